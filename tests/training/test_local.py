"""Local training: every backend against a plain loop of nn.Module and torch.optim.SGD, and every
client's bits against its neighbours'.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from conftest import form, task_of
from scipy import stats
from torch import nn

from raydpfl import models
from raydpfl.config.registry import choose
from raydpfl.core.messages import Facts, View
from raydpfl.core.prng import Purpose, stream, torch_stream
from raydpfl.errors import ConfigError
from raydpfl.methods.local import FAMILY, Adam, Local, Scaffold, Sgd
from raydpfl.models.linear_stack import NoStack, stack
from raydpfl.training import backend_check, process_settings, validation
from raydpfl.training.backend_choice import resolve
from raydpfl.training.backends import base as backend_module
from raydpfl.training.backends import compiled as compiled_module
from raydpfl.training.backends.compiled import Compiled
from raydpfl.training.backends.convolutional import Convolutional, links
from raydpfl.training.backends.fused import Fused
from raydpfl.training.backends.vmap import Vmap
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.process_settings import tune_allocator
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPE = (1, 6, 6)
CLASSES = 4


class Residual(nn.Module):
    """No stack of linear layers: a branch, LayerNorm, a parameter of its own."""

    def __init__(self, outputs):
        super().__init__()
        self.first = nn.Linear(36, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, outputs)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.last(h + self.scale * torch.tanh(self.norm(h)))


class Functional(nn.Module):
    """A stack of linear layers written in functions."""

    def __init__(self, outputs):
        super().__init__()
        self.a = nn.Linear(36, 9)
        self.b = nn.Linear(9, 7, bias=False)
        self.c = nn.Linear(7, outputs)

    def forward(self, x):
        x = F.leaky_relu(self.a(x.view(x.size(0), -1)), 0.2)
        return self.c(torch.sigmoid(F.linear(x, self.b.weight)))


class Tied(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.enter = nn.Linear(36, 8)
        self.square = nn.Linear(8, 8)
        self.leave = nn.Linear(8, outputs)

    def forward(self, x):
        return self.leave(
            torch.relu(self.square(torch.relu(self.square(self.enter(x.flatten(1))))))
        )


class Pooling(nn.Module):
    """Convolutions with the functions after them as they are usually written."""

    def __init__(self, outputs):
        super().__init__()
        self.a = nn.Conv2d(1, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 5, 3, padding=1)
        self.c = nn.Linear(45, 8)
        self.d = nn.Linear(8, outputs)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(torch.tanh(self.b(x)), kernel_size=3, stride=1, padding=1)
        return self.d(F.relu(self.c(torch.flatten(x, 1))))


def adapted(outputs):
    """A frozen net with adapters, one of which is not at its start, a trained norm, and a bias."""
    module = Residual(outputs)
    asked = models.Lora(rank=2, scale=1.5, targets=("first", "last"), trained=("norm.*", "*.bias"))
    models.adapt(module, asked, lambda: module(torch.zeros(1, *SHAPE)))
    nn.init.normal_(module.first.lora_B.weight, std=0.2)
    return module


MODULES = {
    "softmax": lambda outputs: nn.Sequential(nn.Flatten(), nn.Linear(36, outputs)),
    "softmax without bias": lambda outputs: nn.Sequential(
        nn.Flatten(), nn.Linear(36, outputs, bias=False)
    ),
    "mlp": lambda outputs: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 17), nn.Tanh(), nn.Linear(17, outputs)
    ),
    "leaky mlp": lambda outputs: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 17), nn.LeakyReLU(0.1), nn.Linear(17, outputs)
    ),
    "deep mlp": lambda outputs: nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 20),
        nn.ReLU(),
        nn.Linear(20, 11, bias=False),
        nn.Sigmoid(),
        nn.Linear(11, outputs),
    ),
    "relu mlp": lambda outputs: nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 20),
        nn.ReLU(),
        nn.Linear(20, 11, bias=False),
        nn.ReLU(),
        nn.Linear(11, outputs),
    ),
    "functional": Functional,
    "residual": Residual,
    "adapters": adapted,
    "tied": Tied,
    "cnn": lambda outputs: nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(54, outputs),
    ),
    "cnn of functions": Pooling,
    "cnn of all kinds": lambda outputs: nn.Sequential(
        nn.Conv2d(1, 4, (3, 2), stride=(1, 2), padding=(2, 1), bias=False),
        nn.Tanh(),
        nn.MaxPool2d(3, 1, padding=1),
        nn.Identity(),
        nn.Conv2d(4, 6, 2, dilation=2, groups=2),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(18, 7, bias=False),
        nn.Sigmoid(),
        nn.Linear(7, outputs),
    ),
    "group norm": lambda outputs: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, outputs)
    ),
}
CONVOLUTIONAL = ["cnn", "cnn of functions", "cnn of all kinds"]
STACKS = ["softmax", "softmax without bias", "mlp", "deep mlp", "functional"]
PAIRS = [
    *(("fused", name) for name in STACKS),
    *(("compiled", name) for name in (*STACKS[:-1], "relu mlp")),
    *(("vmap", name) for name in ("softmax", "deep mlp", "residual", "tied")),
    *(("one_batch", name) for name in ("adapters", "deep mlp", "tied", "cnn")),
    *(("convolutional", name) for name in CONVOLUTIONAL),
    *(("loop", name) for name in MODULES),
]
# Of each way the module with most kinds of layers, which meets every method; all other modules meet
# the hard ones.
HARDEST = {
    "fused": "functional",
    "compiled": "relu mlp",
    "vmap": "residual",
    "one_batch": "adapters",
    "convolutional": "cnn of all kinds",
    "loop": "tied",
}
HARD = ("full gradient", "share, epochs", "proximal and all")
LOCALS = {
    "plain": Sgd(steps=5, batch=6, lr=0.3),
    "decay": Sgd(steps=5, batch=6, lr=0.3, weight_decay=0.1),
    "momentum": Sgd(steps=6, batch=6, lr=0.1, momentum=0.9),
    "both": Sgd(steps=6, batch=6, lr=0.1, momentum=0.7, weight_decay=0.05, lr_decay=0.9),
    "full gradient": Sgd(steps=3, batch="full", lr=0.3, momentum=0.5, weight_decay=0.02),
    "epochs": Sgd(steps=7, batch=6, lr=0.2, sampling="epochs"),
    "share": Sgd(steps=5, batch={"share": 0.4}, lr=0.3, momentum=0.5),
    "share, epochs": Sgd(steps=5, batch={"share": 0.4}, lr=0.3, sampling="epochs"),
    "proximal": Sgd(steps=5, batch=6, lr=0.3, proximal=0.8),
    "proximal and all": Sgd(
        steps=6, batch=6, lr=0.1, momentum=0.7, weight_decay=0.05, proximal=0.8
    ),
}


class Corrected(Sgd):
    def correction(self, view):
        return view.state


CORRECTED = {
    "scaffold": Scaffold(steps=5, batch=6, lr=0.3, weight_decay=0.1),
    "all": Corrected(steps=6, batch=6, lr=0.1, momentum=0.7, weight_decay=0.05, proximal=0.8),
}
METHODS = LOCALS | CORRECTED
# one with fewer rows than a batch, one empty slot, one with exactly a batch
SIZES = [13, 4, 9, 0, 6]
CLIENTS = [2, 5, 5, -1, 30]
DRAWS = [0, 0, 1, 0, 0]


def made(name: str, outputs: int = CLASSES) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MODULES[name](outputs)


def rows(sizes=SIZES, n=13, seed=1, shape=SHAPE, regression=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), n, *shape, generator=generator)
    y = (
        torch.randn(len(sizes), n, generator=generator)
        if regression
        else torch.randint(0, CLASSES, (len(sizes), n), generator=generator)
    )
    for slot, size in enumerate(sizes):  # whoever looks at padding will show it
        x[slot, size:] = float("nan")
        y[slot, size:] = float("nan") if regression else -7
    return x, y


def corrected(sizes, d: int, seed=3) -> torch.Tensor:
    """A correction of norm about 1 for each client; whoever looks at an empty slot's will
    show it.
    """
    corrections = torch.randn(len(sizes), d, generator=torch.Generator().manual_seed(seed)) / d**0.5
    corrections[np.equal(sizes, 0)] = float("nan")
    return corrections


def reference(module: nn.Module, local: Sgd, x, y, batches_of_client, t: int, correction=None):
    """One client by the book: its update, flat, and its mean loss."""
    module = copy.deepcopy(module).train()
    start = models.flatten(module)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    starts = [parameter.detach().clone() for parameter in trained]
    corrections = (torch.zeros_like(start) if correction is None else correction).split(
        [part.numel() for part in starts]
    )
    optimizer = torch.optim.SGD(
        module.parameters(),
        lr=local.learning_rate(t),
        momentum=local.momentum,
        weight_decay=local.weight_decay,
    )
    losses = []
    for batch in batches_of_client:
        optimizer.zero_grad()
        outputs = module(x[batch])
        loss = (
            ((outputs[:, 0] - y[batch]) ** 2 / 2).mean()
            if y.is_floating_point()
            else F.cross_entropy(outputs, y[batch])
        )
        loss.backward()
        for parameter, began, added in zip(trained, starts, corrections, strict=True):
            parameter.grad += local.proximal * (parameter.detach() - began) + added.view_as(began)
        optimizer.step()
        losses.append(loss.item())
    return models.flatten(module) - start, float(np.mean(losses))


def each(blocks):
    """(slot, update, loss) of every client."""
    return [client for block in blocks for client in block.clients()]


def train(
    backend, module, local, x, y, sizes=SIZES, clients=CLIENTS, draws=DRAWS, t=2, seed=4, **more
):
    trainer = Trainer(module, local, backend=backend, seed=seed, task=task_of(y))
    chunk = trainer.chunk(
        models.flatten(module), x, y, sizes, t=t, clients=clients, draws=draws, **more
    )
    return {slot: (delta, loss) for block in chunk for slot, delta, loss in block.clients()}


def given(name: str, method: str, regression: bool) -> tuple:
    """A module, the rows, and the corrections of a method that has them."""
    module = made(name, outputs=1 if regression else CLASSES)
    corrections = None
    if method in CORRECTED:
        corrections = corrected(SIZES, models.parameter_count(module))
    return module, *rows(regression=regression), corrections


@cache
def by_the_plain_loop(name: str, method: str, regression: bool) -> dict:
    """The update and loss of each client by the book, which every backend is compared with."""
    module, x, y, corrections = given(name, method, regression)
    local = METHODS[method]
    index, batch_sizes = batches(4, 2, CLIENTS, DRAWS, SIZES, local)
    found = {}
    for slot in (0, 1, 2, 4):
        correction = None if corrections is None else corrections[slot]
        taken = index[slot, :, : batch_sizes[slot]]
        found[slot] = reference(module, local, x[slot], y[slot], taken, 2, correction)
    return found


def check_against_the_plain_loop(backend, name, method, regression=False):
    module, x, y, corrections = given(name, method, regression)
    before = models.flatten(module)
    got = train(backend, module, METHODS[method], x, y, corrections=corrections)
    assert torch.equal(models.flatten(module), before)
    assert list(got) == [0, 1, 2, 4]
    for slot, (delta, loss) in got.items():
        expected, expected_loss = by_the_plain_loop(name, method, regression)[slot]
        assert torch.linalg.vector_norm(delta - expected) <= 2e-5 * torch.linalg.vector_norm(
            expected
        )
        assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize(
    "backend,name,method",
    [
        (backend, name, method)
        for backend, name in PAIRS
        for method in LOCALS
        if name == HARDEST[backend] or method in HARD
    ],
)
def test_every_way_does_what_the_plain_loop_with_an_optimizer_does(backend, name, method):
    check_against_the_plain_loop(backend, name, method)


@pytest.mark.slow
@pytest.mark.parametrize("backend,name", PAIRS)
def test_every_way_does_regression_as_the_plain_loop_does(backend, name):
    for method in ("plain", "full gradient", "proximal and all"):
        check_against_the_plain_loop(backend, name, method, regression=True)


@pytest.mark.parametrize("method", CORRECTED)
@pytest.mark.parametrize(
    "backend,name", [(backend, name) for backend, name in PAIRS if backend != "compiled"]
)
def test_every_way_that_takes_corrections_adds_them_to_every_gradient(backend, name, method):
    check_against_the_plain_loop(backend, name, method)


def put(rows, into, slot):
    """A copy of the rows and labels `into`, with those of `rows` at a slot."""
    placed = [part.clone() for part in into]
    for part, source in zip(placed, rows, strict=True):
        part[slot] = source[slot]
    return placed


def check_bits_in_and_out_of_company(backend, module, local, corrects=False, regression=False):
    x, y = rows(regression=regression)
    d = models.parameter_count(module)
    corrections = corrected(SIZES, d) if corrects else None
    together = train(backend, module, local, x, y, corrections=corrections)
    again = train(backend, module, local, x, y, corrections=corrections)
    zeros = torch.zeros_like(x), torch.zeros_like(y)
    others = rows(sizes=[13] * 5, seed=9, regression=regression)
    for slot, (delta, loss) in together.items():
        assert torch.equal(delta, again[slot][0])
        keep = np.arange(5) == slot
        if corrects:
            kept = torch.from_numpy(keep)[:, None]
            none = {"corrections": torch.where(kept, corrections, 0.0)}
            theirs = {"corrections": torch.where(kept, corrections, corrected([13] * 5, d, seed=9))}
        else:
            none = theirs = {}
        sizes = np.where(keep, SIZES, 0)
        members = np.where(keep, CLIENTS, -1)
        alone = train(backend, module, local, *put((x, y), zeros, slot), sizes, members, **none)
        sizes = np.where(keep, SIZES, 13)
        members = np.where(keep, CLIENTS, np.arange(40, 45))
        chunk = put((x, y), others, slot)
        among = train(backend, module, local, *chunk, sizes, members, DRAWS, **theirs)
        assert list(alone) == [slot]
        for other_delta, other_loss in (alone[slot], among[slot]):
            assert torch.equal(delta, other_delta) and loss == other_loss


@pytest.mark.slow
@pytest.mark.parametrize("backend,name", PAIRS)
def test_a_clients_bits_depend_on_no_other_slot_of_its_chunk(backend, name):
    some = ("both", "full gradient")
    for method in (*some, "epochs", "proximal and all") if name == HARDEST[backend] else some:
        check_bits_in_and_out_of_company(backend, made(name), LOCALS[method])


@pytest.mark.slow
@pytest.mark.parametrize("backend,name", PAIRS)
def test_a_clients_bits_depend_on_no_other_slot_in_regression_or_with_corrections(backend, name):
    check_bits_in_and_out_of_company(
        backend, made(name, outputs=1), LOCALS["both"], regression=True
    )
    if backend != "compiled":
        check_bits_in_and_out_of_company(backend, made(name), CORRECTED["all"], corrects=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,n,batch,steps", [("softmax", 20, 10, 20), ("mlp", 31, 16, 6), ("mlp", 37, 16, 3)]
)
@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_bits_hold_at_the_sizes_of_the_papers_and_wherever_the_rows_lie_in_memory(
    backend, kind, n, batch, steps
):
    module = models.build(models.parse({"kind": kind}), form((1, 28, 28)), seed=0)
    local = Sgd(steps=steps, batch=batch, lr=0.1, weight_decay=1e-4)
    generator = np.random.default_rng(0)
    sizes = [n, n, n - 3, n, 5, n, n, n]
    y = generator.integers(0, 10, (8, n))
    bits: dict[int, set[bytes]] = {slot: set() for slot in range(8)}
    memory = np.empty(8 * n * 784 + 16, np.float32)
    for shift in (0, 1, 5, 12):
        x = memory[shift : shift + 8 * n * 784].reshape(8, n, 1, 28, 28)
        x[:] = np.random.default_rng(1).random(x.shape, dtype=np.float32)
        for slot, (delta, _) in train(
            backend, module, local, x, y, sizes, range(8), [0] * 8
        ).items():
            bits[slot].add(delta.numpy().tobytes())
    for slot in (0, 2, 7):
        clients = np.where(np.arange(8) == slot, np.arange(8), -1)
        bits[slot].add(
            train(backend, module, local, x, y, np.where(clients < 0, 0, sizes), clients, [0] * 8)[
                slot
            ][0]
            .numpy()
            .tobytes()
        )
    assert all(len(each) == 1 for each in bits.values())


class Draws(nn.Module):
    """Dropout, a draw of its own, and a buffer that counts its calls and is part of the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(36, CLASSES)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.dropout(x.flatten(1))
        return self.linear(x + torch.randn(1)) * self.calls


def test_what_a_module_draws_and_keeps_is_the_clients_own():
    module = Draws()
    local = Sgd(steps=4, batch=6, lr=0.1)
    x, y = rows()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    together = train("loop", module, local, x, y)
    assert torch.equal(torch.get_rng_state(), state) and module.calls == 0
    torch.manual_seed(1)
    for slot, (delta, _) in together.items():
        alone = train(
            "loop",
            module,
            local,
            x,
            y,
            np.where(np.arange(5) == slot, SIZES, 0),
            np.where(np.arange(5) == slot, CLIENTS, -1),
        )
        assert torch.equal(alone[slot][0], delta)
    index, batch_sizes = batches(4, 2, CLIENTS, DRAWS, SIZES, local)
    with torch.random.fork_rng():
        torch.set_rng_state(torch_stream(4, Purpose.MODULE, t=2, client=5, draw=1).get_state())
        expected, _ = reference(module, local, x[2], y[2], index[2, :, : batch_sizes[2]], 2)
    torch.testing.assert_close(together[2][0], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_blocks_hold_the_clients_in_order_and_no_more_than_fits(backend, monkeypatch):
    module = made("relu mlp")
    d = models.parameter_count(module)
    for each_module in (backend_module, compiled_module):
        monkeypatch.setattr(each_module, "BLOCK", 3 * d)
    clients = [9, 5, 5, 7, 3, -1, 2]
    sizes = [13, 0, 7, 0, 7, 0, 0]  # some clients without rows: within a block, first and last
    x, y = rows([13, 13, 13, 13, 13, 13, 13])
    trainer = Trainer(module, LOCALS["plain"], backend=backend, seed=4)
    name = {"t": 2, "clients": clients, "draws": [0, 0, 1, 0, 0, 0, 0]}
    blocks = list(trainer.chunk(models.flatten(module), x, y, sizes, **name))
    assert [slot for slot, _, _ in each(blocks)] == [0, 1, 2, 3, 4, 6]
    assert max(len(block.slots) for block in blocks) == (1 if backend == "loop" else 3)
    for block in blocks:
        assert block.updates.shape == (len(block.slots), d) and block.losses.dtype == np.float64
    for slot, update, loss in each(blocks):
        assert np.isnan(loss) == (sizes[slot] == 0)
        assert bool(update.any()) == (sizes[slot] > 0)


def test_an_update_that_is_handed_out_is_not_written_to_again():
    module = made("relu mlp")
    x, y = rows()
    for backend in ("compiled", "fused", "vmap", "loop"):
        trainer = Trainer(module, LOCALS["plain"], backend=backend, seed=0)
        chunk = dict(t=0, clients=CLIENTS, draws=DRAWS)
        held = [
            block.updates for block in trainer.chunk(models.flatten(module), x, y, SIZES, **chunk)
        ]
        copies = [delta.clone() for delta in held]
        list(trainer.chunk(models.flatten(module) * 2, x, y, SIZES, **chunk))
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_diverged_client_shows_it_and_spares_the_others(backend):
    module = made("relu mlp")
    x, y = rows()
    healthy = train(backend, module, LOCALS["plain"], x, y)
    x[2, 0] = float("inf")
    local = LOCALS["plain"].model_copy(update={"batch": "full"})
    assert not torch.isfinite(train(backend, module, local, x, y)[2][0]).all()
    sick = train(backend, module, LOCALS["plain"], x, y)
    assert all(torch.equal(healthy[slot][0], sick[slot][0]) for slot in (0, 1, 4))


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_learning_rate_beyond_all_measure_gives_updates_that_are_not_finite(backend):
    local = Sgd(steps=50, batch=4, lr=1e9, weight_decay=1e-3)
    assert not any(
        torch.isfinite(delta).all()
        for delta, _ in train(backend, made("softmax"), local, *rows()).values()
    )


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_client_without_rows_sends_nothing(backend):
    module = made("relu mlp")
    x, y = rows()
    got = train(backend, module, LOCALS["both"], x, y, clients=[2, 5, 5, 7, 30])
    assert list(got) == [0, 1, 2, 3, 4]
    assert torch.equal(got[3][0], torch.zeros(models.parameter_count(module))) and np.isnan(
        got[3][1]
    )


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_label_that_the_model_does_not_know_is_an_error(backend):
    x, y = rows()
    y[0, 3] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        train(backend, made("relu mlp"), LOCALS["full gradient"], x, y)


# ------------------------------------------------------------------------------------------------
# batches


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
@pytest.mark.parametrize("batch", [1, 3, 8, "full"])
def test_a_clients_batches_depend_on_its_key_and_size_alone(sampling, batch):
    local = Sgd(steps=6, batch=batch, sampling=sampling)
    sizes = [5, 80, 1, 17, 0]
    clients = [3, 4, 4, 1 << 40, 0]
    draws = [0, 0, 1, 0, 0]
    index, batch_sizes = batches(7, 3, clients, draws, sizes, local, rows=100)
    for slot, size in enumerate(sizes):
        alone, alone_size = batches(
            7, 3, clients[slot : slot + 1], draws[slot : slot + 1], [size], local
        )
        assert batch_sizes[slot] == alone_size[0] == local.batch_size(size)
        assert np.array_equal(index[slot, :, : batch_sizes[slot]], alone[0, :, : alone_size[0]])
        assert not index[slot, :, batch_sizes[slot] :].any()
        assert index[slot].max() < max(size, 1)
    assert index.shape == (5, 6, 100 if batch == "full" else batch)
    if batch != "full":
        for name in ((8, 3, [4], [0]), (7, 4, [4], [0]), (7, 3, [5], [0]), (7, 3, [4], [1])):
            assert not np.array_equal(index[1], batches(*name, [80], local, rows=100)[0][0])


def test_small_batches_of_many_rows_are_floyds_of_each_clients_own_numbers():
    """Drawn together here, and one after another by the plain algorithm."""
    local = Sgd(steps=3, batch={"share": 0.04})
    sizes = [200, 130, 205, 1000, 51]
    clients = [3, 9, 9, 12, 1 << 40]
    draws = [0, 0, 1, 2, 0]
    index, counts = batches(7, 3, clients, draws, sizes, local)
    for slot, (n, b) in enumerate(zip(sizes, counts.tolist(), strict=True)):
        keyed = stream(7, Purpose.BATCH, t=3, client=clients[slot], draw=draws[slot])
        for uniform, found in zip(keyed.random((3, b)).tolist(), index[slot], strict=True):
            rows: set[int] = set()
            for number, last in zip(uniform, range(n - b, n), strict=True):
                row = int(number * (last + 1))
                rows.add(last if row in rows else row)
            assert found[:b].tolist() == sorted(rows)


# the two ways of drawing: by rank and row by row
@pytest.mark.slow
@pytest.mark.parametrize("n,b", [(6, 3), (40, 2)])
def test_every_subset_is_as_likely_as_another_and_steps_are_independent(n, b):
    """Chi-square over subsets, over pairs (row in step 0, row in step 1), and over first places;
    false-alarm rate 1e-4 each.
    """
    local = Sgd(steps=2, batch=b)
    index, _ = batches(0, 0, np.arange(20_000), np.zeros(20_000, int), np.full(20_000, n), local)
    subsets = {subset: k for k, subset in enumerate(combinations(range(n), b))}
    ordered = np.sort(index, axis=2)
    counts = np.bincount(
        [subsets[tuple(subset)] for subset in ordered.reshape(-1, b).tolist()],
        minlength=len(subsets),
    )
    assert stats.chisquare(counts).pvalue > 1e-4
    ranks = np.array(
        [
            [min(3, 4 * subsets[tuple(subset)] // len(subsets)) for subset in pair]
            for pair in ordered.tolist()
        ]
    )
    assert stats.chi2_contingency(np.histogram2d(*ranks.T, bins=4)[0]).pvalue > 1e-4


def test_shuffled_epochs_show_each_row_once_before_any_twice():
    for n, b, steps in [(7, 3, 14), (10, 5, 5), (33, 8, 20)]:
        index, _ = batches(1, 0, [9], [0], [n], Sgd(steps=steps, batch=b, sampling="epochs"))
        seen = index[0].ravel()
        whole = len(seen) // n * n
        epochs = seen[:whole].reshape(-1, n)
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (len(epochs), 1)))
        assert len(np.unique(seen[whole:])) == len(seen) - whole
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_rows_whose_numbers_take_more_bits_are_shuffled_all_the_same(sampling, monkeypatch):
    name = {"seed": 1, "t": 0}
    sizes = [33, 7, 8, 9]
    local = Sgd(steps=40, batch=6, sampling=sampling)
    # 24 as it is, which 16.8 million rows fill
    monkeypatch.setattr(sys.modules["raydpfl.training.minibatches"], "BITS", 3)
    index, _ = batches(**name, clients=[5, 6, 7, 8], draws=[0] * 4, sizes=sizes, local=local)
    for slot, n in enumerate(sizes):
        assert set(index[slot].ravel()) == set(range(n))
        assert sampling == "epochs" or (np.diff(np.sort(index[slot]), axis=1) > 0).all()
        # whoever is beside it
        assert np.array_equal(
            index[[slot]], batches(**name, clients=[5 + slot], draws=[0], sizes=[n], local=local)[0]
        )
    if sampling == "epochs":
        assert np.array_equal(
            np.sort(index[0].ravel()[:231].reshape(-1, 33)), np.tile(np.arange(33), (7, 1))
        )


# ------------------------------------------------------------------------------------------------
# which backend


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_rows_that_no_batch_takes_are_not_needed(backend):
    sizes = np.array([40, 0, 12, 13, 7])
    clients = [5, -1, 6, 7, 8]
    draws = [0] * 5
    local = Sgd(steps=4, batch=3)
    assert (
        local.rows_used(sizes).tolist() == [12, 0, 12, 12, 7]
        and Sgd(batch="full").rows_used(sizes).tolist() == sizes.tolist()
    )
    x = torch.randn(5, 40, *SHAPE, generator=torch.Generator().manual_seed(1))
    y = torch.arange(200).view(5, 40) % CLASSES
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 9), nn.ReLU(), nn.Linear(9, CLASSES))
    trainer = Trainer(module, local, backend=backend, seed=4)
    parameters = models.flatten(module)
    name = {"t": 2, "clients": clients, "draws": draws}
    index, batch_sizes = batches(4, sizes=sizes, local=local, rows=12, **name)
    rows, places = picked(index, batch_sizes, sizes, local)
    # who may have more than it can use
    assert [slot for slot, each in enumerate(rows) if each is not None] == [0, 3]
    few_x = torch.full((5, 12, *SHAPE), torch.nan)
    few_y = torch.full((5, 12), -1)
    few = []
    for slot, some in enumerate(rows):
        some = np.arange(sizes[slot]) if some is None else some
        few_x[slot, : len(some)] = x[slot, some]
        few_y[slot, : len(some)] = y[slot, some]
        few.append(len(some))
    assert few[0] <= 12 and set(rows[0]) == set(index[0].ravel())
    drawn = places, batch_sizes, local.step_counts(sizes)
    whole = trainer.chunk(parameters, x, y, sizes, **name)
    ours = trainer.chunk(parameters, few_x, few_y, few, **name, drawn=drawn)
    for (_, delta, loss), (_, our_delta, our_loss) in zip(each(whole), each(ours), strict=True):
        torch.testing.assert_close(our_delta, delta, atol=1e-6, rtol=0)
        assert our_loss == pytest.approx(loss, abs=1e-6) and delta.norm() > 0.01


def test_the_learning_rate_follows_its_schedule():
    assert Sgd(lr=0.2, lr_decay=0.5).learning_rate(3) == pytest.approx(0.025)
    assert Sgd(lr=0.2, schedule="inverse_sqrt").learning_rate(3) == pytest.approx(0.1)
    assert Sgd(lr=0.2).learning_rate(100) == 0.2


@pytest.mark.parametrize(
    "values,field",
    [
        ({"steps": 0}, "local.steps"),
        ({"batch": 0}, "local.batch"),
        ({"batch": "half"}, "local.batch"),
        ({"lr": -1}, "local.lr"),
        ({"lr": float("nan")}, "local.lr"),
        ({"momentum": 1.0}, "local.momentum"),
        ({"weight_decay": -0.1}, "local.weight_decay"),
        ({"lr_decay": 0.9, "schedule": "inverse_sqrt"}, "local.lr_decay"),
        ({"lr_deacy": 0.9}, "local.lr_deacy"),
        ({"proximal": -0.1}, "local.proximal"),
        ({"kind": "scaffold", "momentum": 0.5}, "local.momentum"),
        ({"kind": "scaffold", "proximal": 0.5}, "local.proximal"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, field):
    with pytest.raises(ConfigError) as refused:
        choose("local", {"kind": "sgd", **values}, FAMILY, Local)
    assert refused.value.field.startswith(field) and "\n" not in str(refused.value)


def by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layers that `stack` found, one after another on the flat parameters."""
    a = x.flatten(1)
    flat = models.flatten(module)
    for layer in stack(module):
        weight, *bias = layer.views(flat)
        a = a @ weight.mT + (bias[0] if bias else 0)
        a = layer.activation.forward(a) if layer.activation else a
    return a


def hooked() -> nn.Module:
    module = made("mlp")
    module[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def frozen() -> nn.Module:
    module = made("mlp")
    module[1].weight.requires_grad_(False)
    return module


def tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 36))
    module[3].weight = module[1].weight
    return module


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_linear_layers_is_found_however_it_is_written(name):
    module = made(name)
    x = torch.randn(3, *SHAPE)
    torch.testing.assert_close(by_hand(module, x), module(x))


def test_what_changes_nothing_does_not_hide_a_stack():
    for module in (
        nn.Linear(36, 4),
        nn.Sequential(
            nn.Flatten(),
            nn.Identity(),
            nn.Linear(36, 5),
            nn.Dropout(0.0),
            nn.LeakyReLU(),
            nn.Linear(5, 4),
        ),
    ):
        x = torch.randn(3, 36)
        torch.testing.assert_close(by_hand(module, x), module(x))


OTHERS = {
    "tied": lambda: made("tied"),
    "tied weights": tied_weights,
    "residual": lambda: made("residual"),
    "convolution": lambda: made("cnn"),
    "hook": hooked,
    "frozen": frozen,
    "dropout": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.1), nn.Linear(8, 4)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    ),
    "normalised weights": lambda: nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(36, 4))
    ),
    "activation first": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(36, 4)),
    "two activations": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 4)
    ),
    "softplus": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Softplus(), nn.Linear(8, 4)
    ),
    "negative slope": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.LeakyReLU(-0.1), nn.Linear(8, 4)
    ),
}


def hooked_around() -> nn.Module:
    module = nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(36, 4)))
    module[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def of_its_own_forward() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    module.forward = lambda x: module[1](module[0](x)) * 2
    return module


NESTED = {
    "nested": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(36, 5), nn.Sequential(nn.ReLU())), nn.Linear(5, 4)
    ),
    "hook around": hooked_around,
    "own forward": of_its_own_forward,
}


def found_in(module: nn.Module) -> list[str]:
    """What is found of a module by those who take it apart, or why nothing is."""
    found = []
    for look in (stack, links):
        try:
            found.append(repr(look(module)))
        except NoStack as error:
            found.append(f"nothing: {error}")
    return found


@pytest.mark.parametrize("name", [*OTHERS, *NESTED, *MODULES])
def test_layers_one_after_another_are_found_as_torch_fx_finds_them(name, monkeypatch):
    module = {**OTHERS, **NESTED}.get(name, lambda: made(name))()
    found = found_in(module)
    monkeypatch.setattr(
        sys.modules["raydpfl.models.linear_stack"], "_sequence", lambda module: None
    )
    assert found == found_in(module)
    assert name not in ("hook around", "own forward") or all(
        isinstance(each, str) for each in found
    )


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of weight_norm
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_stack_is_not_taken_for_one_and_is_trained_right(kind):
    module = OTHERS[kind]()
    with pytest.raises(NoStack):
        stack(module)
    local = LOCALS["both"]
    x, y = rows(sizes=[13] * 5)
    backend = resolve(module, local, form(SHAPE))
    got = train(backend, module, local, x, y, [13] * 5, range(5), [0] * 5)
    index, _ = batches(4, 2, range(5), [0] * 5, [13] * 5, local)
    if kind != "dropout":
        for slot, (delta, _) in got.items():
            expected, _ = reference(module, local, x[slot], y[slot], index[slot], 2)
            assert torch.linalg.vector_norm(delta - expected) <= 2e-5 * torch.linalg.vector_norm(
                expected
            )


class Mixing(nn.Module):
    """Looks like a flatten and a linear layer, but its view cuts each sample in two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(18, 2)

    def forward(self, x):
        return self.linear(x.view(-1, 18)).view(-1, 4)


@pytest.mark.parametrize(
    "module,backend",
    [(Mixing(), "compiled"), (OTHERS["dropout"](), "vmap"), (OTHERS["batch norm"](), "vmap")],
)
def test_a_way_that_would_train_a_module_wrongly_is_given_up_for_the_loop_and_says_so(
    module, backend, caplog
):
    with caplog.at_level(logging.WARNING, "raydpfl"):
        assert resolve(module, Sgd(steps=1), form(SHAPE)) == "loop"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        f"clients are trained by the loop, one at a time, which is slow: {backend} does not fit"
    )
    for each in {backend, "fused" if isinstance(module, Mixing) else backend}:
        with pytest.raises(
            ConfigError, match=rf"client\.backend = '{each}': expected auto or loop"
        ):
            resolve(module, Sgd(), form(SHAPE), each)


class Scanned(nn.Module):
    """A recurrent layer over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(6, 4, batch_first=True)

    def forward(self, x):
        return self.cells(x.flatten(1, 2))[0][:, -1]


class Twice(nn.Module):
    """A residual of convolutions."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 1, 3, padding=1)
        self.last = nn.Linear(36, 4)

    def forward(self, x):
        return self.last((x + self.first(x)).flatten(1))


class Noised(nn.Module):
    """Adds what NumPy draws."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(36, 4)

    def forward(self, x):
        return self.last(x.flatten(1)) + float(np.random.normal())


class Trained(Sgd):
    """Trains a client whole."""

    def train(self, *given):
        raise NotImplementedError


class Normed(nn.Module):
    """BatchNorm whose statistics are each client's own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.last = nn.Linear(36, 4)
        models.shared_and_local.set_local(self, {"norm.running_mean", "norm.running_var"})

    def forward(self, x):
        return self.last(self.norm(x).flatten(1))


@pytest.mark.parametrize(
    "module,local,backend,why,faster",
    [
        (OTHERS["dropout"], Sgd(), "auto", "vmap does not fit", "a model without dropout"),
        (Scanned, Sgd(), "auto", "LSTM is recurrent", "a model without recurrent layers"),
        (Scanned, Sgd(), "loop", "LSTM is recurrent", "a model without recurrent layers"),
        (
            Twice,
            Sgd(),
            "auto",
            "convolutional does not fit the model: ",
            "convolutions, activ.*GPU",
        ),
        (Noised, Sgd(), "auto", "the module draws from np.random", "a module that draws nothing"),
        (lambda: made("mlp"), Trained(), "auto", "a user-defined train", "a step in its place"),
        (
            lambda: made("mlp"),
            Sgd(),
            "loop",
            "client.backend asks for it",
            "client.backend=auto, which tr",
        ),
        (Normed, Sgd(), "auto", "buffers of the model are clients' own", "without BatchNorm"),
    ],
)
def test_a_loop_that_is_slow_says_why_and_what_would_be_faster(
    module, local, backend, why, faster, caplog
):
    with caplog.at_level(logging.WARNING, "raydpfl"):
        assert resolve(module(), local, form(SHAPE), backend) == "loop"
    (said,) = caplog.messages
    assert re.search(rf"trained by the loop, one at a time.*{why}.*; faster: .*{faster}", said)


@pytest.mark.parametrize("name", ["mlp", "leaky mlp", "residual", "cnn"])
def test_a_step_that_is_slightly_wrong_is_noticed(name, monkeypatch):
    def skewed(self, parameters, chunk):
        for block in self.straight(parameters, chunk):
            yield replace(block, updates=block.updates * 1.01)

    for backend in (Compiled, Fused, Vmap, Convolutional):
        monkeypatch.setattr(backend, "straight", backend.run, raising=False)
        monkeypatch.setattr(backend, "run", skewed)
    assert resolve(made(name), Sgd(), form(SHAPE)) == "loop"


@pytest.mark.parametrize(
    "kind,shape,rows,local,backend",
    [
        ("softmax", (1, 28, 28), 20, Sgd(steps=20, batch=10), "compiled"),
        ("softmax", (1, 28, 28), 600, Sgd(steps=300, batch=10), "compiled"),
        ("softmax", (1, 28, 28), 20, Sgd(steps=1, batch=10), "compiled"),
        ("softmax", (1, 28, 28), 600, Adam(steps=300, batch=10), "fused"),
        ("softmax", (60,), 20, Sgd(steps=20, batch=10), "compiled"),
        ("mlp", (1, 28, 28), 31, Sgd(steps=32, batch=16), "compiled"),
        ("mlp", (1, 28, 28), 31, Sgd(steps=32, batch="full"), "compiled"),
        ("mlp", (1, 28, 28), 600, Sgd(steps=10, batch=64), "compiled"),
        ("mlp", (1, 28, 28), 600, Scaffold(steps=10, batch=64), "fused"),
        ("cnn", (1, 28, 28), 64, Sgd(), "convolutional"),
    ],
)
def test_the_way_follows_from_the_architecture_and_the_shapes(
    kind, shape, rows, local, backend, caplog
):
    module = models.build(models.parse({"kind": kind}), form(shape), seed=0)
    assert resolve(module, local, form(shape)) == backend
    assert not caplog.messages
    assert resolve(module, local, form(shape), "loop") == "loop"


@pytest.mark.parametrize("backend", [Fused, Vmap])
def test_a_way_that_leaves_out_the_proximal_term_is_noticed(backend, monkeypatch):
    def without(self, parameters, chunk):
        self.local = self.local.model_copy(update={"proximal": 0.0})
        return straight(self, parameters, chunk)

    straight = backend.run
    module = made("residual" if backend is Vmap else "leaky mlp")
    local = Sgd(proximal=0.1)
    assert resolve(module, local, form(SHAPE)) == {Fused: "fused", Vmap: "vmap"}[backend]
    monkeypatch.setattr(backend, "run", without)
    assert resolve(module, local, form(SHAPE)) == "loop"


@pytest.mark.parametrize("always", [False, True])
def test_a_maximum_that_rounds_the_other_way_on_some_rows_is_no_mismatch(always, monkeypatch):
    def flipped(self, backend):
        ours, theirs = by(self, backend)
        ours[0 if always else self.seed] *= 1.01
        return ours, theirs

    by = backend_check.FirstSteps.by
    monkeypatch.setattr(backend_check.FirstSteps, "by", flipped)
    reason = backend_check.mismatch(made("mlp"), Sgd(), form(SHAPE), "fused", None)
    assert reason == ("its first step is off by 1.0e-02 of the loop's" if always else None)


@pytest.mark.parametrize("backend", [Fused, Vmap])
def test_a_way_that_leaves_out_corrections_is_noticed(backend, monkeypatch):
    straight = backend.run
    module = made("residual" if backend is Vmap else "mlp")
    assert resolve(module, Scaffold(), form(SHAPE)) == {Fused: "fused", Vmap: "vmap"}[backend]
    monkeypatch.setattr(
        backend,
        "run",
        lambda self, parameters, chunk: straight(
            self, parameters, replace(chunk, corrections=None)
        ),
    )
    assert resolve(module, Scaffold(), form(SHAPE)) == "loop"


@pytest.mark.parametrize("backend", [Fused, Vmap])
def test_a_way_that_is_slightly_wrong_in_regression_is_noticed(backend, monkeypatch):
    straight = backend.run
    module = made("residual" if backend is Vmap else "leaky mlp", outputs=1)
    assert (
        resolve(module, Sgd(steps=1), form(SHAPE, 0, "regression"))
        == {Fused: "fused", Vmap: "vmap"}[backend]
    )
    monkeypatch.setattr(
        backend,
        "run",
        lambda self, parameters, chunk: straight(
            self, parameters, replace(chunk, y=chunk.y * 1.01)
        ),
    )
    assert resolve(module, Sgd(steps=1), form(SHAPE, 0, "regression")) == "loop"


def test_compiled_code_adds_no_corrections():
    module = made("softmax")
    assert resolve(module, Sgd(steps=20), form(SHAPE)) == "compiled"
    assert resolve(module, Scaffold(steps=20), form(SHAPE)) == "fused"
    for refused in (
        lambda: resolve(module, Scaffold(), form(SHAPE), "compiled"),
        lambda: Trainer(module, Scaffold(), backend="compiled", seed=0),
    ):
        with pytest.raises(
            ConfigError,
            match=r"client\.backend = 'compiled': expected auto or one of fused, convolutional, "
            r"one_batch, vmap, loop",
        ):
            refused()
    corrections = torch.zeros(5, models.parameter_count(module))
    with pytest.raises(ValueError, match="this backend adds no corrections"):
        train("compiled", module, Sgd(), *rows(), corrections=corrections)
    with pytest.raises(ValueError, match="scaffold needs corrections"):
        train("fused", module, Scaffold(), *rows())


def test_a_backend_that_clips_is_refused_where_nothing_is_clipped():
    with pytest.raises(
        ConfigError,
        match=r"client\.backend = 'layerwise': expected auto or one of .*\(local\.kind sgd: "
        r"layerwise cannot do samples that are not clipped\)",
    ):
        resolve(made("softmax"), Sgd(), form(SHAPE), "layerwise")


@pytest.mark.parametrize("backend", ["fused", "loop"])
def test_noise_on_gradients_that_nothing_bounds_is_refused(backend):
    with pytest.raises(ValueError, match="clipped per sample"):
        train(backend, made("softmax"), Sgd(), *rows(), stds=np.ones(5))


@pytest.mark.parametrize("backend", ["auto", "fused", "vmap", "loop"])
def test_regression_needs_a_module_with_an_output_for_each_target(backend):
    for name in ("mlp", "residual"):
        with pytest.raises(
            ConfigError,
            match=r"data.task.kind = 'regression': expected a task with a loss for each "
            r"sample of outputs "
            r"\[4, 4\] \(RuntimeError",
        ):
            resolve(made(name), Sgd(), form(SHAPE, 0, "regression"), backend)
    if backend != "auto":
        with pytest.raises(RuntimeError):
            train(backend, made("mlp"), Sgd(), *rows(regression=True))


def test_an_unknown_way_is_refused_by_name():
    with pytest.raises(
        ConfigError,
        match=r"client\.backend = 'lopo': expected auto or one of compiled, fused",
    ):
        resolve(made("mlp"), Sgd(), form(SHAPE), "lopo")


# ------------------------------------------------------------------------------------------------
# scaffold


def known(own, shared, lr: float) -> View:
    """What clients that remember `own` are told with the server's variate `shared`."""
    own = torch.as_tensor(own)
    shared = torch.as_tensor(shared)
    return View(0, lr, None, torch.zeros(own.shape[-1]), {"c": shared}, lambda: own)


def test_the_server_variate_is_the_mean_of_the_clients_whoever_takes_part():
    local = Scaffold(steps=7)
    generator = np.random.default_rng(0)
    own = np.zeros((12, 5))
    shared = np.zeros(5)
    for t in range(30):
        cohort = generator.choice(12, size=generator.integers(1, 13), replace=False)
        sent = generator.normal(size=(len(cohort), 5))
        lr = 0.1 / (t + 1)
        share = len(cohort) / 12
        after = local.next_state(torch.from_numpy(sent), known(own[cohort], shared, lr)).numpy()
        by_change = shared + share * (after - own[cohort]).mean(axis=0)
        state = {"c": shared}
        local.receive(sent.mean(axis=0) * share, state, Facts(t, lr, None, 12, len(cohort), 12))
        shared = state["c"]
        own[cohort] = after
        np.testing.assert_allclose(shared, by_change, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(shared, own.mean(axis=0), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", ["fused", "vmap", "loop"])
def test_a_clients_variate_is_the_mean_of_its_gradients(backend):
    module = made("mlp")
    local = Scaffold(steps=1, batch="full", lr=0.2)
    x, y = rows()
    d = models.parameter_count(module)
    own = corrected([1] * 5, d, seed=1).double()
    shared = corrected([1], d, seed=2)[0].double()
    got = train(backend, module, local, x, y, corrections=local.correction(known(own, shared, 1.0)))
    for slot, (delta, _) in got.items():
        loss = F.cross_entropy(module(x[slot, : SIZES[slot]]), y[slot, : SIZES[slot]])
        gradient = torch.cat(
            [part.flatten() for part in torch.autograd.grad(loss, list(module.parameters()))]
        )
        view = known(own[slot], shared, local.learning_rate(2))
        variate = local.next_state(delta.double(), view)
        torch.testing.assert_close(variate.float(), gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fused", "loop"])
def test_scaffold_reaches_the_optimum_of_unlike_quadratics_where_fedavg_does_not(backend):
    """Linear regression on rows of another law at each client, full gradients, full participation,
    many local steps.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[0.2, 1.0, 2.0], [2.0, 0.2, 1.0], [1.0, 2.0, 0.2], [1.5, 1.5, 0.5]])
    x = torch.randn(4, 8, 3, generator=generator) * scales[:, None]
    y = (x * torch.randn(4, 1, 3, generator=generator) * 2).sum(2)
    optimum = torch.linalg.lstsq(x.flatten(0, 1).double(), y.flatten()[:, None].double()).solution[
        :, 0
    ]
    module = nn.Linear(3, 1, bias=False)
    everyone = dict(clients=range(4), draws=[0] * 4)

    def trained(local: Sgd) -> torch.Tensor:
        trainer = Trainer(module, local, backend=backend, seed=0, task=task_of(y))
        model = torch.zeros(3, dtype=torch.float64)
        own = torch.zeros(4, 3, dtype=torch.float64)
        state = {"c": np.zeros(3)}
        for t in range(60):
            lr = local.learning_rate(t)
            view = known(own, torch.from_numpy(state["c"]), lr)
            more = {"corrections": local.correction(view)}
            blocks = trainer.chunk(model, x, y, [8] * 4, t=t, **everyone, **more)
            sent = torch.cat([block.updates for block in blocks]).double()
            if local.stateful:
                own = local.next_state(sent, view)
                local.receive(sent.mean(0).numpy(), state, Facts(t, lr, None, 4, 4, 4))
            model = model + sent.mean(0)
        return (model - optimum).norm() / optimum.norm()

    assert trained(Scaffold(steps=10, batch="full", lr=0.05)) < 1e-5
    assert trained(Sgd(steps=10, batch="full", lr=0.05)) > 0.02


HASHES = """
import sys, hashlib, numpy as np, torch
from raydpfl import models
from raydpfl.models import tasks
from raydpfl.methods.local import Sgd
from raydpfl.training.trainer import Trainer
from raydpfl.training.process_settings import single_thread, tune_allocator
single_thread()
form = tasks.Form((1, 28, 28), tasks.Target((), 10), tasks.parse("classification"), 0)
if sys.argv[1] == "tuned":
    tune_allocator()
    waste = [torch.rand(100_003) for _ in range(7)]
torch.manual_seed(int(sys.argv[2]))
linear = ("compiled", "fused", "vmap")
for kind, backends in {"softmax": linear, "mlp": linear, "cnn": ("convolutional", "loop")}.items():
    module = models.build(models.parse({"kind": kind}), form, seed=0)
    generator = np.random.default_rng(0)
    x = generator.random((3, 13, 1, 28, 28), dtype=np.float32)
    y = generator.integers(0, 10, (3, 13))
    who = {"t": 0, "clients": [1, 2, 3], "draws": [0, 0, 0]}
    for backend in backends:
        trainer = Trainer(module, Sgd(steps=3, batch=8, momentum=0.5), backend=backend, seed=1)
        chunk = trainer.chunk(models.flatten(module), x, y, [13, 7, 13], **who)
        updates = b"".join(block.updates.numpy().tobytes() for block in chunk)
        print(backend, hashlib.sha256(updates).hexdigest())
"""


@pytest.mark.slow
def test_two_processes_give_the_same_bits(monkeypatch, capsys):
    """This one, and one whose allocator is tuned."""
    command = [sys.executable, "-c", HASHES, "tuned", "2"]
    theirs = processes.run(command, check=True).stdout
    monkeypatch.setattr(sys, "argv", ["-c", "plain", "1"])
    with torch.random.fork_rng(devices=[]):
        exec(HASHES, {})
    assert capsys.readouterr().out == theirs and len(set(theirs.splitlines())) == 8


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux's huge pages"
)
def test_tensors_come_to_lie_where_huge_pages_are_asked_for():
    tune_allocator()
    # a tensor of half the bytes that are asked for: the first huge page begins within it
    place = torch.empty(process_settings.POOL // 8).data_ptr() + process_settings.HUGE
    maps = re.split(r"(?m)^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text())[1:]
    spans = [[int(end, 16) for end in each.split()[0].split("-")] for each in maps]
    (lies,) = (each for each, (a, b) in zip(maps, spans, strict=True) if a <= place < b)
    assert "hg" in lies.partition("VmFlags:")[2].split()


def test_what_another_thread_draws_is_not_taken_for_the_modules(monkeypatch):
    drawn = validation._drawn_once
    asked = []

    def beside_a_thread(module, shape):
        asked.append(drawn(module, shape))
        return "Python's random" if len(asked) == 1 else asked[-1]

    monkeypatch.setattr(validation, "_drawn_once", beside_a_thread)
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    assert resolve(module, Sgd(), form((1, 28, 28))) == "compiled"
    assert asked == [None] * 2  # one try without is enough


@pytest.mark.parametrize("share", [0.001, 0.1, 0.25, 0.5, 0.9, 1.0])
def test_a_batch_by_share_is_that_share_of_every_clients_rows(share):
    local = Sgd(steps=3, batch={"share": share})
    sizes = np.arange(200)
    found = local.batch_sizes(sizes)
    assert found[0] == 0 and (found[1:] >= 1).all() and (found <= sizes).all()
    assert (np.diff(found) >= 0).all()
    assert np.abs(found - share * sizes)[round(1 / share) :].max(initial=0) <= 0.5 + 1e-9
    assert [local.batch_size(rows) for rows in (1, 60, 199)] == found[[1, 60, 199]].tolist()
    # a chunk is as wide as the largest batch of those that may be in it
    assert local.batch_size(int(local.rows_used(sizes).max())) == found.max()


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_a_client_draws_the_batches_of_its_share_whoever_trains_beside_it(sampling):
    local = Sgd(steps=6, batch={"share": 0.3}, sampling=sampling)
    sizes = [40, 0, 7, 1000, 1, 90]
    clients = [3, -1, 8, 9, 10, 11]
    index, counts = batches(1, 5, clients, [0] * 6, sizes, local)
    assert counts.tolist() == [12, 0, 2, 300, 1, 27] and index.shape == (6, 6, 300)
    for slot, (size, count) in enumerate(zip(sizes, counts.tolist(), strict=True)):
        alone, _ = batches(1, 5, clients[slot : slot + 1], [0], [size], local)
        own = index[slot, :, :count]
        assert np.array_equal(own, alone[0, :, :count]) and not index[slot, :, count:].any()
        if sampling == "fresh":
            assert all(len(np.unique(step)) == count for step in own)
        assert own.max(initial=0) < max(size, 1)
