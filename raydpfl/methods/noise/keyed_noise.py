"""Drawing noise: each draw is a function of its key alone.

Standard normals are drawn as one flat float32 vector (`raydpfl.core.prng.normals`, up to 7.5
standard deviations) and scaled in float64.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from raydpfl.core.prng import Purpose, clients_normals, named_stream, normals, stream

QUERIES = ("count", "losses")  # their streams are numbered in this order, all others are named
_TOGETHER = 4096  # clients whose noise on a histogram is added up at once


def client_noise(
    seed: int,
    t: int,
    clients: Sequence[int] | np.ndarray,
    draws: Sequence[int] | np.ndarray,
    std: float,
    d: int,
) -> np.ndarray:
    """The noise of C clients on their updates, float64 [C, d]. Arguments as for
    `Noise.on_clients`.
    """
    drawn = clients_normals(seed, Purpose.CLIENT_NOISE, d, t=t, clients=clients, draws=draws)
    return _scaled(drawn, std)


def server_noise(seed: int, t: int, std: float, d: int, step: int = 0) -> np.ndarray:
    """The noise on the sum of round t, drawn once by the server: float64 [d] of this std; with
    another `step` another draw of the round.
    """
    return _scaled(normals(seed, Purpose.SERVER_NOISE, d, t=t, step=step), std)


def query_noise(
    seed: int, t: int, std: float, client: int = 0, draw: int = 0, query: str = "count"
) -> float:
    """The noise, of this std, on the number that one client gives in the side query of this name in
    round t, or the server's noise on the sum of all (client 0).
    """
    key = {"t": t, "client": client, "draw": draw}
    if query in QUERIES:
        drawn = stream(seed, Purpose.QUERY_NOISE, step=QUERIES.index(query), **key)
    else:
        drawn = named_stream(seed, Purpose.QUERY_NOISE, query, **key)
    return float(drawn.standard_normal() * std)


def survey_noise(
    seed: int, t: int, std: float, bins: int, clients: int | None = None
) -> np.ndarray:
    """The noise on the counts of a histogram after round t, float64 [bins] of this std each: of
    `clients` that each draw std / sqrt(clients), or, with None, of the server.
    """
    if clients is None:
        return _scaled(normals(seed, Purpose.SURVEY_NOISE, bins, t=t), std)
    total = np.zeros(bins)
    for first in range(0, clients, _TOGETHER):  # in client order
        some = np.arange(first, min(first + _TOGETHER, clients))
        nth = np.zeros_like(some)
        drawn = clients_normals(seed, Purpose.SURVEY_NOISE, bins, t=t, clients=some, draws=nth)
        total += drawn.numpy().sum(axis=0, dtype=np.float64)
    return total * (std / math.sqrt(clients))


def _scaled(drawn: torch.Tensor, std: float) -> np.ndarray:
    return np.multiply(drawn.numpy(), std, dtype=np.float64)
