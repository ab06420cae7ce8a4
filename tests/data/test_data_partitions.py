"""Partitions: every sample dealt once, in the sizes and mixtures that were asked for."""

from typing import Any

import numpy as np
import pytest
from conftest import messages, refusal
from scipy import stats

from raydpfl.data import PARTITIONS, SIZES
from raydpfl.data.partitions import Partition
from raydpfl.data.partitions.label_mixture import fit
from raydpfl.data.sizes import Sizes

EVEN = np.repeat(np.arange(10), 300)
# As uneven as SVHN and with a class number that does not occur.
UNEVEN = np.repeat(
    [0, 1, 2, 3, 5, 6, 7, 8, 9, 10], [494, 1386, 1058, 850, 746, 688, 573, 560, 505, 466]
)
DEALT = {
    "iid": {},
    "shards": {"per_client": 5},
    "dominant-labels": {},
    "classes-per-client": {"k": 7},
    "dirichlet": {"psi": 0.1},
    "similarity": {"s": 30.0},
}


def deal(kind, labels, clients, sizes="balanced", seed=0, **fields):
    """A list with the rows of each client."""
    order, counts = PARTITIONS[kind](**fields).assign(
        labels, clients, SIZES[sizes](), np.random.default_rng(seed)
    )
    assert order.dtype == counts.dtype == np.int64
    assert len(counts) == clients and counts.sum() == len(order)
    return np.split(order, np.cumsum(counts)[:-1])


def classes(rows, labels):
    return [len(np.unique(labels[own])) for own in rows]


@pytest.mark.parametrize("labels", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("clients", [3, 20, 97, 300])
@pytest.mark.parametrize("kind", DEALT)
def test_every_sample_goes_to_exactly_one_client_and_every_client_has_one(kind, clients, labels):
    rows = deal(kind, labels, clients, **DEALT[kind])
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(len(labels)))
    assert min(map(len, rows)) >= 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["iid", "dominant-labels", "dirichlet", "similarity"])
def test_sizes_are_kept_exactly_by_every_partition_that_follows_them(kind, sizes):
    rows = deal(kind, UNEVEN, 60, sizes, **DEALT[kind])
    asked = SIZES[sizes]().counts(len(UNEVEN), 60, np.random.default_rng(0))
    assert [len(own) for own in rows] == asked.tolist()


@pytest.mark.parametrize("kind", DEALT)
def test_a_partition_is_a_function_of_its_generator(kind):
    one, same, other = (
        np.concatenate(deal(kind, UNEVEN, 20, seed=seed, **DEALT[kind])) for seed in (1, 1, 2)
    )
    assert np.array_equal(one, same) and not np.array_equal(one, other)


def test_power_law_sizes_follow_rank_to_the_minus_exponent():
    counts = SIZES["power-law"](exponent=1.2).counts(1_000_000, 100, np.random.default_rng(0))
    logs = np.log(np.arange(1, 101)), np.log(np.sort(counts)[::-1])
    slope = stats.linregress(*logs).slope
    assert slope == pytest.approx(-1.2, abs=0.01)


def test_spread_sizes_lie_between_their_bounds():
    counts = SIZES["spread"]().counts(100_000, 100, np.random.default_rng(0))
    assert counts.sum() == 100_000 and counts.max() / counts.min() <= 3.01 and counts.std() > 200


@pytest.mark.parametrize(
    ("labels", "clients", "per_client"),
    [(EVEN, 300, 5), (UNEVEN, 100, 5), (UNEVEN, 77, 7), (EVEN, 2, 5), (EVEN, 1500, 2)],
)
def test_every_shard_has_one_class(labels, clients, per_client):
    rows = deal("shards", labels, clients, per_client=per_client)
    assert max(classes(rows, labels)) <= per_client
    assert max(map(len, rows)) <= 1.3 * min(map(len, rows)) + per_client


def test_fashion_mnist_gives_3000_clients_five_one_class_shards_of_four_at_random():
    labels = np.repeat(np.arange(10), 6000)
    rows = deal("shards", labels, 3000, per_client=5)
    counts = np.array([np.bincount(labels[own], minlength=10) for own in rows])
    assert (counts.sum(1) == 20).all() and (counts % 4 == 0).all()
    held = np.mean(classes(rows, labels))
    # 10 (1 - C(13500, 5) / C(15000, 5)) = 4.0952 expected; std of the mean below 0.013; false alarm
    # below 1e-4 at 4 std.
    assert abs(held - 4.0952) < 0.052


def test_dominant_labels_are_two_classes_of_230_and_eight_of_5():
    labels = np.repeat(np.arange(10), 6000)
    rows = deal("dominant-labels", labels, 120)
    counts = np.sort([np.bincount(labels[own], minlength=10) for own in rows], axis=1)
    assert np.abs(counts - ([5] * 8 + [230] * 2)).max() <= 1


@pytest.mark.parametrize("sizes", ["balanced", "spread"])
@pytest.mark.parametrize("k", [2, 7, 10])
def test_every_client_holds_exactly_k_classes(k, sizes):
    rows = deal("classes-per-client", UNEVEN, 60, sizes, k=k)
    assert classes(rows, UNEVEN) == [k] * 60


def test_every_class_is_held_in_proportion_to_its_samples():
    rows = deal("classes-per-client", EVEN, 100, k=3)
    holders = np.sum([np.bincount(np.unique(EVEN[own]), minlength=10) for own in rows], axis=0)
    assert (holders == 30).all()


def test_similarity_100_is_iid_and_0_is_sorted_by_label():
    assert min(classes(deal("similarity", EVEN, 20, s=100.0), EVEN)) == 10
    assert max(classes(deal("similarity", EVEN, 20, s=0.0), EVEN)) == 1
    half = [np.bincount(EVEN[own]).max() for own in deal("similarity", EVEN, 20, s=50.0)]
    # 75 of 150 from one stretch, of one class or two, and about 7 of each class drawn iid
    assert min(half) >= 38 and max(half) <= 110


def test_dirichlet_mixtures_are_even_for_a_large_psi_and_one_class_for_a_small():
    even, uneven = (
        [np.bincount(EVEN[own]).max() for own in deal("dirichlet", EVEN, 30, psi=psi)]
        for psi in (1000.0, 0.01)
    )
    assert max(even) <= 14 and np.median(uneven) >= 80  # of 100 samples


def test_counts_stay_within_one_of_the_fitted_mixture():
    generator = np.random.default_rng(0)
    mixture = generator.dirichlet(np.ones(10), 50)
    rows = np.full(50, 60)
    columns = np.full(10, 300)
    table = fit(mixture, rows, columns)
    real = mixture.copy()
    for _ in range(2000):  # the slow reference: proportional fitting to the end
        real *= columns / real.sum(0)
        real *= (rows / real.sum(1))[:, None]
    assert (table.sum(1) == rows).all() and (table.sum(0) == columns).all()
    assert np.abs(table - real).max() <= 1 + 1e-6


def test_overlapping_clients_with_dominant_classes_are_those_of_000():
    labels = np.repeat(np.arange(10), 5000)
    rows = deal("overlapping", labels, 300, per_client=500, classes=2, share=0.92)
    counts = np.array([np.bincount(labels[own], minlength=10) for own in rows])
    assert (np.sort(counts, axis=1) == [5] * 8 + [230] * 2).all()
    assert all(len(np.unique(own)) == 500 for own in rows)
    # each class is dominant for 60 clients, binomial of std 6.9; 5 std: 3e-6 for ten classes
    assert np.abs((counts == 230).sum(0) - 60).max() < 35
    # 150,000 rows of 50,000 samples: clients share them
    assert len(np.unique(np.concatenate(rows))) < 50_000


@pytest.mark.parametrize(
    ("per_client", "classes", "share"), [(7, 1, 0.5), (50, 3, 1.0), (33, 9, 0.92), (1, 2, 0.9)]
)
def test_overlapping_clients_hold_the_share_of_dominant_classes(per_client, classes, share):
    rows = deal("overlapping", UNEVEN, 20, per_client=per_client, classes=classes, share=share)
    for own in rows:
        counts = np.sort(np.bincount(UNEVEN[own], minlength=11))[::-1]
        dominant = round(share * per_client)
        assert len(own) == per_client and counts.sum() == per_client
        assert counts[:classes].sum() >= dominant  # the rest may be as many in a class


def test_overlapping_clients_draw_evenly_over_classes_and_never_twice_the_same():
    rows = deal("overlapping", EVEN, 50, per_client=500)
    assert all(len(np.unique(own)) == 500 and (np.bincount(EVEN[own]) == 50).all() for own in rows)
    assert len(np.unique(np.concatenate(rows))) < 50 * 500


@pytest.mark.parametrize(("kind", "clients", "fields", "message"), messages("partitions"))
def test_what_the_data_cannot_give_is_refused_by_name(kind, clients, fields, message):
    with refusal(begins=message):
        deal(kind, EVEN, clients, **fields)


class Fixed(Partition):
    """A user's partition of these rows and counts."""

    rows: Any
    counts: Any

    def assign(self, labels, clients, sizes, generator):
        return np.array(self.rows), np.array(self.counts)


class Weighted(Sizes):
    """Sizes of a user's own, likewise."""

    values: Any

    def weights(self, clients, generator):
        return np.array(self.values)


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([0, 1, 2, 3], [1, 2], "as many rows as its sizes say, not 4 of 3"),
        ([0, 1, 1, 3], [2, 2], "a row to one client"),
    ],
)
def test_a_partition_of_ones_own_gives_each_row_once(rows, counts, message):
    deal = (np.arange(4), None, 2, SIZES["balanced"](), np.random.default_rng(0))
    with refusal(f"data.partition.kind = '': expected one that gives {message}"):
        Fixed(rows=rows, counts=counts).partition(*deal)


@pytest.mark.parametrize("values", [[1, np.nan], [1, np.inf], [2, -1], [0, 0], [1], [[1, 1]]])
def test_weights_of_ones_own_that_give_no_sizes_are_refused(values):
    with refusal("data.sizes.kind = '': expected one whose weights are 2 numbers"):
        Weighted(values=values).counts(10, 2, np.random.default_rng(0))
