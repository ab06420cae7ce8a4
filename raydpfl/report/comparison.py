"""Several runs side by side: which of them are seeds of one setting, in what the settings differ,
and their numbers.

Runs whose configs differ by the seed alone, and by how they are carried out (`HOW`), are seeds of
one setting. Two of them with one seed are labelled by how they are carried out, and if that is the
same too, by their directories.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from raydpfl.config.overrides import flat
from raydpfl.errors import ConfigError
from raydpfl.models.metric_columns import is_score
from raydpfl.report.labels import axis, in_print, listed, quantity
from raydpfl.report.run_reader import Run, grouped, largest_held
from raydpfl.report.statistics import SeedSpread, over_seeds

# Of `data`, what decides which client has which rows, and how a row is put: not which there are.
PARTITIONED = ("clients", "sizes", "partition", "features", "normalize", "mean", "std")
# Beginnings of keys that say how a run is carried out, or what it resolves by itself.
HOW = ("client.", "measure", "track", "noise.coefficients")
LONG = 24  # characters of a value in a label
TERMS = ("unit", "relation", "delta", "observer")  # of a guarantee, as labels of an epsilon


def leaves(tree: Mapping[str, Any]) -> dict[str, str]:
    """The leaves of a config in print, by dotted key.

    >>> leaves({"seed": 1, "local": {"kind": "sgd", "lr": 0.1}})
    {'seed': '1', 'local.kind': 'sgd', 'local.lr': '0.1'}
    """
    return {key: json.dumps(value, default=str).strip('"') for key, value in flat(tree).items()}


def differing(trees: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which some of the trees of leaves differ, in the order in which they come."""
    names = dict.fromkeys(name for tree in trees for name in tree)
    return [name for name in names if len({tree.get(name) for tree in trees}) > 1]


def label(tree: Mapping[str, str], others: Sequence[Mapping[str, str]], keys: Sequence[str]) -> str:
    """What tells a tree of leaves from others by these keys, in words. A key of a member is named
    where others with the same member have another value of it.
    """
    words = []
    for key in keys:
        if key not in tree:
            continue
        # the kinds of the member, and of those around it, that the key is a field of
        kinds = [kind for kind in keys if _is_kind(kind) and kind != key]
        kinds = [kind for kind in kinds if key.startswith(kind.removesuffix("kind"))]
        alike = [other for other in others if all(other.get(k) == tree.get(k) for k in kinds)]
        if len({other.get(key) for other in alike}) > 1:
            value = tree[key]
            value = value if len(value) <= LONG else f"{value[: LONG - 3]}..."
            words.append(value if _is_kind(key) else f"{axis(key)} {value}")
    return ", ".join(words)


def labels(values: Sequence[Any]) -> list[str]:
    """A label for each of the values that a field takes in a sweep: a section by what tells it from
    the others, any other value in print. No two sections have the same one.

    >>> labels([{"kind": "clip", "bound": 1}, {"kind": "clip", "bound": 2}, {"kind": "none"}, 0.5])
    ['clip, bound 1', 'clip, bound 2', 'none', '0.5']
    """
    trees = [leaves(value) if isinstance(value, Mapping) else None for value in values]
    sections = [tree for tree in trees if tree is not None]
    keys = sorted(differing(sections), key=lambda key: not _is_kind(key))
    labels = [
        in_print(value) if tree is None else label(tree, sections, keys) or tree.get("kind", "{}")
        for value, tree in zip(values, trees, strict=True)
    ]
    return [
        ", ".join(f"{key} {value}" for key, value in tree.items())
        if tree is not None and labels.count(name) > 1
        else name
        for name, tree in zip(labels, trees, strict=True)
    ]


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that are seeds of one setting. `label`: what differs from the others; `values`: the
    keys in which the settings differ, in print.
    """

    label: str
    values: Mapping[str, str]
    runs: Sequence[Run]

    def spread(self, name: str) -> SeedSpread:
        """A number of the last round, over the runs."""
        return over_seeds({place: last(run, name) for place, run in enumerate(self.runs)})

    @property
    def epsilon(self) -> float | None:
        """The largest that holds, over the runs; None where one of them has none."""
        return largest_held(self.runs)

    @property
    def accountants(self) -> list[str]:
        """By which accountants it holds."""
        return sorted({run.holds[0].accountant for run in self.runs if run.holds})

    @property
    def private(self) -> bool:
        """Whether any guarantee is stated."""
        return any(run.guarantees for run in self.runs)


class Compared:
    """Runs that can be compared, by their settings.

    Args:
        runs: all of them, each with a name of its own.
        metric: the score that they are compared by; None: that by which each of them is followed.

    Raises:
        ConfigError: they are of different data, or one does not have that score.
    """

    def __init__(self, runs: Sequence[Run], metric: str | None = None):
        self.runs = runs
        _check_data(runs)
        self.metric = _metric(runs, metric)
        self._leaves = {run: leaves(run.config) for run in runs}

    @cached_property
    def keys(self) -> list[str]:
        """The keys in which the settings differ, by section, kinds first."""
        names = self._differing(self.runs)
        printed = [name for name in names if not name.startswith(HOW)]
        clashes = filter(_clash, self._grouped(printed))
        more = {name for runs in clashes for name in self._differing(runs)}
        keys = [name for name in names if name in printed or name in more]
        sections = [name.partition(".")[0] for name in keys]
        return sorted(
            keys, key=lambda name: (sections.index(name.partition(".")[0]), not _is_kind(name))
        )

    def _differing(self, runs: Iterable[Run]) -> list[str]:
        """The keys in which some of the runs differ."""
        names = differing([self._leaves[run] for run in runs])
        return [name for name in names if name != "seed"]

    def _grouped(self, keys: Sequence[str]) -> list[list[Run]]:
        """The runs with the same values of these keys together."""
        return [
            *grouped(
                self.runs, lambda run: tuple(self._leaves[run].get(key) for key in keys)
            ).values()
        ]

    @cached_property
    def settings(self) -> list[SeedGroup]:
        """In the order of their first runs."""
        groups: list[list[Run]] = []
        for group in self._grouped(self.keys):
            groups += [[run] for run in group] if _clash(group) else [group]
        trees = [self._leaves[group[0]] for group in groups]
        names = [label(tree, trees, self.keys) for tree in trees]
        settings = []
        for group, tree, name in zip(groups, trees, names, strict=True):
            if not name or names.count(name) > 1:
                name = ", ".join(part for part in (name, group[0].name) if part)
            settings.append(SeedGroup(name, {key: tree.get(key, "") for key in self.keys}, group))
        return settings

    def ranked(self) -> list[SeedGroup]:
        """The best first, by the mean of the metric; those without one at the end."""
        sign = quantity(self.metric).better or 1

        def rank(setting: SeedGroup) -> float:
            mean = setting.spread(self.metric).mean
            return math.inf if math.isnan(mean) else -sign * mean

        return sorted(self.settings, key=rank)

    @property
    def mixed(self) -> str:
        """In what the epsilons that hold are of different kinds, in words; empty where they are of
        one.
        """
        held = [run.holds[0] for run in self.runs if run.holds]
        parts = []
        for name in TERMS:
            values = dict.fromkeys(str(getattr(one, name)).replace("_", " ") for one in held)
            if len(values) > 1:
                parts.append(f"{name}: {listed([*values])}")
        return "; ".join(parts)


def last(run: Run, name: str) -> float | None:
    """A number of a run in its last round: that of its summary, or of the last row that has it."""
    value = run.number(name)
    column = run.series(name) if value is None else None
    finite = column[np.isfinite(column)].tolist() if column is not None else []
    return finite[-1] if finite else value


def _clash(runs: Sequence[Run]) -> bool:
    """Whether two of these have one seed."""
    return len({run.config.get("seed") for run in runs}) < len(runs)


def _is_kind(key: str) -> bool:
    return key == "kind" or key.endswith(".kind")


def _check_data(runs: Sequence[Run]) -> None:
    """Raises `ConfigError` for runs on different data."""

    def data(run: Run) -> dict[str, str]:
        section = run.config.get("data")
        section = section if isinstance(section, Mapping) else {}
        return leaves({key: value for key, value in section.items() if key not in PARTITIONED})

    first, *others = runs
    for run in others:
        here, there = data(first), data(run)
        for key in dict.fromkeys([*here, *there]):
            if here.get(key) != there.get(key):
                same = f"runs on the same data; data.{key} is {here.get(key)} in {first.name}"
                raise ConfigError("DIR", str(run.folder), f"{same} and {there.get(key)} here")


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    """The score to compare by, checked."""
    scores = {run.name: _scores(run) for run in runs}
    common = [name for name in scores[runs[0].name] if all(name in has for has in scores.values())]
    expected = f"a score that all of them have ({', '.join(common) or 'there is none'})"
    if metric is not None:
        for name, has in scores.items():
            if metric not in has:
                raise ConfigError("--metric", metric, f"{expected}; {name} does not have it")
        return metric
    leads = dict.fromkeys(has[0] if has else "nothing" for has in scores.values())
    if len(leads) > 1 or not common:
        raise ConfigError("--metric", None, f"{expected}; they are followed by {listed([*leads])}")
    return common[0]


def _scores(run: Run) -> list[str]:
    """The scores that a run has, that by which it is followed first."""
    every = dict.fromkeys([*run.summary, *run.table("rounds")])
    return [name for name in every if is_score(name) and last(run, name) is not None]
