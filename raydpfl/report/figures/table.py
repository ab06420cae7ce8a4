"""Numbers of the cells of a study: means, differences, and what is printed."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from raydpfl.config.overrides import value_at
from raydpfl.report.figures.base import Missing, Names, Piece, ReportItem, name_of
from raydpfl.report.labels import count_text, numeric, quantity
from raydpfl.report.run_reader import (
    LabelledRun,
    find_varying_axes,
    group_by,
    labels_of,
    largest_epsilon,
    sort_labels,
    values_of,
)
from raydpfl.report.statistics import SeedSpread, SeedValues, total
from raydpfl.report.tables import PrintedCell, Row, Table, axes_row, mean_cell, number_cells

PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
REPETITION = "and half of the 95 % interval in which the mean of as many other seeds falls, tuning "
REPETITION += "included."
VALUES = ("accuracy", "std", "note", "source")  # columns of printed numbers that no label stands in
Key = tuple[tuple[str, ...], str]  # of a cell: the labels of its row, and that of its column


class TableItem(ReportItem):
    """A table of the number `of` (a score of the last round, or any number of the summary), with
    `rows` and `columns` for axes; any other axis that varies is put to the rows.

    It gives the means with the intervals in which those of a repetition fall; with `best`, those of
    the best round too; differences to the column `against` (by default the first), seed by seed,
    with their intervals, at a level that is corrected for the number of columns; and all of it with
    a row for each cell, with what holds and what is printed. `published` names the table of
    printed numbers, `match` the axis of each of its columns (where labels do not say it by
    themselves), `where` what must stand in others of them, and `value` the column of the number.
    """

    axis_fields: ClassVar[tuple[str, ...]] = ("rows", "columns")
    number_fields: ClassVar[tuple[str, ...]] = ("of",)

    kind: str = "table"
    of: str = "test_accuracy"
    rows: Names = ()
    columns: str = "arm"
    best: bool = False
    against: str = ""
    published: str = ""
    match: dict[str, str] = Field(default_factory=dict)
    where: dict[str, str] = Field(default_factory=dict)
    value: str = "accuracy"

    def labels(self) -> Iterable[tuple[str, str]]:
        against = [(self.columns, self.against)] if self.against else []
        return [*super().labels(), *against]

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        score = quantity(self.of)
        title = self.title or score.words.capitalize()
        grid = CellGrid(cases, self.rows, self.columns)
        if not grid.has(self.of):
            return [Missing(title, f"needs {self.of} of a finished run")]
        base = self.against if self.against in grid.across else grid.across[0]
        points = ", in percentage points" if score.percent else ""
        comparisons = len(grid.across) - 1
        level = 1 - 0.05 / max(comparisons, 1)
        interval_words = "half of the 95 % interval of the true mean, corrected for "
        interval_words += f"{count_text(comparisons, 'comparison')} a row."

        def table(name: str, title: str, text: str, rows: Sequence[Row], note: str = "") -> Table:
            caption = f"{text} From results.parquet.{note}"
            unit = "fraction" if score.percent else score.unit
            return Table(name, title, caption, rows, unit=unit)

        def means(name: str) -> list[Row]:
            return grid.rows(lambda key: mean_cell(grid.spread(name, key), score.percent))

        text = f"Means over the seeds, {REPETITION} In the "
        tables = [table(name_of("table", self.of), title, f"{text}last rounds.", means(self.of))]
        best = f"best_{self.of}"
        if self.best and grid.has(best):
            text += "best round. It is chosen by what is shown, on the test set, which flatters."
            tables.append(table(name_of("table", best), f"{title}, best round", text, means(best)))
        if comparisons and any(case.seed is not None for case in cases):
            text = f"Differences to {base} seed by seed, in the last rounds{points}: means over "
            text += f"the seeds that both have, and {interval_words}"
            rows = grid.rows(
                lambda key: mean_cell(grid.gain(self.of, key, base), score.percent, level),
                without=base,
            )
            name = name_of("differences", self.of)
            tables.append(table(name, f"{title}, against {base}", text, rows))
        text = "All of it, a row for each cell, with half of the interval of a repetition"
        text += f"; differences seed by seed{points}, with {interval_words}" if comparisons else "."
        note = ""
        if self.published:
            note = f" Printed numbers are those of published/{self.published}; a number of another"
            note += " data set is not put next to ours."
        cells = self._cells(grid, base, level)
        name = name_of("cells", self.of)
        return [*tables, table(name, f"{title}, every cell", text, cells, note)]

    def _cells(self, grid: CellGrid, base: str, level: float) -> list[Row]:
        percent = quantity(self.of).percent
        published_table = PublishedTable([])
        home = grid.cases[0].home
        if self.published and home is not None:
            with suppress(OSError, ValueError):
                published_table = PublishedTable.read(home / "published" / self.published)
        rows = []

        def columns(head: str, value: float, half: float) -> Row:
            return number_cells({head: value, f"{head} {PLUS_MINUS}": half}, percent)

        for key, cases in grid.cells.items():
            mean, top = grid.spread(self.of, key), grid.spread(f"best_{self.of}", key)
            gain = grid.gain(self.of, key, base) if key[1] != base else SeedValues({}).spread()
            printed_cell, other_task = self._printed_number(published_table, grid, cases[0])
            optional = {
                **columns("mean", mean.mean, mean.repetition()),
                **number_cells({"std": mean.std}, percent),
                **columns("best round", top.mean, top.repetition()),
                **columns(f"against {base}", gain.mean, gain.half_width(level)),
                "epsilon that holds": largest_epsilon([case.run for case in cases]),
                "printed": printed_cell,
                "printed for another task": other_task,
            }
            heads = axes_row(grid.axes, key[0])
            rows.append({**heads, self.columns: key[1], "seeds": mean.count, **optional})
        empty = {head for head in optional if all(row[head] in (None, "") for row in rows)}
        return [{head: row[head] for head in row if head not in empty} for row in rows]

    def _printed_number(
        self, published_table: PublishedTable, grid: CellGrid, case: LabelledRun
    ) -> tuple[PrintedCell | None, str]:
        """What is printed for the task of a cell, and what for another one, in words."""
        if not published_table.rows:
            return None, ""
        axes = {axis: labels_of(grid.cases, axis) for axis in case.labels}
        columns = published_table.columns(axes, self.match)
        data = str(value_at(case.run.config, "data.kind"))
        row = published_table.row(case.labels, columns, data, self.where, self.value)
        if row is None:
            return None, ""
        percent = quantity(self.of).percent
        std = f" {PLUS_MINUS} {row['std']}" if row.get("std") else ""
        text = f"{row[self.value]}{std}{' %' if percent else ''}"
        if not is_of_data(row, data):
            return None, f"other task: {text} on {row.get('dataset') or 'unknown data'}"
        value = float(row[self.value])
        return PrintedCell(round(value / 100, 6) if percent else value, text), ""


class CellGrid:
    """The cases of a table by cell: `axes` are those of the rows, first the ones that are named and
    vary; `down` has their labels, and `across` those of the columns, an empty one without an axis
    for them.
    """

    def __init__(self, cases: Sequence[LabelledRun], rows: Sequence[str], columns: str = ""):
        self.cases = cases
        varying_axes = find_varying_axes(cases)
        self.axes = [axis for axis in rows if axis in varying_axes]
        self.axes += [axis for axis in varying_axes if axis not in (*self.axes, columns)]
        self.across = labels_of(cases, columns) or [""]
        cells = group_by(cases, lambda case: (case.at(self.axes), case.labels.get(columns, "")))
        self.down = sort_labels((down for down, _ in cells), cases, self.axes)
        keys = [(down, across) for down in self.down for across in self.across]
        self.cells = {key: cells[key] for key in keys if key in cells}

    def rows(self, cell: Callable[[Key], PrintedCell | None], without: str = "") -> list[Row]:
        """A row for each label down, with what `cell` says of each column, but for one."""
        across = [label for label in self.across if label != without]
        return [
            {**axes_row(self.axes, down), **{label: cell((down, label)) for label in across}}
            for down in self.down
        ]

    def has(self, name: str) -> bool:
        return any(self.spread(name, key).count for key in self.cells)

    def values(self, name: str, key: Key) -> SeedValues:
        return values_of(self.cells.get(key, ()), name)

    def spread(self, name: str, key: Key) -> SeedSpread:
        return self.values(name, key).spread()

    def gain(self, name: str, key: Key, base: str) -> SeedSpread:
        """The difference of a cell to that of a column in its row, seed by seed."""
        against = self.values(name, (key[0], base))
        return total([(1, self.values(name, key)), (-1, against)]).spread()


class Values(ReportItem):
    """A column for each of the numbers `of` (one of a mapping with a dot: `stationary.final_x`), a
    row for each cell: `rows` are the axes that come first, of those that vary.
    """

    axis_fields: ClassVar[tuple[str, ...]] = ("rows",)
    number_fields: ClassVar[tuple[str, ...]] = ("of",)

    kind: str = "values"
    of: Names = ("test_loss",)
    rows: Names = ()

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        title = self.title or "Values"
        grid = CellGrid(cases, self.rows)
        if not any(map(grid.has, self.of)):
            return [Missing(title, f"needs {', '.join(self.of)} in the summaries of the runs")]
        rows: list[Row] = []
        for key in grid.cells:
            row = axes_row(grid.axes, key[0])
            for name in self.of:
                row[quantity(name)] = mean_cell(grid.spread(name, key), quantity(name).percent)
            rows.append(row)
        caption = f"Means over the seeds, {REPETITION} From results.parquet."
        return [Table(name_of("values", *self.of), title, caption, rows)]


@dataclass(frozen=True)
class PublishedTable:
    """The rows of a table of printed numbers, by column. A column that says what a number is of is
    an axis of the study if it has its name, or shares labels with it; a study may say so itself.

    >>> printed = PublishedTable([{"algorithm": "dpnfl", "dataset": "mnist", "accuracy": "80.59"}])
    >>> columns = printed.columns({"arm": ["DPNFL", "DPFedAvg"]}, {})
    >>> columns, printed.row({"arm": "DPNFL"}, columns, "mnist", {})["accuracy"]
    ({'algorithm': 'arm'}, '80.59')
    """

    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, path: Path) -> PublishedTable:
        """The table in a CSV file. Raises OSError, ValueError."""
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            return cls([{name: text or "" for name, text in row.items()} for row in rows])

    def columns(
        self, axes: Mapping[str, Sequence[str]], stated_axes: Mapping[str, str]
    ) -> dict[str, str]:
        """The axis of each column: that of `stated_axes`, or of `axes` the one with its labels."""
        columns = dict(stated_axes)
        for name in self.rows[0] if self.rows else ():
            if name in columns or name in VALUES:
                continue
            labels = {normalize(row[name]) for row in self.rows} - {""}
            free_axes = [axis for axis in axes if axis not in columns.values()]
            matches = [axis for axis in free_axes if labels & {*map(normalize, axes[axis])}]
            if matches:
                columns[name] = matches[0]
        return columns

    def row(
        self,
        labels: Mapping[str, str],
        columns: Mapping[str, str],
        data: str,
        conditions: Mapping[str, str],
        value: str = "accuracy",
    ) -> Mapping[str, str] | None:
        """The row with a number in the column `value` for these labels by axis, of the same data
        set if there is one; None where there is none, or several. `columns`: the axis of each
        column of labels; `data`: the kind of data that was trained on; `conditions`: further
        columns and what must stand in them.
        """

        def fits(row: Mapping[str, str]) -> bool:
            text = {name: normalize(row.get(name, "")) for name in (*conditions, *columns)}
            # where no label is printed, it is all of them
            return all(text[k] == normalize(v) for k, v in conditions.items()) and all(
                axis in labels and text[name] in ("", normalize(labels[axis]))
                for name, axis in columns.items()
            )

        rows = [row for row in self.rows if numeric([row.get(value) or "none"]) and fits(row)]
        rows = [row for row in rows if is_of_data(row, data)] or rows
        return rows[0] if len(rows) == 1 else None


def is_of_data(row: Mapping[str, str], data: str) -> bool:
    """Whether a printed number is of this kind of data, or of features of it.

    >>> is_of_data({"dataset": "mnist"}, "fashion_mnist_mini")
    False
    """
    return f"{row.get('dataset', '')}_".startswith(f"{data}_")


def normalize(label: str) -> str:
    """A label without case and punctuation, a number as itself.

    >>> [normalize(label) for label in ("DP-FedAvg", "power_law", "0.30", "1-1")]
    ['dpfedavg', 'powerlaw', '0.3', '11']
    """
    try:
        return f"{float(label):g}"
    except ValueError:
        return "".join(character for character in label.lower() if character.isalnum())
