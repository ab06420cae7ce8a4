"""Canary samples, for noise at local steps, guessed by an observer of every single update.

Every row of some clients is a canary: one of two samples whose gradients differ much, by a coin. It
is a random direction x or -x with one label, or x with one of two labels, whichever drives the
model's gradients that differ more; in regression, x with one of two opposite targets. The two
worlds differ by the replacement of one sample.

The training is the run's own: batches, per-sample clipping, noise at every step. The observer knows
the model that a round starts from, computes both clipped gradients of a canary there, and takes
what the client sent along half their difference, in stds of the noise (`raydpfl.audit.canaries`).
It does not know in which batches the canary was, nor how the gradients change with the client's
steps. That costs it evidence, but the bound stays valid.

In addition, an exact check does updates of every round a second time, as plainly as possible and
with the noise that was accounted for. Some canaries are a thousand or a million times as long as
the others, so that every sample that is not clipped shows there.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from raydpfl import models
from raydpfl.audit import observers
from raydpfl.audit.canaries import Written
from raydpfl.audit.checks import Check, recorded
from raydpfl.audit.privacy_curve import CERTAIN, least_delta, presence
from raydpfl.core.messages import ChunkResult
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Buffers, RowRequest, Shards
from raydpfl.errors import ConfigError
from raydpfl.methods.selection import Cohort
from raydpfl.models.tasks import Task
from raydpfl.privacy import Guarantee, rigorous
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.local_steps import LocalSteps
from raydpfl.privacy.release_report import LocalStepsReport, scope_of
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Inline
from raydpfl.training.backends.base import Block
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.trainer import Trainer

SCALES = 2.0 ** np.arange(-2, 11)  # norms of x, or sizes of the target, that are tried
WEAKEST = 0.3  # of the clip bound: half the difference of a canary's two gradients must reach that
REPLAYS = 20  # updates of a round that are done again
# factors on canaries, so that samples far beyond the clip bound are among them, and their shares
LONGER = {1.0: 7 / 8, 1e3: 1 / 16, 1e6: 1 / 16}
AGREES = 0.01  # of its clipped gradients: by how much an update may differ from what it should be
ROUNDING = 1e-6  # relative: of float32
CHUNK = 1 << 24  # numbers of per-sample gradients at once


Samples = tuple[np.ndarray, np.ndarray]
"""x float32 [n, *shape] and y [n]."""

Pair = tuple[Samples, Samples]
"""Both samples of all canaries."""


@dataclass(frozen=True, eq=False)
class SampleCanaries:
    """All samples of `clients` (int64 [c], ascending) in this order. The larger `scale`, the longer
    their gradients. `relabel`: a canary is one x with two labels, instead of x and -x.
    """

    plan: Plan
    clients: np.ndarray
    scale: float
    relabel: bool = False

    @cached_property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.plan.population.sizes[self.clients])

    @cached_property
    def inside(self) -> np.ndarray:
        """The coins, bool [m]: the first of the two samples."""
        seed = self.plan.experiment.seed
        sizes = self.plan.population.sizes[self.clients].tolist()
        coins = [
            stream(seed, Purpose.CANARY, client=k, step=5).random(n)
            for k, n in zip(self.clients.tolist(), sizes, strict=True)
        ]
        return np.concatenate(coins) < 0.5

    def part(self, client: int) -> slice | None:
        """The places of a client's canaries; None for a client without."""
        place = int(np.searchsorted(self.clients, client))
        if place == len(self.clients) or self.clients[place] != client:
            return None
        end = int(self.ends[place])
        return slice(end - int(self.plan.population.sizes[client]), end)

    def pair(self, client: int, shape: tuple[int, ...], classes: int) -> Pair:
        """Both samples of all of a client's canaries; y is int64, or float32 for regression."""
        n = int(self.plan.population.sizes[client])
        drawn = stream(self.plan.experiment.seed, Purpose.CANARY, client=client, step=4)
        x = drawn.standard_normal((n, *shape))
        column = (n, *[1] * len(shape))
        x /= np.linalg.norm(x.reshape(n, -1), axis=1).reshape(column)
        labels = drawn.integers(classes, size=n) if classes else np.zeros(n)
        scales = self.scale * drawn.choice([*LONGER], n, p=[*LONGER.values()])
        if classes:
            x = (x * scales.reshape(column)).astype(np.float32)
            other = (labels + 1) % classes
            return (x, labels), (x, other) if self.relabel else (-x, labels)
        x = x.astype(np.float32)
        y = scales.astype(np.float32)
        return (x, y), (x, -y)

    def rows(self, client: int, shape: tuple[int, ...], classes: int) -> Samples:
        """The samples that the coins took, x and y."""
        (x, y), (other, target) = self.pair(client, shape, classes)
        inside = self.inside[self.part(client)]
        samples = np.where(inside.reshape(-1, *[1] * len(shape)), x, other)
        return samples, np.where(inside, y, target)


class CanaryRows:
    """A reader of rows, with canaries for those of some clients."""

    def __init__(self, shards: Shards, canaries: SampleCanaries):
        self._reader = shards.reader
        self._shape = shards.shape
        self._classes = shards.classes
        self._canaries = canaries
        self.prefetch = shards.reader.prefetch
        self.release = shards.reader.release

    def read(self, x: np.ndarray, y: np.ndarray, request: RowRequest, buffers: Buffers) -> None:
        """As `RowReader.read`."""
        self._reader.read(x, y, request, buffers)
        for slot, client in enumerate(request.clients.tolist()):
            if client < 0 or self._canaries.part(client) is None:
                continue
            planted = self._canaries.rows(client, self._shape, self._classes)
            for into, values in zip((x, y), planted, strict=True):
                into[slot, : request.counts[slot]] = values[request.rows(slot)]


class ObservedSteps(Contribution):
    """Another contribution, client by client, with a record of what clients with canaries send."""

    def __init__(self, observed: Contribution, record: StepRecord):
        super().__init__(observed.training)
        self.observed = observed
        self.record = record

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        """See `Contribution.add`."""
        for single in block.singles():
            sent = torch.zeros_like(total)
            self.observed.add(state, single, sent)
            total += sent
            if self.record.canaries.part(int(state.chunk.clients[single.slots[0]])) is not None:
                self._note(state, single.slots, sent[None])

    def _note(self, state: ChunkRound, slots: np.ndarray, sent: torch.Tensor) -> None:
        """Records what the client at a slot, int64 [1], has sent, float64 [1, d]."""
        actor = state.actor
        chunk = state.chunk
        slot = int(slots[0])
        correction = self.experiment.local.correction(state.view("local", slots))
        if correction is None:
            correction = torch.zeros_like(actor.model)[None]
        moved = self.bounding.invert(sent, state.view("bounding", slots))[0]
        steps = -moved.cpu() / (float(chunk.weights[slot]) * actor.lr)
        who = (state.work.t, int(chunk.clients[slot]), int(chunk.draws[slot]))
        update = StepUpdate(*who, actor.model.cpu(), correction[0].cpu().double(), steps)
        self.record.sent(update)


class StepActor(ClientActor):
    """A client actor on rows with canaries."""

    def __init__(self, plan: Plan, record: StepRecord):
        super().__init__(plan.experiment, str(plan.shards))
        self.shards.reader = CanaryRows(self.shards, record.canaries)
        self.record = record

    def contribution(self, state: ChunkRound) -> Contribution:
        """See `ClientActor.contribution`."""
        return ObservedSteps(super().contribution(state), self.record)


class StepCoordinator(Coordinator):
    """The coordinator, inline, with canary samples; it keeps neither rows nor checkpoints."""

    def __init__(self, plan: Plan, out: str, canaries: SampleCanaries):
        super().__init__(plan, out)
        self.seen = StepRecord(plan, canaries)

    def start(self) -> tuple[int, list[str]]:
        started = super().start()
        assert isinstance(self.pool, Inline)
        self.pool.client = StepActor(self.plan, self.seen)
        self.written = Written(self.ledger.path)
        return started

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        self.written.begins(t)
        self.seen.rounds.append(t)
        return super().collect(t, cohort)


@dataclass(frozen=True, eq=False)
class StepUpdate:
    """What a client with canaries has sent."""

    t: int
    client: int
    draw: int
    parameters: torch.Tensor  # float32 [d]: the model that the round starts from
    correction: torch.Tensor  # float64 [d]: what is added to every gradient
    steps: torch.Tensor  # float64 [d]: the (weighted) sum of its gradients, corrections among them


@dataclass
class StepRecord:
    """What an observer of every update sees, in units of the noise accounted for."""

    plan: Plan
    canaries: SampleCanaries
    # float64 [m]: sum over the participations of amplitude x score
    product: np.ndarray = field(init=False)
    power: np.ndarray = field(init=False)  # float64 [m]: sum of the amplitudes' squares
    rounds: list[int] = field(default_factory=list)  # that were released
    participations: list[tuple[int, int]] = field(default_factory=list)  # (round, canary client)
    # (round, client, relative difference)
    replayed: list[tuple[int, int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        e = self.plan.experiment
        shards = Shards.open(self.plan.shards)
        self.product = np.zeros(len(self.canaries.inside))
        self.power = np.zeros(len(self.canaries.inside))
        self.shape = shards.shape
        self.classes = shards.classes
        linear = e.local.linear()
        if linear is None:
            linearity = "raydpfl.methods.local.Local.linear"
            expected = f"a rule that is linear ({linearity}), to audit local steps"
            raise ConfigError("local.kind", e.local.kind, expected)
        self.linear = linear
        module = models.build(e.model, shards.form(e.data.task), e.seed)
        bound = _sample_bound(self.plan)
        self.gradients = SampleGradients(module, e.data.task, bound)
        backend = e.client.backend
        self.trainer = Trainer(
            module,
            e.local,
            backend=backend,
            seed=e.seed,
            clip=bound,
            user_defined=True,
            task=e.data.task,
        )
        self.trainer.noise_seed = self.plan.noise_seed

    def _weights(self, rows: int) -> np.ndarray:
        """How often a step's gradient is in the sum of a client's steps, float64 [Q] (momentum)."""
        beta = self.linear.momentum
        steps = int(self.plan.experiment.local.step_counts(np.array([rows]))[0])
        return np.array([sum(beta**j for j in range(steps - q)) for q in range(steps)])

    def sent(self, sent: StepUpdate) -> None:
        """Adds the evidence that an update gives about its client's canaries."""
        part = self.canaries.part(sent.client)
        n = int(self.plan.population.sizes[sent.client])
        std = float(_steps(self.plan).stds[sent.client])
        self.participations.append((sent.t, sent.client))
        pair = self.canaries.pair(sent.client, self.shape, self.classes)
        weights = self._weights(n)
        total = float(weights.sum())
        energy = float(np.linalg.norm(weights))
        seen = (sent.steps - total * sent.correction).float()
        halves = np.zeros(n)
        products = np.zeros(n)
        middle = torch.zeros(self.plan.d, dtype=torch.float64)
        width = self.gradients.width
        pieces = [slice(start, min(start + width, n)) for start in range(0, n, width)]
        for piece in pieces:
            one, other = self._both(sent.parameters, pair, piece)
            middle += ((one + other) / 2).sum(0, dtype=torch.float64)
        # what the gradients have in common, whatever the coins were
        seen -= (total / n * middle).float()
        for piece in pieces:
            one, other = self._both(sent.parameters, pair, piece)
            half = (one - other) / 2
            halves[piece] = torch.linalg.vector_norm(half, dim=1).numpy()
            products[piece] = (half @ seen).double().numpy()
        amplitudes = total / energy * halves / (n * std)
        scores = products / (np.maximum(halves, 1e-30) * energy * std)
        self.product[part] += amplitudes * scores
        self.power[part] += amplitudes**2
        if sum(t == sent.t for t, _, _ in self.replayed[-REPLAYS:]) < REPLAYS:
            self.replayed.append((sent.t, sent.client, self._off(sent, std)))

    def _both(
        self, parameters: torch.Tensor, pair: Pair, piece: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The clipped gradients of both samples of some of a client's canaries."""
        one, other = (
            self.gradients(parameters, torch.from_numpy(x[piece]), torch.from_numpy(y[piece]))
            for x, y in pair
        )
        return one, other

    def _off(self, sent: StepUpdate, std: float) -> float:
        """What an update is off by, beyond rounding, in norms of its clipped gradients."""
        again, clipped = self._replay(sent, std)
        lr = self.plan.experiment.local.learning_rate(sent.t)
        norm = torch.linalg.vector_norm
        rounding = ROUNDING * (norm(again) + norm(sent.parameters) / lr)
        least = 1e-3 * self.gradients.bound
        return float((norm(again - sent.steps) - rounding).clamp(min=0) / max(norm(clipped), least))

    def _replay(self, sent: StepUpdate, std: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the steps' gradients, float64 [d], and what of it is clipped."""
        e = self.plan.experiment
        n = int(self.plan.population.sizes[sent.client])
        lr = e.local.learning_rate(sent.t)
        samples, labels = self.canaries.rows(sent.client, self.shape, self.classes)
        x = torch.from_numpy(samples)
        y = torch.from_numpy(labels)
        index, sizes = batches(e.seed, sent.t, [sent.client], [sent.draw], [n], e.local)
        start = sent.parameters.double()
        model = start.clone()
        velocity = torch.zeros_like(start)
        total = torch.zeros_like(start)
        clipped = torch.zeros_like(start)
        taken, _ = picked(index, sizes, np.array([n]), e.local)
        drawn = samples if taken[0] is None else samples[taken[0]]
        who = {"t": sent.t, "client": sent.client, "draw": sent.draw}
        noises = torch.from_numpy(
            self.trainer.noises(drawn, d=self.plan.d, std=std, steps=index.shape[1], **who)
        )
        weights = self._weights(n)
        for step in range(index.shape[1]):
            rows = torch.from_numpy(index[0, step, : sizes[0]])
            gradient = torch.zeros_like(start)
            for part in rows.split(self.gradients.width):
                gradient += self.gradients(model.float(), x[part], y[part]).sum(
                    0, dtype=torch.float64
                )
            gradient /= len(rows)
            clipped += weights[step] * gradient
            gradient += (
                noises[step]
                + self.linear.decay * model
                + self.linear.proximal * (model - start)
                + sent.correction
            )
            velocity = self.linear.momentum * velocity + gradient
            total += velocity
            model -= lr * velocity
        return total, clipped

    def view(self, delta: float, confidence: float) -> observers.ObserverAudit:
        """The finding, against the smallest claim on the canary client that may have spent most."""
        claims, names = _claims(self.plan, delta)
        worst = int(self.canaries.clients[np.argmax(claims[self.canaries.clients])])
        steps = _steps(self.plan)
        counts = _counts(self.plan)
        n = int(steps.samples[worst])
        scope = scope_of(steps, worst, int(counts[worst]))
        epsilon = float(claims[worst])
        claimed = Guarantee(
            "rigorous", names[worst], steps.unit, "replace_one", Observer.UPDATES, scope, epsilon,
            delta, steps.exclusions,
        )  # fmt: skip
        shifts = np.sqrt(self.power)
        made_up = stream(self.plan.experiment.seed, Purpose.CANARY, step=3)
        signs = np.where(made_up.random(len(shifts)) < 0.5, 1.0, -1.0)
        imagined = 2 * (shifts * made_up.standard_normal(len(shifts)) + signs * self.power)
        statistics = np.divide(self.product, shifts, out=np.zeros_like(shifts), where=shifts > 0)
        scores = observers.Scores(self.canaries.inside, 2 * self.product, statistics, shifts)
        weights = self._weights(int(n))
        momentum = weights.sum() / np.linalg.norm(weights)
        most = momentum * steps.bound / (n * steps.stds[worst]) * math.sqrt(counts[worst])
        return observers.view(scores, imagined, claimed, float(most), True, confidence)

    def least_deltas(self, claims: Sequence[Guarantee]) -> list[observers.Held]:
        """The claims of single clients, with their least deltas: a sample is in a batch by chance,
        or in one batch of every whole epoch.
        """
        return [
            (claim, self._least(claim, claim.sampling.client))
            for claim in observers.smallest(claims)
            if claim.sampling.client is not None
        ]

    def _least(self, claimed: Guarantee, client: int) -> float:
        steps = _steps(self.plan)
        count = int(_counts(self.plan)[client])
        n = int(steps.samples[client])
        batch = int(steps.batches[client])
        times = count * int(steps.client_steps[client])
        mu = 2 * steps.bound / (batch * float(steps.stds[client]))
        if batch < n and steps.sampling == "fresh":
            return least_delta(claimed.epsilon, mu, presence(batch / n), times)
        whole = count * max(1, times // count * batch // n)
        return least_delta(claimed.epsilon, mu, CERTAIN, whole)

    def checks(self, written: Written) -> list[Check]:
        """That rounds are recorded before they start, and updates are those of a plain loop."""
        e = self.plan.experiment
        ledger = written.lines()
        missing = sorted(set(self.rounds) - {entry["round"] for entry in ledger})
        if missing:
            short = f"round {missing[0]} was released and is not in the ledger"
        else:
            short = self._underspent(ledger[-1]["epsilon"], e.accountants) or written.late()
        t, client, far = max(self.replayed, key=lambda replay: replay[2])
        same = far <= AGREES
        finding = f"{len(self.replayed)} of {len(self.participations)} updates with canaries, done "
        finding += (
            f"again with the accounted noise, differ by {far:.1e} of their clipped gradients "
        )
        finding += "at most"
        if not same:
            finding = f"the update of client {client} in round {t} differs by {far:.2g} of its "
            finding += "clipped gradients from what its steps and their accounted noise give"
        return [
            Check("ledger", not short, short or recorded(len(self.rounds))),
            Check("steps", same, finding),
        ]

    def unseen(self) -> tuple[str, ...]:
        """What is not looked at here, in words."""
        others = len(self.plan.population) - len(self.canaries.clients)
        left = len(self.participations) - len(self.replayed)
        detail = ["single steps, as updates alone are seen"]
        if left:
            detail.insert(0, f"those of {left} updates that were not done again")
        if others:
            detail.insert(0, f"the clipping and the noise of {others} clients without canaries")
        return tuple(detail)

    def _underspent(self, recorded: Mapping[str, float], accountants: Sequence[str]) -> str:
        """The accountant whose epsilon is `recorded` too small, and by how much; empty: none."""
        rounds = len(self.rounds)
        curves = LocalStepsReport(_steps(self.plan), accountants).curves(self.plan.draws(rounds))
        for name in accountants:
            truth = float(curves[name][-1])
            epsilon = float(recorded[name])
            if epsilon < truth * (1 - 1e-6):
                spent = f"{rounds} rounds spend {truth:.6g}"
                return f"epsilon {epsilon:.6g} is recorded ({name}) where {spent}"
        return ""


class SampleGradients:
    """Clipped gradients of single samples, float32 [n, d], for a module of any kind."""

    def __init__(self, module: torch.nn.Module, task: Task, bound: float):
        self.task = task
        self.module = copy.deepcopy(module).eval()
        self.bound = bound
        self.shapes = {
            name: parameter.shape
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        # samples at once
        self.width = max(1, CHUNK // sum(shape.numel() for shape in self.shapes.values()))
        self._rows: Callable = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        return self.task.loss(functional_call(self.module, named, (x[None],)), y[None])[0]

    def __call__(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            gradients = self._rows(flat, x, y)
        except RuntimeError:  # a module that cannot be vmapped
            self._rows = lambda flat, x, y: torch.stack(
                [grad(self._loss)(flat, *row) for row in zip(x, y, strict=True)]
            )
            gradients = self._rows(flat, x, y)
        norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
        return gradients * torch.clamp(self.bound / norms, max=1.0).float()[:, None]


def plant(plan: Plan, canaries: int, delta: float) -> SampleCanaries:
    """All samples of the clients that may spend most, of as many clients as these canaries need.

    Raises `ConfigError` if too few clients take part, or if no sample that is tried has gradients
    near the clip bound.
    """
    claims, _ = _claims(plan, delta)
    counts = _counts(plan)
    sizes = plan.population.sizes
    noisy = _steps(plan).stds > 0
    usable = np.flatnonzero((counts > 0) & np.isfinite(claims) & (claims > 0) & noisy)
    order = usable[np.lexsort((-counts[usable], -claims[usable]))]
    taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), canaries)) + 1]
    if sizes[taken].sum() < 10:
        expected = "more: hardly any client with a budget takes part in them"
        raise ConfigError("rounds", plan.experiment.rounds, expected)
    reached = _reached(plan, taken)
    best = max(reached.values())
    if not best >= WEAKEST:
        expected = "one whose gradients random samples can pull about; or a smaller bounding.bound"
        expected += f": those of a canary's two samples differ by {best:.2g} of the bound"
        raise ConfigError("model.kind", plan.experiment.model.kind, expected)
    return next(tried for tried, share in reached.items() if share >= 0.9 * best)


def _reached(plan: Plan, clients: np.ndarray) -> dict[SampleCanaries, float]:
    """Half the distance between a canary's two gradients, in clip bounds, for all that is tried."""
    shards = Shards.open(plan.shards)
    e = plan.experiment
    if shards.tokens or shards.target.shape:
        expected = "samples of numbers, with one class or number each, to audit local steps"
        raise ConfigError("data.kind", e.data.kind, expected)
    module = models.build(e.model, shards.form(e.data.task), e.seed)
    bound = _sample_bound(plan)
    gradients = SampleGradients(module, e.data.task, bound)
    flat = models.flatten(module)
    reached = {}
    for relabel in (False, True)[: 1 + (shards.classes > 1)]:
        for scale in SCALES.tolist():
            tried = SampleCanaries(plan, np.sort(clients), scale, relabel)
            pair = tried.pair(int(clients[0]), shards.shape, shards.classes)
            rows = ((torch.from_numpy(x[:16]), torch.from_numpy(y[:16])) for x, y in pair)
            one, other = (gradients(flat, x, y) for x, y in rows)
            distance = float(torch.linalg.vector_norm(one - other, dim=1).median())
            reached[tried] = distance / (2 * bound)
    return reached


def _steps(plan: Plan) -> LocalSteps:
    """The mechanism of a plan whose noise is at local steps."""
    return cast(LocalSteps, plan.mechanism)


def _sample_bound(plan: Plan) -> float:
    bound = plan.experiment.bounding.sample_bound
    assert bound is not None  # noise at local steps needs one
    return bound


def _counts(plan: Plan) -> np.ndarray:
    """How often clients are drawn in the whole run, int64 [N]."""
    counts = np.zeros(len(plan.population), np.int64)
    for clients in plan.draws(plan.experiment.rounds):
        np.add.at(counts, clients, 1)
    return counts


def _claims(plan: Plan, delta: float) -> tuple[np.ndarray, list[str]]:
    """The smallest rigorous epsilon at `delta` of clients, float64 [N], and by which accountant."""
    steps = replace(_steps(plan), delta=delta)
    counts = _counts(plan)
    names = rigorous(plan.experiment.privacy.accountants)
    report = LocalStepsReport(steps, names)
    spent = np.stack([report.epsilons(name, counts) for name in names])
    return spent.min(0), [names[place] for place in spent.argmin(0).tolist()]
