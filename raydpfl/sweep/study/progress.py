"""How far a cell is: the values that it tries, the choice among them, and its final runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.sweep.study.cells import Cell
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.study.tuned_values import points
from raydpfl.sweep.trial_source import Trial

Add = Callable[[str, Experiment], Trial]  # the trial of an experiment, made where there is none


@dataclass(frozen=True)
class Try:
    """Values that were tried, by dotted key, and the run with them."""

    values: Mapping[str, Any]
    trial: Trial


@dataclass(eq=False)
class Progress:
    """A cell and its runs so far. `advance` makes the next ones once their inputs are there."""

    study: Study
    cell: Cell
    sources: Mapping[str, Cell]  # what gives each number that it takes, by dotted key
    chooser: Cell  # whose choice of values it takes, which may be itself
    taken: dict[str, float] | None = None  # numbers from other arms; None: not all known yet
    tries: list[Try] = field(default_factory=list)
    chosen: Try | None = None  # of its own
    picked: dict[str, Any] = field(default_factory=dict)  # of its grid
    finals: list[Trial] = field(default_factory=list)
    problem: str | None = None  # why it can come to no result

    @property
    def settled(self) -> bool:
        """Whether no more runs will come to be."""
        return bool(self.finals) or self.problem is not None

    @property
    def over(self) -> bool:
        return self.settled and all(trial.done for trial in self.finals)

    @property
    def values(self) -> dict[str, Any]:
        """What it leaves open, as its final runs have it."""
        return {**(self.taken or {}), **self.cell.fixed, **self.picked}

    def advance(self, of: Mapping[Cell, Progress], add: Add) -> bool:
        """Makes the runs that can be made now; whether there were any, or a problem."""
        if self.settled:
            return False
        if self.taken is None and not self._take(of):
            return self.problem is not None
        try:
            if self.chooser is self.cell and self.cell.grid and not self.tries:
                self._try(add)
                return True
            if self.cell.grid and not self._pick(of):
                return self.problem is not None
            made = [self.cell.experiment(self.values, seed) for seed in self.study.final_seeds()]
        except ConfigError as error:  # a number of another arm that makes no experiment
            self.problem = str(error)
            return True
        self.finals = [add(self.cell.named(self.values), experiment) for experiment in made]
        return True

    def _take(self, of: Mapping[Cell, Progress]) -> bool:
        """Takes the numbers of other arms; False as long as one is missing."""
        found = {}
        for key, cell in self.sources.items():
            giving = of[cell]
            if not giving.over:
                return False
            taken = self.cell.taken[key]
            numbers = [number(trial, taken.value) for trial in giving.finals]
            known = [each for each in numbers if each is not None]
            if giving.problem or len(known) < len(numbers):
                self.problem = f"the runs of {cell.named()} have no number {taken.value}"
                return False
            found[key] = taken.times * float(np.mean(known))
        self.taken = found
        return True

    def _try(self, add: Add) -> None:
        share = self.study.about.validation
        every = [{**(self.taken or {}), **point} for point in points(self.cell.grid)]
        made = [self.cell.experiment(values, self.study.seed, share) for values in every]
        for values, experiment in zip(every, made, strict=True):
            trial = add(f"{self.cell.named(values)} tried", experiment)
            self.tries.append(Try(values, trial))

    def _pick(self, of: Mapping[Cell, Progress]) -> bool:
        """Takes up which values were chosen, here or elsewhere; False as long as none are."""
        giving = of[self.chooser]
        if giving is self and not self._choose():
            return False
        if giving.chosen is None:
            if giving.problem:
                self.problem = f"no values were chosen: {giving.cell.named()}: {giving.problem}"
            return False
        self.picked = {key: giving.chosen.values[key] for key in self.cell.grid}
        return True

    def _choose(self) -> bool:
        """Chooses among the values that were tried, the first of equals; False as long as one run
        goes on, or if none has a number to be judged by.
        """
        if not all(each.trial.done for each in self.tries):
            return False
        judge = self.study.about.judge
        judged = [(number(each.trial, judge), each) for each in self.tries]
        known = [(self.study.sign * value, each) for value, each in judged if value is not None]
        if not known:
            first = self.tries[0].trial
            why = first.failure() if first.status == "failed" else f"there is no number {judge}"
            self.problem = f"none of the {len(self.tries)} values tried has a result ({why})"
            return False
        self.chosen = max(known, key=lambda pair: pair[0])[1]
        return True


def number(trial: Trial, name: str) -> float | None:
    """A finite number of the summary of a run that has not failed, one within a mapping there by a
    dotted name; None if it has none.
    """
    if not trial.finished:
        return None
    value = numbers(trial.summary or {}).get(name)
    return value if value is not None and np.isfinite(value) else None


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a summary, and those of the mappings in it, by dotted name.

    >>> numbers({"seed": 1, "status": "completed", "stationary": {"final_x": 0.5}, "holds": []})
    {'seed': 1, 'stationary.final_x': 0.5}
    """
    found: dict[str, float] = {}
    for name, value in summary.items():
        if isinstance(value, Mapping):
            inner = {f"{name}.{key}": each for key, each in value.items()}
            found |= {key: each for key, each in inner.items() if _is_number(each)}
        elif _is_number(value):
            found[name] = value
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
