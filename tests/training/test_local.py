"""Local training by the trainer: blocks, order, diverged clients, state of modules, SCAFFOLD."""

import numpy as np
import pytest
import torch
from conftest import form
from plain_loop import (
    CLASSES,
    CLIENTS,
    DRAWS,
    METHODS,
    SIZES,
    alone,
    clients_of,
    corrected,
    drawn,
    gradient_of,
    made,
    plain_loop,
    rows,
    train,
)
from torch import nn

from raydpfl import models
from raydpfl.core.messages import Facts, View
from raydpfl.core.prng import Purpose, torch_stream
from raydpfl.methods.local import Scaffold, Sgd
from raydpfl.training.backends import base, compiled
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


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

    def note(*given) -> None:
        for slot, (delta, _) in train(backend, module, local, *given, [0] * 8).items():
            bits[slot].add(delta.numpy().tobytes())

    memory = np.empty(8 * n * 784 + 16, np.float32)
    for shift in (0, 1, 5, 12):
        x = memory[shift : shift + 8 * n * 784].reshape(8, n, 1, 28, 28)
        x[:] = np.random.default_rng(1).random(x.shape, dtype=np.float32)
        note(x, y, sizes, range(8))
    for slot in (0, 2, 7):
        clients = np.where(np.arange(8) == slot, np.arange(8), -1)
        note(x, y, np.where(clients < 0, 0, sizes), clients)
    assert all(len(each) == 1 for each in bits.values())


class Draws(nn.Module):
    """Dropout, a draw of its own, and a buffer that counts its calls and is part of the output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, CLASSES)
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
        assert torch.equal(train("loop", module, local, x, y, **alone(slot))[slot][0], delta)
    with torch.random.fork_rng():
        torch.set_rng_state(torch_stream(4, Purpose.MODULE, t=2, client=5, draw=1).get_state())
        expected, *_ = plain_loop(module, local, x[2], y[2], drawn(local, 2))
    torch.testing.assert_close(together[2][0].double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_blocks_hold_the_clients_in_order_and_no_more_than_fits(backend, monkeypatch):
    module = made("relu mlp")
    d = models.parameter_count(module)
    for module_of in (base, compiled):
        monkeypatch.setattr(module_of, "BLOCK", 3 * d)
    clients = [9, 5, 5, 7, 3, -1, 2]
    sizes = [13, 0, 7, 0, 7, 0, 0]  # some clients without rows: within a block, first and last
    x, y = rows([13, 13, 13, 13, 13, 13, 13])
    trainer = Trainer(module, METHODS["plain"], backend=backend, seed=4)
    name = {"t": 2, "clients": clients, "draws": [0, 0, 1, 0, 0, 0, 0]}
    blocks = list(trainer.chunk(models.flatten(module), x, y, sizes, **name))
    assert [slot for slot, _, _ in clients_of(blocks)] == [0, 1, 2, 3, 4, 6]
    assert max(len(block.slots) for block in blocks) == (1 if backend == "loop" else 3)
    for block in blocks:
        assert block.updates.shape == (len(block.slots), d) and block.losses.dtype == np.float64
    for slot, update, loss in clients_of(blocks):
        assert np.isnan(loss) == (sizes[slot] == 0)
        assert bool(update.any()) == (sizes[slot] > 0)


def test_an_update_that_is_handed_out_is_not_written_to_again():
    module = made("relu mlp")
    x, y = rows()
    for backend in ("compiled", "fused", "vmap", "loop"):
        trainer = Trainer(module, METHODS["plain"], backend=backend, seed=0)
        chunk = dict(t=0, clients=CLIENTS, draws=DRAWS)
        blocks = trainer.chunk(models.flatten(module), x, y, SIZES, **chunk)
        held = [block.updates for block in blocks]
        copies = [delta.clone() for delta in held]
        list(trainer.chunk(models.flatten(module) * 2, x, y, SIZES, **chunk))
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_learning_rate_beyond_all_measure_gives_updates_that_are_not_finite(backend):
    local = Sgd(steps=50, batch=4, lr=1e9, weight_decay=1e-3)
    assert not any(
        torch.isfinite(delta).all()
        for delta, _ in train(backend, made("softmax"), local, *rows()).values()
    )


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_a_label_that_the_model_does_not_know_is_an_error(backend):
    x, y = rows()
    y[0, 3] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        train(backend, made("relu mlp"), METHODS["full"], x, y)


@pytest.mark.parametrize("backend", ["fused", "loop"])
def test_noise_on_gradients_that_nothing_bounds_is_refused(backend):
    with pytest.raises(ValueError, match="clipped per sample"):
        train(backend, made("softmax"), Sgd(), *rows(), stds=np.ones(5))


def known(own, shared, lr: float) -> View:
    """What clients that remember `own` are told with the server's variate `shared`."""
    own = torch.as_tensor(own)
    shared = torch.as_tensor(shared)
    return View(0, lr, None, torch.zeros(own.shape[-1]), {"c": shared}, lambda: own)


def test_the_server_variate_is_the_mean_of_the_clients_in_any_cohort():
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
        gradient, _ = gradient_of(module, x[slot, : SIZES[slot]], y[slot, : SIZES[slot]])
        view = known(own[slot], shared, local.learning_rate(2))
        variate = local.next_state(delta.double(), view)
        torch.testing.assert_close(variate.float(), gradient, rtol=1e-4, atol=1e-6)
