"""The accountants: ways of counting what a mechanism costs. A file an accountant; the papers'
formulas are some too.

>>> [name for name, member in ACCOUNTANTS.items() if member.rigorous]
['pld', 'rdp']
>>> [name for name, member in ACCOUNTANTS.items() if member.local_steps]
['paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003']

`raydpfl.privacy.accounting` asks them, and says what a mechanism guarantees whom.
"""

from __future__ import annotations

import importlib
import pkgutil

from raydpfl.privacy.accountants.base import Accountant, Formula

__all__ = ["ACCOUNTANTS", "FORMULAS", "Accountant", "Formula", "at_local_steps"]


def _found() -> dict[str, Accountant]:
    modules = (name for _, name, _ in pkgutil.iter_modules(__path__) if name != "base")
    members = [importlib.import_module(f"{__name__}.{name}").ACCOUNTANT for name in modules]
    # as messages and tables list them
    members.sort(key=lambda member: (not member.rigorous, member.local_steps))
    return {member.name: member for member in members}


ACCOUNTANTS: dict[str, Accountant] = _found()
FORMULAS: dict[str, Formula] = {
    name: member for name, member in ACCOUNTANTS.items() if isinstance(member, Formula)
}


def at_local_steps(name: str) -> tuple[str, ...]:
    """The accountants that stand for one asked for, where noise is drawn at local steps: the
    papers' formulas for `paper`.
    """
    return (name,) if ACCOUNTANTS[name].rigorous or name in FORMULAS else tuple(FORMULAS)
