"""Smoothed normalisation of the error that is left."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field

from raydpfl.bounding.smooth_normalize import SmoothNormalize
from raydpfl.rounds import Facts, State, View


class AlphaNormEC(SmoothNormalize):
    """Smoothed normalisation with error compensation (alpha-NormEC, Shulgin, Khirirat, Richtarik
    2025).

    A client remembers g_i, from 0, and sends s = c v / (a + ||v||) of v = u_i - g_i, u_i being what
    it would have sent; g_i grows by `beta` s, without the noise on s. The server keeps h, from 0: h
    grows by beta (r/N) mean(s), noise included, and is what the server steps along. Without noise h
    is the mean of all g_i, which follow the u_i, so that bounding leaves no bias. Only s is
    released, so the sensitivity is that of `smooth_normalize`.
    """

    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bound": 1.0},
        {"bound": 0.5, "beta": 0.5, "scaling": "gradient"},
    )
    kind: str = "alpha_norm_ec"
    beta: float = Field(default=0.1, gt=0, le=1)

    def send(self, updates: torch.Tensor, view: View) -> torch.Tensor:
        vectors = super().send(updates, view)
        vectors -= view.own
        return vectors

    def invert(self, vectors: torch.Tensor, view: View) -> torch.Tensor:
        return super().invert(vectors + view.own, view)

    def remember(
        self, vectors: torch.Tensor, sent: torch.Tensor, view: View
    ) -> torch.Tensor | None:
        return view.own + self.beta * sent

    def start(self, d: int) -> State:
        return {"h": np.zeros(d)}

    def receive(self, released: np.ndarray, state: State, facts: Facts) -> np.ndarray:
        state["h"] += self.beta / facts.population * released
        return state["h"] * facts.lr if self.scaling == "gradient" else state["h"]
