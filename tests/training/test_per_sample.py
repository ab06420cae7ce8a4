"""Per-sample clipping and noise at every local step: what privacy rests on."""

import numpy as np
import pytest
import torch
from plain_loop import METHODS, bound, check_updates, gradient_of, made, rows, step_noise, train
from scipy import stats
from torch import nn

from raydpfl import models
from raydpfl.core import native
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Sgd
from raydpfl.training.backends import ghost_clipping, missing_requirement, vmap
from raydpfl.training.backends.ghost_clipping import Layerwise
from raydpfl.training.layers.pooled_convolution import Filters, Window
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
compiled = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
POOLED = pytest.param("convolutional", "pooled", marks=compiled)


FORMED = (
    "linear, few positions", "linear, many positions", "of wide patches", "stride", "dilation",
    "channels last",
)  # fmt: skip


@pytest.mark.parametrize("ghost,few", [(0, 0), (0, 1 << 20), (1 << 20, 0)])
@pytest.mark.parametrize("name", FORMED)
def test_gradients_that_are_formed_and_those_that_are_not_agree(name, ghost, few, monkeypatch):
    monkeypatch.setattr(ghost_clipping, "GHOST", ghost)
    monkeypatch.setattr(ghost_clipping, "SMALL_FILTER", few)
    check_updates("layerwise", made(name), METHODS["unequal, all"], *rows(), bound(name))


def test_where_positions_cancel_a_ghost_norm_is_never_too_small():
    """Two positions, opposite gradients, almost the same inputs; true norm in float64."""

    def norms(a, g):
        return (g.double().mT @ a.double()).flatten(1).norm(dim=1)

    generator = torch.Generator().manual_seed(0)
    for apart in (1e-2, 1e-3, 1e-4, 1e-5, 0.0):
        a = torch.randn(200, 1, 64, generator=generator) + apart * torch.randn(
            200, 2, 64, generator=generator
        )
        g = torch.randn(200, 1, 32, generator=generator) * torch.tensor([1.0, -1.0])[:, None]
        assert (ghost_clipping._ghost_squares(a, g).double().sqrt() >= norms(a, g)).all()
    a = torch.randn(200, 8, 64, generator=generator)
    g = torch.randn(200, 8, 32, generator=generator)
    torch.testing.assert_close(
        ghost_clipping._ghost_squares(a, g).double().sqrt(), norms(a, g), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("inputs,outputs", [(1e-23, 1e18), (1e18, 1e-23), (1e-19, 1e15)])
@pytest.mark.parametrize("positions", [1, 8])
def test_a_ghost_norm_is_not_too_small_where_squares_underflow(positions, inputs, outputs):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(20, positions, 64, generator=generator) * inputs
    g = torch.randn(20, positions, 32, generator=generator) * outputs
    norms = (g.double().mT @ a.double()).flatten(1).norm(dim=1)
    assert (ghost_clipping._ghost_squares(a, g).double().sqrt() >= norms * (1 - 1e-6)).all()


def uneven(*shape: int) -> torch.Tensor:
    """A few large numbers, and after them others whose squares are lost when float32 adds them up
    one after another.
    """
    numbers = torch.full(shape, 0.999 * 2.0**-12)
    numbers[..., :16] = 1
    return numbers


LONG = ("loop", "layerwise", "fused", "vmap", "one_batch", pytest.param("compiled", marks=compiled))


@pytest.mark.parametrize("backend", LONG)
def test_a_clipped_gradient_of_millions_of_numbers_is_as_long_as_the_bound(backend):
    module = nn.Linear(10**6, 2, bias=False)
    nn.init.zeros_(module.weight)
    trainer = Trainer(module, Sgd(steps=1, batch=1, lr=1.0), backend=backend, seed=0, clip=1.0)
    (block,) = trainer.chunk(
        models.flatten(module), 1000 * uneven(1, 1, 10**6), torch.tensor([[0]]), [1],
        t=0, clients=[0], draws=[0],
    )  # fmt: skip
    assert float(block.updates.double().norm()) == pytest.approx(1, abs=2e-6)


def test_a_ghost_norm_of_long_inputs_is_exact():
    a, g = uneven(1, 2, 10**5), torch.ones(1, 2, 3)
    norm = (g.double().mT @ a.double()).norm()
    assert float(ghost_clipping._ghost_squares(a, g).sqrt() / norm) == pytest.approx(1, abs=1e-6)


@compiled
def test_the_norm_of_a_filter_gradient_of_many_channels_is_exact():
    channels = 1 << 13
    window = Window((1, 1), (1, 1), (0, 0), ([1, 1], [1, 1], [0, 0], [1, 1], False))
    filters = Filters(torch.ones(1, 1, 1, 1), channels, window)
    filters.maxima(torch.zeros(channels, 1, 1, 1), None)
    g = uneven(channels).view(1, channels, 1, 1)
    filters.follow(g)
    assert float(filters.squares() / g.double().square().sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("wrong", [0.9e-12, 1.1e15, float("nan")])
def test_a_bound_on_samples_that_is_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"bounding.bound = .*from 1e-12 to 1e\+15"):
        Trainer(made("softmax"), Sgd(), backend="loop", seed=0, clip=wrong)


@pytest.mark.parametrize(
    "backend,module,name",
    [("layerwise", ghost_clipping, "channels last"), ("vmap", vmap, "residual")],
)
def test_a_batch_that_takes_too_much_memory_is_cut(backend, module, name, monkeypatch):
    shares = np.empty(5)
    shares_cut = np.empty(5)
    given = (backend, made(name), METHODS["plain"], *rows())
    clip = bound(name)
    whole = train(*given, clip=clip, clipped=shares)
    calls = []
    spied = {"layerwise": (Layerwise, "_forward"), "vmap": (vmap.Vmap, "_loss")}[backend]
    inner = getattr(*spied)
    monkeypatch.setattr(
        *spied, lambda self, *arguments: (calls.append(1), inner(self, *arguments))[1]
    )
    monkeypatch.setattr(module, "LIMIT", 1)
    for slot, (delta, loss) in train(*given, clip=clip, clipped=shares_cut).items():
        assert (delta - whole[slot][0]).norm() <= 1e-5 * delta.norm() and loss == pytest.approx(
            whole[slot][1]
        )
    np.testing.assert_array_equal(shares, shares_cut)
    assert len(calls) >= 4 * 2


PRIVATE = [
    *(POOLED, ("fused", "softmax"), ("fused", "mlp"), ("layerwise", "channels last")),
    *(("layerwise", "in place"), ("vmap", "residual"), ("loop", "mlp")),
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
        who = ([1] * 5, range(5), [0] * 5)
        for slot, (delta, _) in train(backend, module, local, x, y, *who, clip=clip).items():
            raw, _ = gradient_of(module, x[slot], y[slot])
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
    clip = 0.5 * bound(name)
    local = Sgd(steps=1, batch="full", lr=1.0)
    x, y = rows(sizes=[5] * 5, n=5)
    other = x.clone()
    other[:, 2] = 50 * torch.flip(x[:, 2], (1,))
    before, after = (
        train(backend, module, local, each, y, [5] * 5, range(5), [0] * 5, clip=clip)
        for each in (x, other)
    )
    for slot in range(5):
        moved = (before[slot][0] - after[slot][0]).norm()
        assert 0 < moved <= 2 * clip / 5 * (1 + 1e-4) + 1e-6 * models.flatten(module).norm()


@pytest.mark.parametrize("backend,name", PRIVATE)
def test_the_noise_of_a_step_is_the_clients_keyed_normals_times_its_std(backend, name):
    """Not divided by the batch, each step its own. Kolmogorov-Smirnov; false alarms 1e-4."""
    module = made(name)
    local = Sgd(steps=2, batch=4, lr=0.5)
    d = models.parameter_count(module)
    clip = 1e-6
    stds = np.array([0.5, 1.0, 2.0, 9.0, 4.0])
    quiet = train(backend, module, local, *rows(), clip=clip)
    noised = train(backend, module, local, *rows(), clip=clip, stds=stds)
    drawn = {}
    for slot in quiet:
        drawn[slot] = (quiet[slot][0] - noised[slot][0]) / (0.5 * stds[slot])
        keyed = step_noise(d, slot, 2, 1.0).sum(0).float()
        torch.testing.assert_close(drawn[slot], keyed, rtol=1e-3, atol=1e-4)
    together = torch.cat(list(drawn.values())).numpy() / 2**0.5
    assert stats.kstest(together, "norm").pvalue > 1e-4


@pytest.mark.parametrize("backend,name", SAMPLED)
def test_a_bound_beyond_all_gradients_clips_none_one_below_them_all_and_none_that_is_not_finite(
    backend, name
):
    module = made(name)
    (x, y) = rows()
    local = Sgd(steps=1, batch="full")
    clipped = np.empty(5)
    for clip, share in ((1e9, 0.0), (1e-9, 1.0)):
        train(backend, module, METHODS["epochs"], x, y, clip=clip, clipped=clipped)
        np.testing.assert_array_equal(clipped, [share, share, share, np.nan, share])
    for value in (float("nan"), float("inf")):
        x[2, 3] = value
        train(backend, module, local, x, y, clip=1e-9, clipped=clipped)
        np.testing.assert_array_equal(clipped, [1.0, 1.0, 8 / 9, np.nan, 1.0])
    if backend != "layerwise":
        train(backend, module, local, *rows(), clipped=clipped)
        assert np.isnan(clipped).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("backend,name", SAMPLED)
def test_a_gradient_that_is_not_finite_shows_in_its_clients_update_and_in_no_other(
    backend, name, clip, value
):
    module = made(name)
    local = Sgd(steps=1, batch="full", lr=0.1)
    if missing_requirement(backend, local, clip):
        return
    x, y = rows()
    healthy = train(backend, module, local, x, y, clip=clip)
    x[2, 3] = value
    sick = train(backend, module, local, x, y, clip=clip)
    assert torch.isfinite(healthy[2][0]).all() and not torch.isfinite(sick[2][0]).all()
    assert all(torch.equal(healthy[slot][0], sick[slot][0]) for slot in (0, 1, 4))


def test_a_finite_gradient_whose_norm_overflows_is_not_dropped():
    module = made("softmax")
    x, y = rows()
    x[2, 3] = 1e30
    for backend in ("compiled", "fused", "layerwise", "vmap", "loop"):
        assert not torch.isfinite(
            train(backend, module, Sgd(steps=1, batch="full"), x, y, clip=1.0)[2][0]
        ).all()
