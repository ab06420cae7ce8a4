"""The page of an audit: bounds next to claims, canaries' scores, checks."""

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.report.figures import Missing, Piece, Plot, Words
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import Quantity, count_text, number
from raydpfl.report.pages.base import PageSource
from raydpfl.report.plot_style import CHARACTERS, INK, Axes, LegendKey, Look, Subplot, look, scale
from raydpfl.report.run_reader import Columns, arrays_of, read_table
from raydpfl.report.tables import PrintedCell, Row, Table
from raydpfl.storage.files import read_json

PROVEN_LOOK = Look(look(1).colour, "none", "s")
ESTIMATE_LOOK = Look(look(0).colour, "-", "o")
CLAIM_LOOK = Look(INK, "--", "")
INSIDE_LOOK = look(1)
OUTSIDE_LOOK = look(0)
BINS = 40
NO_PROOF = (
    "A passing audit is no proof: a lower bound far below the claim is the rule, and shows that "
    "privacy is no better than that, never that it is as good as claimed."
)
View = Mapping[str, Any]  # of an observer, in audit.json


class AuditSource(PageSource):
    """An audit: audit.json."""

    name: ClassVar[str] = "audit"
    file: ClassVar[str] = "audit.json"

    def page(self) -> Page:
        facts = self._facts()
        views = facts["views"]
        # what weakens the audit, and what it never shows
        notes = Words("How far it reaches", [*(f"{fact}." for fact in facts["notes"]), NO_PROOF])
        sections = [
            PageSection("Checks", [checks(facts["checks"]), notes]),
            PageSection("Config", [self.file_text("config.yaml")]),
        ]
        if views:  # a replay has none
            canaries = arrays_of(read_table(self.folder / "scores.parquet", self.flaws))
            pieces = [bounds(views), scores(views, canaries), table(views)]
            sections.insert(0, PageSection("Bounds against claims", pieces))
        warnings = [] if facts["passed"] else ["Something speaks against the claims."]
        runs = f"{count_text(facts['runs'], 'run')} with canaries" if views else "A replay"
        lead = [facts["verdict"], f"{runs}, from seed {facts['seed']}."]
        title = f"Audit {self.folder.resolve().name}"
        return Page(title, lead, tiles(facts), sections, warnings, self.flaws)

    def _facts(self) -> dict[str, Any]:
        path = self.folder / self.file
        try:
            results = read_json(path)
            if not {"passed", "verdict", "runs", "seed", "views", "checks"} <= results.keys():
                raise ValueError("it is not what an audit writes")
            return results
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError("DIR", str(path), f"the file of an audit ({error})") from None


def tiles(facts: dict[str, Any]) -> list[Tile]:
    """The outcome, and the lower bound against each observer."""
    passed_count = sum(check["passed"] for check in facts["checks"])
    tiles = [
        Tile("outcome", "passed" if facts["passed"] else "not as claimed"),
        Tile("checks passed", f"{passed_count} of {len(facts['checks'])}"),
    ]
    for view in facts["views"][:4]:
        claim = view["claimed"]
        note = f"of {number(float(claim['epsilon']))} claimed, against {claim['observer']}"
        tiles.append(Tile("epsilon proven", number(view["lower"]), note))
    return tiles


def table(views: Sequence[View]) -> Table:
    rows: list[Row] = []
    for view in views:
        claim, estimate = view["claimed"], view["estimate"]
        state = "refuted" if view["refuted"] else "in doubt" if view["exceeded"] else "stands"
        rows.append(
            {
                "against": claim["observer"],
                "sampling": claim["sampling"],
                "epsilon claimed": claim["epsilon"],
                "delta": claim["delta"],
                "accountant": claim["accountant"],
                "proven at least": view["lower"],
                "curve refuted below": view.get("lower_of_curve"),
                Quantity("confidence", "confidence", percent=True): view["confidence"],
                "estimated": estimate["epsilon"],
                "from": estimate["low"],
                "to": estimate["high"],
                **{name: view[name] for name in ("canaries", "guesses", "right")},
                "all right would prove": view["reach"],
                "claim": state,
            }
        )
    caption = "What canaries prove and look like, next to each claim. From audit.json."
    return Table("views", "Observers", caption, rows)


def checks(results: Sequence[Mapping[str, Any]]) -> Table:
    rows: list[Row] = []
    for check in results:
        passed = check["passed"]
        cell = PrintedCell(passed, "passed" if passed else "FAILED", not passed)
        row = {"check": check["name"], "passed": cell, "finding": check["finding"]}
        rows.append({**row, "false alarm": check["false_alarm"]})
    caption = "What ran against what was accounted for. From audit.json."
    return Table("checks", "Checks", caption, rows)


def bounds(views: Sequence[View]) -> Piece:
    subplots = [Subplot(observer(view), partial(_bounds, view=view)) for view in views]
    caption = (
        "Proven: the least epsilon that the canaries' guesses leave possible, with the confidence "
        "of the audit. Estimated: what their scores look like, with its interval. The claim should "
        "lie to the right of what is proven. From audit.json."
    )
    keys = [
        LegendKey("claimed", CLAIM_LOOK),
        LegendKey("proven at least", PROVEN_LOOK, "point"),
        LegendKey("estimated", ESTIMATE_LOOK, "line"),
    ]
    return Plot("bounds", "Bounds against claims", caption, subplots, keys, height=2.1)


def observer(view: View) -> str:
    claim = view["claimed"]
    text = f"{claim['observer']} ({claim['sampling'].split(';')[0]})"
    return textwrap.shorten(text, 2 * CHARACTERS - 4, placeholder=" ...")


def _bounds(axes: Axes, view: View) -> None:
    epsilon = float(view["claimed"]["epsilon"])
    lower, estimate = view["lower"], view["estimate"]
    axes.axvline(epsilon, color=CLAIM_LOOK.colour, linestyle=CLAIM_LOOK.dash, linewidth=1.3)
    axes.plot([lower], [1], color=PROVEN_LOOK.colour, marker=PROVEN_LOOK.marker, markersize=7)
    axes.plot([0, lower], [1, 1], color=PROVEN_LOOK.colour, linewidth=3, alpha=0.5)
    axes.plot([estimate["low"], estimate["high"]], [0, 0], color=ESTIMATE_LOOK.colour, linewidth=2)
    axes.plot([estimate["epsilon"]], [0], color=ESTIMATE_LOOK.colour, marker=ESTIMATE_LOOK.marker)
    finite = [value for value in (epsilon, lower, estimate["high"]) if np.isfinite(value)]
    x_max = 1.15 * max(finite, default=1.0) or 1.0
    for height, value, words in ((1, lower, "at least "), (0, estimate["epsilon"], "")):
        side = "right" if x_max / 3 < value < epsilon else "left"
        style: Any = {"textcoords": "offset points", "ha": side, "fontsize": 9}
        axes.annotate(f"{words}{number(value)}", (value, height), (0, 8), **style)
    axes.set_yticks([1, 0], [f"proven ({view['confidence']:.0%})", "estimated"])
    axes.set_ylim(-0.6, 1.8)
    axes.grid(axis="y", visible=False)
    label = Quantity("e", f"epsilon at delta {view['claimed']['delta']:g}; claimed {epsilon:.4g}")
    scale(axes, "x", label, finite)
    axes.set_xlim(0, x_max)


def scores(views: Sequence[View], table: Columns) -> Piece:
    """The scores of canaries, by their coins; `view` of scores.parquet is the observer's place."""
    title = "Scores of canaries"
    if not {"view", "inside", "score"} <= table.keys():
        return Missing(title, "needs view, inside and score in scores.parquet")
    subplots = []
    for place, view in enumerate(views):
        mask = table["view"] == place
        draw = partial(_histogram, values=table["score"][mask], inside=table["inside"][mask])
        subplots.append(Subplot(observer(view), draw))
    caption = (
        "How many canaries have which score, those that a coin put in and those that it left out. "
        "The further apart the two lie, the more the observer can tell. From scores.parquet."
    )
    keys = [LegendKey("inside", INSIDE_LOOK, "bar"), LegendKey("outside", OUTSIDE_LOOK, "bar")]
    return Plot("scores", title, caption, subplots, keys)


def _histogram(axes: Axes, values: np.ndarray, inside: np.ndarray) -> None:
    edges = np.histogram_bin_edges(values, BINS)
    tops = [0]
    for bar_look, coin in ((INSIDE_LOOK, 1.0), (OUTSIDE_LOOK, 0.0)):
        counts, _ = np.histogram(values[inside == coin], edges)
        tops.append(int(counts.max(initial=0)))
        axes.stairs(counts, edges, color=bar_look.colour, fill=True, alpha=0.35)
        axes.stairs(counts, edges, linewidth=1.4, **bar_look.line)
    middles = (edges[1:] + edges[:-1]) / 2
    scale(axes, "x", Quantity("score", "score", "stds of the noise"), middles)
    scale(axes, "y", Quantity("count", "canaries"), tops)
    axes.set_ylim(bottom=0)
