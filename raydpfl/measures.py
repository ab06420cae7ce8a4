"""What bounding and noise do to the updates of a round, in numbers (000 Theorem 3.1 and Figs 1, 2;
001 Fig. 2).

>>> row = of_bounding(norms=np.array([0.5, 2.0, 4.0]), bound=1.0, measured={})
>>> {name: round(value, 3) for name, value in row.items() if value is not None}
{'alpha_mean': 0.583, 'bias_across': 0.278, 'bias_across_squared': 0.097}

alpha_i = c / max(c, ||Delta_i||) is what clipping at c would leave of client i's update, alpha~_i
the same of the *expected* update E Delta_i, alpha- the mean of the alpha~_i. Theorem 3.1 bounds the
bias of clipping by the two sums

    within = mean |alpha_i - alpha~_i|, from the randomness of the local steps,     across = mean
    |alpha~_i - alpha-|, from the clients' differences,

and by their squares. E Delta_i is estimated by training again (`measure.repeats`). Without repeats
alpha~_i is taken to be alpha_i, which is exact where local steps take full gradients, and `within`
is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

# the columns that `of_bounding` gives
BOUNDING = (
    *("snr", "angle_p10", "angle_p50", "angle_p90", "alpha_mean"),
    *("bias_within", "bias_within_squared", "bias_across", "bias_across_squared"),
)


def of_bounding(
    norms: np.ndarray, bound: float | None, measured: Mapping[str, np.ndarray]
) -> dict[str, float | None]:
    """The columns that `measure.bounding` adds to a round.

    `norms` float64 [r]: of what each client would have sent, in client order. `measured`, float64
    [r] each and all optional: `bounded_norm` and `noise_norm` of what it sent and drew, `angle` of
    its update to the last global one in degrees, `expected_norm`, the norm of the expectation of
    what it would have sent (||E Delta_i|| for an update). A client that failed has NaN, and is left
    out.
    """
    row: dict[str, float | None] = {"snr": None}
    if len(measured.get("noise_norm", ())):
        row["snr"] = float(
            np.nanmean(measured["bounded_norm"]) / np.nanmean(measured["noise_norm"])
        )
    angles = measured.get("angle", np.empty(0))
    angles = angles[np.isfinite(angles)]
    row |= {
        f"angle_p{q}": float(np.quantile(angles, q / 100)) if len(angles) else None
        for q in (10, 50, 90)
    }
    names = (
        "alpha_mean",
        "bias_within",
        "bias_within_squared",
        "bias_across",
        "bias_across_squared",
    )
    row |= dict.fromkeys(names)
    here = np.isfinite(norms)
    if bound is None or not here.any():
        return row
    alpha = bound / np.maximum(bound, norms[here])
    expected = alpha
    if "expected_norm" in measured:
        expected = bound / np.maximum(bound, measured["expected_norm"][here])
        within = np.abs(alpha - expected)
        row |= {
            "bias_within": float(within.mean()),
            "bias_within_squared": float((within**2).mean()),
        }
    across = np.abs(expected - expected.mean())
    return row | {
        "alpha_mean": float(expected.mean()),
        "bias_across": float(across.mean()),
        "bias_across_squared": float((across**2).mean()),
    }


def projection(trajectory: np.ndarray, onto: int = 2) -> np.ndarray:
    """A trajectory of models, float [T, d], on its `onto` principal directions, float64 [T, onto]
    from the first model on (001 Fig. 3).
    """
    moved = np.asarray(trajectory, np.float64) - trajectory[0]
    _, _, directions = np.linalg.svd(moved - moved.mean(0), full_matrices=False)
    return moved @ directions[:onto].T
