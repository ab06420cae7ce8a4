"""The privacy budget calculator: epsilon from noise, noise from epsilon, or rounds from both, with
nothing run.

Give two of noise, epsilon and rounds; the third is found by every accountant, against every
observer:

>>> found = of_clients(population=1920, cohort=80, rounds=100, noise_multiplier=4.0)
>>> for answer in found.answers:
...     print(f"{answer.guarantee.accountant:5} {answer.guarantee.observer}: {answer.guarantee.epsilon:.4g}")
pld   every aggregate: 0.9837
pld   every aggregate: 33.1
pld   every single update: 1190
rdp   every aggregate: 2.044
rdp   every aggregate: 35.08
rdp   every single update: 1212
paper every aggregate: 0.7069
>>> round(found.answers[-1].true_epsilon, 2)  # what the formula's 0.7069 is worth
0.98
>>> print(found.sentence())
Epsilon 0.9837 at delta 1e-05 means: at a false-alarm rate of 5%, whoever sees every aggregate, but not who was in the cohorts, can \
detect that one client was replaced by another at most 13.37% of the time; blind guessing detects 5%.

One client's local steps (002, 003), where a sample is protected and every update is seen:

>>> found = of_samples(samples=600, batch=10, steps=300, participations=1, epsilon=0.3, delta=1e-2)
>>> {answer.guarantee.accountant: round(answer.noise_multiplier / 10, 3) for answer in found.answers}  # std of the mean gradient / bound
{'pld': 0.343, 'rdp': 0.667, 'paper 002 tCDP': 2.14, 'paper 002 Theorem 5': 0.106, 'paper 003': 2.277}

`of_config` answers for an experiment, with noise at local steps client by client (`of_personal`);
`from_options` is the command line. What is given and found is the noise multiplier z = std of the
sum / bound, so every answer carries its mechanism with it: sampling, bound, std and relation.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from raydpfl import privacy
from raydpfl.errors import BudgetError, ConfigError, renamed
from raydpfl.privacy import Guarantee, LocalSteps, Mechanism, Query, Relation, Sampling
from raydpfl.privacy.accountants import FORMULAS, Formula
from raydpfl.privacy.accounting import View, views
from raydpfl.privacy.guarantee import SHARES
from raydpfl.privacy.paper import Printed
from raydpfl.privacy.personal import Participations

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from raydpfl.config import Experiment

Unknown = Literal["epsilon", "noise", "rounds"]
MOST_ROUNDS = 1 << 20  # where `privacy.rounds_for` stops looking
_COUNTS = range(1, MOST_ROUNDS + 1)
MOST_ROWS = 5  # clients that `render` shows
# What the parameters of `raydpfl.privacy` are called where samples are protected.
_OF_SAMPLES = {"population": "samples", "cohort": "batch", "rounds": "participations"}
FALSE_ALARMS = 0.05  # at which `Budget.sentence` says what can be detected


@dataclass(frozen=True)
class Answer:
    """What one accountant says against one observer.

    `noise_multiplier`: std of the sum / bound, of the mechanism itself and not of what the observer
    makes of it; infinite when no noise will do. `rounds`: of the run, or at the sample level those
    the client takes part in; 0 when one spends too much. `guarantee`: what the accountant says of
    that noise and those rounds (of one round, when there is none to spend). `true_epsilon`: for a
    paper's formula, the epsilon that holds there, at the formula's own delta, by the first rigorous
    accountant that can tell; otherwise None.
    """

    guarantee: Guarantee
    noise_multiplier: float
    rounds: int
    true_epsilon: float | None = None

    @property
    def overclaims(self) -> bool:
        """True for a formula that claims a smaller epsilon than holds."""
        return self.true_epsilon is not None and self.true_epsilon > self.guarantee.epsilon * (
            1 + 1e-6
        )


@dataclass(frozen=True)
class Budget:
    """`answers` to the question, and the `guarantees` of one mechanism by every accountant against
    every observer.

    `unknown` is what the answers found. `mechanism` has the noise and rounds of the first answer
    (pld, against whoever sees least), or those of the config. `steps` is 1, or at the sample level
    the local steps of a round. `notes` are what a reader should know beside.
    """

    unknown: Unknown
    mechanism: Mechanism
    relation: Relation
    delta: float
    answers: tuple[Answer, ...]
    guarantees: tuple[Guarantee, ...]
    epsilon: float | None = None  # None: it was the unknown
    steps: int = 1
    notes: tuple[str, ...] = ()

    @property
    def noise(self) -> dict[str, float]:
        """The noise in full: multiplier, bound, sensitivity of the sum under `relation`, std of the
        sum and of what is drawn.
        """
        query = self.mechanism.queries[0]
        r = self.mechanism.sampling.cohort
        drawn = {
            "client": ("std_of_one_client", math.sqrt(r)),
            "step": ("std_of_the_mean_gradient", r),
        }.get(self.mechanism.placement)
        return {
            "noise_multiplier": self.mechanism.noise_multiplier,
            "bound": query.bound,
            "sensitivity": query.bound * (2 if self.relation == "replace_one" else 1),
            "std_of_the_sum": query.std,
            **({drawn[0]: query.std / drawn[1]} if drawn else {}),
            **{
                f"std_of_the_{other.name}": other.std
                for other in self.mechanism.queries
                if other.apart
            },
        }

    def sentence(self) -> str:
        """What the first guarantee's epsilon means, as a bound on the power of any test at a
        false-alarm rate of 5%.
        """
        return _means(self.guarantees[0])

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON can hold it: an infinite number is the string "infinity"."""
        rounds = self.mechanism.rounds // self.steps
        local = self.mechanism.placement == "step"
        return {
            "unknown": self.unknown,
            "unit": self.mechanism.unit,
            "sampling": asdict(self.mechanism.sampling),
            **({"participations": rounds, "steps": self.steps} if local else {"rounds": rounds}),
            "relation": self.relation,
            "placement": self.mechanism.placement,
            "delta": self.delta,
            "noise": self.noise,
            "answers": [
                {
                    "noise_multiplier": _to_json(answer.noise_multiplier),
                    "participations" if local else "rounds": answer.rounds,
                    "true_epsilon": _to_json(answer.true_epsilon),
                    "guarantee": answer.guarantee.to_dict(),
                }
                for answer in self.answers
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "sentence": self.sentence(),
            "notes": list(self.notes),
        }


def of_clients(
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
    relation: str = "auto",
    placement: str = "auto",
    participations: int | None = None,
    v: float = 4.0,
) -> Budget:
    """Whole clients are protected, `rounds` sums over cohorts are released (000, 001).

    Two of epsilon, rounds and noise. `noise_multiplier` is the std of the sum / `bound`; `std`,
    which needs `bound`, that of one client's noise with placement `client` and of the sum with
    `server`. `relation` auto is add_remove for Poisson sampling, else replace_one; `placement` auto
    is server for Poisson, else client. `participations` is the most rounds (draws, with
    replacement) of any client, for whoever knows the cohorts; None: every round. `v` is the
    constant of the papers' formula.

    Raises `ConfigError` by the name of a parameter.
    """
    if placement not in ("auto", "client", "server"):
        raise ConfigError("placement", placement, "client or server")
    poisson = sampling == "poisson"
    placement = ("server" if poisson else "client") if placement == "auto" else placement
    who = Sampling(
        sampling, population, population if cohort is None and sampling == "full" else cohort
    )
    z = _multiplier(
        noise_multiplier, std, bound, {"client": math.sqrt(who.cohort)}.get(placement, 1.0)
    )
    unknown = _unknown(z, epsilon, rounds, "rounds")
    query = Query("updates", bound or 1.0, 0.0)
    mechanism = Mechanism(
        who, (query,), 1 if rounds is None else rounds, placement=placement
    ).with_noise(z or 1.0)
    relation = ("add_remove" if poisson else "replace_one") if relation == "auto" else relation
    most = (
        math.inf
        if rounds is None
        else rounds * (who.cohort if sampling == "with_replacement" else 1)
    )
    if participations is not None and not 1 <= participations <= most:
        raise ConfigError(
            "participations",
            participations,
            f"an integer from 1 to {most}" if rounds else "an integer, at least 1",
        )
    _check(mechanism, relation, delta)
    return _Question(
        mechanism, relation, delta, unknown, epsilon, participations=participations, v=v
    ).budget()


def of_samples(
    *,
    samples: int,
    batch: int,
    steps: int,
    participations: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    std: float | None = None,
    bound: float | None = None,
    delta: float = 1e-5,
    sampling: str = "fixed",
    relation: str = "auto",
) -> Budget:
    """One client's samples are protected, by noise on each local step, against whoever sees every
    update (002, 003).

    Two of epsilon, `participations` (the rounds the client takes part in, realised or capped; never
    T r / N) and noise. `noise_multiplier` is the std of the noise on the sum over a batch /
    `bound`, the per-sample clip norm; `std`, which needs `bound`, that of the noise on the mean
    gradient. Each of the `steps` of a round draws a fresh batch, by `sampling`.
    """
    with renamed(lambda name: _OF_SAMPLES.get(name, name)):
        if sampling == "epochs":
            raise ConfigError(
                "sampling",
                sampling,
                "shuffled epochs have no accountant; nearest: fixed, a fresh batch at each step",
            )
        for name, value in (("steps", steps), ("participations", participations)):
            if value is not None and value < 1:
                raise ConfigError(name, value, "an integer, at least 1")
        z = _multiplier(noise_multiplier, std, bound, batch)
        unknown = _unknown(z, epsilon, participations, "participations")
        rounds = steps if participations is None else steps * participations
        query = Query("gradients", bound or 1.0, 0.0)
        mechanism = Mechanism(
            Sampling(sampling, samples, batch), (query,), rounds, unit="sample", placement="step"
        ).with_noise(z or 1.0)
        relation = (
            ("add_remove" if sampling == "poisson" else "replace_one")
            if relation == "auto"
            else relation
        )
        _check(mechanism, relation, delta)
        return _Question(mechanism, relation, delta, unknown, epsilon, steps=steps).budget()


def of_config(experiment: Experiment, data_root: Path | None = None) -> Budget | PersonalBudget:
    """What a run of `experiment` would guarantee, cohorts drawn as it would draw them, and the
    noise that each accountant would ask for.

    With noise at local steps, what each client's samples have. The data are prepared, for the sizes
    of the population, but nothing is trained. Raises `ConfigError` for all that a run would refuse,
    and for a run without noise.
    """
    from raydpfl.plan import Plan

    experiment = _without_model(experiment)
    if not experiment.private:
        raise ConfigError(
            "noise.kind",
            experiment.noise.kind,
            "a noise with a budget, such as noise={kind: gaussian, epsilon: 8}",
        )
    plan = Plan.make(experiment, data_root)
    e = plan.experiment
    seen = Counter(client for clients in plan.draws(e.rounds) for client in clients.tolist())
    if plan.mechanism.by_draws:
        found = of_personal(plan.mechanism, seen, e.privacy.accountants)
    else:
        scale = e.bounding.initial_bound * plan.weight
        updates, *others = plan.mechanism.queries
        mechanism = replace(
            plan.mechanism,
            queries=(
                replace(updates, bound=updates.bound * scale, std=updates.std * scale),
                *others,
            ),
        )
        target = e.noise.target()
        unknown: Unknown = "epsilon" if target is None else "noise"
        most = max(seen.values(), default=1) if e.noise.simulated() else None
        question = _Question(
            mechanism,
            plan.terms.relation,
            plan.terms.delta,
            unknown,
            target,
            participations=most,
            v=plan.terms.v,
        )
        found = question.budget(mechanism)
    if e.privacy.budget is None:
        return found
    curves = plan.curves()
    lasts = int(
        (np.min([curves[name] for name in plan.rigorous], axis=0) <= e.privacy.budget).sum()
    )
    by = " and ".join(plan.rigorous)
    note = (
        f"privacy.budget {e.privacy.budget:g} lasts for {lasts} of the {e.rounds} rounds, by {by}"
    )
    return replace(found, notes=(*found.notes, note))


def _without_model(experiment: Experiment) -> Experiment:
    """The experiment as far as privacy goes, without what need not be imported: an own model
    where its size does not count, an own server where no noise is correlated."""
    from raydpfl import models, server

    if experiment.accounted_with() & experiment.unread.keys():
        return experiment.imported()
    changes: dict[str, Any] = {}
    if "model" in experiment.unread:
        changes["model"] = models.FAMILY["linear"]()
        changes["client"] = experiment.client.model_copy(update={"way": "auto"})
    if "server" in experiment.unread:
        changes["server"] = server.Sgd()
    return experiment.model_copy(update=changes)


def from_options(unit: str = "client", **options: Any) -> Budget:
    """`of_clients` or `of_samples` by the options of the command line, those left out left out;
    hyphens may stand for underscores.
    """
    kinds = {"client": of_clients, "sample": of_samples}
    if unit not in kinds:
        raise ConfigError("--unit", unit, "client or sample")
    parameters = inspect.signature(kinds[unit]).parameters
    for name, value in options.items():
        if name not in parameters:
            raise ConfigError(
                _flag(name),
                value,
                f"not with --unit {unit}, which takes {', '.join(map(_flag, parameters))}",
            )
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(
                _flag(name),
                None,
                f"required with --unit {unit}; or give a CONFIG (see raydpfl budget --help)",
            )
    given = {
        name: value.replace("-", "_") if isinstance(value, str) else value
        for name, value in options.items()
    }
    names = {"kind": "sampling", "target": "epsilon"} | {name: name for name in parameters}
    with renamed(lambda name: _flag(names[name]) if name in names else name):
        return kinds[unit](**given)


@dataclass(frozen=True)
class PersonalBudget:
    """What noise at local steps guarantees each client's samples, and what was promised them.

    `rows`: `LocalSteps.table`, a row for each client that takes part. `guarantees`: those of the
    client that spends most, by every accountant. `broken`: which clients were promised more than
    holds, in words. `notes`: what a reader should know beside.
    """

    mechanism: LocalSteps
    rows: tuple[dict[str, Any], ...]
    guarantees: tuple[Guarantee, ...]
    broken: str | None = None
    notes: tuple[str, ...] = ()

    def quantiles(self, column: str) -> list[float | None]:
        """Of a column of `rows`, at `SHARES` of the clients that are not public; None where there
        is nothing.
        """
        values = sorted(
            row[column]
            for row in self.rows
            if row[column] is not None and row["epsilon_claimed"] != math.inf
        )
        return [
            values[max(math.ceil(share * len(values)) - 1, 0)] if values else None
            for share in SHARES
        ]

    def sentence(self) -> str:
        """What the first guarantee means for the client that spends most."""
        return _means(self.guarantees[0])

    def to_dict(self) -> dict[str, Any]:
        """All of it as strict JSON can hold it: an infinite number is the string "infinity"."""
        columns = [
            name
            for name in (self.rows[0] if self.rows else ())
            if name not in ("client", "conditions_failed")
        ]
        return {
            "unit": "sample",
            "relation": "replace_one",
            "placement": "step",
            "calibration": self.mechanism.calibration,
            "delta": self.mechanism.delta,
            "bound": self.mechanism.bound,
            "steps": self.mechanism.steps,
            **(
                {f"std_of_the_{beside.name}": beside.std}
                if (beside := self.mechanism.beside)
                else {}
            ),
            "quantiles": {"at": list(SHARES)}
            | {name: [_to_json(value) for value in self.quantiles(name)] for name in columns},
            "clients": [
                {name: _to_json(value) for name, value in row.items()} for row in self.rows
            ],
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees],
            "broken": self.broken,
            "sentence": self.sentence(),
            "notes": list(self.notes),
        }


def of_personal(
    mechanism: LocalSteps,
    participations: Participations,
    accountants: Sequence[str] = ("pld", "rdp", "paper"),
) -> PersonalBudget:
    """What `mechanism` guarantees after the clients' `participations`, by client and for the one
    that spends most.
    """
    try:
        mechanism.check_claims(participations)
        broken = None
    except BudgetError as error:
        broken = str(error)
    rows = mechanism.table(participations, accountants)
    guarantees = mechanism.guarantees(participations, accountants)
    notes = [
        *mechanism.warnings(participations),
        *(f"not accounted for: {each}" for each in mechanism.exclusions),
    ]
    return PersonalBudget(mechanism, tuple(rows), tuple(guarantees), broken, tuple(notes))


@dataclass(frozen=True)
class _Question:
    """What is asked of a mechanism, in which a 1 stands in for the noise, or the rounds, that are
    unknown.
    """

    mechanism: Mechanism
    relation: Relation
    delta: float
    unknown: Unknown
    epsilon: float | None
    steps: int = 1
    participations: int | None = None
    v: float = 4.0

    def budget(self, mechanism: Mechanism | None = None) -> Budget:
        """`mechanism` is the one whose guarantees are wanted, where it is not that of the first
        answer.
        """
        answers = self._answers()
        first = answers[0]
        if first.rounds == 0:
            raise ConfigError(
                "epsilon",
                self.epsilon,
                f"at least {first.guarantee.epsilon:.4g}, which one round spends; or more noise",
            )
        mechanism = mechanism or self._at(first.noise_multiplier, first.rounds)
        held = (
            answers
            if self.unknown == "epsilon"
            else replace(self, mechanism=mechanism, unknown="epsilon")._answers()
        )
        return Budget(
            unknown=self.unknown,
            mechanism=mechanism,
            relation=self.relation,
            delta=self.delta,
            answers=tuple(answers),
            guarantees=tuple(answer.guarantee for answer in held),
            epsilon=self.epsilon,
            steps=self.steps,
            notes=tuple(_notes(mechanism, self.delta)),
        )

    def _answers(self) -> list[Answer]:
        printed = self._printed() if self.mechanism.placement == "step" else self._counted("paper")
        return [*self._counted("pld"), *self._counted("rdp"), *printed]

    def _at(self, z: float, rounds: int) -> Mechanism:
        return replace(self.mechanism.with_noise(z), rounds=rounds * self.steps)

    def _seen(self, rounds: int) -> list[View]:
        return list(views(self.mechanism, self.relation, rounds * self.steps, self.participations))

    def _guarantees(self, name: str, z: float, rounds: int, delta: float) -> list[Guarantee]:
        mechanism = self._at(z, max(rounds, 1))
        return privacy.guarantees(
            mechanism,
            self.relation,
            delta,
            accountants=[name],
            participations=self.participations,
            v=self.v,
        )

    def _counted(self, name: str) -> Iterator[Answer]:
        """By an accountant of `raydpfl.privacy`, one answer against each observer; `paper` knows
        the first alone.
        """
        z = self.mechanism.noise_multiplier
        rounds = self.mechanism.rounds // self.steps
        for place, view in enumerate(self._seen(rounds)[: 1 if name == "paper" else None]):
            observed = view.mechanism
            under = view.relation
            found_z = z
            found_rounds = rounds
            if self.unknown != "epsilon" and not privacy.covers(name, observed, under):
                if self.unknown == "rounds":
                    most = privacy.rounds_for(
                        self.epsilon, observed, under, self.delta, name, self.v
                    )
                    found_rounds = bisect_right(
                        _COUNTS, most, key=lambda t, place=place: self._seen(t)[place].rounds
                    )
                elif name == "paper":
                    found_z = privacy.paper_multiplier(
                        self.epsilon, observed.sampling, view.rounds, self.delta, self.v
                    )
                else:  # what an observer meets is a fixed multiple of the mechanism's own noise
                    found_z *= (
                        privacy.noise_for(
                            self.epsilon, observed, under, self.delta, name, view.rounds
                        )
                        / observed.noise_multiplier
                    )
            guarantee = self._guarantees(name, found_z, found_rounds, self.delta)[place]
            truth = self._truth(found_z, found_rounds, self.delta) if name == "paper" else None
            yield Answer(guarantee, found_z, found_rounds, truth)

    def _printed(self) -> Iterator[Answer]:
        """By the papers' formulas for local steps."""
        query = self.mechanism.queries[0]
        batches = self.mechanism.sampling
        rounds = self.mechanism.rounds // self.steps
        client = {"bound": query.bound, "batch": batches.cohort, "samples": batches.population}
        (seen,) = self._guarantees("pld", self.mechanism.noise_multiplier, 1, self.delta)
        for formula in FORMULAS.values():

            def claim(std: float, rounds: int, formula: Formula = formula) -> tuple[Printed, float]:
                return formula.printed(std, self.delta, **client, steps=max(rounds, 1) * self.steps)

            std = query.std / batches.cohort
            found = rounds
            failed = ()
            if batches.cohort > batches.population:  # which draws with replacement alone allow
                std = math.inf if self.unknown == "noise" else std
                found = 0 if self.unknown == "rounds" else rounds
                failed = (
                    f"a batch of {batches.cohort} from at least as many samples (here: {batches.population})",
                )
            elif self.unknown == "noise":
                std, failed = astuple(
                    formula.noise(self.epsilon, self.delta, **client, steps=rounds * self.steps)
                )
            elif self.unknown == "rounds":
                found = bisect_right(
                    _COUNTS,
                    self.epsilon,
                    key=lambda t, std=std, claim=claim: claim(std, t)[0].value,
                )
            z = batches.cohort * std / query.bound
            epsilon = math.inf
            delta = self.delta
            truth = None
            if math.isfinite(std) and batches.cohort <= batches.population:
                printed, delta = claim(std, found)
                truth = self._truth(z, found, delta)
                epsilon, failed = (
                    (self.epsilon, failed) if self.unknown == "noise" else astuple(printed)
                )
            if not batches.law.as_in_the_papers(batches):
                failed += (
                    f"batches of one fixed size, drawn without replacement (here: {batches})",
                )
            if delta != self.delta:
                failed += (
                    f"delta = {self.delta:g} (the formula gives its epsilon at delta {delta:.3g} alone)",
                )
            says = {
                "kind": "paper",
                "accountant": formula.name,
                "relation": formula.relation,
                "epsilon": epsilon,
                "delta": delta,
            }
            yield Answer(replace(seen, **says, conditions_failed=failed), z, found, truth)

    def _truth(self, z: float, rounds: int, delta: float) -> float:
        """Epsilon by pld, or by rdp where `delta` is too small for pld to tell."""
        if not 0 < delta < 1:
            return math.inf
        spent = (self._guarantees(name, z, rounds, delta)[0].epsilon for name in ("pld", "rdp"))
        return next((each for each in spent if math.isfinite(each)), math.inf)


def _means(guarantee: Guarantee) -> str:
    """An epsilon as a bound on the power of any test at a false-alarm rate of 5%."""
    hidden = guarantee.sampling.secret
    if not math.isfinite(guarantee.epsilon):
        return f"Nothing is guaranteed: {'; '.join(guarantee.conditions_failed)}."
    likelier = math.exp(min(guarantee.epsilon, 700.0))
    power = min(
        likelier * FALSE_ALARMS + guarantee.delta,
        1 - (1 - FALSE_ALARMS - guarantee.delta) / likelier,
        1.0,
    )
    events = {
        "replace_one": "was replaced by another",
        "add_remove": "took part at all",
        "zero_out": "contributed at all",
    }
    return (
        f"Epsilon {guarantee.epsilon:.4g} at delta {guarantee.delta:g} means: at a false-alarm rate of {FALSE_ALARMS:.0%}, whoever sees "
        f"{guarantee.observer}{f', but not {hidden},' if hidden else ''} can detect that one {guarantee.unit} "
        f"{events.get(guarantee.relation, 'differed')} at most {100 * power:.4g}% of the time; blind guessing detects {FALSE_ALARMS:.0%}."
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _to_json(value: Any) -> Any:
    return "infinity" if value == math.inf else value


def _multiplier(
    z: float | None, std: float | None, bound: float | None, count: float
) -> float | None:
    """z from itself or from a std, `count` of which make the std of the sum."""
    for name, value in (("noise_multiplier", z), ("std", std), ("bound", bound)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(name, value, "a positive finite number")
    if std is not None and z is not None:
        raise ConfigError("std", std, "--noise-multiplier or --std, not both")
    if std is not None and bound is None:
        raise ConfigError("bound", None, "the L2 bound that --std is to be compared with")
    field, z = ("noise_multiplier", z) if std is None else ("std", std * count / bound)
    # squares of what lies far outside leave the range of float64
    if z is not None and not 1e-6 <= z <= 1e6:
        raise ConfigError(
            field, std or z, f"a noise multiplier from 1e-06 to 1e+06; this one is {z:.4g}"
        )
    return z


def _unknown(z: float | None, epsilon: float | None, rounds: int | None, repeated: str) -> Unknown:
    given = [
        name
        for name, value in (("noise", z), ("epsilon", epsilon), ("rounds", rounds))
        if value is not None
    ]
    if len(given) != 2:
        accepted = f"two of noise (--noise-multiplier or --std), --epsilon and --{repeated}; the third is computed"
        raise ConfigError("given", given or None, accepted)
    (missing,) = {"noise", "epsilon", "rounds"}.difference(given)
    return missing


def _check(mechanism: Mechanism, relation: Relation, delta: float) -> None:
    """Raises `ConfigError` for a delta that is none, and for what no rigorous accountant covers,
    with the nearest that one does.
    """
    if not 0 < delta < 1:
        raise ConfigError("delta", delta, "a number between 0 and 1, both excluded")
    reason = privacy.covers("pld", mechanism, relation)
    if not reason:
        return
    sampling = mechanism.sampling
    nearest = [
        f"--relation {other}"
        for other in get_args(Relation)
        if not privacy.covers("pld", mechanism, other)
    ]
    field = "relation" if nearest else "placement"
    if not privacy.covers("pld", replace(mechanism, placement="server"), relation):
        nearest.append("--placement server")
    for kind in (
        ("fixed", "poisson", "with_replacement") if sampling.cohort <= sampling.population else ()
    ):
        if not privacy.covers(
            "pld", replace(mechanism, sampling=replace(sampling, kind=kind)), relation
        ):
            nearest.append(f"--sampling {kind}")
    value = relation if field == "relation" else mechanism.placement
    raise ConfigError(
        field, value, f"{reason.split('; nearest')[0]}; nearest: {' or '.join(nearest)}"
    )


def _notes(mechanism: Mechanism, delta: float) -> Iterator[str]:
    size = mechanism.sampling.population
    unit = mechanism.unit
    if loose := privacy.loose(delta, size, unit):
        yield loose
    if mechanism.placement == "client":
        yield "k clients who pool what they know of their own noise, or k that drop out, leave sqrt((r - k) / r) of the noise on a sum of r"
    if mechanism.placement == "step":
        yield "it holds for a fresh batch at each step, not for shuffled epochs; participations are those that occur, or a cap that is kept"
    yield from (f"not accounted for: {exclusion}" for exclusion in mechanism.exclusions)


def render(budget: Budget | PersonalBudget) -> RenderableType:
    """For a terminal: what is released, the answers side by side, the formulas with their
    conditions, and the sentence.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if isinstance(budget, PersonalBudget):
        return _render_personal(budget)
    mechanism = budget.mechanism
    noise = budget.noise
    local = mechanism.placement == "step"
    rounds = mechanism.rounds // budget.steps
    sampling = mechanism.sampling
    head = Table.grid(padding=(0, 2))
    if local:
        steps = f"{mechanism.rounds} local steps ({rounds} x {budget.steps})"
        head.add_row("released", f"{steps}, each a sum over a batch of samples: {sampling}")
    else:
        head.add_row(
            "released", f"{rounds} rounds, each a sum over a cohort of clients: {sampling}"
        )
    sensitivity = f"sensitivity of the sum {noise['sensitivity']:.4g} under {budget.relation}"
    head.add_row("bound", f"{noise['bound']:.4g} for each {mechanism.unit}; {sensitivity}")
    stds = [
        f"{value:.4g} {name.removeprefix('std_').replace('_', ' ')}"
        for name, value in noise.items()
        if name.startswith("std_")
    ]
    sums = sum(not query.apart for query in mechanism.queries)
    together = f", the {sums} queries of a round together" if sums > 1 else ""
    head.add_row("noise", f"std {', '.join(stds)}")
    head.add_row(
        "noise multiplier", f"{noise['noise_multiplier']:.4g} (std of the sum / bound{together})"
    )

    def table(title: str, cells: list[tuple[Guarantee, str]]) -> Table:
        columns: dict[str, list[tuple[Guarantee, str]]] = {}
        for guarantee, cell in cells:
            columns.setdefault(_label(guarantee), []).append((guarantee, cell))
        made = _table(title)
        told_apart = len({guarantee.relation for guarantee, _ in columns["pld"]}) > 1
        made.add_column("against whoever sees", no_wrap=True)
        if told_apart:
            made.add_column("relation", no_wrap=True)
        for name in columns:
            made.add_column(name, justify="right", overflow="fold")
        for place, (guarantee, _) in enumerate(columns["pld"]):
            against = [guarantee.observer.value, guarantee.sampling.knows]
            row = [column[place][1] if place < len(column) else "" for column in columns.values()]
            made.add_row(
                ", ".join(word for word in against if word),
                *[guarantee.relation] * told_apart,
                *row,
            )
        return made

    at = f"epsilon {budget.epsilon or 0:.4g} at delta {budget.delta:g}"
    repeated = "participations" if local else "rounds"
    titles = {
        "epsilon": f"Epsilon at delta {budget.delta:g}",
        "noise": f"Noise multiplier that {at} needs",
        "rounds": f"{repeated.capitalize()} that {at} allows",
    }
    cells = [(answer.guarantee, _cell(budget, answer)) for answer in budget.answers]
    parts: list[Any] = [head, "", table(titles[budget.unknown], cells), ""]
    if budget.unknown != "epsilon":
        which = (
            f"{rounds} {repeated}"
            if budget.unknown == "rounds"
            else f"noise multiplier {noise['noise_multiplier']:.4g}"
        )
        parts += [
            table(
                f"Epsilon at delta {budget.delta:g} with {which}",
                [(each, _spent(each)) for each in budget.guarantees],
            ),
            "",
        ]
    for answer in budget.answers:
        if answer.guarantee.kind == "paper":
            parts.append(
                Text(_worth(budget, answer, repeated), style="red" if answer.overclaims else "")
            )
    known = [each.sampling.participations for each in budget.guarantees]
    notes = [f"cohort known: {each}" for each in dict.fromkeys(known) if each]
    rigorous = [answer.guarantee for answer in budget.answers if answer.guarantee.kind != "paper"]
    notes += dict.fromkeys(
        f"{each.accountant}: {reason}" for each in rigorous for reason in each.conditions_failed
    )
    parts += [Text(f"- {note}") for note in [*notes, *budget.notes]]
    return Group(*parts, "", Text(budget.sentence(), style="bold"))


def _render_personal(budget: PersonalBudget) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    mechanism = budget.mechanism
    rows = budget.rows
    head = Table.grid(padding=(0, 2))
    batch = "all samples" if mechanism.batch is None else f"{mechanism.batch} samples"
    order = "" if mechanism.sampling == "fresh" else ", in shuffled epochs"
    head.add_row(
        "released",
        f"every update of {len(rows)} clients: {mechanism.steps} local steps a participation, each on {batch}{order}",
    )
    head.add_row(
        "bound",
        f"{mechanism.bound:.4g} for each sample's gradient; replacing one moves the mean over B by {2 * mechanism.bound:.4g} / B",
    )
    promised = {
        "rigorous": "to meet each client's budget",
        "paper": "by the formula of 003",
        "tcdp": "by the formula of 002 (tCDP)",
    }
    head.add_row("noise", f"at each step, {promised.get(mechanism.calibration, 'as given')}")
    if mechanism.beside:
        head.add_row(
            "beside",
            f"the {mechanism.beside.name} of a client in each of its rounds, with noise of std {mechanism.beside.std:.4g}",
        )
    names = {"participations": "rounds", "noise_std": "std", "epsilon_claimed": "promised"}
    names |= {
        name: name.removeprefix("epsilon_").removeprefix("paper_").replace("_", " ")
        for row in rows[:1]
        for name in row
        if "epsilon_" in name
    }
    names["epsilon_claimed"] = "promised"

    def table(title: str, first: str, lines: list[tuple[str, list[Any]]]) -> Table:
        made = _table(title)
        made.add_column(first, no_wrap=True)
        for name in names.values():
            made.add_column(name.replace("theorem", "thm"), justify="right", overflow="fold")
        for label, values in lines:
            made.add_row(label, *("-" if value is None else f"{value:.4g}" for value in values))
        return made

    quantiles = {name: budget.quantiles(name) for name in names} if rows else {}
    spread = (
        [
            (f"{share:.0%}", [quantiles[name][place] for name in quantiles])
            for place, share in enumerate(SHARES)
        ]
        if rows
        else []
    )
    title = f"Epsilon of a client's samples at delta {mechanism.delta:g}: quantiles over clients"
    key = next(
        (name for name in names if name.startswith("epsilon_") and name != "epsilon_claimed"),
        "noise_std",
    )
    worst = sorted(
        (row for row in rows if row["epsilon_claimed"] != math.inf),
        key=lambda row: row[key],
        reverse=True,
    )[:MOST_ROWS]
    parts: list[Any] = [head, "", table(title, "share", spread), ""]
    parts += [
        table(
            f"The {len(worst)} clients that spend most",
            "client",
            [(str(row["client"]), [row[name] for name in names]) for row in worst],
        ),
        "",
    ]
    if budget.broken:
        parts += [Text(f"{budget.broken[0].upper()}{budget.broken[1:]}.", style="red"), ""]
    for guarantee in budget.guarantees:
        if guarantee.kind == "paper" and guarantee.conditions_failed:
            parts.append(
                Text(
                    f"- {guarantee.accountant}: conditions that fail for the client it finds worst: {'; '.join(guarantee.conditions_failed)}"
                )
            )
    parts += [Text(f"- {note}") for note in budget.notes]
    return Group(*parts, "", Text(budget.sentence(), style="bold"))


def _table(title: str) -> Table:
    """So narrow that 80 columns hold the numbers of all accountants."""
    from rich import box
    from rich.table import Table

    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )


def _label(guarantee: Guarantee) -> str:
    return "paper 000, 001" if guarantee.accountant == "paper" else guarantee.accountant


def _spent(guarantee: Guarantee) -> str:
    if guarantee.kind == "rigorous" and guarantee.conditions_failed:
        return "-"
    return f"{guarantee.epsilon:.4g}{'*' if guarantee.conditions_failed else ''}"


def _cell(budget: Budget, answer: Answer) -> str:
    text = _spent(answer.guarantee)
    if budget.unknown == "epsilon" or text == "-":
        return text
    mark = "*" if answer.guarantee.conditions_failed else ""
    if budget.unknown == "noise":
        return (
            f"{answer.noise_multiplier:.4g}{mark}"
            if math.isfinite(answer.noise_multiplier)
            else f"none{mark}"
        )
    return (
        f"{'>= ' if (answer.rounds + 1) * budget.steps > MOST_ROUNDS else ''}{answer.rounds}{mark}"
    )


def _worth(budget: Budget, answer: Answer, repeated: str) -> str:
    """A formula's claim beside what it is worth, and the conditions that fail."""
    guarantee = answer.guarantee
    says = {
        "epsilon": f"claims epsilon {guarantee.epsilon:.4g}",
        "noise": f"asks for noise multiplier {answer.noise_multiplier:.4g}",
        "rounds": f"allows {answer.rounds} {repeated}",
    }[budget.unknown]
    text = f"{_label(guarantee)}, as printed, {says}"
    if answer.true_epsilon is not None:
        text += f"; the epsilon there is {answer.true_epsilon:.4g}{', more than it claims' if answer.overclaims else ''}"
    failed = (
        f" Conditions that fail (*): {'; '.join(guarantee.conditions_failed)}."
        if guarantee.conditions_failed
        else ""
    )
    return f"{text}.{failed}"
