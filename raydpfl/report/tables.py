"""A table in Markdown, CSV and HTML.

>>> table = Table("means", "Means", "Of a run.", ("arm", "accuracy"), [["A|B", 0.5]], {1})
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
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from raydpfl.report.labels import number

LONG = 28  # characters from which a cell is a text, or a word may be broken


@dataclass(frozen=True)
class Cell:
    """A value that is shown in words of its own. `value` is what CSV has."""

    value: Any
    shown: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows under a head. `name`: of its files; `percents`: the columns that hold shares, in print
    in percent; `most`: how many rows a page shows, all being in the files; `unit`: that of the
    numbers in CSV, where they keep all their digits, which then has it as a column of its own.
    """

    name: str
    title: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    percents: Collection[int] = ()
    most: int = 60
    unit: str = ""


def _shown(table: Table, place: int, value: Any) -> str:
    if isinstance(value, Cell):
        return value.shown
    return number(value, percent=place in table.percents)


def _right(table: Table) -> list[bool]:
    """Which columns hold numbers."""
    return [
        any(_is_number(_value(row[place])) for row in table.rows)
        for place in range(len(table.head))
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _value(value: Any) -> Any:
    return value.value if isinstance(value, Cell) else value


def markdown(table: Table) -> str:
    """The table as Markdown has it, under its title and caption; text is never HTML or a link."""
    lines = [[_escaped(name) for name in table.head]]
    lines.append(["--:" if right else ":--" for right in _right(table)])
    lines += [
        [_escaped(_shown(table, place, value)) for place, value in enumerate(row)]
        for row in table.rows
    ]
    rows = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"**{_escaped(table.title)}.** {_escaped(table.caption)}\n\n{rows}\n"


def _escaped(text: str) -> str:
    plain = html.escape(text.replace("\\", "\\\\"), quote=False)
    return " ".join(plain.replace("|", "\\|").replace("](", "]\\(").split())


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


def csv_of(table: Table) -> str:
    """The table as CSV, an empty field for none. No field is a formula."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    unit = [table.unit] if table.unit else []
    writer.writerow([_inert(name) for name in [*table.head, *(["unit"] if unit else [])]])
    for row in table.rows:
        writer.writerow([_inert(_value(value)) for value in [*row, *unit]])
    return out.getvalue()


def html_of(table: Table) -> str:
    """The table in a box of its own, which scrolls where it is wider than the page."""
    right = _right(table)
    head = "".join(_cell("th", name, side) for name, side in zip(table.head, right, strict=True))
    body = []
    for row in table.rows[: table.most]:
        cells = []
        for place, value in enumerate(row):
            strong = isinstance(value, Cell) and value.strong
            cells.append(_cell("td", _shown(table, place, value), right[place], strong))
        body.append(f"<tr>{''.join(cells)}</tr>")
    rows = "\n".join(body)
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll" tabindex="0"><table>\n{inside}\n</table></div>'


def _cell(tag: str, text: str, right: bool, strong: bool = False) -> str:
    kinds = ["number"] if right and len(text) <= LONG else []
    if len(text) > LONG:
        kinds.append("text")
    if any(len(word) > LONG for word in text.split()):
        kinds.append("unbroken")
    given = f' class="{" ".join(kinds)}"' if kinds else ""
    inside = html.escape(text)
    return f"<{tag}{given}>{f'<strong>{inside}</strong>' if strong else inside}</{tag}>"
