"""Products in less than float32: what they change, and what they leave as it is."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from conftest import experiment, form
from torch import nn

from raydpfl import models, run
from raydpfl.core import hardware
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Local, Sgd
from raydpfl.methods.local.adam import Adam
from raydpfl.models.tasks import Classification, Form, Target
from raydpfl.simulation import provenance
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.trainer import Trainer

FORM = Form((1, 8, 8), Target(classes=4), Classification())
SIZES = [9, 5, 9]


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = (nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        return nn.Sequential(*layers, nn.Linear(96, 20), nn.ReLU(), nn.Linear(20, 4))


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4))


BACKENDS = [("convolutional", net), ("loop", net), ("loop", mlp), ("vmap", mlp)]


def updates(backend, module, local, precision, members=(0, 1, 2)) -> torch.Tensor:
    """Float32 [3, d]; of the members alone."""
    generator = np.random.default_rng(0)
    x = generator.random((3, 9, 1, 8, 8), dtype=np.float32)
    y = generator.integers(4, size=(3, 9))
    here = np.isin(np.arange(3), members)
    trainer = Trainer(module, local, backend=backend, seed=0, precision=precision)
    who = {"t": 0, "clients": np.where(here, [7, 8, 9], -1), "draws": [0, 0, 0]}
    blocks = trainer.chunk(models.flatten(module), x, y, np.where(here, SIZES, 0), **who)
    found = torch.zeros(3, models.parameter_count(module))
    for block in blocks:
        found[torch.from_numpy(block.slots)] = block.updates
    return found


@pytest.mark.parametrize("backend,made", BACKENDS)
@pytest.mark.parametrize("local", [Sgd(steps=1, batch=4, lr=1e-4), Adam(steps=1, batch=4, lr=1e-4)])
def test_products_alone_are_in_bfloat16_and_small_steps_are_not_lost(backend, made, local):
    module = made()
    exact, low = (updates(backend, module, local, each) for each in ("float32", "bfloat16"))
    assert low.dtype == torch.float32 and not torch.equal(exact, low)
    # parameters of 0.1 in bfloat16 would have steps of 4e-4, and not move at all
    alike = torch.nn.functional.cosine_similarity(exact, low, dim=1)
    assert (alike > (0.98 if isinstance(local, Sgd) else 0.8)).all(), alike


@pytest.mark.parametrize("backend,made", BACKENDS)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_in_bfloat16_a_clients_bits_depend_on_it_alone(backend, made, momentum):
    module = made()
    local = Sgd(steps=3, batch=4, lr=0.1, momentum=momentum, weight_decay=0.01)
    together = updates(backend, module, local, "bfloat16")
    for member in range(3):
        alone = updates(backend, module, local, "bfloat16", (member,))
        assert torch.equal(alone[member], together[member])


def test_the_backend_is_one_that_has_bfloat16_and_the_log_names_another(caplog):
    local = Sgd(steps=20, batch=4)
    assert choose_backend(net(), local, FORM, precision="bfloat16") == "convolutional"
    with caplog.at_level(logging.WARNING, "raydpfl"):
        assert choose_backend(mlp(), local, FORM, precision="bfloat16") == "vmap"
    assert "cannot do products in bfloat16" in caplog.text


class Whole(Local):
    examples = ({"lr": 0.1},)

    def train(self, module, x, y, generator):
        pass


def test_a_train_of_ones_own_takes_its_products_itself():
    mine = {"kind": "test_precision:Whole", "lr": 0.1, "steps": None}
    with pytest.raises(
        ConfigError, match=r"client\.precision = 'bfloat16': expected float32 or tf32 with"
    ):
        experiment(local=mine, client={"precision": "bfloat16"})


def test_a_run_says_its_precision_and_keeps_its_bounds(tmp_path):
    changes = {
        "bounding": {"kind": "clip", "bound": 0.01},
        "noise": {"kind": "none"},
        "selection": {"kind": "uniform", "cohort": 1},
        "server": {"kind": "sgd", "lr": 1.0},
        "rounds": 1,
    }
    of = {
        precision: experiment(**changes, client={"actors": 0, "precision": precision})
        for precision in ("float32", "bfloat16")
    }
    results = {name: run(each, tmp_path / name) for name, each in of.items()}
    hashes = {result.summary["model_sha256"] for result in results.values()}
    assert len(hashes) == 2
    for name, result in results.items():
        assert result.summary["precision"] == name
        start = models.flatten(models.build(of[name].model, form((1, 28, 28)), of[name].seed))
        moved = (models.flatten(result.model).double() - start.double()).norm()
        assert moved == pytest.approx(0.01, rel=1e-5)


def test_what_bits_depend_on_has_the_bfloat16_of_the_processor(monkeypatch):
    exact = provenance.of(experiment())
    low = provenance.of(experiment(client={"precision": "bfloat16"}))
    assert low.keys() - exact.keys() == {"bfloat16"}
    provenance.check_node("here", low)
    monkeypatch.setattr(provenance, "of_bfloat16", lambda: {"bfloat16": "another"})
    with pytest.raises(provenance.RunError, match="bfloat16 another instead of"):
        provenance.check_node("here", low)


def test_a_processor_without_bfloat16_is_warned_of(monkeypatch, caplog):
    for has in (True, False):
        monkeypatch.setattr(hardware, "has_bfloat16", lambda has=has: has)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "raydpfl"):
            resolve(experiment(client={"precision": "bfloat16"})).check_guarantees()
        assert ("has no instructions for it" in caplog.text) is not has


@pytest.mark.parametrize(
    "text,has",
    [
        ("vendor_id : GenuineIntel\nflags : fpu avx512_bf16 amx_tile\n\nflags : x", True),
        ("vendor_id : AuthenticAMD\nflags : fpu avx2", False),
        ("Features : fp asimd bf16", True),
        ("", True),
    ],
)
def test_the_processor_is_read_from_what_linux_says(text, has, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(hardware, "INFO", tmp_path / "cpuinfo")
    hardware._described.cache_clear()
    try:
        assert hardware.has_bfloat16() == has
    finally:
        hardware._described.cache_clear()
