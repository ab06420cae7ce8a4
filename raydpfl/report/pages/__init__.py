"""The kinds of directories that a report is made of, a file a kind, found by looking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raydpfl.config.registry import family
from raydpfl.errors import ConfigError
from raydpfl.report.comparison import Compared
from raydpfl.report.html import Page
from raydpfl.report.pages.base import PageSource
from raydpfl.report.pages.comparison import names
from raydpfl.report.run_reader import Run

FAMILY: dict[str, type[PageSource]] = family(__name__, PageSource, name="name")
ACCEPTED = "the directory of a run, a sweep, an audit or a study"


def page_of(folder: Path) -> Page:
    """The page of a directory. Raises `ConfigError` for one that is of no kind."""
    return _source(folder).page(folder)


def compared(folders: Sequence[Path], metric: str | None = None) -> Compared:
    """The runs in these directories, side by side.

    Args:
        folders: of runs, sweeps and studies.
        metric: the score that they are compared by; None: that by which they are followed.

    Raises:
        ConfigError: one of the directories holds no run, or they cannot be compared.
    """
    runs: list[Run] = []
    for folder, name in zip(folders, names(folders), strict=True):
        source = _source(folder)
        found = source.runs(folder, name)
        if not found:
            expected = "the directories of runs, sweeps and studies, where several are compared"
            reason = f"this one ({source.name}) has no run that has ended"
            raise ConfigError("DIR", str(folder), f"{expected}; {reason}")
        runs += found
    return Compared(runs, metric)


def _source(folder: Path) -> PageSource:
    """The kind of a directory."""
    if not folder.is_dir():
        raise ConfigError("DIR", str(folder), f"{ACCEPTED}; there is no such directory")
    for source in (cls() for cls in FAMILY.values()):
        if source.fits(folder):
            return source
    raise ConfigError("DIR", str(folder), f"{ACCEPTED}; this one holds none of them")
