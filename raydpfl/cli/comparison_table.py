"""Runs side by side on a terminal: one table of at most 80 columns, no word broken where there is
room, and what must be known of its numbers.
"""

from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raydpfl.cli.run_display import BY_DECLARATION, DECLARATION_NOTE
from raydpfl.report.labels import format_mean, number, quantity
from raydpfl.report.pages.comparison import EPSILON_NOTE, Comparison, SeedGroup

WIDTH = 80
ROWS = 40  # of a table on a terminal


def show(console: Console, comparison: Comparison) -> None:
    """Prints the table, best setting first, and what must be known of it."""
    console.print(table(comparison), width=min(WIDTH, console.width))
    for note in notes(comparison):
        console.print(note, markup=False, width=min(WIDTH, console.width))


def table(comparison: Comparison) -> Table:
    """A row for each setting: how it differs, the score in the last round and the best one
    (means and standard deviations over the seeds), the epsilon that holds, rounds and seconds.
    """
    accountants = sorted({name for setting in comparison.settings for name in setting.accountants})
    note = f" ({accountants[0]})" if len(accountants) == 1 else ""
    percent = quantity(comparison.metric).percent
    several = any(len(setting.runs) > 1 for setting in comparison.settings)
    rich_table = Table(box=None, pad_edge=False, header_style="bold")
    rich_table.add_column("setting", ratio=1, overflow="fold")
    names = ["seeds"] if several else []
    names += [quantity(comparison.metric).label, "best", f"epsilon{note}", "rounds", "seconds"]
    for name in names:
        rich_table.add_column(escape(name), justify="right", min_width=min(len(name), 8))
    for group in comparison.ranking()[:ROWS]:
        spread = group.spread(comparison.metric)
        best = group.spread(f"best_{comparison.metric}").mean
        cells = [group.label, *([str(len(group.runs))] if several else [])]
        cells += [format_mean(spread.mean, spread.std, percent), number(best, percent)]
        cells += [_epsilon(group, len(accountants) > 1)]
        cells += [number(group.spread(name).mean) for name in ("rounds", "seconds")]
        rich_table.add_row(*(escape(cell) for cell in cells))
    return rich_table


def notes(comparison: Comparison) -> Iterator[str]:
    """What must be known of the numbers."""
    settings = comparison.settings
    if len(settings) > ROWS:
        yield f"The best {ROWS} of {len(settings)} settings; the page has all."
    if any(len(setting.runs) > 1 for setting in settings):
        yield "Means and sample standard deviations over the seeds; of epsilons the largest."
    yield from comparison.epsilon_warnings
    if any(_is_declared(setting) for setting in settings if setting.epsilon is not None):
        yield DECLARATION_NOTE
    if any(setting.private for setting in settings):
        yield EPSILON_NOTE


def _epsilon(setting: SeedGroup, show_accountants: bool) -> str:
    """What holds, with its accountant where there are several."""
    if setting.epsilon is None:
        return "none holds" if setting.private else "none"
    accountant_note = f" ({', '.join(setting.accountants)})" if show_accountants else ""
    mark = BY_DECLARATION if _is_declared(setting) else ""
    return f"{number(setting.epsilon)}{mark}{accountant_note}"


def _is_declared(setting: SeedGroup) -> bool:
    """Whether an epsilon that holds relies on what a user-defined class declares."""
    return any(run.holds[0].declared for run in setting.runs if run.holds)
