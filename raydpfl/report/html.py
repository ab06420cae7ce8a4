"""The page: plain HTML with everything in it, no script, nothing from any network."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from string import Template

from raydpfl.report.figures import Missing, Piece, Words
from raydpfl.report.plot_style import DASHES, INK, Drawing, Drawn, Key
from raydpfl.report.tables import Table, html_of


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page: what it is, the number, and what it means in a few words."""

    what: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class Page:
    """All of a report. `lead`: paragraphs that say what was run and what came of it; `warnings`:
    what whoever reads it must know; `flaws`: files that cannot be read.
    """

    title: str
    lead: Sequence[str]
    tiles: Sequence[Tile]
    sections: Sequence[Section]
    warnings: Sequence[str] = ()
    flaws: list[str] = field(default_factory=list)


def render(page: Page, drawn: dict[str, Drawn]) -> str:
    """The page as HTML. `drawn`: its figures, by the name of each."""
    sections = [section for section in page.sections if _shown(section)]
    every = (piece for section in page.sections for piece in section.pieces)
    missing = [*dict.fromkeys(piece for piece in every if isinstance(piece, Missing))]
    body = [_section(section, drawn) for section in sections]
    entries = [(_anchor(section.title), section.title) for section in sections]
    if missing or page.flaws:
        body.append(_left_out(missing, page.flaws))
        entries.append(("left-out", "Left out"))
    links = [f'<li><a href="#{anchor}">{_text(title)}</a></li>' for anchor, title in entries]
    return PAGE.substitute(
        title=_text(page.title),
        style=STYLE,
        lead="\n".join(f"<p>{_text(each)}</p>" for each in page.lead),
        tiles="\n".join(_tile(each) for each in page.tiles),
        warnings="\n".join(f'<p class="warning">{_text(each)}</p>' for each in page.warnings),
        contents="\n".join(links),
        body="\n".join(body),
    )


def _shown(section: Section) -> bool:
    return any(not isinstance(piece, Missing) for piece in section.pieces)


def _text(value: str) -> str:
    """Escaped, and no line broken before a percent sign."""
    return html.escape(re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", value))


def _anchor(title: str) -> str:
    return "-".join(word for word in title.lower().split() if word.isalnum())


def _tile(tile: Tile) -> str:
    note = f"<small>{_text(tile.note)}</small>" if tile.note else ""
    return f"<div><dt>{_text(tile.what)}</dt><dd>{_text(tile.value)}{note}</dd></div>"


def _section(section: Section, drawn: dict[str, Drawn]) -> str:
    parts = []
    run: list[str] = []  # figures of one panel stand side by side
    for piece in section.pieces:
        if isinstance(piece, Drawing) and len(piece.parts) == 1:
            run.append(_figure(drawn[piece.name]))
            continue
        parts += _side_by_side(run)
        run = []
        if isinstance(piece, Drawing):
            parts.append(_figure(drawn[piece.name]))
        elif isinstance(piece, Table):
            parts.append(_table(piece))
        elif isinstance(piece, Words):
            parts.append(_words(piece))
    parts += _side_by_side(run)
    inside = "\n".join(parts)
    anchor = _anchor(section.title)
    return f'<section id="{anchor}">\n<h2>{_text(section.title)}</h2>\n{inside}\n</section>'


def _side_by_side(figures: Sequence[str]) -> list[str]:
    if not figures:
        return []
    inside = "\n".join(figures)
    return [f'<div class="row">\n{inside}\n</div>']


def _figure(figure: Drawn) -> str:
    drawing = figure.drawing
    wide = " wide" if len(figure.inline) > 1 else ""
    across = f' style="--across: {drawing.across}"' if drawing.across else ""
    panels = "\n".join(
        f'<div class="panel{"" if svg else " none"}">{svg}</div>' for svg in figure.inline
    )
    keys = "".join(f"<li>{_swatch(key)}{_text(key.label)}</li>" for key in drawing.keys)
    legend = f'<ul class="keys">{keys}</ul>' if keys else ""
    links = _links(f"figures/{drawing.name}", ("png", "pdf", "svg"))
    caption = f"<strong>{_text(drawing.title)}.</strong> {_text(drawing.caption)} {links}"
    return (
        f'<figure id="figure-{drawing.name}" class="figure{wide}">\n'
        f'<div class="panels{" grid" if across else ""}"{across}>\n{panels}\n'
        f"</div>\n{legend}\n<figcaption>{caption}</figcaption>\n</figure>"
    )


def _links(stem: str, suffixes: Sequence[str]) -> str:
    links = [f'<a href="{stem}.{each}">{each.upper()}</a>' for each in suffixes]
    return f'<span class="files">{" ".join(links)}</span>'


def _table(table: Table) -> str:
    links = _links(f"tables/{table.name}", ("md", "csv"))
    caption = f"<strong>{_text(table.title)}.</strong> {_text(table.caption)} {links}"
    if len(table.rows) > table.most:
        caption += f" The first {table.most} of {len(table.rows):,} rows; the files have all."
    return (
        f'<figure id="table-{table.name}" class="table">\n<figcaption>{caption}</figcaption>\n'
        f"{html_of(table)}\n</figure>"
    )


def _words(words: Words) -> str:
    inside = "\n".join(f"<p>{_text(each)}</p>" for each in words.paragraphs)
    if len(words.paragraphs) > 1:
        items = "\n".join(f"<li>{_text(each)}</li>" for each in words.paragraphs)
        inside = f"<ul>\n{items}\n</ul>"
    if words.preformatted:
        inside += f'\n<pre tabindex="0">{_text(words.preformatted)}</pre>'
    heading = f"<h3>{_text(words.title)}</h3>\n" if words.title else ""
    return f'<div class="words">\n{heading}{inside}\n</div>'


def _left_out(missing: Sequence[Missing], flaws: Sequence[str]) -> str:
    items = [
        f"<li><strong>{_text(each.title)}</strong>: {_text(each.why)}.</li>" for each in missing
    ]
    items += [f"<li>{_text(each)}.</li>" for each in dict.fromkeys(flaws)]
    inside = "\n".join(items)
    return f'<section id="left-out">\n<h2>Left out</h2>\n<ul>\n{inside}\n</ul>\n</section>'


# The markers of the legend, in a square of 10 around (14, 5).
_SHAPES = {
    "o": '<circle cx="14" cy="5" r="3.4"/>',
    "s": '<rect x="10.8" y="1.8" width="6.4" height="6.4"/>',
    "^": '<path d="M14 1.2L18 8.4H10Z"/>',
    "v": '<path d="M14 8.8L18 1.6H10Z"/>',
    "D": '<path d="M14 .8L18.2 5L14 9.2L9.8 5Z"/>',
    "P": '<path d="M12.6 1h2.8v2.6H18v2.8h-2.6V9h-2.8V6.4H10V3.6h2.6Z"/>',
    "X": '<path d="M10.6 3L12 1.6L14 3.6L16 1.6L17.4 3L15.4 5L17.4 7L16 8.4L14 6.4L12 8.4'
    'L10.6 7L12.6 5Z"/>',
    "*": '<path d="M14 0L15.3 3.5L19 3.7L16.1 6L17.1 9.6L14 7.5L10.9 9.6L11.9 6L9 3.7L12.7 3.5Z"/>',
    "": "",
}


def _swatch(key: Key) -> str:
    """The sign of an entry of the legend, as a small SVG."""
    colour = "currentColor" if key.look.colour == INK else key.look.colour
    inside = ""
    if key.shape in ("band", "bar"):
        opacity = ' fill-opacity=".25"' if key.shape == "band" else ""
        inside = f'<rect x="2" y="1" width="24" height="8"{opacity}/>'
    else:
        inside = _SHAPES[key.look.marker]
    if key.shape == "line":
        dash = _dashes(key.look.dash)
        inside += f'<path d="M0 5H28" stroke="{colour}" stroke-width="1.6"{dash}/>'
    return f'<svg class="key" viewBox="0 0 28 10" aria-hidden="true" fill="{colour}">{inside}</svg>'


def _dashes(dash: object) -> str:
    """A dash of matplotlib as an attribute."""
    named = {"-": "", "--": "6 3", "-.": "7 2.5 1.6 2.5"}
    if isinstance(dash, str):
        pattern = named.get(dash, "")
    else:
        pattern = " ".join(f"{1.6 * part:g}" for part in _PATTERNS.get(str(dash), (4, 2)))
    return f' stroke-dasharray="{pattern}"' if pattern else ""


_PATTERNS = {str(dash): dash[1] for dash in DASHES if not isinstance(dash, str)}


STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --soft: #5a6470; --line: #d5dae0;
  --box: #f4f6f8; --link: #0b5cad; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #d7dce2; --paper: #14171b; --soft: #98a2ae;
  --line: #333a43; --box: #1c2127; --link: #7cb7f2; --warn: #3a3115; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 1.25rem clamp(.9rem, 3vw, 2.5rem) 4rem; max-width: 92rem;
  color: var(--ink); background: var(--paper); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: clamp(1.35rem, 1.1rem + 1.2vw, 1.9rem); line-height: 1.2; margin: .2rem 0 .6rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.4rem 0 .8rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p, ul.plain, .words { max-width: 75ch; }
.words ul { padding-left: 1.1rem; }
.words li { margin: .35rem 0; }
a { color: var(--link); }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .7rem;
  margin: 1rem 0; }
dl > div { background: var(--box); border-radius: .4rem; padding: .6rem .8rem; }
dt { font-size: .82rem; color: var(--soft); }
dd { margin: 0; font-size: 1.45rem; font-weight: 600; overflow-wrap: anywhere; }
dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft);
  line-height: 1.35; }
.warning { background: var(--warn); border-radius: .4rem; padding: .5rem .8rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr));
  gap: 1.6rem 2rem; align-items: start; margin: 1.2rem 0; }
.row > figure { max-width: 38rem; }
figure { margin: 0; min-width: 0; }
figure.wide, figure.table { margin: 1.2rem 0; }
.panels { display: grid; gap: .6rem 1.2rem; }
.wide .panels { grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
.wide .panel { max-width: 38rem; }
.panel.none { display: none; }
@media (min-width: 60rem) {
  .wide .panels.grid { grid-template-columns: repeat(var(--across), minmax(0, 1fr)); }
  .grid .panel.none { display: block; }
}
.panel svg { display: block; width: 100%; height: auto; }
.keys { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; margin: .3rem 0;
  padding: 0; font-size: .88rem; }
.keys li { display: flex; align-items: center; gap: .4rem; }
svg.key { width: 28px; height: 10px; flex: none; }
figcaption { font-size: .88rem; color: var(--soft); max-width: 80ch; margin: .3rem 0; }
figcaption strong { color: var(--ink); }
.files a { margin-right: .25rem; font-size: .8rem; }
.scroll { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: .4rem; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .65rem;
  border-bottom: 1px solid var(--line); }
td { max-width: 26rem; }
th { background: var(--box); font-weight: 600; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; white-space: nowrap; }
td.text { min-width: 14rem; }
td:first-child:not(.text) { white-space: nowrap; }
td.unbroken { overflow-wrap: anywhere; }
pre { background: var(--box); border-radius: .4rem; padding: .8rem; overflow-x: auto;
  font-size: .82rem; line-height: 1.4; max-width: 100%; }
@media print {
  :root { --ink: #000; --paper: #fff; --soft: #333; --line: #999; --box: #fff; --link: #000;
    --warn: #fff; }
  @page { margin: 14mm; }
  body { padding: 0; max-width: none; font-size: 10pt; }
  nav, .files { display: none; }
  h2, h3, figure.table > figcaption { break-after: avoid; }
  .row, .wide .panels { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  dl { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  dl > div { border: 1px solid var(--line); }
  .row > figure, .panel, tr, dl > div { break-inside: avoid; }
  thead { display: table-header-group; }
  .scroll { overflow: visible; border: 0; }
  table { font-size: 8pt; width: 100%; }
  th, td { padding: .15rem .35rem; }
  td.text { min-width: 0; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 8pt; }
}
"""
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="raydpfl report">
<link rel="icon" href="data:,">
<title>$title</title>
<style>$style</style>
</head>
<body>
<header>
<h1>$title</h1>
$lead
<dl>
$tiles
</dl>
$warnings
<nav aria-label="Contents"><ul>
$contents
</ul></nav>
</header>
<main>
$body
</main>
</body>
</html>
""")
