"""The progress of a cell: the values that it tries, the choice among them, and its final runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.privacy import Composition
from raydpfl.sweep.spaces import points
from raydpfl.sweep.study.cells import StudyCell
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trials import SearchSetting, Trial, best_of

Add = Callable[[str, Experiment], Trial]  # the trial of an experiment, made where there is none


@dataclass(eq=False)
class CellProgress:
    """A cell and its runs so far. `advance` makes the next ones once their inputs are there."""

    study: Study
    cell: StudyCell
    references: dict[str, float] | None = None  # numbers from other arms; None: not all known yet
    tries: list[SearchSetting] = field(default_factory=list)  # of one trial each
    chosen: SearchSetting | None = None  # of `tries`
    final: SearchSetting | None = None
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
        values = {**self.references, **cell.fixed}
        if cell.grid:
            chooser = of[study.chooser(cell)]
            if chooser is self and not self.tries:
                self._try(values, add)
                return True
            if chooser is self:
                self.chosen = self._choice()
            elif chooser.problem:
                why = f"{chooser.cell.named()}: {chooser.problem}"
                raise RunError(f"no values were chosen: {why}")
            if chooser.chosen is None:
                return False
            values |= {key: chooser.chosen.values[key] for key in cell.grid}
        experiments = [cell.experiment(values, seed) for seed in study.final_seeds()]
        trials = [add(cell.named(values), experiment) for experiment in experiments]
        self.final = SearchSetting(values, experiments[0], trials)
        return True

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

    def _try(self, values: Mapping[str, Any], add: Add) -> None:
        study, cell = self.study, self.cell
        grid = [{**values, **point} for point in points(cell.grid)]
        experiments = [
            cell.experiment(setting, study.seed, study.about.validation) for setting in grid
        ]
        for setting, experiment in zip(grid, experiments, strict=True):
            trial = add(f"{cell.named(setting)} tried", experiment)
            self.tries.append(SearchSetting(setting, experiment, [trial]))

    def _choice(self) -> SearchSetting | None:
        """The best of the values tried, the first of equals; None as long as a run of theirs
        continues. Raises `RunError` if none has a result.
        """
        if not all(setting.done for setting in self.tries):
            return None
        judge = self.study.about.judge
        chosen = best_of(self.tries, judge, self.study.sign)
        if chosen is None:
            first = self.tries[0].trials[0]
            why = first.failure() if first.status == "failed" else f"there is no number {judge}"
            raise RunError(f"none of the {len(self.tries)} values tried has a result ({why})")
        return chosen
