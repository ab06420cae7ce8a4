"""Noise on local steps that is drawn in the span of a client's rows: the plain loop with the same
noises comes to the same update, and all that leaves a client has the law that it would have with a
full draw at every step.
"""

import itertools

import numpy as np
import pytest
import torch
from conftest import task_of
from plain_loop import CLASSES, CLIENTS, DRAWS, ROUND, SEED, clients_of, plain_loop
from test_noise_distribution import check_distribution
from torch import nn

from raydpfl import models
from raydpfl.core import native
from raydpfl.methods.local import Sgd
from raydpfl.training.minibatches import batches
from raydpfl.training.span_noise import responses, span_noise_pays, triangle
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")

SIZES = [7, 5, 6, 0, 7]
ALL_TERMS = {"momentum": 0.7, "weight_decay": 0.1, "proximal": 0.3}
LOCALS = {
    "plain": Sgd(steps=9, batch=4, lr=0.2),
    "all terms": Sgd(steps=9, batch=4, lr=0.2, **ALL_TERMS),
    "unequal steps": Sgd(epochs=3, batch=3, lr=0.2, momentum=0.5, weight_decay=0.1),
}
MODULES = {
    "softmax": (129, lambda p: [nn.Linear(p, CLASSES)]),
    "without bias": (128, lambda p: [nn.Linear(p, CLASSES, bias=False)]),
    "mlp": (130, lambda p: [nn.Linear(p, 17), nn.ReLU(), nn.Linear(17, CLASSES)]),
    # steps are drawn together by two and by one
    "wide mlp": (130, lambda p: [nn.Linear(p, 400), nn.ReLU(), nn.Linear(400, CLASSES)]),
    "bias first": (128, lambda p: [bias_first(nn.Linear(p, CLASSES))]),
    "few features": (6, lambda p: [nn.Linear(p, CLASSES)]),
}


def bias_first(layer: nn.Linear) -> nn.Linear:
    """The layer, with its bias before its weight in the flat parameters."""
    layer.weight, weight = None, layer.weight
    del layer.weight
    layer.register_parameter("weight", weight)
    assert [name for name, _ in layer.named_parameters()] == ["bias", "weight"]
    return layer


STDS = np.array([0.05, 0.1, 0.02, 0.0, 0.0])
CLIP = 1.5


def made(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The module, and rows of all clients, [5, 7, p], and their classes."""
    features, layers = MODULES[name]
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = nn.Sequential(*layers(features))
    x = torch.randn(5, 7, features, generator=generator)
    x *= torch.rand(5, 7, 1, generator=generator)
    x[0, 3] = x[0, 1]  # twice the same
    x[2, 4] = x[2, 1] * (1 + 1e-6)  # which leaves no more of it than rounding
    y = torch.randint(0, CLASSES, (5, 7), generator=generator)
    for slot, size in enumerate(SIZES):
        x[slot, size:] = float("nan")
        y[slot, size:] = -7
    return module, x, y


def trainer_of(module: nn.Module, local: Sgd, y: torch.Tensor, clip: float) -> Trainer:
    return Trainer(module, local, backend="compiled", seed=SEED, clip=clip, task=task_of(y))


def check_noises(module, local: Sgd, x, y, sizes, clients, draws, stds) -> None:
    """A plain loop with the noises that the trainer tells of comes to every client's update."""
    start = models.flatten(module)
    trainer = trainer_of(module, local, y, CLIP)
    keyed = {"t": ROUND, "clients": clients, "draws": draws}
    index, taken = batches(SEED, ROUND, clients, draws, sizes, local)
    for slot, update, _ in clients_of(trainer.chunk(start, x, y, sizes, **keyed, stds=stds)):
        own = int(local.step_counts(np.array(sizes))[slot])
        who = {"client": clients[slot], "draw": draws[slot], "std": stds[slot], "steps": own}
        rows = x[slot, : sizes[slot]].numpy()
        noises = torch.from_numpy(trainer.noises(rows, d=len(start), t=ROUND, **who))
        steps = index[slot, :own, : taken[slot]]
        expected, *_ = plain_loop(module, local, x[slot], y[slot], steps, CLIP, noises)
        assert (update - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("method", LOCALS)
@pytest.mark.parametrize("name", MODULES)
def test_a_plain_loop_with_the_same_noises_comes_to_the_same_update(name, method):
    module, x, y = made(name)
    check_noises(module, LOCALS[method], x, y, SIZES, CLIENTS, DRAWS, STDS)


def test_many_rows_are_taken_by_tiles_of_some_and_what_is_left():
    rows = 53
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, rows, 130, generator=generator)
    x[0, 41] = x[0, 3]
    y = torch.randint(0, CLASSES, (1, rows), generator=generator)
    module = nn.Linear(130, CLASSES)
    local = Sgd(steps=70, batch=4, lr=0.05)
    assert span_noise_pays(rows, 130, CLASSES, True, 70, 4)
    check_noises(module, local, x, y, [rows], [3], [0], [1.0])


def test_the_rows_tell_in_which_form_the_noise_is_drawn():
    module, x, y = made("softmax")
    trainer = trainer_of(module, LOCALS["plain"], y, CLIP)
    d = models.parameter_count(module)
    drawn = {}
    for slot in (0, 1, 2):
        keyed = {"t": ROUND, "client": 0, "draw": 0, "std": 1.0, "steps": 9}
        drawn[slot] = trainer.noises(x[slot, : SIZES[slot]].numpy(), d=d, **keyed)
    full = Trainer(module, LOCALS["plain"], backend="fused", seed=SEED, clip=CLIP)
    plain = full.noises(x[0, :7].numpy(), d=d, **keyed)
    assert [np.array_equal(drawn[slot], plain) for slot in drawn] == [False, False, True]
    assert span_noise_pays(20, 784, 10, True, 20, 10) and not span_noise_pays(
        20, 784, 10, True, 1, 10
    )


def noised_alike(module, local, x, y, clients: int, std: float, clip: float) -> np.ndarray:
    """Updates of so many clients with the same rows and batches, float64 [clients, d]."""
    start = models.flatten(module)
    sizes = [len(x)] * clients
    index, taken = batches(SEED, ROUND, [7] * clients, [0] * clients, sizes, local)
    trainer = trainer_of(module, local, y, clip)
    chunk = trainer.chunk(
        start,
        x.expand(clients, *x.shape),
        y.expand(clients, *y.shape),
        sizes,
        t=ROUND,
        clients=range(clients),
        draws=[3] * clients,
        stds=np.full(clients, std),
        batch_plan=(index, taken, local.step_counts(np.array(sizes))),
    )
    return np.concatenate([block.updates.double().numpy() for block in chunk])


@pytest.mark.parametrize("near", [1.0, 2e-3])
def test_noise_alone_has_the_law_of_a_full_draw_inside_and_outside_of_the_span(near):
    """Gradients clipped to nothing; in a basis that has the rows' span first. With `near` a row is
    so near to another that a share of its square of only a few 1e-6 is outside of the span.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 6, generator=generator)
    x[2] = x[0] + near * x[2]
    local = Sgd(steps=5, batch=2, lr=0.3, **ALL_TERMS)
    module = nn.Linear(6, CLASSES)
    assert span_noise_pays(3, 6, CLASSES, True, 5, 2)
    assert triangle(np.concatenate([x.double().numpy(), np.ones((3, 1))], 1)) is not None
    updates = noised_alike(module, local, x, torch.tensor([0, 1, 3]), 1500, 0.5, 1e-9)
    start = models.flatten(module).numpy()
    shrunk, answers = responses(local.linear(), local.learning_rate(ROUND), 5)
    noise = (updates - (shrunk[-1] - 1) * start) / (0.5 * np.linalg.norm(answers))
    weights = noise[:, : 6 * CLASSES].reshape(-1, CLASSES, 6)
    rows = np.concatenate([weights, noise[:, 6 * CLASSES :, None]], 2)
    basis, _ = np.linalg.qr(np.concatenate([np.c_[x, np.ones(3)].T, np.eye(7, 4)], 1))
    check_distribution((rows @ basis).reshape(len(noise), -1))
    check_distribution(noise)


@pytest.mark.parametrize("twin", [False, True])
def test_the_noise_of_steps_and_update_have_the_joint_law_of_a_full_draw(twin):
    """Regression without clipping is linear, so that the update is A z for all steps' noises z,
    with an A that repeats every noise's backend through the later gradients: its distribution is
    N(m, A A^T).
    """
    p = 6
    outputs = 2
    steps = 5
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(4, p, generator=generator)
    if twin:
        x[3] = x[1]
    y = torch.randn(4, outputs, generator=generator)
    local = Sgd(steps=steps, batch=2, lr=0.4, momentum=0.5, weight_decay=0.1)
    module = nn.Linear(p, outputs)
    assert span_noise_pays(4, p, outputs, True, steps, 2)
    updates = noised_alike(module, local, x, y, 1500, 0.3, 1e6)
    start = models.flatten(module)
    d = len(start)
    index, _ = batches(SEED, ROUND, [7], [0], [4], local)

    def loop(z: np.ndarray) -> np.ndarray:
        return plain_loop(module, local, x, y, index[0], 1e6, torch.from_numpy(z))[0].numpy()

    mean = loop(np.zeros((steps, d)))
    columns = []
    for k, j in itertools.product(range(steps), range(d)):
        z = np.zeros((steps, d))
        z[k, j] = 0.3
        columns.append(loop(z) - mean)
    root = np.linalg.cholesky(np.array(columns).T @ np.array(columns))
    check_distribution(np.linalg.solve(root, (updates - mean).T).T)


def test_rows_are_taken_for_a_basis_only_where_it_is_exact():
    generator = np.random.default_rng(0)
    x = generator.standard_normal((5, 9))
    for near, kept in ((1e-2, True), (2e-3, True), (5e-4, False), (0.0, True)):
        x[4] = x[2] + near * x[4]
        lower = triangle(x)
        assert (lower is not None) == kept
        if lower is not None:
            alive = np.flatnonzero(lower.diagonal())
            basis = np.linalg.solve(lower[np.ix_(alive, alive)], x[alive])
            assert np.abs(basis @ basis.T - np.eye(len(alive))).max() < 1e-8
            assert np.allclose(lower @ lower.T, x @ x.T, rtol=1e-12)
        x[4] = generator.standard_normal(9)
