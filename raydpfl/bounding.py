"""What bounds a client's influence: clipping, normalising, and their adaptive and smoothed forms.

A member of this family promises: what a client sends is `factor(norm, bound)` times the vector it
would have sent, `norm` being that vector's L2 norm, and the result's norm is at most `bound` for
every finite `norm`.

>>> Clip(bound=1.0).factor(4.0, 1.0), Clip(bound=1.0).factor(0.5, 1.0)
(0.25, 1.0)
>>> Normalize(bound=1.0).factor(0.5, 1.0), Normalize(bound=1.0).factor(0.0, 1.0)
(2.0, 0.0)

Edge cases, the same for every member:

| norm            | sent                                                                     |
|-----------------|--------------------------------------------------------------------------|
| 0               | 0 (normalisation has no direction to keep; 001 sec. 5 defines it so)      |
| infinite or NaN | nothing: it is the client's error, raised with its id, never passed on   |

Sensitivity of the sum over a cohort: `bound` when a client is added, removed or zeroed out, 2
`bound` when one is replaced. The norm is taken and the factor applied in float64, so the bound
holds to 1e-15; the sum is then rounded once per lane to a grid below 1e-9 of the bound (see
`raydpfl.sums`), which leaves the sensitivity as it is to every printed digit.

`per_sample_clip` bounds inside the local steps instead: every sample's gradient is clipped, the
update is sent as it is, and what is protected is a sample (002, 003). `alpha_norm_ec` bounds the
difference from what the client remembers having sent.

What is sent: the update Delta = x^Q - x, the sum of gradients -Delta / lr (`scaling: gradient`; 001
Alg. 1-2 bound that, and the server multiplies by the local learning rate again), or the model x^Q
itself (`model_clip`). In every form the server moves along +Delta.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from pydantic import Field

from raydpfl.member import Member


class Bounding(Member):
    """Base of the family; a user's own member derives from it and gives `factor`."""

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "adaptive": ("next_bound", "share"),
        "stateful": ("beta",),
    }
    sends: ClassVar[Literal["update", "model"]] = "update"
    adaptive: ClassVar[bool] = False
    # whether a client keeps a vector from one of its rounds to the next
    stateful: ClassVar[bool] = False
    scaling: Literal["update", "gradient"] = "update"

    @property
    def initial_bound(self) -> float | None:
        """The bound in force in the first round, the field `bound` of every member that has one;
        None: nothing is bounded.
        """
        return getattr(self, "bound", None)

    @property
    def sample_bound(self) -> float | None:
        """The bound on each sample's gradient within a local step; None: gradients are not bounded."""
        return None

    def factor(self, norm: float, bound: float) -> float:
        """What a vector of this norm is multiplied by, given the bound in force in this round."""
        raise NotImplementedError


class Unbounded(Bounding):
    """The update as it is (FedAvg: 000 Alg. 1, 001 Alg. 3). No privacy can be claimed for it."""

    kind: str = "none"
    scaling: Literal["update"] = "update"

    def factor(self, norm: float, bound: float) -> float:
        return 1.0


class Clip(Bounding):
    """u min(1, c / ||u||) (000 eq. 3, 001 eq. 4)."""

    kind: str = "clip"
    bound: float = Field(gt=0, le=1e15)

    def factor(self, norm: float, bound: float) -> float:
        return 1.0 if norm <= bound else bound / norm


class ModelClip(Clip):
    """clip(x^Q, c): the model itself is clipped and sent, and the new model is the mean of what was
    sent (000 sec. 2.1).
    """

    sends: ClassVar[Literal["update", "model"]] = "model"
    kind: str = "model_clip"
    scaling: Literal["update"] = "update"


class Normalize(Bounding):
    """c u / ||u||, and 0 for u = 0 (001 eq. 12)."""

    kind: str = "normalize"
    bound: float = Field(gt=0, le=1e15)

    def factor(self, norm: float, bound: float) -> float:
        return bound / norm if norm > 0 else 0.0


class SmoothNormalize(Bounding):
    """c u / (a + ||u||): normalisation without its jump at 0 (alpha-NormEC, 2025)."""

    kind: str = "smooth_normalize"
    bound: float = Field(gt=0, le=1e15)
    a: float = Field(default=0.01, gt=0)

    def factor(self, norm: float, bound: float) -> float:
        return bound / (self.a + norm)


class PerSampleClip(Unbounded):
    """clip(g_j, G) for the gradient of every sample of a local batch, the norm over all parameters
    (002 sec. III, 003 Alg. 1).

    The sum over a batch moves by at most G when a sample is added and 2 G when it is replaced; the
    mean over B by 2 G / B. What the client sends after its steps is not bounded again. 002 assumes
    gradients bounded by G and never clips them.

    Column `clipped` of a client in clients.parquet is the share of its (sample, step) pairs whose
    gradient was longer than G, NaN for one without samples or whose update failed; that of a round
    in rounds.parquet is the mean over its other clients.
    """

    kind: str = "per_sample_clip"
    bound: float = Field(gt=0, le=1e15)

    @property
    def initial_bound(self) -> float | None:
        return None

    @property
    def sample_bound(self) -> float | None:
        return self.bound


class AlphaNormEC(SmoothNormalize):
    """Smoothed normalisation with error compensation (alpha-NormEC, Shulgin, Khirirat, Richtarik
    2025).

    A client remembers g_i, from 0, and sends s = c v / (a + ||v||) of v = u_i - g_i, u_i being what
    it would have sent; g_i grows by `beta` s, without the noise on s. The server keeps h, from 0: h
    grows by beta (r/N) mean(s), noise included, and is what the server steps along. Without noise h
    is the mean of all g_i, which follow the u_i, so that bounding leaves no bias. Only s is
    released, so the sensitivity is that of `smooth_normalize`.
    """

    stateful: ClassVar[bool] = True
    kind: str = "alpha_norm_ec"
    beta: float = Field(default=0.1, gt=0, le=1)


class QuantileClip(Clip):
    """Clipping at a bound that follows a quantile of the norms (Andrew, Thakkar, McMahan, Ramaswamy
    2021, Alg. 1).

    After each round C <- C exp(-lr (b - quantile)), b being the noised share of the cohort with
    norm <= C. The noised count is a second query of the round: each client gives its indicator
    minus 1/2, of norm 1/2, and `share` of the round's squared sensitivity-to-noise ratio is spent
    on it, so that with z the noise multiplier of the round the count has noise of std z / (2
    sqrt(share)) and the update of std z C / sqrt(1 - share), both of the sum; where clients draw
    the noise, each draws its share of both. The noise of a round uses the bound of that round.
    """

    adaptive: ClassVar[bool] = True
    kind: str = "quantile_clip"
    quantile: float = Field(default=0.5, gt=0, lt=1)
    lr: float = Field(default=0.2, gt=0)
    share: float = Field(default=0.05, gt=0, lt=1)

    def next_bound(self, bound: float, below: float) -> float:
        """The bound of the next round, from the noised share of clients `below` the present one."""
        return bound * math.exp(min(-self.lr * (below - self.quantile), 100.0))


FAMILY: dict[str, type[Bounding]] = {
    "none": Unbounded,
    "clip": Clip,
    "model_clip": ModelClip,
    "normalize": Normalize,
    "smooth_normalize": SmoothNormalize,
    "quantile_clip": QuantileClip,
    "per_sample_clip": PerSampleClip,
    "alpha_norm_ec": AlphaNormEC,
}
