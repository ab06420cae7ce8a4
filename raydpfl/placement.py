"""Where clients run: in this process, or in actors of Ray (`raydpfl.actors`).

All pools have one method, `run(model, work, shares)`: results are taken up as they arrive, and
nothing depends on their order, nor on who runs what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from raydpfl import dealing, interrupts
from raydpfl.client import ClientActor
from raydpfl.config import Experiment
from raydpfl.errors import RunError
from raydpfl.evaluator import Scored
from raydpfl.rounds import Broadcast, Lane, LaneResult, Work


class Pool(Protocol):
    """The clients of a run, wherever they are."""

    per_client: bool  # each client of the population is its own actor

    @property
    def healthy(self) -> int:
        """How many actors can work."""

    @property
    def replaced(self) -> int:
        """How many actors there were in the place of which others were started."""

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        """The lanes of a round dealt to the actors."""

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Lane]]
    ) -> Iterator[tuple[int, LaneResult]]:
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


class _Late(BaseException):
    """Goes through where a client's exceptions are taken up."""


class Inline:
    """The same classes as plain objects in this process, without Ray."""

    healthy = 1
    replaced = 0

    def __init__(self, experiment: Experiment, shards: str):
        self.client = ClientActor(experiment, shards)
        self.per_client = False
        timeout = experiment.client.timeout
        # nobody could take this process's place
        self._seconds = None if timeout == "auto" else timeout
        self._experiment = experiment

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
                f"model.kind {self._experiment.model.kind} hangs there, or client.timeout "
                "is to be higher"
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

    def evaluate(self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]) -> list[Scored]:
        every = range(len(self.client.evaluator.batches))
        with self._limited("the evaluation of the model"):
            return self.client.evaluate(model, t, every, own)

    def close(self) -> None:
        pass


class Moving:
    """The clients in this process, until there are others to take the lanes over.

    `others` is asked for them before every piece of work, and gives None while there are none.
    While there are none a round is cut in pieces of about `PIECE` seconds, so that a long one is
    taken over in its midst.
    """

    PIECE = 0.5

    def __init__(self, experiment: Experiment, shards: str, others: Callable[[], Pool | None]):
        self._pool: Pool = Inline(experiment, shards)
        self._others = others
        self._here = True
        self._costs = dealing.Costs()
        self.per_client = False

    @property
    def healthy(self) -> int:
        return self._pool.healthy

    @property
    def replaced(self) -> int:
        return self._pool.replaced

    def _now(self) -> Pool:
        """The clients, who are others from the moment on that there are any."""
        if self._here:
            others = self._others()
            if others is not None:
                self._here = False
                self._pool = others
        return self._pool

    def shares(self, lanes: Sequence[Lane]) -> list[list[Lane]]:
        pool = self._now()
        if not self._here:
            return pool.shares(lanes)
        if not self._costs.known:  # nobody knows yet how long a lane takes
            return [[lane] for lane in lanes]
        costs = self._costs.of(lanes)
        return dealing.shares(lanes, max(1, round(costs.sum() / self.PIECE)), costs)

    def run(
        self, broadcast: Broadcast, work: Work, shares: Sequence[Sequence[Lane]]
    ) -> Iterator[tuple[int, LaneResult]]:
        for index, share in enumerate(shares):
            pool = self._now()
            if not self._here:
                for place, result in pool.run(broadcast, work, shares[index:]):
                    yield index + place, result
                return
            for _, result in pool.run(broadcast, work, [share]):
                self._costs.took(share, result.seconds)
                yield index, result

    def losses(self, model: np.ndarray, t: int, clients: np.ndarray, noise_seed: int) -> np.ndarray:
        return self._now().losses(model, t, clients, noise_seed)

    def evaluate(self, model: np.ndarray, t: int, own: Mapping[int, np.ndarray]) -> list[Scored]:
        return self._now().evaluate(model, t, own)

    def close(self) -> None:
        self._pool.close()
