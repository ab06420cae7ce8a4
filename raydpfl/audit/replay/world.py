"""A world of a replay: a run of some rounds, compared with the same rounds of the first world."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from raydpfl.audit import local_step_canaries
from raydpfl.audit.canaries import CanaryRun
from raydpfl.audit.replay.record import ByClient, Neighbour, RoundRecord, mechanism_of
from raydpfl.audit.replay.rows import ComparedRows, of_victim
from raydpfl.audit.replay.sum_difference import ROUNDING, SumDifference
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Columns, Work
from raydpfl.errors import BudgetError, ClientError, RunError
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Pool

LARGEST = 3e38  # of float32
LOSSES = (0.0, LARGEST, -LARGEST, math.inf, math.nan)  # of the samples of an adversary


class World(CanaryRun):
    """A run of some rounds, compared with those of the `first` world (None: it is the first).

    `moves` are sums that move too far, in words, and `faults` what else may not be.
    """

    def __init__(
        self, plan: Plan, out: str, neighbour: Neighbour | None, first: World | None, **more: Any
    ):
        super().__init__(plan, out, **more)
        self.neighbour = neighbour
        self.words = str(neighbour or "the first world")
        self.first = first
        self.records: list[RoundRecord] = []
        self.moves: list[str] = []
        self.faults: list[str] = []
        self.ended = ""  # why it ended before its last round, in words
        self.broken = False  # whether a round of it failed
        self.compared: set[int] = set()  # rounds that the victim takes part in
        # of how far all sums have moved by the victim, in stds of their noise
        self._squares = 0.0

    @property
    def removed(self) -> bool:
        """Whether the victim is no part of any cohort, whose size is a secret."""
        e = self.experiment
        absent = self.neighbour is not None and self.neighbour.absent
        return absent and e.relation == "add_remove" and e.selection.hides_size()

    def start(self) -> tuple[int, list[str]]:
        """What passes between the server and its clients is recorded."""
        started = super().start()
        self.pool = RecordedPool(self.pool, self)
        return started

    def carry_out(self, rounds: int) -> None:
        """The first rounds, fewer where the run itself ends."""
        try:
            self.start()
            for t in range(rounds):
                if self.first is not None and self.neighbour and self.neighbour.in_turn:
                    self.neighbour = replace(self.neighbour, victim=self.first.records[t].turn)
                self.records.append(RoundRecord())
                self.round()
                self._done()
        except BudgetError as error:
            self.records.pop()
            self.ended = str(error)
        except (RunError, ClientError) as error:
            t = len(self.records) - 1
            self.faults.append(f"round {t} ended the run: {error}")
            self.records[t:] = []
            self.broken = True
        if self.first is None and self.records and not self.broken:
            self.finished()
        elif hasattr(self, "pool"):
            self.pool.close()

    def _done(self) -> None:
        t = self.state.t - 1
        flow = self.records[t].flow
        state = self.state
        flow["the model"] = state.model.tobytes()
        flow["the next bound"] = state.bound
        flow["what the server keeps"] = {
            name: {key: np.asarray(value).tobytes() for key, value in kept.items()}
            for name, kept in state.states.items()
            if name != "individual"
        }
        if self.plan.individual:
            kept = state.states["individual"]
            pairs = zip(kept["spent"].tolist(), kept["left"].tolist(), strict=True)
            victim = None if self.neighbour is None else self.neighbour.victim
            own = {(client, 0): pair for client, pair in enumerate(pairs)}
            flow["what clients have spent of their budgets"] = ByClient(own, victim, True)
        flow["the ledger"] = self._ledger_text().splitlines()[-1:]
        budget = self.experiment.privacy.budget
        spent = [self.accounts.spent(t)[name] for name in self.plan.rigorous]
        if budget is not None and not min(spent) <= budget:
            self.faults.append(f"round {t} spends {min(spent):.6g}, above the budget of {budget:g}")
        if self.first is not None and t < len(self.first.records):
            self._compare(t, self.records[t], self.first.records[t])

    def _compare(self, t: int, here: RoundRecord, there: RoundRecord) -> None:
        assert self.neighbour is not None and there.cohort is not None
        if not len(there.cohort) or self.neighbour.victim in there.cohort.clients:
            self.compared.add(t)
        for what, value in here.flow.items():
            if value != there.flow.get(what):
                self.faults.append(f"with {self.neighbour}, {what} of round {t} differs")
        moved = SumDifference(self.plan, self.neighbour, self.removed, t, here, there)
        for query, noise in here.noise.items():
            before = there.noise.get(query)
            size = 0.0 if before is None else float(np.abs(before).max(initial=0.0))
            size += 0.0 if here.total is None else float(np.abs(here.total).max(initial=0.0))
            if before is None or not np.allclose(noise, before, rtol=0, atol=1e-12 * (1 + size)):
                self.faults.append(
                    f"with {self.neighbour}, the noise on {query} of round {t} differs"
                )
        self.moves += [f"with {self.neighbour}, {fault}" for fault in moved.faults()]
        if self.plan.individual:
            self._squares += moved.square()
            self.moves += self._beyond_its_budget(t)

    def _beyond_its_budget(self, t: int) -> list[str]:
        """By how much all that was released until now moves by the victim, against its budget."""
        assert self.neighbour is not None and self.plan.individual is not None
        budgets = self.plan.individual
        share = (1 if self.neighbour.absent else 2) / budgets.moves
        most = float(budgets.squares[self.neighbour.victim]) * share**2
        if self._squares <= most * (1 + 1e-6):
            return []
        stds = f"{math.sqrt(self._squares):.6g} stds of their noise together"
        return [
            f"with {self.neighbour}, the sums up to round {t} move by {stds}, where its own budget "
            f"has {math.sqrt(most):.6g}"
        ]

    # --- what is released: that of the first world ---

    def select(self, t: int) -> Cohort:
        cohort = super().select(t)
        record = self.records[t]
        record.flow["the cohort"] = cohort.clients.tobytes(), cohort.draws.tobytes(), cohort.lost
        self._drawn_as_declared(t, cohort)
        if self.removed:
            assert self.neighbour is not None
            stay = cohort.clients != self.neighbour.victim
            cohort = Cohort(cohort.clients[stay], cohort.draws[stay], cohort.lost)
        return cohort

    def _drawn_as_declared(self, t: int, cohort: Cohort) -> None:
        """Whether the member, asked again, draws this cohort of the losses that were answered."""
        asked = iter(self.records[t].asked)

        def ask(clients: np.ndarray) -> np.ndarray:
            before, answers = next(asked, (np.empty(0), clients))
            if not np.array_equal(before, clients):
                raise RunError(f"other clients are asked for their losses in round {t} again")
            return answers

        plan = self.plan
        again = self.experiment.selection.draw(plan.cohort_seed(), t, plan.population, ask)
        if not (
            np.array_equal(again.clients, cohort.clients)
            and np.array_equal(again.draws, cohort.draws)
            and again.lost == cohort.lost
        ):
            self.faults.append(f"the cohort of round {t} is not the one that the selection draws")

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        record = self.records[t]
        record.cohort, record.bound = cohort, self.state.bound
        record.flow["the bound"] = self.state.bound
        total, results = super().collect(t, cohort)
        record.total = total.copy()
        by_client: dict[tuple[int, int], bytes] = {}
        for result in results:
            keys = (result.columns[name].tolist() for name in ("client", "draw"))
            rows = np.stack([*result.columns.values()], 1).astype(np.float64)
            by_client |= dict(zip(zip(*keys, strict=True), map(bytes, rows), strict=True))
        victim = None if self.neighbour is None else self.neighbour.victim
        record.flow["what is recorded of clients"] = ByClient(by_client, victim, True)
        if self.neighbour is not None and self.neighbour.absent:
            for result in results:
                stay = result.columns["client"] != victim
                result.columns = {name: kept[stay] for name, kept in result.columns.items()}
        return total, results

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        released = super().release(t, total)
        record = self.records[t]
        record.released = released.copy()
        modular = self.plan.modular(t, self.state.bound)
        if modular is None:
            record.noise["updates"] = released - total
        else:
            added = np.zeros_like(total) if self._added is None else self._added.copy()
            record.noise["updates"] = added
            if not np.array_equal(released, modular.decode(total + added)):
                self.faults.append(f"the sum of round {t} is released with other noise than drawn")
        forced = None if self.first is None else self.first.records[t].released
        return released if forced is None else forced.copy()

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        sums = super().noisy_answers(t, cohort, columns, noise)
        if noise is not None:
            return sums
        record = self.records[t]
        record.answers = dict(sums)
        assert record.bound is not None  # it adapts
        exact = self.experiment.bounding.answers(columns, record.bound)
        for name, answers in exact.items():
            if name in sums:
                record.noise[name] = np.array(sums[name] - np.nan_to_num(answers).sum())
        return sums if self.first is None else dict(self.first.records[t].answers)

    def survey(self, t: int, values: np.ndarray, noise: MonitoredNoise | None = None) -> np.ndarray:
        if noise is not None:
            return super().survey(t, values, noise)
        record = self.records[t]
        record.scores = values.copy()
        if self.neighbour is not None and self.neighbour.victim < len(values):
            values = values.copy()
            worst = [math.inf, -math.inf, 1e300, 0.5][(t + self.neighbour.first) % 4]
            values[self.neighbour.victim] = math.nan if self.neighbour.absent else worst
        record.histogram = super().survey(t, values)
        histogram = self.experiment.evaluate.histogram
        assert histogram is not None  # of which these are the counts
        record.noise["histogram"] = record.histogram - histogram.counts(values)
        if self.first is None:
            return record.histogram
        forced = self.first.records[t].histogram
        return record.histogram if forced is None else forced.copy()

    def answered(
        self, t: int, clients: np.ndarray, answers: np.ndarray, noise_seed: int
    ) -> np.ndarray:
        """The losses that clients (int64 [k]) answer with: those of the first world."""
        record = self.records[t]
        if self.first is not None:
            before = self.first.records[t].asked
            place = len(record.asked)
            if place < len(before) and np.array_equal(before[place][0], clients):
                self._compare_losses(t, clients, answers, before[place][1], noise_seed)
                answers = before[place][1]
            else:
                self.faults.append(f"other clients are asked for their losses in round {t}")
        record.asked.append((clients.copy(), answers.copy()))
        return answers

    def _compare_losses(
        self, t: int, clients: np.ndarray, here: np.ndarray, there: np.ndarray, noise_seed: int
    ) -> None:
        assert self.neighbour is not None
        victim = self.neighbour.victim
        others = clients != victim
        if not np.array_equal(here[others], there[others], equal_nan=True):
            self.faults.append(f"with {self.neighbour}, the loss of others in round {t} differs")
        selection = self.experiment.selection
        query = selection.loss_query
        if query is None or others.all():
            return
        worst = (np.full(3, loss) for loss in LOSSES)
        answers = [selection.answer(losses, noise_seed, t, victim) for losses in worst]
        moved = np.ptp([*answers, *here[~others], *there[~others]])
        if not moved <= 2 * query.bound * (1 + ROUNDING) + 1e-12 * np.abs(answers).max():
            self.moves.append(
                f"with {self.neighbour}, its loss of round {t} moves by {moved:.6g}, where "
                f"{2 * query.bound:g} is declared"
            )

    def broadcast(self, broadcast: Broadcast, work: Work, chunks: Sequence[Chunk]) -> None:
        """Records what clients are sent."""
        flow = self.records[work.t].flow
        victim = None if self.neighbour is None else self.neighbour.victim
        flow["the model sent"] = broadcast.model.tobytes()
        flow["the state broadcast"] = {
            name: {key: np.asarray(value).tobytes() for key, value in state.items()}
            for name, state in broadcast.states.items()
        }
        grid = None if self.first is None else self.first.records[work.t].flow.get("the grid")
        flow["the grid"] = grid if self.removed else (work.grid.step, work.grid.most)
        flow["the noise asked of clients"] = work.client_std, work.noise_seed
        flow["the bound sent"] = work.bound
        others: dict[str, dict[tuple[int, int], Any]] = {"weights": {}, "noise": {}, "state": {}}
        for chunk in chunks:
            for slot, client in enumerate(chunk.clients.tolist()):
                key = client, int(chunk.draws[slot])
                if client < 0:
                    continue
                others["weights"][key] = float(chunk.weights[slot])
                others["noise"][key] = None if chunk.stds is None else float(chunk.stds[slot])
                others["state"][key] = {
                    name: rows[slot].tobytes()
                    for name, rows in chunk.memory.items()
                    if slot in rows
                }
        for what, by_client in others.items():
            flow[f"the {what} of clients"] = ByClient(by_client, victim, what == "state")


class TrainingWorld(World):
    """A world in which clients train on their rows, by the code of every run; the victim on others
    in the neighbouring one.
    """

    def clients(self) -> ClientActor:
        actor = ClientActor(self.experiment, str(self.plan.shards))
        actor.shards.reader = ComparedRows(actor.shards, self.faults)
        if self.neighbour is not None:
            actor.shards.reader = of_victim(actor.shards.reader, self.neighbour.victim, -10)
        return actor

    def spent(self) -> Mapping[str, float]:
        return local_step_canaries.spent(self.plan, len(self.rounds))

    def finished(self) -> None:
        """The ledger is read where no other world has it."""
        if mechanism_of(self.plan).by_draws:
            super().finished()
        else:
            self.pool.close()


class RecordedPool:
    """A pool, of which a world sees what passes through."""

    def __init__(self, pool: Pool, world: World):
        self._pool = pool
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def run(
        self, broadcast: Broadcast, work: Work, assignments: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        self._world.broadcast(broadcast, work, [chunk for part in assignments for chunk in part])
        yield from self._pool.run(broadcast, work, assignments)

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        answers = self._pool.losses(model, t, clients, noise_seed)
        return self._world.answered(t, clients, answers, noise_seed)
