"""Data files: the good ones train from the advice alone; of the bad ones a line says what to do."""

import json
import pickle
import shlex
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from conftest import messages, refusal
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from raydpfl import data, run
from raydpfl.config.yaml import parse_yaml
from raydpfl.data import Shards
from raydpfl.experiment import Experiment
from raydpfl.report import class_histogram

ROWS = 120
DRAWN = np.random.default_rng(0)
CLASS = DRAWN.integers(3, size=ROWS)
FLOATS = DRAWN.normal(size=(ROWS, 4)) + CLASS[:, None]
COLUMNS = {f"f{place}": FLOATS[:, place].round(3) for place in range(4)}
NAMES = np.array(["cat", "dog", "bird"])[CLASS]
TOKENS = DRAWN.integers(20, size=(ROWS, 6))


def table_of(between=",", **columns):
    """Makes a file of a line of names and a line for each row."""
    rows = [columns, *zip(*columns.values(), strict=True)]
    return text_of("".join(between.join(map(str, row)) + "\n" for row in rows))


def rows_of(*rows):
    return text_of("".join(json.dumps(row) + "\n" for row in rows))


def text_of(text):
    return lambda file: file.write_text(text)


def arrays_of(**columns):
    return lambda file: np.savez(file, **columns)


def images(folder: Path, size=(9, 9)):
    folder.mkdir(parents=True)
    for name in range(8):
        pixels = DRAWN.integers(0, 255, (*size, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{name}.png")


def saved_to_disk(folder: Path, columns, names=()):
    """As `datasets.Dataset.save_to_disk` writes it."""
    folder.mkdir(parents=True)
    features = {"label": {"names": list(names), "_type": "ClassLabel"}} if names else {}
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    table = pa.table(columns).replace_schema_metadata(about)
    with pa.ipc.new_stream(str(folder / "data-0.arrow"), table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))


def prices(file):
    price = (FLOATS.sum(1) * 1000).round(2)
    table_of(";", id=range(ROWS), **COLUMNS, town=NAMES, price=price)(file)
    file.write_text(file.read_text().replace(".", ","))


def two_files(file):
    for path in (file, file.with_name("test.csv")):
        table_of(**COLUMNS, label=NAMES)(path)


def parquet(**columns):
    return lambda file: pq.write_table(pa.table(columns), file)


def folders(*parts):
    def made(folder):
        for part in parts:
            for name in ("ant", "bee"):
                images(folder / part / name)

    return made


def saved_parts(folder):
    for part in ("train", "test"):
        saved_to_disk(folder / part, SAVED)
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


SPLIT = np.where(np.arange(ROWS) % 5, "train", "test")
WRITTEN = {"input_ids": list(TOKENS), "label": (TOKENS[:, 0] > 9).astype(int)}
AUTHORS = [f"u{row % 9}" for row in range(ROWS)]
POSITIONS = parquet(tokens=list(TOKENS), labels=list((TOKENS + 1) % 20), author=AUTHORS)
USERS = table_of(**COLUMNS, label=NAMES, user_id=np.arange(ROWS) % 12)
PARTS = table_of("\t", **COLUMNS, label=CLASS, split=SPLIT)
SIGNS = pa.table({**COLUMNS, "y": 2 * (CLASS > 0) - 1})
IMAGES = DRAWN.integers(0, 256, (ROWS, 9, 9, 3)).astype(np.uint8)
FOX = "the quick brown fox jumps over the lazy dog"
SPEECH = "Speak, speak, and let us hear what is to be said of it.\n" * 6
PLAY = "".join(f"Citizen {name}:\n{SPEECH}\n" for name in "ABCAB")
SAVED = {"x": list(FLOATS), "label": CLASS}
LISTED = [
    {"features": x.tolist(), "target": int(y)}
    for x, y in zip(FLOATS.reshape(ROWS, 2, 2), CLASS, strict=True)
]
TAGGED = [{"x": x, "labels": [f"t{k}" for k in range(3) if x[k] > 0]} for x in FLOATS.tolist()]
POSTED = rows_of(*({"user": f"u{row % 4}", "text": f"{FOX} {row}"} for row in range(40)))
# by name of a file, or a folder: how it is made, some of the fields that are suggested, the model
GOOD = {
    "users.csv": (USERS, {"client": "user_id", "partition": {"kind": "natural"}}, "softmax"),
    "prices.csv": (prices, {"x": [*COLUMNS], "y": "price", "task": "regression"}, "linear"),
    "parts.tsv": (PARTS, {"split_by": "split"}, "softmax"),
    "train.csv": (two_files, {"test": "test.csv"}, "softmax"),
    "lists.jsonl": (rows_of(*LISTED), {"x": "features", "y": "target"}, "softmax"),
    "tags.jsonl": (rows_of(*TAGGED), {"task": "multi_label", "y": "labels"}, "linear"),
    "tokens.parquet": (parquet(**WRITTEN), {"x": "input_ids"}, "transformer"),
    "positions.parquet": (POSITIONS, {"task": "sequence", "client": "author"}, "transformer"),
    "signs.arrow": (
        lambda file: pa.feather.write_feather(SIGNS, file),
        {"classes": ["-1", "1"]},
        "softmax",
    ),
    "arrays.npz": (
        arrays_of(features=FLOATS, target=FLOATS @ DRAWN.normal(size=(4, 2))),
        {"task": "regression"},
        "linear",
    ),
    "pixels.npz": (arrays_of(x=IMAGES, y=CLASS), {"x": "x", "y": "y"}, "cnn"),
    "pictures": (folders(""), {"kind": "image_folder"}, "cnn"),
    "parted": (folders("train", "test"), {"test": "parted/test"}, "cnn"),
    "posts.jsonl": (POSTED, {"kind": "text", "text": "text", "client": "user"}, "transformer"),
    "play.txt": (text_of(PLAY), {"kind": "text", "path": "play.txt"}, "transformer"),
    "saved": (
        lambda folder: saved_to_disk(folder, SAVED, ("cat", "dog", "bird")),
        {"kind": "hugging_face", "path": "saved"},
        "softmax",
    ),
    "splits": (saved_parts, {"kind": "hugging_face", "test": "test"}, "softmax"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_file_trains_from_the_advice_alone(name, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    make, expected, model = GOOD[name]
    make(tmp_path / name)
    code, advice, _ = typed("data", "describe", name, *["test.csv"] * (name == "train.csv"))
    assert code == 0
    tree = parse_yaml(advice)
    assert expected.items() <= tree["data"].items() and tree["model"]["kind"] == model
    assert f"# data: kind: {tree['data']['kind']}" in advice.splitlines()[0]
    assert tree["bounding"] == tree["noise"] == {"kind": "none"}
    tree |= {"rounds": 2, "client": {"actors": 0}, "measure": []}
    found = run(Experiment.from_dict(tree), out=tmp_path / "out")
    assert np.isfinite(found.summary["test_loss"])


@pytest.mark.parametrize("size", [1e4, 1e11])
@pytest.mark.parametrize("target", ["price", "label"])
def test_the_advice_for_wide_numbers_does_not_diverge(size, target, tmp_path, monkeypatch):
    wide = {name: column * size for name, column in COLUMNS.items()}
    wide[target] = FLOATS.sum(1) * 1000 if target == "price" else NAMES
    table_of(**wide)(tmp_path / "a.csv")
    monkeypatch.chdir(tmp_path)
    found = data.Suggestion(["a.csv"], {}, tmp_path)
    tree = {**found.tree, "rounds": 20, "client": {"actors": 0}}
    assert np.isfinite(run(Experiment.from_dict(tree), out=tmp_path / "out").summary["test_loss"])


def test_the_advice_is_made_private_as_it_says(tmp_path, monkeypatch):
    USERS(tmp_path / "a.csv")
    monkeypatch.chdir(tmp_path)
    found = data.Suggestion(["a.csv"], {}, tmp_path)
    told = found.notes[-1].removeprefix("no noise; private for each client with ")
    experiment = Experiment.from_dict(found.tree, overrides=shlex.split(told))
    assert experiment.private and experiment.noise.epsilon == 8
    assert experiment.noise.drawn_by() != "step"


def test_names_of_classes_are_those_that_the_file_gives(tmp_path):
    saved_to_disk(tmp_path / "set", SAVED, ("cat", "dog", "bird"))
    keys = {"kind": "hugging_face", "path": "set", "x": "x", "clients": 4}
    shards = Shards.open(data.prepare(data.parse(keys), 0, tmp_path))
    assert shards.target.names == ("cat", "dog", "bird")
    with refusal(r"data.test = 'dev': expected a split of set"):
        data.parse({**keys, "test": "dev"}).split(0, tmp_path)


def test_images_are_scaled_and_held_by_whom_folders_name(tmp_path):
    for who, size in (("ann", (9, 9)), ("bob", (12, 7))):
        for name in ("ant", "bee"):
            images(tmp_path / "all" / who / name, size)
    keys = {"kind": "image_folder", "train": "all", "client": "client", "size": 6}
    natural = {"partition": {"kind": "natural"}}
    split = data.parse({**keys, **natural}).split(0, tmp_path)
    assert split.shape == (3, 6, 6) and split.names == ("ant", "bee") and len(split.sizes) == 2
    with refusal(r"one size .*; bob/ant/0.png is \(3, 12"):
        data.parse({**keys, **natural, "size": None}).split(0, tmp_path)


def sizes(folder):
    images(folder / "a")
    images(folder / "b", (9, 8))


def cut(folder):
    images(folder / "ant")
    images(folder / "bee")
    whole = (folder / "bee" / "3.png").read_bytes()
    (folder / "bee" / "3.png").write_bytes(whole[:80])


def nothing(path):
    """It is not there."""


OBJECTS = np.array([{}, {}], dtype=object)
LATIN = "a,label\n1,caf\xe9\n2,th\xe9\n".encode("latin-1")
LENGTHS = ({"x": [[1.0] * size] * 2, "label": 0} for size in (2, 3))
BAD = {
    "missing.csv": nothing,
    "empty.csv": text_of(""),
    "rowless.csv": text_of("a,label\n"),
    "gaps.csv": table_of(a=["1", ""] * 9, label=[0, 1] * 9),
    "unlabelled.csv": table_of(a=range(6), label=[0, "", 1] * 2),
    "single.csv": table_of(**COLUMNS, label=["one"] * ROWS),
    "twice.csv": text_of("0,0,1\n1,2,0\n"),
    "words.csv": table_of(comment=["hello there"] * 8, label=[0, 1] * 4),
    "latin.csv": lambda file: file.write_bytes(LATIN),
    "ragged.csv": text_of("a,label\n1,0\n2\n3,1\n"),
    "tokens.jsonl": rows_of(*[{"tokens": ["the", "cat"], "label": 0}] * 4),
    "lengths.jsonl": rows_of(*LENGTHS),
    "broken.parquet": text_of("nonsense"),
    "array.json": text_of('[{"a": 1, "label": 0}]'),
    "half.jsonl": text_of('{"a": 1, "label": 0}\n{"a": 2, "lab\n'),
    "keras.npz": arrays_of(x_train=FLOATS, y_train=CLASS, x_test=FLOATS[:9]),
    "objects.npz": arrays_of(x=OBJECTS, label=[0, 1]),
    "pickled.npz": lambda file: file.write_bytes(pickle.dumps({"x": FLOATS, "y": CLASS})),
    "sheet.xlsx": text_of("PK"),
    "nobody.txt": text_of("no speaker\n"),
    "plain": lambda folder: folder.mkdir(),
    "sizes": sizes,
    "cut": cut,
}


@pytest.mark.parametrize(("name", "message"), messages("data files").items())
def test_of_a_bad_file_one_line_says_what_to_do(name, message, tmp_path, monkeypatch, complain):
    monkeypatch.chdir(tmp_path)
    BAD[name](tmp_path / name)
    assert message in complain(["data", "describe", name])


def test_a_column_that_says_the_target_is_left_out_and_what_is_given_is_not_guessed(tmp_path):
    table_of(**COLUMNS, copy=CLASS, who=NAMES, label=CLASS)(tmp_path / "a.csv")
    found = data.Suggestion(["a.csv"], {}, tmp_path)
    assert found.warnings == ["column copy is left out: it says what the target label is"]
    assert found.tree["data"]["x"] == [*COLUMNS] and found.tree["data"]["client"] == "who"
    asked = data.Suggestion(["a.csv"], {"x": ["f0", "copy"]}, tmp_path)
    assert asked.tree["data"]["x"] == ["f0", "copy"]
    given = {"x": ["f0", "f1"], "y": "f2"}
    found = data.Suggestion(["a.csv"], given, tmp_path).tree["data"]
    assert given.items() <= found.items() and found["task"] == "regression"
    keys = {"kind": "table", "train": "a.csv", "x": ["f0", "label"], "clients": 2}
    with refusal(r"data.x = .*: expected columns without label, "):
        data.parse(keys)
    with refusal(r"data.split_by = 'who': expected a column that says"):
        data.parse({**keys, "x": "f0", "split_by": "who"}).split(0, tmp_path)
    with refusal(r"data.split_by = 'who': expected none with data.test"):
        data.parse({**keys, "x": "f0", "split_by": "who", "test": "a.csv"})


def test_a_column_does_not_say_which_rows_are_for_testing_where_a_file_does(tmp_path):
    for name in ("a.tsv", "b.tsv"):
        PARTS(tmp_path / name)
    found = data.Suggestion(["a.tsv", "b.tsv"], {}, tmp_path)
    assert "split_by" not in found.tree["data"] and found.tree["data"]["test"] == "b.tsv"
    assert not any(note.startswith("training and test rows: by") for note in found.notes)


TOKENS_OF_WORDS = {"tokenizer": "words", "vocabulary": ["good", "bad"], "length": 6}


@pytest.mark.parametrize(
    ("names", "given"),
    [
        (("review", "sentiment", "author"), {}),
        (("sentiment", "review", "author"), {}),
        (("author", "review", "mood"), {}),
        (("author", "review", "mood"), {"kind": "table", "classes": ["n", "p"]}),
    ],
)
def test_a_text_with_a_user_is_a_table_where_fields_of_one_are_given(names, given, tmp_path):
    columns = {"review": ["so good", "so bad"] * 9, "author": ["a", "b", "c"] * 6}
    target = next(name for name in names if name not in columns)
    columns[target] = ["p", "n"] * 9
    table_of(**{name: columns[name] for name in names})(tmp_path / "a.csv")
    found = data.Suggestion(["a.csv"], TOKENS_OF_WORDS | given, tmp_path).tree["data"]
    assert found["kind"] == "table" and (found["x"], found["y"]) == ("review", target)
    assert found["client"] == "author"


CONFIG = """
data: {kind: table, train: a.csv, x: [f0, f1], clients: 3, partition: {kind: dirichlet, psi: 0.3}}
selection: {kind: uniform, cohort: 2}
"""


@pytest.mark.slow
def test_what_clients_get_is_printed_and_drawn(tmp_path, monkeypatch, typed):
    table_of(**COLUMNS, label=NAMES)(tmp_path / "a.csv")
    (tmp_path / "mine.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    _, told, _ = typed("data", "describe", "mine.yaml", "--out", "pictures/split.svg")
    assert "samples_per_client: min 36, median 36, max 36" in told
    drawn = (tmp_path / "pictures" / "split.svg").read_text()
    assert all(word in drawn for word in ("cat", "dog", "bird", "training samples"))
    price = ("data.y=f2", "data.task=regression", "data.partition={kind: iid}", "model.kind=linear")
    for arguments, reason in [
        (("mine.yaml", "--out", "split.gif"), "a file that ends in .svg, .png, .pdf"),
        (("a.csv", "--out", "split.svg"), "none without a config"),
        (("mine.yaml", *price, "--out", "split.svg"), "whose samples have no class each"),
    ]:
        assert reason in typed("data", "describe", *arguments)[2]
    assert not list(tmp_path.glob("split.*"))


def test_of_many_classes_the_rare_ones_are_drawn_together():
    counts = np.random.default_rng(0).integers(1, 9, (5, 23))
    counts[:, 7] = 0
    picture = class_histogram.plot_of(counts, [])
    assert [key.label for key in picture.keys][-1] == "3 others" and len(picture.keys) == 21
    axes = Figure().subplots()
    picture.subplots[0].draw(axes)
    tops = {}
    for bar in axes.patches:
        tops[bar.get_x()] = tops.get(bar.get_x(), 0) + bar.get_height()
    assert [*tops.values()] == counts.sum(1).tolist()


def test_images_are_made_grey_or_coloured_and_deep_ones_are_refused(tmp_path):
    images(tmp_path / "all" / "ant")
    images(tmp_path / "all" / "bee")
    with Image.open(tmp_path / "all" / "ant" / "0.png") as image:
        grey = np.asarray(image.convert("L"))
    Image.fromarray(grey).save(tmp_path / "all" / "ant" / "0.png")
    keys = {"kind": "image_folder", "train": "all", "clients": 1, "test_fraction": 0.1}
    for channels in (1, 3):
        split = data.parse({**keys, "channels": channels}).split(0, tmp_path)
        assert split.shape == (channels, 9, 9)
        every = np.concatenate([split.rows(0, 1)[0], split.test()[0]])
        assert any((row == grey).all() for row in every)
    Image.fromarray(grey.astype(np.uint16) * 256).save(tmp_path / "all" / "ant" / "0.png")
    with refusal(r"images of 8 bits a channel .*ant/0.png has more"):
        data.parse({**keys, "channels": 1, "size": 9}).split(0, tmp_path)


def parsed(folder, **keys):
    """A table `a.*` of the folder for two clients."""
    (file,) = folder.glob("a.*")
    return data.parse({"kind": "table", "train": file.name, "x": "x", "clients": 2, **keys})


def test_a_path_with_an_equals_sign_is_that_of_data(tmp_path, typed, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2024").mkdir()
    np.savez(tmp_path / "year=2024" / "a.npz", x=FLOATS, label=CLASS)
    code, out, _ = typed("data", "describe", "year=2024/a.npz", "--data-root", tmp_path)
    assert code == 0 and "year=2024/a.npz" in out


def test_decimals_are_numbers(tmp_path):
    price = [Decimal(row) / 4 for row in range(6)]
    pq.write_table(pa.table({"x": price, "label": [0, 1] * 3}), tmp_path / "a.parquet")
    split = parsed(tmp_path).split(0, tmp_path)
    every = np.concatenate([split.rows(0, 2)[0], split.test()[0]])
    assert sorted(every.ravel()) == [0, 0.25, 0.5, 0.75, 1, 1.25]


def test_data_of_another_task_are_other_data(tmp_path):
    np.savez(tmp_path / "a.npz", x=FLOATS, label=CLASS)
    kinds = {}
    for task in ("classification", "regression"):
        shards = Shards.open(data.prepare(parsed(tmp_path, task=task), 0, tmp_path))
        kinds[shards.folder] = shards.chunk([0], 60)[1].dtype
    assert list(kinds.values()) == [np.int64, np.float32]


@pytest.mark.parametrize("dtype", ["auto", "int64", "float32"])
def test_inputs_have_the_type_that_is_asked_for(dtype, tmp_path):
    np.savez(tmp_path / "a.npz", x=TOKENS, label=CLASS)
    split = parsed(tmp_path, dtype=dtype).split(0, tmp_path)
    whole = dtype != "float32"
    assert split.rows(0, 1)[0].dtype == (np.int64 if whole else np.float32)
    assert split.tokens == (20 if whole else 0)
    np.savez(tmp_path / "a.npz", x=FLOATS, label=CLASS)
    if dtype == "int64":
        with refusal(r"'int64': expected float32: x has other numbers"):
            parsed(tmp_path, dtype=dtype).split(0, tmp_path)


# Seen with normal sight, without green and without red (Machado et al. 2009), linear RGB.
SIGHTS = (
    np.eye(3),
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.96888]],
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.0992], [-0.003882, -0.048116, 1.052]],
)
XYZ = [[0.4339, 0.3762, 0.1899], [0.2126729, 0.7151522, 0.0721750], [0.0178, 0.1095, 0.8727]]


def lab(colour: str, sight) -> np.ndarray:
    """A colour in CIELAB as one with this sight sees it."""
    value = np.array(to_rgb(colour))
    linear = np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)
    xyz = XYZ @ np.clip(np.array(sight) @ linear, 0, 1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("classes", "neighbours", "any_two"), [(10, 55, 23), (20, 25, 0)])
def test_classes_can_be_told_apart_by_the_colour_blind_too(classes, neighbours, any_two):
    keys = class_histogram.plot_of(np.eye(classes, dtype=int), []).keys
    for sight in SIGHTS:
        seen = np.array([lab(key.look.colour, sight) for key in keys])
        apart = np.linalg.norm(seen[:, None] - seen, axis=-1)
        assert np.diagonal(apart, 1).min() > neighbours
        assert apart[np.triu_indices(classes, 1)].min() > any_two
