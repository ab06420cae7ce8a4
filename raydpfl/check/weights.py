"""The contract of weights: see `raydpfl.methods.weights`."""

import numpy as np

from raydpfl.check.contract import hold
from raydpfl.check.example import Example

POPULATIONS = (
    np.array([1]),
    np.array([10, 20, 60]),
    np.arange(1, 60),
    np.array([1] * 30 + [5000]),
)


def _weights(case: Example, sizes: np.ndarray) -> np.ndarray:
    counts = sizes.astype(np.int64)
    copy = counts.copy()
    weights = np.asarray(case.member.of(counts, int(counts.sum()), len(counts)))
    hold(np.array_equal(copy, counts), "the clients' sizes are changed in place")
    return weights


def numbers(case: Example) -> str:
    """There is one finite number for each client."""
    for sizes in POPULATIONS:
        weights = _weights(case, sizes)
        message = f"{len(sizes)} clients get {list(weights.shape)} weights"
        hold(weights.shape == sizes.shape, message)
        hold(np.isfinite(weights).all(), f"a weight of {len(sizes)} clients is not finite")
    return f"{len(POPULATIONS)} populations"


def mean(case: Example) -> str:
    """The weights have mean 1 over the population."""
    for sizes in POPULATIONS:
        weights = _weights(case, sizes)
        mean = float(weights.mean())
        hold(abs(mean - 1) <= 1e-9, f"the mean over {len(sizes)} clients is {mean:.6g}")
        hold(not case.member.plain() or (weights == 1).all(), "plain weights are not 1")
    return "1, over every population"


def no_hidden_state(case: Example) -> str:
    """They are a function of the sizes alone."""
    first = [_weights(case, sizes) for sizes in POPULATIONS]
    second = [_weights(case, sizes) for sizes in reversed(POPULATIONS)][::-1]
    hold(all(map(np.array_equal, first, second)), "asked twice, they are others")
    return "the same twice"


def largest(case: Example) -> str:
    """The largest weight is what the accountants count on."""
    largest = float(np.abs(_weights(case, case.plan.population.sizes)).max())
    accounted_weight = case.plan.weight
    message = f"a client counts {largest:g}, and {accounted_weight:g} is accounted for"
    hold(largest <= accounted_weight * (1 + 1e-12), message)
    return f"{accounted_weight:.4g}"
