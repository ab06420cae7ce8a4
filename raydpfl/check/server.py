"""The contract of the server's step: see `raydpfl.methods.server`."""

import pickle

import numpy as np

from raydpfl.check.contract import copied, equal, hold, made_up, same_shapes
from raydpfl.check.example import Example

D = 50
SIZES = (0.0, 1e-300, 1e-12, 1.0, 1e6)  # of updates; a model is float32


def finite(case: Example) -> str:
    """The next model is finite for every finite update, float32 [d]."""
    for size in SIZES:
        state = case.member.start(D)
        model = made_up(D)
        for t in range(3):
            following = case.member.step(model, made_up(D, step=t + 1) * size, state, t)
            hold(following.shape == (D,), f"it has shape {list(following.shape)}")
            hold(following.dtype == np.float32, f"it is {following.dtype}, not float32")
            hold(np.isfinite(following).all(), f"updates of size {size:g} make it infinite")
            model = following.astype(np.float64)
    return "updates of sizes 0 to 1e6"


def state(case: Example) -> str:
    """Its state keeps its names, shapes and dtypes, float64."""
    start = case.member.start(D)
    for name, array in start.items():
        hold(isinstance(array, np.ndarray), f"{name} is no array")
        hold(array.dtype == np.float64, f"{name} is {array.dtype}, not float64")
    now = copied(start)
    for t in range(4):
        case.member.step(made_up(D), made_up(D, step=t + 1), now, t)
        same_shapes(start, now)
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in start.items()) or "none"


def no_hidden_state(case: Example) -> str:
    """A step is a function of model, update, state and round alone."""
    member = case.member
    model = made_up(D)
    before = member.start(D)
    member.step(model, made_up(D, step=9), before, 0)
    results = []
    for copy in (member, member, pickle.loads(pickle.dumps(member))):
        now = copied(before)
        update = made_up(D, step=1)
        x = model.copy()
        following = copy.step(x, update, now, 3)
        hold(np.array_equal(update, made_up(D, step=1)), "the update is changed in place")
        hold(np.array_equal(x, model), "the model is changed in place")
        results.append((following, now))
        copy.step(-model, made_up(D, step=5) * 7, copied(before), 4)
    for following, now in results[1:]:
        hold(np.array_equal(following, results[0][0]), "asked twice, it gives another model")
        hold(equal(now, results[0][1]), "asked twice, it leaves another state")
    return "the same step twice"


def persistence(case: Example) -> str:
    """What it says of momentum is a number from 0 to below 1."""
    persistence = case.member.persistence()
    hold(0 <= persistence < 1, f"it says {persistence}")
    return f"{persistence:g}"
