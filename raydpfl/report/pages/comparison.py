"""The page of several runs that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydpfl.report.comparison import Compared, Setting
from raydpfl.report.figures import Drawing, Piece
from raydpfl.report.figures.curves import X_WORDS, Curves
from raydpfl.report.html import Page, Section, Tile
from raydpfl.report.labels import accountant, counted, number, quantity
from raydpfl.report.pages.base import file_text, placed
from raydpfl.report.pages.run import guarantee_row, state
from raydpfl.report.plot_style import PALETTE
from raydpfl.report.run_reader import Case
from raydpfl.report.tables import Table

SCORES = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")
OWN = "Each epsilon holds for its own run alone; showing several runs spends several."


def names(folders: Sequence[Path]) -> list[str]:
    """What directories are called: their names, with so many of their parents' as it takes to tell
    them apart.
    """
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(each) for each in parts) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{'/'.join(each[-1:])} ({place})" for place, each in enumerate(parts, 1)]


def page_of_several(compared: Compared) -> Page:
    """The page. Runs that are seeds of one setting are one line with a band; of many settings the
    best are drawn, and the tables have all.
    """
    settings = compared.settings
    best = compared.ranked()[: len(PALETTE)]
    drawn = [each for each in settings if each in best]
    cases = [Case({"run": each.label}, run) for each in drawn for run in each.runs]
    curves: list[Piece] = []
    for x in X_WORDS:
        item = Curves.model_validate({"of": compared.metric, "x": x, "colour": "run"})
        curves += item.unasked(cases)
    title = f"{quantity(compared.metric).words.capitalize()} by round, second and epsilon"
    sections = [Section("Results", [results(compared), differences(compared)])]
    sections.append(Section(title, curves))
    more: dict[str, Sequence[Piece]] = {"Privacy": [guarantees(settings)]}
    sections += [_without(each, curves) for each in placed(cases, more)]
    runs = compared.runs
    sections.append(
        Section("Config of the first", [file_text(runs[0].folder / "config.yaml", runs[0].flaws)])
    )
    flaws = [f"{run.name}: {each}" for run in runs for each in run.flaws]
    heading = f"{counted(len(settings), 'setting')} compared"
    told = warnings(compared, len(drawn))
    return Page(heading, lead(compared), tiles(compared), sections, told, flaws)


def _without(section: Section, others: Sequence[Piece]) -> Section:
    """A section without the figures that stand elsewhere."""
    there = {piece.name for piece in others if isinstance(piece, Drawing)}
    kept = [each for each in section.pieces if getattr(each, "name", None) not in there]
    return Section(section.title, kept)


def warnings(compared: Compared, drawn: int) -> list[str]:
    """What whoever reads it must know."""
    found = [f"{run.name}: {each}" for run in compared.runs for each in state(run)]
    if compared.mixed:
        found.append(f"The epsilons are not of one kind. They differ in {compared.mixed}.")
    if drawn < len(compared.settings):
        words = quantity(compared.metric).words
        said = f"Figures have the {drawn} settings with the best {words} of"
        found.append(f"{said} {len(compared.settings)}; the tables have all.")
    return found


def lead(compared: Compared) -> list[str]:
    """Which setting is best, in a sentence, and what its epsilon is worth."""
    measured = quantity(compared.metric)
    best = compared.ranked()[0]
    mean = best.spread(compared.metric).mean
    said = f"The best {measured.words} in the last round is {number(mean, measured.percent)}"
    runs = counted(len(compared.runs), "run")
    return [
        f"{runs} of {counted(len(compared.settings), 'setting')}. {said}, of {best.label}.",
        OWN,
    ]


def tiles(compared: Compared) -> list[Tile]:
    """The score of each setting, and what holds of it."""
    percent = quantity(compared.metric).percent
    means = [each.spread(compared.metric).mean for each in compared.settings]
    pairs = zip(compared.settings[:8], means, strict=False)
    return [Tile(each.label, number(mean, percent), held(each)) for each, mean in pairs]


def held(setting: Setting) -> str:
    """The epsilon that holds, in words."""
    if setting.epsilon is None:
        return "no rigorous guarantee" if setting.private else "not private"
    one = setting.runs[0].holds[0]
    return f"epsilon {number(setting.epsilon)} holds, delta {one.delta:g}"


def results(compared: Compared) -> Table:
    """Scores, and every accountant's epsilon as it is stated first, a row for each setting."""
    kinds = {one.accountant: one.kind for run in compared.runs for one in run.guarantees}
    metric = compared.metric
    others = [
        name
        for name in SCORES
        if name != metric and any(run.number(name) is not None for run in compared.runs)
    ]
    means = [f"best_{metric}", *others]
    rows: list[list[Any]] = []
    for each in compared.settings:
        spread = each.spread(metric)
        row: list[Any] = [each.label, len(each.runs), spread.mean, spread.std]
        row += [each.spread(name).mean for name in means]
        row += [each.epsilon, *(_stated(each, name) for name in kinds)]
        rows.append([*row, each.spread("rounds").mean, each.spread("seconds").mean])
    epsilons = [f"epsilon, {accountant(name)} ({kind})" for name, kind in kinds.items()]
    head = ["setting", "seeds", quantity(metric).label, "std"]
    head += [*(quantity(name).label for name in means), "epsilon that holds", *epsilons]
    shown = [metric, metric, *means]  # the standard deviation is in the units of the metric
    percents = {place for place, name in enumerate(shown, 2) if quantity(name).percent}
    caption = "Means over the seeds, with the sample standard deviation of the first score; of "
    caption += "epsilons the largest. The best round is chosen on what is shown, which flatters it."
    head += ["rounds", quantity("seconds").label]
    return Table("results", "Results", f"{caption} From summary.json.", head, rows, percents)


def _stated(setting: Setting, name: str) -> float | None:
    """The largest epsilon by an accountant, of those that the runs state first."""
    first = []
    for run in setting.runs:
        first += [one.epsilon for one in run.guarantees if one.accountant == name][:1]
    return max(first, default=None)


def differences(compared: Compared) -> Table:
    """The keys in which the configs of the settings differ."""
    rows = [[each.label, *each.values.values()] for each in compared.settings]
    caption = "What the configs differ in, but for the seed; empty where one has no such key. "
    head = ("setting", *compared.keys)
    return Table("differences", "Differences", f"{caption}From config.yaml.", head, rows)


def guarantees(settings: Sequence[Setting]) -> Table:
    """All guarantees of the first run of each setting."""
    firsts = [(each.label, each.runs[0]) for each in settings]
    rows = [
        [label, *guarantee_row(one, run.holds)] for label, run in firsts for one in run.guarantees
    ]
    head = ("setting", "kind", "accountant", "epsilon", "delta", "holds", "unit", "relation")
    caption = "Of each setting those of its first run. Epsilons of different kinds are never "
    caption += "compared. From summary.json."
    more = ("against", "sampling", "conditions that fail")
    return Table("guarantees", "Guarantees", caption, (*head, *more), rows)
