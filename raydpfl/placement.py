"""Where clients run: how many actors, which lanes on which, and what a lost actor means.

Two pools with one method, `run(model, work, shares)`: `Inline` calls a plain `ClientActor` in this
process, `Actors` calls Ray actors. Results are taken up as they arrive, and nothing depends on
their order. A dead actor never comes back to the pool: its share is done again by whoever is free,
and another actor starts in its place; and one that is stopped, or hangs (`Patience`), is killed.
After the loss of a node there may be no room for another; the pool goes on with the others, and has
it when a node comes back.
"""

from __future__ import annotations

import os
import pickle
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from raydpfl import interrupts, origin
from raydpfl.client import ClientActor
from raydpfl.config import Client, Experiment
from raydpfl.errors import ConfigError, RunError
from raydpfl.evaluator import Evaluator
from raydpfl.plan import Plan
from raydpfl.process import Started
from raydpfl.rounds import Broadcast, Lane, LaneResult, Work
from raydpfl.selection import Cohort

START_SECONDS = 120.0  # an actor that has not come up by then is not coming
DEATHS = 8  # actors that one share of a round may cost before the run gives up
ATTEMPTS = 3  # actors that one share, or an evaluation, may keep waiting for too long
WATCH = 3.0  # seconds in which an actor at work takes CPU time
IN_FLIGHT = 64  # calls at once when each client is its own actor
# the actor is gone, or the node that kept what it had returned
LOST = (RayActorError, OutOfMemoryError, ObjectLostError)


def lanes(
    cohort: Cohort,
    weights: np.ndarray,
    sizes: np.ndarray,
    width: int,
    stds: np.ndarray | None = None,
) -> list[Lane]:
    """The cohort cut into lanes of `width`, in client order, the last one filled up with empty
    slots.

    `weights` float64 [r], `sizes` int64 [r] (rows used) and `stds` float64 [r] (noise of local
    steps) are those of the cohort's clients; a lane's rows are those of its largest.
    """
    if not len(cohort):
        return []
    count = -(-len(cohort) // width)
    clients = _cut(cohort.clients, count, width, -1)
    draws = _cut(cohort.draws, count, width)
    weighted = _cut(weights, count, width)
    noised = [None] * count if stds is None else _cut(stds, count, width)
    rows = np.maximum(_cut(sizes, count, width).max(axis=1), 1).tolist()
    parts = zip(clients, draws, weighted, rows, noised, strict=True)
    return [Lane(*each[:4], stds=each[4]) for each in parts]


def _cut(values: np.ndarray, count: int, width: int, fill: int = 0) -> np.ndarray:
    """[r] as [count, width], the last row filled up."""
    found = np.full(count * width, fill, values.dtype)
    found[: len(values)] = values
    return found.reshape(count, width)


def shares(lanes: Sequence[Lane], actors: int) -> list[list[Lane]]:
    """The lanes dealt to at most `actors` shares, in order, each with about the same number of
    rows.
    """
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
        [lane.alone(slot)] for lane in lanes for slot in np.flatnonzero(lane.clients >= 0).tolist()
    ]


class _Late(BaseException):
    """Goes through where a client's exceptions are taken up."""


class Inline:
    """The same classes as plain objects in this process, without Ray."""

    healthy = 1
    replaced = 0

    def __init__(self, experiment: Experiment, shards: str):
        self.client = ClientActor(experiment, shards)
        self.evaluator = Evaluator(experiment, shards)
        self.per_client = False
        timeout = experiment.client.timeout
        # nobody could take this process's place
        self._seconds = None if timeout == "auto" else timeout
        self._model = experiment.model.kind

    @contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """Raises `RunError` for what takes longer than `client.timeout`, if that is a number."""
        try:
            with interrupts.limited(self._seconds, _Late()):
                yield
        except _Late:
            client = self.client.progress.client
            where = f"client {client}: " if client >= 0 else ""
            raise RunError(
                f"{where}{what} did not end within {self._seconds:g} s; "
                f"model.kind {self._model} hangs there, or client.timeout is to be higher"
            ) from None

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        return [list(lanes)] if lanes else []

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Lane]]
    ) -> Iterator[tuple[int, LaneResult]]:
        for index, share in enumerate(shares):
            with self._limited("training"):
                result = self.client.train(broadcast, work, share)
            yield index, result

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        with self._limited("answering with its loss"):
            return np.array(self.client.losses(model, t, clients.tolist(), noise_seed))

    def evaluate(self, model: np.ndarray) -> Any:
        self.client.progress.at(-1)
        with self._limited("the evaluation of the model"):
            return self.evaluator.evaluate(model)

    def evaluation(self, pending: Any) -> dict[str, float | None]:
        return pending

    def close(self) -> None:
        pass


class Patience:
    """How long one kind of call may take: `client.timeout`, or what follows from the calls before
    it.

    That is `FLOOR` and `TIMES` the longest so far, or as much for each row as the slowest so far
    took, if that is more; twice that when the same call is made again. While none has come to its
    end, `FIRST`, and then an actor at work (by the CPU time that it takes) goes on.
    """

    FIRST = 60.0
    FLOOR = 10.0
    TIMES = 10.0

    def __init__(self, timeout: float | str):
        self.fixed = None if timeout == "auto" else float(timeout)
        self.longest = self.slowest = 0.0

    def took(self, seconds: float, cost: float) -> None:
        self.longest = max(self.longest, seconds)
        self.slowest = max(self.slowest, seconds / max(cost, 1.0))

    def seconds(self, cost: float, again: int = 0) -> float:
        """For a call that trains `cost` rows, and was given up `again` times."""
        if self.fixed:
            return self.fixed
        usual = self.FIRST
        if self.longest:
            usual = self.FLOOR + self.TIMES * max(self.longest, self.slowest * cost)
        return usual * 2**again

    @property
    def knows(self) -> bool:
        """Whether a call that is late is known to be."""
        return bool(self.fixed or self.longest)


@dataclass
class _Flight:
    """A call under way: which of the calls, on which actor, and when it is late."""

    index: int
    actor: int
    began: float
    late: float
    patience: float  # seconds between the two

    @classmethod
    def begun(cls, index: int, actor: int, seconds: float) -> _Flight:
        """A call that is made now."""
        now = time.monotonic()
        return cls(index, actor, now, now + seconds, seconds)


class Actors:
    """Ray actors: `count` of them sharing all lanes, or one per client of the population."""

    def __init__(
        self,
        experiment: Experiment,
        shards: str,
        count: int,
        per_client: bool,
        capability: Mapping[str, str],
    ):
        self.per_client = per_client
        self.replaced = 0
        client = experiment.client
        self._model = experiment.model.kind
        self._patience = {
            name: Patience(client.timeout) for name in ("train", "losses", "evaluate")
        }
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        self._arguments = (pickle.dumps(experiment), shards, path, capability)
        self._class = ray.remote(ClientActor).options(
            num_cpus=client.num_cpus, num_gpus=client.num_gpus, max_restarts=0, max_task_retries=0
        )
        self._evaluator_class = ray.remote(Evaluator).options(
            num_cpus=0, max_restarts=0, max_task_retries=0
        )
        self._actors: dict[int, Any] = {}
        self._facts: dict[int, Started] = {}
        # call -> actor, of those that were started in the place of dead ones
        self._starting: dict[Any, int] = {}
        self._evaluator: Any = None
        self._evaluator_ready: Any = None
        self._start_evaluator()
        self._start_clients(count)
        self._evaluator, self._evaluator_ready = self._up(
            self._evaluator_class, self._evaluator, self._evaluator_ready
        )

    def _start_clients(self, count: int) -> None:
        """Starts the client actors, some at a time: starting one takes a core some seconds, and
        with many more at once than cores Ray gives up on the slowest.
        """
        slots = int(ray.cluster_resources().get("CPU", 1))
        wave = 2 * max(1, min(slots, cores() * len(ray.nodes())))
        for start in range(0, count, wave):
            some = range(start, min(start + wave, count))
            self._actors |= {index: self._class.remote(*self._arguments) for index in some}
            ready = {index: self._actors[index].ready.remote() for index in some}
            for index, call in ready.items():
                self._actors[index], call = self._up(self._class, self._actors[index], call)
                self._facts[index] = ray.get(call)

    def _up(self, kind: Any, actor: Any, ready: Any) -> tuple[Any, Any]:
        """An actor and its call of `ready`, once that has been answered.

        One that died as it started is started again: Ray takes some seconds to see that a node is
        lost, and starts actors on it until then.
        """
        for _ in range(DEATHS):
            try:
                self._await([ready])
                return actor, ready
            except RayActorError as error:
                reason = _cause(error)
                actor = kind.remote(*self._arguments)
                ready = actor.ready.remote()
        raise RunError(f"a client actor died while it started: {reason}")

    def _start_evaluator(self) -> None:
        self._evaluator = self._evaluator_class.remote(*self._arguments)
        self._evaluator_ready = self._evaluator.ready.remote()

    @property
    def healthy(self) -> int:
        return len(self._actors) - len(self._starting)

    def _await(self, references: list) -> list[Started]:
        """What the actors say of themselves once they can work. Raises what stands in the way,
        `RayActorError` for one that died.
        """
        timeout = START_SECONDS + 2.0 * len(references)
        try:
            return ray.get(references, timeout=timeout)
        except GetTimeoutError:
            pending = len(ray.wait(references, num_returns=len(references), timeout=0)[1])
            raise RunError(
                f"{pending} of {len(references)} client actors did not come up within "
                f"{timeout:.0f} s; the cluster has no free place for them: lower client.actors, "
                "client.num_cpus or client.num_gpus"
            ) from None
        except RayTaskError as error:
            raise _reason(error) from None

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        return singles(lanes) if self.per_client else shares(lanes, max(1, self.healthy))

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Lane]]
    ) -> Iterator[tuple[int, LaneResult]]:
        """Yields (index of the share, its result) as they arrive.

        Raises `ClientError` when a client failed, `RunError` when actors keep dying.
        """
        reference = ray.put(broadcast)
        homes = [
            int(share[0].clients[share[0].slot]) if self.per_client else None for share in shares
        ]
        calls = [(reference, work, list(share)) for share in shares]
        yield from self._results("train", calls, homes, [_rows(share) for share in shares])

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """What the clients answer of their local losses under `model`, float64 [len(clients)]."""
        reference = ray.put(model)
        parts = np.array_split(
            clients, len(clients) if self.per_client else min(len(clients), max(1, self.healthy))
        )
        homes = [int(part[0]) if self.per_client else None for part in parts]
        calls = [(reference, t, part.tolist(), noise_seed) for part in parts]
        found = dict(self._results("losses", calls, homes, [len(part) for part in parts]))
        return np.concatenate([found[index] for index in range(len(parts))])

    def _results(
        self,
        method: str,
        calls: Sequence[tuple],
        homes: Sequence[int | None],
        costs: Sequence[float],
    ) -> Iterator[tuple[int, Any]]:
        """(index, result) of `method` called with each of `calls`, as they arrive; on the actor of
        `homes`, or on any that is free (None).
        """
        waiting = deque(range(len(calls)))
        flying: dict[Any, _Flight] = {}
        deaths: Counter[Any] = Counter()
        late: dict[int, list[str]] = {}  # by call, what the actors did that it was given up on
        patience = self._patience[method]
        while waiting or flying:
            while waiting and len(flying) < IN_FLIGHT:
                index = waiting[0]
                busy = {*self._starting.values(), *(flight.actor for flight in flying.values())}
                actor = self._free(homes[index], busy)
                if actor is None:
                    break
                waiting.popleft()
                seconds = patience.seconds(costs[index], len(late.get(index, ())))
                call = getattr(self._actors[actor], method).remote(*calls[index])
                flying[call] = _Flight.begun(index, actor, seconds)
            done = self._wait(flying)
            if done in flying:
                flight = flying.pop(done)
                result = self._taken(done, flight.actor, flight.index, deaths)
                if result is None:
                    waiting.appendleft(flight.index)
                else:
                    patience.took(time.monotonic() - flight.began, costs[flight.index])
                    yield flight.index, result
            elif done is not None:
                self._started(done, deaths)
            for call in [call for call, flight in flying.items() if time.monotonic() > flight.late]:
                if self._given_up(flying[call], patience, late, method):
                    waiting.appendleft(flying.pop(call).index)

    def _started(self, call: Any, deaths: Counter) -> None:
        """Takes up an actor that was started in the place of a dead one, and now answers."""
        actor = self._starting.pop(call)
        facts = self._taken(call, actor, f"actor {actor}", deaths)
        if facts:
            self._facts[actor] = facts

    def _wait(self, flying: dict[Any, _Flight]) -> Any:
        """A call that is done, of those flying or of an actor that starts; None if one is late
        before.
        """
        timeout = START_SECONDS
        if flying:
            first = min(flight.late for flight in flying.values())
            timeout = max(0.0, first - time.monotonic()) + 0.01
        done, _ = ray.wait([*flying, *self._starting], num_returns=1, timeout=timeout)
        if not done and not flying:
            raise RunError(
                f"client actors died, and for {START_SECONDS:.0f} s no node has had room for "
                "others in their place; go on with --resume"
            )
        return done[0] if done else None

    def _taken(self, call: Any, actor: int, of: Any, deaths: Counter) -> Any:
        """The result of a call that is done; None if its actor is dead, which is replaced then."""
        try:
            return ray.get(call)
        except LOST as error:
            deaths[of] += 1
            if deaths[of] > DEATHS:
                raise RunError(f"client actors keep dying in one round: {_cause(error)}") from None
            self._replace(actor)
            return None
        except RayTaskError as error:
            raise _reason(error) from None

    def _given_up(
        self, flight: _Flight, patience: Patience, late: dict[int, list[str]], method: str
    ) -> bool:
        """Whether a late call's actor was replaced; else it has more time. Raises `RunError` for a
        call that was given up too often.
        """
        facts = self._facts.get(flight.actor)
        busy, client = _look(facts, 0.0 if patience.knows else WATCH)
        if busy and not patience.knows:
            flight.late = time.monotonic() + flight.patience
            return False
        those = late.setdefault(flight.index, [])
        those.append(f"client {client}" if client >= 0 else "no client")
        if len(those) >= ATTEMPTS:
            where = ", ".join(dict.fromkeys(those))
            what = "training" if method == "train" else "answering with its loss"
            raise RunError(
                f"{where}: {what} did not end within {flight.patience:.3g} s, on {ATTEMPTS} actors "
                f"one after another; model.kind {self._model} hangs there, or client.timeout is to "
                "be higher"
            )
        self._replace(flight.actor)
        return True

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
        return model, self._evaluator.evaluate.remote(model), time.monotonic()

    def evaluation(self, pending: Any) -> dict[str, float | None]:
        model, call, began = pending
        patience = self._patience["evaluate"]
        late = 0
        reason = ""
        # Ray takes some seconds to see that a node is lost, and starts actors on it until then
        for _ in range(DEATHS):
            try:
                facts = self._await([self._evaluator_ready])[0]
                while not ray.wait([call], timeout=patience.seconds(1, late))[0]:
                    if patience.knows or not _look(facts, WATCH)[0]:
                        raise GetTimeoutError
                result = ray.get(call)
                patience.took(time.monotonic() - began, 1)
                return result
            except GetTimeoutError:
                reason = (
                    f"it did not end within {patience.seconds(1, late):.3g} s, by client.timeout"
                )
                late = late + 1
                if late >= ATTEMPTS:
                    break
                ray.kill(self._evaluator)
            except LOST as error:
                reason = _cause(error)
            except RayTaskError as error:
                raise _reason(error) from None
            self._start_evaluator()
            call = self._evaluator.evaluate.remote(model)
            began = time.monotonic()
        raise RunError(
            f"the evaluation of the model (model.kind {self._model}) has no result: {reason}"
        )

    def close(self) -> None:
        for actor in [*self._actors.values(), self._evaluator]:
            ray.kill(actor)


def _rows(share: Sequence[Lane]) -> int:
    return sum(
        lane.rows * (1 if lane.slot is not None else int((lane.clients >= 0).sum()))
        for lane in share
    )


def _reason(error: RayTaskError) -> Exception:
    """What is to be raised for an error in an actor: its own, if it is one of ours."""
    cause = getattr(error, "cause", None)
    return (
        cause
        if isinstance(cause, (ConfigError, RunError))
        else RunError(f"a client actor failed\n{error}")
    )


def _look(facts: Started | None, seconds: float) -> tuple[bool, int]:
    """Whether an actor's process takes CPU time, and the client in training there (-1: none is
    known), by a look from its node.
    """
    if facts is None:
        return False, -1
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(facts.node, soft=False)
    look = ray.remote(_seen).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        return ray.get(look.remote(facts.pid, facts.progress, seconds), timeout=START_SECONDS)
    except RayError:
        return False, -1


def _seen(pid: int, progress: str, seconds: float) -> tuple[bool, int]:
    """Of a process of this node: see `_look`. Ray's own threads take about 1 % of a core."""
    client = -1
    try:
        if progress:
            with open(progress, "rb") as file:
                client = int.from_bytes(file.read(8), sys.byteorder, signed=True)
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        before = sum(sum(each.cpu_times()[:2]) for each in processes)
        time.sleep(seconds)
        taken = sum(sum(each.cpu_times()[:2]) for each in processes) - before
        return taken > 0.02 * seconds, client
    except (OSError, psutil.Error):
        return False, client


def _cause(error: RayError) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "memory" in text.lower():
        remedy = "use fewer client.actors, a smaller client.lane or a node with more memory"
        return f"killed for memory; {remedy} ({text[:300]})"
    return text[:300]


def capacity(num_cpus: float, num_gpus: float, nodes: Sequence[dict[str, float]]) -> int:
    """How many actors of that size the nodes hold, a GPU fraction being packed into one device at a
    time.

    >>> capacity(1, 0.6, [{"CPU": 16, "GPU": 4}])  # 0.6 fits once on each, whatever the sum says
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def wanted(
    client: Client,
    population: int,
    most_lanes: int,
    nodes: Sequence[dict[str, float]],
    elastic: bool,
    d: int = 0,
) -> int:
    """How many actors to start; raises `ConfigError` when they would not fit.

    `elastic` says that the run starts Ray itself on this machine: the logical CPUs are then its own
    to set, and an explicit count is limited by memory alone (more actors than cores share them). On
    a cluster that others share, Ray's resources decide.
    """
    _check_sizes(client, nodes)
    if client.actors == "auto":
        return max(1, min(_slots(client, nodes), most_lanes))
    count = population if client.actors == "per-client" else int(client.actors)
    held = capacity(0 if elastic else client.num_cpus, client.num_gpus, nodes)
    if elastic:
        # An actor imports what this process has imported and shares its libraries, so it takes
        # about this one's own memory, and some models.
        memory = psutil.Process().memory_info()
        each = (memory.rss - getattr(memory, "shared", 0)) / 1e6 + 6 * 4 * d / 1e6
        held = min(held, int(psutil.virtual_memory().available / 1e6 / each))
        fit = f"at most {held} actors fit here ({each:.0f} MB of memory each)"
        accepted = f"{fit}; {count} are asked for"
    else:
        size = f"{client.num_cpus:g} CPU and {client.num_gpus:g} GPU"
        fit = f"the cluster holds {held} actors of {size}; {count} are asked for"
        accepted = f"{fit}, so lower client.num_cpus"
    if count > held:
        raise ConfigError("client.actors", client.actors, accepted)
    return count


def _check_sizes(client: Client, nodes: Sequence[dict[str, float]]) -> None:
    """Raises `ConfigError` for an actor that no node holds."""
    if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
        accepted = "a fraction of one GPU, or a whole number"
        raise ConfigError("client.num_gpus", client.num_gpus, accepted)
    if client.num_gpus > 0 and capacity(0, client.num_gpus, nodes) == 0:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        accepted = f"at most what one node has; the machine has {gpus:g} GPUs"
        raise ConfigError("client.num_gpus", client.num_gpus, accepted)
    most = max(node.get("CPU", 0) for node in nodes)
    if client.num_cpus > most:
        accepted = f"at most the {most:g} CPUs of one node"
        raise ConfigError("client.num_cpus", client.num_cpus, accepted)


def _slots(client: Client, nodes: Sequence[dict[str, float]]) -> int:
    """How many actors fill the nodes. Raises `ConfigError`."""
    if client.num_cpus == 0:
        accepted = "above 0 with client.actors auto, which fills the CPUs"
        raise ConfigError("client.num_cpus", 0, accepted)
    slots = capacity(client.num_cpus, client.num_gpus, nodes)
    if slots == 0:
        needs = f"an actor needs {client.num_cpus:g} CPU and {client.num_gpus:g} GPU"
        raise ConfigError("client.actors", "auto", f"{needs}, which no node has free")
    return slots


def pool(plan: Plan, actors: int) -> Inline | Actors:
    """The clients of a run: so many actors, or in this process (0).

    Raises `RunError` where this node computes otherwise than the run does.
    """
    capability = origin.of_capability(plan.platform)
    # This may be a worker of Ray's, under other settings than the run's.
    origin.check_node(platform.node(), capability)
    experiment = plan.experiment
    if not actors:
        return Inline(experiment, str(plan.shards))
    apart = experiment.client.actors == "per-client"
    return Actors(experiment, str(plan.shards), actors, apart, capability)
