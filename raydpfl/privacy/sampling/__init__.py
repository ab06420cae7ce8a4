"""Sampling schemes: who takes part in a round, and how much a secret about it amplifies. A file a
scheme.

A `Sampling` names a scheme, a population and a cohort. Accountants, the checks of a run's draws and
the audit read its properties, and never ask which scheme it is:

>>> list(SCHEMES)
['fixed', 'poisson', 'full', 'with_replacement', 'public', 'random_allocation', 'truncated_poisson']
>>> [Sampling(kind, population=1000, cohort=10).hidden for kind in ("poisson", "public")]
[True, False]

A user-defined scheme is an object of a class derived from `SamplingScheme`, in place of the name;
the `sampling` of a user-defined selection returns it (docs/members.md has an example).
"""

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
