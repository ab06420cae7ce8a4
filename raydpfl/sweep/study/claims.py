"""Claims of a study: differences of means that a paper states, and the verdict on each.

A claim is an item of `study.claims`: `larger` and `smaller` are labels of cells (of any axes), or
lists of them, whose numbers `of` are added; `at` the labels at which it is claimed. The difference
of the two is taken seed by seed and averaged over the labels of all other axes. A claim `holds` if
the interval lies above `by` (or within +-`within`), is `reversed` if it lies below (or beyond), and
is `not resolved` otherwise, where a single cell shows the opposite, or where a final run has no
number. A claim of `every_cell` holds if it holds in each cell, and is reversed if it is in any; its
difference is that of the cell that decides. The sides are `equal` if their numbers are, in every
seed of every cell, whatever resampled tuning seeds choose. Levels are corrected for the number of
claims (Bonferroni), those of single cells for the number of cells too.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from raydpfl.config.registry import Section
from raydpfl.config.validation import validate
from raydpfl.errors import ConfigError
from raydpfl.report.labels import count_text, quantity
from raydpfl.report.statistics import SeedValues, total
from raydpfl.sweep.spaces import Options, points
from raydpfl.sweep.study.cells import label, strip_mark

Labels = Mapping[str, str | None]
CellKey = tuple[tuple[str, Any], ...]  # the sorted labels of a cell
OUTCOMES = ("holds", "reversed", "equal", "not resolved")
LEVEL = 0.05  # the chance that any `holds` or `reversed` of a study is wrong, at most


class Claim(Section):
    """One claim; `says`: in words."""

    says: str = Field(min_length=1)
    of: str = "test_accuracy"
    larger: tuple[Mapping[str, str], ...] = Field(min_length=1)
    smaller: tuple[Mapping[str, str], ...] = ()  # none: the number 0
    at: Mapping[str, tuple[str, ...]] = {}
    by: float = 0.0  # in the units of the number
    within: float | None = Field(default=None, gt=0)  # in place of `by`
    every_cell: bool = False  # claimed of each cell, in place of their mean

    @property
    def terms(self) -> list[tuple[float, Mapping[str, str]]]:
        """The labels of each side, with its sign."""
        return [(1.0, side) for side in self.larger] + [(-1.0, side) for side in self.smaller]

    def cells(self, labels: Mapping[str, Sequence[str]]) -> list[list[tuple[float, Labels]]]:
        """The signed labels of all axes, by label of the axes that no side names. `labels`: those
        of every axis; empty for one that the study does not have.
        """
        named_axes = {axis for _, side in self.terms for axis in side}
        free_axes = {
            axis: Options(tuple(self.at.get(axis, ())) or tuple(names) or (None,))
            for axis, names in labels.items()
            if axis not in named_axes
        }
        fixed_labels = {axis: names[0] for axis, names in self.at.items() if axis in named_axes}
        return [
            [(sign, {**fixed_labels, **place, **side}) for sign, side in self.terms]
            for place in points(free_axes)
        ]


def claim(
    field: str, item: Any, labels: Mapping[str, Sequence[str]], placements: Iterable[Labels]
) -> Claim:
    """The claim that an item of `study.claims`, at the key `field`, states. `labels`: those of
    every axis of the study; `placements`: those of all cells at any scale. Raises `ConfigError` for
    unknown keys, axes and labels, for a side that leaves open what the other names, for what means
    nothing, and where no cells stand.
    """
    fields = dict(item) if isinstance(item, Mapping) else {"says": item}
    for name, default in (("larger", None), ("smaller", [])):
        items = fields.get(name, default)
        items = items if isinstance(items, (list, tuple)) else [items]
        fields[name] = [_labels(f"{field}.{name}", side) for side in items]
    at_labels = _labels(f"{field}.at", fields.get("at") or {})
    fields["at"] = {
        axis: names if isinstance(names, list) else [names] for axis, names in at_labels.items()
    }
    claim = validate(Claim, field, fields)
    sides = [side for _, side in claim.terms]
    for axis, names in [*claim.at.items(), *((a, (n,)) for side in sides for a, n in side.items())]:
        if axis not in labels:
            raise ConfigError(field, axis, f"one of {', '.join(labels)}")
        for name in names:
            if name not in labels[axis]:
                raise ConfigError(f"{field}.{axis}", name, f"one of {', '.join(labels[axis])}")
    for axis in dict.fromkeys(axis for side in sides for axis in side):
        if any(axis not in side for side in sides) and len(claim.at.get(axis, ())) != 1:
            raise ConfigError(field, axis, "a label of this axis on either side")
    if not _standing_cells(claim, labels, {key(place) for place in placements}):
        raise ConfigError(field, [*map(dict, sides)], "labels at which cells of the study stand")
    _check_meaning(field, claim)
    return claim


def _check_meaning(field: str, claim: Claim) -> None:
    """Raises `ConfigError` for a key that means nothing next to the others."""
    for axis in claim.at:
        if all(axis in side for _, side in claim.terms):
            raise ConfigError(f"{field}.at", axis, "an axis that a side leaves open")
    if claim.within is not None and "by" in claim.model_fields_set:
        raise ConfigError(f"{field}.by", claim.by, "none next to within")


def _standing_cells(
    claim: Claim, labels: Mapping[str, Sequence[str]], cells: Collection[CellKey]
) -> list[list[tuple[float, CellKey]]]:
    """The signed cells of each difference whose cells are all there."""
    differences = [[(sign, key(place)) for sign, place in terms] for terms in claim.cells(labels)]
    return [terms for terms in differences if all(place in cells for _, place in terms)]


def _labels(field: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not (value or field.endswith(".at")):
        raise ConfigError(field, value, "labels by axis")
    return {
        strip_mark(str(axis)): [*map(label, name)] if isinstance(name, list) else label(name)
        for axis, name in value.items()
    }


def verdicts(
    claims: Sequence[Claim],
    labels: Mapping[str, Sequence[str]],
    values: Mapping[CellKey, Any],
) -> list[dict[str, Any]]:
    """What comes of each claim, for summary.json: `says`, `of`, `verdict` (not run: none of its
    cells has numbers), the `difference` with its interval from `low` to `high` at the `level`,
    `seeds` of `planned_seeds`, and the numbers of `cells`, in all and by what a single one shows.
    `values`: by the sorted labels of a cell (`key`), what gives its `SeedValues` of a number by
    name.
    """
    differences = [_differences(claim, labels, values) for claim in claims]
    count = max(sum(any(cell.spread().count for cell in cells) for cells in differences), 1)
    return [_verdict(claim, cells, count) for claim, cells in zip(claims, differences, strict=True)]


def _differences(
    claim: Claim, labels: Mapping[str, Sequence[str]], values: Mapping[CellKey, Any]
) -> list[SeedValues]:
    """The difference in each of the cells that are there, without numbers where runs failed."""
    cells = _standing_cells(claim, labels, values)
    return [total([(sign, values[place](claim.of)) for sign, place in terms]) for terms in cells]


def key(place: Labels) -> CellKey:
    """The labels of a cell as a key."""
    return tuple(sorted(place.items()))


def _verdict(claim: Claim, differences: Sequence[SeedValues], claim_count: int) -> dict[str, Any]:
    facts = {name: getattr(claim, name) for name in ("says", "of", "by", "within", "every_cell")}
    cells = [cell for cell in differences if cell.spread().count]
    if not cells:
        return {**facts, "verdict": "not run", "cells": 0}
    level = 1 - LEVEL / claim_count
    cell_level = 1 - LEVEL / claim_count / len(differences)
    cell_outcomes = [_outcome(claim, cell, cell_level) for cell in cells]
    outcomes = {*cell_outcomes}
    if claim.every_cell:
        level = cell_level
        same = len(outcomes) == 1 and len(cells) == len(differences)
        common_outcome = cell_outcomes[0] if same else "not resolved"
        outcome = "reversed" if "reversed" in outcomes else common_outcome
        pairs = zip(cells, cell_outcomes, strict=True)
        deciding_cells = [cell for cell, cell_outcome in pairs if cell_outcome == outcome] or cells
        difference = min(deciding_cells, key=lambda cell: _margin(claim, cell, level))
    else:
        difference = total([(1 / len(cells), cell) for cell in cells])
        outcome = _outcome(claim, difference, level)
        cancels = outcome == "equal" and outcomes != {"equal"}
        lacks_cell = len(cells) < len(differences)
        if lacks_cell or cancels or {outcome, *outcomes} >= {"holds", "reversed"}:
            outcome = "not resolved"
    spread = difference.spread()
    half_width = spread.half_width(level)
    has_interval = not math.isnan(half_width)
    return {
        **facts,
        "verdict": outcome,
        "difference": spread.mean,
        "low": spread.mean - half_width if has_interval else None,
        "high": spread.mean + half_width if has_interval else None,
        "level": level,
        "seeds": spread.count,
        "planned_seeds": len(difference.values),
        "cells": len(differences),
        **{outcome: cell_outcomes.count(outcome) for outcome in OUTCOMES},
    }


def _margin(claim: Claim, difference: SeedValues, level: float) -> float:
    """By how much the whole interval is on the side that is claimed."""
    spread = difference.spread()
    mean = claim.within - abs(spread.mean) if claim.within else spread.mean - claim.by
    half_width = spread.half_width(level)
    return -math.inf if math.isnan(half_width) else mean - half_width


def _outcome(claim: Claim, difference: SeedValues, level: float) -> str:
    spread = difference.spread()
    if spread.count < len(difference.values):
        return "not resolved"
    samples = (difference.values, *difference.resamples.values())
    zero = all(number == 0 for numbers in samples for number in numbers.values())
    if zero and len(difference.values) > 1 and not (claim.by or claim.within):
        return "equal"
    # NaN, of a single seed or where a resample lacks a number, resolves nothing
    half_width = spread.half_width(level)
    low, high = spread.mean - half_width, spread.mean + half_width
    if claim.within is None:
        holds, opposite = low > claim.by, high < claim.by
    else:
        holds = -claim.within <= low and high <= claim.within
        opposite = low > claim.within or high < -claim.within
    return "holds" if holds else "reversed" if opposite else "not resolved"


def verdict_line(verdict: Mapping[str, Any]) -> str:
    """A verdict of `verdicts` in one line."""
    if not verdict["cells"]:
        return f"{verdict['says']}: not run"
    number = quantity(verdict["of"])
    factor, unit = (100, " points") if number.percent else (1, "")
    low, high = (verdict[name] for name in ("low", "high"))
    interval = "" if low is None else f" ({factor * low:+.4g} to {factor * high:+.4g}{unit})"
    several = verdict["cells"] > 1
    cells = f", {verdict['holds']} of {verdict['cells']} cells hold" if several else ""
    place = " in the cell that decides" if several and verdict["every_cell"] else ""
    if verdict["seeds"] < verdict["planned_seeds"]:
        place += f", in {verdict['seeds']} of {verdict['planned_seeds']} seeds"
    lacking_cells = verdict["cells"] - sum(verdict[outcome] for outcome in OUTCOMES)
    if lacking_cells:
        place += f", {count_text(lacking_cells, 'cell')} without numbers"
    mean = f"{factor * verdict['difference']:+.4g}{unit}"
    return f"{verdict['says']}: {verdict['verdict']}{cells}; {number.words} {mean}{interval}{place}"
