"""The minima of the clients' objectives, and of their mixtures, for models of one linear layer,
whose loss is convex.

f_i is the mean loss over client i's rows, with the L2 term that local training has. Minima are
computed by L-BFGS in float64, in coordinates in which the rows are white, and within their span, as
what lies outside of it is 0 at a minimum or does not matter.

**Without a minimum.** Without an L2 term the cross-entropy has a minimum only where no direction of
theta makes some row's margin over another class larger and none smaller (Albert and Anderson 1984).
A client whose classes can be separated, or that lacks a class where there is a bias, has none: it
is left out of Gamma_s and of the gaps, and counted. Where the search ends decides: if its theta
puts every row into its class there is no minimum; if positive probabilities of all classes in all
rows make the gradient 0, by a change of those at theta, there is one. Otherwise (some probability
at the minimum is tiny) a linear program decides, and if that is too large the client is left out.
For all rows together w* is then where the search ends: f* is its infimum up to `PRECISION`, and
f_i(w*) the limit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from raydpfl.data import Shards
from raydpfl.models.linear_stack import Layer, NoStack, stack
from raydpfl.models.tasks import Task

Shares = np.ndarray | Mapping[int, float]  # client -> the weight of its objective
ROWS = 1 << 14  # of the data that are in memory at once
PRECISION = 1e-7  # of a gradient's largest coordinate that is a minimum anyhow
STEPS = 2000  # of a search at most
PROGRAM = 1_000_000  # numbers of a linear program at most
GAP = 1e-10  # of a value to the minimum that is enough, where the L2 term bounds it by the gradient
WIDTH = 4096  # of a matrix that is decomposed, at most
# of the loss by the outputs, about; what makes the rows white is up to this constant
CURVATURE = 0.1


class LinearLosses:
    """Objectives and their minima for one linear layer, whose parameters are a matrix theta float64
    [outputs, inputs + 1 for a bias].
    """

    def __init__(self, layer: Layer, shards: Shards, weight_decay: float):
        self.layer = layer
        self.shards = shards
        self.decay = weight_decay
        self.width = layer.inputs + (layer.bias is not None)
        # the rows that were read last, as a search asks for the same ones many times
        self._row_cache: tuple = (None, None)

    def joint_minimum(
        self, clients: np.ndarray, shares: np.ndarray, model: np.ndarray
    ) -> tuple[float, np.ndarray]:
        """f* and its minimiser, for f the mixture of these clients' objectives by their shares; the
        search starts from `model`.
        """
        value = self.mixture(clients, shares)
        if self.decay or self.width > WIDTH:
            return _minimum(value, self.matrix(model), np.ones(self.width), self.decay)
        gram = np.zeros((self.width, self.width))
        for x, _, weights in self.parts(clients, shares):
            gram += (x * weights[:, None]).T @ x
        basis, scale = self._white(*np.linalg.eigh(gram))

        def objective(c: np.ndarray) -> tuple[float, np.ndarray]:
            total, gradient = value((c / scale) @ basis.T)
            return total, gradient @ basis / scale

        start = (self.matrix(model) @ basis) * scale
        best, c = _minimum(objective, start, scale, self.decay)
        return best, (c / scale) @ basis.T

    def mixture(
        self, clients: np.ndarray, shares: Shares
    ) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
        """f and its gradient, as functions of theta, for f the mixture of these clients' objectives
        by their shares.
        """

        def value(theta: np.ndarray) -> tuple[float, np.ndarray]:
            total = 0.5 * self.decay * float(np.sum(theta * theta))
            gradient = self.decay * theta
            for x, y, weights in self.parts(clients, shares):
                loss, by_output = _loss(x @ theta.T, y, weights)
                total += loss
                gradient = gradient + by_output.T @ x
            return total, gradient

        return value

    def parts(
        self, clients: np.ndarray, shares: Shares
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """These clients' rows, some at once: x float64 [n, width], y [n], and the weights of the
        rows in the mixture, float64 [n].
        """
        for group in groups(self.shards, clients):
            key = (group.tobytes(), shares[group[0]])
            if self._row_cache[0] != key:
                x, y, weights = rows_of(self.shards, group, shares)
                x = x.reshape(len(x), -1)
                ones = np.ones((len(x), self.width - x.shape[1]))
                self._row_cache = key, (np.concatenate([x, ones], axis=1), y, weights)
            yield self._row_cache[1]

    def client_minimum(self, client: int, theta: np.ndarray) -> tuple[float | None, float]:
        """f_i* of a client, None where it has no minimum, and f_i(theta)."""
        ((x, y, weights),) = self.parts(np.array([client]), {client: 1.0})
        value = _loss(x @ theta.T, y, weights)[0] + 0.5 * self.decay * float(np.sum(theta * theta))
        basis, scale = self._directions(x, weights)
        has_minimum = self.decay > 0 or y.dtype.kind == "f"
        lacks_class = self.layer.bias is not None and len(np.unique(y)) < self.layer.outputs
        # rows that are independent can all have any outputs; a bias separates a class without rows
        if not has_minimum and (len(scale) == len(x) or lacks_class):
            return None, value
        white = (x @ basis) / scale

        def objective(c: np.ndarray) -> tuple[float, np.ndarray]:
            loss, by_output = _loss(white @ c.T, y, weights)
            total = loss + 0.5 * self.decay * float(np.sum((c / scale) ** 2))
            return total, by_output.T @ white + self.decay * c / scale**2

        optimum, c = _minimum(objective, (theta @ basis) * scale, scale, self.decay)
        has_minimum = has_minimum or _has_minimum(white, y, weights, white @ c.T)
        return (optimum if has_minimum else None), value

    def _directions(self, x: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """As `_white`, of rows x float64 [n, width] with these weights."""
        if len(x) > self.width:
            return self._white(*np.linalg.eigh((x * weights[:, None]).T @ x))
        _, singular, vectors = np.linalg.svd(x * np.sqrt(weights)[:, None], full_matrices=False)
        return self._white(singular**2, vectors.T)

    def _white(self, squares: np.ndarray, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The directions [width, k] in which rows lie, and the factors [k] that make the objective
        about as curved in all of them.
        """
        span_mask = squares > 1e-14 * squares.max(initial=0.0)
        return vectors[:, span_mask], np.sqrt(CURVATURE * squares[span_mask] + self.decay)

    def matrix(self, flat: np.ndarray) -> np.ndarray:
        """theta of a model's parameters, float [d]."""
        views = self.layer.views(torch.from_numpy(np.asarray(flat, np.float64)))
        return np.concatenate([views[0].numpy(), *(bias.numpy().T for bias in views[1:])], axis=1)

    def flat(self, theta: np.ndarray) -> np.ndarray:
        """The parameters of a model, float64 [d], of which this is theta."""
        vector = torch.empty(theta.size, dtype=torch.float64)
        views = self.layer.views(vector)
        views[0].copy_(torch.from_numpy(theta[:, : self.layer.inputs]))
        for bias in views[1:]:
            bias.copy_(torch.from_numpy(theta[:, self.layer.inputs :].T))
        return vector.numpy()


def linear(
    module: nn.Module, task: Task, shards: Shards, weight_decay: float
) -> LinearLosses | None:
    """The clients' objectives under a model of one linear layer, where the loss is cross-entropy or
    the squared error of one output; None for any other.
    """
    if task.loss_form() is None or shards.target.shape:
        return None
    try:
        layers = stack(module)
    except NoStack:
        return None
    single = len(layers) == 1 and not layers[0].activation
    return LinearLosses(layers[0], shards, weight_decay) if single else None


def groups(shards: Shards, clients: np.ndarray) -> list[np.ndarray]:
    """The clients in groups of about `ROWS` rows."""
    rows = np.cumsum([int(shards.sizes[i]) for i in clients])
    return np.split(clients, np.flatnonzero(np.diff(rows // ROWS)) + 1)


def rows_of(
    shards: Shards, clients: Sequence[int] | np.ndarray, shares: Shares
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x float64 [n, *shape], y [n], the rows' weights float64 [n]) of these clients together."""
    rows = [shards.chunk([i], int(shards.sizes[i])) for i in clients]
    x, y = (np.concatenate([row[k][0] for row in rows]) for k in (0, 1))
    weights = [
        np.full(chunk[2][0], shares[i] / chunk[2][0])
        for i, chunk in zip(clients, rows, strict=True)
    ]
    x = x if x.dtype.kind == "i" else x.astype(np.float64)
    return x, y, np.concatenate(weights)


def _loss(outputs: np.ndarray, y: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
    """The weighted sum of the losses over the rows of `outputs` float64 [n, outputs], and its
    gradient by them.
    """
    if y.dtype.kind == "f":
        residuals = outputs[:, 0] - y
        return 0.5 * float(weights @ residuals**2), (weights * residuals)[:, None]
    shifted_outputs = outputs - outputs.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted_outputs)
    sums = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    value = float(weights @ (np.log(sums[:, 0]) - shifted_outputs[rows, y]))
    gradient = exponentials / sums
    gradient[rows, y] -= 1
    return value, gradient * weights[:, None]


def _has_minimum(x: np.ndarray, y: np.ndarray, weights: np.ndarray, outputs: np.ndarray) -> bool:
    """Whether the cross-entropy at white rows x, float64 [n, k], has a minimum, of the `outputs`
    [n, classes] where the search ended. By a linear program, no theta in [-1, 1] has margins that
    are 0 or above, and not all 0; False where it is too large.
    """
    from scipy.optimize import linprog

    by_output = _loss(outputs, y, weights)[1]
    other_mask = np.arange(outputs.shape[1]) != y[:, None]
    # with this change of the probabilities the gradient is 0
    change = CURVATURE * x @ (x.T @ by_output)
    if (by_output / weights[:, None] - change)[other_mask].min() > 0:
        return True
    is_separated = (outputs[np.arange(len(y)), y][:, None] - outputs)[other_mask].min() > 0
    if is_separated or outputs.size * outputs.shape[1] * x.shape[1] > PROGRAM:
        return False
    rows, places = np.nonzero(other_mask)
    margins = np.zeros((len(rows), outputs.shape[1], x.shape[1]))
    margins[np.arange(len(rows)), y[rows]] = x[rows]
    margins[np.arange(len(rows)), places] = -x[rows]
    flat = margins.reshape(len(rows), -1)
    result = linprog(-flat.sum(0), A_ub=-flat, b_ub=np.zeros(len(flat)), bounds=(-1, 1))
    return result.status == 0 and -float(result.fun) < PRECISION * np.abs(flat).sum()


def is_minimum(gradient: np.ndarray, decay: float) -> bool:
    """Whether a value with this gradient is a minimum, or as good as one: with an L2 term of
    `decay` it is at most ||gradient||^2 / (2 decay) above it.
    """
    near = np.sum(gradient**2) <= 2 * decay * GAP
    return bool(near or np.abs(gradient).max() <= PRECISION)


def _minimum(
    function: Callable, start: np.ndarray, scale: np.ndarray, decay: float
) -> tuple[float, np.ndarray]:
    """The least value of `function` of [outputs, k], and where it is. `scale` [k] takes its
    gradient back to that by theta.
    """
    from scipy.optimize import minimize  # here, for every coordinator imports this module

    last = start

    def flat(c: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal last
        value, last = function(c.reshape(start.shape))
        return value, last.ravel()

    def stop(intermediate_result) -> None:  # scipy goes by the name
        if is_minimum(last * scale, decay):
            raise StopIteration

    options = {"maxiter": STEPS, "maxfun": 2 * STEPS, "gtol": 0.0, "ftol": 0.0, "maxcor": 30}
    result = minimize(
        flat, start.ravel(), jac=True, method="L-BFGS-B", options=options, callback=stop
    )
    return float(result.fun), result.x.reshape(start.shape)
