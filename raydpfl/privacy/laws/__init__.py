"""Sampling laws: who takes part in a round, and what a secret about it is worth. A file a law.

A law is named in `Sampling` (the law, the population, the cohort), which is all that accountants,
the checks of a run's draws and the audit are told. They ask the law, and never which one it is:

>>> from raydpfl.privacy.mechanism import Sampling
>>> list(LAWS)
['fixed', 'poisson', 'full', 'with_replacement', 'public']
>>> [Sampling(law, population=1000, cohort=10).hidden for law in ("poisson", "public")]
[True, False]

A law of one's own is an object of a class derived from `Law`, given in the place of the name:
`Sampling(MyLaw(), 1000, 10)`.
"""

from __future__ import annotations

from raydpfl.errors import ConfigError
from raydpfl.member import family
from raydpfl.privacy.laws.base import Law

__all__ = ["LAWS", "Law", "law_of"]

FIRST = ("fixed", "poisson", "full", "with_replacement")  # the commonest, as messages list them
LAWS: dict[str, Law] = {kind: law() for kind, law in family(__name__, Law, FIRST).items()}


def law_of(kind: str | Law) -> Law:
    """The law of a name, or one's own. Raises `ConfigError`."""
    if isinstance(kind, Law):
        return kind
    if kind not in LAWS:
        raise ConfigError("kind", kind, f"one of {', '.join(LAWS)}")
    return LAWS[kind]
