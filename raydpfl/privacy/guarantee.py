"""A guarantee: an epsilon together with everything without which it means nothing.

>>> guarantee = Guarantee("rigorous", "pld", "client", "replace_one", "every aggregate", "fixed size 80 of 1920, cohort hidden", 1.5, 1e-5)
>>> print(guarantee.sentence())
epsilon 1.5 at delta 1e-05 for one client, which may be replaced by another, against whoever sees every aggregate \
(fixed size 80 of 1920, cohort hidden): rigorous, by pld.
>>> guarantee < guarantee  # numbers of different kinds are never compared or added, so no two guarantees are
Traceback (most recent call last):
TypeError: '<' not supported between instances of 'Guarantee' and 'Guarantee'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

_RELATIONS = {
    "add_remove": "which may be there or not",
    "zero_out": "whose contribution may be zero instead",
    "replace_one": "which may be replaced by another",
    "unstated": "whose data differ (by removal or by replacement: the paper leaves it open)",
}


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) of one unit under one relation, against one observer, by one accountant
    (PRIVACY.md sec. 1).

    `kind`: `paper`, the formula as printed; `rigorous`, what holds for the mechanism that ran; or
    `unproven`, computed as if it were rigorous for a mechanism for which no proof is known.
    `epsilon` is infinite when nothing is guaranteed; `conditions_failed` then says why.
    `exclusions` lists in words what is not accounted for.
    """

    kind: Literal["paper", "rigorous", "unproven"]
    accountant: str
    unit: str
    relation: Literal["add_remove", "zero_out", "replace_one", "unstated"]
    observer: str
    sampling: str
    epsilon: float
    delta: float
    exclusions: tuple[str, ...] = ()
    conditions_failed: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Guarantee:
        """The guarantee that `to_dict` wrote."""
        lists = {name: tuple(fields[name]) for name in ("exclusions", "conditions_failed")}
        return cls(**fields | lists | {"epsilon": float(fields["epsilon"])})

    @property
    def meaning(self) -> tuple:
        """What two guarantees must have in common for their epsilons to be comparable."""
        # of samples it names the worst client, by this accountant
        clients = self.sampling if self.unit == "client" else ""
        return (self.kind, self.unit, self.relation, self.observer, clients, self.delta)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON can hold them: tuples as lists, an infinite epsilon as the string
        "infinity" (`float` reads it back).
        """
        fields = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }
        return fields | {"epsilon": "infinity" if math.isinf(self.epsilon) else self.epsilon}

    def sentence(self) -> str:
        """The whole guarantee in plain English, no part left out."""
        what = (
            f"epsilon {self.epsilon:.4g} at delta {self.delta:g}"
            if math.isfinite(self.epsilon)
            else "No privacy is shown (epsilon infinite)"
        )
        how = {"paper": "the formula as printed", "rigorous": "rigorous", "unproven": "not proved"}[
            self.kind
        ]
        text = f"{what} for one {self.unit}, {_RELATIONS[self.relation]}, against whoever sees {self.observer} "
        text += f"({self.sampling}): {how}, by {self.accountant}."
        if self.exclusions:
            text += f" Not accounted for: {'; '.join(self.exclusions)}."
        if self.conditions_failed:
            text += f" Conditions that fail: {'; '.join(self.conditions_failed)}."
        return text


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
    return (
        f"delta {delta:g} is above 1/{size}: it would allow some {unit}'s data to be published outright"
        if delta * size > 1
        else None
    )
