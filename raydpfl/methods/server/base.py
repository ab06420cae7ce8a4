"""The base of the servers."""

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Member
from raydpfl.core.messages import State
from raydpfl.errors import RunError
from raydpfl.methods.hook_values import array_of
from raydpfl.methods.schedules import Schedule


class Server(Schedule, Member):
    """Base of the family. A member gives `direction`, and `start` if it keeps a state.

    `lr` is the server's learning rate eta_g, by round as `raydpfl.methods.schedules.Schedule` says.
    """

    added_fields = frozenset({"lr_decay", "lr_period", "lr_last", "lr_warmup"})

    lr: float = Field(default=1.0, gt=0, description="eta_g of round 0")

    def learning_rate(self, t: int) -> float:
        """eta_g of round t, counted from 0."""
        return self.lr_at(self.lr, t)

    def start(self, d: int) -> State:
        """The state before the first round, for a model of `d` parameters: float64 arrays by name.
        A checkpoint without one of these names is refused.
        """
        return {}

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        """The direction of the step, float64 [d], which the learning rate multiplies.

        `update` float64 [d] is the mean update of the round, noise included, not to be changed;
        `state` is as earlier rounds left it, to be changed in place.
        """
        raise NotImplementedError

    def step(self, model: np.ndarray, update: np.ndarray, state: State, t: int) -> np.ndarray:
        """The next model x + eta_g(t) direction, float32 [d], of `model` and the mean `update` of
        round t, float64 [d] each; changes `state` in place. Raises `RunError` unless it is finite.
        """
        with np.errstate(over="ignore"):  # an overflow is reported below
            direction = self.direction(update, state)
            direction = array_of(f"server.kind {self.kind}: direction", direction, model.shape)
            moved_model = self.learning_rate(t) * direction
            moved_model += model
            next_model = moved_model.astype(np.float32)
        if not np.isfinite(next_model).all():
            raise RunError(
                f"the model is no longer finite after round {t}; lower server.lr or local.lr"
            )
        return next_model

    def persistence(self) -> float:
        """beta, if the model moves along v <- beta v + u; 0 if an update has no effect after its
        round. Noise that is correlated over the rounds is fitted to it.
        """
        return 0.0
