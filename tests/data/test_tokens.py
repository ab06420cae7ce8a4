"""Columns of text: token ids by a declared vocabulary, their classifier, and the next word."""

import json

import numpy as np
import pytest
import torch
from conftest import form, messages, refusal

from raydpfl import data, models
from raydpfl.experiment import Experiment
from raydpfl.simulation import user_code

ROWS = [
    ("A good film.", "pos", "u"),
    ("Bad, bad FILM", "neg", "u"),
    ("it's good", "pos", "v"),
    ("", "neg", "v"),
    ("film good film good film", "pos", "w"),
]
WORDS = ("good", "bad", "film", "it's")
OF_WORDS = [[1, 2, 4, 1], [3, 1, 3, 4], [5, 2, 0, 0], [0, 0, 0, 0], [4, 2, 4, 2]]
OWN = """
def tokenize(text):
    return text.split()

def ids(text):
    return [len(each) for each in text.split()]

def broken(text):
    return text.no_such_method()
"""


def keys(folder, **more):
    """A table of the rows, which are for training and for testing."""
    path = folder / "reviews.jsonl"
    rows = [dict(zip(("text", "label", "user"), row, strict=True)) for row in ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text("\n".join(WORDS) + "\n")
    given = {"kind": "table", "train": str(path), "test": str(path), "x": "text", "clients": 2}
    text = {"tokenizer": "words", "vocabulary": str(folder / "words.txt"), "length": 4}
    return {key: value for key, value in {**given, **text, **more}.items() if value is not None}


def samples(folder, **more):
    return data.parse(keys(folder, **more)).samples(0, None)


@pytest.mark.parametrize("vocabulary", [None, list(WORDS)], ids=["of a file", "in the config"])
def test_a_column_of_text_becomes_the_ids_of_its_first_words(vocabulary, tmp_path):
    given = {"vocabulary": vocabulary} if vocabulary else {}
    found = samples(tmp_path, **given)
    assert found.x.dtype == np.int64 and found.x.tolist() == OF_WORDS == found.test_x.tolist()
    assert found.tokens == 6 and found.y.tolist() == [1, 0, 1, 0, 1]


def test_a_csv_gives_what_json_lines_give(tmp_path):
    path = tmp_path / "some.csv"
    path.write_text("text,label\n" + "".join(f'"{a}",{b}\n' for a, b, _ in ROWS if a))
    found = samples(tmp_path, train=str(path))
    assert found.x.tolist() == [row for row in OF_WORDS if any(row)]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"tokenizer": "characters", "vocabulary": list("adgo ")}, [1, 6, 4, 5]),
        ({"tokenizer": "mine_tokens:tokenize", "vocabulary": ["good", "A"]}, [3, 2, 1, 0]),
        ({"tokenizer": "mine_tokens:ids", "vocabulary": 6}, [1, 4, 5, 0]),
    ],
    ids=["characters", "of one's own", "that gives ids"],
)
def test_tokens_are_made_by_the_tokenizer_that_the_config_names(
    more, expected, tmp_path, own_module
):
    own_module("mine_tokens", OWN)
    found = samples(tmp_path, **more)
    assert found.x[0].tolist() == expected
    sizes = {"characters": 7, "mine_tokens:tokenize": 4, "mine_tokens:ids": 6}
    assert found.tokens == sizes[more["tokenizer"]]


def test_the_next_word_is_the_target_at_every_position_but_unknown_ones(tmp_path):
    found = samples(tmp_path, y="text", task="sequence")
    whole = [[1, 2, 4, 1, 0], [3, 1, 3, 4, 0], [5, 2, 0, 0, 0], [0] * 5, [4, 2, 4, 2, 4]]
    assert found.x.tolist() == [row[:-1] for row in whole]
    assert found.y.tolist() == [[y if y > 1 else -100 for y in row[1:]] for row in whole]
    assert found.target.shape == (4,) and found.target.classes == found.tokens == 6


def test_a_vocabulary_is_no_query_of_the_data(tmp_path):
    """The same ids, whatever other rows hold; and it is said that it is taken as public."""
    before = samples(tmp_path)
    changed = tmp_path / "changed"
    changed.mkdir()
    path = changed / "reviews.jsonl"
    text = (tmp_path / "reviews.jsonl").read_text()
    path.write_text(text.replace("film good film good film", "other words entirely"))
    after = samples(tmp_path, train=str(path))
    assert np.array_equal(before.x[:4], after.x[:4]) and before.tokens == after.tokens
    said = data.parse(keys(tmp_path)).exclusions
    assert any("taken as public" in each for each in said)
    assert not any("data.dtype" in each for each in said)
    following = data.parse(keys(tmp_path, y="text", task="sequence")).exclusions
    assert len(following) == 1 and "taken as public" in following[0]


def test_prepared_data_are_known_by_the_vocabulary_and_the_tokenizer(tmp_path, own_module):
    own_module("mine_tokens", OWN)
    own = data.parse(keys(tmp_path, tokenizer="mine_tokens:tokenize"))
    found = [own.identity(None)]
    (tmp_path / "mine_tokens.py").write_text(OWN + "CHANGED = 1\n")
    found.append(own.identity(None))
    (tmp_path / "words.txt").write_text("good\nfilm\n")
    found.append(own.identity(None))
    inline = [data.parse(keys(tmp_path, vocabulary=each)).identity(None) for each in (["a"], ["b"])]
    digests = {json.dumps(each) for each in (*found, *inline)}
    assert len(digests) == 5
    plain = data.parse(keys(tmp_path, tokenizer=None, vocabulary=None, length=None))
    assert not {"tokenizer", "vocabulary", "length"} & plain.facts().keys()


def test_prepared_data_are_known_by_the_module_that_the_path_of_a_tokenizer_names(
    tmp_path, own_module
):
    made = "import functools\nmade = functools.partial(str.split, sep={!r})\n"
    own_module("mine_made", made.format(" "))
    own = data.parse(keys(tmp_path, tokenizer="mine_made:made"))
    before = own.identity(None)
    assert own.identity(None) == before
    own_module("mine_made", made.format(","))
    assert own.identity(None) != before


def test_a_run_keeps_the_source_of_its_tokenizer(tmp_path, own_module):
    own_module("mine_tokens", OWN)
    given = keys(tmp_path, tokenizer="mine_tokens:tokenize")
    experiment = Experiment.from_dict({"data": given, "selection": {"kind": "full"}})
    assert experiment.code(["data"]) == ["mine_tokens:tokenize"]
    assert user_code.sources(experiment).keys() == {"code mine_tokens:tokenize"}
    user_code.store_code([experiment], tmp_path / "run")
    assert (tmp_path / "run" / "code" / "mine_tokens.py").read_text() == OWN


@pytest.mark.parametrize(("more", "message"), messages("tokens"))
def test_text_that_nothing_declares_is_refused_in_one_line(more, message, tmp_path, own_module):
    own_module("mine_tokens", OWN)
    with refusal(begins=message):
        samples(tmp_path, **more)


def test_unknown_words_are_counted_by_data_describe(tmp_path, typed):
    given = keys(tmp_path)
    counted = {"texts": 5, "empty texts": 1, "tokens": 15, "unknown tokens": 3}
    found = data.parse(given).counted(None)
    assert {name: found[name] for name in counted} == counted
    assert found["tokens cut off"] == 1 and found["of these, in some text"] == 4
    config = tmp_path / "text.yaml"
    selection = {"cohort": 2, "kind": "uniform"}
    config.write_text(Experiment.from_dict({"data": given, "selection": selection}).to_yaml())
    text = [f"data.{name}={given[name]}" for name in ("tokenizer", "vocabulary", "length")]
    for arguments in ([config], [given["train"], *text]):
        code, said, _ = typed("data", "describe", *arguments)
        assert code == 0 and "unknown tokens: 3" in said


def test_the_mean_of_embeddings_does_not_look_at_padding_and_learns_on_texts():
    model = models.parse({"kind": "embedding_mean", "width": 5})
    module = models.build(model, form((4,), 2, tokens=6), 0)
    x = torch.tensor([[3, 4, 0, 0], [0, 0, 0, 0]])
    expected = module.out((module.embed.weight[3] + module.embed.weight[4]) / 2)
    assert torch.allclose(module(x)[0], expected, atol=1e-6)
    assert torch.allclose(module(x)[1], module.out.bias)
    longer = torch.nn.functional.pad(x, (0, 7))
    assert torch.allclose(module(longer), module(x))
    for wrong in (form((4,), 2), form((4,), 6, "sequence", (4,), tokens=6)):
        with refusal(r"model.kind = 'embedding_mean': expected another model"):
            models.build(model, wrong, 0)
