"""Symmetric distributions on the integers, drawn exactly.

A number is drawn by inversion: a uniform number U in [0, 1), of as many bits as it takes, is
compared with the distribution function. 63 bits decide all but about one draw in 10^13; for that
one more bits are drawn, and the function is computed to more digits (`Distribution.resolve`). No
draw depends on a rounded number, so that the distribution is that of the definition, as with the
rational arithmetic of Canonne, Kamath and Steinke (2020). A table of the function's first 63 bits
makes it one search per number.

>>> integers = DiscreteGaussianDistribution(3.0)
>>> integers.sample(np.random.Philox(7).random_raw, 6)
array([ 2., -2., -1.,  1., -1.,  2.])
>>> SkellamDistribution(3.0).variance  # in units of the integers, squared
9.0
"""

import math
from collections.abc import Callable, Iterator
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, localcontext
from fractions import Fraction
from functools import lru_cache

import numpy as np

BITS = 63  # of the first comparison; one more is the sign
DIGITS = 50  # of the distribution function in the table
GUARD = 20  # digits more in the arithmetic: below 10^8 operations, each off by half a unit
CLOSE = Decimal("1e-20")  # to a whole number, in units of 2^-63: then the table takes more digits

Words = Callable[[int], np.ndarray]  # n -> n random words of 64 bits, uint64 [n]


class Distribution:
    """Base: P[X = k] = P[X = -k]. A member gives `weights`."""

    def __init__(self, std: float):
        if not 0 < std < math.inf:
            raise ValueError(f"std {std}: expected a positive finite number")
        self.std = std
        self.variance = std**2  # the distributions are of the exact square of `std`
        digits = DIGITS
        while (table := self._table(digits)) is None:
            digits *= 2
        self._thresholds = table
        # P[|X| > k] for k = -1, 0, 1, ..., to 2^-63
        tails = (2**BITS - table.astype(object)).astype(np.float64) * 2.0**-BITS
        self._tails = np.concatenate([[1.0], tails])

    def weights(self, digits: int) -> Iterator[Decimal]:
        """Numbers in proportion to P[X = k] for k = K, K - 1, ..., 0, where 2 P[X > K] is below
        10^-digits, with errors below that in all.
        """
        raise NotImplementedError

    def _tail(self, digits: int) -> list[Decimal]:
        """P[|X| > k] for k = 0, 1, ..., K; of the last 0."""
        with localcontext(_context(digits)):
            weights = list(self.weights(digits))
            total = 2 * sum(weights[:-1]) + weights[-1]
            tail_weight, values = Decimal(0), []
            for weight in weights:
                values.append(tail_weight / total)
                tail_weight += 2 * weight
        return values[::-1]

    def _table(self, digits: int) -> np.ndarray | None:
        """The first 63 bits of P[|X| <= k], uint64 [K + 1], of k until all are 1; None where
        `digits` do not tell one.
        """
        table = []
        with localcontext(_context(digits)):
            for tail in self._tail(digits):
                scaled_tail = tail * 2**BITS
                integer_part = int(scaled_tail)
                if integer_part and not CLOSE < scaled_tail - integer_part < 1 - CLOSE:
                    return None
                table.append(2**BITS - 1 - integer_part)
                if not integer_part:
                    break
        return np.array(table, np.uint64)

    def sample(self, words: Words, n: int) -> np.ndarray:
        """n independent integers, float64 [n], from n words (very seldom more) of `words`."""
        raw_words = words(n)
        uniform = raw_words >> np.uint64(1)
        size = np.searchsorted(self._thresholds, uniform)  # thresholds below the 63 bits
        for place in np.flatnonzero(self._thresholds[size] == uniform).tolist():
            size[place] = self.resolve(int(uniform[place]), BITS, words)
        return np.where(raw_words & np.uint64(1), -size, size).astype(np.float64)

    def resolve(self, uniform: int, bits: int, words: Words) -> int:
        """|X| for a U whose first `bits` are those of `uniform`, with more bits from `words`."""
        while True:
            digits = DIGITS + bits // 3
            error = Decimal(10) ** -(digits - 5)
            with localcontext(_context(digits)):
                tail_high = 1 - Decimal(uniform) / 2**bits  # bounds of 1 - U
                tail_low = 1 - Decimal(uniform + 1) / 2**bits
                for k, tail in enumerate(self._tail(digits)):
                    if tail + error <= tail_low:
                        return k
                    if tail - error < tail_high:
                        break  # it lies in between, or too close to tell
            uniform = (uniform << 64) | int(words(1)[0])
            bits += 64

    def scores(self, integers: np.ndarray) -> np.ndarray:
        """Of independent integers of this distribution, float64 [...], independent standard
        normals: Phi^-1 of the distribution function, at a random place within each of its jumps.
        The places are random, whatever the seed: noise that is small is often the same.
        """
        from scipy.special import ndtri

        place, coin = np.random.default_rng().random((2, *integers.shape))
        size = np.minimum(np.abs(integers), len(self._tails) - 2).astype(np.int64)
        strict_tail, inclusive_tail = self._tails[size + 1], self._tails[size]
        tail = (strict_tail + place * (inclusive_tail - strict_tail)) / 2
        sign = np.where(integers == 0, np.where(coin < 0.5, -1.0, 1.0), np.sign(integers))
        return -sign * ndtri(np.maximum(tail, 1e-300))


class DiscreteGaussianDistribution(Distribution):
    """P[X = k] in proportion to exp(-k^2 / (2 std^2)) (Canonne, Kamath, Steinke 2020, Def. 1). Its
    variance is below std^2, by less than one part in 10^6 from std 1 on (Corollary 9).
    """

    def weights(self, digits: int) -> Iterator[Decimal]:
        exponent = -1 / (2 * _decimal(self.std) ** 2)
        last = math.ceil(self.std * math.sqrt(2 * math.log(10) * (digits + 5))) + 2
        weight = (exponent * last**2).exp()
        ratio = (exponent * (1 - 2 * last)).exp()  # of the weights at last - 1 and last
        square = (2 * exponent).exp()
        for _ in range(last + 1):
            yield weight
            weight *= ratio
            ratio *= square


class SkellamDistribution(Distribution):
    """The difference of two Poisson numbers of mean std^2 / 2: P[X = k] = e^-v I_k(v), v = std^2,
    with the modified Bessel functions of integer order. The sum of n independent ones has n times
    the variance, and is Skellam too.

    I_(k-1) = I_(k+1) + (2 k / v) I_k, taken downwards (Miller's algorithm; Gautschi 1967, sec. 4).
    """

    def weights(self, digits: int) -> Iterator[Decimal]:
        variance = _decimal(self.std) ** 2
        last = 1
        while self._log_tail(last) > -math.log(10) * (digits + 5):
            last += 1 + last // 8
        next_weight, weight = Decimal(0), Decimal(1)
        for k in range(last, 0, -1):
            yield weight
            next_weight, weight = weight, next_weight + (2 * k) * weight / variance
        yield weight

    def _log_tail(self, k: int) -> float:
        """Chernoff's bound on ln P[X >= k]."""
        v = self.variance
        return math.sqrt(k * k + v * v) - v - k * math.asinh(k / v)


# by std, with tables that are kept
discrete_gaussian = lru_cache(maxsize=8)(DiscreteGaussianDistribution)
skellam = lru_cache(maxsize=8)(SkellamDistribution)


def _context(digits: int) -> Context:
    return Context(prec=digits + GUARD, Emin=MIN_EMIN, Emax=MAX_EMAX)


def _decimal(value: float) -> Decimal:
    ratio = Fraction(value)
    return Decimal(ratio.numerator) / Decimal(ratio.denominator)
