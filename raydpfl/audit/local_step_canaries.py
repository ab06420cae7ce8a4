"""Canary samples, for noise at local steps, guessed by an observer of every single update.

Every row of some clients is a canary: one of two samples whose gradients differ much, by a coin. It
is a random direction x or -x with one label, or x with one of two labels, whichever drives the
model's gradients that differ more; in regression, x with one of two opposite targets. The two
worlds differ by the replacement of one sample.

The training is the run's own: batches, per-sample clipping, noise at every step. The observer knows
the model that a round starts from, computes both clipped gradients of a canary there, and takes
what the client sent along half their difference, in stds of the noise. It does not know in which
batches the canary was, nor how the gradients change with the client's steps. That costs it
evidence, but the bound stays valid.

In addition, an exact check does updates of every round a second time, as plainly as possible and
with the noise that was accounted for. Some canaries are a thousand or a million times as long as
the others, so that every sample that is not clipped shows there.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import torch
from torch.func import functional_call, grad, vmap

from raydpfl import models
from raydpfl.audit import observers
from raydpfl.audit.bounds import Family, TradeOffCurve
from raydpfl.audit.canaries import CanaryRun, OtherRows, Rows, execute_run
from raydpfl.audit.checks import Check
from raydpfl.audit.privacy_curve import CERTAIN, ClaimDelta, delta_lower_bound, presence
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Task
from raydpfl.privacy import Guarantee, TradeOff, rigorous
from raydpfl.privacy.accountants import accountant_of
from raydpfl.privacy.guarantee import Observer
from raydpfl.privacy.local_steps import LocalSteps
from raydpfl.privacy.release_report import LocalStepsReport, scope_of
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.plan import Plan
from raydpfl.training.backends.base import Block
from raydpfl.training.minibatches import batches, pick_rows
from raydpfl.training.trainer import Trainer

SCALES = 2.0 ** np.arange(-2, 11)  # norms of x, or sizes of the target, that are tried
WEAKEST = 0.3  # of the clip bound: half the difference of a canary's two gradients must reach that
REPLAYS = 20  # updates of a round that are done again
# factors on canaries, so that samples far beyond the clip bound are among them, and their shares
LONGER = {1.0: 7 / 8, 1e3: 1 / 16, 1e6: 1 / 16}
AGREES = 0.01  # of its clipped gradients: by how much an update may differ from what it should be
ROUNDING = 1e-6  # relative: of float32
KINDS = 4  # mechanisms of clients whose trade-off curves are looked at together
CHUNK = 1 << 24  # numbers of per-sample gradients at once


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
    def shards(self) -> Shards:
        return Shards.open(self.plan.shards)

    @cached_property
    def gradients(self) -> SampleGradients:
        """Of the run's model, clipped as the run clips them."""
        e = self.plan.experiment
        bound = e.bounding.sample_bound
        assert bound is not None  # noise at local steps needs one
        module = models.build(e.model, self.shards.form(e.data.task), e.seed)
        return SampleGradients(module, e.data.task, bound)

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

    @cached_property
    def parts(self) -> dict[int, slice]:
        """The places of canaries, by client."""
        sizes = self.plan.population.sizes[self.clients]
        ends = np.cumsum(sizes)
        bounds = zip(self.clients.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True)
        return {client: slice(start, end) for client, start, end in bounds}

    def pair(self, client: int) -> tuple[Rows, Rows]:
        """Both samples of all of a client's canaries; y is int64, or float32 for regression."""
        n = int(self.plan.population.sizes[client])
        classes = self.shards.classes
        generator = stream(self.plan.experiment.seed, Purpose.CANARY, client=client, step=4)
        x = generator.standard_normal((n, *self.shards.shape))
        column = (n, *[1] * (x.ndim - 1))
        x /= np.linalg.norm(x.reshape(n, -1), axis=1).reshape(column)
        labels = generator.integers(classes, size=n) if classes else np.zeros(n)
        scales = self.scale * generator.choice([*LONGER], n, p=[*LONGER.values()])
        if classes:
            x = (x * scales.reshape(column)).astype(np.float32)
            other_labels = (labels + 1) % classes
            return (x, labels), (x, other_labels) if self.relabel else (-x, labels)
        x = x.astype(np.float32)
        y = scales.astype(np.float32)
        return (x, y), (x, -y)

    def rows(self, client: int) -> Rows | None:
        """The samples that the coins took, x and y; None for a client without canaries."""
        if client not in self.parts:
            return None
        (x, y), (other_x, other_y) = self.pair(client)
        inside = self.inside[self.parts[client]]
        wide = inside.reshape(-1, *[1] * (x.ndim - 1))
        return np.where(wide, x, other_x), np.where(inside, y, other_y)

    def pair_gradients(
        self, client: int, parameters: torch.Tensor, max_canaries: int | None = None
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The clipped gradients of both samples of (the first `max_canaries` of) a client's
        canaries, float32 [k, d], in pieces, and which canaries they are of.
        """
        pair = self.pair(client)
        n = len(pair[0][1][:max_canaries])
        width = self.gradients.width
        for piece in (slice(start, min(start + width, n)) for start in range(0, n, width)):
            first, second = (
                self.gradients(parameters, torch.from_numpy(x[piece]), torch.from_numpy(y[piece]))
                for x, y in pair
            )
            yield piece, first, second


class SampleCanaryRun(CanaryRun):
    """A run in which all samples of some clients are canaries, and what an observer of every update
    sees, in units of the noise accounted for. Raises `ConfigError` for a local rule that cannot be
    done again.
    """

    def __init__(self, plan: Plan, out: str, canaries: SampleCanaries):
        super().__init__(plan, out)
        self.canaries = canaries
        self.gradients = canaries.gradients
        # float64 [m]: sum over the participations of amplitude x score, and of the amplitudes'
        # squares
        self.product, self.power = np.zeros((2, len(canaries.inside)))
        self.participations: list[tuple[int, int]] = []  # (round, canary client)
        self.replays: list[tuple[int, int, float]] = []  # (round, client, relative difference)
        e = plan.experiment
        linear = e.local.linear()
        if linear is None:
            linearity = "raydpfl.methods.local.Local.linear"
            expected = f"a rule that is linear ({linearity}), to audit local steps"
            raise ConfigError("local.kind", e.local.kind, expected)
        self.linear = linear
        self.trainer = Trainer(
            self.gradients.module,
            e.local,
            backend=e.client.backend,
            seed=e.seed,
            clip=self.gradients.bound,
            user_defined=True,
            task=e.data.task,
        )
        self.trainer.noise_seed = plan.noise_seed

    def start(self) -> tuple[int, list[str]]:
        pid_and_warnings = super().start()
        self.initial = torch.from_numpy(self.state.model.copy())
        return pid_and_warnings

    def plant(self, actor: ClientActor) -> None:
        actor.shards.reader = OtherRows(actor.shards.reader, self.canaries.rows)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        """Adds the evidence that an update gives about its client's canaries, and does some
        updates of a round again.
        """
        chunk = state.chunk
        slot = int(block.slots[0])
        client = int(chunk.clients[slot])
        part = self.canaries.parts.get(client)
        if part is None:
            return
        model = state.actor.model.cpu()
        view = state.view("local", block.slots)
        corrections = self.experiment.local.correction(view)
        correction = torch.zeros_like(model) if corrections is None else corrections[0].cpu()
        update = self.experiment.bounding.invert(vector[None], state.view("bounding", block.slots))
        # float64 [d]: the (weighted) sum of its gradients, corrections among them
        steps = -update[0].cpu() / (float(chunk.weights[slot]) * state.actor.lr)
        n = int(self.plan.population.sizes[client])
        std = float(_steps(self.plan).stds[client])
        weights = self._weights(n)
        total = float(weights.sum())
        weight_norm = float(np.linalg.norm(weights))
        residual = (steps - total * correction.double()).float()
        middle = torch.zeros(self.plan.d, dtype=torch.float64)
        for _, first, second in self.canaries.pair_gradients(client, model):
            middle += ((first + second) / 2).sum(0, dtype=torch.float64)
        # what the gradients have in common, whatever the coins were
        residual -= (total / n * middle).float()
        halves, products = np.zeros((2, n))
        for piece, first, second in self.canaries.pair_gradients(client, model):
            half = (first - second) / 2
            halves[piece] = torch.linalg.vector_norm(half, dim=1).numpy()
            products[piece] = (half @ residual).double().numpy()
        amplitudes = total / weight_norm * halves / (n * std)
        scores = products / (np.maximum(halves, 1e-30) * weight_norm * std)
        self.product[part] += amplitudes * scores
        self.power[part] += amplitudes**2
        t = state.work.t
        self.participations.append((t, client))
        if sum(replay_round == t for replay_round, _, _ in self.replays[-REPLAYS:]) < REPLAYS:
            draw = int(chunk.draws[slot])
            replayed_sum, clipped_sum = self._replay(t, client, draw, model, correction)
            norm = torch.linalg.vector_norm
            rounding = ROUNDING * (norm(replayed_sum) + norm(model) / state.actor.lr)
            difference = (norm(replayed_sum - steps) - rounding).clamp(min=0)
            min_norm = 1e-3 * self.gradients.bound
            self.replays.append((t, client, float(difference / max(norm(clipped_sum), min_norm))))

    def _weights(self, rows: int) -> np.ndarray:
        """How often a step's gradient is in the sum of a client's steps, float64 [Q] (momentum)."""
        steps = int(self.experiment.local.step_counts(np.array([rows]))[0])
        return np.cumsum(self.linear.momentum ** np.arange(steps))[::-1]

    def _initial_power(self) -> np.ndarray:
        """`power` as if all gradients were those at the initial model, which no coin and no noise
        has moved: how many guesses are made must not depend on them.
        """
        initial_power = np.zeros_like(self.power)
        for client, times in Counter(client for _, client in self.participations).items():
            part = self.canaries.parts[client]
            n = int(self.plan.population.sizes[client])
            weights = self._weights(n)
            scale = weights.sum() / (np.linalg.norm(weights) * n * _steps(self.plan).stds[client])
            halves = np.zeros(n)
            for piece, first, second in self.canaries.pair_gradients(client, self.initial):
                halves[piece] = torch.linalg.vector_norm((first - second) / 2, dim=1).numpy()
            initial_power[part] = times * (scale * halves) ** 2
        return initial_power

    def _replay(
        self, t: int, client: int, draw: int, start: torch.Tensor, correction: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of a client's gradients from the model `start` on, each with its `correction`,
        float32 [d] both, and what of it is clipped: float64 [d].
        """
        e = self.experiment
        n = int(self.plan.population.sizes[client])
        lr = e.local.learning_rate(t)
        rows = self.canaries.rows(client)
        assert rows is not None  # a canary client
        samples, labels = rows
        index, sizes = batches(e.seed, t, [client], [draw], [n], e.local)
        sample_indices, _ = pick_rows(index, sizes, np.array([n]), e.local)
        drawn_samples = samples if sample_indices[0] is None else samples[sample_indices[0]]
        steps = index.shape[1]
        std = float(_steps(self.plan).stds[client])
        arguments = {"t": t, "client": client, "draw": draw, "std": std, "steps": steps}
        noises = torch.from_numpy(self.trainer.noises(drawn_samples, d=self.plan.d, **arguments))
        weights = self._weights(n)
        start = start.double()
        model = start.clone()
        velocity, total, clipped_sum = torch.zeros(3, len(start), dtype=torch.float64)
        for step in range(steps):
            batch = index[0, step, : sizes[0]]
            gradient = torch.zeros_like(start)
            width = self.gradients.width
            for part in np.split(batch, range(width, len(batch), width)):
                data = torch.from_numpy(samples[part]), torch.from_numpy(labels[part])
                gradient += self.gradients(model.float(), *data).sum(0, dtype=torch.float64)
            gradient /= len(batch)
            clipped_sum += weights[step] * gradient
            gradient += noises[step] + self.linear.decay * model + correction
            gradient += self.linear.proximal * (model - start)
            velocity = self.linear.momentum * velocity + gradient
            total += velocity
            model -= lr * velocity
        return total, clipped_sum

    def run_epsilons(self) -> Mapping[str, float]:
        return max_epsilons(self.plan, len(self.rounds))

    def view(self, delta: float, confidence: float) -> observers.ObserverAudit:
        """The finding, against the smallest claim on the canary client that may have spent most."""
        claims, names, counts = _claims(self.plan, delta, len(self.rounds))
        worst_client = int(self.canaries.clients[np.argmax(claims[self.canaries.clients])])
        steps = _steps(self.plan)
        count = int(counts[worst_client])
        claim = Guarantee(
            "rigorous", names[worst_client], steps.unit, "replace_one", Observer.UPDATES,
            scope_of(steps, worst_client, count), float(claims[worst_client]), delta,
            steps.exclusions,
        )  # fmt: skip
        seed = self.experiment.seed
        scores = observers.visible_scores(
            self.canaries.inside, self.product, self.power, True, seed, self._initial_power()
        )
        n = int(steps.samples[worst_client])
        weights = self._weights(n)
        momentum = weights.sum() / np.linalg.norm(weights)
        exposure = momentum * steps.bound / (n * steps.stds[worst_client]) * math.sqrt(count)
        family = self._family(names[worst_client], counts)
        return observers.view(scores, claim, float(exposure), True, confidence, family)

    def _family(self, accountant: str, counts: np.ndarray) -> Family | None:
        """The clients' mechanisms, all together, at any noise; None: too many differ, or
        none takes part.
        """
        steps = _steps(self.plan)
        clients = self.canaries.clients.tolist()
        pairs = dict.fromkeys((steps.event(k), int(counts[k])) for k in clients if counts[k])
        if not 0 < len(pairs) <= KINDS:
            return None

        def at(noise: float) -> tuple[TradeOffCurve, Callable[[float], float]]:
            scaled_pairs = [(replace(event, mu=event.mu / noise), count) for event, count in pairs]
            parts = [accountant_of(accountant).tradeoff_of(*pair) for pair in scaled_pairs]
            tradeoff = parts[0]
            if len(parts) > 1:
                tradeoff = TradeOff.from_delta(lambda at: max(float(f.delta(at)) for f in parts))
            curve = accountant_of(accountant).curve
            return observers.curve_of(tradeoff), lambda delta: max(
                float(curve(event, delta, np.array([count]))[0]) for event, count in scaled_pairs
            )

        return at

    def delta_lower_bounds(self, claims: Sequence[Guarantee]) -> list[ClaimDelta]:
        """The claims of single clients, with their least deltas: a sample is in a batch by chance,
        or in one batch of every whole epoch.
        """
        steps = _steps(self.plan)
        counts = _counts(self.plan, len(self.rounds))
        deltas: list[ClaimDelta] = []
        for claim in observers.smallest_claims(claims):
            client = claim.sampling.client
            if client is None:
                continue
            count, n = int(counts[client]), int(steps.samples[client])
            batch, times = int(steps.batches[client]), int(steps.client_steps[client])
            mu = 2 * steps.bound / (batch * float(steps.stds[client]))
            chances, rounds = presence(batch / n), count * times
            if batch == n or steps.sampling != "fresh":
                chances, rounds = CERTAIN, count * max(1, times * batch // n)
            deltas.append((claim, delta_lower_bound(claim.epsilon, mu, chances, rounds)))
        return deltas

    def check_steps(self) -> Check:
        """That updates are those of a plain loop."""
        t, client, gap = max(self.replays, key=lambda replay: replay[2])
        is_same = gap <= AGREES
        if is_same:
            finding = f"{len(self.replays)} of {len(self.participations)} updates with canaries, "
            finding += f"done again with the accounted noise, differ by {gap:.1e} of their clipped "
            finding += "gradients at most"
        else:
            finding = f"the update of client {client} in round {t} differs by {gap:.2g} of its "
            finding += "clipped gradients from what its steps and their accounted noise give"
        return Check("steps", is_same, finding)

    def unseen(self) -> tuple[str, ...]:
        """What is not looked at here, in words."""
        bystanders = len(self.plan.population) - len(self.canaries.clients)
        skipped_updates = len(self.participations) - len(self.replays)
        detail = ["single steps, as updates alone are seen"]
        if skipped_updates:
            detail.insert(0, f"those of {skipped_updates} updates that were not done again")
        if bystanders:
            detail.insert(0, f"the clipping and the noise of {bystanders} clients without canaries")
        return tuple(detail)


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
        parameters = {
            name: part.view(shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        return self.task.loss(functional_call(self.module, parameters, (x[None],)), y[None])[0]

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


def run(
    plan: Plan, canaries: int, delta: float, on_round: Callable[[int, int], None]
) -> SampleCanaryRun:
    """One run, which holds enough canaries: all samples of the clients that may spend most, of as
    many clients as these canaries need.

    Raises `ConfigError` if too few clients take part, or if no sample that is tried has gradients
    near the clip bound.
    """
    claims, _, counts = _claims(plan, delta, plan.experiment.rounds)
    sizes = plan.population.sizes
    has_noise = _steps(plan).stds > 0
    usable_clients = np.flatnonzero((counts > 0) & np.isfinite(claims) & (claims > 0) & has_noise)
    order = usable_clients[np.lexsort((-counts[usable_clients], -claims[usable_clients]))]
    canary_clients = order[: int(np.searchsorted(np.cumsum(sizes[order]), canaries)) + 1]
    rounds = plan.experiment.rounds
    if sizes[canary_clients].sum() < 10:
        expected = "more: hardly any client with a budget takes part in them"
        raise ConfigError("rounds", rounds, expected)
    samples = _choose_canaries(plan, canary_clients)
    return execute_run(partial(SampleCanaryRun, plan, canaries=samples), on_round, 0, rounds)


def max_epsilons(plan: Plan, rounds: int) -> Mapping[str, float]:
    """By accountant, the epsilon of the client that so many rounds cost most."""
    names = plan.experiment.accountants
    curves = LocalStepsReport(_steps(plan), names).curves(plan.draws(rounds))
    return {name: float(curves[name][-1]) for name in names}


def _choose_canaries(plan: Plan, clients: np.ndarray) -> SampleCanaries:
    """The first canaries, of all that are tried, whose two gradients are about as far apart as any:
    half that distance is at least `WEAKEST` clip bounds.
    """
    e = plan.experiment
    shards = Shards.open(plan.shards)
    if shards.tokens or shards.target.shape:
        expected = "samples of numbers, with one class or number each, to audit local steps"
        raise ConfigError("data.kind", e.data.kind, expected)
    ratios = {}
    for relabel in (False, True)[: 1 + (shards.classes > 1)]:
        for scale in SCALES.tolist():
            candidate = SampleCanaries(plan, np.sort(clients), scale, relabel)
            flat = models.flatten(candidate.gradients.module)
            _, first, second = next(candidate.pair_gradients(int(clients[0]), flat, 16))
            distance = float(torch.linalg.vector_norm(first - second, dim=1).median())
            ratios[candidate] = distance / (2 * candidate.gradients.bound)
    max_ratio = max(ratios.values())
    if not max_ratio >= WEAKEST:
        expected = "one whose gradients random samples can pull about; or a smaller bounding.bound"
        expected += f": those of a canary's two samples differ by {max_ratio:.2g} of the bound"
        raise ConfigError("model.kind", e.model.kind, expected)
    return next(candidate for candidate, ratio in ratios.items() if ratio >= 0.9 * max_ratio)


def _steps(plan: Plan) -> LocalSteps:
    """The mechanism of a plan whose noise is at local steps."""
    return cast(LocalSteps, plan.mechanism)


def _counts(plan: Plan, rounds: int) -> np.ndarray:
    """How often clients are drawn in so many rounds, int64 [N]."""
    drawn_clients = np.concatenate(plan.draws(rounds))
    return np.bincount(drawn_clients, minlength=len(plan.population))


def _claims(plan: Plan, delta: float, rounds: int) -> tuple[np.ndarray, list[str], np.ndarray]:
    """The smallest rigorous epsilon at `delta` of clients, float64 [N], by which accountant, and
    how often they are drawn in so many rounds, int64 [N].
    """
    counts = _counts(plan, rounds)
    names = rigorous(plan.experiment.privacy.accountants)
    report = LocalStepsReport(replace(_steps(plan), delta=delta), names)
    epsilons = np.stack([report.epsilons(name, counts) for name in names])
    return epsilons.min(0), [names[place] for place in epsilons.argmin(0).tolist()], counts
