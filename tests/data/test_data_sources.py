"""Where samples come from: the embedded set, torchvision's layout, tables, Synthetic(u, v)."""

import io
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conftest import messages, refusal
from PIL import Image

from raydpfl import data
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import embedded
from raydpfl.data.sources.image_sets import Mnist


def table(**keys):
    return data.parse({"kind": "table", "clients": 2} | keys)


def encoded(pixels, form="PNG"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


PREFIXES = {
    "MNIST": ("train", "t10k"),
    "EMNIST": ("emnist-digits-train", "emnist-digits-test"),
}


def write_idx(root: Path, images: np.ndarray, name: str = "MNIST", parts: int = 2) -> None:
    """The files of training rows, and of test rows, of a set of these images of classes 0 to 9."""
    folder = root / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    labels = np.arange(len(images)) % 10
    for prefix in PREFIXES[name][:parts]:
        header = struct.pack(">IIII", 0x803, *images.shape)
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 0x801, len(labels))
        (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + bytes(labels.tolist()))


def write_table(folder: Path, **columns) -> None:
    pq.write_table(pa.table(columns), folder / "t.parquet")


WRITERS = {
    "parquet": lambda columns, path: pq.write_table(pa.table(columns), path),
    "arrow": lambda columns, path: pa.feather.write_feather(pa.table(columns), path),
    "npz": lambda columns, path: np.savez_compressed(path, **columns),
}


def test_the_embedded_files_are_small_balanced_and_licensed():
    for part, per_class in {"train": 900, "test": 200}.items():
        x, y = embedded.read(part)
        assert x.shape == (10 * per_class, 1, 28, 28) and x.dtype == np.uint8
        assert (np.bincount(y) == per_class).all()
        assert embedded.path(part).stat().st_size < 5e6
    licence = embedded.path("train").with_name("LICENSE").read_text()
    assert "Copyright (c) 2017 Zalando SE" in licence


def test_normalized_embedded_images_have_mean_0_and_deviation_1():
    found = data.parse({"kind": "fashion_mnist_mini", "clients": 1, "normalize": True})
    pixels = (found.samples(0, None).x / 255 - found.mean[0]) / found.std[0]
    assert abs(pixels.mean()) < 1e-3 and abs(pixels.std() - 1) < 1e-3


def test_torchvision_sets_are_read_in_torchvisions_layout(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = np.arange(30) % 10
    for name in PREFIXES:
        write_idx(tmp_path, images, name)
    described = data.parse({"kind": "mnist", "clients": 2})
    assert [name for name, *_ in described.identity(tmp_path)] == list(Mnist.file_names)
    assert data.Shards.open(data.prepare(described, 0, tmp_path)).describe()["samples"] == 30
    mnist = described.samples(0, tmp_path)
    assert np.array_equal(mnist.x[:, 0], images) and np.array_equal(mnist.test_y, labels)
    emnist = data.parse({"kind": "emnist_digits", "clients": 2}).samples(0, tmp_path)
    # upright: the files hold them transposed
    assert np.array_equal(emnist.x[:, 0], images.transpose(0, 2, 1))
    where = {row["kind"]: row["where"] for row in data.catalogue(tmp_path)}
    assert where["mnist"] == str(tmp_path)
    assert where["svhn"] == f"not under {tmp_path}; raydpfl data fetch svhn"
    assert data.fetch("mnist", tmp_path) == tmp_path


def test_a_class_of_ones_own_is_listed_and_has_nothing_to_fetch(tmp_path, own_module):
    own_module(
        "faces",
        "from raydpfl.data import InMemoryData\n"
        "class Faces(InMemoryData):\n    'Faces, in grey.'\n"
        "class Near(Faces):\n    'Near faces.'\n    @classmethod\n"
        "    def located(cls, root):\n        return f'{root}/faces'\n",
    )
    rows = data.catalogue(tmp_path, ["faces:Faces", "faces:Near", "synthetic"])
    assert [(row["summary"], row["where"]) for row in rows[:2]] == [
        ("Faces, in grey.", "given by its class"),
        ("Near faces.", f"{tmp_path}/faces"),
    ]
    assert rows[2]["where"] == "generated"
    for kind in ("faces:Faces", "synthetic", "table"):
        with refusal(f"data.kind = '{kind}': expected one that is downloaded"):
            data.fetch(kind, tmp_path)
    with refusal(r"data.kind = 'faces': expected one of fashion_mnist_mini, mnist"):
        data.catalogue(tmp_path, ["faces"])


def test_cifar10_as_jpeg_images_is_read_from_its_folder_under_the_root(tmp_path):
    described = data.parse({"kind": "cifar10_jpeg", "clients": 2})
    files = "cifar10_jpeg/train.parquet and cifar10_jpeg/test.parquet"
    with refusal(begins=f"data.kind: {files} under {tmp_path} (--data-root, RAYDPFL_DATA)"):
        described.split(0, tmp_path)
    assert not list(tmp_path.iterdir())
    smooth = np.add.outer(np.arange(32), np.arange(32))[..., None] + np.arange(3) * 20
    pixels = np.stack([smooth + 9 * row for row in range(10)]).astype(np.uint8)
    column = [encoded(image, "JPEG") for image in pixels]
    (tmp_path / "cifar10_jpeg").mkdir()
    for part in ("train", "test"):
        table = pa.table({"image": column, "label": np.arange(10)})
        pq.write_table(table, tmp_path / "cifar10_jpeg" / f"{part}.parquet")
    found = described.samples(0, tmp_path)
    assert found.x.shape == (10, 3, 32, 32) and found.x.dtype == np.uint8
    assert np.abs(found.x.astype(int) - pixels.transpose(0, 3, 1, 2)).mean() < 5  # it is lossy
    assert np.array_equal(found.y, np.arange(10)) and len(described.identity(tmp_path)) == 2
    (row,) = data.catalogue(tmp_path, ["cifar10_jpeg"])
    assert row["where"] == str(tmp_path / "cifar10_jpeg")


def test_normalizing_pixels_that_are_not_the_published_ones_is_refused(tmp_path):
    write_idx(tmp_path, np.full((5, 28, 28), 9, np.uint8))
    measured = r"mean and std are \[0.035\] and \[0.0\], not \(0.1307,\)"
    with refusal(f"data.normalize = True: expected false: {measured}"):
        data.parse({"kind": "mnist", "clients": 2, "normalize": True}).split(0, tmp_path)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "kind", ["mnist", "fashion_mnist", "emnist_digits", "cifar10", "cifar100", "svhn"]
)
def test_a_data_set_that_is_not_there_says_where_it_was_looked_for(kind, tmp_path):
    for root in (tmp_path / "not" / "there", tmp_path):
        with refusal(begins=f"data.kind: a data set that is under {root} (--data-root, "):
            data.fetch(kind, root)
        assert not list(tmp_path.iterdir())  # nothing was made


@pytest.mark.parametrize("suffix", WRITERS)
def test_columns_of_numbers_become_features(suffix, tmp_path):
    columns = {"a": np.arange(10.0), "b": np.arange(10) * 2, "label": np.arange(10) % 3}
    name = f"t.{suffix}"
    WRITERS[suffix](columns, tmp_path / name)
    found = table(train=name, test=name, x=["a", "b"]).samples(0, tmp_path)
    assert found.x.dtype == np.float32
    assert np.array_equal(found.x, np.stack([columns["a"], columns["b"]], 1))
    assert np.array_equal(found.y, columns["label"]) and np.array_equal(found.test_x, found.x)


@pytest.mark.parametrize("form", ["bytes", "struct"])
def test_encoded_images_are_decoded_channels_first(form, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 5, 7, 3), dtype=np.uint8)
    images = [encoded(image) for image in pixels]
    column = images if form == "bytes" else [{"bytes": image, "path": None} for image in images]
    labels = [f"class {row % 3}" for row in range(12)]
    write_table(tmp_path, image=column, label=labels)
    found = table(train="t.parquet", test="t.parquet").samples(0, tmp_path)
    assert np.array_equal(found.x, pixels.transpose(0, 3, 1, 2))
    assert np.array_equal(found.y, np.arange(12) % 3)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((6, 6), 1), ((3, 6, 6), 3), ((6, 6, 3), 3), ((6, 6, 1), 1)],
)
def test_arrays_of_images_are_read_channels_first_or_last(shape, channels, tmp_path):
    image = np.arange(9 * np.prod(shape)).reshape(9, *shape).astype(np.uint8)
    np.savez(tmp_path / "t.npz", image=image, label=np.zeros(9, int))
    assert table(train="t.npz").samples(0, tmp_path).x.shape[1:] == (channels, 6, 6)


def test_lists_become_features_and_rows_held_out_are_not_trained_on(tmp_path):
    rows = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    write_table(tmp_path, v=list(rows), label=np.zeros(40, int))
    found = table(train="t.parquet", x="v", test_fraction=0.25).samples(0, tmp_path)
    assert len(found.test_x) == 10
    every = np.concatenate([found.x, found.test_x])
    assert np.array_equal(np.unique(every, axis=0), np.unique(rows, axis=0))


def test_a_column_of_ids_makes_natural_clients(tmp_path):
    ids = np.random.default_rng(0).choice(["ann", "bob", "eve"], 30)
    write_table(tmp_path, a=np.arange(30), label=np.zeros(30, int), who=ids)
    natural = {"client": "who", "partition": {"kind": "natural"}, "clients": None}
    described = table(train="t.parquet", test="t.parquet", x="a", **natural)
    split = described.split(0, tmp_path)
    assert split.sizes.tolist() == [int((ids == name).sum()) for name in ("ann", "bob", "eve")]
    assert np.array_equal(split.rows(1, 2)[0][:, 0], np.flatnonzero(ids == "bob"))
    with refusal(r"data.clients = 4: expected 3, the number of clients in the data, or none"):
        data.prepare(described.model_copy(update={"clients": 4}), 0, tmp_path)


def test_no_client_vanishes_with_the_rows_that_are_held_out(tmp_path):
    ids = np.repeat(np.arange(30), np.arange(30) % 2 + 1)
    np.savez(tmp_path / "t.npz", x=np.arange(45.0)[:, None], label=np.zeros(45, int), who=ids)
    natural = {"client": "who", "partition": {"kind": "natural"}, "clients": 30}
    found = table(train="t.npz", x="x", test_fraction=0.3, **natural)
    split = found.split(0, tmp_path)
    rows = split.rows(0, 30)[0][:, 0].astype(int)
    held = split.test()[0][:, 0].astype(int)
    assert len(held) == 14 and sorted([*rows, *held]) == list(range(45))
    assert np.array_equal(ids[rows], np.repeat(np.arange(30), split.sizes))
    np.savez(tmp_path / "t.npz", x=np.zeros((3, 1)), label=np.zeros(3, int), who=np.arange(3))
    with refusal(r"data.test = None: expected a table that leaves at least one row to test"):
        found.split(0, tmp_path)


@pytest.mark.parametrize(("keys", "message"), messages("tables"))
def test_what_is_wrong_with_a_table_is_said_in_one_line(keys, message, tmp_path):
    columns = {
        "a": np.arange(4.0),
        "gap": pa.array([1.0, None, 2.0, 3.0]),
        "nan": [0, 1, np.nan, 3],
        "text": list("abcd"),
        "label": [0, 1, 0, 1],
        "half": [0, 0.5, 1, 1],
        "image": [encoded(np.zeros((2, 2), np.uint8)), b"x", b"y", b"z"],
        "who": list("aabb"),
        "part": ["test", "train", "train", "test"],
        "v": [[0.0, 1.0]] * 4,
    }
    write_table(tmp_path, **columns)
    wide = {"a": [0.0, np.nan], "half": [0.0, 1.0], "label": [0, 1], "v": [[0.0, 1.0, 2.0]] * 2}
    pq.write_table(pa.table(wide), tmp_path / "wide.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"nonsense")
    with refusal(begins=message):
        table(**({"train": "t.parquet", "x": "a"} | keys)).split(0, tmp_path)


@pytest.mark.parametrize(("name", "column", "message"), messages("arrays"))
@pytest.mark.filterwarnings("error")
def test_arrays_of_a_wrong_shape_or_range_are_refused_in_one_line(name, column, message, tmp_path):
    arrays = {"x": np.zeros((4, 2)), "label": np.array([0, 1, 0, 1]), "who": np.array([0, 0, 1, 1])}
    kind = "datetime64[D]" if "NaT" in str(column) else None
    np.savez(tmp_path / "t.npz", **(arrays | {name: np.array(column, kind)}))
    with refusal(f"^{re.escape(message)}$"):
        table(train="t.npz", x="x", client="who", partition={"kind": "natural"}).split(0, tmp_path)


def slow_synthetic(seed, client, samples, u, v):
    """Li et al.'s construction, one number after another, from the client's own stream."""
    generator = stream(seed, Purpose.DATA, client=client)
    draw = iter(generator.standard_normal(2 + 600 + 10 + 60, np.float32))
    shift = u**0.5 * next(draw)
    centre = v**0.5 * next(draw)
    weights = np.array([[shift + next(draw) for _ in range(10)] for _ in range(60)])
    bias = np.array([shift + next(draw) for _ in range(10)])
    mean = np.array([centre + next(draw) for _ in range(60)])
    noise = generator.standard_normal((samples, 60), np.float32)
    x = np.array([[mean[j] + (j + 1) ** -0.6 * row[j] for j in range(60)] for row in noise])
    return x, (x @ weights + bias).argmax(1)


def synthetic(clients, samples, sizes="balanced", seed=0, **keys):
    given = {"kind": "synthetic", "clients": clients, "samples": samples, "sizes": {"kind": sizes}}
    return data.parse(given | keys).split(seed, None)


def test_synthetic_data_follow_their_definition():
    split = synthetic(4, 25, seed=3, u=0.5, v=2.0)
    for client in range(4):
        x, y = split.rows(client, client + 1)
        slow_x, slow_y = slow_synthetic(3, client, 25, 0.5, 2.0)
        np.testing.assert_allclose(x, slow_x, atol=1e-5)
        assert (y == slow_y).mean() > 0.95  # a tie may fall either way in float32


def test_the_sizes_of_synthetic_clients_follow_a_power_law_unless_they_are_said_to_be_even():
    sizes = data.parse({"kind": "synthetic", "clients": 50, "samples": 100}).split(0, None).sizes
    expected = 5000 / np.sum(1 / np.arange(1, 51)) / np.arange(1, 51)
    assert sizes.sum() == 5000
    np.testing.assert_allclose(np.sort(sizes)[::-1], expected, atol=1.5)
    assert set(synthetic(50, 100).sizes.tolist()) == {100}


def test_u_changes_no_label():
    one, other = (synthetic(20, 50, "power-law", u=u).rows(0, 20) for u in (0.0, 9.0))
    assert np.array_equal(one[0], other[0]) and (one[1] == other[1]).mean() > 0.999


def test_iid_synthetic_clients_share_one_model_and_the_test_rows_are_new():
    split = synthetic(50, 200, iid=True, test_samples=2000)
    x, y = split.rows(0, 50)
    test_x, test_y = split.test()
    # Means of 10,000 rows: std 0.01 for the first feature, less for the others; 60 two-sided tests
    # at 4.5 std: false alarm below 5e-4.
    assert np.abs(x.mean(0)).max() < 0.045
    assert np.abs(x.std(0) / np.arange(1, 61) ** -0.6 - 1).max() < 0.045
    weights = np.linalg.lstsq(np.c_[x, np.ones(len(x))], np.eye(10)[y], rcond=None)[0]
    right = (np.c_[test_x, np.ones(len(test_x))] @ weights).argmax(1) == test_y
    assert right.mean() > 0.6  # by a linear fit to one-hot labels
    assert len(np.unique(np.concatenate([x, test_x]), axis=0)) == len(x) + len(test_x)


@pytest.mark.parametrize("kind", ["power-law", "balanced", "spread"])
def test_synthetic_test_rows_are_the_same_share_of_each_clients_own(kind):
    split = synthetic(40, 50, kind, test_samples=2000, features=3)
    test_x, test_y = split.test()
    # v_k tells clients apart; 2000 rows to test as 2000 to train are a half of each client's
    rows = np.split(test_x, np.cumsum(split.sizes)[:-1])
    assert len(test_y) == split.sizes.sum() == 2000
    for client in np.flatnonzero(split.sizes >= 40):
        own = split.rows(client, client + 1)[0]
        # means of 40 rows or more, of std 1 or less: 6 std
        assert np.abs(own.mean(0) - rows[client].mean(0)).max() < 6 * (2 / 40) ** 0.5


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A grey PNG that says it is so large, with as many rows as are given."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + header + body


SMALL = png(2, 2, b"\0" * 6)


def scanned(width: int, height: int, scans: int) -> bytes:
    """A JPEG of so many scans, as a progressive one may have, each of them as good as empty."""
    image = encoded(np.zeros((height, width), np.uint8), "JPEG")
    return image[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x00\x00\x00\x00" * scans + b"\xff\xd9"


BOMBS = {
    "many of nothing": [png(8_000, 8_000)] * 80,
    "scan upon scan": [scanned(2_000, 2_000, 1_000)],
    "16 bits": [encoded(np.full((2, 2), 40_000, np.uint16))],
    "numbers for pixels": [encoded(np.ones((2, 2), np.float32), "TIFF")],
    "200 million pixels": [png(20_000, 10_000)],
    "90 million pixels": [png(9_500, 9_500)],
    "70 million pixels": [png(10_000, 7_000)],
    "a header of 2^31": [png(2**31 - 1, 2**31 - 1)],
    "a later row": [SMALL, png(20_000, 10_000)],
    "a later row of another size": [SMALL, png(5_000, 5_000)],
    "more than memory": [png(8_000, 8_000)] * 100_000,
    "a row that is cut": [png(2, 2, b"\0")],
    "another format": [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"],
    "nothing": [b""],
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("bomb", "message"), messages("images").items())
def test_images_that_no_one_could_want_are_refused_before_a_pixel_is_decoded(
    bomb, message, tmp_path
):
    images = BOMBS[bomb]
    labels = np.zeros(len(images), int)
    write_table(tmp_path, image=pa.array(images, pa.binary()), label=labels)
    with refusal(begins=f"data.x: {message}"):
        table(train="t.parquet").split(0, tmp_path)


def test_large_images_of_flat_colour_and_progressive_ones_are_taken(tmp_path):
    flat = np.full((2_000, 2_000), 7, np.uint8)
    progressive = io.BytesIO()
    Image.fromarray(flat).save(progressive, "JPEG", progressive=True, quality=100)
    for image in (encoded(flat), progressive.getvalue()):
        write_table(tmp_path, image=[image] * 2, label=[0, 1])
        assert (table(train="t.parquet", test="t.parquet").samples(0, tmp_path).x == 7).all()


LISTS = [pa.list_(pa.float32()), pa.binary(), pa.float32(), pa.struct([("bytes", pa.binary())])]


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_a_column_without_rows_is_refused(kind, tmp_path):
    write_table(tmp_path, v=pa.array([], kind), label=pa.array([], pa.int64()))
    with refusal(r"data.train = 't.parquet': expected a table with rows; this one has none"):
        table(train="t.parquet", x="v").split(0, tmp_path)


ODD = {
    "dates": pa.array([0, 1], pa.date32()),
    "durations": pa.array([0, 1], pa.duration("s")),
    "structs": pa.array([{"a": 1}, {"a": 2}]),
    "maps": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())),
    "lists of lists of words": pa.array([[["a"]], [["b"]]]),
    "lists of words": pa.array([["a"], ["b"]]),
    "empty lists": pa.array([[], []], pa.list_(pa.int8())),
    "lists of several lengths": pa.array([[1], [1, 2]]),
    "lists with gaps": pa.array([[1, None], [1, 2]]),
    "nothing": pa.nulls(2),
    "words by number": pa.array(["a", "b"]).dictionary_encode(),
    "runs": pa.RunEndEncodedArray.from_arrays([1, 2], ["a", "b"]),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("odd", ODD)
def test_columns_that_are_no_features_are_refused_in_one_line(odd, tmp_path):
    pa.feather.write_feather(pa.table({"v": ODD[odd], "label": [0, 1]}), tmp_path / "t.arrow")
    with refusal(begins="data.x: "):
        table(train="t.arrow", x="v").split(0, tmp_path)


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_a_small_file_of_more_than_memory_holds_is_refused_before_it_is_read(
    suffix, tmp_path, monkeypatch
):
    columns = {"v": np.zeros(1_000_000), "label": np.zeros(1_000_000, int)}
    WRITERS[suffix](columns, tmp_path / f"t.{suffix}")
    assert (tmp_path / f"t.{suffix}").stat().st_size < 100_000
    free = type("Memory", (), {"available": 10_000_000})
    monkeypatch.setattr("raydpfl.storage.files.psutil.virtual_memory", lambda: free)
    with refusal(r"\(MemoryError: 0.0 GB are needed, 0.0 are free\)"):
        table(train=f"t.{suffix}", x="v").split(0, tmp_path)


LIES = struct.pack(">IIII", 0x803, 2**31, 2**31 - 1, 20)


@pytest.mark.parametrize(
    ("most", "damaged", "message"),
    [
        (100, lambda whole: whole, r"samples of at most 100 numbers, not \(1, 20, 20\)"),
        (10**6, lambda whole: LIES + whole[16:], "files under .* intact, but cannot be"),
        (10**6, lambda whole: b"nonsense", "files under .* intact, but cannot be"),
    ],
    ids=["too large", "a header that lies", "nonsense"],
)
def test_images_of_torchvisions_files_have_a_limit_and_damaged_ones_are_named(
    most, damaged, message, tmp_path, monkeypatch
):
    monkeypatch.setattr(data.sources.base, "LARGEST", most)
    write_idx(tmp_path, np.zeros((4, 20, 20), np.uint8))
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    path.write_bytes(damaged(path.read_bytes()))
    with refusal(f"data.kind = 'mnist': expected {message}"):
        data.parse({"kind": "mnist", "clients": 2}).split(0, tmp_path)


def downloaded(monkeypatch, broken=False):
    """Has MNIST "downloaded": by torchvision's own reader, from files that are written here."""

    def part(self, folder, train, download=False):
        write_idx(folder, np.zeros((5, 28, 28), np.uint8), parts=1 if train else 2)
        if broken and not train:
            raise OSError("the network is gone")

    monkeypatch.setattr(data.FAMILY["mnist"], "_part", part)


def test_a_download_that_breaks_off_leaves_nothing_and_a_whole_one_is_put_in_place(
    tmp_path, monkeypatch
):
    root = tmp_path / "root"
    downloaded(monkeypatch, broken=True)
    with refusal(r"was not downloaded \(the network is gone\)"):
        data.fetch("mnist", root)
    assert not root.exists()
    (root / "MNIST").mkdir(parents=True)
    (root / "MNIST" / "mine.txt").write_text("kept")
    with refusal():
        data.fetch("mnist", root)
    assert [path.name for path in root.rglob("*")] == ["MNIST", "mine.txt"]
    downloaded(monkeypatch)
    assert data.fetch("mnist", root) == root
    files = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert files == {*data.FAMILY["mnist"].file_names, "MNIST/mine.txt"}
