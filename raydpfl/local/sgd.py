"""Local training as a section of the config: how many steps, on which batches, with which learning rate.

>>> Sgd(lr=0.1, lr_decay=0.5).learning_rate(2)
0.025
>>> Sgd(lr=0.1, schedule="inverse_sqrt").learning_rate(3)
0.05
>>> Sgd(batch="full", steps=2).batch_size(31), Sgd(batch=20).batch_size(31)
(31, 20)
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from raydpfl.member import Member


class Local(Member):
    """Base of the family: Q steps, each on a batch of the client's own rows. A member says what a step does with the batch's gradient.

    A user's own member derives from `Sgd`, and may give a `learning_rate` of its own.
    """

    steps: int = Field(default=20, ge=1)  # Q
    batch: Annotated[int, Field(ge=1)] | Literal["full"] = 10  # B; a client with fewer rows uses all of them, as `full` always does
    sampling: Literal["fresh", "epochs"] = "fresh"  # each step its own uniform subset; or shuffled rows in turn, each once an epoch
    lr: float = Field(default=0.1, gt=0)  # eta_l of round 0
    schedule: Literal["exponential", "inverse_sqrt"] = "exponential"  # lr lr_decay^t (001 sec. 6); lr / sqrt(t + 1) (002 sec. VI)
    lr_decay: float = Field(default=1.0, gt=0, le=1)

    @field_validator("lr_decay")
    @classmethod
    def _exponential_alone(cls, value: float, info: Any) -> float:
        if value != 1 and info.data.get("schedule") == "inverse_sqrt":
            raise ValueError("1 with the schedule inverse_sqrt, which decays by itself")
        return value

    def learning_rate(self, round: int) -> float:
        """The learning rate of all local steps of a round, counted from 0."""
        return self.lr / math.sqrt(round + 1) if self.schedule == "inverse_sqrt" else self.lr * self.lr_decay**round

    def batch_size(self, rows: int) -> int:
        """Rows in each batch of a client that has `rows`."""
        return rows if self.batch == "full" else min(self.batch, rows)


class Sgd(Local):
    """v <- momentum v + g + weight_decay x;  x <- x - lr v, with v = 0 at the start of a round.

    g is the gradient of the mean cross-entropy of the batch; every parameter decays, biases too, all as `torch.optim.SGD` does it
    (000 Alg. 1-3, 001 Alg. 1-3: Q local steps; the L2 terms of SPEC sec. 4 are `weight_decay`).
    """

    kind: str = "sgd"
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)


FAMILY: dict[str, type[Local]] = {"sgd": Sgd}
