"""Where clients run: how many actors, which lanes on which, and what a lost actor means.

Two pools with one method, `run(model, work, shares)`: `Inline` calls a plain `ClientActor` in this process, `Actors` calls Ray
actors. Results are taken up as they arrive, and nothing depends on their order. A dead actor never comes back to the pool: its
share is done again by whoever is free, and another actor starts in its place. After the loss of a node there may be no room
for that one; the pool goes on with the others, and has it when a node comes back.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from raydpfl.client import ClientActor, Evaluator, Lane, Partial, Work
from raydpfl.config import Client, Experiment
from raydpfl.errors import ClientError, ConfigError, RunError
from raydpfl.selection import Cohort

START_SECONDS = 120.0  # an actor that has not come up by then is not coming
DEATHS = 8  # actors that one share of a round may cost before the run gives up
IN_FLIGHT = 64  # calls at once when each client is its own actor
LOST = (RayActorError, OutOfMemoryError, ObjectLostError)  # the actor is gone, or the node that kept what it had returned


def lanes(cohort: Cohort, weights: np.ndarray, sizes: np.ndarray, width: int, stds: np.ndarray | None = None) -> list[Lane]:
    """The cohort cut into lanes of `width`, in client order, the last one filled up with empty slots.

    `weights` float64 [r], `sizes` int64 [r] (rows used) and `stds` float64 [r] (noise of local steps) are those of the cohort's clients;
    a lane's rows are those of its largest.
    """
    cut = []
    for start in range(0, len(cohort), width):
        part = slice(start, start + width)
        missing = (0, max(0, start + width - len(cohort)))
        cut.append(
            Lane(
                np.pad(cohort.clients[part], missing, constant_values=-1),
                np.pad(cohort.draws[part], missing),
                np.pad(weights[part], missing),
                rows=max(1, int(sizes[part].max())),
                stds=None if stds is None else np.pad(stds[part], missing),
            )
        )
    return cut


def shares(lanes: Sequence[Lane], actors: int) -> list[list[Lane]]:
    """The lanes dealt to at most `actors` shares, in order, each with about the same number of rows."""
    cost = np.array([lane.rows * int((lane.clients >= 0).sum()) for lane in lanes], float)
    middle = np.cumsum(cost) - cost / 2
    owner = (middle / max(cost.sum(), 1.0) * actors).astype(int)
    dealt: list[list[Lane]] = [[] for _ in range(actors)]
    for lane, actor in zip(lanes, owner, strict=True):
        dealt[actor].append(lane)
    return [share for share in dealt if share]


def singles(lanes: Sequence[Lane]) -> list[list[Lane]]:
    """A share for every client of the cohort, in client order."""
    return [
        [replace(lane, slot=slot, memory={slot: lane.memory[slot]} if slot in lane.memory else {})]
        for lane in lanes
        for slot in np.flatnonzero(lane.clients >= 0).tolist()
    ]


class Inline:
    """The same classes as plain objects in this process, without Ray."""

    healthy, replaced = 1, 0

    def __init__(self, experiment: Experiment, shards: str):
        self.client = ClientActor(experiment, shards)
        self.evaluator = Evaluator(experiment, shards)
        self.per_client = False

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        return [list(lanes)] if lanes else []

    def run(self, model: np.ndarray, work: Work, shares: Sequence[Sequence[Lane]]) -> Iterator[tuple[int, Partial]]:
        for index, share in enumerate(shares):
            yield index, self.client.train(model, work, share)

    def losses(self, model: np.ndarray, round: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        return np.array(self.client.losses(model, round, clients.tolist(), noise_seed))

    def evaluate(self, model: np.ndarray) -> Any:
        return self.evaluator.evaluate(model)

    def evaluation(self, pending: Any) -> tuple[float, float]:
        return pending

    def close(self) -> None:
        pass


class Actors:
    """Ray actors: `count` of them sharing all lanes, or one per client of the population."""

    def __init__(self, experiment: Experiment, shards: str, count: int, per_client: bool):
        self.per_client = per_client
        self.replaced = 0
        client = experiment.client
        self._arguments = (experiment, shards, tuple(sys.path))
        self._class = ray.remote(ClientActor).options(num_cpus=client.num_cpus, num_gpus=client.num_gpus, max_restarts=0, max_task_retries=0)
        self._evaluator_class = ray.remote(Evaluator).options(num_cpus=0, max_restarts=0, max_task_retries=0)
        self._actors: dict[int, Any] = {}
        self._starting: dict[Any, int] = {}  # call -> actor, of those that were started in the place of dead ones
        self._evaluator = self._evaluator_class.remote(*self._arguments)
        # Starting takes a core some seconds: with many more at once than cores, Ray gives up on the slowest.
        wave = 2 * max(1, min(int(ray.cluster_resources().get("CPU", 1)), cores() * len(ray.nodes())))
        for start in range(0, count, wave):
            self._actors |= {index: self._class.remote(*self._arguments) for index in range(start, min(start + wave, count))}
            self._await([actor.ready.remote() for actor in self._actors.values()])

    @property
    def healthy(self) -> int:
        return len(self._actors) - len(self._starting)

    def _await(self, references: list) -> None:
        timeout = START_SECONDS + 2.0 * len(references)
        try:
            ray.get(references, timeout=timeout)
        except GetTimeoutError:
            pending = len(ray.wait(references, num_returns=len(references), timeout=0)[1])
            raise RunError(
                f"{pending} of {len(references)} client actors did not come up within {timeout:.0f} s; "
                "the cluster has no free place for them: lower client.actors, client.num_cpus or client.num_gpus"
            ) from None
        except RayActorError as error:
            raise RunError(f"a client actor died while it started: {error}") from None
        except RayTaskError as error:
            raise error.cause if isinstance(getattr(error, "cause", None), Exception) else RunError(str(error)) from None

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        return singles(lanes) if self.per_client else shares(lanes, max(1, self.healthy))

    def run(self, model: np.ndarray, work: Work, shares: Sequence[Sequence[Lane]]) -> Iterator[tuple[int, Partial]]:
        """Yields (index of the share, its result) as they arrive.

        Raises `ClientError` when a client failed, `RunError` when actors keep dying.
        """
        reference = ray.put(model)
        homes = [int(share[0].clients[share[0].slot]) if self.per_client else None for share in shares]
        yield from self._results("train", [(reference, work, list(share)) for share in shares], homes)

    def losses(self, model: np.ndarray, round: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """What the clients answer of their local losses under `model`, float64 [len(clients)]."""
        reference = ray.put(model)
        parts = np.array_split(clients, len(clients) if self.per_client else min(len(clients), max(1, self.healthy)))
        homes = [int(part[0]) if self.per_client else None for part in parts]
        found = dict(self._results("losses", [(reference, round, part.tolist(), noise_seed) for part in parts], homes))
        return np.concatenate([found[index] for index in range(len(parts))])

    def _results(self, method: str, calls: Sequence[tuple], homes: Sequence[int | None]) -> Iterator[tuple[int, Any]]:
        """(index, result) of `method` called with each of `calls`, as they arrive; on the actor of `homes`, or on any that is free (None)."""
        waiting = deque(range(len(calls)))
        flying: dict[Any, tuple[int, int]] = {}  # call -> (its index, actor)
        deaths: Counter[Any] = Counter()
        while waiting or flying:
            while waiting and len(flying) < IN_FLIGHT:
                actor = self._free(homes[waiting[0]], {*self._starting.values(), *(busy for _, busy in flying.values())})
                if actor is None:
                    break
                index = waiting.popleft()
                flying[getattr(self._actors[actor], method).remote(*calls[index])] = (index, actor)
            done, _ = ray.wait([*flying, *self._starting], num_returns=1, timeout=None if flying else START_SECONDS)
            if not done:
                raise RunError(f"client actors died, and for {START_SECONDS:.0f} s no node has had room for others in their place; go on with --resume")
            index, actor = flying.pop(done[0], None) or (None, self._starting.pop(done[0]))
            try:
                result = ray.get(done[0])
            except LOST as error:
                of = f"actor {actor}" if index is None else index
                deaths[of] += 1
                if deaths[of] > DEATHS:
                    raise RunError(f"client actors keep dying in one round: {_cause(error)}") from None
                self._replace(actor)
                if index is not None:
                    waiting.appendleft(index)
                continue
            except RayTaskError as error:
                cause = getattr(error, "cause", None)
                raise cause if isinstance(cause, (ClientError, RunError)) else RunError(f"a client actor failed\n{error}") from None
            if index is not None:
                yield index, result

    def _free(self, home: int | None, busy: set[int]) -> int | None:
        if home is not None:
            return None if home in busy else home
        return next((actor for actor in self._actors if actor not in busy), None)

    def _replace(self, actor: int) -> None:
        self.replaced += 1
        ray.kill(self._actors[actor])  # a process that hangs on must not come back into the pool
        self._actors[actor] = self._class.remote(*self._arguments)
        self._starting[self._actors[actor].ready.remote()] = actor

    def evaluate(self, model: np.ndarray) -> Any:
        return model, self._evaluator.evaluate.remote(model)

    def evaluation(self, pending: Any) -> tuple[float, float | None]:
        model, call = pending
        for _ in range(DEATHS):  # Ray takes some seconds to see that a node is lost, and starts actors on it until then
            try:
                return ray.get(call)
            except LOST as error:
                reason = _cause(error)
                self._evaluator = self._evaluator_class.remote(*self._arguments)
                call = self._evaluator.evaluate.remote(model)
        raise RunError(f"the evaluation of the model keeps dying: {reason}")

    def close(self) -> None:
        for actor in [*self._actors.values(), self._evaluator]:
            ray.kill(actor)


def _cause(error: RayError) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "memory" in text.lower():
        return f"killed for memory; use fewer client.actors, a smaller client.lane or a node with more memory ({text[:300]})"
    return text[:300]


def capacity(num_cpus: float, num_gpus: float, nodes: Sequence[dict[str, float]]) -> int:
    """How many actors of that size the nodes hold, a GPU fraction being packed into one device at a time.

    >>> capacity(1, 0.6, [{"CPU": 16, "GPU": 4}])  # 0.6 fits once on each GPU, whatever the sum says
    4
    >>> capacity(2, 0, [{"CPU": 3}, {"CPU": 3}])
    2
    """
    total = 0
    for node in nodes:
        fits = []
        if num_cpus > 0:
            fits.append(int(node.get("CPU", 0) / num_cpus + 1e-9))
        if num_gpus >= 1:
            fits.append(int(node.get("GPU", 0) // num_gpus))
        elif num_gpus > 0:
            fits.append(int(node.get("GPU", 0)) * int(1 / num_gpus + 1e-9))
        total += min(fits, default=sys.maxsize)
    return total


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def wanted(client: Client, population: int, most_lanes: int, nodes: Sequence[dict[str, float]], elastic: bool, d: int = 0) -> int:
    """How many actors to start; raises `ConfigError` when they would not fit.

    `elastic` says that the run starts Ray itself on this machine: the logical CPUs are then its own to set, and an explicit count
    is limited by memory alone (more actors than cores share them). On a cluster that others share, Ray's resources decide.
    """
    field = "client.actors"
    if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
        raise ConfigError("client.num_gpus", client.num_gpus, "a fraction of one GPU, or a whole number")
    if client.num_gpus > 0 and capacity(0, client.num_gpus, nodes) == 0:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        raise ConfigError("client.num_gpus", client.num_gpus, f"at most what one node has; the machine has {gpus:g} GPUs")
    if client.num_cpus > max(node.get("CPU", 0) for node in nodes):
        raise ConfigError("client.num_cpus", client.num_cpus, f"at most the {max(node.get('CPU', 0) for node in nodes):g} CPUs of one node")
    held = capacity(0 if elastic else client.num_cpus, client.num_gpus, nodes)
    if client.actors == "auto":
        if client.num_cpus == 0:
            raise ConfigError("client.num_cpus", 0, "above 0 with client.actors auto, which fills the CPUs")
        slots = capacity(client.num_cpus, client.num_gpus, nodes)
        if slots == 0:
            raise ConfigError(field, "auto", f"an actor needs {client.num_cpus:g} CPU and {client.num_gpus:g} GPU, which no node has free")
        return max(1, min(slots, most_lanes))
    count = population if client.actors == "per-client" else int(client.actors)
    if elastic:
        # An actor imports what this process has imported and shares its libraries, so it takes about this one's own memory, and some models.
        memory = psutil.Process().memory_info()
        each = (memory.rss - getattr(memory, "shared", 0)) / 1e6 + 6 * 4 * d / 1e6
        held = min(held, int(psutil.virtual_memory().available / 1e6 / each))
        if count > held:
            raise ConfigError(field, client.actors, f"at most {held} actors fit here ({each:.0f} MB of memory each); {count} are asked for")
    elif count > held:
        fit = f"the cluster holds {held} actors of {client.num_cpus:g} CPU and {client.num_gpus:g} GPU; {count} are asked for"
        raise ConfigError(field, client.actors, f"{fit}, so lower client.num_cpus")
    return count
