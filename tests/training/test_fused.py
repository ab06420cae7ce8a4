"""The losses of a chunk's columns, and chunks trained together, of stacks of linear layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raydpfl.training.backends.fused import _Loss, _target
from raydpfl.training.process_settings import single_thread

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
