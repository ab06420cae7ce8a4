"""Gaussian noise, independent over the rounds: on sums, or at each client's local steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl import privacy
from raydpfl.config.registry import Examples
from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.noise import on_sums
from raydpfl.methods.noise.base import Noise, RunFacts
from raydpfl.methods.noise.schedule import NoiseSchedule
from raydpfl.privacy import LocalSteps, Mechanism, Relation, Release, Sampling, Terms, budgets
from raydpfl.privacy.papers import PAPERS
from raydpfl.privacy.types import Placement

# the fields that determine how large the noise is
SIZES = {
    "epsilon", "rounds", "multiplier", "std", "delta", "calibration", "v", "virtual_cohort",
    "virtual_population", "common", "schedule",
}  # fmt: skip


class Gaussian(Noise):
    """N(0, std^2 I) (000 Alg. 3, 001 Alg. 1-2; at local steps 002 Alg. 1-2, 003 Alg. 1).

    With `calibration: paper` the std is that of the papers' printed formula: 000 Theorem 3.2, which
    is 001 Theorem 1, with the constant `v` that they leave open; at local steps sigma_k of 003 eq.
    6. `tcdp` is 002 Theorem 5 in its usable form; the clients for whom a condition of it fails have
    the rigorous noise, and are named in a warning and in guarantees.parquet. The guarantees then
    show what that noise truly gives. At local steps `epsilon` may be a distribution of budgets
    (`raydpfl.privacy.budgets`), which gives every client its own.
    """

    examples: ClassVar[Examples] = (
        {"multiplier": 1.0},
        {"epsilon": 8.0, "delta": 1e-5},
        {"std": 0.05},
        {"multiplier": 1.0, "placement": "server"},
        {"multiplier": 1.0, "common": True},
        {"multiplier": 1.0, "virtual_cohort": 18},
        {"epsilon": 8.0, "schedule": {"decay": 0.9, "phases": [[2, 1.5]]}},
        {"multiplier": 1.0, "placement": "step"},
        {"epsilon": {"kind": "uniform", "low": 1.0, "high": 20.0}, "placement": "step"},
    )
    kind: str = "gaussian"
    placement: Literal["auto", "client", "server", "step"] = Field(
        default="auto",
        description="auto: step with per_sample_clip, server where the size of a cohort is a "
        "secret, else client",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        lt=1,
        description="of every guarantee, and of what epsilon is calibrated for",
    )
    epsilon: Annotated[float, Field(gt=0)] | SerializeAsAny[budgets.BudgetDistribution] | None = (
        Field(
            default=None,
            description=(
                "the target, from which the noise is calibrated; else `multiplier` or `std` says it"
            ),
        )
    )
    rounds: int | None = Field(
        default=None,
        ge=1,
        description="the first rounds, which `epsilon` is for; None: all of the run",
    )
    multiplier: float | None = Field(
        default=None,
        ge=1e-9,
        le=1e15,
        description="std of the noise on the sum, divided by the bound",
    )
    std: float | None = Field(
        default=None,
        ge=1e-9,
        le=1e15,
        description="in the units of the bound: of one client (of the sum, if the server draws it)",
    )
    calibration: Literal["rigorous", "paper", "tcdp"] = Field(
        default="rigorous", description="how epsilon becomes noise"
    )
    v: float = Field(default=4.0, gt=0, description="the constant that 000 and 001 leave open")
    virtual_cohort: int | None = Field(
        default=None, ge=1, description="R, the clients of a round that those simulated stand for"
    )
    virtual_population: int | None = Field(
        default=None,
        ge=1,
        description="the clients that virtual_cohort is drawn from; by default in proportion",
    )
    schedule: NoiseSchedule | None = Field(
        default=None, description="the std by round, over that of the size; None: the same in all"
    )
    common: bool = Field(
        default=False, description="one noise for all runs with one seed, to compare them in pairs"
    )

    @field_validator("epsilon", mode="before")
    @classmethod
    def _distribution(cls, value: Any) -> Any:
        if isinstance(value, bool):
            expected = "a positive number, or a distribution of budgets"
            raise ConfigError("noise.epsilon", value, expected)
        return budgets.parse(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        sizes = [
            name for name in ("epsilon", "multiplier", "std") if getattr(self, name) is not None
        ]
        if len(sizes) != 1:
            raise ConfigError("noise", sizes or None, "exactly one of epsilon, multiplier and std")
        if self.epsilon is None:
            self._refuse("rounds", "none without noise.epsilon for them")
            self._refuse("calibration", "rigorous, unless noise.epsilon is what is given")
        if self.virtual_cohort is None:
            self._refuse("virtual_population", "none without noise.virtual_cohort")
        else:
            self._refuse("std", "none with noise.virtual_cohort, which scales noise.multiplier")
        return self

    def _refuse(self, field: str, expected: str) -> None:
        """Raises `ConfigError` for a field that is not at its default."""
        if getattr(self, field) != Gaussian.model_fields[field].default:
            raise ConfigError(f"noise.{field}", getattr(self, field), expected)

    # --- who draws it ---

    def drawn_by(self) -> Placement:
        assert self.placement != "auto"  # which is filled in when the config is read
        return self.placement

    def resolve_placement(self, per_sample: bool, cohort_hidden: bool) -> Self:
        if self.placement != "auto":
            return self
        placement = "step" if per_sample else "server" if cohort_hidden else "client"
        return self.model_copy(update={"placement": placement})

    def by_norms(self) -> bool:
        on_sums = self.drawn_by() in ("server", "client")
        return on_sums and not self.correlated and self.virtual_cohort is None

    def release(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=SIZES)

    def factor(self, t: int) -> float:
        return 1.0 if self.schedule is None else self.schedule.at(t)

    # --- what accountants know ---

    def terms(self, asked: str, natural: Relation) -> Terms:
        if self.drawn_by() == "step":
            return Terms("replace_one", self.delta, self.v)
        return replace(super().terms(asked, natural), v=self.v)

    def target(self) -> float | None:
        if self.rounds is not None:  # what all rounds spend follows
            return None
        return self.epsilon if isinstance(self.epsilon, int | float) else None

    def calibrated_over(self, rounds: int) -> int | None:
        return None if self.epsilon is None else self.rounds or rounds

    def size(self, outline: Mechanism, facts: RunFacts) -> float:
        if self.multiplier is not None:
            return self.multiplier
        if self.std is not None:
            assert facts.setting.bound is not None
            draws = facts.clients_left if self.drawn_by() == "client" else 1
            return self.std * math.sqrt(draws) / (facts.setting.bound * facts.weight)
        return self._calibrated_size(outline, facts)

    def _calibrated_size(self, outline: Mechanism, facts: RunFacts) -> float:
        """z for `epsilon`, over the rounds that it is for."""
        assert isinstance(self.epsilon, int | float)
        target = float(self.epsilon)
        if self.calibration == "tcdp":
            expected = f"rigorous or paper; tcdp ({PAPERS['002']}) is for noise at local steps"
            raise ConfigError("noise.calibration", self.calibration, expected)
        rounds = facts.calibrated
        if self.calibration == "paper":
            return privacy.paper_multiplier(target, outline.sampling, rounds, self.delta, self.v)
        setting = facts.setting
        terms = self.terms_in(setting)
        accountants = on_sums.covering_accountants(setting, outline, terms.relation)
        release = replace(outline, rounds=rounds, factors=outline.factors[: self.rounds])
        release = release.with_surveys(facts.calibrated_surveys)

        def calibrate(name: str) -> float:
            return privacy.noise_for(target, release, terms.relation, terms.delta, name, rounds)

        return on_sums.calibrate_first(setting, accountants, calibrate, "paper")

    # --- at local steps: of each client, for the rounds that it takes part in (002, 003) ---

    def calibrated(self, outline: Mechanism | None, facts: RunFacts) -> Release | None:
        if self.drawn_by() != "step":
            return super().calibrated(outline, facts)
        setting = facts.setting
        exclusions = on_sums.list_exclusions(setting, self.has_common_noise, at_steps=True)
        steps = facts.local.step_counts(facts.sizes)
        step_arguments: dict[str, Any] = {
            "samples": facts.sizes,
            "batch": _batch(facts),
            "steps": int(steps[0]) if (steps == steps[0]).all() else steps,
            "bound": setting.per_sample_bound,
            "delta": self.delta,
            "sampling": facts.local.sampling,
            "exclusions": (*setting.sample_exclusions, *exclusions),
            "side_query": setting.loss_query,
        }
        if self.epsilon is not None:
            return self._calibrated_steps(facts, step_arguments)
        noiseless_steps = LocalSteps(stds=np.zeros(len(facts.sizes)), **step_arguments)
        if self.std is not None:  # of the mean gradient
            return replace(noiseless_steps, stds=np.full(len(noiseless_steps.samples), self.std))
        assert self.multiplier is not None
        stds = self.multiplier * noiseless_steps.bound / np.maximum(noiseless_steps.batches, 1)
        return replace(noiseless_steps, stds=stds)

    def _calibrated_steps(self, facts: RunFacts, step_arguments: dict[str, Any]) -> LocalSteps:
        accountants = privacy.rigorous(facts.setting.accountants)
        if self.calibration != "rigorous":
            accountants = accountants or ("pld",)
        counts = np.zeros(len(facts.sizes), np.int64)
        for clients in facts.draws():
            np.add.at(counts, clients, 1)
        step_arguments |= {
            "participations": counts,
            "budgets": self._budgets(facts.seed, facts.sizes, facts.data_root, facts.ids),
            "calibration": self.calibration,
        }

        def calibrate(name: str) -> LocalSteps:
            return privacy.calibrate_local_steps(accountant=name, **step_arguments)

        return on_sums.calibrate_first(facts.setting, accountants, calibrate, "paper or tcdp")

    def variances(
        self,
        seed: int,
        sizes: np.ndarray,
        batches: np.ndarray,
        root: Path | None,
        ids: Sequence[str] | None,
    ) -> np.ndarray | None:
        if self.drawn_by() != "step" or self.epsilon is None:
            return None
        budgets = self._budgets(seed, sizes, root, ids)
        return privacy.budget_variance(budgets, self.delta, batch=batches, samples=sizes)

    def _budgets(
        self, seed: int, sizes: np.ndarray, root: Path | None, ids: Sequence[str] | None
    ) -> np.ndarray:
        """The budget of every client: epsilon, float64 [N]; infinite for a public client."""
        if isinstance(self.epsilon, int | float):
            return np.full(len(sizes), float(self.epsilon))
        assert self.epsilon is not None
        return self.epsilon.draw(seed, len(sizes), root, ids)

    # --- a virtual cohort ---

    def sampling(self, cohorts: Sampling) -> Sampling:
        size = self.virtual_cohort
        if size is None:
            return cohorts
        if cohorts.by_participation or cohorts.rule or cohorts.p_max or cohorts.epoch:
            expected = f"none with {cohorts}; selection.kind uniform, poisson or full scale to it"
            raise ConfigError("noise.virtual_cohort", size, expected)
        if size < cohorts.cohort:
            expected = f"at least the simulated cohort of {cohorts.cohort}"
            raise ConfigError("noise.virtual_cohort", size, expected)
        population = self.virtual_population or round(cohorts.population * size / cohorts.cohort)
        if population < size or (cohorts.everyone and population != size):
            quantifier = "exactly" if cohorts.everyone else "at least"
            expected = f"{quantifier} noise.virtual_cohort, {size}, with {cohorts}"
            raise ConfigError("noise.virtual_population", population, expected)
        return replace(cohorts, population=population, cohort=size)

    # --- what it refuses ---

    def check(self, setting: Setting) -> None:
        if setting.bound is None and setting.per_sample_bound is None:
            expected = "none without a bound; set bounding.kind to clip or normalize"
            raise ConfigError("noise.kind", self.kind, expected)
        if self.rounds is not None and self.rounds > setting.rounds:
            expected = f"at most the {setting.rounds} rounds of the run"
            raise ConfigError("noise.rounds", self.rounds, expected)
        if self.drawn_by() == "step":
            self._check_steps(setting)
        else:
            self._check_sums(setting)
        if self.epsilon is not None and not setting.accountants:
            expected = "pld or rdp, to calibrate the noise of noise.epsilon with"
            raise ConfigError("privacy.accountants", [], expected)

    def _check_sums(self, setting: Setting) -> None:
        if self.schedule is not None and self.calibration != "rigorous":
            expected = "rigorous with noise.schedule: the papers' formulas are for one std"
            raise ConfigError("noise.calibration", self.calibration, expected)
        if setting.per_sample_bound is not None:
            raise ConfigError("noise.placement", self.placement, "step, with per_sample_clip")
        if self.epsilon is not None and not isinstance(self.epsilon, int | float):
            expected = "a number; budgets of clients' own need placement step with per_sample_clip"
            raise ConfigError("noise.epsilon", self.model_dump(mode="json")["epsilon"], expected)
        if setting.adaptive_bound:
            self._refuse("std", "none with an adaptive bound; give noise.multiplier or epsilon")

    def _check_steps(self, setting: Setting) -> None:
        if setting.per_sample_bound is None:
            expected = "client or server; noise at local steps needs bounding.kind per_sample_clip"
            raise ConfigError("noise.placement", self.placement, expected)
        if setting.drops_failures:
            expected = "fail, with noise at local steps, as a client that sends none would be known"
            raise ConfigError("client.on_error", "drop", expected)
        if setting.shared_samples:
            expected = "one that gives a sample to a single client, as noise at local steps needs"
            raise ConfigError("data.partition.kind", "overlapping", expected)
        if setting.uncounted is not None and self.epsilon is None:
            expected = f"a budget to size the noise for, where {setting.uncounted}"
            raise ConfigError("noise.epsilon", None, expected)
        expected = "none with placement step"
        self._refuse("rounds", f"{expected}: a client's noise is for the rounds that it is in")
        self._refuse("v", f"{expected}, whose formulas have no such constant")
        self._refuse("virtual_cohort", f"{expected}: each client's noise is its own")
        self._refuse("schedule", f"{expected}: a client's noise is the same at all its steps")
        if setting.relation not in ("auto", "replace_one"):
            expected = "replace_one (of a sample), for noise at local steps"
            raise ConfigError("privacy.relation", setting.relation, expected)

    def warnings(self, setting: Setting) -> tuple[str, ...]:
        if self.rounds is None or self.rounds == setting.rounds:
            return ()
        clause = f"noise.epsilon {self.epsilon} is what {self.rounds} rounds spend"
        return (f"{clause}; guarantees say what all {setting.rounds} do",)


def _batch(facts: RunFacts) -> int | np.ndarray | None:
    """`LocalSteps.batch`. Raises `ConfigError` for batches larger than a client's rows."""
    local, sizes = facts.local, facts.sizes
    rows = np.asarray(local.batch_sizes(sizes))
    if rows.shape != sizes.shape or (rows > sizes).any():
        expected = "a rule whose batch_sizes are integers from 1 to a client's rows, one per client"
        raise ConfigError("local.kind", local.kind, expected)
    if local.batch == "full" and np.array_equal(rows, sizes):
        return None
    if isinstance(local.batch, int) and np.array_equal(rows, np.minimum(sizes, local.batch)):
        return local.batch
    return rows
