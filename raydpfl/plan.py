"""The plan of a run: an experiment and its data put together once, before the first round.

It settles what `auto` left open (the lane, the way of training), calibrates the noise, and
describes the mechanism. The sampler, the clients' noise and the accountants all read this one
object, so they cannot disagree; a combination that no accountant covers is refused here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl import data, local, models, origin, privacy
from raydpfl.config import Experiment, as_fields
from raydpfl.data import Shards
from raydpfl.errors import BudgetError, ConfigError, RunError
from raydpfl.noise import Noise
from raydpfl.noise.banded_gaussian import BandedGaussian
from raydpfl.own import is_own
from raydpfl.privacy import (
    Guarantee,
    LocalSteps,
    Mechanism,
    Query,
    Release,
    Segment,
    Terms,
    paper,
)
from raydpfl.privacy.factorization import check as check_bands
from raydpfl.selection import Population, Selection
from raydpfl.selection.witness import fingerprint

log = logging.getLogger("raydpfl")
SHOWN = "the tables and figures of this run show exact norms, losses and accuracies, which are not noised; how many samples each client has is taken as public"
# What may differ between a run and its resumption: where it runs and what it shows, never what it
# computes.
FREE = {"client": {"actors", "num_cpus", "timeout"}}
LANE = 32  # clients at most, for the ways that train a whole lane at once


@dataclass(frozen=True)
class Plan:
    """Everything a run is made of. All stds scale with the bound in force, so the mechanism is the
    same in every round.
    """

    experiment: Experiment  # nothing left at auto but client.actors
    shards: Path
    population: Population
    d: int  # model parameters
    weight: float  # the largest weight of any client's contribution
    ratio: float  # std of the noise on the sum of updates over (bound x weight); 0: no noise
    # by bounding's queries: std of the noise on the sum of the answers, in their units
    side_stds: Mapping[str, float]
    survivors: int  # clients that the round with most dropouts keeps
    mechanism: Release | None  # None: not private
    # int64 [rounds]: how many of the first t + 1 rounds a guarantee composes over
    exposures: np.ndarray
    platform: Mapping[str, str]  # code, versions and processor: see `raydpfl.origin`
    # what was released before the run was begun anew with fresh noise
    history: tuple[Segment, ...] = ()
    first: int = 0  # the round that it was begun anew from

    @classmethod
    @as_fields()
    def make(cls, experiment: Experiment, data_root: Path | None = None) -> Plan:
        """Prepares the data, and raises `ConfigError` for whatever of the experiment they or the
        accountants cannot give.
        """
        experiment.complete()
        if experiment.data.clients is not None:  # what can be said before the data are touched
            count = experiment.data.clients
            experiment.selection.fits(count)
            _mechanism(
                experiment,
                Population.balanced(count, experiment.selection.table(count, data_root)),
                1.0,
            )
        folder = data.prepare(experiment.data, experiment.seed, data_root)
        shards = Shards.open(folder)
        sizes = np.array(shards.sizes)
        experiment.selection.fits(len(sizes))
        module = models.build(experiment.model, shards.shape, shards.classes, experiment.seed)
        d = models.parameter_count(module)
        clip = experiment.bounding.sample_bound
        regression = shards.classes == 0
        way = local.resolve(
            module,
            experiment.local,
            int(sizes.max()),
            shards.shape,
            experiment.client.way,
            clip=clip,
            regression=regression,
        )
        population = Population(
            sizes,
            experiment.selection.costs(d, lambda: _variances(experiment, sizes, data_root)),
            experiment.selection.table(len(sizes), data_root),
        )
        experiment = _resolve(experiment, way, experiment.selection.sampling(population).cohort)
        seed = experiment.seed
        rounds = experiment.rounds
        selection = experiment.selection
        if experiment.bounding.sends_model and not selection.means(population):
            accepted = "one whose cohorts all have the size that the sum is divided by, without weights or dropouts: the new model is the mean of those sent"
            raise ConfigError("selection.kind", selection.kind, accepted)
        if experiment.stateful and selection.corrections(population) is not None:
            accepted = f"one without weights of its own, as {experiment.stateful.kind} keeps the plain mean over all clients"
            raise ConfigError("selection.kind", selection.kind, accepted)
        weight = float(np.abs(_weights(experiment, population)).max())
        survivors = selection.survivors(seed, rounds, population)
        exposures = composed(selection, seed, rounds, population)
        platform = origin.of(experiment)
        plan = cls(
            experiment,
            folder,
            population,
            d,
            weight,
            0.0,
            {},
            survivors,
            None,
            exposures,
            platform,
        )
        if not experiment.private:
            return plan
        if experiment.noise.placement == "step":
            return _held(replace(plan, mechanism=_local_steps(experiment, population, data_root)))
        if isinstance(experiment.noise, BandedGaussian):
            check_bands(
                experiment.noise.bands, selection.sampling(population), selection.separation
            )
            noise = experiment.noise.resolve(rounds, experiment.server.persistence())
            experiment = experiment.model_copy(update={"noise": noise})
            plan = replace(plan, experiment=experiment)
        unit = _mechanism(experiment, population, 1.0, int(plan.exposures[-1]))
        z = _multiplier(experiment, unit, weight, survivors)
        mechanism = _mechanism(experiment, population, z, int(plan.exposures[-1]))
        stds = {query.name: query.std / query.bound for query in mechanism.queries}
        # A virtual cohort's noise, scaled down to the sum of those who are simulated.
        share = selection.sampling(population).cohort / mechanism.sampling.cohort
        asked = {query.name: query.bound for query in experiment.bounding.queries()}
        side = {name: stds[name] * bound * share for name, bound in asked.items()}
        return _held(
            replace(
                plan,
                mechanism=mechanism,
                ratio=stds["updates"] * share,
                side_stds=side,
            )
        )

    def continued(self, segments: tuple[Segment, ...], anew: int | None = None) -> Plan:
        """This plan for a run that has released `segments`: going on in the last of them, or anew
        from round `anew`.
        """
        if not segments:
            return self
        history, first = (segments[:-1], segments[-1].first) if anew is None else (segments, anew)
        if not history:
            return self
        e = self.experiment
        seeds = [seed_of(e.seed, again) for again in range(1, len(history) + 1)]
        drawn = [e.selection.survivors(seed, e.rounds, self.population) for seed in seeds]
        return replace(self, history=history, first=first, survivors=min(self.survivors, *drawn))

    def origin(self) -> dict[str, str]:
        """What a run's bits depend on besides the experiment, by name."""
        ran = {"mechanism": self.mechanism.digest()} if self.mechanism else {}
        drawn = {"cohorts": self._cohorts()} if self.mechanism else {}
        # a checkpoint of another run goes on nowhere else
        own = f"{_digest64([self.experiment.seed, self._kept()]):016x}"
        found = {"experiment": own, "data": self.shards.name, "clients": self._clients()}
        return found | drawn | ran | dict(self.platform)

    def _cohorts(self) -> str:
        """A digest of the draws by the experiment's own seed: of all rounds for an own selection,
        else of the first few.

        What was released before a change of code or of versions is counted by draws that are made
        again after it.
        """
        e = self.experiment
        rounds = e.rounds if is_own(type(e.selection)) else min(e.rounds, 4)

        def compute() -> str:
            drawn = [e.selection.exposed(e.seed, t, self.population) for t in range(rounds)]
            return hashlib.sha256(b"".join(fingerprint(clients) for clients in drawn)).hexdigest()[
                :16
            ]

        return self.population.remember(("cohorts", e.seed, rounds), compute)

    def _clients(self) -> str:
        """A digest of what the plan holds of each client."""
        known = [
            self.population.privacy_cost,
            self.experiment.selection.corrections(self.population),
        ]
        known += self.mechanism.client_facts() if self.mechanism else ()
        # which may depend on more than its source and the data
        if is_own(type(self.experiment.weights)):
            known.append(_weights(self.experiment, self.population))
        return hashlib.sha256(
            b"".join(each.tobytes() for each in known if each is not None)
        ).hexdigest()[:16]

    @property
    def again(self) -> int:
        """How often the run was begun anew with fresh noise."""
        return len(self.history)

    @property
    def repeated(self) -> int:
        """How many releases there were besides those of the rounds as they count now."""
        return sum(map(len, self.history)) - self.first

    @property
    def seed(self) -> int:
        """The seed of batches, of randomness inside modules and of secret cohorts, from round
        `first` on.
        """
        return seed_of(self.experiment.seed, self.again)

    @property
    def noise_seed(self) -> int:
        """The seed of the noise, below 2^64: a digest of all that a release depends on, so that no
        other release has it.

        That is the experiment (but for its number of rounds, what it measures and where it runs),
        the data, the clients' weights and noise, the user's code, the versions and how the
        processor computes. Two keys of 64 bits are the same with probability 2^-64. With
        `noise.common` it is the experiment's own seed.
        """
        if self.experiment.noise.of_seed:
            return self.seed
        side = list(self.side_stds.values()) or [0.0]
        sizes = [self.ratio, *side, self.survivors, self.weight, self.d]
        facts = [
            self.seed,
            self.again,
            self._kept(),
            sizes,
            self.shards.name,
            self._clients(),
            dict(self.platform),
        ]
        return _digest64(facts)

    def _kept(self) -> dict[str, Any]:
        """What of the experiment a release depends on, besides its seed and how large its noise is."""
        tree = self.experiment.to_dict()
        kept = {
            name: tree[name]
            for name in ("model", "selection", "local", "bounding", "weights", "server")
        }
        for name in self.experiment.selection.named:  # the file is among the clients' facts
            kept["selection"].pop(name)
        kept["client"] = {
            name: value for name, value in tree["client"].items() if name not in FREE["client"]
        }
        kept["noise"] = self.experiment.noise.release()
        return kept

    @property
    def rigorous(self) -> tuple[str, ...]:
        """Of `named`, the rigorous accountants that cover the mechanism: the smallest epsilon of
        theirs is held against the budget.
        """
        return tuple(
            name
            for name in privacy.rigorous(self.named)
            if not _uncovered(name, self.experiment, self.mechanism)
        )

    @property
    def noise_multiplier(self) -> float | None:
        """Std of the noise on the sum / bound, all queries of a round taken together; None where
        there is no one such number.
        """
        return self.mechanism.noise_multiplier if self.mechanism else None

    @property
    def terms(self) -> Terms:
        """What guarantees are asked for at."""
        e = self.experiment
        return Terms(e.relation, e.noise.delta, e.noise.v)

    @property
    def covering(self) -> tuple[str, ...]:
        """Of `named`, those that cover the mechanism; of the others the guarantees say why they do
        not.
        """
        return tuple(
            name for name in self.named if not _uncovered(name, self.experiment, self.mechanism)
        )

    @property
    def named(self) -> tuple[str, ...]:
        """The accountants that guarantees are given by: those asked for, and where that is paper
        alone, which never stands by itself, a rigorous one that covers the mechanism: rdp, else
        pld.
        """
        asked = self.experiment.privacy.accountants
        if not asked or _rigorous(self.experiment):
            return asked
        beside = next(
            (
                name
                for name in ("rdp", "pld")
                if not _uncovered(name, self.experiment, self.mechanism)
            ),
            "rdp",
        )
        return (*asked, beside)

    @property
    def cohort(self) -> int:
        """The nominal size of a cohort."""
        return self.experiment.selection.sampling(self.population).cohort

    @property
    def divisor(self) -> float:
        """What the server divides the sum of the contributions by."""
        return self.experiment.selection.divisor(self.population)

    def weights(self, clients: np.ndarray) -> np.ndarray:
        """The factors float64 [r] of these clients' contributions.

        Raises `RunError` for one above `weight`, which is what the accountants were told.
        """
        weights = _weights(self.experiment, self.population)[clients]
        heaviest = float(np.abs(weights).max(initial=0.0))
        if not heaviest <= self.weight:
            raise RunError(
                f"weights.kind {self.experiment.weights.kind} gives a client weight {heaviest:g}, "
                f"above the {self.weight:g} that was accounted for"
            )
        return weights

    def sum_std(self, bound: float | None) -> float:
        """Std of the noise on the sum of the contributions of a round with this bound; 0 when it is
        drawn at local steps.
        """
        return self.ratio * bound * self.weight if self.ratio else 0.0

    def released_std(self, bound: float | None) -> float | None:
        """As `sum_std`; None where each client has noise of its own at its local steps."""
        by_draws = self.mechanism is not None and self.mechanism.by_draws
        return None if by_draws else self.sum_std(bound)

    def client_std(self, bound: float | None) -> float:
        """Std of the noise that one client draws on what it sends; 0 when it draws none. The round
        with most dropouts still has the sum's.
        """
        return self.experiment.noise.client_std(self.sum_std(bound), self.survivors)

    def step_stds(self, clients: np.ndarray) -> np.ndarray | None:
        """Stds float64 [r] of the noise of these clients on the mean gradient of each local step;
        None when there is none.
        """
        return self.mechanism.step_stds(clients) if self.mechanism else None

    def check_claims(self) -> None:
        """Warns of what whoever reads the results should know; raises `BudgetError` when some
        client has been promised more than will hold.

        A run that was begun anew has released rounds twice: then that is a warning, and the
        guarantees say what holds.
        """
        e = self.experiment
        if said := _classes(Shards.open(self.shards)):
            log.warning(said)
        for warning in e.warnings():
            log.warning(warning)
        mechanism = self.mechanism
        if not mechanism:
            return
        loose = privacy.loose(e.noise.delta, mechanism.largest, mechanism.unit)
        if loose:
            log.warning(loose)
        seen = self.participations(e.rounds) if mechanism.by_draws else {}
        for warning in mechanism.warnings(seen):
            log.warning(warning)
        try:
            mechanism.check_claims(seen)
        except BudgetError as error:
            if not self.history:
                raise
            log.warning("%s, as rounds were released twice", error)

    def check_law(self) -> None:
        """Raises `RunError` where the selection declares another law by now than the mechanism was
        told of.
        """
        told = self.mechanism.cohorts if self.mechanism else None
        if told is None:
            return
        selection = self.experiment.selection
        now = selection.sampling(self.population)
        if self.experiment.noise.virtual_cohort:
            now = replace(now, population=told.population, cohort=told.cohort)
        facts = [
            (type(one.law), one.population, one.cohort, one.p_max, one.rule) for one in (told, now)
        ]
        if facts[0] != facts[1]:
            raise RunError(
                f"selection.kind {selection.kind} declares {now}, and declared {told} when that was accounted for: "
                "no accountant covers what it does"
            )

    def curves(self, draws: list[np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Epsilon after 1, 2, ... rounds by every accountant, float64 [rounds] each: of a client,
        or of the sample that has spent most.

        `draws`: as the method gives them for all rounds, where they are at hand.
        """
        if not self.mechanism:
            return {}
        if draws is None and self.mechanism.by_draws:
            draws = self.draws(self.experiment.rounds)
        composed = self.exposures + self.repeated
        return self.mechanism.curves(self.named, draws, composed, self.terms)

    def cohort_seed(self, again: int | None = None) -> int:
        """The seed of the cohorts of a segment, the present one by default.

        Where the cohort is a secret, a round that is released again has one of its own, or it would
        amplify but once.
        """
        hidden = self.mechanism is not None and self.mechanism.hidden
        return seed_of(
            self.experiment.seed, (self.again if again is None else again) if hidden else 0
        )

    def draws(self, rounds: int) -> list[np.ndarray]:
        """The clients of each release up to round `rounds`, with repeats: known before the first,
        as they depend on the seed alone.
        """
        past = [
            (self.cohort_seed(one.again), t)
            for one in self.history
            for t in range(one.first, one.end)
        ]
        present = [(self.cohort_seed(), t) for t in range(self.first, rounds)]
        exposed = self.experiment.selection.exposed
        return [exposed(seed, t, self.population) for seed, t in (*past, *present)]

    def counted_draws(self) -> list[np.ndarray] | None:
        """`draws` of the whole run, where what clients spend depends on these; else None."""
        if self.mechanism is None or not self.mechanism.by_draws:
            return None
        return self.draws(self.experiment.rounds)

    def participations(self, rounds: int) -> Counter:
        """How often the seed draws each client in the releases up to round `rounds`; where losses
        choose among candidates, how often it is one.
        """
        return Counter(client for clients in self.draws(rounds) for client in clients.tolist())

    def guarantees(self, rounds: int, participations: Mapping[int, int]) -> list[Guarantee]:
        """What holds after `rounds` rounds, `participations` counting how often each client was
        drawn.
        """
        if not self.mechanism or rounds == 0:
            return []
        # of a virtual cohort's clients nobody knows how often they are drawn
        seen = None if self.experiment.noise.virtual_cohort else participations
        composed = int(self.exposures[rounds - 1]) + self.repeated
        return self.mechanism.guarantees(seen, self.named, composed, self.terms)


def _classes(shards: Shards) -> str | None:
    """What is odd about the classes of the training samples, in words; None for nothing."""
    present = shards.classes - len(shards.unseen)
    if shards.classes and present == 1:
        return "all training samples are of one class: there is nothing to tell apart"
    if not shards.unseen:
        return None
    some = ", ".join(map(str, shards.unseen[:5])) + (", ..." if len(shards.unseen) > 5 else "")
    return (
        f"no training sample is of {len(shards.unseen)} of the {shards.classes} classes ({some}); "
        "the model has an output for each: number the classes from 0 without gaps"
    )


def composed(selection: Selection, seed: int, rounds: int, population: Population) -> np.ndarray:
    """`Selection.exposures`, int64 [rounds]. Raises `ConfigError` for what no cohorts of its law
    can come to.

    Where cohorts are a secret, each of t rounds draws among the law's whole population, so that the
    N clients together were available t times that number, each of them in as many rounds as are
    composed at most.
    """
    found = np.asarray(selection.exposures(seed, rounds, population))
    law = selection.sampling(population)
    if (
        found.shape != (rounds,)
        or found.dtype.kind not in "iu"
        or (np.diff(found, prepend=0) < 0).any()
    ):
        accepted = f"one whose exposures are {rounds} whole numbers that never fall, one per round"
        raise ConfigError("selection.kind", selection.kind, accepted)
    available = np.arange(1, rounds + 1) * law.population
    if not law.by_participation and (found * len(population) < available).any():
        t = int(np.argmax(found * len(population) < available))
        accepted = f"one whose exposures count every round that a client can be in; {law} cannot give {found[t]} in {t + 1}"
        raise ConfigError("selection.kind", selection.kind, accepted)
    return found.astype(np.int64)


def seed_of(seed: int, again: int) -> int:
    """The seed of a run that was begun anew `again` times; its own where it was not."""
    return _digest64(["again", seed, again]) if again else seed


def _digest64(facts: list) -> int:
    """64 bits of the SHA-256 of `facts`, JSON values."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def lane_width(cohort: int) -> int:
    """How many clients of a cohort train at once: an even number of lanes, evenly filled, of at
    most `LANE`.

    >>> lane_width(150), lane_width(80), lane_width(10)
    (25, 20, 5)
    """
    return math.ceil(cohort / (2 * math.ceil(cohort / (2 * LANE))))


def _resolve(experiment: Experiment, way: str, cohort: int) -> Experiment:
    lane = experiment.client.lane
    if lane == "auto":
        lane = 1 if way in ("loop", "layerwise") else lane_width(cohort)
    return experiment.model_copy(
        update={"client": experiment.client.model_copy(update={"way": way, "lane": lane})}
    )


def _rigorous(experiment: Experiment, mechanism: Release | None = None) -> tuple[str, ...]:
    """The rigorous accountants asked for, of those that cover the mechanism if it is known."""
    asked = privacy.rigorous(experiment.privacy.accountants)
    return tuple(name for name in asked if not _uncovered(name, experiment, mechanism))


def _held(plan: Plan) -> Plan:
    """`plan`. Raises `ConfigError` where its budget could only be held by an epsilon that no proof
    stands behind.
    """
    budget = plan.experiment.privacy.budget
    mechanism = plan.mechanism
    if budget is None:
        return plan
    if not plan.rigorous:
        reason = _uncovered(plan.named[-1], plan.experiment, mechanism)
        raise ConfigError(
            "privacy.budget", budget, f"none here, as no rigorous accountant can hold it: {reason}"
        )
    if mechanism and mechanism.unproved:
        accepted = f"none here, as no proof holds it: {mechanism.unproved}"
        raise ConfigError("privacy.budget", budget, accepted)
    return plan


def _uncovered(name: str, experiment: Experiment, mechanism: Release | None) -> str | None:
    """Why this accountant does not cover the mechanism; None if it does."""
    return mechanism.uncovered(name, experiment.relation) if mechanism else None


def _weights(experiment: Experiment, population: Population) -> np.ndarray:
    """The factor float64 [N] of every client's contribution, computed once for all clients
    together.

    Raises `ConfigError` unless they are N finite numbers.
    """

    def compute() -> np.ndarray:
        count = len(population)
        member = experiment.weights
        given = np.asarray(member.of(population.sizes, population.samples, count))
        weights = given.astype(np.float64) if given.dtype.kind in "iuf" else np.empty(0)
        largest = float(np.abs(weights).max(initial=0.0))
        if weights.shape != (count,) or not np.isfinite(weights).all():
            accepted = f"one whose weights are {count} finite numbers, one per client"
            raise ConfigError("weights.kind", member.kind, accepted)
        if not 1e-15 <= largest <= 1e15:
            accepted = f"one whose largest weight is from 1e-15 to 1e15; this has {largest:g}"
            raise ConfigError("weights.kind", member.kind, accepted)
        corrections = experiment.selection.corrections(population)
        return weights if corrections is None else weights * corrections

    members = (experiment.weights, experiment.selection)
    return population.remember(tuple(member.model_dump_json() for member in members), compute)


def _variances(
    experiment: Experiment, sizes: np.ndarray, data_root: Path | None
) -> np.ndarray | None:
    """V_k of 003 Problem 1, float64 [N]: the variance of each client's noise for a bound of 1; None
    where clients have no budgets of their own.
    """
    if experiment.noise.placement != "step" or experiment.noise.epsilon is None:
        return None
    held = np.maximum(sizes, 1)  # a client without samples is never drawn
    batches = np.minimum(held, experiment.local.batch_size(int(sizes.max())))
    budgets = _budgets(experiment, len(sizes), data_root)
    return paper.budget_variance(budgets, experiment.noise.delta, batch=batches, samples=held)


def _budgets(experiment: Experiment, clients: int, data_root: Path | None) -> np.ndarray:
    """The epsilon of every client's samples, float64 [N]; infinite for a public client."""
    epsilon = experiment.noise.epsilon
    return (
        np.full(clients, float(epsilon))
        if isinstance(epsilon, (int, float))
        else epsilon.draw(experiment.seed, clients, data_root)
    )


def _local_steps(
    experiment: Experiment, population: Population, data_root: Path | None
) -> LocalSteps:
    """What the clients release at their local steps, each with noise of its own for the rounds that
    it will take part in.
    """
    e = experiment
    noise = experiment.noise
    counts = np.zeros(len(population), np.int64)
    for clients in _draws(e, population, e.rounds):
        np.add.at(counts, clients, 1)
    release = {
        "samples": population.sizes, "batch": None if e.local.batch == "full" else e.local.batch, "steps": e.local.steps,
        "bound": e.bounding.sample_bound, "delta": noise.delta, "sampling": e.local.sampling,
        "exclusions": (*e.data.exclusions, *e.selection.exclusions, *_common(noise), SHOWN), "beside": e.selection.loss_query,
    }  # fmt: skip
    if noise.epsilon is None:
        silent = LocalSteps(stds=np.zeros(len(population)), **release)
        std = (
            noise.multiplier * silent.bound / np.maximum(silent.batches, 1)
            if noise.std is None
            else noise.std
        )
        return replace(silent, stds=std)
    accountants = _rigorous(e)
    if not accountants and noise.calibration == "rigorous":
        accepted = (
            "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: paper or tcdp"
        )
        raise ConfigError("privacy.accountants", list(e.privacy.accountants), accepted)
    budgets = _budgets(e, len(population), data_root)
    release |= {"participations": counts, "budgets": budgets, "calibration": noise.calibration}
    return _first_that_can(
        accountants or ("pld",), lambda name: LocalSteps.calibrated(accountant=name, **release)
    )


def _common(noise: Noise) -> list[str]:
    """What a guarantee says of noise that other runs have too."""
    return (
        [
            "runs with one seed carry the same noise (noise.common), so no two of them may both be shown"
        ]
        if noise.of_seed
        else []
    )


def _draws(experiment: Experiment, population: Population, rounds: int) -> list[np.ndarray]:
    selection = experiment.selection
    return [selection.exposed(experiment.seed, t, population) for t in range(rounds)]


def _mechanism(
    experiment: Experiment, population: Population, z: float, rounds: int | None = None
) -> Mechanism | None:
    """The mechanism at noise multiplier `z` per unit of bound, `rounds` being those that compose;
    None when there is no noise on updates.

    Raises `ConfigError` when none of the rigorous accountants asked for covers it.
    """
    if not experiment.private or experiment.noise.placement == "step":
        return None
    bounding = experiment.bounding
    noise = experiment.noise
    selection = experiment.selection
    asked = bounding.queries()
    queries = (
        Query("updates", 1.0, z / math.sqrt(1 - sum(each.share for each in asked))),
        *(Query(each.name, each.bound, each.bound * z / math.sqrt(each.share)) for each in asked),
    )
    losses = selection.loss_query
    queries += (losses,) if losses else ()
    exclusions = [*experiment.data.exclusions, *selection.exclusions, *_common(noise), SHOWN]
    sampling = selection.sampling(population)
    if noise.virtual_cohort:
        if sampling.by_participation or sampling.rule or sampling.p_max:
            raise ConfigError(
                "noise.virtual_cohort",
                noise.virtual_cohort,
                f"none with selection.kind {selection.kind}; uniform, poisson or full scale to it",
            )
        virtual = noise.virtual_population or round(
            sampling.population * noise.virtual_cohort / sampling.cohort
        )
        if noise.virtual_cohort < sampling.cohort:
            raise ConfigError(
                "noise.virtual_cohort",
                noise.virtual_cohort,
                f"at least the simulated cohort of {sampling.cohort}",
            )
        exclusions.append(
            f"the {sampling.cohort} clients simulated in a round stand for {noise.virtual_cohort} of {virtual}, whose guarantee this is"
        )
        if virtual < noise.virtual_cohort or (
            sampling.everyone and virtual != noise.virtual_cohort
        ):
            size = "exactly" if sampling.everyone else "at least"
            accepted = f"{size} noise.virtual_cohort, {noise.virtual_cohort}, with selection.kind {selection.kind}"
            raise ConfigError("noise.virtual_population", virtual, accepted)
        sampling = replace(sampling, population=virtual, cohort=noise.virtual_cohort)
    memory = experiment.stateful.kind if experiment.stateful else ""
    mechanism = Mechanism(
        sampling, queries, rounds or experiment.rounds, placement=noise.placement, memory=memory
    )
    mechanism = replace(
        mechanism, remembers_noise=experiment.local.remembers and noise.placement == "client"
    )
    exclusions += [mechanism.unproved] if mechanism.unproved else []
    mechanism = replace(mechanism, exclusions=tuple(exclusions))
    rigorous = privacy.rigorous(experiment.privacy.accountants)
    if rigorous and not _rigorous(experiment, mechanism):
        raise _refusal(experiment, mechanism, rigorous[0])
    return mechanism


def _refusal(experiment: Experiment, mechanism: Mechanism, accountant: str) -> ConfigError:
    """What to change of a mechanism that no rigorous accountant asked for covers."""
    reason = _uncovered(accountant, experiment, mechanism)
    client = mechanism.placement == "client"
    asked = experiment.relation
    if mechanism.sampling.coins is not None and client:
        return ConfigError("noise.placement", "client", f"server or auto: {reason}")
    relations = ("replace_one", "add_remove", "zero_out")
    others = [each for each in relations if not privacy.covers(accountant, mechanism, each)]
    if not others:
        return ConfigError("privacy.accountants", accountant, reason)
    accepted = f"{' or '.join(others)} with selection.kind {experiment.selection.kind}"
    drawn = replace(mechanism, placement="server")
    if client and not privacy.covers(accountant, drawn, asked):
        accepted += f"; or {asked} with noise.placement server"
    elif asked == "add_remove":
        accepted += "; add_remove needs selection.kind poisson, and noise that the server draws"
    return ConfigError("privacy.relation", asked, accepted)


def _multiplier(
    experiment: Experiment, mechanism: Mechanism, weight: float, survivors: int
) -> float:
    """The noise multiplier z: std of the noise on the sum over (bound x weight), the round's
    queries taken together.
    """
    noise = experiment.noise
    bounding = experiment.bounding
    if noise.placement == "client" and survivors == 0:
        raise ConfigError(
            "selection.dropout",
            experiment.selection.dropout,
            "one that leaves some client, and its noise, in every round of the run",
        )
    if noise.multiplier is not None:
        return noise.multiplier
    if noise.std is not None:
        total = noise.std * (math.sqrt(survivors) if noise.placement == "client" else 1.0)
        return total / (bounding.initial_bound * weight)
    if noise.calibration == "tcdp":
        raise ConfigError(
            "noise.calibration", "tcdp", "rigorous or paper; tcdp (002) is for noise at local steps"
        )
    if noise.calibration == "paper":
        return privacy.paper_multiplier(
            noise.epsilon, mechanism.sampling, mechanism.rounds, noise.delta, noise.v
        )
    accountants = _rigorous(experiment, mechanism)
    if not accountants:
        accepted = "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: paper"
        raise ConfigError("privacy.accountants", list(experiment.privacy.accountants), accepted)

    def calibrated(name: str) -> float:
        return privacy.noise_for(
            noise.epsilon, mechanism, experiment.relation, noise.delta, name, mechanism.rounds
        )

    return _first_that_can(accountants, calibrated)


def _first_that_can(accountants: Sequence[str], calibrate: Callable[[str], Any]) -> Any:
    """What `calibrate` gives for the first accountant that it does not refuse; at a tiny delta pld
    reaches no epsilon.

    Raises the `ConfigError` of the first accountant where it refuses all.
    """
    refusals = []
    for name in accountants:
        try:
            return calibrate(name)
        except ConfigError as refusal:
            refusals.append(refusal)
    raise refusals[0]
