"""User-defined modules that draw or keep something: one set of bits, or an error by name."""

import random

import numpy as np
import pytest
import torch
from conftest import experiment, form, refusal
from test_same_bits import assert_same_bits, bits_of

from raydpfl import models, run
from raydpfl.check.runs import run_plan
from raydpfl.errors import RunError
from raydpfl.methods.local import Sgd
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend

pytestmark = pytest.mark.slow

FILE = """
import itertools, random
import numpy as np
import torch
from torch import nn
from raydpfl.methods.bounding import Clip
from raydpfl.methods.local import Sgd

CALLS = [0]
GENERATOR = np.random.default_rng(0)
numbers = itertools.count()


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)
        self.calls = 0

    def forward(self, x):
        return self.layer(x.flatten(1)) * self.factor()


class Starts(Base):
    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.layer.weight.mul_(1 + np.random.rand() + random.random())

    def factor(self):
        return 1


class Rule(Sgd):
    kind: str = "rule"

    def learning_rate(self, round):
        return self.lr * (1 + np.random.rand())


class Loose(Clip):
    kind: str = "loose"

    def factor(self, norm, bound):
        return super().factor(norm, bound) * np.random.rand()
"""


# what `factor` of a module computes
FACTORS = {
    "Numpy": "return 1 + 0.1 * np.random.rand()",
    "Python": "return 1 + 0.1 * random.random()",
    "Torch": "return 1 + 0.1 * torch.rand(())",
    "Attribute": "self.calls += 1; return 1 + 0.01 * self.calls",
    "Global": "CALLS[0] += 1; return 1 + 0.01 * CALLS[0]",
    "OnClass": "OnClass.seen += 1; return 1 + 0.01 * OnClass.seen",
    "Generator": "return 1 + GENERATOR.random()",
    # which the checks before a run, without gradients, do not see
    "InTraining": "self.calls += torch.is_grad_enabled(); return 1 + 0.01 * self.calls",
    "Hidden": "return 1 + 0.01 * next(numbers)",  # kept in what nobody looks into
    "Fresh": "return 1 + np.random.default_rng().random()",
    "Tensor": "self.last = self.layer.weight * 2; return 1",  # kept, and never looked at again
}
for name, factor in FACTORS.items():
    FILE += f"class {name}(Base):\n    seen = 0\n    def factor(self): {factor}\n"

CLIPPED = {  # the gradient of every sample
    "bounding": {"kind": "per_sample_clip", "bound": 0.5},
    "noise": {"kind": "gaussian", "multiplier": 2.0},
}


@pytest.fixture(autouse=True)
def mine(own_module):
    own_module("own_modules", FILE)


def seed(number: int) -> None:
    """Every generator of the process."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def states() -> tuple:
    """What the generators of the process are at."""
    numpy = np.random.get_state()[1].tolist()
    return random.getstate(), numpy, torch.get_rng_state().tolist()


def of(name: str, **sections):
    return experiment(model={"kind": f"own_modules:{name}"}, **sections)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("name", ["Numpy", "Python", "Torch", "Starts", "Tensor"])
def test_what_a_module_draws_is_keyed_by_its_client(name, clipped, tmp_path):
    few = {"rounds": 2, "data": {"clients": 12}, "selection": {"cohort": 6}}
    plan = resolve(of(name, **few, **(CLIPPED if clipped else {})))
    seed(1)
    inline = bits_of(run_plan(plan, tmp_path / "inline"))
    after = states()
    seed(2)
    for actors in (0, 3):
        assert_same_bits(bits_of(run_plan(plan, tmp_path / str(actors), actors)), inline)
    seed(1)
    assert states() == after


def test_two_processes_give_what_one_gives(tmp_path, shared_ray):
    inline = run(of("Numpy"), tmp_path / "inline").summary
    two = run(of("Numpy", client={"actors": 2}), tmp_path / "two").summary
    assert two["model_sha256"] == inline["model_sha256"] and two["test_loss"] == inline["test_loss"]


def test_clients_draw_numbers_of_their_own(tmp_path):
    differ = [
        run_plan(resolve(of("Numpy", seed=seed)), tmp_path / str(seed)).parameters()
        for seed in (1, 2)
    ]
    assert not np.array_equal(*differ)


@pytest.mark.parametrize("name", ["Attribute", "Global", "OnClass", "Generator"])
def test_a_module_that_keeps_something_is_refused_before_the_run(name, tmp_path):
    with refusal(
        r"keeps nothing from one batch to the next; .*(calls|CALLS|seen|GENERATOR) changes"
    ) as error:
        run(of(name), tmp_path / "out")
    assert error.value.field == "model.kind" and error.value.value == f"own_modules:{name}"


@pytest.mark.parametrize("name", ["InTraining", "Hidden", "Fresh"])
@pytest.mark.parametrize("actors", [None, 2])
def test_a_module_whose_state_shows_in_training_ends_the_run_by_name(name, actors, tmp_path):
    with pytest.raises(RunError, match=f"model.kind own_modules:{name} keeps something"):
        run_plan(resolve(of(name, client={"backend": "loop"})), tmp_path / "out", actors)


def test_a_module_that_draws_is_trained_by_the_loop_and_by_no_way_that_takes_a_chunk_at_once():
    module = models.build(of("Numpy").model, form((1, 28, 28)), 0)
    assert choose_backend(module, Sgd(), form((1, 28, 28))) == "loop"
    with refusal(r"client.backend = 'vmap': expected .* draws from np.random"):
        choose_backend(module, Sgd(), form((1, 28, 28)), backend="vmap")


def test_a_learning_rate_that_is_drawn_is_refused(tmp_path):
    with refusal(r"local.kind = .*the round alone"):
        run(experiment(local={"kind": "own_modules:Rule"}), tmp_path / "out")


def test_a_bounding_that_draws_is_keyed_by_its_client(tmp_path):
    plan = resolve(experiment(bounding={"kind": "own_modules:Loose", "bound": 1.0}))
    inline = bits_of(run_plan(plan, tmp_path / "inline"))
    for actors in (0, 3):
        assert_same_bits(bits_of(run_plan(plan, tmp_path / str(actors), actors)), inline)


def test_the_error_is_one_line(tmp_path, complain):
    config = tmp_path / "config.yaml"
    config.write_text(of("Torch").to_yaml().replace("own_modules:Torch", "own_modules:Global"))
    assert "own_modules:Global" in complain(["run", config, "--out", tmp_path / "out"])
