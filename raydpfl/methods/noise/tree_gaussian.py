"""Gaussian noise of binary trees over the rounds."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from pydantic import Field

from raydpfl.methods.noise.base import NoiseSource
from raydpfl.methods.noise.correlated import CorrelatedGaussian, ReplayedSource
from raydpfl.methods.noise.keyed_noise import server_noise
from raydpfl.privacy.factorization import tree_squares


class TreeGaussian(CorrelatedGaussian):
    """Correlated noise by tree aggregation (DP-FTRL, Kairouz et al. 2021): every node of a binary
    tree over the rounds has noise z of N(0, std^2 I), and the sum so far has that of the nodes that
    it consists of, each estimated from all nodes below it as well (Honaker 2015, the estimator from
    below, which costs no privacy). After `restart` rounds a new tree begins.

    `epsilon`, `multiplier` and `std` are those of a node: a client moves one in every level of the
    tree in each of its rounds. The server keeps a model for each level.
    """

    examples = ({"multiplier": 1.0}, {"multiplier": 1.0, "restart": 3})
    kind: str = "tree_gaussian"
    restart: int | None = Field(
        default=None, ge=1, description="rounds of one tree; None: all of the run"
    )

    def source(self, seed: int, d: int) -> NoiseSource:
        return TreeSource(seed, self.restart, d)

    def whitening(self, t: int) -> np.ndarray:
        tree_start = t // self.restart * self.restart if self.restart else 0
        return _whitening(1 << (t - tree_start).bit_length())[t - tree_start, t - tree_start :: -1]

    def squares(self, rounds: int, separation: int, participations: int) -> np.ndarray:
        return tree_squares(rounds, separation, participations, self.restart)


class SumsOfTree:
    """The noise of a binary tree in the sums so far, round after round.

    A node of height h has the variance v_h of its estimate from below, v_0 = 1 and 1 / v_h = 1 + 1
    / (2 v_(h-1)): of its own noise and of its children's estimates, weighted by their variances.
    """

    def __init__(self) -> None:
        self._round = 0
        self._nodes: list[np.ndarray] = []  # that the sum so far consists of, the largest first

    def next_sum(self, draw: Callable[[int], np.ndarray]) -> np.ndarray:
        """The noise in the sum after the next round, an array like those that `draw` gives: the
        noise of the node of this height that the round completes.
        """
        node = draw(0)
        variance = 1.0
        height = 0
        while self._round >> height & 1:
            height += 1
            share = 2 * variance / (1 + 2 * variance)
            node = share * draw(height) + (1 - share) * (self._nodes.pop() + node)
            variance = share
        self._nodes.append(node)
        self._round += 1
        total = self._nodes[0].copy()
        for part in self._nodes[1:]:
            total += part
        return total


@lru_cache(maxsize=4)
def _whitening(rounds: int) -> np.ndarray:
    """The matrix float64 [rounds, rounds] by which the noise of a tree, round by round, becomes
    independent.
    """
    from scipy.linalg import cholesky, solve_triangular

    unit_rows = iter(np.eye(2 * rounds))
    tree = SumsOfTree()
    sums = np.stack([tree.next_sum(lambda height: next(unit_rows)) for _ in range(rounds)])
    noise = np.diff(sums, axis=0, prepend=0.0)
    return solve_triangular(cholesky(noise @ noise.T, lower=True), np.eye(rounds), lower=True)


class TreeSource(ReplayedSource):
    """The noise of a `TreeGaussian` on models of `d` parameters: what a round adds to the noise in
    the sum so far. The node that round t completes at a height is drawn by the key (t, height).
    """

    def __init__(self, seed: int, restart: int | None, d: int):
        self._restart_after = restart
        super().__init__(seed, d)

    def restart(self) -> None:
        self._tree = SumsOfTree()
        self._previous_total = np.zeros(self.d)

    def next_noise(self, t: int) -> np.ndarray:
        if self._restart_after and t % self._restart_after == 0:
            self.restart()
        total = self._tree.next_sum(lambda height: server_noise(self.seed, t, 1.0, self.d, height))
        y = total - self._previous_total
        self._previous_total = total
        return y
