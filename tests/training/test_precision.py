"""Products in less than float32: what they change, and what they leave as it is."""

import pytest
import torch
from conftest import experiment, form
from plain_loop import CLASSES, SHAPE, alone, made, rows, train
from torch import nn
from torch.nn import functional as F

from raydpfl import models, run
from raydpfl.core import hardware
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Local, Sgd
from raydpfl.methods.local.adam import Adam
from raydpfl.models.shared_and_local import freeze
from raydpfl.simulation import provenance
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend

BACKENDS = [("convolutional", "pooled"), ("loop", "pooled"), ("loop", "mlp"), ("vmap", "mlp")]
BACKENDS += [("vmap", "cnn"), ("one_batch", "cnn")]


@pytest.mark.parametrize("backend,name", BACKENDS)
@pytest.mark.parametrize("local", [Sgd(steps=1, batch=4, lr=1e-4), Adam(steps=1, batch=4, lr=1e-4)])
def test_products_alone_are_in_bfloat16_and_small_steps_are_not_lost(backend, name, local):
    given = (backend, made(name), local, *rows())
    exact, low = (train(*given, precision=each) for each in ("float32", "bfloat16"))
    for slot, (update, _) in low.items():
        assert update.dtype == torch.float32 and not torch.equal(exact[slot][0], update)
        # parameters of 0.1 in bfloat16 would have steps of 4e-4, and not move at all
        alike = F.cosine_similarity(exact[slot][0], update, dim=0)
        assert alike > (0.98 if isinstance(local, Sgd) else 0.8)


@pytest.mark.parametrize("backend,name", BACKENDS)
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_in_bfloat16_a_clients_bits_depend_on_it_alone(backend, name, momentum):
    local = Sgd(steps=3, batch=4, lr=0.1, momentum=momentum, weight_decay=0.01)
    given = (backend, made(name), local, *rows())
    for slot, (update, _) in train(*given, precision="bfloat16").items():
        single = train(*given, **alone(slot), precision="bfloat16")
        assert torch.equal(single[slot][0], update)


@pytest.mark.parametrize("backend", ["vmap", "one_batch"])
@pytest.mark.parametrize("frozen_name", ["0.weight", "0.bias"])
def test_convolutions_are_in_bfloat16_by_every_backend(backend, frozen_name, monkeypatch):
    module = made("cnn")
    module.get_parameter(frozen_name).requires_grad_(False)
    dtypes = set()
    forward = torch.nn.Conv2d.forward

    def noted(layer, x):
        outputs = forward(layer, x)
        dtypes.add(outputs.dtype)
        return outputs

    monkeypatch.setattr(torch.nn.Conv2d, "forward", noted)
    train(backend, module, Sgd(steps=1, batch=4), *rows(), precision="bfloat16")
    assert dtypes == {torch.bfloat16}


def test_the_backend_is_one_that_has_bfloat16_and_the_log_names_another(caplog):
    local = Sgd(steps=20, batch=4)
    low = {"form": form(SHAPE), "precision": "bfloat16"}
    assert choose_backend(made("cnn"), local, **low) == "convolutional"
    assert choose_backend(made("relu mlp"), local, **low) == "vmap"
    assert "cannot do products in bfloat16" in caplog.text


@pytest.mark.parametrize("backend", ["one_batch", "vmap"])
def test_a_backend_that_raises_in_bfloat16_is_refused_before_the_run(backend):
    """BatchNorm under vmap takes no bfloat16, which the linear layer gives."""
    layers = [nn.Flatten(), nn.Linear(72, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)]
    module = nn.Sequential(*layers)
    freeze(module, {"1.weight", "1.bias", "2.running_mean", "2.running_var"})
    given = (module, Sgd(), form(SHAPE), backend)
    assert choose_backend(*given) == backend
    said = "does not fit the model: RuntimeError: expected scalar type BFloat16"
    with pytest.raises(ConfigError, match=said):
        choose_backend(*given, precision="bfloat16")
    assert choose_backend(*given[:3], precision="bfloat16") == "loop"


class Whole(Local):
    examples = ({"lr": 0.1},)

    def train(self, module, x, y, generator):
        pass


def test_a_train_of_ones_own_takes_its_products_itself():
    mine = {"kind": "test_precision:Whole", "lr": 0.1, "steps": None}
    said = r"client\.precision = 'bfloat16': expected float32 or tf32 with"
    with pytest.raises(ConfigError, match=said):
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
    exact = provenance.platform_facts(experiment())
    low = provenance.platform_facts(experiment(client={"precision": "bfloat16"}))
    assert low.keys() - exact.keys() == {"bfloat16"}
    provenance.check_node("here", low)
    monkeypatch.setattr(provenance, "bfloat16_facts", lambda: {"bfloat16": "another"})
    with pytest.raises(provenance.RunError, match="bfloat16 another instead of"):
        provenance.check_node("here", low)


def test_a_processor_without_bfloat16_is_warned_of(monkeypatch, caplog):
    for has in (True, False):
        monkeypatch.setattr(hardware, "has_bfloat16", lambda has=has: has)
        caplog.clear()
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
    hardware._cpu_info.cache_clear()
    try:
        assert hardware.has_bfloat16() == has
    finally:
        hardware._cpu_info.cache_clear()
