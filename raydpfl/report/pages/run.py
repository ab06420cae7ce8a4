"""The page of one run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydpfl.errors import MORE, brief
from raydpfl.models.metric_columns import TEST, is_score, set_of
from raydpfl.privacy import Guarantee, in_words
from raydpfl.report.figures import Piece, Words
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import accountant, number, quantity
from raydpfl.report.pages.base import PageSource, file_text, placed
from raydpfl.report.plot_style import thin
from raydpfl.report.run_reader import LabelledRun, Run
from raydpfl.report.tables import Column, Table, columns_of

BEGUN = ("rounds.parquet", "summary.json", "checkpoints/rounds.arrows")
TILES = 4  # scores at the top
ROWS = 25  # of the table of rounds
NAMED = 12  # classes that are named
AS_DECLARED = "as user-defined classes declare"  # behind a kind
GUARANTEE_HEAD = (
    *("kind", "accountant", "epsilon", "delta", "holds", "unit", "relation"),
    *("against", "sampling", "conditions that fail"),
)
KINDS = {"rigorous": "rigorous", "paper": "formula as printed", "unproven": "not proved"}


class RunSource(PageSource):
    """A run: config.yaml, and rounds.parquet or summary.json."""

    name = "run"

    def fits(self, folder: Path) -> bool:
        begun = any((folder / name).exists() for name in BEGUN)
        audited = (folder / "audit.json").exists()
        return (folder / "config.yaml").is_file() and begun and not audited

    def page(self, folder: Path) -> Page:
        run = Run(folder, folder.resolve().name)
        sections = [
            *placed([LabelledRun({"run": run.name}, run)], {"Privacy": privacy(run)}),
            PageSection("Numbers", [*rounds_table(run), *numbers(run)]),
            PageSection("Config", [file_text(folder / "config.yaml", run.flaws)]),
        ]
        lead = [what(run), outcome(run)]
        return Page(f"Run {run.name}", lead, tiles(run), sections, state(run), run.flaws)

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
    names = [str(name) for name in run.summary.get("class_names") or ()]
    names = [name if name.strip() else repr(name) for name in names]
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
    scores = []
    for name in scores_of(run):
        measured = quantity(name)
        scores.append(f"{measured.words} {number(run.number(name), measured.percent)}")
    if not scores:
        return f"No round has been evaluated. {spent(run)}"
    rounds = run.summary.get("rounds", len(run.table("rounds").get("round", ())))
    return f"After {number(rounds)} rounds: {', '.join(scores)}. {spent(run)}"


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
    tiles = []
    for name in scores_of(run)[:TILES]:
        measured = quantity(name)
        where = "the test set" if set_of(name) == TEST else "rows held out"
        score = number(run.number(name), measured.percent)
        tiles.append(Tile(measured.words, score, f"last round, on {where}"))
    if run.holds:
        one = run.holds[0]
        note = f"delta {one.delta:g}, one {one.unit}, {one.accountant}; against {one.observer}"
        tiles.append(Tile("epsilon that holds", number(one.epsilon), note))
    for one in [guarantee for guarantee in run.guarantees if guarantee.formula][:1]:
        note = "the formula as printed"
        if one.conditions_failed:
            note += "; its conditions fail"
        tiles.append(Tile(f"epsilon by {accountant(one.accountant)}", number(one.epsilon), note))
    seconds = run.summary.get("seconds")
    if seconds is not None:
        speed = f"{number(run.summary.get('clients_per_second'))} clients per second"
        tiles.append(Tile("time of training", f"{number(seconds)} s", speed))
    return tiles


def state(run: Run) -> list[str]:
    """What to know before reading on."""
    status = run.summary.get("status")
    if status is None:
        return ["There is no summary.json: the run goes on, or was killed."]
    if status != "completed":
        reason = brief(run.summary.get("reason") or "").removesuffix(MORE).strip()
        return [f"The run ended as {status}{f': {reason}' if reason else ''}."]
    return [f"The run has ended; {run.summary['reason']}."] if run.summary.get("reason") else []


def privacy(run: Run) -> list[Piece]:
    """All guarantees, as a table and in words."""
    if not run.guarantees:
        return [Words("", [spent(run)])]
    caption = "Epsilons of different kinds are never compared: rigorous ones are guarantees, a "
    caption += "formula is what a paper prints, whether or not its conditions hold. From "
    columns = guarantee_columns([(one, run.holds) for one in run.guarantees])
    table = Table("guarantees", "Guarantees", f"{caption}summary.json.", columns)
    return [table, Words("The same in words", in_words(run.guarantees))]


def guarantee_columns(stated: Sequence[tuple[Guarantee, Sequence[Guarantee]]]) -> list[Column]:
    """Guarantees as columns. `stated`: each with those of its run that hold."""
    rows = [
        (
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
        )
        for one, holds in stated
    ]
    return columns_of(GUARANTEE_HEAD, rows)


def rounds_table(run: Run) -> list[Piece]:
    """The rounds that were evaluated."""
    scored = [name for name in run.table("rounds") if is_score(name) and run.has("rounds", (name,))]
    if not scored:
        return []
    scores = [run.table("rounds")[name] for name in scored]
    places = np.flatnonzero(np.isfinite(scores).any(0))
    rows = places[thin(len(places), ROWS)]
    columns = []
    for name in ("round", *scored, "train_loss", *run.epsilons, "seconds"):
        values = run.series(name)
        if values is not None and run.has("rounds", (name,)):
            columns.append(Column.of(name, values[rows].tolist()))
    text = "Rounds that were evaluated"
    if len(rows) < len(places):
        text += f", {len(rows)} of {len(places)}"
    return [Table("rounds", "Rounds", f"{text}. From rounds.parquet.", columns)]


def numbers(run: Run) -> list[Piece]:
    """Every number and short text of the summary."""
    rows = [
        (name, value)
        for name, value in _flat(run.summary)
        if isinstance(value, (int, float, str)) and len(str(value)) < 200
    ]
    if not rows:
        return []
    caption = "What summary.json says of the run."
    return [Table("summary", "Summary", caption, columns_of(("name", "value"), rows))]


def _flat(tree: dict[str, object], path: str = "") -> list[tuple[str, object]]:
    values: list[tuple[str, object]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            values += _flat(value, f"{path}{name}.")
        elif isinstance(value, list):
            if all(isinstance(item, (int, float)) for item in value):
                values.append((f"{path}{name}", ", ".join(number(item) for item in value)))
        elif value is not None:
            values.append((f"{path}{name}", value))
    return values
