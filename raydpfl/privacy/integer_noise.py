"""Integer noise on modular sums: the grid, the sensitivity after rounding, and the privacy loss.

What a client sends is its vector over a step, rounded at random to integers of a squared norm up to
`Lattice.square`; all noise on the sum is of integers too (`raydpfl.core.modular_sum`).

**Step.** The sum of n clients of norm up to the bound c, rotated in m dimensions, has coordinates
of variance n^2 c^2 / m at most, rounding adds n step^2 / 4 and the noise std^2. The step is the one
at which 4 standard deviations of that are half of 2^bits steps ([1] sec. 4, with k = 4), or std /
`MOST_STD` where that is more.

**Sensitivity** ([1] Definition 21 and Theorem 1, beta = e^-1/2): the integers of a vector of norm
c, rounded again until they fit, have in units of the step a squared norm up to

    min((c + sqrt(d))^2, c^2 + d / 4 + c + sqrt(d) / 2).

It is checked for every vector that is sent, and so holds whatever the rounding. Taking the sum
modulo 2^bits and turning it back is post-processing: wrap-arounds cost accuracy, not privacy.

**Discrete Gaussian.** That of variance parameter sigma^2 around an integer vector is, up to factors
of e^(+-eta) on all probabilities, what a Gaussian of variance sigma^2 - r^2 around it is turned
into by rounding every coordinate y to an integer k with probability in proportion to
exp(-(k - y)^2 / (2 r^2)) ([3] Theorem 3.1; `smoothing` is r^2). With the sensitivity D such a pair
is dominated by N(0, 1) and N(mu, 1), mu = D / sqrt(sigma^2 - r^2) + `SLACK` (docs/proofs.md). So
what is proved of Gaussian sums holds of these. From sigma = 40 steps on that costs a thousandth of
epsilon at most.

The sum of n discrete Gaussians of clients, of variance parameter s^2 each, has the probabilities of
one of n s^2 up to factors e^(+-eta), eta = d sum_(k<n) ln((1 + t_k) / (1 - t_k)), t_k = 2 sum_j
exp(-2 pi^2 s^2 j^2 k / (k + 1)) (docs/proofs.md). Where eta is below 1e-13 e^(-mu^2 / 8), it is
accounted for as one.

**Skellam** ([2] Theorem 3.5 and Corollary 4.1): its Renyi divergences are bounded, at whole orders
alpha, by

    alpha D2^2 / (2 v) + min(((2 alpha - 1) D2^2 + 6 D1) / (4 v^2), 3 D1 / (2 v)),

v the variance, D2 the sensitivity, D1 = min(sqrt(d) D2, D2^2) that in L1; all in steps.

[1] Kairouz, Liu, Steinke. The distributed discrete Gaussian mechanism for federated learning with
secure aggregation. ICML 2021 (2102.06387).
[2] Agarwal, Kairouz, Liu. The Skellam mechanism for differentially private federated learning.
NeurIPS 2021 (2110.04995).
[3] Peikert. An efficient and parallel Gaussian sampler for lattices. CRYPTO 2010.
[4] Canonne, Kamath, Steinke. The discrete Gaussian for differential privacy. NeurIPS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from raydpfl.errors import ConfigError

SPREAD = 4.0  # standard deviations of a coordinate of the sum that half of its range holds
MOST_STD = 2.0**14  # steps: the table of the noise's distribution takes a second or two there
LEAST_STD = 4.0  # steps, of a discrete Gaussian: below, smoothing costs too much
SLACK = 1e-12  # of mu


@dataclass(frozen=True)
class Lattice:
    """The grid of a sum at one noise multiplier; the unit of norms is the step."""

    step: float  # over the largest norm of what a client sends (its bound times its weight)
    square: int  # the largest squared norm of a client's integers
    std: float  # of the noise on the sum


@dataclass(frozen=True)
class SkellamLoss:
    """What accountants know of one release with Skellam noise: see the module."""

    variance: float  # of the noise
    square: float  # the squared L2 sensitivity
    d: int  # dimensions

    def renyi(self, orders: np.ndarray) -> np.ndarray:
        """Bounds on the Renyi divergences at `orders` above 1, float64 [n]. Between whole orders
        (alpha - 1) times the divergence, which is convex (van Erven and Harremoes 2014, Corollary
        2), is interpolated; it is 0 at order 1.
        """
        low, high = np.floor(orders), np.ceil(orders)
        share = orders - low
        below, above = ((order - 1) * self._whole(order) for order in (low, high))
        return ((1 - share) * below + share * above) / (orders - 1)

    def _whole(self, order: np.ndarray) -> np.ndarray:
        v, square = self.variance, self.square
        l1 = min(math.sqrt(self.d * square), square)
        rest = ((2 * order - 1) * square + 6 * l1) / (4 * v * v)
        return order * square / (2 * v) + np.minimum(rest, 3 * l1 / (2 * v))


@dataclass(frozen=True)
class IntegerNoise:
    """How the sums of a mechanism are taken, with discrete Gaussian noise."""

    bits: int
    cohort: int  # n, the nominal number of clients
    d: int = 1
    rotated: bool = True
    share: float = 1.0  # of the std of the noise on the sum: what an observer does not know

    renyi_alone: ClassVar[bool] = False  # whether only Renyi divergences are known
    by_clients: ClassVar[bool] = False  # whether clients draw it, or the server

    def lattice(self, z: float) -> Lattice:
        """The grid at this std over the bound, as the observer has it. Raises `ConfigError` for a
        width that does not hold the sum.
        """
        z /= self.share
        room = 4.0**self.bits - SPREAD**2 * self.cohort
        if room <= 0:
            min_bits = math.ceil(math.log2(SPREAD**2 * self.cohort) / 2 + 0.1)
            expected = f"at least {min_bits}, for sums of {self.cohort} clients"
            raise ConfigError("noise.bits", self.bits, expected)
        m = 1 << (self.d.bit_length() - 1) if self.rotated else 1
        variance = self.cohort**2 / m + z * z
        step = max(2 * SPREAD * math.sqrt(variance / room), z / MOST_STD)
        c, root = 1 / step, math.sqrt(self.d)
        square = min((c + root) ** 2, c * c + self.d / 4 + c + root / 2)
        return Lattice(step, int(square), z / step)

    def reaches(self, z: float, times: int = 1) -> bool:
        """Whether a guarantee is known at this std over the bound; `times` is as of `mu`."""
        enough = self.lattice(z).std * self.share >= LEAST_STD
        return enough and math.isfinite(self.mu(2, z, times))

    def _loss(self, moves: int, z: float) -> tuple[float, float]:
        """The squared sensitivity and the noise's variance, in steps, where `moves` clients'
        integers change; above any rounding of the lattice.
        """
        lattice = self.lattice(z)
        square = moves**2 * (lattice.square * (1 + 1e-12) + 1)
        return square, (lattice.std * self.share) ** 2 * (1 - 1e-12)

    def mu(self, moves: int, z: float, times: int = 1) -> float:
        """Sensitivity / std of the Gaussian that this counts as, for up to `times` that
        sensitivity; infinite where there is too little noise.
        """
        square, variance = self._loss(moves, z)
        rest = variance - smoothing(self.d, 2 * times * math.sqrt(square / variance))
        return math.sqrt(square / rest) + SLACK if rest > variance / 4 else math.inf

    def skellam_loss(self, moves: int, z: float) -> SkellamLoss | None:
        """The loss of noise that counts as no Gaussian; None: it counts as one."""
        return None

    def seen(self, share: float) -> IntegerNoise:
        """For an observer of noise of this share of the std: the grid stays that of the run."""
        return replace(self, share=self.share * share)


class DistributedDiscreteGaussian(IntegerNoise):
    """The same where each of n clients draws 1 / sqrt(n) of the std."""

    by_clients = True

    def mu(self, moves: int, z: float, times: int = 1) -> float:
        """See `IntegerNoise.mu`; infinite too where the clients' noise has too few steps."""
        square, variance = self._loss(moves, z)
        max_mu = 2 * times * math.sqrt(square / variance)
        exponent = math.log(20.0 * self.d * self.cohort) + 13 * math.log(10) + max_mu * max_mu / 8
        enough = self.lattice(z).std ** 2 / self.cohort >= exponent / math.pi**2
        return super().mu(moves, z, times) if enough else math.inf


class SkellamNoise(IntegerNoise):
    """The same with Skellam noise."""

    renyi_alone = by_clients = True

    def reaches(self, z: float, times: int = 1) -> bool:
        return True

    def mu(self, moves: int, z: float, times: int = 1) -> float:
        """Sensitivity / std."""
        square, variance = self._loss(moves, z)
        return math.sqrt(square / variance)

    def skellam_loss(self, moves: int, z: float) -> SkellamLoss:
        square, variance = self._loss(moves, z)
        return SkellamLoss(variance, square, self.d)


def smoothing(d: int, mu: float) -> float:
    """r^2, the variance that rounding at random takes in d dimensions, for a mu up to this one: so
    that eta = d ln((1 + theta) / (1 - theta)) is less than e^(-mu^2 / 8) / 1e13, with theta = 2
    sum_(j > 0) exp(-2 pi^2 r^2 j^2), the most by which the sum of exp(-(k - y)^2 / (2 r^2)) over
    the integers k is off sqrt(2 pi) r, as a share (Poisson's summation formula).
    """
    return (math.log(10.0 * d) + 13 * math.log(10) + mu * mu / 8) / (2 * math.pi**2)
