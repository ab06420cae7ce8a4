"""Metrics against the loop of their definition and published values, wherever a run shows them."""

import math
from typing import Any, ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import batches, messages, refusal

from raydpfl import Experiment, run
from raydpfl.check import check
from raydpfl.check.runs import RecordingCoordinator
from raydpfl.data import Shards
from raydpfl.models import metric_columns, metrics, tasks
from raydpfl.models.metrics import Metric
from raydpfl.models.tasks import Form, Target
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.tables import StoredTable

CLASSES = Form((2,), Target((), 3), tasks.parse("classification"))
TWO = Form((2,), Target((), 2), tasks.parse("classification"))
LETTERS = Form((2,), Target((4,), 3), tasks.parse("sequence"))
LABELS = Form((2,), Target((3,)), tasks.parse("multi_label"))
NUMBERS = Form((2,), Target((2,)), tasks.parse("regression"))
MICRO = {"kind": "f1", "average": "micro"}
ROWS = 200


def value(metric: Any, form: Form, outputs: Any, y: Any, width: int = 30) -> float | None:
    """A metric of rows, in batches."""
    (made,) = metrics.parse([metric])
    outputs = torch.as_tensor(outputs, dtype=torch.float32)
    batches = zip(outputs.split(width), torch.as_tensor(y).split(width), strict=True)
    return made.value(made.joined([made.sums(form, *each).double().numpy() for each in batches]))


def made_up(form: Form, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs with ties, and targets; of classes one that few samples have."""
    drawn = np.random.default_rng(seed)
    outputs = torch.from_numpy(drawn.integers(-4, 5, (ROWS, *form.outputs)) / 2).float()
    return outputs, form.task.random_targets(drawn, ROWS, form.outputs)


def test_perplexity_leaves_out_positions_that_do_not_count_whatever_their_scores():
    """As of a model that never says the class of padding."""
    outputs, y = made_up(LETTERS)
    y = torch.where(y == 0, -100, y)
    outputs[..., 0] = -math.inf
    assert math.isfinite(value("perplexity", LETTERS, outputs, y))


def flat(form: Form) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes of the samples, or positions, that count."""
    outputs, y = made_up(form)
    kept = y.flatten() != -100
    return outputs.reshape(-1, outputs.shape[-1])[kept].numpy(), y.flatten()[kept].numpy()


@pytest.mark.parametrize("form", [CLASSES, LETTERS], ids=["classification", "sequence"])
def test_metrics_of_classes_are_the_loops_of_their_definitions(form):
    shown, y = flat(form)
    given = made_up(form)
    chosen = np.array([max(range(3), key=lambda c: row[c]) for row in shown])
    assert value("accuracy", form, *given) == np.mean(chosen == y)
    assert value({"kind": "top_k", "k": 1}, form, *given) == np.mean(chosen == y)
    ranks = [
        sorted(range(3), key=lambda c: -row[c]).index(c) for row, c in zip(shown, y, strict=True)
    ]
    assert value({"kind": "top_k", "k": 2}, form, *given) == np.mean(np.array(ranks) < 2)
    recalls = [np.mean(chosen[y == c] == c) for c in range(3)]
    assert value("balanced_accuracy", form, *given) == pytest.approx(np.mean(recalls), abs=1e-15)
    f1 = []
    for c in range(3):
        precision = np.mean(y[chosen == c] == c)
        f1.append(2 * precision * recalls[c] / (precision + recalls[c]))
    assert value("f1", form, *given) == pytest.approx(np.mean(f1), abs=1e-15)
    micro = value(MICRO, form, *given)
    assert micro == pytest.approx(np.mean(chosen == y), abs=1e-15)
    lost = torch.full_like(given[0], math.nan), given[1]
    assert value({"kind": "top_k", "k": 1}, form, *lost) == 0.0
    losses = [math.log(np.exp(row - row[c]).sum()) for row, c in zip(shown, y, strict=True)]
    assert value("perplexity", form, *given) == pytest.approx(math.exp(np.mean(losses)), rel=1e-6)
    p = np.exp(shown.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    areas = [area(p[y == c, c], p[y != c, c]) for c in range(3)]
    assert value("auc", form, *given) == pytest.approx(np.mean(areas), abs=1e-12)


def area(ones: np.ndarray, others: np.ndarray) -> float:
    """The share of pairs that are in order, ties half."""
    pairs = [(a > b + 1e-12) + 0.5 * (abs(a - b) <= 1e-12) for a in ones for b in others]
    return float(np.mean(pairs))


def test_metrics_of_labels_are_the_loops_of_their_definitions():
    outputs, y = made_up(LABELS)
    shown = outputs.numpy()
    right = y.numpy() > 0.5
    areas = [area(shown[right[:, k], k], shown[~right[:, k], k]) for k in range(3)]
    assert value("auc", LABELS, outputs, y) == pytest.approx(np.mean(areas), abs=1e-12)
    counts = [
        (np.sum((shown[:, k] > 0) & right[:, k]), np.sum(shown[:, k] > 0), np.sum(right[:, k]))
        for k in range(3)
    ]
    f1 = [2 * both / (predicted + actual) for both, predicted, actual in counts]
    assert value("f1", LABELS, outputs, y) == pytest.approx(np.mean(f1), abs=1e-15)
    recall = np.mean([both / actual for both, _, actual in counts])
    assert value("balanced_accuracy", LABELS, outputs, y) == pytest.approx(recall, abs=1e-15)


def test_metrics_of_numbers_are_the_loops_of_their_definitions():
    drawn = np.random.default_rng(3)
    y = (1e4 + drawn.standard_normal((ROWS, 2))).astype(np.float32)
    outputs = (y + drawn.standard_normal((ROWS, 2))).astype(np.float32)
    apart = outputs.astype(np.float64) - y
    given = outputs, y
    assert value("mse", NUMBERS, *given) == pytest.approx(np.mean(apart**2), rel=1e-12)
    assert value("mae", NUMBERS, *given) == pytest.approx(np.mean(abs(apart)), rel=1e-12)
    around = y - y.astype(np.float64).mean(0)
    r2 = np.mean(1 - (apart**2).sum(0) / (around**2).sum(0))
    assert value("r2", NUMBERS, *given) == pytest.approx(r2, rel=1e-9)


# From the examples in scikit-learn's documentation of each function.
OF_NUMBERS = NUMBERS, [[0.0, 2], [-1, 2], [8, -5]], [[0.5, 1], [-1, 1], [7, -6]]
PUBLISHED = {
    "f1": ("f1", CLASSES, np.eye(3)[[0, 2, 1, 0, 0, 1]], [0, 1, 2, 0, 1, 2], 0.26666666666666666),
    "f1 micro": (MICRO, CLASSES, np.eye(3)[[0, 2, 1, 0, 0, 1]], [0, 1, 2, 0, 1, 2], 1 / 3),
    "balanced_accuracy": (
        "balanced_accuracy", TWO, np.eye(2)[[0, 1, 0, 0, 0, 1]], [0, 1, 0, 0, 1, 0], 0.625),
    "top_k": (
        {"kind": "top_k", "k": 2},
        CLASSES,
        [[0.5, 0.2, 0.2], [0.3, 0.4, 0.2], [0.2, 0.4, 0.3], [0.7, 0.2, 0.1]],
        [0, 1, 2, 2],
        0.75,
    ),
    "auc": ("auc", TWO, [[0, 0.1], [0, 0.4], [0, 0.35], [0, 0.8]], [0, 0, 1, 1], 0.75),
    "r2": ("r2", *OF_NUMBERS, (0.965438 + 0.908163) / 2),
    "mse": ("mse", *OF_NUMBERS, 0.7083333333333334),
    "mae": ("mae", *OF_NUMBERS, 0.75),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED.values(), ids=PUBLISHED)
def test_metrics_have_the_values_that_are_published(case):
    metric, form, outputs, y, expected = case
    assert value(metric, form, outputs, y, width=2) == pytest.approx(expected, abs=1e-6)


def test_a_class_that_no_sample_is_of_is_left_out_and_no_rows_have_no_value():
    outputs = torch.eye(3)[torch.tensor([0, 0, 1])]
    y = torch.tensor([0, 1, 1])
    assert value("balanced_accuracy", CLASSES, outputs, y) == 0.75
    assert value("f1", CLASSES, outputs, y) == pytest.approx(2 / 3)
    assert value("auc", CLASSES, outputs[:1], y[:1]) is None
    nothing = torch.full((2, 4), -100)
    for metric in ("accuracy", "perplexity", "f1", "auc", "balanced_accuracy"):
        assert value(metric, LETTERS, torch.zeros(2, 4, 3), nothing) is None
    assert value("r2", NUMBERS, torch.zeros(2, 2), torch.ones(2, 2)) is None


def test_a_confusion_matrix_counts_pairs():
    (metric,) = metrics.parse(["confusion_matrix"])
    outputs = torch.eye(3)[torch.tensor([0, 0, 1, 0])]
    total = metric.sums(CLASSES, outputs, torch.tensor([0, 1, 1, 0])).numpy()
    found = {name: column.tolist() for name, column in metric.cells(total).items()}
    assert found == {"actual": [0, 1, 1], "predicted": [0, 0, 1], "samples": [2, 1, 1]}


# --- in a run ---

ASKED: tuple[Any, ...] = ("f1", {"kind": "top_k", "k": 2}, "auc", "confusion_matrix")


def experiment(**more: Any) -> Experiment:
    tree: dict[str, Any] = {
        "seed": 3,
        "rounds": 4,
        "data": {"kind": "synthetic", "clients": 12, "samples": 20, "classes": 3, "features": 5},
        "selection": {"kind": "uniform", "cohort": 6},
        "client": {"actors": 0},
        "evaluate": {"every": 2, "batch": 50, "metrics": list(ASKED)},
        "measure": [],
    }
    for section, values in more.items():
        both = isinstance(values, dict) and isinstance(tree.get(section), dict)
        tree[section] = {**tree[section], **values} if both else values
    return Experiment.from_dict(tree)


def test_a_run_has_the_metrics_that_it_asks_for_and_is_followed_by_the_first(tmp_path):
    asked = experiment(evaluate={"validation": 0.25})
    found = run(asked, tmp_path / "a")
    names = [f"{rows}_{name}" for rows in ("test", "validation")
             for name in ("f1", "top_2", "auc", "loss", "accuracy")]  # fmt: skip
    assert [name for name in found.rounds.column_names if metric_columns.is_score(name)] == names
    assert found.rounds["test_f1"].null_count == 2
    for name in names:
        assert found.summary[name] == found.rounds[name].to_pylist()[-1] is not None
    best = max(value for value in found.rounds["test_f1"].to_pylist() if value is not None)
    assert found.summary["best_test_f1"] == best and "best_test_accuracy" not in found.summary
    assert metric_columns.words(found.rounds.to_pylist()[-1]).startswith("f1 ")
    assert metric_columns.summary_text(found.summary).startswith("Test f1 ")
    table = pq.read_table(tmp_path / "a" / "test_confusion_matrix.parquet").to_pylist()
    last = [row for row in table if row["round"] == 3]
    every = sum(row["samples"] for row in last)
    right = sum(row["samples"] for row in last if row["actual"] == row["predicted"])
    assert right / every == found.summary["test_accuracy"]
    assert {row["round"] for row in table} == {1, 3}
    assert (tmp_path / "a" / "validation_confusion_matrix.parquet").exists()


class Brier(Metric):
    """The mean squared distance of the probabilities from what is right."""

    examples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"scale": 2.0})

    scale: float = 1.0

    def sums(self, form: Form, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = form.task.classes(outputs, y)
        if found is None:
            raise self.refused("classes are asked for")
        given, y, counts = found
        p = given.double().softmax(1)
        right = torch.nn.functional.one_hot(y, p.shape[1])
        apart = ((p - right) ** 2).sum(1) * counts
        return torch.stack([self.scale * apart.sum(), counts.sum().double()])

    def value(self, total: np.ndarray) -> float | None:
        return float(total[0] / total[1]) if total[1] else None

    def sign(self) -> int:
        return -1


class Last(Brier):
    """Looks at the last batch alone."""

    def joined(self, parts: Any) -> np.ndarray:
        return parts[-1]


class Upside(Brier):
    """Says that more of it is better."""

    def sign(self) -> int:
        return 1


@pytest.mark.slow
def test_an_own_metric_is_named_by_import_path_and_has_its_column(tmp_path):
    own = f"{__name__}:Brier"
    asked = experiment(evaluate={"metrics": [{"kind": own, "scale": 2.0}]})
    found = run(asked, tmp_path / "a").summary
    assert 0 < found["test_brier"] < 2 and found["best_test_brier"] <= found["test_brier"] * 2
    assert all(clause.kept for clause in check(own))


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "broken"), [("Last", "batches"), ("Upside", "better")])
def test_a_metric_that_lies_is_caught(lie, broken):
    found = check(f"{__name__}:{lie}")
    assert {clause.name for clause in found if not clause.kept} == {broken}


REFUSED = messages("metrics")


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_no_metric_of_the_task_is_refused_in_one_line(case, tmp_path):
    given, message = case
    with refusal(message):
        run(experiment(evaluate={"metrics": given}), tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- early stopping ---


def stopping(**more: Any) -> Experiment:
    """Steps so large that the loss on rows held out soon grows again."""
    stop = {"metric": "validation_loss", "patience": 2, **more}
    return experiment(
        rounds=40,
        local={"kind": "sgd", "steps": 40, "batch": "full", "lr": 2.0},
        noise={"kind": "gaussian", "multiplier": 0.3, "delta": 1e-3},
        bounding={"kind": "clip", "bound": 5.0},
        evaluate={"every": 1, "validation": 0.3, "metrics": ["accuracy"], "stop": stop},
    )


@pytest.mark.slow
def test_a_run_ends_once_its_validation_score_is_no_better_for_long_enough(tmp_path):
    found = run(stopping(), tmp_path / "a")
    values = found.rounds["validation_loss"].to_pylist()
    least = values.index(min(values))
    assert len(values) == least + 3 < 40 and found.summary["rounds"] == len(values)
    for end in range(1, len(values)):  # it would have ended at no round before
        assert end - 1 - values[:end].index(min(values[:end])) < 2
    assert found.summary["status"] == "completed"
    said = "evaluate.stop: the validation loss was no better for 2 evaluations"
    assert found.summary["reason"] == said
    ledger = (tmp_path / "a" / "ledger.jsonl").read_text().splitlines()
    assert sum('"round"' in line for line in ledger) == len(values)
    whole = run(stopping(patience=40), tmp_path / "whole")
    assert whole.summary["rounds"] == 40 and whole.summary["reason"] is None
    assert found.guarantees[0].epsilon < whole.guarantees[0].epsilon
    assert whole.rounds["validation_loss"].to_pylist()[: len(values)] == values


@pytest.mark.slow
def test_a_run_that_goes_on_stops_at_the_same_round_and_stays_stopped(tmp_path):
    whole = run(stopping(), tmp_path / "whole")
    run(stopping(), tmp_path / "cut", on_rows=lambda rows: rows[-1]["round"] == 1)
    again = run(stopping(), tmp_path / "cut", resume=True)
    assert again.summary["rounds"] == whole.summary["rounds"]
    assert again.summary["model_sha256"] == whole.summary["model_sha256"]
    still = run(stopping(), tmp_path / "cut", resume=True)
    assert still.summary["rounds"] == whole.summary["rounds"]
    assert still.summary["reason"] == whole.summary["reason"]


@pytest.mark.parametrize("metric", ["test_loss", "validation_f1"])
def test_a_run_is_stopped_by_scores_of_rows_held_out_alone(metric):
    with refusal(r"evaluate\.stop\.metric = .*rows held out of training"):
        stopping(metric=metric)


def test_the_mode_says_which_way_is_better():
    assert stopping(mode="max").evaluate.stop.sign(stopping().metrics) == 1
    assert stopping().evaluate.stop.sign(stopping().metrics) == -1
    assert metric_columns.since_best([0.1, 0.2, 0.3], -1) == [0.1, 0.2, 0.3]
    assert metric_columns.since_best([0.1, 0.2, 0.3], 1) == [0.3]
    assert metric_columns.since_best([], 1) == []


def test_whether_a_run_is_over_takes_no_look_at_all_its_rounds(tmp_path, monkeypatch):
    coordinator = RecordingCoordinator(resolve(stopping()), str(tmp_path))
    coordinator.start()
    coordinator.round()
    monkeypatch.delattr(StoredTable, "arrow")
    while not coordinator.stop_reason():
        coordinator.round()
    assert 2 < coordinator.position() < 40


# --- a metric of every client ---


@pytest.mark.slow
@pytest.mark.parametrize("validation", [0.0, 0.3], ids=["training rows", "held out"])
@pytest.mark.parametrize("metric", ["accuracy", "perplexity", "auc"])
def test_each_client_is_scored_by_its_own_rows(validation, metric, tmp_path):
    sizes = {"kind": "synthetic", "clients": 12, "samples": 20, "classes": 3, "features": 5}
    sizes |= {"sizes": {"kind": "spread"}}
    asked = {"every": 2, "batch": 37, "validation": validation, "per_client": metric}
    made = experiment(data=sizes, evaluate=asked)
    found = run(made, tmp_path / "a")
    shards = Shards.open(resolve(made).shards)
    if validation:
        x, y = map(np.concatenate, zip(*batches(shards, "validation"), strict=True))
        before = Shards.open(resolve(experiment(data=sizes)).shards).sizes
        rows = before - shards.sizes
    else:
        rows = np.array(shards.sizes)
        every = [shards.chunk([client], int(rows[client])) for client in range(12)]
        x = np.concatenate([each[0][0] for each in every])
        y = np.concatenate([each[1][0] for each in every])
    ends = np.cumsum(rows)
    with torch.inference_mode():
        outputs = found.model(torch.from_numpy(x))
    known = []
    for start, end in zip(ends - rows, ends, strict=True):
        own = outputs[start:end], torch.from_numpy(y[start:end])
        known.append(value(metric, CLASSES, *own, width=1000) if end > start else None)
    table = pq.read_table(tmp_path / "a" / "client_scores.parquet").to_pylist()
    last = [row for row in table if row["round"] == 3]
    assert [row["client"] for row in last] == list(range(12))
    told = [math.nan if row[metric] is None else row[metric] for row in last]
    kept = [value for value in known if value is not None]
    known = [math.nan if value is None else value for value in known]
    assert told == pytest.approx(known, rel=1e-5, nan_ok=True)
    summary = {name: found.summary[f"client_{metric}_{name}"] for name in metric_columns.STATISTICS}
    worst = sorted(kept, reverse=metric == "perplexity")[: math.ceil(len(kept) / 10)]
    expected = [np.mean(kept), np.std(kept), *np.quantile(kept, (0.1, 0.5, 0.9)), np.mean(worst)]
    assert list(summary.values()) == pytest.approx(expected, rel=1e-5)


def test_scores_of_clients_are_not_private_and_the_guarantees_say_so(tmp_path):
    made = experiment(
        noise={"kind": "gaussian", "multiplier": 1.0, "delta": 1e-3},
        bounding={"kind": "clip", "bound": 1.0},
        evaluate={"per_client": "accuracy"},
    )
    unasked = made.evaluate.model_copy(update={"per_client": None})
    plain = made.model_copy(update={"evaluate": unasked})
    found = [run(each, tmp_path / str(place)) for place, each in enumerate((made, plain))]
    assert found[0].summary["model_sha256"] == found[1].summary["model_sha256"]
    for place, each in enumerate(found):
        for guarantee in each.guarantees:
            said = [one for one in guarantee.exclusions if "evaluate.per_client" in one]
            assert len(said) == 1 - place
            assert all("the accuracy of every client" in one for one in said)
        assert each.guarantees


@pytest.mark.slow
def test_scores_are_the_same_on_actors_and_after_a_resume(tmp_path, shared_ray):
    asked = {"per_client": "auc", "validation": 0.3, "batch": 20}
    whole = run(experiment(evaluate=asked), tmp_path / "whole")
    spread = experiment(evaluate=asked, client={"actors": 2})
    part = run(spread, tmp_path / "cut", on_rows=lambda rows: rows[-1]["round"] == 1)
    assert part.summary["rounds"] == 2
    again = run(spread, tmp_path / "cut", resume=True)
    names = [name for name in whole.rounds.column_names if metric_columns.is_score(name)]
    assert again.rounds.select(names).equals(whole.rounds.select(names))
    for file in ("client_scores.parquet", "test_confusion_matrix.parquet"):
        tables = [pq.read_table(tmp_path / name / file).to_pydict() for name in ("cut", "whole")]
        np.testing.assert_equal(*tables)  # for which NaN is NaN
