"""The contract of the server's step: see `raydpfl.methods.server`."""

import pickle
from copy import deepcopy

import numpy as np

from raydpfl.check.contract import check_shapes, equal, hold, normals
from raydpfl.check.example import Example

D = 50
SIZES = (0.0, 1e-300, 1e-12, 1.0, 1e6)  # of updates; a model is float32


def finite(case: Example) -> str:
    """The next model is finite for every finite update, float32 [d]."""
    for size in SIZES:
        state = case.member.start(D)
        model = normals(D)
        for t in range(3):
            next_model = case.member.step(model, normals(D, step=t + 1) * size, state, t)
            hold(next_model.shape == (D,), f"it has shape {list(next_model.shape)}")
            hold(next_model.dtype == np.float32, f"it is {next_model.dtype}, not float32")
            hold(np.isfinite(next_model).all(), f"updates of size {size:g} make it infinite")
            model = next_model.astype(np.float64)
    return "updates of sizes 0 to 1e6"


def state(case: Example) -> str:
    """Its state keeps its names, shapes and dtypes, float64."""
    start = case.member.start(D)
    for name, array in start.items():
        hold(isinstance(array, np.ndarray), f"{name} is no array")
        hold(array.dtype == np.float64, f"{name} is {array.dtype}, not float64")
    current_state = deepcopy(start)
    for t in range(4):
        case.member.step(normals(D), normals(D, step=t + 1), current_state, t)
        check_shapes(start, current_state)
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in start.items()) or "none"


def no_hidden_state(case: Example) -> str:
    """A step is a function of model, update, state and round alone."""
    member = case.member
    model = normals(D)
    initial_state = member.start(D)
    member.step(model, normals(D, step=9), initial_state, 0)
    results = []
    for copy in (member, member, pickle.loads(pickle.dumps(member))):
        next_state = deepcopy(initial_state)
        update = normals(D, step=1)
        x = model.copy()
        next_model = copy.step(x, update, next_state, 3)
        hold(np.array_equal(update, normals(D, step=1)), "the update is changed in place")
        hold(np.array_equal(x, model), "the model is changed in place")
        results.append((next_model, next_state))
        copy.step(-model, normals(D, step=5) * 7, deepcopy(initial_state), 4)
    for next_model, next_state in results[1:]:
        hold(np.array_equal(next_model, results[0][0]), "asked twice, it gives another model")
        hold(equal(next_state, results[0][1]), "asked twice, it leaves another state")
    return "the same step twice"


def persistence(case: Example) -> str:
    """What it says of momentum is a number from 0 to below 1."""
    persistence = case.member.persistence()
    hold(0 <= persistence < 1, f"it says {persistence}")
    return f"{persistence:g}"
