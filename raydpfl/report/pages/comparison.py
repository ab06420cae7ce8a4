"""The page of several runs that are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydpfl.report.figures import Piece
from raydpfl.report.page import Page, Section, Tile
from raydpfl.report.pages.base import Source, file_text, placed
from raydpfl.report.pages.run import RunSource, guarantee_row, state
from raydpfl.report.reading import Case, Run
from raydpfl.report.tables import Table
from raydpfl.report.words import accountant, listed, number, quantity

SCORES = ("test_accuracy", "best_test_accuracy", "test_loss", "rounds", "seconds")


class Comparison(Source):
    """Several runs, each of them a line of its own in every figure."""

    name = "comparison"
    several = True

    def fits(self, folder: Path) -> bool:
        return RunSource().fits(folder)

    def page(self, folders: Sequence[Path]) -> Page:
        runs = [Run(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
        cases = [Case({"run": run.name}, run) for run in runs]
        more: dict[str, Sequence[Piece]] = {"Privacy": [guarantees(runs)]}
        head = Section("Results", [results(runs), differences(runs)])
        sections = [head, *placed(cases, more)]
        files = [file_text(run.folder / "config.yaml", run.flaws) for run in runs[:1]]
        sections.append(Section("Config of the first", files))
        lead = [f"The runs {listed([run.name for run in runs])}. {best(runs)}"]
        lead.append("Each epsilon holds for its own run; showing several runs spends several.")
        warnings = [f"{run.name}: {each}" for run in runs for each in state(run)]
        flaws = [f"{run.name}: {each}" for run in runs for each in run.flaws]
        return Page(f"{len(runs)} runs compared", lead, tiles(runs), sections, warnings, flaws)


def names(folders: Sequence[Path]) -> list[str]:
    """What runs are called: their directories' names, with so many of their parents' as it takes to
    tell them apart.
    """
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(each) for each in parts) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(found):
            return found
    return [f"{'/'.join(each[-1:])} ({place})" for place, each in enumerate(parts, 1)]


def best(runs: Sequence[Run]) -> str:
    """Which has the best accuracy, in a sentence."""
    scores = {run.name: run.number("test_accuracy") for run in runs}
    known = {name: value for name, value in scores.items() if value is not None}
    if not known:
        return "None of them has a test accuracy."
    name = max(known, key=lambda each: known[each])
    return f"The best test accuracy in the last round is {known[name]:.2%}, of {name}."


def tiles(runs: Sequence[Run]) -> list[Tile]:
    """The accuracy and what holds of each run."""
    found = []
    for run in runs[:8]:
        note = "not private"
        if run.holds:
            note = f"epsilon {number(run.holds[0].epsilon)} holds, delta {run.holds[0].delta:g}"
        elif run.guarantees:
            note = "no rigorous guarantee"
        score = run.number("test_accuracy")
        loss = run.number("test_loss")
        shown = f"loss {number(loss)}" if score is None else number(score, percent=True)
        found.append(Tile(run.name, shown, note))
    return found


def results(runs: Sequence[Run]) -> Table:
    """Scores, and every accountant's epsilon as it is stated first, a row for each run."""
    kinds: dict[str, str] = {}
    for run in runs:
        for one in run.guarantees:
            kinds.setdefault(one.accountant, one.kind)
    scores = [name for name in SCORES if any(run.number(name) is not None for run in runs)]
    rows = []
    for run in runs:
        first: dict[str, float] = {}
        for one in run.guarantees:
            first.setdefault(one.accountant, one.epsilon)
        row: list[Any] = [run.name, *(run.number(name) for name in scores)]
        row += [run.holds[0].epsilon if run.holds else None, *(first.get(name) for name in kinds)]
        rows.append(row)
    epsilons = [f"epsilon, {accountant(name)} ({kind})" for name, kind in kinds.items()]
    head = ("run", *(quantity(name).label for name in scores), "epsilon that holds", *epsilons)
    percents = {place for place, name in enumerate(scores, 1) if quantity(name).percent}
    caption = "The best round is chosen on the test set, which flatters it. From summary.json."
    return Table("results", "Results", caption, head, rows, percents)


def differences(runs: Sequence[Run]) -> Table:
    """The keys in which the configs differ."""
    leaves = [_leaves(run.config) for run in runs]
    keys = dict.fromkeys(key for each in leaves for key in each)
    rows = [
        [key, *(each.get(key, "") for each in leaves)]
        for key in keys
        if len({each.get(key, "") for each in leaves}) > 1
    ]
    caption = "What the configs differ in; empty where a config has no such key. From config.yaml."
    head = ("key", *(run.name for run in runs))
    return Table("differences", "Differences", caption, head, rows)


def _leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _leaves(value, f"{path}{key}.")
        else:
            found[f"{path}{key}"] = json.dumps(value, default=str).strip('"')
    return found


def guarantees(runs: Sequence[Run]) -> Table:
    """All guarantees of all runs."""
    rows = [[run.name, *guarantee_row(one, run.holds)] for run in runs for one in run.guarantees]
    head = ("run", "kind", "accountant", "epsilon", "delta", "holds", "unit", "relation", "against")
    caption = "Epsilons of different kinds are never compared. From summary.json."
    return Table(
        "guarantees", "Guarantees", caption, (*head, "sampling", "conditions that fail"), rows
    )
