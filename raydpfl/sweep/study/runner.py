"""Running studies: `reproduce(study, out)`. What a study runs follows from its file and from the
results of its own runs, never from the order in which they end.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from raydpfl import data, report, storage
from raydpfl.core import signals
from raydpfl.errors import ConfigError, FileError
from raydpfl.privacy import Composition
from raydpfl.simulation import user_code
from raydpfl.storage.run_files import make_folder
from raydpfl.sweep.resources import Resources
from raydpfl.sweep.search_privacy import UNREADABLE, compose_search, former_runs
from raydpfl.sweep.search_runner import SearchResult, SearchRunner, describe
from raydpfl.sweep.study import results
from raydpfl.sweep.study.cell_progress import CellProgress
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.tune import execute


@dataclass(frozen=True)
class StudyResult(SearchResult):
    """A study that is over, with its cells, and the tables of `raydpfl.sweep.study.results`."""

    study: Study
    cells: list[CellProgress]
    results: pa.Table
    resamples: pa.Table
    tuning: pa.Table

    def tables(self) -> dict[str, pa.Table]:
        names = ("results", "resamples", "tuning")
        return {f"{name}.parquet": getattr(self, name) for name in names}


class StudyRunner(SearchRunner):
    """One run of a study."""

    kind = "study"

    def __init__(self, study: Study, folder: Path, on_change: Callable[[StudyRunner], object]):
        super().__init__(study, folder, on_change)
        self.study = study
        self.metric = study.about.judge
        self.last = study.about.last
        self.progress = {cell: CellProgress(study, cell) for cell in study.cells}
        self._root: Path | None = None

    def check(self, resources: Resources) -> None:
        """Raises `ConfigError` also for missing data: of each kind of data, those of the first cell
        that has it.
        """
        self._root = resources.root
        seed = self.study.final_seeds().start
        experiments = [cell.first_experiment(seed) for cell in self.study.cells]
        for experiment in {e.client: e for e in experiments}.values():
            resources.check(experiment)
        kinds = {(e.data.kind, e.data.clients): e for e in reversed(experiments)}
        for experiment in reversed(kinds.values()):
            data.prepare(experiment.data, experiment.seed, resources.root)

    def advance(self) -> bool:
        """Adds each run once its inputs are there."""
        cells = self.progress.values()
        while any([cell.advance(self.progress, self.add) for cell in cells]):
            pass
        return not all(cell.complete for cell in cells)

    def copy_inputs(self) -> None:
        seed = self.study.final_seeds().start
        pairs = [(cell, values) for cell in self.study.cells for values in cell.setting_values()]
        user_code.store_code((cell.experiment(values, seed) for cell, values in pairs), self.folder)
        for name, path in self.study.published_tables().items():
            place = self.folder / "published" / name
            if path != place:
                make_folder(place.parent)
                shutil.copyfile(path, place)

    def gather(self, is_over: bool, **facts: Any) -> StudyResult:
        self.advance()
        progress = [*self.progress.values()]
        if is_over:
            self._compose_tuning(progress)
        summary = results.summary(self.study, progress, self.folder, is_over) | facts
        makers = (results.final_table, results.resample_table, results.tuning_table)
        tables = [make(self.study, progress) for make in makers]
        return StudyResult(self.folder, summary, summary["reason"], self.study, progress, *tables)

    def _compose_tuning(self, progress: Sequence[CellProgress]) -> None:
        """Says what all runs tried in each cell spend together. Former runs on the same kind of
        data count in every cell, as nothing tells where they were tried.
        """
        former, unread = [], None
        try:
            former = former_runs(self.trials, self.folder)
        except ConfigError as error:
            unread = Composition(notes=(UNREADABLE.format(error),))
        for cell in progress:
            runs = [(trial.folder, trial.experiment) for trial in cell.tuning_trials]
            kinds = {experiment.data.kind for _, experiment in runs if experiment.private}
            others = [run for run in former if run[1].private and run[1].data.kind in kinds]
            # values that a grid grew by were chosen by results, and so may be a change of the study
            adaptive = self.is_adaptive or bool(others) or len(cell.tries) > cell.cell.settings
            composition = compose_search(runs + others, self._root, adaptive)
            cell.composition = composition and (unread or composition)

    def finish(self, processes: int) -> StudyResult:
        """The result, written, with the page, figures and tables of its report."""
        result = super().finish(processes)
        try:
            report.write([self.folder])
            return result
        except (ConfigError, FileError, OSError) as error:
            reason = str(error) if isinstance(error, ConfigError) else describe(error)
            hint = "write it with raydpfl report"
            return result.failed(f"the report could not be written ({reason}); {hint}")


def reproduce(
    *studies: Study,
    out: str | Path | None = None,
    resume: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_change: Callable[[StudyRunner], object] = lambda runner: None,
) -> list[StudyResult]:
    """Runs studies, each into a directory of its own, and writes the report of each there
    (`raydpfl.report`). The `problem` of each result says what went wrong: runs that failed, an
    identity that is broken.

    Args:
        studies: what to run.
        out: a directory, a path or an address, for one study; the studies' directories are below it
            by their ids for several. None: a new one under `runs/`.
        resume: continues what is there; of a study that has changed, what is new in it is run.
        data_root, address, on_change: see `raydpfl.sweep.run`, as for what is raised.
    """
    with signals.handle_signals(), ExitStack() as stack:
        runners = []
        for study, place in zip(studies, _places(studies, out), strict=True):
            folder = stack.enter_context(storage.open_folder(place))
            runners.append(StudyRunner(study, folder, on_change))
        return execute(runners, Resources(data_root, address), resume)


def _places(studies: Sequence[Study], out: str | Path | None) -> list[str | Path]:
    ids = [study.about.id for study in studies]
    if len(ids) == 1:
        return [out if out is not None else storage.new(ids[0].replace("/", "-"))]
    if len(set(ids)) < len(ids) or not ids:
        raise ConfigError("study", ids, "studies with ids that differ")
    folder = out if out is not None else storage.new("studies")
    return [storage.join_address(folder, *name.split("/")) for name in ids]
