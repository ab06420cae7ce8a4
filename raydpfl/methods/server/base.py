"""The base of the servers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from raydpfl.config.registry import Member
from raydpfl.errors import RunError
from raydpfl.methods.schedules import Schedule

State = dict[str, np.ndarray]


class Server(Schedule, Member):
    """Base of the family. A member gives `direction`, and `start` if it keeps a state.

    `lr` is the server's learning rate eta_g, by round as `raydpfl.methods.schedules.Schedule` says.
    """

    newer: ClassVar[frozenset[str]] = frozenset({"lr_decay", "lr_period", "lr_last", "lr_warmup"})

    lr: float = Field(default=1.0, gt=0, description="eta_g of round 0")

    def learning_rate(self, t: int) -> float:
        """eta_g of round t, counted from 0."""
        return self.lr_at(self.lr, t)

    def start(self, d: int) -> State:
        """The state before the first round, for a model of `d` parameters.

        Returns:
            By names of the member's own choice, float64 arrays. A checkpoint whose state has other
            names or shapes is refused.
        """
        return {}

    def direction(self, update: np.ndarray, state: State) -> np.ndarray:
        """The direction of the step; the learning rate multiplies it.

        Args:
            update: float64 [d], the mean update of the round, noise included. Not to be changed.
            state: as `start` made it and earlier rounds left it; to be changed in place.

        Returns:
            float64 [d].
        """
        raise NotImplementedError

    def step(self, model: np.ndarray, update: np.ndarray, state: State, t: int) -> np.ndarray:
        """The next model: x + eta_g(t) direction.

        Args:
            model: float64 [d].
            update: float64 [d], the mean update of round t.
            state: the member's own, changed in place.
            t: the round, counted from 0.

        Returns:
            float32 [d].

        Raises:
            RunError: the next model is not finite.
        """
        with np.errstate(over="ignore"):  # an overflow is reported below
            moved = self.learning_rate(t) * self.direction(update, state)
            moved += model
            following = moved.astype(np.float32)
        if not np.isfinite(following).all():
            raise RunError(
                f"the model is no longer finite after round {t}; lower server.lr or local.lr"
            )
        return following

    def persistence(self) -> float:
        """beta, if the model moves along v <- beta v + u; 0 if an update has no effect after its
        own round. Noise that is correlated over the rounds is fitted to it.
        """
        return 0.0
