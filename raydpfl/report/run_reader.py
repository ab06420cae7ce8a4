"""What the directory of a run holds, as the report reads it: nothing is computed, and no data set
is needed. A missing file is an empty table; so is a damaged one, and `flaws` says why.
"""

import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.privacy import RIGOROUS, Guarantee, column
from raydpfl.report.labels import float_or_none, join_labels, quantity
from raydpfl.report.statistics import Resample, SeedValues
from raydpfl.storage.files import read_json
from raydpfl.storage.tables import read_log

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Columns = Mapping[str, np.ndarray]
MAX_GRID_COLUMNS = 4  # panels of a row, at most


def read_table(path: Path, flaws: list[str] | None = None) -> pa.Table:
    """A Parquet file; without columns where there is none, or a damaged one, which `flaws` gets."""
    try:
        return pq.read_table(path) if path.is_file() else pa.table({})
    except (OSError, pa.ArrowException) as error:
        if flaws is not None:
            flaws.append(f"{path.name} cannot be read ({' '.join(str(error).split())[:120]})")
        return pa.table({})


def arrays_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Columns of numbers as float64 [n] with NaN for null, all others as objects [n]."""
    columns = {}
    for name, values in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
            columns[name] = values.cast(pa.float64()).fill_null(math.nan).to_numpy()
        else:
            columns[name] = np.array([*values.to_pylist(), None], dtype=object)[:-1]
    return columns


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a summary, and those of the mappings in it, by dotted name.

    >>> numbers({"seed": 1, "status": "completed", "stationary": {"final_x": 0.5}, "holds": []})
    {'seed': 1, 'stationary.final_x': 0.5}
    """
    values: dict[str, Any] = {}
    for name, value in summary.items():
        submapping = value if isinstance(value, Mapping) else {}
        values |= {f"{name}.{key}": part for key, part in submapping.items()} or {name: value}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def has_numbers(values: np.ndarray | None) -> bool:
    """Whether there is a finite number, or a word, among these values."""
    if values is None or not len(values):
        return False
    return bool(values.dtype == object or np.isfinite(values).any())


def group_by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by their keys, both in the order of the items."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(eq=False)
class Run:
    """The directory of a run. `name`: what the report calls it."""

    folder: Path
    name: str
    flaws: list[str] = field(default_factory=list)
    _tables: dict[str, Columns] = field(default_factory=dict)

    def table(self, name: str) -> Columns:
        """The columns of `name`.parquet (of rounds, if that is missing, those of its log)."""
        if name not in self._tables:
            table = read_table(self.folder / f"{name}.parquet", self.flaws)
            if name == "rounds" and not table.column_names:
                table = read_log(self.folder, name) or table
            self._tables[name] = arrays_of(table)
        return self._tables[name]

    def has(self, table: str, names: Sequence[str]) -> bool:
        """Whether a table has all these columns, with a number in each."""
        if table == "trajectory":
            return self.path is not None
        column_of = self.series if table == "rounds" else self.table(table).get
        return all(has_numbers(column_of(name)) for name in names)

    def points(self, table: str, *names: str) -> tuple[np.ndarray, np.ndarray]:
        """The rows of a table with numbers in all k columns: their rounds, float64 [n] (NaN where
        the table has none), and the columns, float64 [n, k].
        """
        columns = self.table(table)
        if not {*names} <= columns.keys():
            return np.empty(0), np.empty((0, len(names)))
        points = np.stack([columns[name] for name in names], 1)
        finite = np.isfinite(points).all(1)
        rounds = columns.get("round", np.full(len(points), math.nan))
        return rounds[finite], points[finite]

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty while the run goes on."""
        path = self.folder / "summary.json"
        try:
            summary = read_json(path) if path.exists() else {}
            if not isinstance(summary, dict):
                raise ValueError("it is no mapping")
            return summary
        except (OSError, ValueError) as error:
            self.flaws.append(f"summary.json cannot be read ({error})")
            return {}

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml, complete as the run wrote it."""
        try:
            config = read(self.folder / "config.yaml")
        except ConfigError as error:
            self.flaws.append(f"config.yaml cannot be read (expected {error.expected})")
            return {}
        return config if isinstance(config, dict) else {}

    @cached_property
    def experiment(self) -> Experiment | None:
        """The experiment, user-defined classes unread; None for a config of another version."""
        try:
            return Experiment.from_dict(self.config, imports=())
        except ConfigError:
            return None

    @cached_property
    def guarantees(self) -> list[Guarantee]:
        """All that the summary states."""
        return [Guarantee.from_dict(guarantee) for guarantee in self.summary.get("guarantees", ())]

    @cached_property
    def holds(self) -> list[Guarantee]:
        """Those of them that hold: rigorous, the smallest of several that say the same."""
        return [Guarantee.from_dict(guarantee) for guarantee in self.summary.get("holds", ())]

    @property
    def epsilons(self) -> list[str]:
        """The columns of epsilon in the rounds table: rigorous ones, then the formulas."""
        names = [name for name in self.table("rounds") if name.startswith("epsilon_")]
        return sorted(names, key=lambda name: name not in RIGOROUS)

    @property
    def epsilon_column(self) -> str | None:
        """The column of the epsilon that holds; None where none does. Of a run that has not ended,
        that of the rigorous accountant with the smallest.
        """
        if self.summary:
            return column(self.holds[0].accountant) if self.holds else None
        columns = {name: self.table("rounds")[name] for name in self.epsilons if name in RIGOROUS}
        epsilons = {name: values[-1] for name, values in columns.items() if len(values)}
        return min(epsilons, key=lambda name: epsilons[name], default=None)

    def series(self, name: str) -> np.ndarray | None:
        """A column of numbers of the rounds table, float64 [T]: `round` counted from 1, `seconds`
        since the start, and `epsilon`, the one that holds.
        """
        rounds = self.table("rounds")
        values = rounds.get(self.epsilon_column or name if name == "epsilon" else name)
        if values is None or values.dtype == object:
            return None
        if name == "round":
            return values + 1
        return np.cumsum(values) if name == "seconds" else values

    def number(self, name: str) -> float | None:
        """A number of the summary, by its name (of one within a mapping, with a dot); `best_` and
        a column of which more is better, or less: the best of all rounds; `rounds.` and a column:
        the mean over the rounds.
        """
        value = numbers(self.summary).get(name)
        if value is not None:
            return float(value)
        if name.startswith("rounds."):
            values = self.series(name.partition(".")[2])
            return float(np.nanmean(values)) if values is not None and has_numbers(values) else None
        column = name.removeprefix("best_")
        better = quantity(column).better
        values = self.series(column) if name != column else None
        if not better or values is None or not has_numbers(values):
            return None
        return float(np.nanmax(values) if better > 0 else np.nanmin(values))

    @cached_property
    def path(self) -> np.ndarray | None:
        """The models of trajectory.bin, float32 [T + 1, d], mapped; None where there are none."""
        return self._models("trajectory.bin", "<f4")

    @cached_property
    def optimum(self) -> np.ndarray | None:
        """The best model there is, float64 [1, d], from optimum.bin; None where it is not known."""
        return self._models("optimum.bin", "<f8")

    def _models(self, name: str, dtype: str) -> np.ndarray | None:
        path, d = self.folder / name, self.summary.get("parameters")
        if not path.is_file() or not isinstance(d, int) or d < 1:
            return None
        models = path.stat().st_size // (np.dtype(dtype).itemsize * d)
        return np.memmap(path, dtype, "r", shape=(models, d)) if models else None

    @property
    def per_sample(self) -> bool:
        """Whether the bound is that of a sample's gradient, not of a client's update."""
        return self.experiment is not None and self.experiment.bounding.sample_bound is not None

    @property
    def sends_updates(self) -> bool:
        """Whether what clients would send unbounded are their updates, of which the mean is one."""
        if self.experiment is None or self.experiment.bounding.is_placeholder():
            return False
        return self.experiment.bounding.scales


@dataclass(frozen=True, eq=False)
class LabelledRun:
    """A run with its label on each axis. Runs with the same labels differ by their `seed`.
    `numbers`: what a table of results has of it; `home`: the directory of its study;
    `resampled_runs`: the run in its place by resample of the tuning seeds; None: it has not ended.
    """

    labels: Mapping[str, str]
    run: Run
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    home: Path | None = None
    resampled_runs: Mapping[Resample, "LabelledRun | None"] = field(default_factory=dict)

    def at(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Its labels on these axes, empty where it has none."""
        return tuple(self.labels.get(axis, "") for axis in axes)

    def number(self, name: str) -> float | None:
        """A number of the run, from the table of results if that has it."""
        value = float_or_none(self.numbers.get(name))
        return self.run.number(name) if value is None else value


def values_of(cases: Sequence[LabelledRun], name: str) -> SeedValues:
    """A number of these cases by seed, and by resample of the tuning seeds."""
    seeds = {place if case.seed is None else case.seed: case for place, case in enumerate(cases)}
    resamples = dict.fromkeys(key for case in seeds.values() for key in case.resampled_runs)
    return SeedValues(
        {seed: case.number(name) for seed, case in seeds.items()},
        {
            key: {
                seed: run.number(name) if (run := case.resampled_runs.get(key)) else None
                for seed, case in seeds.items()
            }
            for key in resamples
        },
    )


@dataclass(frozen=True, eq=False)
class Group:
    """The cases that one line stands for, seeds of one setting; `place` gives its look."""

    label: str
    place: int
    cases: Sequence[LabelledRun]

    @property
    def runs(self) -> list[Run]:
        return [case.run for case in self.cases]


@dataclass(frozen=True, eq=False)
class Panel:
    """What is drawn on one pair of axes: the cases with the same labels, which its title has in
    words. `place`: its row and column, where it has one.
    """

    title: str
    groups: Sequence[Group]
    place: tuple[int, int] | None = None

    @property
    def run(self) -> Run:
        """The first run of the first group."""
        return self.groups[0].runs[0]


def largest_epsilon(runs: Sequence[Run]) -> float | None:
    """The largest epsilon that holds, over the runs; None where one of them has none."""
    holds = [run.holds for run in runs]
    return max(guarantees[0].epsilon for guarantees in holds) if all(holds) else None


def stated_epsilons(runs: Sequence[Run]) -> dict[tuple[str, str], float]:
    """By accountant and kind the largest epsilon, over the runs, that each states first."""
    largest: dict[tuple[str, str], float] = {}
    for run in runs:
        run_epsilons = {(g.accountant, g.kind): g.epsilon for g in reversed(run.guarantees)}
        for name, epsilon in run_epsilons.items():
            largest[name] = max(epsilon, largest.get(name, epsilon))
    return largest


def labels_of(cases: Sequence[LabelledRun], axis: str) -> list[str]:
    """The labels of an axis, in the order in which they come."""
    return list(dict.fromkeys(case.labels[axis] for case in cases if axis in case.labels))


def sort_labels(
    keys: Iterable[tuple[str, ...]], cases: Sequence[LabelledRun], axes: Sequence[str]
) -> list[tuple[str, ...]]:
    """Each combination of labels once, in the order of the cases, the first axis the slowest."""
    places = [{name: at for at, name in enumerate(labels_of(cases, axis))} for axis in axes]
    return sorted(
        dict.fromkeys(keys),
        key=lambda key: [at.get(name, -1) for at, name in zip(places, key, strict=True)],
    )


def find_varying_axes(cases: Sequence[LabelledRun]) -> list[str]:
    """The axes that have more than one label here."""
    axes = dict.fromkeys(axis for case in cases for axis in case.labels)
    return [axis for axis in axes if len(labels_of(cases, axis)) > 1]


def arrange(
    cases: Sequence[LabelledRun], colour: str, facet: Sequence[str] = (), x: str = ""
) -> list[Panel]:
    """A panel for the labels of every axis that varies but `colour`, whose labels are its groups,
    and `x`, whose labels stand side by side in each panel. Runs are never averaged over anything
    but their seeds. `facet`: axes that make a grid, where two of them vary: the last one goes
    across, unless it has too many labels, and the others, with all further axes, go down.
    """
    axes = [axis for axis in find_varying_axes(cases) if axis not in (colour, x)]
    cases_by_labels = group_by(cases, lambda case: case.at(axes))
    places = _grid(cases_by_labels, cases, axes, [axis for axis in facet if axis in axes])
    colours = labels_of(cases, colour)
    panels = []
    for labels, panel_cases in cases_by_labels.items():
        cases_by_colour = group_by(panel_cases, lambda case: case.labels.get(colour, ""))
        groups = [
            Group(label, colours.index(label) if label in colours else 0, group_cases)
            for label, group_cases in cases_by_colour.items()
        ]
        title = join_labels(dict(zip(axes, labels, strict=True)))
        panels.append(Panel(title, groups, places.get(labels)))
    if len(panels) == 4 and not places:
        return [replace(panel, place=divmod(place, 2)) for place, panel in enumerate(panels)]
    return panels


def _grid(
    keys: Iterable[tuple[str, ...]],
    cases: Sequence[LabelledRun],
    axes: Sequence[str],
    facet: Sequence[str],
) -> dict[tuple[str, ...], tuple[int, int]]:
    """The row and column of each key, where two facets vary and the last has few labels."""
    if len(facet) < 2:
        return {}
    last = axes.index(facet[-1])
    columns = [*dict.fromkeys(key[last] for key in keys)]
    if len(columns) > MAX_GRID_COLUMNS:
        return {}
    row_axes = [*facet[:-1], *(axis for axis in axes if axis not in facet)]
    row_keys = {key: tuple(key[axes.index(axis)] for axis in row_axes) for key in keys}
    rows = sort_labels(row_keys.values(), cases, row_axes)
    return {key: (rows.index(row_keys[key]), columns.index(key[last])) for key in keys}


def json_of(text: Any) -> dict[str, Any]:
    """The mapping in a JSON text; empty for none."""
    try:
        value = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
