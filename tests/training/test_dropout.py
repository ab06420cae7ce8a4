"""Dropout: every backend draws the masks that the loop draws for a client."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain_loop import CLASSES, CLIENTS, SHAPE, SIZES, rows, train
from torch import nn

from raydpfl.core import native
from raydpfl.methods.local import Adam, Sgd

pytestmark = pytest.mark.usefixtures("one_thread")
CHANNELS, HEIGHT, WIDTH = SHAPE


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(CHANNELS, 6, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(5 * (HEIGHT // 2) * (WIDTH // 2), 8),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(8, CLASSES),
    )


def dense() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(CHANNELS * HEIGHT * WIDTH, 8), nn.ReLU(), nn.Dropout(0.4)
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, CLASSES))


class Scaled(nn.Module):
    """Dropout as a function, its first axis not that of the samples."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(CHANNELS * HEIGHT * WIDTH, CLASSES)

    def forward(self, x):
        return self.last(F.dropout(x.flatten(1).mT, 0.5, self.training).mT)


CASES = [(convolutions, "convolutional"), (convolutions, "vmap"), (dense, "vmap")]


@pytest.mark.parametrize("local", [Sgd(steps=3, batch=4), Sgd(epochs=1.5, batch=4), Adam(steps=2)])
@pytest.mark.parametrize("module,backend", CASES)
def test_a_backend_trains_a_client_on_the_masks_that_the_loop_draws(module, backend, local):
    if backend == "convolutional" and native.library() is None:
        pytest.skip("nothing is compiled here")
    x, y = rows()
    expected = train("loop", module(), local, x, y)
    found = train(backend, module(), local, x, y)
    for slot, (update, loss) in expected.items():
        assert (found[slot][0] - update).norm() <= 1e-4 * update.norm()
        assert found[slot][1] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("module,backend", [*CASES, (convolutions, "layerwise")])
def test_a_client_has_the_same_masks_whoever_else_is_in_its_chunk(module, backend):
    if backend == "convolutional" and native.library() is None:
        pytest.skip("nothing is compiled here")
    x, y = rows()
    clip = 1.0 if backend == "layerwise" else None
    local = Sgd(steps=2, batch=4)
    every = train(backend, module(), local, x, y, clip=clip)
    last = max(every)
    keep = np.arange(len(SIZES)) == last
    alone = {"sizes": np.where(keep, SIZES, 0), "clients": np.where(keep, CLIENTS, -1)}
    found = train(backend, module(), local, x, y, clip=clip, **alone)
    assert torch.equal(found[last][0], every[last][0])


def test_the_rate_is_that_of_the_layer_and_the_scale_keeps_the_mean():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.75), nn.Linear(72, CLASSES, bias=False))
    nn.init.zeros_(module[2].weight)
    x, y = torch.ones(1, 400, *SHAPE), torch.zeros(1, 400, dtype=torch.long)
    local = Sgd(steps=1, batch=400, lr=1.0)
    ((update, _),) = train("vmap", module, local, x, y, [400], [3], [0]).values()
    # the gradient by a weight is the mean of its input times 3/4 or -1/4: the input's mean is 1
    inputs = update.view(CLASSES, 72)[0] / (1 - 1 / CLASSES)
    assert abs(float(inputs.mean()) - 1) < 0.05 and inputs.std() > 0.01


def test_what_drops_along_another_axis_than_the_samples_is_refused_by_vmap():
    x, y = rows()
    with pytest.raises(ValueError, match="the first axis of what is dropped out"):
        train("vmap", Scaled(), Sgd(steps=1, batch=4), x, y)
