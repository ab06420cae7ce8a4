"""Per-sample clipping and noise at every local step: every backend against autograd, one sample at
a time, and what privacy rests on.
"""

from __future__ import annotations

import copy
import logging
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import form, task_of
from scipy import stats
from torch import nn

from raydpfl import models
from raydpfl.check.scales import hold_samples
from raydpfl.core import native
from raydpfl.core.prng import Purpose, normals
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Scaffold, Sgd
from raydpfl.training.backend_choice import resolve
from raydpfl.training.backends import ghost_clipping, vmap
from raydpfl.training.backends.ghost_clipping import Layerwise, NotLayerwise
from raydpfl.training.minibatches import batches
from raydpfl.training.trainer import Trainer

SHAPE = (2, 6, 6)
CLASSES = 4
SIZES = [7, 3, 5, 0, 7]  # one with fewer rows than a batch, one empty slot
CLIENTS = [2, 5, 5, -1, 30]
DRAWS = [0, 0, 1, 0, 0]
ROUND = 2
SEED = 4
LOCALS = {
    "plain": Sgd(steps=2, batch=4, lr=0.3),
    "all terms": Sgd(steps=3, batch=4, lr=0.2, momentum=0.7, weight_decay=0.1, proximal=0.3),
    "full batches": Sgd(steps=2, batch="full", lr=0.3, weight_decay=0.1),
    "epochs": Sgd(steps=4, batch=4, lr=0.3, sampling="epochs"),
}


pytestmark = pytest.mark.usefixtures("one_thread")


class Positions(nn.Module):
    """Linear layers over T x 2 positions, the first with few inputs a position, and a LayerNorm
    over the last two axes.
    """

    def __init__(self, positions: int, width: int):
        super().__init__()
        self.positions = positions
        inputs = 36 // positions
        self.first = nn.Linear(inputs, width)
        self.norm = nn.LayerNorm((positions, width))
        self.last = nn.Linear(width, CLASSES, bias=False)

    def forward(self, x):
        return self.last(
            torch.tanh(self.norm(self.first(x.reshape(len(x), 2, self.positions, -1))))
        ).mean((1, 2))


class InPlace(nn.Module):
    """Changes the outputs of its layers in place, and adds to one of them."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(2, 6, 3, padding=1)
        self.b = nn.Conv2d(6, 6, 3, padding=1)
        self.norm = nn.GroupNorm(3, 6)
        self.c = nn.Linear(216, CLASSES)

    def forward(self, x):
        a = torch.tanh_(self.a(x))
        out = self.norm(self.b(a))
        out += a
        return self.c(F.relu_(out.mul_(2.0)).flatten(1))


class Scale(nn.Module):
    """A layer with a bare parameter, of two inputs."""

    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.linspace(0.5, 2, 72))

    def forward(self, x, y):
        return torch.sin(self.by * x.flatten(1)) + self.by**2 * y.flatten(1)


class Twice(nn.Module):
    """Hands its own layer two inputs."""

    def __init__(self):
        super().__init__()
        self.scale = Scale()
        self.last = nn.Linear(72, CLASSES)

    def forward(self, x):
        return self.last(self.scale(x, x.tanh()))


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.last = nn.Linear(3, CLASSES)

    def forward(self, x):
        return self.last(self.table((x.flatten(1)[:, :10].abs() * 3).long() % 5).mean(1))


class Bare(nn.Module):
    """A parameter of its own beside those of its layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(72, 8)
        self.last = nn.Linear(8, CLASSES)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.last(self.scale * torch.tanh(self.first(x.flatten(1))))


class Reused(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(72, 8)
        self.square = nn.Linear(8, 8)
        self.leave = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.leave(
            torch.tanh(self.square(torch.tanh(self.square(self.enter(x.flatten(1))))))
        )


class TiedByHand(nn.Module):
    """Uses a layer's weight a second time, outside of the layer."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(72, CLASSES)
        self.square = nn.Linear(CLASSES, CLASSES)

    def forward(self, x):
        return F.linear(torch.tanh(self.square(self.enter(x.flatten(1)))), self.square.weight)


def tied() -> nn.Module:
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 72), nn.Linear(72, CLASSES)
    )
    module[3].weight = module[1].weight
    return module


def frozen() -> nn.Module:
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 5, 3),
        nn.Flatten(),
        nn.Linear(20, CLASSES),
    )
    for parameter in (module[0].bias, module[1].weight, module[3].weight, module[5].bias):
        parameter.requires_grad_(False)
    return module


def ending(*layers: nn.Module) -> nn.Module:
    """The layers, then a linear one."""
    with torch.no_grad():
        width = nn.Sequential(*layers)(torch.zeros(2, *SHAPE)).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(width, CLASSES))


STACKS = {
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES)),
    "softmax without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, CLASSES, bias=False)),
    "relu mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(72, 17), nn.ReLU(), nn.Linear(17, CLASSES)
    ),
    "mlp": lambda: nn.Sequential(
        nn.Flatten(),
        nn.Linear(72, 17),
        nn.Tanh(),
        nn.Linear(17, 9, bias=False),
        nn.Sigmoid(),
        nn.Linear(9, CLASSES),
    ),
    "leaky mlp": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(72, 17), nn.LeakyReLU(0.1), nn.Linear(17, CLASSES)
    ),
}
LAYERS = {
    "linear, few positions": lambda: Positions(2, 30),
    "linear, many positions": lambda: Positions(18, 5),
    "convolution": lambda: ending(nn.Conv2d(2, 5, 3)),
    "of wide patches": lambda: ending(nn.Conv2d(2, 5, 3), nn.Conv2d(5, 3, 3)),
    "of few positions": lambda: ending(nn.Conv2d(2, 20, 5), nn.Conv2d(20, 24, (2, 1), bias=False)),
    "stride": lambda: ending(
        nn.Conv2d(2, 5, 3, stride=(2, 1), padding=(1, 2)), nn.Conv2d(5, 20, 2, stride=(1, 3))
    ),
    "dilation": lambda: ending(
        nn.Conv2d(2, 5, 2, dilation=(3, 2), padding=1),
        nn.Conv2d(5, 20, 3, padding=(1, 0), dilation=2),
    ),
    "groups": lambda: ending(
        nn.Conv2d(2, 6, 3, groups=2), nn.Conv2d(6, 6, 2, groups=6), nn.Conv2d(6, 9, 2, groups=3)
    ),
    "padded to the same size": lambda: ending(
        nn.Conv2d(2, 5, 4, padding="same"), nn.Conv2d(5, 5, 2, padding="same", dilation=3)
    ),
    "reflected and circular": lambda: ending(
        nn.Conv2d(2, 5, 3, padding=2, padding_mode="reflect"),
        nn.Conv2d(5, 20, 3, padding=1, padding_mode="circular"),
    ),
    "one dimension": lambda: ending(
        nn.Flatten(2), nn.Conv1d(2, 3, 5, stride=2, padding=1), nn.Conv1d(3, 4, 3)
    ),
    "three dimensions": lambda: ending(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 3, (2, 3, 3))),
    "transposed": lambda: ending(
        nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), nn.Conv2d(4, 2, 5, stride=3)
    ),
    "channels last": lambda: ending(
        nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 20, 2)
    ),
    "pooled": lambda: nn.Sequential(
        nn.Conv2d(2, 5, 3, padding=1, stride=(1, 2)),
        nn.MaxPool2d((2, 1)),
        nn.ReLU(),
        nn.Conv2d(5, 19, (1, 2), bias=False),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),  # whose windows overlap
        nn.Flatten(),
        nn.Linear(38, CLASSES),
    ),
    "group norm": lambda: ending(
        nn.Conv2d(2, 6, 3),
        nn.GroupNorm(3, 6),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.GroupNorm(4, 96),
    ),
    "instance norm": lambda: ending(nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6, affine=True)),
    "rms norm": lambda: ending(nn.Conv2d(2, 6, 3), nn.RMSNorm((4, 4))),
    "embedding": Embedded,
    "own layer": Twice,
    "in place": InPlace,
    "frozen": frozen,
}
OTHERS = {"bare parameter": Bare, "reused": Reused, "tied": tied, "tied by hand": TiedByHand}
compiled = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
MODULES = {**STACKS, **LAYERS, **OTHERS}
BY_HAND = ("bare parameter", "tied by hand")  # used by no layer of their own
POOLED = pytest.param("convolutional", "pooled", marks=compiled)
BACKENDS = [
    POOLED,
    *(("fused", name) for name in STACKS),
    *(("layerwise", name) for name in {**STACKS, **LAYERS}),
    *(("one_batch", name) for name in MODULES if name not in BY_HAND),
    *((backend, name) for backend in ("vmap", "loop") for name in MODULES),
]


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MODULES[name]()


def rows(sizes=SIZES, n=7, seed=1, regression=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), n, *SHAPE, generator=generator) * torch.rand(
        len(sizes), n, 1, 1, 1, generator=generator
    )
    y = torch.randint(0, CLASSES, (len(sizes), n), generator=generator)
    y = torch.randn(len(sizes), n, generator=generator) if regression else y
    for slot, size in enumerate(sizes):  # whoever looks at padding will show it
        x[slot, size:] = float("nan")
        y[slot, size:] = -7
    return x, y


def gradients(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each sample's gradient by autograd, float64 [B, d]."""
    module = copy.deepcopy(module).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    each = []
    for row, label in zip(x, y, strict=True):
        outputs = module(row[None])
        loss = (
            (outputs.squeeze() - label) ** 2 / 2
            if y.is_floating_point()
            else F.cross_entropy(outputs, label[None])
        )
        each.append(
            torch.cat(
                [gradient.flatten() for gradient in torch.autograd.grad(loss, parameters)]
            ).double()
        )
    return torch.stack(each)


def by_the_book(
    module: nn.Module, local: Sgd, clip: float, x, y, index, slot: int, std: float, correction
) -> tuple[torch.Tensor, np.ndarray]:
    """One client's update, step by step as the papers print it, on a float64 model; and the norms
    that its samples' gradients had, [steps, batch].
    """
    start = models.flatten(module).double()
    now = start.clone()
    velocity = torch.zeros_like(start)
    norms = []
    for step, batch in enumerate(index):
        each = gradients(models.load(copy.deepcopy(module), now.float()), x[batch], y[batch])
        norms.append([float(one.norm()) for one in each])
        g = sum(one * min(1.0, clip / float(one.norm())) for one in each) / len(batch)
        g += (
            std
            * normals(
                SEED,
                Purpose.STEP_NOISE,
                len(start),
                t=ROUND,
                client=CLIENTS[slot],
                draw=DRAWS[slot],
                step=step,
            ).double()
        )
        g += local.weight_decay * now + local.proximal * (now - start) + correction.double()
        velocity = local.momentum * velocity + g
        now = now - local.learning_rate(ROUND) * velocity
    return now - start, np.array(norms)


@cache
def median_norm(name: str) -> float:
    """About; between the norms of two samples, so that rounding decides of none whether it is
    clipped.
    """
    x, y = rows()
    return float(gradients(made(name), x[0], y[0]).norm(dim=1).quantile(0.45))


@cache
def expected(name: str, method: str) -> dict[int, tuple[torch.Tensor, np.ndarray]]:
    module = made(name)
    local = LOCALS[method]
    x, y = rows()
    stds, corrections = noise_and_corrections(module)
    index, batch_sizes = batches(SEED, ROUND, CLIENTS, DRAWS, SIZES, local)
    clip = median_norm(name)
    return {
        slot: by_the_book(
            module,
            local,
            clip,
            x[slot],
            y[slot],
            index[slot, :, : batch_sizes[slot]],
            slot,
            stds[slot],
            corrections[slot],
        )
        for slot in np.flatnonzero(SIZES)
    }


def noise_and_corrections(module: nn.Module) -> tuple[np.ndarray, torch.Tensor]:
    corrections = (
        torch.randn(5, models.parameter_count(module), generator=torch.Generator().manual_seed(2))
        * 0.01
    )
    return np.array([0.01, 0.0, 0.02, 0.0, 0.005]), corrections


def train(backend, module, local, clip, x, y, sizes=SIZES, clients=CLIENTS, draws=DRAWS, **more):
    trainer = Trainer(module, local, backend=backend, seed=SEED, clip=clip, task=task_of(y))
    chunk = trainer.chunk(
        models.flatten(module), x, y, sizes, t=ROUND, clients=clients, draws=draws, **more
    )
    return {slot: (delta, loss) for block in chunk for slot, delta, loss in block.clients()}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("backend,name", BACKENDS)
def test_every_way_clips_each_sample_as_autograd_by_the_book_does(backend, name):
    module = made(name)
    before = models.flatten(module)
    stds, corrections = noise_and_corrections(module)
    for method in LOCALS if name in ("mlp", "channels last", "bare parameter") else ("all terms",):
        got = train(
            backend,
            module,
            LOCALS[method],
            median_norm(name),
            *rows(),
            stds=stds,
            corrections=corrections,
        )
        assert torch.equal(models.flatten(module), before)
        assert list(got) == [0, 1, 2, 4]
        for slot, (update, _) in expected(name, method).items():
            assert (got[slot][0] - update).norm() <= 2e-5 * update.norm()


@pytest.mark.parametrize(
    "backend,name",
    [
        pytest.param("compiled", "relu mlp", marks=compiled),
        ("fused", "softmax"),
        ("fused", "mlp"),
        ("layerwise", "channels last"),
        ("vmap", "bare parameter"),
        ("loop", "mlp"),
    ],
)
def test_the_loss_is_the_mean_over_the_batches_rows_unclipped(backend, name):
    module = made(name)
    local = Sgd(steps=1, batch=4)
    x, y = rows()
    index, batch_sizes = batches(SEED, ROUND, CLIENTS, DRAWS, SIZES, local)
    for slot, (_, loss) in train(backend, module, local, 1e-3, x, y).items():
        batch = index[slot, 0, : batch_sizes[slot]]
        assert loss == pytest.approx(
            F.cross_entropy(module(x[slot, batch]), y[slot, batch]).item(), rel=1e-5
        )


@pytest.mark.parametrize("backend", ["fused", "layerwise", "vmap", "loop"])
def test_regression_is_clipped_too(backend):
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.Tanh(), nn.Linear(9, 1))
    x, y = rows(regression=True)
    clip = float(gradients(module, x[0], y[0]).norm(dim=1).median())
    local = Sgd(steps=1, batch="full", lr=1.0)
    for slot, (delta, loss) in train(backend, module, local, clip, x, y).items():
        size = SIZES[slot]
        each = gradients(module, x[slot, :size], y[slot, :size])
        mean = (each * (clip / each.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
        assert (delta + mean).norm() <= 1e-5 * mean.norm()
        assert loss == pytest.approx(
            (module(x[slot, :size])[:, 0] - y[slot, :size]).square().mean().item() / 2, rel=1e-5
        )


@pytest.mark.parametrize("ghost,few", [(0, 0), (0, 1 << 20), (1 << 20, 0)])
@pytest.mark.parametrize(
    "name",
    [
        "linear, few positions",
        "linear, many positions",
        "of wide patches",
        "stride",
        "dilation",
        "channels last",
    ],
)
def test_gradients_that_are_formed_and_those_that_are_not_agree(name, ghost, few, monkeypatch):
    monkeypatch.setattr(ghost_clipping, "GHOST", ghost)
    monkeypatch.setattr(ghost_clipping, "SMALL_FILTER", few)
    module = made(name)
    stds, corrections = noise_and_corrections(module)
    got = train(
        "layerwise",
        module,
        LOCALS["all terms"],
        median_norm(name),
        *rows(),
        stds=stds,
        corrections=corrections,
    )
    for slot, (update, _) in expected(name, "all terms").items():
        assert (got[slot][0] - update).norm() <= 2e-5 * update.norm()


def test_each_form_of_a_gradient_is_chosen_somewhere_among_the_tested_layers():
    shapes = {
        nn.Linear(9, 30): (4, 2, 2, 30),
        nn.Linear(2, 5): (4, 2, 18, 5),
        nn.Conv2d(20, 24, (2, 1)): (4, 24, 1, 2),
        nn.Conv2d(2, 5, 3): (4, 5, 4, 4),
    }
    assert [
        ghost_clipping._ghostly(layer, "weight", output) for layer, output in shapes.items()
    ] == [
        True,
        False,
        True,
        False,
    ]


def test_where_positions_cancel_a_ghost_norm_is_never_too_small():
    """Two positions with opposite gradients and almost the same inputs; the true norm in
    float64.
    """

    def norms(a, g):
        return (g.double().mT @ a.double()).flatten(1).norm(dim=1)

    generator = torch.Generator().manual_seed(0)
    for apart in (1e-2, 1e-3, 1e-4, 1e-5, 0.0):
        a = torch.randn(200, 1, 64, generator=generator) + apart * torch.randn(
            200, 2, 64, generator=generator
        )
        g = torch.randn(200, 1, 32, generator=generator) * torch.tensor([1.0, -1.0])[:, None]
        assert (ghost_clipping._ghost(a, g).double().sqrt() >= norms(a, g)).all()
    a = torch.randn(200, 8, 64, generator=generator)
    g = torch.randn(200, 8, 32, generator=generator)
    torch.testing.assert_close(
        ghost_clipping._ghost(a, g).double().sqrt(), norms(a, g), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("inputs,outputs", [(1e-23, 1e18), (1e18, 1e-23), (1e-19, 1e15)])
@pytest.mark.parametrize("positions", [1, 8])
def test_a_ghost_norm_is_not_too_small_where_squares_underflow(positions, inputs, outputs):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, positions, 64, generator=generator) * inputs
    g = torch.randn(20, positions, 32, generator=generator) * outputs
    norms = (g.double().mT @ a.double()).flatten(1).norm(dim=1)
    assert (ghost_clipping._ghost(a, g).double().sqrt() >= norms * (1 - 1e-6)).all()


CLIPPING = [
    pytest.param("compiled", marks=compiled),
    "fused",
    pytest.param("convolutional", marks=compiled),
    *("layerwise", "one_batch", "vmap", "loop"),
]


@pytest.mark.parametrize("backend", CLIPPING)
def test_a_bound_on_samples_holds_for_inputs_and_errors_of_every_size_or_is_refused(backend):
    for exponent in range(-12, 16, 3):
        hold_samples(backend, 10.0**exponent)
    for bound in (1e-30, 1e-25, 0.9e-12, 1.1e15, 1e30, float("nan")):
        with pytest.raises(ConfigError, match=r"bounding.bound = .*from 1e-12 to 1e\+15"):
            hold_samples(backend, bound)


@pytest.mark.parametrize(
    "backend,module,name",
    [("layerwise", ghost_clipping, "channels last"), ("vmap", vmap, "bare parameter")],
)
def test_a_batch_that_takes_too_much_memory_is_cut(backend, module, name, monkeypatch):
    shares = np.empty(5)
    shares_cut = np.empty(5)
    whole = train(backend, made(name), LOCALS["plain"], median_norm(name), *rows(), clipped=shares)
    calls = []
    spied = {"layerwise": (Layerwise, "_forward"), "vmap": (vmap.Vmap, "_loss")}[backend]
    inner = getattr(*spied)
    monkeypatch.setattr(
        *spied, lambda self, *arguments: (calls.append(1), inner(self, *arguments))[1]
    )
    monkeypatch.setattr(module, "LIMIT", 1)
    for slot, (delta, loss) in train(
        backend, made(name), LOCALS["plain"], median_norm(name), *rows(), clipped=shares_cut
    ).items():
        assert (delta - whole[slot][0]).norm() <= 1e-5 * delta.norm() and loss == pytest.approx(
            whole[slot][1]
        )
    np.testing.assert_array_equal(shares, shares_cut)
    assert len(calls) >= 4 * 2


PRIVATE = [
    POOLED,
    ("fused", "softmax"),
    ("fused", "mlp"),
    ("layerwise", "channels last"),
    ("layerwise", "in place"),
    ("vmap", "bare parameter"),
    ("loop", "mlp"),
]


SAMPLED = [  # with backends that add no corrections
    *PRIVATE,
    pytest.param("compiled", "softmax", marks=compiled),
    pytest.param("compiled", "relu mlp", marks=compiled),
]


@pytest.mark.parametrize("backend,name", SAMPLED)
def test_no_sample_moves_a_step_by_more_than_the_bound(backend, name):
    """One row a step, with a learning rate of 1: the update is minus the clipped gradient."""
    module = made(name)
    generator = np.random.default_rng(0)
    local = Sgd(steps=1, batch=1, lr=1.0)
    free = clipped = 0
    for seed in range(12):
        x, y = rows(sizes=[1] * 5, n=1, seed=seed)
        x *= torch.from_numpy(10 ** generator.uniform(-3, 3, (5, 1, 1, 1, 1)).astype(np.float32))
        clip = float(10 ** generator.uniform(-2, 2))
        for slot, (delta, _) in train(
            backend, module, local, clip, x, y, [1] * 5, range(5), [0] * 5
        ).items():
            raw = gradients(module, x[slot], y[slot])[0]
            rounding = 1e-6 * float(models.flatten(module).norm())
            assert delta.norm() <= clip * (1 + 1e-5) + rounding
            if raw.norm() <= clip:
                assert (delta + raw).norm() <= 1e-4 * raw.norm() + rounding
                free += 1
            else:
                assert float(delta.norm()) == pytest.approx(clip, rel=1e-5, abs=rounding)
                clipped += 1
    assert free >= 10 and clipped >= 10


@pytest.mark.parametrize("backend,name", SAMPLED)
def test_replacing_one_sample_moves_the_mean_gradient_by_at_most_twice_the_bound_over_the_batch(
    backend, name
):
    module = made(name)
    clip = 0.5 * median_norm(name)
    local = Sgd(steps=1, batch="full", lr=1.0)
    x, y = rows(sizes=[5] * 5, n=5)
    other = x.clone()
    other[:, 2] = 50 * torch.flip(x[:, 2], (1,))
    before, after = (
        train(backend, module, local, clip, each, y, [5] * 5, range(5), [0] * 5)
        for each in (x, other)
    )
    for slot in range(5):
        moved = (before[slot][0] - after[slot][0]).norm()
        assert 0 < moved <= 2 * clip / 5 * (1 + 1e-4) + 1e-6 * models.flatten(module).norm()


@pytest.mark.parametrize("backend,name", PRIVATE)
def test_the_noise_of_a_step_is_the_clients_keyed_normals_times_its_std(backend, name):
    """Not divided by the batch, whatever its size; each step its own. Kolmogorov-Smirnov;
    false-alarm rate 1e-4.
    """
    module = made(name)
    local = Sgd(steps=2, batch=4, lr=0.5)
    d = models.parameter_count(module)
    clip = 1e-6
    stds = np.array([0.5, 1.0, 2.0, 9.0, 4.0])
    quiet = train(backend, module, local, clip, *rows())
    noised = train(backend, module, local, clip, *rows(), stds=stds)
    drawn = {}
    for slot in quiet:
        drawn[slot] = (quiet[slot][0] - noised[slot][0]) / (0.5 * stds[slot])
        key = dict(t=ROUND, client=CLIENTS[slot], draw=DRAWS[slot])
        keyed = sum(normals(SEED, Purpose.STEP_NOISE, d, **key, step=step) for step in range(2))
        torch.testing.assert_close(drawn[slot], keyed, rtol=1e-3, atol=1e-4)
    together = torch.cat(list(drawn.values())).numpy() / 2**0.5
    assert stats.kstest(together, "norm").pvalue > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("backend,name", PRIVATE)
def test_a_clients_bits_depend_on_no_other_slot_of_its_chunk(backend, name):
    module = made(name)
    local = LOCALS["all terms"]
    clip = median_norm(name)
    x, y = rows()
    stds, corrections = noise_and_corrections(module)
    together = train(backend, module, local, clip, x, y, stds=stds, corrections=corrections)
    again = train(backend, module, local, clip, x, y, stds=stds, corrections=corrections)
    for slot, (delta, loss) in together.items():
        assert torch.equal(delta, again[slot][0])
        keep = np.arange(5) == slot
        alone_x = torch.zeros_like(x)
        alone_y = torch.zeros_like(y)
        others_x, others_y = rows(sizes=[7] * 5, seed=9)
        for rows_x, rows_y in ((alone_x, alone_y), (others_x, others_y)):
            rows_x[slot] = x[slot]
            rows_y[slot] = y[slot]
        sizes = np.where(keep, SIZES, 0)
        members = np.where(keep, CLIENTS, -1)
        added = {"stds": stds, "corrections": corrections}
        alone = train(backend, module, local, clip, alone_x, alone_y, sizes, members, **added)
        sizes = np.where(keep, SIZES, 7)
        members = np.where(keep, CLIENTS, np.arange(40, 45))
        added = {
            "stds": np.where(keep, stds, 3.0),
            "corrections": torch.where(torch.from_numpy(keep)[:, None], corrections, 1.0),
        }
        among = train(backend, module, local, clip, others_x, others_y, sizes, members, **added)
        for other_delta, other_loss in (alone[slot], among[slot]):
            assert torch.equal(delta, other_delta) and loss == other_loss


@pytest.mark.parametrize("backend,name", PRIVATE)
def test_the_share_clipped_counts_samples_and_steps_with_gradients_longer_than_the_bound(
    backend, name
):
    module = made(name)
    clip = median_norm(name)
    stds, corrections = noise_and_corrections(module)
    for method in LOCALS:
        clipped = np.zeros(5)
        seen = {}
        trainer = Trainer(module, LOCALS[method], backend=backend, seed=SEED, clip=clip)
        x, y = rows()
        keyed = {
            "t": ROUND,
            "clients": CLIENTS,
            "draws": DRAWS,
            "stds": stds,
            "corrections": corrections,
        }
        for block in trainer.chunk(models.flatten(module), x, y, SIZES, **keyed, clipped=clipped):
            for slot in block.slots.tolist():
                seen[slot] = clipped[slot]  # there once the slot is yielded
        norms = {slot: norms for slot, (_, norms) in expected(name, method).items()}
        # rounding decides of none
        assert all(np.abs(each / clip - 1).min() > 5e-5 for each in norms.values())
        assert seen == pytest.approx(
            {slot: np.mean(each > clip) for slot, each in norms.items()}, rel=1e-15
        )
        assert any(0 < share < 1 for share in seen.values()) and np.isnan(clipped[3])


@pytest.mark.parametrize("backend,name", SAMPLED)
def test_a_bound_beyond_all_gradients_clips_none_one_below_them_all_and_none_that_is_not_finite(
    backend, name
):
    module = made(name)
    (x, y) = rows()
    local = Sgd(steps=1, batch="full")
    clipped = np.empty(5)
    for clip, share in ((1e9, 0.0), (1e-9, 1.0)):
        train(backend, module, LOCALS["epochs"], clip, x, y, clipped=clipped)
        np.testing.assert_array_equal(clipped, [share, share, share, np.nan, share])
    for value in (float("nan"), float("inf")):
        x[2, 3] = value
        train(backend, module, local, 1e-9, x, y, clipped=clipped)
        np.testing.assert_array_equal(clipped, [1.0, 1.0, 0.8, np.nan, 1.0])
    if backend != "layerwise":
        train(backend, module, local, None, *rows(), clipped=clipped)
        assert np.isnan(clipped).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("backend,name", SAMPLED)
def test_a_gradient_that_is_not_finite_shows_in_its_clients_update_and_in_no_other(
    backend, name, value
):
    module = made(name)
    local = Sgd(steps=1, batch="full", lr=0.1)
    x, y = rows()
    healthy = train(backend, module, local, 1.0, x, y)
    x[2, 3] = value
    sick = train(backend, module, local, 1.0, x, y)
    assert torch.isfinite(healthy[2][0]).all() and not torch.isfinite(sick[2][0]).all()
    assert all(torch.equal(healthy[slot][0], sick[slot][0]) for slot in (0, 1, 4))


def test_a_finite_gradient_whose_norm_overflows_is_not_dropped():
    module = made("softmax")
    x, y = rows()
    x[2, 3] = 1e30
    for backend in ("compiled", "fused", "layerwise", "vmap", "loop"):
        assert not torch.isfinite(
            train(backend, module, Sgd(steps=1, batch="full"), 1.0, x, y)[2][0]
        ).all()


def test_scaffold_trains_with_clipping_and_noise():
    module = made("channels last")
    local = Scaffold(steps=2, batch=4, lr=0.3)
    stds, corrections = noise_and_corrections(module)
    got = {
        backend: train(backend, module, local, 1.0, *rows(), stds=stds, corrections=corrections)
        for backend in ("layerwise", "vmap", "loop")
    }
    for slot, (delta, _) in got["loop"].items():
        for backend in ("layerwise", "vmap"):
            assert (got[backend][slot][0] - delta).norm() <= 2e-5 * delta.norm()


# ------------------------------------------------------------------------------------------------
# which backend


@pytest.mark.parametrize("name", MODULES)
def test_the_way_follows_from_the_architecture(name, caplog):
    with caplog.at_level(logging.WARNING, "raydpfl"):
        backend = resolve(made(name), Sgd(), form(SHAPE), clip=1.0)
    stacked = "fused" if name == "leaky mlp" or native.library() is None else "compiled"
    by_hand = native.library() is not None and name == "pooled"
    layerwise = "convolutional" if by_hand else "layerwise"
    if name == "frozen":
        layerwise = "one_batch"
    assert backend == (stacked if name in STACKS else layerwise if name in LAYERS else "vmap")
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "clients are trained by vmap"
    ] * (backend == "vmap")


@pytest.mark.parametrize(
    "kind,backend",
    [
        ("softmax", "compiled"),
        ("mlp", "compiled"),
        ("cnn", "convolutional"),
        ("dp_cnn", "layerwise"),
    ],
)
def test_the_models_of_the_papers_have_a_fast_way(kind, backend, caplog):
    module = models.build(models.parse({"kind": kind}), form((1, 12, 12)), seed=0)
    found = resolve(module, Sgd(), form((1, 12, 12)), clip=1.0)
    if native.library() is not None:
        assert found == backend and not caplog.messages


@pytest.mark.parametrize(
    "name,reason",
    [
        ("bare parameter", "Bare has parameters of its own beside those of its layers"),
        ("reused", "Linear is called more than once"),
        ("tied", "a parameter of Linear is tied to another layer's"),
        ("tied by hand", "its first step is off by"),
    ],
)
def test_a_module_that_layerwise_would_get_wrong_is_refused_with_the_reason(name, reason):
    with pytest.raises(
        ConfigError,
        match=rf"client\.backend = 'layerwise': expected auto or loop; this backend "
        rf"does not fit the model: {reason}",
    ):
        resolve(made(name), Sgd(), form(SHAPE), "layerwise", clip=1.0)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.last(self.lstm(x[:, 0])[0][:, -1])


class Overwrites(nn.Module):
    """Changes a layer's input after the layer has seen it, and made a padded copy."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
        self.last = nn.Linear(72, CLASSES)

    def forward(self, x):
        x = x + 0
        return self.last((self.first(x) + x.mul_(3)).flatten(1))


class SamplesSecond(nn.Module):
    """A layer whose first axis is not the samples'."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(60, CLASSES)

    def forward(self, x):
        return self.last(
            self.first(x.transpose(0, 1).reshape(12, -1, 6)).transpose(0, 1).reshape(len(x), -1)
        )


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)
        self.last = nn.Linear(72, CLASSES)

    def forward(self, x):
        return self.last(x.flatten(1))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "kind,reason",
    [
        (Recurrent, "LSTM takes or gives more than tensors"),
        (Overwrites, "the input of Conv2d is changed in place after it"),
        (SamplesSecond, "the first axis of Linear's input is not that of the samples"),
        (Unused, "Linear is not called"),
    ],
)
def test_what_layerwise_cannot_do_is_left_to_vmap_or_the_loop_and_said(kind, reason, caplog):
    with caplog.at_level(logging.WARNING, "raydpfl"):
        assert resolve(kind(), Sgd(), form(SHAPE), clip=1.0) in ("vmap", "loop")
    assert reason in caplog.messages[0]


class Drawing(nn.Module):
    """A layer with a parameter and a dropout of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(72))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(x.flatten(1) * self.weight)


def test_a_layer_that_cannot_be_drawn_sample_by_sample_is_left_to_the_loop():
    module = nn.Sequential(Drawing(), nn.Linear(72, CLASSES))
    assert resolve(module, Sgd(), form(SHAPE), clip=1.0) == "loop"
    module[0].dropout.p = 0.0
    assert resolve(module, Sgd(), form(SHAPE), clip=1.0) == "layerwise"


def test_linear_layers_over_positions_are_no_stack_of_matrices_but_trained_layerwise():
    module = nn.Sequential(nn.Flatten(2), nn.Linear(36, 5), nn.Flatten(), nn.Linear(10, CLASSES))
    assert resolve(module, Sgd(), form(SHAPE), clip=1.0) == "layerwise"


class Shrinking(nn.Module):
    """Writes to its parameter while it is run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, CLASSES)

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight[:, x.flatten(1).mean(0) > 0] *= 0.9
        return self.linear(x.flatten(1))


def test_a_module_that_writes_to_its_own_parameters_is_refused_as_no_noise_hides_that():
    with pytest.raises(
        ConfigError,
        match=r"model = 'Shrinking': expected a module that mixes no samples.*its parameter "
        r"linear.weight changes",
    ):
        resolve(Shrinking(), Sgd(), form(SHAPE), clip=1.0)
    table = nn.Sequential(nn.Flatten(), nn.EmbeddingBag(5, CLASSES, max_norm=1e9))
    with pytest.raises(ConfigError, match=r"1 is a EmbeddingBag with max_norm"):
        resolve(table, Sgd(), form(SHAPE), clip=1.0)


class Mixing(nn.Module):
    """Subtracts the mean of the batch, so that a gradient is no sum over samples."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, CLASSES)

    def forward(self, x):
        return self.linear((x - x.mean(0) / 2).flatten(1))


class Counting(nn.Module):
    """Keeps a running mean of what it is given."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(72, CLASSES)
        self.register_buffer("mean", torch.zeros(72))

    def forward(self, x):
        x = x.flatten(1)
        self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        return self.linear(x - self.mean)


def test_a_module_that_mixes_samples_is_clipped_one_sample_at_a_time_or_refused():
    assert resolve(Mixing(), Sgd(), form(SHAPE), clip=1.0) in ("vmap", "loop")
    with pytest.raises(
        ConfigError,
        match=r"model = 'Counting': expected a module that mixes no samples.*its buffer "
        r"mean changes",
    ):
        resolve(Counting(), Sgd(), form(SHAPE), clip=1.0)
    normed = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, CLASSES)
    )
    for backend in ("auto", "layerwise", "vmap", "loop"):
        with pytest.raises(
            ConfigError,
            match=r"model = 'Sequential': expected a module that mixes no samples.*1 is a "
            r"BatchNorm2d "
            r".*group_norm",
        ):
            resolve(normed, Sgd(), form(SHAPE), backend, clip=1.0)
    with pytest.raises(NotLayerwise, match="BatchNorm2d mixes the samples of a batch"):
        Layerwise(normed, Sgd(), torch.device("cpu"), form(SHAPE).task)
    assert resolve(normed, Sgd(), form(SHAPE)) == "loop"


@pytest.mark.parametrize("backend,name", PRIVATE[:-1])
@pytest.mark.parametrize("fault", ["a norm too small", "a bound of the mean gradient"])
def test_a_way_that_clips_slightly_wrong_is_noticed(backend, name, fault, monkeypatch):
    from raydpfl.training import backend_check
    from raydpfl.training.backends import convolutional, fused, ghost_clipping

    right = ghost_clipping.clip_factors
    wrong = (
        (lambda norms, bound: right(0.97 * norms, bound))
        if fault == "a norm too small"
        else (lambda norms, bound: right(norms * 0 + norms.mean(), bound))
    )
    assert backend_check.mismatch(made(name), Sgd(), form(SHAPE), backend, 1.0) is None
    for each in (convolutional, ghost_clipping, fused, vmap):
        monkeypatch.setattr(each, "clip_factors", wrong)
    assert "off by" in backend_check.mismatch(made(name), Sgd(), form(SHAPE), backend, 1.0)


def test_dropout_is_drawn_for_each_sample_and_keyed_by_the_client():
    module = ending(nn.Conv2d(2, 6, 3), nn.Dropout(0.5))
    assert resolve(module, Sgd(), form(SHAPE), clip=1.0) == "layerwise"
    x, y = rows()
    together = train("layerwise", module, LOCALS["plain"], 1.0, x, y)
    torch.manual_seed(1)
    for slot, (delta, _) in together.items():
        keep = np.arange(5) == slot
        alone = train(
            "layerwise",
            module,
            LOCALS["plain"],
            1.0,
            x,
            y,
            np.where(keep, SIZES, 0),
            np.where(keep, CLIENTS, -1),
        )
        assert torch.equal(alone[slot][0], delta)
    one_x = x[:1, :1].expand(5, 7, -1, -1, -1)
    one_y = y[:1, :1].expand(5, 7)
    dropped = train(
        "layerwise",
        module,
        Sgd(steps=1, batch=7),
        1.0,
        one_x,
        one_y,
        [7] * 5,
        [1, 2, 3, 3, 4],
        [0, 0, 0, 1, 0],
    )
    assert len({loss for _, loss in dropped.values()}) == 5
