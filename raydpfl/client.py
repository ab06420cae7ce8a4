"""The client actor: holds the shards of one or many clients, and returns bounded and noised sums.

`ClientActor` is a plain class. The runtime makes it a Ray actor (`client.actors` above 0) or calls
it in the same process (`client.actors: 0`); the bits are the same, because all randomness is keyed
and every lane has the same shape whoever runs it:

- pooled, an actor trains whole lanes and returns one vector, the exact sum of its lanes' sums;
- per client, it trains its own client at that client's slot of the lane, the other slots standing
  empty, and returns
  the client's contribution, which the coordinator adds up in client order.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise

import numpy as np
import torch

from raydpfl import models, origin
from raydpfl.cluster import place
from raydpfl.config import Experiment
from raydpfl.data import Room, Shards
from raydpfl.errors import RAISED, ClientError, ConfigError, RunError, contained, exited, told
from raydpfl.keys import keyed_globals
from raydpfl.local import Trainer, batches, picked, single_thread, tune_allocator
from raydpfl.local.way import sample_loss
from raydpfl.models.state import changed, kept
from raydpfl.own import is_own
from raydpfl.sums import snap


@dataclass(frozen=True)
class Lane:
    """A fixed number of clients that train together; its shape is a function of its full membership
    alone.
    """

    clients: np.ndarray  # int64 [C], ascending; -1 for an empty slot
    draws: np.ndarray  # int64 [C], how often the client stands before in the cohort
    weights: np.ndarray  # float64 [C]
    # that any of its clients trains on in a round at most, which all others are padded to
    rows: int
    slot: int | None = None  # the one slot to train, when each client is its own actor
    # float64 [C]: std of the noise on the mean gradient of each client's local steps
    stds: np.ndarray | None = None
    # slot -> what its client remembers, float32 [d]; absent: zeros
    memory: Mapping[int, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """What all clients of a round must know beside the model."""

    round: int
    seed: int  # of batches, and of randomness inside modules
    noise_seed: int
    bound: float | None  # of one client's vector, before its weight
    client_std: float  # std of the noise on one client's contribution, after its weight; 0: none
    grid: float  # see raydpfl.sums.grid
    # the last global update, float32 [d], where angles to it are measured
    previous: np.ndarray | None = None


@dataclass
class Partial:
    """What one actor returns of a round."""

    total: np.ndarray  # float64 [d]: the exact sum of its lanes' sums, or one client's contribution
    clients: list[int] = field(default_factory=list)
    # L2 norm of what each would have sent, before bounding and weight
    norms: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)  # what bounding multiplied it by
    # 1 for a factor below 1, else 0; of per-sample clipping see `PerSampleClip`
    clipped: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # mean local training loss
    dropped: list[tuple[int, str]] = field(default_factory=list)
    # what each client remembers from now on, float32 [d]; empty: nothing
    memory: list[np.ndarray] = field(default_factory=list)
    # a value per client, of what `measure.bounding` asks for
    measured: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    peak_rss_mb: float = 0.0


def peak_rss_mb() -> float:
    """The largest resident set this process has had, in MB (10^6 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


@dataclass(frozen=True)
class Facts:
    """What a process says of itself once it can work."""

    pid: int
    host: str
    node: str  # Ray's id of its node
    # a file of that host, which holds the client in training, an int64; empty where there is none
    progress: str


class Progress:
    """The client in training; if shared, in a file of memory that others on this machine can read
    even when this process is stopped.
    """

    def __init__(self, shared: bool) -> None:
        self.path = ""
        self._client = np.zeros(1, np.int64)
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("raydpfl-progress")
            os.ftruncate(descriptor, self._client.nbytes)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._client = np.memmap(self.path, np.int64, "r+")
        self.at(-1)

    @property
    def client(self) -> int:
        return int(self._client[0])

    def at(self, client: int) -> None:
        """-1: none."""
        self._client[0] = client


class Process:
    """Base of what runs in a process of its own: `make` opens all that the work needs.

    In the process of the caller that is done at once. An actor is given the experiment pickled, and
    is made by `ready`: so what its node lacks comes back as an error that names both. `capability`,
    of the run (`raydpfl.origin.capability`), is what its node has to compute like.
    """

    def __init__(
        self,
        experiment: Experiment | bytes,
        shards: str,
        path: Sequence[str] = (),
        capability: Mapping[str, str] | None = None,
    ):
        self.own = False  # whether code of the user's own takes part
        here = isinstance(experiment, Experiment)
        self._given = (experiment, shards, path, capability)
        self.progress = Progress(shared=not here)
        if here:
            self.make(experiment, shards)

    def make(self, experiment: Experiment, shards: str) -> None:
        raise NotImplementedError

    def keyed(self, seed: int, **key: int) -> AbstractContextManager[None]:
        """What code of the user's own draws within from the generators of the process is keyed."""
        return keyed_globals(seed, **key) if self.own else nullcontext()

    def ready(self) -> Facts:
        """Where it runs, once it can work. Raises `ConfigError` naming the host, what it lacks, and
        what to set.
        """
        pickled, shards, path, capability = self._given
        # Where a user's own module was found by the process that started the run.
        sys.path.extend(entry for entry in path if entry not in sys.path)
        host = place()
        if not os.path.exists(os.path.join(shards, "data.json")):
            accepted = f"one directory for all nodes of the cluster; on node {host} it has no prepared data"
            raise ConfigError("RAYDPFL_CACHE", os.path.dirname(os.path.dirname(shards)), accepted)
        try:
            experiment = pickle.loads(pickled)
        except (ImportError, AttributeError) as error:
            accepted = f"directories that all nodes of the cluster have; on node {host}: {error}"
            raise ConfigError("PYTHONPATH", path[0] if path else "", accepted) from None
        try:
            self.make(experiment, shards)
        except ConfigError as error:  # where the run was started it was none
            accepted = f"{error.accepted}; so it is on node {host}, which needs the directory of your modules in PYTHONPATH"
            raise ConfigError(error.field, error.value, accepted) from None
        origin.check_node(host, capability)
        import ray

        return Facts(os.getpid(), host, ray.get_runtime_context().get_node_id(), self.progress.path)


def _own(experiment: Experiment) -> bool:
    """Whether code of the user's own takes part in what a client does."""
    members = (experiment.local, experiment.bounding, experiment.model)
    return isinstance(experiment.model, models.Module) or any(
        is_own(type(each)) for each in members
    )


class ClientActor(Process):
    """Trains lanes of clients. Raises `ClientError` naming the client whose training failed or gave
    a non-finite update.
    """

    def make(self, experiment: Experiment, shards: str) -> None:
        single_thread()
        tune_allocator()
        self.experiment = experiment
        self.shards = Shards.open(shards)
        self._room = Room()
        self.device = torch.device(
            "cuda" if experiment.client.num_gpus > 0 and torch.cuda.is_available() else "cpu"
        )
        module = models.build(
            experiment.model, self.shards.shape, self.shards.classes, experiment.seed
        )
        local = experiment.local
        clip = experiment.bounding.sample_bound
        self.module = copy.deepcopy(module).to(self.device).eval()
        self.own = _own(experiment)
        settings = {"way": experiment.client.way, "seed": experiment.seed, "device": self.device}
        self.trainer = Trainer(module, local, clip=clip, own=self.own, **settings)
        self._shares, self._sample, self._state = 0, None, self._kept()
        self.clipped = np.empty(0)  # float64 [C], of the lane in training: see `Trainer.lane`

    def _kept(self) -> dict[str, bytes]:
        things = (
            [self.trainer.module, self.experiment.local, self.experiment.bounding]
            if self.own
            else []
        )
        return kept(*(each for each in things if each is not None))

    def _check_state(
        self, parameters: torch.Tensor, shared: torch.Tensor | None, work: Work
    ) -> None:
        """Raises `RunError` if the user's own code keeps something from one client to the next: by
        what it keeps, and by what it does.

        After 1, 2, 4, 8, ... shares the first client of the share is trained again, and must give
        the same bits.
        """
        state = self._state
        self._state = self._kept()
        names = ", ".join(changed(state, self._state)[:5])
        if not names and self._sample:
            lane, slot, delta = self._sample
            alone = replace(lane, slot=slot)
            for _, again, _ in self._train(parameters, shared, work, alone, self._members(alone)):
                if not np.array_equal(again.cpu().numpy(), delta.cpu().numpy(), equal_nan=True):
                    names = f"client {lane.clients[slot]}, trained again, gives another update"
        if names:
            raise RunError(
                f"model.kind {self.experiment.model.kind} keeps something from one client to the next ({names}), so that "
                "the bits would depend on who trains whom; a model may use its parameters, its buffers and its input alone"
            )

    @contained()
    def train(self, model: np.ndarray, work: Work, lanes: Sequence[Lane]) -> Partial:
        """`model` is the flat broadcast: float32 [d], or [2, d] with the server's variate below it.
        The sum comes back by value.
        """
        began = time.perf_counter()
        self.trainer.seed = work.seed
        self.trainer.noise_seed = work.noise_seed
        # a copy: what Ray hands out may not be written to
        broadcast = torch.tensor(model, device=self.device)
        parameters, shared = broadcast if broadcast.dim() == 2 else (broadcast, None)
        partial = Partial(np.zeros(len(parameters)))
        self.shards.prefetch(
            np.concatenate([self._members(lane) for lane in lanes]),
            max(lane.rows for lane in lanes),
        )
        for lane in lanes:
            total = torch.zeros(len(parameters), dtype=torch.float64, device=self.device)
            for contribution in self._contributions(parameters, shared, work, lane, partial):
                total += contribution
            # One client alone goes back as it is: the coordinator forms the lane's sum and rounds
            # that.
            partial.total += (
                total.cpu().numpy()
                if lane.slot is not None
                else snap(total.cpu().numpy(), work.grid)
            )
        if self.own:
            self._shares += 1
            if self._shares & (self._shares - 1) == 0:
                self._check_state(parameters, shared, work)
            self._sample = None
        self.shards.release()
        partial.seconds = time.perf_counter() - began
        partial.peak_rss_mb = peak_rss_mb()
        return partial

    @contained()
    def losses(
        self, model: np.ndarray, t: int, clients: Sequence[int], noise_seed: int
    ) -> list[float]:
        """What each of `clients` answers of the losses of `model` (float32 [d]) on all of its rows.

        With noise of `noise_seed`, where the selection asks for any.
        """
        selection = self.experiment.selection
        models.load(self.module, torch.tensor(model, device=self.device))
        found = []
        with torch.inference_mode():
            for client in clients:
                self.progress.at(client)
                x, y, _ = self.shards.lane([client], int(self.shards.sizes[client]))
                with self.keyed(self.experiment.seed, t=t, client=client, step=3):
                    outputs = self.module(torch.from_numpy(x[0]).to(self.device))
                each = (
                    sample_loss(outputs, torch.from_numpy(y[0]).to(self.device), "none")
                    .double()
                    .cpu()
                    .numpy()
                )
                found.append(selection.answer(each, noise_seed, t, client))
        return found

    def _contributions(
        self,
        parameters: torch.Tensor,
        shared: torch.Tensor | None,
        work: Work,
        lane: Lane,
        partial: Partial,
    ) -> Iterator[torch.Tensor]:
        """The weighted, bounded, noised vectors (float64 [d]) of the lane's clients, in client
        order.
        """
        bounding = self.experiment.bounding
        local = self.experiment.local
        lr = local.learning_rate(work.round)
        expected = (
            self._expected_norms(parameters, shared, work, lane)
            if self.experiment.measure.repeats
            else {}
        )
        for slot, delta, loss in self._updates(parameters, shared, work, lane, partial):
            client = int(lane.clients[slot])
            if self.own and self._sample is None and delta is not None:
                self._sample = lane, slot, delta.clone()
            own = self._memory(lane, slot, len(parameters))
            vector = self._sent(parameters, delta, own, shared, lr)
            norm = sent = float(torch.linalg.vector_norm(vector)) if delta is not None else math.nan
            if not math.isfinite(norm):  # the client's error: it counts as one that has not moved
                if delta is not None:
                    self._fault(
                        client,
                        f"its update has norm {norm} in round {work.round}; lower local.lr, or look at its data",
                        partial,
                    )
                vector = self._sent(parameters, None, own, shared, lr)
                norm = math.nan
                sent = float(torch.linalg.vector_norm(vector))
            with self.keyed(
                work.seed, t=work.round, client=client, draw=int(lane.draws[slot]), step=2
            ):
                factor = bounding.factor(sent, work.bound)
            if work.bound is not None and not 0 <= factor * sent <= work.bound * (1 + 1e-12):
                raise RunError(
                    f"bounding.kind {bounding.kind} lets norm {sent:g} times factor {factor:g} pass its bound of {work.bound:g}"
                )
            vector *= factor * float(lane.weights[slot])
            if self.experiment.measure.bounding:
                more = (
                    {"expected_norm": expected.get(slot, math.nan)}
                    if self.experiment.measure.repeats
                    else {}
                )
                self._measure(partial, vector, delta, work, more)
            if bounding.stateful:
                partial.memory.append((own + bounding.beta * vector).float().cpu().numpy())
            if work.client_std > 0:
                who = lane.clients[slot : slot + 1], lane.draws[slot : slot + 1]
                (noise,) = self.experiment.noise.on_clients(
                    work.noise_seed, work.round, *who, work.client_std, len(vector)
                )
                vector += torch.from_numpy(noise).to(self.device)
                if self.experiment.measure.bounding:
                    partial.measured.setdefault("noise_norm", []).append(
                        float(np.linalg.norm(noise))
                    )
            if local.stateful:
                update = vector * lr if bounding.scaling == "gradient" else vector
                partial.memory.append(
                    local.next_own(own.double(), shared.double(), update, lr).float().cpu().numpy()
                )
            partial.clients.append(client)
            partial.norms.append(norm)
            partial.factors.append(factor)
            if bounding.sample_bound is None:
                partial.clipped.append(float(factor < 1.0))
            else:
                partial.clipped.append(
                    float(self.clipped[slot]) if math.isfinite(norm) else math.nan
                )
            partial.losses.append(loss)
            yield vector

    def _measure(
        self,
        partial: Partial,
        vector: torch.Tensor,
        delta: torch.Tensor | None,
        work: Work,
        more: dict[str, float],
    ) -> None:
        """Norm of the bounded `vector`, weight included; angle of the update to the last global
        one, in degrees (000 Figs 1, 2, 5-11).
        """
        angle = math.nan
        if delta is not None and work.previous is not None:
            last = torch.tensor(work.previous, device=self.device)
            length = float(
                torch.linalg.vector_norm(delta, dtype=torch.float64)
                * torch.linalg.vector_norm(last, dtype=torch.float64)
            )
            cosine = float(delta.double() @ last.double()) / length if length > 0 else math.nan
            angle = (
                math.degrees(math.acos(min(max(cosine, -1.0), 1.0)))
                if math.isfinite(cosine)
                else math.nan
            )
        values = {"bounded_norm": float(torch.linalg.vector_norm(vector)), "angle": angle, **more}
        for name, value in values.items():
            partial.measured.setdefault(name, []).append(value)

    def _expected_norms(
        self, parameters: torch.Tensor, shared: torch.Tensor | None, work: Work, lane: Lane
    ) -> dict[int, float]:
        """Norm of the expectation of what each slot would send unbounded, ||E Delta_i|| for
        updates, from `measure.repeats` more trainings with batches and noise of their own (000
        Theorem 3.1).

        The variance of the mean, as the repeats show it, is taken off its squared norm.
        """
        members = self._members(lane)
        repeats = self.experiment.measure.repeats
        lr = self.experiment.local.learning_rate(work.round)
        sums: dict[int, torch.Tensor] = {}
        squares: dict[int, float] = {}
        for k in range(1, repeats + 1):
            again = replace(lane, draws=lane.draws + (k << 20))  # draws that no cohort has
            try:
                for slot, delta, _ in self._train(parameters, shared, work, again, members):
                    sent = self._sent(
                        parameters, delta, self._memory(lane, slot, len(parameters)), shared, lr
                    )
                    sums[slot] = sums.get(slot, 0.0) + sent
                    squares[slot] = squares.get(slot, 0.0) + float(sent @ sent)
            except RAISED:  # some client's, which is found and named when the lane is trained
                return {}
        found = {}
        for slot, total in sums.items():
            mean = float(total @ total) / repeats**2
            spread = max(squares[slot] / repeats - mean, 0.0) / max(repeats - 1, 1)
            found[slot] = math.sqrt(max(mean - spread, 0.0))
        return found

    @staticmethod
    def _members(lane: Lane) -> np.ndarray:
        """The clients of a lane that this actor trains, -1 for all others."""
        if lane.slot is None:
            return lane.clients.copy()
        members = np.full_like(lane.clients, -1)
        members[lane.slot] = lane.clients[lane.slot]
        return members

    def _memory(self, lane: Lane, slot: int, d: int) -> torch.Tensor | None:
        """What a slot's client remembers, float32 [d]; None when clients remember nothing."""
        if not self.experiment.stateful:
            return None
        stored = lane.memory.get(slot)
        return (
            torch.zeros(d, device=self.device)
            if stored is None
            else torch.tensor(stored, device=self.device)
        )

    def _sent(
        self,
        parameters: torch.Tensor,
        delta: torch.Tensor | None,
        own: torch.Tensor | None,
        shared: torch.Tensor | None,
        lr: float,
    ) -> torch.Tensor:
        """What a client with this update would send unbounded, float64 [d]; None: it has not moved."""
        if delta is None:
            delta = (
                torch.zeros_like(parameters)
                if shared is None
                else self.experiment.local.unmoved(shared, lr)
            )
        vector = delta.double()
        if self.experiment.bounding.sends == "model":
            vector += parameters
        elif self.experiment.bounding.scaling == "gradient":
            vector /= lr
        if self.experiment.bounding.stateful:
            vector -= own
        return vector

    def _updates(
        self,
        parameters: torch.Tensor,
        shared: torch.Tensor | None,
        work: Work,
        lane: Lane,
        partial: Partial,
    ) -> Iterator[tuple[int, torch.Tensor | None, float]]:
        """(slot, update float32 [d], loss) in client order. A client that raises is found by
        training each alone.
        """
        members = self._members(lane)
        try:
            done = 0
            for slot, delta, loss in self._train(parameters, shared, work, lane, members):
                yield slot, delta, loss
                done = slot + 1
            return
        except RAISED:
            failures = {
                slot: detail
                for slot in np.flatnonzero(members >= 0)
                if (detail := self._fails_alone(parameters, shared, work, lane, slot))
            }
            if not failures:
                raise
        for slot, detail in failures.items():
            self._fault(int(members[slot]), detail, partial)
        survivors = members.copy()
        survivors[list(failures)] = -1
        for slot, delta, loss in self._every_member(
            parameters, shared, work, lane, members, survivors
        ):
            if slot >= done:
                yield slot, delta, loss

    def _every_member(
        self, parameters, shared, work, lane, members, survivors
    ) -> Iterator[tuple[int, torch.Tensor | None, float]]:
        """The survivors' updates, and None for those who failed, in client order."""
        pending = iter(self._train(parameters, shared, work, lane, survivors))
        for slot in np.flatnonzero(members >= 0):
            yield next(pending) if survivors[slot] >= 0 else (int(slot), None, math.nan)

    def _train(
        self,
        parameters: torch.Tensor,
        shared: torch.Tensor | None,
        work: Work,
        lane: Lane,
        members: np.ndarray,
    ) -> Iterator[tuple[int, torch.Tensor, float]]:
        keyed = {"t": work.round, "clients": members, "draws": lane.draws}
        local = self.experiment.local
        sizes = np.where(members < 0, 0, self.shards.sizes[members])
        index, batch_sizes = batches(work.seed, sizes=sizes, local=local, rows=lane.rows, **keyed)
        rows, index = picked(index, batch_sizes, sizes, local)
        x, y, sizes = self.shards.lane(members, lane.rows, rows, self._room)
        corrections = None
        if shared is not None:
            own = [self._memory(lane, slot, len(parameters)) for slot in range(len(members))]
            corrections = torch.stack(
                [self.experiment.local.correction(shared, each) for each in own]
            )
        self.clipped = np.empty(len(members))
        more = {
            "stds": lane.stds,
            "corrections": corrections,
            "drawn": (index, batch_sizes),
            "clipped": self.clipped,
        }
        present = np.flatnonzero(members >= 0).tolist()
        following = dict(pairwise(present))
        self.progress.at(members[present[0]] if present else -1)
        blocks = self.trainer.lane(parameters, x, y, sizes, **keyed, **more)
        for slot, delta, loss in chain.from_iterable(block.clients() for block in blocks):
            self.progress.at(members[following[slot]] if slot in following else -1)
            idle = shared is not None and not sizes[slot]
            yield (
                slot,
                self.experiment.local.unmoved(
                    shared, self.experiment.local.learning_rate(work.round)
                )
                if idle
                else delta,
                loss,
            )

    def _fails_alone(
        self,
        parameters: torch.Tensor,
        shared: torch.Tensor | None,
        work: Work,
        lane: Lane,
        slot: int,
    ) -> str | None:
        alone = replace(lane, slot=int(slot))
        try:
            for _ in self._train(parameters, shared, work, alone, self._members(alone)):
                pass
        except SystemExit as error:
            return f"its training {exited(error)}"
        except Exception as error:
            return f"its training raised {told(error)}"
        return None

    def _fault(self, client: int, detail: str, partial: Partial) -> None:
        if self.experiment.client.on_error == "fail":
            raise ClientError(client, detail)
        partial.dropped.append((client, detail))


class Evaluator(Process):
    """Loss and accuracy of a model on the test set, in an actor of its own so that it hides behind
    the next round.
    """

    def make(self, experiment: Experiment, shards: str) -> None:
        single_thread()
        self.batch = experiment.evaluate.batch
        self.seed = experiment.seed
        self.own = _own(experiment)
        self.shards = Shards.open(shards)
        self.module = models.build(
            experiment.model, self.shards.shape, self.shards.classes, experiment.seed
        ).eval()

    @contained()
    def evaluate(self, model: np.ndarray) -> tuple[float, float | None]:
        """(mean loss, share of samples classified right; None for a regression) over the whole test
        set.
        """
        models.load(self.module, torch.tensor(model))
        loss = 0.0
        right = 0
        with torch.inference_mode():
            for x, y in self.shards.test(self.batch):
                with self.keyed(self.seed, step=4):
                    outputs = self.module(torch.from_numpy(x))
                targets = torch.from_numpy(y)
                loss += float(sample_loss(outputs, targets, "sum"))
                right += int((outputs.argmax(1) == targets).sum())
        return (
            loss / self.shards.test_size,
            right / self.shards.test_size if self.shards.classes else None,
        )
