"""The bases of accountants and of papers' formulas."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.privacy import laplace
from raydpfl.privacy.mechanism import Event, Mechanism
from raydpfl.privacy.repetition import Repetition
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.types import Relation

Part = tuple[Event, int]  # an event, and how often it is composed
NEEDS = {"pld": "curves", "rdp": "renyi"}  # of a sampling scheme, by the accountants of the package


class Accountant:
    """Base of the accountants. A member gives `name`, and `curve` and `delta_of` for the events
    that it covers, or `epsilons` and `delta` for mechanisms. A rigorous one names in `needs` the
    method of a sampling scheme that it accounts for a secret cohort by (`curves` or `renyi`).
    docs/method.md has an example.
    """

    name: ClassVar[str] = ""  # a user-defined one is named by its import path
    label: ClassVar[str] = ""  # the heading of its column in tables; empty: its name
    rigorous: ClassVar[bool] = True
    needs: ClassVar[str] = ""

    def covers(self, mechanism: Mechanism, relation: Relation) -> str | None:
        """Why it does not cover the mechanism under the relation, and the nearest that is covered,
        in words; None: it covers it.
        """
        sampling = mechanism.sampling
        scheme = sampling.scheme
        mechanism_refusal = mechanism.refuses(relation)
        skellam = mechanism.integer is not None and mechanism.integer.renyi_alone
        if skellam and self.needs != NEEDS["rdp"]:
            mechanism_refusal = f"Skellam noise is not covered by {self.name}; nearest: rdp"
        if mechanism.laplace:
            return mechanism_refusal or laplace.refuses(sampling, relation, self.name, self.needs)
        if mechanism_refusal or sampling.everyone:
            return mechanism_refusal
        scheme_refusal = scheme.refuses(relation)
        needs = "amplified" if skellam else self.needs
        if scheme_refusal or not sampling.hidden or scheme.gives(needs):
            return scheme_refusal
        if skellam:
            return f"{scheme.plural()} are not covered with Skellam noise; nearest: fixed size"
        nearest = [name for name, method in NEEDS.items() if scheme.gives(method)]
        reason = f"{scheme.plural()} are not covered by {self.name}"
        return f"{reason}; nearest: {nearest[0]}" if nearest else reason

    def epsilons(
        self,
        mechanism: Mechanism,
        relation: Relation,
        delta: float,
        first: int,
        last: int,
        v: float,
    ) -> np.ndarray:
        """Epsilon at `delta` after `first`, ..., `last` rounds (at least 1) of a mechanism with
        noise that it covers, float64 [last - first + 1]; `v` as of `Terms`.
        """
        return self.curve(mechanism.event(relation), delta, np.arange(first, last + 1))

    def delta(
        self, mechanism: Mechanism, relation: Relation, epsilon: float, rounds: int, v: float
    ) -> float:
        """Delta at `epsilon` after `rounds` rounds of a mechanism with noise."""
        return self.delta_of(mechanism.event(relation), epsilon, rounds)

    def tradeoff(self, mechanism: Mechanism, relation: Relation, rounds: int, v: float) -> TradeOff:
        """The trade-off curve after `rounds` rounds: a lower bound if it is rigorous."""
        return TradeOff.from_delta(lambda at: self.delta(mechanism, relation, at, rounds, v))

    def tradeoff_of(self, event: Event, count: int) -> TradeOff:
        """The same after `count` events."""
        return TradeOff.from_delta(lambda at: self.delta_of(event, at, count))

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        """Epsilon at `delta` after `counts` int64 [n], consecutive numbers of events, and what is
        released `once`: float64 [n], never below the truth if the accountant is rigorous;
        infinite where delta is out of reach.
        """
        raise NotImplementedError

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        """Delta at `epsilon` after `count` events."""
        raise NotImplementedError

    def together(self, parts: Sequence[Part], delta: float) -> float:
        """Epsilon at `delta` of all `parts`, composed adaptively; here by basic composition."""
        share = delta / len(parts)
        return sum(float(self.curve(event, share, np.array([n]))[0]) for event, n in parts)

    def best_of(self, repetition: Repetition, runs: Sequence[Part], delta: float) -> float:
        """Epsilon at `delta` of a search whose every run is one of `runs`, drawn at random."""

        def epsilon_of(share: float) -> float:
            return max(float(self.curve(event, share, np.array([n]))[0]) for event, n in runs)

        def delta_of(epsilon: float) -> float:
            return max(self.delta_of(event, epsilon, n) for event, n in runs)

        return repetition.epsilon(delta, epsilon_of, delta_of)


@dataclass(frozen=True)
class FormulaValue:
    """What a formula gives, and the conditions of its paper that do not hold, in words."""

    value: float
    conditions_failed: tuple[str, ...] = ()


class Formula(Accountant):
    """Base of the papers' formulas for noise at local steps. These are not guarantees of what ran;
    `raydpfl.privacy.epsilon` is. A member gives `printed` and `noise`.

    `std` (sigma) is that of the noise on the mean gradient of a batch, and `client` has `bound`
    (per-sample clip norm, c or G), `batch` (B), `samples` (n_k) and `steps` (K_i Q or T_k T_l: the
    local steps over all participations).
    """

    rigorous = False
    relation: ClassVar[Literal["replace_one", "unstated"]] = "replace_one"
    calibration: ClassVar[str] = ""  # the `noise.calibration` that calibrates by it

    def covers(self, mechanism: Mechanism, relation: Relation) -> None:
        """None: a formula can always be printed, with the conditions that fail."""

    def has_own_delta(self) -> bool:
        """Whether its epsilon is at a delta of its own, not at the one asked for."""
        return False

    def refused(self, failures: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the failed conditions for which it refuses to calibrate noise."""
        return ()

    def printed(self, std: float, delta: float, **client: Any) -> tuple[FormulaValue, float]:
        """Its epsilon at this noise with the conditions that fail, and the delta that it is at."""
        raise NotImplementedError

    def noise(self, epsilon: float, delta: float, **client: Any) -> FormulaValue:
        """The std at which it claims (epsilon, delta), with conditions that fail; or infinite."""
        raise NotImplementedError

    def claims(self, std: ArrayLike, delta: float, counts: ArrayLike, **client: Any) -> np.ndarray:
        """Its epsilons float64 [n] after `counts` int64 [n] participations of `steps` steps: of one
        client, or of n clients whose `std`, `batch`, `samples` and `steps` are [n].
        """
        bound, batch, samples = (client[name] for name in ("bound", "batch", "samples"))
        columns = np.broadcast_arrays(std, np.multiply(client["steps"], counts), batch, samples)
        return np.array(
            [
                self.printed(z, delta, bound=bound, batch=b, samples=n, steps=times)[0].value
                for z, times, b, n in zip(*(column.tolist() for column in columns), strict=True)
            ]
        )

    def conditions(
        self, epsilon: float, std: float, delta: float, **client: Any
    ) -> tuple[float, tuple[str, ...]]:
        """The delta that its `epsilon` at this noise is at, and the conditions that fail there."""
        claim, claim_delta = self.printed(std, delta, **client)
        return claim_delta, claim.conditions_failed
