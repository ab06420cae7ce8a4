"""Convolutions without the taps that see padding alone, against autograd on the whole."""

import pytest
import torch
import torch.nn.functional as F
from plain_loop import net
from torch import nn

from raydpfl import models
from raydpfl.methods.local import Sgd
from raydpfl.training.layers.tap_crop import crop, live_taps
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(40))
def test_the_taps_that_read_pixels_are_those_with_a_gradient(seed):
    draw = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    kernel, stride, padding = (number(1, 5), number(1, 5)), number(1, 3), number(0, 3)
    layer = nn.Conv2d(2, 3, kernel, stride, padding, number(1, 3) if padding else 1)
    image = (number(1, 5), number(1, 5))
    x = torch.rand(2, 2, *image) + 0.1
    try:
        layer(x).sum().backward()
    except RuntimeError:  # the filter is larger than the padded image
        return
    read = layer.weight.grad[0, 0] != 0
    (top, bottom), (left, right) = live_taps(layer, image)
    assert read.any(1).nonzero().flatten().tolist() == [*range(top, bottom)] or not read.any()
    assert read.any(0).nonzero().flatten().tolist() == [*range(left, right)] or not read.any()
    part = crop(layer, image)
    if part is not None:
        how = (layer.stride, 0, layer.dilation)
        assert torch.allclose(
            F.conv2d(x, layer.weight[part], layer.bias, *how), layer(x), atol=1e-6
        )


def convolutions(reads: bool) -> nn.Module:
    """Three, of which the weight of one may be read by the module itself too."""

    def forward(self, x):
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = self.third(x).flatten(1)
        return x + self.second.weight.square().sum() * x if reads else x

    filters = {"second": nn.Conv2d(4, 4, 3, padding=1)}
    filters["third"] = nn.Conv2d(4, 4, 3, padding=1, bias=False)
    return net("Reader", forward, first=nn.Conv2d(2, 4, 3, stride=2, padding=1), **filters)


def rows(clients: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(clients, 6, 2, 2, 2, generator=draw)
    return x, torch.randint(4, (clients, 6), generator=draw)


def updates(module, local: Sgd, x, y, sizes, clients, crops: bool) -> tuple[torch.Tensor, int]:
    """Of these clients, and of how many layers taps were left out."""
    trainer = Trainer(module, local, backend="loop", seed=0)
    trainer.backend.crops = crops
    same = {"t": 0, "clients": clients, "draws": [0] * len(clients)}
    chunk = trainer.chunk(models.flatten(module), x, y, sizes, **same)
    found = torch.cat([block.updates for block in chunk])
    return found, len(trainer.backend.cropped_taps)


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("local", [Sgd(steps=3, batch=3), Sgd(steps=3, batch=3, momentum=0.5)])
def test_the_loop_trains_as_without_the_crop_also_where_a_weight_is_read(local, reads):
    torch.manual_seed(0)
    module = convolutions(reads)
    given = (module, local, *rows(2), [6, 5], [0, 1])
    expected, _ = updates(*given, crops=False)
    found, cropped = updates(*given, crops=True)
    assert cropped == 2
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    if not reads:  # of nine taps one has moved
        by_second = found[0].split([p.numel() for p in module.parameters()])[2].view(4, 4, 3, 3)
        assert by_second[:, :, 1, 1].all() and by_second.count_nonzero() == 16


def test_clipped_samples_have_all_taps():
    torch.manual_seed(0)
    module = convolutions(False)
    x, y = rows(1)

    def update(backend: str) -> torch.Tensor:
        trainer = Trainer(module, Sgd(steps=3, batch=3), backend=backend, seed=0, clip=0.5)
        same = {"t": 0, "clients": [0], "draws": [0]}
        (block,) = trainer.chunk(models.flatten(module), x, y, [6], **same)
        return block.updates

    assert torch.allclose(update("layerwise"), update("loop"), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("local", [Sgd(steps=2, batch=3), Sgd(steps=2, batch=3, momentum=0.5)])
@pytest.mark.parametrize("bright", [[0], [1], [0, 1]])
def test_images_of_another_size_have_all_taps_in_every_order_of_clients(bright, local):
    def forward(self, x):
        x = F.adaptive_avg_pool2d(x, 2) if x.mean() > 1 else x.mean((2, 3), keepdim=True)
        return self.filters(torch.tanh(x)).mean((2, 3))

    torch.manual_seed(0)
    module = net("Sizes", forward, filters=nn.Conv2d(2, 4, 3, padding=1))
    x, y = torch.rand(2, 6, 2, 2, 2), torch.randint(4, (2, 6))
    x[bright] += 2
    both = (module, local, x, y, [6, 6], [0, 1])
    found, cropped = updates(*both, crops=True)
    expected, whole = updates(*both, crops=False)
    alone, again = updates(module, local, x[1:], y[1:], [6], [1], crops=True)
    assert (cropped, whole, again) == (1, 0, 1)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert torch.equal(found[1:], alone)
