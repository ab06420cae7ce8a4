"""Canary clients, guessed by the observers of sums and of single updates.

A canary is a real client whose update is a random direction, far longer than the bound. A coin,
tossed before the run, decides whether it is sent or what the neighbouring relation has in its
place: under replace-one its opposite, a distance of twice the bound, else nothing. Directions are
functions of a key, so none is stored.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch

from raydpfl import privacy
from raydpfl.audit.canaries import CanaryRun, carried_out
from raydpfl.core.messages import ChunkResult, Columns
from raydpfl.core.prng import Purpose, normals, stream
from raydpfl.methods.noise import Whitening
from raydpfl.methods.population import composed
from raydpfl.methods.selection import Cohort
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import views
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.recorder import joined
from raydpfl.training.backends.base import Block

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
class ClientCanaries:
    """The clients whose training is replaced in one run.

    `mirrored`: whether the world without a canary has its opposite, not nothing.
    """

    seed: int
    d: int
    clients: np.ndarray  # int64 [k], ascending
    mirrored: bool

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


class ClientCanaryRun(CanaryRun):
    """A run in which some or all clients are canaries, and what its observers see, in units of the
    noise that the accountants count on.

    The observer knows everything but the coins and the noise, so it subtracts what other clients
    contribute. Scores are <direction, what is left> / std: N(0, 1) for an absent canary,
    N(amplitude, 1) for a present one. ([1] of `bounds` takes sqrt(d) cos, as its std is unknown;
    where an amplitude is not far below sqrt(d), that is not Gaussian.)
    """

    def __init__(self, plan: Plan, out: str, canaries: ClientCanaries):
        super().__init__(plan, out)
        self.canaries = canaries
        k = len(canaries.clients)
        rounds = plan.experiment.rounds
        # float64 [k, T]: of the (whitened) sums; norm of a canary's contribution over the std of
        # the sum; how often the canary was in the cohort
        self.scores, self.amplitudes, self.times = np.zeros((3, k, rounds))
        # float64 [k]: sum over a canary's own updates of amplitude x score, and of the squares
        self.single, self.single_power = np.zeros((2, k))
        # By round: std of the noise on the sum, as the mechanism has it for the nominal cohort;
        # clients selected, those who failed included; squared norm of the noise on the sum, in its
        # std; that of what canaries sent over that of the noise; first coordinates of the noise;
        # (log2 of the measured over the declared grid, coordinates that it is measured by).
        self.stds: list[float] = []
        self.cohorts: list[int] = []
        self.squares: list[float] = []
        self.crowds: list[float] = []
        self.noises: list[np.ndarray] = []
        self.grids: list[tuple[float, int]] = []
        self.sum_error = 0.0  # the most by which a sum differs from its parts, in stds of its noise
        # By update, (round, client, ...): squared norm of its noise, in its std; what a canary sent
        # beyond its bound; and first coordinates of the noise.
        self.update_squares: list[tuple[int, int, float]] = []
        self.along: list[tuple[int, int, float]] = []
        self.update_noises: list[np.ndarray] = []
        # By histogram of scores: squared norm of its noise, in its std; and the most by which one
        # client less has moved one, an L2 norm.
        self.surveys: list[float] = []
        self.moved = 0.0
        # By side query: the noise on the sums of answers, in its std, with that of further draws;
        # the largest answer, in its bounds; and a bound that moved by something else, in words.
        self.answers: dict[str, list[float]] = {}
        self.longest: dict[str, float] = {}
        self.unanswered = ""
        noise = plan.experiment.noise
        self.by_client = noise.client_std(1.0, plan.clients_left) > 0
        self._weights = plan.weights(canaries.clients)
        # std of the noise on a sum over its bound, by query
        self._ratios = on_sums(plan).sum_stds(plan.cohort)
        self._seen = Whitening(noise)
        self._left = Whitening(noise)
        self._rows: list[np.ndarray] = []

    @cached_property
    def _more(self) -> MonitoredNoise:
        """For draws that no run makes, which are not held against those of its rounds."""
        return MonitoredNoise(self.experiment.noise, self.plan.noise_seed, self.plan.d, 0, None)

    @property
    def counts(self) -> Mapping[int, int]:
        """How often clients were drawn."""
        return self.state.participations

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        """The std of the noise is computed again from what the accountants read."""
        plan = self.plan
        bound = self.state.bound
        assert bound is not None  # what is claimed is bounded
        if t and bound != self._following and not self.unanswered:
            self.unanswered = f"the bound of round {t} is not what the noisy answers make it"
        self._bound = bound
        self.stds.append(self._ratios["updates"] * bound * plan.weight * plan.factor(t))
        # The clients' noise is sized for the round with most dropouts: all others carry more.
        self._sum_std = self.stds[-1] * self._carried(cohort)
        self._client_std = plan.experiment.noise.client_std(self.stds[-1], plan.clients_left)
        self.cohorts.append(len(cohort) + cohort.lost)
        # the grid as `raydpfl.core.exact_sum` has it: room for 2^51 steps in the largest sum
        most = bound * plan.weight + TAIL * self._client_std
        self._declared = math.ceil(math.log2(max(1, len(cohort)) * most)) - 51
        self._digits = 0  # those that any number sent has, in steps of that grid
        self._coordinates = 0
        self._sum, self._others, self._planted = np.zeros((3, plan.d))
        total, results = super().collect(t, cohort)
        if self._coordinates:
            finest = math.log2(self._digits & -self._digits) if self._digits else -math.inf
            self.grids.append((finest, self._coordinates))
        error = float(np.abs(total - self._sum).max(initial=0.0)) / (self._sum_std or 1.0)
        self.sum_error = max(self.sum_error, error)
        self._last = cohort, joined(results)
        return total, results

    def _carried(self, cohort: Cohort) -> float:
        """Std of the noise on a sum over that which is accounted for."""
        return math.sqrt(len(cohort) / self.plan.clients_left) if self.by_client else 1.0

    def blocks(self, contribution: Contribution, state: ChunkRound) -> Iterator[Block]:
        """A canary's vector to be bounded is its direction."""
        members = state.chunk.members
        planted = np.isin(members, self.canaries.clients)
        blocks = contribution.training.blocks(state, np.where(planted, -1, members))
        trained = (single for block in blocks for single in block.singles())
        bounding = self.experiment.bounding
        far = FAR * (self._bound + self._client_std / self.plan.weight) + bounding.far
        for slots in np.flatnonzero(members >= 0)[:, None]:
            if not planted[slots[0]]:
                yield next(trained)
                continue
            place = self.canaries.places[int(members[slots[0]])]
            vector = self.canaries.direction(place) * (self.canaries.sign(place) * far)
            vectors = vector.to(contribution.device)[None]
            updates = bounding.invert(vectors, state.view("bounding", slots)).float()
            yield Block(slots, updates, NO_LOSS)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        """What is sent should be what is expected of the client, plus its noise."""
        client = int(state.chunk.clients[block.slots[0]])
        place = self.canaries.places.get(client)
        expected = self._expected(state, block)
        added = vector.cpu().numpy()
        self._sum += added
        part = self._others if place is None else self._planted
        part += expected
        noise = added - expected
        self._sent_noise = noise
        if self.by_client:
            noise = noise / self._client_std
            self.update_squares.append((state.work.t, client, float(noise @ noise)))
            if len(self.update_noises) < SKETCHES:
                self.update_noises.append(noise[:SMALL_SKETCH].astype(np.float32))
        if self.by_client or place is not None:
            steps = np.ldexp(added[added != 0], -self._declared).astype(np.int64)
            self._digits |= int(np.bitwise_or.reduce(steps))
            self._coordinates += len(steps)
        # beyond its bound: with the client's noise on it, in its std; bare, in bounds
        most = self.plan.weight * self._bound
        if place is not None:
            most = min(abs(self._weights[place]) * self._bound, most)
            self.times[place, state.work.t] += 1
        if place is not None and self.by_client:
            beyond = self._single(place, added, noise, most)
        else:
            beyond = float(np.linalg.norm(added, self.experiment.bounding.order)) / most - 1
        if place is not None or not self.by_client:
            self.along.append((state.work.t, client, beyond))

    def _expected(self, state: ChunkRound, block: Block) -> np.ndarray:
        """What the client of a block must add to the sum, without its noise, float64 [d]."""
        view = state.view("bounding", block.slots)
        bounding = self.experiment.bounding
        updates = block.updates
        sent = bounding.send(updates.double(), view)[0]
        if not math.isfinite(torch.linalg.vector_norm(sent)):  # it counts as not having moved
            updates = self.experiment.local.idle(state.view("local", block.slots))[None]
            sent = bounding.send(updates.double(), view)[0]
        norm = float(torch.linalg.vector_norm(sent, bounding.order))
        slot = block.slots[0]
        factor = bounding.factor(norm, self._bound) * float(state.chunk.weights[slot])
        limits = state.chunk.limits
        if limits is not None and abs(factor) * norm > limits[slot]:  # beyond its own budget
            factor = 0.0
        return (sent * factor).cpu().numpy()

    def _single(self, place: int, added: np.ndarray, noise: np.ndarray, accounted: float) -> float:
        """Scores a canary's own update; how far it is beyond its bound, in stds of its noise."""
        direction = self.canaries.direction(place).numpy().astype(np.float64)
        most = self._weights[place] * self._bound
        amplitude = most / self._client_std
        self.single[place] += amplitude * float(direction @ added) / self._client_std
        self.single_power[place] += amplitude**2
        return float(direction @ noise) + (abs(most) - accounted) / self._client_std

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        released = super().release(t, total)
        if self.plan.lattice is not None:  # in steps, as `sent` has it
            return released
        added = released - self._others - self._planted
        noise = self._left(self.experiment.noise.scores(added, self._sum_std))
        self.squares.append(float(noise @ noise))
        self.crowds.append(float(self._planted @ self._planted) / (self.plan.d * self._sum_std**2))
        self.noises.append(noise[:SKETCH].astype(np.float32))
        self.amplitudes[:, t] = self._weights * self._bound / self._sum_std
        row = self._seen((released - self._others) / self._sum_std)
        self._rows.append(row.astype(np.float32))
        if len(self._rows) * self._rows[0].nbytes > BUFFER:
            self._score()
        return released

    def _score(self) -> None:
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

    def noisy_answers(
        self, t: int, cohort: Cohort, columns: Columns, noise: MonitoredNoise | None = None
    ) -> dict[str, float]:
        sums = super().noisy_answers(t, cohort, columns, noise)
        assert self.state.bound is not None  # it adapts
        self._answered = True
        exact = self.experiment.bounding.answers(columns, self.state.bound)
        for query in on_sums(self.plan).sums[1:]:
            answers = np.nan_to_num(exact[query.name])
            added = sums[query.name] - float(answers.sum())
            std = self._ratios[query.name] * query.bound * self.plan.factor(t)
            stds = added / (std * self._carried(cohort))
            self.answers.setdefault(query.name, []).append(stds)
            longest = float(np.abs(answers).max(initial=0.0)) / query.bound
            self.longest[query.name] = max(self.longest.get(query.name, 0.0), longest)
        return sums

    def next_bound(self, t: int, cohort: Cohort, columns: Columns) -> float | None:
        self._answered = False
        self._following = super().next_bound(t, cohort, columns)
        if self._following != self.state.bound and not self._answered and not self.unanswered:
            self.unanswered = f"the bound moved after round {t} without noisy answers"
        return self._following

    def survey(self, t: int, values: np.ndarray, noise: MonitoredNoise | None = None) -> np.ndarray:
        released = super().survey(t, values, noise)
        histogram = self.experiment.evaluate.histogram
        survey = on_sums(self.plan).survey
        assert histogram is not None and survey is not None
        off = released - histogram.counts(values)
        self.surveys.append(float(off @ off) / survey.std**2)
        if noise is not None:
            return released
        self._scored = t, values
        # one client less, under the same noise: all that it can move
        some = np.flatnonzero(np.isfinite(values))
        for client in some[:: max(1, len(some) // 8)]:
            without = values.copy()
            without[client] = math.nan
            moved = super().survey(t, without, self._more) - released
            self.moved = max(self.moved, float(np.linalg.norm(moved)))
        return released

    def accounted_stds(self) -> Mapping[int, float]:
        return dict(zip(self.rounds, self.stds, strict=True))

    def spent(self) -> Mapping[str, float]:
        plan = self.plan
        last = len(self.rounds) - 1
        counted = int(plan.composed_rounds[last])
        mechanism = on_sums(plan).asking(int(plan.surveys[last]))
        terms = plan.experiment.terms
        relation, delta, v = terms.relation, terms.delta, terms.v
        if mechanism.unproved:  # the first observer against whom there is a proof
            most = max(self.counts.values(), default=0)
            every = views(mechanism, relation, counted, most)
            seen = next((one for one in every if not one.mechanism.unproved), None)
            if seen is None:
                return {}
            mechanism, relation, counted = seen.mechanism, seen.relation, seen.rounds
        return {
            name: privacy.epsilon(mechanism, relation, delta, counted, name, v=v)
            for name in plan.named
            if counted and not privacy.covers(name, mechanism, relation)
        }

    def finished(self) -> None:
        """The last round's clients answer again, and the last scores are counted again, as in
        rounds after the last, with their noise: rounds have little of it.
        """
        self._score()
        if self.experiment.bounding.queries():
            cohort, columns = self._last
            count = min(DRAWS, DRAWN // max(1, len(cohort)))
            for t in range(self.state.t, self.state.t + count):
                self.noisy_answers(t, cohort, columns, self._more)
        if self.surveys:
            t, values = self._scored
            for n in range(1, 1 + min(DRAWS // 10, DRAWN // len(values))):
                self.survey(t + n * self.experiment.evaluate.every, values, self._more)
        super().finished()


def runs(plan: Plan, canaries: int, on_round: Callable[[int, int], None]) -> list[ClientCanaryRun]:
    """As many runs as the canaries need, on the same data with other seeds."""
    population = len(plan.population)
    count = min(canaries, population)
    times = math.ceil(canaries / count)
    rounds = plan.experiment.rounds
    done = []
    for number in range(times):
        seeded = _seeded(plan, (plan.experiment.seed + number) % (1 << 64))
        e = seeded.experiment
        drawn = stream(e.seed, Purpose.CANARY, step=1)
        clients = np.sort(drawn.choice(population, count, replace=False, shuffle=False))
        planted = ClientCanaries(e.seed, plan.d, clients, e.relation == "replace_one")
        run = partial(ClientCanaryRun, seeded, canaries=planted)
        done.append(carried_out(run, on_round, number * rounds, times * rounds))
    return done


def _seeded(plan: Plan, seed: int) -> Plan:
    """The same mechanism on the same data, with all that is random of another seed."""
    e = plan.experiment.model_copy(update={"seed": seed})
    composed_rounds = composed(e.selection, seed, e.rounds, plan.population)
    return replace(
        plan,
        experiment=e,
        composed_rounds=composed_rounds,
        clients_left=e.selection.clients_left(seed, e.rounds, plan.population),
        mechanism=replace(on_sums(plan), rounds=int(composed_rounds[-1])),
    )
