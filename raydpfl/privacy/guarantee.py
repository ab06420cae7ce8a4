"""A guarantee: an epsilon, with everything that gives it a meaning (PRIVACY.md sec. 1).

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

A guarantee is made of facts. They become words here alone, and nothing reads the words: what is
read back from a file (`Told`) is words only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydpfl.privacy.types import Unit

if TYPE_CHECKING:
    from raydpfl.privacy.mechanism import Sampling

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # the quantiles over clients that are reported

_RELATIONS = {
    "add_remove": "which may be there or not",
    "zero_out": "whose contribution may be zero instead",
    "replace_one": "which may be replaced by another",
    "unstated": "whose data differ (by removal or by replacement: the paper leaves it open)",
}
DECLARED = "(tested, not proved)"  # ends an exclusion: what a user-defined class declares
KINDS = {"paper": "the formula as printed", "rigorous": "rigorous", "unproven": "not proved"}


class Observer(StrEnum):
    """Against whom a guarantee holds: what the observer sees, besides what is public."""

    AGGREGATES = "every aggregate"
    UPDATES = "every single update"


@dataclass(frozen=True)
class Participations:
    """What a client spends against an observer who knows the cohorts.

    Args:
        most: the largest number of times that any client was drawn.
        gaussians: how many Gaussians that composes.
        rounds: out of how many rounds; None where only a client's own rounds are counted.
        repeats: whether a client may be drawn several times in a round.
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
    """What a guarantee relies on in the sampling: its law, its secret, and what composes.

    Scopes are equal if they say the same.
    """

    @property
    def secret(self) -> str:
        """What the observer does not know, in words; empty if it knows all."""
        return ""

    @property
    def knows(self) -> str:
        """The same in two words, for a table: "cohort hidden", "cohort known", "batch hidden"."""
        return ""

    @property
    def participations(self) -> Participations | None:
        """What a client spends against an observer who knows the cohorts; None for other
        observers.
        """
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scope) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, eq=False)
class Cohorts(Scope):
    """Cohorts of clients drawn by `law`; with `known`, against an observer who knows them. What is
    released `besides` the rounds, in words, is counted too.
    """

    law: Sampling
    known: Participations | None = None
    besides: str = ""

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
        parts = [str(self.law), self.knows, str(self.known or ""), self.besides]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, eq=False)
class Batches(Scope):
    """One client's batches of samples, drawn by `law` at each local step."""

    law: Sampling

    @property
    def hidden(self) -> bool:
        """Whether the samples of a batch are a secret."""
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

    Args:
        client: its id.
        batch: samples in a batch.
        samples: that it has.
        hidden: whether a batch is a secret subset. Else it is all samples, or shuffled epochs.
        gaussians: how many Gaussians are composed over the run.
        steps: local steps over the run.
        times: participations.
        besides: what each participation releases in addition; empty: nothing.
        spread: quantiles of the clients' epsilons, at `SHARES`.
        among: how many clients took part.
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
    """No protected client took part; `public`: public clients did."""

    public: bool

    def __str__(self) -> str:
        return "public clients alone took part" if self.public else "no client took part"


@dataclass(frozen=True, eq=False)
class Told(Scope):
    """A scope read back from a file, as it is worded there; `known` is what it `knows`."""

    words: str
    known: str = ""

    @property
    def knows(self) -> str:
        return self.known

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one unit under one relation, against one observer, by one accountant.

    Args:
        kind: `rigorous`, what holds for the mechanism that ran; `paper`, the formula as printed;
            `unproven`, computed like a rigorous one, where no proof is known.
        accountant: its name.
        unit: whose data are protected, a client's or a sample.
        relation: the neighbouring relation; `unstated` where a paper leaves it open.
        observer: what the adversary sees.
        sampling: what the guarantee relies on in the sampling.
        epsilon: infinite where nothing is guaranteed; `conditions_failed` then says why.
        delta: that epsilon is at.
        exclusions: what is not accounted for, in words.
        conditions_failed: conditions of the accountant that do not hold, in words.
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

    @property
    def formula(self) -> bool:
        """Whether it is what a paper's formula gives, be it true or not."""
        return self.kind == "paper"

    @property
    def declared(self) -> tuple[str, ...]:
        """The exclusions by which the guarantee relies on what user-defined classes declare."""
        return tuple(words for words in self.exclusions if words.endswith(DECLARED))

    def brief(self) -> Guarantee:
        """The same with those exclusions alone."""
        return replace(self, exclusions=self.declared)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Guarantee:
        """The guarantee that `to_dict` wrote, with its sampling in words only."""
        read = dict(values)
        read["observer"] = Observer(values["observer"])
        read["sampling"] = Told(values["sampling"], read.pop("knows", ""))
        read["epsilon"] = float(values["epsilon"])
        for name in ("exclusions", "conditions_failed"):
            read[name] = tuple(values[name])
        return cls(**read)

    @property
    def meaning(self) -> tuple:
        """What two guarantees must have in common for their epsilons to be comparable."""
        # where samples are protected, the scope names the client that is worst by this accountant
        clients = self.sampling if self.unit == "client" else None
        return (self.kind, self.unit, self.relation, self.observer, clients, self.delta)

    def leaving_out(self, what: str, whose: str) -> Guarantee:
        """The same as a number that nothing proves, as it leaves out `what`, in words; its
        accountant is named as that `of the` clients it counts.
        """
        return replace(
            self,
            kind="unproven" if self.kind == "rigorous" else self.kind,
            accountant=f"{self.accountant} of the {whose}",
            exclusions=(*self.exclusions, what),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields for JSON: facts in words, tuples as lists, and an infinite epsilon as the
        string "infinity", which `float` reads back.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["observer"] = self.observer.value
        values["sampling"] = str(self.sampling)
        values["knows"] = self.sampling.knows
        values["exclusions"] = list(self.exclusions)
        values["conditions_failed"] = list(self.conditions_failed)
        if math.isinf(self.epsilon):
            values["epsilon"] = "infinity"
        return values

    def about(self) -> str:
        """Delta, the unit and the relation, in words."""
        return f"at delta {self.delta:g} {self._protects()}"

    def _protects(self) -> str:
        return f"for one {self.unit}, {_RELATIONS[self.relation]}"

    def sentence(self) -> str:
        """The whole guarantee in plain English; nothing is left out."""
        text = f"No privacy is shown (epsilon infinite) {self._protects()}, "
        if math.isfinite(self.epsilon):
            text = f"epsilon {self.epsilon:.4g} {self.about()}, "
        text += f"against whoever sees {self.observer} ({self.sampling}): "
        text += f"{KINDS[self.kind]}, by {self.accountant}."
        if self.exclusions:
            text += f" Not accounted for: {'; '.join(self.exclusions)}."
        if self.conditions_failed:
            text += f" Conditions that fail: {'; '.join(self.conditions_failed)}."
        return text


def quantiles(epsilons: np.ndarray) -> np.ndarray:
    """Quantiles at `SHARES` of epsilons float64 [n >= 1]: float64 [5], each one of the epsilons."""
    return np.quantile(epsilons, SHARES, method="inverted_cdf")


def column(accountant: str) -> str:
    """The name that tables give to an accountant's epsilon.

    >>> column("Chen 2024 tCDP")
    'epsilon_chen_2024_tcdp'
    >>> column("mine.gdp:Exact")
    'epsilon_mine_gdp_exact'
    """
    return "epsilon_" + re.sub("[^a-z0-9_]", "_", accountant.lower())


def holding(guarantees: Sequence[Guarantee]) -> list[Guarantee]:
    """The guarantees that hold: where several accountants make the same claim, the one with the
    smallest epsilon, since each of them is valid.

    Papers' formulas, guarantees without a proof and infinite epsilons are left out.
    """
    alike: dict[tuple, list[Guarantee]] = {}
    for one in guarantees:
        if one.kind == "rigorous":
            alike.setdefault(one.meaning, []).append(one)
    least = [min(ones, key=lambda one: one.epsilon) for ones in alike.values()]
    return [one for one in least if math.isfinite(one.epsilon)]


def sentences(guarantees: Sequence[Guarantee]) -> list[str]:
    """Every guarantee in plain English; the smallest of several accountants is marked as the one
    that holds.
    """
    least = holding(guarantees)
    found = []
    for one in guarantees:
        alike = [
            other.accountant
            for other in guarantees
            if not other.formula and other.meaning == one.meaning
        ]
        text = one.sentence()
        if len(alike) > 1 and one in least:
            text += f" This holds, the smallest by {' and '.join(alike)}."
        found.append(text)
    return found


def in_words(guarantees: Sequence[Guarantee]) -> list[str]:
    """As `sentences`; what is not accounted for is listed once for all, at the end, but for
    what a guarantee takes from user-defined classes.
    """
    found = sentences([one.brief() for one in guarantees])
    excluded = dict.fromkeys(
        words for one in guarantees for words in one.exclusions if words not in one.declared
    )
    return found + [f"Not accounted for: {each}." for each in excluded]


def loose(delta: float, size: int, unit: str) -> str | None:
    """Why `delta` is too large where `size` units are protected, in words; None: it is not.

    >>> loose(1e-2, 600, "sample")
    "delta 0.01 is above 1/600: it would allow some sample's data to be published outright"
    """
    if delta * size <= 1:
        return None
    allows = f"it would allow some {unit}'s data to be published outright"
    return f"delta {delta:g} is above 1/{size}: {allows}"
