"""What bounding and noise do to the updates of a round (000 Theorem 3.1 and Figs 1, 2; 001 Fig. 2).

>>> row = round_columns({"norm": np.array([0.5, 2.0, 4.0])}, bound=1.0)
>>> {name: round(value, 3) for name, value in row.items() if value is not None}
{'alpha_mean': 0.583, 'bias_across': 0.278, 'bias_across_squared': 0.097}

alpha_i = c / max(c, ||Delta_i||) is what clipping at c would leave of client i's update, alpha~_i
the same of the *expected* update E Delta_i, alpha- the mean of the alpha~_i. Theorem 3.1 bounds the
bias of clipping by the two sums

    within = mean |alpha_i - alpha~_i|, from the randomness of the local steps,
    across = mean |alpha~_i - alpha-|, from the clients' differences,

and by their squares. E Delta_i is estimated by training again (`repeats`). Without repeats alpha~_i
is taken to be alpha_i, which is exact where local steps take full gradients, and `within` is not
reported.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from pydantic import Field, field_validator

from raydpfl.core.messages import Columns, State
from raydpfl.methods.probes.base import Probe, Round, Sent

BIAS = ("alpha_mean", "bias_within", "bias_within_squared", "bias_across", "bias_across_squared")
ANGLES = ("angle_p10", "angle_p50", "angle_p90")


class BoundingProbe(Probe):
    """Signal to noise, angles to the last global update, and the sums of clipping's bias.

    Of a client: `bounded_norm`, the norm of what it sends, weight included, before its noise;
    `noise_norm`, that of its noise; `angle`, that of its update to the last global one, in degrees;
    with `repeats`, `expected_norm`, the norm of the expectation of what it would send unbounded
    (||E Delta_i|| for an update; 000 Theorem 3.1), from so many more trainings per client.

    Of a round: `snr`, quantiles of the angles, `update_angle`, that of the mean update, as it is
    released, to the one before (with the rounds table's `update_norm` the black dot of 000 Figs 1,
    2, 5-11), and the sums of clipping's bias.
    """

    examples = ({}, {"repeats": 2})
    kind: str = "bounding"
    repeats: int = Field(default=0, ge=0, description="more trainings per client, for E Delta_i")

    @field_validator("repeats")
    @classmethod
    def _several(cls, value: int) -> int:
        if value == 1:
            raise ValueError("0, or at least 2")
        return value

    def columns(self, client_noise: bool) -> tuple[str, ...]:
        repeat_names = ("expected_norm",) if self.repeats else ()
        return ("bounded_norm", "angle", *repeat_names, *(("noise_norm",) if client_noise else ()))

    def chunk(self, sent: Sent) -> Columns:
        norms = torch.linalg.vector_norm(sent.vectors, dim=1).cpu().numpy()
        columns = {"bounded_norm": norms, "angle": np.full(len(norms), np.nan)}
        if "previous" in sent.broadcast:
            columns["angle"] = _angles(sent.updates, sent.broadcast["previous"])
        if self.repeats:
            columns["expected_norm"] = self._expected_norms(sent)
        if sent.noise is not None:
            columns["noise_norm"] = np.linalg.norm(sent.noise, axis=1)
        return columns

    def _expected_norms(self, sent: Sent) -> np.ndarray:
        """The variance of the mean, as the repeats show it, is taken off its squared norm."""
        sums, squares = sent.again(self.repeats)
        mean = (sums * sums).sum(1).cpu().numpy() / self.repeats**2
        spread = np.maximum(squares / self.repeats - mean, 0.0) / max(self.repeats - 1, 1)
        return np.sqrt(np.maximum(mean - spread, 0.0))

    def broadcast_state(self, state: State) -> State:
        return state

    def values(self) -> tuple[str, ...]:
        return ("snr", "update_angle", *ANGLES, *BIAS)

    def round(self, seen: Round, state: State) -> Mapping[str, float | None]:
        row = round_columns(seen.columns, seen.bound)
        if seen.noise is not None:
            row["snr"] = float(np.linalg.norm(seen.total) / np.linalg.norm(seen.noise))
        row["update_angle"] = None
        if "previous" in state:
            update_pair = torch.from_numpy(seen.update[None]), torch.from_numpy(state["previous"])
            angle = float(_angles(*update_pair)[0])
            row["update_angle"] = None if math.isnan(angle) else angle
        state["previous"] = seen.update.astype(np.float32)
        return row


def _angles(updates: torch.Tensor, previous: torch.Tensor) -> np.ndarray:
    """Between updates [k, d] and the last global one [d], in degrees, float64 [k]; NaN where one of
    them is 0.
    """
    rows = updates.double()
    last = previous.double()
    lengths = torch.linalg.vector_norm(rows, dim=1) * torch.linalg.vector_norm(last)
    cosines = ((rows * last).sum(1) / lengths).cpu().numpy()
    return np.degrees(np.arccos(np.clip(cosines, -1.0, 1.0)))


def round_columns(columns: Columns, bound: float | None) -> dict[str, float | None]:
    """The columns of the rounds table, of those of its clients, float64 [r] each: `norm` of what
    each would have sent, and optional `bounded_norm`, `noise_norm`, `angle` and `expected_norm`. A
    client that failed has NaN, and is left out.
    """
    row: dict[str, float | None] = dict.fromkeys(("snr", *ANGLES, *BIAS))
    finite_mask = np.isfinite(columns["norm"])
    if finite_mask.any() and len(columns.get("noise_norm", ())):
        signal = np.nanmean(columns["bounded_norm"][finite_mask])
        row["snr"] = float(signal / np.nanmean(columns["noise_norm"][finite_mask]))
    angles = columns.get("angle", np.empty(0))
    angles = angles[np.isfinite(angles)]
    if len(angles):
        row |= {name: float(np.quantile(angles, int(name[-2:]) / 100)) for name in ANGLES}
    if bound is None or not finite_mask.any():
        return row
    alpha = expected_alpha = bound / np.maximum(bound, columns["norm"][finite_mask])
    biases = {}
    if "expected_norm" in columns:
        expected_alpha = bound / np.maximum(bound, columns["expected_norm"][finite_mask])
        biases["bias_within"] = np.abs(alpha - expected_alpha)
    biases["bias_across"] = np.abs(expected_alpha - expected_alpha.mean())
    row["alpha_mean"] = float(expected_alpha.mean())
    for name, bias in biases.items():
        row |= {name: float(bias.mean()), f"{name}_squared": float((bias**2).mean())}
    return row
