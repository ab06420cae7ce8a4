"""What runs on the same people spend together: `raydpfl budget RUN RUN ...`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np

from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.privacy import (
    Composition,
    LocalSteps,
    Mechanism,
    Repetition,
    RunRelease,
    Segment,
    StepsRelease,
    best_of,
    compose_step_runs,
    read_entries,
    rigorous,
    segments_of,
    together,
)
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.planned_guarantee import check_mechanism, strip_model
from raydpfl.simulation.resolution import resolve

# the sections on which a run's releases depend, next to those that its members name
ACCOUNTED = ("rounds", "data", "selection", "bounding", "noise", "weights", "privacy", "evaluate")


@dataclass(frozen=True)
class StoredRun:
    """A run by its `name`: its experiment, and the lines of its ledger; None: it has not begun, and
    all its rounds count. `in_full`: they do, however far it has come.
    """

    name: str
    experiment: Experiment
    ledger: Sequence[dict[str, Any]] | None = None
    in_full: bool = False

    @classmethod
    def of(cls, name: str, experiment: Experiment, folder: Path | None) -> StoredRun:
        """The run in a directory; None: only its config is there. Raises `ConfigError`."""
        if folder is None:
            return cls(name, experiment)
        path = folder / "ledger.jsonl"
        try:
            text = path.read_bytes() if path.exists() else b""
            # a line torn by a kill was never released
            return cls(name, experiment, read_entries(Path(path.name), text.split(b"\n")[:-1]))
        except (OSError, RunError) as error:
            raise ConfigError("RUN", name, f"a run whose ledger can be read ({error})") from None

    @property
    def keys(self) -> tuple[str, ...]:
        """What tells its noise from that of others, in its ledger, the last of it at the end; of
        noise of the system, which no run has again, its name too.
        """
        keys = tuple(dict.fromkeys(str(line["key"]) for line in self.ledger or ()))
        own = "" if self.experiment.noise.repeatable else self.name
        return tuple(f"{key}{own}" for key in keys)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The rounds that count, divided where it was restarted with fresh noise."""
        segments = segments_of(self.ledger or ())
        if self.in_full and segments:
            segments = (*segments[:-1], replace(segments[-1], end=self.experiment.rounds))
        return segments

    @property
    def rounds(self) -> int:
        """Those that count: in its ledger, or all."""
        if self.ledger is None or self.in_full:
            return self.experiment.rounds
        return self.ledger[-1]["round"] + 1 if self.ledger else 0


def compose(
    runs: Sequence[StoredRun], data_root: Path | None = None, delta: float | None = None
) -> Composition:
    """What holds against an observer of all the runs, by the rigorous accountants that any of them
    names, at `delta` (None: that of all runs). Nothing is trained. Raises `ConfigError` where a run
    has no noise, runs have different clients, the same noise or different deltas, or some protect
    clients and others samples.
    """
    plans = [_plan(run, data_root) for run in runs]
    _check_steps(runs, plans)
    for (run_a, plan_a), (run_b, plan_b) in combinations(zip(runs, plans, strict=True), 2):
        if ({*run_a.keys} or {plan_a.noise_key}) & ({*run_b.keys} or {plan_b.noise_key}):
            expected = f"runs with noise of their own; {run_a.name} and {run_b.name} have the "
            expected += "same (one release, or two whose difference is free of noise: noise.common)"
            raise ConfigError("RUN", run_b.name, expected)
        _check_people(run_a.name, run_b.name, plan_a, plan_b)
    deltas = sorted({plan.experiment.terms.delta for plan in plans})
    if delta is None and len(deltas) > 1:
        expected = f"one, at which all runs compose; theirs are {', '.join(map(str, deltas))}"
        raise ConfigError("--delta", None, expected)
    accountants = dict.fromkeys(name for plan in plans for name in rigorous(plan.accountants))
    delta = deltas[0] if delta is None else delta
    return _compose_plans([*zip(runs, plans, strict=True)], delta, [*accountants], adaptive=True)


def _compose_plans(
    runs: Sequence[tuple[StoredRun, Plan]], delta: float, accountants: Sequence[str], adaptive: bool
) -> Composition:
    if any(_has_step_noise(plan) for _, plan in runs):
        steps = [released_by_steps(run, plan) for run, plan in runs]
        return compose_step_runs(steps, delta, accountants, adaptive)
    return together([release_of(run, plan) for run, plan in runs], delta, accountants, adaptive)


def compose_trials(
    runs: Sequence[StoredRun], data_root: Path | None = None, adaptive: bool = False
) -> list[Composition]:
    """As `compose`, what trials of a search spend together, for the clients of each seed that
    divides rows in a way of its own; clients that the data name are the same for all. All rounds
    count, as where a trial stops depends on the data, and what it released before a restart.
    """
    if any(run.experiment.noise.has_common_noise for run in runs) and len(runs) > 1:
        raise ConfigError("noise.common", True, "noise of its own for each of the runs")
    populations: dict[str, list[tuple[StoredRun, Plan]]] = {}
    plans = _plans(runs, data_root)
    _check_steps(runs, plans)
    for run, plan in zip(runs, plans, strict=True):
        people = plan.experiment.data.kind if _has_fixed_people(plan) else repr(_people(plan))
        populations.setdefault(people, []).append((run, plan))
    on_file = runs[0].experiment.data.location != "generated"
    if len(populations) > 1 and on_file and _has_step_noise(plans[0]):
        expected = "the same for all runs, as each sample is in those of every seed (data.seed)"
        raise ConfigError("data.seed", None, expected)
    compositions = []
    for population_runs in populations.values():
        plan = population_runs[0][1]
        full_runs = [
            (replace(run, in_full=True), trial_plan) for run, trial_plan in population_runs
        ]
        delta = min(trial_plan.experiment.terms.delta for _, trial_plan in population_runs)
        compositions.append(_compose_plans(full_runs, delta, rigorous(plan.accountants), adaptive))
    return compositions


def best_of_trials(
    repetition: Repetition, runs: Sequence[StoredRun], data_root: Path | None = None
) -> Composition:
    """What a search spends of which the best trial alone is released, every trial being one of
    `runs`, with noise on sums and any seed. Arguments and errors are those of `compose`.
    """
    plans = _plans(runs, data_root)
    releases = []
    for run, plan in zip(runs, plans, strict=True):
        release = release_of(run, plan)
        # how often clients are drawn depends on the seed
        counts_participations = release.mechanism.sampling.by_participation
        rounds = run.experiment.rounds if counts_participations else release.rounds
        releases.append(replace(release, rounds=rounds, participations=None))
    terms = {plan.experiment.terms for plan in plans}
    if len(terms) > 1:
        expected = "one relation and delta for all trials of a private search"
        raise ConfigError("sweep.private", repetition.runs, expected)
    return best_of(repetition, releases, terms.pop().delta, rigorous(plans[0].accountants))


def _plans(runs: Sequence[StoredRun], data_root: Path | None) -> list[Plan]:
    """Plans of runs, one for all that differ in nothing that bears on what they release."""
    plans: dict[str, Plan] = {}
    keys = []
    for run in runs:
        accounted_sections = {"seed", *ACCOUNTED, *run.experiment.accounted_with()}
        if run.experiment.noise.drawn_by() == "step":
            accounted_sections.add("local")  # its steps and batches
        keys.append(run.experiment.model_dump_json(include=accounted_sections))
        if keys[-1] not in plans:
            plans[keys[-1]] = _plan(run, data_root)
    return [plans[key] for key in keys]


def _plan(run: StoredRun, data_root: Path | None) -> Plan:
    experiment = strip_model(run.experiment)
    if not experiment.private:
        raise ConfigError("RUN", run.name, f"a run with noise; {run.name} has no noise")
    plan = resolve(experiment, data_root)
    check_mechanism(run.name, plan, run.ledger or ())
    return plan


def _has_step_noise(plan: Plan) -> bool:
    return plan.experiment.noise.drawn_by() == "step"


def _check_steps(runs: Sequence[StoredRun], plans: Sequence[Plan]) -> None:
    """Raises `ConfigError` unless all runs protect samples, or all clients, and for a restarted one
    with noise at local steps.
    """
    for run, plan in zip(runs, plans, strict=True):
        if _has_step_noise(plan) != _has_step_noise(plans[0]):
            names = (runs[0].name, run.name) if _has_step_noise(plan) else (run.name, runs[0].name)
            expected = f"runs that protect the same; {names[1]} has noise at local steps, which "
            expected += f"protects samples, and {names[0]} protects clients"
            raise ConfigError("RUN", run.name, expected)
        if _has_step_noise(plan) and any(line.get("restart") for line in run.ledger or ()):
            expected = "a run without --fresh-noise, whose batches then are others; "
            raise ConfigError("RUN", run.name, f"{expected}{run.name} had it")


def _check_people(name: str, second_name: str, plan: Plan, second_plan: Plan) -> None:
    """Raises `ConfigError` unless two runs have the same clients, held-out rows aside."""
    if _people(plan) == _people(second_plan) or _rows(plan) == _rows(second_plan):
        return
    reason = "their data sections differ"
    if plan.experiment.data == second_plan.experiment.data:
        seeds = f"seeds {plan.experiment.seed} and {second_plan.experiment.seed}"
        reason = f"{seeds} divide the rows in other ways; data.seed fixes it"
    expected = f"runs on the same clients; {name} and {second_name} have others ({reason})"
    if not _has_step_noise(plan):
        expected += ". Of different people each run's own epsilon holds"
    raise ConfigError("RUN", second_name, expected)


def _has_fixed_people(plan: Plan) -> bool:
    """Whether the data name the people that are protected, whatever the seed."""
    return _client_ids(plan) is not None and not _has_step_noise(plan)


def _client_ids(plan: Plan) -> Any:
    """A digest of the names of the clients in order; None: the data name none."""
    unnamed = plan.shards.name if plan.experiment.data.names_clients else None
    return _digests(plan).get("ids.arrow", unnamed)


def _digests(plan: Plan) -> dict[str, Any]:
    """Digests of the files of the prepared data, by name."""
    return json.loads((plan.shards / "digests.json").read_text())["files"]


def _people(plan: Plan) -> Any:
    """The data by which rows are divided among clients."""
    data = plan.experiment.data
    division = data.model_dump(mode="json", include=set(data.division))
    if _has_fixed_people(plan):
        return division, None, None
    seed = plan.experiment.seed if data.seed is None else data.seed
    held_out = plan.experiment.evaluate.held_out
    return division, seed, held_out if isinstance(held_out, dict) else None


def _rows(plan: Plan) -> list[Any]:
    """Digests of the rows of the clients."""
    files = _digests(plan)
    row_digests = [files.get(f"{name}.arrow", plan.shards.name) for name in ("train", "clients")]
    return [*row_digests, files.get("rows.arrow")]


def released_by_steps(run: StoredRun, plan: Plan) -> StepsRelease:
    """What a run with noise at local steps has released."""
    release = cast(LocalSteps, plan.mechanism)
    counts = np.zeros(len(release.samples), np.int64)
    cohorts = []
    for clients in plan.draws(run.rounds):
        np.add.at(counts, clients, 1)
        cohorts.append(hashlib.sha256(clients.tobytes()).hexdigest())
    rows = f"{release.sampling}, {plan.experiment.evaluate.held_out}"
    return StepsRelease(run.name, release, counts, plan.experiment.seed, tuple(cohorts), rows)


def release_of(run: StoredRun, plan: Plan) -> RunRelease:
    """What a run has released."""
    experiment = plan.experiment
    lines, rounds = run.ledger, run.rounds
    plan = plan.extend_history(run.segments)
    composed_rounds = 0
    if rounds:
        composed_rounds = int(plan.composed_rounds[rounds - 1]) + plan.extra_composed_rounds
    mechanism = cast(Mechanism, plan.mechanism)
    surveys = int(plan.surveys[rounds - 1]) if rounds else 0
    if mechanism.survey and lines and not run.in_full:
        surveys = sum(line.get("survey_std", 0.0) > 0 for line in lines)
    has_counts = experiment.noise.stands_for is None and not plan.repeated
    origin = plan.origin()
    facts: list[Any] = [experiment.selection.meaning(), origin["clients"], origin["cohorts"]]
    facts += [_client_ids(plan), plan.first, *map(astuple, plan.history)]
    return RunRelease(
        name=run.name,
        mechanism=mechanism.with_surveys(surveys),
        relation=experiment.relation,
        rounds=composed_rounds,
        participations=max(plan.participations(rounds).values(), default=0) if has_counts else None,
        seed=experiment.seed,
        cohorts=json.dumps(facts, sort_keys=True),
    )
