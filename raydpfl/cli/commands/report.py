"""Commands of what ran: report and compare."""

from __future__ import annotations

from typing import Annotated

from rich.console import Console

from raydpfl import storage
from raydpfl.cli.experiment_reader import redirect_errors
from raydpfl.cli.options import argument, directory, option

REPORTED = "The directory of a run, a sweep, an audit or a study; or several, as for compare."
WRITTEN = "Where the report goes. Default: DIR/report; of several, a new ./report-NAMES."
PRINTED = "Figures for 1 column of a paper (3.5 in) or 2 (7.16 in), text of 8 pt."


def report(
    directories: Annotated[list[str], argument(REPORTED, "DIR")],
    out: Annotated[str | None, directory(WRITTEN)] = None,
    columns: Annotated[int | None, option(PRINTED)] = None,
) -> None:
    """Make a page, figures and tables of what ran, from its directory alone. Nothing is trained."""
    from raydpfl.report import write

    with redirect_errors("report", *directories):
        place = write(directories, out, columns)
    print(f"Report: {storage.join_address(place, 'index.html')}")


SCORE = "The score to compare by. Default: that by which the runs are followed."


def compare(
    directories: Annotated[list[str], argument("Directories of runs, sweeps and studies.", "DIR")],
    metric: Annotated[str | None, option(SCORE)] = None,
    out: Annotated[str | None, directory("Where the page goes. Default: ./report-NAMES.")] = None,
) -> None:
    """Set runs side by side: a table of how they differ, their scores, epsilons and times;
    and a page with the score over rounds, seconds and epsilon. Seeds are averaged. Nothing is
    trained.
    """
    from raydpfl import report as reports
    from raydpfl.cli import comparison_table

    with redirect_errors("compare", *directories):
        comparison, place = reports.compare(directories, out, metric)
    comparison_table.show(Console(highlight=False), comparison)
    print(f"Page: {storage.join_address(place, 'index.html')}")
