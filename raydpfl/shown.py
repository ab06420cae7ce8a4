"""What `raydpfl run` shows: its progress, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raydpfl import scores
from raydpfl.plan import Plan
from raydpfl.privacy import column, sentences
from raydpfl.runner import Result


class Display:
    """A progress bar on a terminal, a line per evaluation elsewhere. For a run of `rounds`."""

    def __init__(self, console: Console, rounds: int):
        self._console = console
        self._rounds = rounds
        self._score = ""
        self._said = -1.0  # the part of the measuring that was told last
        self._accountants: list[str] = []
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )

    def __enter__(self) -> Display:
        self._progress.start()
        self._task = self._progress.add_task("", total=self._rounds, state="starting")
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, plan: Plan) -> None:
        """Says what is run."""
        self._accountants = [column(name) for name in plan.rigorous]
        e = plan.experiment
        noise = "no noise: not private"
        if plan.ratio:
            noise = f"noise multiplier {plan.ratio:.4g}"
        elif plan.mechanism:
            noise = "noise at each local step"
        self._console.print(
            f"{e.data.kind}, {len(plan.population):,} clients, "
            f"{plan.population.samples:,} samples; {e.model.kind}, {plan.d:,} parameters; "
            f"{e.bounding.kind}, {noise}; "
            f"lanes of {e.client.lane} in {e.client.precision}, way {e.client.way}"
        )

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Shows the rounds of these rows of the rounds table."""
        for row in rows:
            spent = [row[name] for name in self._accountants if name in row]
            epsilon = f"epsilon {min(spent):.3g}" if spent else ""
            speed = rate(row)
            if scores.evaluated(row):
                self._score = scores.words(row)
                if not self._console.is_terminal:
                    place = f"round {row['round'] + 1}/{self._rounds}"
                    self._console.print(f"{place}  {self._score}  {epsilon}  {speed}")
            state = "  ".join(part for part in (self._score, epsilon, speed) if part)
            self._progress.update(self._task, completed=row["round"] + 1, state=state)

    def measure(self, done: int, of: int) -> None:
        """Shows how many of how many steps of measuring after the last round are done."""
        part = done / of
        text = f"measuring: {part:.0%}"
        self._progress.update(self._task, state=text)
        if not self._console.is_terminal and (done == of or part >= self._said + 0.1):
            self._said = part
            self._console.print(text)


def rate(row: dict[str, Any]) -> str:
    """Clients per second in three digits, or all that stand before the point."""
    value = row["clients_per_second"]
    return f"{value:,.0f} clients/s" if value >= 100 else f"{value:.3g} clients/s"


def report(console: Console, result: Result) -> None:
    """Says what came of a run: its scores, and every guarantee in words."""
    summary = result.summary
    if summary["status"] == "budget" or summary.get("reason"):
        console.print(f"[yellow]Stopped:[/] {summary['reason']}")
    said = scores.told(summary)
    if said:
        time = f"{summary['rounds']} rounds in {summary['seconds']:.1f} s ({rate(summary)})"
        console.print(f"{said}, after {time}")
    _guarantees(console, result)
    ray = summary["ray"]
    if ray["why_not"] and ray["asked"]:
        console.print(f"Ray was not started: {ray['why_not']}.", markup=False)
    console.print(f"Run directory: {result.out}", markup=False)


def _guarantees(console: Console, result: Result) -> None:
    found = result.guarantees
    if not found and result.summary["status"] == "budget":
        console.print("No round was run: nothing of the data was released, and nothing spent.")
    elif not found:
        no_noise = "the run had no noise that an accountant was asked to account for"
        console.print(f"No privacy guarantee: {no_noise}.")
    for sentence in sentences([replace(one, exclusions=()) for one in found]):
        console.print(f"- {sentence}", markup=False)
    for exclusion in dict.fromkeys(each for one in found for each in one.exclusions):
        console.print(f"  Not accounted for: {exclusion}.", markup=False)
