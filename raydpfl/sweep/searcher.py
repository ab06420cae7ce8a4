"""How Ray Tune asks a source for its trials, one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ray.tune.search import Searcher

from raydpfl.errors import ConfigError
from raydpfl.sweep.trial_source import Source, Stop, Trial


class Proposals(Searcher):
    """Hands Ray Tune the trials of `source`. `work` says what a trial's process is told."""

    def __init__(self, source: Source, work: Callable[[Trial], dict[str, Any]]):
        super().__init__()
        self._trials: Iterator[Trial | None] = iter(source.proposals())
        self._work = work
        self.running: dict[str, Trial] = {}

    def waiting(self) -> bool:
        """Whether there is, or may come, a trial to run."""
        first = list(itertools.islice(self._trials, 1))
        self._trials = itertools.chain(first, self._trials)
        return bool(first)

    def suggest(self, trial_id: str) -> Any:  # Ray Tune takes `FINISHED`, a text, for the end
        try:
            trial = next(self._trials)
        except StopIteration:
            return Searcher.FINISHED
        except ConfigError as error:
            raise Stop(error) from None
        if trial is None:
            return None
        self.running[trial_id] = trial
        return self._work(trial)

    def on_trial_complete(
        self, trial_id: str, result: dict | None = None, error: bool = False
    ) -> None:
        """The watcher of the trials has taken up its result."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the trials' directories hold all there is."""

    restore = save
