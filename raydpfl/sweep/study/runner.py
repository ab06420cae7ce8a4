"""Carrying out studies: `reproduce(study, out)`, and a study as a source of trials.

What a study runs follows from its file and from what its own runs came to, never from the order in
which they end: so a study that was killed is resumed by running it again. Trials that have finished
answer from their directories, the others go on from their checkpoints.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl import data, report, storage
from raydpfl.core import signals
from raydpfl.errors import ConfigError, FileError
from raydpfl.experiment import Experiment
from raydpfl.storage.run_files import make_folder, replace_file, write_json
from raydpfl.sweep.directory import Directory, said
from raydpfl.sweep.resources import Room
from raydpfl.sweep.study import summary, tables
from raydpfl.sweep.study.progress import Progress
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trial_folders import name_of
from raydpfl.sweep.trial_source import Source, Trial
from raydpfl.sweep.tune_driver import drive, proposed

OVER = object()  # what a source has instead of a trial once it is at its end
OUTPUTS = ("study.yaml", "results.parquet", "tuning.parquet", "summary.json")


@dataclass(frozen=True)
class Result:
    """A study that is over. `results` and `tuning` are its tables (see
    `raydpfl.sweep.study.tables`), `summary` its summary.json; `problem` says in one line what went
    wrong, None if nothing did.
    """

    study: Study
    out: Path | str
    results: pa.Table
    tuning: pa.Table
    summary: dict[str, Any]
    problem: str | None = None


class Course(Source):
    """One carrying out of a study, from what lies in its directory to its result."""

    mark = "study.yaml"

    def __init__(self, study: Study, directory: Directory, on_change: Callable[[Course], object]):
        self.study = study
        self.directory = directory
        self.folder = directory.folder
        self.on_change = on_change
        self.metric = study.about.judge
        self.began = time.monotonic()
        self.progress = [
            Progress(study, cell, study.sources(cell), study.chooser(cell)) for cell in study.cells
        ]
        self._of = {each.cell: each for each in self.progress}
        self._found: dict[str, Trial] = {}  # by the name of the directory
        self._next: deque[Trial] = deque()  # found, and not handed out

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Holds the directory, takes up what is there and writes what the study is.

        Raises `ConfigError` where another study holds it, or it cannot be written to.
        """
        make_folder(self.folder)
        with ExitStack() as stack:
            with self.directory.writable():
                stack.enter_context(self.directory.held())
                self._prepare()
                self.write(self.gather(over=False))  # what an earlier result says holds no more
            yield

    def _prepare(self) -> None:
        self.directory.tidy()
        text = self.study.to_yaml().encode()
        replace_file(self.folder / self.mark, lambda file: file.write(text))
        for name, path in self.study.published().items():
            place = self.folder / "published" / name
            if path != place:
                make_folder(place.parent)
                shutil.copyfile(path, place)
        self._advance()

    @property
    def trials(self) -> list[Trial]:
        return [*self._found.values()]

    def proposals(self) -> Iterator[Trial | None]:
        """Each run once its inputs are there."""
        while True:
            self._advance()
            while self._next and self._next[0].finished:
                self._next.popleft()
            if self._next:
                yield self._next.popleft()
            elif all(each.settled for each in self.progress):
                return
            else:
                yield None

    def refused(self, trial: Trial, error: ConfigError) -> None:
        """The other runs go on."""

    def show(self) -> None:
        self.on_change(self)

    def save(self) -> None:
        with suppress(OSError, FileError):  # the last writing says so, if it fails too
            self.write(self.gather(over=False))

    def gather(self, over: bool, **more: Any) -> Result:
        """What there is so far, or, when the study is `over`, its result."""
        found = summary.of(self.study, self.progress, self.folder, over) | more
        results = tables.results(self.study, self.progress)
        tuning = tables.tuning(self.study, self.progress)
        problem = found["reason"] if over else None
        return Result(self.study, self.folder, results, tuning, found, problem)

    def write(self, result: Result) -> None:
        """results.parquet, tuning.parquet and summary.json. Raises OSError, `FileError`."""
        for name in ("results", "tuning"):
            table = getattr(result, name)
            replace_file(self.folder / f"{name}.parquet", partial(pq.write_table, table))
        write_json(self.folder / "summary.json", result.summary)
        storage.push(self.folder)

    def leave(self, processes: int) -> Result:
        """The result, written."""
        self._advance()
        seconds = time.monotonic() - self.began
        result = self.gather(over=True, seconds=seconds, processes=processes)
        try:
            self.write(result)
        except (OSError, FileError) as error:
            problem = f"the results could not be written ({said(error)}); go on with --resume"
            problem = f"{result.problem}; {problem}" if result.problem else problem
            result = dataclasses.replace(result, problem=problem)
            with suppress(OSError):
                (self.folder / "summary.json").unlink(missing_ok=True)
                self.directory.tidy()
        return result

    def _advance(self) -> None:
        while any([each.advance(self._of, self._add) for each in self.progress]):
            pass

    def _add(self, label: str, experiment: Experiment) -> Trial:
        """The trial of this experiment: a run that two cells share is one."""
        name = name_of(experiment)
        if name not in self._found:
            trial = Trial.found(label, experiment, self.folder / "trials" / name)
            self._found[name] = trial
            self._next.append(trial)
        return self._found[name]


class Together(Source):
    """Several studies in one go: their trials in turn, so that while one study has to wait the
    others go on, and the processes of trials are started once.
    """

    mark = Course.mark

    def __init__(self, courses: Sequence[Course], folder: Path):
        self.courses = courses
        self.folder = folder

    @property
    def trials(self) -> list[Trial]:
        return [trial for course in self.courses for trial in course.trials]

    def proposals(self) -> Iterator[Trial | None]:
        left = [course.proposals() for course in self.courses]
        while left:
            ready, left = _first_ready(left)
            if left:
                yield ready

    def refused(self, trial: Trial, error: ConfigError) -> None:
        """The other runs go on."""

    def show(self) -> None:
        for course in self.courses:
            course.show()

    def save(self) -> None:
        for course in self.courses:
            course.save()


def _first_ready(
    sources: Sequence[Iterator[Trial | None]],
) -> tuple[Trial | None, list[Iterator[Trial | None]]]:
    """The next trial of the first source that need not wait, None if all must; and the sources that
    have not come to their end.
    """
    left = []
    for place, source in enumerate(sources):
        trial = next(source, OVER)
        if trial is OVER:
            continue
        left.append(source)
        if isinstance(trial, Trial):
            return trial, [*left, *sources[place + 1 :]]
    return None, left


def reproduce(
    *studies: Study,
    out: str | Path | None = None,
    resume: bool = False,
    data_root: str | Path | None = None,
    address: str | None = None,
    on_change: Callable[[Course], object] = lambda course: None,
) -> list[Result]:
    """Runs studies, each into a directory of its own: `out`, a path or an address, for one, below
    `out` by their ids for several (default: a new one under `runs/`).

    `resume` goes on with what is there: finished trials are not run again, the others go on from
    their checkpoints; a study that has changed since runs what is new in it. `data_root` is where
    data sets lie (default: the variable RAYDPFL_DATA). `address` joins a running Ray cluster, whose
    nodes must all see `out`, unless that is an address. `on_change` is called, now and then, with
    each study's course. Last of all, each study's report is written into its directory
    (`raydpfl.report`).

    A result's `problem` says what went wrong: runs that failed, an identity that is broken. Raises
    `ConfigError` before anything is started or written when a study cannot be run, `RunError` when
    all was cut off. A Ray that this process had started is used, and left running.
    """
    root = Path(data_root).absolute() if data_root else None
    with signals.handled(), ExitStack() as stack:
        folders = [stack.enter_context(storage.at(place)) for place in _places(studies, out)]
        places = [Directory(folder.absolute(), "study", OUTPUTS) for folder in folders]
        _check_places(studies, places, resume)
        room = stack.enter_context(Room(None, root, address))
        _check(studies, room, root)
        courses = []
        for study, place in zip(studies, places, strict=True):
            course = Course(study, place, on_change)
            stack.enter_context(course.begun())
            courses.append(course)
        source: Source = courses[0]
        if len(courses) > 1:
            source = Together(courses, places[0].folder)
        processes = drive(source, proposed(source, room), room)
        return [_reported(course.leave(processes)) for course in courses]


def _reported(result: Result) -> Result:
    """The result, once its page, figures and tables are written into `report` in its directory."""
    elsewhere = storage.origin(Path(result.out))
    try:
        report.write([result.out])
        return dataclasses.replace(result, out=elsewhere or result.out)
    except (ConfigError, FileError, OSError) as error:
        why = str(error) if isinstance(error, ConfigError) else said(error)
        problem = f"the report could not be written ({why}); write it with raydpfl report"
        problem = f"{result.problem}; {problem}" if result.problem else problem
        return dataclasses.replace(result, out=elsewhere or result.out, problem=problem)


def _places(studies: Sequence[Study], out: str | Path | None) -> list[str | Path]:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    if len(studies) == 1:
        name = studies[0].about.id.replace("/", "-")
        return [out if out is not None else Path("runs") / f"{name}-{stamp}"]
    ids = [study.about.id for study in studies]
    if len(set(ids)) < len(ids) or not ids:
        raise ConfigError("study", ids, "studies with ids that differ")
    folder = out if out is not None else Path("runs") / f"studies-{stamp}"
    return [storage.within(folder, *name.split("/")) for name in ids]


def _check_places(studies: Sequence[Study], places: Sequence[Directory], resume: bool) -> None:
    """Raises `ConfigError` for a directory that a study cannot be run in, or gone on with."""
    for study, place in zip(studies, places, strict=True):
        with place.writable():
            place.check(resume)
            if resume:
                _same_study(study, place)


def _same_study(study: Study, place: Directory) -> None:
    """Raises `ConfigError` when the directory holds another study, or another scale of it."""
    stored = place.begun(Study.stored)
    if stored is None:
        return
    pairs: Mapping[str, tuple[str, str]] = {
        "study.id": (study.about.id, stored.about.id),
        "--scale": (study.scale, stored.scale),
    }
    for field, (here, there) in pairs.items():
        if here != there:
            raise ConfigError(field, here, f"{there!r}, as in the study to be resumed")


def _check(studies: Sequence[Study], room: Room, root: Path | None) -> None:
    """Raises `ConfigError` for a run that the cluster could never hold, and for data that are not
    there: of each kind of data, those of the first cell that has it.
    """
    held = set()
    prepared = set()
    for study in studies:
        for cell in study.cells:
            experiment = cell.experiment(next(cell.tried()), study.seed + 1)
            if experiment.client not in held:
                held.add(experiment.client)
                room.check(experiment)
            kind = (experiment.data.kind, experiment.data.clients)
            if kind not in prepared:
                prepared.add(kind)
                data.prepare(experiment.data, experiment.seed, root)
