"""Tasks: what targets are, what a loss is, and that every backend carries it out."""

import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from conftest import experiment, form, refusal
from torch import nn

from raydpfl import models, run
from raydpfl.check.runs import run_plan
from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.local import Sgd
from raydpfl.models import tasks
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches
from raydpfl.training.trainer import Trainer

SIZES = [5, 3, 0, 4]
INPUTS = 6


class PerPosition(nn.Module):
    """Of tokens [B, T] scores [B, T, classes]."""

    def __init__(self, tokens: int = 7, classes: int = 4):
        super().__init__()
        self.embed = nn.Embedding(tokens, 5)
        self.out = nn.Linear(5, classes)

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)).cumsum(1))


def flat(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 5), nn.ReLU(), nn.Linear(5, outputs))


class Huber(tasks.FAMILY["regression"]):  # type: ignore[misc]
    delta: float = 0.3

    def loss(self, outputs, y):
        return F.huber_loss(outputs.view(y.shape), y, delta=self.delta, reduction="none").mean(1)


# By name: the module, what samples are, and the mean loss of a batch in plain torch.
CASES = {
    "classification": (
        lambda: flat(3),
        form((INPUTS,), 3),
        lambda outputs, y: F.cross_entropy(outputs, y),
    ),
    "several numbers": (
        lambda: flat(3),
        form((INPUTS,), 0, "regression", (3,)),
        lambda outputs, y: F.mse_loss(outputs, y) / 2,
    ),
    "multi_label": (
        lambda: flat(4),
        form((INPUTS,), 0, "multi_label", (4,)),
        lambda outputs, y: F.binary_cross_entropy_with_logits(outputs, y),
    ),
    "sequence": (
        PerPosition,
        form((8,), 4, "sequence", (8,), tokens=7),
        lambda outputs, y: torch.stack(
            [F.cross_entropy(*pair, ignore_index=-100) for pair in zip(outputs, y, strict=True)]
        ).mean(),
    ),
    "own": (
        lambda: flat(2),
        form((INPUTS,), 0, Huber(), (2,)),
        lambda outputs, y: F.huber_loss(outputs, y, delta=0.3),
    ),
}
LOCAL = Sgd(steps=4, batch=3, lr=0.2)


def rows(of: tasks.Form):
    generator = stream(3, Purpose.DATA)
    count = len(SIZES) * max(SIZES)
    x = of.inputs(count, generator)
    y = of.task.random_targets(generator, count, of.outputs)
    return (each.view(len(SIZES), max(SIZES), *each.shape[1:]) for each in (x, y))


def plain(module: nn.Module, mean, x, y, index):
    """A client's update by an ordinary loop of torch."""
    start = models.flatten(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=LOCAL.lr)
    for batch in index:
        optimizer.zero_grad()
        mean(module(x[batch]), y[batch]).backward()
        optimizer.step()
    return models.flatten(module) - start


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name][0]()


@pytest.mark.parametrize("name", CASES)
def test_the_loop_trains_for_a_task_as_torch_alone_does(name):
    """The contract of tasks holds the other backends against it."""
    _, of, mean = CASES[name]
    x, y = rows(of)
    index, taken = batches(4, 1, range(4), [0] * 4, SIZES, LOCAL, rows=max(SIZES))
    trainer = Trainer(made(name), LOCAL, backend="loop", seed=4, task=of.task)
    start = models.flatten(made(name))
    chunk = trainer.chunk(start, x, y, SIZES, t=1, clients=range(4), draws=[0] * 4)
    for slot, update, _ in (client for block in chunk for client in block.clients()):
        if SIZES[slot]:
            expected = plain(made(name), mean, x[slot], y[slot], index[slot, :, : taken[slot]])
            assert torch.allclose(update, expected, atol=1e-6, rtol=1e-5), slot


def test_the_loss_of_several_labels_is_that_of_torch():
    scores = torch.tensor([[-80.0, -1.0, 0.0, 3.0], [90.0, -0.0, 1e-6, -2.0]])
    bits = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0]])
    scores.requires_grad_()
    ours = tasks.parse("multi_label").loss(scores, bits)
    theirs = F.binary_cross_entropy_with_logits(scores, bits, reduction="none").mean(1)
    assert torch.allclose(ours, theirs, rtol=1e-6)
    gradients = [torch.autograd.grad(each.sum(), scores)[0] for each in (ours, theirs)]
    assert torch.allclose(*gradients, atol=1e-7)


def test_a_sequence_without_a_counted_position_loses_nothing():
    task = tasks.parse({"kind": "sequence", "ignore": 9})
    scores = torch.randn(2, 3, 4, requires_grad=True)
    y = torch.tensor([[9, 9, 9], [1, 9, 9]])
    loss = task.loss(scores, y)
    loss.sum().backward()
    assert loss[0] == 0 and not scores.grad[0].any() and not scores.grad[1, 1:].any()
    assert loss[1].item() == pytest.approx(F.cross_entropy(scores[1, :1], y[1, :1]).item())
    assert task.right(scores, y)[1] == 1


@pytest.mark.parametrize(
    ("task", "y", "classes", "target", "first"),
    [
        ("classification", ["b", "a", "b"], None, ((), 2, ("a", "b")), 1),
        ("classification", [0, 2, 1], 7, ((), 7, ()), 0),
        ("classification", [-1, 1, 1], ("1", "-1"), ((), 2, ("1", "-1")), 1),
        ("regression", [[1, 2], [3, 4], [5, 6]], None, ((2,), 0, ()), [1.0, 2.0]),
        ("multi_label", [[0, 1], [1, 1], [0, 0]], None, ((2,), 0, ()), [0.0, 1.0]),
        ("multi_label", [["x"], [], ["y", "x"]], None, ((2,), 0, ("x", "y")), [1.0, 0.0]),
        ("sequence", [[1, 2], [3], [0, 0]], None, ((2,), 4, ()), [1, 2]),
        ("sequence", [[1, 2], [3], [0, 0]], 9, ((2,), 9, ()), [1, 2]),
    ],
)
def test_targets_are_taken_from_columns(task, y, classes, target, first):
    ragged = any(isinstance(row, list) for row in y) and (
        len({len(row) for row in y}) > 1 or isinstance(y[0][0], str)
    )
    column = np.array([*y, None], object)[:-1] if ragged else np.array(y)
    found, test, of = tasks.parse(task).targets("t", column, column[:1], classes)
    assert of == tasks.Target(*target)
    assert found[0].tolist() == first and test.tolist() == found[:1].tolist()
    assert found.dtype == (np.int64 if of.classes else np.float32)


@pytest.mark.parametrize(
    ("task", "y", "classes", "message"),
    [
        ("classification", [0, 999], None, "data.y: class numbers from 0 without such gaps"),
        ("classification", [-1, 1], None, "data.y: whole numbers from 0, or names"),
        ("classification", [0, 5], 3, "data.classes: more than 5, the largest label of t"),
        ("classification", ["a", "b"], ("a",), "data.classes: names of all labels of t; "),
        ("classification", [[0, 1]], None, "data.y: one column with a number or name"),
        ("regression", ["a", "b"], None, "data.y: finite numbers, for regression"),
        ("regression", [1e39, 0], None, "data.y: numbers below 3.4e38, for regression"),
        ("regression", [1.0, 0], 2, "data.classes: none for task regression"),
        ("multi_label", [[0, 2]], None, "data.y: columns or lists of 0 and 1, or names"),
        ("multi_label", [[0, 1]], 3, "data.classes: 2, the labels of t, or none"),
        ("sequence", [0, 1], None, "data.y: a list of whole numbers to a row"),
        ("sequence", [[-100, -100]], None, "data.y: targets; all of these are -100"),
    ],
)
def test_targets_that_cannot_be_right_are_refused_in_one_line(task, y, classes, message):
    column = np.array(y)
    with refusal(begins=message):
        tasks.parse(task).targets("t", column, column[:1], classes)


@pytest.mark.slow
def test_a_run_on_sequences_has_the_same_bits_wherever_it_is_carried_out(tmp_path):
    """Inline, on an actor per client and on two, with scores of rows that clients hold out."""
    sys.modules.setdefault("test_tasks", sys.modules[__name__])
    asked = experiment(
        data={"kind": "test_shards:Letters"},
        model={"kind": "test_tasks:PerPosition"},
        selection={"kind": "uniform", "cohort": 6},
        evaluate={"every": 2, "validation": 0.3},
    )
    plan = resolve(asked)
    runs = [run_plan(plan, tmp_path / str(actors), actors) for actors in (None, 0, 2)]
    scores = [
        pq.read_table(each.out / "rounds.parquet")["validation_accuracy"].to_pylist()
        for each in runs
    ]
    assert scores[0] == scores[1] == scores[2] and set(scores[0]) != {None}
    for other in runs[1:]:
        assert np.array_equal(other.parameters(), runs[0].parameters())
        assert np.array_equal(other.totals, runs[0].totals)


@pytest.mark.slow
def test_an_own_loss_is_named_by_import_path_and_another_sort_of_targets_refused(tmp_path):
    sys.modules.setdefault("test_tasks", sys.modules[__name__])
    quadratics = {"kind": "quadratics", "clients": 12, "dimension": 5, "rank": 3}
    cases = {"usual": {}, "huber": {"task": {"kind": "test_tasks:Absolute"}}}
    models_of = {}
    for name, task in cases.items():
        asked = experiment(
            data=quadratics | task,
            model={"kind": "linear", "start": 1.0},
            selection={"kind": "uniform", "cohort": 6},
        )
        models_of[name] = models.flatten(run(asked, out=tmp_path / name).model)
    assert not torch.equal(models_of["usual"], models_of["huber"])
    with refusal(r"data.task.kind = 'classification': expected a task whose targe"):
        experiment(data=quadratics | {"task": "classification"})


class Absolute(tasks.FAMILY["regression"]):  # type: ignore[misc]
    def loss(self, outputs, y):
        return (outputs.reshape(y.shape) - y).abs()


class Mixing(tasks.Classification):
    def loss(self, outputs, y):
        return F.cross_entropy(outputs - outputs.mean(0), y, reduction="none")


class Single(tasks.Classification):
    def loss(self, outputs, y):
        return F.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    ("task", "reason"),
    [(Mixing(), "that of one does not depend on the others"), (Single(), "it gives shape")],
)
def test_a_loss_that_is_not_one_of_each_sample_is_refused(task, reason):
    with refusal(reason):
        choose_backend(flat(3), LOCAL, form((INPUTS,), 3, task))


def test_a_loss_without_a_closed_form_is_trained_by_backends_that_differentiate_it(caplog):
    flats = {name: of for name, (_, of, _) in CASES.items() if not of.tokens}
    for name, of in flats.items():
        closed = of.task.loss_form() is not None
        backend = choose_backend(made(name), LOCAL, of)
        assert (backend in ("compiled", "fused")) == closed and (closed or backend == "vmap")
        clipping = choose_backend(made(name), LOCAL, of, clip=1.0)
        assert clipping in (("compiled", "fused") if closed else ("layerwise",))
    assert not caplog.messages
