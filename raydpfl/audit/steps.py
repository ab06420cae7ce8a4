"""Canary samples, for noise at local steps: every row of some clients is one, and whoever sees each
update guesses.

A canary is one of two samples whose gradients point far apart: a random direction x or -x with one
label, or x with one of two labels (whichever drives the model's gradients further apart); in
regression, x with one of two opposite targets. A coin says which; the two worlds are the
replacement of one sample. All of the training is the run's own: batches, per-sample clipping, noise
at each step. The observer knows the model that a round starts from, works out both clipped
gradients of each canary there, and compares what the client sent with half their difference. What
it does not know (in which batches the canary was, and how the gradients move with the client's
steps) costs it evidence, never the bound its validity.

A check beside it does updates again, as plainly as can be and with the noise that was accounted
for.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from raydpfl import models
from raydpfl.audit import views
from raydpfl.audit.checks import Check
from raydpfl.client import ClientActor, Share
from raydpfl.coordinator import Coordinator
from raydpfl.data import Room, Shards
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, normals, stream
from raydpfl.local.batches import batches
from raydpfl.local.way import Block, sample_loss
from raydpfl.plan import Plan
from raydpfl.privacy import Guarantee, rigorous
from raydpfl.privacy.guarantee import Observer
from raydpfl.rounds import Lane
from raydpfl.selection import Cohort
from raydpfl.tracking import Clock

SCALES = 2.0 ** np.arange(-2, 11)  # norms of x, or sizes of the target, that are tried
WEAKEST = 0.3  # of the clip bound: half the difference of a canary's two gradients must reach that
REPLAYS = 20  # clients whose first update is done again
AGREES = 0.01  # relative: rounding, and a ReLU whose input rounds across 0
CHUNK = 1 << 24  # numbers of per-sample gradients at once


@dataclass(frozen=True, eq=False)
class SampleCanaries:
    """All samples of `clients` (int64 [c], ascending), canary after canary in this order; the
    larger `scale`, the longer their gradients.

    `relabel`: the two samples of a canary are one x with two labels, not x and -x.
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
        e = self.plan.experiment
        sizes = self.plan.population.sizes[self.clients].tolist()
        return np.concatenate(
            [
                stream(e.seed, Purpose.CANARY, client=k, step=5).random(n) < 0.5
                for k, n in zip(self.clients.tolist(), sizes, strict=True)
            ]
        )

    def part(self, client: int) -> slice | None:
        """Where the canaries of a client stand; None for a client without."""
        place = int(np.searchsorted(self.clients, client))
        if place == len(self.clients) or self.clients[place] != client:
            return None
        return slice(
            int(self.ends[place] - self.plan.population.sizes[client]), int(self.ends[place])
        )

    def pair(
        self, client: int, shape: tuple[int, ...], classes: int
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """Both samples of each of a client's canaries: x float32 [n, *shape] and y [n], int64, or
        float32 for regression.
        """
        n = int(self.plan.population.sizes[client])
        drawn = stream(self.plan.experiment.seed, Purpose.CANARY, client=client, step=4)
        x = drawn.standard_normal((n, *shape))
        x /= np.linalg.norm(x.reshape(n, -1), axis=1).reshape(n, *[1] * len(shape))
        if classes:
            x = (x * self.scale).astype(np.float32)
            y = drawn.integers(classes, size=n)
            return (x, y), (x, (y + 1) % classes) if self.relabel else (-x, y)
        x = x.astype(np.float32)
        y = np.full(n, self.scale, np.float32)
        return (x, y), (x, -y)

    def rows(
        self, client: int, shape: tuple[int, ...], classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The samples that the coins took, x and y."""
        (x, y), (other, target) = self.pair(client, shape, classes)
        inside = self.inside[self.part(client)]
        return np.where(inside.reshape(-1, *[1] * len(shape)), x, other), np.where(
            inside, y, target
        )


class PlantedShards:
    """Shards, with canaries for the rows of some clients."""

    def __init__(self, shards: Shards, canaries: SampleCanaries):
        self._shards = shards
        self._canaries = canaries

    def __getattr__(self, name: str):
        return getattr(self._shards, name)

    def lane(
        self, clients, rows: int, picked=None, room: Room | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y, n = self._shards.lane(clients, rows, picked, room)
        for slot, client in enumerate(np.asarray(clients).tolist()):
            if client >= 0 and self._canaries.part(client) is not None:
                rows = slice(None) if picked is None or picked[slot] is None else picked[slot]
                for into, planted in zip(
                    (x, y),
                    self._canaries.rows(client, self._shards.shape, self._shards.classes),
                    strict=True,
                ):
                    into[slot, : n[slot]] = planted[rows]
        return x, y, n


class StepClient(ClientActor):
    """The client actor, on planted rows."""

    def __init__(self, plan: Plan, record: StepRecord):
        super().__init__(plan.experiment, str(plan.shards))
        self.shards = PlantedShards(self.shards, record.canaries)
        self.record = record

    def _contribute(self, share: Share, lane: Lane, block: Block) -> torch.Tensor:
        vectors = super()._contribute(share, lane, block)
        for place, slot in enumerate(block.slots.tolist()):
            client = int(lane.clients[slot])
            if self.record.canaries.part(client) is not None:
                alone = block.slots[place : place + 1]
                self._note(share, lane, alone, vectors[place : place + 1])
        return vectors

    def _note(self, share: Share, lane: Lane, alone: np.ndarray, sent: torch.Tensor) -> None:
        """Has the record take up what the client at a slot, int64 [1], has sent, float64 [1, d]."""
        slot = int(alone[0])
        local = self.experiment.local
        correction = local.correction(self._view(share, lane, "local", alone))
        if correction is None:
            correction = torch.zeros_like(share.model)[None]
        view = self._view(share, lane, "bounding", alone)
        moved = self.experiment.bounding.moved(sent, view)[0]
        # In units of a gradient: minus the sum of the steps' gradients.
        steps = -moved.cpu() / (float(lane.weights[slot]) * share.lr)
        client = int(lane.clients[slot])
        draw = int(lane.draws[slot])
        self.record.sent(share.model.cpu(), correction[0].cpu(), share.work.t, client, draw, steps)


class StepCoordinator(Coordinator):
    """The coordinator, inline, with canary samples; it accounts as ever, and keeps neither rows nor
    checkpoints.
    """

    def __init__(self, plan: Plan, out: str, canaries: SampleCanaries):
        super().__init__(plan, out, 0)
        self.seen = StepRecord(plan, canaries)

    def start(self) -> None:
        super().start()
        self.pool.client = StepClient(self.plan, self.seen)

    def collect(self, t: int, cohort: Cohort):
        self.seen.rounds.append(t)
        return super().collect(t, cohort)

    def _recorded(self, row: dict, clock: Clock) -> list[dict]:
        return []


@dataclass
class StepRecord:
    """What an observer of every update has, in units of the noise that the accountants were told
    of.
    """

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
        self.product, self.power = (
            np.zeros(len(self.canaries.inside)),
            np.zeros(len(self.canaries.inside)),
        )
        self.shape = shards.shape
        self.classes = shards.classes
        self.gradients = Gradients(
            models.build(e.model, shards.shape, shards.classes, e.seed), e.bounding.sample_bound
        )
        # How often the gradient of each step is in the sum of all steps: 1, or more with momentum.
        self.linear = e.local.linear()
        if self.linear is None:
            accepted = "a rule that is linear (raydpfl.local.Local.linear), to audit local steps"
            raise ConfigError("local.kind", e.local.kind, accepted)
        beta = self.linear.momentum
        self.weights = np.array(
            [sum(beta**j for j in range(e.local.steps - q)) for q in range(e.local.steps)]
        )

    def sent(
        self,
        parameters: torch.Tensor,
        correction: torch.Tensor,
        t: int,
        client: int,
        draw: int,
        steps: torch.Tensor,
    ) -> None:
        """A client with canaries has sent `steps` float64 [d], the (weighted) sum of its steps'
        gradients, corrections among them.
        """
        part = self.canaries.part(client)
        steps_mechanism = self.plan.mechanism
        n = int(self.plan.population.sizes[client])
        std = float(steps_mechanism.stds[client])
        self.participations.append((t, client))
        first, second = self.canaries.pair(client, self.shape, self.classes)
        total = float(self.weights.sum())
        energy = float(np.linalg.norm(self.weights))
        seen = (steps - total * correction.double()).float()
        halves = np.zeros(n)
        products = np.zeros(n)
        middle = torch.zeros(self.plan.d, dtype=torch.float64)
        width = self.gradients.width
        pieces = [slice(start, min(start + width, n)) for start in range(0, n, width)]

        def both(piece: slice) -> tuple[torch.Tensor, torch.Tensor]:
            one, other = (
                self.gradients(parameters, torch.from_numpy(x[piece]), torch.from_numpy(y[piece]))
                for x, y in (first, second)
            )
            return (one - other) / 2, (one + other) / 2

        for piece in pieces:
            middle += both(piece)[1].sum(0, dtype=torch.float64)
        # what is known of the gradients, whatever the coins were
        seen -= (total / n * middle).float()
        length = float(torch.linalg.vector_norm(seen, dtype=torch.float64))
        for piece in pieces:
            half, _ = both(piece)
            halves[piece] = torch.linalg.vector_norm(half, dim=1).numpy()
            products[piece] = (half @ seen).double().numpy()
        amplitudes = total / energy * halves / (n * std)
        scores = math.sqrt(self.plan.d) * products / (np.maximum(halves, 1e-30) * length)
        self.product[part] += amplitudes * scores
        self.power[part] += amplitudes**2
        if len(self.replayed) < REPLAYS and client not in {done for _, done, _ in self.replayed}:
            again = self._replay(parameters, correction, t, client, draw, std)
            self.replayed.append(
                (
                    t,
                    client,
                    float(
                        torch.linalg.vector_norm(again - steps) / torch.linalg.vector_norm(again)
                    ),
                )
            )

    def _replay(
        self,
        parameters: torch.Tensor,
        correction: torch.Tensor,
        t: int,
        client: int,
        draw: int,
        std: float,
    ) -> torch.Tensor:
        """The sum of the steps' gradients, float64 [d], by the definition of a local step
        (`raydpfl.local`).
        """
        e = self.plan.experiment
        n = int(self.plan.population.sizes[client])
        local = e.local
        lr = e.local.learning_rate(t)
        x, y = (
            torch.from_numpy(each) for each in self.canaries.rows(client, self.shape, self.classes)
        )
        index, sizes = batches(e.seed, t, [client], [draw], [n], local)
        start = parameters.double()
        model = start.clone()
        velocity = torch.zeros_like(start)
        total = torch.zeros_like(start)
        for step in range(local.steps):
            rows = index[0, step, : sizes[0]]
            parts = torch.from_numpy(rows).split(self.gradients.width)
            gradient = sum(
                self.gradients(model.float(), x[part], y[part]).sum(0, dtype=torch.float64)
                for part in parts
            ) / len(rows)
            noise = normals(
                self.plan.noise_seed,
                Purpose.STEP_NOISE,
                self.plan.d,
                t=t,
                client=client,
                draw=draw,
                step=step,
            )
            gradient += (
                std * noise.double()
                + self.linear.decay * model
                + self.linear.proximal * (model - start)
                + correction.double()
            )
            velocity = self.linear.momentum * velocity + gradient
            total += velocity
            model -= lr * velocity
        return total

    def view(self, delta: float, confidence: float) -> views.View:
        """The finding. The claim is that of the canary client that may have spent most, by
        whichever accountant says least of it.
        """
        claims, names = _claims(self.plan, delta)
        worst = int(self.canaries.clients[np.argmax(claims[self.canaries.clients])])
        steps = self.plan.mechanism
        counts = _counts(self.plan)
        n = int(steps.samples[worst])
        by = names[worst]
        claimed = Guarantee(
            "rigorous",
            by,
            "sample",
            "replace_one",
            Observer.UPDATES,
            steps.scope(worst, int(counts[worst])),
            float(claims[worst]),
            delta,
            steps.exclusions,
        )
        exposures = np.sqrt(self.power)
        made_up = stream(self.plan.experiment.seed, Purpose.CANARY, step=3)
        signs = np.where(made_up.random(len(exposures)) < 0.5, 1.0, -1.0)
        imagined = 2 * (exposures * made_up.standard_normal(len(exposures)) + signs * self.power)
        statistics = np.divide(
            self.product, exposures, out=np.zeros_like(exposures), where=exposures > 0
        )
        scores = views.Scores(self.canaries.inside, 2 * self.product, statistics, exposures)
        most = (
            self.weights.sum()
            / np.linalg.norm(self.weights)
            * steps.bound
            / (n * steps.stds[worst])
            * math.sqrt(counts[worst])
        )
        return views.view(scores, imagined, claimed, float(most), True, confidence)

    def checks(self, ledger: list[dict]) -> list[Check]:
        """That every round is recorded with what it spends, and that updates are what a plain loop
        with the accounted noise gives.
        """
        e = self.plan.experiment
        missing = sorted(set(self.rounds) - {entry["round"] for entry in ledger})
        finding = f"all {len(self.rounds)} released rounds are recorded, with what they spend"
        if missing:
            finding = f"round {missing[0]} was released and is not in the ledger"
        else:
            for name in e.privacy.accountants:
                truth = float(
                    self.plan.mechanism.curves([name], self.plan.draws(len(self.rounds)))[name][-1]
                )
                if float(ledger[-1]["epsilon"][name]) < truth * (1 - 1e-6):
                    missing = [len(self.rounds) - 1]
                    finding = f"epsilon {float(ledger[-1]['epsilon'][name]):.6g} is recorded ({name}) where {len(self.rounds)} rounds spend {truth:.6g}"
        t, client, far = max(self.replayed, key=lambda each: each[2])
        same = far <= AGREES
        done_again = f"{len(self.replayed)} updates done again with the accounted noise differ by {far:.1e} of their norm at most"
        wrong = f"the update of client {client} in round {t} differs by {far:.2g} of its norm from what its steps and their accounted noise give"
        return [
            Check("ledger", not missing, finding, 0.0),
            Check("steps", same, done_again if same else wrong, 0.0),
        ]


class Gradients:
    """Clipped gradients of single samples, float32 [n, d], for a module of any kind."""

    def __init__(self, module: torch.nn.Module, bound: float):
        self.module = copy.deepcopy(module).eval()
        self.bound = bound
        self.shapes = {
            name: parameter.shape
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
        }
        # samples at once
        self.width = max(1, CHUNK // sum(shape.numel() for shape in self.shapes.values()))
        self._each: Callable = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        named = {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        return sample_loss(functional_call(self.module, named, (x[None],)), y[None])

    def __call__(self, flat: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        try:
            found = self._each(flat, x, y)
        except RuntimeError:  # a module that cannot be vmapped
            self._each = lambda flat, x, y: torch.stack(
                [grad(self._loss)(flat, *row) for row in zip(x, y, strict=True)]
            )
            found = self._each(flat, x, y)
        norms = torch.linalg.vector_norm(found, dim=1, dtype=torch.float64)
        return found * torch.clamp(self.bound / norms, max=1.0).float()[:, None]


def plant(plan: Plan, canaries: int, delta: float) -> SampleCanaries:
    """All samples of the clients that may spend most, of as many clients as it takes for so many.

    Raises `ConfigError` where too few clients take part, or none of the samples tried has gradients
    that come near the clip bound.
    """
    claims, _ = _claims(plan, delta)
    counts = _counts(plan)
    sizes = plan.population.sizes
    usable = np.flatnonzero(
        (counts > 0) & np.isfinite(claims) & (claims > 0) & (plan.mechanism.stds > 0)
    )
    order = usable[np.lexsort((-counts[usable], -claims[usable]))]
    taken = order[: int(np.searchsorted(np.cumsum(sizes[order]), canaries)) + 1]
    if sizes[taken].sum() < 10:
        raise ConfigError(
            "rounds",
            plan.experiment.rounds,
            "more: hardly any client with a budget takes part in them",
        )
    shards = Shards.open(plan.shards)
    e = plan.experiment
    module = models.build(e.model, shards.shape, shards.classes, e.seed)
    gradients = Gradients(module, e.bounding.sample_bound)
    flat = models.flatten(module)
    reached = {}
    for relabel in (False, True)[: 1 + (shards.classes > 1)]:
        for scale in SCALES.tolist():
            tried = SampleCanaries(plan, np.sort(taken), scale, relabel)
            pair = tried.pair(int(taken[0]), shards.shape, shards.classes)
            one, other = (
                gradients(flat, torch.from_numpy(x[:16]), torch.from_numpy(y[:16])) for x, y in pair
            )
            reached[tried] = float(torch.linalg.vector_norm(one - other, dim=1).median()) / (
                2 * e.bounding.sample_bound
            )
    best = max(reached.values())
    if not best >= WEAKEST:
        accepted = "one whose gradients random samples can pull about; or a smaller bounding.bound"
        raise ConfigError(
            "model.kind",
            e.model.kind,
            f"{accepted}: those of a canary's two samples come to {best:.2g} of the bound apart",
        )
    return next(tried for tried, found in reached.items() if found >= 0.9 * best)


def _counts(plan: Plan) -> np.ndarray:
    """How often each client is drawn in the whole run, int64 [N]."""
    counts = np.zeros(len(plan.population), np.int64)
    for clients in plan.draws(plan.experiment.rounds):
        np.add.at(counts, clients, 1)
    return counts


def _claims(plan: Plan, delta: float) -> tuple[np.ndarray, list[str]]:
    """The least epsilon float64 [N] at `delta` that a rigorous accountant of the run gives each
    client's samples, and which one.
    """
    steps = replace(plan.mechanism, delta=delta)
    counts = _counts(plan)
    names = rigorous(plan.experiment.privacy.accountants)
    spent = np.stack([steps.epsilons(name, counts) for name in names])
    return spent.min(0), [names[place] for place in spent.argmin(0).tolist()]
