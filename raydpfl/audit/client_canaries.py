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
from raydpfl.audit.canaries import CanaryRun, execute_run
from raydpfl.core.messages import ChunkResult, Columns
from raydpfl.core.prng import Purpose, normals, stream
from raydpfl.methods.noise import Whitening
from raydpfl.methods.population import check_composed_rounds
from raydpfl.methods.selection import Cohort
from raydpfl.privacy.mechanism import Mechanism
from raydpfl.privacy.observers import views
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.noise_monitor import MonitoredNoise
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.recorder import join_columns
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


def sum_mechanism(plan: Plan) -> Mechanism:
    """The mechanism on sums or single updates, without surveys, in which no canary stands out."""
    return cast(Mechanism, plan.mechanism).with_surveys(0)


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
        normal_vector = normals(self.seed, Purpose.CANARY, self.d, client=int(self.clients[place]))
        return normal_vector / torch.linalg.vector_norm(normal_vector, dtype=torch.float64).float()


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
        self.max_histogram_shift = 0.0
        # By side query: the noise on the sums of answers, in its std, with that of further draws;
        # the largest answer, in its bounds; and a bound that moved by something else, in words.
        self.answers: dict[str, list[float]] = {}
        self.longest: dict[str, float] = {}
        self.bound_fault = ""
        noise = plan.experiment.noise
        self.by_client = noise.client_std(1.0, plan.clients_left) > 0
        self._weights = plan.weights(canaries.clients)
        # std of the noise on a sum over its bound, by query
        self._ratios = sum_mechanism(plan).sum_stds(plan.cohort)
        self._score_whitening = Whitening(noise)
        self._noise_whitening = Whitening(noise)
        self._rows: list[np.ndarray] = []

    @cached_property
    def _extra_noise(self) -> MonitoredNoise:
        """For draws that no run makes, which are not held against those of its rounds."""
        return MonitoredNoise(self.experiment.noise, self.plan.noise_seed, self.plan.d, 0, None)

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        """The std of the noise is computed again from what the accountants read."""
        plan = self.plan
        bound = self.state.bound
        assert bound is not None  # what is claimed is bounded
        if t and bound != self._next_bound and not self.bound_fault:
            self.bound_fault = f"the bound of round {t} is not what the noisy answers make it"
        self._bound = bound
        self.stds.append(self._ratios["updates"] * bound * plan.weight * plan.factor(t))
        # The clients' noise is sized for the round with most dropouts: all others carry more.
        self._sum_std = self.stds[-1] * self._noise_ratio(cohort)
        self._client_std = plan.experiment.noise.client_std(self.stds[-1], plan.clients_left)
        self.cohorts.append(len(cohort) + cohort.lost)
        # the grid as `raydpfl.core.exact_sum` has it: room for 2^51 steps in the largest sum
        max_magnitude = bound * plan.weight + TAIL * self._client_std
        self._grid_exponent = math.ceil(math.log2(max(1, len(cohort)) * max_magnitude)) - 51
        self._digits = 0  # those that any number sent has, in steps of that grid
        self._coordinates = 0
        self._sum, self._other_sum, self._canary_sum = np.zeros((3, plan.d))
        total, results = super().collect(t, cohort)
        if self._coordinates:
            digit_exponent = math.log2(self._digits & -self._digits) if self._digits else -math.inf
            self.grids.append((digit_exponent, self._coordinates))
        error = float(np.abs(total - self._sum).max(initial=0.0)) / (self._sum_std or 1.0)
        self.sum_error = max(self.sum_error, error)
        self._last_results = cohort, join_columns(results)
        return total, results

    def _noise_ratio(self, cohort: Cohort) -> float:
        """Std of the noise on a sum over that which is accounted for."""
        return math.sqrt(len(cohort) / self.plan.clients_left) if self.by_client else 1.0

    def blocks(self, contribution: Contribution, state: ChunkRound) -> Iterator[Block]:
        """A canary's vector to be bounded is its direction."""
        members = state.chunk.members
        is_canary = np.isin(members, self.canaries.clients)
        blocks = contribution.training.blocks(state, np.where(is_canary, -1, members))
        trained_blocks = (single for block in blocks for single in block.singles())
        bounding = self.experiment.bounding
        canary_norm = FAR * (self._bound + self._client_std / self.plan.weight) + bounding.far
        for slots in np.flatnonzero(members >= 0)[:, None]:
            if not is_canary[slots[0]]:
                yield next(trained_blocks)
                continue
            place = self.canaries.places[int(members[slots[0]])]
            vector = self.canaries.direction(place) * (self.canaries.sign(place) * canary_norm)
            vectors = vector.to(contribution.device)[None]
            updates = bounding.invert(vectors, state.view("bounding", slots)).float()
            yield Block(slots, updates, NO_LOSS)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        """What is sent should be what is expected of the client, plus its noise."""
        client = int(state.chunk.clients[block.slots[0]])
        place = self.canaries.places.get(client)
        expected_vector = self._expected_vector(state, block)
        addend = vector.cpu().numpy()
        self._sum += addend
        part = self._other_sum if place is None else self._canary_sum
        part += expected_vector
        noise = addend - expected_vector
        self._sent_noise = noise
        if self.by_client:
            noise = noise / self._client_std
            self.update_squares.append((state.work.t, client, float(noise @ noise)))
            if len(self.update_noises) < SKETCHES:
                self.update_noises.append(noise[:SMALL_SKETCH].astype(np.float32))
        if self.by_client or place is not None:
            steps = np.ldexp(addend[addend != 0], -self._grid_exponent).astype(np.int64)
            self._digits |= int(np.bitwise_or.reduce(steps))
            self._coordinates += len(steps)
        # beyond its bound: with the client's noise on it, in its std; bare, in bounds
        max_norm = self.plan.weight * self._bound
        if place is not None:
            max_norm = min(abs(self._weights[place]) * self._bound, max_norm)
            self.times[place, state.work.t] += 1
        if place is not None and self.by_client:
            excess = self._score_update(place, addend, noise, max_norm)
        else:
            excess = float(np.linalg.norm(addend, self.experiment.bounding.order)) / max_norm - 1
        if place is not None or not self.by_client:
            self.along.append((state.work.t, client, excess))

    def _expected_vector(self, state: ChunkRound, block: Block) -> np.ndarray:
        """What the client of a block must add to the sum, without its noise, float64 [d]."""
        view = state.view("bounding", block.slots)
        bounding = self.experiment.bounding
        updates = block.updates
        vector = bounding.send(updates.double(), view)[0]
        if not math.isfinite(torch.linalg.vector_norm(vector)):  # it counts as not having moved
            updates = self.experiment.local.idle(state.view("local", block.slots))[None]
            vector = bounding.send(updates.double(), view)[0]
        norm = float(torch.linalg.vector_norm(vector, bounding.order))
        slot = block.slots[0]
        factor = bounding.factor(norm, self._bound) * float(state.chunk.weights[slot])
        limits = state.chunk.limits
        if limits is not None and abs(factor) * norm > limits[slot]:  # beyond its own budget
            factor = 0.0
        return (vector * factor).cpu().numpy()

    def _score_update(
        self, place: int, addend: np.ndarray, noise: np.ndarray, accounted_norm: float
    ) -> float:
        """Scores a canary's own update; how far it is beyond its bound, in stds of its noise."""
        direction = self.canaries.direction(place).numpy().astype(np.float64)
        signed_norm = self._weights[place] * self._bound
        amplitude = signed_norm / self._client_std
        self.single[place] += amplitude * float(direction @ addend) / self._client_std
        self.single_power[place] += amplitude**2
        return float(direction @ noise) + (abs(signed_norm) - accounted_norm) / self._client_std

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        noised_sum = super().release(t, total)
        if self.plan.lattice is not None:  # in steps, as `sent` has it
            return noised_sum
        residual = noised_sum - self._other_sum - self._canary_sum
        noise = self._noise_whitening(self.experiment.noise.scores(residual, self._sum_std))
        self.squares.append(float(noise @ noise))
        energy = float(self._canary_sum @ self._canary_sum)
        self.crowds.append(energy / (self.plan.d * self._sum_std**2))
        self.noises.append(noise[:SKETCH].astype(np.float32))
        self.amplitudes[:, t] = self._weights * self._bound / self._sum_std
        row = self._score_whitening((noised_sum - self._other_sum) / self._sum_std)
        self._rows.append(row.astype(np.float32))
        if len(self._rows) * self._rows[0].nbytes > BUFFER:
            self._score()
        return noised_sum

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
        self._has_answers = True
        exact = self.experiment.bounding.each_answer(columns, self.state.bound)
        for query in sum_mechanism(self.plan).sums[1:]:
            answers = np.nan_to_num(exact[query.name])
            added_noise = sums[query.name] - float(answers.sum())
            std = self._ratios[query.name] * query.bound * self.plan.factor(t)
            stds = added_noise / (std * self._noise_ratio(cohort))
            self.answers.setdefault(query.name, []).append(stds)
            longest = float(np.abs(answers).max(initial=0.0)) / query.bound
            self.longest[query.name] = max(self.longest.get(query.name, 0.0), longest)
        return sums

    def next_bound(self, t: int, cohort: Cohort, columns: Columns) -> float | None:
        self._has_answers = False
        self._next_bound = super().next_bound(t, cohort, columns)
        if self._next_bound != self.state.bound and not self._has_answers and not self.bound_fault:
            self.bound_fault = f"the bound moved after round {t} without noisy answers"
        return self._next_bound

    def survey(self, t: int, values: np.ndarray, noise: MonitoredNoise | None = None) -> np.ndarray:
        noised_counts = super().survey(t, values, noise)
        histogram = self.experiment.evaluate.histogram
        survey = sum_mechanism(self.plan).survey
        assert histogram is not None and survey is not None
        residual = noised_counts - histogram.counts(values)
        self.surveys.append(float(residual @ residual) / survey.std**2)
        if noise is not None:
            return noised_counts
        self._last_survey = t, values
        # one client less, under the same noise: all that it can move
        scored_clients = np.flatnonzero(np.isfinite(values))
        for client in scored_clients[:: max(1, len(scored_clients) // 8)]:
            reduced_values = values.copy()
            reduced_values[client] = math.nan
            shift = super().survey(t, reduced_values, self._extra_noise) - noised_counts
            self.max_histogram_shift = max(self.max_histogram_shift, float(np.linalg.norm(shift)))
        return noised_counts

    def accounted_stds(self) -> Mapping[int, float]:
        return dict(zip(self.rounds, self.stds, strict=True))

    def run_epsilons(self) -> Mapping[str, float]:
        plan = self.plan
        last_round = len(self.rounds) - 1
        rounds = int(plan.composed_rounds[last_round])
        mechanism = sum_mechanism(plan).with_surveys(int(plan.surveys[last_round]))
        terms = plan.experiment.terms
        relation, delta, v = terms.relation, terms.delta, terms.v
        if mechanism.proof_gap:  # the first observer against whom there is a proof
            max_participations = max(self.state.participations.values(), default=0)
            choices = views(mechanism, relation, rounds, max_participations)
            view = next((view for view in choices if not view.mechanism.proof_gap), None)
            if view is None:
                return {}
            mechanism, relation, rounds = view.mechanism, view.relation, view.rounds
        return {
            name: privacy.epsilon(mechanism, relation, delta, rounds, name, v=v)
            for name in plan.accountants
            if rounds and not privacy.covers(name, mechanism, relation)
        }

    def finished(self) -> None:
        """The last round's clients answer again, and the last scores are counted again, as in
        rounds after the last, with their noise: rounds have little of it.
        """
        self._score()
        count = len(self.rounds)
        self.scores, self.amplitudes, self.times = (
            rows[:, :count] for rows in (self.scores, self.amplitudes, self.times)
        )
        if self.experiment.bounding.queries():
            cohort, columns = self._last_results
            count = min(DRAWS, DRAWN // max(1, len(cohort)))
            for t in range(self.state.t, self.state.t + count):
                self.noisy_answers(t, cohort, columns, self._extra_noise)
        if self.surveys:
            t, values = self._last_survey
            for n in range(1, 1 + min(DRAWS // 10, DRAWN // len(values))):
                self.survey(t + n * self.experiment.evaluate.every, values, self._extra_noise)
        super().finished()


def runs(plan: Plan, canaries: int, on_round: Callable[[int, int], None]) -> list[ClientCanaryRun]:
    """As many runs as the canaries need, on the same data with other seeds."""
    population = len(plan.population)
    count = min(canaries, population)
    times = math.ceil(canaries / count)
    rounds = plan.experiment.rounds
    canary_runs = []
    for number in range(times):
        seeded_plan = _reseed_plan(plan, (plan.experiment.seed + number) % (1 << 64))
        e = seeded_plan.experiment
        generator = stream(e.seed, Purpose.CANARY, step=1)
        clients = np.sort(generator.choice(population, count, replace=False, shuffle=False))
        client_canaries = ClientCanaries(e.seed, plan.d, clients, e.relation == "replace_one")
        run = partial(ClientCanaryRun, seeded_plan, canaries=client_canaries)
        canary_runs.append(execute_run(run, on_round, number * rounds, times * rounds))
    return canary_runs


def _reseed_plan(plan: Plan, seed: int) -> Plan:
    """The same mechanism on the same data, with all that is random of another seed."""
    e = plan.experiment.model_copy(update={"seed": seed})
    composed_rounds = check_composed_rounds(e.selection, seed, e.rounds, plan.population)
    return replace(
        plan,
        experiment=e,
        composed_rounds=composed_rounds,
        clients_left=e.selection.clients_left(seed, e.rounds, plan.population),
        mechanism=replace(sum_mechanism(plan), rounds=int(composed_rounds[-1])),
    )
