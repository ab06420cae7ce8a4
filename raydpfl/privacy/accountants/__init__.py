"""The accountants: ways of counting what a mechanism costs, a file each. The papers' formulas are
among them.

>>> [name for name, member in ACCOUNTANTS.items() if member.rigorous]
['pld', 'rdp']
>>> list(FORMULAS)
['paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003']
>>> ASKED
('pld', 'rdp', 'paper')

`raydpfl.privacy.accounting` asks them, and says what a mechanism guarantees against whom. A config
may also name an accountant of your own, a class of `Accountant`, by import path.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from raydpfl import own
from raydpfl.errors import ConfigError, renamed
from raydpfl.member import family, load
from raydpfl.privacy.accountants.base import Accountant, Formula
from raydpfl.privacy.facts import Unit

__all__ = ["ACCOUNTANTS", "ASKED", "FORMULAS", "Accountant", "Formula", "named", "standing"]


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


def named(name: str) -> Accountant:
    """The accountant of a name that a config may have: one of `ASKED`, or an import path.

    Raises:
        ConfigError: there is none, or its class lacks what its base leaves to it.
    """
    if name in ASKED:
        return ACCOUNTANTS[name]
    if ":" not in name:
        raise ConfigError("accountant", name, f"one of {', '.join(ASKED)}")
    return _own(name)


@functools.cache
def _own(path: str) -> Accountant:
    """An accountant of the user's own, whose name is the import path of its class."""
    cls = load(path, "accountant")
    fits = isinstance(cls, type) and issubclass(cls, Accountant) and not issubclass(cls, Formula)
    if not fits or cls is Accountant:
        raise ConfigError(
            "accountant", path, "a subclass of raydpfl.privacy.accountants.Accountant"
        )
    with renamed(lambda _: "accountant"):
        own.complete(cls, "", path)
    return type(cls.__name__, (cls,), {"name": path, "__module__": cls.__module__})()


def standing(asked: Iterable[str], unit: Unit) -> tuple[str, ...]:
    """The accountants that answer for those asked for, where this unit is protected.

    >>> standing(("pld", "paper"), "client")
    ('pld', 'paper')
    >>> standing(("pld", "paper"), "sample")
    ('pld', 'paper 002 tCDP', 'paper 002 Theorem 5', 'paper 003')
    """
    return tuple(
        each
        for name in asked
        for each in (ACCOUNTANTS[name].of(unit) if name in ACCOUNTANTS else (name,))
    )
