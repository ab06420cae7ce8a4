"""Local training as a section of the config: how many steps, on which batches, with which learning
rate.

>>> Sgd(lr=0.1, lr_decay=0.5).learning_rate(2)
0.025
>>> Sgd(lr=0.1, schedule="inverse_sqrt").learning_rate(3)
0.05
>>> Sgd(batch="full", steps=2).batch_size(31), Sgd(batch=20).batch_size(31)
(31, 20)
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, field_validator

from raydpfl.member import Member

A = TypeVar("A", np.ndarray, torch.Tensor)


class Local(Member):
    """Base of the family: Q steps, each on a batch of the client's own rows. A member says what a
    step does with the batch's gradient.

    A user's own member derives from `Sgd`, and may give a `learning_rate` of its own.
    """

    needs: ClassVar[dict[str, tuple[str, ...]]] = {
        "stateful": ("correction", "next_own", "unmoved", "next_shared")
    }
    # whether a client keeps something between rounds, and its gradients need a correction for it
    stateful: ClassVar[bool] = False

    steps: int = Field(default=20, ge=1)  # Q
    # B; a client with fewer rows uses all of them, as `full` always does
    batch: Annotated[int, Field(ge=1)] | Literal["full"] = 10
    # each step its own uniform subset; or shuffled rows in turn, each once an epoch
    sampling: Literal["fresh", "epochs"] = "fresh"
    lr: float = Field(default=0.1, gt=0)  # eta_l of round 0
    # lr lr_decay^t (001 sec. 6); lr / sqrt(t + 1) (002 sec. VI)
    schedule: Literal["exponential", "inverse_sqrt"] = "exponential"
    lr_decay: float = Field(default=1.0, gt=0, le=1)

    @field_validator("lr_decay")
    @classmethod
    def _exponential_alone(cls, value: float, info: Any) -> float:
        if value != 1 and info.data.get("schedule") == "inverse_sqrt":
            raise ValueError("1 with the schedule inverse_sqrt, which decays by itself")
        return value

    def learning_rate(self, t: int) -> float:
        """The learning rate of all local steps of a round, counted from 0."""
        return (
            self.lr / math.sqrt(t + 1)
            if self.schedule == "inverse_sqrt"
            else self.lr * self.lr_decay**t
        )

    def batch_size(self, rows: int) -> int:
        """Rows in each batch of a client that has `rows`."""
        return rows if self.batch == "full" else min(self.batch, rows)

    def rows_used(self, sizes: np.ndarray) -> np.ndarray:
        """How many of its rows, `sizes` int64 [C], each client can train on in a round at most,
        int64 [C].
        """
        return sizes if self.batch == "full" else np.minimum(sizes, self.steps * self.batch)


class Sgd(Local):
    """v <- momentum v + g + weight_decay x + proximal (x - x_t);  x <- x - lr v, with v = 0 and x =
    x_t, the model, at a round's start.

    g is the gradient of the mean loss of the batch (cross-entropy; half the squared error in
    regression); every parameter decays, biases too, all as `torch.optim.SGD` does it (000 Alg. 1-3,
    001 Alg. 1-3: Q local steps; the L2 terms of SPEC sec. 4 are `weight_decay`). `proximal` is the
    mu of FedProx (Li et al. 2020, Alg. 2), where a client minimises its loss + mu/2 ||x - x_t||^2.
    """

    kind: str = "sgd"
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    proximal: float = Field(default=0.0, ge=0)


class Scaffold(Sgd):
    """SGD whose gradients are corrected by control variates (SCAFFOLD; Karimireddy et al. 2020,
    Alg. 1, option II).

    Each client i keeps c_i and the server c, all 0 in the first round. A client of the cohort
    trains with c - c_i added to its gradients; then, from what it sent, its update after bounding
    and noise,

        c_i+ = c_i - c - sent_i / (Q lr)                                         (the mean of its
        gradients, where nothing was bounded) c+   = c - share (c + mean(sent) / (Q lr)) = c + share
        mean(c_i+ - c_i)  (the means over the cohort, whose share of the clients is r/N)

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
        """c_i+ of a client that trained with `correction(shared, own)` and sent the update `sent`."""
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


FAMILY: dict[str, type[Local]] = {"sgd": Sgd, "scaffold": Scaffold}
