"""What of a model is trained, what travels, and what stays with each client."""

from __future__ import annotations

import pytest
import torch
from conftest import experiment, form
from torch import nn

import raydpfl
from raydpfl import models
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.local import Sgd, resolve
from raydpfl.plan import Plan

NET = {"kind": "test_personal_models:normed"}


def normed() -> nn.Module:
    """A net with a BatchNorm, whose statistics are not those that it starts with by itself."""
    norm = nn.BatchNorm1d(12)
    with torch.no_grad():
        norm.running_mean.uniform_(-0.1, 0.1)
        norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), norm, nn.ReLU(), nn.Linear(12, 10))


def build(**keys) -> nn.Module:
    return models.build(models.parse({**NET, **keys}), form((1, 28, 28)), seed=3)


def refused(**sections) -> str:
    """The one line by which an experiment is refused."""
    with pytest.raises(ConfigError) as error:
        Plan.make(experiment(**sections))
    assert "\n" not in str(error.value)
    return str(error.value)


# --- frozen parts ---


def test_what_is_frozen_does_not_travel_and_keeps_its_bits(tmp_path):
    frozen = ["1.*", "2.running_*"]
    result = raydpfl.run(experiment(model={**NET, "frozen": frozen}, rounds=2), out=tmp_path)
    before = build(frozen=frozen)
    assert result.summary["parameters"] == models.parameter_count(before) == 2 * 12 + 130
    after = raydpfl.load(tmp_path).module.state_dict()
    same = {name for name, tensor in before.state_dict().items() if tensor.equal(after[name])}
    buffers = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert same == {"1.weight", "1.bias"} | buffers


def test_a_batchnorm_with_frozen_statistics_keeps_samples_apart():
    module = build(frozen=["2.running_*"])
    x = form((1, 28, 28)).inputs(4, stream(0, Purpose.DATA))
    together = module.train()(x)
    assert torch.allclose(together, torch.cat([module.train()(each) for each in x.split(1)]))
    assert models.is_still(module[2]) and not models.is_still(module[1])
    # so that each sample's gradient can be clipped, as the loop does it
    assert resolve(module, Sgd(), 20, form((1, 28, 28)), clip=1.0) == "layerwise"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "model.kind = 'test_personal_models:normed': a module without BatchNorm (2), which"),
        (
            {"frozen": ["2.runing_mean"]},
            "model.frozen = '2.runing_mean': names that the model has, or patterns of them: "
            "1.weight, 1.bias, 2.weight, ...; nearest: 2.running_mean",
        ),
        ({"frozen": ["*"]}, "model.frozen = ['*']: what leaves something to train"),
        ({"frozen": ["2.weight"]}, "model.kind = 'test_personal_models:normed': a module without"),
    ],
)
def test_frozen_parts_that_are_none_are_refused_in_one_line(model, message):
    assert refused(model={**NET, **model}).startswith(message)
