"""The kinds of directories that a report is made of, a file a kind, found by looking."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from raydpfl.errors import ConfigError
from raydpfl.member import family
from raydpfl.report.page import Page
from raydpfl.report.pages.base import Source

FAMILY: dict[str, type[Source]] = family(__name__, Source, name="name")
ACCEPTED = "the directory of a run, a sweep, an audit or a study"


def page_of(folders: Sequence[Path]) -> Page:
    """The page of a directory, or of several runs. Raises `ConfigError` for any other."""
    if not folders:
        raise ConfigError("DIR", None, ACCEPTED)
    several = len(folders) > 1
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError("DIR", str(folder), f"{ACCEPTED}; there is no such directory")
    for source in (cls() for cls in FAMILY.values() if cls.several == several):
        if all(source.fits(folder) for folder in folders):
            return source.page(folders)
    known = [source for source in (cls() for cls in FAMILY.values()) if not source.several]
    for folder in folders:
        kinds = [source.name for source in known if source.fits(folder)]
        if not kinds:
            raise ConfigError("DIR", str(folder), f"{ACCEPTED}; this one holds none of them")
        if kinds != ["run"]:
            accepted = "the directories of runs, where several are compared"
            told = f"this one is of another kind ({kinds[0]})"
            raise ConfigError("DIR", str(folder), f"{accepted}; {told}")
    raise AssertionError("a directory of a run that no page is made of")
