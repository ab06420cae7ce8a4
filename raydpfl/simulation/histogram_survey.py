"""What all clients are asked for after some of the rounds, as it is released."""

from __future__ import annotations

import numpy as np

from raydpfl.errors import RunError
from raydpfl.simulation.noise_monitor import Drawing
from raydpfl.simulation.plan import Plan


def counted(plan: Plan, t: int, values: np.ndarray, noise: Drawing) -> np.ndarray:
    """The counts of a histogram of scores, float64 [bins], with the noise that accountants were
    told of.

    Args:
        plan: of the run.
        t: the round that they are released after.
        values: the score of every client that has any, float64 [clients]; NaN where one has none.
        noise: draws it.

    Raises:
        RunError: this was not accounted for, or the noise is not what was.
    """
    e = plan.experiment
    histogram = e.evaluate.histogram
    if histogram is None or not plan.surveyed(t):
        raise RunError(f"clients are asked after round {t}, which was not accounted for")
    counts = histogram.counts(values)
    size = histogram.std, counts, len(values)
    return counts + noise.on_survey(plan.survey_seed, t, *size)
