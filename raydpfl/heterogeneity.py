"""How different the clients' objectives are: Gamma_s and Gamma_n of 002 (Definitions 3 and 4), f_i(w*) - f_i* of 001.

f_i is the mean loss over client i's rows, with the L2 term that local training has, f = sum_i p_i f_i with p_i = n_i / sum n, w* its minimiser and
f* its minimum, f_i* that of f_i. Then

    Gamma_s = f* - sum_i p_i f_i* = sum_i p_i (f_i(w*) - f_i*),         Gamma_n(w)^2 = sum_i p_i ||grad f_i(w) - grad f(w)||^2.

Gamma_s needs the minima, so it is given where they can be found: for models of one linear layer, whose loss is convex. They are found by
L-BFGS in float64. Without an L2 term a client whose classes can be separated has no minimiser; f_i* is then near 0, its infimum.

None of this is noised: it is for those who may see all data.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from raydpfl.data import Shards
from raydpfl.local.stack import NoStack, stack
from raydpfl.local.way import sample_loss

ROWS = 1 << 14  # of the data that are in memory at once
PRECISION = 1e-7  # of a gradient's largest coordinate, at a minimum


def of_clients(module: nn.Module, shards: Shards, model: np.ndarray, weight_decay: float = 0.0) -> dict:
    """`gamma_n` at `model` (flat [d]), and for convex models `gamma_s`, `optimum` (f*) and `gap`: of f_i(w*) - f_i* over the clients, its
    mean, median and largest value. `clients` has a row for each client with data: ||grad f_i - grad f|| at `model` as `gradient_gap`, and
    for convex models f_i* as `optimum` and f_i(w*) - f_i* as `gap`."""
    objective = _Objective(module, shards, weight_decay)
    shares = np.asarray(shards.sizes) / np.sum(shards.sizes)
    everyone = np.flatnonzero(shares)
    _, mean = objective.mixture(model, everyone, shares)
    apart = np.array([float(np.linalg.norm(objective.client(model, i)[1] - mean)) for i in everyone])
    rows = [{"client": int(i), "gradient_gap": gap} for i, gap in zip(everyone, apart.tolist(), strict=True)]
    found: dict = {"gamma_n": float(np.sqrt(shares[everyone] @ apart**2)), "gamma_s": None, "optimum": None, "gap": None, "clients": rows}
    try:
        layers = stack(module)
    except NoStack:
        return found
    if len(layers) > 1 or layers[0].activation:
        return found
    best = _minimum(lambda w: objective.mixture(w, everyone, shares), model)
    least = np.array([_minimum(lambda w, i=i: objective.client(w, i), best.x).fun for i in everyone])
    gaps = np.array([objective.client(best.x, i)[0] for i in everyone]) - least
    for row, optimum, gap in zip(rows, least.tolist(), gaps.tolist(), strict=True):
        row |= {"optimum": optimum, "gap": gap}
    gap = {"mean": float(gaps.mean()), "median": float(np.median(gaps)), "max": float(gaps.max())}
    return found | {"gamma_s": float(shares[everyone] @ gaps), "optimum": float(best.fun), "gap": gap}


def _minimum(function, start: np.ndarray):
    from scipy.optimize import minimize  # here, for every coordinator imports this module

    return minimize(function, start, jac=True, method="L-BFGS-B", options={"maxiter": 10_000, "maxfun": 20_000, "gtol": PRECISION, "ftol": 0.0, "maxcor": 30})


class _Objective:
    """Values and gradients (float64 [d]) of f_i and of their mixtures."""

    def __init__(self, module: nn.Module, shards: Shards, weight_decay: float):
        self.module, self.shards, self.decay = copy.deepcopy(module).double().eval(), shards, weight_decay
        self.parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self._held: tuple = (None, None)  # the rows that were read last, as a search asks for the same ones many times

    def _rows(self, clients: np.ndarray, shares) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(x float64 [n, ...], y [n], the rows' weights float64 [n]) of these clients together."""
        asked = (clients.tobytes(), shares[clients[0]])
        if self._held[0] != asked:
            rows = [self.shards.lane([i], int(self.shards.sizes[i])) for i in clients]
            x, y = (torch.from_numpy(np.concatenate([each[k][0] for each in rows])) for k in (0, 1))
            weights = torch.from_numpy(np.concatenate([np.full(each[2][0], shares[i] / each[2][0]) for i, each in zip(clients, rows, strict=True)]))
            self._held = asked, (x.double(), y.double() if y.is_floating_point() else y, weights)
        return self._held[1]

    def client(self, w: np.ndarray, client: int) -> tuple[float, np.ndarray]:
        return self.mixture(w, [client], {client: 1.0})

    def mixture(self, w: np.ndarray, clients: Sequence[int], shares) -> tuple[float, np.ndarray]:
        w = np.asarray(w, np.float64)
        with torch.no_grad():
            parts = torch.from_numpy(w).split([parameter.numel() for parameter in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        value, gradient = 0.5 * self.decay * float(w @ w), self.decay * w
        held = np.cumsum([int(self.shards.sizes[i]) for i in clients])
        for together in np.split(np.asarray(clients), np.flatnonzero(np.diff(held // ROWS)) + 1):
            x, y, weights = self._rows(together, shares)
            loss = sample_loss(self.module(x), y, "none") @ weights
            gradients = torch.autograd.grad(loss, self.parameters)
            value += float(loss.detach())
            gradient = gradient + torch.cat([each.flatten() for each in gradients]).numpy()
        return value, gradient
