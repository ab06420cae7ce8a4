"""A replay: the same rounds on neighbouring populations, under the same keys.

Each world is a run of the experiment itself, in this process, in which all clients send what an
adversary would: far beyond the bound and around it, the largest numbers, NaN, infinity, denormals,
nothing. A neighbouring world differs in one client, the victim: it sends something else, or
nothing, or is not there. Where clients keep nothing, the victim may be another in every round. The
noise is the same, as its keys are. What is released in a round of the first world is taken up in
all others, so that every round is compared given one history, as the composition of rounds has it.
So nothing may differ but

- each released sum, by no more than the sensitivity that the mechanism declares, and all sums of a
  round together, in stds of their noise, by no more than `Mechanism.mu`;
- what the victim alone keeps.

Cohorts, weights, bounds, all that is sent to clients, what the others send, models, states, the
ledger and the number of rounds are compared with themselves. In addition clients train on their own
rows for some rounds, and the victim on others: that is the code of every run, and the sums of its
compiled loops. What is released of the first world is held against the noise that was accounted
for, with a false alarm in 1e-9 of sound runs.

>>> experiment = Experiment.from_dict({
...     "rounds": 2,
...     "data": {"kind": "synthetic", "clients": 20, "samples": 5, "test_samples": 10},
...     "model": {"kind": "softmax"},
...     "selection": {"kind": "uniform", "cohort": 5},
...     "bounding": {"kind": "clip", "bound": 1.0},
...     "noise": {"kind": "gaussian", "multiplier": 1.0},
... })
>>> replay(experiment).passed
True
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from raydpfl.audit import Audit, checks, local_step_canaries, observers, result_folder
from raydpfl.audit.checks import Check
from raydpfl.audit.client_canaries import ClientCanaries
from raydpfl.audit.replay.adversaries import (
    FALSE_ALARM,
    LESS,
    OVERHEAD,
    AdversaryWorld,
    EveryoneWorld,
)
from raydpfl.audit.replay.record import Neighbour, mechanism_of
from raydpfl.audit.replay.world import TrainingWorld, World
from raydpfl.check import bounding
from raydpfl.check.contract import check_clause
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve

VICTIMS = 2
TRAINED = 2  # rounds in which clients train
NEIGHBOURS = 12  # rounds of a neighbouring world at most, where clients take no turns
CANARIES = 200  # samples, where noise is drawn at local steps
WORK = 2e8  # as `LESS`, of the first world


@dataclass(frozen=True)
class Replay(Audit):
    """What the worlds of a replay come to: an audit whose runs are worlds, without views."""

    rounds: int = 0  # of the first world

    @property
    def verdict(self) -> str:
        """The outcome in plain sentences, with what was not looked at."""
        unseen = f"Not looked at: {'; '.join(self.unseen)}." if self.unseen else ""
        if self.failures:
            faults = "; ".join(self.failures)
            return f"What ran is not what was accounted for ({faults}). {unseen}"
        names = ", ".join(check.name for check in self.checks)
        return (
            f"In {self.runs} worlds of up to {self.rounds} rounds ({names}) nothing moves "
            f"by more than the mechanism declares. {unseen}"
        )

    @property
    def false_alarm(self) -> dict[str, float]:
        return {"checks": sum(check.false_alarm for check in self.checks)}

    def text(self) -> str:
        """The report, for a terminal."""
        return "\n".join([*(check.line() for check in self.checks), self.verdict])


def replay(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    data_root: str | Path | None = None,
    on_world: Callable[[int, int], None] = lambda done, of: None,
) -> Replay:
    """Replays an experiment, in this process, whatever `client.actors` says. Raises `ConfigError`
    if it claims no privacy.

    Args:
        experiment: what is replayed.
        out: a new or empty directory for `audit.json` and `config.yaml`, which `raydpfl report`
            shows, or its address; None: no files are written.
        data_root: the folder of data sets.
        on_world: is called with the worlds done, and of how many.
    """
    with result_folder(out) as write:
        if not experiment.private:
            expected = "gaussian: without noise nothing is claimed, and there is nothing to replay"
            raise ConfigError("noise.kind", experiment.noise.kind, expected)
        if not experiment.noise.repeatable:
            expected = "keyed in a replay, in whose worlds the noise is the same"
            raise ConfigError("noise.source", "system", expected)
        plan = resolve(experiment, Path(data_root) if data_root else None)
        world_plan = _world_plan(plan)
        worlds = _worlds(world_plan, on_world)
        step_checks, unseen = _check_steps(world_plan)
        if experiment.evaluate.stop is not None:
            unseen.append("early stopping (evaluate.stop)")
        report = _verdict(world_plan, worlds, step_checks, unseen)
        write(plan, report.to_dict(), None)
    return report


def _world_plan(plan: Plan) -> Plan:
    """The plan of the worlds: another release than the run's own, in this process, in which clients
    that fail are left out. Nothing is measured, and nothing evaluated that is not accounted for.
    """
    e = plan.experiment
    on_error = e.client.on_error if mechanism_of(plan).by_draws else "drop"
    client = e.client.model_copy(update={"actors": 0, "on_error": on_error})
    evaluate_update: dict[str, Any] = {"test": False, "stop": None}
    if e.evaluate.survey is None:
        evaluate_update |= {"every": e.rounds + 1, "per_client": None, "validation": 0.0}
    evaluate = e.evaluate.model_copy(update=evaluate_update)
    update = {"client": client, "measure": (), "track": (), "evaluate": evaluate}
    quiet_experiment = e.model_copy(update=update)
    return replace(plan, experiment=quiet_experiment, platform={**plan.platform, "audit": "replay"})


def _rounds(plan: Plan, work: float) -> int:
    """So many rounds of a world as this work allows, two at least."""
    round_work = max(plan.cohort, 1) * (plan.d + OVERHEAD)
    return min(plan.experiment.rounds, max(2, int(work / round_work)))


def _worlds(plan: Plan, on_world: Callable[[int, int], None]) -> list[World]:
    """All worlds, the first of each kind before its neighbours. With noise at local steps, whose
    sums are in no adversary's hands, those alone in which clients train.

    All rounds of the first world of adversaries are compared with a neighbour. Where clients keep
    nothing from one round to the next, another of them may differ in every round; else the same
    does in all.
    """
    short_rounds, long_rounds = min(_rounds(plan, LESS), NEIGHBOURS), _rounds(plan, WORK)
    is_stateful = bool(plan.experiment.stateful or plan.individual)  # budgets run out later
    if is_stateful:
        short_rounds = long_rounds
    victims = _victims(plan, short_rounds)
    client_canaries = ClientCanaries(plan.experiment.seed, plan.d, np.unique(victims), False)
    adversaries = partial(AdversaryWorld, canaries=client_canaries)
    train_rounds = min(TRAINED, short_rounds)
    kinds: list[tuple[Callable[..., World], int, int, list[Neighbour]]] = [
        (TrainingWorld, train_rounds, train_rounds, [Neighbour(_victims(plan, train_rounds)[0])])
    ]
    if not mechanism_of(plan).by_draws:
        cases = (False, 1), (True, 0), (False, 5)
        neighbours = [Neighbour(victims[0], *case) for case in cases]
        neighbours += [Neighbour(victim, *case) for victim in victims[1:] for case in cases[:2]]
        neighbours += [Neighbour(-1, *case, is_rotating=True) for case in cases if not is_stateful]
        everyone = partial(EveryoneWorld, canaries=client_canaries)
        kinds = [
            (adversaries, long_rounds, short_rounds, neighbours),
            (everyone, min(2, plan.experiment.rounds), 0, []),
            *kinds,
        ]
    world_count = sum(1 + len(neighbours) for *_, neighbours in kinds)
    worlds: list[World] = []
    for kind, rounds, neighbour_rounds, neighbours in kinds:
        base: World | None = None
        for neighbour in (None, *neighbours):
            limit = rounds if neighbour is None or neighbour.is_rotating else neighbour_rounds
            limit = limit if base is None else min(limit, len(base.records))
            with tempfile.TemporaryDirectory(prefix="raydpfl-replay-") as out:
                world = kind(plan, out, neighbour, base)
                world.carry_out(limit)
            base = base or world
            worlds.append(world)
            on_world(len(worlds), world_count)
    return worlds


def _victims(plan: Plan, rounds: int) -> list[int]:
    """Of the clients that take part in the first rounds those that weigh most, and then those that
    take part most often.
    """
    e = plan.experiment
    draws = [e.selection.exposed(plan.cohort_seed(), t, plan.population) for t in range(rounds)]
    clients, counts = np.unique(np.concatenate(draws), return_counts=True)
    if not len(clients):
        return [0]
    weights = np.abs(plan.weights(clients))
    order = np.lexsort((clients, -counts, -weights))
    return [int(client) for client in clients[order][:VICTIMS]]


def _check_steps(plan: Plan) -> tuple[list[Check], list[str]]:
    """Of noise at local steps: updates done again as plainly as possible, with the noise that was
    accounted for, and what is not looked at, in words.
    """
    if not mechanism_of(plan).by_draws:
        return [], []
    noise_checks = checks.noise_of_steps(plan, FALSE_ALARM)
    try:
        delta = plan.experiment.terms.delta
        run = local_step_canaries.run(plan, CANARIES, delta, lambda done, of: None)
    except ConfigError as error:
        return noise_checks, [f"local steps ({error})"]
    curve_check = checks.curve(run.delta_lower_bounds(run.printed))
    results = [checks.ledger([run]), run.check_steps(), *noise_checks, curve_check]
    return [check for check in results if check], [*run.unseen()]


def _verdict(
    plan: Plan, worlds: Sequence[World], step_checks: list[Check], unseen: list[str]
) -> Replay:
    moves = [move for world in worlds for move in world.moves]
    faults = [fault for world in worlds for fault in world.faults]
    rounds = f"{sum(len(world.records) for world in worlds)} rounds of {len(worlds)} worlds"
    sensitivity_finding = f"no sum moves by more than is declared in {rounds}"
    flow_finding = f"all that is no sum of clients is the same in {rounds}"
    results = [
        Check("sensitivity", not moves, "; ".join(moves[:3]) or sensitivity_finding),
        Check("control flow", not faults, "; ".join(faults[:3]) or flow_finding),
    ]
    base = worlds[0]
    if isinstance(base, AdversaryWorld) and base.records and not base.broken:
        results += checks.check_runs([base], FALSE_ALARM)
        cohorts = [record.cohort for record in base.records if record.cohort is not None]
        results.append(checks.noise_of_draws(plan, cohorts, FALSE_ALARM))
        results += filter(None, [checks.curve(observers.delta_lower_bounds([base], []))])
    step_names = {check.name for check in step_checks}
    if mechanism_of(plan).by_draws and base.records and "ledger" not in step_names:
        results.append(checks.ledger([base]))
    for world in worlds:
        results += world.checks() if isinstance(world, EveryoneWorld) and not world.broken else []
    results += step_checks
    factors = check_clause(bounding.bound, SimpleNamespace(member=plan.experiment.bounding))
    if factors is not None and plan.experiment.bounding.initial_bound is not None:
        results.append(Check("factors", bool(factors.kept), factors.finding))
    rest = plan.experiment.rounds - len(base.records)
    if rest:
        reason = f" ({base.end_reason})" if base.end_reason else ""
        unseen.append(f"the last {rest} rounds{reason}")
    round_sets = (world.compared_rounds for world in worlds if world.first is base)
    gaps = sorted({*range(len(base.records))}.difference(*round_sets))
    if gaps:
        suffix = f" and {len(gaps) - 20} more" if len(gaps) > 20 else ""
        unseen.append(f"rounds in which no client differs ({str(gaps[:20])[1:-1]}{suffix})")
    notes = tuple(
        f"world: {'adversaries' if isinstance(world, AdversaryWorld) else 'clients that train'}, "
        f"{world.words}, {len(world.records)} rounds"
        for world in worlds
    )
    return Replay(
        views=[],
        checks=results,
        runs=len(worlds),
        seed=plan.experiment.seed,
        unseen=tuple(unseen),
        notes=notes,
        rounds=len(base.records),
    )
