"""Trade-off curves: the false-negative rate that any attack has at a false-positive rate.

An attack decides whether one unit was there. The trade-off curve f of a mechanism is the least
false-negative rate of any attack, at every false-positive rate [1]. From the privacy profiles
delta(P, Q) and delta(Q, P) at epsilon >= 0, of P with the unit and Q without it, that of attacks
whose false positives are under Q is ([1] Proposition 6)

    f(a) = max over epsilon >= 0 of 1 - delta(P, Q) - e^epsilon a,
                                    e^-epsilon (1 - delta(Q, P) - a), and 0.

Upper bounds on the profiles, at any epsilons, make it a lower bound on f. It is exact for a
discrete pair at all its losses, as the maximum is at one of these.

>>> curve = TradeOff.gaussian(1.0)  # N(0, 1) against N(1, 1)
>>> float(curve.true_positives(1e-3).round(4))
0.0183

[1] Dong, Roth, Su. Gaussian differential privacy. JRSS B 2022.
[2] Gomez, Kulynych, Kaissis, du Pin Calmon, Hayes, Balle, Honkela. Gaussian DP for reporting
    differential privacy guarantees in machine learning. SaTML 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.privacy.pld import gaussian_delta
from raydpfl.privacy.search import bisect_brackets

Null = Literal["either", "absent", "present"]
LOW_RATE = 1e-3  # the false-positive rate at which reports state an attack's power
LEAST_RATE = 1e-10  # of errors, from which on a Gaussian is compared with f
_POINTS = 600  # at which a profile is sampled
_TABLE_SIZE = 1 << 22  # numbers of a table that is held at once


@dataclass(frozen=True, eq=False)
class TradeOff:
    """A lower bound on the trade-off curve f, and the privacy profile that it is of."""

    epsilons: np.ndarray  # float64 [n], from 0 on, rising
    # float64 [directions, n], upper bounds on delta there: of the unit there against it not there,
    # and the reverse; or one row, which holds for both
    deltas: np.ndarray
    mu: float | None = None  # where f is exactly that of N(0, 1) against N(mu, 1)

    @classmethod
    def gaussian(cls, mu: float) -> TradeOff:
        """That of N(0, 1) against N(`mu`, 1), of mu >= 0, exact."""
        epsilons = np.linspace(0.0, mu * mu / 2 + 9 * mu, 2000)
        deltas = gaussian_delta(epsilons, mu) if mu else np.zeros_like(epsilons)
        return cls(epsilons, deltas[None], mu)

    @classmethod
    def from_directions(cls, step: float, tails: Sequence[np.ndarray]) -> TradeOff:
        """That of deltas at 0, `step`, 2 `step`, ..., by direction; the last holds beyond it."""
        longest = max(map(len, tails))
        deltas = np.stack([np.pad(tail, (0, longest - len(tail)), mode="edge") for tail in tails])
        return cls(step * np.arange(longest), np.minimum(deltas, 1.0))

    @classmethod
    def from_delta(cls, delta: Callable[[float], float]) -> TradeOff:
        """That of any upper bound on delta of both directions, at epsilons from 0 until it is below
        1e-12, or 1e-6 above what it falls to.
        """
        reach, delta_floor = 1.0, delta(1e4)
        while delta(reach) > max(1e-12, delta_floor * (1 + 1e-6)) and reach < 1e4:
            reach *= 1.5
        epsilons = np.append(0.0, np.geomspace(1e-4, 1.0, _POINTS) * reach)
        return cls(epsilons, np.array([[min(1.0, delta(float(epsilon))) for epsilon in epsilons]]))

    @property
    def profile(self) -> np.ndarray:
        """delta at `epsilons`, the larger of both directions, float64 [n]."""
        return self.deltas.max(axis=0)

    def delta(self, epsilons: ArrayLike) -> np.ndarray:
        """delta at `epsilons` >= 0, float64 [...]: between those known on the chord, linear in
        e^epsilon, which is never below it, as delta is convex in e^epsilon.
        """
        x = np.asarray(epsilons, float)
        if self.mu is not None:
            return gaussian_delta(x, self.mu) if self.mu else np.zeros_like(x)
        place = np.clip(np.searchsorted(self.epsilons, x, side="right"), 1, len(self.epsilons) - 1)
        low, high = self.epsilons[place - 1], self.epsilons[place]
        share = np.exp(np.minimum(x - high, 0)) * -np.expm1(low - x) / -np.expm1(low - high)
        below, above = self.profile[place - 1], self.profile[place]
        return np.where(x >= high, above, below + share * (above - below))

    def false_negatives(self, false_positives: ArrayLike, null: Null = "either") -> np.ndarray:
        """f, float64 [...]: no attack has a lower false-negative rate at these `false_positives`
        [...], from 0 to 1. `null`: whether a false positive takes an `absent` unit for present, or
        a `present` one for absent; `either`: the curve for both, which is convex and its own
        inverse ([1] Proposition 6).
        """
        rates = np.asarray(false_positives, float)
        if self.mu is not None:
            from scipy.special import ndtr, ndtri

            with np.errstate(invalid="ignore"):
                return np.where(rates >= 1, 0.0, ndtr(-ndtri(rates) - self.mu))
        present, absent = self.deltas[0], self.deltas[-1]
        if null == "either":
            present = absent = self.profile
        rise, fall = (absent, present) if null == "present" else (present, absent)
        growth = np.exp(np.minimum(self.epsilons, 700.0))
        flat = rates.ravel()
        best = np.zeros_like(flat)
        for start in range(0, len(flat), size := max(1, _TABLE_SIZE // len(growth))):
            chunk = flat[start : start + size, None]
            lines = np.maximum(1 - rise - growth * chunk, (1 - fall - chunk) / growth)
            best[start : start + size] = lines.max(axis=1).clip(min=0.0)
        return best.reshape(rates.shape)

    def true_positives(self, false_positives: ArrayLike) -> np.ndarray:
        """The largest true-positive rate of any attack, 1 - f; as `false_negatives`."""
        return 1 - self.false_negatives(false_positives)

    def nearest_gaussian(self) -> tuple[float, float]:
        """mu and regret of the nearest Gaussian from below: the smallest mu such that the trade-off
        curve of N(0, 1) against N(mu, 1) is nowhere above f where both error rates are at least
        1e-10 [2]; infinite if there is none. The regret is the smallest r with
        f(a + r) - r <= G_mu(a) for all a. f is linear between its corners and the Gaussian's curve
        convex, so that the corners decide.
        """
        from scipy.special import ndtri

        if self.mu is not None:
            return self.mu, 0.0
        false_positives, false_negatives = self._corners
        corner_mask = (false_positives >= LEAST_RATE) & (false_negatives >= LEAST_RATE)
        first = np.append(false_positives[corner_mask], LEAST_RATE)
        second = np.append(false_negatives[corner_mask], self.false_negatives(LEAST_RATE))
        mu = max(0.0, float((-ndtri(first) - ndtri(second)).max()))
        if math.isinf(mu):
            return mu, 1.0
        order = np.argsort(false_positives, kind="stable")
        low, high = false_positives[order], false_negatives[order]
        corners = np.concatenate([low, high[::-1]]), np.concatenate([high, low[::-1]])
        rates = np.geomspace(LEAST_RATE, 0.5, 400)
        rates = np.append(rates, np.interp(rates, *corners))
        gaussian = TradeOff.gaussian(mu).false_negatives(rates)

        def above(regret: np.ndarray) -> np.ndarray:
            return np.interp(rates + regret, *corners) - regret > gaussian

        return mu, float(bisect_brackets(above, 0 * rates, np.ones_like(rates), times=40).max())

    @cached_property
    def _corners(self) -> tuple[np.ndarray, np.ndarray]:
        """Where lines of neighbouring epsilons meet: false-positive and false-negative rates."""
        delta = np.minimum.accumulate(self.profile)
        drops = -np.diff(delta)
        low, high = self.epsilons[:-1], self.epsilons[1:]
        shrinks = np.exp(-np.minimum(low, 700.0))
        slopes = drops / np.expm1(np.minimum(high - low, 700.0))
        return slopes * shrinks, 1 - delta[:-1] - slopes

    def to_dict(self) -> dict[str, Any]:
        """What reports state, as JSON values."""
        mu, regret = self.nearest_gaussian()
        rates = np.concatenate([np.geomspace(1e-6, 0.1, 21), np.linspace(0.15, 1.0, 18)])
        place = min(int((self.profile > 1e-12).sum()), len(self.epsilons) - 1)
        epsilons = np.linspace(0.0, self.epsilons[place], 41)
        return {
            "epsilon": epsilons.tolist(),
            "delta": self.delta(epsilons).tolist(),
            "false_positive_rate": rates.tolist(),
            "false_negative_rate": self.false_negatives(rates).tolist(),
            "mu": "infinity" if math.isinf(mu) else mu,
            "regret": regret,
            "true_positive_rate": float(self.true_positives(LOW_RATE)),
            "at_false_positive_rate": LOW_RATE,
        }
