"""The accountants: ways of counting what a mechanism costs. A file an accountant; the papers'
formulas are some too.

>>> [name for name, member in ACCOUNTANTS.items() if member.rigorous]
['pld', 'rdp']
>>> list(FORMULAS)
['paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003']
>>> ASKED
('pld', 'rdp', 'paper')

`raydpfl.privacy.accounting` asks them, and says what a mechanism guarantees whom.
"""

from __future__ import annotations

from raydpfl.member import family
from raydpfl.privacy.accountants.base import Accountant, Formula

__all__ = ["ACCOUNTANTS", "ASKED", "FORMULAS", "Accountant", "Formula", "at_local_steps"]


def _listed() -> dict[str, Accountant]:
    """One of each, in the order of messages and tables: rigorous first, local steps last."""
    members = [cls() for cls in family(__name__, Accountant, name="name").values()]
    members.sort(key=lambda member: (not member.rigorous, isinstance(member, Formula)))
    return {member.name: member for member in members}


ACCOUNTANTS: dict[str, Accountant] = _listed()
FORMULAS: dict[str, Formula] = {
    name: member for name, member in ACCOUNTANTS.items() if isinstance(member, Formula)
}
# Those that a config may ask for: at local steps `paper` stands for the papers' formulas.
ASKED: tuple[str, ...] = tuple(name for name in ACCOUNTANTS if name not in FORMULAS)


# The rigorous accountants that stand by where only formulas are asked for, the first that covers.
STANDBY = ("rdp", "pld")


def at_local_steps(name: str) -> tuple[str, ...]:
    """The accountants that stand for one asked for, where noise is drawn at local steps: the
    papers' formulas for `paper`.
    """
    return (name,) if ACCOUNTANTS[name].rigorous or name in FORMULAS else tuple(FORMULAS)
