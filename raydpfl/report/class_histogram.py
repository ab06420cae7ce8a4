"""Which classes each client has, as a picture: a bar for each client, a colour for each class.

>>> plot_of(np.array([[3, 0], [1, 2]]), ["cat", "dog"]).title
'Classes of each client'
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.report.plot_style import Axes, LegendKey, Look, Plot, Subplot, render, thin
from raydpfl.storage.run_files import make_folder, replace_file

SUFFIXES = (".svg", ".png", ".pdf")
MAX_BARS = 200  # clients that have a bar
MAX_COLOURS = 20  # classes that have a colour; all others have one together
OTHERS_COLOUR = "#9A9A9A"
# Distinct for the colour-blind too: two neighbours by 59 in CIELAB, any two by 24.
COLOURS = (
    *("#A6D608", "#CC6677", "#332288", "#88CCEE", "#8C6D31"),
    *("#0072B2", "#A8DDB5", "#5A1A0A", "#DDCC77", "#882255"),
)


def check(out: Path) -> None:
    """Raises `ConfigError` unless this names a file that a picture may be written to."""
    if out.suffix not in SUFFIXES:
        raise ConfigError("--out", str(out), f"a file that ends in {', '.join(SUFFIXES)}")


def write(out: Path, counts: np.ndarray, names: Sequence[str]) -> None:
    """Draws what `plot_of` does into a file, .svg, .png or .pdf, which is replaced.

    Raises:
        ConfigError: for another suffix.
        FileError: where the file cannot be written.
    """
    check(out)
    files, _ = render(plot_of(counts, names))
    content = files[out.suffix[1:]]
    make_folder(out.parent)
    replace_file(out, lambda file: file.write(content))


def plot_of(counts: np.ndarray, names: Sequence[str]) -> Plot:
    """The picture of the samples of each class that each client has, int64 [clients, classes].
    `names`: of the classes; empty where they have none but their numbers.
    """
    from matplotlib.colors import to_hex, to_rgb

    # the same in pale for more than ten: neighbours differ in each of them
    tints = [to_hex((0.5 + r / 2, 0.5 + g / 2, 0.5 + b / 2)) for r, g, b in map(to_rgb, COLOURS)]
    ids = thin(len(counts), MAX_BARS)
    clients, classes = counts.shape
    common = np.sort(np.argsort(-counts.sum(0), kind="stable")[:MAX_COLOURS])
    labels = [names[place] if names else str(place) for place in common]
    bars = [*zip(labels, (*COLOURS, *tints), counts[ids][:, common].T, strict=False)]
    if classes > MAX_COLOURS:
        other_counts = counts[ids].sum(1) - counts[ids][:, common].sum(1)
        bars.append((f"{classes - MAX_COLOURS} others", OTHERS_COLOUR, other_counts))

    def draw(axes: Axes) -> None:
        below = np.zeros(len(ids))
        for _, colour, column in bars:
            axes.bar(range(len(ids)), column, 0.9, bottom=below, color=colour, linewidth=0)
            below = below + column
        ticks = thin(len(ids), 8)
        axes.set_xticks(ticks, [str(ids[tick]) for tick in ticks])
        axes.set_xlabel("client")
        axes.set_ylabel("training samples")
        axes.grid(False, axis="x")

    caption = f"{len(ids)} of {clients} clients; the samples that each trains on, by their class."
    keys = [LegendKey(label, Look(colour), "bar") for label, colour, _ in bars]
    return Plot("split", "Classes of each client", caption, [Subplot("", draw)], keys)
