"""How much noise, and where it is drawn.

A Gaussian says in exactly one of three ways how large it is:

- `epsilon` (with `delta`): calibrated so that the run as a whole spends at most that, by the run's
  first accountant;
- `multiplier`: standard deviation of the sum over the bound of one client;
- `std`: standard deviation of one client's noise (placement client), of the sum (server), or of a
  batch's mean gradient (step).

`placement` says who draws it: every client on its own update (the sum of r clients then carries
sqrt(r) times the std of one), the server once on the sum, or every client at each of its local
steps (002, 003), where a sample is protected rather than a client.

>>> Gaussian(multiplier=2.0, delta=1e-5).placement
'auto'

**Virtual cohort.** A large cohort needs the noise of a small one, relative to its sum. With
`virtual_cohort` R the r clients that are simulated stand for R, of a `virtual_population` (default:
in proportion), and get r/R of the noise on the sum of those R, so that the mean carries what it
would there. The guarantee is the virtual cohort's, and says so.

Noise is a function of its key alone (`raydpfl.keys`): a round done again after a crash draws the
same noise, so it is one release and not two. The key takes in all that the release depends on
(`raydpfl.plan.Plan.noise_seed`), so that two runs that differ in anything never carry the same
noise, which their difference would be free of. With `common: true` the seed alone is the key: runs
with one seed then carry the same noise, for comparisons in pairs (001 Figs 1 to 3), and no two of
them may both be shown.

**Banded noise** (`banded_gaussian`): the server's noise of one round takes back a part of that of
the rounds before, so that the sum over the rounds carries less, at the same privacy for clients
that take part by turns. Theory and accounting stand in `raydpfl.privacy.factorization`.

It is simulation-grade: floating-point Gaussians from a non-cryptographic generator.
"""

from __future__ import annotations

from raydpfl.member import family
from raydpfl.noise.base import Noise, SideQuery, Source
from raydpfl.noise.gaussian import Gaussian

__all__ = ["FAMILY", "Gaussian", "Noise", "SideQuery", "Source"]

FAMILY: dict[str, type[Noise]] = family(__name__, Noise, first=("none", "gaussian"))
