"""Sampling schemes: who takes part in a round, and how much a secret about it amplifies. A file a
scheme.

A `Sampling` names a scheme, a population and a cohort. Accountants, the checks of a run's draws and
the audit read its properties, and never ask which scheme it is:

>>> list(SCHEMES)
['fixed', 'poisson', 'full', 'with_replacement', 'public']
>>> [Sampling(kind, population=1000, cohort=10).hidden for kind in ("poisson", "public")]
[True, False]

A user-defined scheme is an object of a class derived from `SamplingScheme`, in place of the name;
the `sampling` of a user-defined selection returns it. A cohort of 10 or 20 of 1000, as a coin
decides, costs the mean of both:

>>> from raydpfl.privacy import Mechanism, Query, epsilon, pld
>>> class Coin(SamplingScheme):
...     kind = "coin"
...     def size(self, sampling):
...         return None  # it varies
...     def words(self, sampling):
...         return f"{sampling.cohort - 5} or {sampling.cohort + 5} of {sampling.population}"
...     def refuses(self, relation):
...         return None if relation == "replace_one" else "replace_one is covered alone"
...     def curves(self, sampling, mu):
...         sizes = (sampling.cohort - 5, sampling.cohort + 5)
...         halves = [pld.fixed_size_curve(size / sampling.population, mu) for size in sizes]
...         curve = lambda epsilon: (halves[0](epsilon) + halves[1](epsilon)) / 2
...         return ((curve, curve),)
>>> sampling = Sampling(Coin(), population=1000, cohort=15)
>>> round(epsilon(Mechanism(sampling, (Query("update", 1.0, 1.0),), 50), "replace_one", 1e-5), 2)
7.21
"""

from __future__ import annotations

from raydpfl.config.registry import family
from raydpfl.privacy.sampling.base import (
    SCHEMES,
    Participations,
    Sampling,
    SamplingScheme,
    scheme_of,
)

__all__ = ["SCHEMES", "Participations", "Sampling", "SamplingScheme", "scheme_of"]

_FIRST = ("fixed", "poisson", "full", "with_replacement")  # the order in messages
SCHEMES |= {kind: cls() for kind, cls in family(__name__, SamplingScheme, _FIRST).items()}
