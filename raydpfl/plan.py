"""The plan of a run: an experiment and its data put together once, before the first round.

It settles what `auto` left open (the lane, the way of training), calibrates the noise, and describes the mechanism. The
sampler, the clients' noise and the accountants all read this one object, so they cannot disagree; a combination that no
accountant covers is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from raydpfl import data, local, models, privacy
from raydpfl.config import Experiment
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.privacy import Guarantee, Mechanism, Query

LANE = 32  # clients at most, for the ways that train a whole lane at once


@dataclass(frozen=True)
class Plan:
    """Everything a run is made of. All stds scale with the bound in force, so the mechanism is the same in every round."""

    experiment: Experiment  # nothing left at auto but client.actors
    shards: Path
    population: int
    samples: int  # training samples of all clients together
    d: int  # model parameters
    weight: float  # the largest weight of any client's contribution
    ratio: float  # std of the noise on the sum of updates over (bound x weight); 0: no noise
    count_std: float  # std of the noise on the count of clients below the bound; 0: no such query
    mechanism: Mechanism | None  # None: not private

    @classmethod
    def make(cls, experiment: Experiment, data_root: Path | None = None) -> Plan:
        """Prepares the data, and raises `ConfigError` for whatever of the experiment they or the accountants cannot give."""
        if experiment.data.clients is not None:  # what can be said before the data are touched
            experiment.selection.check(experiment.data.clients)
            _mechanism(experiment, experiment.data.clients, 1.0)
        folder = data.prepare(experiment.data, experiment.seed, data_root)
        shards = Shards.open(folder)
        population, sizes = shards.clients, np.asarray(shards.sizes)
        experiment.selection.check(population)
        module = models.build(experiment.model, shards.shape, shards.classes, experiment.seed)
        way = local.resolve(module, experiment.local, int(sizes.max()), shards.shape, experiment.client.way)
        experiment = _resolve(experiment, way, experiment.selection.sampling(population).cohort)
        unit, weight = _mechanism(experiment, population, 1.0), experiment.weights.largest(sizes)
        z = _multiplier(experiment, unit, weight)
        mechanism = _mechanism(experiment, population, z) if unit else None
        stds = {query.name: query.std / query.bound for query in mechanism.queries} if mechanism else {}
        return cls(
            experiment=experiment,
            shards=folder,
            population=population,
            samples=int(sizes.sum()),
            d=models.parameter_count(module),
            weight=weight,
            ratio=stds.get("updates", 0.0),
            count_std=stds.get("count", 0.0) / 2,
            mechanism=mechanism,
        )

    def origin(self) -> dict[str, str]:
        """What a run's bits depend on beside the experiment, by name."""
        return {"data": self.shards.name, "torch": str(torch.__version__), "numpy": np.__version__}

    @property
    def accountant(self) -> str | None:
        """The accountant that calibrates the noise and holds the budget: the first rigorous one asked for, or paper if there is no other."""
        return _rigorous(self.experiment) or next(iter(self.experiment.privacy.accountants), None)

    def sum_std(self, bound: float | None) -> float:
        """Std of the noise on the sum of the contributions of a round with this bound."""
        return self.ratio * bound * self.weight if self.ratio else 0.0

    def client_std(self, bound: float | None) -> float:
        """Std of the noise that one client draws; 0 when the server draws it."""
        if self.experiment.noise.placement == "server":
            return 0.0
        return self.sum_std(bound) / math.sqrt(self.experiment.selection.divisor(self.population))

    def curves(self) -> dict[str, np.ndarray]:
        """Epsilon after 1, 2, ... rounds by every accountant, float64 [rounds] each."""
        if not self.mechanism:
            return {}
        e = self.experiment
        return {
            name: privacy.epsilon_curve(self.mechanism, e.relation, e.noise.delta, e.rounds, name, v=e.noise.v)
            for name in e.privacy.accountants
        }

    def guarantees(self, rounds: int, participations: Mapping[int, int]) -> list[Guarantee]:
        """What holds after `rounds` rounds, `participations` counting how often each client was drawn."""
        if not self.mechanism or rounds == 0:
            return []
        e = self.experiment
        most = max(participations.values(), default=0)
        return privacy.guarantees(self.mechanism, e.relation, e.noise.delta, rounds, e.privacy.accountants, participations=most, v=e.noise.v)


def lane_width(cohort: int) -> int:
    """How many clients of a cohort train at once: an even number of lanes, evenly filled, of at most `LANE`.

    >>> lane_width(150), lane_width(80), lane_width(10)
    (25, 20, 5)
    """
    return math.ceil(cohort / (2 * math.ceil(cohort / (2 * LANE))))


def _resolve(experiment: Experiment, way: str, cohort: int) -> Experiment:
    lane = experiment.client.lane
    if lane == "auto":
        lane = 1 if way == "loop" else lane_width(cohort)
    return experiment.model_copy(update={"client": experiment.client.model_copy(update={"way": way, "lane": lane})})


def _rigorous(experiment: Experiment) -> str | None:
    return next((name for name in experiment.privacy.accountants if name != "paper"), None)


def _mechanism(experiment: Experiment, population: int, z: float) -> Mechanism | None:
    """The mechanism at noise multiplier `z` per unit of bound; None when there is no noise.

    Raises `ConfigError` when one of the accountants asked for does not cover it.
    """
    if not experiment.private:
        return None
    bounding, noise = experiment.bounding, experiment.noise
    if bounding.adaptive:
        queries = (Query("updates", 1.0, z / math.sqrt(1 - bounding.share)), Query("count", 0.5, 0.5 * z / math.sqrt(bounding.share)))
    else:
        queries = (Query("updates", 1.0, z),)
    shown = "the tables and figures of this run show exact norms, losses and accuracies, which are not noised"
    sampling = experiment.selection.sampling(population)
    mechanism = Mechanism(sampling, queries, experiment.rounds, placement=noise.placement, exclusions=(*experiment.data.exclusions, shown))
    for name in experiment.privacy.accountants:
        reason = privacy.covers(name, mechanism, experiment.relation)
        if reason:
            raise ConfigError("privacy.accountants", name, reason)
    return mechanism


def _multiplier(experiment: Experiment, mechanism: Mechanism | None, weight: float) -> float:
    """The noise multiplier z: std of the noise on the sum over (bound x weight), the round's queries taken together."""
    noise, bounding = experiment.noise, experiment.bounding
    if mechanism is None:
        return 0.0
    if noise.multiplier is not None:
        return noise.multiplier
    r = mechanism.sampling.cohort
    if noise.std is not None:
        total = noise.std * (math.sqrt(r) if noise.placement == "client" else 1.0)
        return total / (bounding.initial_bound * weight)
    if noise.calibration == "paper":
        return privacy.paper_multiplier(noise.epsilon, mechanism.sampling, experiment.rounds, noise.delta, noise.v)
    accountant = _rigorous(experiment)
    if accountant is None:
        accepted = "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: paper"
        raise ConfigError("privacy.accountants", list(experiment.privacy.accountants), accepted)
    return privacy.noise_for(noise.epsilon, mechanism, experiment.relation, noise.delta, accountant, experiment.rounds)
