"""Where clients run: in this process, or in actors of Ray (`raydpfl.runtime.actor_pool`).

All pools have one method, `run(model, work, shares)`: results are taken up as they arrive, and
nothing depends on their order, nor on who runs what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from raydpfl.core import signals
from raydpfl.core.hardware import threads
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.errors import RunError
from raydpfl.experiment import Experiment
from raydpfl.simulation import scheduler
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.evaluation import Scored
from raydpfl.simulation.thread_pool import Crew, Pace, timed
from raydpfl.training.backends import BACKENDS
from raydpfl.training.process_settings import single_thread


class Pool(Protocol):
    """The clients of a run, wherever they are."""

    per_client: bool  # each client of the population is its own actor

    @property
    def healthy(self) -> int:
        """How many actors can work."""

    @property
    def replaced(self) -> int:
        """How many actors there were in the place of which others were started."""

    def shares(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """The chunks of a round dealt to the actors."""

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        """Yields (index of the share, its result) as they arrive.

        Raises:
            ClientError: a client failed.
            RunError: actors keep dying, or a client takes too long.
        """

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        """What `clients` (int64 [k]) answer of their local losses under `model` (float32 [d]),
        float64 [k].
        """

    def evaluate(self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]) -> list[Scored]:
        """What a model, float32 [d], does after t rounds on each batch that it is evaluated on, in
        order. `own`: by client, what it has of its own of the model, float32 [own].
        """

    def close(self) -> None:
        """Ends the actors."""


PARTS = 4  # that each thread takes up, about, of what is asked of many


class _Late(BaseException):
    """Goes through where a client's exceptions are taken up."""


class Inline:
    """The same classes as plain objects in this process, without Ray.

    What compiled code does not train in threads of its own is trained in threads of Python, a chunk
    by one of them, where that is faster than by one after another
    (`raydpfl.simulation.thread_pool.Pace`).
    """

    healthy = 1
    replaced = 0
    PIECE = 0.1  # seconds of chunks that a thread takes up at once, about

    def __init__(self, experiment: Experiment, shards: str, piece: float = math.inf):
        """`piece`: seconds of chunks that are trained at once at most, about."""
        self.client = ClientActor(experiment, shards)
        self.per_client = False
        timeout = experiment.client.timeout
        # nobody could take this process's place
        self._seconds = None if timeout == "auto" else timeout
        self._experiment = experiment
        self._piece = piece
        self._costs = scheduler.Costs()
        self._clients = [self.client]  # of each thread, the first the caller's too
        self._crew: Crew | None = None
        self._compiled = BACKENDS[experiment.client.backend].threads
        most = threads()
        if most > 1 and not self.client.has_twins():
            most = 1
        self._pace = Pace(1 if self._compiled else most)  # of training
        self._asked = Pace(most)
        self._scored = Pace(most)

    @property
    def speed(self) -> float | None:
        """How many times as fast as one thread it trains; None: not known yet."""
        return float(threads()) if self._compiled else self._pace.speed

    def only(self, client: ClientActor) -> None:
        """Has this one do all work from now on, in the thread of the caller."""
        self.client = client
        self._clients = [client]
        self._pace = self._asked = self._scored = Pace(1)

    @contextmanager
    def _limited(self, what: str) -> Iterator[None]:
        """Raises `RunError` for what takes longer than `client.timeout`, if that is a number."""
        try:
            with signals.limited(self._seconds, _Late()):
                yield
        except _Late:
            client = self._client()
            where = f"client {client}: " if client >= 0 else ""
            raise RunError(
                f"{where}{what} did not end within {self._seconds:g} s; "
                f"model.kind {self._experiment.model.kind} hangs there, or client.timeout "
                "is to be higher"
            ) from None

    def _client(self) -> int:
        """The client in training, of several that of the thread that is longest at it; -1: none."""
        at_work = [self._clients[thread].progress.client for thread in self._at_work() or [0]]
        return next((client for client in at_work if client >= 0), -1)

    def shares(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        count = self._pace.threads
        piece = self._piece if count == 1 else min(self._piece, self.PIECE)
        if math.isinf(piece):
            return [list(chunks)] if chunks else []
        if not self._costs.known:  # nobody knows yet how long a chunk takes: one of most rows first
            return [[chunk] for chunk in sorted(chunks, key=lambda chunk: -chunk.rows)]
        costs = self._costs.of(chunks)
        return scheduler.shares(chunks, max(count, round(costs.sum() / piece)), costs)

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        return self.begin(broadcast, work, shares, lambda: False)

    def begin(
        self,
        broadcast: Broadcast,
        work: Work,
        shares: Sequence[Sequence[Chunk]],
        others: Callable[[], bool],
    ) -> Iterator[tuple[int, ChunkResult]]:
        """As `run`, of the first shares alone where `others` take over those that are left: they
        are asked before each.
        """

        def ours() -> Iterator[tuple[int, Sequence[Chunk]]]:
            for index, share in enumerate(shares):
                if others():
                    return
                yield index, share

        def train(client: ClientActor, share: Sequence[Chunk]) -> ChunkResult:
            return client.train(broadcast, work, share)

        count = min(self._pace.threads, len(shares))
        for index, share, result in self._done(
            "training", self._pace, train, ours(), scheduler.rows, count
        ):
            self._costs.took(share, result.seconds)
            yield index, result

    def _done(
        self,
        what: str,
        pace: Pace,
        work: Callable[[ClientActor, Any], Any],
        pieces: Iterator[tuple[int, Any]],
        amount: Callable[[Any], float],
        count: int,
    ) -> Iterator[tuple[int, Any, Any]]:
        """What `work` gives for each piece, as it is done: its place, the piece, and that.

        Args:
            what: is done, in words.
            pace: of such work, which is told how long it takes.
            work: of a client and a piece.
            pieces: and their places.
            amount: of work in a piece.
            count: how many threads take them up; 1: the caller's.
        """

        def one(thread: int, piece: tuple[int, Any]) -> tuple[int, Any, Any]:
            return *piece, work(self._clients[thread], piece[1])

        arriving = (timed(partial(one, 0, piece)) for piece in pieces)
        if count > 1:
            arriving = self._hired(count).each(one, pieces)
        total = 0.0
        began = time.perf_counter()
        with closing(arriving):
            while True:
                with self._limited(what):
                    done = next(arriving, None)
                if done is None:
                    break
                total += amount(done.value[1])
                if self._at_work():
                    pace.did(done)
                yield done.value
        if total and count == pace.threads:
            pace.took(count, total, time.perf_counter() - began)

    def _parted(
        self,
        what: str,
        pace: Pace,
        work: Callable[[ClientActor, Sequence[int]], list],
        every: Sequence[int] | np.ndarray,
    ) -> list:
        """What `work` gives for each of these numbers, in their order."""
        count = max(1, min(pace.threads, len(every)))
        parts = np.array_split(every, 1 if count == 1 else min(PARTS * count, len(every)))
        pieces = ((place, part.tolist()) for place, part in enumerate(parts))
        found = {place: got for place, _, got in self._done(what, pace, work, pieces, len, count)}
        return [each for place in range(len(parts)) for each in found[place]]

    def _hired(self, count: int) -> Crew:
        """At least so many threads, and a client for each."""
        if self._crew is None or len(self._crew) < count:
            self.close()
            while len(self._clients) < count:
                self._clients.append(self.client.twin())
            self._crew = Crew(count, single_thread)
        return self._crew

    def _at_work(self) -> list[int]:
        """The threads that are at work, the first to begin it first."""
        return self._crew.at_work if self._crew is not None else []

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        def answer(client: ClientActor, some: Sequence[int]) -> list[float]:
            return client.losses(model, t, some, noise_seed)

        return np.array(self._parted("answering with its loss", self._asked, answer, clients))

    def evaluate(self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]) -> list[Scored]:
        def score(client: ClientActor, batches: Sequence[int]) -> list[Scored]:
            return client.evaluate(model, t, batches, own)

        every = range(len(self.client.evaluator.batches))
        return self._parted("the evaluation of the model", self._scored, score, every)

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()
            self._crew = None


class Moving:
    """The clients in this process, until there are others to take the chunks over.

    `others` is asked for them before every piece of work, and gives None while there are none.
    While there are none a round is cut in pieces of about `PIECE` seconds, so that a long one is
    taken over in its midst.
    """

    PIECE = 0.5
    per_client = False

    def __init__(self, experiment: Experiment, shards: str, others: Callable[[], Pool | None]):
        self._here: Inline | None = Inline(experiment, shards, self.PIECE)
        self._pool: Pool = self._here
        self._others = others

    @property
    def speed(self) -> float | None:
        """See `Inline`; None where it is others who train."""
        return self._here.speed if self._here else None

    @property
    def healthy(self) -> int:
        return self._pool.healthy

    @property
    def replaced(self) -> int:
        return self._pool.replaced

    def _now(self) -> Pool:
        """The clients, who are others from the moment on that there are any."""
        if self._pool is self._here:
            self._pool = self._others() or self._pool
        return self._pool

    def shares(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        return self._now().shares(chunks)

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Chunk]]
    ) -> Iterator[tuple[int, ChunkResult]]:
        done = 0
        if self._here:
            given = (broadcast, work, shares, lambda: self._now() is not self._here)
            for each in self._here.begin(*given):
                done += 1
                yield each
        if done < len(shares):
            if self._here:
                self._here.close()
                self._here = None
            for place, result in self._pool.run(broadcast, work, shares[done:]):
                yield done + place, result

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        return self._now().losses(model, t, clients, noise_seed)

    def evaluate(self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]) -> list[Scored]:
        return self._now().evaluate(model, t, own)

    def close(self) -> None:
        if self._here:
            self._here.close()
        self._pool.close()
