"""What `raydpfl run` shows: its progress, and what came of it."""

from __future__ import annotations

import math
import shlex
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raydpfl import storage
from raydpfl.cli import guarantee_table
from raydpfl.models import metric_columns
from raydpfl.privacy import Guarantee, column, tightest_guarantees
from raydpfl.privacy.guarantee import DECLARED_SUFFIX, KINDS
from raydpfl.report.run_reader import group_by
from raydpfl.runtime.runner import FIRST, RunResult
from raydpfl.simulation.plan import Plan

WAIT = 5.0  # seconds between lines of what is done before the first round
PACE = 30  # rounds by whose time the rest is estimated
BY_DECLARATION = "^"  # behind an epsilon, after its sign
DECLARATION_NOTE = (
    f"{BY_DECLARATION} relies on what a user-defined class declares {DECLARED_SUFFIX}."
)
SIGNS = {"rigorous": "", "paper": "*", "unproven": "?"}  # behind an epsilon


class Display:
    """Two lines that live on a terminal, a line per evaluation elsewhere. For a run of `rounds`.

    `start_time`: when what the user waits for began, in seconds since the epoch; None: now.
    """

    def __init__(self, console: Console, rounds: int, start_time: float | None = None):
        self._console = console
        self._rounds = rounds
        self._start_time = time.time() if start_time is None else start_time
        self._first_round_time: float | None = None  # when the first round began
        self._stage = ""  # what happens before it, or after the last one
        self._rounds_done = 0
        self._score = ""
        self._state = ""
        self._line_time = time.monotonic()  # when the last line of a stage was printed
        self._printed_fraction = -1.0  # the part of the measuring that was shown last
        self._accountants: list[str] = []
        self._epsilon_target: float | None = None  # epsilon
        self._ends: deque[float] = deque(maxlen=PACE)  # of the last rounds
        self._spinner = Spinner("line")
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, get_renderable=self._renderable, refresh_per_second=8)

    def __enter__(self) -> Display:
        if self._is_live and not self._console.quiet:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.transient = kind is None  # how far it came stays where it came no further
        self._live.stop()

    def stage(self, text: str) -> None:
        """Shows what is done before the first round; as a line only if it takes long."""
        self._stage = text
        if time.monotonic() - self._line_time >= WAIT:
            self._line_time = time.monotonic()
            self.milestone(text)
        if text == FIRST:
            self._first_round_time = time.time()
        self.refresh()

    def start(self, plan: Plan) -> None:
        """Says what is run."""
        self._accountants = [column(name) for name in plan.rigorous_accountants]
        e = plan.experiment
        self._epsilon_target = e.privacy.budget or e.noise.target()
        noise = "no noise: not private"
        if plan.ratio:
            noise = f"noise multiplier {plan.ratio:.4g}"
        elif plan.mechanism:
            noise = "noise at each local step"
        self.say(
            f"{e.data.kind}, {len(plan.population):,} clients, "
            f"{plan.population.samples:,} samples; {e.model.kind}, {plan.d:,} parameters; "
            f"{e.bounding.kind}, {noise}; "
            f"chunks of {e.client.chunk} in {e.client.precision}, backend {e.client.backend}"
        )

    def rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Shows the rounds of these rows of the rounds table."""
        for row in rows:
            self._stage = ""
            self._rounds_done = row["round"] + 1
            self._ends.append(time.monotonic())
            epsilons = [row[name] for name in self._accountants if name in row]
            if metric_columns.is_evaluated(row):
                self._score = metric_columns.words(row)
            epsilon = epsilon_text(min(epsilons), self._epsilon_target) if epsilons else ""
            parts = (self._score, epsilon, rate(row))
            self._state = "  ".join(part for part in parts if part)
            if metric_columns.is_evaluated(row):
                self.milestone(f"round {self._rounds_done}/{self._rounds}  {self._state}")
        self.refresh()

    def measure(self, steps_done: int, step_count: int) -> None:
        """Shows how many of how many steps of measuring after the last round are done."""
        part = steps_done / step_count
        self._stage = f"measuring: {part:.0%}"
        if steps_done == step_count or part >= self._printed_fraction + 0.1:
            self._printed_fraction = part
            self.milestone(self._stage)
        self.refresh()

    def refresh(self) -> None:
        """Called when what is shown changes: a terminal looks for itself."""

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        _say(self._console, text)

    def milestone(self, text: str) -> None:
        """Prints a line where no other lives."""
        if not self._is_live:
            self.say(text)

    def duration_text(self) -> str:
        """How long all of it took so far, in words."""
        end_time = time.time()
        seconds = end_time - self._start_time
        startup = (self._first_round_time or end_time) - self._start_time
        return f"{seconds:.1f} s in all, {startup:.1f} s of them before the first round"

    def remaining_text(self) -> str:
        """How long the rounds that are left take, by the last ones."""
        if len(self._ends) < 2:
            return ""
        seconds_per_round = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        seconds = math.ceil(seconds_per_round * (self._rounds - self._rounds_done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d} left"

    @property
    def place(self) -> str:
        """How many of the rounds are done."""
        return f"round {self._rounds_done:>{len(str(self._rounds))}}/{self._rounds}"

    @property
    def state(self) -> str:
        """What is done before or after the rounds, or how they go."""
        if self._stage:
            return f"{self._stage}  {time.time() - self._start_time:.0f} s"
        return self._state

    def _renderable(self) -> RenderableType:
        if not self._rounds_done:
            self._spinner.update(text=self.state)
            return self._spinner
        line = Table.grid(padding=(0, 1), expand=True)
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(self._rounds, self._rounds_done)
        line.add_row(self.place, bar, self.remaining_text())
        return Group(line, Text(self.state))


def epsilon_text(epsilon: float, target: float | None) -> str:
    """What is spent of what may be, in print.

    >>> epsilon_text(4.8213, 8.0), epsilon_text(29.01, 8.0), epsilon_text(4.8213, None)
    ('epsilon 4.82 of 8', 'epsilon 29, asked for 8', 'epsilon 4.82')
    """
    if target is None:
        return f"epsilon {epsilon:.3g}"
    # above it by the formula of a paper, say
    relation = ", asked for" if epsilon > target * (1 + 1e-3) else " of"
    return f"epsilon {epsilon:.3g}{relation} {target:g}"


def rate(row: dict[str, Any]) -> str:
    """Clients per second in three digits, or all that stand before the point."""
    value = row["clients_per_second"]
    return f"{value:,.0f} clients/s" if value >= 100 else f"{value:.3g} clients/s"


def report(console: Console, result: RunResult, duration: str = "") -> None:
    """Says what came of a run, how long it took (`duration`, in words), and where to look next."""
    summary = result.summary
    if summary["status"] == "budget" or summary.get("reason"):
        _say(console, Text.assemble(("Stopped:", "yellow"), f" {summary['reason']}"))
    text = metric_columns.summary_text(summary)
    if text:
        time = f"{summary['rounds']} rounds in {summary['seconds']:.1f} s ({rate(summary)})"
        _say(console, f"{text}, after {time}")
    if duration:
        _say(console, f"{duration[0].upper()}{duration[1:]}.")
    _guarantees(console, result)
    if summary["ray"]["why_not"]:
        _say(console, f"Ray was not started: {summary['ray']['why_not']}.")
    for line in next_commands(result):  # a command stays whole, however long
        console.print(Text(line), soft_wrap=True)


def next_commands(result: RunResult) -> list[str]:
    """Where a run lies, and the commands that say more of it, or go on with it."""
    out = shlex.quote(str(result.out))
    lines = [
        f"Run directory: {result.out}",
        f"  its page and figures:  raydpfl report {out}",
        f"  next to another run:   raydpfl compare {out} DIR",
    ]
    status = result.summary["status"]
    if status == "stopped":
        lines.append(f"  go on with it:         raydpfl run {out} --resume")
    elif status == "completed" and not result.summary["reason"]:
        rounds = result.experiment.rounds
        override = result.experiment.noise.extension(rounds)
        command = f"raydpfl run {out} --resume rounds={2 * rounds} {override}".rstrip()
        if override is None:  # noise that is for these rounds alone
            config = shlex.quote(str(storage.join_address(result.out, "config.yaml")))
            command = f"raydpfl run {config} model.init={out} --out DIR"
        lines.append(f"  more rounds:           {command}")
    return lines


def _say(console: Console, text: str | Text) -> None:
    """Prints a line; wrapped at words on a terminal, and as it is in a file."""
    console.print(Text(text) if isinstance(text, str) else text, soft_wrap=not console.is_terminal)


def _guarantees(console: Console, result: RunResult) -> None:
    guarantees = result.guarantees
    if not guarantees and result.summary["status"] == "budget":
        _say(console, "No round was run: nothing of the data was released, and nothing spent.")
    elif not guarantees:
        _say(console, "No privacy guarantee: no accountant was asked, or there was no noise.")
    holds = tightest_guarantees(guarantees)
    # a table for those of one unit and one delta
    for group in group_by(guarantees, lambda one: (one.unit, one.delta)).values():
        cells = [(one, epsilon(one)) for one in group]
        main_guarantee = holds[0] if holds and holds[0] in group else None
        _say(console, f"\nEpsilon {group[0].terms_text()}:")
        table = guarantee_table.table(cells, main_guarantee=main_guarantee, bold=holds)
        console.print(table, end="")
    for note in notes(guarantees, holds):
        _say(console, note)
    if guarantees:
        console.print()


def epsilon(one: Guarantee) -> str:
    """An epsilon in print, with its signs; a dash where nothing is shown."""
    mark = BY_DECLARATION if one.declared else ""
    return "-" if math.isinf(one.epsilon) else f"{one.epsilon:.4g}{SIGNS[one.kind]}{mark}"


def notes(guarantees: Sequence[Guarantee], holds: Sequence[Guarantee]) -> list[str]:
    """What the numbers rely on, and leave out, a line each."""
    lines = []
    if holds:
        lines.append(
            "> the setting of this config; an observer who sees more has another row. Of several "
            "numbers in a row the smallest holds."
        )
    for one in guarantees:
        failures = "; ".join(one.conditions_failed)
        if failures or SIGNS[one.kind]:
            sign = f"{SIGNS[one.kind]} {one.accountant}, {KINDS[one.kind]}".strip()
            lines.append(f"{sign}. Conditions that fail: {failures}." if failures else f"{sign}.")
    basis = holds or [one for one in guarantees if not one.formula]
    lines += [f"Sampling: {one.sampling}." for one in basis]
    lines += [
        f"Against an observer of {guarantee_table.against(one)}: {one.zcdp_sentence()}."
        for one in basis
        if one.rho is not None
    ]
    if any(one.declared for one in guarantees):
        lines.append(DECLARATION_NOTE)
    lines += [
        f"Not accounted for: {exclusion}." for one in guarantees for exclusion in one.exclusions
    ]
    return [*dict.fromkeys(lines)]
