"""The losses of a chunk's columns, and chunks trained together, of stacks of linear layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl.methods.local import Sgd
from raydpfl.training.backends.fused import _Loss, _target
from raydpfl.training.process_settings import single_thread
from raydpfl.training.trainer import Trainer

single_thread()


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("apart", [True, False])
def test_losses_and_their_gradients_are_those_of_autograd(classes, apart):
    clients = 3
    n = 7
    batch = 5
    generator = torch.Generator().manual_seed(classes)
    y = torch.randint(classes, (clients, n), generator=generator)
    a = torch.randn(clients, batch, classes, generator=generator, requires_grad=True)
    places = torch.stack([torch.randperm(n, generator=generator)[:batch] for _ in range(clients)])
    shares = torch.rand(clients, 1, batch, generator=generator)
    flat = (places + n * torch.arange(clients)[:, None]).flatten()
    loss = _Loss(_target(y, classes), [(flat, shares)], closed="softmax")
    with torch.inference_mode():
        g = loss.step(a.detach(), 0, apart)
    each = F.cross_entropy(a.mT, y.gather(1, places), reduction="none")
    (each if apart else each * shares[:, 0]).sum().backward()
    torch.testing.assert_close(g.clone(), a.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.sums(), (each * shares[:, 0]).sum(1).detach())


@pytest.mark.parametrize("batch", [1, 3, 10])
def test_bits_of_a_client_do_not_depend_on_how_many_columns_there_are(batch):
    """The last columns, which fill no vector of the processor, are rounded as the others are."""
    clients = 37
    generator = torch.Generator().manual_seed(batch)
    y = torch.randint(10, (clients, batch), generator=generator)
    a = torch.randn(clients, batch, 10, generator=generator) * 3
    shares = torch.full((clients, 1, batch), 1 / batch)

    def of(some: slice) -> tuple[torch.Tensor, torch.Tensor]:
        loss = _Loss(_target(y[some], 10), [(None, shares[some])], closed="softmax")
        with torch.inference_mode():
            return loss.step(a[some], 0, by_sample=False), loss.sums()

    every, sums = of(slice(None))
    for first in range(clients):
        for last in (first + 1, first + 2, clients):
            alone, alone_sums = of(slice(first, last))
            assert torch.equal(alone, every[first:last])
            assert torch.equal(alone_sums, sums[first:last])


@pytest.mark.parametrize("batch", [3, 7])
def test_chunks_trained_together_have_the_bits_of_each_alone(batch):
    """Where the columns of a chunk fill no vectors; with clipped samples."""
    module = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 10))
    local = Sgd(steps=3, batch=batch)
    trainer = Trainer(module, local, backend="fused", seed=0, clip=0.5)
    parameters = torch.randn(125, generator=torch.Generator().manual_seed(0))
    x = torch.randn(12, 7, 12, generator=torch.Generator().manual_seed(1))
    y = torch.randint(10, (12, 7), generator=torch.Generator().manual_seed(2))
    sizes = np.array([7, 5, 7, 7, 6, 7, 7, 7, 0, 3, 7, 7])

    def of(some: np.ndarray, width: int) -> torch.Tensor:
        keys = {"t": 0, "clients": some, "draws": [0] * len(some), "width": width}
        blocks = trainer.chunk(parameters, x[some], y[some], sizes[some], **keys)
        return torch.cat([block.updates for block in blocks])

    every = of(np.arange(12), 3)
    for first in range(0, 12, 3):
        alone = np.arange(first, first + 3)
        assert torch.equal(of(alone, 3), every[alone])
