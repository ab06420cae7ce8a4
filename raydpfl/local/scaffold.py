"""SGD with control variates.

>>> import numpy as np
>>> local = Scaffold(steps=2, lr=0.1)
>>> own, shared = np.array([[1.0], [3.0]]), np.array([2.0])
>>> local.correction(shared, own).ravel()
array([ 1., -1.])
>>> sent = np.array([[-0.4], [-1.0]])
>>> local.next_own(own, shared, sent, lr=0.1).ravel()
array([1., 6.])
>>> local.next_shared(shared, sent.mean(axis=0), lr=0.1, share=1.0)
array([3.5])
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

import numpy as np
import torch
from pydantic import field_validator

from raydpfl.local.sgd import Sgd

A = TypeVar("A", np.ndarray, torch.Tensor)


class Scaffold(Sgd):
    """SGD whose gradients are corrected by control variates (SCAFFOLD; Karimireddy et al. 2020,
    Alg. 1, option II).

    Each client i keeps c_i and the server c, all 0 in the first round. A client of the cohort
    trains with c - c_i added to its gradients; then, from what it sent, its update after bounding
    and noise,

        c_i+ = c_i - c - sent_i / (Q lr)
        c+   = c - share (c + mean(sent) / (Q lr)) = c + share mean(c_i+ - c_i)

    c_i+ is the mean of the client's gradients, where nothing was bounded; the means in c+ are over
    the cohort, whose share of the clients is r/N.

    The second form makes c the mean of all c_i, round after round; the first needs nothing but the
    sent updates, so what is released of them covers c too. With per-sample clipping and noise at
    each step this is DP-SCAFFOLD (Noble, Bellet and Dieuleveut 2022; the DPSCAFFOLD of 002), whose
    variates are made of noised gradients likewise. Weight decay counts as part of a client's loss,
    so it is in the variates; momentum and a proximal term are refused, for with them -sent / (Q lr)
    is no mean of gradients. So is noise that the server draws: the mean of what was sent would hold
    it and no c_i, so that c would keep all of it for good, a random walk away from their mean.

    All vectors are [d], or [C, d] for C clients, numpy or torch alike, and no method rounds them:
    give float64, keep c in float64, and round c_i to float32 where memory counts. lr is
    `learning_rate` of the round that was trained.
    """

    stateful: ClassVar[bool] = True
    kind: str = "scaffold"

    @field_validator("momentum", "proximal")
    @classmethod
    def _gradients_alone(cls, value: float) -> float:
        if value != 0:
            raise ValueError("0 with scaffold, whose control variates are means of gradients")
        return value

    def correction(self, shared: A, own: A) -> A:
        """c - c_i, which a client adds to every gradient of a round."""
        return shared - own

    def next_own(self, own: A, shared: A, sent: A, lr: float) -> A:
        """c_i+ of a client that trained with `correction(shared, own)` and sent `sent`."""
        return own - shared - sent / (self.steps * lr)

    def unmoved(self, shared: A, lr: float) -> A:
        """The update of a client that has no gradients (it failed, or has no data): the one after
        which `next_own` is its c_i as it was.
        """
        return -shared * (self.steps * lr)

    def next_shared(self, shared: A, mean: A, lr: float, share: float) -> A:
        """c+ from the mean of what the cohort sent, each client with the same weight; `share` is
        r/N.
        """
        return shared - share * (shared + mean / (self.steps * lr))
