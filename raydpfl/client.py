"""The client actor: holds the shards of one or many clients, and returns bounded and noised sums.

`ClientActor` is a plain class. The runtime makes it a Ray actor (`client.actors` above 0) or calls it in the same
process (`client.actors: 0`); the bits are the same, because all randomness is keyed and every lane has the same shape
whoever runs it:

- pooled, an actor trains whole lanes and returns one vector, the exact sum of its lanes' sums;
- per client, it trains its own client at that client's slot of the lane, the other slots standing empty, and returns
  the client's contribution, which the coordinator adds up in client order.
"""

from __future__ import annotations

import math
import os
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from raydpfl import models
from raydpfl.config import Experiment
from raydpfl.data import Shards
from raydpfl.errors import ClientError, RunError
from raydpfl.local import Trainer, single_thread, tune_allocator
from raydpfl.noise import client_noise
from raydpfl.server import snap


@dataclass(frozen=True)
class Lane:
    """A fixed number of clients that train together; its shape is a function of its full membership alone."""

    clients: np.ndarray  # int64 [C], ascending; -1 for an empty slot
    draws: np.ndarray  # int64 [C], how often the client stands before in the cohort
    weights: np.ndarray  # float64 [C]
    rows: int  # rows of its largest client, which all others are padded to
    slot: int | None = None  # the one slot to train, when each client is its own actor


@dataclass(frozen=True)
class Work:
    """What all clients of a round must know beside the model."""

    round: int
    bound: float | None  # of one client's vector, before its weight
    client_std: float  # std of the noise on one client's contribution, after its weight; 0: none
    grid: float  # see raydpfl.server.grid


@dataclass
class Partial:
    """What one actor returns of a round."""

    total: np.ndarray  # float64 [d]: the exact sum of its lanes' sums, or one client's contribution
    clients: list[int] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # L2 norm of what each would have sent, before bounding and weight
    factors: list[float] = field(default_factory=list)  # what bounding multiplied it by
    losses: list[float] = field(default_factory=list)  # mean local training loss
    dropped: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0
    peak_rss_mb: float = 0.0


def peak_rss_mb() -> float:
    """The largest resident set this process has had, in MB (10^6 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


class ClientActor:
    """Trains lanes of clients. Raises `ClientError` naming the client whose training failed or gave a non-finite update."""

    def __init__(self, experiment: Experiment, shards: str, path: Sequence[str] = ()):
        # Where a user's own module was found by the process that started the run.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        single_thread()
        tune_allocator()
        self.experiment = experiment
        self.shards = Shards.open(shards)
        self.device = torch.device("cuda" if experiment.client.num_gpus > 0 and torch.cuda.is_available() else "cpu")
        module = models.build(experiment.model, self.shards.shape, self.shards.classes, experiment.seed)
        self.trainer = Trainer(module, experiment.local, way=experiment.client.way, seed=experiment.seed, device=self.device)

    def ready(self) -> int:
        """The actor's process id, once it can work."""
        return os.getpid()

    def train(self, model: np.ndarray, work: Work, lanes: Sequence[Lane]) -> Partial:
        """`model` is the flat float32 [d] broadcast. The sum comes back by value."""
        began = time.perf_counter()
        parameters = torch.tensor(model, device=self.device)  # a copy: what Ray hands out may not be written to
        partial = Partial(np.zeros(len(model)))
        self.shards.prefetch(np.concatenate([lane.clients if lane.slot is None else lane.clients[[lane.slot]] for lane in lanes]))
        for lane in lanes:
            total = torch.zeros(len(model), dtype=torch.float64, device=self.device)
            for contribution in self._contributions(parameters, work, lane, partial):
                total += contribution
            # One client alone goes back as it is: the coordinator forms the lane's sum and rounds that.
            partial.total += total.cpu().numpy() if lane.slot is not None else snap(total.cpu().numpy(), work.grid)
        self.shards.release()
        partial.seconds = time.perf_counter() - began
        partial.peak_rss_mb = peak_rss_mb()
        return partial

    def _contributions(self, parameters: torch.Tensor, work: Work, lane: Lane, partial: Partial) -> Iterator[torch.Tensor]:
        """The weighted, bounded, noised vectors (float64 [d]) of the lane's clients, in client order."""
        bounding = self.experiment.bounding
        lr = self.experiment.local.learning_rate(work.round)
        for slot, delta, loss in self._updates(parameters, work, lane, partial):
            client = int(lane.clients[slot])
            vector = self._sent(parameters, delta, lr)
            norm = sent = float(torch.linalg.vector_norm(vector)) if delta is not None else math.nan
            if not math.isfinite(norm):  # the client's error: it counts as one that has not moved
                if delta is not None:
                    self._fault(client, f"its update has norm {norm} in round {work.round}; lower local.lr, or look at its data", partial)
                vector = self._sent(parameters, None, lr)
                norm, sent = math.nan, float(torch.linalg.vector_norm(vector))
            factor = bounding.factor(sent, work.bound)
            if work.bound is not None and not 0 <= factor * sent <= work.bound * (1 + 1e-12):
                raise RunError(f"bounding.kind {bounding.kind} lets norm {sent:g} times factor {factor:g} pass its bound of {work.bound:g}")
            vector *= factor * float(lane.weights[slot])
            if work.client_std > 0:
                noise = client_noise(self.experiment.seed, work.round, client, int(lane.draws[slot]), work.client_std, len(vector))
                vector += torch.from_numpy(noise).to(self.device)
            partial.clients.append(client)
            partial.norms.append(norm)
            partial.factors.append(factor)
            partial.losses.append(loss)
            yield vector

    def _sent(self, parameters: torch.Tensor, delta: torch.Tensor | None, lr: float) -> torch.Tensor:
        """What a client with this update would send unbounded, float64 [d]; None: it has not moved."""
        vector = torch.zeros(len(parameters), dtype=torch.float64, device=self.device) if delta is None else delta.double()
        if self.experiment.bounding.sends == "model":
            vector += parameters
        elif self.experiment.bounding.scaling == "gradient":
            vector /= lr
        return vector

    def _updates(self, parameters: torch.Tensor, work: Work, lane: Lane, partial: Partial) -> Iterator[tuple[int, torch.Tensor | None, float]]:
        """(slot, update float32 [d], loss) in client order. A client that raises is found by training each alone."""
        members = lane.clients.copy()
        if lane.slot is not None:
            members[:] = -1
            members[lane.slot] = lane.clients[lane.slot]
        try:
            done = 0
            for slot, delta, loss in self._train(parameters, work, lane, members):
                yield slot, delta, loss
                done = slot + 1
            return
        except Exception:
            failures = {slot: detail for slot in np.flatnonzero(members >= 0) if (detail := self._fails_alone(parameters, work, lane, slot))}
            if not failures:
                raise
        for slot, detail in failures.items():
            self._fault(int(members[slot]), detail, partial)
        survivors = members.copy()
        survivors[list(failures)] = -1
        for slot, delta, loss in self._every_member(parameters, work, lane, members, survivors):
            if slot >= done:
                yield slot, delta, loss

    def _every_member(self, parameters, work, lane, members, survivors) -> Iterator[tuple[int, torch.Tensor | None, float]]:
        """The survivors' updates, and None for those who failed, in client order."""
        pending = iter(self._train(parameters, work, lane, survivors))
        for slot in np.flatnonzero(members >= 0):
            yield next(pending) if survivors[slot] >= 0 else (int(slot), None, math.nan)

    def _train(self, parameters: torch.Tensor, work: Work, lane: Lane, members: np.ndarray) -> Iterator[tuple[int, torch.Tensor | None, float]]:
        x, y, sizes = self.shards.lane(members, lane.rows)
        yield from self.trainer.lane(parameters, x, y, sizes, round=work.round, clients=members, draws=lane.draws)

    def _fails_alone(self, parameters: torch.Tensor, work: Work, lane: Lane, slot: int) -> str | None:
        alone = np.full_like(lane.clients, -1)
        alone[slot] = lane.clients[slot]
        try:
            for _ in self._train(parameters, work, replace(lane, slot=int(slot)), alone):
                pass
        except Exception:
            return "its training raised\n" + traceback.format_exc()
        return None

    def _fault(self, client: int, detail: str, partial: Partial) -> None:
        if self.experiment.client.on_error == "fail":
            raise ClientError(client, detail)
        partial.dropped.append((client, detail))


class Evaluator:
    """Loss and accuracy of a model on the test set, in an actor of its own so that it hides behind the next round."""

    def __init__(self, experiment: Experiment, shards: str, path: Sequence[str] = ()):
        sys.path.extend(entry for entry in path if entry not in sys.path)
        single_thread()
        self.batch = experiment.evaluate.batch
        self.shards = Shards.open(shards)
        self.module = models.build(experiment.model, self.shards.shape, self.shards.classes, experiment.seed).eval()

    def evaluate(self, model: np.ndarray) -> tuple[float, float]:
        """(mean cross-entropy, share of samples classified right) over the whole test set."""
        models.load(self.module, torch.tensor(model))
        loss, right = 0.0, 0
        with torch.inference_mode():
            for x, y in self.shards.test(self.batch):
                logits, labels = self.module(torch.from_numpy(x)), torch.from_numpy(y)
                loss += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
                right += int((logits.argmax(1) == labels).sum())
        return loss / self.shards.test_size, right / self.shards.test_size
