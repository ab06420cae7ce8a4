"""How much noise, and who draws it.

Noise is a function of its key alone (`raydpfl.core.prng`): a round repeated after a crash draws the
same noise, so it is one release and not two. The key covers everything that the release depends on
(`raydpfl.simulation.plan.Plan.noise_seed`), so that two runs that differ in anything never have the
same noise, of which their difference would be free. With `common: true` the key is the seed alone,
and no two runs with one seed may both be published (001 Figs 1 to 3).

The noise is for simulation: floating-point Gaussians from a non-cryptographic generator.
"""

from raydpfl.config.registry import family
from raydpfl.methods.noise.base import (
    Noise,
    NoiseSource,
    RunFacts,
    SideQuery,
    Whitening,
    whitening_matrix,
)
from raydpfl.methods.noise.gaussian import Gaussian

__all__ = [
    "FAMILY",
    "Gaussian",
    "Noise",
    "NoiseSource",
    "RunFacts",
    "SideQuery",
    "Whitening",
    "whitening_matrix",
]

FAMILY: dict[str, type[Noise]] = family(__name__, Noise, leading_kinds=("none", "gaussian"))
