from typing import Any

import numpy as np
import torch
from pydantic import field_validator

from raydpfl.config.setting import Setting
from raydpfl.core.messages import Facts, State, View
from raydpfl.errors import ConfigError
from raydpfl.methods.local.sgd import Sgd


class Scaffold(Sgd):
    """SGD whose gradients are corrected by control variates (SCAFFOLD; Karimireddy et al. 2020,
    Alg. 1, option II).

    Each client i keeps c_i and the server c, all 0 in the first round. A client of the cohort
    trains with c - c_i added to its gradients; then, from what it sent, its update after bounding
    and noise,

        c_i+ = c_i - c - sent_i / (Q lr)
        c+   = c - share (c + mean(sent) / (Q lr)) = c + share mean(c_i+ - c_i)

    c_i+ is the mean of the client's gradients, where nothing was bounded; the means in c+ are over
    the cohort, whose share of the clients is r/N. lr is that of the round that was trained.

    The second form makes c the mean of all c_i; the first needs nothing but the sent updates, so
    what is released of them covers c too. With per-sample clipping and noise at each step this is
    DP-SCAFFOLD (Noble, Bellet and Dieuleveut 2022; the DPSCAFFOLD of 002). Weight decay counts as
    part of a client's loss, so it is in the variates. Momentum and a proximal term are refused, for
    with them -sent / (Q lr) is no mean of gradients; so is noise that the server draws, which would
    be in c and in no c_i, so that c would walk away from their mean.

    c is float64; a c_i is rounded to float32 where it is stored.
    """

    examples = ({"steps": 4, "batch": 5}, {"steps": 4, "batch": 5, "weight_decay": 0.01})
    kind: str = "scaffold"

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` where c would not follow the mean of the c_i."""
        if setting.drawn_by and setting.cohort_hidden:
            expected = f"one with cohorts of known size: the server of {self.kind} divides by it"
            raise ConfigError("selection.kind", setting.kinds["selection"], expected)
        if setting.weighted:
            expected = f"uniform, as {self.kind} keeps the plain mean over all clients"
            raise ConfigError("weights.kind", setting.kinds["weights"], expected)
        if setting.drawn_by == "server":
            expected = f"client or step: the server's noise would add up in local.kind {self.kind}"
            raise ConfigError("noise.placement", "server", expected)
        if setting.sends_model:
            expected = f"one that sends updates, for local.kind {self.kind}"
            raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)

    @field_validator("epochs", "within")
    @classmethod
    def _steps_of_one_length(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("none with scaffold, whose variates are means over `steps` of one lr")
        return value

    @field_validator("momentum", "proximal")
    @classmethod
    def _gradients_alone(cls, value: float) -> float:
        if value != 0:
            raise ValueError("0 with scaffold, whose control variates are means of gradients")
        return value

    def _path(self, lr: float) -> float:
        """Q lr."""
        assert self.steps is not None  # see `_steps_of_one_length`
        return self.steps * lr

    def start(self, d: int) -> State:
        return {"c": np.zeros(d)}

    def broadcast_state(self, state: State) -> State:
        return {"c": state["c"].astype(np.float32)}

    def correction(self, view: View) -> torch.Tensor | None:
        """c - c_i, which a client adds to every gradient of a round."""
        return view.broadcast["c"] - view.state

    def idle(self, view: View) -> torch.Tensor:
        """The update after which `next_state` gives a client its c_i as it was."""
        return -view.broadcast["c"] * self._path(view.lr)

    def next_state(self, noisy_updates: torch.Tensor, view: View) -> torch.Tensor | None:
        """c_i+ of clients that trained with `correction` and moved by `noisy_updates`."""
        difference = view.state.double() - view.broadcast["c"].double()
        return difference - noisy_updates / self._path(view.lr)

    def receive(self, mean: np.ndarray, state: State, facts: Facts) -> None:
        """c+ from the mean of what the cohort moved by, each client with the same weight."""
        if not facts.cohort:
            return
        c = state["c"]
        mean_update = mean * (facts.divisor / facts.cohort)
        share = facts.cohort / facts.population
        state["c"] = c - share * (c + mean_update / self._path(facts.lr))
