"""What the directory of a run holds, as the report reads it: nothing of it is computed anew, and no
data set is needed.

A file that is not there is an empty table; one that cannot be read is that too, and `flaws` says
why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.privacy import RIGOROUS, Guarantee, column
from raydpfl.report.labels import axis as axis_words
from raydpfl.report.labels import quantity
from raydpfl.storage.files import read_json
from raydpfl.storage.tables import read_log

Columns = Mapping[str, np.ndarray]
BARE = ("none", "true", "false", "auto")  # labels that need their axis, as numbers do
ACROSS = 4  # panels beside one another, at most


def read_columns(path: Path, flaws: list[str]) -> dict[str, np.ndarray]:
    """The columns of a Parquet file, one array each, nulls as NaN; none where there is no file.

    Args:
        path: of the file.
        flaws: is told, in words, of a file that cannot be read.
    """
    if not path.is_file():
        return {}
    try:
        return columns_of(pq.read_table(path))
    except (OSError, pa.ArrowException) as error:
        flaws.append(f"{path.name} cannot be read ({' '.join(str(error).split())[:120]})")
        return {}


def columns_of(table: pa.Table) -> dict[str, np.ndarray]:
    """Numbers as float64 [n] with NaN for null, all else as objects."""
    columns = {}
    for name in table.column_names:
        values = table[name]
        if pa.types.is_floating(values.type) or pa.types.is_integer(values.type):
            columns[name] = _floats(values)
        else:
            columns[name] = np.array([*values.to_pylist(), None], dtype=object)[:-1]
    return columns


def _floats(values: pa.ChunkedArray) -> np.ndarray:
    filled = values.cast(pa.float64()).fill_null(math.nan)
    return np.asarray(filled.combine_chunks().to_numpy(zero_copy_only=False), np.float64)


def some(values: np.ndarray | None) -> bool:
    """Whether there is a finite number, or a word, among these values."""
    if values is None or not len(values):
        return False
    return bool(values.dtype == object or np.isfinite(values).any())


@dataclass(eq=False)
class Run:
    """The directory of a run. `name`: what the report calls it."""

    folder: Path
    name: str
    flaws: list[str] = field(default_factory=list)

    def table(self, name: str) -> Columns:
        """The columns of `name`.parquet (of rounds, if that is missing, those of its log)."""
        if name not in self._tables:
            columns = read_columns(self.folder / f"{name}.parquet", self.flaws)
            if name == "rounds" and not columns:
                log = read_log(self.folder, name)
                columns = columns_of(log) if log is not None else {}
            self._tables[name] = columns
        return self._tables[name]

    @cached_property
    def _tables(self) -> dict[str, dict[str, np.ndarray]]:
        return {}

    def has(self, table: str, names: Sequence[str]) -> bool:
        """Whether a table has all these columns, with a number in each."""
        if table == "trajectory":
            return self.path is not None
        if table == "rounds":
            return all(some(self.series(name)) for name in names)
        columns = self.table(table)
        return all(some(columns.get(name)) for name in names)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json; empty while the run goes on."""
        path = self.folder / "summary.json"
        if not path.exists():
            return {}
        try:
            summary = read_json(path)
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
        """The experiment, its own members unread; None for a config of another version."""
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

    def kind_of(self, name: str) -> str:
        """What the epsilons of a column are, in print."""
        return "rigorous" if name in RIGOROUS else "formula"

    @property
    def holding(self) -> str | None:
        """The column of the epsilon that holds; None where none does. Of a run that has not ended,
        that of the rigorous accountant with the smallest.
        """
        if self.summary:
            return column(self.holds[0].accountant) if self.holds else None
        last = {name: self.table("rounds")[name] for name in self.epsilons if name in RIGOROUS}
        epsilons = {name: values[-1] for name, values in last.items() if len(values)}
        return min(epsilons, key=lambda name: epsilons[name], default=None)

    def series(self, name: str) -> np.ndarray | None:
        """A column of the rounds table, float64 [T]; besides those it has: `round` counted from 1,
        `seconds` since the start, and `epsilon`, the one that holds.
        """
        rounds = self.table("rounds")
        if name == "epsilon":
            name = self.holding or name
        values = rounds.get(name)
        if values is None or values.dtype == object:
            return None
        if name == "round":
            return values + 1
        return np.cumsum(values) if name == "seconds" else values

    def number(self, name: str) -> float | None:
        """A number of the summary, by its name (of one within a mapping, with a dot); `best_` and
        a column of which more is better, or less: the best of all rounds.
        """
        value: Any = self.summary
        for part in name.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        column = name.removeprefix("best_")
        better = quantity(column).better
        values = self.series(column) if name != column else None
        if not better or values is None or not some(values):
            return None
        return float(np.nanmax(values) if better > 0 else np.nanmin(values))

    @cached_property
    def path(self) -> np.ndarray | None:
        """The models of trajectory.bin, float32 [T + 1, d], mapped; None where there are none."""
        path = self.folder / "trajectory.bin"
        d = self.summary.get("parameters")
        if not path.is_file() or not isinstance(d, int) or d < 1:
            return None
        models = path.stat().st_size // (4 * d)
        return np.memmap(path, "<f4", "r", shape=(models, d)) if models else None

    @cached_property
    def optimum(self) -> np.ndarray | None:
        """The best model there is, float64 [d], from optimum.bin; None where it is not known."""
        path = self.folder / "optimum.bin"
        d = self.summary.get("parameters")
        if not path.is_file() or not isinstance(d, int) or path.stat().st_size != 8 * d:
            return None
        return np.fromfile(path, "<f8")

    @property
    def per_sample(self) -> bool:
        """Whether the bound is that of a sample's gradient, not of a client's update."""
        return self.experiment is not None and self.experiment.bounding.sample_bound is not None

    @property
    def sends_updates(self) -> bool:
        """Whether what clients would send unbounded are their updates, of which the mean is one."""
        return self.experiment is not None and self.experiment.bounding.sends_updates


@dataclass(frozen=True, eq=False)
class LabelledRun:
    """A run with what tells it from others on a page: the label of each axis. Runs with the same
    labels differ by their `seed`. `numbers` are what a table of results has of it, `home` is the
    directory of the study that it is part of.
    """

    labels: Mapping[str, str]
    run: Run
    numbers: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    home: Path | None = None

    def number(self, name: str) -> float | None:
        """A number of the run, from the table of results if that has it."""
        value = self.numbers.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value:
            return float(value)
        return self.run.number(name)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs that one line stands for, seeds of one setting; `place` gives its look."""

    label: str
    place: int
    runs: Sequence[Run]


@dataclass(frozen=True, eq=False)
class Panel:
    """What is drawn on one pair of axes. `place`: its row and column, where it has one."""

    title: str
    groups: Sequence[Group]
    place: tuple[int, int] | None = None

    @property
    def run(self) -> Run:
        """The first run of the first group."""
        return self.groups[0].runs[0]


def labels_of(cases: Sequence[LabelledRun], axis: str) -> list[str]:
    """The labels of an axis, in the order in which they come."""
    return list(dict.fromkeys(case.labels[axis] for case in cases if axis in case.labels))


def in_order(
    keys: Iterable[tuple[str, ...]], cases: Sequence[LabelledRun], axes: Sequence[str]
) -> list[tuple[str, ...]]:
    """Labels on these axes, each combination once, in the order of the labels of the cases: the
    first axis is the slowest.
    """
    labels = [labels_of(cases, axis) for axis in axes]
    places = [{name: place for place, name in enumerate(names)} for names in labels]
    return sorted(
        dict.fromkeys(keys),
        key=lambda key: [at.get(name, -1) for at, name in zip(places, key, strict=True)],
    )


def varying(cases: Sequence[LabelledRun]) -> list[str]:
    """The axes that have more than one label here."""
    axes = dict.fromkeys(axis for case in cases for axis in case.labels)
    return [axis for axis in axes if len(labels_of(cases, axis)) > 1]


@dataclass(frozen=True)
class Facet:
    """Cases with the same labels: these in words, empty for none, and their place in a grid."""

    title: str
    cases: Sequence[LabelledRun]
    place: tuple[int, int] | None = None


def facets(
    cases: Sequence[LabelledRun], apart: Sequence[str], named: Sequence[str] = ()
) -> list[Facet]:
    """The cases by the labels of all axes that vary.

    Args:
        cases: All of them.
        apart: Axes that are left out.
        named: Axes that make a grid, where two of them vary: the last one goes across.
    """
    axes = [axis for axis in varying(cases) if axis not in apart]
    groups: dict[tuple[str, ...], list[LabelledRun]] = {}
    for case in cases:
        groups.setdefault(tuple(case.labels.get(axis, "") for axis in axes), []).append(case)
    places = _grid([*groups], axes, [axis for axis in named if axis in axes])
    return [
        Facet(_title(axes, labels), inside, places.get(labels)) for labels, inside in groups.items()
    ]


def _title(axes: Sequence[str], labels: Sequence[str]) -> str:
    pairs = zip(axes, labels, strict=True)
    return ", ".join(named(axis, label) for axis, label in pairs if label)


def _grid(
    found: Sequence[tuple[str, ...]], axes: Sequence[str], named: Sequence[str]
) -> dict[tuple[str, ...], tuple[int, int]]:
    """Row and column of each combination of labels; none where fewer than two axes are named, or
    the last of them has too many labels.
    """
    if len(named) < 2:
        return {}
    across = axes.index(named[-1])
    columns = list(dict.fromkeys(labels[across] for labels in found))
    if len(columns) > ACROSS:
        return {}
    order = [axes.index(axis) for axis in named[:-1]]
    order += [place for place in range(len(axes)) if place not in (across, *order)]
    sequence = [list(dict.fromkeys(labels[place] for labels in found)) for place in order]
    keys = {labels: tuple(labels[place] for place in order) for labels in found}
    rows = sorted(
        {*keys.values()},
        key=lambda key: [labels.index(name) for labels, name in zip(sequence, key, strict=True)],
    )
    return {labels: (rows.index(keys[labels]), columns.index(labels[across])) for labels in found}


def named(axis: str, label: str) -> str:
    """A label that says by itself what it is of, or with its axis."""
    try:
        float(label)
    except ValueError:
        if axis == "accounting":
            return f"{label} accounting"
        if label not in BARE:
            return label
    return f"{axis_words(axis)} {label}"


def arrange(cases: Sequence[LabelledRun], colour: str, facet: Sequence[str] = ()) -> list[Panel]:
    """A panel for the labels of every axis that varies but `colour`, whose labels are its groups.

    Runs are never averaged over anything but their seeds. `facet`: the axes of a grid, see
    `facets`.
    """
    places = {label: place for place, label in enumerate(labels_of(cases, colour))}
    arranged = []
    for facet_cases in facets(cases, (colour,), facet):
        runs: dict[str, list[Run]] = {}
        for case in facet_cases.cases:
            runs.setdefault(case.labels.get(colour, ""), []).append(case.run)
        groups = [Group(name, places.get(name, 0), inside) for name, inside in runs.items()]
        arranged.append(Panel(facet_cases.title, groups, facet_cases.place))
    return arranged


def json_of(text: Any) -> dict[str, Any]:
    """The mapping in a JSON text; empty for none."""
    try:
        value = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
