"""How different the clients' objectives are: Gamma_s and Gamma_n of 002 (Definitions 3 and 4),
f_i(w*) - f_i* of 001.

With f = sum_i p_i f_i, p_i = n_i / sum n, w* its minimiser and f* its minimum, f_i* that of f_i,

    Gamma_s = f* - sum_i p_i f_i* = sum_i p_i (f_i(w*) - f_i*),
    Gamma_n(w)^2 = sum_i p_i ||grad f_i(w) - grad f(w)||^2.

Gamma_s needs the minima (`raydpfl.methods.probes.client_optima`).
"""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from raydpfl.data import Shards
from raydpfl.methods.probes.base import Finished, Measurement, Probe
from raydpfl.methods.probes.client_optima import Shares, groups, linear, rows_of
from raydpfl.models.tasks import Task
from raydpfl.storage.tables import schema, write_table


class HeterogeneityProbe(Probe):
    """Gamma_s and Gamma_n (002 Definitions 3 and 4) and f_i(w*) - f_i* (001) at the final model;
    each client's part is in heterogeneity.parquet. Without an L2 term clients may have no minimum:
    `left_out` in the summary counts them. It may take longer than the run.
    """

    needs_common_model = True
    kind: str = "heterogeneity"

    def afterwards(self, run: Finished) -> Measurement:
        problem = run.problem
        parts = problem.module, problem.task, problem.shards
        values = yield from measure_clients(*parts, run.model, problem.local.l2)
        rows = values.pop("clients")
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(run.out / "heterogeneity.parquet", table)
        return values


def measure_clients(
    module: nn.Module, task: Task, shards: Shards, model: np.ndarray, weight_decay: float = 0.0
) -> Measurement:
    """Yields steps done and steps in all, and returns what is measured of the clients at `model`,
    float32 [d].

    `gamma_n`, and for convex models `gamma_s`, `optimum` (f*), `gap`: the mean, median and max of
    f_i(w*) - f_i* over the clients, and `left_out`: how many have no minimum. Gamma_s is the mean
    of the others' gaps by their shares, or None. `clients` has a row for each client with data:
    `gradient_gap`, ||grad f_i - grad f|| at `model`, and for convex models `optimum`, f_i*, and
    `gap`, f_i(w*) - f_i*, both None without a minimum.
    """
    gradient_of = _gradients(module, task, shards, model, weight_decay)
    losses = linear(module, task, shards, weight_decay)
    sizes = np.asarray(shards.sizes)
    clients = np.flatnonzero(sizes)
    shares = sizes / sizes.sum()
    total_steps = len(clients) * (2 if losses else 1) + 1
    yield 0, total_steps
    mean = gradient_of(clients, shares)
    if losses:
        best, theta = losses.joint_minimum(clients, shares, model)
    yield 1, total_steps
    rows: list[dict[str, Any]] = []
    for step, client in enumerate(clients.tolist(), 2):
        deviation = gradient_of(np.array([client]), {client: 1.0}) - mean
        rows.append({"client": client, "gradient_gap": float(np.linalg.norm(deviation))})
        yield step, total_steps
    norms = np.array([row["gradient_gap"] for row in rows])
    values: dict[str, Any] = {"gamma_n": float(np.sqrt(shares[clients] @ norms**2))}
    values |= dict.fromkeys(("gamma_s", "optimum", "gap", "left_out")) | {"clients": rows}
    if not losses:
        return values
    for step, row in enumerate(rows, len(rows) + 2):
        optimum, value = losses.client_minimum(row["client"], theta)
        row |= {"optimum": optimum, "gap": None if optimum is None else value - optimum}
        yield step, total_steps
    has_optimum = np.array([row["gap"] is not None for row in rows])
    gaps = np.array([row["gap"] for row in rows])[has_optimum].astype(np.float64)
    values |= {"optimum": best, "left_out": int((~has_optimum).sum())}
    if len(gaps):
        parts = shares[clients][has_optimum]
        values["gamma_s"] = float(parts @ gaps / parts.sum())
        quantiles = {"median": float(np.median(gaps)), "max": float(gaps.max())}
        values["gap"] = {"mean": float(gaps.mean()), **quantiles}
    return values


def _gradients(
    module: nn.Module, task: Task, shards: Shards, model: np.ndarray, weight_decay: float
) -> Callable[[np.ndarray, Shares], np.ndarray]:
    """The gradient at `model`, float64 [d], of the objectives of clients by their shares, of any
    module.
    """
    module = copy.deepcopy(module).double().eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    w = np.asarray(model, np.float64)
    nn.utils.vector_to_parameters(torch.from_numpy(w.copy()), parameters)

    def mixture(clients: np.ndarray, shares: Shares) -> np.ndarray:
        gradient = weight_decay * w
        for group in groups(shards, clients):
            x, y, weights = map(torch.from_numpy, rows_of(shards, group, shares))
            y = y.double() if y.is_floating_point() else y
            parts = torch.autograd.grad(task.loss(module(x), y) @ weights, parameters)
            gradient = gradient + nn.utils.parameters_to_vector(parts).numpy()
        return gradient

    return mixture
