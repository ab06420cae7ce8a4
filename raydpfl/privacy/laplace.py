"""Laplace noise on sums bounded in L1: its privacy curve, and as accountants compose it.

A vector with Laplace noise of scale b on every coordinate, moved by L1 distance Delta, is dominated
by one number so moved, whose loss is at most ratio = Delta / b (docs/proofs.md, Laplace noise). So
one round is `ratio`-DP [1], and so many rounds are rounds x ratio; at a delta above 0 pld composes
the loss itself, amplified by sampling as any pair is.

>>> laplace_delta(np.array([0.5, 1.5]), 1.0).round(4)
array([0.2212, 0.    ])

[1] Dwork, McSherry, Nissim, Smith. Calibrating noise to sensitivity in private data analysis. TCC
    2006.
[2] Mironov. Renyi differential privacy. CSF 2017. Proposition 6.
"""

import math
from dataclasses import replace
from functools import partial

import numpy as np

from raydpfl.privacy import pld, rdp
from raydpfl.privacy.sampling.base import Sampling, SamplingScheme
from raydpfl.privacy.types import Relation

_ROOT = math.sqrt(2)  # std of Laplace noise over its scale


def laplace_delta(epsilon: np.ndarray | float, ratio: np.ndarray | float) -> np.ndarray:
    """Delta of the Laplace mechanism, exact: that of Lap(ratio, 1) against Lap(0, 1),

        1 - e^((eps - ratio)/2) for |eps| <= ratio, 0 above, and 1 - e^eps below.

    Args:
        epsilon, ratio: of any sign [...]; sensitivity (L1) / scale, above 0 [...].
    """
    middle = -np.expm1((np.minimum(epsilon, ratio) - ratio) / 2) + 0.0  # no -0.0
    return np.where(np.less(epsilon, -np.asarray(ratio)), -np.expm1(np.minimum(epsilon, 0)), middle)


class LaplaceRounds(SamplingScheme):
    """Rounds over everyone with Laplace noise. `mu` is sensitivity / std, as everywhere, and the
    std is sqrt(2) times the scale.
    """

    def everyone(self, sampling):
        return False

    def words(self, sampling):
        return "rounds with Laplace noise"

    def curves(self, sampling, mu, relation):
        curve = partial(laplace_delta, ratio=_ROOT * mu)
        return ((curve, curve),)

    def renyi(self, sampling, mu, relation):
        """Proposition 6 of [2]."""
        a, ratio = rdp.ORDERS, _ROOT * mu
        up = np.log(a / (2 * a - 1)) + (a - 1) * ratio
        down = np.log((a - 1) / (2 * a - 1)) - a * ratio
        return np.logaddexp(up, down) / (a - 1)

    def largest_loss(self, sampling, mu):
        return _ROOT * mu


class SampledLaplaceRounds(SamplingScheme):
    """The same over a secret cohort: Poisson under add_remove and zero_out, of fixed size under
    replace_one.
    """

    def words(self, sampling):
        return "sampled rounds with Laplace noise"

    def curves(self, sampling, mu, relation):
        if relation != "replace_one":
            return pld.poisson_curves(sampling.q, _ROOT * mu, laplace_delta)
        curve = pld.fixed_size_curve(sampling.q, _ROOT * mu, laplace_delta)
        return ((curve, curve),)

    def largest_loss(self, sampling, mu):
        ratio = _ROOT * mu
        return ratio + math.log(sampling.q + (1 - sampling.q) * math.exp(-ratio))


_EVERYONE, _SAMPLED_ROUNDS = LaplaceRounds(), SampledLaplaceRounds()


def laplace_sampling(sampling: Sampling) -> Sampling:
    """The sampling of an event whose noise is Laplace."""
    return replace(sampling, kind=_SAMPLED_ROUNDS if sampling.hidden else _EVERYONE)


def refuses(sampling: Sampling, relation: Relation, accountant: str, needs: str) -> str | None:
    """Why an accountant, which needs this method of a scheme, does not cover Laplace noise; None:
    it does.
    """
    if needs not in ("curves", "renyi"):
        return f"Laplace noise is not covered by {accountant}; nearest: pld"
    if not sampling.hidden:
        return None if sampling.everyone else sampling.scheme.refuses(relation)
    if not sampling.convex(relation):
        cases = "poisson with add_remove or zero_out, or uniform with replace_one"
        return f"{sampling.scheme.plural()} are not covered with Laplace noise; nearest: {cases}"
    if needs == "renyi":
        return f"{sampling.scheme.plural()} with Laplace noise are not covered by rdp; nearest: pld"
    return None
