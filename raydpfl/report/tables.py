"""A table in Markdown and CSV, and its cells for a page.

>>> columns = [Column("arm", ["A|B"]), Column("accuracy", [0.5], percent=True)]
>>> table = Table("means", "Means", "Of a run.", columns)
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

from __future__ import annotations

import csv
import html
import io
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.report.labels import number, quantity, with_std
from raydpfl.report.statistics import SeedSpread

LONG = 28  # characters from which a cell is a text, or a word may be broken


@dataclass(frozen=True)
class PrintedCell:
    """A value with its own text in print. `value` is what CSV has."""

    value: Any
    text: str
    strong: bool = False


def mean_cell(spread: SeedSpread, percent: bool, sign: bool = False) -> PrintedCell | None:
    """A mean with its standard deviation in print, and the mean as the value; None for no number.
    `sign`: of a difference, whose percentage points have no unit.
    """
    if not spread.count:
        return None
    text = with_std(spread.mean, spread.std, percent)
    if sign:
        text = f"{'+' if spread.mean > 0 else ''}{text.removesuffix(' %')}"
    return PrintedCell(spread.mean, text)


@dataclass(frozen=True)
class Column:
    """The values of a column under its `head`; `percent`: shares, which print shows in percent."""

    head: str
    values: Sequence[Any]
    percent: bool = False

    @classmethod
    def of(cls, name: str, values: Sequence[Any]) -> Column:
        """A column of the quantity `name`, under its label."""
        measured = quantity(name)
        return cls(measured.label, values, measured.percent)

    @property
    def numeric(self) -> bool:
        """Whether it has a number."""
        return any(
            isinstance(value, (int, float)) and not isinstance(value, bool)
            for value in map(_value, self.values)
        )

    @property
    def empty(self) -> bool:
        """Whether no cell of it has anything."""
        return all(value in (None, "") for value in self.values)

    @property
    def texts(self) -> list[str]:
        """The values in print."""
        return [
            value.text if isinstance(value, PrintedCell) else number(value, self.percent)
            for value in self.values
        ]


@dataclass(frozen=True)
class Table:
    """Columns side by side. `name`: of its files; `most`: how many rows a page shows, all being in
    the files; `unit`: that of the numbers in CSV, where they keep all their digits, which then has
    it as a column of its own.
    """

    name: str
    title: str
    caption: str
    columns: Sequence[Column]
    most: int = 60
    unit: str = ""

    @property
    def head(self) -> list[str]:
        return [column.head for column in self.columns]

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        return [*zip(*(column.values for column in self.columns), strict=True)]

    @property
    def head_cells(self) -> list[tuple[str, str, bool]]:
        """The text of each cell of the head, its CSS classes, and whether it is strong."""
        return [
            (column.head, _classes(column.head, column.numeric), False) for column in self.columns
        ]

    @property
    def cells(self) -> list[tuple[tuple[str, str, bool], ...]]:
        """The cells of the rows that a page shows, as `head_cells`."""
        columns = []
        for column in self.columns:
            strong = [isinstance(value, PrintedCell) and value.strong for value in column.values]
            classes = [_classes(text, column.numeric) for text in column.texts]
            columns.append([*zip(column.texts, classes, strong, strict=True)][: self.most])
        return [*zip(*columns, strict=True)]


def columns_of(heads: Iterable[str], rows: Iterable[Sequence[Any]]) -> list[Column]:
    """Columns of rows, none of them in percent."""
    rows = [*rows]
    return [Column(head, [row[place] for row in rows]) for place, head in enumerate(heads)]


def _value(value: Any) -> Any:
    return value.value if isinstance(value, PrintedCell) else value


def _classes(text: str, numeric: bool) -> str:
    long = len(text) > LONG
    unbroken = any(len(word) > LONG for word in text.split())
    kinds = {"number": numeric and not long, "text": long, "unbroken": unbroken}
    return " ".join(kind for kind, holds in kinds.items() if holds)


def markdown(table: Table) -> str:
    """The table as Markdown has it, under its title and caption; text is never HTML or a link."""
    lines = [
        map(_escaped, table.head),
        ("--:" if column.numeric else ":--" for column in table.columns),
        *zip(*(map(_escaped, column.texts) for column in table.columns), strict=True),
    ]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{_escaped(table.title)}.** {_escaped(table.caption)}\n\n{rows}\n"


def _escaped(text: str) -> str:
    plain = html.escape(text.replace("\\", "\\\\"), quote=False)
    return " ".join(plain.replace("|", "\\|").replace("](", "]\\(").split())


def csv_of(table: Table) -> str:
    """The table as CSV, an empty field for none. No field is a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_inert, [*table.head, *(["unit"] if table.unit else [])]))
    for row in table.rows:
        writer.writerow(map(_inert, [*map(_value, row), *([table.unit] if table.unit else [])]))
    return out.getvalue()


def _inert(value: Any) -> str:
    """A value as a CSV field has it. Text that a spreadsheet would take for a formula is put behind
    an apostrophe, as OWASP's "CSV Injection" asks, and is one line: a carriage return, which the
    writer does not quote, would begin a row. Numbers stay as they are.
    """
    if value is None or value != value:
        return ""
    text = " ".join(str(value).splitlines())
    # the first character in its usual form: some spreadsheets take the wide ones for the same
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    if first not in tuple("=+-@") and not text.startswith("\t"):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text
