"""Rows that clients hold out of training: which ones, and what is told of them."""

import io
import json
from dataclasses import replace
from operator import itemgetter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import batches, experiment
from rich.console import Console

from raydpfl import Experiment, data, run
from raydpfl.cli import run_display
from raydpfl.data import Shards, prepare, shard_writer, validation_split
from raydpfl.errors import ConfigError, RunError
from raydpfl.models.metric_columns import is_score
from raydpfl.simulation import evaluation
from raydpfl.simulation.resolution import resolve

SPREAD = {"kind": "fashion_mnist_mini", "clients": 70, "sizes": {"kind": "spread"}}
OVERLAPPING = {
    "kind": "fashion_mnist_mini",
    "clients": 60,
    "partition": {"kind": "overlapping", "per_client": 40},
}
HALF = {"every": 2, "validation": 0.5}


def rows_of(found):
    """Rows of a split or of opened shards, as text that tells them apart."""
    x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return [(np.asarray(a, np.float32).tobytes(), float(b)) for a, b in zip(x, y, strict=True)]


def kept_and_apart(described, share, seed=5):
    """For each client, all its rows, and which of them are held out and which scored."""
    split = described.split(seed, None)
    apart = validation_split.hold_out_rows(split, share, seed, described.overlaps())
    clients = len(split.sizes)
    return split, apart, [apart.rows(client, client + 1) for client in range(clients)]


@pytest.mark.parametrize(
    ("sizes", "share", "expected"),
    [
        ([0, 1, 2, 3], 0.9, [0, 0, 1, 2]),  # one row stays
        ([4, 5, 14, 15, 25, 30], 0.1, [0, 1, 1, 2, 3, 3]),  # a half is rounded upwards
        ([50], 0.29, [15]),  # 14.5, whatever floating point makes of it
    ],
)
def test_how_many_rows_are_held_out(sizes, share, expected):
    assert validation_split.counts(np.array(sizes), share).tolist() == expected


@pytest.mark.parametrize(
    "described",
    [
        SPREAD,
        {**SPREAD, "normalize": True},
        {"kind": "synthetic", "clients": 40, "samples": 30, "test_samples": 100},
        {"kind": "quadratics", "clients": 8, "dimension": 5, "rank": 6},
    ],
    ids=["images", "normalised", "synthetic", "regression"],
)
def test_what_is_held_out_is_not_trained_on_and_all_else_is(described, tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "BATCH_BYTES", 1 << 18)  # several batches
    described = data.parse(described)
    whole = Shards.open(prepare(described, 5, cache=tmp_path))
    opened = Shards.open(prepare(described, 5, cache=tmp_path, validation=0.3))
    apart = validation_split.counts(np.asarray(whole.sizes), 0.3)
    assert np.array_equal(opened.sizes, whole.sizes - apart) and opened.clients == whole.clients
    held = rows_of(batches(opened, "validation", 7))
    assert list(batches(whole, "validation", 7)) == [] and len(held) == apart.sum()
    first = np.cumsum(apart) - apart
    for client in range(opened.clients):
        all_x, all_y, n = whole.chunk([client], int(whole.sizes.max()))
        x, y, left = opened.chunk([client], int(whole.sizes.max()))
        everything = rows_of([(all_x[0, : n[0]], all_y[0, : n[0]])])
        trained = rows_of([(x[0, : left[0]], y[0, : left[0]])])
        own = held[first[client] : first[client] + apart[client]]
        assert sorted(everything) == sorted(trained + own)
        assert [row for row in everything if row in set(trained)] == trained  # in their order
    assert rows_of(batches(opened, "test", 1000)) == rows_of(batches(whole, "test", 1000))
    told = opened.describe()
    assert told["validation_samples"] == apart.sum() and told["samples"] == opened.sizes.sum()
    assert "validation_samples" not in whole.describe()


def test_which_rows_a_client_holds_out_depends_on_the_seed_and_itself_alone():
    split, apart, flags = kept_and_apart(data.parse(SPREAD), 0.3)
    others = replace(split, sizes=np.where(np.arange(70) == 9, split.sizes, 3))
    alone = validation_split.hold_out_rows(others, 0.3, 5, False)
    assert np.array_equal(alone.rows(9, 10)[0], flags[9][0])
    together = np.concatenate([held for held, _ in flags])
    assert np.array_equal(apart.rows(0, 70)[0], together)
    again = validation_split.hold_out_rows(split, 0.3, 6, False).rows(0, 70)[0]
    assert again.sum() == together.sum() and not np.array_equal(again, together)


def test_every_row_is_as_likely_to_be_held_out():
    split = replace(kept_and_apart(data.parse(SPREAD), 0.3)[0], sizes=np.full(4000, 10))
    held = validation_split.hold_out_rows(split, 0.3, 5, False).rows(0, 4000)[0].reshape(4000, 10)
    assert (held.sum(1) == 3).all()
    # 1200 expected, std 29; 10 places at 4.5 standard deviations
    assert np.abs(held.sum(0) - 1200).max() < 130
    assert len({tuple(row) for row in held.tolist()}) == 120  # all choices of 3 out of 10


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_shared_sample_is_scored_once_and_trained_on_by_nobody(share, tmp_path):
    described = data.parse(OVERLAPPING)
    split, apart, flags = kept_and_apart(described, share)
    samples = split.samples(0, 60)
    held, scored = (np.concatenate(each) for each in zip(*flags, strict=True))
    trained = set(samples[~held].tolist())
    assert not trained & set(samples[scored].tolist())
    assert len(set(samples[scored].tolist())) == scored.sum() and not (scored & ~held).any()
    assert (apart.sizes >= 1).all() and apart.sizes.sum() == (~held).sum()
    present = len(np.unique(samples))
    assert abs(scored.sum() - share * present) <= (1 if share < 0.5 else 60)
    opened = Shards.open(prepare(described, 5, cache=tmp_path, validation=share))
    assert opened.describe()["validation_samples"] == scored.sum()
    assert np.array_equal(opened.sizes, apart.sizes)


def test_nothing_held_out_is_nothing_changed(tmp_path):
    described = data.parse(SPREAD)
    folder = prepare(described, 5, cache=tmp_path)
    assert prepare(described, 5, cache=tmp_path, validation=0.0) == folder
    assert not (folder / "validation.arrow").exists()
    assert len({folder, *(prepare(described, 5, None, tmp_path, s) for s in (0.1, 0.2))}) == 3
    result = run(experiment(), tmp_path / "out")
    names = set(result.rounds.column_names) | result.summary.keys()
    assert not [name for name in names if "validation" in name]


class Unnamed(data.Data):
    """Samples that clients share, without saying which."""

    def overlaps(self):
        return True

    def split(self, seed, root):
        x = np.zeros((4, 2), np.float32)
        y = np.arange(4) % 2

        def rows(first, last):
            return x[2 * first : 2 * last], y[2 * first : 2 * last]

        return data.Split(np.array([2, 2]), (2,), 2, rows, lambda: (x, y))


def test_a_share_that_comes_to_nothing_is_refused_before_anything_is_written(tmp_path):
    scalar = data.parse({"kind": "scalar_quadratics", "a": [1, 2, 6], "b": [4, 1, -1]})
    said = "= 0.4: expected a share that comes to a row of some client; the largest has"
    with pytest.raises(ConfigError, match=f"evaluate.validation {said}"):
        prepare(scalar, 0, cache=tmp_path, validation=0.4)
    with pytest.raises(ConfigError, match=r"= 0\.5: expected 0 for data whose clients"):
        prepare(Unnamed(kind="unnamed"), 0, cache=tmp_path, validation=0.5)
    assert not (tmp_path / "data").exists()
    for wrong in (1.0, -0.1, True):
        with pytest.raises(ConfigError, match=r"evaluate\.validation"):
            experiment(evaluate={"validation": wrong})


def scored(module, rows):
    """The reference: loss and accuracy of a model on these rows."""
    x, y = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*rows, strict=True))
    with torch.no_grad():
        outputs = module(x)
        loss = torch.nn.functional.cross_entropy(outputs.double(), y)
    return float(loss), float((outputs.argmax(1) == y).double().mean())


def test_validation_is_scored_at_every_evaluation_and_in_the_summary(tmp_path):
    result = run(experiment(rounds=5, evaluate=HALF), tmp_path / "out")
    opened = Shards.open(resolve(experiment(evaluate=HALF)).shards)
    rows = result.rounds.to_pylist()
    names = ("test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
    assert {name for name in result.rounds.column_names if is_score(name)} == {*names}
    for name in names:
        assert [row["round"] for row in rows if row[name] is not None] == [1, 3, 4]
        assert result.summary[name] == rows[-1][name]
    for prefix in ("validation", "test"):
        loss, accuracy = scored(result.model, batches(opened, prefix))
        assert result.summary[f"{prefix}_loss"] == pytest.approx(loss, rel=1e-6)
        assert result.summary[f"{prefix}_accuracy"] == pytest.approx(accuracy, abs=1e-12)
        accuracy_of = itemgetter(f"{prefix}_accuracy")
        best = max((row for row in rows if row[names[1]] is not None), key=accuracy_of)
        assert result.summary[f"best_{prefix}_accuracy"] == best[f"{prefix}_accuracy"]
        place = "best_round" if prefix == "test" else "best_validation_round"
        assert result.summary[place] == best["round"]


def test_the_best_round_of_a_regression_is_that_of_the_least_loss(tmp_path):
    quadratics = {"kind": "quadratics", "clients": 50, "dimension": 5, "rank": 6}
    asked = experiment(data=quadratics, model={"kind": "linear"}, evaluate={"every": 1})
    result = run(asked, tmp_path / "out")
    losses = result.rounds["test_loss"].to_pylist()
    assert result.summary["best_test_loss"] == min(losses)
    assert result.summary["best_round"] == losses.index(min(losses))
    assert "best_test_accuracy" not in result.summary


def test_the_sizes_that_are_left_are_those_that_count(tmp_path):
    samples = {"kind": "per_sample_clip", "bound": 1.0}
    noise = {"kind": "gaussian", "epsilon": 4.0, "delta": 1e-5}
    asked = experiment(bounding=samples, noise=noise, weights={"kind": "data"}, evaluate=HALF)
    plan = resolve(asked)
    assert np.array_equal(plan.population.sizes, np.full(50, 90))  # of 180
    assert plan.population.samples == 4500 and len(plan.population) == 50
    assert np.array_equal(plan.mechanism.samples, np.full(50, 90))


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounding", [{"kind": "clip", "bound": 1.0}, {"kind": "per_sample_clip", "bound": 1.0}]
)
def test_no_epsilon_covers_the_validation_scores_and_the_guarantees_say_so(bounding, tmp_path):
    noise = {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5}
    for evaluate, expected in (({"every": 2}, 0), (HALF, 1)):
        asked = experiment(bounding=bounding, noise=noise, evaluate=evaluate)
        found = run(asked, tmp_path / str(expected)).guarantees
        for guarantee in found:
            told = [each for each in guarantee.exclusions if "evaluate.validation" in each]
            assert len(told) == expected
        assert found


@pytest.fixture
def untouched(monkeypatch):
    """The test set may not be read."""

    stored_batches = Shards.stored_batches

    def read(self, name, batch):
        assert name != "test", "a test row was read"
        return stored_batches(self, name, batch)

    monkeypatch.setattr(Shards, "stored_batches", read)


def said(report):
    console = Console(file=io.StringIO(), width=200)
    report(console)
    return console.file.getvalue()


def test_a_run_that_does_not_look_at_the_test_set_tells_its_validation(untouched, tmp_path):
    result = run(experiment(evaluate={**HALF, "test": False}), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    rows = pq.read_table(tmp_path / "out" / "rounds.parquet").to_pylist()
    for name in ("test_loss", "test_accuracy", "best_test_accuracy", "best_round"):
        assert written[name] is None
    assert all(row["test_loss"] is None and row["test_accuracy"] is None for row in rows)
    assert [row["validation_accuracy"] is None for row in rows] == [True, False, True, False]
    text = said(lambda console: run_display.report(console, result))
    assert text.startswith(f"Validation accuracy {written['validation_accuracy']:.2%}, loss ")

    def show(console):
        with run_display.Display(console, 4) as display:
            display.rows(rows)

    assert f"round 4/4  validation accuracy {written['validation_accuracy']:.2%}" in said(show)


def test_measuring_after_the_last_round_is_told_without_the_name_of_a_measure():
    def show(console):
        with run_display.Display(console, 4) as display:
            for done in range(5):
                display.measure(done, 4)

    assert said(show).splitlines() == [f"measuring: {part}%" for part in (0, 25, 50, 75, 100)]


@pytest.mark.slow
def test_a_run_without_any_evaluation_is_carried_out(untouched, tmp_path, monkeypatch):
    def evaluate(*_):
        raise AssertionError("there is nothing to evaluate on")

    monkeypatch.setattr(evaluation.Evaluator, "evaluate", evaluate)
    result = run(experiment(evaluate={"test": False}), tmp_path / "out")
    assert result.summary["status"] == "completed" and result.summary["test_loss"] is None
    assert result.rounds["test_loss"].null_count == result.rounds.num_rows == 4
    assert "loss" not in said(lambda console: run_display.report(console, result)).splitlines()[0]


def test_a_validation_loss_that_is_no_number_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "set_scores", lambda *_: {"validation_loss": float("nan")})
    with pytest.raises(RunError, match="the validation loss is nan after round 1; lower"):
        run(experiment(evaluate={**HALF, "test": False}), tmp_path / "out")


@pytest.mark.slow
def test_a_run_that_goes_on_has_the_same_validation_scores(tmp_path):
    asked = experiment(rounds=6, evaluate={**HALF, "every": 1})
    whole = run(asked, tmp_path / "whole")
    run(asked, tmp_path / "cut", on_rows=lambda rows: rows[-1]["round"] >= 2)
    resumed = run(asked, tmp_path / "cut", resume=True)
    names = ["round", "test_loss", "validation_loss", "validation_accuracy"]
    assert resumed.rounds.select(names).equals(whole.rounds.select(names))
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    scores = [name for name in whole.summary if "test_" in name or "validation" in name]
    assert {name: whole.summary[name] for name in scores} == {
        name: resumed.summary[name] for name in scores
    }


# --- clients that are held out ---


@pytest.mark.parametrize("described", [SPREAD, OVERLAPPING], ids=["disjoint", "overlapping"])
def test_clients_that_are_held_out_are_scored_and_train_no_more(described, tmp_path):
    source = data.parse(described)
    whole = Shards.open(prepare(source, 5, cache=tmp_path))
    part = Shards.open(prepare(source, 5, cache=tmp_path, validation={"clients": 0.2}))
    count = round(0.8 * whole.clients)
    assert part.clients == count and len(part.client_rows) == whole.clients - count
    rows = [shard_rows(whole, client) for client in range(whole.clients)]
    kept = [shard_rows(part, client) for client in range(count)]
    left = iter(rows)  # the others, in the same order, with all their rows
    assert all(any(each == other for other in left) for each in kept)
    out = [each for each in rows if each not in kept]
    assert len(out) == whole.clients - count
    trained = {row for each in kept for row in each}
    scored = [row.tobytes() for x, _ in batches(part, "validation", 50) for row in x]
    assert set(scored) == {row for each in out for row in each} - trained
    assert len(scored) == part.client_rows.sum()
    told = part.describe()
    assert told["clients"] == count and told["validation_samples"] == len(scored)


def shard_rows(shards: Shards, client: int) -> list[bytes]:
    """The samples of a client."""
    x, _, _ = shards.chunk([client], int(shards.sizes[client]))
    return [row.tobytes() for row in x[0]]


@pytest.mark.slow
def test_a_run_is_accounted_for_by_the_clients_that_are_left(tmp_path):
    asked = {"every": 2, "validation": {"clients": 0.25}, "per_client": "accuracy"}
    made = experiment(evaluate=asked)
    found = run(made, tmp_path / "out")
    whole = run(experiment(evaluate={"every": 2}), tmp_path / "whole")
    left = whole.summary["population"] - int(0.25 * whole.summary["population"] + 0.5)
    assert found.summary["population"] == left
    assert f"of {left}" in str(found.guarantees[0].sampling)
    assert found.guarantees[0].epsilon > whole.guarantees[0].epsilon  # a larger share takes part
    assert found.summary["validation_accuracy"] is not None
    scored = pq.read_table(tmp_path / "out" / "client_scores.parquet")
    assert set(scored["client"].to_pylist()) == set(range(whole.summary["population"] - left))
    assert Experiment.from_dict(made.to_dict()) == made


def test_clients_held_out_that_come_to_nobody_are_refused(tmp_path):
    few = data.parse({**SPREAD, "clients": 3})
    said = r"evaluate\.validation\.clients = 0\.1: expected a share that leaves"
    with pytest.raises(ConfigError, match=said):
        prepare(few, 5, cache=tmp_path, validation={"clients": 0.1})
    for wrong in ({"clients": 0}, {"clients": 1}, {"client": 0.1}, {}):
        with pytest.raises(ConfigError, match=r"evaluate\.validation"):
            experiment(evaluate={"validation": wrong})
