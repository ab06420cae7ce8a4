"""Gaussian noise, independent over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.methods.noise import on_sums
from raydpfl.methods.noise.base import Asked, Facts, Noise, Source
from raydpfl.methods.noise.placements import DrawnBy, settled, who_draws
from raydpfl.privacy import Mechanism, Release, Sampling, Terms, budgets
from raydpfl.privacy.papers import PAPERS
from raydpfl.privacy.types import Placement, Relation, Unit

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment

# the fields that determine how large the noise is
SIZES = {
    "epsilon",
    "rounds",
    "multiplier",
    "std",
    "delta",
    "calibration",
    "v",
    "virtual_cohort",
    "virtual_population",
    "common",
}


class Gaussian(Noise):
    """N(0, std^2 I) (000 Alg. 3, 001 Alg. 1-2; at local steps 002 Alg. 1-2, 003 Alg. 1).

    With `calibration: paper` the std is that of the papers' printed formula: 000 Theorem 3.2, which
    is 001 Theorem 1, with the constant `v` that they leave open; at local steps sigma_k of 003 eq.
    6. `tcdp` is 002 Theorem 5 in its usable form; the clients for whom a condition of it fails have
    the rigorous noise, and are named in a warning and in guarantees.parquet. The guarantees then
    show what that noise truly gives. At local steps `epsilon` may be a law of budgets
    (`raydpfl.privacy.budgets`), which gives every client its own.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"multiplier": 1.0},
        {"epsilon": 8.0, "delta": 1e-5},
        {"std": 0.05},
        {"multiplier": 1.0, "placement": "server"},
        {"multiplier": 1.0, "common": True},
        {"multiplier": 1.0, "virtual_cohort": 18},
        {"multiplier": 1.0, "placement": "step"},
        {"epsilon": {"kind": "uniform", "low": 1.0, "high": 20.0}, "placement": "step"},
    )
    kind: str = "gaussian"
    placement: Literal["auto", "client", "server", "step"] = Field(
        default="auto",
        description="auto: step with per_sample_clip, server with Poisson cohorts, else client",
    )
    delta: float = Field(
        default=1e-5,
        gt=0,
        lt=1,
        description="of every guarantee, and of what epsilon is calibrated for",
    )
    epsilon: Annotated[float, Field(gt=0)] | SerializeAsAny[budgets.Law] | None = Field(
        default=None,
        description=(
            "the target, from which the noise is calibrated; else `multiplier` or `std` says it"
        ),
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
    common: bool = Field(
        default=False, description="one noise for all runs with one seed, to compare them in pairs"
    )

    @field_validator("epsilon", mode="before")
    @classmethod
    def _law(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ConfigError("noise.epsilon", value, "a positive number, or a law of budgets")
        return budgets.parse(value) if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _one_size(self) -> Gaussian:
        given = [
            name for name in ("epsilon", "multiplier", "std") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ConfigError("noise", given or None, "exactly one of epsilon, multiplier and std")
        if self.rounds is not None and self.epsilon is None:
            raise ConfigError("noise.rounds", self.rounds, "none without noise.epsilon for them")
        if self.calibration != "rigorous" and self.epsilon is None:
            raise ConfigError(
                "noise.calibration",
                self.calibration,
                "rigorous, unless noise.epsilon is what is given",
            )
        if self.virtual_population is not None and self.virtual_cohort is None:
            raise ConfigError(
                "noise.virtual_population",
                self.virtual_population,
                "none without noise.virtual_cohort",
            )
        if self.virtual_cohort is not None and self.std is not None:
            raise ConfigError(
                "noise.std",
                self.std,
                "none with noise.virtual_cohort, which scales the noise; "
                "give noise.multiplier or noise.epsilon",
            )
        return self

    # --- what it draws: see `raydpfl.methods.noise.placements` ---

    @property
    def _by(self) -> DrawnBy:
        return who_draws(self.placement)  # auto is settled when the config is read

    @property
    def of_seed(self) -> bool:
        return self.common

    def release(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude=SIZES)

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        return self._by.on_clients(seed, t, clients, draws, std, d)

    @property
    def keyed(self) -> bool:
        return type(self).on_clients is Gaussian.on_clients

    def client_std(self, std: float, survivors: int) -> float:
        return self._by.client_std(std, survivors)

    def least(self, survivors: int) -> int:
        return self._by.least(survivors)

    def unseen(self) -> bool:
        return self._by.unseen

    def source(self, seed: int, d: int) -> Source:
        return self._by.source(seed, d)

    # --- what accountants are told ---

    def drawn_by(self) -> Placement:
        return self._by.name

    def protects(self) -> Unit:
        return self._by.protects

    def terms(self, asked: Asked, natural: Relation) -> Terms:
        return Terms(self._by.relation(asked, natural), self.delta, self.v)

    def target(self) -> float | None:
        if self.rounds is not None:  # what all rounds spend follows
            return None
        return self.epsilon if isinstance(self.epsilon, int | float) else None

    def calibrated_over(self, rounds: int) -> int | None:
        return None if self.epsilon is None else self.rounds or rounds

    def kept(self, rounds: int) -> str | None:
        return self._by.kept(super().kept(rounds))

    def simulated(self) -> bool:
        return self.virtual_cohort is None

    def placed(self, experiment: Experiment) -> Gaussian:
        return self.model_copy(update={"placement": settled(self.placement, experiment)})

    def outline(self, experiment: Experiment, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        def law() -> Sampling:
            found = cohorts()
            self._check_virtual(found, experiment.selection.kind)
            return found

        return self._by.outline(self, experiment, law)

    def noised(self, outline: Mechanism | None, facts: Facts) -> Release | None:
        return self._by.noised(self, outline, facts)

    def variances(
        self, experiment: Experiment, sizes: np.ndarray, root: Path | None
    ) -> np.ndarray | None:
        return self._by.variances(self, experiment, sizes, root)

    def size(self, outline: Mechanism, facts: Facts) -> float:
        if self.multiplier is not None:
            return self.multiplier
        if self.std is not None:
            bound = facts.experiment.bounding.initial_bound
            assert bound is not None
            return self._by.total(self.std, facts) / (bound * facts.weight)
        return self._calibrated(outline, facts)

    def _calibrated(self, outline: Mechanism, facts: Facts) -> float:
        """z for `epsilon`, over the rounds that it is for."""
        assert isinstance(self.epsilon, int | float)
        target = float(self.epsilon)
        if self.calibration == "tcdp":
            expected = f"rigorous or paper; tcdp ({PAPERS['002']}) is for noise at local steps"
            raise ConfigError("noise.calibration", self.calibration, expected)
        if self.calibration == "paper":
            law = outline.sampling
            return privacy.paper_multiplier(target, law, facts.calibrated, self.delta, self.v)
        e = facts.experiment
        accountants = on_sums.covering(e, outline)
        if not accountants:
            expected = (
                "pld or rdp among them, to calibrate noise.epsilon; or noise.calibration: paper"
            )
            raise ConfigError("privacy.accountants", list(e.privacy.accountants), expected)
        whole = replace(outline, rounds=facts.calibrated).asking(facts.calibrated_surveys)

        def calibrate(name: str) -> float:
            terms = e.terms
            at = (terms.relation, terms.delta, name, facts.calibrated)
            return privacy.noise_for(target, whole, *at)

        return on_sums.first_that_can(accountants, calibrate)

    # --- a virtual cohort ---

    def _stands_for(self, cohorts: Sampling) -> int:
        """The population that the virtual cohort is drawn from."""
        assert self.virtual_cohort is not None
        scaled = round(cohorts.population * self.virtual_cohort / cohorts.cohort)
        return self.virtual_population or scaled

    def check_audit(self) -> None:
        if self.virtual_cohort is not None:
            expected = "none: the clients that it stands for do not run, and cannot be audited"
            raise ConfigError("noise.virtual_cohort", self.virtual_cohort, expected)

    def sampling(self, cohorts: Sampling) -> Sampling:
        if self.virtual_cohort is None:
            return cohorts
        return replace(cohorts, population=self._stands_for(cohorts), cohort=self.virtual_cohort)

    def exclusions(self, cohorts: Sampling) -> tuple[str, ...]:
        if self.virtual_cohort is None:
            return ()
        return (
            f"the {cohorts.cohort} clients simulated in a round stand for {self.virtual_cohort} "
            f"of {self._stands_for(cohorts)}, whose guarantee this is",
        )

    def _check_virtual(self, cohorts: Sampling, selection: str) -> None:
        """Raises `ConfigError` for cohorts that cannot stand for the virtual one."""
        if self.virtual_cohort is None:
            return
        if cohorts.by_participation or cohorts.rule or cohorts.p_max:
            expected = f"none with selection.kind {selection}; uniform, poisson or full scale to it"
            raise ConfigError("noise.virtual_cohort", self.virtual_cohort, expected)
        if self.virtual_cohort < cohorts.cohort:
            expected = f"at least the simulated cohort of {cohorts.cohort}"
            raise ConfigError("noise.virtual_cohort", self.virtual_cohort, expected)
        virtual = self._stands_for(cohorts)
        exact = cohorts.everyone and virtual != self.virtual_cohort
        if exact or virtual < self.virtual_cohort:
            size = "exactly" if cohorts.everyone else "at least"
            expected = (
                f"{size} noise.virtual_cohort, {self.virtual_cohort}, with selection.kind "
                f"{selection}"
            )
            raise ConfigError("noise.virtual_population", virtual, expected)

    # --- what it refuses ---

    def check(self, experiment: Experiment) -> None:
        bounding = experiment.bounding
        if bounding.initial_bound is None and bounding.sample_bound is None:
            expected = (
                "none without a bound; set bounding.kind to clip, normalize, ... with a bound"
            )
            raise ConfigError("noise.kind", self.kind, expected)
        if self.rounds is not None and self.rounds > experiment.rounds:
            expected = f"at most the {experiment.rounds} rounds of the run"
            raise ConfigError("noise.rounds", self.rounds, expected)
        self._by.check(self, experiment)
        accountants = experiment.privacy.accountants
        if self.epsilon is not None and not accountants:
            expected = "pld or rdp, to calibrate the noise of noise.epsilon with"
            raise ConfigError("privacy.accountants", [], expected)
        budget = experiment.privacy.budget
        if budget is not None and not accountants:
            expected = "none without noise and an accountant: this run spends without bound"
            raise ConfigError("privacy.budget", budget, expected)

    def warnings(self, experiment: Experiment) -> tuple[str, ...]:
        """See `Member.warnings`."""
        if self.rounds is None or self.rounds == experiment.rounds:
            return ()
        first = f"noise.epsilon {self.epsilon} is what {self.rounds} rounds spend"
        return (f"{first}; guarantees say what all {experiment.rounds} do",)

    def check_sums(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for settings that noise on sums rules out."""
        if self.epsilon is not None and not isinstance(self.epsilon, int | float):
            expected = (
                "a number; budgets of clients' own need placement step, and bounding.kind "
                "per_sample_clip"
            )
            raise ConfigError("noise.epsilon", self.model_dump(mode="json")["epsilon"], expected)
        if self.std is not None and experiment.bounding.adapts:
            expected = (
                "none with an adaptive bound, with which the noise moves; give noise.multiplier or "
                "noise.epsilon"
            )
            raise ConfigError("noise.std", self.std, expected)
