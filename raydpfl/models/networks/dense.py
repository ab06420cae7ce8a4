"""Linear models, and dense layers."""

from math import prod
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator
from torch import nn

from raydpfl.models.base import Model, Shape, dense


class Softmax(Model):
    """Softmax regression: one linear layer with bias. For numeric targets see `linear`."""

    is_classifier: ClassVar[bool] = True
    kind: str = "softmax"

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), outputs))


class LinearModel(Model):
    """One linear layer, for regression and classification.

    With the quadratics of 001 sec. 5.3, whose optimum is the origin, `spread` 0.2 and 1 are its
    starts w* + z/5 and w* + z, z ~ U(0,1)^d.
    """

    kind: str = "linear"
    bias: bool = Field(default=False, description="whether there is one")
    start: float = Field(default=0.0, description="of every parameter")
    spread: float = Field(default=0.0, ge=0, description="of U(0, spread), which is added to start")

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        layer = nn.Linear(prod(shape), outputs, self.bias)
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, self.start, self.start + self.spread)
        return nn.Sequential(nn.Flatten(), layer)


ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class Mlp(Model):
    """Dense layers, one or several (000: 200 units; 002: 1200 on 60 principal components).

    Sigmoid and ELU are left out: torch computes them differently by the position in a tensor, so a
    run's bits would depend on the chunk.
    """

    kind: str = "mlp"
    hidden: tuple[int, ...] = Field(default=(200,), description="units of each hidden layer")
    activation: Literal["relu", "tanh"] = Field(default="relu", description="behind each")

    @field_validator("hidden", mode="before", json_schema_input_type=int | tuple[int, ...])
    @classmethod
    def _wrap_hidden(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int | float) else value

    @field_validator("hidden")
    @classmethod
    def _check_hidden(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or min(value) < 1:
            raise ValueError("at least one hidden layer, each of at least 1 unit")
        return value

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        return dense([], [prod(shape), *self.hidden], ACTIVATIONS[self.activation], outputs)
