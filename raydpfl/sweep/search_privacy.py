"""What a whole search spends: the composition over all of its trials, which are there to be seen;
less where the best of a random number of trials is released alone (`sweep.private`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.privacy import Composition, RunRelease
from raydpfl.simulation.composed_runs import StoredRun, best_of_trials, compose_trials
from raydpfl.sweep.spaces import Interval
from raydpfl.sweep.sweep import Sweep
from raydpfl.sweep.trials import Trial, shown, trained


def of_the_best(sweep: Sweep, data_root: Path | None) -> Composition:
    """What a private search spends, before it begins: its trials are drawn among `Sweep.support`.
    Raises `ConfigError` for several relations or deltas, and for an interval that the noise of a
    trial depends on.
    """
    assert sweep.search.private
    values, trials = zip(*sweep.support(), strict=True)
    names = [shown(at) or "every trial" for at in values]
    runs = [StoredRun(*each) for each in zip(names, trials, strict=True)]
    joint = best_of_trials(sweep.search.private.repetition(), runs, data_root)
    for key, space in sweep.spaces.items():
        if isinstance(space, Interval) and key in values[0]:
            releases: dict[Any, set[tuple[str, int]]] = {}
            for at, run in zip(values, joint.runs, strict=True):
                assert isinstance(run, RunRelease)
                releases.setdefault(at[key], set()).add((run.mechanism.digest(), run.rounds))
            if len({*map(frozenset, releases.values())}) > 1:
                expected = "a grid with sweep.private, which accounts for the noise of each value"
                raise ConfigError(key, [space.low, space.high], expected)
    return joint


def of_all(
    trials: Sequence[Trial], folder: Path, sweep: Sweep, data_root: Path | None
) -> Composition | None:
    """What all runs in the directory of a search have spent together; None: none was private."""
    own = {trial.folder.name for trial in trials}
    runs = [(trial.folder, trial.experiment) for trial in trials]
    others = [folder / "trials" / name for name in trained(folder / "trials") if name not in own]
    try:
        # what was tried before the config was changed
        runs += [(path, Experiment.from_dict(read(path / "config.yaml"))) for path in others]
    except ConfigError as error:
        return Composition(notes=(f"a run in trials/ cannot be read ({error})",))
    # proposals depend on the results, and so does a change of the config
    return together(runs, data_root, sweep.search.search == "optuna" or bool(others))


def together(
    runs: Iterable[tuple[Path, Experiment]], data_root: Path | None, adaptive: bool = False
) -> Composition | None:
    """What runs spend together, those that have begun: (directory, experiment) of each. None: none
    of them was private.
    """
    begun = [
        StoredRun.of(path.name, experiment, path)
        for path, experiment in runs
        if experiment.private and (path / "ledger.jsonl").exists()
    ]
    # runs that differ in nothing that they release are one, as long as the longest
    begun.sort(key=lambda run: run.experiment.rounds)
    # common noise is that of other releases too
    longest = {
        (run.key, run.name if run.experiment.noise.of_seed else ""): run
        for run in begun
        if run.ledger
    }
    if not longest:
        return None
    try:
        joint = compose_trials([*longest.values()], data_root, adaptive)
    except ConfigError as error:
        return Composition(notes=(error.expected,))
    return _worst(joint)


def _worst(joint: Sequence[Composition]) -> Composition:
    """Of the clients of each seed that divides the rows in its own way, those that spend most."""

    def spent(one: Composition) -> float:
        return max(guarantee.epsilon for guarantee in one.guarantees)

    worst = max(joint, key=spent)
    notes = worst.notes
    if len(joint) > 1:
        notes += (
            f"that is of the clients of one seed, as each of {len(joint)} divides the rows in its "
            "own way (data.seed: the same)",
        )
    return replace(worst, notes=notes)
