"""The coordinator: one private federated run, round by round.

A round, as `Coordinator.round` reads: account for it (the ledger first: spending is on disk before
anything is released), select the cohort, broadcast the model and take up the exact sum of what the
clients send, step the server, measure, record. On hardware of one kind the model after round t is a
function of (experiment, seed, t) alone.
"""

import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl import models
from raydpfl.core import exact_sum
from raydpfl.core.messages import BOUNDS, Broadcast, ChunkResult, Columns, Facts, Grid, Work
from raydpfl.data import Shards
from raydpfl.errors import RunError
from raydpfl.methods.hook_values import array_of
from raydpfl.methods.noise import SideQuery
from raydpfl.methods.probes import Finished, Probe, Round
from raydpfl.methods.selection import Cohort
from raydpfl.simulation import provenance, sampling_monitor, scheduler
from raydpfl.simulation.checkpoint import RunState
from raydpfl.simulation.noise_monitor import MonitoredNoise, check_whitening
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import InlinePool, Pool
from raydpfl.simulation.recorder import Recorder, join_columns, open_tables
from raydpfl.simulation.resume import initial_states, take_up
from raydpfl.storage.run_files import Clock
from raydpfl.training import backends


class Coordinator:
    """Runs the rounds of a plan in the directory `out`. `pool`: its clients; None: in this process.
    With `resume` it goes on from the newest checkpoint in `out`, if any; with `fresh_noise` under
    fresh noise, so that code, versions and processor may be others than those it began with.
    """

    def __init__(
        self,
        plan: Plan,
        out: str,
        pool: Pool | None = None,
        resume: bool = False,
        fresh_noise: bool = False,
    ):
        self.plan = plan
        self.experiment = plan.experiment
        self.out = Path(out)
        self._pool = pool
        self._resume = resume
        self._fresh_noise = fresh_noise
        self._measurements: Iterator[tuple[int, int]] | None = None
        self._measured_values: dict[str, Any] = {}  # of the finished run, by probe
        self._progress = 1, 1

    def start(self) -> tuple[int, list[str]]:
        """Takes up the run and starts its clients; the id of this process, and the warnings. Raises
        `RunError` for a run directory that contradicts itself.
        """
        with captured_warnings() as warnings:
            self._take_up()
        return os.getpid(), warnings

    def _take_up(self) -> None:
        self.shards = Shards.open(self.plan.shards)
        tables = open_tables(self.plan, self.out)
        continuation = take_up(self.plan, self.out, tables, self._resume, self._fresh_noise)
        self.plan, self.accounts, state = continuation
        plan = self.plan
        self.ledger = self.accounts.ledger
        self.problem = plan.problem(self.shards)
        model = models.flatten(self.problem.module).numpy()
        bound = self.experiment.bounding.initial_bound
        self.state = state or RunState(0, model, bound, initial_states(plan))
        std = plan.drawn_std if plan.mechanism else None
        check_whitening(plan)
        seed, t = plan.noise_seed, self.state.t
        self.noise = MonitoredNoise(self.experiment.noise, seed, plan.d, t, std)
        self.monitor = sampling_monitor.of_run(plan, self.state.t, self.accounts.draws)
        # This may be a worker of Ray's, under other settings than the run's.
        provenance.check_node(platform.node(), plan.platform)
        self.pool = self._pool or InlinePool(self.experiment, str(plan.shards))
        facts = (self.state, self.pool, self.problem, self.survey)
        self.record = Recorder(plan, self.out, tables, *facts)
        # what the bits depend on, before anything is released
        if self._fresh_noise or not self.state.t:
            self.record.save(copies=False)
        self._server_noise: np.ndarray | None = None  # the server's noise of the current round
        self._wrapped_count: int | None = None  # coordinates of its sum that wrapped around

    def round(self) -> dict[str, Any]:
        """Does the next round and returns its row of the rounds table."""
        state = self.state
        t = state.t
        clock = Clock()
        self.account(t)
        clock.lap("account")
        cohort = self.select(t)
        clock.lap("select")
        total, results = self.collect(t, cohort)
        columns = join_columns(results)
        if self.plan.individual and len(cohort):
            std, budget_state = self.plan.sum_std(t, state.bound), state.states["individual"]
            lengths = columns.pop("contribution")
            self.plan.individual.spend(columns["client"], lengths, std, budget_state)
        clock.lap("collect")
        update = self.aggregate(t, cohort, self.release(t, total))
        model = state.model.astype(np.float64)
        state.model = self.experiment.server.step(model, update, state.states["server"], t)
        clock.lap("server")
        round_record = Round(t, state.bound, columns, total, self._server_noise, update)
        row = self.record.row(round_record, results, self.accounts.epsilons(t))
        row["lost"] = cohort.lost
        if self._wrapped_count is not None:
            row["wrapped"] = self._wrapped_count
        state.bound = self.next_bound(t, cohort, columns)
        state.participations.update(cohort.clients.tolist())
        state.t = t + 1
        return self.record.finish_row(row, clock)

    def account(self, t: int) -> None:
        """Writes this round's spending ahead of it; raises `BudgetError` where it may not be."""
        self.accounts.spend(t, self.state.bound)

    def select(self, t: int) -> Cohort:
        """The cohort of the round."""

        def ask(clients: np.ndarray) -> np.ndarray:
            self.monitor.check_candidates(t, clients)
            return self.pool.losses(self.state.model, t, clients, self.plan.noise_seed)

        seed = self.plan.cohort_seed()
        cohort = self.experiment.selection.draw(seed, t, self.plan.population, ask)
        self.monitor.check(t, cohort, self.state.participations)
        return cohort

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        """The exact sum of what the cohort sends, float64 [d], and the actors' accounts of it."""
        plan, state, local = self.plan, self.state, self.experiment.local
        clients = cohort.clients
        sizes = plan.population.sizes[clients]
        client = self.experiment.client
        width = client.chunk
        assert isinstance(width, int)  # the plan has resolved "auto"
        stds = plan.step_stds(clients)
        costs = backends.costs(client.backend, local, sizes, plan.d, gpu=client.num_gpus > 0)
        limits = None
        if plan.individual:
            std, budget_state = plan.sum_std(t, state.bound), state.states["individual"]
            limits = plan.individual.limits(clients, std, budget_state)
        weights, rows = plan.weights(clients), local.max_rows(sizes)
        chunks = scheduler.chunks(cohort, weights, rows, width, stds, costs, limits)
        shares = self.pool.assign([state.memory.attach_states(chunk) for chunk in chunks])
        std = plan.client_std(t, state.bound)
        max_norm = None if state.bound is None else state.bound * plan.weight
        modular_sum = plan.modular_sum(t, state.bound)
        count = len(cohort)
        grid = Grid.integer_grid(count) if modular_sum else Grid.of(count, max_norm, std)
        work = Work(t, plan.seed, plan.noise_seed, state.bound, std, grid, modular_sum)
        answers = self.pool.run(self._broadcast(), work, shares)
        total, results = exact_sum.sum_results(answers, plan.d)
        self.noise.check_client_noise(work, len(cohort), results, total)
        state.memory.keep(results)
        return total, results

    def _broadcast(self) -> Broadcast:
        experiment = self.experiment
        members: dict[str, Any] = {"bounding": experiment.bounding, "local": experiment.local}
        members |= {f"measure.{probe.kind}": probe for probe in experiment.measure}
        states = self.state.states
        pairs = ((name, member.broadcast_state(states[name])) for name, member in members.items())
        return Broadcast(self.state.model, {name: state for name, state in pairs if state})

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        """The sum of the contributions as it is released, float64 [d]: with the server's noise,
        where the server draws any. A sum of integers is taken modulo a power of two, and turned
        back into the units of what clients send.
        """
        plan, bound = self.plan, self.state.bound
        self._server_noise = self.noise.on_sum(t, plan.drawn_std(t, bound), total)
        released_sum = total if self._server_noise is None else total + self._server_noise
        modular_sum = plan.modular_sum(t, bound)
        if modular_sum is None:
            return released_sum
        self._wrapped_count = modular_sum.wrapped(released_sum)
        return modular_sum.decode(released_sum)

    def aggregate(self, t: int, cohort: Cohort, total: np.ndarray) -> np.ndarray:
        """The mean update, float64 [d], from the released sum of the contributions."""
        experiment = self.experiment
        population = self.plan.population
        lr = experiment.local.learning_rate(t)
        divisor = experiment.selection.divisor(population)
        count: float = len(cohort)
        if self.plan.mechanism is not None and not self.plan.mechanism.by_draws:
            count = experiment.selection.counted(cohort, population)
        facts = Facts(t, lr, self.state.model, divisor, count, len(population))
        mean = experiment.bounding.receive(total, self.state.states["bounding"], facts)
        experiment.local.receive(mean, self.state.states["local"], facts)
        return mean

    def next_bound(self, t: int, cohort: Cohort, columns: Columns) -> float | None:
        """The bound of round t + 1. Raises `RunError` for one out of range, an answer beyond its
        own bound, or noise that is not what was accounted for.
        """
        bound = self.state.bound
        bounding = self.experiment.bounding
        if bound is None or not bounding.adapts:
            return bound
        clients = self.experiment.selection.counted(cohort, self.plan.population)
        if not clients:
            return bound
        sums = self.noisy_answers(t, cohort, columns)
        new_bound = bounding.adapt(bound, sums, clients, self.state.states["bounding"])
        new_bound = float(array_of(f"bounding.kind {bounding.kind}: adapt", new_bound, ()))
        if not BOUNDS[0] <= new_bound <= BOUNDS[1]:
            problem = f"the adaptive bound left its range ({new_bound:g} after round {t})"
            raise RunError(f"{problem}; look at what bounding.kind {bounding.kind} makes of it")
        return new_bound

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        """The noisy sums of the clients' answers, by side query; `noise`: None is the run's."""
        plan = self.plan
        bounding = self.experiment.bounding
        assert self.state.bound is not None  # it adapts
        by_query = bounding.each_answer(columns, self.state.bound)
        sums = {}
        for query in bounding.queries():
            kind = f"bounding.kind {bounding.kind}"
            if query.name not in by_query:
                names = ", ".join(by_query) or "nothing"
                raise RunError(
                    f"{kind} gives no answers to its query {query.name}; it answers {names}"
                )
            subject = f"{kind}: answers, to {query.name},"
            answers = array_of(subject, by_query[query.name], columns["client"].shape)
            answers = np.nan_to_num(answers)
            max_answer = float(np.abs(answers).max(initial=0.0))
            if not max_answer <= query.bound:
                excess = f"{max_answer:g}, above its bound of {query.bound:g}"
                raise RunError(f"{kind} answers its query {query.name} with {excess}")
            std = plan.side_stds.get(query.name, 0.0) * plan.factor(t)
            cohort_facts = (cohort.clients, cohort.draws, plan.clients_left)
            side_query = SideQuery(query.name, plan.noise_seed, t, std, *cohort_facts)
            answer_sum = float(answers.sum())
            sums[query.name] = answer_sum + (noise or self.noise).on_query(side_query, answer_sum)
        return sums

    def survey(self, t: int, values: np.ndarray, noise: MonitoredNoise | None = None) -> np.ndarray:
        """The noisy histogram, float64 [bins], of the clients' scores, float64 [clients] with NaN
        where one has none, that is released after round t; `noise`: None is the run's. Raises
        `RunError` where it, or the noise, is not what was accounted for.
        """
        histogram = self.experiment.evaluate.histogram
        if histogram is None or not self.plan.has_survey(t):
            raise RunError(f"clients are asked after round {t}, which was not accounted for")
        counts = histogram.counts(values)
        size = histogram.std, counts, len(values)
        return counts + (noise or self.noise).on_survey(self.plan.survey_seed, t, *size)

    def save(self) -> None:
        """Puts the tables and a checkpoint on disk."""
        self.record.save()

    def stop_reason(self) -> str | None:
        """Why the run ends before its last round, in words; None: it goes on."""
        return self.record.stop_reason()

    def finish(self, status: str, save: bool) -> dict:
        """Stops the clients and sums up the run, saved if asked to: a broken round must not be."""
        if save:
            self.save()
        self.pool.close()
        return self.record.summary(self.accounts) | {"status": status}

    def measure_after(self, seconds: float = 1.0) -> tuple[int, int]:
        """Measures a finished run for about so many seconds more: the steps done, of how many."""
        deadline = time.monotonic() + seconds
        self._measurements = self._measurements or self._measures()
        for progress in self._measurements:
            self._progress = progress
            if time.monotonic() >= deadline:
                break
        return self._progress

    def _measures(self) -> Iterator[tuple[int, int]]:
        state = self.state
        run = Finished(self.out, self.problem, state.model, state.participations)
        for probe in self.experiment.measure:
            if probe.has_summary:
                values = probe.afterwards(run)
                if isinstance(values, Generator):
                    values = yield from values
                self._measured_values[probe.kind] = _json_values(probe, values)

    def measured_after(self) -> dict[str, Any]:
        """The results of that, for the summary."""
        deque(self._measurements or (), maxlen=0)
        return self._measured_values

    def parameters(self) -> np.ndarray:
        """The model, flat float32 [d]."""
        return self.state.model

    def position(self) -> int:
        """How many rounds are done."""
        return self.state.t


def _json_values(probe: Probe, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a probe's `afterwards` gave, arrays as lists. Raises `RunError` for what is no mapping,
    or has no form in JSON.
    """
    subject = f"measure {probe.kind}: afterwards gives"
    if not isinstance(values, Mapping):
        raise RunError(f"{subject} {type(values).__name__}, not a mapping")
    try:
        text = json.dumps(dict(values), default=methodcaller("tolist"), allow_nan=False)
    except (AttributeError, TypeError, ValueError) as error:
        raise RunError(f"{subject} what summary.json cannot hold: {error}") from None
    return json.loads(text)


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """The package's warnings within, which the log of an actor would keep to itself."""
    messages: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("raydpfl")
    log.addHandler(listener)
    try:
        yield messages
    finally:
        log.removeHandler(listener)
