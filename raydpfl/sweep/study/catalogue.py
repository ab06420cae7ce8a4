"""What `raydpfl reproduce --list` shows: the studies, what each takes here and what it lost."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from raydpfl.errors import ConfigError
from raydpfl.sweep.study import builtin
from raydpfl.sweep.study.estimate import Estimate, estimate, measure
from raydpfl.sweep.study.schema import SCALES, Study

WIDTH = 78


def catalogue(
    console: Console,
    names: Sequence[str] = (),
    scale: str | None = None,
    seeds: int | None = None,
    root: Path | None = None,
) -> None:
    """Prints all studies that come with the package, with what is known of their cost here; or the
    named ones with all that they take at one scale, what was not timed yet being timed.

    Raises `ConfigError` for a scale or a number of seeds of none.
    """
    for field, value in (("--scale", scale), ("--seeds", seeds), ("--data-root", root)):
        if not names and value is not None:
            given = str(value) if isinstance(value, Path) else value
            raise ConfigError(field, given, "the name of a study as well, with --list")
    if not names:
        for name in builtin.paths():
            console.print(_entry(name), markup=False)
        return
    for given in names:
        for name in builtin.several(given):
            study = Study.named(name, scale, seeds)
            with console.status("timing a round of each kind of run"):
                taken = measure(study, root)
            console.print(_entry(name, study), markup=False)
            console.print(textwrap.indent(plan(study, taken), "  "), markup=False)


def _entry(name: str, study: Study | None = None) -> str:
    """A study in some lines: what it shows, and its runs at each scale, or at the one it has."""
    at_scales = [study] if study else [Study.named(name, scale) for scale in SCALES]
    said = at_scales[0].about
    lines = [textwrap.fill(f"{said.id}  {said.title}", WIDTH + 2, subsequent_indent="  ")]
    for what, text in (
        ("also", ", ".join(said.answers)),
        ("shows", said.shows),
        ("lost", said.lost),
    ):
        if text:
            words = " ".join(f"{what}: {text}".split())
            lines.append(textwrap.indent(textwrap.fill(words, WIDTH), "  "))
    if not study:
        for one in at_scales:
            lines.append(f"  {one.scale}: {counts(one)}; {estimate(one).words()}")
    return "\n".join(lines)


def counts(study: Study) -> str:
    """How many cells and runs there are."""
    runs = study.runs()
    seeds = "1 seed" if study.seeds == 1 else f"{study.seeds} seeds"
    told = f"{len(study.cells)} cells, {runs['final']} final runs over {seeds}"
    return f"{told}, {runs['tried']} to choose values by" if runs["tried"] else told


def plan(study: Study, taken: Estimate) -> str:
    """What a study would run at its scale, a line per cell, and what that takes here."""
    lines = [f"at scale {study.scale}: {counts(study)}; {taken.words()}"]
    for cell in study.cells:
        experiment = cell.experiment(next(cell.tried()), study.seed + 1)
        tried = ", ".join(
            f"{key} of {', '.join(map(str, each.options))}" for key, each in cell.grid.items()
        )
        sources = study.sources(cell)
        taken_from = ", ".join(f"{key} from {each.arm}" for key, each in sources.items())
        parts = [cell.named(), f"{experiment.rounds} rounds", tried, taken_from]
        lines.append("; ".join(part for part in parts if part))
    return "\n".join(lines)
