"""Dropout: every backend draws the masks that the loop draws for a client."""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import CLASSES, SHAPE, alone, mlp, net, rows, train
from torch import nn

from raydpfl.core import native
from raydpfl.methods.local import Adam, Sam, Sgd

pytestmark = pytest.mark.usefixtures("one_thread")
needs = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 5, 3, padding=1), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(45, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, CLASSES)),
    )


def dropped_features() -> nn.Module:
    """Dropout behind the flattening, as in AlexNet."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Dropout(0.5), nn.Linear(45, 8), nn.ReLU(), nn.Linear(8, CLASSES)),
    )


def dense() -> nn.Module:
    torch.manual_seed(0)
    return mlp(nn.Linear(72, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, CLASSES))


CASES = [
    pytest.param(convolutions, "convolutional", marks=needs),
    pytest.param(dropped_features, "convolutional", marks=needs),
    *((convolutions, "vmap"), (dense, "vmap")),
]


LOCALS = [Sgd(steps=3, batch=4), Sgd(epochs=1.5, batch=4), Adam(steps=2), Sam(steps=2, rho=0.5)]


@pytest.mark.parametrize("local", LOCALS)
@pytest.mark.parametrize("module,backend", CASES)
def test_a_backend_trains_a_client_on_the_masks_that_the_loop_draws(module, backend, local):
    x, y = rows()
    expected = train("loop", module(), local, x, y)
    found = train(backend, module(), local, x, y)
    for slot, (update, loss) in expected.items():
        assert (found[slot][0] - update).norm() <= 1e-4 * update.norm()
        assert found[slot][1] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize("module,backend", [*CASES, (convolutions, "layerwise")])
def test_a_client_has_the_same_masks_whoever_else_is_in_its_chunk(module, backend):
    given = (backend, module(), Sgd(steps=2, batch=4), *rows())
    clip = 1.0 if backend == "layerwise" else None
    for slot, (update, _) in train(*given, clip=clip).items():
        assert torch.equal(train(*given, clip=clip, **alone(slot))[slot][0], update)


def test_every_sample_that_is_clipped_has_masks_of_its_own():
    x, y = rows()
    same = x[:1, :1].expand(5, 7, -1, -1, -1), y[:1, :1].expand(5, 7)
    who = ([7] * 5, [1, 2, 3, 3, 4], [0, 0, 0, 1, 0])
    dropped = train("layerwise", convolutions(), Sgd(steps=1, batch=7), *same, *who, clip=1.0)
    assert len({loss for _, loss in dropped.values()}) == 5


def test_the_rate_is_that_of_the_layer_and_the_scale_keeps_the_mean():
    module = mlp(nn.Dropout(0.75), nn.Linear(72, CLASSES, bias=False))
    nn.init.zeros_(module[2].weight)
    x, y = torch.ones(1, 400, *SHAPE), torch.zeros(1, 400, dtype=torch.long)
    local = Sgd(steps=1, batch=400, lr=1.0)
    ((update, _),) = train("vmap", module, local, x, y, [400], [3], [0]).values()
    # the gradient by a weight is the mean of its input times 3/4 or -1/4: the input's mean is 1
    inputs = update.view(CLASSES, 72)[0] / (1 - 1 / CLASSES)
    assert abs(float(inputs.mean()) - 1) < 0.05 and inputs.std() > 0.01


def test_what_drops_along_another_axis_than_the_samples_is_refused_by_vmap():
    def forward(self, x):
        return self.last(F.dropout(x.flatten(1).mT, 0.5, self.training).mT)

    module = net("Scaled", forward, last=nn.Linear(72, CLASSES))
    with pytest.raises(ValueError, match="the first axis of what is dropped out"):
        train("vmap", module, Sgd(steps=1, batch=4), *rows())
