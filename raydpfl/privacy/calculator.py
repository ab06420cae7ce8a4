"""The privacy budget calculator: of noise, epsilon and rounds any two determine the third, by every
accountant, against every observer.

>>> budget = client_budget(population=1920, cohort=80, rounds=100, noise_multiplier=4.0)
>>> for answer in budget.answers:
...     guarantee = answer.guarantee
...     print(f"{guarantee.accountant:5} {guarantee.observer}: {guarantee.epsilon:.4g}")
pld   every aggregate: 0.9837
pld   every aggregate: 33.1
pld   every single update: 1190
rdp   every aggregate: 2.044
rdp   every aggregate: 35.08
rdp   every single update: 1212
paper every aggregate: 0.7069
>>> round(budget.answers[-1].true_epsilon, 2)  # what the formula's 0.7069 is worth
0.98

One client's local steps (002, 003), where samples are protected and every update is seen:

>>> sample = {"samples": 600, "batch": 10, "steps": 300, "participations": 1}
>>> for answer in sample_budget(**sample, epsilon=0.3, delta=1e-2).answers:
...     # std of the mean gradient / bound
...     print(f"{answer.guarantee.accountant}: {answer.noise_multiplier / 10:.3f}")
pld: 0.343
rdp: 0.667
Chen 2024 tCDP: 2.140
Chen 2024 Theorem 5: 0.106
Xu 2026: 2.277

Noise is the multiplier z = std of the noise on the sum / bound. `from_options` is the command line;
`raydpfl.simulation.planned_guarantee` answers for an experiment, with a `PersonalBudget` where the
noise is at local steps.
"""

import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

import numpy as np

from raydpfl.errors import BudgetError, ConfigError, rename_fields
from raydpfl.privacy.accountants import FORMULAS
from raydpfl.privacy.accountants.base import Formula, FormulaValue
from raydpfl.privacy.accountants.paper import paper_multiplier
from raydpfl.privacy.accounting import covers, guarantee_against, guarantees
from raydpfl.privacy.calibration import MOST_ROUNDS, noise_for, rounds_for
from raydpfl.privacy.factorization import STRATEGIES, separation_refusal
from raydpfl.privacy.guarantee import SHARES, Guarantee, delta_warning, tightest_guarantees
from raydpfl.privacy.integer_noise import DistributedDiscreteGaussian, IntegerNoise, SkellamNoise
from raydpfl.privacy.local_steps import LocalSteps, Participations
from raydpfl.privacy.mechanism import Mechanism, Query
from raydpfl.privacy.observers import ObserverView, views
from raydpfl.privacy.release_report import LocalStepsReport, row_quantiles
from raydpfl.privacy.sampling import Sampling, scheme_of
from raydpfl.privacy.types import LEAST_DELTA, Placement, Relation

Unknown = Literal["epsilon", "noise", "rounds"]
# how sums are taken of integers, if they are, the default placement first
NOISES: dict[str, tuple[type[IntegerNoise], ...]] = {
    "discrete_gaussian": (IntegerNoise, DistributedDiscreteGaussian),
    "skellam": (SkellamNoise,),
    "laplace": (),
}
LARGE_MULTIPLIER = 1e12  # a noise multiplier next to which the sums of rounds show nothing
RIGOROUS = ("pld", "rdp")
_STRATEGY_OF = {"restart": "tree", "bands": "banded", "buffers": "buffered"}  # option: its strategy
_COUNTS = range(1, MOST_ROUNDS + 1)
# What one draw of the noise is on, where it is not the sum; what else a reader should know.
_DRAW = {"client": "one_client", "step": "the_mean_gradient"}
_CAVEATS = {
    "client": "k clients who pool what they know of their own noise, or k that drop out, leave "
    "sqrt((r - k) / r) of the noise on a sum of r",
    "step": "it holds for a fresh batch at each step, not for shuffled epochs; participations are "
    "those that occur, or a cap that is kept",
}
# What the parameters of `raydpfl.privacy` are called where samples are protected.
_SAMPLE_NAMES = {"population": "samples", "cohort": "batch", "rounds": "participations"}


@dataclass(frozen=True)
class Answer:
    """What one accountant answers against one observer."""

    guarantee: Guarantee  # for that noise and those rounds (for one round if there are none)
    noise_multiplier: float  # of the mechanism, for any observer; infinite: none is enough
    rounds: int  # of the run, or of the client with its samples; 0 if one spends too much
    true_epsilon: float | None = None  # of a formula: what holds there, at the formula's own delta

    @property
    def overclaims(self) -> bool:
        """Whether it is a formula that claims a smaller epsilon than holds."""
        claimed_epsilon = self.guarantee.epsilon * (1 + 1e-6)
        return self.true_epsilon is not None and self.true_epsilon > claimed_epsilon


@dataclass
class Budget:
    """The answers of every accountant against every observer, and the guarantees of one mechanism:
    that of the first answer (pld, against the observer who sees least), or `run`. Raises
    `ConfigError` if one round spends more than epsilon.
    """

    asked: Mechanism  # in which a 1 stands for the noise or the rounds if they are unknown
    relation: Relation
    delta: float
    unknown: Unknown
    epsilon: float | None  # None if it is the unknown
    steps: int = 1  # local steps of a round where samples are protected
    participations: int | None = None  # the largest number of rounds of any client; None: unknown
    v: float = 4.0  # the constant of the formula of 000 and 001
    run: Mechanism | None = None  # what a config runs, if the question is about one
    person: int | None = None  # how many samples a person has who is protected too; None: nobody is
    individual: tuple[Guarantee, ...] = ()  # what clients' own budgets guarantee

    def __post_init__(self) -> None:
        self._target = self.epsilon or 0.0
        self._refusal: ConfigError | None = None
        self.answers = tuple(self._answers(self.asked, self.unknown))
        answers = [each for each in self.answers if math.isfinite(each.guarantee.epsilon)]
        solutions = [each for each in answers if math.isfinite(each.noise_multiplier)]
        if self._refusal and all(each.guarantee.accountant not in RIGOROUS for each in solutions):
            raise self._refusal
        first = (solutions or answers or self.answers)[0]
        if first.rounds == 0:
            expected = f"at least {first.guarantee.epsilon:.4g}, which one round spends; "
            raise ConfigError("epsilon", self.epsilon, f"{expected}or more noise")
        self.mechanism = self.run or self._mechanism_at(first.noise_multiplier, first.rounds)
        final_answers = self.answers
        if self.unknown != "epsilon":
            final_answers = tuple(self._answers(self.mechanism, "epsilon"))
        self.persons: tuple[Guarantee, ...] = ()
        if self.person is not None:
            (view,) = self._views(self.mechanism.person_mechanism(self.person), self.rounds)
            self.persons = tuple(guarantee_against(view, name, self.delta) for name in RIGOROUS)
        claims = [answer.guarantee for answer in final_answers]
        self.guarantees = (*claims, *self.individual, *self.persons)
        delta_note = delta_warning(self.delta, self.asked.sampling.population, self.asked.unit)
        caveat = _CAVEATS.get(self.asked.placement)
        self.notes = [note for note in (delta_note, caveat) if note]
        self.notes += dict.fromkeys(one.sampling.words for one in self.individual)
        lists = (self.mechanism.exclusions, *(one.exclusions for one in self.individual))
        self.notes += dict.fromkeys(f"not accounted for: {w}" for each in lists for w in each)

    @property
    def is_sample_level(self) -> bool:
        """Whether samples are protected, by noise at every local step of one client."""
        return self.mechanism.unit == "sample"

    @property
    def rounds_name(self) -> str:
        return "participations" if self.is_sample_level else "rounds"

    @property
    def rounds(self) -> int:
        return self.mechanism.rounds // self.steps

    @property
    def released(self) -> str:
        """What is released, in words."""
        sampling = self.mechanism.sampling
        if self.is_sample_level:
            steps = f"{self.mechanism.rounds} local steps ({self.rounds} x {self.steps})"
            return f"{steps}, each a sum over a batch of samples: {sampling}"
        text = f"{self.rounds} rounds, each a sum over a cohort of clients: {sampling}"
        squares = self.mechanism.squares
        if squares:
            text += f"; noise is correlated over the rounds, so that {len(squares)} of a client's "
            text += f"cost what {squares[-1]:.4g} with independent noise do"
        survey = self.mechanism.survey
        return f"{text}; and {survey}" if survey else text

    @property
    def noise(self) -> dict[str, float]:
        """Multiplier, bound, sensitivity of the sum, std of the noise on it, and of one draw."""
        query = self.mechanism.queries[0]
        moves = 2.0 if self.relation == "replace_one" else 1.0
        if self.mechanism.integer:  # after rounding
            lattice = self.mechanism.integer.lattice(self.mechanism.noise_multiplier)
            moves *= math.sqrt(lattice.square) * lattice.step
        noise = {
            "noise_multiplier": self.mechanism.noise_multiplier,
            "bound": query.bound,
            "sensitivity": query.bound * moves,
            "std_of_the_sum": query.std,
        }
        draw = _DRAW.get(self.mechanism.placement)
        if draw:
            noise[f"std_of_{draw}"] = query.std / self.mechanism.draws
        per_client = (side for side in self.mechanism.queries if side.per_client)
        return noise | {f"std_of_the_{side.name}": side.std for side in per_client}

    def sentence(self) -> str:
        """What the first guarantee that holds means, that of clients' own budgets if there is one,
        by the largest power of a test at 5% false alarms; why none does, if there is none.
        """
        claims = (*self.individual, *self.guarantees)
        rigorous = (claim for claim in claims if claim.kind == "rigorous")
        finite = (claim for claim in rigorous if math.isfinite(claim.epsilon))
        return next(finite, self.guarantees[0]).detection()

    def to_dict(self) -> dict[str, Any]:
        """Everything, for strict JSON: an infinite number is the string "infinity"."""
        return {
            "unknown": self.unknown,
            "unit": self.mechanism.unit,
            "sampling": asdict(self.mechanism.sampling),
            self.rounds_name: self.rounds,
            **({"steps": self.steps} if self.is_sample_level else {}),
            "relation": self.relation,
            "placement": self.mechanism.placement,
            "delta": self.delta,
            "noise": self.noise,
            "answers": [
                {
                    "noise_multiplier": _to_json(answer.noise_multiplier),
                    self.rounds_name: answer.rounds,
                    "true_epsilon": _to_json(answer.true_epsilon),
                    "guarantee": answer.guarantee.to_dict(),
                }
                for answer in self.answers
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "holds": [one.to_dict(curve=True) for one in tightest_guarantees(self.guarantees)],
            "sentence": self.sentence(),
            "notes": self.notes,
        }

    def _answers(self, mechanism: Mechanism, unknown: Unknown) -> Iterator[Answer]:
        for name in RIGOROUS:
            yield from self._view_answers(name, mechanism, unknown)
        if mechanism.unit == "client":
            yield self._paper_answer(mechanism, unknown)
        else:
            for formula in FORMULAS.values():
                yield self._formula_answer(formula, mechanism, unknown)

    def _mechanism_at(self, z: float, rounds: int) -> Mechanism:
        return replace(self.asked.with_noise(z), rounds=rounds * self.steps)

    def _views(self, mechanism: Mechanism, rounds: int) -> list[ObserverView]:
        return list(views(mechanism, self.relation, rounds * self.steps, self.participations))

    def _guarantee(self, place: int, name: str, z: float, rounds: int, delta: float) -> Guarantee:
        """Against the observer at this place, for this noise and these rounds (1 for 0)."""
        mechanism = self._mechanism_at(z, max(rounds, 1))
        return guarantee_against(self._views(mechanism, max(rounds, 1))[place], name, delta)

    def _view_answers(self, name: str, mechanism: Mechanism, unknown: Unknown) -> Iterator[Answer]:
        """By a rigorous accountant, one answer against every observer."""
        rounds = mechanism.rounds // self.steps
        for place, view in enumerate(self._views(mechanism, rounds)):
            z, limit = mechanism.noise_multiplier, rounds
            if not covers(name, view.mechanism, view.relation):
                if unknown == "rounds":
                    limit = self._max_rounds(name, place, view)
                elif unknown == "noise":
                    z *= self._scale(name, view, place)
            guarantee = self._guarantee(place, name, min(z, LARGE_MULTIPLIER), limit, self.delta)
            yield Answer(guarantee, z, limit)

    def _scale(self, name: str, view: ObserverView, place: int) -> float:
        """The factor on the noise multiplier that an accountant asks for; infinite where a survey
        alone spends more, no proof is known, sums of integers do for the first observer alone, or
        none is enough by rdp where pld is asked too.
        """
        release = view.mechanism
        try:
            z = noise_for(self._target, release, view.relation, self.delta, name, view.rounds)
        except ConfigError as refusal:
            coarse = release.integer and place and refusal.field in ("target", "noise.bits")
            looser = name != "pld" and not covers("pld", release, view.relation)
            unmet = refusal.field == "target" and (release.survey or release.proof_gap or looser)
            if not (coarse or unmet):
                raise
            self._refusal = self._refusal or refusal
            return math.inf
        return z / release.noise_multiplier

    def _max_rounds(self, name: str, place: int, view: ObserverView) -> int:
        """The most rounds in which the observer at this place stays within epsilon."""
        arguments = (self._target, view.mechanism, view.relation, self.delta, name, self.v)
        limit = rounds_for(*arguments)
        return bisect_right(_COUNTS, limit, key=lambda t: self._views(self.asked, t)[place].rounds)

    def _paper_answer(self, mechanism: Mechanism, unknown: Unknown) -> Answer:
        """By the formula of 000 and 001, which is about the first observer only."""
        z, rounds = mechanism.noise_multiplier, mechanism.rounds
        view = self._views(mechanism, rounds)[0]
        if unknown == "rounds":
            rounds = self._max_rounds("paper", 0, view)
        elif unknown == "noise":
            sampling = view.mechanism.sampling
            z = paper_multiplier(self._target, sampling, view.rounds, self.delta, self.v)
            z *= mechanism.noise_multiplier / mechanism.min_multiplier
        release = self._mechanism_at(z, max(rounds, 1))
        (guarantee,) = guarantees(release, self.relation, self.delta, None, ["paper"], v=self.v)
        return Answer(guarantee, z, rounds, self._true_epsilon(z, rounds, self.delta))

    def _true_epsilon(self, z: float, rounds: int, delta: float) -> float:
        """Epsilon by pld."""
        if not LEAST_DELTA <= delta < 1:
            return math.inf
        return self._guarantee(0, "pld", z, rounds, delta).epsilon

    def _formula_answer(self, formula: Formula, mechanism: Mechanism, unknown: Unknown) -> Answer:
        """By a formula for the local steps of one client."""
        batches = mechanism.sampling
        fits = batches.cohort <= batches.population  # draws with replacement may be more
        query = mechanism.queries[0]
        std = query.std / batches.cohort
        rounds = mechanism.rounds // self.steps
        epsilon, delta = math.inf, self.delta
        client = {"bound": query.bound, "batch": batches.cohort, "samples": batches.population}

        def printed(std: float, times: int) -> tuple[FormulaValue, float]:
            return formula.printed(std, self.delta, **client, steps=max(times, 1) * self.steps)

        if not fits:
            std = math.inf if unknown == "noise" else std
            rounds = 0 if unknown == "rounds" else rounds
            samples = f"from at least as many samples (here: {batches.population})"
            failures: tuple[str, ...] = (f"a batch of {batches.cohort} {samples}",)
        elif unknown == "noise":
            steps = rounds * self.steps
            noise = formula.noise(self._target, self.delta, **client, steps=steps)
            std, failures = noise.value, noise.conditions_failed
            if math.isfinite(std):
                epsilon = self._target
                delta = printed(std, rounds)[1]
        else:
            if unknown == "rounds":
                rounds = bisect_right(_COUNTS, self._target, key=lambda t: printed(std, t)[0].value)
            value, delta = printed(std, rounds)
            epsilon, failures = value.value, value.conditions_failed
        z = batches.cohort * std / query.bound
        truth = self._true_epsilon(z, rounds, delta) if fits and math.isfinite(std) else None
        if not batches.scheme.as_in_the_papers(batches):
            failures += (f"batches of one fixed size, drawn without replacement (here: {batches})",)
        if delta != self.delta:
            delta_text = f"the formula gives its epsilon at delta {delta:.3g} alone"
            failures += (f"delta = {self.delta:g} ({delta_text})",)
        (view,) = self._views(mechanism, 1)
        guarantee = view.guarantee(formula.name, epsilon, delta, failures)
        guarantee = replace(guarantee, kind="paper", relation=formula.relation)
        return Answer(guarantee, z, rounds, truth)


@dataclass
class PersonalBudget:
    """What noise at local steps guarantees a client's samples: `rows` of
    `LocalStepsReport.client_table`, the guarantees of the client that spends most, and the
    `violation` of what the noise claims, in words; None: none. `participations`: how often each
    takes part, by id or int64 [N].
    """

    mechanism: LocalSteps
    participations: Participations
    accountants: Sequence[str] = ("pld", "rdp", "paper")
    person: int | None = None  # how many samples of a client a person has; None: all of them

    def __post_init__(self) -> None:
        report = LocalStepsReport(self.mechanism, self.accountants)
        self.rows = report.client_table(self.participations)
        largest = self.mechanism.largest
        if self.person is not None and not 1 <= self.person <= largest:
            expected = f"an integer from 1 to the {largest} samples of the largest"
            raise ConfigError("--person", self.person, expected)
        self.persons = report.person_guarantees(self.participations, self.person)
        self.guarantees = (*report.sample_guarantees(self.participations), *self.persons)
        self.violation: str | None = None
        try:
            report.check_claims(self.participations)
        except BudgetError as error:
            self.violation = str(error)
        self.notes = [*report.warnings(self.participations)]
        self.notes += [f"not accounted for: {words}" for words in self.mechanism.exclusions]

    @property
    def released(self) -> str:
        mechanism = self.mechanism
        steps = _range(mechanism.client_steps[mechanism.samples > 0], "local steps")
        batch = "all samples"
        if mechanism.batch is not None:
            batch = _range(np.atleast_1d(mechanism.batch), "samples")
        order = "" if mechanism.sampling == "fresh" else ", in shuffled epochs"
        steps += f", in a participation, each on {batch}{order}"
        return f"every update of {len(self.rows)} clients: {steps}"

    @property
    def private_rows(self) -> list[dict[str, Any]]:
        """The rows of the clients that are not public."""
        return [row for row in self.rows if row["epsilon_claimed"] != math.inf]

    def quantiles(self, column: str) -> list[float | None]:
        """Quantiles of a column of `rows` at `SHARES`, of private clients; None where missing."""
        return [*row_quantiles(self.rows, column)] or [None for _ in SHARES]

    def sentence(self) -> str:
        """What the first guarantee means for the client that spends most."""
        return self.guarantees[0].detection()

    def to_dict(self) -> dict[str, Any]:
        """Everything, for strict JSON: an infinite number is the string "infinity"."""
        mechanism = self.mechanism
        columns = dict.fromkeys(self.rows[0] if self.rows else ())
        for name in ("client", "calibrated_by", "conditions_failed"):
            columns.pop(name, None)
        query, calibration = mechanism.side_query, mechanism.calibration
        counts = mechanism.client_steps[mechanism.samples > 0]
        low, high = int(counts.min()), int(counts.max())
        return {
            "unit": "sample",
            "relation": "replace_one",
            "placement": "step",
            "calibration": calibration and calibration.method,
            "delta": mechanism.delta,
            "bound": mechanism.bound,
            "steps": low if low == high else {"least": low, "most": high},
            **({f"std_of_the_{query.name}": query.std} if query else {}),
            "quantiles": {"at": list(SHARES)}
            | {name: list(map(_to_json, self.quantiles(name))) for name in columns},
            "clients": [
                {name: _to_json(value) for name, value in row.items()} for row in self.rows
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "holds": [one.to_dict(curve=True) for one in tightest_guarantees(self.guarantees)],
            "broken": self.violation,
            "sentence": self.sentence(),
            "notes": self.notes,
        }


def _range(counts: np.ndarray, noun: str) -> str:
    low, high = counts.min(), counts.max()
    return f"{low} {noun}" if low == high else f"{low} to {high} {noun}, by the client's size"


def _to_json(value: Any) -> Any:
    return "infinity" if value == math.inf else value


def client_budget(
    *,
    population: int,
    cohort: int | None = None,
    rounds: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    std: float | None = None,
    bound: float | None = None,
    delta: float = 1e-5,
    sampling: str = "fixed",
    cap: int | None = None,
    epoch: int | None = None,
    per_epoch: int | None = None,
    relation: str = "auto",
    placement: str = "auto",
    participations: int | None = None,
    colluders: int = 0,
    strategy: str | None = None,
    separation: int = 1,
    restart: int | None = None,
    bands: int | None = None,
    buffers: int | None = None,
    noise: str | None = None,
    bits: int | None = None,
    parameters: int | None = None,
    v: float = 4.0,
) -> Budget:
    """The budget where whole clients are protected: `rounds` sums over cohorts are released (000,
    001). Give two of epsilon, rounds and noise: `noise_multiplier`, or the `std` of one draw (a
    client's with placement `client`, else that on the sum) and the `bound`. Raises `ConfigError` on
    the name of a parameter.

    `participations` is the largest number of rounds (with replacement: of draws) of any client,
    against an observer who knows the cohorts; None: every round. `epoch` and `per_epoch` (1 by
    default) are those of a random allocation, `cap` is that of truncated Poisson sampling. With
    `colluders` there are answers against as many clients who tell what they know; clients must draw
    the noise. Where the size of a cohort is a secret `relation` auto is add_remove and `placement`
    auto is server, else replace_one and client. `v` is the constant of 000 Theorem 3.2.

    With a `strategy` (one of `factorization.STRATEGIES`) the server's noise is correlated over the
    rounds: that of a node of the tree, or of z for a matrix whose first column has norm 1. Cohorts
    are public or full, a client's rounds at least `separation` apart. `restart` is the rounds of
    one tree (None: all), `bands` (None: the separation) the rounds that noise is correlated over,
    `buffers` (None: 3) the models that the server keeps.

    With `noise` laplace the bound is an L1 norm. With discrete_gaussian (of the server) or skellam
    (of the clients) sums are of integers modulo 2^`bits` (16 by default), for a model of so many
    `parameters`, rotated (`raydpfl.privacy.integer_noise`).
    """
    cohorts = _build_sampling(sampling, population, cohort, cap, epoch, per_epoch)
    # auto: the clients, unless their part of the noise would depend on a secret
    integers = NOISES.get(noise or "skellam", (SkellamNoise,))
    laplace = not integers
    server_draws = cohorts.size_secret or strategy or laplace or not integers[0].by_clients
    auto: Placement = "server" if server_draws else "client"
    places: dict[str, Placement] = {"auto": auto, "client": "client", "server": "server"}
    if laplace:
        del places["client"]
    place = places.get(placement)
    if not place:
        expected = "server, with noise laplace" if laplace else "client or server"
        raise ConfigError("placement", placement, expected)
    query = Query("updates", bound or 1.0, 0.0)
    mechanism = Mechanism(
        cohorts, (query,), 1 if rounds is None else rounds, placement=place,
        colluders=colluders, laplace=laplace,
    )  # fmt: skip
    z = _multiplier(noise_multiplier, std, bound, mechanism.draws)
    unknown = _unknown(z, epsilon, rounds, "rounds")
    limit = math.inf if rounds is None else rounds * (cohorts.cohort if cohorts.repeats else 1)
    if participations is not None and cohorts.everyone:
        expected = "none with everyone in every round: no client takes part in fewer"
        raise ConfigError("participations", participations, expected)
    if participations is not None and not 1 <= participations <= limit:
        expected = f"an integer from 1 to {limit}" if rounds else "an integer, at least 1"
        raise ConfigError("participations", participations, expected)
    covered_relation = _check_relation(mechanism, relation, delta)
    mechanism = mechanism.with_noise(z or 1.0)
    shape = _shape(strategy, separation, restart=restart, bands=bands, buffers=buffers)
    if strategy is not None:
        mechanism, participations = _correlated_mechanism(
            mechanism, strategy, separation, participations, unknown, shape
        )
    integer = _integer_noise(mechanism, noise, bits, parameters, strategy)
    mechanism = replace(mechanism, integer=integer)
    return Budget(
        mechanism, covered_relation, delta, unknown, epsilon, participations=participations, v=v
    )


def _build_sampling(
    kind: str,
    population: int,
    cohort: int | None,
    cap: int | None,
    epoch: int | None,
    per_epoch: int | None,
) -> Sampling:
    """The sampling. Raises `ConfigError` for an option that it lacks, or does not read."""
    scheme = scheme_of(kind)
    if per_epoch is not None and not scheme.in_epochs():
        raise ConfigError("per_epoch", per_epoch, "none, but for sampling random_allocation")
    per_epoch = 1 if epoch and per_epoch is None else per_epoch
    size = scheme.default(population, epoch, per_epoch) if cohort is None else cohort
    size = cast(int, size)  # `Sampling` refuses None
    return Sampling(scheme.kind, population, size, epoch=epoch, per_epoch=per_epoch, cap=cap)


def _shape(strategy: str | None, separation: int, **shape: int | None) -> dict[str, int]:
    """The options of a strategy that are given. Raises `ConfigError` for those of another."""
    if strategy is None and separation != 1:
        raise ConfigError("separation", separation, "1 without a strategy")
    options = {name: value for name, value in shape.items() if value is not None}
    for name, value in options.items():
        if strategy != _STRATEGY_OF[name]:
            raise ConfigError(name, value, f"none, but for strategy {_STRATEGY_OF[name]}")
        if value < 1:
            raise ConfigError(name, value, "an integer, at least 1")
    if "bands" in options and options["bands"] > separation >= 1:
        expected = f"at most {separation}, the rounds after which a client may take part again"
        raise ConfigError("bands", options["bands"], expected)
    return options


def _correlated_mechanism(
    mechanism: Mechanism,
    strategy: str,
    separation: int,
    participations: int | None,
    unknown: Unknown,
    shape: dict[str, int],
) -> tuple[Mechanism, int]:
    """With noise by a strategy of this shape, and the most rounds of a client."""
    if mechanism.laplace:
        raise ConfigError("strategy", strategy, "none with Laplace noise")
    if strategy not in STRATEGIES:
        raise ConfigError("strategy", strategy, f"one of {', '.join(STRATEGIES)}")
    if unknown == "rounds":
        raise ConfigError("rounds", None, "a number: a strategy is for so many")
    if separation < 1:
        raise ConfigError("separation", separation, "an integer, at least 1")
    if separation > 1 and mechanism.sampling.everyone:
        raise ConfigError("separation", separation, "1 with everyone in every round")
    if mechanism.distributed:
        raise ConfigError("placement", mechanism.placement, "server, with a strategy")
    reason = separation_refusal(mechanism.sampling, separation)
    if reason:
        kind = mechanism.sampling.scheme.kind
        raise ConfigError("sampling", kind, f"public or full, with a strategy: {reason}")
    rounds = mechanism.rounds
    max_participations = min(participations or rounds, -(-rounds // separation))
    squares = STRATEGIES[strategy](rounds, separation, max_participations, **shape)
    return replace(mechanism, squares=tuple(squares.tolist())), max_participations


def _integer_noise(
    mechanism: Mechanism,
    noise: str | None,
    bits: int | None,
    parameters: int | None,
    strategy: str | None,
) -> IntegerNoise | None:
    """How sums are taken of integers; None: they are not."""
    if noise is not None and noise not in NOISES:
        *names, last = NOISES
        expected = f"{', '.join(names)} or {last}; of itself noise is Gaussian"
        raise ConfigError("noise", noise, expected)
    kinds = NOISES.get(noise or "")
    if not kinds:
        for name, value in (("bits", bits), ("parameters", parameters)):
            if value is not None:
                raise ConfigError(name, value, "none without sums of integers, by --noise")
        return None
    bits = 16 if bits is None else bits
    kind = next((kind for kind in kinds if kind.by_clients == mechanism.distributed), None)
    if strategy is not None:
        raise ConfigError("strategy", strategy, "none with sums of integers")
    if kind is None and mechanism.sampling.size_secret:
        expected = f"fixed, full or public: noise {noise} is drawn by the clients, whose parts of "
        expected += "it would depend on the secret size of a cohort"
        raise ConfigError("sampling", mechanism.sampling.scheme.kind, expected)
    if kind is None:
        raise ConfigError("placement", mechanism.placement, f"client, with noise {noise}")
    if not 8 <= bits <= 32:
        raise ConfigError("bits", bits, "an integer from 8 to 32")
    if parameters is None or parameters < 1:
        raise ConfigError("parameters", parameters, f"those of the model, with noise {noise}")
    integer = kind(bits, mechanism.sampling.cohort, parameters)
    integer.lattice(1.0)  # refuses a width that does not hold the sum
    return integer


def sample_budget(
    *,
    samples: int,
    steps: int,
    batch: int | None = None,
    participations: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    std: float | None = None,
    bound: float | None = None,
    delta: float = 1e-5,
    sampling: str = "fixed",
    cap: int | None = None,
    epoch: int | None = None,
    per_epoch: int | None = None,
    relation: str = "auto",
    person: int | None = None,
) -> Budget:
    """The budget where one client's samples are protected, by noise at every local step, against an
    observer of every update (002, 003). Give two of epsilon, participations and noise:
    `noise_multiplier`, or the `std` on the mean gradient and the `bound`, the per-sample clip norm.
    With `person`, what holds for so many of the samples together.

    `participations` are the client's rounds, as they occur or capped; never T r / N. Each of the
    `steps` of a round draws a fresh batch, by `sampling`; `cap`, `epoch` and `per_epoch` are as in
    `client_budget`, of batches and steps. Raises `ConfigError` on the name of a parameter.
    """
    with rename_fields(lambda name: _SAMPLE_NAMES.get(name, name)):
        if sampling == "epochs":
            expected = "fixed, a fresh batch at each step: shuffled epochs have no accountant"
            raise ConfigError("sampling", sampling, expected)
        for name, value in (("steps", steps), ("participations", participations)):
            if value is not None and value < 1:
                raise ConfigError(name, value, "an integer, at least 1")
        batch_sampling = _build_sampling(sampling, samples, batch, cap, epoch, per_epoch)
        z = _multiplier(noise_multiplier, std, bound, batch_sampling.cohort)
        unknown = _unknown(z, epsilon, participations, "participations")
        query = Query("gradients", bound or 1.0, 0.0)
        rounds = steps * (1 if participations is None else participations)
        mechanism = Mechanism(batch_sampling, (query,), rounds, unit="sample", placement="step")
        covered_relation = _check_relation(mechanism, relation, delta)
        noisy = mechanism.with_noise(z or 1.0)
        if person is not None:
            noisy.person_mechanism(person)  # refuses it before anything is computed
        return Budget(noisy, covered_relation, delta, unknown, epsilon, steps=steps, person=person)


_UNITS: dict[str, Callable[..., Budget]] = {"client": client_budget, "sample": sample_budget}


def from_options(unit: str = "client", **options: Any) -> Budget:
    """`client_budget` or `sample_budget` from the options of the command line; hyphens may stand
    for underscores. Raises `ConfigError` on an option.
    """
    if unit not in _UNITS:
        raise ConfigError("--unit", unit, "client or sample")
    parameters = inspect.signature(_UNITS[unit]).parameters
    for name, value in options.items():
        if name not in parameters:
            takes = ", ".join(map(_flag, parameters))
            raise ConfigError(_flag(name), value, f"none with --unit {unit}, which takes {takes}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            expected = f"a value with --unit {unit}, or a CONFIG (see raydpfl budget --help)"
            raise ConfigError(_flag(name), None, expected)
    arguments = {
        name: value.replace("-", "_") if isinstance(value, str) else value
        for name, value in options.items()
    }
    names = {"kind": "sampling", "target": "epsilon", "noise.bits": "bits"} | {
        name: name for name in parameters
    }
    with rename_fields(lambda name: _flag(names[name]) if name in names else name):
        return _UNITS[unit](**arguments)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _multiplier(
    z: float | None, std: float | None, bound: float | None, draws: float
) -> float | None:
    """z as stated, or from the std of one draw, `draws` times which is the std of the sum."""
    for name, value in (("noise_multiplier", z), ("std", std), ("bound", bound)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "a positive finite number")
    if std is not None and z is not None:
        raise ConfigError("std", std, "--noise-multiplier or --std, not both")
    if std is not None and bound is None:
        raise ConfigError("bound", None, "the L2 bound that --std is to be compared with")
    field, value = ("noise_multiplier", z) if std is None else ("std", std)
    z = z if std is None or bound is None else std * draws / bound
    if z is not None and not 1e-6 <= z <= 1e6:  # its squares must not leave float64
        expected = f"a noise multiplier from 1e-06 to 1e+06; this one is {z:.4g}"
        raise ConfigError(field, value, expected)
    return z


def _unknown(z: float | None, epsilon: float | None, rounds: int | None, option: str) -> Unknown:
    values: dict[Unknown, float | None] = {"noise": z, "epsilon": epsilon, "rounds": rounds}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) != 1:
        known_names = [name for name in values if name not in missing]
        expected = f"two of noise (--noise-multiplier or --std), --epsilon and --{option}; "
        raise ConfigError("given", known_names or None, f"{expected}the third is computed")
    return missing[0]


def _check_relation(mechanism: Mechanism, request: str, delta: float) -> Relation:
    """The relation asked for; auto: replace_one, unless the size of a cohort is a secret. What no
    rigorous accountant covers is refused, with the nearest combination that is covered.
    """
    if not LEAST_DELTA <= delta < 1:
        raise ConfigError("delta", delta, "a number between 0 and 1, from 1e-300 on")
    sampling = mechanism.sampling
    auto = "add_remove" if sampling.size_secret else "replace_one"
    # `covers` refuses other words
    relation = cast(Relation, auto if request == "auto" else request)
    reason = covers("pld", mechanism, relation)
    if not reason:
        return relation
    known_relations: tuple[Relation, ...] = get_args(Relation)
    relations = [other for other in known_relations if not covers("pld", mechanism, other)]
    nearest = [f"--relation {relation}" for relation in relations]
    if not covers("pld", replace(mechanism, placement="server"), relation):
        nearest.append("--placement server")
    if sampling.cohort <= sampling.population:
        for kind in ("fixed", "poisson", "with_replacement"):
            other = replace(sampling, kind=kind, epoch=None, per_epoch=None, cap=None)
            candidate = replace(mechanism, sampling=other)
            nearest += [] if covers("pld", candidate, relation) else [f"--sampling {kind}"]
    expected = f"{' or '.join(nearest)}: {reason.split('; nearest')[0]}"
    if relations:
        raise ConfigError("relation", relation, expected)
    if "--placement server" in nearest:
        raise ConfigError("placement", mechanism.placement, expected)
    raise ConfigError("sampling", sampling.scheme.kind, expected)
