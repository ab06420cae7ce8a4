"""The sections of an experiment that are no choice of a family: privacy, client, evaluate."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    StrictInt,
    field_validator,
)

from raydpfl.config.registry import Section, choose, is_import_allowed
from raydpfl.config.setting import Setting
from raydpfl.core.hardware import Precision
from raydpfl.errors import ConfigError, rename_fields
from raydpfl.methods import local
from raydpfl.methods.local import Local
from raydpfl.models import metric_columns
from raydpfl.models.client_histogram import Histogram
from raydpfl.models.metrics import Metric
from raydpfl.models.metrics import parse as parse_metrics
from raydpfl.privacy import Survey
from raydpfl.privacy.accountants import ACCOUNTANT_NAMES, accountant_of
from raydpfl.privacy.budgets import BudgetDistribution
from raydpfl.privacy.budgets import parse as parse_budgets


def normalize_integer(value: Any) -> Any:
    """A float without a fraction as the int that it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def parse_accountant(value: Any) -> str:
    """The name of an accountant, or the import path of a user-defined one, which is imported where
    that is allowed. Raises `ValueError`.
    """
    if isinstance(value, str) and (value in ACCOUNTANT_NAMES or ":" in value):
        if value not in ACCOUNTANT_NAMES and is_import_allowed("privacy"):
            with rename_fields(lambda _: "privacy.accountants"):
                accountant_of(value)
        return value
    *leading_names, last_name = map(repr, ACCOUNTANT_NAMES)
    names = f"{', '.join(leading_names)} or {last_name}"
    raise ValueError(f"{names}; or the import path of your own (package.module:Name)")


AccountantName = Annotated[str, PlainValidator(parse_accountant, json_schema_input_type=str)]
WholeNumber = Annotated[StrictInt, BeforeValidator(normalize_integer)]


class Privacy(Section):
    """Who accounts, under which neighbouring relation, and how much may be spent."""

    accountants: tuple[AccountantName, ...] = Field(
        default=("pld", "rdp", "paper"), description="the first rigorous one calibrates the noise"
    )
    relation: Literal["auto", "replace_one", "add_remove", "zero_out"] = Field(
        default="auto",
        description="auto: add_remove where the size of a cohort is a secret, else replace_one",
    )
    budget: float | None = Field(
        default=None, gt=0, description="epsilon that the run stops short of exceeding"
    )
    colluders: int = Field(
        default=0,
        ge=0,
        description="clients who tell an observer all they know; guarantees against these too",
    )
    individual: Annotated[float, Field(gt=0)] | SerializeAsAny[BudgetDistribution] | None = Field(
        default=None,
        description=(
            "epsilon of each client's own budget, or a distribution: by the norms of what it sends "
            "it leaves before it exceeds that; who has left is not public"
        ),
    )

    def import_paths(self) -> tuple[str, ...]:
        return tuple(name for name in self.accountants if ":" in name)

    @field_validator("individual", mode="before")
    @classmethod
    def _distribution(cls, value: Any) -> Any:
        with rename_fields(lambda name: name.replace("noise.epsilon", "privacy.individual")):
            return parse_budgets(value) if isinstance(value, Mapping) else value

    @field_validator("accountants", mode="before")
    @classmethod
    def _wrap_name(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("accountants", mode="after")
    @classmethod
    def _check_unique(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each accountant once")
        return value


class Client(Section):
    """How clients become actors, and how they train."""

    actors: WholeNumber | Literal["auto", "per-client"] = Field(
        default="auto",
        description="auto: this process, or one actor for each core, chosen before the first round",
    )
    num_cpus: float = Field(
        default=1,
        ge=0,
        description=(
            "cores of each actor, of those that Ray has, and the threads of compiled code in it"
        ),
    )
    num_gpus: float = Field(
        default=0, ge=0, description="share of a GPU of each actor; 0: it trains on the CPU"
    )
    precision: Precision = Field(
        default="float32",
        description=(
            "what the products of training are taken in; parameters, losses and updates are float32"
        ),
    )
    chunk: WholeNumber | Literal["auto"] = Field(
        default="auto",
        description=(
            "clients trained at once, at most; bits depend on it. auto: some of a cohort for each "
            "core; on a GPU all of it, where half of the memory holds them, so that several actors "
            "need a number"
        ),
    )
    backend: Literal[
        "auto", "compiled", "fused", "convolutional", "layerwise", "one_batch", "vmap", "loop"
    ] = Field(
        default="auto",
        description=(
            "how a chunk trains; auto: what is known to be fast, and in runs of 5 s or more the "
            "fastest of those that fit, as timed before the first round"
        ),
    )
    timeout: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        default="auto",
        description=(
            "Seconds that an actor has for its share of a round, before it is replaced; auto: see "
            "`raydpfl.runtime.actor_pool.Patience`. Without actors nobody could take over: a "
            "number then ends the run, and auto waits."
        ),
    )
    on_error: Literal["fail", "drop"] = Field(
        default="fail",
        description=(
            "drop: the client counts with an update of 0 (scaffold: one that leaves its variate as "
            "it is, unless it is bounded), and its noise"
        ),
    )

    @field_validator("precision", mode="after")
    @classmethod
    def _check_precision(cls, value: Precision, info: Any) -> Precision:
        if value == "tf32" and not info.data.get("num_gpus"):
            raise ValueError("float32 or bfloat16 without a GPU (client.num_gpus is 0)")
        return value

    @field_validator("actors", "chunk", mode="after")
    @classmethod
    def _check_counts(cls, value: int | str, info: Any) -> int | str:
        minimum = 0 if info.field_name == "actors" else 1
        if isinstance(value, int) and value < minimum:
            raise ValueError(f"a number of at least {minimum}")
        return value


class EarlyStopping(Section):
    """When a run ends before its last round: once a score of rows held out is no better for long
    enough.
    """

    metric: str = Field(
        default="validation_loss", description="a score of rows held out, never of the test set"
    )
    patience: int = Field(ge=1, description="evaluations after the best one without a better one")
    mode: Literal["auto", "min", "max"] = Field(
        default="auto",
        description="min, max: of which less, or more, is better; auto: as the metric says",
    )

    def check(self, scores: Sequence[str], metrics: Sequence[Metric]) -> None:
        """Raises `ConfigError` for a score that is not among those that evaluations on rows held
        out of training give, or that has no better direction; `metrics` score the model.
        """
        names = [name for name in scores if metric_columns.score_set(name) != metric_columns.TEST]
        if self.metric not in names:
            text = ", ".join(names) or "evaluate.validation holds out no rows: give it a share"
            expected = f"a score of rows held out of training ({text})"
            raise ConfigError("evaluate.stop.metric", self.metric, expected)
        if not self.sign(metrics):
            expected = f"min or max: nobody knows of {self.metric} whether more of it is better"
            raise ConfigError("evaluate.stop.mode", self.mode, expected)

    def sign(self, metrics: Sequence[Metric]) -> int:
        """1: more of the score is better; -1: less of it; 0: unknown."""
        if self.mode == "auto":
            return metric_columns.sign(self.metric, metrics)
        return 1 if self.mode == "max" else -1


def rule(section: str, value: Any) -> Any:
    """A local rule for personal models, by default of kind sgd; None: there is none."""
    if isinstance(value, Mapping):
        value = {"kind": "sgd", **value}
    return None if value is None else choose(section, value, local.FAMILY, Local)


class HeldOut(Section):
    """Clients that are held out of training."""

    clients: float = Field(gt=0, lt=1, description="share of them")


class Evaluate(Section):
    """When the model is evaluated, and on what."""

    every: int = Field(default=10, ge=1, description="rounds; the last round always counts")
    batch: int = Field(default=1000, ge=1, description="rows at a time")
    test: bool = Field(default=True, description="false: the test set is not looked at")
    validation: Annotated[float, Field(ge=0, lt=1)] | HeldOut = Field(
        default=0.0,
        description=(
            "share of each client's rows that is held out of training and evaluated on; or, as in "
            "{clients: 0.1}, of the clients, with all their rows, who are no part of the "
            "population then"
        ),
    )
    metrics: Literal["auto"] | tuple[SerializeAsAny[Metric], ...] = Field(
        default="auto",
        description=(
            "what the model is scored by: the first is that by which a run is followed; auto: as "
            "the task says. The loss and the accuracy are always there"
        ),
    )
    per_client: SerializeAsAny[Metric] | None = Field(
        default=None,
        description=(
            "a metric of every client, on the rows that it holds out (on those that it trains on, "
            "where none are), and what it comes to over the clients: exact, and so not private"
        ),
    )
    histogram: Histogram | None = Field(
        default=None,
        description="per_client as counts over bins with noise, which guarantees account for",
    )
    fine_tune: SerializeAsAny[Local] | None = Field(
        default=None,
        description=(
            "per_client of a model that each client trains further, alone, by this local rule, on "
            "the rows that it trains on, and that it then forgets"
        ),
    )
    stop: EarlyStopping | None = Field(default=None, description="when the run ends early")

    @field_validator("fine_tune", mode="before")
    @classmethod
    def _fine_tune(cls, value: Any) -> Any:
        return rule("evaluate.fine_tune", value)

    @field_validator("per_client", mode="before")
    @classmethod
    def _per_client(cls, value: Any) -> Any:
        return None if value is None else parse_metrics([value], "evaluate.per_client")[0]

    @field_validator("metrics", mode="before")
    @classmethod
    def _metrics(cls, value: Any) -> Any:
        return value if value == "auto" else parse_metrics(value)

    @property
    def held_out(self) -> float | dict[str, float]:
        """What is held out of training, as `raydpfl.data.prepare` takes it."""
        if isinstance(self.validation, HeldOut):
            return {"clients": self.validation.clients}
        return self.validation

    @property
    def survey(self) -> Survey | None:
        """What all clients are asked for, as accountants count it; None: nothing with noise."""
        if self.per_client is None or self.histogram is None:
            return None
        return Survey(self.per_client.name, self.histogram.std)

    def check(self, setting: Setting, scores: Sequence[str], metrics: Sequence[Metric]) -> None:
        """Raises `ConfigError` for what an evaluation that gives these scores, and whose model is
        scored by these metrics, cannot give.
        """
        if self.stop:
            self.stop.check(scores if self.validation else (), metrics)
        share = self.validation if isinstance(self.validation, float) else 0.0
        if self.fine_tune and not (self.per_client and share):
            expected = "none without evaluate.per_client, the metric that a client is scored by, "
            expected += "and evaluate.validation, a share of its rows that it is scored on"
            raise ConfigError("evaluate.fine_tune", self.fine_tune.kind, expected)
        if self.histogram is None:
            return
        expected = ""
        if self.per_client is None:
            expected = "none without evaluate.per_client, the metric whose values it is of"
        elif setting.drawn_by not in ("client", "server") or setting.virtual_cohort:
            expected = (
                "noise that protects the clients who are asked, on what they send or on its sum "
                "(without noise nothing is private, and evaluate.per_client gives exact scores; at "
                "local steps nobody adds up answers; of a virtual cohort not all answer)"
            )
        elif "personal" in setting.kinds or setting.local_parameters:
            expected = (
                "none with models of clients' own (model.local, personal): who has one has taken "
                "part, and a secret cohort would be known by the answers"
            )
        if expected:
            histogram = self.histogram.model_dump(mode="json")
            raise ConfigError("evaluate.histogram", histogram, expected)
        if setting.rounds % self.every:
            expected = (
                f"a multiple of evaluate.every, {self.every}, with evaluate.histogram: clients are "
                "asked after every so many rounds, and not once more at the end"
            )
            raise ConfigError("rounds", setting.rounds, expected)

    @property
    def exclusions(self) -> tuple[str, ...]:
        """What of it no accountant counts, in words."""
        texts = []
        if self.per_client and not self.histogram:
            texts.append(
                f"the {self.per_client.name} of every client (evaluate.per_client), its quantiles, "
                "mean and spread are exact answers to queries on the clients' rows; no epsilon "
                "covers them"
            )
        if self.validation:
            texts.append(
                "the validation scores (evaluate.validation) are exact answers to queries on rows "
                "of the clients, which were held out of training; no epsilon covers them, nor what "
                "is chosen by them"
            )
        return tuple(texts)
