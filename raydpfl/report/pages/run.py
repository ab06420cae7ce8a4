"""The page of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydpfl.errors import MORE, brief
from raydpfl.models.metric_columns import TEST, is_score, set_of
from raydpfl.privacy import Guarantee, in_words
from raydpfl.report.figures import Piece, Words
from raydpfl.report.html import Page, Section, Tile
from raydpfl.report.labels import accountant, number, quantity
from raydpfl.report.pages.base import Source, file_text, placed
from raydpfl.report.plot_style import thin
from raydpfl.report.run_reader import Case, Run
from raydpfl.report.tables import Table

BEGUN = ("rounds.parquet", "summary.json", "checkpoints/rounds.arrows")
TILES = 4  # scores at the top
ROWS = 25  # of the table of rounds
NAMED = 12  # classes that are named
AS_DECLARED = "as user-defined classes declare"  # behind a kind
KINDS = {"rigorous": "rigorous", "paper": "formula as printed", "unproven": "not proved"}


class RunSource(Source):
    """A run: config.yaml, and rounds.parquet or summary.json."""

    name = "run"

    def fits(self, folder: Path) -> bool:
        begun = any((folder / name).exists() for name in BEGUN)
        audited = (folder / "audit.json").exists()
        return (folder / "config.yaml").is_file() and begun and not audited

    def page(self, folder: Path) -> Page:
        run = Run(folder, folder.resolve().name)
        cases = [Case({"run": run.name}, run)]
        tables = [*rounds_table(run), *numbers(run)]
        sections = [*placed(cases, {"Privacy": privacy(run)}), Section("Numbers", tables)]
        sections.append(Section("Config", [file_text(run.folder / "config.yaml", run.flaws)]))
        return Page(
            f"Run {run.name}",
            [what(run), outcome(run)],
            tiles(run),
            sections,
            state(run),
            run.flaws,
        )

    def runs(self, folder: Path, name: str) -> list[Run]:
        return [Run(folder, name)]


def what(run: Run) -> str:
    """What was run, in a sentence: data, model, and the six choices."""
    tree = run.config
    kinds = {
        name: section.get("kind") for name, section in tree.items() if isinstance(section, dict)
    }
    data = tree.get("data", {})
    clients = run.summary.get("population", data.get("clients"))
    parts = [f"{kinds.get('data')}, {number(clients)} clients", f"model {kinds.get('model')}"]
    given = map(str, run.summary.get("class_names") or ())
    names = [name if name.strip() else repr(name) for name in given]
    if names:
        more = ", ..." if len(names) > NAMED else ""
        parts[0] += f", {len(names)} classes ({', '.join(names[:NAMED])}{more})"
    parts += [
        f"{name} {kinds[name]}"
        for name in ("selection", "local", "bounding", "noise", "weights", "server")
        if kinds.get(name)
    ]
    return f"{'; '.join(parts)}; seed {tree.get('seed')}, {number(tree.get('rounds'))} rounds."


def scores_of(run: Run) -> list[str]:
    """Of the last evaluation, that by which the run is followed first."""
    return [name for name in run.summary if is_score(name) and run.number(name) is not None]


def outcome(run: Run) -> str:
    """The main result in a sentence."""
    found = []
    for name in scores_of(run):
        value = run.number(name)
        if value is not None:
            measured = quantity(name)
            found.append(f"{measured.words} {number(value, measured.percent)}")
    if not found:
        return f"No round has been evaluated. {spent(run)}"
    rounds = run.summary.get("rounds", len(run.table("rounds").get("round", ())))
    return f"After {number(rounds)} rounds: {', '.join(found)}. {spent(run)}"


def spent(run: Run) -> str:
    """What holds, in words."""
    if not run.summary:
        return "What it guarantees will stand in its summary.json."
    if not run.guarantees:
        return "No privacy is guaranteed: there was no noise that an accountant accounted for."
    if not run.holds:
        return "No rigorous guarantee holds."
    # what is not accounted for is told once for all
    return f"What holds: {run.holds[0].brief().sentence()}"


def tiles(run: Run) -> list[Tile]:
    """The numbers at the top."""
    found = []
    for name in scores_of(run)[:TILES]:
        value = run.number(name)
        if value is not None:
            measured = quantity(name)
            where = "the test set" if set_of(name) == TEST else "rows held out"
            note = f"last round, on {where}"
            found.append(Tile(measured.words, number(value, measured.percent), note))
    if run.holds:
        one = run.holds[0]
        note = f"delta {one.delta:g}, one {one.unit}, {one.accountant}; against {one.observer}"
        found.append(Tile("epsilon that holds", number(one.epsilon), note))
    for one in [each for each in run.guarantees if each.formula][:1]:
        note = "the formula as printed"
        if one.conditions_failed:
            note += "; its conditions fail"
        found.append(Tile(f"epsilon by {accountant(one.accountant)}", number(one.epsilon), note))
    seconds = run.summary.get("seconds")
    if seconds is not None:
        speed = number(run.summary.get("clients_per_second"))
        found.append(
            Tile("time of training", f"{number(seconds)} s", f"{speed} clients per second")
        )
    return found


def state(run: Run) -> list[str]:
    """What to know before reading on."""
    found = []
    status = run.summary.get("status")
    if status is None:
        found.append("There is no summary.json: the run goes on, or was killed.")
    elif status != "completed":
        reason = brief(run.summary.get("reason") or "").removesuffix(MORE).strip()
        found.append(f"The run ended as {status}{f': {reason}' if reason else ''}.")
    elif run.summary.get("reason"):
        found.append(f"The run has ended; {run.summary['reason']}.")
    return found


def privacy(run: Run) -> list[Piece]:
    """All guarantees, as a table and in words."""
    if not run.guarantees:
        return [Words("", [spent(run)])]
    plain = [guarantee_row(one, run.holds) for one in run.guarantees]
    head = ("kind", "accountant", "epsilon", "delta", "holds", "unit", "relation", "against")
    table = Table(
        "guarantees",
        "Guarantees",
        "Epsilons of different kinds are never compared: rigorous ones are guarantees, a formula "
        "is what a paper prints, whether or not its conditions hold. From summary.json.",
        (*head, "sampling", "conditions that fail"),
        plain,
    )
    return [table, Words("The same in words", in_words(run.guarantees))]


def guarantee_row(one: Guarantee, holds: Sequence[Guarantee]) -> list[object]:
    """A guarantee as a row of the table."""
    return [
        KINDS[one.kind] + (f", {AS_DECLARED}" if one.declared else ""),
        accountant(one.accountant),
        one.epsilon,
        one.delta,
        "yes" if one in holds else "",
        one.unit,
        one.relation.replace("_", " "),
        str(one.observer),
        str(one.sampling),
        "; ".join(one.conditions_failed),
    ]


def rounds_table(run: Run) -> list[Piece]:
    """The rounds that were evaluated."""
    scored = [name for name in run.table("rounds") if is_score(name) and run.has("rounds", (name,))]
    known = [run.table("rounds")[name] for name in scored]
    if not known:
        return []
    places = np.flatnonzero(np.isfinite(known).any(0))
    kept = places[thin(len(places), ROWS)]
    names = ["round", *scored, "train_loss", *run.epsilons, "seconds"]
    names = [name for name in names if run.has("rounds", (name,))]
    columns = [run.series(name) for name in names]
    rows = [[float(values[at]) for values in columns if values is not None] for at in kept]
    shown = [quantity(name) for name in names]
    text = "Rounds that were evaluated"
    if len(kept) < len(places):
        text += f", {len(kept)} of {len(places)}"
    percents = {place for place, each in enumerate(shown) if each.percent}
    head = [each.label for each in shown]
    return [Table("rounds", "Rounds", f"{text}. From rounds.parquet.", head, rows, percents)]


def numbers(run: Run) -> list[Piece]:
    """Every number and short text of the summary."""
    rows = [
        [name, value]
        for name, value in _flat(run.summary)
        if isinstance(value, (int, float, str)) and len(str(value)) < 200
    ]
    if not rows:
        return []
    caption = "What summary.json says of the run."
    return [Table("summary", "Summary", caption, ("name", "value"), rows)]


def _flat(tree: dict[str, object], path: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _flat(value, f"{path}{name}.")
        elif isinstance(value, list):
            if all(isinstance(each, (int, float)) for each in value):
                found.append((f"{path}{name}", ", ".join(number(each) for each in value)))
        elif value is not None:
            found.append((f"{path}{name}", value))
    return found
