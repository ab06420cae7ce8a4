"""A guarantee: an epsilon, with everything that gives it a meaning (PRIVACY.md sec. 1). Numbers of
different kinds are never compared or added, so guarantees have no order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal

from raydpfl.privacy.sampling import Participations, Sampling
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.types import Unit

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # the quantiles over clients that are reported

_RELATIONS = {
    "add_remove": "which may be there or not",
    "zero_out": "whose contribution may be zero instead",
    "replace_one": "which may be replaced by another",
    "unstated": "whose data differ (by removal or by replacement: the paper leaves it open)",
}
HIDDEN_COHORT = "cohort hidden"
HIDDEN_BATCH = "batch hidden"
_SECRETS = {
    HIDDEN_COHORT: "who was in the cohorts",
    HIDDEN_BATCH: "which samples were in the batches",
}
_EVENTS = {
    "replace_one": "was replaced by another",
    "add_remove": "took part at all",
    "zero_out": "contributed at all",
}
FALSE_ALARMS = 0.05  # at which `Guarantee.detection` says what can be detected
GROUP = "by group privacy"  # in the scope of a person's guarantee that is not the person's own
DECLARED_SUFFIX = "(tested, not proved)"  # ends an exclusion: what a user-defined class declares
KINDS = {"paper": "the formula as printed", "rigorous": "rigorous", "unproven": "not proved"}


class Observer(StrEnum):
    """Against whom a guarantee holds: what the observer sees next to what is public."""

    AGGREGATES = "every aggregate"
    UPDATES = "every single update"
    # whether some of the clients took part, and which noise they drew
    COLLUDERS = "every aggregate and what colluders know"


@dataclass(frozen=True)
class Scope:
    """What a guarantee relies on in the sampling. Scopes are equal if they say the same."""

    words: str  # the sampling scheme, what is hidden, and what composes
    knows: str = field(default="", compare=False)  # `HIDDEN_COHORT`, "cohort known", `HIDDEN_BATCH`
    # what a client spends against an observer who knows the cohorts
    participations: Participations | None = field(default=None, compare=False)
    # that has spent most, where clients are accounted for one by one
    client: int | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.words

    def add_words(self, words: str) -> Scope:
        """The same that also relies on something else, in words."""
        return replace(self, words=f"{self.words}, {words}") if words else self

    @classmethod
    def from_cohorts(
        cls, sampling: Sampling, participations: Participations | None = None, extras: str = ""
    ) -> Scope:
        """Cohorts of clients; with `participations`, against an observer who knows them.
        `extras` are released next to the rounds, in words.
        """
        hidden_words = HIDDEN_COHORT if sampling.hidden else ""
        knows = "cohort known" if participations else hidden_words
        parts = (str(sampling), knows, str(participations or ""), extras)
        return cls(", ".join(filter(None, parts)), knows, participations)

    @classmethod
    def from_batches(cls, sampling: Sampling) -> Scope:
        """One client's batches of samples at every local step."""
        if not sampling.hidden:
            return cls(f"batches: {sampling}")
        return cls(f"batches: {sampling}, {HIDDEN_BATCH}", HIDDEN_BATCH)


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one unit under one relation, against one observer, by one accountant."""

    # what holds for the mechanism that ran; the formula as printed; as the first, without a proof
    kind: Literal["rigorous", "paper", "unproven"]
    accountant: str
    unit: Unit
    # the neighbouring relation; unstated where a paper leaves it open
    relation: Literal["add_remove", "zero_out", "replace_one", "unstated"]
    observer: Observer
    sampling: Scope
    epsilon: float  # infinite where nothing is guaranteed; `conditions_failed` then says why
    delta: float
    exclusions: tuple[str, ...] = ()  # what is not accounted for, in words
    conditions_failed: tuple[str, ...] = ()  # conditions of the accountant, in words
    # of zCDP (Bun and Steinke 2016), where all that is released is one Gaussian; None: it is not
    rho: float | None = None
    # gives the trade-off curve of which epsilon is a point; None: there is none
    curve: Callable[[], TradeOff] | None = field(default=None, compare=False, repr=False)

    @property
    def formula(self) -> bool:
        """Whether it is what a paper's formula gives, be it true or not."""
        return self.kind == "paper"

    @property
    def declared(self) -> tuple[str, ...]:
        """The exclusions by which the guarantee relies on what user-defined classes declare."""
        return tuple(words for words in self.exclusions if words.endswith(DECLARED_SUFFIX))

    def brief(self) -> Guarantee:
        """The same with those exclusions alone."""
        return replace(self, exclusions=self.declared)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Guarantee:
        """The guarantee that `to_dict` wrote, with its sampling in words only."""
        read = {
            **values,
            "observer": Observer(values["observer"]),
            "sampling": Scope(values["sampling"], values.get("knows", "")),
            "epsilon": float(values["epsilon"]),
            "exclusions": tuple(values["exclusions"]),
            "conditions_failed": tuple(values["conditions_failed"]),
        }
        for name in ("knows", "curve"):
            read.pop(name, None)
        return cls(**read)

    @property
    def meaning(self) -> tuple:
        """What two guarantees must have in common for their epsilons to be comparable."""
        # where samples are protected, the scope names the client that is worst by this accountant
        clients = self.sampling if self.unit == "client" else None
        return (self.kind, self.unit, self.relation, self.observer, clients, self.delta)

    def add_exclusion(self, exclusion: str, client_group: str) -> Guarantee:
        """The same as a number that nothing proves, as it leaves out `exclusion`. The name of its
        accountant says which clients it counts, `client_group`.
        """
        return replace(
            self,
            kind="unproven" if self.kind == "rigorous" else self.kind,
            accountant=f"{self.accountant} of the {client_group}",
            exclusions=(*self.exclusions, exclusion),
        )

    def to_dict(self, curve: bool = False) -> dict[str, Any]:
        """The fields for JSON: facts in words, tuples as lists, and an infinite epsilon as the
        string "infinity", which `float` reads back; with `curve` also `TradeOff.to_dict` of it.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["curve"]
        values |= {"curve": self.curve().to_dict()} if curve and self.curve else {}
        return values | {
            "observer": self.observer.value,
            "sampling": str(self.sampling),
            "knows": self.sampling.knows,
            "epsilon": "infinity" if math.isinf(self.epsilon) else self.epsilon,
            "exclusions": list(self.exclusions),
            "conditions_failed": list(self.conditions_failed),
        }

    def detection(self) -> str:
        """What it means: the largest power of any test at a false-alarm rate of 5%, by the whole
        trade-off curve where there is one, else by epsilon at delta.
        """
        if not math.isfinite(self.epsilon):
            return f"Nothing is guaranteed: {'; '.join(self.conditions_failed)}."
        likelier = math.exp(min(self.epsilon, 700.0))
        power = min(
            likelier * FALSE_ALARMS + self.delta,
            1 - (1 - FALSE_ALARMS - self.delta) / likelier,
            1.0,
        )
        if self.curve:
            power = min(power, float(self.curve().true_positives(FALSE_ALARMS)))
        source = ", by its whole trade-off curve," if self.curve else ""
        unit = 10.0 ** (math.floor(math.log10(100 * power)) - 3)  # of the last digit
        percent = min(100.0, math.ceil(100 * power / unit) * unit)
        secret = _SECRETS.get(self.sampling.knows)
        secret_text = f", but not {secret}," if secret else ""
        return (
            f"Epsilon {self.epsilon:.4g} at delta {self.delta:g}{source} means: at a false-alarm "
            f"rate of {FALSE_ALARMS:.0%}, an observer of {self.observer}{secret_text} can detect "
            f"that one {self.unit} {_EVENTS.get(self.relation, 'differed')} at most {percent:.4g}% "
            f"of the time; blind guessing detects {FALSE_ALARMS:.0%}."
        )

    def zcdp_sentence(self) -> str:
        return f"It is zCDP with rho {self.rho:.4g}"

    def terms_text(self) -> str:
        """Delta, the unit and the relation, in words."""
        return f"at delta {self.delta:g} for one {self.unit}, {_RELATIONS[self.relation]}"

    def sentence(self) -> str:
        """The whole guarantee in plain English; nothing is left out."""
        text = f"epsilon {self.epsilon:.4g} {self.terms_text()}, "
        if math.isinf(self.epsilon):
            protects = f"for one {self.unit}, {_RELATIONS[self.relation]}"
            text = f"No privacy is shown (epsilon infinite) {protects}, "
        text += f"against an observer of {self.observer} ({self.sampling}): "
        text += f"{KINDS[self.kind]}, by {self.accountant}."
        text += "" if self.rho is None else f" {self.zcdp_sentence()}."
        if self.exclusions:
            text += f" Not accounted for: {'; '.join(self.exclusions)}."
        if self.conditions_failed:
            text += f" Conditions that fail: {'; '.join(self.conditions_failed)}."
        return text


def column(accountant: str) -> str:
    """The name that tables give to an accountant's epsilon.

    >>> column("Chen 2024 tCDP")
    'epsilon_chen_2024_tcdp'
    >>> column("mine.gdp:Exact")
    'epsilon_mine_gdp_exact'
    """
    return "epsilon_" + re.sub("[^a-z0-9_]", "_", accountant.lower())


def tightest_guarantees(guarantees: Sequence[Guarantee]) -> list[Guarantee]:
    """The guarantees that hold, rigorous and finite: of several accountants' same claim, the one
    with the smallest epsilon.
    """
    groups: dict[tuple, list[Guarantee]] = {}
    for one in guarantees:
        if one.kind == "rigorous":
            groups.setdefault(one.meaning, []).append(one)
    tightest_claims = [min(ones, key=lambda one: one.epsilon) for ones in groups.values()]
    return [one for one in tightest_claims if math.isfinite(one.epsilon)]


def sentences(guarantees: Sequence[Guarantee]) -> list[str]:
    """All guarantees in plain English; the smallest of several accountants is marked."""
    tightest_claims = tightest_guarantees(guarantees)
    texts = []
    for one in guarantees:
        text = one.sentence()
        peers = [peer for peer in guarantees if not peer.formula and peer.meaning == one.meaning]
        if len(peers) > 1 and one in tightest_claims:
            names = " and ".join(peer.accountant for peer in peers)
            text += f" This holds, the smallest by {names}."
        texts.append(text)
    return texts


def brief_sentences(guarantees: Sequence[Guarantee]) -> list[str]:
    """As `sentences`, with what is not accounted for listed once for all, at the end."""
    texts = sentences([one.brief() for one in guarantees])
    exclusions = dict.fromkeys(
        words for one in guarantees for words in one.exclusions if words not in one.declared
    )
    return texts + [f"Not accounted for: {exclusion}." for exclusion in exclusions]


def delta_warning(delta: float, size: int, unit: str) -> str | None:
    """Why `delta` is too large where `size` units are protected, in words; None: it is not.

    >>> delta_warning(1e-2, 600, "sample")
    "delta 0.01 is above 1/600: it would allow some sample's data to be published outright"
    """
    if delta * size <= 1:
        return None
    allows = f"it would allow some {unit}'s data to be published outright"
    return f"delta {delta:g} is above 1/{size}: {allows}"
