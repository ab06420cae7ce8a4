"""Every data set, partition and model that the papers name is a config away."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import form
from PIL import Image

from raydpfl import data, models
from raydpfl.data import Shards, prepare
from raydpfl.errors import ConfigError

PARTITIONS = {
    "iid": {"kind": "iid"},
    "000: two dominant classes of 92 %": {"kind": "dominant-labels", "classes": 2, "share": 0.92},
    "000: overlapping": {"kind": "overlapping", "per_client": 500},
    "000: overlapping, two dominant classes of 92 %": {
        "kind": "overlapping",
        "per_client": 500,
        "classes": 2,
        "share": 0.92,
    },
    "001: five one-class shards": {"kind": "shards", "per_client": 5},
    "002: seven classes": {"kind": "classes-per-client", "k": 7},
    "002: dirichlet 100": {"kind": "dirichlet", "psi": 100},
    "002: dirichlet 5": {"kind": "dirichlet", "psi": 5},
    "002: dirichlet 0.1": {"kind": "dirichlet", "psi": 0.1},
    "003: similarity 100": {"kind": "similarity", "s": 100},
    "003: similarity 70": {"kind": "similarity", "s": 70},
    "003: similarity 30": {"kind": "similarity", "s": 30},
    "003: similarity 0": {"kind": "similarity", "s": 0},
}
SIZES = {
    "balanced": {"kind": "balanced"},
    "002: power law": {"kind": "power-law"},
    "003: v ~ U(0.5, 1.5)": {"kind": "spread"},
}
SYNTHETIC = {
    "002: Synthetic(0, 0)": {"u": 0, "v": 0},
    "002: Synthetic(1, 1), power law": {"u": 1, "v": 1, "sizes": {"kind": "power-law"}},
    "002: Synthetic IID": {"iid": True},
}
GREY = (1, 28, 28)
COLOUR = (3, 32, 32)
MODELS = {
    "001, 002: softmax regression": ({"kind": "softmax"}, GREY, 7_850),
    "000: one hidden layer": ({"kind": "mlp"}, GREY, 159_010),
    "002: DNN on 60 components": ({"kind": "mlp", "hidden": 1200}, (60,), 61 * 1200 + 1201 * 10),
    "003: CNN": ({"kind": "cnn"}, GREY, 833_322),
    "003: DP CNN on CIFAR-10": ({"kind": "dp_cnn"}, COLOUR, 550_570),
    "000: AlexNet": ({"kind": "alexnet"}, GREY, 3_348_490),
    "000: MobileNetV2": ({"kind": "mobilenet_v2"}, GREY, 2_236_106),
    "000: ResNet-18": ({"kind": "resnet18"}, COLOUR, 11_173_962),
    "003: softmax regression on 512 features": ({"kind": "softmax"}, (512,), 5_130),
    "a user's own": (
        {"kind": "torch.nn:Linear", "args": {"in_features": 60, "out_features": 10}},
        (60,),
        610,
    ),
}


pytestmark = pytest.mark.usefixtures("cache")


def test_the_real_data_sets_are_read_by_name():
    assert {
        "mnist",
        "fashion_mnist",
        "emnist_digits",
        "cifar10",
        "cifar10_jpeg",
        "cifar100",
        "svhn",
        "table",
        "fashion_mnist_mini",
    } <= set(data.FAMILY)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
def test_each_partition_deals_every_sample_with_each_form_of_sizes_it_leaves_open(partition, sizes):
    keys = {"kind": "fashion_mnist_mini", "clients": 60, "partition": partition, "sizes": sizes}
    if partition["kind"] in ("shards", "overlapping") and sizes["kind"] != "balanced":
        with pytest.raises(ConfigError, match="which itself decides the sizes"):
            data.parse(keys)
        return
    told = data.describe(data.parse(keys))
    per_client = told["samples_per_client"]
    held = told["classes_per_client"]
    if partition["kind"] == "overlapping":
        assert per_client == {"min": 500, "median": 500, "max": 500} and held["min"] == 10
        return
    assert told["clients"] == 60 and told["samples"] == 9000 and told["unused"] == 0
    assert {
        "balanced": per_client["max"] == 150,
        "power-law": per_client["max"] > 1500,
        "spread": 200 < per_client["max"] < 250,
    }[sizes["kind"]]
    if partition["kind"] == "classes-per-client":
        assert held == {"min": 7, "median": 7, "max": 7}
    if partition["kind"] == "shards":
        assert held["max"] <= 5


@pytest.mark.parametrize("keys", SYNTHETIC.values(), ids=SYNTHETIC)
def test_each_synthetic_set_has_60_features_and_10_classes(keys):
    opened = Shards.open(
        prepare(
            data.parse(
                {"kind": "synthetic", "clients": 30, "samples": 20, "test_samples": 300} | keys
            ),
            0,
        )
    )
    assert (
        opened.shape == (60,)
        and opened.classes == 10
        and opened.sizes.sum() == 600
        and opened.test_size == 300
    )


def test_the_quadratics_of_000_and_001_are_regression_data():
    # 001 sec. 5.3 with the defaults of its lost scalars
    opened = Shards.open(prepare(data.parse({"kind": "quadratics"}), 0))
    assert (
        opened.clients,
        opened.shape,
        opened.classes,
        int(opened.sizes.min()),
        opened.test_size,
    ) == (100, (200,), 0, 20, 2000)
    opened = Shards.open(
        prepare(data.parse({"kind": "scalar_quadratics", "a": [1, 2, 6], "b": [4, 1, -1]}), 0)
    )
    assert (opened.clients, opened.shape, opened.classes) == (3, (1,), 0)


def test_parquet_of_jpeg_images_is_a_table_and_its_own_column_can_name_the_clients(tmp_path):
    """The form of cifar10_jpeg: columns `image`, the bytes of a file, and `label`."""
    tones = np.arange(0, 240, 8)
    for part, rows in (("train", 30), ("test", 12)):
        files = []
        for tone in tones[:rows]:
            Image.fromarray(np.full((32, 32, 3), tone, np.uint8)).save(file := io.BytesIO(), "JPEG")
            files.append(file.getvalue())
        columns = {"image": files, "label": np.arange(rows) % 10, "writer": np.arange(rows) // 10}
        pq.write_table(pa.table(columns), tmp_path / f"{part}.parquet")
    keys = {"kind": "table", "train": "train.parquet", "test": "test.parquet"}
    opened = Shards.open(prepare(data.parse(keys | {"clients": 5}), 0, tmp_path))
    x, y, _ = opened.chunk(range(5), 6)
    assert opened.shape == (3, 32, 32) and opened.classes == 10 and opened.test_size == 12
    # JPEG keeps one tone to a level or two
    np.testing.assert_allclose(np.sort(x[..., 0, 7, 7].ravel()), tones / 255, atol=2 / 255)
    assert np.array_equal(np.bincount(y.ravel()), [3] * 10)
    natural = data.describe(
        data.parse(keys | {"client": "writer", "partition": {"kind": "natural"}}), root=tmp_path
    )
    assert natural["clients"] == 3 and natural["samples_per_client"] == {
        "min": 10,
        "median": 10,
        "max": 10,
    }


@pytest.mark.parametrize(("keys", "shape", "count"), MODELS.values(), ids=MODELS)
def test_each_model_is_built_from_its_config(keys, shape, count):
    module = models.build(models.parse(keys), form(shape), seed=0)
    assert models.parameter_count(module) == count
    with torch.no_grad():
        assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_the_dnn_of_002_trains_on_60_principal_components():
    keys = {
        "kind": "fashion_mnist_mini",
        "clients": 10,
        "features": {"kind": "pca", "components": 60},
    }
    opened = Shards.open(prepare(data.parse(keys), 0))
    module = models.build(models.parse({"kind": "mlp", "hidden": 1200}), form(opened.shape), seed=0)
    assert opened.shape == (60,) and [
        layer.in_features for layer in module if isinstance(layer, torch.nn.Linear)
    ] == [60, 1200]
