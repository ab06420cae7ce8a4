"""Dense layers."""

from __future__ import annotations

from math import prod
from typing import Any, Literal

from pydantic import field_validator
from torch import nn

from raydpfl.models.base import Model, Shape, dense

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Mlp(Model):
    """Dense layers of `hidden` units each, one or several (000: 200; 002: 1200 on 60 principal
    components).

    Sigmoid and ELU are left out: torch computes them differently by the position in a tensor, so a
    run's bits would depend on the chunk.
    """

    kind: str = "mlp"
    hidden: tuple[int, ...] = (200,)
    activation: Literal["relu", "tanh"] = "relu"

    @field_validator("hidden", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("hidden")
    @classmethod
    def _positive(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("at least one hidden layer, each of at least 1 unit")
        return value

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        hidden = dense([prod(shape), *self.hidden], ACTIVATIONS[self.activation])
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(self.hidden[-1], outputs))
