"""The page of several runs that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raydpfl.report.comparison import Compared, SeedGroup
from raydpfl.report.figures import Piece, Plot
from raydpfl.report.figures.curves import X_WORDS
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import Quantity, accountant, counted, number, quantity
from raydpfl.report.pages.run import RunSource, guarantee_row, run_sections, state, unasked
from raydpfl.report.plot_style import PALETTE
from raydpfl.report.run_reader import LabelledRun
from raydpfl.report.tables import Row, Table

SCORES = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")
EACH_ALONE = "Each epsilon holds for its own run alone; showing several runs spends several."


def names(folders: Sequence[Path]) -> list[str]:
    """What directories are called: their names, with so many of their parents' that no two are
    alike.
    """
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(part) for part in parts) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({place})" for place, part in enumerate(parts, 1)]


def page_of_several(compared: Compared) -> Page:
    """The page. Runs that are seeds of one setting are one line with a band; of many settings the
    best are drawn, and the tables have all.
    """
    settings = compared.settings
    runs = compared.runs
    metric = compared.metric
    measured = quantity(metric)
    best = compared.ranked()
    drawn = [setting for setting in settings if setting in best[: len(PALETTE)]]
    cases = [LabelledRun({"run": setting.label}, run) for setting in drawn for run in setting.runs]
    curves = [piece for x in X_WORDS for piece in unasked({"curves": metric, "x": x}, cases)]
    there = {piece.name for piece in curves if isinstance(piece, Plot)}
    others = [
        replace(part, pieces=[one for one in part.pieces if getattr(one, "name", "") not in there])
        for part in run_sections(cases, {"Privacy": guarantees(settings)})
    ]
    first = RunSource(runs[0].folder)
    sections = [
        PageSection("Results", [results(compared), differences(compared)]),
        PageSection(f"{measured.words.capitalize()} by round, second and epsilon", curves),
        *others,
        PageSection("Config of the first", [first.file_text(first.file)]),
    ]

    def mean(setting: SeedGroup) -> str:
        return number(setting.spread(metric).mean, measured.percent)

    title = f"{counted(len(settings), 'setting')} compared"
    lead = f"{counted(len(runs), 'run')} of {counted(len(settings), 'setting')}. The best "
    lead += f"{measured.words} in the last round is {mean(best[0])}, of {best[0].label}."
    tiles = [Tile(setting.label, mean(setting), held(setting)) for setting in settings[:8]]
    flaws = [f"{run.name}: {flaw}" for run in runs for flaw in run.flaws]
    flaws += [f"{runs[0].name}: {flaw}" for flaw in first.flaws]
    warned = warnings(compared, len(drawn))
    return Page(title, [lead, EACH_ALONE], tiles, sections, warned, flaws)


def warnings(compared: Compared, drawn: int) -> list[str]:
    """What the reader must know."""
    lines = [f"{run.name}: {line}" for run in compared.runs for line in state(run)]
    if compared.mixed:
        lines.append(f"The epsilons are not of one kind. They differ in {compared.mixed}.")
    if drawn < len(compared.settings):
        text = f"Figures have the {drawn} settings with the best {quantity(compared.metric).words}"
        lines.append(f"{text} of {len(compared.settings)}; the tables have all.")
    return lines


def held(setting: SeedGroup) -> str:
    """The epsilon that holds, in words."""
    if setting.epsilon is None:
        return "no rigorous guarantee" if setting.private else "not private"
    one = setting.runs[0].holds[0]
    return f"epsilon {number(setting.epsilon)} holds, delta {one.delta:g}"


def results(compared: Compared) -> Table:
    """Scores, and every accountant's epsilon as it is stated first, a row for each setting."""
    metric = compared.metric
    kinds = {one.accountant: one.kind for run in compared.runs for one in run.guarantees}
    others = [
        name
        for name in SCORES
        if name != metric and any(run.number(name) is not None for run in compared.runs)
    ]
    rows: list[Row] = []
    for setting in compared.settings:

        def mean(name: str, setting: SeedGroup = setting) -> Row:
            return {quantity(name): setting.spread(name).mean}

        std = Quantity("std", "std", percent=quantity(metric).percent)
        row = {"setting": setting.label, "seeds": len(setting.runs), **mean(metric)}
        row |= {std: setting.spread(metric).std}
        for name in (f"best_{metric}", *others):
            row |= mean(name)
        row["epsilon that holds"] = setting.epsilon
        for name, kind in kinds.items():
            row[f"epsilon, {accountant(name)} ({kind})"] = _stated(setting, name)
        rows.append({**row, **mean("rounds"), **mean("seconds")})
    caption = "Means over the seeds, with the sample standard deviation of the first score; of "
    caption += "epsilons the largest. The best round is chosen on what is shown, which flatters it."
    return Table("results", "Results", f"{caption} From summary.json.", rows)


def _stated(setting: SeedGroup, name: str) -> float | None:
    """The largest epsilon by an accountant, of those that the runs state first."""
    first = []
    for run in setting.runs:
        first += [one.epsilon for one in run.guarantees if one.accountant == name][:1]
    return max(first, default=None)


def differences(compared: Compared) -> Table:
    """The keys in which the configs of the settings differ."""
    rows: list[Row] = [{"setting": one.label, **one.values} for one in compared.settings]
    caption = "What the configs differ in, but for the seed; empty where one has no such key. "
    return Table("differences", "Differences", f"{caption}From config.yaml.", rows)


def guarantees(settings: Sequence[SeedGroup]) -> list[Piece]:
    """All guarantees of the first run of each setting."""
    rows: list[Row] = [
        {"setting": setting.label, **guarantee_row(one, setting.runs[0])}
        for setting in settings
        for one in setting.runs[0].guarantees
    ]
    caption = "Of each setting those of its first run. Epsilons of different kinds are never "
    caption += "compared. From summary.json."
    return [Table("guarantees", "Guarantees", caption, rows)] if rows else []
