"""What a study would take on this machine, by `raydpfl.sweep.estimate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from raydpfl.experiment import Experiment
from raydpfl.sweep import estimate as machine
from raydpfl.sweep.estimate import Estimate
from raydpfl.sweep.study.schema import Study


def estimate(study: Study) -> Estimate:
    """From what has been timed on this machine."""
    return machine.estimate(runs(study))


def measure(study: Study, root: Path | None) -> Estimate:
    """Times what has not been timed yet: see `raydpfl.sweep.estimate.measure`."""
    return machine.measure(runs(study), root)


def runs(study: Study) -> Iterator[tuple[Experiment, int]]:
    """Each that would be run, and how often; of the values to be chosen the first stand for all."""
    for cell in study.cells:
        points = [*cell.tried()]
        if cell.grid and study.chooser(cell) is cell:
            for values in points:
                yield cell.experiment(values, study.seed, study.about.validation), 1
        yield cell.experiment(points[0], study.seed + 1), study.seeds
