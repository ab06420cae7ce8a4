"""Noise as it is drawn: functions of their keys alone.

Standard normals are drawn as one flat float32 vector (`raydpfl.keys.normals`, whose tail reaches
7.5 standard deviations) and scaled in float64.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from raydpfl.keys import Purpose, clients_normals, normals, stream

QUERIES = ("count", "losses")  # side queries whose streams are numbered in this order


def client_noise(
    seed: int,
    t: int,
    clients: Sequence[int] | np.ndarray,
    draws: Sequence[int] | np.ndarray,
    std: float,
    d: int,
) -> np.ndarray:
    """Noise of standard deviation `std` on the updates of C clients, float64 [C, d].

    Args:
        seed: the run's seed of noise.
        t: the round.
        clients: C clients.
        draws: the index of each draw among its client's draws this round, from 0.
        std: of one client's noise.
        d: parameters of the model.
    """
    who = np.asarray(clients).tolist()
    which = np.asarray(draws).tolist()
    drawn = clients_normals(seed, Purpose.CLIENT_NOISE, d, t=t, clients=who, draws=which)
    return _scaled(drawn, std)


def server_noise(seed: int, t: int, std: float, d: int) -> np.ndarray:
    """Noise on the sum of round t, drawn once by the server: float64 [d] of std `std`."""
    return _scaled(normals(seed, Purpose.SERVER_NOISE, d, t=t), std)


def query_noise(
    seed: int, t: int, std: float, client: int = 0, draw: int = 0, query: str = "count"
) -> float:
    """Noise on the number that one client gives in a side query of a round, or the server's on the
    sum of all (client 0).
    """
    step = _number(query)
    key = {"t": t, "client": client, "draw": draw, "step": step}
    return float(stream(seed, Purpose.QUERY_NOISE, **key).standard_normal() * std)


def _number(query: str) -> int:
    """The stream of a side query: those named here in their order, others by their names."""
    if query in QUERIES:
        return QUERIES.index(query)
    return len(QUERIES) + zlib.crc32(query.encode()) % (1 << 20)


def _scaled(drawn: torch.Tensor, std: float) -> np.ndarray:
    return np.multiply(drawn.numpy(), std, dtype=np.float64)
