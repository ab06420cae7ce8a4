"""Optuna: which setting of a sweep comes next, where it proposes them (`propose_settings`), and a
sweep as a study in a storage of Optuna (`Dashboard`).

Its proposals do not depend on the order in which results arrive: setting k is proposed when the
results of all settings up to k - `ahead` have been reported, and of no other. So they are the same
on any cluster, and a resumed sweep repeats them, the finished settings answering at once.
"""

import importlib
import json
import logging
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError, one_line
from raydpfl.report.run_reader import read_table
from raydpfl.sweep.results import epsilons
from raydpfl.sweep.spaces import Interval, Options, Space
from raydpfl.sweep.sweep import Sweep
from raydpfl.sweep.trials import SearchSetting, Trial, identity, meaning

MAX_TEXT_LENGTH = 60  # characters of a value that is no number
log = logging.getLogger("raydpfl")


def optuna(
    field: str = "sweep.search", value: Any = "optuna", alternatives: str = "grid or random"
) -> Any:
    """The library. Raises `ConfigError` on the field that asks for it, with its `alternatives`,
    where it is not installed.
    """
    try:
        library = importlib.import_module("optuna")
    except ImportError:
        expected = f"{alternatives}; optuna needs pip install 'raydpfl[optuna]'"
        raise ConfigError(field, value, expected) from None
    library.logging.set_verbosity(library.logging.ERROR)
    return library


def propose_settings(
    sweep: Sweep, add: Callable[[dict[str, Any]], SearchSetting]
) -> Iterator[SearchSetting | None]:
    """The settings that Optuna's tree-structured Parzen estimator (Watanabe 2023) proposes, at most
    `sweep.ahead` of them without a result; None as long as the next has to wait for one. `add`
    makes the setting of some values; the same values have one setting.
    """
    library = optuna()
    metric = sweep.search.metric
    seed = int(stream(sweep.seed, Purpose.SWEEP).integers(1 << 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is marked experimental
        sampler = library.samplers.TPESampler(seed=seed, constant_liar=True)
    study = library.create_study(direction="maximize", sampler=sampler)
    spaces = list(sweep.spaces.items())  # known to Optuna by number, as it sorts them by name
    distributions = {str(k): _distribution(space) for k, (_, space) in enumerate(spaces)}
    settings: dict[str, SearchSetting] = {}
    queue: deque[tuple[Any, SearchSetting]] = deque()  # proposals without a reported result
    for _ in range(sweep.size):
        if len(queue) == sweep.search.ahead:
            proposal, setting = queue.popleft()
            while not setting.is_done:
                yield None
            mean = setting.mean(metric)
            if mean is None:
                study.tell(proposal, state=library.trial.TrialState.FAIL)
            else:
                study.tell(proposal, sweep.sign * mean)
        proposal = study.ask(distributions)
        values = {}
        for k, (key, space) in enumerate(spaces):
            param = proposal.params[str(k)]
            values[key] = space.options[param] if isinstance(space, Options) else float(param)
        name = identity(values)
        if name not in settings:
            settings[name] = add(values)
        queue.append((proposal, settings[name]))
        yield settings[name]


def _distribution(space: Space) -> Any:
    kinds = optuna().distributions
    if isinstance(space, Interval):
        return kinds.FloatDistribution(space.low, space.high, log=space.log)
    if space.ordered:
        return kinds.IntDistribution(0, len(space.options) - 1)
    return kinds.CategoricalDistribution(range(len(space.options)))


class Dashboard:
    """A sweep as a study in the storage that `sweep.storage` names: its dashboard, and all that
    reads Optuna's storages, then show any sweep, however its settings were proposed.

    The study is written and never read back into the sweep: a setting that is done becomes a trial
    of the study, named by its values, so that a resumed sweep adds what is missing. If the study
    has another result of a setting, one that the sweep does not have, or other values to choose
    from, it is deleted and written from the directory, with a warning. A storage that fails later
    is warned of once, and the sweep continues without it. `place` is the sweep's directory or its
    address, the last part of which is the name of the study; one that `has_begun` may have been
    moved.

    Raises `ConfigError` if the storage cannot be opened, or has another study of this name.
    """

    def __init__(self, sweep: Sweep, place: str, has_begun: bool = False):
        self.sweep = sweep
        self.place = place.rstrip("/")
        self.name = self.place.rpartition("/")[2]
        self.url = sweep.search.storage
        self._library = optuna("sweep.storage", self.url, "none")
        self._has_failed = False
        self._has_other_axes = False  # the study, than the sweep
        self._outcomes: dict[str, str] = {}  # in words, by setting
        self._axes = {key: self._axis(space) for key, space in sweep.spaces.items()}
        # what a resumed sweep has in common with what it was
        values = {key: space.probes[0] for key, space in sweep.spaces.items()}
        prefixes = tuple(f"{key}." for key in values)
        leaves = meaning(sweep.setting(values).experiment)
        leaves = {k: v for k, v in leaves.items() if not f"{k}.".startswith(prefixes)}
        self._mark = identity({"metric": sweep.search.metric, "keys": sorted(values), **leaves})
        try:
            self._open(has_begun)
        except ConfigError:
            raise
        except Exception as error:  # of any library that the URL names
            expected = f"a storage that Optuna can open ({one_line(error, 200)})"
            raise ConfigError("sweep.storage", self.url, expected) from None

    def _open(self, has_begun: bool) -> None:
        self._storage = self._library.storages.get_storage(self.url)
        if self.name not in self._library.get_all_study_names(self._storage):
            self._create()
            return
        self._study = self._library.load_study(study_name=self.name, storage=self._storage)
        facts = self._study.user_attrs
        is_elsewhere = facts.get("directory") != self.place and not has_begun
        if facts.get("sweep") != self._mark or is_elsewhere:
            expected = f"a storage without another study named {self.name}, as the directory is"
            raise ConfigError("sweep.storage", self.url, expected)
        self._study.set_user_attr("directory", self.place)
        for trial in self._study.get_trials(deepcopy=False):
            value = trial.value if trial.values else None
            self._outcomes[trial.user_attrs.get("setting", "")] = _words(trial.state.name, value)
            self._has_other_axes |= not self._takes_axes(trial)

    def _takes_axes(self, trial: Any) -> bool:
        """Whether the study of this trial can have trials of the sweep; it keeps its choices."""
        try:
            for key, axis in trial.distributions.items():
                self._library.distributions.check_distribution_compatibility(axis, self._axes[key])
        except (KeyError, ValueError):
            return False
        return True

    def _create(self) -> None:
        place = {"study_name": self.name, "storage": self._storage}
        direction = "maximize" if self.sweep.sign > 0 else "minimize"
        self._study = self._library.create_study(**place, direction=direction)
        self._study.set_user_attr("sweep", self._mark)
        self._study.set_user_attr("directory", self.place)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this is marked experimental
            self._study.set_metric_names([self.sweep.search.metric])
        self._outcomes = {}
        self._has_other_axes = False

    def show(self, settings: Sequence[SearchSetting], is_over: bool = False) -> None:
        """Adds the settings that are done. `is_over`: these are all that the sweep has."""
        if self._has_failed:
            return
        try:
            self._show({identity(setting.values): setting for setting in settings}, is_over)
        except Exception as error:  # of any library that the URL names
            self._has_failed = True
            consequence = "the sweep continues without it; --resume adds what is missing"
            log.warning("sweep.storage: %s; %s", one_line(error, 200), consequence)

    def _show(self, settings: dict[str, SearchSetting], is_over: bool) -> None:
        metric = self.sweep.search.metric
        outcomes = {}
        for name, setting in settings.items():
            if setting.is_done:
                mean = setting.mean(metric)  # a scheduler's stop is called pruning
                state = "FAIL" if mean is None else "COMPLETE" if setting.whole else "PRUNED"
                outcomes[name] = state, mean
        names = outcomes.keys() & self._outcomes
        mismatch = any(_words(*outcomes[name]) != self._outcomes[name] for name in names)
        mismatch |= self._has_other_axes
        if mismatch or (is_over and self._outcomes.keys() - settings.keys()):
            study_label = f"the study {self.name} in {self.url}"
            log.warning("%s does not match the sweep and is replaced", study_label)
            self._library.delete_study(study_name=self.name, storage=self._storage)
            self._create()
        for name in [name for name in outcomes if name not in self._outcomes]:
            self._study.add_trial(self._trial(name, settings[name], *outcomes[name]))
            self._outcomes[name] = _words(*outcomes[name])

    def _trial(self, name: str, setting: SearchSetting, state: str, value: float | None) -> Any:
        facts: dict[str, Any] = {"setting": name, "seeds": [trial.seed for trial in setting.trials]}
        facts["directories"] = [f"trials/{trial.folder.name}" for trial in setting.trials]
        for trial in setting.trials:
            for column, epsilon in epsilons(trial).items():
                if np.isfinite(epsilon):
                    facts[column] = max(facts.get(column, 0.0), epsilon)
        return self._library.trial.create_trial(
            state=self._library.trial.TrialState[state],
            value=value,
            params={
                key: (_text if hasattr(axis, "choices") else float)(setting.values[key])
                for key, axis in self._axes.items()
            },
            distributions=self._axes,
            user_attrs=facts,
            intermediate_values=_curve(setting.trials[0], self.sweep.search.metric),
        )

    def _axis(self, space: Space) -> Any:
        kinds = self._library.distributions
        if isinstance(space, Interval):
            return _distribution(space)
        if all(type(value) in (int, float) for value in space.options):
            return kinds.FloatDistribution(min(space.options), max(space.options))
        return kinds.CategoricalDistribution([*dict.fromkeys(map(_text, space.options))])


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= MAX_TEXT_LENGTH else f"{text[: MAX_TEXT_LENGTH - 3]}..."


def _words(state: str, value: float | None) -> str:
    """An outcome, to the digits that any database keeps."""
    return state if value is None else f"{state} {value:.6g}"


def _curve(trial: Trial, metric: str) -> dict[int, float]:
    """The metric of a trial by rounds done; empty where it cannot be read."""
    table = read_table(trial.folder / "rounds.parquet")
    if not {"round", metric} <= {*table.column_names}:
        return {}
    pairs = zip(table["round"].to_pylist(), table[metric].to_pylist(), strict=True)
    return {t + 1: value for t, value in pairs if value is not None and np.isfinite(value)}
