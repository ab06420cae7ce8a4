"""Runs from Python: `raydpfl.run` shows in a notebook what `raydpfl run` shows on a terminal, and
its result shows itself. IPython is used where it is running, and not needed.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from raydpfl.cli import guarantee_table, run_display
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.privacy import Guarantee, holding
from raydpfl.runtime import runner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PACE = 0.25  # seconds between two looks of a cell at the run
BAR = 50  # characters
CELL = "text-align: {}; padding: 0 1em 0 0"


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

        of = of or next(iter(self.experiment.given), "train_loss")
        return report.figure(self.out, {"curves": of, "x": x})

    def __repr__(self) -> str:
        lines = [
            f"{self.summary['rounds']} rounds",
            metric_columns.summary_text(self.summary).lower(),
        ]
        held = holding(self.guarantees)
        if held:
            against = guarantee_table.against(held[0])
            lines.append(f"epsilon {held[0].epsilon:.4g} {held[0].about()}, against {against}")
        return f"Result({self.out}: {'; '.join(part for part in lines if part)})"

    def _repr_html_(self) -> str:
        held = holding(self.guarantees)
        rounds = f"{self.summary['rounds']} rounds in {self.summary['seconds']:.1f} s"
        head = metric_columns.summary_text(self.summary) or "No evaluation"
        parts = [f"<p><b>{escape(head)}</b>, after {rounds}</p>"]
        for group in run_display.groups(self.guarantees):
            parts.append(f"<p>Epsilon {escape(group[0].about())}:</p>{_table(group, held)}")
        notes = run_display.notes(self.guarantees, held)
        parts += [f"<small>{escape(note)}</small><br>" for note in notes]
        parts.append(f"<pre>{escape(chr(10).join(run_display.following(self)))}</pre>")
        return "".join(parts)


def _table(group: Sequence[Guarantee], held: Sequence[Guarantee]) -> str:
    """Guarantees in HTML, as `raydpfl.cli.guarantee_table.table` has them on a terminal."""
    rows = guarantee_table.by_observer([(one, run_display.epsilon(one)) for one in group])
    names = list(dict.fromkeys(guarantee_table.label(one) for one in group))
    heads = "".join(f'<th style="{CELL.format("right")}">{escape(name)}</th>' for name in names)
    lines = [f'<tr><th style="{CELL.format("left")}">against an observer of</th>{heads}</tr>']
    for row in rows:
        marked = held[:1] and held[0] in [one for one, _ in row.cells.values()]
        line = f'<td style="{CELL.format("left")}">{"&gt; " if marked else ""}'
        line += f"{escape(row.against)}</td>"
        for name in names:
            one, text = row.cells.get(name, (None, ""))
            weight = "bold" if one in held else "normal"
            style = f"{CELL.format('right')}; font-weight: {weight}"
            line += f'<td style="{style}">{escape(text)}</td>'
        lines.append(f"<tr>{line}</tr>")
    return f"<table>{''.join(lines)}</table>"


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    progress: bool | None = None,
    on_stage: Callable[..., object] = lambda what: None,
    on_start: Callable[..., object] = lambda plan: None,
    on_rows: Callable[..., object] = lambda rows: None,
    on_measure: Callable[..., object] = lambda done, of: None,
    **options: Any,
) -> Result:
    """Runs an experiment: `raydpfl.runtime.runner.run`, whose arguments it takes, with its
    progress.

    Args:
        experiment: what to run.
        out: the run directory, or its address; None: a new one under `runs/`.
        progress: whether to show how far it is; None: in a notebook alone.
        on_stage: as there, as are `on_start`, `on_rows` and `on_measure`.
        options: `resume`, `fresh_noise`, `data_root` and `address`, as there.

    Returns:
        The finished run.

    Raises:
        ConfigError: as there, as are `RunError` and `KeyboardInterrupt`.
    """
    hooks: dict[str, Any] = {"on_stage": on_stage, "on_start": on_start, "on_rows": on_rows}
    hooks["on_measure"] = on_measure
    if progress is False or (progress is None and not cell_is_there()):
        result = runner.run(experiment, out, **hooks, **options)
    else:
        console = Console(highlight=False)
        shows = Cell if cell_is_there() else run_display.Display
        with shows(console, experiment.rounds) as display:
            for name, call in hooks.items():
                hooks[name] = _both(getattr(display, name.removeprefix("on_")), call)
            result = runner.run(experiment, out, **hooks, **options)
    return Result(*(getattr(result, field.name) for field in fields(result)))


def _both(first: Callable[..., object], second: Callable[..., object]) -> Callable[..., object]:
    """Calls one after the other, and returns what the second does."""

    def call(*arguments: Any) -> object:
        first(*arguments)
        return second(*arguments)

    return call


def cell_is_there() -> bool:
    """Whether this runs in a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None


class Cell(run_display.Display):
    """The same lines in the output of a cell, which are replaced as the run goes on."""

    def __init__(self, console: Console, rounds: int):
        super().__init__(Console(file=io.StringIO(), width=console.width), rounds)
        self._lines: list[str] = []  # that stay
        self._looked = 0.0

    def __enter__(self) -> Cell:
        from IPython.display import display

        self._handle = display(self, display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._look()

    def stage(self, what: str) -> None:
        super().stage(what)
        self._look()

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        super().rows(rows)
        if time.monotonic() > self._looked + PACE:
            self._look()

    def measure(self, done: int, of: int) -> None:
        super().measure(done, of)
        self._look()

    def say(self, text: str | Text) -> None:
        self._lines.append(str(text))

    def milestone(self, text: str) -> None:
        """Nothing: the cell shows the last one."""

    def _look(self) -> None:
        self._looked = time.monotonic()
        self._handle.update(self)

    def __repr__(self) -> str:
        lines = [*self._lines, self.state]
        if self._done:
            full = BAR * self._done // self._rounds
            lines.insert(-1, f"{self.place} [{'=' * full:{BAR}}] {self.left()}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(repr(self))}</pre>'
