"""The page: plain HTML with everything in it, no script, nothing from any network.

The template is page.html.jinja, the style is style.css. Jinja escapes every text.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from raydpfl.report.figures import Missing, Piece, Plot, Words
from raydpfl.report.plot_style import INK
from raydpfl.report.tables import Table

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page: what it is, the number, and what it means in a few words."""

    what: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageSection:
    """A heading and the pieces under it."""

    title: str
    pieces: Sequence[Piece]

    @property
    def blocks(self) -> list[tuple[str, list[Any]]]:
        """The pieces that it shows, neighbours of one kind together: figures of one panel stand in
        a row. A table without rows is not shown.
        """

        def kind(piece: Piece) -> str:
            if isinstance(piece, Plot):
                return "row" if len(piece.subplots) == 1 else "plot"
            if isinstance(piece, Table):
                return "table" if piece.rows else ""
            return "words" if isinstance(piece, Words) else ""

        return [(block, [*pieces]) for block, pieces in groupby(self.pieces, kind) if block]


@dataclass(frozen=True)
class Page:
    """All of a report. `lead`: paragraphs that say what was run and what came of it; `warnings`:
    what its reader must know; `flaws`: files that cannot be read.
    """

    title: str
    lead: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[PageSection]
    warnings: Sequence[str] = ()
    flaws: list[str] = field(default_factory=list)

    @property
    def pieces(self) -> list[Piece]:
        return [piece for section in self.sections for piece in section.pieces]


def render(page: Page, svgs: Mapping[str, Sequence[str]]) -> str:
    """The page as HTML. `svgs`: of the panels of each of its figures, by name."""
    environment = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
        finalize=_bind_percent_sign,
    )
    environment.filters["anchor"] = _anchor
    return environment.get_template("page.html.jinja").render(
        page=page,
        style=Markup((FOLDER / "style.css").read_text()),
        sections=[section for section in page.sections if section.blocks],
        missing=[*dict.fromkeys(piece for piece in page.pieces if isinstance(piece, Missing))],
        flaws=[*dict.fromkeys(page.flaws)],
        svgs={name: [*map(Markup, panels)] for name, panels in svgs.items()},
        ink=INK,
    )


def _bind_percent_sign(value: Any) -> Any:
    """No line is broken before a percent sign."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", value)


def _anchor(title: str) -> str:
    return "-".join(word for word in title.lower().split() if word.isalnum())
