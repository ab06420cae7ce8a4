"""The client actors of Ray: which chunks on which, and what a lost one means.

A dead actor never comes back to the pool: its share is done again by whoever is free, and another
actor starts in its place; and one that is stopped, or hangs (`Patience`), or has lost its GPU to an
error there, is killed. After the loss
of a node there may be no room for another; the pool goes on with the others, and has it when a node
comes back.
"""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection
from pathlib import Path
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

from raydpfl.core.hardware import cores
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.data import Shards
from raydpfl.errors import ConfigError, DeviceLost, RunError
from raydpfl.experiment import Experiment
from raydpfl.runtime.client_actor import ClientActor
from raydpfl.runtime.file_transfer import RATE
from raydpfl.runtime.shared_memory import Door, Gone, Outbox, Put, opened
from raydpfl.runtime.worker import Started
from raydpfl.sections import Client
from raydpfl.simulation import evaluation
from raydpfl.simulation.provenance import differences
from raydpfl.simulation.scheduler import Costs, dealer, rows, singles

START_SECONDS = 120.0  # an actor that has not come up by then is not coming
DEATHS = 8  # actors that one share of a round may cost before the run gives up
ATTEMPTS = 3  # actors that one share, or an evaluation, may keep waiting for too long
WATCH = 3.0  # seconds in which an actor at work takes CPU time
# what a method does, in words
SAID = {
    "train": "{where}: training",
    "losses": "{where}: answering with its loss",
    "evaluate": "the evaluation of the model",
}
SMALL = 1 << 16  # bytes; Ray sends an argument of up to 100 kB with the call
PIECE = 0.25  # seconds of a piece of a round, of which an actor may take several
PIECES = 4
IN_FLIGHT = 64  # calls at once when each client is its own actor
# the actor is gone, or the node that kept what it had returned, or its door
LOST = (RayActorError, OutOfMemoryError, ObjectLostError, Gone, GetTimeoutError)
# what belongs to one process, of the attributes of `Actors`
OWN = ("_class", "_outbox", "_served")
LOOKS = 0.002  # seconds between looks at calls of Ray's, while others are waited for


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
    """Ray actors: `count` of them sharing all chunks, or one per client of the population.

    Their processes start at once, some at a time: starting one takes a core some seconds, and with
    many more at once than cores Ray gives up on the slowest. They work once they are `told` what
    for. It may be handed to another process, by pickling, between two rounds.
    """

    def __init__(self, client: Client, count: int):
        self.per_client = client.actors == "per-client"
        self.replaced = 0
        self._client = client
        self._count = count
        self._costs = Costs()
        self._patience = {name: Patience(client.timeout) for name in SAID}
        self._given: tuple | None = None  # what `ready` of each is told
        self._sending = 0.0  # seconds that the data may take to other nodes
        self._actors: dict[int, Any] = {}
        self._facts: dict[int, Started] = {}
        # call -> actor, of those that have been told and have not answered yet
        self._starting: dict[Any, int] = {}
        slots = int(ray.cluster_resources().get("CPU", 1))
        self._wave = 2 * max(1, min(slots, cores() * len(ray.nodes())))
        self._begin()
        self._more()

    def _begin(self) -> None:
        """Makes what belongs to this process."""
        client = self._client
        self._class = ray.remote(ClientActor).options(
            num_cpus=client.num_cpus, num_gpus=client.num_gpus, max_restarts=0, max_task_retries=0
        )
        self._outbox = Outbox()
        self._served: dict[int, _Served] = {}  # actors of this machine, once they were called

    def __getstate__(self) -> dict[str, Any]:
        self._leave(*self._served)  # for whoever takes them over
        return {name: value for name, value in vars(self).items() if name not in OWN}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def told(self, experiment: Experiment, shards: str, capability: Mapping[str, str]) -> None:
        """Tells the actors what they work for: a complete experiment and the folder of its data."""
        opened = Shards.open(shards)
        self._kind = experiment.model.kind
        self._batches = [each.clients for each in evaluation.batches(experiment, opened)]
        path = tuple(os.path.abspath(entry) for entry in sys.path)
        here = ray.get_runtime_context().get_node_id()
        self._given = (pickle.dumps(experiment), shards, path, capability, here)
        self._deal = dealer(experiment)
        if len(ray.nodes()) > 1:  # others may have to be sent them
            self._sending = sum(each.stat().st_size for each in Path(shards).iterdir()) / RATE
        for index in self._actors:
            self._tell(index)

    def _tell(self, index: int) -> None:
        assert self._given is not None
        self._starting[self._actors[index].begin.remote(*self._given)] = index

    def _more(self) -> None:
        """Starts as many of the actors that are missing as may start at once."""
        coming = len(self._starting) if self._given else len(self._actors)
        for index in range(
            len(self._actors), min(self._count, len(self._actors) + self._wave - coming)
        ):
            self._actors[index] = self._class.remote()
            if self._given:
                self._tell(index)

    def up(self, least: int, check: Callable[[], None]) -> None:
        """Waits until so many actors can work. Raises what stands in the way, and what `check`
        raises, which is called several times a second.
        """
        timeout = START_SECONDS + 2.0 * self._count + self._sending
        until = time.monotonic() + timeout
        deaths: Counter[Any] = Counter()
        while self.healthy < least:
            check()
            done, _ = ray.wait([*self._starting], num_returns=1, timeout=0.1)
            if done:
                self._started(done[0], deaths)
            elif time.monotonic() > until:
                raise RunError(
                    f"{least - self.healthy} of {self._count} client actors did not come up within "
                    f"{timeout:.0f} s; the cluster has no free place for them: lower "
                    "client.actors, client.num_cpus or client.num_gpus"
                )

    @property
    def healthy(self) -> int:
        return len(self._actors) - len(self._starting) if self._given else 0

    def shares(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        if self.per_client:
            return singles(chunks)
        costs = self._costs.of(chunks)
        actors = max(1, self.healthy)
        each = 1.0
        if self._costs.known:  # a long round in pieces, so that whoever is ahead takes more of them
            each = np.clip(costs.sum() / actors / PIECE, 1, PIECES)
        return self._deal(chunks, actors * round(each), costs)

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        """Yields (index of the share, its result) as they arrive.

        Raises `ClientError` when a client failed, `RunError` when actors keep dying.
        """
        homes = [
            int(share[0].clients[share[0].slot]) if self.per_client else None for share in shares
        ]
        calls = [(work, list(share)) for share in shares]
        costs = [rows(share) for share in shares]
        for index, lent in self._results("train", broadcast, calls, homes, costs):
            result = lent.kept()
            if not self.per_client:
                self._costs.took(shares[index], result.seconds)
            yield index, result

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """What the clients answer of their local losses under `model`, float64 [len(clients)]."""
        parts = np.array_split(
            clients, len(clients) if self.per_client else min(len(clients), max(1, self.healthy))
        )
        homes = [int(part[0]) if self.per_client else None for part in parts]
        calls = [(t, part.tolist(), noise_seed) for part in parts]
        found = dict(self._results("losses", model, calls, homes, [len(part) for part in parts]))
        return np.concatenate([found[index] for index in range(len(parts))])

    def _results(
        self,
        method: str,
        given: Any,
        calls: Sequence[tuple],
        homes: Sequence[int | None],
        costs: Sequence[float],
    ) -> Iterator[tuple[int, Any]]:
        """(index, result) of each of `calls` as they arrive, of its home or (None) of any actor."""
        sent = _Sent(method, given, calls, self._outbox)
        waiting = deque(range(len(calls)))
        deaths: Counter[Any] = Counter()
        late: dict[int, list[str]] = {}  # by call, what the actors did that it was given up on
        patience = self._patience[method]
        with self._flights() as flying:
            while waiting or flying:
                while waiting and len(flying) < IN_FLIGHT:
                    index = waiting[0]
                    actor = self._free(homes[index], flying)
                    if actor is None:
                        break
                    waiting.popleft()
                    seconds = patience.seconds(costs[index], len(late.get(index, ())))
                    call = sent.to(self._actors[actor], self._serving(actor), index)
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
                now = time.monotonic()
                for call in [call for call, flight in flying.items() if now > flight.late]:
                    if self._given_up(flying[call], patience, late, method):
                        waiting.appendleft(flying.pop(call).index)

    @contextmanager
    def _flights(self) -> Iterator[dict[Any, _Flight]]:
        """The calls under way, by what their answers are asked of; those left at its end are never
        asked.
        """
        flying: dict[Any, _Flight] = {}
        try:
            yield flying
        finally:
            self._leave(*(flight.actor for flight in flying.values()))

    def _serving(self, actor: int) -> _Served | None:
        """What serves calls on an actor of this machine; None: it is elsewhere."""
        address = self._facts[actor].address
        if address and actor not in self._served:
            with suppress(Gone):
                self._served[actor] = _Served(self._actors[actor], opened(address))
        return self._served.get(actor)

    def _leave(self, *actors: int) -> None:
        """Takes no more answers through the doors of these actors."""
        for actor in actors:
            served = self._served.pop(actor, None)
            if served:
                served.door.close()

    def _started(self, call: Any, deaths: Counter) -> None:
        """Takes up an actor that was started, and now answers."""
        actor = self._starting.pop(call)
        facts = self._taken(call, actor, f"actor {actor}", deaths)
        if facts:
            self._check_alike(facts)
            self._facts[actor] = facts
        self._more()

    def _check_alike(self, facts: Started) -> None:
        """Raises `RunError` for an actor with another GPU than those before it."""
        for other in self._facts.values():
            if other.gpu != facts.gpu:
                raise RunError(
                    f"node {facts.host} has another GPU than node {other.host} "
                    f"({differences(other.gpu, facts.gpu)}), so that its clients would have other "
                    "bits; use nodes of one kind"
                )

    def _wait(self, flying: dict[Any, _Flight]) -> Any:
        """A call that is done, of those flying or of an actor that starts; None if one is late
        before.
        """
        timeout = START_SECONDS
        if flying:
            first = min(flight.late for flight in flying.values())
            timeout = max(0.0, first - time.monotonic()) + 0.01
        near = [call for call in flying if isinstance(call, _Served)]
        far = [call for call in flying if not isinstance(call, _Served)]
        done = _first(near, [*far, *self._starting], timeout)
        if done is None and not flying:
            raise RunError(
                f"client actors died, and for {START_SECONDS:.0f} s no node has had room for "
                "others in their place; go on with --resume"
            )
        return done

    def _taken(self, call: Any, actor: int, of: Any, deaths: Counter) -> Any:
        """The result of a call that is done; None if its actor is dead, which is replaced then."""
        try:
            return call.answer() if isinstance(call, _Served) else ray.get(call)
        except LOST as error:
            deaths[of] += 1
            if deaths[of] > DEATHS:
                raise RunError(f"client actors keep dying: {_cause(error)}") from None
            self._replace(actor)
            return None
        except RayTaskError as error:
            self._leave(actor)
            reason = _reason(error)
            if not isinstance(reason, DeviceLost):
                raise reason from None
            deaths[of] += 1
            if deaths[of] >= ATTEMPTS:
                raise reason from None
            self._replace(actor)  # its process cannot use its GPU any more
            return None

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
            what = SAID[method].format(where=where)
            raise RunError(
                f"{what} did not end within {flight.patience:.3g} s, on {ATTEMPTS} actors "
                f"one after another; model.kind {self._kind} hangs there, or "
                "client.timeout is to be higher"
            )
        self._replace(flight.actor)
        return True

    def _free(self, home: int | None, flying: dict[Any, _Flight]) -> int | None:
        busy = {*self._starting.values(), *(flight.actor for flight in flying.values())}
        if home is not None:
            return home if home in self._actors and home not in busy else None
        return next((actor for actor in self._actors if actor not in busy), None)

    def _replace(self, actor: int) -> None:
        self.replaced += actor in self._facts  # others had not come up yet
        ray.kill(self._actors[actor])  # a process that hangs on must not come back into the pool
        self._leave(actor)
        self._actors[actor] = self._class.remote()
        self._tell(actor)

    def evaluate(
        self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]
    ) -> list[evaluation.Scored]:
        """See `Pool.evaluate`. The batches are dealt to the actors, in runs."""
        count = len(self._batches)
        edges = np.linspace(0, count, min(count, max(1, self.healthy)) + 1).astype(int).tolist()
        some = [range(*edge) for edge in itertools.pairwise(edges)]
        calls = [(t, each, self._of_clients(own, each)) for each in some]
        costs = [*map(len, some)]
        found = dict(self._results("evaluate", model, calls, [None] * len(some), costs))
        return [each for index in range(len(some)) for each in found[index]]

    def _of_clients(self, own: Mapping[int, np.ndarray], which: range) -> dict[int, np.ndarray]:
        """What of their own the clients of some batches have."""
        clients = (client for index in which for client in self._batches[index])
        return {client: own[client] for client in clients if client in own} if own else {}

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


class _Served:
    """An actor of this machine, which takes calls through a door while one call of Ray's lasts, and
    then that says why.
    """

    ENDS = 10.0  # seconds in which Ray says it
    lent = False  # whether the arrays of the next answer hold until the next call alone

    def __init__(self, actor: Any, door: Door):
        self.door = door
        self._ended = actor.serve.remote()

    def answer(self) -> Any:
        """The answer to the last call. Raises what that has raised, or what has become of the
        actor.
        """
        try:
            return self.door.take(copied=not self.lent)[0]
        except Gone:
            ray.get(self._ended, timeout=self.ENDS)
            raise


class _Sent:
    """Calls of a method as they are sent, each of what all are given and of something of its
    own.
    """

    def __init__(self, method: str, given: Any, calls: Sequence[tuple], outbox: Outbox):
        self._method = method
        self._given = given
        self._calls = calls
        self._outbox = outbox

    def to(self, actor: Any, served: _Served | None, index: int) -> Any:
        """Makes a call on an actor, and by whatever serves it, if anything does; what its answer is
        asked of.
        """
        if served is None:
            return getattr(actor, self._method).remote(self._reference, *self._calls[index])
        served.lent = self._method == "train"
        given, *calls = self._puts
        with suppress(Gone):  # as its answer will say
            served.door.send(given, calls[index])
        return served

    @cached_property
    def _puts(self) -> list[Put]:
        return self._outbox.put(self._given, *((self._method, *call) for call in self._calls))

    @cached_property
    def _reference(self) -> Any:
        """What all are given, where it is small; else a reference to it in the object store, which
        costs a millisecond.
        """
        size = len(pickle.dumps(self._given))
        small = size <= SMALL and size * len(self._calls) <= 4 * SMALL
        return self._given if small else ray.put(self._given)


def _first(near: list[_Served], far: list[Any], timeout: float) -> Any:
    """The first that has an answer, of calls through doors and of Ray's; None after so many
    seconds.
    """
    doors: dict[Any, _Served] = {call.door.fileno(): call for call in near}
    until = time.monotonic() + timeout
    left = timeout
    while True:
        ready = connection.wait(doors, 0.0 if far else left)
        if ready:
            return doors[ready[0]]
        if far:
            done, _ = ray.wait(far, num_returns=1, timeout=min(left, LOOKS) if near else left)
            if done:
                return done[0]
        left = until - time.monotonic()
        if left <= 0:
            return None


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


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, OutOfMemoryError) or "memory" in text.lower():
        remedy = "use fewer client.actors, a smaller client.chunk or a node with more memory"
        return f"killed for memory; {remedy} ({text[:300]})"
    return text[:300]
