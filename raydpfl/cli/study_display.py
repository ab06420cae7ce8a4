"""What `raydpfl reproduce` shows: on a terminal a bar for every study, elsewhere a line per
finished run; in the end what came of each cell.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from raydpfl.models import metric_columns
from raydpfl.privacy import RIGOROUS
from raydpfl.report.statistics import over_seeds
from raydpfl.sweep.study.identities import words
from raydpfl.sweep.study.runner import Course, Result
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.sweep import short
from raydpfl.sweep.trial_source import Trial

ROWS = 60  # cells that are told in the end
WIDE = 200  # characters of a line that no terminal shows


class Display:
    """`show` is called with a study's course when something has changed, `report` with its
    result.
    """

    def __init__(self, console: Console, studies: Sequence[Study]):
        self._console = console
        self._runs = {study.about.id: sum(study.runs().values()) for study in studies}
        self._told: set[Trial] = set()
        columns = (TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn())
        self._bars = Progress(
            *columns,
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        for name, runs in self._runs.items():
            self._tasks[name] = self._bars.add_task(escape(name), total=runs, state="")
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, course: Course) -> None:
        name = course.study.about.id
        over = [trial for trial in course.trials if trial.done]
        failed = sum(trial.status == "failed" for trial in over)
        running = [trial.label for trial in course.trials if trial.status == "running"]
        state = f"{failed} failed  " if failed else ""
        self._bars.update(
            self._tasks[name], completed=len(over), state=state + escape(" | ".join(running[:1]))
        )
        if self._console.is_terminal:
            return
        before = sum(trial.before for trial in over)
        for trial in over:
            if not trial.before and trial not in self._told:
                self._told.add(trial)
                done = before + sum(each in self._told for each in over)
                self._console.print(
                    f"{done}/{self._runs[name]}  {name}  {_line(trial)}", markup=False
                )

    def report(self, result: Result) -> None:
        """What came of every cell; what failed and which identities hold; where it lies."""
        study = result.study
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, WIDE)
        self._console.print(f"[bold]{escape(study.about.id)}[/] {escape(study.about.title)}")
        self._console.print(outcome(result, ROWS))
        for failed in result.summary["failed"][:ROWS]:
            self._say(f"Failed: {failed['cell']}: {failed['reason']}")
        for identity in result.summary["identities"]:
            self._say(words(identity))
        self._say(result.summary["tuning"]["statement"])
        self._say(f"Study directory: {result.out} (its page: report/index.html)")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def outcome(result: Result, most: int | None = None) -> Table:
    """A row per cell, at most so many: the score on the test set over the seeds, the largest
    epsilon that holds, and the values that the cell was tuned to.
    """
    study = result.study
    rows = result.results.to_pylist()
    accurate = any(row.get("test_accuracy") is not None for row in rows)
    metric = "test_accuracy" if accurate else "test_loss"
    names = [*study.axes, *(["accounting"] if study.accounting else []), "arm"]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        shown.add_column(escape(name), no_wrap=True)
    for name in (metric_columns.named(metric), "epsilon", "seeds"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("values", overflow="fold", min_width=20)
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in names), []).append(row)
    for place, inside in [*cells.items()][:most]:
        shown.add_row(
            *(escape(str(name or "")) for name in place),
            _score(inside, metric),
            _epsilon(inside),
            str(len(inside)),
            escape(_values(inside[0]["values"])),
        )
    return shown


def _score(rows: Sequence[dict[str, Any]], metric: str) -> str:
    found = over_seeds({row["seed"]: row.get(metric) for row in rows})
    if not found.count:
        return ""
    spread = f" ± {metric_columns.number(metric, found.std)}" if found.count > 1 else ""
    return metric_columns.number(metric, found.mean) + spread


def _epsilon(rows: Sequence[dict[str, Any]]) -> str:
    """The largest over the seeds of the smallest that a rigorous accountant gives."""
    spent = []
    for row in rows:
        known = [row[name] for name in RIGOROUS if row.get(name) is not None]
        spent += [min(known)] if known else []
    return f"{max(spent):.3g}" if spent and math.isfinite(max(spent)) else ""


def _values(text: str) -> str:
    return " ".join(f"{key}={short(value)}" for key, value in json.loads(text).items())


def _line(trial: Trial) -> str:
    """A run that is over, in one line."""
    if trial.status == "failed":
        return f"{trial.named()}  failed: {trial.failure()}"
    said = metric_columns.words(trial.summary or {})
    return "  ".join(part for part in (trial.named(), said, trial.status) if part)
