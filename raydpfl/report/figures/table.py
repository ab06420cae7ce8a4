"""A number of every cell of a study: means, differences, and what is printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from raydpfl.experiment import at
from raydpfl.report.figures.base import Missing, Names, Piece, Shown, name_of
from raydpfl.report.labels import axis as in_words
from raydpfl.report.labels import quantity, unit_of, with_std
from raydpfl.report.published_numbers import Found, Printed
from raydpfl.report.run_reader import Case, in_order, labels_of, varying
from raydpfl.report.statistics import Spread, over_seeds, paired
from raydpfl.report.tables import Cell, Table

Seeds = dict[int, float | None]


class Tabled(Shown):
    """A table of the number `of` (a score of the last round, or any number of the summary), with
    `rows` and `columns` for axes; an axis that varies besides is put to the rows.

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
        yield from super().labels()
        if self.against:
            yield self.columns, self.against

    def numbers(self) -> Sequence[str]:
        return (self.of,)

    def make(self, cases: Sequence[Case]) -> Sequence[Piece]:
        title = self.title or quantity(self.of).words.capitalize()
        grid = Grid(self, cases)
        if not any(spread.count for spread in grid.spreads(self.of).values()):
            return [Missing(title, f"needs {self.of} of a finished run")]
        found = [self._means(grid, title, self.of, "in the last round")]
        best = f"best_{self.of}"
        if self.best and any(spread.count for spread in grid.spreads(best).values()):
            found.append(self._means(grid, f"{title}, best round", best, "in the best round"))
        if len(grid.across) > 1 and grid.seeds:
            found.append(self._differences(grid, title))
        return [*found, self._cells(grid, title)]

    def _means(self, grid: Grid, title: str, name: str, which: str) -> Table:
        spreads = grid.spreads(name)
        rows = []
        for down in grid.down:
            cells = [spreads.get((down, across)) for across in grid.across]
            rows.append([*down, *(_cell(each, quantity(name).percent) for each in cells)])
        text = f"Means and sample standard deviations over the seeds, {which}."
        if name.startswith("best_"):
            text += " It is chosen by what is shown, on the test set, which flatters."
        head = [*grid.heads, *grid.across]
        text += " From results.parquet."
        unit = unit_of(quantity(name))
        return Table(name_of("table", name), title, text, head, rows, unit=unit)

    def _differences(self, grid: Grid, title: str) -> Table:
        base = self.against if self.against in grid.across else grid.across[0]
        others = [across for across in grid.across if across != base]
        percent = quantity(self.of).percent
        rows = []
        for down in grid.down:
            against = grid.values(self.of).get((down, base), {})
            found = [paired(grid.values(self.of).get((down, each), {}), against) for each in others]
            rows.append([*down, *(_cell(each, percent, sign=True) for each in found)])
        text = f"Differences to {base} seed by seed, in the last round: mean and sample standard "
        text += f"deviation over the seeds that both have{_points(percent)}. From results.parquet."
        name = name_of("differences", self.of)
        head = [*grid.heads, *others]
        unit = unit_of(quantity(self.of))
        return Table(name, f"{title}, against {base}", text, head, rows, unit=unit)

    def _cells(self, grid: Grid, title: str) -> Table:
        best = f"best_{self.of}"
        percent = quantity(self.of).percent
        base = self.against if self.against in grid.across else grid.across[0]
        rows = []
        for down in grid.down:
            for across in grid.across:
                if (down, across) not in grid.cases:
                    continue
                spread = grid.spreads(self.of)[down, across]
                there = grid.spreads(best)[down, across]
                against = grid.values(self.of).get((down, base), {})
                gain = paired(grid.values(self.of)[down, across], against)
                row = [*down, across, spread.count, _none(spread.mean), _none(spread.std)]
                row += [_none(there.mean), _none(there.std)]
                row += [None, None] if across == base else [_none(gain.mean), _none(gain.std)]
                rows.append([*row, grid.holds(down, across), *grid.printed(down, across)])
        head = [*grid.heads, self.columns, "seeds", "mean", "std", "best round", "std of the best"]
        head += [f"against {base}", "std of the difference", "epsilon that holds"]
        head += ["printed", "printed for another task"]
        first = len(grid.heads) + 2
        percents = set(range(first, first + 6)) if percent else set()
        kept = [place for place in range(len(head)) if place < first or _known(rows, place)]
        text = f"All of it, a row for each cell; differences seed by seed{_points(percent)}."
        text += " From results.parquet."
        if self.published:
            text += f" Printed numbers are those of published/{self.published}; a number of another"
            text += " data set is not put beside ours."
        return Table(
            name_of("cells", self.of),
            f"{title}, every cell",
            text,
            [head[place] for place in kept],
            [[row[place] for place in kept] for row in rows],
            {kept.index(place) for place in percents if place in kept},
            unit=unit_of(quantity(self.of)),
        )


def _points(percent: bool) -> str:
    return ", in percentage points" if percent else ""


def _known(rows: Sequence[Sequence[Any]], place: int) -> bool:
    return any(row[place] not in (None, "") for row in rows)


def _none(value: float) -> float | None:
    return None if value != value else value


def _cell(spread: Spread | None, percent: bool, sign: bool = False) -> Cell | None:
    """Mean and standard deviation in print; the mean as the value."""
    if spread is None or not spread.count:
        return None
    shown = with_std(spread.mean, spread.std, percent)
    if sign:
        shown = shown.removesuffix(" %")
        shown = f"+{shown}" if spread.mean > 0 else shown
    return Cell(spread.mean, shown)


@dataclass(frozen=True)
class Grid:
    """The cases of a table by row and column."""

    table: Tabled
    every: Sequence[Case]

    @cached_property
    def axes(self) -> list[str]:
        """The axes of the rows: those that are named and vary, and any other that does."""
        there = varying(self.every)
        named = [axis for axis in self.table.rows if axis in there]
        return [*named, *(each for each in there if each not in (*named, self.table.columns))]

    @property
    def heads(self) -> list[str]:
        return [in_words(axis) for axis in self.axes]

    @cached_property
    def cases(self) -> dict[tuple[tuple[str, ...], str], list[Case]]:
        """The runs of each cell."""
        found: dict[tuple[tuple[str, ...], str], list[Case]] = {}
        for case in self.every:
            down = tuple(case.labels.get(axis, "") for axis in self.axes)
            found.setdefault((down, case.labels.get(self.table.columns, "")), []).append(case)
        return found

    @property
    def down(self) -> list[tuple[str, ...]]:
        return in_order((down for down, _ in self.cases), self.every, self.axes)

    @property
    def across(self) -> list[str]:
        return labels_of(self.every, self.table.columns) or [""]

    @property
    def seeds(self) -> bool:
        """Whether any cell has a run whose seed is known."""
        return any(case.seed is not None for case in self.every)

    def values(self, name: str) -> dict[tuple[tuple[str, ...], str], Seeds]:
        """A number of each cell, by seed."""
        return {
            key: {
                place if case.seed is None else case.seed: case.number(name)
                for place, case in enumerate(cases)
            }
            for key, cases in self.cases.items()
        }

    def spreads(self, name: str) -> dict[tuple[tuple[str, ...], str], Spread]:
        return {key: over_seeds(values) for key, values in self.values(name).items()}

    def holds(self, down: tuple[str, ...], across: str) -> float | None:
        """The largest epsilon that holds of the runs of a cell; None where one has none."""
        found = [case.run.holds for case in self.cases[down, across]]
        return max(each[0].epsilon for each in found) if all(found) else None

    @cached_property
    def _printed(self) -> Printed | None:
        folder = self.every[0].home
        if not self.table.published or folder is None:
            return None
        try:
            return Printed.read(folder / "published" / self.table.published)
        except (OSError, ValueError):
            return None

    def printed(self, down: tuple[str, ...], across: str) -> tuple[Any, str]:
        """What is printed for the task of a cell, and what for another one, in words."""
        found = self._found(down, across)
        if found is None:
            return None, ""
        percent = quantity(self.table.of).percent
        shown = f"{found.number} \N{PLUS-MINUS SIGN} {found.std}" if found.std else found.number
        shown += " %" if percent else ""
        if found.other:
            return None, f"other task: {shown} on {found.other}"
        value = float(found.number)
        return Cell(round(value / 100, 6) if percent else value, shown), ""

    def _found(self, down: tuple[str, ...], across: str) -> Found | None:
        if self._printed is None:
            return None
        table = self.table
        case = self.cases[down, across][0]
        axes = {axis: labels_of(self.every, axis) for axis in case.labels}
        columns = self._printed.columns(axes, table.match)
        data = str(at(case.run.config, "data.kind"))
        return self._printed.of(case.labels, columns, data, table.where, table.value)
