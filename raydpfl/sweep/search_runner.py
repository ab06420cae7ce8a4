"""A run of a sweep or a study: its trials, its directory, and what it writes there."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from ray.tune.schedulers import FIFOScheduler, TrialScheduler

from raydpfl import storage
from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError, FileError
from raydpfl.experiment import Experiment
from raydpfl.runtime.runner import hold_folder
from raydpfl.storage.files import LOCK, read_json, read_text, remove
from raydpfl.storage.run_files import clear, make_folder, replace_file, write_json
from raydpfl.sweep.resources import Resources
from raydpfl.sweep.trials import Trial, check, check_code, name_of, trained_runs

BUSY_TIMEOUT = 10.0  # seconds that processes of an earlier start may take to release the directory
# what a kill leaves half written: Ray Tune's state, and files by the process that wrote them
REMAINS = (".tune-*", ".*.yaml.*", ".*.parquet.*", ".*.json.*")
# the first line of a config that was changed so
ADAPTIVE = "# The values to try were changed when there were runs."
Difference = tuple[str, Any, Any] | None  # (key, new value, stored value)


@dataclass(frozen=True)
class SearchResult:
    """A sweep or a study, finished or running. `summary` is its summary.json; `problem` says in
    one line what went wrong, None if nothing did.
    """

    out: Path | str
    summary: dict[str, Any]
    problem: str | None

    def tables(self) -> dict[str, pa.Table]:
        """The tables that are written, by file name."""
        return {}

    def failed(self, problem: str) -> Self:
        """The result with one more problem."""
        return replace(self, problem="; ".join(filter(None, (self.problem, problem))))


class SearchRunner(ABC):
    """One run of a sweep or a study (`specification`) in a directory, which has it as `KIND.yaml`.
    Its methods are called in the driver's process, between two steps of Ray Tune, and should be
    quick; so should `on_change`, called when something has changed, and is to be shown.
    """

    kind: str  # sweep or study
    metric: str  # what the scheduler compares
    max_concurrent: int | None = None  # trials at once; None: as many as the cluster holds
    timeout: float | None = None  # seconds of a trial; None: see `timeouts`
    pauses = False  # whether a trial waits after every evaluation until it may continue
    last = 1  # evaluations of which a trial's scores are the mean
    fail_fast = False  # whether a trial that is refused ends all others
    is_adaptive = False  # whether the values to try were ever changed when there were runs

    def __init__(self, specification: Any, folder: Path, on_change: Callable[[Any], object]):
        self.specification = specification
        self.folder = folder.absolute()
        self.on_change = on_change
        self._start_time = time.monotonic()
        self._earlier_seconds = 0.0  # before it was resumed
        self._trials: dict[str, Trial] = {}  # by the name of the directory
        self._ready: deque[Trial] = deque()  # not handed out yet

    @property
    def config(self) -> Path:
        """The config; nodes of the cluster look for it to tell whether they see the directory."""
        return self.folder / f"{self.kind}.yaml"

    @property
    def seconds(self) -> float:
        """How long it has run, with all that came before a resume that had trials to run."""
        if self._earlier_seconds and all(trial.before for trial in self.trials):
            return self._earlier_seconds
        return self._earlier_seconds + time.monotonic() - self._start_time

    @property
    def trials(self) -> list[Trial]:
        """All trials so far, whether or not they need to be run."""
        return [*self._trials.values()]

    @abstractmethod
    def advance(self) -> bool:
        """Adds the trials that follow from the config and the results so far; whether there may be
        more later. Raises `ConfigError`, OSError, `FileError`.
        """

    def add(self, label: str, experiment: Experiment, searched_keys: Collection[str] = ()) -> Trial:
        """The trial of this experiment, with what its directory holds: one, however often it is
        asked for. `searched_keys`: see `meaning`. Raises `ConfigError` if that holds another run.
        """
        name = name_of(experiment, searched_keys)
        if name not in self._trials:
            trial = Trial(label, experiment, self.folder / "trials" / name, window=self.last)
            check(trial.folder, experiment, searched_keys, trial.display_name())
            check_code(trial.folder, trial.display_name())
            trial.read()
            trial.before = trial.finished
            if not trial.before:  # it continues, or is tried again
                trial.status, trial.summary, trial.reason = "waiting", None, None
            self._trials[name] = trial
            self._ready.append(trial)
        return self._trials[name]

    def proposals(self) -> Iterator[Trial | None]:
        """The trials to run, one after another; None as long as the next one depends on the results
        of others.
        """
        has_more = self.advance()
        is_over = not has_more and all(trial.finished for trial in self.trials)
        # as long as any trial runs, a scheduler needs the results of the finished ones too
        skips_finished = is_over or not self.pauses
        while has_more or self._ready:
            while self._ready and self._ready[0].finished and skips_finished:
                self._ready.popleft()
            if self._ready:
                yield self._ready.popleft()
            elif has_more:
                yield None
            has_more = has_more and self.advance()

    @abstractmethod
    def check(self, resources: Resources) -> None:
        """Raises `ConfigError` for what cannot be run. Nothing has been written yet."""

    @abstractmethod
    def copy_inputs(self) -> None:
        """Copies to the directory what a resumption needs next to the config."""

    @abstractmethod
    def gather(self, is_over: bool, **facts: Any) -> Any:
        """The result so far, or, with `is_over`, the final one. The summary gets `facts`."""

    def scheduler(self) -> TrialScheduler:
        """Ray Tune's, which may stop a trial before its last round."""
        return FIFOScheduler()

    def check_directory(self, resume: bool) -> None:
        """Raises `ConfigError` unless the directory can be made, or, to `resume`, has this sweep or
        study, or nothing, in it.
        """
        folder = self.folder
        trials = folder / "trials"
        with self._report_write_errors():
            is_taken = not folder.is_dir() or any(file.name != LOCK for file in folder.iterdir())
            if folder.exists() and is_taken and not (folder.is_dir() and resume):
                expected = f"a new or empty directory, or --resume to go on with the {self.kind}"
                raise ConfigError("--out", str(folder), f"{expected} in it")
            if (trials.exists() or trials.is_symlink()) and not trials.is_dir():
                expected = "a directory whose trials/ is a directory; it is a file"
                raise ConfigError("--out", str(folder), expected)
            if resume:
                self._check_stored_config()

    def _check_stored_config(self) -> None:
        name = self.config.name
        if not self.config.exists():
            leftovers = {*self._remains(), self.folder / LOCK}
            if self.folder.exists() and {*self.folder.iterdir()} - leftovers:
                expected = f"the directory of a {self.kind}; it has no {name}"
                raise ConfigError("--resume", str(self.folder), expected)
            return
        try:
            stored = self.specification.from_directory(self.folder)
            difference = self.specification.differs(stored)
        except ConfigError as error:
            if error.field == "--resume":
                raise
            expected = f"the {name} of a {self.kind}; {error}"
            raise ConfigError("--resume", str(self.config), expected) from None
        if difference:
            key, value, stored_value = difference
            raise ConfigError(key, value, f"{stored_value!r}, as in the {self.kind} to be resumed")
        self.is_adaptive = read_text(self.config).startswith(ADAPTIVE) or (
            bool(trained_runs(self.folder / "trials")) and self.specification.tries_others(stored)
        )

    @contextmanager
    def started(self, resume: bool) -> Iterator[None]:
        """Holds the directory, reads what is there and writes the config. Raises `ConfigError` if
        another process holds it, or it cannot be written to; otherwise as `check_directory`.
        """
        make_folder(self.folder)
        with hold_folder(self.folder, BUSY_TIMEOUT):
            self.check_directory(resume)  # again, as another process may have held it
            with self._report_write_errors():
                self.tidy()
                with suppress(OSError, ValueError, KeyError, TypeError):  # absent or torn
                    seconds = read_json(self.folder / "summary.json")["seconds"]
                    self._earlier_seconds = seconds if 0 <= seconds < math.inf else 0.0
                self.advance()
                head = f"{ADAPTIVE}\n" if self.is_adaptive else ""
                text = (head + self.specification.to_yaml()).encode()
                replace_file(self.config, lambda file: file.write(text))
                self.copy_inputs()
                # in place of an earlier result
                self.write(self.gather(is_over=False, seconds=self.seconds))
            yield

    @contextmanager
    def _report_write_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, FileError) as error:
            expected = f"a directory that can be written to ({describe(error)})"
            raise ConfigError("--out", str(self.folder), expected) from None

    def save(self) -> None:
        """Writes the result so far."""
        with suppress(OSError, FileError):  # if the last writing fails too, it says so
            self.write(self.gather(is_over=False, seconds=self.seconds))

    def write(self, result: Any) -> None:
        """Writes the tables and summary.json. Raises OSError, `FileError`."""
        for name, table in result.tables().items():
            replace_file(self.folder / name, functools.partial(pq.write_table, table))
        write_json(self.folder / "summary.json", result.summary)
        storage.push(self.folder)

    def finish(self, processes: int) -> Any:
        """The result, written. A result that could not be written has a problem."""
        result = self.gather(is_over=True, seconds=self.seconds, processes=processes)
        try:
            self.write(result)
        except (OSError, FileError) as error:
            problem = f"the results could not be written ({describe(error)}); go on with --resume"
            result = result.failed(problem)
            with suppress(OSError):
                for name in ("best.yaml", "summary.json"):  # of an earlier result
                    remove_file(self.folder / name)
                self.tidy()
        return replace(result, out=storage.origin(self.folder) or self.folder)

    def tidy(self) -> None:
        """Removes what a kill has left half written."""
        for path in self._remains():
            with suppress(FileNotFoundError):  # processes of what was killed may still end
                remove(path)

    def _remains(self) -> list[Path]:
        return [path for pattern in REMAINS for path in self.folder.glob(pattern)]


def remove_file(path: Path) -> None:
    """Removes a file, if there is one; anything else there is set aside. Raises OSError."""
    clear(path)
    path.unlink(missing_ok=True)


def read_config_tree(folder: Path, kind: str) -> Mapping[str, Any]:
    """The tree in the `KIND.yaml` of a directory. Raises `ConfigError` unless it is whole."""
    path = folder / f"{kind}.yaml"
    tree = read(path)
    if not isinstance(tree, Mapping):
        reason = f"it is a {type(tree).__name__}"
    elif not tree:
        reason = "it is empty"
    elif not read_text(path).endswith("\n...\n"):
        reason = "it is cut, as its last line is not '...'"
    else:
        return tree
    raise ConfigError("--resume", str(path), f"the {path.name} of a {kind}; {reason}")


def describe(error: OSError | FileError) -> str:
    """What failed, and on which file, in one line."""
    if isinstance(error, FileError):
        return str(error)
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
