"""The client actors of Ray: which chunks on which, and what a lost one means.

A dead actor never comes back to the pool: its assignment is done again by another, and a new actor
starts in its place. One that is stopped, hangs (`Patience`) or has lost its GPU to an error there
is killed. After the loss of a node there may be no room for a new one; the pool goes on with the
others, and has it when a node comes back.
"""

import os
import pickle
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from raydpfl.core.hardware import cores
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.errors import DeviceLost, RunError, message
from raydpfl.experiment import Experiment
from raydpfl.runtime.file_transfer import RATE
from raydpfl.runtime.session import pin_to_node, unwrap_error
from raydpfl.runtime.worker import Started, start_worker
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.evaluation import BatchScores
from raydpfl.simulation.provenance import differences
from raydpfl.simulation.scheduler import Costs, assign_chunks, assign_clients, assign_singly, rows

START_SECONDS = 120.0  # an actor that has not come up by then is not coming
DEATHS = 8  # actors that one assignment may cost before the run gives up
ATTEMPTS = 3  # actors on which one call may take too long
WATCH = 3.0  # seconds in which an actor at work takes CPU time
METHODS = ("train", "losses", "evaluate")  # of a client actor that are called
PIECE = 0.25  # seconds of an assignment, of which an actor may take several a round
PIECES = 4
IN_FLIGHT = 64  # calls at once when each client is its own actor
# the actor is gone, or the node that kept what it had returned
LOST = (RayActorError, OutOfMemoryError, ObjectLostError)


class Patience:
    """How long one kind of call may take: `client.timeout`, or by the calls before it `FLOOR` and
    `TIMES` the longest so far, or as much for each row as the slowest so far took, if that is more;
    twice that when the same call is made again. Before the first has ended it is `FIRST`, and an
    actor that takes CPU time then has more.
    """

    FIRST = 60.0
    FLOOR = 10.0
    TIMES = 10.0

    def __init__(self, timeout: float | str):
        self.fixed = None if timeout == "auto" else float(timeout)
        self.longest = self.slowest = 0.0

    def record_call(self, seconds: float, cost: float) -> None:
        self.longest = max(self.longest, seconds)
        self.slowest = max(self.slowest, seconds / max(cost, 1.0))

    def seconds(self, cost: float, attempts: int = 0) -> float:
        """For a call that trains `cost` rows, and was given up `attempts` times."""
        if self.fixed:
            return self.fixed
        limit = self.FIRST
        if self.longest:
            limit = self.FLOOR + self.TIMES * max(self.longest, self.slowest * cost)
        return limit * 2**attempts

    @property
    def certain(self) -> bool:
        """Whether a call that takes longer is given up, though its actor takes CPU time."""
        return bool(self.fixed or self.longest)


@dataclass
class _Call:
    """A call of a method, made until it has a result."""

    index: int  # among the calls
    arguments: tuple
    cost: float
    home: int | None  # the actor that is to answer it; None: any
    timeouts: int = 0  # times that it was given up
    # while it is under way
    actor: int = -1
    start_time: float = 0.0
    patience: float = 0.0  # seconds
    deadline: float = 0.0


class ActorPool:
    """Ray actors: `count` of them sharing all chunks, or one per client of the population.

    Their processes start at once, some at a time: starting one takes a core some seconds, and with
    many more at once than cores Ray gives up on the slowest. Once all are up it may be pickled, for
    the process of the coordinator. `experiment` is complete, `shards` the folder of its data, and
    `platform` what the nodes have to compute like (`raydpfl.runtime.worker.start_worker`).
    """

    def __init__(
        self, experiment: Experiment, shards: str, count: int, platform: Mapping[str, str]
    ):
        client = experiment.client
        self.per_client = client.actors == "per-client"
        self.replaced = 0
        self._options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        self._options |= {"num_cpus": client.num_cpus, "num_gpus": client.num_gpus}
        self._kind = experiment.model.kind
        self._count = count
        self._costs = Costs()
        self._assign = assign_clients if experiment.is_chunk_invariant else assign_chunks
        self._patience = {method: Patience(client.timeout) for method in METHODS}
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        node = ray.get_runtime_context().get_node_id()
        self._worker_arguments = (pickle.dumps(experiment), shards, path, platform, node)
        self._transfer_seconds = 0.0  # seconds that the data may take to other nodes
        if len(ray.nodes()) > 1:
            size = sum(file.stat().st_size for file in Path(shards).iterdir())
            self._transfer_seconds = size / RATE
        self._actors: dict[int, Any] = {}
        self._facts: dict[int, Started] = {}
        self._start_calls: dict[Any, int] = {}  # call -> actor, of those that have not answered yet
        self._deaths: Counter[Any] = Counter()  # by actor that starts, or by call of the round
        slots = int(ray.cluster_resources().get("CPU", 1))
        self._wave = 2 * max(1, min(slots, cores() * len(ray.nodes())))
        self._start_missing()

    def _start(self, actor: int) -> None:
        handle: Any = ray.remote(ClientActor).options(**self._options).remote()
        self._actors[actor] = handle
        call = handle.__ray_call__.remote(start_worker, *self._worker_arguments)
        self._start_calls[call] = actor

    def _start_missing(self) -> None:
        """Starts as many of the actors that are missing as may start at once."""
        count = len(self._actors)
        for actor in range(count, min(self._count, count + self._wave - len(self._start_calls))):
            self._start(actor)

    def wait_until_up(self, check: Callable[[], None]) -> None:
        """Waits until all actors can work; calls `check`, which may raise, meanwhile."""
        timeout = START_SECONDS + 2.0 * self._count + self._transfer_seconds
        deadline = time.monotonic() + timeout
        while self.healthy < self._count:
            check()
            ready_calls, _ = ray.wait([*self._start_calls], num_returns=1, timeout=0.1)
            if ready_calls:
                self._register_actor(ready_calls[0])
            elif time.monotonic() > deadline:
                raise RunError(
                    f"{self._count - self.healthy} of {self._count} client actors did not come up "
                    f"within {timeout:.0f} s; the cluster has no free place for them: lower "
                    "client.actors, client.num_cpus or client.num_gpus"
                )

    @property
    def healthy(self) -> int:
        return len(self._actors) - len(self._start_calls)

    def assign(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        if self.per_client:
            return assign_singly(chunks)
        costs = self._costs.of(chunks)
        actors = max(1, self.healthy)
        pieces = 1.0
        if self._costs.is_fitted:  # of a long round, so that the faster actors take more of them
            pieces = np.clip(costs.sum() / actors / PIECE, 1, PIECES)
        return self._assign(chunks, actors * round(pieces), costs)

    def run(
        self, broadcast: Broadcast, work: Work, assignments: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        calls = []
        for index, chunks in enumerate(assignments):
            home = int(chunks[0].clients[chunks[0].slot]) if self.per_client else None
            calls.append(_Call(index, (work, list(chunks)), rows(chunks), home))
        activity = f"training in round {work.t}"
        for index, result in self._results("train", activity, broadcast, calls):
            if not self.per_client:
                self._costs.record(assignments[index], result.seconds)
            yield index, result.copy_arrays()

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        count = len(clients) if self.per_client else min(len(clients), max(1, self.healthy))
        calls = []
        for index, part in enumerate(np.array_split(clients, count)):
            home = int(part[0]) if self.per_client else None
            calls.append(_Call(index, (t, part.tolist(), noise_seed), len(part), home))
        activity = f"answering with losses in round {t}"
        losses = dict(self._results("losses", activity, model, calls))
        return np.concatenate([losses[index] for index in range(len(calls))])

    def evaluate(
        self, model: np.ndarray, t: int, client_parameters: Mapping[int, np.ndarray]
    ) -> list[BatchScores]:
        """See `Pool.evaluate`. Each actor takes consecutive batches."""
        batches = np.arange(next(iter(self._facts.values())).batches)
        parts = np.array_split(batches, max(1, self.healthy))
        own_ref = ray.put(client_parameters)
        calls = [
            _Call(index, (t, part.tolist(), own_ref), len(part), None)
            for index, part in enumerate(filter(len, parts))
        ]
        activity = f"the evaluation of the model after {t} rounds"
        call_scores = dict(self._results("evaluate", activity, model, calls))
        return [score for index in sorted(call_scores) for score in call_scores[index]]

    def _results(
        self, method: str, activity: str, first_argument: Any, calls: Sequence[_Call]
    ) -> Iterator[tuple[int, Any]]:
        """(index, result) of each call of a method, whose `activity` it is in words, as they
        arrive; `first_argument` is common to all calls.
        """
        argument_ref = ray.put(first_argument)
        queued_calls = deque(calls)
        self._deaths.clear()
        patience = self._patience[method]
        futures: dict[Any, _Call] = {}  # the calls under way, by future
        while queued_calls or futures:
            while queued_calls and (len(futures) < IN_FLIGHT or not self.per_client):
                actor = self._idle_actor(queued_calls[0].home, futures)
                if actor is None:
                    break
                call = queued_calls.popleft()
                future = getattr(self._actors[actor], method).remote(argument_ref, *call.arguments)
                call.actor = actor
                call.start_time = time.monotonic()
                call.patience = patience.seconds(call.cost, call.timeouts)
                call.deadline = call.start_time + call.patience
                futures[future] = call
            ready_future = self._wait(futures)
            if ready_future in futures:
                call = futures.pop(ready_future)
                result = self._result(ready_future, call.actor, call.index)
                if result is None:
                    queued_calls.appendleft(call)
                else:
                    patience.record_call(time.monotonic() - call.start_time, call.cost)
                    yield call.index, result
            elif ready_future is not None:
                self._register_actor(ready_future)
            moment = time.monotonic()
            for future in [future for future, call in futures.items() if moment > call.deadline]:
                if self._handle_timeout(futures[future], patience, activity):
                    queued_calls.appendleft(futures.pop(future))

    def _register_actor(self, future: Any) -> None:
        """Takes an actor into the pool that was started, and now answers."""
        actor = self._start_calls.pop(future)
        facts: Started | None = self._result(future, actor, f"actor {actor}")
        if facts:
            self._check_same_gpu(facts)
            self._facts[actor] = facts
        self._start_missing()

    def _check_same_gpu(self, facts: Started) -> None:
        """Raises `RunError` for an actor with another GPU than those before it."""
        for other in self._facts.values():
            if other.gpu != facts.gpu:
                raise RunError(
                    f"node {facts.host} has another GPU than node {other.host} "
                    f"({differences(other.gpu, facts.gpu)}), so that its clients would have other "
                    "bits; use nodes of one kind"
                )

    def _wait(self, futures: Mapping[Any, _Call]) -> Any:
        """A future that is done, of calls or of an actor that starts; None: a call is late."""
        timeout = START_SECONDS
        if futures:
            first_deadline = min(call.deadline for call in futures.values())
            timeout = max(0.0, first_deadline - time.monotonic()) + 0.01
        ready_futures, _ = ray.wait([*futures, *self._start_calls], num_returns=1, timeout=timeout)
        if ready_futures:
            return ready_futures[0]
        if not futures:
            raise RunError(
                f"client actors died, and for {START_SECONDS:.0f} s no node has had room for "
                "others in their place; go on with --resume"
            )
        return None

    def _result(self, future: Any, actor: int, death_key: Any) -> Any:
        """The result of a call that is done; None if its actor is dead, which is replaced then."""
        try:
            return ray.get(future)
        except LOST as error:
            self._deaths[death_key] += 1
            if self._deaths[death_key] > DEATHS:
                text = message(error)
                if isinstance(error, OutOfMemoryError) or "memory" in text.lower():
                    remedy = (
                        "fewer client.actors, a smaller client.chunk or a node with more memory"
                    )
                    text = f"killed for memory; use {remedy} ({text})"
                raise RunError(f"client actors keep dying: {text}") from None
        except RayTaskError as error:
            reason = unwrap_error(error, "a client actor failed")
            self._deaths[death_key] += 1
            if not isinstance(reason, DeviceLost) or self._deaths[death_key] >= ATTEMPTS:
                raise reason from None  # else its process cannot use its GPU any more
        self._replace(actor)
        return None

    def _handle_timeout(self, call: _Call, patience: Patience, activity: str) -> bool:
        """Whether a late call's actor was replaced; `RunError` for one late too often."""
        if not patience.certain and _is_busy(self._facts[call.actor]):
            call.deadline = time.monotonic() + call.patience
            return False
        call.timeouts += 1
        if call.timeouts >= ATTEMPTS:
            raise RunError(
                f"{activity} did not end within {call.patience:.3g} s, on {ATTEMPTS} actors "
                f"one after another; model.kind {self._kind} hangs there, or "
                "client.timeout is to be higher"
            )
        self._replace(call.actor)
        return True

    def _idle_actor(self, home: int | None, futures: Mapping[Any, _Call]) -> int | None:
        """The actor of this home, or any, that is up and not at work."""
        busy_actors = {*self._start_calls.values(), *(call.actor for call in futures.values())}
        actors = self._actors if home is None else [home]
        idle_actors = self._actors.keys() - busy_actors
        return next((actor for actor in actors if actor in idle_actors), None)

    def _replace(self, actor: int) -> None:
        self.replaced += actor in self._facts  # others had not come up yet
        ray.kill(self._actors[actor])  # a process that hangs on must not come back into the pool
        self._start(actor)

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


def _is_busy(facts: Started) -> bool:
    """Whether an actor takes CPU time."""
    with suppress(RayError):
        call = pin_to_node(_takes_cpu_time, facts.node, max_retries=0).remote(facts.pid)
        return ray.get(call, timeout=START_SECONDS)
    return False


def _takes_cpu_time(pid: int) -> bool:
    """As `_is_busy`, for a local process. Ray's own threads take about 1 % of a core."""
    with suppress(OSError, psutil.Error):
        process = psutil.Process(pid)
        processes = [process, *process.children(recursive=True)]
        start_cpu_time = sum(sum(process.cpu_times()[:2]) for process in processes)
        time.sleep(WATCH)
        cpu_seconds = sum(sum(process.cpu_times()[:2]) for process in processes) - start_cpu_time
        return cpu_seconds > 0.02 * WATCH
    return False
