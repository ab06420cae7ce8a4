"""A sweep as a study of Optuna, in the storage that `sweep.storage` names: its dashboard, and
whatever reads its storages, then show any sweep, whoever proposed the settings.

The study is written and never asked. The sweep's directory is what holds: a setting that is done
there becomes a trial of the study, named by its values, so that a resumed sweep adds what is
missing. Where the study has another result of a setting, or one that the sweep does not have, it is
written anew from the directory, with a warning. A storage that cannot be opened is refused before
anything starts; one that fails later is warned of once, and the sweep goes on without it.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.errors import ConfigError
from raydpfl.sweep.optuna_search import optuna
from raydpfl.sweep.results import epsilons
from raydpfl.sweep.spaces import Interval, Space
from raydpfl.sweep.sweep import Setting, Sweep
from raydpfl.sweep.trial_folders import identity
from raydpfl.sweep.trial_source import Trial

LONG = 60  # characters of a value that is no number
log = logging.getLogger("raydpfl")
Told = tuple[str, float | None]  # the state of a trial of Optuna, and its value


class Mirror:
    """The study of a sweep.

    Args:
        sweep: with a `sweep.storage`.
        name: of its directory, and so of the study.

    Raises:
        ConfigError: the storage cannot be opened, or has another study of this name.
    """

    def __init__(self, sweep: Sweep, name: str):
        self.sweep = sweep
        self.name = name
        self.url = sweep.search.storage
        self._library = optuna("sweep.storage", self.url, "none")
        self._library.logging.set_verbosity(self._library.logging.ERROR)
        self._failed = False
        self._known: dict[str, Told] = {}
        # what a resumed sweep has in common with what it was
        self._mark = identity({"metric": sweep.search.metric, "keys": sorted(sweep.spaces)})
        try:
            self._open()
        except ConfigError:
            raise
        except Exception as error:  # of any library that the URL names
            expected = f"a storage that Optuna can open ({_said(error)})"
            raise ConfigError("sweep.storage", self.url, expected) from None

    def _open(self) -> None:
        self._storage = self._library.storages.get_storage(self.url)
        if self.name not in self._library.get_all_study_names(self._storage):
            self._begin()
            return
        self._study = self._library.load_study(study_name=self.name, storage=self._storage)
        if self._study.user_attrs.get("sweep") != self._mark:
            expected = f"a storage without another study named {self.name}, as the directory is"
            raise ConfigError("sweep.storage", self.url, expected)
        for trial in self._study.get_trials(deepcopy=False):
            value = trial.value if trial.values else None
            self._known[trial.user_attrs.get("setting", "")] = trial.state.name, value

    def _begin(self) -> None:
        """An empty study."""
        direction = "maximize" if self.sweep.sign > 0 else "minimize"
        self._study = self._library.create_study(
            study_name=self.name, storage=self._storage, direction=direction
        )
        self._study.set_user_attr("sweep", self._mark)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this is marked experimental
            self._study.set_metric_names([self.sweep.search.metric])
        self._known = {}

    def show(self, settings: Sequence[Setting], over: bool = False) -> None:
        """Adds the settings that are done. `over`: these are all that the sweep has."""
        if self._failed:
            return
        try:
            self._show({identity(each.values): each for each in settings}, over)
        except Exception as error:  # of any library that the URL names
            self._failed = True
            without = "the sweep goes on without it; --resume adds what is missing"
            log.warning("sweep.storage: %s; %s", _said(error), without)

    def _show(self, settings: dict[str, Setting], over: bool) -> None:
        metric = self.sweep.search.metric
        told = {name: _told(each, metric) for name, each in settings.items() if each.done}
        shared = told.keys() & self._known.keys()
        others = any(not _same(told[name], self._known[name]) for name in shared)
        if others or (over and self._known.keys() - settings.keys()):
            what = f"the study {self.name} in {self.url}"
            log.warning("%s is not of what the sweep has: it is written anew", what)
            self._library.delete_study(study_name=self.name, storage=self._storage)
            self._begin()
        for name in [each for each in told if each not in self._known]:
            self._study.add_trial(self._trial(name, settings[name], told[name]))
            self._known[name] = told[name]

    def _trial(self, name: str, setting: Setting, told: Told) -> Any:
        """A setting as a trial of Optuna."""
        state, value = told
        distributions = {key: self._axis(space) for key, space in self.sweep.spaces.items()}
        facts: dict[str, Any] = {"setting": name, "seeds": [each.seed for each in setting.trials]}
        facts["directories"] = [f"trials/{each.folder.name}" for each in setting.trials]
        for trial in setting.trials:
            for column, epsilon in epsilons(trial).items():
                if np.isfinite(epsilon):
                    facts[column] = max(facts.get(column, 0.0), epsilon)
        return self._library.trial.create_trial(
            state=self._library.trial.TrialState[state],
            value=value,
            params={key: _plain(setting.values[key], axis) for key, axis in distributions.items()},
            distributions=distributions,
            user_attrs=facts,
            intermediate_values=_curve(setting.trials[0], self.sweep.search.metric),
        )

    def _axis(self, space: Space) -> Any:
        """The distribution by which Optuna shows the values of a space."""
        kinds = self._library.distributions
        if isinstance(space, Interval):
            return kinds.FloatDistribution(space.low, space.high, log=space.log)
        if all(type(each) in (int, float) for each in space.options):
            return kinds.FloatDistribution(min(space.options), max(space.options))
        return kinds.CategoricalDistribution([*dict.fromkeys(map(_text, space.options))])


def _plain(value: Any, axis: Any) -> Any:
    """A value as its distribution has it."""
    return _text(value) if hasattr(axis, "choices") else float(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONG else f"{text[: LONG - 3]}..."


def _told(setting: Setting, metric: str) -> Told:
    """A done setting as Optuna tells of a trial: pruned where a scheduler stopped it."""
    mean = setting.mean(metric)
    if mean is None:
        return "FAIL", None
    return ("COMPLETE" if setting.whole else "PRUNED"), mean


def _same(one: Told, other: Told) -> bool:
    if one[0] != other[0] or one[1] is None or other[1] is None:
        return one == other
    return math.isclose(one[1], other[1], rel_tol=1e-9)


def _curve(trial: Trial, metric: str) -> dict[int, float]:
    """The metric of a trial by rounds done; empty where it cannot be read."""
    with suppress(OSError, KeyError, pa.ArrowException):
        rows = pq.read_table(trial.folder / "rounds.parquet", columns=["round", metric])
        pairs = zip(*(rows[name].to_pylist() for name in ("round", metric)), strict=True)
        return {t + 1: value for t, value in pairs if value is not None and np.isfinite(value)}
    return {}


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
