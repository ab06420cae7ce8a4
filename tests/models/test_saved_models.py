"""Models in and out of a run, and a finished run that goes on for more rounds."""

import copy
import json
import os
import shutil

import numpy as np
import pytest
import torch
from conftest import experiment, refusal
from safetensors.torch import load_file, save_file
from torch import nn

import raydpfl
from raydpfl import models, run
from raydpfl.cli import run_display
from raydpfl.errors import RunError
from raydpfl.experiment import Experiment
from raydpfl.models import weights
from raydpfl.simulation import export
from raydpfl.simulation.resolution import resolve

TIED = {"kind": f"{__name__}:Tied"}


class Tied(nn.Module):
    """A tied layer, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 12)
        self.again = nn.Linear(12, 12)
        self.twice = self.again
        self.frozen = nn.Linear(12, 10)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(12))

    def forward(self, x):
        return self.frozen(self.twice(self.again(self.first(x.flatten(1)).relu() * self.scale)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two rounds, and its result."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    return folder, run(experiment(rounds=2, model=TIED), folder)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_two_names_of_one_tensor_are_not_filled_with_different_weights(tmp_path):
    tensors = state_of(Tied())
    tensors["again.weight"] = tensors["again.weight"] + 1
    path = tmp_path / "torn.safetensors"
    save_file(tensors, path)
    with refusal(r"the same weights as \w+.weight and \w+.weight, which"):
        weights.fill(Tied(), str(path))


def test_a_run_is_loaded_from_its_directory_alone(finished, tmp_path, monkeypatch):
    folder, result = finished
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))  # no prepared data
    found = raydpfl.load(folder, trust_code=True)
    assert same(found.module.state_dict(), result.model.state_dict())
    assert not found.module.training
    assert found.module.twice is found.module.again
    assert found.summary == json.loads((folder / "summary.json").read_text())
    assert found.config == Experiment.from_yaml(folder / "config.yaml")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_a_model_is_exported_with_all_that_it_has(finished, tmp_path, name, typed):
    folder, result = finished
    file = tmp_path / name
    code, said, _ = typed("export", folder, "--out", file, "--trust-code")
    assert code == 0 and said.strip() == str(file)
    read = load_file(file) if name.endswith("safetensors") else torch.load(file, weights_only=True)
    assert same(read, result.model.state_dict())
    fresh = Tied()
    fresh.load_state_dict(read)
    x = torch.rand(3, 1, 28, 28)
    assert torch.equal(fresh(x), result.model(x))


def test_without_a_file_export_names_that_of_the_run(finished):
    folder, _ = finished
    assert export.export(folder) == folder / "model.safetensors"


@pytest.mark.parametrize("source", ["safetensors", "state_dict", "run"])
def test_training_starts_from_the_weights_that_are_given(finished, tmp_path, source):
    folder, result = finished
    state = state_of(result.model)
    given = {"safetensors": tmp_path / "w.safetensors", "state_dict": tmp_path / "w.pt"}
    path = given.get(source, folder)
    if source == "safetensors":
        save_file(state, path)
    elif source == "state_dict":
        torch.save(state, path)
    e = experiment(rounds=1, model={**TIED, "init": os.path.relpath(path)}, seed=9)
    e = e.model_copy(update={"local": e.local.model_copy(update={"lr": 1e-30})})
    e = Experiment.from_dict({**e.to_dict(), "noise": {"kind": "none"}})
    found = run(e, tmp_path / "run")
    assert same(found.model.state_dict(), state)
    assert os.path.isabs(raydpfl.load(tmp_path / "run", trust_code=True).config.model.init)


def test_what_a_run_starts_from_is_named_as_not_counted_and_keys_its_noise(finished, tmp_path):
    folder, result = finished
    for name in ("first", "second"):
        shutil.copy(folder / "model.safetensors", tmp_path / f"{name}.safetensors")
    state = state_of(result.model)
    state["scale"] += 1
    save_file(state, tmp_path / "other.safetensors")

    def plan(name):
        init = name and str(tmp_path / f"{name}.safetensors")
        return resolve(experiment(rounds=2, model={**TIED, "init": init}))

    seeds = {name: plan(name).noise_seed for name in (None, "first", "second", "other")}
    assert len(set(seeds.values())) == 3 and seeds["second"] == seeds["first"]
    said = plan("first").mechanism.exclusions
    assert any("first.safetensors" in each and "the data they are of" in each for each in said)


# what the file holds, of the right weights (None: there is none), and part of the message
WRONG = {
    "more": (lambda state: state | {"head": torch.ones(1)}, "weights without head"),
    "less": (
        lambda state: {name: state[name] for name in state if name != "first.bias"},
        "weights with first.bias",
    ),
    "shape": (lambda state: state | {"first.bias": torch.ones(3)}, r"first.bias \[12\], not \[3\]"),
    "nan": (
        lambda state: state | {"first.bias": torch.full((12,), torch.nan)},
        "first.bias is not",
    ),
    "missing": (None, "a file of weights|a file that can be read"),
    "code": (lambda _: Tied(), "a file that can be read"),
    "list": (lambda _: [torch.ones(1)], "a state_dict"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_weights_that_do_not_fit_are_refused_in_a_line(finished, tmp_path, kind):
    wrong, said = WRONG[kind]
    path = tmp_path / "w.pt"
    if wrong is not None:
        torch.save(wrong(state_of(finished[1].model)), path)
    with refusal(rf"model\.init.*({said})"):
        run(experiment(rounds=1, model={**TIED, "init": str(path)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_no_finished_run_is_refused(finished, tmp_path):
    folder, _ = finished
    with refusal(r"has no model\.safetensors"):
        raydpfl.load(tmp_path)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    summary = json.loads((damaged / "summary.json").read_text())
    (damaged / "summary.json").write_text(json.dumps({**summary, "model_sha256": "0"}))
    with pytest.raises(RunError, match=r"is not the model of"):
        raydpfl.load(damaged, trust_code=True)
    with refusal(r"--out = .*/model\.onnx'"):
        export.export(folder, tmp_path / "model.onnx", trust_code=True)
    os.truncate(damaged / "model.safetensors", 100)
    with refusal(r"expected the directory of a run \(ValueError"):
        raydpfl.load(damaged, trust_code=True)


# --- more rounds ---


def grown(tmp_path, *, first=2, rounds=4, then=None, **sections):
    """The same run in two parts, and at once; what each came to."""
    run(experiment(rounds=first, **sections), tmp_path / "parts")
    stored = Experiment.from_yaml(tmp_path / "parts" / "config.yaml")
    more = {**stored.to_dict(), "rounds": rounds}
    more["noise"] = {**more["noise"], **(then or {})}
    asked = Experiment.from_dict(more)
    parts = run(asked, tmp_path / "parts", resume=True)
    return parts, run(asked, tmp_path / "whole")


CASES = {
    "multiplier": {"noise": {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5}},
    "none": {"noise": {"kind": "none"}, "bounding": {"kind": "none"}},
    "adapting": {"bounding": {"kind": "quantile_clip", "bound": 0.5}},
    "secret": {"selection": {"kind": "poisson", "cohort": 10}},
    "local steps": {
        "bounding": {"kind": "per_sample_clip", "bound": 1.0},
        "noise": {"kind": "gaussian", "placement": "step", "multiplier": 1.0, "delta": 1e-3},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_finished_run_goes_on_as_one_of_so_many_rounds(case, tmp_path):
    parts, whole = grown(tmp_path, **copy.deepcopy(CASES[case]))
    assert parts.summary["rounds"] == 4 and parts.summary["status"] == "completed"
    assert parts.summary["model_sha256"] == whole.summary["model_sha256"]
    assert parts.summary["guarantees"] == whole.summary["guarantees"]
    assert same(raydpfl.load(tmp_path / "parts").module.state_dict(), whole.model.state_dict())
    ledger = tmp_path / "parts" / "ledger.jsonl"
    if ledger.exists():
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        assert [line["round"] for line in lines] == [0, 1, 2, 3]
        assert {line["mechanism"] for line in lines} == {lines[0]["mechanism"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "banded_gaussian"])
def test_noise_for_an_epsilon_stays_and_the_guarantees_say_what_all_rounds_spend(kind, tmp_path):
    sections = {"noise": {"kind": kind, "epsilon": 3.0, "delta": 1e-5}}
    if kind == "banded_gaussian":
        sections["noise"]["bands"] = 2
        sections["selection"] = {"kind": "cyclic", "period": 2, "cohort": 25}
    begun = experiment(rounds=2, **copy.deepcopy(sections))
    first = run(begun, tmp_path / "alone")
    longer = Experiment.from_yaml(tmp_path / "alone" / "config.yaml", ["rounds=4"])
    with refusal(r"rounds = 4: expected 2,.*noise\.rounds=2 too"):
        run(longer, tmp_path / "alone", resume=True)
    parts, whole = grown(tmp_path, then={"rounds": 2}, **sections)
    assert parts.summary["model_sha256"] == whole.summary["model_sha256"]
    assert parts.summary["guarantees"] == whole.summary["guarantees"]
    assert parts.summary["noise_multiplier"] == first.summary["noise_multiplier"]

    def spent(result) -> float:
        return max(each.epsilon for each in result.guarantees if each.kind == "rigorous")

    before = max(entry["epsilon"] for entry in first.summary["holds"][:1])
    after = max(entry["epsilon"] for entry in parts.summary["holds"][:1])
    assert before == pytest.approx(3.0, rel=1e-2)
    assert after > 3.2
    assert spent(parts) > spent(first)


@pytest.mark.slow
def test_noise_of_clients_own_budgets_does_not_go_on(tmp_path):
    steps = {"kind": "gaussian", "placement": "step", "epsilon": 4.0, "delta": 1e-3}
    sections = {"bounding": {"kind": "per_sample_clip", "bound": 1.0}, "noise": steps}
    begun = experiment(rounds=2, **sections)
    first = run(begun, tmp_path / "run")
    with refusal(r"rounds = 3: expected 2, .*model\.init=.*/run, with noise") as no:
        run(Experiment.from_dict({**begun.to_dict(), "rounds": 3}), tmp_path / "run", resume=True)
    assert "noise.rounds" not in str(no.value)
    (told,) = (line for line in run_display.next_commands(first) if "more rounds" in line)
    assert told.endswith(f"/run/config.yaml model.init={tmp_path / 'run'} --out DIR")
    init = f"model.init={tmp_path / 'run'}"
    after = run(Experiment.from_yaml(tmp_path / "run" / "config.yaml", [init]), tmp_path / "more")
    assert after.summary["model_sha256"] != first.summary["model_sha256"]
    said = after.guarantees[0].exclusions
    assert any("the weights that training starts from" in each for each in said)
    with refusal(r"noise\.rounds = 2: expected none with placement step"):
        experiment(rounds=3, **{**sections, "noise": {**steps, "rounds": 2}})


@pytest.mark.parametrize(
    "values,field",
    [
        ({"rounds": 1}, "rounds"),
        ({"rounds": 4, "local": {"kind": "sgd", "steps": 5, "batch": 10, "lr": 0.2}}, "local.lr"),
        ({"rounds": 4, "noise": {"kind": "gaussian", "multiplier": 2.0}}, "noise.multiplier"),
    ],
)
def test_only_the_rounds_may_grow(values, field, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    stored = Experiment.from_yaml(folder / "config.yaml").to_dict()
    with refusal(begins=f"{field}: "):
        run(Experiment.from_dict({**stored, **values}), folder, resume=True)


def test_noise_is_for_rounds_that_there_are():
    for values, said in (
        ({"epsilon": 3.0, "rounds": 9}, "at most the 4"),
        ({"std": 1.0, "rounds": 2}, "none without"),
    ):
        with refusal(rf"noise\.rounds.*{said}"):
            experiment(noise={"kind": "gaussian", **values})
    e = experiment(noise={"kind": "gaussian", "epsilon": 3.0, "rounds": 2})
    assert any("what 2 rounds spend" in said for said in e.warnings())


def test_a_model_file_holds_float32_as_it_is(finished):
    folder, result = finished
    read = load_file(folder / "model.safetensors")
    flat = models.flatten(result.model).numpy()
    assert np.array_equal(read["first.weight"].numpy().ravel(), flat[: 784 * 12])
