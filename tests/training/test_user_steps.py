"""A user-defined rule of a local step: every backend carries it out as a plain torch loop does."""

import math
import re

import numpy as np
import pytest
import torch
from conftest import experiment, form, refusal
from plain_loop import METHODS, SHAPE, USER_DEFINED, Nesterov, made, rows, train

from raydpfl import run
from raydpfl.methods.local import LinearRule, Local, Scaffold, Sgd, Step
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backends.base import Rule, take

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("backend", "each"), [("fused", 1), ("vmap", 2)])
def test_a_step_takes_no_slot_beyond_the_last_whose_client_would_make_it(
    backend, each, monkeypatch
):
    taken = []

    def noted(source, rows):
        taken.append(len(source))
        return take(source, rows)

    monkeypatch.setattr(f"raydpfl.training.backends.{backend}.take", noted)
    module = made("mlp")
    rule = Sgd(epochs=1, batch=4, lr=0.1)
    sizes = np.array([13, 9, 9, 4])
    planned = rule.step_counts(sizes)
    assert planned.tolist() == [4, 3, 3, 1]
    whole = train(backend, module, rule, *rows(sizes), sizes, range(4), [0] * 4)
    assert taken[::each] == [4, 3, 3, 1]
    taken.clear()
    held = np.array([13, 0, 9, 0])  # the others train elsewhere
    who = (held, [0, -1, 2, -1], [0] * 4)
    some = train(backend, module, rule, *rows(sizes), *who, planned_steps=planned)
    assert taken[::each] == [4, 3, 3, 1]
    assert all(torch.equal(some[slot][0], whole[slot][0]) for slot in (0, 2))


def test_sgds_own_step_is_what_its_coefficients_say():
    local = Sgd(lr=0.1, momentum=0.7, weight_decay=0.05, proximal=0.8)
    generator = torch.Generator().manual_seed(0)
    model, *gradients = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    now = [model.clone()]
    velocity = [torch.zeros_like(model)]
    x = model
    state = local.fresh(x)
    for k, gradient in enumerate(gradients):
        x, state = local.step(x, gradient, state, Step(k, 0.1, model))
        local.linear().move(now, [gradient.clone()], velocity, [model], [], 0.1)
        torch.testing.assert_close(now[0], x)


class TwoSpeeds(Local):
    """Two velocities (AggMo, Lucas et al. 2019), stacked in front of the clients."""

    def fresh(self, x):
        return torch.zeros(2, *x.shape)

    def step(self, x, gradient, state, at):
        state = torch.stack([0.9 * state[0] + gradient, 0.1 * state[1] + gradient])
        return x - at.lr * state.mean(0), state


class Memory(Local):
    """The mean of the last five gradients."""

    def fresh(self, x):
        return torch.zeros(5, *x.shape)

    def step(self, x, gradient, state, at):
        state = torch.cat([state[1:], gradient[None]])
        return x - at.lr * state.mean(0), state


@pytest.mark.parametrize("kind", [TwoSpeeds, Memory])
@pytest.mark.parametrize("backend", ["fused", "vmap"])
@pytest.mark.parametrize("count", [2, 4, 5])
def test_a_state_that_is_stacked_in_front_is_not_cut(kind, backend, count):
    """Not even where as many are stacked as there are clients."""
    sizes = [13, 9, 9, 4, 4][:count]
    given = (made("mlp"), kind(epochs=2, batch=4, lr=0.1), *rows(sizes), sizes)
    given += (range(count), [0] * count)
    expected = train("loop", *given)
    for slot, (update, _) in train(backend, *given).items():
        assert (update - expected[slot][0]).norm() <= 1e-5 * update.norm()


@pytest.mark.parametrize("name", ["adam", "within", "sam", "own adam"])
def test_a_state_of_a_row_for_each_client_is_cut(name, monkeypatch):
    counts = []

    def noted(self, x, gradient, *rest):
        counts.append(len(x))
        return step(self, x, gradient, *rest)

    local = METHODS[name].model_copy(update={"epochs": 1, "steps": None, "batch": 4})
    step = type(local).step
    monkeypatch.setattr(type(local), "step", noted)
    monkeypatch.setattr(type(local), "linear", lambda self: None)
    sizes = [13, 9, 9, 4]
    train("vmap", made("mlp"), local, *rows(sizes), sizes, range(4), [0] * 4)
    assert counts == [4, 3, 3, 1]


class Careless(Local):
    def step(self, x, gradient, state, at):
        at.model.mul_(0.5)
        return x.sub_(at.lr * gradient), state


@pytest.mark.parametrize("backend", ["fused", "one_batch", "vmap", "loop"])
def test_a_rule_that_writes_to_its_arguments_leaves_the_model_of_the_round(backend):
    train(backend, made("mlp"), Careless(steps=3, batch=4, lr=0.1), *rows())  # asserts it


def test_a_class_with_a_rule_of_its_own_is_not_taken_for_a_linear_one():
    assert Local().linear() == LinearRule()
    assert Sgd(momentum=0.5, proximal=0.1).linear() == LinearRule(0.5, 0.0, 0.1)
    assert Scaffold(weight_decay=0.1).linear() == LinearRule(decay=0.1)
    assert all(local.linear() is None for local in map(METHODS.get, USER_DEFINED))

    class Schedule(Sgd):
        def learning_rate(self, t):
            return self.lr / (1 + t)

    class Known(Nesterov):
        def linear(self):
            return LinearRule(momentum=self.beta)

    assert Schedule(momentum=0.5).linear() == LinearRule(momentum=0.5)
    assert Known().linear() == LinearRule(momentum=0.9)


def test_a_mixins_rule_counts_where_it_is_the_one_that_a_class_has():
    class Signs:
        def step(self, x, gradient, state, at):
            return x - at.lr * gradient.sign(), state

    class Signed(Signs, Sgd):
        pass

    class SignedToo(Signed):
        pass

    class Plain(Sgd, Signs):
        pass

    class Known(Signs, Nesterov):
        def linear(self):
            return LinearRule(momentum=self.beta)

    class Perturbed(Local):
        def perturb(self, x, gradient, state, at):
            return x + gradient

    class PerturbedSgd(Sgd, Perturbed):
        pass

    class Decay:
        def linear(self):
            return LinearRule(decay=0.5)

    class Decayed(Decay, Sgd):
        pass

    class SignedDecay(Signs, Decay, Sgd):
        pass

    assert Decayed().linear() == LinearRule(decay=0.5) and SignedDecay().linear() is None
    assert Signed().linear() is None and SignedToo().linear() is None
    assert Plain().linear() == LinearRule() and Known().linear() == LinearRule(momentum=0.9)
    assert PerturbedSgd().perturbs and PerturbedSgd().linear() is None


def test_plain_gradient_descent_is_the_rule_of_a_class_that_gives_none():
    class Mine(Local):
        def learning_rate(self, t):
            return self.lr / (1 + t)

    module = made("mlp")
    x, y = rows()
    mine = train("fused", module, Mine(steps=5, batch=6, lr=0.3), x, y)
    plain = train("fused", module, Sgd(steps=5, batch=6, lr=0.1), x, y)
    for slot, (delta, _) in mine.items():
        torch.testing.assert_close(delta, plain[slot][0])


@pytest.mark.parametrize("name", USER_DEFINED)
def test_the_backend_of_a_user_defined_rule_follows_from_model_and_clipping(name):
    local = METHODS[name].model_copy(update={"steps": 20})
    assert choose_backend(made("softmax"), local, form(SHAPE)) == "fused"
    assert choose_backend(made("residual"), local, form(SHAPE)) == "vmap"
    assert choose_backend(made("cnn"), local, form(SHAPE)) == "convolutional"
    assert choose_backend(made("cnn"), local, form(SHAPE), clip=1.0) == "layerwise"


def test_a_backend_that_forgets_the_state_of_a_rule_is_noticed(monkeypatch, caplog):
    right = Rule.step

    def forgetful(self, gradient, k):
        self.state = self.local.start(self.x)
        return right(self, gradient, k)

    assert choose_backend(made("mlp"), METHODS["nesterov"], form(SHAPE)) == "fused"
    monkeypatch.setattr(Rule, "step", forgetful)
    assert choose_backend(made("mlp"), METHODS["nesterov"], form(SHAPE)) == "loop"
    assert "fused does not fit the model" in caplog.text


@pytest.mark.parametrize(
    "step,reason",
    [
        (lambda x, g, state: x.sub_(g), "changes what it is given in place"),
        (lambda x, g, state: x - g / g.norm(), "whose step for clients [C, P] is that for each"),
        (lambda x, g, state: x - g * torch.rand_like(x), "whose step for clients [C, P] is that"),
        (lambda x, g, state: (x - g)[..., :-1], "from x [3, 7] it gives torch.float32 [3, 6]"),
        (lambda x, g, state: x.double() - g, "it gives torch.float64 [3, 7]"),
        (lambda x, g, state: x - g / state["norm"], "it raised TypeError: 'NoneType' object is"),
    ],
)
def test_a_rule_that_is_none_is_refused_before_the_run(step, reason):
    class Wrong(Local):
        def step(self, x, gradient, state, at):
            return step(x, gradient, state), state

    with refusal(re.escape(reason), begins="local.kind: "):
        choose_backend(made("mlp"), Wrong(), form(SHAPE))


FILE = """
import torch
from raydpfl.methods.local import Local


class LocalAdam(Local):
    '''Adam within a round (Kingma and Ba 2015), without bias correction.'''
    beta: float = 0.9

    def fresh(self, x):
        return torch.zeros_like(x), torch.ones_like(x)

    def step(self, x, gradient, state, at):
        mean = self.beta * state[0] + (1 - self.beta) * gradient
        square = self.beta * state[1] + (1 - self.beta) * gradient**2
        return x - at.lr * mean / (square.sqrt() + 1e-3), (mean, square)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [{}, {"bounding": {"kind": "per_sample_clip", "bound": 1.0}}],
    ids=["clients", "samples"],
)
def test_a_rule_in_a_file_of_ones_own_runs_private_with_the_epsilon_of_sgd(
    sections, tmp_path, own_module
):
    own_module("own_rule", FILE)
    settings = {"steps": 3, "batch": 5, "lr": 0.05}
    mine = experiment(local={"kind": "own_rule:LocalAdam", "beta": 0.8, **settings}, **sections)
    plain = experiment(local={"kind": "sgd", **settings}, **sections)
    ours = run(mine, tmp_path / "ours")
    theirs = run(plain, tmp_path / "theirs")
    spent = [[each.epsilon for each in result.guarantees] for result in (ours, theirs)]
    assert spent[0] == spent[1] and math.isfinite(min(spent[0])) and min(spent[0]) > 0
    again = run(mine, tmp_path / "again")
    assert again.summary["model_sha256"] == ours.summary["model_sha256"]
    assert again.summary["model_sha256"] != theirs.summary["model_sha256"]
