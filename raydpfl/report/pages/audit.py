"""The page of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.report.audit_results import bounds, scores
from raydpfl.report.figures import Words
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import counted, number
from raydpfl.report.pages.base import PageSource, file_text
from raydpfl.report.run_reader import read_columns
from raydpfl.report.tables import Column, PrintedCell, Table, columns_of
from raydpfl.storage.files import read_json


class AuditSource(PageSource):
    """An audit: audit.json."""

    name = "audit"

    def fits(self, folder: Path) -> bool:
        return (folder / "audit.json").is_file()

    def page(self, folder: Path) -> Page:
        facts = _facts(folder)
        views = facts["views"]
        flaws: list[str] = []
        scored = read_columns(folder / "scores.parquet", flaws)
        sections = [
            PageSection(
                "Bounds against claims", [bounds(views), *scores(views, scored), table(views)]
            ),
            PageSection("Checks", [checks(facts["checks"]), notes(facts)]),
            PageSection("Config", [file_text(folder / "config.yaml", flaws)]),
        ]
        warnings = [] if facts["passed"] else ["Something speaks against the claims."]
        runs = counted(facts["runs"], "run")
        lead = [facts["verdict"], f"{runs} with canaries, from seed {facts['seed']}."]
        title = f"Audit {folder.resolve().name}"
        return Page(title, lead, tiles(facts), sections, warnings, flaws)


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "audit.json"
    try:
        results = read_json(path)
        if not {"passed", "verdict", "runs", "seed", "views", "checks"} <= results.keys():
            raise ValueError("it is not what an audit writes")
        return results
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("DIR", str(path), f"the file of an audit ({error})") from None


def tiles(facts: dict[str, Any]) -> list[Tile]:
    """The outcome, and the finding of each observer."""
    passed = sum(check["passed"] for check in facts["checks"])
    tiles = [
        Tile("outcome", "passed" if facts["passed"] else "not as claimed"),
        Tile("checks passed", f"{passed} of {len(facts['checks'])}"),
    ]
    for view in facts["views"][:4]:
        claimed = view["claimed"]
        note = f"of {number(float(claimed['epsilon']))} claimed, against {claimed['observer']}"
        tiles.append(Tile("epsilon proven", number(view["lower"]), note))
    return tiles


def table(views: Sequence[dict[str, Any]]) -> Table:
    """What is claimed, proven and estimated, a row for each observer."""
    claims = [view["claimed"] for view in views]
    estimates = [view["estimate"] for view in views]
    states = []
    for view in views:
        state = "in doubt" if view["exceeded"] else "stands"
        states.append("refuted" if view["refuted"] else state)

    def values(dicts: Sequence[dict[str, Any]], name: str) -> list[Any]:
        return [result[name] for result in dicts]

    columns = [
        Column("against", values(claims, "observer")),
        Column("sampling", values(claims, "sampling")),
        Column("epsilon claimed", [float(claim["epsilon"]) for claim in claims]),
        Column("delta", values(claims, "delta")),
        Column("accountant", values(claims, "accountant")),
        Column("proven at least", values(views, "lower")),
        Column("confidence", values(views, "confidence"), percent=True),
        Column("estimated", values(estimates, "epsilon")),
        Column("from", values(estimates, "low")),
        Column("to", values(estimates, "high")),
        Column("canaries", values(views, "canaries")),
        Column("guesses", values(views, "guesses")),
        Column("right", values(views, "right")),
        Column("all right would prove", values(views, "reach")),
        Column("claim", states),
    ]
    caption = "What canaries prove and look like, beside each claim. From audit.json."
    return Table("views", "Observers", caption, columns)


def checks(results: Sequence[dict[str, Any]]) -> Table:
    """The checks of what ran against what was accounted for."""
    rows = []
    for check in results:
        passed = check["passed"]
        cell = PrintedCell(passed, "passed" if passed else "FAILED", not passed)
        rows.append((check["name"], cell, check["finding"], check["false_alarm"]))
    caption = "What ran against what was accounted for. From audit.json."
    columns = columns_of(("check", "passed", "finding", "false alarm"), rows)
    return Table("checks", "Checks", caption, columns)


def notes(facts: dict[str, Any]) -> Words:
    """What weakens the audit, and what it never shows."""
    never = (
        "A passing audit is no proof: a lower bound far below the claim is the rule, and shows "
        "that privacy is no better than that, never that it is as good as claimed."
    )
    return Words("How far it reaches", [*(f"{fact}." for fact in facts["notes"]), never])
