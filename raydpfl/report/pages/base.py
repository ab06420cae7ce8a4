"""The base of pages: one for each kind of directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from raydpfl.report.figures import FAMILY, Missing, Piece, Words
from raydpfl.report.html import Page, Section
from raydpfl.report.run_reader import Case, Run
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


class Source:
    """Base of the family: a kind of directory, how it is known, and the page that is made of it."""

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


def placed(cases: Sequence[Case], more: Mapping[str, Sequence[Piece]]) -> list[Section]:
    """The sections of runs with all items that are placed there, on the axis `run`.

    Args:
        cases: the runs.
        more: what stands before these in a section, by its title.
    """
    found: dict[str, list[Piece]] = {title: [*more.get(title, ())] for title in SECTIONS}
    runs = [case.run for case in cases]
    columns = [name for run in runs for name in run.table("rounds") if run.has("rounds", (name,))]
    known = dict.fromkeys(columns)
    places = [(cls, place) for cls in FAMILY.values() for place in cls.placed_for(known)]
    for cls, place in sorted(places, key=lambda pair: pair[1].rank):
        item = cls.model_validate({**place.fields, "colour": "run"})
        found[place.section] += item.unasked(cases)
    return [Section(title, pieces) for title, pieces in found.items()]


def file_text(path: Path, flaws: list[str]) -> Piece:
    """A file as it stands. `flaws` is told of one that cannot be read."""
    try:
        return Words("", [f"{path.name}, as it stands."], read_text(path))
    except (OSError, ValueError) as error:
        flaws.append(f"{path.name} cannot be read ({error})")
        return Missing(path.name, "cannot be read")
