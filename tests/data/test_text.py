"""Text: a client per speaker, the next character at every position, and the models of tokens."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from conftest import experiment, form, messages, refusal

from raydpfl import data, models, run
from raydpfl.check.runs import run_plan
from raydpfl.data import Shards
from raydpfl.methods.local import Sgd
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches

PLAY = """A B:
hello there
you, say:
no

Cob:
yes

A B:
and so on and on
D:

Cob:
it is, it is
"""


def play(tmp_path, **keys):
    path = tmp_path / "play.txt"
    path.write_text(PLAY)
    given = {"kind": "text", "path": str(path), "length": 5, "speaker": "[A-Z][A-Za-z ]*"}
    return {**given, "test_fraction": 0.3, **keys}


def test_a_play_has_a_client_for_each_speaker_and_the_next_character_for_a_target(tmp_path):
    described = data.parse(play(tmp_path))
    written = described.texts_by_client(None)
    assert written["A B"] == "hello there\nyou, say:\nno\n\nand so on and on"
    assert written["D"] == "" and set(written) == {"A B", "Cob", "D"}
    shards = Shards.open(data.prepare(described, 0))
    assert shards.clients == 2 and shards.target.shape == (5,) and shards.unseen == ()
    letters = "".join(shards.target.names)
    assert list(letters) == sorted(set(written["A B"] + written["Cob"]))
    assert shards.tokens == len(letters) + 1 and shards.classes == len(letters)
    for client, name in enumerate(("A B", "Cob")):
        n = int(shards.sizes[client])
        x, y, _ = shards.chunk([client], n)
        read = "".join((letters + "#")[token] for token in x[0].flatten())
        assert written[name].startswith(read[:-1].rstrip("#"))
        follows = np.append(x[0].flatten()[1:], y[0, -1, -1])
        assert np.array_equal(np.where(y[0].flatten() < 0, len(letters), y[0].flatten()), follows)
        windows = -(-(len(written[name]) - 1) // 5)
        assert n == windows - int(0.3 * windows + 0.5)
    windows = [-(-(len(written[name]) - 1) // 5) for name in ("A B", "Cob")]
    assert shards.describe()["test_samples"] == sum(windows) - int(shards.sizes.sum())


def test_names_may_have_to_stand_apart_and_an_alphabet_may_be_given(tmp_path):
    with_verse = PLAY.replace("you, say:", "Say:")
    path = tmp_path / "verse.txt"
    path.write_text(with_verse)
    found = data.parse(play(tmp_path, path=str(path)))
    assert "Say" in found.texts_by_client(None)
    found = data.parse(play(tmp_path, path=str(path), apart=True))
    assert set(found.texts_by_client(None)) == {"A B", "Cob"}
    short = data.parse(play(tmp_path, characters="abcdefghijklmno"))
    samples = short.samples(0, None)
    assert samples.target.classes == 15 and samples.tokens == 16 and not short.exclusions
    assert samples.x.max() == 15 and samples.y.min() == -100 and samples.y.max() < 15
    assert "characters that occur" in data.parse(play(tmp_path)).exclusions[-1]


def test_what_one_sample_of_a_text_is_is_said_where_samples_are_protected(tmp_path):
    said = "a sample is a window of 5 characters and the one that follows each"
    for bounding, protects in (("per_sample_clip", True), ("clip", False)):
        values = {"data": play(tmp_path), "bounding": {"kind": bounding, "bound": 1.0}}
        values["model"] = {"kind": "char_lstm", "hidden": 4, "layers": 1}
        values["selection"] = {"kind": "uniform", "cohort": 1}
        values["noise"] = {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-3}
        plan = resolve(experiment(**values))
        assert any(said in each for each in plan.mechanism.exclusions) == protects


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_a_table_of_texts_is_read_by_client(suffix, tmp_path):
    rows = [("ann", "hello, again"), ("bob", "yes"), ("ann", "good\nbye")]
    path = tmp_path / f"posts.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps({"who": a, "post": b}) + "\n" for a, b in rows))
    elif suffix == "csv":
        path.write_text("who,post\n" + "".join(f'{a},"{b}"\n' for a, b in rows))
    else:
        columns = {"who": [a for a, _ in rows], "post": [b for _, b in rows]}
        pq.write_table(pa.table(columns), path)
    described = data.parse(play(tmp_path, path=str(path), text="post", client="who"))
    assert described.texts_by_client(None) == {"ann": "hello, again\ngood\nbye", "bob": "yes"}


def test_clients_with_few_rows_are_left_out_and_of_many_rows_some_are_drawn(tmp_path):
    who = np.repeat([0, 1, 2, 3], [5, 30, 1, 24])
    np.savez(tmp_path / "t.npz", x=np.arange(60.0)[:, None], label=np.arange(60) % 2, who=who)
    keys = {"kind": "table", "train": "t.npz", "test": "t.npz", "x": "x", "client": "who"}
    limits = {"kind": "natural", "least": 5, "most": 12}
    split = data.parse({**keys, "partition": limits}).split(3, tmp_path)
    assert split.sizes.tolist() == [5, 12, 12] and split.unused == 31
    rows = [split.rows(client, client + 1)[0][:, 0] for client in range(3)]
    assert rows[0].tolist() == [0, 1, 2, 3, 4]
    for found, (low, high) in zip(rows[1:], ((5, 35), (36, 60)), strict=True):
        assert len(set(found)) == 12 and low <= found.min() and found.max() < high
    with refusal(r"data.partition.least = 40: expected at most 30"):
        data.parse({**keys, "partition": {"kind": "natural", "least": 40}}).split(3, tmp_path)


@pytest.mark.parametrize(("keys", "message"), messages("texts"))
def test_text_that_cannot_be_is_refused_in_one_line(keys, message, tmp_path):
    with refusal(begins=message):
        data.parse(play(tmp_path, **keys)).split(0, tmp_path)


SMALL = {
    "char_lstm": {"kind": "char_lstm", "embedding": 3, "hidden": 7, "layers": 1},
    "transformer": {"kind": "transformer", "width": 8, "heads": 2, "layers": 1},
}
TOKENS = form((6,), 5, "sequence", (6,), tokens=6)


@pytest.mark.parametrize("kind", SMALL)
def test_models_of_tokens_look_at_no_later_position_and_take_a_target_per_sample_too(kind):
    module = models.build(models.parse(SMALL[kind]), TOKENS, 0)
    x = torch.arange(6)[None] % 5
    other = x.clone()
    other[0, 4:] = 0
    assert torch.equal(module(x)[:, :4], module(other)[:, :4])
    assert not torch.equal(module(x)[:, 4:], module(other)[:, 4:])
    single = models.build(models.parse(SMALL[kind]), form((6,), 5, tokens=6), 0)
    assert torch.allclose(single(x), module(x)[:, -1], atol=1e-6)
    for wrong in (form((6,), 5), form((2, 6), 5, tokens=6)):
        with refusal(f"model.kind = '{kind}': expected a model for other inputs"):
            models.build(models.parse(SMALL[kind]), wrong, 0)
    with refusal(r"model.kind = 'mlp': expected char_lstm, transformer or one"):
        models.build(models.parse({"kind": "mlp"}), TOKENS, 0)


@pytest.mark.parametrize(
    ("kind", "clip", "backend"),
    [
        ("char_lstm", None, "loop"),
        ("char_lstm", 0.3, "loop"),
        ("transformer", None, "vmap"),
        ("transformer", 0.3, "layerwise"),
    ],
)
def test_models_of_tokens_have_the_backend_that_is_known_to_fit(kind, clip, backend):
    """The contract of models holds every backend that fits against the loop."""
    module = models.build(models.parse(SMALL[kind]), TOKENS, 0)
    assert choose_backend(module, Sgd(steps=3, batch=2), TOKENS, clip=clip) == backend


def text_experiment(tmp_path, kind, **sections):
    return experiment(
        data=play(tmp_path, length=6),
        model=SMALL[kind],
        selection={"kind": "full"},
        local={"kind": "sgd", "steps": 4, "batch": 2, "lr": 0.5},
        server={"kind": "sgd"},
        **sections,
    )


def by_the_book(plan: Plan) -> torch.Tensor:
    """What is trained, float32 [d], after all rounds of a plain loop over the clients."""
    asked = plan.experiment
    shards = Shards.open(plan.shards)
    module = models.build(asked.model, shards.form(asked.data.task), asked.seed)
    clients = range(shards.clients)
    sizes = shards.sizes.tolist()
    for t in range(asked.rounds):
        start = models.flatten(module)
        drawn = asked.seed, t, clients, [0] * len(sizes), sizes, asked.local
        index, taken = batches(*drawn, rows=max(sizes))
        after = []
        for client in clients:
            models.load(module, start)
            parameters = [each for each in module.parameters() if each.requires_grad]
            optimizer = torch.optim.SGD(parameters, lr=0.5)
            x, y, _ = (torch.from_numpy(part) for part in shards.chunk([client], sizes[client]))
            for rows in index[client, :, : taken[client]]:
                optimizer.zero_grad()
                outputs = module(x[0, rows])
                every = F.cross_entropy(outputs.transpose(1, 2), y[0, rows], reduction="none")
                counted = (y[0, rows] >= 0).sum(1)
                (every.sum(1) / counted).mean().backward()
                optimizer.step()
            after.append(models.flatten(module))
        models.load(module, torch.stack(after).mean(0))
    return models.flatten(module)


@pytest.mark.parametrize("kind", SMALL)
def test_a_run_on_speakers_is_the_plain_loop_of_torch(kind, tmp_path):
    none = {"kind": "none"}
    asked = text_experiment(tmp_path, kind, noise=none, bounding=none)
    expected = by_the_book(resolve(asked))
    found = run(asked, out=tmp_path / "out")
    assert torch.allclose(models.flatten(found.model), expected, atol=1e-5)


@pytest.mark.parametrize("bounding", ["clip", "per_sample_clip"])
@pytest.mark.parametrize("kind", SMALL)
def test_private_runs_on_text_have_the_same_bits_wherever_they_are_carried_out(
    kind, bounding, tmp_path
):
    asked = text_experiment(tmp_path, kind, bounding={"kind": bounding, "bound": 0.5})
    plan = resolve(asked)
    one, *others = (run_plan(plan, tmp_path / f"{n}", n) for n in (None, 2, 0))
    for other in others:
        assert all(map(np.array_equal, one.totals, other.totals))
