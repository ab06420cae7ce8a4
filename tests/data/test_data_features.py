"""Front ends: principal components and frozen ResNet-18 features, and their guarantee."""

import numpy as np
import pytest
import torch
from conftest import batches, refusal

from raydpfl import data
from raydpfl.data import Shards, prepare
from raydpfl.data.features import principal_components
from raydpfl.data.features.pca import Pca
from raydpfl.data.features.random_filters import RandomFilters
from raydpfl.data.features.resnet18 import ResNet18Features

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def net():
    """A ResNet-18 of made-up parameters and statistics: no layer is the identity by chance."""
    from torchvision.models import resnet18

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made = resnet18()
        for layer in made.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.running_mean.normal_(0, 0.1)
                layer.running_var.uniform_(0.5, 1.5)
    return made.eval()


def images(rows, channels=3, side=8, seed=0):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (rows, channels, side, side), dtype=np.uint8)


def table(folder, x, **keys):
    path = str(folder / "t.npz")
    np.savez(path, image=x, label=np.arange(len(x)) % 3)
    return data.parse({"kind": "table", "train": path, "test": path, "clients": 2, **keys})


@pytest.mark.parametrize("validation", [0.3, {"clients": 0.5}])
def test_nothing_is_learnt_of_rows_that_are_held_out(validation, tmp_path):
    """Columns of the rows that are left have mean 0, and are those of these rows alone."""
    x = np.random.default_rng(0).normal(size=(60, 5)) * [1, 2, 3, 4, 5] + 7
    described = table(tmp_path, x, features={"kind": "pca", "components": 2})
    shards = Shards.open(prepare(described, 0, cache=tmp_path / "made", validation=validation))
    columns, _, n = shards.chunk(range(shards.clients), int(shards.sizes.max()))
    left = np.concatenate([each[:count] for each, count in zip(columns, n, strict=True)])
    assert len(left) == shards.sizes.sum() < 60
    assert np.abs(left.mean(axis=0)).max() < 1e-6
    held = np.concatenate([x for x, _ in batches(shards, "validation")])
    assert np.abs(held.mean(axis=0)).max() > 1e-3
    whole = Shards.open(prepare(described, 0, cache=tmp_path / "whole"))
    assert (whole.shape, whole.sizes.sum()) == ((2,), 60)


def test_columns_that_are_not_learnt_are_the_same_whatever_is_held_out():
    x = images(6)
    filters = RandomFilters(filters=3, size=3, pool=2)
    expected = filters.columns(x, x[:2], None)
    found = filters.columns_without(x, x[:2], np.array([1, 4]), None)
    assert all(map(np.array_equal, found, expected))


def test_principal_components_are_those_of_the_training_rows_and_an_exclusion(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(300, 6)) @ generator.normal(size=(6, 6))
    described = table(tmp_path, x, features={"kind": "pca", "components": 2})
    split = described.split(0, tmp_path)
    rows = split.rows(0, 2)[0]
    _, singular, _ = np.linalg.svd(x - x.mean(0))
    np.testing.assert_allclose(np.linalg.norm(rows, axis=0), singular[:2], rtol=1e-4)
    assert split.shape == (2,) and rows.dtype == np.float32
    computed = "the principal components are computed from the training data without noise"
    assert described.exclusions[0] == computed
    assert computed not in table(tmp_path, x).exclusions


@pytest.mark.parametrize(
    "keys,said",
    [
        ({"x": ["a", "b"]}, ["which classes occur"]),
        ({"x": ["a", "b"], "classes": 3}, []),
        ({"x": ["a", "b"], "task": "regression"}, []),
        ({"x": ["a", "b"], "task": "multi_label", "dtype": "int64"}, ["which classes", "largest"]),
        ({"x": "a", "classes": 3}, ["largest of inputs"]),
        ({"x": "a", "classes": 3, "dtype": "float32"}, []),
        ({"x": "a", "classes": 3, "dtype": "float32", "task": "sequence"}, ["longest list"]),
    ],
)
def test_what_is_read_off_the_rows_of_a_table_to_size_a_model_is_an_exclusion(keys, said):
    found = data.parse({"kind": "table", "train": "rows.csv", **keys}).exclusions
    assert len(found) == len(said)
    assert all(part in each for part, each in zip(said, found, strict=True))


def test_components_of_public_rows_come_from_a_file_and_are_no_exclusion(tmp_path):
    public = images(200, 1, 5, seed=1)
    private = images(90, 1, 5, seed=2)
    mean, axes = principal_components(public, 9)
    np.testing.assert_allclose(axes @ axes.T, np.eye(9), atol=1e-12)
    np.savez(tmp_path / "public.npz", mean=mean, components=axes)
    public = {"kind": "pca", "components": 4, "file": "public.npz"}
    described = table(tmp_path, private, features=public)
    expected = (private.reshape(90, -1) / 255 - mean) @ axes[:4].T
    np.testing.assert_allclose(described.split(0, tmp_path).test()[0], expected, atol=1e-5)
    assert not any("components" in each for each in described.exclusions)
    before = described.identity(tmp_path)
    np.savez(tmp_path / "public.npz", mean=mean + 1, components=axes, more=np.zeros(3))
    assert described.identity(tmp_path) != before


@pytest.mark.parametrize(
    "arrays",
    [
        {"mean": np.zeros(24)},
        {"mean": np.zeros(24), "components": np.zeros((4, 25))},
        {"mean": np.full(25, np.nan)},
    ],
)
def test_a_file_of_components_that_do_not_fit_is_refused(arrays, tmp_path):
    np.savez(tmp_path / "public.npz", **{"components": np.zeros((4, 25))} | arrays)
    file = r"expected an NPZ file with mean \[25\] and components \[4 or more, 25\]"
    with refusal(f"data.features.file = 'public.npz': {file}"):
        Pca(components=4, file="public.npz").columns(images(9, 1, 5), images(3, 1, 5), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_the_nets_without_its_last_layer_on_images_as_the_weights_ask(
    channels, net, tmp_path
):
    from torchvision.models import ResNet18_Weights

    torch.save(net.state_dict(), tmp_path / "net.pt")
    x = images(5, channels)
    test_x = images(2, channels, seed=3)
    columns, test_columns = ResNet18Features(weights="net.pt").columns(x, test_x, tmp_path)
    assert columns.shape == (5, 512) and test_columns.shape == (2, 512)
    assert columns.dtype == np.float32
    colour = torch.from_numpy(x).repeat(1, 3 // channels, 1, 1)
    ready = ResNet18_Weights.IMAGENET1K_V1.transforms()(colour)
    assert ready.shape == (5, 3, 224, 224)
    with torch.no_grad():
        np.testing.assert_allclose(net.fc(torch.from_numpy(columns)), net(ready), atol=1e-4)
    assert np.ptp(columns, axis=0).max() > 1e-3  # they tell the images apart


def test_features_are_extracted_once_whatever_the_partition_and_anew_for_other_weights(
    tmp_path, monkeypatch, cache
):
    extracted = []
    monkeypatch.setattr(
        ResNet18Features,
        "_extract",
        lambda self, x, root: extracted.append(len(x)) or np.ones((len(x), 512), np.float32),
    )
    (tmp_path / "net.pt").write_bytes(b"weights")
    front = {"kind": "resnet18", "weights": str(tmp_path / "net.pt"), "resize": 32, "crop": 32}
    described = table(tmp_path, images(6), features=front)
    for seed, clients in ((0, 2), (1, 3)):
        described = described.model_copy(update={"clients": clients})
        opened = data.Shards.open(data.prepare(described, seed))
        assert opened.shape == (512,) and opened.classes == 3
        assert not described.features.exclusions
    # training and test rows are the same here
    assert extracted == [6] and len(list((cache / "features").iterdir())) == 1
    (tmp_path / "net.pt").write_bytes(b"others")
    for asked in (front, {**front, "resize": 40}):
        data.prepare(described.model_copy(update={"features": ResNet18Features(**asked)}), 0)
    assert extracted == [6, 6, 6]


def test_a_net_that_fails_leaves_nothing_in_the_cache(tmp_path, cache):
    (tmp_path / "net.pt").write_bytes(b"nonsense")
    file = r"a file with a state dict of torchvision's resnet18 \(UnpicklingError"
    with refusal(f"data.features.weights = 'net.pt': expected {file}"):
        ResNet18Features(weights="net.pt").columns(images(2), images(2), tmp_path)
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "net.pt")
    with refusal("Missing key"):
        ResNet18Features(weights="net.pt").columns(images(2), images(2), tmp_path)
    assert list((cache / "features").iterdir()) == []


@pytest.mark.usefixtures("offline")
def test_without_a_network_the_weights_of_imagenet_are_asked_for_as_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path / "hub"))
    file = f"resnet18-f37072fd.pth, put in {tmp_path}/hub/checkpoints"
    with refusal(rf"^data\.features\.weights = .*{file}"):
        ResNet18Features().columns(images(2), images(2), None)


def test_a_crop_larger_than_the_image_is_refused(tmp_path):
    with refusal(r"data.features.crop = 64: expected at most data.features.resize, 32"):
        table(tmp_path, images(2), features={"kind": "resnet18", "resize": 32, "crop": 64})


def filtered(x, **keys):
    return RandomFilters(**keys).columns(x, x[:1], None)[0]


def test_random_filters_are_what_a_slow_sum_over_patches_gives():
    x = images(2, 3, 9)
    member = RandomFilters(filters=3, size=4, pool=2)
    weights = member._weights(3).astype(np.float64)
    np.testing.assert_allclose(weights.reshape(3, -1).mean(1), 0, atol=1e-8)
    np.testing.assert_allclose((weights**2).reshape(3, -1).sum(1), 1, rtol=1e-6)
    expected = np.zeros((2, 6, 2, 2))
    for row, image in enumerate(x / 255):
        for top in range(6):
            for left in range(6):
                patch = image[:, top : top + 4, left : left + 4]
                found = (weights * patch).sum((1, 2, 3)) / (patch.std() + 10 / 255)
                parts = np.concatenate([found.clip(0), (-found).clip(0)])
                expected[row, :, top // 3, left // 3] += parts / 9
    columns = member.columns(x, x[:1], None)
    np.testing.assert_allclose(columns[0], expected.reshape(2, -1), atol=1e-5)
    np.testing.assert_allclose(columns[1], columns[0][:1], atol=1e-6)


def test_random_filters_depend_on_their_seed_and_on_no_other_image():
    x = images(5, 1, 12)
    assert filtered(x).shape == (5, 512) and filtered(x).dtype == np.float32
    assert np.array_equal(filtered(x), filtered(x.copy()))
    np.testing.assert_allclose(filtered(x)[3:], filtered(x[3:]), atol=1e-6)
    assert not np.allclose(filtered(x), filtered(x, seed=1))
    assert RandomFilters().exclusions == ()
    # brighter, or with twice the contrast: nearly the same
    dim = (images(1, 1, 12) // 4 + 30).astype(np.uint8)
    np.testing.assert_allclose(filtered(dim + 60), filtered(dim), atol=1e-4)


def test_flat_images_have_small_features():
    assert np.abs(filtered(np.full((1, 3, 12, 12), 200, np.uint8))).max() < 1e-4


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (images(3).astype(np.float32), "kind = 'random_filters': expected images; the"),
        (images(3), r"size = 8: expected at most 7, for images of \(8, 8\)"),
    ],
)
def test_what_random_filters_cannot_be_made_of_is_refused(x, message):
    with refusal(f"data.features.{message}"):
        filtered(x, size=8)
