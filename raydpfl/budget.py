"""The privacy budget calculator: epsilon from noise, noise from epsilon, or rounds from both, with nothing run.

Give two of noise, epsilon and rounds; the third is found by every accountant, against every observer:

>>> found = of_clients(population=1920, cohort=80, rounds=100, noise_multiplier=4.0)
>>> for answer in found.answers:
...     print(f"{answer.guarantee.accountant:5} {answer.guarantee.observer}: {answer.guarantee.epsilon:.4g}")
pld   every aggregate: 0.9835
pld   every aggregate: 33.2
pld   every single update: 1298
rdp   every aggregate: 2.044
rdp   every aggregate: 34.11
rdp   every single update: 1306
paper every aggregate: 0.707
>>> found.answers[-1].true_epsilon.__round__(4)  # what the formula's 0.707 is worth
0.9835
>>> print(found.sentence())
Epsilon 0.9835 at delta 1e-05 means: at a false-alarm rate of 5 %, whoever sees every aggregate, but not who was in the cohorts, can \
detect that one client was replaced by another at most 13.37 % of the time; blind guessing detects 5 %.

One client's local steps (002, 003), where a sample is protected and every update is seen:

>>> found = of_samples(samples=600, batch=10, steps=300, participations=1, epsilon=0.3, delta=1e-2)
>>> {answer.guarantee.accountant: round(answer.noise_multiplier / 10, 3) for answer in found.answers}  # std of the mean gradient / bound
{'pld': 0.343, 'rdp': 0.514, 'paper 002 tCDP': 2.138, 'paper 002 Theorem 5': 0.107, 'paper 003': 0.571}

`of_config` answers for an experiment; `from_options` is the command line. What is given and found is the noise multiplier
z = std of the sum / bound, so every answer carries its mechanism with it: sampling, bound, std and relation.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.privacy import Guarantee, Mechanism, Query, Relation, Sampling, paper
from raydpfl.privacy.accountants import _views
from raydpfl.privacy.paper import Printed

if TYPE_CHECKING:
    from rich.console import RenderableType

    from raydpfl.config import Experiment

Unknown = Literal["epsilon", "noise", "rounds"]
MOST_ROUNDS = 1 << 20  # where `privacy.rounds_for` stops looking
FALSE_ALARMS = 0.05  # at which `Budget.sentence` says what can be detected


@dataclass(frozen=True)
class Answer:
    """What one accountant says against one observer.

    `noise_multiplier`: std of the sum / bound, of the mechanism itself and not of what the observer makes of it; infinite when no noise will
    do. `rounds`: of the run, or at the sample level those the client takes part in; 0 when one spends too much. `guarantee`: what
    the accountant says of that noise and those rounds (of one round, when there is none to spend). `true_epsilon`: for a paper's
    formula, the epsilon that holds there, at the formula's own delta, by the first rigorous accountant that can tell; otherwise None.
    """

    guarantee: Guarantee
    noise_multiplier: float
    rounds: int
    true_epsilon: float | None = None

    @property
    def overclaims(self) -> bool:
        """True for a formula that claims a smaller epsilon than holds."""
        return self.true_epsilon is not None and self.true_epsilon > self.guarantee.epsilon * (1 + 1e-6)


@dataclass(frozen=True)
class Budget:
    """`answers` to the question, and the `guarantees` of one mechanism by every accountant against every observer.

    `unknown` is what the answers found. `mechanism` has the noise and rounds of the first answer (pld, against whoever sees least), or
    those of the config. `steps` is 1, or at the sample level the local steps of a round. `notes` are what a reader should know beside.
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
        """The noise in full: multiplier, bound, sensitivity of the sum under `relation`, std of the sum and of what is drawn."""
        query, r = self.mechanism.queries[0], self.mechanism.sampling.cohort
        drawn = {"client": ("std_of_one_client", math.sqrt(r)), "step": ("std_of_the_mean_gradient", r)}.get(self.mechanism.placement)
        return {
            "noise_multiplier": self.mechanism.noise_multiplier,
            "bound": query.bound,
            "sensitivity": query.bound * (2 if self.relation == "replace_one" else 1),
            "std_of_the_sum": query.std,
            **({drawn[0]: query.std / drawn[1]} if drawn else {}),
        }

    def sentence(self) -> str:
        """What the first guarantee's epsilon means, as a bound on the power of any test at a false-alarm rate of 5 %."""
        guarantee, mechanism = self.guarantees[0], self.mechanism
        if not math.isfinite(guarantee.epsilon):
            return f"Nothing is guaranteed: {'; '.join(guarantee.conditions_failed)}."
        likelier = math.exp(min(guarantee.epsilon, 700.0))
        power = min(likelier * FALSE_ALARMS + self.delta, 1 - (1 - FALSE_ALARMS - self.delta) / likelier, 1.0)
        event = {"replace_one": "was replaced by another", "add_remove": "took part at all", "zero_out": "contributed at all"}[guarantee.relation]
        hidden = "which samples were in the batches" if mechanism.placement == "step" else "who was in the cohorts"
        secret = "" if mechanism.sampling.everyone else f", but not {hidden},"
        return (
            f"Epsilon {guarantee.epsilon:.4g} at delta {self.delta:g} means: at a false-alarm rate of {FALSE_ALARMS:.0%}, whoever sees "
            f"{guarantee.observer}{secret} can detect that one {guarantee.unit} {event} at most {100 * power:.4g} % of the time; "
            f"blind guessing detects {FALSE_ALARMS:.0%}."
        ).replace("%", " %").replace("  %", " %")

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

    Two of epsilon, rounds and noise. `noise_multiplier` is the std of the sum / `bound`; `std`, which needs `bound`, that of one client's
    noise with placement `client` and of the sum with `server`. `relation` auto is add_remove for Poisson sampling, else
    replace_one; `placement` auto is server for Poisson, else client. `participations` is the most rounds (draws, with
    replacement) of any client, for whoever knows the cohorts; None: every round. `v` is the constant of the papers' formula.

    Raises `ConfigError`, by option, for what is not covered.
    """
    poisson = sampling == "poisson"
    placement = ("server" if poisson else "client") if placement == "auto" else placement
    with _by_option({"data.clients": "--population", "selection.cohort": "--cohort", "rounds": "--rounds"}):
        who = Sampling(sampling, population, population if cohort is None and sampling == "full" else cohort)
        z = _multiplier(noise_multiplier, std, bound, {"client": math.sqrt(who.cohort)}.get(placement, 1.0))
        unknown = _unknown(z, epsilon, rounds, "rounds")
        mechanism = Mechanism(who, (Query("updates", bound or 1.0, 0.0),), 1 if rounds is None else rounds, placement=placement).with_noise(z or 1.0)
        relation = ("add_remove" if poisson else "replace_one") if relation == "auto" else relation
        most = math.inf if rounds is None else rounds * (who.cohort if sampling == "with_replacement" else 1)
        if participations is not None and not 1 <= participations <= most:
            raise ConfigError("--participations", participations, f"an integer from 1 to {most}" if rounds else "an integer, at least 1")
        _check(mechanism, relation, delta)
        return _Question(mechanism, relation, delta, unknown, epsilon, participations=participations, v=v).budget()


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
    """One client's samples are protected, by noise on each local step, against whoever sees every update (002, 003).

    Two of epsilon, `participations` (the rounds the client takes part in, realised or capped; never T r / N) and noise. `noise_multiplier`
    is the std of the noise on the sum over a batch / `bound`, the per-sample clip norm; `std`, which needs `bound`, that of the noise
    on the mean gradient. Each of the `steps` of a round draws a fresh batch, by `sampling`.
    """
    with _by_option({"data.clients": "--samples", "selection.cohort": "--batch", "rounds": "--participations"}):
        if sampling == "epochs":
            raise ConfigError("--sampling", sampling, "shuffled epochs have no accountant; nearest: fixed, a fresh batch at each step")
        if not steps >= 1:
            raise ConfigError("--steps", steps, "an integer, at least 1")
        z = _multiplier(noise_multiplier, std, bound, batch)
        unknown = _unknown(z, epsilon, participations, "participations")
        rounds = steps if participations is None else steps * participations
        query = Query("gradients", bound or 1.0, 0.0)
        mechanism = Mechanism(Sampling(sampling, samples, batch), (query,), rounds, unit="sample", placement="step").with_noise(z or 1.0)
        relation = ("add_remove" if sampling == "poisson" else "replace_one") if relation == "auto" else relation
        _check(mechanism, relation, delta)
        return _Question(mechanism, relation, delta, unknown, epsilon, steps=steps).budget()


def of_config(experiment: Experiment, data_root: Path | None = None) -> Budget:
    """What a run of `experiment` would guarantee, cohorts drawn as it would draw them, and the noise that each accountant would ask for.

    The data are prepared, for the sizes of the population, but nothing is trained. Raises `ConfigError` for all that a run would refuse, and
    for a run without noise.
    """
    from raydpfl.plan import Plan

    if not experiment.private:
        raise ConfigError("noise.kind", experiment.noise.kind, "a noise with a budget, such as noise={kind: gaussian, epsilon: 8}")
    plan = Plan.make(experiment, data_root)
    e, scale = plan.experiment, (plan.experiment.bounding.initial_bound or 1.0) * plan.weight
    queries = [replace(query, bound=query.bound * scale, std=query.std * scale) if query.name == "updates" else query for query in plan.mechanism.queries]
    seen: Counter[int] = Counter()
    for t in range(e.rounds):
        seen.update(e.selection.draw(e.seed, t, plan.population).clients.tolist())
    epsilon = getattr(e.noise, "epsilon", None)
    question = _Question(
        replace(plan.mechanism, queries=tuple(queries)),
        e.relation,
        e.noise.delta,
        "epsilon" if epsilon is None else "noise",
        epsilon,
        participations=max(seen.values(), default=1),
        v=e.noise.v,
        decided=True,
    )
    found = question.budget()
    if e.privacy.budget is None:
        return found
    name = plan.accountant
    lasts = privacy.rounds_for(e.privacy.budget, plan.mechanism, e.relation, e.noise.delta, name, v=e.noise.v)
    return replace(found, notes=(*found.notes, f"privacy.budget {e.privacy.budget:g} lasts for {min(lasts, e.rounds)} of the {e.rounds} rounds, by {name}"))


def from_options(unit: str = "client", **options: Any) -> Budget:
    """`of_clients` or `of_samples` by the options of the command line, those left out left out; hyphens may stand for underscores."""
    kinds = {"client": of_clients, "sample": of_samples}
    if unit not in kinds:
        raise ConfigError("--unit", unit, "client or sample")
    parameters = inspect.signature(kinds[unit]).parameters
    for name, value in options.items():
        if name not in parameters:
            raise ConfigError(_flag(name), value, f"not with --unit {unit}, which takes {', '.join(map(_flag, parameters))}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise ConfigError(_flag(name), None, f"required with --unit {unit}; or give a CONFIG (see raydpfl budget --help)")
    return kinds[unit](**{name: value.replace("-", "_") if isinstance(value, str) else value for name, value in options.items()})


@dataclass(frozen=True)
class _Question:
    """A mechanism in which one of noise and rounds may be a mere 1 in place of the unknown; `decided`: it is not, whatever is unknown."""

    mechanism: Mechanism
    relation: Relation
    delta: float
    unknown: Unknown
    epsilon: float | None
    steps: int = 1
    participations: int | None = None
    v: float = 4.0
    decided: bool = False

    def budget(self) -> Budget:
        answers = [*self._counted("pld"), *self._counted("rdp"), *self._printed()]
        first, question = answers[0], self
        if first.rounds == 0:
            least = f"{first.guarantee.epsilon:.4g}, which one round spends"
            raise ConfigError("--epsilon", self.epsilon, f"at least {least}; or more noise")
        if self.unknown != "epsilon":
            mechanism = self.mechanism if self.decided else self._at(first.noise_multiplier, first.rounds)
            question = replace(self, mechanism=mechanism, unknown="epsilon")
        at_hand = answers if question is self else [*question._counted("pld"), *question._counted("rdp"), *question._printed()]
        return Budget(
            self.unknown,
            question.mechanism,
            self.relation,
            self.delta,
            tuple(answers),
            tuple(answer.guarantee for answer in at_hand),
            self.epsilon,
            self.steps,
            tuple(_notes(question.mechanism, self.delta)),
        )

    @property
    def _z(self) -> float:
        return self.mechanism.noise_multiplier

    @property
    def _rounds(self) -> int:
        return self.mechanism.rounds // self.steps

    def _at(self, z: float, rounds: int) -> Mechanism:
        return replace(self.mechanism.with_noise(z), rounds=rounds * self.steps)

    def _seen(self, rounds: int) -> list[tuple]:
        return list(_views(self.mechanism, self.relation, rounds * self.steps, self.participations))

    def _guarantees(self, name: str, z: float, rounds: int, delta: float | None = None) -> list[Guarantee]:
        delta = self.delta if delta is None else delta
        return privacy.guarantees(self._at(z, rounds), self.relation, delta, accountants=[name], participations=self.participations, v=self.v)

    def _counted(self, name: str) -> Iterator[Answer]:
        """One answer against each observer, by an accountant of `raydpfl.privacy`; `paper` knows one observer only."""
        for place, (_, _, observed, under, times) in enumerate(self._seen(self._rounds)):
            z, rounds = self._z, self._rounds
            covered = privacy.covers(name, observed, under) is None
            if covered and self.unknown == "noise":
                if name == "paper":
                    z = privacy.paper_multiplier(self.epsilon, observed.sampling, times, self.delta, self.v)
                else:  # what this observer meets is a fixed multiple of the mechanism's own noise
                    z *= privacy.noise_for(self.epsilon, observed, under, self.delta, name, times) / observed.noise_multiplier
            if covered and self.unknown == "rounds":
                most = privacy.rounds_for(self.epsilon, observed, under, self.delta, name, self.v)
                rounds = bisect_right(range(1, MOST_ROUNDS + 1), most, key=lambda t, place=place: self._seen(t)[place][-1])
            guarantee = self._guarantees(name, z, max(rounds, 1))[place]
            if name == "paper":
                yield Answer(guarantee, z, rounds, self._truth(z, max(rounds, 1), self.delta))
                return
            yield Answer(guarantee, z, rounds)

    def _printed(self) -> Iterator[Answer]:
        """The papers' formulas for this kind of mechanism, each with what it is worth."""
        if self.mechanism.placement != "step":
            yield from self._counted("paper")
            return
        query, sampling = self.mechanism.queries[0], self.mechanism.sampling
        batches = () if sampling.kind in ("fixed", "full") else (f"batches of one fixed size, drawn without replacement (here: {sampling})",)
        for formula in _FORMULAS:
            std, rounds, claim = query.std / sampling.cohort, self._rounds, None
            step = {"bound": query.bound, "batch": sampling.cohort, "samples": sampling.population}
            if self.unknown == "noise":
                claim = formula.noise(self.epsilon, self.delta, **step, steps=rounds * self.steps)
                std = claim.value
            if self.unknown == "rounds":

                def claims(t: int, formula=formula, std=std, step=step) -> float:
                    return formula.epsilon(std, self.delta, **step, steps=t * self.steps)[0].value

                rounds = bisect_right(range(1, MOST_ROUNDS + 1), self.epsilon, key=claims)
            z, delta, truth = sampling.cohort * std / query.bound, self.delta, None
            if math.isfinite(std):
                printed, delta = formula.epsilon(std, self.delta, **step, steps=max(rounds, 1) * self.steps)
                truth = self._truth(z, max(rounds, 1), delta)
                claim = Printed(self.epsilon, claim.conditions_failed) if claim else printed
            failed = (*batches, *claim.conditions_failed)
            if delta != self.delta:
                failed = (*failed, f"delta = {self.delta:g} (the formula gives its epsilon at delta {delta:.3g} alone)")
            where = self._guarantees("pld", self._z, 1)[0]
            epsilon = claim.value if math.isfinite(std) else math.inf
            guarantee = replace(
                where, kind="paper", accountant=formula.name, relation=formula.relation, epsilon=epsilon, delta=delta, conditions_failed=failed
            )
            yield Answer(guarantee, z, rounds, truth)

    def _truth(self, z: float, rounds: int, delta: float) -> float:
        """Epsilon by pld, or by rdp where `delta` is too small for pld to tell."""
        if not 0 < delta < 1:
            return math.inf
        spent = (self._guarantees(name, z, rounds, delta)[0].epsilon for name in ("pld", "rdp"))
        return next((each for each in spent if math.isfinite(each)), math.inf)


@dataclass(frozen=True)
class _Formula:
    """A paper's formula for local steps: (Printed epsilon, its delta) of a std of the mean gradient, and Printed std of an epsilon."""

    name: str
    relation: str
    epsilon: Callable[..., tuple[Printed, float]]
    noise: Callable[..., Printed]


def _theorem5_noise(epsilon: float, delta: float, *, bound: float, batch: int, samples: int, steps: int) -> Printed:
    """002 Theorem 5 solved for the std: rho omega does not depend on it, so rho = 2 rho omega - epsilon."""
    rho, omega, _ = paper.tcdp(bound, bound=bound, batch=batch, samples=samples, steps=steps)
    left = 2 * rho * omega - epsilon
    if left <= 0:
        return Printed(math.inf, (f"epsilon {epsilon:.4g} < {2 * rho * omega:.4g}, which the formula approaches as the noise grows",))
    std = bound * math.sqrt(rho / left)
    return Printed(std, paper.tcdp(std, bound=bound, batch=batch, samples=samples, steps=steps)[2])


def _budget_epsilon(std: float, delta: float, **client: Any) -> tuple[Printed, float]:
    """003 solved for the epsilon; sigma_k falls with it."""
    from scipy.optimize import brentq

    def excess(log_epsilon: float) -> float:
        return math.log(paper.budget_noise(math.exp(log_epsilon), delta, **client).value / std)

    epsilon = math.exp(brentq(excess, -60, 60, xtol=1e-13))
    return Printed(epsilon, paper.budget_noise(epsilon, delta, **client).conditions_failed), delta


_FORMULAS = (
    _Formula(
        "paper 002 tCDP",
        "replace_one",
        lambda std, delta, **client: (paper.tcdp_epsilon(std, delta=delta, **client), delta),
        lambda epsilon, delta, **client: paper.tcdp_noise(epsilon, delta=delta, **client),
    ),
    _Formula("paper 002 Theorem 5", "replace_one", lambda std, delta, **client: paper.tcdp_theorem5(std, **client), _theorem5_noise),
    _Formula("paper 003", "unstated", _budget_epsilon, lambda epsilon, delta, **client: paper.budget_noise(epsilon, delta, **client)),
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _to_json(value: float | None) -> float | str | None:
    return "infinity" if value == math.inf else value


@contextmanager
def _by_option(names: dict[str, str]) -> Iterator[None]:
    """What the lower rooms refuse by the name of a config's field is refused by that of an option."""
    names = {
        "selection.kind": "--sampling",
        "privacy.relation": "--relation",
        "noise.placement": "--placement",
        "noise.epsilon": "--epsilon",
        "noise.v": "--v",
        **names,
    }
    try:
        yield
    except ConfigError as error:
        raise ConfigError(names.get(error.field, error.field), error.value, error.accepted) from None


def _multiplier(z: float | None, std: float | None, bound: float | None, count: float) -> float | None:
    """z from itself or from a std, `count` of which make the std of the sum."""
    for name, value in (("noise_multiplier", z), ("std", std), ("bound", bound)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(_flag(name), value, "a positive finite number")
    if std is None:
        return z
    if z is not None:
        raise ConfigError("--std", std, "--noise-multiplier or --std, not both")
    if bound is None:
        raise ConfigError("--bound", None, "the L2 bound that --std is to be compared with")
    return std * count / bound


def _unknown(z: float | None, epsilon: float | None, rounds: int | None, repeated: str) -> Unknown:
    given = {"noise (--noise-multiplier or --std)": z, "--epsilon": epsilon, f"--{repeated}": rounds}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        names = ", ".join(name.split(" (")[0] for name in given if name not in missing) or None
        raise ConfigError("given", names, f"two of {', '.join(given)}; the third is computed")
    return {"--epsilon": "epsilon", f"--{repeated}": "rounds"}.get(missing[0], "noise")


def _check(mechanism: Mechanism, relation: Relation, delta: float) -> None:
    """Raises `ConfigError` for a delta that is none, and for what no rigorous accountant covers, with the nearest that one does."""
    if not 0 < delta < 1:
        raise ConfigError("--delta", delta, "a number between 0 and 1, both excluded")
    reason = privacy.covers("pld", mechanism, relation)
    if not reason:
        return
    sampling = mechanism.sampling
    nearest = [f"--relation {other}" for other in get_args(Relation) if not privacy.covers("pld", mechanism, other)]
    field = "relation" if nearest else "placement"
    if not privacy.covers("pld", replace(mechanism, placement="server"), relation):
        nearest.append("--placement server")
    for kind in ("fixed", "poisson", "with_replacement") if sampling.cohort <= sampling.population else ():
        if not privacy.covers("pld", replace(mechanism, sampling=replace(sampling, kind=kind)), relation):
            nearest.append(f"--sampling {kind}")
    raise ConfigError(_flag(field), relation if field == "relation" else mechanism.placement, f"{reason.split('; nearest')[0]}; nearest: {' or '.join(nearest)}")


def _notes(mechanism: Mechanism, delta: float) -> Iterator[str]:
    size, unit = mechanism.sampling.population, mechanism.unit
    if delta * size > 1:
        yield f"delta {delta:g} is above 1/{size}: it would allow some {unit}'s data to be published outright"
    if mechanism.placement == "client":
        yield "k clients who pool what they know of their own noise, or k that drop out, leave sqrt((r - k) / r) of the noise on a sum of r"
    if mechanism.placement == "step":
        yield "it holds for a fresh batch at each step, not for shuffled epochs; the participations are those that occur, or a cap that is kept"
    yield from (f"not accounted for: {exclusion}" for exclusion in mechanism.exclusions)


def render(budget: Budget) -> RenderableType:
    """For a terminal: what is released, the answers side by side, the formulas with their conditions, and the sentence."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    noise, sampling, at = budget.noise, budget.mechanism.sampling, f"epsilon {budget.epsilon or 0:.4g} at delta {budget.delta:g}"
    local, rounds = budget.mechanism.placement == "step", budget.mechanism.rounds // budget.steps
    drawn = [f"{noise[name]:.4g} of {what}" for name, what in (("std_of_one_client", "one client's"), ("std_of_the_mean_gradient", "the mean gradient's")) if name in noise]
    released = f"{rounds} participations x {budget.steps} local steps, each a sum over a batch" if local else f"{rounds} rounds, each a sum over a cohort"
    head = Table.grid(padding=(0, 2))
    head.add_row("released", f"{released}: {sampling} {'samples' if local else 'clients'}")
    head.add_row("bound", f"{noise['bound']:.4g} for each {budget.mechanism.unit}; sensitivity of the sum {noise['sensitivity']:.4g} under {budget.relation}")
    stds = ", ".join([f"std {noise['std_of_the_sum']:.4g} of the sum", *drawn])
    head.add_row("noise", f"{stds}; noise multiplier {noise['noise_multiplier']:.4g} (std of the sum / bound)")

    def table(title: str, cells: list[tuple[Guarantee, str]]) -> Table:
        names = list(dict.fromkeys(guarantee.accountant for guarantee, _ in cells))
        columns = {name: [(guarantee, cell) for guarantee, cell in cells if guarantee.accountant == name] for name in names}
        made = Table(title=title, title_justify="left", title_style="bold")
        for name in ("against whoever sees", "", "relation"):
            made.add_column(name)
        for name in names:
            made.add_column(name, justify="right")
        for place, (guarantee, _) in enumerate(columns["pld"]):
            knows = guarantee.sampling.removeprefix("batches: ").removeprefix(str(sampling)).removeprefix(", ").split(",")[0]
            row = [column[place][1] if place < len(column) else "" for column in columns.values()]
            made.add_row(guarantee.observer, knows or "all take part", guarantee.relation, *row)
        return made

    titles = {
        "epsilon": f"Epsilon at delta {budget.delta:g}",
        "noise": f"Noise multiplier that {at} needs",
        "rounds": f"{'Participations' if local else 'Rounds'} that {at} allows",
    }
    parts: list[Any] = [head, "", table(titles[budget.unknown], [(answer.guarantee, _cell(budget, answer)) for answer in budget.answers])]
    if budget.unknown != "epsilon":
        which = f"noise multiplier {noise['noise_multiplier']:.4g}" if budget.unknown == "noise" else f"{rounds} {'participations' if local else 'rounds'}"
        parts += ["", table(f"Epsilon at delta {budget.delta:g} with {which}", [(each, _spent(each)) for each in budget.guarantees])]
    known = next((each.sampling.split("cohort known, ")[1] for each in budget.guarantees if "cohort known, " in each.sampling), None)
    notes = [f"cohort known: {known}"] if known else []
    notes += [f"{name}: {reason}" for name, reason in _uncovered(budget)]
    parts.append("")
    for answer in budget.answers:
        if answer.guarantee.kind == "paper":
            parts.append(Padding(Text(_worth(budget, answer), style="red" if answer.overclaims else ""), (0, 0, 0, 0)))
    parts += [Text(f"- {note}") for note in [*notes, *budget.notes]]
    return Group(*parts, "", Text(budget.sentence(), style="bold"))


def _uncovered(budget: Budget) -> list[tuple[str, str]]:
    rigorous = [answer.guarantee for answer in budget.answers if answer.guarantee.kind == "rigorous"]
    return list(dict.fromkeys((each.accountant, reason) for each in rigorous for reason in each.conditions_failed))


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
        return f"{answer.noise_multiplier:.4g}{mark}" if math.isfinite(answer.noise_multiplier) else f"none{mark}"
    return f"{'>= ' if (answer.rounds + 1) * budget.steps > MOST_ROUNDS else ''}{answer.rounds}{mark}"


def _worth(budget: Budget, answer: Answer) -> str:
    """A formula's claim beside what it is worth, and the conditions that fail."""
    guarantee = answer.guarantee
    says = {
        "epsilon": f"claims epsilon {guarantee.epsilon:.4g}",
        "noise": f"asks for noise multiplier {answer.noise_multiplier:.4g}",
        "rounds": f"allows {answer.rounds}",
    }[budget.unknown]
    text = f"{guarantee.accountant}, as printed, {says}"
    if answer.true_epsilon is not None:
        text += f"; the epsilon there is {answer.true_epsilon:.4g}{', more than it claims' if answer.overclaims else ''}"
    failed = f" * Conditions that fail: {'; '.join(guarantee.conditions_failed)}." if guarantee.conditions_failed else ""
    return f"{text}.{failed}"
