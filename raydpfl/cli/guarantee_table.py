"""Guarantees as a small table: a row for each observer, a column for each accountant."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table
from rich.text import Text

from raydpfl.privacy import Guarantee
from raydpfl.privacy.accountants import ACCOUNTANTS

Cells = Sequence[tuple[Guarantee, str]]


@dataclass
class Row:
    """What holds against one observer: `against` and `relation` in words, `cells` by column."""

    against: str
    relation: str
    cells: dict[str, tuple[Guarantee, str]] = field(default_factory=dict)


def against(one: Guarantee) -> str:
    """The observer, and what they know, in words."""
    return ", ".join(word for word in (one.observer.value, one.sampling.knows) if word)


def label(one: Guarantee) -> str:
    """The accountant, as a heading has it."""
    accountant = ACCOUNTANTS.get(one.accountant)
    return accountant.label if accountant and accountant.label else one.accountant


def by_observer(cells: Cells) -> list[Row]:
    """The rows, in the order of their first guarantees."""
    rows: list[Row] = []
    for one, text in cells:
        free = [row for row in rows if row.against == against(one) and label(one) not in row.cells]
        row = next((row for row in free if one.relation in (row.relation, "unstated")), None)
        if row is None:
            row = Row(against(one), one.relation)
            rows.append(row)
        row.cells[label(one)] = (one, text)
    return rows


def table(
    cells: Cells,
    title: str | None = None,
    main_guarantee: Guarantee | None = None,
    bold: Sequence[Guarantee] = (),
) -> Table:
    """A table whose numbers of all accountants fit in 80 columns.

    Args:
        cells: guarantees, each with its number in print.
        title: what stands above.
        main_guarantee: the one whose row has a `>` in front.
        bold: those whose numbers stand out.
    """
    rows = by_observer(cells)
    several = len({row.relation for row in rows}) > 1
    rich_table = plain(title)
    if main_guarantee:
        rich_table.add_column("", no_wrap=True)
    rich_table.add_column("against an observer of")
    if several:
        rich_table.add_column("relation", no_wrap=True)
    names = list(dict.fromkeys(label(one) for one, _ in cells))
    cell_rows = [[row.cells.get(name, (None, "")) for name in names] for row in rows]
    add_numbers(rich_table, names, [[text for _, text in cells] for cells in cell_rows])
    for row, numbers in zip(rows, cell_rows, strict=True):
        is_marked = main_guarantee in [one for one, _ in row.cells.values()]
        mark = [">" if is_marked else ""] if main_guarantee else []
        relation = [row.relation] if several else []
        number_texts = [Text(text, style="bold" if one in bold else "") for one, text in numbers]
        rich_table.add_row(*mark, row.against, *relation, *number_texts)
    return rich_table


def add_numbers(
    rich_table: Table, heads: Sequence[str], lines: Sequence[Sequence[str]], head_width: int = 15
) -> None:
    """Adds columns of numbers, which are never split or cut. Heads wrap to `head_width` letters, or
    to the longest number or word.
    """
    for place, head in enumerate(heads):
        widths = [len(text) for text in (*head.split(), *(line[place] for line in lines))]
        head_lines = textwrap.wrap(head, max([head_width, *widths]))
        width = max([*widths, *map(len, head_lines)])
        text = "\n".join(head_lines)
        rich_table.add_column(text, justify="right", no_wrap=True, min_width=width)


def plain(title: str | None = None) -> Table:
    """An empty table with narrow columns."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
