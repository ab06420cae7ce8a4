"""Where user-defined code takes part in a run."""

from __future__ import annotations

from raydpfl.experiment import Experiment


def in_training(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in what a client does."""
    members = (
        experiment.local,
        experiment.bounding,
        experiment.model,
        experiment.evaluate.fine_tune,
        experiment.personal,
    )
    return any(member is not None and member.is_user_defined for member in members)


def in_run(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in anything that a process of the run does."""
    members = (
        experiment.noise,
        experiment.selection,
        experiment.data.task,
        *experiment.measure,
        *experiment.metrics,
    )
    return in_training(experiment) or any(member.is_user_defined for member in members)
