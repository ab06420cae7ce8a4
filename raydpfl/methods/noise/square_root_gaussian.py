"""Gaussian noise that is correlated over all rounds by the square root of the sums so far."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from pydantic import Field

from raydpfl.config.setting import Setting
from raydpfl.core.prng import Purpose, normals
from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.correlated import ToeplitzGaussian
from raydpfl.privacy.factorization import square_root

CACHE_BYTES = 1 << 26  # bytes of normals that are kept; more are drawn again in every round
BLOCK_ROUNDS = 8  # rounds whose normals are added up as one


class SquareRootGaussian(ToeplitzGaussian):
    """Correlated noise by the full square root C of the sums so far, C C = A (Fichtenberger,
    Henzinger and Upadhyay 2023; Kalinin and Lampert 2024), scaled to a first column of norm 1 over
    all rounds. With a server of momentum A is that of the sums of velocities.

    `epsilon`, `multiplier` and `std` are those of z. The noise of round t adds up t + 1 normals a
    parameter: of large models they are drawn again in every round, as none of their history is
    kept. `buffered_gaussian` comes as near, at the cost of a few.
    """

    examples = ({"multiplier": 1.0},)
    kind: str = "square_root_gaussian"
    momentum: float | None = Field(
        default=None, ge=0, lt=1, description="of the server that it is fitted to; None: the run's"
    )
    norm: float | None = Field(
        default=None, gt=0, description="of the column 1, 1/2, ... over the rounds; filled in"
    )

    def source(self, seed: int, d: int) -> NoiseSource:
        assert self.momentum is not None and self.norm is not None
        return SquareRootSource(seed, self.momentum, self.norm, d)

    def column(self, rounds: int) -> np.ndarray:
        assert self.momentum is not None and self.norm is not None
        return _root(rounds, self.momentum) / self.norm

    def fit_matrix(self, setting: Setting) -> SquareRootGaussian:
        momentum = setting.momentum if self.momentum is None else self.momentum
        norm = self.norm or float(np.linalg.norm(_root(setting.rounds, momentum)))
        return self.model_copy(update={"momentum": momentum, "norm": norm})


_root = lru_cache(maxsize=8)(square_root)


@lru_cache(maxsize=8)
def _inverse(rounds: int, momentum: float) -> np.ndarray:
    """The first column of C^-1 for a first entry of 1, float64 [rounds]."""
    from scipy.signal import lfilter

    return lfilter([1.0], _root(rounds, momentum), np.eye(1, rounds)[0])


class SquareRootSource(NoiseSource):
    """The noise of a resolved `SquareRootGaussian` on models of `d` parameters: a function of
    (seed, round) alone, norm times the sum over the rounds s up to t of z_s times the entry t - s
    of the first column of C^-1, where z_s are the standard normals of round s. It keeps at most 64
    MiB of these.
    """

    def __init__(self, seed: int, momentum: float, norm: float, d: int):
        super().__init__(seed, d)
        self._momentum = momentum
        self._norm = norm
        self._normals_cache: dict[int, np.ndarray] = {}  # by number of a whole block of rounds

    def on_sum(self, t: int, std: float) -> np.ndarray:
        """See `NoiseSource.on_sum`; `std` is that of z."""
        entries = _inverse(1 << (t + 1).bit_length(), self._momentum)[t::-1] * self._norm
        total = np.zeros(self.d)
        for start in range(0, t + 1, BLOCK_ROUNDS):
            z = self._normals(start, min(t + 1 - start, BLOCK_ROUNDS))
            total += np.einsum("s,sd->d", entries[start : start + len(z)], z)
        return total * std

    def _normals(self, start: int, count: int) -> np.ndarray:
        """Those of `count` rounds, float32 [count, d]."""
        if start in self._normals_cache:
            return self._normals_cache[start][:count]
        rounds = range(start, start + count)
        z = np.stack(
            [normals(self.seed, Purpose.SERVER_NOISE, self.d, t=s).numpy() for s in rounds]
        )
        if count == BLOCK_ROUNDS and (len(self._normals_cache) + 1) * z.nbytes <= CACHE_BYTES:
            self._normals_cache[start] = z
        return z
