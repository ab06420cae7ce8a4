"""Runs from Python: `raydpfl.run` shows in a notebook what `raydpfl run` shows on a terminal, and
its result shows itself. IPython is used where it is running, and not needed.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from raydpfl.cli import guarantee_table, run_display
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.privacy import tightest_guarantees
from raydpfl.runtime import runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACE = 0.25  # seconds between two looks of a cell at the run
BAR = 50  # characters
PRE = '<pre style="white-space: pre-wrap">{}</pre>'


@dataclass(frozen=True, repr=False)
class Result(runner.RunResult):
    """A finished run. `out` is its directory, or the address of that; `experiment` is complete, as
    its config is written; `rounds` is the rounds table, `summary` what `summary.json` holds,
    `guarantees` what it says of privacy, `model` the trained module. A notebook shows it as tables.
    """

    def plot(self, of: str | Sequence[str] = "", x: str = "round") -> Figure:
        """Draws columns of the rounds table, as the report of the run does.

        Args:
            of: one of them or several (`train_loss`; `epsilon_*`: all that begin so); empty: the
                score by which the run is followed.
            x: `round`, `seconds`, `epsilon` (the one that holds) or another column.

        Returns:
            A figure of matplotlib.

        Raises:
            ConfigError: there is nothing of that to draw, which says how a run comes to have it.
        """
        from raydpfl import report

        of = of or next(iter(self.experiment.evaluation_scores), "train_loss")
        return report.figure(self.out, {"curves": of, "x": x})

    def __repr__(self) -> str:
        lines = [
            f"{self.summary['rounds']} rounds",
            metric_columns.summary_text(self.summary).lower(),
        ]
        guarantees = tightest_guarantees(self.guarantees)
        if guarantees:
            claim = guarantees[0]
            against = guarantee_table.against(claim)
            lines.append(f"epsilon {claim.epsilon:.4g} {claim.terms_text()}, against {against}")
        return f"Result({self.out}: {'; '.join(part for part in lines if part)})"

    def _repr_html_(self) -> str:
        """What `raydpfl run` says in the end."""
        console = Console(file=io.StringIO(), record=True, highlight=False)
        run_display.report(console, self)
        return console.export_html(inline_styles=True, code_format=PRE.format("{code}"))


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    progress: bool | None = None,
    **options: Any,
) -> Result:
    """Runs an experiment: `raydpfl.runtime.runner.run`, whose arguments it takes, with its
    progress.

    Args:
        experiment: what to run.
        out: the run directory, or its address; None: a new one under `runs/`.
        progress: whether to show how far it is; None: in a notebook alone.
        options: `resume`, `fresh_noise`, `data_root`, `address`, `on_stage`, `on_start`, `on_rows`
            and `on_measure`, as there.

    Returns:
        The finished run.

    Raises:
        ConfigError: as there, as are `RunError` and `KeyboardInterrupt`.
    """
    display: Any = nullcontext()
    if is_notebook() if progress is None else progress:
        shows = Cell if is_notebook() else run_display.Display
        display = shows(Console(highlight=False), experiment.rounds)
        for name in ("stage", "start", "rows", "measure"):
            options[f"on_{name}"] = _chain(getattr(display, name), options.get(f"on_{name}"))
    with display:
        result = runner.run(experiment, out, **options)
    return Result(*(getattr(result, field.name) for field in fields(result)))


def _chain(
    first: Callable[..., object], second: Callable[..., object] | None
) -> Callable[..., object]:
    """Calls one after the other, and returns what the second does."""

    def call(*arguments: Any) -> object:
        first(*arguments)
        return second(*arguments) if second else None

    return call


def is_notebook() -> bool:
    """Whether this runs in a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class Cell(run_display.Display):
    """The same lines in the output of a cell, which are replaced as the run goes on."""

    def __init__(self, console: Console, rounds: int):
        super().__init__(console, rounds)
        self._is_live = True  # no milestone is said: the cell shows the last one
        self._lines: list[str] = []  # that stay
        self._update_time = 0.0

    def __enter__(self) -> Cell:
        from IPython.display import display

        self._handle = display(self, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.update(self)

    def refresh(self) -> None:
        if time.monotonic() > self._update_time + PACE:
            self._update_time = time.monotonic()
            self._handle.update(self)

    def say(self, text: str) -> None:
        self._lines.append(text)

    def __repr__(self) -> str:
        lines = [*self._lines, self.state]
        if self._rounds_done:
            full = BAR * self._rounds_done // self._rounds
            lines.insert(-1, f"{self.place} [{'=' * full:{BAR}}] {self.remaining_text()}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return PRE.format(escape(repr(self)))
