"""Claims of a study: differences of means that a paper states, and the verdict on each.

A claim is an item of `study.claims`: `larger` and `smaller` are labels of cells (of any axes), or
lists of them, whose numbers `of` are added; `at` the labels at which it is claimed. The difference
of the two is taken seed by seed and averaged over the labels of all other axes. It `holds` if its
interval lies above `by` (or within +-`within`), is `reversed` if it lies below (or beyond), and is
`not resolved` else, or where a single cell shows the opposite. Levels are corrected for the number
of claims (Bonferroni), and of single cells for theirs too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from raydpfl.config.registry import Section
from raydpfl.config.validation import validate
from raydpfl.errors import ConfigError
from raydpfl.report.labels import quantity
from raydpfl.report.statistics import SeedValues, total
from raydpfl.sweep.spaces import Options, points
from raydpfl.sweep.study.cells import label, plain

Labels = Mapping[str, str | None]
LEVEL = 0.05  # the chance that any verdict of a study but `not resolved` is wrong, at most


class Claim(Section):
    """One claim; `says`: in words."""

    says: str = Field(min_length=1)
    of: str = "test_accuracy"
    larger: tuple[Mapping[str, str], ...] = Field(min_length=1)
    smaller: tuple[Mapping[str, str], ...] = ()  # none: the number 0
    at: Mapping[str, tuple[str, ...]] = {}
    by: float = 0.0  # in the units of the number
    within: float | None = Field(default=None, gt=0)  # in place of `by`

    @property
    def terms(self) -> list[tuple[float, Mapping[str, str]]]:
        """The labels of each side, with its sign."""
        return [(1.0, each) for each in self.larger] + [(-1.0, each) for each in self.smaller]

    def cells(self, labels: Mapping[str, Sequence[str]]) -> list[list[tuple[float, Labels]]]:
        """The signed labels of all axes, by label of the axes that no side names. `labels`: those
        of every axis; empty for one that the study does not have.
        """
        named = {axis for _, each in self.terms for axis in each}
        free = {
            axis: Options(tuple(self.at.get(axis, ())) or tuple(names) or (None,))
            for axis, names in labels.items()
            if axis not in named
        }
        fixed = {axis: names[0] for axis, names in self.at.items() if axis in named}
        return [
            [(sign, {**fixed, **place, **each}) for sign, each in self.terms]
            for place in points(free)
        ]


def claim(where: str, given: Any, labels: Mapping[str, Sequence[str]]) -> Claim:
    """The claim that an item of `study.claims`, the field `where`, states; `labels`: those of every
    axis of the study. Raises `ConfigError` for keys, axes and labels that there are not, and for a
    side that leaves open what the other names.
    """
    fields = dict(given) if isinstance(given, Mapping) else {"says": given}
    for side, default in (("larger", None), ("smaller", [])):
        every = fields.get(side, default)
        every = every if isinstance(every, (list, tuple)) else [every]
        fields[side] = [_labels(f"{where}.{side}", each) for each in every]
    at = _labels(f"{where}.at", fields.get("at") or {})
    fields["at"] = {
        axis: names if isinstance(names, list) else [names] for axis, names in at.items()
    }
    made = validate(Claim, where, fields)
    sides = [each for _, each in made.terms]
    for axis, names in [*made.at.items(), *((a, (n,)) for each in sides for a, n in each.items())]:
        if axis not in labels:
            raise ConfigError(where, axis, f"one of {', '.join(labels)}")
        for name in names:
            if name not in labels[axis]:
                raise ConfigError(f"{where}.{axis}", name, f"one of {', '.join(labels[axis])}")
    for axis in dict.fromkeys(axis for each in sides for axis in each):
        if any(axis not in each for each in sides) and len(made.at.get(axis, ())) != 1:
            raise ConfigError(where, axis, "a label of this axis on either side")
    return made


def _labels(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not (value or where.endswith(".at")):
        raise ConfigError(where, value, "labels by axis")
    return {
        plain(str(axis)): [*map(label, name)] if isinstance(name, list) else label(name)
        for axis, name in value.items()
    }


def verdicts(
    claims: Sequence[Claim],
    labels: Mapping[str, Sequence[str]],
    values: Mapping[tuple[tuple[str, Any], ...], Any],
) -> list[dict[str, Any]]:
    """What comes of each claim, for summary.json: `says`, `of`, `verdict` (not run: none of its
    cells is there), the mean `difference` with its interval from `low` to `high` at the `level`,
    `seeds`, and the numbers of `cells`, in all and by what a single one shows. `values`: by the
    sorted labels of a cell (`key`), what gives its `SeedValues` of a number by name.
    """
    differences = [_differences(claim, labels, values) for claim in claims]
    tested = max(sum(map(bool, differences)), 1)
    return [
        _verdict(claim, cells, tested) for claim, cells in zip(claims, differences, strict=True)
    ]


def _differences(
    claim: Claim, labels: Mapping[str, Sequence[str]], values: Mapping[Any, Any]
) -> list[SeedValues]:
    """The difference in each of the cells that are there with all their numbers."""
    cells = [[(sign, key(at)) for sign, at in terms] for terms in claim.cells(labels)]
    there = [terms for terms in cells if all(at in values for _, at in terms)]
    differences = [total([(sign, values[at](claim.of)) for sign, at in terms]) for terms in there]
    return [each for each in differences if each.spread().count]


def key(place: Labels) -> tuple[tuple[str, Any], ...]:
    """The labels of a cell as a key."""
    return tuple(sorted(place.items()))


def _verdict(claim: Claim, cells: Sequence[SeedValues], tested: int) -> dict[str, Any]:
    facts = {"says": claim.says, "of": claim.of, "by": claim.by, "within": claim.within}
    if not cells:
        return {**facts, "verdict": "not run", "cells": 0}
    level = 1 - LEVEL / tested
    mean = total([(1 / len(cells), each) for each in cells])
    single = [_outcome(claim, each, 1 - LEVEL / tested / len(cells)) for each in cells]
    outcome = _outcome(claim, mean, level)
    if {outcome, *single} >= {"holds", "reversed"}:
        outcome = "not resolved"
    spread = mean.spread()
    half = spread.half_width(level)
    known = not math.isnan(half)
    return {
        **facts,
        "verdict": outcome,
        "difference": spread.mean,
        "low": spread.mean - half if known else None,
        "high": spread.mean + half if known else None,
        "level": level,
        "seeds": spread.count,
        "cells": len(cells),
        **{name: single.count(name) for name in ("holds", "reversed", "not resolved")},
    }


def _outcome(claim: Claim, difference: SeedValues, level: float) -> str:
    spread = difference.spread()
    half = spread.half_width(level)  # NaN, of a single seed, resolves nothing
    low, high = spread.mean - half, spread.mean + half
    if claim.within is None:
        holds, opposite = low > claim.by, high < claim.by
    else:
        holds = -claim.within <= low and high <= claim.within
        opposite = low > claim.within or high < -claim.within
    return "holds" if holds else "reversed" if opposite else "not resolved"


def in_words(verdict: Mapping[str, Any]) -> str:
    """A verdict of `verdicts` in one line."""
    if not verdict["cells"]:
        return f"{verdict['says']}: not run"
    number = quantity(verdict["of"])
    factor, unit = (100, " points") if number.percent else (1, "")
    low, high = (verdict[name] for name in ("low", "high"))
    interval = "" if low is None else f" ({factor * low:+.4g} to {factor * high:+.4g}{unit})"
    several = verdict["cells"] > 1
    cells = f", {verdict['holds']} of {verdict['cells']} cells hold" if several else ""
    mean = f"{factor * verdict['difference']:+.4g}{unit}"
    return f"{verdict['says']}: {verdict['verdict']}{cells}; {number.words} {mean}{interval}"
