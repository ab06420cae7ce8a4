"""Which setting comes next: listed beforehand, or proposed by Optuna; and how Ray Tune asks for it,
trial by trial.

Optuna is asked and told in an order of its own making, whatever order the results arrive in:
setting k is proposed when the results of all settings up to k - `ahead` have been told, and of no
other. So its proposals are the same on any cluster, and a resumed sweep asks and tells the same
again, the finished settings answering at once.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from ray.tune.search import Searcher

from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.tune.spaces import Interval, Space
from raydpfl.tune.sweep import Setting, Sweep, Trial, identity


class Stop(BaseException):
    """Leaves Ray Tune, whose own handling of errors would end the trials in good order and so mark
    them as stopped."""

    def __init__(self, error: Exception):
        self.error = error


class Source(Protocol):
    """Settings in order. `next` is None while the next one must wait for results; it raises
    StopIteration after the last.
    """

    def next(self) -> Setting | None: ...


class Listed:
    """All settings known beforehand."""

    def __init__(self, settings: Iterable[Setting]):
        self._settings = iter(settings)

    def next(self) -> Setting:
        return next(self._settings)


class Guided:
    """Optuna's tree-structured Parzen estimator (Watanabe 2023), through Ray Tune."""

    def __init__(self, sweep: Sweep, add: Callable[[dict[str, Any]], Setting]):
        library = optuna()
        from ray.tune.search.optuna import OptunaSearch

        library.logging.set_verbosity(library.logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # constant_liar is marked experimental
            seed = int(stream(sweep.seed, Purpose.SWEEP).integers(1 << 32))
            sampler = library.samplers.TPESampler(seed=seed, constant_liar=True)
            space = {
                str(place): _distribution(each) for place, each in enumerate(sweep.spaces.values())
            }
            self._search = OptunaSearch(space, metric="score", mode="max", sampler=sampler)
        self._sweep = sweep
        self._add = add
        self._made: dict[str, Setting] = {}
        self._asked: list[Setting] = []  # one may stand there twice
        self._told = 0

    def next(self) -> Setting | None:
        if len(self._asked) == self._sweep.search.samples:
            raise StopIteration
        while self._told <= len(self._asked) - self._sweep.search.ahead:
            setting = self._asked[self._told]
            if not setting.done:
                return None
            mean = setting.mean(self._sweep.search.metric)
            result = None if mean is None else {"score": self._sweep.sign * mean}
            self._search.on_trial_complete(str(self._told), result, error=mean is None)
            self._told += 1
        drawn = self._search.suggest(str(len(self._asked)))
        spaces = self._sweep.spaces.items()
        values = {
            key: _value(space, drawn[str(place)]) for place, (key, space) in enumerate(spaces)
        }
        name = identity(values)
        if name not in self._made:
            self._made[name] = self._add(values)
        self._asked.append(self._made[name])
        return self._made[name]


def optuna() -> Any:
    """The library, which is not installed with the package. Raises `ConfigError` without it."""
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ConfigError(
            "sweep.search", "optuna", "grid or random; optuna needs pip install raydpfl[optuna]"
        ) from None


def _distribution(space: Space) -> Any:
    kinds = optuna().distributions
    if isinstance(space, Interval):
        return kinds.FloatDistribution(space.low, space.high, log=space.log)
    if space.ordered:
        return kinds.IntDistribution(0, len(space.options) - 1)
    return kinds.CategoricalDistribution(list(range(len(space.options))))


def _value(space: Space, drawn: Any) -> Any:
    return float(drawn) if isinstance(space, Interval) else space.options[int(drawn)]


class Proposals(Searcher):
    """Hands Ray Tune the trials of a source's settings, all trials of a setting before the next.

    `skip` says which trials need not run, `work` what a trial's process is told.
    """

    def __init__(
        self, source: Source, skip: Callable[[Trial], bool], work: Callable[[Trial], dict[str, Any]]
    ):
        super().__init__()
        self._source = source
        self._skip = skip
        self._work = work
        self._trials: Iterator[Trial] = iter(())
        self._next: Trial | None = None
        self._over = False
        self.running: dict[str, Trial] = {}

    def waiting(self) -> bool:
        """Whether there is, or may come, a trial to run."""
        self._advance()
        return self._next is not None or not self._over

    def _advance(self) -> None:
        while self._next is None and not self._over:
            self._next = next((trial for trial in self._trials if not self._skip(trial)), None)
            if self._next is None:
                try:
                    setting = self._source.next()
                except StopIteration:
                    self._over = True
                    return
                if setting is None:
                    return
                self._trials = iter(setting.trials)

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:
        try:
            self._advance()
        except ConfigError as error:
            raise Stop(error) from None
        if self._next is None:
            return Searcher.FINISHED if self._over else None
        trial = self._next
        self._next = None
        self.running[trial_id] = trial
        return self._work(trial)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """The watcher of the trials has taken up its result."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' directories hold all there is."""

    restore = save
