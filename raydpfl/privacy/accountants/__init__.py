"""The accountants: ways of counting what a mechanism costs, a file each. The papers' formulas are
among them.

>>> [name for name, member in ACCOUNTANTS.items() if member.rigorous]
['pld', 'rdp']
>>> list(FORMULAS)
['paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003']
>>> ASKED
('pld', 'rdp', 'paper')

`raydpfl.privacy.accounting` asks them, and says what a mechanism guarantees against whom.
"""

from __future__ import annotations

from collections.abc import Iterable

from raydpfl.member import family
from raydpfl.privacy.accountants.base import Accountant, Formula
from raydpfl.privacy.facts import Unit

__all__ = ["ACCOUNTANTS", "ASKED", "FORMULAS", "Accountant", "Formula", "standing"]


def _listed() -> dict[str, Accountant]:
    """One of each, in the order of messages and tables: rigorous ones first, formulas for local
    steps last.
    """
    members = [cls() for cls in family(__name__, Accountant, name="name").values()]
    members.sort(key=lambda member: (not member.rigorous, isinstance(member, Formula)))
    return {member.name: member for member in members}


ACCOUNTANTS: dict[str, Accountant] = _listed()
FORMULAS: dict[str, Formula] = {
    name: member for name, member in ACCOUNTANTS.items() if isinstance(member, Formula)
}
# What a config may ask for: where samples are protected, `paper` stands for the formulas.
ASKED: tuple[str, ...] = tuple(name for name in ACCOUNTANTS if name not in FORMULAS)
# Where only formulas are asked for, the first of these that covers the mechanism is added.
STANDBY = ("rdp", "pld")


def standing(asked: Iterable[str], unit: Unit) -> tuple[str, ...]:
    """The accountants that answer for those asked for, where this unit is protected.

    >>> standing(("pld", "paper"), "client")
    ('pld', 'paper')
    >>> standing(("pld", "paper"), "sample")
    ('pld', 'paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003')
    """
    return tuple(each for name in asked for each in ACCOUNTANTS[name].of(unit))
