"""The computation: what every accountant answers where noise, epsilon or rounds are unknown."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.privacy import Guarantee, Mechanism, Relation
from raydpfl.privacy.accountants import FORMULAS, Formula
from raydpfl.privacy.calculator.answer import Answer, Budget, Unknown
from raydpfl.privacy.observers import ObserverView, place_of, views
from raydpfl.privacy.paper_formulas import FormulaValue

MOST_ROUNDS = 1 << 20  # where `privacy.rounds_for` stops looking
LARGE = 1e12  # a noise multiplier next to which the sums of rounds show nothing
_COUNTS = range(1, MOST_ROUNDS + 1)
RIGOROUS = ("pld", "rdp")


@dataclass(frozen=True)
class Question:
    """What is asked about a mechanism, in which a 1 stands for the noise or the rounds if they are
    unknown. `participations` is the largest number of rounds of any client, None if unknown.
    """

    mechanism: Mechanism
    relation: Relation
    delta: float
    unknown: Unknown
    epsilon: float | None
    steps: int = 1
    participations: int | None = None
    v: float = 4.0

    def budget(self, mechanism: Mechanism | None = None) -> Budget:
        """The answers, with the guarantees of `mechanism`; None: of that of the first answer."""
        answers = self.answers()
        first = answers[0]
        if first.rounds == 0:
            expected = f"at least {first.guarantee.epsilon:.4g}, which one round spends; "
            raise ConfigError("epsilon", self.epsilon, f"{expected}or more noise")
        mechanism = mechanism or self.at(first.noise_multiplier, first.rounds)
        held = answers
        if self.unknown != "epsilon":
            held = replace(self, mechanism=mechanism, unknown="epsilon").answers()
        return Budget(
            unknown=self.unknown,
            mechanism=mechanism,
            relation=self.relation,
            delta=self.delta,
            answers=tuple(answers),
            guarantees=tuple(answer.guarantee for answer in held),
            epsilon=self.epsilon,
            steps=self.steps,
            notes=tuple(_notes(mechanism, self.delta)),
        )

    def answers(self) -> list[Answer]:
        """By the rigorous accountants, against every observer, and by the papers' formulas."""
        return [*(epsilon for name in RIGOROUS for epsilon in self.counted(name)), *self.printed()]

    @property
    def rounds(self) -> int:
        """The rounds asked for; 1 if they are unknown."""
        return self.mechanism.rounds // self.steps

    @property
    def target(self) -> float:
        """The epsilon asked for."""
        assert self.epsilon is not None
        return self.epsilon

    def at(self, z: float, rounds: int) -> Mechanism:
        """The mechanism with this noise multiplier, for so many rounds."""
        return replace(self.mechanism.with_noise(z), rounds=rounds * self.steps)

    def seen(self, rounds: int) -> list[ObserverView]:
        """What observers see in so many rounds."""
        return list(views(self.mechanism, self.relation, rounds * self.steps, self.participations))

    def guarantees(self, name: str, z: float, rounds: int, delta: float) -> list[Guarantee]:
        """An accountant's guarantees for this noise and these rounds (1 for 0), by observer."""
        mechanism = self.at(z, max(rounds, 1))
        most = self.participations
        return privacy.guarantees(mechanism, self.relation, delta, None, [name], most, self.v)

    def counted(self, name: str) -> Iterator[Answer]:
        """By a rigorous accountant, one answer against every observer."""
        for place, view in enumerate(self.seen(self.rounds)):
            z = self.mechanism.noise_multiplier
            rounds = self.rounds
            if not privacy.covers(name, view.mechanism, view.relation):
                if self.unknown == "rounds":
                    rounds = self.lasting(name, place, view)
                elif self.unknown == "noise":
                    z *= self._scale(name, view)
            guarantee = self.guarantees(name, min(z, LARGE), rounds, self.delta)[place]
            yield Answer(guarantee, z, rounds)

    def _scale(self, name: str, view: ObserverView) -> float:
        """The factor on the noise multiplier that an accountant asks for against an observer, who
        sees a fixed multiple of the mechanism's own noise; infinite where a survey alone spends
        more against it, or no proof is known.
        """
        seen = view.mechanism
        try:
            z = privacy.noise_for(self.target, seen, view.relation, self.delta, name, view.rounds)
        except ConfigError as refusal:
            if refusal.field != "target" or not (seen.survey or seen.unproved):
                raise
            return math.inf
        return z / seen.noise_multiplier

    def lasting(self, name: str, place: int, view: ObserverView) -> int:
        """The largest number of rounds in which the observer at this place stays within epsilon."""
        spent = (self.target, view.mechanism, view.relation, self.delta, name, self.v)
        most = privacy.rounds_for(*spent)
        return bisect_right(_COUNTS, most, key=lambda t: self.seen(t)[place].rounds)

    def printed(self) -> Iterator[Answer]:
        """By the formula of 000 and 001, which is about the first observer only."""
        name = "paper"
        view = self.seen(self.rounds)[0]
        z = self.mechanism.noise_multiplier
        rounds = self.rounds
        if self.unknown == "rounds":
            rounds = self.lasting(name, 0, view)
        elif self.unknown == "noise":
            sampling = view.mechanism.sampling
            z = privacy.paper_multiplier(self.target, sampling, view.rounds, self.delta, self.v)
        guarantee = self.guarantees(name, z, rounds, self.delta)[0]
        yield Answer(guarantee, z, rounds, self.truth(z, rounds, self.delta))

    def truth(self, z: float, rounds: int, delta: float) -> float:
        """Epsilon by pld, or by rdp where `delta` is too small for pld to tell."""
        if not 0 < delta < 1:
            return math.inf
        spent = (self.guarantees(name, z, rounds, delta)[0].epsilon for name in RIGOROUS)
        return next((epsilon for epsilon in spent if math.isfinite(epsilon)), math.inf)


class SampleQuestion(Question):
    """The same about one client's local steps, `steps` of them in a participation."""

    def printed(self) -> Iterator[Answer]:
        """By the papers' formulas for local steps."""
        yield from map(self._by, FORMULAS.values())

    def _by(self, formula: Formula) -> Answer:
        batches = self.mechanism.sampling
        fits = batches.cohort <= batches.population  # draws with replacement may be more
        query = self.mechanism.queries[0]
        std = query.std / batches.cohort
        rounds = self.rounds
        epsilon, delta = math.inf, self.delta
        if not fits:
            std = math.inf if self.unknown == "noise" else std
            rounds = 0 if self.unknown == "rounds" else rounds
            samples = f"from at least as many samples (here: {batches.population})"
            failed: tuple[str, ...] = (f"a batch of {batches.cohort} {samples}",)
        elif self.unknown == "noise":
            noise = formula.noise(self.target, self.delta, **self._arguments(rounds))
            std, failed = noise.value, noise.conditions_failed
            if math.isfinite(std):
                epsilon = self.target
                delta = self._value(formula, std, rounds)[1]
        else:
            if self.unknown == "rounds":
                rounds = bisect_right(
                    _COUNTS, self.target, key=lambda t: self._value(formula, std, t)[0].value
                )
            value, delta = self._value(formula, std, rounds)
            epsilon, failed = value.value, value.conditions_failed
        z = batches.cohort * std / query.bound
        truth = self.truth(z, rounds, delta) if fits and math.isfinite(std) else None
        if not batches.scheme.as_in_the_papers(batches):
            failed += (f"batches of one fixed size, drawn without replacement (here: {batches})",)
        if delta != self.delta:
            alone = f"the formula gives its epsilon at delta {delta:.3g} alone"
            failed += (f"delta = {self.delta:g} ({alone})",)
        (view,) = self.seen(1)
        guarantee = view.guarantee(formula.name, epsilon, delta, failed)
        guarantee = replace(guarantee, kind="paper", relation=formula.relation)
        return Answer(guarantee, z, rounds, truth)

    def _value(self, formula: Formula, std: float, rounds: int) -> tuple[FormulaValue, float]:
        return formula.printed(std, self.delta, **self._arguments(max(rounds, 1)))

    def _arguments(self, rounds: int) -> dict[str, Any]:
        """What the papers' formulas read of the client."""
        batches = self.mechanism.sampling
        return {
            "bound": self.mechanism.queries[0].bound,
            "batch": batches.cohort,
            "samples": batches.population,
            "steps": rounds * self.steps,
        }


def _notes(mechanism: Mechanism, delta: float) -> Iterator[str]:
    loose = privacy.loose(delta, mechanism.sampling.population, mechanism.unit)
    if loose:
        yield loose
    if place_of(mechanism.placement).caveat:
        yield place_of(mechanism.placement).caveat
    yield from (f"not accounted for: {exclusion}" for exclusion in mechanism.exclusions)
