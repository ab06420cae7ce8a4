"""Sampling laws: who takes part in a round, and what a secret about it is worth. A file a law.

A law is named in `Sampling` (the law, the population, the cohort), which is all that accountants,
the checks of a run's draws and the audit are told. They ask the law, and never which one it is:

>>> from raydpfl.privacy.mechanism import Sampling
>>> list(LAWS)
['fixed', 'poisson', 'full', 'with_replacement', 'public']
>>> Sampling("poisson", population=1000, cohort=10).hidden, Sampling("public", population=1000, cohort=10).hidden
(True, False)

A law of one's own is an object of a class derived from `Law`, given in the place of the name:
`Sampling(MyLaw(), 1000, 10)`.
"""

from __future__ import annotations

import importlib
import pkgutil

from raydpfl.privacy.laws.base import Law

__all__ = ["LAWS", "Law"]


FIRST = ("fixed", "poisson", "full", "with_replacement")  # the commonest, as messages list them


def _found() -> dict[str, Law]:
    modules = (name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base")
    members = [importlib.import_module(f"{__name__}.{name}").LAW for name in modules]
    named = {member.kind: member for member in members}
    return {**{kind: named[kind] for kind in FIRST}, **named}


LAWS: dict[str, Law] = _found()
