"""Whether a run can continue, and from where.

Before anything starts `restore_resolved_keys` fills in what the run has resolved, and
`check_same_run` compares configs. The coordinator begins with `take_up`: it
finds the newest checkpoint that the run can continue from, and refuses one that another run has
written or that the ledger contradicts.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydpfl.config.overrides import flatten
from raydpfl.config.registry import choose
from raydpfl.config.yaml import read
from raydpfl.core.messages import State
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.methods import noise
from raydpfl.privacy import Ledger
from raydpfl.simulation import provenance
from raydpfl.simulation.checkpoint import Checkpoint, RunState, check_state, load
from raydpfl.simulation.plan import DISPLAY_SECTIONS, FREE_KEYS, Plan
from raydpfl.simulation.privacy_budget import FRESH_NOISE, Account
from raydpfl.storage.tables import StoredTable

# Keys that a run resolves before it writes its config, by the value that leaves them open.
RESOLVED_KEYS = {
    "client.chunk": "auto",
    "client.backend": "auto",
    **{f"noise.{key}": None for key in ("coefficients", "decays", "scales", "norm", "momentum")},
}


def take_up(
    plan: Plan, out: Path, tables: Mapping[str, StoredTable], resume: bool, fresh_noise: bool
) -> tuple[Plan, Account, RunState | None]:
    """Begins a run in the directory `out`, or continues it: the plan of the coming rounds, the
    account, and the state; the last is None before the first round. Raises `RunError` where the
    directory contradicts itself, or it would be another run.

    Args:
        plan: as it was made.
        out: the run directory.
        tables: the run's, by name; they continue with their rows.
        resume: whether to continue from the newest checkpoint, if there is one.
        fresh_noise: whether the noise is fresh, so that code, versions and processor may differ.
    """
    if fresh_noise and plan.individual:
        expected = "none with privacy.individual: what clients spent after the checkpoint is lost"
        raise ConfigError("--fresh-noise", True, expected)
    ledger = Ledger(out / "ledger.jsonl", resume=resume)

    def read_rows(checkpoint: Checkpoint) -> None:
        for name, table in tables.items():
            table.read(checkpoint.tables[name])

    checkpoint = load(out / "checkpoints", read_rows) if resume else None
    restart_round = (checkpoint.state.t if checkpoint else 0) if fresh_noise else None
    plan = plan.extend_history(ledger.segments, restart_round)
    account = Account(plan, ledger)
    if checkpoint is None:
        return plan, account, None
    state = checkpoint.state
    starts = initial_states(plan)
    state.states = {name: state.states.get(name, {}) for name in starts}
    check_origin(plan, checkpoint.origin, fresh_noise)
    for name, start in starts.items():
        missing_names = ", ".join(sorted(start.keys() - state.states[name].keys()))
        if missing_names:
            raise RunError(f"the checkpoint has no state {missing_names} of {name}")
    account.verify(state.t, state.bound)
    for name, table in tables.items():
        table.resume(checkpoint.tables[name])
    return plan, account, state


def initial_states(plan: Plan) -> dict[str, State]:
    """The states before the first round, by section, and clients' spent budgets."""
    experiment = plan.experiment
    members: dict[str, Any] = {
        "server": experiment.server,
        "bounding": experiment.bounding,
        "local": experiment.local,
    }
    members |= {f"measure.{probe.kind}": probe for probe in experiment.measure}
    states = {name: member.start(plan.d) for name, member in members.items()}
    for name, state in states.items():
        check_state(f"{members[name].kind}: start gives", state)
    return states | ({"individual": plan.individual.start()} if plan.individual else {})


def check_origin(plan: Plan, stored_origin: dict[str, str], fresh_noise: bool) -> None:
    """Raises `RunError` if something that the bits depend on has changed since the run began; with
    `fresh_noise` only the mechanism and the data count.
    """
    current_origin = plan.origin(stored_origin)
    if fresh_noise:
        keys = ("experiment", "data", "clients", "cohorts", "mechanism")
        stored_origin = {name: stored_origin[name] for name in keys if name in stored_origin}
        current_origin = {name: current_origin[name] for name in keys if name in current_origin}
    differences = provenance.differences(stored_origin, current_origin)
    if differences and fresh_noise:
        raise RunError(f"the run cannot go on, as it would be another: {differences}")
    if differences:
        bits = f"its bits would differ: {differences}"
        raise RunError(f"the run cannot go on as it began, as {bits}; {FRESH_NOISE}")


def restore_resolved_keys(experiment: Experiment, folder: Path) -> Experiment:
    """The experiment with what the run in `folder` has resolved, where it leaves that open: so a
    run that continues never resolves it differently, on another node or another day.
    """
    stored_values = flatten(_stored_config(folder))
    tree = experiment.to_dict()
    for key, open_value in RESOLVED_KEYS.items():
        section, name = key.split(".")
        values = tree[section]
        same_kind = values.get("kind") == stored_values.get(f"{section}.kind")
        if same_kind and key in stored_values and values.get(name) == open_value:
            values[name] = stored_values[key]
    return Experiment.from_dict(tree)


def _stored_config(folder: Path) -> dict[str, Any]:
    """What `config.yaml` of a run holds. Raises `ConfigError`."""
    path = folder / "config.yaml"
    if not os.path.lexists(path):
        raise ConfigError("--resume", str(folder), "the directory of a run; it has no config.yaml")
    config = read(path, "--resume")
    if not isinstance(config, dict) or not config:
        problem = "empty" if config in ({}, [], "") else "no mapping"
        expected = f"the directory of a run; its config.yaml is {problem}"
        raise ConfigError("--resume", str(folder), expected)
    return config


def check_same_run(experiment: Experiment, folder: Path) -> None:
    """Raises `ConfigError` when `folder` holds a run that would have computed something else."""
    stored_config = _stored_config(folder)
    requested_config = experiment.to_dict()
    longer = _adds_rounds(experiment, stored_config, folder)
    free = {*FREE_KEYS, *DISPLAY_SECTIONS, *(("rounds", "noise.rounds") if longer else ())}
    requested_values, stored_values = (_keys(tree) for tree in (requested_config, stored_config))
    for key in dict.fromkeys([*requested_values, *stored_values]):
        if requested_values.get(key) != stored_values.get(key) and key not in free:
            suffix = " or more" if key == "rounds" else ""
            expected = f"{stored_values.get(key)!r}{suffix}, as in the run to be resumed"
            raise ConfigError(key, requested_values.get(key), expected)


def check_repeatable(experiment: Experiment, fresh_noise: bool) -> None:
    """Raises `ConfigError` for a run whose noise is not the same again, unless it is fresh."""
    if not (fresh_noise or experiment.noise.repeatable):
        expected = "--fresh-noise as well, as the noise of this run is not repeatable; "
        raise ConfigError("--resume", True, expected + FRESH_NOISE)


def _keys(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config by section, or where a section has keys by these."""
    keys: dict[str, Any] = {}
    for section, value in tree.items():
        inner = value if isinstance(value, dict) else {}
        keys |= {f"{section}.{key}": inner[key] for key in inner} or {section: value}
    return keys


def _adds_rounds(experiment: Experiment, config: dict[str, Any], folder: Path) -> bool:
    """Whether it asks for more rounds than the run to be resumed, of the same noise. Raises
    `ConfigError` where the noise would be another, as its size is for a number of rounds.
    """
    rounds = config.get("rounds")
    if not isinstance(rounds, int) or experiment.rounds <= rounds:
        return False
    stored_noise: noise.Noise = choose("noise", config.get("noise"), noise.FAMILY, noise.Noise)
    calibrated_rounds = experiment.noise.calibrated_over(experiment.rounds)
    if calibrated_rounds == stored_noise.calibrated_over(rounds):
        return True
    expected = f"{rounds}, as in the run to be resumed, as noise.epsilon is for all rounds; or "
    override = stored_noise.extension(rounds)
    if override is None:
        expected += f"a new run from this one's model, model.init={folder}, with noise of its own: "
        expected += "what both spend adds up, and its guarantees are of its own rounds"
    else:
        expected += f"{override} too: the noise stays as it is, and guarantees say what all "
        expected += "rounds spend"
    raise ConfigError("rounds", experiment.rounds, expected)
