"""What a sweep shows: on a terminal a table that lives, best setting first, epsilon beside
accuracy; elsewhere a line per finished trial.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from raydpfl import storage
from raydpfl.models.metric_columns import named, words
from raydpfl.privacy import RIGOROUS
from raydpfl.report.comparison import labels
from raydpfl.report.labels import beyond
from raydpfl.sweep.results import Result, epsilons, failures, score
from raydpfl.sweep.spaces import Interval
from raydpfl.sweep.sweep import Setting, Sweep, short
from raydpfl.sweep.trial_source import Trial

VALUES = 10  # of a field whose best settings are shown


class Display:
    """`show` is called with all settings when something has changed, `report` with the result."""

    def __init__(self, console: Console, sweep: Sweep):
        self._console = console
        self._sweep = sweep
        self._live = (
            Live(console=console, refresh_per_second=4, transient=True)
            if console.is_terminal and not console.quiet
            else None
        )
        self._printed: set[Trial] = set()

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, settings: Sequence[Setting]) -> None:
        over = [trial for setting in settings for trial in setting.trials if trial.done]
        total = self._sweep.size * self._sweep.search.repeats
        if self._live:
            shown = table(settings, self._sweep, rows=max(5, self._console.height - 8))
            shown.title = f"{len(over)} of {total} trials"
            shown.title_justify = "left"
            self._live.update(shown)
            return
        before = sum(trial.before for trial in over)
        for trial in over:
            if not trial.before and trial not in self._printed:
                self._printed.add(trial)
                self._console.print(
                    f"{before + len(self._printed)}/{total}  {_line(trial, self._sweep)}",
                    markup=False,
                )

    def report(self, result: Result) -> None:
        """First what failed, each trial with its reason in one line; then the table, the best
        setting, and what choosing it means."""
        failed = failures(result.all)
        total = sum(len(setting.trials) for setting in result.all)
        if failed:
            self._say(f"Failed: {len(failed)} of {total} trials")
        for trial in failed:
            place = f"trials/{trial.folder.name}"
            self._say(f"  {trial.named()}  {place}: {trial.failure()}")
        self._console.print(table(result.all, self._sweep, rows=20))
        metric = self._sweep.search.metric
        best = result.best
        if best:
            self._say(f"Best: {best.named()}, {metric.replace('_', ' ')} {score(best, metric)}")
            edges = beyond(best.values, result.summary["best"]["edges"])
            if edges:
                self._say(edges)
        for key, rows in result.summary.get("best_for", {}).items():
            if len(rows) <= VALUES:
                self._console.print(for_each(key, rows, result.all, self._sweep))
        self._say(result.summary["choice"])
        for line in following(result):  # a command stays whole, however long
            self._console.print(line, markup=False, soft_wrap=True)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)


def for_each(
    key: str, rows: Sequence[Mapping[str, Any]], settings: Sequence[Setting], sweep: Sweep
) -> Table:
    """The best setting for each value of a field. `rows`: see `raydpfl.sweep.results.best_for`."""
    metric = sweep.search.metric
    others = [name for name in sweep.spaces if name != key]
    edged = any(row["edges"] for row in rows)
    shown = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    shown.title = escape(f"Best for each {key}")
    shown.add_column(escape(key))
    shown.add_column(escape(named(metric)), justify="right")
    for name in [*others, *(["at an edge"] if edged else [])]:
        shown.add_column(escape(name))
    for row in rows:
        best = settings[row["setting"]]
        cells = [label(sweep, key, row["value"]), score(best, metric)]
        cells += [label(sweep, name, best.values[name]) for name in others]
        cells += [", ".join(row["edges"])] if edged else []
        shown.add_row(*map(escape, cells))
    return shown


def label(sweep: Sweep, key: str, value: Any) -> str:
    """A value of a searched field in print: a section by what tells it from the others."""
    space = sweep.spaces[key]
    if isinstance(space, Interval) or not isinstance(value, Mapping):
        return short(value)
    return labels(space.options)[space.options.index(value)]


def following(result: Result) -> list[str]:
    """Where a sweep lies, and the commands that say more of it."""
    found = [
        f"Sweep directory: {result.out}",
        f"  its page and figures:  raydpfl report {result.out}",
        f"  its runs side by side: raydpfl compare {result.out}",
    ]
    if result.best:
        best = storage.within(result.out, "best.yaml")
        found.append(f"  the best setting:      raydpfl run {best}")
    return found


def table(settings: Sequence[Setting], sweep: Sweep, rows: int | None = None) -> Table:
    """The settings, best first, at most `rows` of them; epsilon, the largest of the seeds, by one
    accountant (see `_told`).
    """
    metric = sweep.search.metric
    kind = _told([trial for setting in settings for trial in setting.trials])
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in sweep.spaces:
        shown.add_column(escape(name))
    spent = [f"{kind.replace('_', ' (', 1)})"] if kind else []
    for name in (named(metric), *spent, "rounds", "trials"):
        shown.add_column(escape(name), justify="right")

    def rank(setting: Setting) -> tuple[bool, float]:
        mean = setting.mean(metric)
        return mean is not None, sweep.sign * (mean or 0.0)

    for setting in sorted(settings, key=rank, reverse=True)[:rows]:
        rounds = [_rounds(trial) for trial in setting.trials]
        states = Counter(trial.status for trial in setting.trials)
        shown.add_row(
            *(escape(label(sweep, key, value)) for key, value in setting.values.items()),
            score(setting, metric),
            *([_largest(setting.trials, kind)] if kind else []),
            "-".join(str(number) for number in sorted({min(rounds), max(rounds)})),
            ", ".join(f"{count} {state}" for state, count in states.items()),
        )
    return shown


def _largest(trials: Sequence[Trial], kind: str) -> str:
    """The largest epsilon by one accountant, in print; empty where none is known."""
    spent = [each[kind] for each in map(epsilons, trials) if kind in each]
    return f"{max(spent):.3g}" if spent else ""


def _rounds(trial: Trial) -> int:
    """How many rounds a trial has done, as far as is known."""
    return (trial.summary or trial.report).get("rounds", trial.report.get("round", 0))


def _told(trials: Sequence[Trial]) -> str | None:
    """The first rigorous accountant that covers all of them; if none does, the first of all; None
    if there is none.
    """
    spent = [epsilons(trial) for trial in trials]
    kinds = list(dict.fromkeys(kind for each in spent for kind in each))
    rigorous = [kind for kind in kinds if kind in RIGOROUS]
    return next(
        (kind for kind in rigorous if all(math.isfinite(each.get(kind, 0.0)) for each in spent)),
        next(iter(kinds), None),
    )


def _line(trial: Trial, sweep: Sweep) -> str:
    metric = sweep.search.metric
    value = trial.value(metric)
    kind = _told([trial])
    parts = [trial.label, f"seed={trial.seed}"]
    if value is not None:
        parts.append(words({metric: value}))
    if kind:
        parts.append(f"epsilon {epsilons(trial)[kind]:.3g} ({kind.removeprefix('epsilon_')})")
    return "  ".join([*parts, f"{_rounds(trial)} rounds", trial.status])
