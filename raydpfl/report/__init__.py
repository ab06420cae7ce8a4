"""Pages, figures and tables of what ran, from its directory alone.

`write` makes one HTML page with everything in it, each figure as PNG, PDF and SVG, and each table
as Markdown and CSV, of a run, a sweep, an audit or a study; `compare` does so of several whose runs
are set side by side. The same directory gives the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydpfl import storage
from raydpfl.errors import ConfigError
from raydpfl.report.figures import Missing, Piece, Plot, parse
from raydpfl.report.html import Page, render
from raydpfl.report.pages.audit import AuditSource
from raydpfl.report.pages.base import PageSource
from raydpfl.report.pages.comparison import Comparison, comparison_page, names
from raydpfl.report.pages.run import RunSource
from raydpfl.report.pages.study import StudySource
from raydpfl.report.pages.sweep import SweepSource
from raydpfl.report.plot_style import PAPER, whole_figure
from raydpfl.report.plot_style import render as render_plot
from raydpfl.report.run_reader import LabelledRun, Run
from raydpfl.report.tables import Table, csv_of, markdown
from raydpfl.storage.run_files import make_folder, replace_file

__all__ = ["compare", "figure", "write"]

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = {"figures": (".png", ".pdf", ".svg"), "tables": (".md", ".csv")}
MARK = '<meta name="generator" content="raydpfl report">'
# the kinds of directories; an audit has the config of a run too
SOURCES: tuple[type[PageSource], ...] = (StudySource, SweepSource, AuditSource, RunSource)
ACCEPTED = "the directory of a run, a sweep, an audit or a study"


def write(
    directories: Sequence[str | Path], out: str | Path | None = None, columns: int | None = None
) -> Path | str:
    """Writes the report of a directory, or of several to compare.

    Args:
        directories: of a run, a sweep, an audit, a study; or several whose runs are compared. Paths
            or addresses.
        out: where it goes, a new or empty directory or that of an earlier report, which is
            replaced. Default: `report` within the one directory; of several, `report-` and their
            names, here.
        columns: of a paper that the files of figures are for: 1 (3.5 inches wide) or 2 (7.16), with
            text of 8 points; None: as wide as their panels take.

    Returns:
        The directory of the report, whose page is index.html.

    Raises:
        ConfigError: for a directory that is none of these, for runs that cannot be compared, for
            another number of columns, and for an `out` that is something else or cannot be made.
        FileError: where a file cannot be written.
    """
    if columns not in (None, *PAPER):
        raise ConfigError("--columns", columns, "1 or 2, the columns of a paper")
    if len(directories) != 1:
        return compare(directories, out, columns=columns)[1]
    with storage.readable_folder(directories[0], "DIR", _read) as folder:
        place = storage.join_address(directories[0], "report") if out is None else out
        return _write_page(page_of(folder), place, columns)


def compare(
    directories: Sequence[str | Path],
    out: str | Path | None = None,
    metric: str | None = None,
    columns: int | None = None,
) -> tuple[Comparison, Path | str]:
    """Sets the runs of directories side by side, and writes the page that shows it.

    Args:
        directories: of runs, sweeps and studies. Paths or addresses.
        out: as for `write`; default: `report-` and their names, here.
        metric: the score that they are compared by; None: that by which they are followed.
        columns: as for `write`.

    Returns:
        The runs by their settings, and the directory of the page, index.html.

    Raises:
        ConfigError, FileError: as `write`.
    """
    if not directories:
        raise ConfigError("DIR", None, ACCEPTED)
    with ExitStack() as stack:
        readers = [storage.readable_folder(directory, "DIR", _read) for directory in directories]
        comparison = compare_runs([*map(stack.enter_context, readers)], metric)
        place = _default_place(directories) if out is None else out
        return comparison, _write_page(comparison_page(comparison), place, columns)


def figure(directory: str | Path, item: Mapping[str, Any]) -> Figure:
    """Draws one figure of a run.

    Args:
        directory: of the run, or its address.
        item: what to draw, as the `show` list of a study has it: `{"curves": "test_loss"}`.

    Returns:
        A figure of matplotlib.

    Raises:
        ConfigError: for no such figure, or a run that has not what it is drawn from.
    """
    with storage.readable_folder(directory, "DIR", _read) as folder:
        run = Run(folder, folder.resolve().name)
        pieces = parse(item, "plot").shown([LabelledRun({"run": run.name}, run)])
        for piece in pieces:
            if isinstance(piece, Plot):
                return whole_figure(piece)
        reasons = "".join(f"; {piece.reason}" for piece in pieces if isinstance(piece, Missing))
        raise ConfigError("plot", dict(item), f"something that this run has{reasons}")


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


def _read(name: str) -> bool:
    """Whether a file of a directory elsewhere is read: no checkpoint, and no earlier report."""
    return not re.search(r"(^|/)round-\d+\.npz$", name) and not name.startswith("report/")


def _write_page(page: Page, out: str | Path, columns: int | None) -> Path | str:
    page = _rename_duplicates(page)
    svgs: dict[str, list[str]] = {}
    with storage.open_folder(out) as place:
        _clear(place)
        for piece in page.pieces:
            if isinstance(piece, Plot):
                files, svgs[piece.name] = render_plot(piece, columns)
                for suffix, content in files.items():
                    _write_file(place / "figures" / f"{piece.name}.{suffix}", content)
            elif isinstance(piece, Table):
                _write_file(place / "tables" / f"{piece.name}.md", markdown(piece).encode())
                _write_file(place / "tables" / f"{piece.name}.csv", csv_of(piece).encode())
        _write_file(place / "index.html", render(page, svgs).encode())
    return storage.location(out)


def _rename_duplicates(page: Page) -> Page:
    """The page, a number put behind the name of a figure or table that another one has."""
    names = set[str]()

    def rename(piece: Piece) -> Piece:
        if not isinstance(piece, (Plot, Table)):
            return piece
        candidates = chain([piece.name], (f"{piece.name}-{number}" for number in count(2)))
        name = next(candidate for candidate in candidates if candidate not in names)
        names.add(name)
        return replace(piece, name=name)

    sections = [replace(part, pieces=[*map(rename, part.pieces)]) for part in page.sections]
    return replace(page, sections=sections)


def _default_place(directories: Sequence[str | Path]) -> str:
    addresses = [storage.absolute_name(directory) for directory in directories]
    name = "-".join(path.partition("?")[0].rstrip("/").rpartition("/")[2] for path in addresses)
    if len(name) > 60:
        digest = hashlib.sha256("\n".join(addresses).encode())
        name = f"{name[:50]}-{digest.hexdigest()[:8]}"
    return f"report-{name}"


def _clear(place: Path) -> None:
    """Makes the directory, and removes what an earlier report left there."""
    make_folder(place)
    index = place / "index.html"
    if not any(place.iterdir()):
        return
    if not index.is_file() or MARK not in index.read_text(errors="replace"):
        raise ConfigError("--out", str(place), "a new or empty directory, or that of a report")
    for folder, suffixes in SUFFIXES.items():
        for path in sorted((place / folder).glob("*")):
            if path.suffix in suffixes:
                path.unlink()


def _write_file(path: Path, content: bytes) -> None:
    make_folder(path.parent)
    replace_file(path, lambda file: file.write(content))
