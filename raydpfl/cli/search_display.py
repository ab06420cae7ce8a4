"""What `raydpfl sweep` and `raydpfl reproduce` show: on a terminal a live table of settings, or a
bar for each study, elsewhere a line per finished trial; in the end a table of the results.
"""

import math
import shlex
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from raydpfl import storage
from raydpfl.models import metric_columns
from raydpfl.models.metric_columns import score_label
from raydpfl.privacy import RIGOROUS
from raydpfl.report.labels import edge_warning
from raydpfl.report.pages.comparison import labels
from raydpfl.sweep import Sweep, SweepResult
from raydpfl.sweep.results import epsilons, score
from raydpfl.sweep.runner import SweepRunner
from raydpfl.sweep.spaces import Interval
from raydpfl.sweep.study import Study, StudyResult, StudyRunner
from raydpfl.sweep.study.claims import verdict_line
from raydpfl.sweep.study.identities import words
from raydpfl.sweep.trials import SearchSetting, Trial, override_text, short_text

VALUES = 10  # of a field whose best settings are shown
ROWS = 60  # cells that are shown in the end
WIDE = 200  # columns of a line that no terminal shows


class SearchDisplay(ABC):
    """`show` is called with a runner when something has changed."""

    def __init__(self, console: Console):
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._is_live = console.is_terminal and not console.quiet
        self._printed_trials: set[Trial] = set()

    def __enter__(self):
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, runner: Any) -> None:
        trials = [trial for trial in runner.trials if trial.is_done]
        if self._is_live:
            self._live.update(self._render(runner, len(trials)))
            return
        resumed_count = sum(trial.before for trial in trials)
        for trial in trials:
            if not trial.before and trial not in self._printed_trials:
                self._printed_trials.add(trial)
                done_count = resumed_count + sum(trial in self._printed_trials for trial in trials)
                self._say(f"{done_count}/{self._total(runner)}  {self._line(runner, trial)}")

    @abstractmethod
    def _total(self, runner: Any) -> int:
        """The number of trials."""

    @abstractmethod
    def _render(self, runner: Any, done_count: int) -> RenderableType:
        """What a terminal shows while the runner has so many trials done."""

    @abstractmethod
    def _line(self, runner: Any, trial: Trial) -> str:
        """A trial that is over, in one line."""

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


class SweepDisplay(SearchDisplay):
    def _total(self, runner: SweepRunner) -> int:
        return runner.sweep.size * runner.sweep.search.repeats

    def _render(self, runner: SweepRunner, done_count: int) -> RenderableType:
        rows = max(5, self._console.height - 8)
        table = settings_table(runner.settings, runner.sweep, rows)
        table.title = f"{done_count} of {self._total(runner)} trials"
        table.title_justify = "left"
        return table

    def show(self, runner: SweepRunner) -> None:
        """Nothing of a private search, whose trials are not to be seen."""
        if not runner.sweep.search.private:
            super().show(runner)

    def _line(self, runner: SweepRunner, trial: Trial) -> str:
        metric = runner.sweep.search.metric
        value = trial.value(metric)
        kind = _epsilon_column([trial])
        parts = [trial.label, f"seed={trial.seed}"]
        if value is not None:
            parts.append(metric_columns.words({metric: value}))
        if kind:
            parts.append(f"epsilon {epsilons(trial)[kind]:.3g} ({kind.removeprefix('epsilon_')})")
        return "  ".join([*parts, f"{_rounds(trial)} rounds", trial.status])

    def report(self, result: SweepResult, sweep: Sweep) -> None:
        """What failed, a line each; the table, the best setting, and what choosing it means."""
        trials = [trial for setting in result.all for trial in setting.trials]
        failed_trials = [trial for trial in trials if trial.status == "failed"]
        if failed_trials:
            self._say(f"Failed: {len(failed_trials)} of {len(trials)} trials")
        for trial in failed_trials:
            place = f"trials/{trial.folder.name}"
            self._say(f"  {trial.display_name()}  {place}: {trial.failure()}")
        self._console.print(settings_table(result.all, sweep, rows=20))
        metric = sweep.search.metric
        best = result.best
        if best:
            values = override_text(best.values)
            self._say(f"Best: {values}, {score_label(metric)} {score(best, metric)}")
            edges = edge_warning(best.values, result.summary["best"]["edges"])
            if edges:
                self._say(edges)
        for key, rows in result.summary.get("best_for", {}).items():
            if len(rows) <= VALUES:
                self._console.print(best_table(key, rows, result.all, sweep))
        self._say(result.summary["choice"])
        for line in next_commands(result):  # a command stays whole, however long
            self._console.print(line, markup=False, soft_wrap=True)


class StudyDisplay(SearchDisplay):
    def __init__(self, console: Console, studies: Sequence[Study]):
        super().__init__(console)
        self._totals = {study.about.id: sum(study.runs().values()) for study in studies}
        self._bars: dict[str, RenderableType] = {}

    def _total(self, runner: StudyRunner) -> int:
        return max(self._totals[runner.study.about.id], len(runner.trials))  # grids may grow

    def _render(self, runner: StudyRunner, done_count: int) -> RenderableType:
        name, total = runner.study.about.id, self._total(runner)
        failed_count = sum(trial.status == "failed" for trial in runner.trials)
        running_labels = (trial.label for trial in runner.trials if trial.status == "running")
        state = (f"{failed_count} failed  " if failed_count else "") + next(running_labels, "")
        bar = Table.grid(padding=(0, 1))
        part = ProgressBar(total, done_count, width=40)
        bar.add_row(escape(name), f"{done_count}/{total}", part, escape(state))
        self._bars[name] = bar
        return Group(*self._bars.values())

    def _line(self, runner: StudyRunner, trial: Trial) -> str:
        status_parts = [metric_columns.words(trial.summary or {}), trial.status]
        if trial.status == "failed":
            status_parts = [f"failed: {trial.failure()}"]
        parts = [runner.study.about.id, trial.display_name(), *status_parts]
        return "  ".join(part for part in parts if part)

    def report(self, result: StudyResult) -> None:
        """What came of every cell; what failed and which identities hold; where it lies."""
        about = result.study.about
        if not self._console.is_terminal:
            self._console.width = max(self._console.width, WIDE)
        self._console.print(f"[bold]{escape(about.id)}[/] {escape(about.title)}")
        self._console.print(cells_table(result))
        for failure in result.summary["failed"][:ROWS]:
            self._say(f"Failed: {failure['cell']}: {failure['reason']}")
        for identity in result.summary["identities"]:
            self._say(words(identity))
        for claim in result.summary["claims"]:
            self._say(f"Claim: {verdict_line(claim)}")
        self._say(result.summary["tuning"]["statement"])
        self._say(f"Study directory: {result.out} (its page: report/index.html)")


def _table(columns: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table: columns of text, then columns of numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in columns:
        table.add_column(escape(name))
    for name in numbers:
        table.add_column(escape(name), justify="right")
    return table


def settings_table(
    settings: Sequence[SearchSetting], sweep: Sweep, rows: int | None = None
) -> Table:
    """The settings, best first, at most `rows` of them; epsilon, the largest of the seeds, by one
    accountant (see `_epsilon_column`).
    """
    metric = sweep.search.metric
    kind = _epsilon_column([trial for setting in settings for trial in setting.trials])
    epsilon_columns = [f"{kind.replace('_', ' (', 1)})"] if kind else []
    table = _table([*sweep.spaces], [score_label(metric), *epsilon_columns, "rounds", "trials"])

    def rank(setting: SearchSetting) -> tuple[bool, float]:
        mean = setting.mean(metric)
        return mean is not None, sweep.sign * (mean or 0.0)

    for setting in sorted(settings, key=rank, reverse=True)[:rows]:
        rounds = [_rounds(trial) for trial in setting.trials]
        states = Counter(trial.status for trial in setting.trials)
        largest = [trial[kind] for trial in map(epsilons, setting.trials) if kind in trial]
        epsilon = [f"{max(largest):.3g}" if largest else ""] if kind else []
        table.add_row(
            *(escape(label(sweep, key, value)) for key, value in setting.values.items()),
            score(setting, metric),
            *epsilon,
            "-".join(str(number) for number in sorted({min(rounds), max(rounds)})),
            ", ".join(f"{count} {state}" for state, count in states.items()),
        )
    return table


def best_table(
    key: str, rows: Sequence[Mapping[str, Any]], settings: Sequence[SearchSetting], sweep: Sweep
) -> Table:
    """The best setting for each value of a field. `rows`: see `raydpfl.sweep.results.best_for`."""
    metric = sweep.search.metric
    fields = [name for name in sweep.spaces if name != key]
    has_edges = any(row["edges"] for row in rows)
    table = _table([key, score_label(metric), *fields, *(["at an edge"] if has_edges else [])], [])
    table.columns[1].justify = "right"
    table.title = escape(f"Best for each {key}")
    for row in rows:
        best = settings[row["setting"]]
        cells = [label(sweep, key, row["value"]), score(best, metric)]
        cells += [label(sweep, name, best.values[name]) for name in fields]
        cells += [", ".join(row["edges"])] if has_edges else []
        table.add_row(*map(escape, cells))
    return table


def label(sweep: Sweep, key: str, value: Any) -> str:
    """A value of a searched field in print: a section by how it differs from the others."""
    space = sweep.spaces[key]
    if isinstance(space, Interval) or not isinstance(value, Mapping):
        return short_text(value)
    return labels(space.options)[space.options.index(value)]


def next_commands(result: SweepResult) -> list[str]:
    """Where a sweep lies, and the commands that say more of it."""
    out = shlex.quote(str(result.out))
    lines = [
        f"Sweep directory: {result.out}",
        f"  its page and figures:  raydpfl report {out}",
        f"  its runs side by side: raydpfl compare {out}",
    ]
    if result.best:
        best = shlex.quote(str(storage.join_address(result.out, "best.yaml")))
        lines.append(f"  the best setting:      raydpfl run {best}")
    return lines


def _rounds(trial: Trial) -> int:
    """How many rounds a trial has done, as far as is known."""
    return (trial.summary or trial.report).get("rounds", trial.report.get("round", 0))


def _epsilon_column(trials: Sequence[Trial]) -> str | None:
    """The column of the first rigorous accountant that covers all trials, else of the first."""
    rows = [epsilons(trial) for trial in trials]
    kinds = list(dict.fromkeys(kind for row in rows for kind in row))
    complete_kinds = (
        kind
        for kind in kinds
        if kind in RIGOROUS and all(math.isfinite(row.get(kind, 0.0)) for row in rows)
    )
    return next(complete_kinds, next(iter(kinds), None))


def cells_table(result: StudyResult) -> Table:
    """A row per cell, at most `ROWS`: the mean score on the test set with half of the interval of a
    repetition, the largest epsilon that holds, and the values that the cell was tuned to.
    """
    study = result.study
    cells = [cell for cell in result.cells if cell.finals]
    summaries = [trial.summary or {} for cell in cells for trial in cell.finals]
    accurate = any(summary.get("test_accuracy") is not None for summary in summaries)
    metric = "test_accuracy" if accurate else "test_loss"
    names = [*study.axes, *(["accounting"] if study.accounting else []), "arm"]
    table = _table(names, [score_label(metric), "epsilon", "seeds"])
    for column in table.columns:
        column.no_wrap = True
    table.add_column("values", overflow="fold", min_width=20)
    for cell in cells[:ROWS]:
        spread = cell.values(metric).spread()
        mean = metric_columns.number(metric, spread.mean) if spread.count else ""
        half = spread.repetition()
        interval = f" ± {metric_columns.number(metric, half)}" if not math.isnan(half) else ""
        table.add_row(
            *(escape(cell.cell.place[name] or "") for name in names),
            mean + interval,
            _epsilon(cell.finals),
            str(spread.count),
            escape(override_text(cell.final_setting.values if cell.final_setting else {})),
        )
    return table


def _epsilon(trials: Sequence[Trial]) -> str:
    """The largest over the seeds of the smallest that a rigorous accountant gives."""
    values_by_run = [
        [epsilon for name, epsilon in epsilons(trial).items() if name in RIGOROUS]
        for trial in trials
        if trial.summary
    ]
    smallest = [min(values) for values in values_by_run if values]
    return f"{max(smallest):.3g}" if smallest and math.isfinite(max(smallest)) else ""
