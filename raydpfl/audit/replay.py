"""A replay: the same rounds on neighbouring populations, under the same keys.

Each world is a run of the experiment itself, in this process, in which all clients send what an
adversary would: far beyond the bound, the largest numbers, NaN, infinity, denormals, nothing. A
neighbouring world differs in one client, the victim: it sends something else, or nothing, or is not
there. The noise is the same, as its keys are. What is released in a round of the first world is
taken up in all others, so that every round is compared given one history, as the composition of
rounds has it. So nothing may differ but

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

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raydpfl.audit import checks, local_step_canaries, observers, result_folder
from raydpfl.audit.canaries import CanaryRun
from raydpfl.audit.checks import Check
from raydpfl.audit.client_canaries import FAR, ClientCanaries, ClientCanaryRun, on_sums
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Columns, Grid, Work
from raydpfl.core.prng import Purpose, normals
from raydpfl.data import RowReader, Shards
from raydpfl.errors import BudgetError, ClientError, ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.methods.noise import NoiseSource, SideQuery
from raydpfl.methods.selection import Cohort
from raydpfl.privacy import Release
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Pool
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backends.base import Block

FALSE_ALARM = 1e-9  # of one check of the noise
ROUNDING = 1e-9  # relative: what float64 may differ by
ROUNDED = 1e-3  # of the coordinates of a vector, that it may round otherwise to integers
SAME = 1e-6  # of two draws of one noise, over its std and the bound: float64, and the sums' grid
VICTIMS = 2
TRAINED = 2  # rounds in which clients train
NEIGHBOURS = 12  # rounds of a neighbouring world at most
CANARIES = 200  # samples, where noise is drawn at local steps
# contributions x (parameters + OVERHEAD) of the first world, and of each other one
WORK, LESS = 2e8, 3e7
OVERHEAD = 20_000
LARGEST = 3e38  # of float32
# what a client with state may send at most: its state is float32, and so is its square
WITH_STATE = 1e15
LOSSES = (0.0, LARGEST, -LARGEST, math.inf, math.nan)  # of the samples of an adversary
SENT = ("far", "opposite", "tiny", "largest", "spike", "denormal", "NaN", "nothing", "infinite")


@dataclass(frozen=True)
class Neighbour:
    """How a neighbouring world differs from the first: in this client, which sends something else,
    or is `absent`. `first` is the place in `SENT` of what it sends in round 0.
    """

    victim: int
    absent: bool = False
    first: int = 1

    def __str__(self) -> str:
        return f"client {self.victim} {'absent' if self.absent else 'replaced'}"


@dataclass
class RoundRecord:
    """What is seen of one round of a world."""

    # what must be the same in all worlds, by what it is in words
    flow: dict[str, Any] = field(default_factory=dict)
    cohort: Cohort | None = None
    bound: float | None = None
    sent: dict[int, np.ndarray] = field(default_factory=dict)  # by victim, of all its draws
    total: np.ndarray | None = None  # as it is added up: of integers in steps
    released: np.ndarray | None = None
    answers: Mapping[str, float] = field(default_factory=dict)
    # what was added to the exact values, by query
    noise: dict[str, np.ndarray] = field(default_factory=dict)
    asked: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    scores: np.ndarray | None = None  # of all clients
    histogram: np.ndarray | None = None


class World(CanaryRun):
    """A run of some rounds, compared with those of the `first` world (None: it is the first).

    `moves` are sums that move too far, in words, and `faults` what else may not be.
    """

    def __init__(
        self, plan: Plan, out: str, neighbour: Neighbour | None, first: World | None, **more: Any
    ):
        super().__init__(plan, out, **more)
        self.neighbour = neighbour
        self.first = first
        self.records: list[RoundRecord] = []
        self.moves: list[str] = []
        self.faults: list[str] = []
        self.ended = ""  # why it ended before its last round, in words
        self.broken = False  # whether a round of it failed
        # of how far all sums have moved by the victim, in stds of their noise
        self._squares = 0.0

    @property
    def removed(self) -> bool:
        """Whether the victim is no part of any cohort, whose size is a secret."""
        e = self.experiment
        absent = self.neighbour is not None and self.neighbour.absent
        return absent and e.relation == "add_remove" and e.selection.hides_size()

    def start(self) -> tuple[int, list[str]]:
        """See `Coordinator.start`. What passes between the server and its clients is recorded."""
        started = super().start()
        self.pool = RecordedPool(self.pool, self)
        return started

    def carry_out(self, rounds: int) -> None:
        """The first rounds, fewer where the run itself ends."""
        try:
            self.start()
            for _ in range(rounds):
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
        assert self.neighbour is not None
        for what, value in here.flow.items():
            if value != there.flow.get(what):
                self.faults.append(f"with {self.neighbour}, {what} of round {t} differs")
        moved = Moved(self, t, here, there)
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
        record.noise["updates"] = released - total
        if self.plan.lattice is not None:
            added = self._added
            record.noise["updates"] = np.zeros_like(total) if added is None else added.copy()
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


@dataclass(frozen=True, eq=False)
class ByClient:
    """A value by (client, draw); compared without the victim's where it may differ."""

    values: Mapping[tuple[int, int], Any]
    victim: int | None
    own: bool  # whether the victim's may differ even where it is there

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ByClient):
            return NotImplemented
        victims = {self.victim, other.victim}
        both = [
            {key: value for key, value in one.values.items() if key[0] not in victims}
            for one in (self, other)
        ]
        mine = [
            {key: value for key, value in one.values.items() if key[0] in victims}
            for one in (self, other)
        ]
        same = self.own or not all(mine) or mine[0] == mine[1]
        return both[0] == both[1] and same


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
        """See `Pool.run`."""
        self._world.broadcast(broadcast, work, [chunk for part in assignments for chunk in part])
        yield from self._pool.run(broadcast, work, assignments)

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """See `Pool.losses`."""
        answers = self._pool.losses(model, t, clients, noise_seed)
        return self._world.answered(t, clients, answers, noise_seed)


class Moved:
    """By how much what was released in round `t` moves from one world to another, against what the
    mechanism declares.
    """

    def __init__(self, world: World, t: int, here: RoundRecord, there: RoundRecord):
        self.world, self.t, self.here, self.there = world, t, here, there
        assert world.neighbour is not None and there.cohort is not None
        self.victim = world.neighbour.victim
        self.draws = int((there.cohort.clients == self.victim).sum())
        # how far a client's part may move, in bounds
        self.share = 1 if world.neighbour.absent else 2

    def faults(self) -> Iterator[str]:
        plan = self.world.plan
        if plan.mechanism is None or plan.mechanism.by_draws:
            return
        mechanism = on_sums(plan)
        moved = self._sum()
        squares = 0.0
        for query in mechanism.sums:
            if query is mechanism.queries[0]:
                unit = (self.there.bound or 0.0) * plan.weight / query.bound
                far, slack = moved
            else:
                unit = 1.0
                answers = self.here.answers, self.there.answers
                if not all(query.name in some for some in answers):
                    continue
                far = abs(answers[0][query.name] - answers[1][query.name])
                slack = 4 * float(np.spacing(abs(answers[1][query.name])))
            most = self.draws * self.share * query.bound * unit
            std = query.std * unit * plan.factor(self.t)
            if plan.lattice is not None:  # the one sum, in steps
                most = self.draws * self.share * math.sqrt(plan.lattice.square)
                std = plan.lattice.std
            squares += (max(far - slack, 0.0) / std) ** 2
            if not far <= most * (1 + ROUNDING) + slack:
                yield (
                    f"the sum of {query.name} in round {self.t} moves by {far:.12g}, where "
                    f"{most:.12g} is declared"
                )
        relation = self.world.experiment.relation
        declared = mechanism.mu(relation) / plan.factor(self.t) * self.draws * self.share
        declared /= 2 if relation == "replace_one" else 1
        if not math.sqrt(squares) <= declared * (1 + 1e-6):
            yield (
                f"the sums of round {self.t} move by {math.sqrt(squares):.6g} stds of their noise "
                f"together, where the mechanism has {declared:.6g}"
            )
        yield from self._others(moved[1])
        yield from self._histogram()

    def square(self) -> float:
        """Of how far the sum of the updates moves, in stds of its noise."""
        far, slack = self._sum()
        std = self.world.plan.sum_std(self.t, self.there.bound)
        return (max(far - slack, 0.0) / std) ** 2

    def _sum(self) -> tuple[float, float]:
        """How far the sum of the updates moves, and what rounding may add to that."""
        plan = self.world.plan
        here, there = self.here.released, self.there.released
        if plan.lattice is not None:
            here, there = self.here.total, self.there.total
        assert here is not None and there is not None and self.there.cohort is not None
        if plan.lattice is not None:  # whose integers are exact
            return float(np.linalg.norm(here - there)), 0.0
        grid = Grid.of(
            len(self.there.cohort),
            None if self.there.bound is None else self.there.bound * plan.weight,
            plan.client_std(self.t, self.there.bound),
        )
        order = self.world.experiment.bounding.order
        root = len(there) ** (1 / order)
        coarse = 2 * self.draws + (len(self.there.cohort) if self.world.removed else 0)
        slack = root * (coarse * grid.step + 4 * float(np.spacing(np.abs(there).max(initial=0.0))))
        return float(np.linalg.norm(here - there, order)), slack

    def _others(self, slack: float) -> Iterator[str]:
        """What clients send, the victim left out, is the same."""
        records = self.here, self.there
        if any(record.total is None or self.victim not in record.sent for record in records):
            return
        sums = [record.total - record.sent[self.victim] for record in records]
        if not float(np.abs(sums[0] - sums[1]).max(initial=0.0)) <= self.world.removed * slack:
            yield f"what others send in round {self.t} differs"

    def _histogram(self) -> Iterator[str]:
        here, there = self.here.histogram, self.there.histogram
        if (here is None) != (there is None):
            yield f"a histogram is released after round {self.t} in one world alone"
        if here is None or there is None:
            return
        assert self.here.scores is not None and self.there.scores is not None
        every = (self.here.scores, self.there.scores)
        if len({np.delete(scores, self.victim).tobytes() for scores in every}) > 1:
            yield f"the scores of others after round {self.t} differ"
        most = math.sqrt(self.share)
        survey = _mechanism(self.world.plan).survey
        relation = self.world.experiment.relation
        if survey is not None and (relation == "replace_one") == (self.share == 2):
            most = min(most, replace(survey, times=1).mu(relation) * survey.std)
        far = float(np.linalg.norm(here - there))
        if not far <= most * (1 + ROUNDING) + 1e-15 * float(np.abs(there).sum()):
            counts = f"the counts after round {self.t}"
            yield f"{counts} move by {far:.12g}, where {most:.12g} is declared"


class AdversaryWorld(World, ClientCanaryRun):
    """A world in which no client trains: what each would send unbounded is an adversary's."""

    def plant(self, actor: ClientActor) -> None:
        """See `CanaryRun.plant`: losses and scores are of other rows too."""
        if self.neighbour is not None:
            actor.shards.reader = OtherRows(actor.shards.reader, self.neighbour.victim, -1e4)

    def blocks(self, contribution: Contribution, state: ChunkRound) -> Iterator[Block]:
        """See `CanaryRun.blocks`."""
        for slots in np.flatnonzero(state.chunk.members >= 0)[:, None]:
            client = int(state.chunk.members[slots[0]])
            what = self._what(client, state.work.t)
            updates = self._updates(what, client, state, slots, contribution.device)
            loss = math.nan if what == "NaN" else 10.0 ** (SENT.index(what) - 2)
            yield Block(slots, updates, np.full(1, loss))

    def _what(self, client: int, t: int) -> str:
        """What a client sends in a round; victims of the first world go as far as they can."""
        if client not in self.canaries.places:
            turn = client + t
            return "far" if turn % 2 else SENT[turn // 2 % len(SENT)]
        neighbour = self.neighbour
        if neighbour is None or client != neighbour.victim:
            return "far"
        return "nothing" if neighbour.absent else SENT[(neighbour.first + t) % len(SENT)]

    def _updates(
        self, what: str, client: int, state: ChunkRound, slots: np.ndarray, device: torch.device
    ) -> torch.Tensor:
        """A client's update, float32 [1, d]."""
        d = self.plan.d
        most = LARGEST if self.experiment.stateful is None else WITH_STATE
        far = FAR * (self._bound + self._client_std / self.plan.weight)
        far += self.experiment.bounding.far
        direction = normals(self.experiment.seed, Purpose.CANARY, d, client=client)
        direction /= torch.linalg.vector_norm(direction, dtype=torch.float64).float()
        sizes = {"far": far, "opposite": -far, "tiny": 1e-3 * self._bound, "nothing": 0.0}
        if what in sizes:
            vectors = (direction * sizes[what]).to(device)[None]
            view = state.view("bounding", slots)
            return self.experiment.bounding.invert(vectors, view).float()
        updates = torch.zeros(1, d)
        spike = (client + state.work.t) % d
        if what == "largest":
            updates[:] = torch.sign(direction) * most
        elif what == "denormal":
            updates[:] = 1e-45
        else:
            updates[0, spike] = {"spike": most / 1e8, "NaN": math.nan, "infinite": math.inf}[what]
        return updates.to(device)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        """See `CanaryRun.sent`."""
        work, chunk = state.work, state.chunk
        slots = block.slots
        client = int(chunk.clients[slots[0]])
        sent = vector.cpu().numpy()
        if work.modular is None:
            super().sent(state, block, vector)
        else:
            self._sum += sent
        if client in self.canaries.places:
            by_victim = self.records[work.t].sent
            by_victim[client] = by_victim.get(client, 0.0) + sent
        if self.neighbour is not None:
            return
        who = chunk.clients[slots], chunk.draws[slots]
        if self._client_std:
            noise = self.experiment.noise
            drawn = noise.on_clients(work.noise_seed, work.t, *who, work.client_std, self.plan.d)
            assert drawn is not None  # of this std
            sent = sent - drawn[0]
            if work.modular is None:
                what = f"client {client}'s update"
                self._drawn_as_accounted(work.t, what, self._sent_noise, drawn[0], work.client_std)
        order = self.experiment.bounding.order
        length, most = float(np.linalg.norm(sent, order)), self._bound * self.plan.weight
        slack = self.plan.d ** (1 / order) * work.grid.step
        if work.modular is not None:
            expected = work.modular.encode(self._expected(state, block)[None], *who)[0]
            off = np.flatnonzero(sent != expected)
            if len(off) > ROUNDED * self.plan.d or np.abs(sent - expected).max(initial=0.0) > 1:
                self.faults.append(
                    f"client {client} sends other integers in round {work.t} than its vector and "
                    f"the noise that was accounted for make, in {len(off)} coordinates"
                )
            length, most, slack = float(sent @ sent), float(work.modular.square), 0.0
        if not length <= most * (1 + ROUNDING) + slack:
            norm = "norm" if work.modular is None else "squared norm"
            self.moves.append(
                f"client {client} sends {norm} {length:.12g} in round {work.t}, where {most:.12g} "
                "is declared"
            )

    # --- the noise: what the member draws for the std that accountants have ---

    def _drawn_as_accounted(
        self, t: int, what: str, added: np.ndarray, drawn: np.ndarray, std: float
    ) -> None:
        if not self.experiment.noise.repeatable:
            return
        off = float(np.abs(added - drawn).max(initial=0.0))
        if not off <= SAME * (std + self._bound * self.plan.weight):
            self.faults.append(
                f"the noise on {what} of round {t} is off by {off:.6g} from what noise.kind "
                f"{self.experiment.noise.kind} draws at std {std:.6g}, which was accounted for"
            )

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        """See `Coordinator.release`."""
        released = super().release(t, total)
        if self.neighbour is None:
            std = self.stds[-1] if self.plan.lattice is None else self.plan.lattice.std
            drawn = self._again.on_sum(t, std)
            drawn = np.zeros(self.plan.d) if drawn is None else drawn
            added = self.records[t].noise["updates"]
            self._drawn_as_accounted(t, "the sum", added, drawn, std)
        return released

    @cached_property
    def _again(self) -> NoiseSource:
        return self.experiment.noise.on_server(self.plan.noise_seed, self.plan.d)

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        """See `Coordinator.noisy_answers`."""
        sums = super().noisy_answers(t, cohort, columns, noise)
        if noise is not None or self.neighbour is not None:
            return sums
        plan = self.plan
        for query in on_sums(plan).sums[1:]:
            std = self._ratios[query.name] * query.bound * plan.factor(t)
            who = cohort.clients, cohort.draws, plan.clients_left
            asked = SideQuery(query.name, plan.noise_seed, t, std, *who)
            drawn = np.array(self.experiment.noise.on_query(asked))
            added = self.records[t].noise[query.name]
            self._drawn_as_accounted(t, f"the sum of {query.name}", added, drawn, std)
        return sums


class EveryoneWorld(AdversaryWorld):
    """A world of one round in which every client takes part, whoever is drawn, and goes as far as
    it can.
    """

    def select(self, t: int) -> Cohort:
        """See `Coordinator.select`."""
        able = int(LESS / (self.plan.d + OVERHEAD))
        return Cohort.of(np.arange(min(len(self.plan.population), max(1, able))))

    def _what(self, client: int, t: int) -> str:
        return "far"

    def finished(self) -> None:
        """See `CanaryRun.finished`."""
        self.pool.close()

    def checks(self) -> list[Check]:
        """Of what every client sends."""
        if self.plan.lattice is not None:
            return [replace(checks.sums([self]), name="sums of everyone")]
        every = [checks.bounds([self], FALSE_ALARM), checks.sums([self])]
        noise = checks.noise_of_updates([self], FALSE_ALARM)
        every += [noise] if noise else []
        return [replace(check, name=f"{check.name} of everyone") for check in every]


class TrainedWorld(World):
    """A world in which clients train on their rows, by the code of every run; the victim on others
    in the neighbouring one.
    """

    def clients(self) -> ClientActor:
        """See `CanaryRun.clients`."""
        actor = ClientActor(self.experiment, str(self.plan.shards))
        actor.shards.reader = OwnRows(actor.shards, self.faults)
        if self.neighbour is not None:
            actor.shards.reader = OtherRows(actor.shards.reader, self.neighbour.victim, -10)
        return actor

    def spent(self) -> Mapping[str, float]:
        return local_step_canaries.spent(self.plan, len(self.rounds))

    def finished(self) -> None:
        """See `CanaryRun.finished`: the ledger is read where no other world has it."""
        if _mechanism(self.plan).by_draws:
            super().finished()
        else:
            self.pool.close()


class OwnRows(RowReader):
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

    def rows(self, client: int, picked: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """As `RowReader.rows`."""
        x, y = self._reader.rows(client, picked)
        self._compare(client, slice(None) if picked is None else picked, x, y)
        return x, y

    def read(
        self, clients: np.ndarray, counts: np.ndarray, width: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """As `RowReader.read`."""
        whole = self._reader.read(clients, counts, width)
        if whole is not None:
            for slot in np.flatnonzero(counts).tolist():
                x, y = (column[slot, : counts[slot]] for column in whole)
                self._compare(int(clients[slot]), slice(None), x, y)
        return whole

    def _compare(
        self, client: int, picked: slice | np.ndarray, x: np.ndarray, y: np.ndarray
    ) -> None:
        if self._train is None or self._clients is None:
            return
        first, size = (column[client].as_py() for column in self._clients.columns)
        places = np.arange(first, first + size)[picked]
        if self._index is not None:
            places = self._index.column(0).to_numpy()[places]
        own = self._train.take(places)
        for rows, name in ((x, "x"), (y, "y")):
            column = own.column(name).combine_chunks()
            flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
            if rows.tobytes() != flat.to_numpy(zero_copy_only=False).tobytes():  # NaN too
                fault = f"client {client} is given rows that are not its own"
                self._faults += [] if fault in self._faults else [fault]

    def release(self) -> None:
        self._reader.release()


class OtherRows(RowReader):
    """A reader of rows that gives others for those of one client."""

    def __init__(self, reader: RowReader, victim: int, scale: float):
        self._reader = reader
        self._victim = victim
        self._scale = scale

    def rows(self, client: int, picked: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """As `RowReader.rows`."""
        if client != self._victim:
            return self._reader.rows(client, picked)
        x, y = self._reader.rows(client, None)
        x = x * x.dtype.type(self._scale) if x.dtype.kind == "f" else x[:, ::-1]
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y[::-1])
        return (x, y) if picked is None else (x[picked], y[picked])

    def release(self) -> None:
        self._reader.release()


@dataclass(frozen=True)
class Replay:
    """What the worlds of a replay come to."""

    checks: list[Check]
    worlds: tuple[str, ...]  # in words
    rounds: int  # of the first
    seed: int
    unseen: tuple[str, ...]  # what was not looked at

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts what the mechanism declares."""
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in plain sentences, with what was not looked at."""
        failed = [f"{check.name}: {check.finding}" for check in self.checks if not check.passed]
        unseen = f"Not looked at: {'; '.join(self.unseen)}." if self.unseen else ""
        if failed:
            return f"What ran is not what was accounted for ({'; '.join(failed)}). {unseen}"
        looked = ", ".join(check.name for check in self.checks)
        return (
            f"In {len(self.worlds)} worlds of up to {self.rounds} rounds ({looked}) nothing moves "
            f"by more than the mechanism declares. {unseen}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As `audit.json` has it."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "runs": len(self.worlds),
            "seed": self.seed,
            "not_looked_at": list(self.unseen),
            "notes": [f"world: {world}" for world in self.worlds],
            "false_alarm": {"checks": sum(check.false_alarm for check in self.checks)},
            "views": [],
            "checks": [check.to_dict() for check in self.checks],
        }

    def text(self) -> str:
        """The report, for a terminal."""
        lines = [
            f"{'passed' if c.passed else 'FAILED'}  {c.name}: {c.finding}" for c in self.checks
        ]
        return "\n".join([*lines, self.verdict])


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
        quiet = _quiet(plan)
        worlds = _worlds(quiet, on_world)
        results, unseen = _of_steps(quiet)
        if experiment.evaluate.stop is not None:
            unseen.append("early stopping (evaluate.stop)")
        done = _verdict(quiet, worlds, (results, unseen))
        write(plan, done.to_dict(), None)
    return done


def _quiet(plan: Plan) -> Plan:
    """The plan of the worlds: another release than the run's own, in this process, in which clients
    that fail are left out. Nothing is measured, and nothing evaluated that is not accounted for.
    """
    e = plan.experiment
    on_error = e.client.on_error if _mechanism(plan).by_draws else "drop"
    client = e.client.model_copy(update={"actors": 0, "on_error": on_error})
    quiet: dict[str, Any] = {"test": False, "stop": None, "every": e.rounds + 1}
    if e.evaluate.survey is not None:
        quiet = {"test": False, "stop": None}
    else:
        quiet |= {"per_client": None, "validation": 0.0}
    update = {"client": client, "measure": (), "track": ()}
    update["evaluate"] = e.evaluate.model_copy(update=quiet)
    quieted = e.model_copy(update=update)
    return replace(plan, experiment=quieted, platform={**plan.platform, "audit": "replay"})


def _rounds(plan: Plan, work: float, least: int) -> int:
    """So many rounds of a world as this work allows."""
    of_one = max(plan.cohort, 1) * (plan.d + OVERHEAD)
    return min(plan.experiment.rounds, max(least, int(work / of_one)))


def _worlds(plan: Plan, on_world: Callable[[int, int], None]) -> list[World]:
    """All worlds, the first of each kind before its neighbours. With noise at local steps, whose
    sums are in no adversary's hands, those alone in which clients train.
    """
    few = min(_rounds(plan, LESS, 2), NEIGHBOURS)
    victims = _victims(plan, few)
    planted = ClientCanaries(plan.experiment.seed, plan.d, np.unique(victims), False)
    adversaries = partial(AdversaryWorld, canaries=planted)
    trained = min(TRAINED, few)
    kinds: list[tuple[Callable[..., World], int, int, list[Neighbour]]] = [
        (TrainedWorld, trained, trained, [Neighbour(_victims(plan, trained)[0])])
    ]
    if not _mechanism(plan).by_draws:
        cases = (False, 1), (True, 0), (False, 5)
        neighbours = [Neighbour(victims[0], *case) for case in cases]
        neighbours += [Neighbour(victim, *case) for victim in victims[1:] for case in cases[:2]]
        everyone = partial(EveryoneWorld, canaries=planted)
        kinds = [
            (adversaries, _rounds(plan, WORK, 2), few, neighbours),
            (everyone, 1, 0, []),
            *kinds,
        ]
    of = sum(1 + len(neighbours) for *_, neighbours in kinds)
    worlds: list[World] = []
    for kind, rounds, less, neighbours in kinds:
        first: World | None = None
        for neighbour in (None, *neighbours):
            most = rounds if first is None else min(less, len(first.records))
            with tempfile.TemporaryDirectory(prefix="raydpfl-replay-") as out:
                world = kind(plan, out, neighbour, first)
                world.carry_out(most)
            first = first or world
            worlds.append(world)
            on_world(len(worlds), of)
    return worlds


def _victims(plan: Plan, rounds: int) -> list[int]:
    """Of the clients that take part in the first rounds those that weigh most, and then those that
    take part most often.
    """
    e = plan.experiment
    drawn = [e.selection.exposed(plan.cohort_seed(), t, plan.population) for t in range(rounds)]
    clients, counts = np.unique(np.concatenate(drawn), return_counts=True)
    if not len(clients):
        return [0]
    weights = np.abs(plan.weights(clients))
    order = np.lexsort((clients, -counts, -weights))
    return [int(client) for client in clients[order][:VICTIMS]]


def _of_steps(plan: Plan) -> tuple[list[Check], list[str]]:
    """Of noise at local steps: updates done again as plainly as possible, with the noise that was
    accounted for, and what is not looked at, in words.
    """
    if not _mechanism(plan).by_draws:
        return [], []
    drawn = checks.noise_of_steps(plan, FALSE_ALARM)
    try:
        run = local_step_canaries.run(plan, CANARIES, plan.terms.delta, lambda done, of: None)
    except ConfigError as error:
        return drawn, [f"local steps ({error})"]
    results = [checks.ledger([run]), run.check_steps(), *drawn]
    held = checks.curve(run.least_deltas(run.printed))
    return [*results, *([held] if held else [])], list(run.unseen())


def _verdict(
    plan: Plan, worlds: Sequence[World], of_steps: tuple[list[Check], list[str]]
) -> Replay:
    moves = [move for world in worlds for move in world.moves]
    faults = [fault for world in worlds for fault in world.faults]
    count = sum(len(world.records) for world in worlds)
    rounds = f"{count} rounds of {len(worlds)} worlds"
    results = [
        Check(
            "sensitivity",
            not moves,
            "; ".join(moves[:3]) or f"no sum moves by more than is declared in {rounds}",
        ),
        Check(
            "control flow",
            not faults,
            "; ".join(faults[:3]) or f"all that is no sum of clients is the same in {rounds}",
        ),
    ]
    unseen = list(of_steps[1])
    first = worlds[0]
    if isinstance(first, AdversaryWorld) and first.records and not first.broken:
        results += checks.of_runs([first], FALSE_ALARM)
        cohorts = [record.cohort for record in first.records if record.cohort is not None]
        results.append(checks.noise_of_draws(plan, cohorts, FALSE_ALARM))
        held = checks.curve(observers.least_deltas([first], []))
        results += [held] if held else []
    by_steps = {check.name for check in of_steps[0]}
    if _mechanism(plan).by_draws and first.records and "ledger" not in by_steps:
        results.append(checks.ledger([first]))
    for world in worlds:
        results += world.checks() if isinstance(world, EveryoneWorld) and not world.broken else []
    results += of_steps[0]
    left = plan.experiment.rounds - len(first.records)
    if left:
        unseen.append(f"the last {left} rounds" + (f" ({first.ended})" if first.ended else ""))
    words = tuple(
        f"{'adversaries' if isinstance(world, AdversaryWorld) else 'clients that train'}, "
        f"{world.neighbour or 'the first world'}, {len(world.records)} rounds"
        for world in worlds
    )
    return Replay(results, words, len(first.records), plan.experiment.seed, tuple(unseen))


def _mechanism(plan: Plan) -> Release:
    assert plan.mechanism is not None  # else nothing is claimed; see `replay`
    return plan.mechanism
