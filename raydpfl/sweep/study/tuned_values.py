"""Values that a study leaves open: those that it tries, and those that another arm's runs give.

>>> leaves = find({"local": {"lr": {"tune": [0.1, 1]}}, "bounding": {"bound": 1.0}})
>>> leaves["local.lr"].options
(0.1, 1)
>>> list(points({"local.lr": leaves["local.lr"]}))
[{'local.lr': 0.1}, {'local.lr': 1}]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from raydpfl.config.registry import Section
from raydpfl.config.validation import validate
from raydpfl.errors import ConfigError
from raydpfl.experiment import is_space
from raydpfl.sweep.spaces import Options, Space, parse


class From(Section):
    """A number that the finished runs of another arm give: the mean over their seeds."""

    arm: str
    value: str  # a number of the summary, one within a mapping there as `stationary.final_x`
    times: float = 1.0
    panel: Mapping[str, Any] = {}  # labels of axes where they are not those of the cell itself


Open = Options | From


def _only(value: Any, key: str) -> bool:
    return isinstance(value, Mapping) and list(value) == [key]


def find(tree: Mapping[str, Any], path: str = "") -> dict[str, Open]:
    """What is open in a tree of sections, by dotted key, in the tree's order.

    Raises `ConfigError` for what is neither a list of values to try nor a number to take.
    """
    found: dict[str, Open] = {}
    for key, value in tree.items():
        where = f"{path}{key}"
        if _only(value, "tune"):
            found[where] = _options(where, value["tune"])
        elif _only(value, "from"):
            found[where] = validate(From, where, value["from"])
        elif isinstance(value, Mapping):
            found |= find(value, f"{where}.")
    return found


def _options(field: str, given: Any) -> Options:
    """The values of `{tune: given}`: a list of them, or a space with finitely many."""
    space: Space = parse(field, given if is_space(given) else {"grid": given})
    if not isinstance(space, Options):
        raise ConfigError(field, given, "a list of values to try, or powers_of_two")
    return space


def points(grid: Mapping[str, Options]) -> Iterator[dict[str, Any]]:
    """All combinations of the values to try, the last key fastest; one, empty, of none."""
    for point in itertools.product(*(options.options for options in grid.values())):
        yield dict(zip(grid, point, strict=True))
