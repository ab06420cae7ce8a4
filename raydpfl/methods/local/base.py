"""The base of the family: how many steps, on which batches, with which learning rate, and what a
step does with the gradient of its batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from raydpfl.config.registry import Section, overrides
from raydpfl.config.setting import Setting
from raydpfl.core.messages import Facts, State, View
from raydpfl.errors import ConfigError
from raydpfl.methods.schedules import Schedule
from raydpfl.methods.server_state import WithServerState


@dataclass(frozen=True)
class Step:
    """What a rule knows of the step that it makes."""

    k: int  # the step's number in the round, from 0
    lr: float  # its learning rate
    # x_t, float32 [P]: the round's model, where every client began; [..., P] where each began with
    # parts of its own
    model: Tensor


@dataclass(frozen=True)
class LinearRule:
    """A rule that is linear in all its inputs, with v = 0 at a round's start:

    v <- momentum v + g + decay x + proximal (x - x_t);  x <- x - lr v.
    """

    momentum: float = 0.0
    decay: float = 0.0
    proximal: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether it is x <- x - lr g."""
        return not (self.momentum or self.decay or self.proximal)

    def move(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        velocity: list[Tensor],
        model: list[Tensor],
        corrections: list[Tensor],
        lr: float,
    ) -> None:
        """Makes a step in place on parameters in parts.

        Args:
            parameters: x; changed in place.
            gradients: g; overwritten.
            velocity: v, changed in place; may be empty where `momentum` is 0.
            model: x_t; may be empty where `proximal` is 0.
            corrections: added to the gradients; empty for none.
            lr: the learning rate.
        """
        direction = gradients
        if self.decay:
            torch._foreach_add_(direction, parameters, alpha=self.decay)
        if self.proximal:
            offsets = [part - start for part, start in zip(parameters, model, strict=True)]
            torch._foreach_add_(direction, offsets, alpha=self.proximal)
        if corrections:
            torch._foreach_add_(direction, corrections, alpha=1.0)
        if self.momentum:
            for part in velocity:
                part.mul_(self.momentum)
            torch._foreach_add_(velocity, direction, alpha=1.0)
            direction = velocity
        torch._foreach_add_(parameters, direction, alpha=-lr)


class Share(Section):
    """A batch as a share q of a client's rows, q n_k rounded, one row at least: so the sampling
    rate is the same for all clients, whatever their sizes.

    >>> Share(share=0.1).of(np.array([0, 3, 25, 600]))
    array([ 0,  1,  2, 60])
    """

    share: float = Field(gt=0, le=1, description="q, the share of a client's rows that a batch has")

    def of(self, sizes: np.ndarray) -> np.ndarray:
        """Rows in a batch, int64 [C], of clients with so many rows, int64 [C]."""
        batch_rows = np.round(np.round(self.share * sizes, 9)).astype(np.int64)
        return np.clip(batch_rows, np.minimum(sizes, 1), sizes)


RULED = {"fresh", "step", "perturb", "train"}  # what makes another rule of a class
EITHER = "none with local.steps {0}: a client makes either; local.steps=null takes that away"


class Local(Schedule, WithServerState):
    """Base of the family: steps, each on a batch of the client's rows.

    `step` is the rule of a step, here plain gradient descent. A user-defined member gives another,
    and `fresh` if it keeps a state from one step to the next; it may give a `learning_rate` too.
    Every backend applies the rule, to one client or many at once, to gradients that are clipped and
    noisy where the experiment asks for that.
    """

    added_fields = frozenset({"epochs", "lr_period", "lr_last", "lr_warmup", "within"})

    steps: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="Q, of every client; or `epochs` in its place, and none here"
    )
    epochs: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="E: a client of n_i rows makes ceil(E n_i / B) steps"
    )
    batch: Annotated[int, Field(ge=1)] | Literal["full"] | Share = Field(
        default=10,
        description="B; a client with fewer rows uses all of them, as `full` always does; or "
        "a share of its rows",
    )
    sampling: Literal["fresh", "epochs"] = Field(
        default="fresh",
        description="each step its own uniform subset; or shuffled rows in turn, each once "
        "an epoch",
    )
    lr: float = Field(default=0.1, gt=0, description="eta_l of round 0")
    schedule: Literal["constant", "exponential", "inverse", "inverse_sqrt", "cosine"] = Field(
        default="exponential",
        description="by round: lr lr_decay^t (001 sec. 6); lr / sqrt(t + 1) (002 sec. VI); "
        "and others",
    )
    within: Schedule | None = Field(
        default=None, description="by step of a round, from what the round has"
    )

    @model_validator(mode="before")
    @classmethod
    def _steps_or_epochs(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        steps = values.get("steps")
        if values.get("epochs") is None:
            return values if steps is not None else {**values, "steps": 20}
        if steps is not None:
            raise ConfigError("local.epochs", values["epochs"], EITHER.format(steps))
        return values

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """A class with another rule, its own or a mixin's, does not inherit the coefficients of its
        base.
        """
        super().__pydantic_init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "linear" in vars(base))
        hooks = {name: getattr(cls, name) for name in RULED}
        has_others = any(getattr(owner, name, hook) is not hook for name, hook in hooks.items())
        earlier_classes = cls.__mro__[: cls.__mro__.index(owner)]
        if has_others or any(RULED & vars(base).keys() for base in earlier_classes):
            cls.linear = _no_linear_rule  # type: ignore[method-assign]

    # --- steps, batches and learning rates, as accountants and every backend know them ---

    def learning_rate(self, t: int) -> float:
        """The learning rate of round `t`, counted from 0; of all its steps, if not for `within`."""
        return self.lr_at(self.lr, t)

    def step_counts(self, sizes: np.ndarray) -> np.ndarray:
        """Steps in a round of clients with so many rows, int64 [C] both."""
        if self.trains:
            return np.zeros(len(sizes), np.int64)
        if self.steps is not None:
            return np.full(len(sizes), self.steps)
        assert self.epochs is not None
        rows = np.round(self.epochs * sizes, 9)  # as 0.1 times 30 is above 3
        return np.ceil(rows / np.maximum(self.batch_sizes(sizes), 1)).astype(np.int64)

    def batch_size(self, rows: int) -> int:
        """Rows in each batch of a client that has `rows`."""
        return int(self.batch_sizes(np.array([rows]))[0])

    def batch_sizes(self, sizes: np.ndarray) -> np.ndarray:
        """Rows in each batch of clients with so many rows, int64 [C] both; they never fall as
        `sizes` rise.
        """
        if self.batch == "full":
            return sizes
        if isinstance(self.batch, Share):
            return self.batch.of(sizes)
        return np.minimum(sizes, self.batch)

    def max_rows(self, sizes: np.ndarray) -> np.ndarray:
        """The rows that each client can train on in a round at most, int64 [C], of its `sizes`:
        all where batches are shares, or a user-defined class has `batch_sizes`, `step_counts` or
        `train`.
        """
        cls = type(self)
        is_overridden = (cls.batch_sizes, cls.step_counts) != (Local.batch_sizes, Local.step_counts)
        if is_overridden or self.trains or not isinstance(self.batch, int):
            return sizes
        return np.minimum(sizes, self.step_counts(sizes) * self.batch)

    # --- the rule ---

    def fresh(self, x: Tensor) -> Any:
        """The rule's state at a round's start, which only `step` looks at; `x` float32 [..., P] is
        the model, once for each client.
        """
        return None

    def step(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> tuple[Tensor, Any]:
        """One step, here x - lr g, of each client by itself. Arguments are not to be changed.

        Args:
            x: float32 [..., P], the parameters of each client along the last axis, in an order that
                may differ between backends.
            gradient: float32 [..., P], of each client's batch, at x or where `perturb` says:
                clipped, noisy and corrected.
            state: as `fresh` made it and the steps before left it.
            at: the step, its learning rate and the round's model.

        Returns:
            (the next x, float32 [..., P]; the next state).
        """
        return x - at.lr * gradient, state

    def perturb(self, x: Tensor, gradient: Tensor, state: Any, at: Step) -> Tensor:
        """Where the gradient for `step` is taken, float32 [..., P]; here x. Arguments as for
        `step`, but for the gradient, at x as it is. A class with this takes two of every batch.
        """
        return x

    perturbs = overrides(perturb)  # whether its steps take two gradients

    def train(self, module: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> None:
        """All of a client's training in a round, in the place of steps: any torch code. A class
        that gives this has clients one by one, and no `step`. `self.lr` is the round's.

        Args:
            module: the client's copy of the model, at the round's parameters and in training mode;
                its trainable parameters afterwards are what the client has trained to.
            x: [n, *shape], the client's rows.
            y: [n], or [n, ...], their targets.
            generator: keyed by the client and the round; so are torch's default generator,
                `numpy.random` and `random` during the call.
        """
        raise TypeError(f"{self.kind} trains by steps")

    trains = overrides(train)

    def linear(self) -> LinearRule | None:
        """The coefficients of `step` where it is as `LinearRule` says, with one learning rate in
        all steps of a round: some backends are fast because of that. None for any other rule.
        """
        return None if self.within else LinearRule()

    @property
    def l2(self) -> float:
        """l of the term l/2 ||x||^2 that the rule adds to every client's loss."""
        return 0.0

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for a rule that does not suit its section, or samples' gradients
        that are clipped.
        """
        if self.trains:
            _check_train(self)
        if setting.section != "local":
            _check_personal(self, setting)
            return
        bounding, precision = setting.kinds["bounding"], setting.precision
        if self.trains and precision == "bfloat16":
            expected = f"float32 or tf32 with local.kind {self.kind}, whose train is its own"
            raise ConfigError("client.precision", precision, expected)
        if setting.per_sample_bound is None:
            return
        if precision != "float32":
            expected = "float32 where every sample's gradient is clipped, as its norm must be exact"
            raise ConfigError("client.precision", precision, expected)
        if self.perturbs or self.trains:
            expected = f"one that bounds what a client sends: local.kind {self.kind} "
            expected += "has its own gradients" if self.trains else "takes two of every batch"
            raise ConfigError("bounding.kind", bounding, expected)

    # --- states of clients and server between rounds; vectors are torch's, [d] or [k, d] ---

    def correction(self, view: View) -> Tensor | None:
        """What is added to every gradient of these k clients, float32 [k, d]; None: nothing."""
        return None

    corrects = overrides(correction)

    def idle(self, view: View) -> Tensor:
        """The update of a client that has no gradients (it failed, or has no data), float32 [d]."""
        return torch.zeros_like(view.model)

    def next_state(self, noisy_updates: Tensor, view: View) -> Tensor | None:
        """The state of clients for their next round, [k, d], where it was `view.state` before.
        `noisy_updates`, float64 [k, d], are what each sent, bounded, with noise, in units of
        updates.
        """
        return None

    stateful = overrides(next_state)  # whether clients keep a vector from one round to their next

    @property
    def accounted_with(self) -> tuple[str, ...]:
        return ("local",) if self.stateful else ()

    def receive(self, mean: np.ndarray, state: State, facts: Facts) -> None:
        """Adds the mean update of a round, float64 [d], to the server's `state`, in place."""


def _check_personal(local: Local, setting: Setting) -> None:
    """Raises `ConfigError` for what a personal model, or one that is fine-tuned, cannot have."""
    if local.stateful or local.corrects:
        expected = "a rule without variates, as it is for one client's own model"
        raise ConfigError(f"{setting.section}.kind", local.kind, expected)
    if setting.section != "personal":
        return
    linear = local.linear()
    if not (local.is_user_defined and not local.trains) and not (linear and linear.proximal):
        expected = "sgd with proximal above 0, which draws a client's own model to that of all "
        expected += "(Ditto), or a rule of your own with a step"
        raise ConfigError("personal.kind", local.kind, expected)
    if setting.local_parameters or "evaluate.fine_tune" in setting.kinds:
        conflicting_field = "model.local" if setting.local_parameters else "evaluate.fine_tune"
        expected = f"none with {conflicting_field}, which makes another model of each client's own"
        raise ConfigError("personal", local.kind, expected)
    if isinstance(setting.held_out, dict):
        expected = "a share of every client's rows: clients that are held out train no model"
        raise ConfigError("evaluate.validation", setting.held_out, expected)


def _check_train(local: Local) -> None:
    """Raises `ConfigError` for hooks next to a user-defined `train`, which nothing would call."""
    for name in ("step", "fresh", "perturb", "correction", "linear", "learning_rate"):
        if getattr(type(local), name) not in (getattr(Local, name), _no_linear_rule):
            expected = f"a class without {name} next to train, as nothing calls it"
            raise ConfigError("local.kind", local.kind, expected)


def _no_linear_rule(self: Local) -> LinearRule | None:
    return None
