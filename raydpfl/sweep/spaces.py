"""Search spaces: what a field of an experiment may take in the place of its value.

>>> space = parse("local.lr", {"loguniform": [0.001, 1.0]})
>>> round(space.at(0.5), 6), space.count
(0.031623, inf)
>>> parse("bounding.bound", {"powers_of_two": [-2, 1]}).options
(0.25, 0.5, 1, 2)
>>> parse("local.lr", {"grid": []})
Traceback (most recent call last):
raydpfl.errors.ConfigError: local.lr = {'grid': []}: expected a list of at least one value, for grid
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from raydpfl.config.overrides import is_space
from raydpfl.errors import ConfigError
from raydpfl.sections import normalize_integer

T = TypeVar("T")
_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True)
class Options:
    """Finitely many values, each as likely as any other. `ordered`: neighbours are alike (for
    Optuna).
    """

    options: tuple[Any, ...]
    ordered: bool = False

    @property
    def count(self) -> float:
        return len(self.options)

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that tell whether the field takes this space."""
        return self.options

    def at(self, u: float) -> Any:
        """The value at `u` in [0, 1)."""
        return self.options[int(u * len(self.options))]


@dataclass(frozen=True)
class Interval:
    """All numbers from `low` to `high`, evenly or (`log`) evenly in their logarithms."""

    low: float
    high: float
    log: bool = False

    count = math.inf

    @property
    def probes(self) -> tuple[float, ...]:
        return self.low, self.high, self.at(0.6180339887)

    def at(self, u: float) -> float:
        if not self.log:
            return self.low + u * (self.high - self.low)
        low = math.log(self.low)
        value = math.exp(low + u * (math.log(self.high) - low))
        return min(max(value, self.low), self.high)


Space = Options | Interval


def parse(field: str, value: Mapping[str, Any]) -> Space:
    """The space that `{kind: arguments}` describes. Raises `ConfigError` naming `field`."""
    ((kind, options),) = value.items()
    if isinstance(options, list):  # numbers may be text, of a config made in Python or by YAML 1.1
        options = [
            float(option) if isinstance(option, str) and _SCIENTIFIC.fullmatch(option) else option
            for option in options
        ]
    try:
        return _options(options) if kind in ("grid", "choice") else _range(kind, options)
    except ValueError as error:
        raise ConfigError(field, dict(value), f"{error}, for {kind}") from None


def _options(options: Any) -> Options:
    if not isinstance(options, list) or not options:
        raise ValueError("a list of at least one value")
    if len({json.dumps(option, sort_keys=True, default=str) for option in options}) < len(options):
        raise ValueError("values that differ")
    return Options(tuple(options))


def _range(kind: str, options: Any) -> Space:
    ends = options if isinstance(options, list) else ()
    if len(ends) != 2 or not all(type(end) in (int, float) and math.isfinite(end) for end in ends):
        raise ValueError("two numbers [lowest, highest]")
    if kind == "powers_of_two":
        low, high = map(normalize_integer, options)
        if not (type(low) is int and type(high) is int and -1000 < low <= high < 1000):
            raise ValueError("two whole exponents [lowest, highest]")
        powers = (2**k if k >= 0 else 2.0**k for k in range(low, high + 1))
        return Options(tuple(powers), ordered=True)
    low, high = options
    if not low < high:
        raise ValueError("[lowest, highest], the first below the second")
    if kind == "loguniform" and low <= 0:
        raise ValueError("[lowest, highest], both above 0")
    return Interval(float(low), float(high), log=kind == "loguniform")


def find(tree: Mapping[str, Any]) -> dict[str, Space]:
    """The spaces in a tree of sections, by dotted key, in the tree's order."""
    return walk(tree, lambda key, value: parse(key, value) if is_space(value) else None)


def walk(
    tree: Mapping[str, Any], read: Callable[[str, Mapping[str, Any]], T | None], path: str = ""
) -> dict[str, T]:
    """What `read` makes of each key and mapping in a tree of sections, whose own key is `path`, by
    dotted key, in the tree's order. Where that is None, it reads what is within the mapping.
    """
    entries: dict[str, T] = {}
    for name, value in tree.items():
        key = f"{path}{name}"
        if isinstance(value, Mapping):
            entry = read(key, value)
            entries |= walk(value, read, f"{key}.") if entry is None else {key: entry}
    return entries


def points(spaces: Mapping[str, Options]) -> Iterator[dict[str, Any]]:
    """All combinations of the values of finite spaces, the last key fastest; one, empty, of none.

    >>> [*points({"a": Options((1, 2)), "b": Options((3,))})]
    [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]
    """
    for point in itertools.product(*(space.options for space in spaces.values())):
        yield dict(zip(spaces, point, strict=True))


def fill_spaces(
    tree: Mapping[str, Any], values: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """A copy of the tree, whose own key is `path`, with `values` (by dotted key) in their places.

    >>> fill_spaces({"seed": 1, "local": {"lr": {"grid": [0.1, 1]}}}, {"local.lr": 0.1})
    {'seed': 1, 'local': {'lr': 0.1}}
    """
    copies: dict[str, Any] = {}
    for key, value in tree.items():
        place = f"{path}{key}"
        subtree = fill_spaces(value, values, f"{place}.") if isinstance(value, Mapping) else value
        copies[key] = values.get(place, subtree)
    return copies
