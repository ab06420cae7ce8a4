"""The figure of an audit: for every observer, the canaries' scores by coin, and what is proven,
estimated and claimed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from raydpfl.audit.views import View

INSIDE = "#c4442f"
OUTSIDE = "#3b6ea5"
CLAIM = "#333333"


def draw(views: Sequence[View], path: Path) -> None:
    """Writes a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * len(views)), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(views), 2, squeeze=False, width_ratios=(3, 2))
    for view, (scores, epsilons) in zip(views, rows, strict=True):
        edges = np.histogram_bin_edges(view.statistics, 40)
        for inside, colour, label in ((True, INSIDE, "canary inside"), (False, OUTSIDE, "outside")):
            scores.hist(
                view.statistics[view.inside == inside], edges, color=colour, alpha=0.6, label=label
            )
        claim = view.claimed
        scores.set_title(
            textwrap.fill(f"{claim.observer}: {claim.sampling}", 80), fontsize=9, loc="left"
        )
        scores.set_xlabel("score (standard deviations of the noise)", fontsize=8)
        scores.legend(fontsize=8, frameon=False)
        estimate = view.estimate
        epsilons.barh([1], [view.lower], color=INSIDE, height=0.5)
        bars = [
            [max(estimate.epsilon - estimate.low, 0)],
            [max(estimate.high - estimate.epsilon, 0)],
        ]
        epsilons.errorbar([estimate.epsilon], [0], xerr=bars, fmt="o", color=OUTSIDE, capsize=4)
        epsilons.axvline(claim.epsilon, color=CLAIM, linestyle="--", linewidth=1)
        epsilons.set_yticks([1, 0], [f"proven ({view.confidence:.0%})", "estimated"], fontsize=8)
        epsilons.set_ylim(-0.7, 1.7)
        epsilons.set_xlim(0, 1.15 * max(claim.epsilon, view.lower, estimate.high, 1e-6))
        epsilons.set_title(
            f"claimed: epsilon {claim.epsilon:.4g} at delta {claim.delta:g} ({claim.accountant})",
            fontsize=9,
            loc="left",
        )
        epsilons.set_xlabel("epsilon", fontsize=8)
    figure.savefig(path, dpi=120)
