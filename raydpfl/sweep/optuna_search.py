"""Which setting of a sweep comes next, where Optuna proposes it.

Optuna is asked and told in an order of its own making, whatever order the results arrive in:
setting k is proposed when the results of all settings up to k - `ahead` have been told, and of no
other. So its proposals are the same on any cluster, and a resumed sweep asks and tells the same
again, the finished settings answering at once.
"""

from __future__ import annotations

import importlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.sweep.spaces import Interval, Space
from raydpfl.sweep.sweep import Setting, Sweep
from raydpfl.sweep.trial_folders import identity


def optuna(
    field: str = "sweep.search", value: Any = "optuna", other: str = "grid or random"
) -> Any:
    """The library, which is not installed with the package.

    Args:
        field, value: what asks for it.
        other: what there is without it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        expected = f"{other}; optuna needs pip install 'raydpfl[optuna]'"
        raise ConfigError(field, value, expected) from None


def guided(sweep: Sweep, add: Callable[[dict[str, Any]], Setting]) -> Iterator[Setting | None]:
    """The settings that Optuna's tree-structured Parzen estimator (Watanabe 2023) proposes.

    Args:
        sweep: With `sweep.samples` settings, at most `sweep.ahead` of them without a result.
        add: Makes the setting of some values. Values that are proposed again have it again.

    Yields:
        The next setting, or None as long as it has to wait for a result.
    """
    library = optuna()
    search = sweep.search
    spaces = list(sweep.spaces.items())  # known to Optuna by number, as it goes by their names
    distributions = {str(place): _distribution(space) for place, (_, space) in enumerate(spaces)}
    study = library.create_study(direction="maximize", sampler=_sampler(sweep))
    made: dict[str, Setting] = {}
    pending: deque[tuple[Any, Setting]] = deque()  # asked and not yet told
    for _ in range(sweep.size):
        if len(pending) == search.ahead:
            asked, setting = pending.popleft()
            while not setting.done:
                yield None
            mean = setting.mean(search.metric)
            if mean is None:
                study.tell(asked, state=library.trial.TrialState.FAIL)
            else:
                study.tell(asked, sweep.sign * mean)
        asked = study.ask(distributions)
        values = {key: _value(space, asked.params[str(k)]) for k, (key, space) in enumerate(spaces)}
        name = identity(values)
        if name not in made:
            made[name] = add(values)
        pending.append((asked, made[name]))
        yield made[name]


def _sampler(sweep: Sweep) -> Any:
    library = optuna()
    library.logging.set_verbosity(library.logging.ERROR)
    seed = int(stream(sweep.seed, Purpose.SWEEP).integers(1 << 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant_liar is marked experimental
        return library.samplers.TPESampler(seed=seed, constant_liar=True)


def _distribution(space: Space) -> Any:
    kinds = optuna().distributions
    if isinstance(space, Interval):
        return kinds.FloatDistribution(space.low, space.high, log=space.log)
    if space.ordered:
        return kinds.IntDistribution(0, len(space.options) - 1)
    return kinds.CategoricalDistribution(range(len(space.options)))


def _value(space: Space, drawn: Any) -> Any:
    return float(drawn) if isinstance(space, Interval) else space.options[int(drawn)]
