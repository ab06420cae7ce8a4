"""Every backend by every method against the plain loop; a client's bits against its neighbours'."""

from functools import cache

import numpy as np
import pytest
import torch
from plain_loop import (
    CLIENTS,
    CONVOLUTIONAL,
    CORRECTED,
    DRAWS,
    LAYERS,
    METHODS,
    MODULES,
    SIZES,
    STACKS,
    STDS,
    USER_DEFINED,
    alone,
    bound,
    check_updates,
    corrected,
    drawn,
    made,
    plain_loop,
    rows,
    step_noise,
    train,
)

from raydpfl import models
from raydpfl.core import native
from raydpfl.training.backends import missing_requirement

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
]
COMPILED = ("softmax", "softmax without bias", "relu mlp")
BY_HAND = ("functional", "residual", "tied by hand")  # use parameters outside of their layers
FITTING = {
    "compiled": COMPILED if native.library() is not None else (),
    "fused": tuple(STACKS),
    "convolutional": tuple(CONVOLUTIONAL) if native.library() is not None else (),
    "layerwise": tuple(name for name in (*STACKS, *LAYERS) if name not in BY_HAND),
    "one_batch": tuple(name for name in MODULES if name not in BY_HAND),
    "vmap": tuple(MODULES),
    "loop": tuple(MODULES),
}
# of each backend, clipped or not, the module that meets every method; all others meet a hard one
HARDEST = {
    "compiled": "relu mlp",
    "fused": "functional",
    "convolutional": "cnn of all kinds",
    "layerwise": "channels last",
    "one_batch": "adapters",
    "vmap": "residual",
    "loop": "cnn",
}


def cases():
    for backend, names in FITTING.items():
        for name in names:
            for method, local in METHODS.items():
                for clipped in (False, True):
                    # by hand, where one max-pooling follows each convolution
                    if backend == "convolutional" and clipped and name != "pooled":
                        continue
                    hardest = "pooled" if backend == "convolutional" and clipped else None
                    hard = name == (hardest or HARDEST[backend])
                    some = method == "all" or (method == "full" and name in STACKS)
                    if missing_requirement(backend, local, 1.0 if clipped else None) is None and (
                        hard or some
                    ):
                        yield backend, name, method, clipped


def arguments(backend: str, name: str, method: str, clipped: bool, sizes=SIZES, seed=3) -> dict:
    """What is added to gradients."""
    d = models.parameter_count(made(name))
    more = {}
    if method in CORRECTED:
        more["corrections"] = corrected(sizes, d, seed)
    if clipped:
        more["clip"] = bound(name)
        more["stds"] = STDS
    return more


@cache
def expected(name: str, method: str, added: bool, clipped: bool, noisy: bool) -> dict:
    """(update, loss, share clipped) of each client by the plain loop."""
    module = made(name)
    x, y = rows()
    local = METHODS[method]
    d = models.parameter_count(module)
    found = {}
    for slot in (0, 1, 2, 4):
        index = drawn(local, slot)
        noise = step_noise(d, slot, len(index), STDS[slot]) if noisy else None
        correction = corrected(SIZES, d)[slot] if added else None
        clip = bound(name) if clipped else None
        update, loss, norms = plain_loop(
            module, local, x[slot], y[slot], index, clip, noise, correction
        )
        found[slot] = update, loss, np.mean(norms > clip) if clipped else np.nan
    return found


@pytest.mark.parametrize("backend,name,method,clipped", cases())
def test_every_backend_does_what_the_plain_loop_does(backend, name, method, clipped):
    module = made(name)
    before = models.flatten(module)
    more = arguments(backend, name, method, clipped)
    spanned = backend == "compiled" and "corrections" not in more
    if clipped and spanned:
        more["stds"] = np.zeros(5)  # test_span_noise has its noise
    shares = np.zeros(5)
    got = train(backend, module, METHODS[method], *rows(), **more, clipped=shares)
    assert torch.equal(models.flatten(module), before)
    assert list(got) == [0, 1, 2, 4] and np.isnan(shares[3])
    noisy = clipped and not spanned
    close = 1e-4 if METHODS[method].linear() is None else 2e-5
    for slot, (update, loss, share) in expected(
        name, method, "corrections" in more, clipped, noisy
    ).items():
        assert (got[slot][0] - update).norm() <= close * update.norm()
        assert got[slot][1] == pytest.approx(loss, rel=1e-4)
        np.testing.assert_allclose(shares[slot], share, atol=1e-12)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("backend,name", [(b, n) for b, n in HARDEST.items() if n in FITTING[b]])
def test_every_backend_does_regression_as_the_plain_loop_does(backend, name, clipped):
    if backend == "convolutional" and clipped:
        name = "pooled"
    local = METHODS["unequal, all"]
    clip = bound(name) if clipped else None
    if missing_requirement(backend, local, clip):
        return
    x, y = rows(regression=True)
    check_updates(backend, made(name, regression=True), local, x, y, clip)


def put(source, into, slot):
    """A copy of the rows and labels `into`, with those of `source` at a slot."""
    placed = [part.clone() for part in into]
    for part, own in zip(placed, source, strict=True):
        part[slot] = own[slot]
    return placed


BITS = [
    pytest.param(*case, marks=() if case[2] in ("unequal, all", "drawn") else pytest.mark.slow)
    for case in cases()
    if case[2] in ("all", "full", "unequal, all", "epochs", "sam", *USER_DEFINED)
    or case[0] == "compiled"
]


@pytest.mark.parametrize("backend,name,method,clipped", BITS)
def test_a_clients_bits_depend_on_no_other_slot_of_its_chunk(backend, name, method, clipped):
    module = made(name)
    local = METHODS[method]
    x, y = rows()
    more = arguments(backend, name, method, clipped)
    theirs = arguments(backend, name, method, clipped, [13] * 5, seed=9)
    # the steps of the others, on which bits may depend
    more["planned_steps"] = theirs["planned_steps"] = local.step_counts(np.array(SIZES))
    whole = train(backend, module, local, x, y, **more)
    again = train(backend, module, local, x, y, **more)
    zeros = torch.zeros_like(x), torch.zeros_like(y)
    others = rows(sizes=[13] * 5, seed=9)
    sizes = [13] * 5 if local.epochs is None else SIZES
    for slot, (delta, loss) in whole.items():
        assert torch.equal(delta, again[slot][0])
        keep = np.arange(5) == slot
        if "corrections" in more:
            kept = torch.from_numpy(keep)[:, None]
            theirs["corrections"] = torch.where(kept, more["corrections"], theirs["corrections"])
        if "stds" in more:
            theirs["stds"] = np.where(keep, more["stds"], 3.0)
        single = train(backend, module, local, *put((x, y), zeros, slot), **alone(slot), **more)
        among = train(
            *(backend, module, local, *put((x, y), others, slot)),
            *(np.where(keep, SIZES, sizes), np.where(keep, CLIENTS, np.arange(40, 45)), DRAWS),
            **theirs,
        )
        assert list(single) == [slot]
        for other_delta, other_loss in (single[slot], among[slot]):
            assert torch.equal(delta, other_delta) and loss == other_loss
