"""The schedule of a learning rate, by round or by step of a round.

>>> cosine = Schedule(schedule="cosine", lr_period=10, lr_last=0.1, lr_warmup=1)
>>> [round(cosine.lr_at(0.2, k), 3) for k in (0, 1, 6, 11, 12)]
[0.1, 0.2, 0.11, 0.02, 0.02]
>>> Schedule(schedule="exponential", lr_decay=0.5).lr_at(0.2, 2)
0.05
>>> Schedule(schedule="inverse_sqrt").lr_at(0.2, 3)
0.1
>>> Schedule(schedule="inverse", lr_period=3).lr_at(0.2, 3)
0.1
"""

import math
from typing import Any, Literal

from pydantic import Field, field_validator

from raydpfl.config.registry import Section


class Schedule(Section):
    """A learning rate lr as a function of k, the round or the step, from 0.

    | schedule     | lr times                                               | as torch's          |
    |--------------|--------------------------------------------------------|---------------------|
    | constant     | 1                                                      | ConstantLR          |
    | exponential  | lr_decay^k                                             | ExponentialLR       |
    | inverse      | 1 / (1 + k / lr_period)                                | LambdaLR            |
    | inverse_sqrt | 1 / sqrt(k + 1)                                        | LambdaLR            |
    | cosine       | from 1 to lr_last in lr_period, along half a cosine,   | CosineAnnealingLR   |
    |              | and lr_last from then on                               |                     |

    The first w = `lr_warmup` of them have lr (k + 1) / (w + 1), and the schedule begins after them.
    """

    schedule: Literal["constant", "exponential", "inverse", "inverse_sqrt", "cosine"] = Field(
        default="constant",
        description="how the learning rate goes on from step to step, or from round to round",
    )
    lr_decay: float = Field(
        default=1.0, gt=0, le=1, description="exponential: the factor of every round"
    )
    lr_period: int | None = Field(
        default=None,
        ge=1,
        description="rounds until a cosine is at its least, or inverse at lr / 2",
    )
    lr_last: float = Field(
        default=0.01, gt=0, le=1, description="cosine: its least, as a share of lr"
    )
    lr_warmup: int = Field(default=0, ge=0, description="first rounds, over which it rises to lr")

    @field_validator("lr_decay")
    @classmethod
    def _exponential_alone(cls, value: float, info: Any) -> float:
        schedule = info.data.get("schedule")
        if value != 1 and schedule not in ("exponential", None):
            raise ValueError(f"1 with the schedule {schedule}; exponential decays by it")
        return value

    @field_validator("lr_period", "lr_last")
    @classmethod
    def _check_decay_fields(cls, value: float | None, info: Any) -> float | None:
        schedule = info.data.get("schedule")
        users = ("cosine", "inverse") if info.field_name == "lr_period" else ("cosine",)
        if value is None and schedule in users:
            raise ValueError(f"a number, with the schedule {schedule}: how long lr falls")
        if value not in (None, 0.01) and schedule not in (*users, None):
            raise ValueError(
                f"none with the schedule {schedule}; it is that of {' and '.join(users)}"
            )
        return value

    def lr_at(self, lr: float, k: int) -> float:
        """The learning rate of round or step `k`, from 0."""
        if k < self.lr_warmup:
            return lr * (k + 1) / (self.lr_warmup + 1)
        k -= self.lr_warmup
        if self.schedule == "inverse_sqrt":
            return lr / math.sqrt(k + 1)
        if self.schedule == "inverse":
            assert self.lr_period is not None
            return lr / (1 + k / self.lr_period)
        if self.lr_period is not None:
            turn = math.pi * min(k / self.lr_period, 1.0)
            return lr * (self.lr_last + (1 - self.lr_last) * (1 + math.cos(turn)) / 2)
        return lr * self.lr_decay**k
