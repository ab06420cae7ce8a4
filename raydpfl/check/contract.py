"""Clauses, and whether they are kept.

A clause is a function of a case. Its docstring is the clause in words. It returns what was found,
or raises `BrokenClause` with what is wrong.

>>> def even(case):
...     '''Numbers are even.'''
...     hold(case % 2 == 0, f"{case} is odd")
...     return f"{case} is"
>>> check_clause(even, 2)
Clause(name='even', kept=True, finding='2 is', example='')
>>> check_clause(even, 3).finding
'Numbers are even: 3 is odd'
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.special import ndtri

from raydpfl.core.prng import Purpose, keyed_globals, stream
from raydpfl.errors import USER_EXCEPTIONS, located_message
from raydpfl.methods.local import Local
from raydpfl.training.backends import BACKENDS, REFERENCE, missing_requirement

SEED = 20  # of all made-up numbers
FALSE_ALARM = 1e-6  # of one clause that is checked by statistics, for a member that keeps it


@dataclass(frozen=True)
class Clause:
    """One clause of a member's family."""

    name: str
    kept: bool | None  # None: it was not tried
    # what was seen; of a broken clause, the clause and what breaks it; of one not tried, why
    finding: str
    example: str = ""  # the member's settings, in words


class BrokenClause(Exception):
    """A clause is not kept: what breaks it, in words."""


class UntriedClause(Exception):
    """A clause cannot be looked at, because something that it needs has failed already."""


class UnsupportedMember(Exception):
    """No small experiment takes the member, so that the clause cannot be looked at."""


ClauseFunction: TypeAlias = Callable[[Any], str]


def clauses_of(*modules: ModuleType) -> tuple[ClauseFunction, ...]:
    """The public functions of a `case` in these modules, in the order in which they stand."""
    return tuple(
        function
        for module in modules
        for name, function in vars(module).items()
        if isinstance(function, FunctionType)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and [*inspect.signature(function).parameters] == ["case"]
    )


def hold(condition: object, message: str) -> None:
    """Raises `BrokenClause` unless the condition holds."""
    if not bool(condition):
        raise BrokenClause(message)


def check_clause(clause: ClauseFunction, case: Any, example: str = "") -> Clause | None:
    """Whether a case keeps a clause; None: no experiment takes the member."""
    name = clause.__name__.replace("_", " ")
    try:
        with keyed_globals(SEED):
            return Clause(name, True, clause(case), example)
    except UnsupportedMember:
        return None
    except UntriedClause as error:
        return Clause(name, None, str(error), example)
    except BrokenClause as error:
        reason = str(error)
    except USER_EXCEPTIONS as error:  # a user's code may raise anything
        reason = located_message(error)
    text = " ".join((clause.__doc__ or name).split("\n\n")[0].split()).rstrip(".")
    return Clause(name, False, f"{text}: {' '.join(reason.split())[:300]}", example)


def normals(*shape: int, step: int = 0) -> np.ndarray:
    """Standard normals of this shape, float64, the same every time."""
    return stream(SEED, Purpose.DATA, step=step).standard_normal(shape)


def tensor(*shape: int, step: int = 0) -> torch.Tensor:
    """As `normals`, float64."""
    return torch.from_numpy(normals(*shape, step=step))


def close(one: Any, other: Any, tolerance: float = 1e-9) -> bool:
    """Whether arrays have one shape, and are equal to the last digits of their largest number."""
    first, second = np.asarray(one, np.float64), np.asarray(other, np.float64)
    if first.shape != second.shape or (np.isfinite(first) != np.isfinite(second)).any():
        return False
    size = max(float(np.abs(second[np.isfinite(second)]).max(initial=0.0)), 1e-300)
    return bool(np.allclose(first, second, rtol=tolerance, atol=tolerance * size, equal_nan=True))


def check_shapes(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    """Raises `BrokenClause` unless a state has the names, shapes and dtypes that it had."""
    names = f"the state has {sorted(after)}, and began with {sorted(before)}"
    hold(before.keys() == after.keys(), names)
    for name, array in before.items():
        after_array = np.asarray(after[name])
        start_text = f"the state's {name} began as {array.dtype} {list(array.shape)}"
        same_layout = (after_array.shape, after_array.dtype) == (array.shape, array.dtype)
        hold(same_layout, f"{start_text}, and is {after_array.dtype} {list(after_array.shape)}")
        hold(np.isfinite(after_array).all(), f"the state's {name} is not finite")


def normal_limit(comparisons: int, alarm: float) -> float:
    """What the largest of so many standard normals passes with probability `alarm` at most."""
    return -float(ndtri(alarm / (2 * max(1, comparisons))))


def largest_correlation(rows: np.ndarray) -> tuple[float, int, int]:
    """The largest correlation of two rows, float [n, d], in standard errors, and which two."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    units = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    worst = (0.0, 0, 0)
    for start in range(0, len(units), 512):
        products = np.tril(np.abs(units[start : start + 512] @ units.T), start - 1)
        later_row, earlier_row = np.unravel_index(int(products.argmax()), products.shape)
        largest = float(products.max()) * math.sqrt(rows.shape[1])
        worst = max(worst, (largest, int(earlier_row), start + int(later_row)))
    return worst


def backends(local: Local, clip: float | None) -> list[str]:
    """All but the reference that can carry out a rule, `clip`ping each sample's gradient or not."""
    names = [name for name in BACKENDS if name != REFERENCE]
    return [name for name in names if not missing_requirement(name, local, clip)]


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    """Whether two states are the same, bit by bit."""
    return one.keys() == other.keys() and all(
        np.array_equal(one[name], other[name], equal_nan=True) for name in one
    )
