"""A world of a replay: a run of some rounds, compared with the same rounds of the first world, and
the readers of its clients' rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl.audit import local_step_canaries
from raydpfl.audit.canaries import CanaryRun, OtherRows, Rows
from raydpfl.audit.replay.record import ByClient, Neighbour, RoundRecord, mechanism_of
from raydpfl.audit.replay.sum_difference import ROUNDING, SumDifference
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Columns, Work
from raydpfl.data import RowReader, Shards
from raydpfl.errors import BudgetError, ClientError, RunError
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Pool

LARGEST = 3e38  # of float32
LOSSES = (0.0, LARGEST, -LARGEST, math.inf, math.nan)  # of the samples of an adversary


class World(CanaryRun):
    """A run of some rounds, compared with those of the first world, `base` (None: it is the first).

    `moves` are sums that move too far, in words, and `faults` what else may not be.
    """

    def __init__(
        self, plan: Plan, out: str, neighbour: Neighbour | None, base: World | None, **options: Any
    ):
        super().__init__(plan, out, **options)
        self.neighbour = neighbour
        self.words = str(neighbour or "the first world")
        self.first = base
        self.records: list[RoundRecord] = []
        self.moves: list[str] = []
        self.faults: list[str] = []
        self.broken = False  # whether a round of it failed
        self.compared_rounds: set[int] = set()  # rounds that the victim takes part in
        # of how far all sums have moved by the victim, in stds of their noise
        self._squares = 0.0

    @property
    def is_removed(self) -> bool:
        """Whether the victim is no part of any cohort, whose size is a secret."""
        e = self.experiment
        absent = self.neighbour is not None and self.neighbour.absent
        return absent and e.relation == "add_remove" and e.selection.hides_size()

    def start(self) -> tuple[int, list[str]]:
        """What passes between the server and its clients is recorded."""
        pid_and_warnings = super().start()
        self.pool = RecordedPool(self.pool, self)
        return pid_and_warnings

    def carry_out(self, rounds: int) -> None:
        """The first rounds, fewer where the run itself ends."""
        try:
            self.start()
            for t in range(rounds):
                if self.first is not None and self.neighbour and self.neighbour.is_rotating:
                    self.neighbour = replace(self.neighbour, victim=self.first.records[t].turn)
                self.records.append(RoundRecord())
                self.round()
                self._record_round()
        except BudgetError as error:
            self.records.pop()
            self.end_reason = str(error)
        except (RunError, ClientError) as error:
            t = len(self.records) - 1
            self.faults.append(f"round {t} ended the run: {error}")
            self.records[t:] = []
            self.broken = True
        if self.first is None and self.records and not self.broken:
            self.finished()
        elif hasattr(self, "pool"):
            self.pool.close()

    def _record_round(self) -> None:
        t = self.state.t - 1
        flow = self.records[t].flow
        state = self.state
        flow["the model"] = state.model.tobytes()
        flow["the next bound"] = state.bound
        flow["what the server keeps"] = {
            name: {key: np.asarray(value).tobytes() for key, value in state_arrays.items()}
            for name, state_arrays in state.states.items()
            if name != "individual"
        }
        if self.plan.individual:
            state_arrays = state.states["individual"]
            pairs = zip(state_arrays["spent"].tolist(), state_arrays["left"].tolist(), strict=True)
            victim = None if self.neighbour is None else self.neighbour.victim
            budget_pairs = {(client, 0): pair for client, pair in enumerate(pairs)}
            flow["what clients have spent of their budgets"] = ByClient(budget_pairs, victim, True)
        flow["the ledger"] = self._ledger_text().splitlines()[-1:]
        budget = self.experiment.privacy.budget
        costs = [self.accounts.epsilons(t)[name] for name in self.plan.rigorous_accountants]
        if budget is not None and not min(costs) <= budget:
            self.faults.append(f"round {t} spends {min(costs):.6g}, above the budget of {budget:g}")
        if self.first is not None and t < len(self.first.records):
            self._compare(t, self.records[t], self.first.records[t])

    def _compare(self, t: int, record: RoundRecord, reference: RoundRecord) -> None:
        assert self.neighbour is not None and reference.cohort is not None
        if not len(reference.cohort) or self.neighbour.victim in reference.cohort.clients:
            self.compared_rounds.add(t)
        names = [name for name, value in record.flow.items() if value != reference.flow.get(name)]
        difference = SumDifference(self.plan, self.neighbour, self.is_removed, t, record, reference)
        for query, noise in record.noise.items():
            twin = reference.noise.get(query)  # the same noise in the first world
            size = 0.0 if twin is None else float(np.abs(twin).max(initial=0.0))
            size += 0.0 if record.total is None else float(np.abs(record.total).max(initial=0.0))
            if twin is None or not np.allclose(noise, twin, rtol=0, atol=1e-12 * (1 + size)):
                names.append(f"the noise on {query}")
        self.faults += [f"with {self.neighbour}, {name} of round {t} differs" for name in names]
        self.moves += [f"with {self.neighbour}, {fault}" for fault in difference.faults()]
        if self.plan.individual:
            self._squares += difference.square()
            self.moves += self._budget_faults(t)

    def _budget_faults(self, t: int) -> list[str]:
        """By how much all that was released until now moves by the victim, against its budget."""
        assert self.neighbour is not None and self.plan.individual is not None
        budgets = self.plan.individual
        share = self.neighbour.share / budgets.sensitivity_factor
        max_square = float(budgets.squares[self.neighbour.victim]) * share**2
        if self._squares <= max_square * (1 + 1e-6):
            return []
        stds = f"{math.sqrt(self._squares):.6g} stds of their noise together"
        return [
            f"with {self.neighbour}, the sums up to round {t} move by {stds}, where its own budget "
            f"has {math.sqrt(max_square):.6g}"
        ]

    # --- what is released: that of the first world ---

    def select(self, t: int) -> Cohort:
        cohort = super().select(t)
        record = self.records[t]
        record.flow["the cohort"] = cohort.clients.tobytes(), cohort.draws.tobytes(), cohort.lost
        self._check_cohort(t, cohort)
        if self.is_removed:
            assert self.neighbour is not None
            mask = cohort.clients != self.neighbour.victim
            cohort = Cohort(cohort.clients[mask], cohort.draws[mask], cohort.lost)
        return cohort

    def _check_cohort(self, t: int, cohort: Cohort) -> None:
        """Whether the member, asked again, draws this cohort of the losses that were answered."""
        replies = iter(self.records[t].asked)

        def ask(clients: np.ndarray) -> np.ndarray:
            recorded_clients, answers = next(replies, (np.empty(0), clients))
            if not np.array_equal(recorded_clients, clients):
                raise RunError(f"other clients are asked for their losses in round {t} again")
            return answers

        plan = self.plan
        redrawn_cohort = self.experiment.selection.draw(plan.cohort_seed(), t, plan.population, ask)
        if not (
            np.array_equal(redrawn_cohort.clients, cohort.clients)
            and np.array_equal(redrawn_cohort.draws, cohort.draws)
            and redrawn_cohort.lost == cohort.lost
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
                mask = result.columns["client"] != victim
                result.columns = {name: column[mask] for name, column in result.columns.items()}
        return total, results

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        noised_sum = super().release(t, total)
        record = self.records[t]
        record.released = noised_sum.copy()
        modular = self.plan.modular_sum(t, self.state.bound)
        if modular is None:
            record.noise["updates"] = noised_sum - total
        else:
            noise = self._server_noise
            noise = np.zeros_like(total) if noise is None else noise.copy()
            record.noise["updates"] = noise
            if not np.array_equal(noised_sum, modular.decode(total + noise)):
                self.faults.append(f"the sum of round {t} is released with other noise than drawn")
        reference_sum = None if self.first is None else self.first.records[t].released
        return noised_sum if reference_sum is None else reference_sum.copy()

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        sums = super().noisy_answers(t, cohort, columns, noise)
        if noise is not None:
            return sums
        record = self.records[t]
        record.answers = dict(sums)
        assert record.bound is not None  # it adapts
        exact = self.experiment.bounding.each_answer(columns, record.bound)
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
        reference_histogram = self.first.records[t].histogram
        return record.histogram if reference_histogram is None else reference_histogram.copy()

    def answered(
        self, t: int, clients: np.ndarray, answers: np.ndarray, noise_seed: int
    ) -> np.ndarray:
        """The losses that clients (int64 [k]) answer with: those of the first world."""
        record = self.records[t]
        if self.first is not None:
            replies = self.first.records[t].asked
            place = len(record.asked)
            if place < len(replies) and np.array_equal(replies[place][0], clients):
                self._compare_losses(t, clients, answers, replies[place][1], noise_seed)
                answers = replies[place][1]
            else:
                self.faults.append(f"other clients are asked for their losses in round {t}")
        record.asked.append((clients.copy(), answers.copy()))
        return answers

    def _compare_losses(
        self, t: int, clients: np.ndarray, losses: np.ndarray, base: np.ndarray, noise_seed: int
    ) -> None:
        assert self.neighbour is not None
        victim = self.neighbour.victim
        is_other = clients != victim
        if not np.array_equal(losses[is_other], base[is_other], equal_nan=True):
            self.faults.append(f"with {self.neighbour}, the loss of others in round {t} differs")
        selection = self.experiment.selection
        query = selection.loss_query
        if query is None or is_other.all():
            return
        answers = [selection.answer(np.full(3, loss), noise_seed, t, victim) for loss in LOSSES]
        loss_range = np.ptp([*answers, *losses[~is_other], *base[~is_other]])
        if not loss_range <= 2 * query.bound * (1 + ROUNDING) + 1e-12 * np.abs(answers).max():
            self.moves.append(
                f"with {self.neighbour}, its loss of round {t} moves by {loss_range:.6g}, where "
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
        flow["the grid"] = grid if self.is_removed else (work.grid.step, work.grid.most)
        flow["the noise asked of clients"] = work.client_std, work.noise_seed
        flow["the bound sent"] = work.bound
        values: dict[str, dict[tuple[int, int], Any]] = {"weights": {}, "noise": {}, "state": {}}
        for chunk in chunks:
            for slot, client in enumerate(chunk.clients.tolist()):
                key = client, int(chunk.draws[slot])
                if client < 0:
                    continue
                values["weights"][key] = float(chunk.weights[slot])
                values["noise"][key] = None if chunk.stds is None else float(chunk.stds[slot])
                values["state"][key] = {
                    name: rows[slot].tobytes()
                    for name, rows in chunk.memory.items()
                    if slot in rows
                }
        for kind, by_client in values.items():
            flow[f"the {kind} of clients"] = ByClient(by_client, victim, kind == "state")


class TrainingWorld(World):
    """A world in which clients train on their rows, by the code of every run; the victim on others
    in the neighbouring one.
    """

    def clients(self) -> ClientActor:
        actor = ClientActor(self.experiment, str(self.plan.shards))
        actor.shards.reader = ComparedRows(actor.shards, self.faults)
        if self.neighbour is not None:
            reader = actor.shards.reader
            actor.shards.reader = replace_victim_rows(reader, self.neighbour.victim, -10)
        return actor

    def run_epsilons(self) -> Mapping[str, float]:
        return local_step_canaries.max_epsilons(self.plan, len(self.rounds))

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


class ComparedRows(RowReader):
    """A reader whose rows are held against those that the file has for the client (none has those
    that are generated), which are read as plainly as possible.
    """

    def __init__(self, shards: Shards, faults: list[str]):
        self._reader = shards.reader
        self._faults = faults
        files = (shards.folder / f"{name}.arrow" for name in ("train", "clients", "rows"))
        self._train, self._clients, self._index = (
            pa.ipc.open_file(pa.memory_map(str(file))).read_all() if file.exists() else None
            for file in files
        )

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        x, y = self._reader.rows(client, row_indices)
        self._compare(client, slice(None) if row_indices is None else row_indices, x, y)
        return x, y

    def read(self, clients: np.ndarray, counts: np.ndarray, width: int) -> Rows | None:
        whole = self._reader.read(clients, counts, width)
        if whole is not None:
            for slot in np.flatnonzero(counts).tolist():
                x, y = (column[slot, : counts[slot]] for column in whole)
                self._compare(int(clients[slot]), slice(None), x, y)
        return whole

    def _compare(
        self, client: int, row_indices: slice | np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> None:
        if self._train is None or self._clients is None:
            return
        first_row, size = (column[client].as_py() for column in self._clients.columns)
        places = np.arange(first_row, first_row + size)[row_indices]
        if self._index is not None:
            places = self._index.column(0).to_numpy()[places]
        file_rows = self._train.take(places)
        for rows, name in ((x, "x"), (y, "y")):
            column = file_rows.column(name).combine_chunks()
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            if rows.tobytes() != flat.to_numpy(zero_copy_only=False).tobytes():  # NaN too
                fault = f"client {client} is given rows that are not its own"
                self._faults += [] if fault in self._faults else [fault]

    def release(self) -> None:
        self._reader.release()


def replace_victim_rows(reader: RowReader, victim: int, scale: float) -> OtherRows:
    """A reader of rows that gives others for those of one client."""

    def victim_rows(client: int) -> Rows | None:
        if client != victim:
            return None
        x, y = reader.rows(client, None)
        x = x * x.dtype.type(scale) if x.dtype.kind == "f" else x[:, ::-1]
        return np.ascontiguousarray(x), np.ascontiguousarray(y[::-1])

    return OtherRows(reader, victim_rows)
