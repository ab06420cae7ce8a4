"""The page of one run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from raydpfl.config.overrides import flatten
from raydpfl.errors import DEBUG_HINT, brief_traceback
from raydpfl.models.metric_columns import TEST, is_score, score_set
from raydpfl.privacy import Guarantee, brief_sentences
from raydpfl.report.figures import Missing, Piece, Words, parse
from raydpfl.report.figures.curves import X_WORDS, Curves
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import accountant, number, quantity
from raydpfl.report.pages.base import PageSource
from raydpfl.report.plot_style import thin
from raydpfl.report.run_reader import LabelledRun, Run
from raydpfl.report.tables import Row, Table

RUN_FILES = ("rounds.parquet", "summary.json", "checkpoints/rounds.arrows")
TILES = 4  # scores at the top
ROWS = 25  # of the table of rounds
CLASS_LIMIT = 12  # classes that are named
MIN_SECONDS = 5.0  # that a run takes, from which curves by second say more than those by round
KINDS = {"rigorous": "rigorous", "paper": "formula as printed", "unproven": "not proved"}
X_COLUMNS = ("round", "seconds")
SCORES = [{"curves": "test_accuracy", "x": x} for x in X_WORDS]
LOSSES = [{"curves": ["test_loss", "train_loss"], "main": "test_loss", "x": x} for x in X_COLUMNS]
# What the page of runs shows, section by section, as a study's `show` has it.
SECTIONS: dict[str, list[dict[str, Any]]] = {
    "Accuracy and loss": [*SCORES, *LOSSES],
    "Privacy": [
        *({"curves": "epsilon_*", "main": "epsilon", "x": x} for x in X_COLUMNS),
        *({"tradeoff": of} for of in ("attacks", "profile")),
        {"personal": {}},
    ],
    "Bounding and noise": [
        {"norms": {}},
        {"curves": "clipped"},
        {"curves": "snr"},
        {"curves": ["angle_p10", "angle_p50", "angle_p90"], "main": "angle_p50"},
        {"cloud": "angle"},
        {"curves": ["bias_within", "bias_across"], "main": "bias_across"},
    ],
    "Path of the model": [{"trajectory": {}}],
    "Selection": [{"selection": "probability", "x": x} for x in ("size", "budget")],
    "Time": [{"phases": {}}],
}


class RunSource(PageSource):
    """A run: config.yaml, and rounds.parquet or summary.json."""

    name: ClassVar[str] = "run"
    file: ClassVar[str] = "config.yaml"

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return super().fits(folder) and any((folder / name).exists() for name in RUN_FILES)

    def page(self) -> Page:
        run = Run(self.folder, self.folder.resolve().name, self.flaws)
        sections = [
            *run_sections([LabelledRun({"run": run.name}, run)], privacy(run)),
            PageSection("Numbers", [*rounds_table(run), *numbers(run)]),
            PageSection("Config", [self.file_text(self.file)]),
        ]
        lead = [description(run), outcome(run)]
        return Page(f"Run {run.name}", lead, tiles(run), sections, state(run), self.flaws)

    def runs(self, name: str) -> list[Run]:
        return [Run(self.folder, name)]


def run_sections(cases: Sequence[LabelledRun], guarantees: Sequence[Piece]) -> list[PageSection]:
    """The sections of runs, on the axis `run`, with a curve of every other score too.
    `guarantees`: what stands first under privacy.
    """
    scores = dict.fromkeys(name for case in cases for name in score_columns(case.run))
    curves = [{"curves": name} for name in scores if name not in ("test_accuracy", "test_loss")]
    sections = []
    for title, items in SECTIONS.items():
        if items[:1] == SCORES[:1]:
            items = [*items, *curves]
        pieces = [piece for item in items for piece in default_pieces(item, cases)]
        leading_pieces = guarantees if title == "Privacy" else ()
        sections.append(PageSection(title, [*leading_pieces, *pieces]))
    return sections


def default_pieces(item: Mapping[str, Any], cases: Sequence[LabelledRun]) -> Sequence[Piece]:
    """An item that nobody asked for by itself: curves by second are left out of shorter runs."""
    report_item = parse({**item, "colour": "run"}, "show")
    if isinstance(report_item, Curves) and report_item.x == "seconds":
        times = [case.run.series("seconds") for case in cases]
        ends = [np.nanmax(np.append(0.0, time)) for time in times if time is not None]
        longest = max(ends, default=0.0)
        if longest < MIN_SECONDS:
            reason = f"needs a run of {MIN_SECONDS:g} s: the longest here took {longest:.2g} s"
            return [Missing(report_item.headline(), reason)]
    return report_item.make(cases)


def score_columns(run: Run) -> list[str]:
    columns = run.table("rounds")
    return [name for name in columns if is_score(name) and run.has("rounds", (name,))]


def description(run: Run) -> str:
    """What was run, in a sentence: data, model, and the six choices."""
    tree = run.config
    kinds = {name: part.get("kind") for name, part in tree.items() if isinstance(part, dict)}
    clients = run.summary.get("population", tree.get("data", {}).get("clients"))
    parts = [f"{kinds.get('data')}, {number(clients)} clients", f"model {kinds.get('model')}"]
    names = [str(name) for name in run.summary.get("class_names") or ()]
    if names:
        words = ", ".join(name if name.strip() else repr(name) for name in names[:CLASS_LIMIT])
        ellipsis = ", ..." if len(names) > CLASS_LIMIT else ""
        parts[0] += f", {len(names)} classes ({words}{ellipsis})"
    choices = ("selection", "local", "bounding", "noise", "weights", "server")
    parts += [f"{name} {kinds[name]}" for name in choices if kinds.get(name)]
    return f"{'; '.join(parts)}; seed {tree.get('seed')}, {number(tree.get('rounds'))} rounds."


def scores_of(run: Run) -> dict[str, str]:
    """The scores of the last evaluation in print, that by which the run is followed first."""
    return {
        name: number(score, quantity(name).percent)
        for name in run.summary
        if is_score(name) and (score := run.number(name)) is not None
    }


def outcome(run: Run) -> str:
    scores = [f"{quantity(name).words} {score}" for name, score in scores_of(run).items()]
    if not scores:
        return f"No round has been evaluated. {guarantee_text(run)}"
    rounds = run.summary.get("rounds", len(run.table("rounds").get("round", ())))
    return f"After {number(rounds)} rounds: {', '.join(scores)}. {guarantee_text(run)}"


def guarantee_text(run: Run) -> str:
    if not run.summary:
        return "What it guarantees will stand in its summary.json."
    if not run.guarantees:
        return "No privacy is guaranteed: there was no noise that an accountant accounted for."
    if not run.holds:
        return "No rigorous guarantee holds."
    # what is not accounted for is said once for all
    return f"What holds: {run.holds[0].brief().sentence()}"


def tiles(run: Run) -> list[Tile]:
    tiles = []
    for name, score in [*scores_of(run).items()][:TILES]:
        data_set = "the test set" if score_set(name) == TEST else "rows held out"
        tiles.append(Tile(quantity(name).words, score, f"last round, on {data_set}"))
    if run.holds:
        g = run.holds[0]
        note = f"delta {g.delta:g}, one {g.unit}, {g.accountant}; against {g.observer}"
        tiles.append(Tile("epsilon that holds", number(g.epsilon), note))
    for g in [guarantee for guarantee in run.guarantees if guarantee.formula][:1]:
        note = "the formula as printed"
        note += "; its conditions fail" if g.conditions_failed else ""
        tiles.append(Tile(f"epsilon by {accountant(g.accountant)}", number(g.epsilon), note))
    seconds = run.summary.get("seconds")
    if seconds is not None:
        speed = f"{number(run.summary.get('clients_per_second'))} clients per second"
        tiles.append(Tile("time of training", f"{number(seconds)} s", speed))
    return tiles


def state(run: Run) -> list[str]:
    """What to know before reading on."""
    status, reason = run.summary.get("status"), run.summary.get("reason") or ""
    if status is None:
        return ["There is no summary.json: the run goes on, or was killed."]
    if status != "completed":
        reason = brief_traceback(reason).removesuffix(DEBUG_HINT).strip()
        return [f"The run ended as {status}{f': {reason}' if reason else ''}."]
    return [f"The run has ended; {reason}."] if reason else []


def privacy(run: Run) -> list[Piece]:
    if not run.guarantees:
        return [Words("", [guarantee_text(run)])]
    caption = "Epsilons of different kinds are never compared: rigorous ones are guarantees, a "
    caption += "formula is what a paper prints, whether or not its conditions hold. From "
    rows = [guarantee_row(guarantee, run) for guarantee in run.guarantees]
    table = Table("guarantees", "Guarantees", f"{caption}summary.json.", rows)
    return [table, Words("The same in words", brief_sentences(run.guarantees))]


def guarantee_row(guarantee: Guarantee, run: Run) -> Row:
    return {
        "kind": KINDS[guarantee.kind]
        + (", as user-defined classes declare" if guarantee.declared else ""),
        "accountant": accountant(guarantee.accountant),
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "holds": "yes" if guarantee in run.holds else "",
        "unit": guarantee.unit,
        "relation": guarantee.relation.replace("_", " "),
        "against": str(guarantee.observer),
        "sampling": str(guarantee.sampling),
        "conditions that fail": "; ".join(guarantee.conditions_failed),
    }


def rounds_table(run: Run) -> list[Piece]:
    scores = score_columns(run)
    if not scores:
        return []
    table = run.table("rounds")
    places = np.flatnonzero(np.isfinite([table[name] for name in scores]).any(0))
    shown_rows = places[thin(len(places), ROWS)]
    names = ("round", *scores, "train_loss", *run.epsilons, "seconds")
    columns = {quantity(name): run.series(name) for name in names if run.has("rounds", (name,))}
    rows: list[Row] = [
        {head: values[row].item() for head, values in columns.items() if values is not None}
        for row in shown_rows
    ]
    text = "Rounds that were evaluated"
    if len(shown_rows) < len(places):
        text += f", {len(shown_rows)} of {len(places)}"
    return [Table("rounds", "Rounds", f"{text}. From rounds.parquet.", rows)]


def numbers(run: Run) -> list[Piece]:
    """Every number and short text of the summary."""
    rows: list[Row] = []
    for name, value in flatten(run.summary).items():
        if isinstance(value, list):
            numeric = all(isinstance(item, (int, float)) for item in value)
            value = ", ".join(map(number, value)) if numeric else None
        if isinstance(value, (int, float, str)) and len(str(value)) < 200:
            rows.append({"name": name, "value": value})
    return [Table("summary", "Summary", "What summary.json says of the run.", rows)] if rows else []
