from typing import Literal

import numpy as np
import torch
from pydantic import Field

from raydpfl.core.messages import Facts, State, View
from raydpfl.methods.bounding.clip import Clip


class ModelClip(Clip):
    """clip(x^Q, c): the model itself is clipped and sent, and the new model is the mean of what was
    sent (000 sec. 2.1).
    """

    examples = ({"bound": 1.0},)
    kind: str = "model_clip"
    scaling: Literal["update"] = Field(default="update", description="bounded: the model")

    def sends_model(self) -> bool:
        return True

    def send(self, updates: torch.Tensor, view: View) -> torch.Tensor:
        updates += view.model
        return updates

    def invert(self, vectors: torch.Tensor, view: View) -> torch.Tensor:
        return vectors - view.model

    def receive(self, noisy_sum: np.ndarray, state: State, facts: Facts) -> np.ndarray:
        return noisy_sum / facts.divisor - facts.model
