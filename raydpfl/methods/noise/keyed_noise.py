"""Drawing noise: each draw is a function of its key alone.

Standard normals are drawn as one flat float32 vector (`raydpfl.core.prng.normals`, up to 7.5
standard deviations) and scaled in float64.
"""

import math

import numpy as np
import torch

from raydpfl.core.prng import Purpose, clients_normals, named_stream, normals, stream

QUERIES = ("count", "losses")  # their streams are numbered in this order, all others are named
_GROUP_SIZE = 4096  # clients whose noise on a histogram is added up at once


def client_noise(
    seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
) -> np.ndarray:
    """The noise of C clients on their updates, float64 [C, d]. Arguments as for
    `Noise.on_clients`.
    """
    z = clients_normals(seed, Purpose.CLIENT_NOISE, d, t=t, clients=clients, draws=draws)
    return _scale_noise(z, std)


def server_noise(seed: int, t: int, std: float, d: int, step: int = 0) -> np.ndarray:
    """The noise on the sum of round t, drawn once by the server: float64 [d] of this std; with
    another `step` another draw of the round.
    """
    return _scale_noise(normals(seed, Purpose.SERVER_NOISE, d, t=t, step=step), std)


def query_noise(
    seed: int, t: int, std: float, client: int = 0, draw: int = 0, query: str = "count"
) -> float:
    """The noise, of this std, on the number that one client gives in the side query of this name in
    round t, or the server's noise on the sum of all (client 0).
    """
    key = {"t": t, "client": client, "draw": draw}
    if query in QUERIES:
        generator = stream(seed, Purpose.QUERY_NOISE, step=QUERIES.index(query), **key)
    else:
        generator = named_stream(seed, Purpose.QUERY_NOISE, query, **key)
    return float(generator.standard_normal() * std)


def survey_noise(
    seed: int, t: int, std: float, bins: int, clients: int | None = None
) -> np.ndarray:
    """The noise on the counts of a histogram after round t, float64 [bins] of this std each: of
    `clients` that each draw std / sqrt(clients), or, with None, of the server.
    """
    if clients is None:
        return _scale_noise(normals(seed, Purpose.SURVEY_NOISE, bins, t=t), std)
    total = np.zeros(bins)
    for start in range(0, clients, _GROUP_SIZE):  # in client order
        group = np.arange(start, min(start + _GROUP_SIZE, clients))
        draws = np.zeros_like(group)
        z = clients_normals(seed, Purpose.SURVEY_NOISE, bins, t=t, clients=group, draws=draws)
        total += z.numpy().sum(axis=0, dtype=np.float64)
    return total * (std / math.sqrt(clients))


def _scale_noise(z: torch.Tensor, std: float) -> np.ndarray:
    return np.multiply(z.numpy(), std, dtype=np.float64)
