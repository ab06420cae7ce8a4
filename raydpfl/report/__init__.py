"""Pages, figures and tables of what ran, from its directory alone.

`write` makes one HTML page with everything in it, each figure as PNG, PDF and SVG, and each table
as Markdown and CSV, of a run, a sweep, an audit or a study; `compare` does so of several whose runs
are set side by side. The same directory gives the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from raydpfl.errors import ConfigError
from raydpfl.report.compared import Compared
from raydpfl.report.figures import Drawing, Piece
from raydpfl.report.page import Page, render
from raydpfl.report.pages import ACCEPTED, compared, page_of
from raydpfl.report.pages.comparison import page_of_several
from raydpfl.report.style import Drawn
from raydpfl.report.style import render as drawn
from raydpfl.report.tables import Table, csv_of, markdown
from raydpfl.tracking import make_folder, replace_file

__all__ = ["compare", "write"]

KEPT = {"figures": (".png", ".pdf", ".svg"), "tables": (".md", ".csv")}
MARK = '<meta name="generator" content="raydpfl report">'


def write(directories: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Writes the report of a directory, or of several to compare.

    Args:
        directories: of a run, a sweep, an audit, a study; or several whose runs are compared.
        out: where it goes, a new or empty directory or that of an earlier report, which is
            replaced. Default: `report` within the one directory; of several, `report-` and their
            names, here.

    Returns:
        The directory of the report, whose page is index.html.

    Raises:
        ConfigError: for a directory that is none of these, for runs that cannot be compared, and
            for an `out` that is something else or cannot be made.
        FileError: where a file cannot be written.
    """
    folders = [Path(each) for each in directories]
    if not folders:
        raise ConfigError("DIR", None, ACCEPTED)
    if len(folders) > 1:
        return compare(folders, out)[1]
    place = Path(out) if out is not None else folders[0] / "report"
    return _put_page(page_of(folders[0]), place)


def compare(
    directories: Sequence[str | Path], out: str | Path | None = None, metric: str | None = None
) -> tuple[Compared, Path]:
    """Sets the runs of directories side by side, and writes the page that shows it.

    Args:
        directories: of runs, sweeps and studies.
        out: as for `write`; default: `report-` and their names, here.
        metric: the score that they are compared by; None: that by which they are followed.

    Returns:
        The runs by their settings, and the directory of the page, index.html.

    Raises:
        ConfigError, FileError: as `write`.
    """
    folders = [Path(each) for each in directories]
    if not folders:
        raise ConfigError("DIR", None, ACCEPTED)
    found = compared(folders, metric)
    place = Path(out) if out is not None else _beside(folders)
    return found, _put_page(page_of_several(found), place)


def _put_page(page: Page, place: Path) -> Path:
    """Writes a page with its figures and tables into a directory, and says which that is."""
    _clear(place)
    names = set[str]()
    figures: dict[str, Drawn] = {}
    sections = [
        replace(section, pieces=[_named(piece, names) for piece in section.pieces])
        for section in page.sections
    ]
    page = replace(page, sections=sections)
    for piece in (piece for section in sections for piece in section.pieces):
        if isinstance(piece, Drawing):
            figures[piece.name] = drawn(piece)
            for suffix, content in figures[piece.name].files.items():
                _put(place / "figures" / f"{piece.name}.{suffix}", content)
        elif isinstance(piece, Table):
            text = f"**{piece.title}.** {piece.caption}\n\n{markdown(piece)}\n"
            _put(place / "tables" / f"{piece.name}.md", text.encode())
            _put(place / "tables" / f"{piece.name}.csv", csv_of(piece).encode())
    _put(place / "index.html", render(page, figures).encode())
    return place


def _named(piece: Piece, names: set[str]) -> Piece:
    """A figure or table whose name no other has: a number is put behind one that is taken."""
    if not isinstance(piece, (Drawing, Table)):
        return piece
    name = piece.name
    count = 1
    while name in names:
        count += 1
        name = f"{piece.name}-{count}"
    names.add(name)
    return replace(piece, name=name)


def _beside(folders: Sequence[Path]) -> Path:
    joined = "-".join(folder.resolve().name for folder in folders)
    if len(joined) > 60:
        digest = hashlib.sha256("\n".join(str(each.resolve()) for each in folders).encode())
        joined = f"{joined[:50]}-{digest.hexdigest()[:8]}"
    return Path(f"report-{joined}")


def _clear(place: Path) -> None:
    """Makes the directory, and removes what an earlier report left there."""
    make_folder(place)
    index = place / "index.html"
    if not any(place.iterdir()):
        return
    if not index.is_file() or MARK not in index.read_text(errors="replace"):
        raise ConfigError("--out", str(place), "a new or empty directory, or that of a report")
    for folder, suffixes in KEPT.items():
        for path in sorted((place / folder).glob("*")):
            if path.suffix in suffixes:
                path.unlink()


def _put(path: Path, content: bytes) -> None:
    make_folder(path.parent)
    replace_file(path, lambda file: file.write(content))
