"""The progress of a cell: the values that it tries, the choice among them, and its final runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.privacy import Composition
from raydpfl.report.labels import edge
from raydpfl.report.statistics import Resample, SeedValues
from raydpfl.sweep.spaces import Options, points
from raydpfl.sweep.study.cells import StudyCell
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trials import SearchSetting, Trial, best_of

End = tuple[str, str]  # of a grid: its key, and smallest or largest
Add = Callable[[str, Experiment], Trial]  # the trial of an experiment, made where there is none


@dataclass(eq=False)
class CellProgress:
    """A cell and its runs so far. `advance` makes the next ones once their inputs are there."""

    study: Study
    cell: StudyCell
    references: dict[str, float] | None = None  # numbers from other arms; None: not all known yet
    grid: dict[str, list[Any]] = field(default_factory=dict)  # that of the cell, and what it grew
    tries: list[SearchSetting] = field(default_factory=list)  # a trial for each tuning seed
    chosen: SearchSetting | None = None  # of `tries`
    choices: dict[Resample, SearchSetting] = field(default_factory=dict)  # of `tries`
    final: SearchSetting | None = None  # the final runs of `chosen`
    resampled: dict[Resample, SearchSetting] = field(default_factory=dict)  # of `choices`
    spent: Composition | None = None  # by all of `tries`, once the study is over; None: no privacy
    problem: str | None = None  # why it can come to no result

    @property
    def complete(self) -> bool:
        """It makes no more runs."""
        return self.final is not None or self.problem is not None

    @property
    def tried(self) -> list[Trial]:
        return [trial for setting in self.tries for trial in setting.trials]

    @property
    def finals(self) -> list[Trial]:
        return self.final.trials if self.final else []

    def values(self, name: str) -> SeedValues:
        """A number of its final runs by seed, and by resample of the tuning seeds."""

        def by_seed(setting: SearchSetting) -> dict[int, float | None]:
            return {trial.seed: trial.value(name) for trial in setting.trials}

        resampled = {key: by_seed(setting) for key, setting in self.resampled.items()}
        return SeedValues(by_seed(self.final) if self.final else {}, resampled)

    def advance(self, of: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Makes the runs that can be made now; whether there were any, or a problem."""
        if self.complete:
            return False
        try:
            return self._advance(of, add)
        except (ConfigError, RunError) as error:  # as a number that makes no experiment
            self.problem = str(error)
            return True

    def _advance(self, of: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Raises `RunError` for what can never be known, `ConfigError` for what cannot be run."""
        study, cell = self.study, self.cell
        if self.references is None:
            self.references = self._references(of)
        if self.references is None:
            return False
        if not cell.grid:
            self.final = self._final({}, add)
            return True
        chooser = of[study.chooser(cell)]
        if chooser is self and not self.tries:
            self.grid = {key: [*space.options] for key, space in cell.grid.items()}
            return self.attempt(add)
        if chooser is self and self.chosen is None:
            return self._choose(of, add)
        if chooser.problem:
            why = f"{chooser.cell.named()}: {chooser.problem}"
            raise RunError(f"no values were chosen: {why}")
        if chooser.chosen is None:
            return False
        self.final = self._final(chooser.chosen.values, add)
        for resample, choice in chooser.choices.items():
            self.resampled[resample] = self._final(choice.values, add)
        return True

    def _final(self, chosen: Mapping[str, Any], add: Add) -> SearchSetting:
        """The final runs with these of the values that are open."""
        values = {**(self.references or {}), **self.cell.fixed}
        values |= {key: chosen[key] for key in self.cell.grid}
        seeds = self.study.final_seeds()
        experiments = [self.cell.experiment(values, seed) for seed in seeds]
        trials = [add(self.cell.named(values), experiment) for experiment in experiments]
        return SearchSetting(values, experiments[0], trials)

    def _references(self, of: Mapping[StudyCell, CellProgress]) -> dict[str, float] | None:
        """The numbers that the runs of other arms give; None as long as one is missing."""
        numbers = {}
        for key, cell in self.study.sources(self.cell).items():
            source = of[cell]
            if not source.complete or not all(trial.done for trial in source.finals):
                return None
            reference = self.cell.references[key]
            mean = source.final.mean(reference.value) if source.final else None
            if mean is None:
                raise RunError(f"the runs of {cell.named()} have no number {reference.value}")
            numbers[key] = reference.times * mean
        return numbers

    def attempt(self, add: Add) -> bool:
        """Tries what of the grid has not been tried; whether there was any."""
        study, cell = self.study, self.cell
        tried = [setting.values for setting in self.tries]
        spaces = {key: Options(tuple(values)) for key, values in self.grid.items()}
        grid = [{**(self.references or {}), **cell.fixed, **point} for point in points(spaces)]
        for setting in [setting for setting in grid if setting not in tried]:
            seeds = study.tuning_seeds()
            experiments = [cell.experiment(setting, seed, study.about.validation) for seed in seeds]
            trials = [add(f"{cell.named(setting)} tried", one) for one in experiments]
            self.tries.append(SearchSetting(setting, experiments[0], trials))
        return len(self.tries) > len(tried)

    def _choose(self, of: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Chooses once no grid of the panel grows; whether there was anything to do."""
        place = self._panel(self.cell)
        panel = [
            one
            for cell, one in of.items()
            if self.study.chooser(cell) is cell and cell.grid and self._panel(cell) == place
            if one.tries or not one.problem
        ]
        if not all(one.tries and all(setting.done for setting in one.tries) for one in panel):
            return False
        if _grow(panel, add):
            return True
        count = len(self.study.tuning_seeds())
        chosen = self.choice(range(count))
        if chosen is None:
            judge, first = self.study.about.judge, self.tries[0].trials[0]
            why = first.failure() if first.status == "failed" else f"there is no number {judge}"
            raise RunError(f"none of the {len(self.tries)} values tried has a result ({why})")
        for resample in itertools.combinations_with_replacement(range(count), count):
            self.choices[resample] = self.choice(resample) or chosen
        self.chosen = chosen
        return True

    def _panel(self, cell: StudyCell) -> tuple[Any, ...]:
        """What the arms share whose grids grow together: the labels of all axes, and how many
        arms stand before the cell in the line of those that take numbers of others.
        """
        depth, line = 0, [cell]
        while line := [source for each in line for source in self.study.sources(each).values()]:
            depth += 1
        return (*cell.labels.values(), cell.accounting, depth)

    def choice(self, resample: Sequence[int]) -> SearchSetting | None:
        """The best of the values tried by the mean over these of their trials, the first of equals;
        None where none has a number.
        """
        drawn = {
            replace(one, trials=[one.trials[seed] for seed in resample]): one for one in self.tries
        }
        best = best_of(drawn, self.study.about.judge, self.study.about.sign)
        return None if best is None else drawn[best]

    def ends(self) -> set[End]:
        """The ends of its grids that it chooses and that could grow."""
        chosen = self.choice(range(len(self.study.tuning_seeds())))
        values = {} if chosen is None else {key: chosen.values[key] for key in self.grid}
        ends = [(key, edge(value, self.grid[key])) for key, value in values.items()]
        return {(key, end) for key, end in ends if end and self.beyond(key, end) is not None}

    def beyond(self, key: str, end: str) -> float | int | None:
        """The value that its grid grows by at an end, in the ratio of the last two; None where it
        grows no more, has no ratio, or its experiment takes no such value.
        """
        numbers = sorted(value for value in self.grid[key] if type(value) in (int, float))
        first = [value for value in self.cell.grid[key].options if value in numbers]
        if end == "largest":
            numbers.reverse()
        added = numbers.index((min if end == "smallest" else max)(first))
        if added >= self.study.grow or min(numbers[:2]) <= 0:
            return None
        last, before = numbers[:2]
        value: float | int = float(f"{last * last / before:.6g}")
        if all(type(each) is int for each in numbers) and value == int(value):
            value = int(value)
        try:
            self.cell.experiment(
                {**self.tries[0].values, key: value}, self.study.tuning_seeds().start
            )
        except ConfigError:
            return None
        return value


def _grow(panel: Sequence[CellProgress], add: Add) -> bool:
    """Adds a value to the grids of all arms of a panel at each end that any of them has chosen, and
    tries it; whether there was any.
    """
    ends = sorted({end for one in panel for end in one.ends()})
    for one in panel:
        for key, end in ends:
            value = one.beyond(key, end) if key in one.grid else None
            if value is not None:
                one.grid[key].append(value)
    return any([one.attempt(add) for one in panel if ends])
