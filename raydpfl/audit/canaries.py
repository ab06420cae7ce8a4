"""A run with canaries, and a record of what an observer of the run sees.

Canaries are real clients whose training is replaced by a random direction, far longer than the
bound. A coin, tossed before the run, decides whether it is sent or what the neighbouring relation
has in its place: under replace-one its opposite, a distance of twice the bound, else nothing. All
after the training is the code of every run. Directions are functions of a key, so none is stored.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from raydpfl.core.messages import Chunk, ChunkResult, Columns
from raydpfl.core.prng import Purpose, normals, stream
from raydpfl.methods.noise import Whitening
from raydpfl.methods.selection import Cohort
from raydpfl.privacy import Guarantee
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ActorRound, ChunkRound
from raydpfl.simulation.client.chunk_training import ChunkTraining
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Inline
from raydpfl.simulation.recorder import joined
from raydpfl.training.backends.base import Block, Sum

FAR = 20.0  # (bound + std of its noise): the norm of what a canary would send unbounded
BUFFER = 1 << 28  # bytes of released sums that are held at once
CHUNK = 256  # directions at once
# coordinates of a round's noise, of one update's, and how many of the latter
SKETCH = 4096
SMALL_SKETCH = 256
SKETCHES = 4000
NO_LOSS = np.full(1, math.nan)
TAIL = 40.0  # stds of a client's noise that the grid of the sums has room for
# draws of the noise on answers and on histograms after the last round, and how many numbers they
# may take from clients
DRAWS = 1000
DRAWN = 200_000


def on_sums(plan: Plan) -> Mechanism:
    """The mechanism on sums or single updates, without surveys, in which no canary stands out."""
    return cast(Mechanism, plan.mechanism).asking(0)


@dataclass(frozen=True)
class Canaries:
    """The clients whose training is replaced in one run.

    `mirrored`: whether the world without a canary has its opposite, not nothing.
    """

    seed: int
    d: int
    clients: np.ndarray  # int64 [k], ascending
    mirrored: bool

    @classmethod
    def among(cls, seed: int, population: int, count: int, d: int, mirrored: bool) -> Canaries:
        """`count` clients drawn uniformly."""
        generator = stream(seed, Purpose.CANARY, step=1)
        drawn = generator.choice(population, count, replace=False, shuffle=False)
        return cls(seed, d, np.sort(drawn), mirrored)

    @cached_property
    def inside(self) -> np.ndarray:
        """The coins, bool [k]."""
        clients = self.clients.tolist()
        coins = [stream(self.seed, Purpose.CANARY, client=k, step=2).random() for k in clients]
        return np.array(coins) < 0.5

    @cached_property
    def places(self) -> dict[int, int]:
        return {client: place for place, client in enumerate(self.clients.tolist())}

    def sign(self, place: int) -> float:
        return 1.0 if self.inside[place] else -1.0 if self.mirrored else 0.0

    def direction(self, place: int) -> torch.Tensor:
        """Float32 [d], of norm 1."""
        drawn = normals(self.seed, Purpose.CANARY, self.d, client=int(self.clients[place]))
        return drawn / torch.linalg.vector_norm(drawn, dtype=torch.float64).float()


class CanaryTraining(ChunkTraining):
    """Trains chunks in which canaries take the place of some clients."""

    record: CanaryRecord

    def train(
        self,
        actor: ActorRound,
        chunk: Chunk,
        members: np.ndarray,
        clipped: np.ndarray | None = None,
        into: Sum | None = None,
    ) -> Iterator[Block]:
        """See `ChunkTraining.train`."""
        assert into is None  # as `CanaryActor.contribution` is none of compiled code
        places = self.record.canaries.places
        planted = [client in places for client in members.tolist()]
        others = np.where(planted, -1, members)
        blocks = super().train(actor, chunk, others, clipped) if (others >= 0).any() else ()
        trained = (single for block in blocks for single in block.singles())
        for slot in np.flatnonzero(members >= 0).tolist():
            yield self._canary(actor, chunk, slot) if planted[slot] else next(trained)

    def _canary(self, actor: ActorRound, chunk: Chunk, slot: int) -> Block:
        """The update of a canary, such that the vector to be bounded is its direction."""
        bounding = self.experiment.bounding
        canaries = self.record.canaries
        place = canaries.places[int(chunk.clients[slot])]
        far = FAR * self.record.reach + bounding.far
        vector = canaries.direction(place).to(self.device) * (canaries.sign(place) * far)
        slots = np.array([slot])
        view = actor.view(chunk, "bounding", slots)
        return Block(slots, bounding.invert(vector[None], view).float(), NO_LOSS)


class ObservedContribution(Contribution):
    """Records what another contribution adds to the sum, and what it must add if it is right."""

    def __init__(self, observed: Contribution, record: CanaryRecord):
        super().__init__(observed.training)
        self.observed = observed
        self.record = record

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        """See `Contribution.add`."""
        for single in block.singles():
            expected = self._expected(state, single)
            sent = torch.zeros_like(total)
            self.observed.add(state, single, sent)
            total += sent
            client = int(state.chunk.clients[single.slots[0]])
            self.record.sent(client, expected, sent.cpu().numpy())

    def _expected(self, state: ChunkRound, single: Block) -> np.ndarray:
        """What the client of a block must add to the sum, without its noise, float64 [d]."""
        view = state.view("bounding", single.slots)
        sent = self.bounding.send(single.updates.double(), view)[0]
        norm = float(torch.linalg.vector_norm(sent))
        factor = self.bounding.factor(norm, self.record.bound) if math.isfinite(norm) else 0.0
        return (sent * (factor * float(state.chunk.weights[single.slots[0]]))).cpu().numpy()


class CanaryActor(ClientActor):
    """A client actor with canaries among its clients."""

    training_class = CanaryTraining

    def __init__(self, plan: Plan, record: CanaryRecord):
        super().__init__(plan.experiment, str(plan.shards))
        self.record = record
        cast(CanaryTraining, self.training).record = record

    def contribution(self, state: ChunkRound) -> Contribution:
        """See `ClientActor.contribution`."""
        return ObservedContribution(super().contribution(state), self.record)


class Written:
    """What the ledger at `path` had when rounds started, to be held against its end."""

    def __init__(self, path: Path):
        self.path = path
        self._before: list[tuple[int, int, bytes]] = []  # (round, bytes, last line)

    def begins(self, t: int) -> None:
        """Reads the ledger as round t begins, before its clients are asked for anything."""
        text = self._text()
        self._before.append((t, len(text), text.splitlines()[-1] if text else b""))

    def lines(self) -> list[dict[str, Any]]:
        """The lines by now."""
        return [json.loads(line) for line in self._text().splitlines()]

    def late(self) -> str:
        """Which round was not in the ledger as it started, or was written twice; empty: none."""
        text = self._text()
        for t, size, last in self._before:
            if not last or json.loads(last)["round"] < t:
                return f"round {t} began before it was in the ledger"
            if not text[:size].endswith(last + b"\n"):
                return f"the ledger of round {t} was changed after that round had started"
        return ""

    def _text(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""


class PlantedCoordinator(Coordinator):
    """The coordinator, inline, with canaries; it keeps neither rows nor checkpoints."""

    def __init__(self, plan: Plan, out: str, canaries: Canaries):
        super().__init__(plan, out)
        self.seen = CanaryRecord(plan, canaries)

    def start(self) -> tuple[int, list[str]]:
        started = super().start()
        assert isinstance(self.pool, Inline)
        self.pool.client = CanaryActor(self.plan, self.seen)
        # of draws that no run makes, which are not held against those of its rounds
        self.more = MonitoredNoise(
            self.experiment.noise, self.plan.noise_seed, self.plan.d, 0, None
        )
        self.written = Written(self.ledger.path)
        return started

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        assert self.state.bound is not None  # what is claimed is bounded
        self.written.begins(t)
        self.seen.begin(t, self.state.bound, cohort)
        total, results = super().collect(t, cohort)
        self.seen.collected(total)
        self._last = cohort, joined(results)
        return total, results

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        released = super().release(t, total)
        self.seen.released(t, released)
        return released

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        sums = super().noisy_answers(t, cohort, columns, noise)
        assert self.state.bound is not None  # it adapts
        self.seen.answered(self.experiment.bounding.answers(columns, self.state.bound), sums)
        return sums

    def next_bound(self, t: int, cohort: Cohort, columns: Columns) -> float | None:
        following = super().next_bound(t, cohort, columns)
        self.seen.adapted(following)
        return following

    def survey(self, t: int, values: np.ndarray, noise: MonitoredNoise | None = None) -> np.ndarray:
        released = super().survey(t, values, noise)
        histogram = self.experiment.evaluate.histogram
        assert histogram is not None
        self.seen.surveyed(released - histogram.counts(values))
        self._scores = t, values
        # one client less, under the same noise: all that it can move
        some = np.flatnonzero(np.isfinite(values))
        for client in some[:: max(1, len(some) // 8)]:
            without = values.copy()
            without[client] = math.nan
            moved = super().survey(t, without, self.more) - released
            self.seen.moved = max(self.seen.moved, float(np.linalg.norm(moved)))
        return released

    def finished(self) -> CanaryRecord:
        """The record of the whole run, and of more draws of noise of which rounds have little."""
        self.seen.flush()
        self._draw_more()
        self.seen.ledger = self.written.lines()
        self.seen.late = self.written.late()
        self.seen.counts = self.state.participations.copy()
        self.seen.printed = self.accounts.guarantees(self.state.t, self.state.participations)
        return self.seen

    def _draw_more(self) -> None:
        """Has the last round's clients answer again, and counts the last scores again, as in rounds
        after the last, with their noise.
        """
        if self.experiment.bounding.queries():
            cohort, columns = self._last
            count = min(DRAWS, DRAWN // max(1, len(cohort)))
            for t in range(self.state.t, self.state.t + count):
                self.noisy_answers(t, cohort, columns, self.more)
        histogram = self.experiment.evaluate.histogram
        if histogram is None or not self.seen.surveys:
            return
        t, values = self._scores
        every = self.experiment.evaluate.every
        exact = histogram.counts(values)
        for n in range(1, 1 + min(DRAWS // 10, DRAWN // len(values))):
            counts = super().survey(t + n * every, values, self.more)
            self.seen.surveyed(counts - exact)


@dataclass
class CanaryRecord:
    """What an observer sees of one run, in units of the noise that the accountants count on, and
    what it was made from.

    The observer knows everything but the coins and the noise, so it subtracts what other clients
    contribute. Scores are <direction, what is left> / std: N(0, 1) for an absent canary,
    N(amplitude, 1) for a present one. ([1] of `bounds` takes sqrt(d) cos, as its std is unknown;
    where an amplitude is not far below sqrt(d), that is not Gaussian.)
    """

    plan: Plan
    canaries: Canaries
    scores: np.ndarray = field(init=False)  # float64 [k, T], of the (whitened) sums
    # float64 [k, T]: norm of a canary's contribution over the std of the sum
    amplitudes: np.ndarray = field(init=False)
    times: np.ndarray = field(init=False)  # int64 [k, T]: how often the canary was in the cohort
    # float64 [k]: sum over a canary's own updates of amplitude x score, and of the squares
    single: np.ndarray = field(init=False)
    single_power: np.ndarray = field(init=False)
    ledger: list[dict] = field(default_factory=list)
    late: str = ""  # what the ledger had too late, in words
    counts: Counter = field(default_factory=Counter)  # client -> times drawn
    printed: list[Guarantee] = field(default_factory=list)  # what the run says in the end
    # By round: its number; std of the noise on the sum, as the mechanism has it for the nominal
    # cohort; clients selected, those who failed included; squared norm of the noise on the sum, in
    # its std; that of what canaries sent over that of the noise; first coordinates of the noise;
    # (log2 of the measured over the declared grid, coordinates that it is measured by).
    rounds: list[int] = field(default_factory=list)
    stds: list[float] = field(default_factory=list)
    cohorts: list[int] = field(default_factory=list)
    squares: list[float] = field(default_factory=list)
    crowds: list[float] = field(default_factory=list)
    noises: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[float, int]] = field(default_factory=list)
    sum_error: float = 0.0  # the most by which a sum differs from its parts, in stds of its noise
    # By update, (round, client, ...): squared norm of its noise, in its std; what a canary sent
    # beyond its bound; and first coordinates of the noise.
    update_squares: list[tuple[int, int, float]] = field(default_factory=list)
    along: list[tuple[int, int, float]] = field(default_factory=list)
    update_noises: list[np.ndarray] = field(default_factory=list)
    # By histogram of scores: squared norm of its noise, in its std; and the most by which one
    # client less has moved one, an L2 norm.
    surveys: list[float] = field(default_factory=list)
    moved: float = 0.0
    # By side query: the noise on the sums of answers, in its std, with that of further draws; the
    # largest answer, in its bounds; and a bound that moved by something else, in words.
    answers: dict[str, list[float]] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)
    unanswered: str = ""

    def __post_init__(self) -> None:
        k = len(self.canaries.clients)
        rounds = self.plan.experiment.rounds
        self.scores = np.zeros((k, rounds))
        self.amplitudes = np.zeros((k, rounds))
        self.times = np.zeros((k, rounds), np.int64)
        self.single = np.zeros(k)
        self.single_power = np.zeros(k)
        noise = self.plan.experiment.noise
        self.by_client = noise.client_std(1.0, self.plan.clients_left) > 0
        self._weights = self.plan.weights(self.canaries.clients)
        self._seen = Whitening(noise.whitening())
        self._left = Whitening(noise.whitening())
        self._rows: list[np.ndarray] = []
        self._following: float | None = None

    def begin(self, t: int, bound: float, cohort: Cohort) -> None:
        """Begins a round. The std of its noise is computed again from what the accountants read."""
        updates = on_sums(self.plan).queries[0]
        adapts = self.plan.experiment.bounding.adapts
        if adapts and t and self._following != bound and not self.unanswered:
            self.unanswered = f"the bound of round {t} is not what the noisy answers make it"
        self._following = bound  # where no client answers
        self._answered = False
        self._round = t
        self._cohort = len(cohort)
        self.bound = bound
        self.stds.append(updates.std / updates.bound * bound * self.plan.weight)
        # The clients' noise is sized for the round with most dropouts: all others carry more.
        self._sum_std = self.stds[-1] * (
            math.sqrt(len(cohort) / self.plan.clients_left) if self.by_client else 1.0
        )
        noise = self.plan.experiment.noise
        self._client_std = noise.client_std(self.stds[-1], self.plan.clients_left)
        self.reach = bound + self._client_std / self.plan.weight
        self.cohorts.append(len(cohort) + cohort.lost)
        # the grid as `raydpfl.core.exact_sum` has it: room for 2^51 steps in the largest sum
        most = bound * self.plan.weight + TAIL * self._client_std
        self._declared = math.ceil(math.log2(max(1, len(cohort)) * most)) - 51
        self._finest = math.inf
        self._coordinates = 0
        self._sum = np.zeros(self.plan.d)
        self._others = np.zeros(self.plan.d)
        self._planted = np.zeros(self.plan.d)

    def sent(self, client: int, expected: np.ndarray, vector: np.ndarray) -> None:
        """Notes one client's contribution `vector`, which should be `expected` plus its noise."""
        place = self.canaries.places.get(client)
        self._sum += vector
        part = self._others if place is None else self._planted
        part += expected
        noise = vector - expected
        if self.by_client:
            noise = noise / self._client_std
            self.update_squares.append((self._round, client, float(noise @ noise)))
            if len(self.update_noises) < SKETCHES:
                self.update_noises.append(noise[:SMALL_SKETCH].astype(np.float32))
        if self.by_client or place is not None:
            self._measure(vector)
        if place is None:
            if not self.by_client:
                beyond = float(np.linalg.norm(vector)) / (self.plan.weight * self.bound) - 1
                self.along.append((self._round, client, beyond))
            return
        direction = self.canaries.direction(place).numpy().astype(np.float64)
        most = self._weights[place] * self.bound
        accounted = min(abs(most), self.plan.weight * self.bound)
        # With the client's noise on it, in its std; bare, in bounds.
        beyond = float(np.linalg.norm(vector)) / accounted - 1
        if self.by_client:
            beyond = float(direction @ noise) + (abs(most) - accounted) / self._client_std
        self.along.append((self._round, client, beyond))
        self.times[place, self._round] += 1
        if self.by_client:
            amplitude = most / self._client_std
            self.single[place] += amplitude * float(direction @ vector) / self._client_std
            self.single_power[place] += amplitude**2

    def _measure(self, vector: np.ndarray) -> None:
        """Takes note of the grid of a vector that is rounded to it: the largest power of two that
        its coordinates, whose digits are random, are multiples of.
        """
        mantissas, exponents = np.frexp(vector[vector != 0])
        if len(exponents):
            digits = np.ldexp(mantissas, 53).astype(np.int64)
            last = np.frexp((digits & -digits).astype(np.float64))[1] - 1
            self._finest = min(self._finest, float((exponents - 53 + last).min()))
            self._coordinates += len(exponents)

    def answered(self, exact: Mapping[str, np.ndarray], sums: Mapping[str, float]) -> None:
        """Records the answers to the side queries, float64 [r] by name, and their released sums."""
        self._answered = True
        clients = math.sqrt(self._cohort / self.plan.clients_left) if self.by_client else 1.0
        for query in on_sums(self.plan).queries[1:]:
            answers = np.nan_to_num(exact[query.name])
            noise = sums[query.name] - float(answers.sum())
            self.answers.setdefault(query.name, []).append(noise / (query.std * clients))
            longest = float(np.abs(answers).max(initial=0.0)) / query.bound
            self.longest[query.name] = max(self.longest.get(query.name, 0.0), longest)

    def adapted(self, following: float | None) -> None:
        """Notes the bound of the next round, which may differ only where clients have answered."""
        if following != self.bound and not self._answered and not self.unanswered:
            self.unanswered = f"the bound moved after round {self._round} without noisy answers"
        self._following = following

    def collected(self, total: np.ndarray) -> None:
        if self._coordinates:
            self.grids.append((self._finest - self._declared, self._coordinates))
        error = float(np.abs(total - self._sum).max(initial=0.0)) / (self._sum_std or 1.0)
        self.sum_error = max(self.sum_error, error)

    def released(self, t: int, released: np.ndarray) -> None:
        """Notes the released sum of round t, float64 [d]."""
        self.rounds.append(t)
        noise = self._left((released - self._others - self._planted) / self._sum_std)
        self.squares.append(float(noise @ noise))
        self.crowds.append(float(self._planted @ self._planted) / (self.plan.d * self._sum_std**2))
        self.noises.append(noise[:SKETCH].astype(np.float32))
        self.amplitudes[:, t] = self._weights * self.bound / self._sum_std
        row = self._seen((released - self._others) / self._sum_std)
        self._rows.append(row.astype(np.float32))
        if len(self._rows) * self._rows[0].nbytes > BUFFER:
            self.flush()

    def surveyed(self, noise: np.ndarray) -> None:
        """Notes the noise, float64 [bins], on a histogram that is released."""
        survey = on_sums(self.plan).survey
        assert survey is not None
        self.surveys.append(float(noise @ noise) / survey.std**2)

    def flush(self) -> None:
        """Scores the sums that are held."""
        if not self._rows:
            return
        rows = torch.from_numpy(np.stack(self._rows))
        last = self.rounds[-1] + 1
        for start in range(0, len(self.canaries.clients), CHUNK):
            stop = min(start + CHUNK, len(self.canaries.clients))
            directions = torch.stack([self.canaries.direction(k) for k in range(start, stop)])
            self.scores[start:stop, last - len(rows) : last] = (directions @ rows.T).numpy()
        self._rows.clear()
