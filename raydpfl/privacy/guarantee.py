"""A guarantee: an epsilon together with everything without which it means nothing.

>>> from raydpfl.privacy.mechanism import Sampling
>>> seen = Cohorts(Sampling("fixed", population=1920, cohort=80))
>>> guarantee = Guarantee(
...     "rigorous", "pld", "client", "replace_one", Observer.AGGREGATES, seen, 1.5, delta=1e-5)
>>> print(guarantee.sentence())  # doctest: +NORMALIZE_WHITESPACE
epsilon 1.5 at delta 1e-05 for one client, which may be replaced by another,
against whoever sees every aggregate (fixed size 80 of 1920, cohort hidden): rigorous, by pld.
>>> guarantee.sampling.secret
'who was in the cohorts'
>>> guarantee < guarantee  # numbers of different kinds are never compared or added
Traceback (most recent call last):
TypeError: '<' not supported between instances of 'Guarantee' and 'Guarantee'

A guarantee is made of facts. This module is the one place where they become words, and nothing
reads the words: what is read back from a file (`Told`) has words alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydpfl.privacy.facts import Unit

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Sampling

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # at which quantiles over clients are reported

_RELATIONS = {
    "add_remove": "which may be there or not",
    "zero_out": "whose contribution may be zero instead",
    "replace_one": "which may be replaced by another",
    "unstated": "whose data differ (by removal or by replacement: the paper leaves it open)",
}
_KINDS = {"paper": "the formula as printed", "rigorous": "rigorous", "unproven": "not proved"}


class Observer(StrEnum):
    """Against whom: all that it sees, besides what is public."""

    AGGREGATES = "every aggregate"
    UPDATES = "every single update"


@dataclass(frozen=True)
class Participations:
    """What a client spends against one who knows the cohorts.

    `most`: how often any client was drawn, at most. `gaussians`: how many Gaussians these compose.
    `rounds`: out of how many rounds; None where only a client's own rounds are counted. `repeats`:
    whether a client may be drawn several times in a round.
    """

    most: int
    gaussians: int
    rounds: int | None = None
    repeats: bool = False

    def __str__(self) -> str:
        if self.repeats:
            return f"a client drawn at most {self.most} times"
        of = "" if self.rounds is None else f" of {self.rounds}"
        return f"a client in at most {self.most}{of} rounds"


class Scope:
    """What of the sampling a guarantee counts on: which law, what of it is a secret, what composes.

    Two of them are equal where they say the same.
    """

    @property
    def secret(self) -> str:
        """What the observer does not know, in words; empty where it knows all."""
        return ""

    @property
    def knows(self) -> str:
        """The same in two words, for a table: "cohort hidden", "cohort known", "batch hidden"."""
        return ""

    @property
    def participations(self) -> Participations | None:
        """What a client spends against one who knows the cohorts; None where that is not asked."""
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, eq=False)
class Cohorts(Scope):
    """Cohorts of clients drawn by `law`; with `known`, against one who knows them."""

    law: Sampling
    known: Participations | None = None

    @property
    def participations(self) -> Participations | None:
        return self.known

    @property
    def hidden(self) -> bool:
        """Whether the cohort is a secret."""
        return self.law.hidden and self.known is None

    @property
    def secret(self) -> str:
        return "who was in the cohorts" if self.hidden else ""

    @property
    def knows(self) -> str:
        if self.hidden:
            return "cohort hidden"
        return "cohort known" if self.known else ""

    def __str__(self) -> str:
        parts = [str(self.law), self.knows, str(self.known or "")]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, eq=False)
class Batches(Scope):
    """One client's batches of samples, drawn by `law` at each local step."""

    law: Sampling

    @property
    def hidden(self) -> bool:
        """Whether who is in a batch is a secret."""
        return self.law.hidden

    @property
    def secret(self) -> str:
        return "which samples were in the batches" if self.hidden else ""

    @property
    def knows(self) -> str:
        return "batch hidden" if self.hidden else ""

    def __str__(self) -> str:
        return ", ".join(part for part in (f"batches: {self.law}", self.knows) if part)


@dataclass(frozen=True, eq=False)
class OneClient(Scope):
    """The batches of the client that has spent most.

    `batch` of its `samples`, a secret subset where `hidden`, else all of them or shuffled epochs of
    `gaussians` Gaussians in all; `steps` local steps in `times` participations. `besides`: what is
    released in each participation in addition; empty for nothing. `spread`: the epsilons at
    `SHARES` of the `among` clients that took part.
    """

    client: int
    batch: int
    samples: int
    hidden: bool
    gaussians: int
    steps: int
    times: int
    besides: str = ""
    spread: tuple[float, ...] = ()
    among: int = 1

    @property
    def secret(self) -> str:
        return "which samples were in the batches" if self.hidden else ""

    @property
    def knows(self) -> str:
        return "batch hidden" if self.hidden else ""

    def __str__(self) -> str:
        text = f"batches: {self._batches()}; client {self.client}, {self.steps} steps in "
        text += f"{self.times} participations"
        if self.besides:
            text += f", the {self.besides} released at each"
        if self.among > 1:
            values = ", ".join(f"{value:.4g}" for value in self.spread)
            text += f", the worst of {self.among} whose epsilons have quartiles {values}"
        return text

    def _batches(self) -> str:
        if self.hidden:
            return f"fixed size {self.batch} of {self.samples}, batch hidden"
        if self.batch == self.samples:
            return f"all {self.samples}"
        order = f"{self.batch} of {self.samples} in shuffled epochs, order known"
        return f"{order}, {self.gaussians} Gaussians without amplification"


@dataclass(frozen=True, eq=False)
class Nobody(Scope):
    """No client took part that noise protects; `public`: public clients did."""

    public: bool

    def __str__(self) -> str:
        return "public clients alone took part" if self.public else "no client took part"


@dataclass(frozen=True, eq=False)
class Told(Scope):
    """What a file says of it."""

    words: str

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one unit under one relation, against one observer, by one accountant
    (PRIVACY.md sec. 1).

    `kind`: `paper`, the formula as printed; `rigorous`, what holds for the mechanism that ran; or
    `unproven`, computed as if it were rigorous for a mechanism for which no proof is known.
    `sampling`: what of the sampling it counts on. `epsilon` is infinite when nothing is guaranteed;
    `conditions_failed` then says why. `exclusions` lists in words what is not accounted for.
    """

    kind: Literal["paper", "rigorous", "unproven"]
    accountant: str
    unit: Unit
    relation: Literal["add_remove", "zero_out", "replace_one", "unstated"]
    observer: Observer
    sampling: Scope
    epsilon: float
    delta: float
    exclusions: tuple[str, ...] = ()
    conditions_failed: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Guarantee:
        """The guarantee that `to_dict` wrote; of its sampling only the words."""
        read = dict(values)
        read["observer"] = Observer(values["observer"])
        read["sampling"] = Told(values["sampling"])
        read["epsilon"] = float(values["epsilon"])
        for name in ("exclusions", "conditions_failed"):
            read[name] = tuple(values[name])
        return cls(**read)

    @property
    def meaning(self) -> tuple:
        """What two guarantees must have in common for their epsilons to be comparable."""
        # of samples it names the worst client, by this accountant
        clients = self.sampling if self.unit == "client" else None
        return (self.kind, self.unit, self.relation, self.observer, clients, self.delta)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them: facts as their words, tuples as lists, an infinite
        epsilon as the string "infinity" (`float` reads it back).
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["observer"] = self.observer.value
        values["sampling"] = str(self.sampling)
        values["exclusions"] = list(self.exclusions)
        values["conditions_failed"] = list(self.conditions_failed)
        if math.isinf(self.epsilon):
            values["epsilon"] = "infinity"
        return values

    def sentence(self) -> str:
        """The whole guarantee in plain English, no part left out."""
        text = "No privacy is shown (epsilon infinite)"
        if math.isfinite(self.epsilon):
            text = f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"
        text += f" for one {self.unit}, {_RELATIONS[self.relation]}, "
        text += f"against whoever sees {self.observer} ({self.sampling}): "
        text += f"{_KINDS[self.kind]}, by {self.accountant}."
        if self.exclusions:
            text += f" Not accounted for: {'; '.join(self.exclusions)}."
        if self.conditions_failed:
            text += f" Conditions that fail: {'; '.join(self.conditions_failed)}."
        return text


def quantiles(epsilons: np.ndarray) -> np.ndarray:
    """Of epsilons float64 [n >= 1], those at `SHARES`, float64 [5]; each is one of them."""
    return np.quantile(epsilons, SHARES, method="inverted_cdf")


def column(accountant: str) -> str:
    """The name that tables give to an accountant's epsilon.

    >>> column("paper 002 tCDP")
    'epsilon_paper_002_tcdp'
    """
    return f"epsilon_{accountant.lower().replace(' ', '_')}"


def holding(guarantees: Sequence[Guarantee]) -> list[Guarantee]:
    """Of the guarantees that say the same by several accountants, the one with the smallest
    epsilon.

    Each of them is valid, so the smallest is what holds. Those of the papers' formulas and without
    a proof are left out, and what is infinite.
    """
    alike: dict[tuple, list[Guarantee]] = {}
    for one in guarantees:
        if one.kind == "rigorous":
            alike.setdefault(one.meaning, []).append(one)
    least = [min(ones, key=lambda one: one.epsilon) for ones in alike.values()]
    return [one for one in least if math.isfinite(one.epsilon)]


def sentences(guarantees: Sequence[Guarantee]) -> list[str]:
    """Every guarantee in plain English; where several accountants say the same, the smallest is
    said to be what holds.
    """
    least = holding(guarantees)
    found = []
    for one in guarantees:
        alike = [
            other.accountant
            for other in guarantees
            if other.kind != "paper" and other.meaning == one.meaning
        ]
        text = one.sentence()
        if len(alike) > 1 and one in least:
            text += f" This holds, the smallest by {' and '.join(alike)}."
        found.append(text)
    return found


def loose(delta: float, size: int, unit: str) -> str | None:
    """What is wrong with `delta` where `size` units are protected, in words; None: nothing.

    >>> loose(1e-2, 600, "sample")
    "delta 0.01 is above 1/600: it would allow some sample's data to be published outright"
    """
    if delta * size <= 1:
        return None
    allows = f"it would allow some {unit}'s data to be published outright"
    return f"delta {delta:g} is above 1/{size}: {allows}"
