"""Noise at local steps, as accountants read it: each client's own, for the rounds in which it will
take part (002, 003).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.on_sums import excluded, first_that_can
from raydpfl.privacy import LocalSteps, paper_formulas

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.methods.noise.base import Facts
    from raydpfl.methods.noise.gaussian import Gaussian


def release(noise: Gaussian, facts: Facts) -> LocalSteps:
    """What the clients release at their local steps, each with noise of its own. Raises
    `ConfigError`.
    """
    e = facts.experiment
    what: dict[str, Any] = {
        "samples": facts.sizes,
        "batch": _batch(e, facts.sizes),
        "steps": _steps(e, facts.sizes),
        "bound": e.bounding.sample_bound,
        "delta": noise.delta,
        "sampling": e.local.sampling,
        "exclusions": (*e.data.sample_exclusions, *excluded(e, noise, at_steps=True)),
        "beside": e.selection.loss_query,
    }
    if noise.epsilon is None:
        silent = LocalSteps(stds=np.zeros(len(facts.sizes)), **what)
        return replace(silent, stds=_given(noise, silent))
    return _calibrated(noise, facts, what)


def _batch(experiment: Experiment, sizes: np.ndarray) -> int | np.ndarray | None:
    """Rows of a batch: one number, of which a smaller client uses all its rows, one for each
    client, int64 [N], or None for all of them. Raises `ConfigError` for a rule of the user's own
    whose batches are no part of a client's rows.
    """
    local = experiment.local
    taken = np.asarray(local.batch_sizes(sizes))
    counts = taken.shape == sizes.shape and taken.dtype.kind in "iu"
    if not counts or (taken < np.minimum(sizes, 1)).any() or (taken > sizes).any():
        expected = "a rule whose batch_sizes are integers from 1 to a client's rows, one per client"
        raise ConfigError("local.kind", local.kind, expected)
    if local.batch == "full" and np.array_equal(taken, sizes):
        return None
    if isinstance(local.batch, int) and np.array_equal(taken, np.minimum(sizes, local.batch)):
        return local.batch
    return taken


def _steps(experiment: Experiment, sizes: np.ndarray) -> int | np.ndarray:
    """Steps of a participation: one number, or one for each client, int64 [N]."""
    counts = experiment.local.step_counts(sizes)
    return int(counts[0]) if (counts == counts[0]).all() else counts


def _given(noise: Gaussian, silent: LocalSteps) -> np.ndarray:
    """Stds on the mean gradient, from the config's `std` or `multiplier`: float64 [N]."""
    if noise.std is not None:
        return np.full(len(silent.samples), noise.std)
    assert noise.multiplier is not None
    return noise.multiplier * silent.bound / np.maximum(silent.batches, 1)


def _calibrated(noise: Gaussian, facts: Facts, what: dict[str, Any]) -> LocalSteps:
    e = facts.experiment
    accountants = privacy.rigorous(e.privacy.accountants)
    if not accountants and noise.calibration == "rigorous":
        expected = (
            "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: paper or tcdp"
        )
        raise ConfigError("privacy.accountants", list(e.privacy.accountants), expected)
    counts = np.zeros(len(facts.sizes), np.int64)
    for clients in facts.draws():
        np.add.at(counts, clients, 1)
    budgets = drawn_budgets(noise, e.seed, len(facts.sizes), facts.data_root)
    what |= {"participations": counts, "budgets": budgets, "calibration": noise.calibration}
    return first_that_can(
        accountants or ("pld",), lambda name: LocalSteps.calibrated(accountant=name, **what)
    )


def variances(
    noise: Gaussian, experiment: Experiment, sizes: np.ndarray, root: Path | None
) -> np.ndarray | None:
    """See `Noise.variances`."""
    if noise.epsilon is None:
        return None
    held = np.maximum(sizes, 1)  # a client without samples is never drawn
    batches = experiment.local.batch_sizes(held)
    budgets = drawn_budgets(noise, experiment.seed, len(sizes), root)
    return paper_formulas.budget_variance(budgets, noise.delta, batch=batches, samples=held)


def drawn_budgets(noise: Gaussian, seed: int, clients: int, root: Path | None) -> np.ndarray:
    """The budget of every client: epsilon, float64 [N]; infinite for a public client."""
    if isinstance(noise.epsilon, int | float):
        return np.full(clients, float(noise.epsilon))
    assert noise.epsilon is not None
    return noise.epsilon.draw(seed, clients, root)


def check(noise: Gaussian, experiment: Experiment) -> None:
    """Raises `ConfigError` for settings that noise at local steps rules out."""
    if experiment.client.on_error == "drop":
        expected = (
            "fail, with noise at local steps: a client that failed would send no noise, and be "
            "known by it"
        )
        raise ConfigError("client.on_error", "drop", expected)
    if experiment.data.overlaps():
        expected = (
            "one that gives a sample to a single client, with noise at local steps, which protects "
            "samples"
        )
        raise ConfigError("data.partition.kind", "overlapping", expected)
    uncounted = experiment.selection.uncounted
    if uncounted is not None and noise.epsilon is None:
        expected = f"a budget to size the noise for, where {uncounted}"
        raise ConfigError("noise.epsilon", None, expected)
    if noise.rounds is not None:
        expected = "none with placement step: a client's noise is for the rounds that it is in"
        raise ConfigError("noise.rounds", noise.rounds, expected)
    if noise.v != 4.0:
        expected = "none with placement step, whose formulas have no such constant"
        raise ConfigError("noise.v", noise.v, expected)
    if noise.virtual_cohort is not None:
        expected = "none with placement step: each client's noise is its own"
        raise ConfigError("noise.virtual_cohort", noise.virtual_cohort, expected)
    relation = experiment.privacy.relation
    if relation not in ("auto", "replace_one"):
        expected = "replace_one (of a sample), for noise at local steps"
        raise ConfigError("privacy.relation", relation, expected)
