"""Members that do not keep the contract."""

from typing import ClassVar

from pydantic import Field

from raydpfl.methods.bounding import Bounding


class Bare(Bounding):
    """Has a field that must be given, and no examples."""

    bound: float = Field(gt=0)

    def factor(self, norm, bound):
        return min(1.0, bound / norm) if norm > 0 else 1.0


class Loud(Bare):
    """Twice the bound."""

    examples: ClassVar = ({"bound": 1.0},)

    def factor(self, norm, bound):
        return min(1.0, 2 * bound / norm) if norm > 0 else 1.0
