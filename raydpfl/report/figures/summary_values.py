"""Numbers of the summaries of the runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from raydpfl.report.figures.base import Missing, Names, Piece, ReportItem, name_of
from raydpfl.report.labels import axis as in_words
from raydpfl.report.labels import quantity
from raydpfl.report.run_reader import LabelledRun, grouped, in_order, varying
from raydpfl.report.statistics import over_seeds
from raydpfl.report.tables import Column, Table, columns_of, mean_cell


class Values(ReportItem):
    """A column for each of the numbers `of` (one of a mapping with a dot: `stationary.final_x`), a
    row for each cell: `rows` are the axes that come first.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"of": ["test_loss", "seconds"]},)
    axes_named: ClassVar[tuple[str, ...]] = ("rows",)

    kind: str = "values"
    of: Names = ("test_loss",)
    rows: Names = ()

    def numbers(self) -> Sequence[str]:
        return self.of

    def make(self, cases: Sequence[LabelledRun]) -> Sequence[Piece]:
        axes = [*dict.fromkeys([*self.rows, *varying(cases)])]
        axes = [axis for axis in axes if any(axis in case.labels for case in cases)]
        cells = grouped(cases, lambda case: case.at(axes))
        rows = in_order(cells, cases, axes)
        columns = []
        for name in self.of:
            seeds = [{at: case.number(name) for at, case in enumerate(cells[row])} for row in rows]
            means = [mean_cell(over_seeds(numbers), quantity(name).percent) for numbers in seeds]
            columns.append(Column(quantity(name).label, means))
        title = self.title or "Values"
        if all(column.empty for column in columns):
            return [Missing(title, f"needs {', '.join(self.of)} in the summaries of the runs")]
        caption = "Means and sample standard deviations over the seeds. From results.parquet."
        columns = [*columns_of(map(in_words, axes), rows), *columns]
        return [Table(name_of("values", *self.of), title, caption, columns)]
