"""Noise on local steps, drawn in the span of a client's rows.

Every step t adds z_t ~ N(0, s^2 I) to its gradient. The first layer's part of it, a row for each
output, is drawn so by backend `compiled` (`raydpfl/core/native/step_noise.c`). Steps touch these
weights through the outputs on the client's own rows X [n, p] alone (with a column of ones for the
bias), and an observer of the update sees only B = sum_t c_t z_t, where the learning rate, momentum,
decay and the proximal term give the numbers c_t (`responses`). So B
~ N(0, s^2 sum_t c_t^2 I) is drawn first, as the noise in the update: one draw in the place of Q. Of
each z_t the steps need X z_t only. Given the rest R_t = c_t z_t + c_(t+1) z_(t+1) + ... of B, z_t
is normal with mean c_t / l_t^2 R_t and variance s^2 l_(t+1)^2 / l_t^2, where l_t is the L2 norm of
c_t, c_(t+1),
...; so that, with K = X X^T = L L^T,

    X z_t = c_t / l_t^2 X R_t + l_(t+1) / l_t L a_t,    a_t [n, out] ~ N(0, s^2 I),
    X R_(t+1) = X R_t - c_t X z_t,    R_0 = B.

The last step, of which nothing is left to draw, needs no a_t: n (Q - 1) + p normals an output take
the place of p Q. As no a_t depends on what is computed, those of many steps are drawn together, and
multiplied by L together.

What this means for privacy. The steps' noises, the outputs on the client's rows at every step and
the update have together the very distribution that they have where z_t is drawn in full. Whatever
is computed from them (the update, its norm, the loss, the share of clipped gradients) has the
distribution that it had, and the composition over the steps, in which an observer is granted every
step's noisy gradient, is proven for that distribution. That K, and by it the form of the drawing,
depends on the client's data reveals nothing, as no distribution depends on it. A rule whose
update is not linear in the gradients with fixed numbers (Adam, SAM, a schedule within a
round) is for the backends that form z_t; and so is a method that would look at the weights between
the steps. A client with corrections that are added to every gradient (SCAFFOLD) trains by its
weights and draws z_t in full. What a client keeps of its
update it may keep here.

Exactness. B has its distribution whatever the rows are. K is summed in double from exact products,
so that L has the distribution's covariance to 1e-14 over the smallest squared share of a row that
lies outside of the span of those before it. A row equal to an earlier one is in its span
altogether, and has its noise. Where for any other row this squared share is below 1e-6, the client
trains by its weights and draws z_t in full, as it does where that takes less time. What is left to
rounding, 1e-8 of the variance, is below that of the std in float32. X R_t is in float32: its
rounding errors fall with l_t^2 as the steps go on, and the rest itself with l_t.

>>> span_noise_pays(n=20, p=784, outputs=10, bias=True, steps=20, batch=10)
True
>>> span_noise_pays(n=600, p=784, outputs=10, bias=True, steps=50, batch=10)
False
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from raydpfl.methods.local.base import LinearRule
from raydpfl.models.linear_stack import Layer
from raydpfl.training.backends.base import StepNoise

NORMAL = 50  # products that take as long as a normal
EXACT = 3  # and as one of two floats in double
MEMORY = 8  # and as reading and writing a weight
MAX_NORMALS = 1 << 13  # normals of steps that are drawn together
MIN_SHARE = 1e-6  # squared share of a row outside of the span of the others


def span_noise_pays(n: int, p: int, outputs: int, bias: bool, steps: int, batch: int) -> bool:
    """Whether steps in the span of the n rows are faster than by the weights; `span_pays` in C."""
    numbers = outputs * (p + bias)
    products = n * n * (p + bias) // 2
    weights = steps * numbers * (2 * batch + MEMORY + NORMAL)
    span = 2 * n * numbers + steps * n * batch * outputs + EXACT * products
    return span + (steps * n * outputs + numbers) * (NORMAL + n) < weights


def responses(linear: LinearRule, lr: float, steps: int) -> tuple[list[float], list[float]]:
    """([gamma_0, ..., gamma_Q], [c_0, ..., c_{Q-1}]) for gradients g_t of the steps t, such that

    W_Q = gamma_Q W_0 + sum_t c_t g_t.

    Who makes q of the steps has gamma_q, and the last q of the c_t.
    """

    def run(start: float, w: float, v: float, steps: int) -> list[float]:
        """A number w for the weights' part along W_0, `start` at first, or along a gradient."""
        weights = [w]
        for _ in range(steps):
            v = linear.momentum * v + linear.decay * w + linear.proximal * (w - start)
            w -= lr * v
            weights.append(w)
        return weights

    def single(number: float) -> float:
        """Infinite where float32 would be, so that a client that diverged shows it."""
        return number if abs(number) < 3e38 else math.inf

    if linear.plain:
        return [1.0] * (steps + 1), [single(-lr)] * steps
    gammas = run(1.0, 1.0, 0.0, steps)
    responses = run(0.0, -lr, 1.0, steps - 1)[::-1]
    return [single(gamma) for gamma in gammas], [single(c) for c in responses]


def lengths(responses: Sequence[float] | np.ndarray) -> np.ndarray:
    """The L2 norms of c_t and all after it, float64 [Q + 1], of c_t `responses`, [Q]."""
    squares = np.square(np.asarray(responses, np.float64))[::-1]
    return np.sqrt(np.append(0.0, np.cumsum(squares)))[::-1].copy()


def triangle(x: np.ndarray) -> np.ndarray | None:
    """L of K = X X^T, float64 [n, n], for rows `x`, float64 [n, p]; its columns are 0 for rows that
    equal an earlier one. None where another row is nearly in the span of those before it.
    """
    gram = x @ x.T
    lower = np.zeros_like(gram)
    for r in range(len(x)):
        for s in range(r):
            top = lower[s, s]
            lower[r, s] = (gram[r, s] - lower[r, :s] @ lower[s, :s]) / top if top else 0.0
        pivot = gram[r, r] - lower[r, :r] @ lower[r, :r]
        if not pivot >= MIN_SHARE * gram[r, r]:
            if not (x[:r] == x[r]).all(1).any():
                return None
            pivot = 0.0
        lower[r, r] = math.sqrt(pivot)
    return lower


def step_noises(
    noise: StepNoise, layers: Sequence[Layer], x: np.ndarray, batch: int, responses: Sequence[float]
) -> np.ndarray:
    """Noises of all steps that would lead the plain loop to the update of backend `compiled`, of
    which this is the plain reference.

    They are those that it draws where the rows reach, and elsewhere every z_t is the part c_t B /
    l_0^2 of B.

    Args:
        noise: of one client.
        layers: the model's.
        x: float32 [n, p], the rows that the client's batches take.
        batch: rows of a batch.
        responses: c_t of its steps, [Q].

    Returns:
        float64 [Q, d].
    """
    first_layer = layers[0]
    steps, n = len(responses), len(x)
    ones = np.ones((n, int(first_layer.bias is not None)))  # for the bias
    rows = np.concatenate([x.astype(np.float64), ones], 1)
    shape = (n, first_layer.inputs, first_layer.outputs, first_layer.bias is not None)
    lower = triangle(rows) if span_noise_pays(*shape, steps, batch) else None
    if lower is None:
        return np.stack([noise.client_step_noise(k, noise.d) for k in range(steps)])
    live_rows = np.flatnonzero(lower.diagonal())
    basis = np.linalg.solve(lower[np.ix_(live_rows, live_rows)], rows[live_rows])
    norms = lengths(responses)
    numbers = first_layer.outputs * rows.shape[1]
    scaled_normals = norms[0] * noise.client_step_noise(steps, numbers)
    weights, biases = np.split(scaled_normals, [first_layer.outputs * first_layer.inputs])
    columns = weights.reshape(first_layer.outputs, -1).T, biases.reshape(-1, first_layer.outputs)
    update_noise = np.concatenate(columns)  # B, [p (+ 1), out]
    span_rest = basis @ update_noise
    orthogonal_noise = update_noise - basis.T @ span_rest
    noises = np.empty((steps, noise.d))
    step_normals = _step_normals(noise, steps, n, first_layer.outputs, noise.d - numbers)
    for k, (c, (a, later_normals)) in enumerate(zip(responses, step_normals, strict=True)):
        span_part = c / norms[k] ** 2 * span_rest + norms[k + 1] / norms[k] * a[live_rows]
        span_rest = span_rest - c * span_part
        values = basis.T @ span_part + c / norms[0] ** 2 * orthogonal_noise
        weight, *bias = (view.numpy() for view in first_layer.views(torch.from_numpy(noises[k])))
        weight[:] = values[: first_layer.inputs].T
        for part in bias:
            part[:] = values[first_layer.inputs :]
        for layer in layers[1:]:
            for view in layer.views(torch.from_numpy(noises[k])):
                view.copy_(torch.from_numpy(later_normals[: view.numel()]).view_as(view))
                later_normals = later_normals[view.numel() :]
    return noises


def _step_normals(
    noise: StepNoise, steps: int, n: int, outputs: int, later_count: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Of every step a_t [n, outputs], 0 for the last, and the `later_count` numbers of the later
    layers. Steps whose numbers are no more than `MAX_NORMALS` are drawn together.
    """
    max_steps = max(1, MAX_NORMALS // (n * outputs + later_count))
    for start in range(0, steps, max_steps):
        count = min(max_steps, steps - start)
        runs = min(count, steps - 1 - start)
        normals = noise.client_step_noise(start, runs * n * outputs + count * later_count)
        span_normals, later_normals = np.split(normals, [runs * n * outputs])
        span_normals = span_normals.reshape(n, runs, outputs)
        for k in range(count):
            a = span_normals[:, k] if k < runs else np.zeros((n, outputs))
            yield a, later_normals.reshape(count, later_count)[k]
