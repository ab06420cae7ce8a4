"""Runs side by side on a terminal: one table of at most 80 columns, no word broken where there is
room, and what must be known of its numbers.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydpfl.report.labels import number, quantity, with_std
from raydpfl.report.pages.comparison import EACH_ALONE, Compared, SeedGroup

WIDTH = 80
ROWS = 40  # of a table on a terminal


def show(console: Console, compared: Compared) -> None:
    """Prints the table, best setting first, and what must be known of it."""
    console.print(table(compared), width=min(WIDTH, console.width))
    for note in notes(compared):
        console.print(note, markup=False, width=min(WIDTH, console.width))


def table(compared: Compared) -> Table:
    """A row for each setting: how it differs, the score in the last round and the best one
    (means and standard deviations over the seeds), the epsilon that holds, rounds and seconds.
    """
    accountants = sorted({name for setting in compared.settings for name in setting.accountants})
    of = f" ({accountants[0]})" if len(accountants) == 1 else ""
    percent = quantity(compared.metric).percent
    several = any(len(setting.runs) > 1 for setting in compared.settings)
    found = Table(box=None, pad_edge=False, header_style="bold")
    found.add_column("setting", ratio=1, overflow="fold")
    names = ["seeds"] if several else []
    names += [quantity(compared.metric).label, "best", f"epsilon{of}", "rounds", "seconds"]
    for name in names:
        found.add_column(escape(name), justify="right", min_width=min(len(name), 8))
    for each in compared.ranked()[:ROWS]:
        spread = each.spread(compared.metric)
        best = each.spread(f"best_{compared.metric}").mean
        cells = [each.label, *([str(len(each.runs))] if several else [])]
        cells += [with_std(spread.mean, spread.std, percent), number(best, percent)]
        cells += [_epsilon(each, len(accountants) > 1)]
        cells += [number(each.spread(name).mean) for name in ("rounds", "seconds")]
        found.add_row(*(escape(cell) for cell in cells))
    return found


def notes(compared: Compared) -> Iterator[str]:
    """What must be known of the numbers."""
    settings = compared.settings
    if len(settings) > ROWS:
        yield f"The best {ROWS} of {len(settings)} settings; the page has all."
    if any(len(setting.runs) > 1 for setting in settings):
        yield "Means and sample standard deviations over the seeds; of epsilons the largest."
    yield from compared.mixed
    if any(setting.private for setting in settings):
        yield EACH_ALONE


def _epsilon(setting: SeedGroup, named: bool) -> str:
    """What holds, with its accountant where there are several."""
    if setting.epsilon is None:
        return "none holds" if setting.private else "none"
    by = f" ({', '.join(setting.accountants)})" if named else ""
    return f"{number(setting.epsilon)}{by}"
