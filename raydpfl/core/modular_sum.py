"""Sums of integers modulo a power of two, as secure aggregation adds them up.

A client's vector is rotated, divided by a step and rounded at random to integers (Kairouz, Liu and
Steinke 2021, Algorithm 1; Agarwal, Kairouz and Liu 2021, Algorithm 1): `encode`. What is sent is
these integers and the client's noise, modulo 2^bits. The server learns the sum modulo 2^bits, turns
it back and multiplies by the step: `decode`. Clients' integers are added up exactly here
(`raydpfl.core.exact_sum`), so that the coordinates that wrap around are known: `wrapped`.

>>> sums = ModularSum(step=0.01, square=20_000, bits=10, rotated=True, seed=7, t=0)
>>> integers = sums.encode(np.array([[0.3, -0.4, 0.2]]), np.array([5]), np.array([0]))
>>> sums.decode(integers.sum(0)).round(2)
array([ 0.3, -0.4,  0.2])
"""

import math
from dataclasses import dataclass

import numpy as np

from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import RunError

TRIALS = 64  # of rounding at random, each of which fits with probability 1 - e^-1/2 at least


@dataclass(frozen=True)
class ModularSum:
    """The sum of one round. Rotation, which is public, and rounding are keyed by `seed` and `t`."""

    step: float  # the number that an integer 1 stands for, in the units of what clients send
    square: int  # the largest squared L2 norm of a client's integers, without noise
    bits: int  # the width of the sum
    rotated: bool  # whether vectors are, so that no coordinate is far larger than others
    seed: int  # of the noise
    t: int  # the round

    def encode(self, vectors: np.ndarray, clients: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """The integers of k clients, float64 [k, d], of their vectors float64 [k, d]; each row is a
        function of its client's vector and key. Its squared norm is at most `square`: rounding is
        repeated until it is (Kairouz et al. 2021, Definition 21), and after `TRIALS` times it is
        towards 0. Raises `RunError` for a vector that is too long for that.
        """
        rotated_rows = self._rotate(vectors / self.step)
        for row, client, draw in zip(rotated_rows, clients.tolist(), draws.tolist(), strict=True):
            key = {"t": self.t, "client": client, "draw": draw}
            generator = stream(self.seed, Purpose.ROUNDING, **key)
            for _ in range(TRIALS):
                integers = np.floor(row + generator.random(len(row)))
                if integers @ integers <= self.square:
                    break
            else:
                integers = np.trunc(row)
            if not integers @ integers <= self.square:
                norm = math.sqrt(integers @ integers)
                raise RunError(
                    f"client {client} sends integers of norm {norm:g} in round {self.t}, above the "
                    f"{math.sqrt(self.square):g} that was accounted for"
                )
            row[:] = integers
        return rotated_rows

    def wrapped(self, total: np.ndarray) -> int:
        """How many coordinates of an exact sum of integers, float64 [d], wrap around."""
        return int(np.count_nonzero(self._reduce_modulo(total) != total))

    def decode(self, totals: np.ndarray) -> np.ndarray:
        """The vectors, float64 [..., d], that sums of integers, float64 [..., d], stand for: taken
        modulo 2^bits between -2^(bits - 1) and 2^(bits - 1) - 1, turned back, times the step.
        """
        rows = self._reduce_modulo(totals).reshape(-1, totals.shape[-1])
        return (self._rotate(rows, back=True) * self.step).reshape(totals.shape)

    def _reduce_modulo(self, totals: np.ndarray) -> np.ndarray:
        half = 2.0 ** (self.bits - 1)
        return (totals + half) % (2 * half) - half

    def _rotate(self, rows: np.ndarray, back: bool = False) -> np.ndarray:
        """Rows float64 [k, d] by an orthogonal matrix, or its inverse: random signs and a Hadamard
        matrix on the first m coordinates, then on the last m, m the largest power of two up to d.
        """
        if not self.rotated:
            return rows.copy()
        d = rows.shape[1]
        m = 1 << (d.bit_length() - 1)
        signs = 1.0 - 2 * stream(self.seed, Purpose.ROTATION, t=self.t).integers(2, size=(2, m))
        parts = [(slice(m), signs[0])] + [(slice(d - m, d), signs[1])] * (d > m)
        rows = rows.copy()
        for place, sign in reversed(parts) if back else parts:
            part = rows[:, place]
            rows[:, place] = hadamard(part) * sign if back else hadamard(part * sign)
        return rows


def hadamard(rows: np.ndarray) -> np.ndarray:
    """Rows float64 [k, m] times the symmetric Hadamard matrix of order m, a power of two, over
    sqrt(m). Every row has the same bits alone and among others.
    """
    k, m = rows.shape
    factor_size = 1 << ((m.bit_length() - 1) // 2)
    cube = rows.reshape(k, factor_size, m // factor_size)
    for _ in range(2):  # both factors of the matrix, each along the axis whose steps are long
        count = cube.shape[1]
        half = 1
        while half < count:
            pairs = cube.reshape(k, count // (2 * half), 2, half, -1)
            sums, differences = pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]
            cube = np.stack([sums, differences], axis=2).reshape(k, count, -1)
            half *= 2
        cube = np.ascontiguousarray(cube.swapaxes(1, 2))
    return cube.reshape(k, m) / math.sqrt(m)
