"""Clipping with error feedback (Zhang et al. 2024, DiceSGD): what is cut off is sent later."""

from typing import ClassVar

from pydantic import Field

from raydpfl.methods.bounding import Bounding


class Feedback(Bounding):
    """v = u + e is clipped at the bound and sent; e <- decay (v - sent), e = 0 at first."""

    examples: ClassVar = ({"bound": 0.2}, {"bound": 0.5, "decay": 0.5})
    bound: float = Field(gt=0)
    decay: float = Field(default=1.0, gt=0, le=1)

    def send(self, updates, view):
        return super().send(updates, view) + view.state

    def invert(self, vectors, view):
        return super().invert(vectors - view.state, view)

    def factor(self, norm, bound):
        return min(1.0, bound / norm) if norm > 0 else 1.0

    def next_state(self, vectors, sent, view):
        return self.decay * (vectors - sent)
