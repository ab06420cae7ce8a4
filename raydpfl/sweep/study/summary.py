"""summary.json of a study: how it ended, how values were chosen, and which identities hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydpfl.sweep.study.cells import label
from raydpfl.sweep.study.identities import looked_at, words
from raydpfl.sweep.study.progress import Progress
from raydpfl.sweep.study.schema import Study
from raydpfl.sweep.trial_folders import trained
from raydpfl.sweep.trial_source import Trial

STATES = ("completed", "budget", "stopped", "failed", "running", "waiting")


def of(study: Study, progress: Sequence[Progress], folder: Path, over: bool) -> dict[str, Any]:
    """All that is known, but for the seconds it took."""
    # the directory and the digest of the model of every final run, by cell and seed
    models = {each.cell: {trial.seed: _model(trial) for trial in each.finals} for each in progress}
    identities = [looked_at(each, models) for each in study.same_bits]
    reason = _problem(progress, identities) if over else None
    status = "running"
    if over:
        status = "failed" if reason else "completed"
    found = trained(folder / "trials")
    return {
        "status": status,
        "reason": reason,
        "study": study.about.id,
        "scale": study.scale,
        "seeds": [*study.final_seeds()],
        "cells": len(progress),
        "tried": _states([each.trial for one in progress for each in one.tries]),
        "final": _states([trial for one in progress for trial in one.finals]),
        "trained": {"runs": len(found), "private": sum(found.values())},
        "failed": _failed(progress),
        "identities": identities,
        "tuning": tuned(study, progress, found),
    }


def _model(trial: Trial) -> tuple[str, str] | None:
    digest = (trial.summary or {}).get("model_sha256")
    return (trial.folder.name, digest) if trial.finished and digest else None


def _states(trials: Sequence[Trial]) -> dict[str, int]:
    """How many runs are in which state; `runs`: all, each counted once."""
    apart = {trial.folder: trial.status for trial in trials}
    states = list(apart.values())
    return {"runs": len(apart), **{state: states.count(state) for state in STATES}}


def _failed(progress: Sequence[Progress]) -> list[dict[str, str]]:
    """Final runs and cells without a result, and why."""
    found = {}
    for each in progress:
        if each.problem:
            found[each.cell.named()] = {"cell": each.cell.named(), "reason": each.problem}
        for trial in each.finals:
            if trial.status == "failed":
                place = f"trials/{trial.folder.name}"
                found[place] = {"directory": place, "cell": trial.named()}
                found[place]["reason"] = trial.failure()
    return list(found.values())


def _problem(progress: Sequence[Progress], identities: Sequence[dict[str, Any]]) -> str | None:
    """Why a study that is over is not as it should be, in one line."""
    said = []
    failed = _failed(progress)
    if failed:
        first = failed[0]
        told = f"{first['cell']}: {first['reason']}"
        more = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        said.append(f"without a result: {told}{more}; go on with --resume")
    broken = [words(each) for each in identities if each["held"] is False]
    if broken:
        said.append("an identity is broken: " + "; ".join(broken))
    return "; ".join(said) or None


def tuned(
    study: Study, progress: Sequence[Progress], trained: Mapping[str, bool]
) -> dict[str, Any]:
    """How many settings each arm tried in a cell, and what their choice is worth, in words.

    Args:
        study: What is run.
        progress: Of every cell.
        trained: Every run of the directory, by name, and whether it was private.
    """
    arms: dict[str, list[int]] = {}
    for each in progress:
        count = 1
        for options in each.cell.grid.values():
            count *= len(options.options)
        arms.setdefault(each.cell.arm, []).append(count if each.cell.grid else 0)
    ranges = {arm: (min(counts), max(counts)) for arm, counts in arms.items()}
    return {
        "judge": study.about.judge,
        "validation": study.about.validation,
        "seed": study.seed,
        "at": {axis: label(name) for axis, name in study.about.chosen_at.items()},
        "settings": {arm: list(ends) for arm, ends in ranges.items()},
        "equal": len(set(ranges.values())) == 1,
        "statement": _statement(study, ranges, *_counted(progress, trained)),
    }


def _counted(progress: Sequence[Progress], trained: Mapping[str, bool]) -> tuple[int, int]:
    """How many private runs values were chosen among, and how many of them the study has no more:
    of former values, arms and seeds, which are in the directory.
    """
    tried = {each.trial.folder.name: each.trial for one in progress for each in one.tries}
    final = {trial.folder.name for one in progress for trial in one.finals}
    former = [private for name, private in trained.items() if name not in {*tried, *final}]
    private = sum(trial.experiment.private for trial in tried.values())
    return private + sum(former), sum(former)


def _statement(study: Study, ranges: dict[str, tuple[int, int]], private: int, former: int) -> str:
    if not any(most for _, most in ranges.values()):
        return "No value was chosen by looking at results."
    about = study.about
    each = ", ".join(
        f"{arm} {least}" if least == most else f"{arm} {least} to {most}"
        for arm, (least, most) in ranges.items()
    )
    where = "".join(f" at {axis}={label(name)}" for axis, name in about.chosen_at.items())
    told = (
        f"Values were chosen in each cell{where} by the {about.judge.replace('_', ' ')} of one run"
    )
    told += f" (seed {study.seed}) per setting"
    if about.validation:
        told += f", on {about.validation:.0%} of every client's rows, held out of training"
    told += "; the test set was not looked at. Settings tried in a cell, by arm: " + each
    told += ". The final runs have other seeds, and all rows."
    if private:
        of = f", {former:,} of which are of former settings or arms," if former else ""
        told += (
            f" The choice among {private:,} private runs{of} is itself a query on the data: each"
            " epsilon holds for its own run alone, and none covers the choice."
        )
    return told
