"""The plan of a run: an experiment with its data, its noise and what it releases.

`raydpfl.simulation.resolution` makes it, once, before the first round. The sampler, the clients'
noise and the accountants all read this one object, so they cannot disagree.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from raydpfl import models, privacy
from raydpfl.core import hardware
from raydpfl.core.modular_sum import ModularSum
from raydpfl.data import Shards
from raydpfl.errors import BudgetError, ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.methods.population import client_weights
from raydpfl.methods.probes import Problem
from raydpfl.methods.selection import Population
from raydpfl.models.tasks import Form
from raydpfl.privacy import Guarantee, Mechanism, Release, ReleaseReport, Segment
from raydpfl.privacy.individual import IndividualBudgets
from raydpfl.privacy.integer_noise import Lattice

log = logging.getLogger("raydpfl")
# What may differ between a run and its resumption: where it runs and what it shows, never what it
# computes.
FREE_KEYS = frozenset({"client.actors", "client.num_cpus", "client.timeout"})
# keys by the names that the noise is keyed by, which never change
DIGEST_NAMES = {"chunk": "lane", "backend": "way"}
SLOW_BFLOAT16 = (
    "client.precision bfloat16 is slower than float32 here: this processor has no instructions "
    "for it"
)
DISPLAY_SECTIONS = ("track",)  # sections that say where a run is shown, and nothing of what it is


@dataclass(frozen=True)
class Plan:
    """All that a run is made of. Stds scale with the bound in force, and by round as `factors`."""

    experiment: Experiment  # nothing left at auto but client.actors
    shards: Path
    population: Population
    d: int  # parameters of the model that travel
    weight: float  # the largest weight of any client's contribution
    clients_left: int  # clients that the round with most dropouts keeps
    # int64 [rounds]: how many of the first t + 1 rounds a guarantee composes over
    composed_rounds: np.ndarray
    ratio: float  # std of the noise on the sum of updates over (bound x weight); 0: no noise
    # by bounding's queries: std of the noise on the sum of the answers, in their units
    side_stds: Mapping[str, float]
    mechanism: Release | None  # None: not private
    individual: IndividualBudgets | None  # clients' own budgets; None: they have none
    # code, its files, versions and processor: see `raydpfl.simulation.provenance`
    platform: Mapping[str, str]
    train_seconds: float = 0.0  # of all rounds' training in one thread, if it was timed
    # what was released before the run was restarted with fresh noise
    history: tuple[Segment, ...] = ()
    first: int = 0  # the round that it was restarted from
    # by round, std of the noise on sums over that of `ratio` and `side_stds`; empty: 1 in all
    factors: tuple[float, ...] = ()

    @property
    def cohort(self) -> int:
        """The nominal size of a cohort."""
        return self.experiment.selection.sampling(self.population).cohort

    def problem(self, shards: Shards) -> Problem:
        """What the run is to solve, as probes are shown it."""
        experiment = self.experiment
        return Problem(
            seed=experiment.seed,
            rounds=experiment.rounds,
            model=experiment.model,
            task=experiment.data.task,
            selection=experiment.selection,
            local=experiment.local,
            bounding=experiment.bounding,
            weights=experiment.weights,
            server=experiment.server,
            shards=shards,
            population=self.population,
            mechanism=self.mechanism,
        )

    def trained(self, form: Form, parameters: np.ndarray) -> nn.Module:
        """The module of the run, of samples of this form, with these parameters, float32 [d]."""
        module = models.build(self.experiment.model, form, self.experiment.seed)
        return models.load(module, torch.from_numpy(parameters.copy()))

    def extend_history(
        self, segments: tuple[Segment, ...], restart_round: int | None = None
    ) -> Plan:
        """This plan after the releases of `segments`, restarted from `restart_round` if any."""
        history, first_round = segments, restart_round
        if first_round is None:
            history, first_round = segments[:-1], segments[-1].first if segments else 0
        if not history:
            return self
        experiment = self.experiment
        clients_left = min(
            experiment.selection.clients_left(
                seed_of(experiment.seed, restart), experiment.rounds, self.population
            )
            for restart in range(len(history) + 1)
        )
        experiment.noise.check_clients_left(clients_left, experiment.selection.dropout)
        max_rounds = int(self.composed_rounds[-1]) + sum(map(len, history))
        mechanism = self.mechanism and self.mechanism.restarted_release(max_rounds)
        if self.factors:  # of all releases, one after another
            past = [range(segment.first, segment.end) for segment in history]
            factors = tuple(map(self.factor, chain(*past, range(first_round, experiment.rounds))))
            mechanism = replace(cast(Mechanism, mechanism), factors=factors)
        plan = replace(self, history=history, first=first_round, clients_left=clients_left)
        return replace(plan, mechanism=mechanism)

    def origin(self, stored_origin: Mapping[str, str] | None = None) -> dict[str, str]:
        """What a run's bits depend on, next to the experiment, by name; as a checkpoint of fewer
        rounds would have it, where `stored_origin` is that of one.
        """
        # a checkpoint of another run goes on nowhere else
        digest = _digest64([self.experiment.seed, self._release_config()])
        origin = {"experiment": f"{digest:016x}", "data": self.shards.name}
        origin["clients"] = self._clients()
        if self.mechanism:
            origin["cohorts"] = self._cohorts((stored_origin or {}).get("cohorts"))
            origin["mechanism"] = self.mechanism.round_digest()
        return origin | dict(self.platform)

    def _cohorts(self, digest: str | None = None) -> str:
        """A digest of the draws by the experiment's own seed, and of how many rounds they are: all
        of a user-defined selection, else the first few; those of `digest`, if there are as many.
        """
        # what was released before a change of code or versions is counted by draws made after it
        experiment = self.experiment
        selection = experiment.selection
        rounds = experiment.rounds if selection.is_user_defined else min(experiment.rounds, 4)
        stored_rounds = (digest or "").rpartition(" ")[2]
        if stored_rounds.isdecimal() and 1 <= int(stored_rounds) <= experiment.rounds:
            rounds = int(stored_rounds)

        def compute() -> str:
            draws = [selection.exposed(experiment.seed, t, self.population) for t in range(rounds)]
            return f"{_hex16(fingerprint(clients) for clients in draws)} of {rounds}"

        return self.population.cached(("cohorts", experiment.seed, rounds), compute)

    def _clients(self) -> str:
        """A digest of what the plan holds of every client."""
        individual = self.individual
        arrays = [
            self.population.privacy_cost,
            self.experiment.selection.corrections(self.population),
            self.mechanism.stds if self.mechanism else None,
            individual.squares / individual.sensitivity_factor**2 if individual else None,
        ]
        if self.experiment.selection.is_user_defined:
            arrays.append(self.population.table)
        # which may depend on more than its source and the data
        if self.experiment.weights.is_user_defined:
            arrays.append(
                client_weights(self.experiment.weights, self.experiment.selection, self.population)
            )
        return _hex16(array.tobytes() for array in arrays if array is not None)

    @property
    def restart(self) -> int:
        """How often the run was restarted with fresh noise."""
        return len(self.history)

    @property
    def repeated(self) -> int:
        """How many releases there were in addition to those of the rounds as they count now."""
        return sum(map(len, self.history)) - self.first

    @property
    def extra_composed_rounds(self) -> int:
        """How many rounds accountants compose in addition to `composed_rounds`: those released
        again; where rounds of an epoch depend on each other, all of each epoch that one touches.
        """
        sums = self.mechanism if self.mechanism and not self.mechanism.by_draws else None
        epoch = (sums and sums.cohorts and sums.cohorts.epoch) or 1
        spans = (-(-segment.end // epoch) - segment.first // epoch for segment in self.history)
        return epoch * (sum(spans) - self.first // epoch)

    @cached_property
    def surveys(self) -> np.ndarray:
        """Noisy histograms until after every round, int64 [rounds], restarts included."""
        interval = self.experiment.evaluate.every
        rounds = np.arange(1, self.experiment.rounds + 1)
        if self.mechanism is None or self.mechanism.survey is None:
            return 0 * rounds
        past = sum(segment.end // interval - segment.first // interval for segment in self.history)
        return rounds // interval + past - self.first // interval

    def has_survey(self, t: int) -> bool:
        """Whether all clients are asked after round t."""
        asks = self.mechanism is not None and self.mechanism.survey is not None
        return asks and (t + 1) % self.experiment.evaluate.every == 0

    @property
    def seed(self) -> int:
        """The seed of batches, randomness inside modules and secret cohorts, from `first` on."""
        return seed_of(self.experiment.seed, self.restart)

    @cached_property
    def noise_seed(self) -> int:
        """The seed of the noise, below 2^64: a digest of all that a release depends on, so that no
        other release has it (two keys of 64 bits are the same with probability 2^-64). It covers
        the experiment (but for its number of rounds, what it measures and where it runs), the data,
        the clients' weights and noise, the user's code (of measures too) and the files that the
        config names for it, the versions and how the processor computes. With `noise.common` it is
        the experiment's own seed.
        """
        if self.experiment.noise.has_common_noise:
            return self.seed
        side_stds = list(self.side_stds.values()) or [0.0]
        clients_left = self.clients_left
        if self.experiment.selection.dropout and self.experiment.noise.drawn_by() != "client":
            clients_left = 0  # no release depends on it, and rounds to come may lose more clients
        facts = [
            self.seed,
            self.restart,
            self._release_config(),
            [self.ratio, *side_stds, clients_left, self.weight, self.d],
            self.shards.name,
            self._clients(),
            dict(self.platform),
        ]
        schedule = self.experiment.noise.meaning().get("schedule")
        if schedule:  # as text, for keys that are numbers
            facts.append(["schedule", str(schedule)])
        return _digest64(facts)

    @property
    def noise_key(self) -> str:
        """What the ledger says of `noise_seed`: 16 hexadecimal digits that do not tell it."""
        return hashlib.sha256(str(self.noise_seed).encode()).hexdigest()[:16]

    @cached_property
    def survey_seed(self) -> int:
        """The seed of the noise on histograms of scores, which no other release has."""
        evaluate = self.experiment.evaluate
        section = evaluate.model_dump(mode="json", include={"histogram", "validation", "every"})
        metric = evaluate.per_client and evaluate.per_client.meaning()
        rules = filter(None, (evaluate.fine_tune, self.experiment.personal))
        facts = ["survey", self.noise_seed, section, metric, *(rule.meaning() for rule in rules)]
        return _digest64(facts)

    def _release_config(self) -> dict[str, Any]:
        """What of the experiment a release depends on, but for seed and size of its noise."""
        experiment = self.experiment
        names = ("model", "selection", "local", "bounding", "weights", "server")
        meanings: dict[str, Any] = {name: getattr(experiment, name).meaning() for name in names}
        for name in experiment.selection.file_fields:  # the file is among the clients' facts
            meanings["selection"].pop(name)
        meanings["client"] = {
            DIGEST_NAMES.get(name, name): value
            for name, value in experiment.client.model_dump(mode="json").items()
            if f"client.{name}" not in FREE_KEYS
        }
        meanings["noise"] = experiment.noise.release()
        if experiment.personal:  # no release depends on it, but what clients go on with does
            meanings["personal"] = experiment.personal.meaning()
        return meanings

    @property
    def rigorous_accountants(self) -> tuple[str, ...]:
        """Those of `accountants` that are rigorous and cover the mechanism: their smallest epsilon
        is held against the budget.
        """
        names = privacy.rigorous(self.accountants)
        return tuple(name for name in names if not self.coverage_gap(name))

    def check(self, shards: Shards) -> None:
        """Raises `ConfigError` for what cannot be scored or measured of these data, and for a
        budget that could only be held by an epsilon that no proof stands behind.
        """
        experiment = self.experiment
        form = shards.form(experiment.data.task)
        for metric in filter(None, (*experiment.metrics, experiment.evaluate.per_client)):
            metric.fits(form)
        problem = self.problem(shards)
        for probe in experiment.measure:
            probe.fits(problem)
        budget = experiment.privacy.budget
        if budget is None or self.mechanism is None:
            return
        reason = self.mechanism.proof_gap and f"no proof holds it: {self.mechanism.proof_gap}"
        if not self.rigorous_accountants:
            gap = self.coverage_gap(self.accountants[-1])
            reason = f"no rigorous accountant can hold it: {gap}"
        if reason:
            raise ConfigError("privacy.budget", budget, f"none here, as {reason}")

    def coverage_gap(self, accountant: str) -> str | None:
        """Why an accountant does not cover the mechanism, in words; None if it does."""
        if self.mechanism is None or self.mechanism.by_draws:
            return None
        mechanism = cast(Mechanism, self.mechanism)
        return privacy.covers(accountant, mechanism, self.experiment.relation)

    @cached_property
    def report(self) -> ReleaseReport:
        """What the mechanism costs, by each of `accountants`."""
        assert self.mechanism is not None
        return privacy.report_of(self.mechanism, self.accountants, self.experiment.terms)

    @property
    def accountants(self) -> tuple[str, ...]:
        """The accountants of the guarantees: those asked for, and where none of them is
        rigorous, a rigorous one that covers the mechanism, since a formula never stands by itself.
        """
        names = self.experiment.accountants
        if not names or privacy.rigorous(names):
            return names
        fallbacks = [name for name in privacy.FALLBACK if not self.coverage_gap(name)]
        return (*names, *(fallbacks or privacy.FALLBACK)[:1])

    def weights(self, clients: np.ndarray) -> np.ndarray:
        """The factors float64 [r] of these clients' contributions. Raises `RunError` for one above
        `weight`, which the accountants count on.
        """
        member = self.experiment.weights
        weights = client_weights(member, self.experiment.selection, self.population)[clients]
        max_weight = float(np.abs(weights).max(initial=0.0))
        if not max_weight <= self.weight:
            raise RunError(
                f"weights.kind {member.kind} gives a client weight {max_weight:g}, "
                f"above the {self.weight:g} that was accounted for"
            )
        return weights

    def factor(self, t: int) -> float:
        """Std of the noise on the sums of round t over that of `ratio` and `side_stds`; after the
        last round, from which an audit draws on, that of the last.
        """
        return self.factors[min(t, len(self.factors) - 1)] if self.factors else 1.0

    def sum_std(self, t: int, bound: float | None) -> float:
        """Std of the noise on the sum of round t with this bound; 0: drawn at local steps."""
        if not self.ratio or bound is None:
            return 0.0
        return self.ratio * bound * self.weight * self.factor(t)

    @cached_property
    def lattice(self) -> Lattice | None:
        """The grid of sums of integers; None: what clients send is no integers."""
        if self.mechanism is None or self.mechanism.integer is None:
            return None
        return self.mechanism.integer.lattice(self.mechanism.noise_multiplier)

    def modular_sum(self, t: int, bound: float | None) -> ModularSum | None:
        """How the sum of round t is taken; None: not of integers."""
        if self.lattice is None or bound is None:
            return None
        assert self.mechanism is not None and self.mechanism.integer is not None
        step = self.lattice.step * bound * self.weight
        noise = self.mechanism.integer
        return ModularSum(step, self.lattice.square, noise.bits, noise.rotated, self.noise_seed, t)

    def drawn_std(self, t: int, bound: float | None) -> float:
        """`sum_std`, in steps where sums are of integers."""
        return self.sum_std(t, bound) if self.lattice is None else self.lattice.std

    def client_std(self, t: int, bound: float | None) -> float:
        """Std of the noise that one client draws on what it sends, in steps if that is integers; 0
        when it draws none. The round with most dropouts still has the sum's.
        """
        return self.experiment.noise.client_std(self.drawn_std(t, bound), self.clients_left)

    def step_stds(self, clients: np.ndarray) -> np.ndarray | None:
        """Stds float64 [r] of the noise of these clients on the mean gradient of every local step;
        None when there is none.
        """
        stds = self.mechanism.stds if self.mechanism else None
        return None if stds is None else stds[clients]

    def check_guarantees(self) -> None:
        """Warns of what a reader of the results should know; raises `BudgetError` when the claimed
        guarantee of a client will not hold, which is a warning where rounds were released twice.
        """
        experiment = self.experiment
        client = experiment.client
        mechanism = self.mechanism
        by_draws = mechanism is not None and mechanism.by_draws
        participations = self.participations(experiment.rounds) if by_draws else {}
        half_precision = client.precision == "bfloat16" and not client.num_gpus
        warnings = [SLOW_BFLOAT16 if half_precision and not hardware.has_bfloat16() else None]
        warnings += [_classes(Shards.open(self.shards)), *experiment.warnings()]
        if mechanism:
            delta = experiment.terms.delta
            warnings.append(privacy.delta_warning(delta, mechanism.largest, mechanism.unit))
            warnings += self.report.warnings(participations)
        for warning in filter(None, warnings):
            log.warning(warning)
        if not mechanism:
            return
        try:
            self.report.check_claims(participations)
        except BudgetError as error:
            reason = experiment.selection.uncounted
            if not self.history and not reason:
                raise
            log.warning("%s, as %s", error, reason or "rounds were released twice")

    def curves(self, draws: list[np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """Epsilon after 1, 2, ... rounds by every accountant, float64 [rounds] each: of a client,
        or of the sample that has spent most. `draws`: `counted_draws`; None: computed.
        """
        if not self.mechanism:
            return {}
        draws = self.counted_draws() if draws is None else draws
        composed_rounds = self.composed_rounds + self.extra_composed_rounds
        return self.report.curves(draws, composed_rounds, self.surveys)

    def cohort_seed(self, restart: int | None = None) -> int:
        """The seed of the cohorts of a segment, the present one by default. Where the cohort is a
        secret, a round that is released again has one of its own, or it would amplify but once.
        """
        if self.mechanism is None or not self.mechanism.hidden:
            return self.experiment.seed
        return seed_of(self.experiment.seed, self.restart if restart is None else restart)

    def draws(self, rounds: int) -> list[np.ndarray]:
        """The clients of every release up to round `rounds`, with repeats."""
        past = [
            (self.cohort_seed(segment.restart), t)
            for segment in self.history
            for t in range(segment.first, segment.end)
        ]
        present = [(self.cohort_seed(), t) for t in range(self.first, rounds)]
        selection = self.experiment.selection
        return [selection.exposed(seed, t, self.population) for seed, t in (*past, *present)]

    def counted_draws(self) -> list[np.ndarray] | None:
        """`draws` of the whole run, where what clients spend depends on these; else None."""
        mechanism = self.mechanism
        if mechanism is None:
            return None
        # how often the clients of a virtual cohort are drawn is unknown
        is_simulated = mechanism.proof_gap and self.experiment.noise.stands_for is None
        return self.draws(self.experiment.rounds) if mechanism.by_draws or is_simulated else None

    def participations(self, rounds: int) -> Counter:
        """How often the seed draws every client in the releases up to round `rounds`; where losses
        choose among candidates, how often it is one.
        """
        return Counter(client for clients in self.draws(rounds) for client in clients.tolist())

    def guarantees(self, rounds: int, participations: Mapping[int, int]) -> list[Guarantee]:
        """What holds after so many rounds; `participations`: draws of every client."""
        if not self.mechanism or rounds == 0:
            return []
        # how often the clients of a virtual cohort are drawn is unknown
        counts = participations if self.experiment.noise.stands_for is None else None
        composed_rounds = int(self.composed_rounds[rounds - 1]) + self.extra_composed_rounds
        survey_count = int(self.surveys[rounds - 1])
        guarantees = self.report.guarantees(counts, composed_rounds, survey_count)
        if self.individual:
            guarantees += self.individual.guarantees(cast(Mechanism, self.mechanism))
        return guarantees

    def of_the_chosen(self, rounds: int, chosen_counts: Mapping[int, int]) -> list[Guarantee]:
        """As `guarantees`, counting only how often losses have chosen the clients: none of these is
        proved. Empty where all who are exposed are counted.
        """
        reason = self.experiment.selection.uncounted
        if not self.mechanism or rounds == 0 or reason is None:
            return []
        return [
            guarantee.add_exclusion(reason, "chosen")
            for guarantee in self.report.guarantees(chosen_counts, rounds)
        ]


def seed_of(seed: int, restart: int) -> int:
    """The seed of a run that was restarted `restart` times; its own where it was not."""
    return _digest64(["again", seed, restart]) if restart else seed


def fingerprint(clients: np.ndarray) -> bytes:
    """16 bytes that tell the clients of one round, int64 [r] in order, from any others."""
    return hashlib.sha256(np.ascontiguousarray(clients, np.int64).tobytes()).digest()[:16]


def _hex16(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _digest64(facts: list) -> int:
    """64 bits of the SHA-256 of `facts`, JSON values."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _classes(shards: Shards) -> str | None:
    """What is odd about the classes of the training samples, in words; None for nothing."""
    present = shards.classes - len(shards.unseen)
    if shards.classes and present == 1:
        return "all training samples are of one class: no classes are left to distinguish"
    if not shards.unseen:
        return None
    ids = ", ".join(map(str, shards.unseen[:5])) + (", ..." if len(shards.unseen) > 5 else "")
    return (
        f"no training sample is of {len(shards.unseen)} of the {shards.classes} classes ({ids}); "
        "the model has an output for each: number the classes from 0 without gaps"
    )
