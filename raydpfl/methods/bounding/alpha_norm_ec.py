import numpy as np
from pydantic import Field
from torch import Tensor

from raydpfl.core.messages import Facts, State, View
from raydpfl.methods.bounding.normalize import SmoothNormalize


class AlphaNormEC(SmoothNormalize):
    """Smoothed normalisation with error compensation (alpha-NormEC, Shulgin, Khirirat, Richtarik
    2025).

    A client has a state g_i, at first 0. With u_i what it would have sent, it sends

        s = c v / (a + ||v||),  v = u_i - g_i,

    and adds beta s to g_i, without the noise on s. The server keeps h, at first 0, adds
    beta (r/N) mean(s) to it, noise included, and steps along h. Without noise h is the mean of all
    g_i, and these follow the u_i, so bounding leaves no bias. Only s is released, so the
    sensitivity is that of `smooth_normalize`.
    """

    examples = ({"bound": 1.0}, {"bound": 0.5, "beta": 0.5, "scaling": "gradient"})
    kind: str = "alpha_norm_ec"
    beta: float = Field(default=0.1, gt=0, le=1, description="share of s that g_i takes up")

    def send(self, updates: Tensor, view: View) -> Tensor:
        vectors = super().send(updates, view)
        vectors -= view.state
        return vectors

    def invert(self, vectors: Tensor, view: View) -> Tensor:
        return super().invert(vectors + view.state, view)

    def next_state(self, vectors: Tensor, sent: Tensor, view: View) -> Tensor | None:
        return view.state + self.beta * sent

    def start(self, d: int) -> State:
        return {"h": np.zeros(d)}

    def receive(self, noisy_sum: np.ndarray, state: State, facts: Facts) -> np.ndarray:
        state["h"] += self.beta / facts.population * noisy_sum
        return state["h"] * facts.lr if self.scaling == "gradient" else state["h"]
