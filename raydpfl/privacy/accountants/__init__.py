"""The accountants, a file each; the papers' formulas are among them. A config may also name a
user-defined accountant, a class of `Accountant`, by import path.

>>> [name for name, member in ACCOUNTANTS.items() if member.rigorous]
['pld', 'rdp']
>>> list(FORMULAS)
['Chen 2024 tCDP', 'Chen 2024 Theorem 5', 'Xu 2026']
>>> ACCOUNTANT_NAMES
('pld', 'rdp', 'paper')
"""

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np

from raydpfl.config import user_classes
from raydpfl.config.registry import family, load
from raydpfl.errors import ConfigError, rename_fields
from raydpfl.privacy.accountants.base import Accountant, Formula
from raydpfl.privacy.types import Unit

__all__ = [
    "ACCOUNTANTS",
    "ACCOUNTANT_NAMES",
    "FORMULAS",
    "Accountant",
    "Formula",
    "accountant_of",
    "resolve_accountants",
]


# In the order of messages and tables: rigorous ones first, formulas last.
ACCOUNTANTS: dict[str, Accountant] = {
    cls.name: cls()
    for cls in sorted(
        family(__name__, Accountant, name="name").values(),
        key=lambda cls: (not cls.rigorous, issubclass(cls, Formula)),
    )
}
FORMULAS: dict[str, Formula] = {
    name: member for name, member in ACCOUNTANTS.items() if isinstance(member, Formula)
}
# What a config may ask for: where samples are protected, `paper` stands for the formulas.
ACCOUNTANT_NAMES: tuple[str, ...] = tuple(name for name in ACCOUNTANTS if name not in FORMULAS)
# Where only formulas are asked for, the first of these that covers the mechanism is added.
FALLBACK = ("rdp", "pld")


def accountant_of(name: str) -> Accountant:
    """The accountant of a name that a config may have: one of `ACCOUNTANT_NAMES`, or an import
    path. Raises `ConfigError` if there is none, or its class lacks what its base leaves to it.
    """
    if name in ACCOUNTANT_NAMES:
        return ACCOUNTANTS[name]
    if ":" not in name:
        raise ConfigError("accountant", name, f"one of {', '.join(ACCOUNTANT_NAMES)}")
    return _load_accountant(name)


@functools.cache
def _load_accountant(path: str) -> Accountant:
    """The accountant whose class has this import path, which is its name."""
    cls = load(path, "accountant")
    fits = isinstance(cls, type) and issubclass(cls, Accountant) and not issubclass(cls, Formula)
    if not fits or cls is Accountant:
        expected = "a subclass of raydpfl.privacy.accountants.Accountant"
        raise ConfigError("accountant", path, expected)
    if cls.epsilons is Accountant.epsilons or cls.delta is Accountant.delta:
        with rename_fields(lambda _: "accountant"):
            user_classes.check_required_methods(cls, "", path)
    return type(cls.__name__, (_Checked, cls), {"name": path, "__module__": cls.__module__})()


class _Checked(Accountant):
    """Checks that a user-defined accountant gives epsilons."""

    def curve(self, event, delta, counts):
        return self._check_epsilons(super().curve(event, delta, counts), len(counts))

    def epsilons(self, mechanism, relation, delta, first, last, v):
        values = super().epsilons(mechanism, relation, delta, first, last, v)
        return self._check_epsilons(values, last - first + 1)

    def _check_epsilons(self, values: Any, count: int) -> np.ndarray:
        """The epsilons, float64 [count]. Raises `ConfigError` for anything else."""
        try:
            epsilons = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            epsilons = np.empty(0)
        if epsilons.shape == (count,) and (epsilons >= 0).all():  # NaN is not
            return epsilons
        text = " ".join(repr(values).split())[:80]
        expected = f"an accountant that gives {count} epsilons, each 0 or more (it gives {text})"
        raise ConfigError("accountant", self.name, expected)


def resolve_accountants(names: Iterable[str], unit: Unit) -> tuple[str, ...]:
    """The accountants asked for, where this unit is protected: at local steps `paper` stands for
    `FORMULAS`.

    >>> resolve_accountants(("pld", "paper"), "client")
    ('pld', 'paper')
    >>> resolve_accountants(("pld", "paper"), "sample")
    ('pld', 'Chen 2024 tCDP', 'Chen 2024 Theorem 5', 'Xu 2026')
    """
    formulas = tuple(FORMULAS) if unit == "sample" else ("paper",)
    return tuple(key for name in names for key in (formulas if name == "paper" else (name,)))
