"""The base of pages: one for each kind of directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from raydpfl.report.figures import Missing, Piece, Words
from raydpfl.report.html import Page, Tile
from raydpfl.report.labels import number
from raydpfl.report.run_reader import Run
from raydpfl.storage.files import read_text


class PageSource:
    """Base of the kinds of directories: what one holds, and its page. It reads that and nothing
    else. `file`: by which a directory of the kind is known; `flaws`: what of it cannot be read.
    """

    name: ClassVar[str] = ""
    file: ClassVar[str] = ""

    def __init__(self, folder: Path):
        self.folder = folder
        self.flaws: list[str] = []

    @classmethod
    def fits(cls, folder: Path) -> bool:
        """Whether a directory is of this kind."""
        return (folder / cls.file).is_file()

    def page(self) -> Page:
        raise NotImplementedError

    def runs(self, name: str) -> list[Run]:
        """The runs in it that have come to an end, to be compared with others; none where it is of
        other things. `name`: what the directory is called.
        """
        return []

    def file_text(self, name: str) -> Piece:
        """A file as it stands."""
        try:
            return Words("", [f"{name}, as it stands."], read_text(self.folder / name))
        except (OSError, ValueError) as error:
            self.flaws.append(f"{name} cannot be read ({error})")
            return Missing(name, "cannot be read")


def status_warnings(kind: str, summary: Mapping[str, Any]) -> list[str]:
    """A warning of a sweep or study whose summary does not say that it has completed."""
    status = summary.get("status", "not ended: there is no summary.json")
    reason = f": {summary['reason']}" if summary.get("reason") else ""
    return [] if status == "completed" else [f"The {kind} is {status}{reason}."]


def time_tile(summary: Mapping[str, Any], note: str) -> list[Tile]:
    """The seconds that a summary states."""
    seconds = summary.get("seconds")
    return [] if seconds is None else [Tile("time", f"{number(seconds)} s", note)]
