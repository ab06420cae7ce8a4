"""The public facts of a run's clients, as selection and weights give them, and what they have to
be.
"""

import numpy as np

from raydpfl.config.registry import Member
from raydpfl.errors import ConfigError
from raydpfl.methods.bounding import Bounding
from raydpfl.methods.selection import Population, Selection
from raydpfl.methods.weights import Weights


def check_means(
    selection: Selection, bounding: Bounding, stateful: Member | None, population: Population
) -> None:
    """Raises `ConfigError` where the server's quotient is not the mean that a member needs:
    `bounding`, or the one by which clients have a state.
    """
    if bounding.sends_model() and not selection.means(population):
        expected = "one whose cohorts all have the size that the sum is divided by, without own "
        expected += "weights or dropouts: the new model is the mean of those sent"
    elif stateful and selection.corrections(population) is not None:
        expected = f"one without weights of its own, as {stateful.kind} keeps the plain mean"
    else:
        return
    raise ConfigError("selection.kind", selection.kind, expected)


def client_weights(member: Weights, selection: Selection, population: Population) -> np.ndarray:
    """The factor float64 [N] of every client's contribution, computed once for all clients
    together. Raises `ConfigError` where they are not N finite numbers.
    """

    def compute() -> np.ndarray:
        count = len(population)
        weights = np.asarray(member.of(population.sizes, population.samples, count))
        numbers = weights.dtype.kind in "iuf" and weights.shape == (count,)
        if not (numbers and np.isfinite(weights).all()):
            expected = f"one whose weights are {count} finite numbers, one per client"
            raise ConfigError("weights.kind", member.kind, expected)
        weights = weights.astype(np.float64, copy=False)
        largest = float(np.abs(weights).max(initial=0.0))
        if not 1e-15 <= largest <= 1e15:
            expected = f"one whose largest weight is from 1e-15 to 1e15; this has {largest:g}"
            raise ConfigError("weights.kind", member.kind, expected)
        corrections = selection.corrections(population)
        return weights if corrections is None else weights * corrections

    return population.cached((member.model_dump_json(), selection.model_dump_json()), compute)


def check_composed_rounds(
    selection: Selection, seed: int, rounds: int, population: Population
) -> np.ndarray:
    """`Selection.composed_rounds`, int64 [rounds]. Raises `ConfigError` for what no cohorts of its
    scheme can come to: where cohorts are secret, each of t rounds draws among the scheme's whole
    population, so the N clients together were available t times that number.
    """
    composed_rounds = np.asarray(selection.composed_rounds(seed, rounds, population))
    sampling = selection.sampling(population)
    counts = composed_rounds.dtype.kind in "iu" and composed_rounds.shape == (rounds,)
    if not counts or (np.diff(composed_rounds, prepend=0) < 0).any():
        expected = f"one whose composed_rounds are {rounds} whole numbers that never fall"
        raise ConfigError("selection.kind", selection.kind, expected)
    available = np.arange(1, rounds + 1) * sampling.population
    shortfall_mask = composed_rounds * len(population) < available
    if not sampling.by_participation and shortfall_mask.any():
        t = int(np.argmax(shortfall_mask))
        expected = "one whose composed_rounds count every round that a client can be in; "
        expected += f"{sampling} cannot give {composed_rounds[t]} in {t + 1}"
        raise ConfigError("selection.kind", selection.kind, expected)
    return composed_rounds.astype(np.int64)
