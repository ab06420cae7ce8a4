"""One look for every figure, and its files.

Text and axes are drawn in the colour of the page around them (`currentColor`), so that one SVG
reads in light, in the dark and on paper. Colours are distinct for the colour-blind (Okabe and Ito
2008), and each goes with a dash and a marker of its own. Nothing here touches pyplot.
"""

import html
import io
import itertools
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl.report.labels import Quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
else:  # reading a study imports no matplotlib
    Axes = Figure = Any

INK = "#010203"  # in whose place an SVG has the colour of the text around it
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (1, 1.2)), (0, (6, 1.5, 1, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 4.6  # inches of a panel
NARROW_WIDTH = 3.5  # of one next to another, whose text is to be read where both have little room
HEIGHT = 3.0
CHARACTERS = 42  # of a line of a panel's title
PAPER = {1: 3.5, 2: 7.16}  # inches of one and two columns of a paper
LOG_SPAN = 4.0  # of labels and of epsilon across: as `LOG_RATIO`
MARGIN = 0.05  # of an axis, beyond its values
LOG_RATIO = 30.0  # the ratio of the largest to the smallest value from which an axis is logarithmic
# of an SVG that stands by itself, in the light or in the dark
DARK_STYLE = (
    "<style>svg{color:#1b1f24;background:#fff}"
    "@media (prefers-color-scheme:dark){svg{color:#d7dce2;background:#14171b}}</style>"
)
STYLE = Path(__file__).parent / "report.mplstyle"
PAPER_STYLE = Path(__file__).parent / "paper.mplstyle"


@dataclass(frozen=True)
class Look:
    """How a line and its points are drawn."""

    colour: str
    dash: Any = "-"
    marker: str = "o"

    @property
    def line(self) -> dict[str, Any]:
        """What `Axes.plot` takes of it for a line without markers."""
        return {"color": self.colour, "linestyle": self.dash}

    @property
    def dash_array(self) -> str:
        """The dash as SVG has it, empty for an unbroken line."""
        if isinstance(self.dash, str):
            return {"--": "6 3", "-.": "7 2.5 1.6 2.5"}.get(self.dash, "")
        return " ".join(f"{1.6 * part:g}" for part in self.dash[1])


REFERENCE = Look(INK, (0, (4, 2)), "")
STAR = Look(INK, "none", "*")


def look(place: int, dash: int | None = None) -> Look:
    """The look of the line at this place among its kind; `dash`: with another line's dash."""
    turn = place if dash is None else dash
    colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
    return Look(colour, DASHES[turn % len(DASHES)], marker)


@dataclass(frozen=True)
class LegendKey:
    """An entry of the legend. `shape`: line, point or bar."""

    label: str
    look: Look
    shape: str = "line"


@dataclass(frozen=True)
class Subplot:
    """One pair of axes: its title, empty for none, what draws it, and its row and column where all
    subplots stand in a grid.
    """

    title: str
    draw: Callable[[Axes], None]
    place: tuple[int, int] | None = None


@dataclass(frozen=True)
class Plot:
    """A figure before it is drawn. `name`: of its files; `caption`: what is shown, from where."""

    name: str
    title: str
    caption: str
    subplots: Sequence[Subplot]
    keys: Sequence[LegendKey] = ()
    height: float = HEIGHT

    def grid(self, max_columns: int | None = None) -> list[list[Subplot | None]]:
        """The subplots by row and column, None for an empty place; longer rows are cut into several
        of `max_columns` places, none of them empty. Those without places of their own are one row.
        """
        rows: list[list[Subplot | None]] = [[*self.subplots]]
        if self.across:
            places = {subplot.place: subplot for subplot in self.subplots}
            down = range(1 + max(place[0] for place in places if place))
            rows = [[places.get((row, column)) for column in range(self.across)] for row in down]
        max_columns = min(max_columns or len(rows[0]), len(rows[0]))
        pieces = [row[i : i + max_columns] for row in rows for i in range(0, len(row), max_columns)]
        return [[*piece, *[None] * (max_columns - len(piece))] for piece in pieces if any(piece)]

    @property
    def across(self) -> int:
        """The columns of the grid; 0, without places of their own: as many as there is room for."""
        places = {subplot.place for subplot in self.subplots}
        if None in places or len(places) < len(self.subplots):
            return 0
        return 1 + max(place[1] for place in places if place)


def render(plot: Plot, columns: int | None = None) -> tuple[dict[str, bytes], list[str]]:
    """Draws a figure into its files by suffix, the same bytes each time, and into an SVG of each
    subplot for the page, empty for an empty place of its grid. `columns`: of a paper that its files
    are as wide as, 1 or 2, with text of 8 points; None: as wide as it takes.
    """
    from matplotlib import style

    with style.context(STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of axes without room
        with style.context(PAPER_STYLE if columns else {}):
            full_figure = _lay_out(_figure(plot, columns))
            text = _svg(full_figure)
            pdf = _file(full_figure, "pdf", metadata={"CreationDate": None, "Producer": None})
            svg = re.sub(r"(<svg[^>]*>)", rf"\1{DARK_STYLE}", text, count=1)
            files = {"svg": svg.encode(), "pdf": pdf, "png": _png(full_figure)}
        svgs = [text]
        if len(plot.subplots) > 1 or plot.keys or columns:
            single_plots = [
                replace(plot, subplots=[replace(part, place=None)], keys=()) if part else None
                for part in itertools.chain(*plot.grid())
            ]
            svgs = [_svg(_lay_out(_figure(part))) if part else "" for part in single_plots]
    return files, [
        _inline(svg, f"{plot.name}-{place}-", plot.title) if svg else ""
        for place, svg in enumerate(svgs)
    ]


def whole_figure(plot: Plot) -> Figure:
    """A figure with all of its subplots, in the style of the report, which a notebook shows."""
    from matplotlib import style

    with style.context(STYLE):
        figure = _figure(plot)
    figure._repr_png_ = partial(_png, figure)  # type: ignore[attr-defined]
    return figure


def _figure(plot: Plot, columns: int | None = None) -> Figure:
    """All subplots in a grid, the legend below them. `columns`: see `render`."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = plot.grid(columns or 2)
    across = len(rows[0])
    width = across * (WIDTH if across == 1 else NARROW_WIDTH)
    height = plot.height
    if columns is not None:
        width = PAPER[columns]
        height *= min(1.0, width / across / WIDTH)
    size = matplotlib.rcParams["font.size"] / 10
    longest = max((len(key.label) for key in plot.keys), default=0)
    keys_across = max(1, int(width / ((0.55 + 0.08 * longest) * size)))
    lines = math.ceil(len(plot.keys) / keys_across)
    figure = Figure(figsize=(width, height * len(rows) + 0.2 * lines), layout="constrained")
    grid = figure.subplots(len(rows), across, squeeze=False)
    for subplot, axes in zip(itertools.chain(*rows), grid.ravel(), strict=True):
        if subplot is None:
            axes.set_axis_off()
            continue
        characters = round(CHARACTERS * width / across / WIDTH / size)
        axes.set_title(textwrap.fill(subplot.title, characters))
        subplot.draw(axes)
    if plot.keys:
        figure.legend(
            handles=[_handle(key) for key in plot.keys],
            loc="outside lower center",
            ncols=min(keys_across, len(plot.keys)),
            frameon=False,
        )
    return figure


def _handle(key: LegendKey) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    style: Any = {"color": key.look.colour, "label": key.label}
    if key.shape == "bar":
        return Patch(**style)
    dash: Any = key.look.dash if key.shape == "line" else "none"
    return Line2D([], [], linestyle=dash, marker=key.look.marker, **style)


def _lay_out(figure: Figure) -> Figure:
    """The figure with everything in its place, which all of its files share."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine(None)  # savefig would lay it out again
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_visible(False)
    return figure


def _file(figure: Figure, suffix: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, **options)
    return buffer.getvalue()


def _png(figure: Figure) -> bytes:
    figure.patch.set_visible(True)
    return _file(figure, "png", dpi=144, facecolor="white", metadata={"Software": None})


def _svg(figure: Figure) -> str:
    """The SVG, the font left to the page, colours of text as `currentColor`."""
    metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = _file(figure, "svg", metadata=metadata).decode()
    text = re.sub(r"<metadata>.*?</metadata>|<!DOCTYPE.*?>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace(INK, "currentColor")
    text = re.sub(r"(font: [^'\"]*)'DejaVu Sans'[^;\"]*", r"\1system-ui, sans-serif", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", text)
    # coordinates to a hundredth of a point
    shorter = partial(re.sub, r"(\.\d\d)\d+", r"\1")
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda match: shorter(match[0]), text)
    return re.sub(r"\n\s*", "\n", text)


def _inline(text: str, prefix: str, title: str) -> str:
    """An SVG to stand in a page: its names its own, no address, as wide as there is room."""
    text = re.sub(r"<\?xml.*?\?>", "", text, flags=re.DOTALL).strip()
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = text.replace("xlink:href", "href")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", text)
    box = re.search(r'viewBox="[^"]*"', text)
    opening_tag = f'<svg role="img" aria-label="{html.escape(title)}" {box[0] if box else ""}>'
    return re.sub(r"<svg[^>]*>", lambda _: opening_tag, text, count=1, flags=re.DOTALL)


# --- axes ---


def dots(axes: Axes, points: Any, look: Look, alpha: float = 0.7, size: float = 4.5) -> None:
    """Points (float array [n, 2], or as many pairs) without a line between them; `alpha`: how
    opaque, `size`: of a marker, in points of print.
    """
    x, y = np.asarray(points, np.float64).reshape(-1, 2).T
    style: Any = {"marker": look.marker, "markersize": size, "markeredgewidth": 0}
    axes.plot(x, y, linestyle="none", color=look.colour, alpha=alpha, **style)


def scale(axes: Axes, name: str, quantity: Quantity, values: Any, log: bool | None = None) -> None:
    """Sets up one axis (`name`: x or y) for `values`, all that it and its like in the other panels
    show, a float array of any shape: logarithmic where they span decades (or as `log` says), as far
    as they reach, with plain numbers, and its label with the unit.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    finite = np.asarray(values, np.float64).ravel()
    finite = finite[np.isfinite(finite)]
    ratio = finite.max() / finite.min() if len(finite) and finite.min() > 0 else 0.0
    wide = quantity.wide and ratio >= LOG_RATIO
    logarithmic = bool(ratio and (wide if log is None else log))
    axes.set(**{f"{name}label": textwrap.fill(quantity.label, CHARACTERS // 2)})
    axis = getattr(axes, f"{name}axis")
    if logarithmic:
        axes.set(**{f"{name}scale": "log"})
        # ticks at powers of ten; where there are few, at twice and five times them too
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if ratio < 100 else (1,), numticks=7))
        axis.set_minor_formatter(NullFormatter())
    else:
        whole = quantity.name == "round"
        axis.set_major_locator(MaxNLocator(5, integer=whole, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(_percent if quantity.percent else _plain))
    if len(finite):
        axes.set(**{f"{name}lim": reach(finite, logarithmic, quantity.percent)})


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
        margin = max((high / low) ** MARGIN, 1.02)
        return low / margin, high * margin
    single_margin = 0.05 if percent else 1.0  # beyond a single value
    margin = MARGIN * (high - low) or (0.05 * abs(high) if high % 1 else single_margin)
    return low - margin, high + margin


def _plain(value: float, _: int) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1e4:
        return f"{value:,.0f}" if abs(value) < 1e7 else f"{value:.3g}"
    return f"{value:.6g}".replace("-", "\N{MINUS SIGN}", 1 if value < 0 else 0)


def _percent(value: float, _: int) -> str:
    return f"{100 * value:.4g} %"


def thin(count: int, max_count: int) -> np.ndarray:
    """Indices of the points that are drawn, `max_count` at most, evenly over all `count`."""
    if count <= max_count:
        return np.arange(count)
    return np.unique(np.linspace(0, count - 1, max_count).round().astype(int))
