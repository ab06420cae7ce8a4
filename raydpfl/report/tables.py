"""A table in Markdown and CSV, and its cells for a page.

>>> share = Quantity("accuracy", "accuracy", percent=True)
>>> table = Table("means", "Means", "Of a run.", [{"arm": "A|B", share: 0.5}])
>>> print(markdown(table).strip())
**Means.** Of a run.
<BLANKLINE>
| arm | accuracy |
| :-- | --: |
| A\\|B | 50.00 % |
>>> print(csv_of(table).strip())
arm,accuracy
A|B,0.5
"""

import csv
import html
import io
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raydpfl.report.labels import Quantity, axis, float_or_none, format_mean, number
from raydpfl.report.statistics import SeedSpread

LONG = 28  # characters from which a cell is a text, or a word may be broken
Head = str | Quantity  # of a column: words, or a quantity, whose label it then has
Row = dict[Any, Any]  # the cells of a row, by the `Head` of their columns


@dataclass(frozen=True)
class PrintedCell:
    """A value with its own text in print. `value` is what CSV has."""

    value: Any
    text: str
    strong: bool = False

    @property
    def numeric(self) -> bool:
        return isinstance(self.value, (int, float)) and not isinstance(self.value, bool)

    def classes(self, numeric: bool) -> str:
        """The CSS classes of the cell, in a column that has numbers or none."""
        long = len(self.text) > LONG
        unbroken = any(len(word) > LONG for word in self.text.split())
        kinds = {"number": numeric and not long, "text": long, "unbroken": unbroken}
        return " ".join(kind for kind, holds in kinds.items() if holds)


def mean_cell(spread: SeedSpread, percent: bool, level: float | None = None) -> PrintedCell | None:
    """A mean with half of the interval of a repetition in print, and the mean as the value; None
    for no number. `level`: of a difference, whose own interval it has, at this level; its
    percentage points have no unit.
    """
    if not spread.count:
        return None
    if level is None:
        return PrintedCell(spread.mean, format_mean(spread.mean, spread.repetition(), percent))
    text = format_mean(spread.mean, spread.half_width(level), percent).removesuffix(" %")
    return PrintedCell(spread.mean, f"{'+' if spread.mean > 0 else ''}{text}")


def number_cells(values: Mapping[str, Any], percent: bool) -> Row:
    """Numbers by the heads of their columns, None for what is none."""
    return {Quantity(head, head, percent=percent): float_or_none(v) for head, v in values.items()}


def axes_row(axes: Sequence[str], labels: Sequence[str]) -> Row:
    """Labels, a column for each axis."""
    heads = [Quantity(name, axis(name)) for name in axes]
    return dict(zip(heads, labels, strict=True))


@dataclass(frozen=True)
class Table:
    """Rows, each a mapping of the heads of its columns to values. `name`: of its files; `most`: how
    many rows a page shows, all being in the files; `unit`: that of the numbers in CSV, where they
    keep all their digits, which then has it as a column of its own.
    """

    name: str
    title: str
    caption: str
    rows: Sequence[Row]
    most: int = 60
    unit: str = ""

    @cached_property
    def columns(self) -> list[Head]:
        return [*dict.fromkeys(head for row in self.rows for head in row)]

    @property
    def heads(self) -> list[str]:
        return [head.label if isinstance(head, Quantity) else head for head in self.columns]

    @property
    def head_cells(self) -> list[PrintedCell]:
        return [PrintedCell(head, head) for head in self.heads]

    @cached_property
    def cells(self) -> list[list[PrintedCell]]:
        return [[_cell(row.get(head), head) for head in self.columns] for row in self.rows]

    @cached_property
    def numeric(self) -> list[bool]:
        """Of each column, whether it has a number."""
        columns = zip(*self.cells, strict=True)
        return [any(cell.numeric for cell in cells) for cells in columns]


def _cell(value: Any, head: Head) -> PrintedCell:
    if isinstance(value, PrintedCell):
        return value
    return PrintedCell(value, number(value, isinstance(head, Quantity) and head.percent))


def markdown(table: Table) -> str:
    """The table as Markdown has it, under its title and caption; text is never HTML or a link."""
    lines = [
        map(_escape, table.heads),
        ("--:" if numeric else ":--" for numeric in table.numeric),
        *(tuple(_escape(cell.text) for cell in row) for row in table.cells),
    ]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{_escape(table.title)}.** {_escape(table.caption)}\n\n{rows}\n"


def _escape(text: str) -> str:
    plain = html.escape(text.replace("\\", "\\\\"), quote=False)
    return " ".join(plain.replace("|", "\\|").replace("](", "]\\(").split())


def csv_of(table: Table) -> str:
    """The table as CSV, an empty field for none. No field is a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    unit = [table.unit] if table.unit else []
    writer.writerow(map(_csv_field, [*table.heads, *(["unit"] if unit else [])]))
    for row in table.cells:
        writer.writerow(map(_csv_field, [*(cell.value for cell in row), *unit]))
    return out.getvalue()


def _csv_field(value: Any) -> str:
    """A value as a CSV field has it. Text that a spreadsheet would take for a formula is put behind
    an apostrophe, as OWASP's "CSV Injection" asks, and is one line: a carriage return, which the
    writer does not quote, would begin a row. Numbers stay as they are.
    """
    if value is None or value != value:
        return ""
    text = " ".join(str(value).splitlines())
    # the first character in its usual form: some spreadsheets take the wide ones for the same
    first_character = unicodedata.normalize("NFKC", text.lstrip()[:1])
    if first_character not in tuple("=+-@") and not text.startswith("\t"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
