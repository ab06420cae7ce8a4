"""What stays from round to round in sample space, and the losses of a lane's columns."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl.local import Sgd, Trainer, kernels, single_thread
from raydpfl.local.kernels import Kernels
from raydpfl.local.linear import _Loss, _target

single_thread()


def rows(clients: int, n: int = 6, p: int = 40) -> torch.Tensor:
    return torch.randn(clients, n, p, generator=torch.Generator().manual_seed(clients))


@pytest.mark.parametrize("p", [40, 41])
@pytest.mark.parametrize("memory", [kernels.MEMORY, 4 * 6 * 6 * 5, 4 * 6 * 6, 0])
def test_what_is_kept_has_the_bits_of_what_is_computed(memory, p, monkeypatch):
    """With places for all clients, for some of them, for one, and for none; and where the rows of
    some clients begin at a multiple of 16 bytes and those of others do not.
    """
    monkeypatch.setattr(kernels, "MEMORY", memory)
    x = rows(12, p=p)
    kept = Kernels()
    generator = np.random.default_rng(0)
    for _ in range(30):
        cohort = np.sort(generator.choice(12, 7, replace=False))
        owners = np.where(generator.random(7) < 0.8, cohort, -1)
        given = x[cohort]
        assert torch.equal(kept.of(given, owners), torch.bmm(given, given.mT))


@pytest.mark.parametrize(("n", "p", "kept"), [(6, 40, True), (6, 41, False), (4, 41, True)])
def test_only_rows_that_begin_alike_in_every_slot_are_kept(n, p, kept):
    """On some processors the others have other bits in another slot."""
    kernels = Kernels()
    kernels.of(rows(3, n, p), np.array([4, 5, 9]))
    assert bool(kernels._kept) == kept


def test_rows_are_multiplied_once_where_they_stay_and_anew_where_they_do_not():
    kept = Kernels()
    first = kept.of(rows(3), np.array([4, -1, 9]))
    other = torch.zeros(3, 6, 40)
    again = kept.of(other, np.array([9, 4, -1]))
    assert torch.equal(again[:2], first[[2, 0]]) and not again[2].any()
    assert not kept.of(other, np.array([-1, -1, -1])).any()  # nobody's are kept
    assert torch.equal(kept.of(rows(3)), torch.bmm(rows(3), rows(3).mT))  # nor asked for
    again += 1  # what is given is the caller's
    assert torch.equal(kept.of(other, np.array([9, 4, -1]))[:2], first[[2, 0]])


def test_few_numbers_of_rows_are_kept():
    kept = Kernels()
    for n in range(1, kernels.COUNTS + 4):
        x = rows(2, n)
        for _ in range(2):
            assert torch.equal(kept.of(x, np.array([0, 1])), torch.bmm(x, x.mT))
    assert len(kept._kept) == kernels.COUNTS


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
            return loss.step(a[some], 0, apart=False), loss.sums()

    every, sums = of(slice(None))
    for first in range(clients):
        for last in (first + 1, first + 2, clients):
            alone, alone_sums = of(slice(first, last))
            assert torch.equal(alone, every[first:last])
            assert torch.equal(alone_sums, sums[first:last])


def test_clients_whose_rows_stay_train_to_the_same_bits_in_every_round():
    module = nn.Linear(784, 10)
    parameters = torch.randn(7850, generator=torch.Generator().manual_seed(0)) * 0.1
    x = torch.rand(9, 20, 784, generator=torch.Generator().manual_seed(1))
    y = torch.randint(10, (9, 20), generator=torch.Generator().manual_seed(2))
    keeping = Trainer(module, Sgd(steps=4, batch=10), way="sample_space", seed=0)
    plain = Trainer(module, Sgd(steps=4, batch=10), way="sample_space", seed=0)
    same = np.array([True, True, False, True, True])
    for t in range(6):
        clients = np.sort(np.random.default_rng(t).choice(9, 5, replace=False))
        lane = (parameters, x[clients], y[clients], [20] * 5)
        keys = {"t": t, "clients": clients, "draws": [0] * 5}
        (kept,) = keeping.lane(*lane, **keys, same=same)
        (new,) = plain.lane(*lane, **keys)
        assert torch.equal(kept.updates, new.updates)


@pytest.mark.parametrize("way", ["fused", "sample_space"])
@pytest.mark.parametrize("batch", [3, 7])
def test_lanes_trained_together_have_the_bits_of_each_alone(way, batch):
    """Where the columns of a lane fill no vectors; with clipped samples, where the way can."""
    clip = 0.5 if way == "fused" else None
    module = nn.Sequential(nn.Linear(12, 5), nn.Tanh(), nn.Linear(5, 10))
    local = Sgd(steps=3, batch=batch)
    trainer = Trainer(module, local, way=way, seed=0, clip=clip)
    parameters = torch.randn(125, generator=torch.Generator().manual_seed(0))
    x = torch.randn(12, 7, 12, generator=torch.Generator().manual_seed(1))
    y = torch.randint(10, (12, 7), generator=torch.Generator().manual_seed(2))
    sizes = np.array([7, 5, 7, 7, 6, 7, 7, 7, 0, 3, 7, 7])

    def of(some: np.ndarray, width: int) -> torch.Tensor:
        keys = {"t": 0, "clients": some, "draws": [0] * len(some), "width": width}
        blocks = trainer.lane(parameters, x[some], y[some], sizes[some], **keys)
        return torch.cat([block.updates for block in blocks])

    every = of(np.arange(12), 3)
    for first in range(0, 12, 3):
        alone = np.arange(first, first + 3)
        assert torch.equal(of(alone, 3), every[alone])
