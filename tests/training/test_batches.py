"""The rows of every local step."""

import sys
from itertools import combinations

import numpy as np
import pytest
import torch
from plain_loop import CLASSES, SHAPE, clients_of
from scipy import stats
from torch import nn

from raydpfl import models
from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.local import Sgd
from raydpfl.training.minibatches import batches, pick_rows
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
@pytest.mark.parametrize("batch", [1, 3, 8, "full", {"share": 0.3}])
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
        own = index[slot, :, : batch_sizes[slot]]
        assert np.array_equal(own, alone[0, :, : alone_size[0]])
        assert not index[slot, :, batch_sizes[slot] :].any()
        assert index[slot].max() < max(size, 1)
        if sampling == "fresh":
            assert all(len(np.unique(step)) == batch_sizes[slot] for step in own)
    assert index.shape == (5, 6, local.batch_size(100))
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
    """Chi-square over subsets, pairs of rows in steps 0 and 1, first places; alarms 1e-4."""
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


@pytest.mark.parametrize("backend", ["compiled", "fused", "vmap", "loop"])
def test_rows_that_no_batch_takes_are_not_needed(backend):
    sizes = np.array([40, 0, 12, 13, 7])
    clients = [5, -1, 6, 7, 8]
    draws = [0] * 5
    local = Sgd(steps=4, batch=3)
    assert (
        local.max_rows(sizes).tolist() == [12, 0, 12, 12, 7]
        and Sgd(batch="full").max_rows(sizes).tolist() == sizes.tolist()
    )
    x = torch.randn(5, 40, *SHAPE, generator=torch.Generator().manual_seed(1))
    y = torch.arange(200).view(5, 40) % CLASSES
    module = nn.Sequential(nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, CLASSES))
    trainer = Trainer(module, local, backend=backend, seed=4)
    parameters = models.flatten(module)
    name = {"t": 2, "clients": clients, "draws": draws}
    index, batch_sizes = batches(4, sizes=sizes, local=local, rows=12, **name)
    rows, places = pick_rows(index, batch_sizes, sizes, local)
    # who may have more than it can use
    assert [slot for slot, row in enumerate(rows) if row is not None] == [0, 3]
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
    ours = trainer.chunk(parameters, few_x, few_y, few, **name, batch_plan=drawn)
    for (_, delta, loss), (_, our_delta, our_loss) in zip(
        clients_of(whole), clients_of(ours), strict=True
    ):
        torch.testing.assert_close(our_delta, delta, atol=1e-6, rtol=0)
        assert our_loss == pytest.approx(loss, abs=1e-6) and delta.norm() > 0.01


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
    assert local.batch_size(int(local.max_rows(sizes).max())) == found.max()
