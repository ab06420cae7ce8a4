"""How much noise, and who draws it.

The size of a Gaussian is one of three fields:

- `epsilon` (with `delta`): the noise is calibrated so that the whole run spends at most that, by
  the run's first rigorous accountant that covers it;
- `multiplier`: std of the noise on the sum / bound of one client;
- `std`: that of one client's noise (placement client), of the noise on the sum (server), or on the
  mean gradient of a batch (step).

`placement` says who draws it: every client on its update (the noise on the sum of r clients
then has sqrt(r) times the std of one), the server once on the sum, or every client at each of its
local steps (002, 003), where samples are protected rather than clients.

>>> Gaussian(multiplier=2.0, delta=1e-5).placement
'auto'

**Virtual cohort.** With `virtual_cohort` R, the r clients that are simulated stand for R, of a
`virtual_population` (by default in proportion). They get r/R of the noise on the sum of those R, so
that the mean has the noise that it would have there. The guarantee is that of the virtual cohort.

Noise is a function of its key alone (`raydpfl.core.prng`): a round repeated after a crash draws the
same noise, so it is one release and not two. The key covers everything that the release depends on
(`raydpfl.simulation.plan.Plan.noise_seed`), so that two runs that differ in anything never have the
same noise, of which their difference would be free. With `common: true` the key is the seed alone:
runs with one seed then have the same noise, for comparisons in pairs (001 Figs 1 to 3), and no two
of them may both be published.

**Banded noise** (`banded_gaussian`): the server's noise of one round cancels a part of that of the
rounds before, so that the sum over the rounds has less noise, at the same privacy for clients that
take part in turns (`raydpfl.privacy.factorization`).

The noise is for simulation: floating-point Gaussians from a non-cryptographic generator.
"""

from __future__ import annotations

from raydpfl.config.registry import family
from raydpfl.methods.noise.base import Noise, NoiseSource, RunFacts, SideQuery, Whitening
from raydpfl.methods.noise.gaussian import Gaussian

__all__ = ["FAMILY", "Gaussian", "Noise", "NoiseSource", "RunFacts", "SideQuery", "Whitening"]

FAMILY: dict[str, type[Noise]] = family(__name__, Noise, first=("none", "gaussian"))
