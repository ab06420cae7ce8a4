"""One look for every figure, and its files.

Text and axes are drawn in the colour of the page around them (`currentColor`), so that one SVG
reads in light, in the dark and on paper. Colours are told apart by the colour-blind (Okabe and Ito
2008), and each goes with a dash and a marker of its own. Nothing here touches pyplot.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl.report.labels import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#010203"  # in whose place an SVG has the colour of the text around it
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 4.6  # inches of a panel
NARROW = 3.5  # of one beside another, whose text is to be read where both have little room
HEIGHT = 3.0
CHARACTERS = 42  # of a line of a panel's title
PAPER = {1: 3.5, 2: 7.16}  # inches of one and two columns of a paper
PRINT = 8  # points of text in a figure for a paper
FACTOR = 4.0  # of labels and of epsilon across: as `DECADES`
MARGIN = 0.05  # of an axis, beyond its values
DECADES = 30.0  # the ratio of the largest to the smallest value from which an axis is logarithmic
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "raydpfl",
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "axes.titlelocation": "left",
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.linewidth": 0.8,
    "axes.formatter.useoffset": False,
    "axes.unicode_minus": True,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
    "axes.titlecolor": INK,
}


@dataclass(frozen=True)
class Look:
    """How a line and its points are drawn."""

    colour: str
    dash: Any = "-"
    marker: str = "o"


REFERENCE = Look(INK, (0, (4, 2)), "")


def look(place: int, dash: int | None = None) -> Look:
    """The look of the line at this place among its kind; `dash`: with another line's dash."""
    turn = place if dash is None else dash
    return Look(
        PALETTE[place % len(PALETTE)],
        DASHES[turn % len(DASHES)],
        MARKERS[place % len(MARKERS)],
    )


@dataclass(frozen=True)
class Key:
    """A line of the legend. `shape`: line, point, band or bar."""

    label: str
    look: Look
    shape: str = "line"


@dataclass(frozen=True)
class Part:
    """One pair of axes: its title, empty for none, what draws it, and its row and column where all
    parts stand in a grid.
    """

    title: str
    draw: Callable[[Axes], None]
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Drawing:
    """A figure before it is drawn. `name`: of its files; `caption`: what is shown, from where."""

    name: str
    title: str
    caption: str
    parts: Sequence[Part]
    keys: Sequence[Key] = ()
    height: float = HEIGHT

    @property
    def grid(self) -> list[list[Part | None]]:
        """The parts by row and column, None for a place without one; rows of up to two where the
        parts have no places.
        """
        places = {part.place: part for part in self.parts}
        if None in places or len(places) < len(self.parts):
            return broken([[*self.parts]], 2)
        rows, columns = (range(1 + max(found)) for found in zip(*filter(None, places), strict=True))
        return [[places.get((row, column)) for column in columns] for row in rows]

    @property
    def across(self) -> int:
        """How many parts stand beside one another; 0: as many as there is room for."""
        return len(self.grid[0]) if all(part.place for part in self.parts) else 0


def broken(rows: Sequence[Sequence[Part | None]], most: int) -> list[list[Part | None]]:
    """Rows of `most` places at most: of a longer one so many as it takes, none of them empty."""
    across = min(most, max(map(len, rows)))
    found = []
    for row in rows:
        for at in range(0, len(row), across):
            piece = [*row[at : at + across]]
            if any(piece):
                found.append([*piece, *[None] * (across - len(piece))])
    return found


@dataclass(frozen=True)
class Drawn:
    """A figure. `files`: by suffix; `inline`: an SVG for each of its parts, to stand in a page,
    empty for a place of its grid without one.
    """

    drawing: Drawing
    files: dict[str, bytes] = field(default_factory=dict)
    inline: Sequence[str] = ()


def render(drawing: Drawing, columns: int | None = None) -> Drawn:
    """Draws a figure into its files, the same bytes each time, and into SVGs for the page.

    Args:
        drawing: the figure.
        columns: of a paper that its files are as wide as, 1 or 2, with text of 8 points; None: as
            wide as it takes.
    """
    import matplotlib

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of axes without room
        with matplotlib.rc_context(None if columns is None else _printed()):
            together = _laid_out(_figure(drawing, columns))
            text = _svg(together)
            files = {"svg": _alone(text).encode(), "pdf": _pdf(together), "png": _png(together)}
        parts = [text]
        if len(drawing.parts) > 1 or drawing.keys or columns is not None:
            shown: list[Part | None] = [*drawing.parts]
            if drawing.across:
                shown = [part for row in drawing.grid for part in row]
            parts = [
                _svg(_laid_out(_single(part, drawing.height))) if part else "" for part in shown
            ]
        inline = [
            _inline(each, f"{drawing.name}-{place}-", drawing.title) if each else ""
            for place, each in enumerate(parts)
        ]
    return Drawn(drawing, files, inline)


def whole(drawing: Drawing) -> Figure:
    """A figure with all of its parts, in the style of the report, which a notebook shows."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS):
        figure = _figure(drawing)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _printed() -> Any:
    """What a figure for a paper has of its own: text and lines for its size."""
    sizes = [name for name in SETTINGS if name.endswith(("titlesize", "labelsize", "fontsize"))]
    lines = {"lines.linewidth": 1.2, "lines.markersize": 3.5}
    return {**dict.fromkeys([*sizes, "font.size"], PRINT), **lines}


def _figure(drawing: Drawing, columns: int | None = None) -> Figure:
    """All parts in a grid of two beside one another at most, the legend below them. `columns`: see
    `render`.
    """
    parts = broken(drawing.grid, columns or 2)
    across = len(parts[0])
    down = len(parts)
    width = across * (WIDTH if across == 1 else NARROW)
    height = drawing.height
    size = 10
    if columns is not None:
        width = PAPER[columns]
        height *= min(1.0, width / across / WIDTH)
        size = PRINT
    longest = max((len(key.label) for key in drawing.keys), default=0)
    beside = max(1, int(width / ((0.55 + 0.08 * longest) * size / 10)))
    lines = math.ceil(len(drawing.keys) / beside)
    figure = _empty(width, height * down + 0.2 * lines)
    grid = figure.subplots(down, across, squeeze=False)
    for part, axes in zip(itertools.chain(*parts), grid.ravel(), strict=True):
        if part is None:
            axes.set_axis_off()
            continue
        room = CHARACTERS * width / across / WIDTH * 10 / size
        axes.set_title(textwrap.fill(part.title, round(room)))
        part.draw(axes)
    if drawing.keys:
        figure.legend(
            handles=[_handle(key) for key in drawing.keys],
            loc="outside lower center",
            ncols=min(beside, len(drawing.keys)),
            frameon=False,
        )
    return figure


def _single(part: Part, height: float) -> Figure:
    figure = _empty(WIDTH, height)
    axes = figure.subplots()
    axes.set_title(textwrap.fill(part.title, CHARACTERS))
    part.draw(axes)
    return figure


def _empty(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _handle(key: Key) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if key.shape in ("band", "bar"):
        return Patch(
            color=key.look.colour, alpha=0.25 if key.shape == "band" else 1.0, label=key.label
        )
    dash: Any = key.look.dash if key.shape == "line" else "none"
    return Line2D(
        [], [], color=key.look.colour, linestyle=dash, marker=key.look.marker, label=key.label
    )


def _laid_out(figure: Figure) -> Figure:
    """The figure with its parts in their places, which all of its files share."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    return figure


# Each canvas is asked for its file directly: savefig would draw the figure a second time.


def _pdf(figure: Figure) -> bytes:
    from matplotlib.backends.backend_pdf import FigureCanvasPdf

    buffer = io.BytesIO()
    FigureCanvasPdf(figure).print_pdf(buffer, metadata={"CreationDate": None, "Producer": None})
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.patch.set_visible(True)
    figure.patch.set_facecolor("white")
    figure.set_dpi(144)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _svg(figure: Figure) -> str:
    """The SVG, the font left to the page, colours of text as `currentColor`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    FigureCanvasSVG(figure).print_svg(buffer, metadata=metadata)
    text = buffer.getvalue().decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!DOCTYPE.*?>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"(font: [^'\"]*)'DejaVu Sans'[^;\"]*", r"\1system-ui, sans-serif", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    text = re.sub(r' (?:d|x|y)="[^"]*"', _shorter, text)
    return re.sub(r"\n\s*", "\n", text)


def _shorter(found: re.Match[str]) -> str:
    """Coordinates to a hundredth of a point."""
    return re.sub(r"(\.\d\d)\d+", r"\1", found.group())


DARK = (
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#d7dce2;background:#14171b}}</style>"
)


def _alone(text: str) -> str:
    """An SVG that stands by itself, in the light or in the dark."""
    return re.sub(r"(<svg[^>]*>)", rf"\1{DARK}", text, count=1, flags=re.DOTALL)


def _inline(text: str, prefix: str, title: str) -> str:
    """An SVG to stand in a page: its names its own, no address, as wide as there is room."""
    text = re.sub(r"<\?xml.*?\?>", "", text, flags=re.DOTALL).strip()
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    said = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return re.sub(
        r'<svg[^>]*?(viewBox="[^"]*")[^>]*>',
        rf'<svg role="img" aria-label="{said}" \1>',
        text,
        count=1,
        flags=re.DOTALL,
    )


# --- axes ---


def dots(axes: Axes, points: Any, drawn: Look, alpha: float = 0.7, size: float = 4.5) -> None:
    """Points without a line between them.

    Args:
        axes: where they are drawn.
        points: float array [n, 2], or as many pairs.
        drawn: their colour and marker.
        alpha: how opaque they are.
        size: of a marker, in points.
    """
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T
    given: Any = {"marker": drawn.marker, "markersize": size, "markeredgewidth": 0}
    axes.plot(x, y, linestyle="none", color=drawn.colour, alpha=alpha, **given)


def scale(axes: Axes, which: str, measured: Quantity, values: Any, log: bool | None = None) -> None:
    """Sets up one axis for these values: logarithmic where they span decades (or as `log` says),
    as far as they reach, with plain numbers, and its label with the unit.

    Args:
        axes: what is set up.
        which: x or y.
        measured: what the axis shows.
        values: all that it and its like in the other panels show, float array of any shape.
        log: whether it is logarithmic; None: where that fits.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    getattr(axes, f"set_{which}label")(measured.label)
    axis = getattr(axes, f"{which}axis")
    finite = np.asarray(values, np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    logarithmic = is_log(measured, finite, log)
    if logarithmic:
        getattr(axes, f"set_{which}scale")("log")
        _decades(axis, finite)
        axis.set_minor_formatter(NullFormatter())
    else:
        whole = measured.name == "round"
        axis.set_major_locator(MaxNLocator(5, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    show = _percent if measured.percent else _plain
    axis.set_major_formatter(FuncFormatter(show))
    if len(finite):
        getattr(axes, f"set_{which}lim")(*reach(finite, logarithmic, measured.percent))


def reach(values: np.ndarray, logarithmic: bool, percent: bool = False) -> tuple[float, float]:
    """From where to where an axis goes: as far as its values, and a little further.

    >>> reach(np.array([0.0, 1.0]), False), reach(np.array([3.0]), False)
    ((-0.05, 1.05), (2.0, 4.0))
    >>> reach(np.array([1.0]), False, percent=True), reach(np.array([0.0]), False, percent=True)
    ((0.95, 1.05), (-0.05, 0.05))
    """
    low = float(values.min())
    high = float(values.max())
    if logarithmic:
        further = max((high / low) ** MARGIN, 1.02)
        return low / further, high * further
    alone = 0.05 if percent else 1.0  # beyond a single value
    further = MARGIN * (high - low) or (0.05 * abs(high) if high % 1 else alone)
    return low - further, high + further


def is_log(measured: Quantity, values: np.ndarray, log: bool | None) -> bool:
    """Whether an axis of these finite values is logarithmic."""
    if log is False or not len(values) or values.min() <= 0:
        return False
    return bool(log or (measured.wide and values.max() / values.min() >= DECADES))


def _decades(axis: Any, values: np.ndarray) -> None:
    """Ticks at powers of ten; where there are few, at twice and five times them too."""
    from matplotlib.ticker import LogLocator

    few = values.max() / values.min() < 100
    subs = (1.0, 2.0, 5.0) if few else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=7))


def _plain(value: float, _: int) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}", 1 if value < 0 else 0)


def _percent(value: float, _: int) -> str:
    return f"{100 * value:.4g} %"


def thin(count: int, most: int) -> np.ndarray:
    """Which of `count` points are drawn: `most` at most, evenly over all, the same each time."""
    if count <= most:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, most).round().astype(int))
