"""The calculator's answers: a budget of clients, of one client's samples, or of all clients one by
one.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from raydpfl.privacy import Guarantee, LocalSteps, Mechanism, Relation
from raydpfl.privacy.guarantee import SHARES
from raydpfl.privacy.observers import place_of

Unknown = Literal["epsilon", "noise", "rounds"]
FALSE_ALARMS = 0.05  # at which `Budget.sentence` says what can be detected
_EVENTS = {
    "replace_one": "was replaced by another",
    "add_remove": "took part at all",
    "zero_out": "contributed at all",
}


@dataclass(frozen=True)
class Answer:
    """What one accountant answers against one observer.

    Args:
        guarantee: for that noise and those rounds (for one round if there are none).
        noise_multiplier: std of the noise on the sum / bound, of the mechanism itself, whatever the
            observer sees of it; infinite if no noise is enough.
        rounds: of the run, or, where samples are protected, of the client; 0 if one spends too
            much.
        true_epsilon: for a paper's formula, the epsilon that holds there, at the formula's own
            delta.
    """

    guarantee: Guarantee
    noise_multiplier: float
    rounds: int
    true_epsilon: float | None = None

    @property
    def overclaims(self) -> bool:
        """Whether it is a formula that claims a smaller epsilon than holds."""
        if self.true_epsilon is None:
            return False
        return self.true_epsilon > self.guarantee.epsilon * (1 + 1e-6)


@dataclass(frozen=True)
class Budget:
    """The answers to a question, of every accountant against every observer, and the guarantees of
    one mechanism, where whole clients are protected: that with the noise and rounds of the first
    answer (pld, against the observer who sees least), or that of the config. `epsilon` is None if
    it was the unknown; `steps` are the local steps of a round where samples are protected.
    """

    unknown: Unknown
    mechanism: Mechanism
    relation: Relation
    delta: float
    answers: tuple[Answer, ...]
    guarantees: tuple[Guarantee, ...]
    epsilon: float | None = None
    steps: int = 1
    notes: tuple[str, ...] = ()

    @property
    def of_samples(self) -> bool:
        """Whether samples are protected, by noise at every local step of one client."""
        return self.mechanism.unit == "sample"

    @property
    def repeated(self) -> str:
        """What composes."""
        return "participations" if self.of_samples else "rounds"

    @property
    def rounds(self) -> int:
        """The rounds of the mechanism."""
        return self.mechanism.rounds // self.steps

    @property
    def released(self) -> str:
        """What is released, in words."""
        sampling = self.mechanism.sampling
        if self.of_samples:
            steps = f"{self.mechanism.rounds} local steps ({self.rounds} x {self.steps})"
            return f"{steps}, each a sum over a batch of samples: {sampling}"
        text = f"{self.rounds} rounds, each a sum over a cohort of clients: {sampling}"
        survey = self.mechanism.survey
        return f"{text}; and {survey}" if survey else text

    @property
    def noise(self) -> dict[str, float]:
        """Multiplier, bound, sensitivity of the sum, std of the noise on it, and of one draw."""
        query = self.mechanism.queries[0]
        place = place_of(self.mechanism.placement)
        noise = {
            "noise_multiplier": self.mechanism.noise_multiplier,
            "bound": query.bound,
            "sensitivity": query.bound * (2 if self.relation == "replace_one" else 1),
            "std_of_the_sum": query.std,
        }
        if place.draw:
            noise[f"std_of_{place.draw}"] = query.std / place.draws(self.mechanism.sampling)
        per_client = (other for other in self.mechanism.queries if other.per_client)
        return noise | {f"std_of_the_{other.name}": other.std for other in per_client}

    def sentence(self) -> str:
        """What the first guarantee means: the largest power of a test at 5% false alarms."""
        return meaning(self.guarantees[0])

    def to_dict(self) -> dict[str, Any]:
        """Everything, for strict JSON: an infinite number is the string "infinity"."""
        return {
            "unknown": self.unknown,
            "unit": self.mechanism.unit,
            "sampling": asdict(self.mechanism.sampling),
            self.repeated: self.rounds,
            **({"steps": self.steps} if self.of_samples else {}),
            "relation": self.relation,
            "placement": self.mechanism.placement,
            "delta": self.delta,
            "noise": self.noise,
            "answers": [
                {
                    "noise_multiplier": _to_json(answer.noise_multiplier),
                    self.repeated: answer.rounds,
                    "true_epsilon": _to_json(answer.true_epsilon),
                    "guarantee": answer.guarantee.to_dict(),
                }
                for answer in self.answers
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "sentence": self.sentence(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class PersonalBudget:
    """What noise at local steps guarantees a client's samples: `rows` of
    `LocalStepsReport.table`, the guarantees of the client that spends most, and which clients were
    promised more than holds, in words.
    """

    mechanism: LocalSteps
    rows: tuple[dict[str, Any], ...]
    guarantees: tuple[Guarantee, ...]
    broken: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def released(self) -> str:
        """What is released, in words."""
        mechanism = self.mechanism
        steps = _range(mechanism.client_steps[mechanism.samples > 0], "local steps")
        batch = "all samples"
        if mechanism.batch is not None:
            batch = _range(np.atleast_1d(mechanism.batch), "samples")
        order = "" if mechanism.sampling == "fresh" else ", in shuffled epochs"
        steps += f", in a participation, each on {batch}{order}"
        return f"every update of {len(self.rows)} clients: {steps}"

    @property
    def protected(self) -> list[dict[str, Any]]:
        """The rows of the clients that are not public."""
        return [row for row in self.rows if row["epsilon_claimed"] != math.inf]

    def quantiles(self, column: str) -> list[float | None]:
        """Quantiles of a column of `rows` at `SHARES`, of private clients; None where missing."""
        values = sorted(row[column] for row in self.protected if row[column] is not None)
        if not values:
            return [None for _ in SHARES]
        return [values[max(math.ceil(share * len(values)) - 1, 0)] for share in SHARES]

    def sentence(self) -> str:
        """What the first guarantee means for the client that spends most."""
        return meaning(self.guarantees[0])

    def to_dict(self) -> dict[str, Any]:
        """Everything, for strict JSON: an infinite number is the string "infinity"."""
        mechanism = self.mechanism
        columns = dict.fromkeys(self.rows[0] if self.rows else ())
        for name in ("client", "calibrated_by", "conditions_failed"):
            columns.pop(name, None)
        quantiles = {name: list(map(_to_json, self.quantiles(name))) for name in columns}
        query = mechanism.side_query
        calibration = mechanism.calibration
        return {
            "unit": "sample",
            "relation": "replace_one",
            "placement": "step",
            "calibration": calibration and calibration.method,
            "delta": mechanism.delta,
            "bound": mechanism.bound,
            "steps": _least_and_most(mechanism.client_steps[mechanism.samples > 0]),
            **({f"std_of_the_{query.name}": query.std} if query else {}),
            "quantiles": {"at": list(SHARES), **quantiles},
            "clients": [
                {name: _to_json(value) for name, value in row.items()} for row in self.rows
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "broken": self.broken,
            "sentence": self.sentence(),
            "notes": list(self.notes),
        }


def _least_and_most(counts: np.ndarray) -> int | dict[str, int]:
    """The one count, or where clients differ the least and the most."""
    least, most = int(counts.min()), int(counts.max())
    return least if least == most else {"least": least, "most": most}


def _range(counts: np.ndarray, noun: str) -> str:
    """As `_least_and_most`, in words."""
    least, most = counts.min(), counts.max()
    return f"{least} {noun}" if least == most else f"{least} to {most} {noun}, by the client's size"


def meaning(guarantee: Guarantee) -> str:
    """What an epsilon means: the largest power of any test at a false-alarm rate of 5%."""
    if not math.isfinite(guarantee.epsilon):
        return f"Nothing is guaranteed: {'; '.join(guarantee.conditions_failed)}."
    hidden = guarantee.sampling.secret
    likelier = math.exp(min(guarantee.epsilon, 700.0))
    power = min(
        likelier * FALSE_ALARMS + guarantee.delta,
        1 - (1 - FALSE_ALARMS - guarantee.delta) / likelier,
        1.0,
    )
    event = _EVENTS.get(guarantee.relation, "differed")
    but = f", but not {hidden}," if hidden else ""
    return (
        f"Epsilon {guarantee.epsilon:.4g} at delta {guarantee.delta:g} means: at a false-alarm "
        f"rate of {FALSE_ALARMS:.0%}, an observer of {guarantee.observer}{but} can detect that one "
        f"{guarantee.unit} {event} at most {100 * power:.4g}% of the time; blind guessing detects "
        f"{FALSE_ALARMS:.0%}."
    )


def _to_json(value: Any) -> Any:
    return "infinity" if value == math.inf else value
