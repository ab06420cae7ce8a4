"""Numbers of the summaries of the runs, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from raydpfl.report.figures.base import Missing, Names, Piece, Shown, name_of
from raydpfl.report.labels import axis as in_words
from raydpfl.report.labels import quantity, with_std
from raydpfl.report.run_reader import Case, in_order, varying
from raydpfl.report.statistics import over_seeds
from raydpfl.report.tables import Cell, Table


class Values(Shown):
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

    def make(self, cases: Sequence[Case]) -> Sequence[Piece]:
        there = [*dict.fromkeys([*self.rows, *varying(cases)])]
        axes = [axis for axis in there if any(axis in case.labels for case in cases)]
        cells: dict[tuple[str, ...], list[Case]] = {}
        for case in cases:
            cells.setdefault(tuple(case.labels.get(axis, "") for axis in axes), []).append(case)
        rows = [
            [*labels, *(_cell(cells[labels], name) for name in self.of)]
            for labels in in_order(cells, cases, axes)
        ]
        shown = [quantity(name).label for name in self.of]
        title = self.title or "Values"
        if not any(cell is not None for row in rows for cell in row[len(axes) :]):
            return [Missing(title, f"needs {', '.join(self.of)} in the summaries of the runs")]
        caption = "Means and sample standard deviations over the seeds. From results.parquet."
        head = [*(in_words(axis) for axis in axes), *shown]
        return [Table(name_of("values", *self.of), title, caption, head, rows)]


def _cell(cases: Sequence[Case], name: str) -> Cell | None:
    values = {place: case.number(name) for place, case in enumerate(cases)}
    found = over_seeds(values)
    if not found.count:
        return None
    shown = with_std(found.mean, found.std, quantity(name).percent)
    return Cell(found.mean, shown)
