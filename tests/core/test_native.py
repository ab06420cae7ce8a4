"""The compiled parts of the engine: same bits as their plain references, on every kind of code."""

import hashlib
import json
import math
import os
import pickle
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import processes
import pytest
import torch
import torch.nn.functional as F
from conftest import experiment, form, refusal, task_of
from torch import nn

from raydpfl import models
from raydpfl.core import exact_sum, kernel_build, native, prng
from raydpfl.core.messages import Grid
from raydpfl.core.prng import Purpose, clients_normals
from raydpfl.errors import RunError
from raydpfl.methods.local import Sgd
from raydpfl.runtime.worker import start_worker
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.layers.pooled_convolution import Filters, Window
from raydpfl.training.minibatches import batches
from raydpfl.training.trainer import CLASSES, Trainer

LENGTHS = [1, 2, 63, 64, 65, 127, 1000, 2049, 7850]
needs = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")


def test_it_compiles_wherever_there_is_a_compiler():
    assert shutil.which("cc") is None or native.library() is not None


def hostile(d: int, dtype: type) -> np.ndarray:
    """Rows of many sizes, [8, d]."""
    generator = np.random.default_rng(d)
    rows = generator.standard_normal((8, d)) * np.logspace(-30, 18, 8)[:, None]
    rows[1] = 0
    rows[2, d // 2] = np.inf
    rows[3, d // 3] = np.nan
    return rows.astype(dtype)


@needs
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", LENGTHS)
def test_norms_have_the_bits_of_the_reference_and_are_norms(d, dtype, monkeypatch):
    rows = torch.from_numpy(hostile(d, dtype))
    compiled = native.norms(rows)
    monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(compiled, native.norms(rows))
    for row, norm in zip(rows.double().numpy(), compiled, strict=True):
        if np.isfinite(row).all():
            assert norm == pytest.approx(math.sqrt(math.fsum(row * row)), rel=1e-14)
        else:
            assert not np.isfinite(norm)


@needs
@pytest.mark.parametrize("d", LENGTHS)
@pytest.mark.parametrize("step", [2.0**-47, 2.0**-60])
def test_what_is_added_is_put_on_the_grid_as_numpy_rounds_it(d, step, monkeypatch):
    generator = np.random.default_rng(d)
    most = 2.0**51
    numbers = np.rint(generator.uniform(-most, most, (3, d))) * 0.5 ** generator.integers(51)
    sent = numbers * step * 0.5 ** generator.integers(0, 3, d)  # a few just between two multiples
    sent[1, d // 2] = -most * step
    grid = Grid(step, most * step)
    expected = sum(np.rint(row / step) * step for row in sent)
    for _ in range(2):
        found = np.zeros(d)
        for rows in (sent[2:], sent[:2]):
            exact_sum.add(found, rows, grid)
        assert found.tobytes() == expected.tobytes()
        for wrong in (np.nan, -np.inf, most * step * (1 + 1e-9)):
            others = sent.copy()
            others[2, d - 1] = wrong
            with pytest.raises(RunError, match="diverged"):
                exact_sum.add(np.zeros(d), others, grid)
        monkeypatch.setattr(native, "library", lambda: None)


@needs
@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize("d", LENGTHS)
def test_sums_have_the_bits_of_adding_row_by_row(d, noised, monkeypatch):
    rows = hostile(d, np.float32)[[0, 1, 4, 5, 6]]
    generator = np.random.default_rng(1)
    factors = generator.random(len(rows))
    noise = generator.standard_normal(rows.shape) if noised else None
    grid = Grid(2.0**-11, 2.0**40)
    expected = np.zeros(d)
    for i, row in enumerate(rows):
        sent = row.astype(np.float64) * factors[i]
        sent = sent if noise is None else sent + noise[i]
        expected += np.rint(sent / grid.step) * grid.step
    for _ in range(2):
        total = np.zeros(d)
        exact_sum.add(total, rows, grid, factors, noise)
        np.testing.assert_array_equal(total, expected)
        monkeypatch.setattr(native, "library", lambda: None)


def drawn(n: int, stds: np.ndarray | None) -> np.ndarray:
    """The normals of some names, among them the largest."""
    who = {"clients": [0, 5, 2**40, 7], "draws": [0, 1, 2**32 - 1, 3]}
    found = [
        clients_normals(2**63 + 5, purpose, n, t=t, step=step, stds=stds, **who).numpy()
        for purpose, t, step in ((Purpose.CLIENT_NOISE, 0, 0), (Purpose.CANARY, 10**6, 2**32 - 1))
    ]
    return np.stack(found)


@needs
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 129, 1000, 70_001])
def test_normals_have_the_bits_of_those_in_numpy(n, scaled, monkeypatch):
    stds = np.array([1.0, 0.3, 1e-20, 7e9]) if scaled else None
    compiled = drawn(n, stds)
    monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(compiled, drawn(n, stds))


@needs
@pytest.mark.parametrize(
    "most, batch", [(5, 1), (17, 4), (65, 9), (native.RANKED, 16), (native.RANKED + 1, 17)]
)
@pytest.mark.parametrize("made", [{"steps": 3}, {"epochs": 2}])
def test_batches_are_those_that_sorted_words_give(most, batch, made, monkeypatch):
    local = Sgd(batch=batch, **made)
    generator = np.random.default_rng(most)
    sizes = generator.integers(0, most + 1, 12)
    sizes[3] = most
    who = (np.sort(generator.integers(0, 90, 12)), generator.integers(0, 3, 12))
    asked = []
    shuffled = native.shuffle_rows
    monkeypatch.setattr(native, "shuffle_rows", lambda *given: asked.append(shuffled(*given)))
    batches(4, 2**33, *who, sizes, local)
    assert asked == [most <= native.RANKED]
    monkeypatch.setattr(native, "shuffle_rows", shuffled)
    index, batch_sizes = batches(4, 2**33, *who, sizes, local)
    monkeypatch.setattr(native, "library", lambda: None)
    expected, rows = batches(4, 2**33, *who, sizes, local)
    made = np.arange(index.shape[1]) < local.step_counts(sizes)[:, None]
    np.testing.assert_array_equal(index[made], expected[made])
    np.testing.assert_array_equal(batch_sizes, rows)


def filtered() -> list[np.ndarray]:
    """Maxima, norms and sums of gradients by filters."""
    torch.manual_seed(0)
    window = Window((3, 3), (2, 2), (1, 1), ([2, 2], [2, 2], [0, 0], [1, 1], False))
    filters = Filters(torch.randn(3, 7, 9, 33), 21, window)
    weights = torch.randn(21, 3, 3, 7)
    maxima = filters.maxima(weights, torch.randn(21))
    filters.follow(torch.randn(maxima.shape))
    factors = torch.tensor([0.5, 1.0, 0.1])
    by_images = filters.by_images(weights)
    found = maxima, filters.squares(), filters.total(factors), filters.total(), by_images
    return [each.numpy() for each in found]


PLAIN_POOL = ([2, 2], [2, 2], [0, 0], [1, 1], False)
WINDOWS = {
    "of the CNN": (Window((5, 5), (1, 1), (2, 2), PLAIN_POOL), (28, 28)),
    "overlapping": (
        Window((3, 3), (1, 1), (1, 1), ([3, 3], [2, 2], [1, 1], [1, 1], False)),
        (9, 8),
    ),
    "rounded up": (Window((3, 2), (1, 1), (0, 0), ([3, 2], [2, 3], [1, 0], [1, 1], True)), (12, 7)),
    "all unequal": (
        Window((4, 3), (2, 1), (1, 2), ([1, 2], [3, 1], [0, 1], [1, 2], True)),
        (9, 13),
    ),
    "a column": (Window((3, 1), (1, 1), (0, 0), ([2, 1], [2, 1], [0, 0], [1, 1], False)), (6, 1)),
}


@needs
@pytest.mark.parametrize("channels", [(1, 16), (5, 37)], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_pooled_convolutions_and_their_gradients_are_those_of_torch(name, channels):
    """Of whole numbers, so that sums are exact and many maxima are equal."""
    window, size = WINDOWS[name]
    inputs, outputs = channels
    torch.manual_seed(7)
    images = torch.randint(-2, 3, (3, inputs, *size)).float()
    weights = torch.randint(-1, 2, (outputs, inputs, *window.kernel)).float()
    bias = torch.randint(-3, 4, (outputs,)).float()
    x = images.double().requires_grad_()
    w = weights.double().requires_grad_()
    z = F.conv2d(x, w, bias.double(), window.stride, window.padding)
    expected = F.max_pool2d(z, *window.pool)
    g = torch.randint(-1, 2, expected.shape).float()
    by_x, by_w = torch.autograd.grad(expected, (x, w), g.double())

    filters = Filters(images, outputs, window)
    laid = weights.permute(0, 2, 3, 1)
    assert torch.equal(filters.maxima(laid, bias).double(), expected)
    filters.follow(g)
    total = filters.total().view(laid.shape).permute(0, 3, 1, 2)
    assert torch.equal(total.double(), by_w)
    assert torch.equal(filters.by_images(laid).double(), by_x)


@needs
def test_the_maximum_of_outputs_with_a_nan_is_nan():
    window = Window((1, 1), (1, 1), (0, 0), PLAIN_POOL)
    for place in range(4):
        images = torch.full((1, 1, 2, 4), -math.inf)
        images[0, 0].view(2, 2, 2)[place // 2, 0, place % 2] = math.nan
        images[0, 0, 1, 1] = 3 if place < 3 else math.nan
        maxima = Filters(images, 1, window).maxima(torch.ones(1, 1, 1, 1), None)
        assert math.isnan(maxima[0, 0, 0, 0]) and maxima[0, 0, 0, 1] == -math.inf


MODULES = {
    "relu": lambda: nn.Sequential(nn.Linear(61, 19), nn.ReLU(), nn.Linear(19, 7)),
    "tanh": lambda: nn.Sequential(nn.Linear(61, 19), nn.Tanh(), nn.Linear(19, 7)),
    "sigmoid": lambda: nn.Sequential(nn.Linear(61, 19), nn.Sigmoid(), nn.Linear(19, 7)),
    "few inputs": lambda: nn.Sequential(nn.Linear(21, 18), nn.ReLU(), nn.Linear(18, 7)),
    "softmax": lambda: nn.Linear(61, 7),
}


def steps_of(
    backend: str, module: nn.Module, local: Sgd, x, y, sizes, clip=None, task=CLASSES, **named
) -> tuple[torch.Tensor, np.ndarray]:
    """Updates, [C, d], and mean losses, [C], where clients train by a backend."""
    trainer = Trainer(module, local, backend=backend, seed=1, clip=clip, task=task)
    keys = {"t": 0, "clients": range(len(sizes)), "draws": [0] * len(sizes), **named}
    blocks = list(trainer.chunk(models.flatten(module), x, y, sizes, **keys))
    losses = np.concatenate([block.losses for block in blocks])
    return torch.cat([block.updates for block in blocks]), losses


def trained(clip=None, steps=9, name="relu", **noise) -> list[np.ndarray]:
    """Updates and losses of some clients; with one step they train by their weights."""
    torch.manual_seed(0)
    module = MODULES[name]()
    local = Sgd(steps=steps, batch=5, lr=0.2, momentum=0.5, weight_decay=0.01, proximal=0.1)
    x = torch.randn(4, 11, next(module.parameters()).shape[1])
    y = torch.randint(0, 7, (4, 11))
    updates, losses = steps_of("compiled", module, local, x, y, [11, 4, 0, 9], clip, **noise)
    return [updates.numpy(), losses]


def computed() -> list[np.ndarray]:
    """What compiled code trains, adds up and draws."""
    noised = {"clip": 0.8, "stds": np.array([0.3, 0.2, 0.1, 0.0])}
    found = [*trained(**noised), *trained(**noised, steps=1), *filtered()]
    for name in MODULES:
        for steps in (1, 9):  # by which the first layer is trained in its ways
            found += trained(name=name, steps=steps)
    return [*found, native.norms(torch.from_numpy(hostile(1000, np.float32))), drawn(1001, None)]


@needs
@pytest.mark.slow
def test_shorter_vectors_give_the_same_bits(monkeypatch):
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has one vector length")
    expected = computed()
    monkeypatch.setitem(kernel_build.KINDS, "AVX512", kernel_build.KINDS["AVX2"])
    native.library_or_reason.cache_clear()
    try:
        for found, wanted in zip(computed(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
    finally:
        native.library_or_reason.cache_clear()


def lies_across(p: int, outputs: int) -> bool:
    """lies_across of step_noise.c."""
    return 2 * p * (-(-outputs // 16) * 16) < outputs * (2 * (-(-p // 16) * 16) + 56)


def in_span(n: int, p: int, outputs: int, batch: int, steps: int, bias: bool = True) -> bool:
    """span_pays of step_noise.c, for steps without noise."""
    numbers = outputs * (p + bias)
    products = n * n * (p + bias) // 2
    span = 2 * n * numbers + products + steps * n * batch * outputs
    return span < steps * numbers * (2 * batch + 8)


@needs
@pytest.mark.parametrize("features", [128, 61])
def test_a_clients_own_rows_tell_whether_its_first_layer_is_in_their_span(features):
    """In the span, a row that is not finite shows though it is in no batch."""
    sizes = [3, 16, 17, 40, 90, 400]
    module = nn.Linear(features, 5)
    x = torch.ones(6, 400, features)
    for slot, size in enumerate(sizes):
        x[slot, size - 1] = torch.nan
    y = torch.zeros(6, 400, dtype=torch.long)
    index = np.zeros((6, 6, 2), np.int64)
    index[:, :, 1] = 1
    drawn = index, np.full(6, 2), np.full(6, 6)
    local = Sgd(steps=6, batch=2)
    updates, _ = steps_of("compiled", module, local, x, y, sizes, batch_plan=drawn)
    found = updates.isnan().any(1).tolist()
    assert found == [in_span(size, features, 5, 2, 6) for size in sizes]
    assert len(set(found)) == 2


@needs
@pytest.mark.parametrize("behind,moves", [(-63.0, True), (-65.0, False), (-86.5, False)])
@pytest.mark.parametrize("rows", [2, 200])
def test_no_gradient_comes_of_a_class_so_unlikely_that_it_would_be_subnormal(rows, behind, moves):
    assert in_span(rows, 3, 2, 2, 20) == (rows == 2)
    module = nn.Linear(3, 2)
    nn.init.zeros_(module.weight)
    module.bias.data = torch.tensor([0.0, behind])
    y = torch.zeros(1, rows, dtype=torch.long)
    x = torch.ones(1, rows, 3)
    update, _ = steps_of("compiled", module, Sgd(steps=20, batch=2, lr=0.2), x, y, [rows])
    expected = -20 * 0.2 * math.exp(behind) if moves else 0.0
    assert update[0, 3:6].tolist() == pytest.approx([expected] * 3, rel=1e-5, abs=0)


TERMS = {"lr": 0.2, "momentum": 0.6, "weight_decay": 0.1, "proximal": 0.3}
SIX = Sgd(steps=6, batch=4, **TERMS)
SOME_IN_SPAN = [90, 3, 60, 7]  # those of few rows for their steps
# of many rows for their steps, which differ
BY_WEIGHTS = Sgd(epochs=0.2, batch=4, **TERMS), [60, 33, 0, 21]


def private(backend: str, module: nn.Module, local: Sgd, sizes, stds, clip) -> tuple:
    """Updates and losses of the clients with rows, and each one's share of clipped gradients."""
    torch.manual_seed(4)
    x = torch.randn(4, max(sizes), next(module.parameters()).shape[1])
    y = torch.randint(0, 5, x.shape[:2])
    clipped = np.empty(4)
    named = {"clients": [3, 1, 5, 7], "draws": [0, 1, 0, 0], "stds": stds, "clipped": clipped}
    updates, losses = steps_of(backend, module, local, x, y, sizes, clip, **named)
    some = np.array(sizes) > 0
    return updates[some], losses[some], clipped[some]


@needs
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "features,hidden,activation,local,sizes",
    [
        (32, 18, nn.ReLU, SIX, SOME_IN_SPAN),
        (21, 18, nn.ReLU, SIX.model_copy(update={"batch": "full"}), SOME_IN_SPAN),
        (61, 18, nn.ReLU, *BY_WEIGHTS),
        (61, 18, nn.Tanh, *BY_WEIGHTS),
        (61, 18, nn.Sigmoid, *BY_WEIGHTS),
        (64, None, None, *BY_WEIGHTS),
    ],
)
def test_clients_in_the_span_of_their_rows_and_by_weights_train_as_the_loop_has_them_trained(
    features, hidden, activation, local, sizes, bias, noised, clip
):
    """With all terms of a linear rule."""
    if noised and (clip is None or local is SIX or local.batch == "full"):
        return  # the noise of a span is another
    layers = [nn.Linear(features, hidden or 5, bias=bias)]
    if hidden:
        layers += [activation(), nn.Linear(hidden, 5)]
    spanned = [
        in_span(n, features, hidden or 5, local.batch_size(n), int(steps), bias)
        for n, steps in zip(sizes, local.step_counts(np.array(sizes)), strict=True)
    ]
    assert spanned == [0 < n < 10 for n in sizes]
    assert lies_across(features, hidden or 5) == (local.epochs is None)
    stds = np.array([0.3, 0.2, 0.0, 0.1]) if noised else None
    given = (nn.Sequential(*layers), local, sizes, stds, clip)
    updates, losses, clipped = private("compiled", *given)
    expected, mean_losses, shares = private("loop", *given)
    assert ((updates - expected).norm(dim=1) <= 1e-5 * expected.norm(dim=1)).all()
    assert losses == pytest.approx(mean_losses, rel=1e-5)
    np.testing.assert_array_equal(clipped, shares)


def activated_by(layer: nn.Module, z: torch.Tensor, weight: float) -> torch.Tensor:
    """The update [3 n + 1] by a step along a gradient of 1 by the output, `weight` times the sum of
    `layer` of these numbers z [n], which are the first layer's weights.
    """
    module = nn.Sequential(nn.Linear(1, len(z)), layer, nn.Linear(len(z), 1))
    module[0].weight.data = z[:, None]
    nn.init.zeros_(module[0].bias)
    nn.init.constant_(module[2].weight, weight)
    nn.init.zeros_(module[2].bias)
    y = module(torch.ones(1, 1, 1)).detach().view(1, 1) - 1
    local = Sgd(steps=1, batch=1, lr=1.0)
    x = torch.ones(1, 1, 1)
    return steps_of("compiled", module, local, x, y, [1], task=task_of(y))[0][0]


@needs
@pytest.mark.parametrize("layer", [nn.Tanh(), nn.Sigmoid()], ids=["tanh", "sigmoid"])
def test_activations_and_their_derivatives_are_right_to_a_few_last_places_at_any_size(layer):
    sizes = np.logspace(-30, 2, 4000)
    z = torch.from_numpy(np.concatenate([sizes, -sizes, [0.0, 8.0, -8.0, 3e38, -3e38]])).float()
    exact = z.double().requires_grad_()
    made = layer(exact)
    (steep,) = torch.autograd.grad(made.sum(), exact)
    n = len(z)
    outputs = -activated_by(layer, z, 0.0)[2 * n : 3 * n].double()
    off = (outputs - made.detach()).abs()
    assert (off <= 3e-7 * made.detach().abs() + 1e-27).all()
    found = activated_by(layer, z, 1e-6)
    slopes = (found[:n] / found[-1]).double() / 1e-6
    assert (slopes - steep).abs().max() <= 5e-7
    assert (outputs.abs() <= 1).all() and (slopes >= 0).all()


@needs
@pytest.mark.parametrize("classes", [2, 16, 5000])
@pytest.mark.parametrize("scale", [1e-3, 30.0, 1e4, 1e20])
def test_losses_of_any_outputs_are_those_of_torch(classes, scale):
    """The logarithm is that of a product of the sums of up to 16 samples."""
    torch.manual_seed(3)
    module = nn.Linear(8, classes)
    x = torch.randn(1, 40, 8) * scale
    y = torch.randint(0, classes, (1, 40))
    local = Sgd(steps=1, batch="full", lr=1 / scale)
    update, (loss,) = steps_of("compiled", module, local, x, y, [40])
    outputs = module(x[0]).double()
    assert loss == pytest.approx(F.cross_entropy(outputs, y[0]).item(), rel=1e-5)
    expected, _ = steps_of("loop", module, local, x, y, [40])
    assert (update - expected).norm() <= 1e-4 * expected.norm()


@needs
def test_rows_and_targets_that_the_model_does_not_take_are_refused():
    module = nn.Linear(8, 3)
    x = torch.randn(2, 5, 8)
    y = torch.zeros(2, 5, dtype=torch.int64)
    for rows, targets, said in (
        (x[:, :, :7], y, "7 float32 a row"),
        (x.long(), y, "8 int64 a row"),
        (x, y - 1, "one of the model's 3 classes"),
        (x, y + 3, "one of the model's 3 classes"),
        (x, y.float(), "targets are float32"),
    ):
        with pytest.raises(RuntimeError, match=said):
            steps_of("compiled", module, Sgd(), rows, targets, [5, 4])


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    native.library_or_reason.cache_clear()
    yield tmp_path
    native.library_or_reason.cache_clear()


def test_without_a_compiler_clients_train_another_way_and_are_said_to(no_compiler, caplog):
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    assert native.library() is None
    assert choose_backend(module, Sgd(), form((36,), 4)) == "fused"
    assert "half the time: nothing is compiled here" in caplog.text
    images = form((1, 8, 8), 4)
    cnn = models.build(models.parse({"kind": "cnn", "width": 0.1}), images, seed=0)
    assert choose_backend(cnn, Sgd(), images) == "loop"
    with refusal(r"'no-such-compiler'.*install a C compiler, or name"):
        choose_backend(module, Sgd(), form((36,), 4), "compiled")


@needs
def test_a_compiler_that_fails_leaves_nothing_behind(no_compiler, monkeypatch):
    monkeypatch.setenv("CC", "false")
    native.library_or_reason.cache_clear()
    assert native.library() is None
    assert "(false fails)" in str(native.library_or_reason())
    assert not [*no_compiler.rglob("*.so")]


@pytest.fixture(scope="module")
def compiled_here(tmp_path_factory):
    """A cache with nothing but what these tests compile: what one command has made is there for
    others that mean the same one.
    """
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def quickly(monkeypatch):
    """Compiles as everyone does, but for the optimiser, which takes two thirds of the time."""
    monkeypatch.setattr(kernel_build, "FLAGS", ("-O0", *kernel_build.FLAGS[1:]))


@pytest.mark.slow
@needs
@pytest.mark.parametrize("compiler", ["", " ", "cc -g0"])
def test_cc_may_be_empty_or_have_arguments(
    compiler, no_compiler, compiled_here, quickly, monkeypatch
):
    monkeypatch.setenv("RAYDPFL_CACHE", str(compiled_here))
    monkeypatch.setenv("CC", compiler)
    native.library_or_reason.cache_clear()
    assert native.library() is not None


def test_where_nothing_may_be_run_from_a_folder_another_is_asked_for(no_compiler, monkeypatch):
    def opened(*given):
        raise OSError("/tmp/kernels.so: failed to map segment from shared object")

    monkeypatch.setattr(native, "_open_library", opened)
    assert native.library_or_reason().endswith(
        "; name a folder in TMPDIR that code may be run from"
    )


@pytest.mark.slow
@needs
@pytest.mark.parametrize("broken", [False, True])
def test_without_a_library_in_the_cache_a_process_compiles_its_own(
    broken, no_compiler, quickly, monkeypatch
):
    """Where nothing can be written there, and where what is there cannot be loaded."""
    monkeypatch.setenv("CC", "cc")
    names = []
    with monkeypatch.context() as looking:
        looking.setattr(native, "_open_library", lambda command, name: names.append(name))
        native.library_or_reason()
    elsewhere = no_compiler / "elsewhere"
    monkeypatch.setenv("RAYDPFL_CACHE", str(elsewhere))
    if broken:
        (elsewhere / "native").mkdir(parents=True)
        (elsewhere / "native" / names[0]).write_text("no library")
    else:
        elsewhere.touch()
    native.library_or_reason.cache_clear()
    assert native.library() is not None
    assert native.norms(torch.tensor([[3.0, 4.0]])).tolist() == [5.0]


def compile_quickly(folder: Path) -> Path:
    """Compiles without the optimiser; the library."""
    command = kernel_build.command(torch.backends.cpu.get_cpu_capability())
    path = folder / "native" / "kernels.so"
    kernel_build.compile_kernel(["-O0" if each == "-O2" else each for each in command], path)
    return path


@pytest.fixture(scope="module")
def shelved(tmp_path_factory):
    return compile_quickly(tmp_path_factory.mktemp("shelf"))


def _other_owner(path, monkeypatch):
    """Gives a path to another user; as no root, has it look so."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1, follow_symlinks=False)
        return
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)


def _seal(path):
    return path.with_suffix(".json")


DAMAGES = {
    "folder for all": lambda path, _: path.parent.chmod(0o777),
    "folder for the group": lambda path, _: path.parent.chmod(0o770),
    "folder of another": lambda path, patch: _other_owner(path.parent, patch),
    "library of another": _other_owner,
    "seal of another": lambda path, patch: _other_owner(_seal(path), patch),
    "library for all": lambda path, _: path.chmod(0o777),
    "seal for all": lambda path, _: _seal(path).chmod(0o666),
    "symlink": lambda path, _: path.symlink_to(path.rename(path.parent.parent / "elsewhere.so")),
    "truncated": lambda path, _: path.write_bytes(path.read_bytes()[:5000]),
    "one byte": lambda path, _: path.write_bytes(path.read_bytes()[:-1] + b"x"),
    "another digest": lambda path, _: _seal(path).write_text(json.dumps("0" * 64)),
    "no digest": lambda path, _: _seal(path).unlink(),
    "no JSON": lambda path, _: _seal(path).write_text("{"),
    "pipe": lambda path, _: (path.unlink(), os.mkfifo(path)),
}


@needs
@pytest.mark.parametrize("how", DAMAGES)
def test_a_library_that_another_could_have_put_there_is_not_loaded_but_compiled_again(
    how, shelved, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    shutil.copytree(shelved.parent, tmp_path / "native")
    path = tmp_path / "native" / shelved.name
    assert native._load_verified(shelved) is not None  # a copy that is loaded may not be cut
    with monkeypatch.context() as within:
        DAMAGES[how](path, within)
        with pytest.raises(OSError):
            kernel_build.load_library(path)
    if "folder" in how or (os.geteuid() != 0 and "another" in how):
        return  # nothing can be put there; to be owned by another takes root
    made = []

    def again(command, to):
        made.append(to)
        for name in (path.name, path.with_suffix(".json").name):
            shutil.copy(shelved.parent / name, tmp_path / "made")
            os.replace(tmp_path / "made", to.parent / name)

    monkeypatch.setattr(kernel_build, "compile_kernel", again)
    assert native._open_library([], path.name) is not None
    assert made == [path] and native._load_verified(path) is not None


@pytest.mark.slow
@needs
def test_a_library_that_draws_a_hundredth_of_the_noise_is_not_loaded(tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(kernel_build.SOURCE.parent, source)
    text = (source / "normals.c").read_text()
    call = "stream_normals(names + 5 * i, stds[i],"
    assert text.count(call) == 1
    monkeypatch.setattr(kernel_build, "SOURCE", source / "kernels.c")
    (source / "normals.c").write_text(text.replace(call, call.replace("stds[i]", "stds[i] / 100")))
    path = compile_quickly(tmp_path)
    kernel_build.load_library(path)  # it is owned and sealed as it should
    with pytest.raises(OSError, match="computes something else"):
        native._load_verified(path)


def test_what_a_library_is_to_compute_is_what_numpy_computes(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    names = np.arange(15, dtype=np.uint64).reshape(3, 5)
    drawn = np.empty((3, 2 * native.CHECKED), np.float32)
    prng._numpy_normals(names, np.array([1.0, 0.5, 3.0], np.float32), drawn)
    lengths = native.norms(torch.from_numpy(drawn))
    total = np.zeros(2 * native.CHECKED)
    assert native.add(total, drawn, 2.0**-30, 2.0**20, lengths)
    computed = b"".join(each.tobytes() for each in (drawn, lengths, total))
    assert hashlib.sha256(computed).hexdigest() == native.COMPUTED


@pytest.mark.slow
@needs
def test_a_node_without_a_compiler_is_named_with_what_to_do(
    no_compiler, compiled_here, quickly, monkeypatch
):
    monkeypatch.setenv("RAYDPFL_CACHE", str(compiled_here))
    with monkeypatch.context() as home:
        home.setenv("CC", "cc")
        native.library_or_reason.cache_clear()
        plan = resolve(experiment(client={"backend": "compiled"}))
    native.library_or_reason.cache_clear()
    with refusal(r"on node .*install a C compiler") as error:
        start_worker(ClientActor(), pickle.dumps(plan.experiment), str(plan.shards), ())
    assert error.value.field == "client.backend" and socket.gethostname() in str(error.value)


@needs
@pytest.mark.slow
def test_processes_that_compile_at_once_all_get_the_library(tmp_path, monkeypatch):
    """Forked once torch is imported; without the optimiser, see `quickly`."""
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    code = """
import os
from raydpfl.core import kernel_build
from raydpfl.core import native

kernel_build.FLAGS = ("-O0", *kernel_build.FLAGS[1:])
children = []
while len(children) < 3:
    child = os.fork()
    if not child:
        os._exit(native.library() is None)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
    done = processes.run([sys.executable, "-c", code])
    assert done.stdout == "[0, 0, 0]\n", done.stderr
    assert len([*tmp_path.rglob("*.so")]) == 1
    assert sorted(each.suffix for each in (tmp_path / "native").iterdir()) == [".json", ".so"]
