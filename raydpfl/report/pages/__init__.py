"""The kinds of directories that a report is made of, a file a kind."""

from collections.abc import Sequence
from pathlib import Path

from raydpfl.errors import ConfigError
from raydpfl.report.html import Page
from raydpfl.report.pages.audit import AuditSource
from raydpfl.report.pages.base import PageSource
from raydpfl.report.pages.comparison import Comparison, names
from raydpfl.report.pages.run import RunSource
from raydpfl.report.pages.study import StudySource
from raydpfl.report.pages.sweep import SweepSource
from raydpfl.report.run_reader import Run

# an audit has the config of a run too
SOURCES: tuple[type[PageSource], ...] = (StudySource, SweepSource, AuditSource, RunSource)
ACCEPTED = "the directory of a run, a sweep, an audit or a study"


def page_of(folder: Path) -> Page:
    """The page of a directory. Raises `ConfigError` for one that is of no kind."""
    return _source(folder).page()


def compare_runs(folders: Sequence[Path], metric: str | None = None) -> Comparison:
    """The runs in these directories of runs, sweeps and studies, side by side by the score `metric`
    (None: that by which they are followed). Raises `ConfigError` where one of the directories holds
    no run, or they cannot be compared.
    """
    runs: list[Run] = []
    for folder, name in zip(folders, names(folders), strict=True):
        source = _source(folder)
        source_runs = source.runs(name)
        if not source_runs:
            expected = "the directories of runs, sweeps and studies, where several are compared"
            reason = f"this one ({source.name}) has no run that has ended"
            raise ConfigError("DIR", str(folder), f"{expected}; {reason}")
        runs += source_runs
    return Comparison(runs, metric)


def _source(folder: Path) -> PageSource:
    if not folder.is_dir():
        raise ConfigError("DIR", str(folder), f"{ACCEPTED}; there is no such directory")
    for cls in SOURCES:
        if cls.fits(folder):
            return cls(folder)
    raise ConfigError("DIR", str(folder), f"{ACCEPTED}; this one holds none of them")
