"""The base of pages: one for each kind of directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from raydpfl.report.figures import FAMILY, Missing, Piece, Words
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import number
from raydpfl.report.run_reader import LabelledRun, Run
from raydpfl.storage.files import read_text

# The sections that runs have, in this order; the kinds of items say where they stand.
SECTIONS = (
    "Accuracy and loss",
    "Privacy",
    "Bounding and noise",
    "Path of the model",
    "Selection",
    "Time",
)


class PageSource:
    """Base of the family: a kind of directory, how it is recognised, and its page."""

    name: ClassVar[str] = ""

    def fits(self, folder: Path) -> bool:
        """Whether a directory is of this kind."""
        raise NotImplementedError

    def page(self, folder: Path) -> Page:
        """The page of such a directory. It reads that and nothing else."""
        raise NotImplementedError

    def runs(self, folder: Path, name: str) -> list[Run]:
        """The runs in it that have come to an end, to be compared with others; none where it is of
        other things. `name`: what the directory is called.
        """
        return []


def placed(cases: Sequence[LabelledRun], more: Mapping[str, Sequence[Piece]]) -> list[PageSection]:
    """The sections of runs with all items that are placed there, on the axis `run`.

    Args:
        cases: the runs.
        more: what stands before these in a section, by its title.
    """
    sections: dict[str, list[Piece]] = {title: [*more.get(title, ())] for title in SECTIONS}
    runs = [case.run for case in cases]
    columns = [name for run in runs for name in run.table("rounds") if run.has("rounds", (name,))]
    columns = [*dict.fromkeys(columns)]
    places = [(cls, place) for cls in FAMILY.values() for place in cls.placed_for(columns)]
    for cls, place in sorted(places, key=lambda pair: pair[1].rank):
        item = cls.model_validate({**place.fields, "colour": "run"})
        sections[place.section] += item.unasked(cases)
    return [PageSection(title, pieces) for title, pieces in sections.items()]


def not_completed(what: str, summary: Mapping[str, Any]) -> list[str]:
    """A warning of a sweep or study whose summary does not say that it has completed."""
    status = summary.get("status", "not ended: there is no summary.json")
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    return [] if status == "completed" else [f"The {what} is {status}{reason}."]


def time_tile(summary: Mapping[str, Any], note: str) -> list[Tile]:
    """The seconds that a summary states."""
    seconds = summary.get("seconds")
    return [] if seconds is None else [Tile("time", f"{number(seconds)} s", note)]


def file_text(path: Path, flaws: list[str]) -> Piece:
    """A file as it stands. `flaws` is told of one that cannot be read."""
    try:
        return Words("", [f"{path.name}, as it stands."], read_text(path))
    except (OSError, ValueError) as error:
        flaws.append(f"{path.name} cannot be read ({error})")
        return Missing(path.name, "cannot be read")
