"""The page of an audit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.report.audit_results import bounds, scores
from raydpfl.report.figures import Piece, Words
from raydpfl.report.html import Page, Section, Tile
from raydpfl.report.labels import counted, number
from raydpfl.report.pages.base import Source, file_text
from raydpfl.report.run_reader import read_columns
from raydpfl.report.tables import Cell, Table
from raydpfl.storage.files import read_json


class AuditSource(Source):
    """An audit: audit.json."""

    name = "audit"

    def fits(self, folder: Path) -> bool:
        return (folder / "audit.json").is_file()

    def page(self, folder: Path) -> Page:
        facts = _facts(folder)
        views = facts["views"]
        flaws: list[str] = []
        drawn = [bounds(views), *scores(views, read_columns(folder / "scores.parquet", flaws))]
        sections = [
            Section("Bounds against claims", [*drawn, table(views)]),
            Section("Checks", [checks(facts["checks"]), *notes(facts)]),
        ]
        sections.append(Section("Config", [file_text(folder / "config.yaml", flaws)]))
        warnings = [] if facts["passed"] else ["Something speaks against the claims."]
        runs = counted(facts["runs"], "run")
        lead = [facts["verdict"], f"{runs} with canaries, from seed {facts['seed']}."]
        name = folder.resolve().name
        return Page(f"Audit {name}", lead, tiles(facts), sections, warnings, flaws)


def _facts(folder: Path) -> dict[str, Any]:
    path = folder / "audit.json"
    try:
        found = read_json(path)
        if not {"passed", "verdict", "runs", "seed", "views", "checks"} <= found.keys():
            raise ValueError("it is not what an audit writes")
        return found
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError("DIR", str(path), f"the file of an audit ({error})") from None


def tiles(facts: dict[str, Any]) -> list[Tile]:
    """The outcome, and the finding of each observer."""
    passed = sum(check["passed"] for check in facts["checks"])
    found = [
        Tile("outcome", "passed" if facts["passed"] else "not as claimed"),
        Tile("checks passed", f"{passed} of {len(facts['checks'])}"),
    ]
    for view in facts["views"][:4]:
        claimed = view["claimed"]
        note = f"of {number(float(claimed['epsilon']))} claimed, against {claimed['observer']}"
        found.append(Tile("epsilon proven", number(view["lower"]), note))
    return found


def table(views: Sequence[dict[str, Any]]) -> Table:
    """What is claimed, proven and estimated, a row for each observer."""
    rows = []
    for view in views:
        claimed = view["claimed"]
        estimate = view["estimate"]
        row = [claimed["observer"], claimed["sampling"], float(claimed["epsilon"])]
        row += [claimed["delta"], claimed["accountant"], view["lower"], view["confidence"]]
        row += [estimate["epsilon"], estimate["low"], estimate["high"], view["canaries"]]
        row += [view["guesses"], view["right"], view["reach"]]
        state = "in doubt" if view["exceeded"] else "stands"
        rows.append([*row, "refuted" if view["refuted"] else state])
    head = ["against", "sampling", "epsilon claimed", "delta", "accountant", "proven at least"]
    head += ["confidence", "estimated", "from", "to", "canaries", "guesses", "right"]
    head += ["all right would prove", "claim"]
    caption = "What canaries prove and look like, beside each claim. From audit.json."
    return Table("views", "Observers", caption, head, rows, {6})


def checks(found: Sequence[dict[str, Any]]) -> Table:
    """The checks of what ran against what was accounted for."""
    rows = [
        [
            check["name"],
            Cell(check["passed"], "passed" if check["passed"] else "FAILED", not check["passed"]),
            check["finding"],
            check["false_alarm"],
        ]
        for check in found
    ]
    caption = "What ran against what was accounted for. From audit.json."
    return Table("checks", "Checks", caption, ("check", "passed", "finding", "false alarm"), rows)


def notes(facts: dict[str, Any]) -> list[Piece]:
    """What weakens the audit, and what it never shows."""
    never = (
        "A passing audit is no proof: a lower bound far below the claim is the rule, and shows "
        "that privacy is no better than that, never that it is as good as claimed."
    )
    return [Words("How far it reaches", [*(f"{each}." for each in facts["notes"]), never])]
