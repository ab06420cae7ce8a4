"""Who draws Gaussian noise: each client on its update, the server on the sum, or each client at its
local steps.
"""

from __future__ import annotations

import math

import numpy as np

from raydpfl.noise.base import Source
from raydpfl.noise.drawn import client_noise, query_noise, server_noise


class AtSteps:
    """Each client at each of its local steps, which is part of its training. Nothing is drawn on
    what it sends.
    """

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        """See `Noise.on_clients`."""
        return None

    def client_std(self, std: float, survivors: int) -> float:
        """See `Noise.client_std`."""
        return 0.0

    def least(self, survivors: int) -> int:
        """See `Noise.least`."""
        return 0

    def source(self, seed: int, d: int) -> Source:
        """See `Noise.source`."""
        return Source()

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        """See `Noise.on_query`."""
        return 0.0


class AtServer(AtSteps):
    """The server, once on the sum."""

    def source(self, seed: int, d: int) -> Source:
        return Independent(seed, d)

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        return query_noise(seed, t, std, query=query)


class AtClients(AtSteps):
    """Each client on what it sends. All draw as much as the round with fewest clients needs."""

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        return client_noise(seed, t, clients, draws, std, d)

    def client_std(self, std: float, survivors: int) -> float:
        return std / math.sqrt(survivors)

    def least(self, survivors: int) -> int:
        return survivors

    def on_query(
        self,
        seed: int,
        t: int,
        std: float,
        clients: np.ndarray,
        draws: np.ndarray,
        survivors: int,
        query: str,
    ) -> float:
        own = std / math.sqrt(survivors)
        drawn = zip(clients.tolist(), draws.tolist(), strict=True)
        # in client order, whoever trained them
        return sum(query_noise(seed, t, own, client, draw, query) for client, draw in drawn)


class Independent(Source):
    """The server's noise, independent over the rounds."""

    def __init__(self, seed: int, d: int):
        self._seed = seed
        self._d = d

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        return server_noise(self._seed, t, std, self._d)


PLACES: dict[str, AtSteps] = {"client": AtClients(), "server": AtServer(), "step": AtSteps()}
