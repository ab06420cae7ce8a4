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
    final_setting: SearchSetting | None = None  # the final runs of `chosen`
    resample_settings: dict[Resample, SearchSetting] = field(default_factory=dict)  # of `choices`
    composition: Composition | None = None  # of `tries`, once the study is over; None: not private
    problem: str | None = None  # why it can come to no result

    @property
    def complete(self) -> bool:
        """It makes no more runs."""
        return self.final_setting is not None or self.problem is not None

    @property
    def tuning_trials(self) -> list[Trial]:
        return [trial for setting in self.tries for trial in setting.trials]

    @property
    def finals(self) -> list[Trial]:
        return self.final_setting.trials if self.final_setting else []

    def values(self, name: str) -> SeedValues:
        """A number of its final runs by seed, and by resample of the tuning seeds."""

        def by_seed(setting: SearchSetting) -> dict[int, float | None]:
            return {trial.seed: trial.value(name) for trial in setting.trials}

        resamples = {key: by_seed(setting) for key, setting in self.resample_settings.items()}
        return SeedValues(by_seed(self.final_setting) if self.final_setting else {}, resamples)

    def advance(self, progress: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Makes the runs that can be made now; whether there were any, or a problem."""
        if self.complete:
            return False
        try:
            return self._advance(progress, add)
        except (ConfigError, RunError) as error:  # as a number that makes no experiment
            self.problem = str(error)
            return True

    def _advance(self, progress: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Raises `RunError` for what can never be known, `ConfigError` for what cannot be run."""
        study, cell = self.study, self.cell
        if self.references is None:
            self.references = self._references(progress)
        if self.references is None:
            return False
        if not cell.grid:
            self.final_setting = self._final_runs({}, add)
            return True
        chooser = progress[study.chooser(cell)]
        if chooser is self and not self.tries:
            self.grid = {key: [*space.options] for key, space in cell.grid.items()}
            return self.attempt(add)
        if chooser is self and self.chosen is None:
            return self._choose(progress, add)
        if chooser.problem:
            reason = f"{chooser.cell.display_name()}: {chooser.problem}"
            raise RunError(f"no values were chosen: {reason}")
        if chooser.chosen is None:
            return False
        self.final_setting = self._final_runs(chooser.chosen.values, add)
        for resample, choice in chooser.choices.items():
            self.resample_settings[resample] = self._final_runs(choice.values, add)
        return True

    def _final_runs(self, chosen_values: Mapping[str, Any], add: Add) -> SearchSetting:
        """The final runs with these of the values that are open."""
        values = {**(self.references or {}), **self.cell.fixed_values}
        values |= {key: chosen_values[key] for key in self.cell.grid}
        seeds = self.study.final_seeds()
        experiments = [self.cell.experiment(values, seed) for seed in seeds]
        trials = [add(self.cell.display_name(values), experiment) for experiment in experiments]
        return SearchSetting(values, experiments[0], trials)

    def _references(self, progress: Mapping[StudyCell, CellProgress]) -> dict[str, float] | None:
        """The numbers that the runs of other arms give; None as long as one is missing."""
        numbers = {}
        for key, cell in self.study.sources(self.cell).items():
            source = progress[cell]
            if not source.complete or not all(trial.is_done for trial in source.finals):
                return None
            reference = self.cell.references[key]
            mean = source.final_setting.mean(reference.value) if source.final_setting else None
            if mean is None:
                name = cell.display_name()
                raise RunError(f"the runs of {name} have no number {reference.value}")
            numbers[key] = reference.times * mean
        return numbers

    def attempt(self, add: Add) -> bool:
        """Tries what of the grid has not been tried; whether there was any."""
        study, cell = self.study, self.cell
        tried_values = [setting.values for setting in self.tries]
        spaces = {key: Options(tuple(values)) for key, values in self.grid.items()}
        known_values = {**(self.references or {}), **cell.fixed_values}
        grid = [{**known_values, **point} for point in points(spaces)]
        for setting in [setting for setting in grid if setting not in tried_values]:
            seeds = study.tuning_seeds()
            experiments = [cell.experiment(setting, seed, study.about.validation) for seed in seeds]
            name = f"{cell.display_name(setting)} tried"
            trials = [add(name, experiment) for experiment in experiments]
            self.tries.append(SearchSetting(setting, experiments[0], trials))
        return len(self.tries) > len(tried_values)

    def _choose(self, progress: Mapping[StudyCell, CellProgress], add: Add) -> bool:
        """Chooses once no grid of the panel grows; whether there was anything to do."""
        place = self._panel(self.cell)
        panel = [
            peer
            for cell, peer in progress.items()
            if self.study.chooser(cell) is cell and cell.grid and self._panel(cell) == place
            if peer.tries or not peer.problem
        ]
        if not all(peer.tries and all(setting.is_done for setting in peer.tries) for peer in panel):
            return False
        if _grow(panel, add):
            return True
        count = len(self.study.tuning_seeds())
        best_setting = self.choice(range(count))
        if best_setting is None:
            judge, trial = self.study.about.judge, self.tries[0].trials[0]
            reason = trial.failure() if trial.status == "failed" else f"there is no number {judge}"
            raise RunError(f"none of the {len(self.tries)} values tried has a result ({reason})")
        for resample in itertools.combinations_with_replacement(range(count), count):
            self.choices[resample] = self.choice(resample) or best_setting
        self.chosen = best_setting
        return True

    def _panel(self, cell: StudyCell) -> tuple[Any, ...]:
        """What the arms share whose grids grow together: the labels of all axes, and how many
        arms stand before the cell in the line of those that take numbers of others.
        """
        depth, cells = 0, [cell]
        while cells := [source for cell in cells for source in self.study.sources(cell).values()]:
            depth += 1
        return (*cell.labels.values(), cell.accounting, depth)

    def choice(self, resample: Sequence[int]) -> SearchSetting | None:
        """The best of the values tried by the mean over these of their trials, the first of equals;
        None where none has a number.
        """
        originals = {
            replace(s, trials=[s.trials[place] for place in resample]): s for s in self.tries
        }
        best = best_of(originals, self.study.about.judge, self.study.about.sign)
        return None if best is None else originals[best]

    def ends(self) -> set[End]:
        """The ends of its grids that it chooses and that could grow."""
        best = self.choice(range(len(self.study.tuning_seeds())))
        values = {} if best is None else {key: best.values[key] for key in self.grid}
        ends = [(key, edge(value, self.grid[key])) for key, value in values.items()]
        return {(key, end) for key, end in ends if end and self.next_value(key, end) is not None}

    def next_value(self, key: str, end: str) -> float | int | None:
        """The value that its grid grows by at an end, in the ratio of the last two; None where it
        grows no more, has no ratio, or its experiment takes no such value.
        """
        numbers = sorted(value for value in self.grid[key] if type(value) in (int, float))
        if len(numbers) < 2:
            return None
        original_values = [value for value in self.cell.grid[key].options if value in numbers]
        if end == "largest":
            numbers.reverse()
        growth = numbers.index((min if end == "smallest" else max)(original_values))
        if growth >= self.study.grow or min(numbers[:2]) <= 0:
            return None
        last, neighbor = numbers[:2]
        value: float | int = float(f"{last * last / neighbor:.6g}")
        if all(type(number) is int for number in numbers) and value == int(value):
            value = int(value)
        try:
            seed = self.study.tuning_seeds().start
            self.cell.experiment({**self.tries[0].values, key: value}, seed)
        except ConfigError:
            return None
        return value


def _grow(panel: Sequence[CellProgress], add: Add) -> bool:
    """Adds a value to the grids of all arms of a panel at each end that any of them has chosen, and
    tries it; whether there was any.
    """
    ends = sorted({end for peer in panel for end in peer.ends()})
    for peer in panel:
        for key, end in ends:
            value = peer.next_value(key, end) if key in peer.grid else None
            if value is not None:
                peer.grid[key].append(value)
    return any([peer.attempt(add) for peer in panel if ends])
