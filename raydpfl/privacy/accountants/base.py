"""What an accountant answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

if TYPE_CHECKING:
    from raydpfl.privacy.facts import Relation, Unit
    from raydpfl.privacy.mechanism import Event, Mechanism
    from raydpfl.privacy.paper import Printed


class Accountant:
    """Base of the accountants. A member gives `curve` and `delta_of` an event that it covers, or,
    where it is a formula of another form, `epsilons` and `delta` of a mechanism.

    A rigorous member names in `needs` the method of a sampling law (`Law.losses` or `Law.renyi`)
    that it accounts a secret by.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""  # what tables head its column; empty: its name
    rigorous: ClassVar[bool] = True
    needs: ClassVar[str] = ""

    def of(self, unit: Unit) -> tuple[str, ...]:
        """The accountants that stand for it where such a unit is protected."""
        return (self.name,)

    def covers(self, mechanism: Mechanism, relation: Relation) -> str | None:
        """None if it covers the mechanism under the relation, else the reason and the nearest
        combination that it does cover.
        """
        sampling = mechanism.sampling
        law = sampling.law
        impossible = mechanism.place.refuses(sampling, relation)
        if impossible or sampling.everyone:
            return impossible
        refused = law.refuses(relation)
        if refused or not sampling.hidden or law.gives(self.needs):
            return refused
        others = [each for each in self.members() if each.needs and law.gives(each.needs)]
        nearest = f"; nearest: {others[0].name}" if others else ""
        return f"{law.plural()} are not covered by {self.name}{nearest}"

    @classmethod
    def members(cls) -> list[Accountant]:
        """All accountants there are."""
        from raydpfl.privacy.accountants import ACCOUNTANTS

        return list(ACCOUNTANTS.values())

    def epsilons(
        self,
        mechanism: Mechanism,
        relation: Relation,
        delta: float,
        first: int,
        last: int,
        v: float,
    ) -> np.ndarray:
        """Epsilon at `delta` after `first`, ..., `last` rounds of a mechanism with noise, float64
        [last - first + 1].

        `v` is the constant that the formula of 000 and 001 leaves open.
        """
        return self.curve(mechanism.event(relation), delta, np.arange(first, last + 1))

    def delta(
        self, mechanism: Mechanism, relation: Relation, epsilon: float, rounds: int, v: float
    ) -> float:
        """Delta at `epsilon` after `rounds` rounds of a mechanism with noise."""
        return self.delta_of(mechanism.event(relation), epsilon, rounds)

    def curve(self, event: Event, delta: float, counts: np.ndarray) -> np.ndarray:
        """Epsilon at `delta` after `counts` events (int64, consecutive), float64 [counts]."""
        raise NotImplementedError

    def delta_of(self, event: Event, epsilon: float, count: int) -> float:
        """Delta at `epsilon` after `count` events."""
        raise NotImplementedError


class Formula(Accountant):
    """A paper's formula for noise at local steps. `std` is that of the noise on the mean gradient
    of a batch.

    `client` has `bound` (per-sample clip norm), `batch`, `samples` and `steps` (local steps over
    all participations).
    """

    rigorous = False
    relation: ClassVar[Literal["replace_one", "unstated"]] = "replace_one"
    calibration: ClassVar[str] = ""  # the `noise.calibration` that calibrates by it

    def covers(self, mechanism: Mechanism, relation: Relation) -> None:
        """A formula can always be printed; the conditions that fail are listed beside it."""

    def own_delta(self) -> bool:
        """Whether its epsilon is at a delta of its own."""
        return False

    def refused(self, failed: tuple[str, ...]) -> tuple[str, ...]:
        """Of the conditions that fail, those without which it does not calibrate noise."""
        return ()

    def printed(self, std: float, delta: float, **client: Any) -> tuple[Printed, float]:
        """(epsilon, with the conditions that fail; the delta that it is at)."""
        raise NotImplementedError

    def noise(self, epsilon: float, delta: float, **client: Any) -> Printed:
        """The std at which it claims (epsilon, delta), with the conditions that fail."""
        raise NotImplementedError

    def claims(self, std: float, delta: float, counts: np.ndarray, **client: Any) -> np.ndarray:
        """Its epsilons after `counts` participations of `client["steps"]` steps each, float64
        [counts].
        """
        steps = client.pop("steps")
        return np.array(
            [
                self.printed(std, delta, steps=steps * count, **client)[0].value
                for count in counts.tolist()
            ]
        )

    def conditions(
        self, epsilon: float, std: float, delta: float, **client: Any
    ) -> tuple[float, tuple[str, ...]]:
        """(the delta that its epsilon is at, the conditions that fail)."""
        printed, at = self.printed(std, delta, **client)
        return at, printed.conditions_failed
