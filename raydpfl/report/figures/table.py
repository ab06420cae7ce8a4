"""A number of every cell of a study: means, differences, and what is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from raydpfl.config.overrides import at
from raydpfl.report.figures.base import Missing, Names, Piece, ReportItem, name_of
from raydpfl.report.labels import axis as in_words
from raydpfl.report.labels import quantity, unit_of
from raydpfl.report.published_numbers import PublishedTable
from raydpfl.report.run_reader import LabelledRun, as_number, grouped, in_order, labels_of, varying
from raydpfl.report.statistics import SeedSpread, over_seeds, paired
from raydpfl.report.tables import Column, PrintedCell, Table, columns_of, mean_cell

Labels = tuple[str, ...]  # of a row


class TableItem(ReportItem):
    """A table of the number `of` (a score of the last round, or any number of the summary), with
    `rows` and `columns` for axes; any other axis that varies is put to the rows.

    It gives the means with their standard deviations over the seeds; with `best`, those of the best
    round too; differences to the column `against` (by default the first), seed by seed; and all of
    it with a row for each cell, with what holds and what is printed. `published` names the table of
    printed numbers, `match` the axis of each of its columns (where labels do not say it by
    themselves), `where` what must stand in others of them, and `value` the column of the number.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"of": "test_accuracy", "rows": ["data"], "best": True},
    )
    axes_named: ClassVar[tuple[str, ...]] = ("rows", "columns")

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

    def numbers(self) -> Sequence[str]:
        return (self.of,)

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        title = self.title or quantity(self.of).words.capitalize()
        grid = CellGrid(self, cases)
        if not grid.has(self.of):
            return [Missing(title, f"needs {self.of} of a finished run")]
        tables = [self._means(grid, title, self.of, "in the last round")]
        best = f"best_{self.of}"
        if self.best and grid.has(best):
            tables.append(self._means(grid, f"{title}, best round", best, "in the best round"))
        if len(grid.across) > 1 and any(case.seed is not None for case in cases):
            tables.append(self._differences(grid, title))
        return [*tables, self._cells(grid, title)]

    def _table(self, name: str, title: str, text: str, columns: Sequence[Column]) -> Table:
        return Table(name, title, text, columns, unit=unit_of(quantity(self.of)))

    def _means(self, grid: CellGrid, title: str, name: str, which: str) -> Table:
        percent = quantity(name).percent
        columns = grid.heads(grid.down)
        for across in grid.across:
            spreads = [grid.spread(name, (down, across)) for down in grid.down]
            columns.append(Column(across, [mean_cell(spread, percent) for spread in spreads]))
        text = f"Means and sample standard deviations over the seeds, {which}."
        if name.startswith("best_"):
            text += " It is chosen by what is shown, on the test set, which flatters."
        return self._table(name_of("table", name), title, f"{text} From results.parquet.", columns)

    def _differences(self, grid: CellGrid, title: str) -> Table:
        percent = quantity(self.of).percent
        columns = grid.heads(grid.down)
        for across in grid.across:
            if across != grid.base:
                gains = [grid.gain((down, across)) for down in grid.down]
                columns.append(
                    Column(across, [mean_cell(gain, percent, sign=True) for gain in gains])
                )
        text = (
            f"Differences to {grid.base} seed by seed, in the last round: mean and sample standard"
        )
        text += f" deviation over the seeds that both have{_points(percent)}. From results.parquet."
        name = name_of("differences", self.of)
        return self._table(name, f"{title}, against {grid.base}", text, columns)

    def _cells(self, grid: CellGrid, title: str) -> Table:
        percent = quantity(self.of).percent
        keys = [(down, across) for down in grid.down for across in grid.across]
        keys = [key for key in keys if key in grid.cases]
        spreads = [grid.spread(self.of, key) for key in keys]
        gains = [grid.gain(key) if key[1] != grid.base else over_seeds({}) for key in keys]
        printed = [grid.printed(key) for key in keys]
        columns = [
            *grid.heads([down for down, _ in keys]),
            Column(self.columns, [across for _, across in keys]),
            Column("seeds", [spread.count for spread in spreads]),
        ]
        optional = [
            Column("epsilon that holds", [grid.holds(key) for key in keys]),
            Column("printed", [ours for ours, _ in printed]),
            Column("printed for another task", [other for _, other in printed]),
        ]
        for mean, std, values in (
            (f"against {grid.base}", "std of the difference", gains),
            (
                "best round",
                "std of the best",
                [grid.spread(f"best_{self.of}", key) for key in keys],
            ),
            ("mean", "std", spreads),
        ):
            optional[:0] = [
                Column(mean, [as_number(spread.mean) for spread in values], percent),
                Column(std, [as_number(spread.std) for spread in values], percent),
            ]
        columns += [column for column in optional if not column.empty]
        text = f"All of it, a row for each cell; differences seed by seed{_points(percent)}."
        text += " From results.parquet."
        if self.published:
            text += f" Printed numbers are those of published/{self.published}; a number of another"
            text += " data set is not put beside ours."
        return self._table(name_of("cells", self.of), f"{title}, every cell", text, columns)


def _points(percent: bool) -> str:
    return ", in percentage points" if percent else ""


@dataclass(frozen=True)
class CellGrid:
    """The cases of a table; the key of a cell is the labels of its row and that of its column."""

    table: TableItem
    every: Sequence[LabelledRun]

    @cached_property
    def axes(self) -> list[str]:
        """The axes of the rows: those that are named and vary, and any other that does."""
        there = varying(self.every)
        named = [axis for axis in self.table.rows if axis in there]
        return [*named, *(column for column in there if column not in (*named, self.table.columns))]

    def heads(self, rows: Sequence[Labels]) -> list[Column]:
        """The columns of the labels of these rows."""
        return columns_of(map(in_words, self.axes), rows)

    @cached_property
    def cases(self) -> dict[tuple[Labels, str], list[LabelledRun]]:
        """The runs of each cell."""
        across = self.table.columns
        return grouped(self.every, lambda case: (case.at(self.axes), case.labels.get(across, "")))

    @cached_property
    def down(self) -> list[Labels]:
        return in_order((down for down, _ in self.cases), self.every, self.axes)

    @cached_property
    def across(self) -> list[str]:
        return labels_of(self.every, self.table.columns) or [""]

    @property
    def base(self) -> str:
        """The column that differences are to."""
        return self.table.against if self.table.against in self.across else self.across[0]

    def has(self, name: str) -> bool:
        """Whether any cell has this number."""
        return any(self.spread(name, key).count for key in self.cases)

    def values(self, name: str, key: tuple[Labels, str]) -> dict[int, float | None]:
        """A number of a cell, by seed."""
        return {
            place if case.seed is None else case.seed: case.number(name)
            for place, case in enumerate(self.cases.get(key, ()))
        }

    def spread(self, name: str, key: tuple[Labels, str]) -> SeedSpread:
        """A number of a cell over its seeds."""
        return over_seeds(self.values(name, key))

    def gain(self, key: tuple[Labels, str]) -> SeedSpread:
        """The difference of a cell to that of the base in its row, seed by seed."""
        of = self.table.of
        return paired(self.values(of, key), self.values(of, (key[0], self.base)))

    def holds(self, key: tuple[Labels, str]) -> float | None:
        """The largest epsilon that holds of the runs of a cell; None where one has none."""
        guarantees = [case.run.holds for case in self.cases[key]]
        return max(guarantee[0].epsilon for guarantee in guarantees) if all(guarantees) else None

    @cached_property
    def _published(self) -> PublishedTable | None:
        folder = self.every[0].home
        if not self.table.published or folder is None:
            return None
        try:
            return PublishedTable.read(folder / "published" / self.table.published)
        except (OSError, ValueError):
            return None

    def printed(self, key: tuple[Labels, str]) -> tuple[Any, str]:
        """What is printed for the task of a cell, and what for another one, in words."""
        if self._published is None:
            return None, ""
        table = self.table
        case = self.cases[key][0]
        axes = {axis: labels_of(self.every, axis) for axis in case.labels}
        columns = self._published.columns(axes, table.match)
        data = str(at(case.run.config, "data.kind"))
        number = self._published.number(case.labels, columns, data, table.where, table.value)
        if number is None:
            return None, ""
        percent = quantity(table.of).percent
        std = f" \N{PLUS-MINUS SIGN} {number.std}" if number.std else ""
        text = f"{number.text}{std}{' %' if percent else ''}"
        if number.other:
            return None, f"other task: {text} on {number.other}"
        value = float(number.text)
        return PrintedCell(round(value / 100, 6) if percent else value, text), ""
