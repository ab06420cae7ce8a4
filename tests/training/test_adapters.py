"""Adapters of low rank on a frozen base: what is trained, what travels, a chunk as one batch."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import experiment, form, messages, refusal
from plain_loop import net
from safetensors.torch import load_file, save_file
from test_text import by_the_book, play
from torch import nn
from typer.testing import CliRunner

import raydpfl
from raydpfl import models
from raydpfl.check.runs import run_plan
from raydpfl.cli.app import app
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Sgd
from raydpfl.simulation import export
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backends import frozen_base
from raydpfl.training.trainer import Trainer

SMALL = {"kind": "transformer", "width": 8, "heads": 2, "layers": 2}
GPT = {
    "kind": "transformers:GPT2LMHeadModel",
    "args": {"n_layer": 2, "n_embd": 8, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
}
DROPS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
STILL = {**GPT, "args": {**GPT["args"], **dict.fromkeys(DROPS, 0.0), "n_positions": 6}}
LORA = {"rank": 2, "scale": 2.0}
TOKENS = form((6,), 6, "sequence", (6,), tokens=6)


def build(model: dict, of=TOKENS, seed: int = 0) -> nn.Module:
    return models.build(models.parse(model), of, seed)


def trained_names(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


# --- which layers have adapters ---


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained():
    plain = build(SMALL)
    module = build({**SMALL, "lora": {**LORA, "targets": ["into", "2.up"], "trained": ["6.bias"]}})
    names = [
        f"{layer}.lora_{half}.weight" for layer in ("2.into", "2.up", "3.into") for half in "AB"
    ]
    assert trained_names(module) == [*names, "6.bias"]
    base = plain.state_dict()
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in base.items())
    x = TOKENS.inputs(3, np.random.default_rng(0))
    assert torch.equal(module(x), plain(x))
    with torch.no_grad():
        for layer in (module[2].into, module[3].into):
            layer.lora_B.weight.normal_()
    layer = module[2].into
    rows = torch.randn(5, 8)
    change = 2.0 * layer.lora_B.weight @ layer.lora_A.weight
    assert torch.allclose(layer(rows), F.linear(rows, layer.weight + change, layer.bias), atol=1e-5)
    merged = build(SMALL)
    merged.load_state_dict(models.merged(module))
    assert torch.allclose(merged(x), module(x), atol=1e-5) and not torch.allclose(
        merged(x), plain(x)
    )


def test_a_weight_of_an_adapted_layer_and_another_is_not_merged():
    """The other layer does without the adapter."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    module[1].weight = module[0].weight
    lora = models.Lora(rank=1, targets=("0",))
    models.adapt(module, lora, lambda: module(torch.ones(1, 6)))
    with pytest.raises(ConfigError, match=r"--merged = True: .* other layers have the weight of 0"):
        models.merged(module)


def test_adapters_are_drawn_by_the_seed_and_a_may_stay_so_and_none_is_where_a_layer_is_trained():
    drawn = [models.flatten(build({**SMALL, "lora": LORA}, seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    half = build({**SMALL, "lora": {**LORA, "targets": ["out"], "freeze_a": True}})
    assert trained_names(half) == ["2.out.lora_B.weight", "3.out.lora_B.weight"]
    whole = trained_names(build({**SMALL, "lora": {**LORA, "trained": ["6.*"]}}))
    assert "6.weight" in whole and "6.lora_A.weight" not in whole


def attention() -> nn.Module:
    """A layer of it is never called: its weights alone are used."""

    def forward(self, x):
        rows = x.flatten(2)[..., [0, 1, 2, 3]]
        return self.last(self.look(rows, rows, rows)[0].mean(1))

    look = nn.MultiheadAttention(4, 2, batch_first=True)
    return net("Attention", forward, look=look, last=nn.Linear(4, 3))


def twice() -> nn.Module:
    """A layer under two names."""

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.flatten(1))))[:, :3]

    layer = nn.Linear(4, 4)
    return net("Twice", forward, first=layer, second=layer)


def test_a_layer_under_two_names_has_one_adapter(tmp_path):
    images = form((1, 2, 2), 3)
    asked = {"kind": f"{__name__}:twice", "lora": LORA}
    module = build(asked, images)
    assert models.parameter_count(module) == 2 * 2 * 4
    nn.init.normal_(module.first.lora_B.weight)
    x = images.inputs(5, np.random.default_rng(0))
    plain = build({"kind": asked["kind"]}, images)
    plain.load_state_dict(models.merged(module))
    assert torch.allclose(plain(x), module(x), atol=1e-5)
    local = Sgd(steps=2, batch=2)
    assert choose_backend(module, local, images) == "one_batch"
    sent = {name: tensor for name, tensor in module.named_parameters() if tensor.requires_grad}
    save_file(sent, tmp_path / "sent.safetensors")
    again = build({**asked, "init": str(tmp_path / "sent.safetensors")}, images)
    assert torch.equal(again(x), module(x))


@pytest.mark.parametrize(("model", "message"), messages("adapters"))
def test_adapters_that_cannot_be_are_refused_in_one_line(model, message):
    with refusal(line=message):
        build(model)


def normed() -> nn.Module:
    first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    return nn.Sequential(nn.Flatten(), first, nn.Linear(3, 3))


def test_a_layer_whose_weight_is_computed_is_no_target():
    own = {"kind": f"{__name__}:normed"}
    module = build({**own, "lora": {}}, form((2, 4), 3))
    assert trained_names(module) == ["2.lora_A.weight", "2.lora_B.weight"]


def test_a_layer_whose_weights_alone_are_used_is_no_target():
    images = form((1, 2, 4), 3)
    own = {"kind": f"{__name__}:attention"}
    module = build({**own, "lora": {}}, images)
    assert trained_names(module) == ["last.lora_A.weight", "last.lora_B.weight"]
    with refusal("or patterns of them: last$"):
        build({**own, "lora": {"targets": ["look.out_proj"]}}, images)


# --- the chunk as one batch ---


def test_the_frozen_products_are_one_for_the_whole_chunk(monkeypatch):
    module = build({**SMALL, "lora": {**LORA, "targets": ["into"]}})
    local = Sgd(steps=3, batch=2)
    assert choose_backend(module, local, TOKENS) == "one_batch"
    assert choose_backend(module, local, TOKENS, clip=0.3) == "one_batch"
    frozen = []
    plain = F.linear

    def noted(x, weight, bias=None):
        frozen.append(tuple(x.shape[:-1]))
        return plain(x, weight, bias)

    monkeypatch.setattr(F, "linear", noted)
    train("one_batch", module, local)
    # counted once for a sample; a step has six layers with a product in each block and the last
    assert set(frozen[9:]) == {(4 * 2, 6)} and len(frozen[9:]) == 3 * 9


def train(backend, module, local, clip=None, chunk=(0, 1, 2, 3)):
    """The updates of a chunk by slot, from a model none of whose matrices is 0."""
    generator = np.random.default_rng(0)
    x = TOKENS.inputs(20, generator).view(4, 5, 6)
    y = TOKENS.task.random_targets(generator, 20, TOKENS.outputs).view(4, 5, 6)
    start = models.flatten(module)
    drawn = torch.randn(len(start), generator=torch.Generator().manual_seed(1))
    start = torch.where(start == 0, 0.1 * drawn, start)
    trainer = Trainer(module, local, backend=backend, seed=0, clip=clip, task=TOKENS.task)
    clients = [client if client in chunk else -1 for client in range(4)]
    blocks = trainer.chunk(start, x, y, [5, 0, 3, 1], t=0, clients=clients, draws=[0] * 4)
    return {slot: update for block in blocks for slot, update, _ in block.clients()}


def close(found, expected) -> bool:
    return found.keys() == expected.keys() and all(
        (found[slot] - expected[slot]).norm() <= 1e-5 * expected[slot].norm() for slot in expected
    )


@pytest.mark.parametrize("clip", [None, 0.3])
def test_a_chunk_in_passes_of_few_clients_is_trained_alike_and_empty_slots_change_no_bit(
    clip, monkeypatch
):
    module = build({**SMALL, "lora": LORA})
    local = Sgd(steps=2, batch=2, lr=0.5)
    loop = train("loop", module, local, clip)
    for limit in (frozen_base.LIMIT, 1):
        monkeypatch.setattr(frozen_base, "LIMIT", limit)
        whole = train("one_batch", module, local, clip)
        assert close(whole, loop)
        for slot in (0, 3):
            alone = train("one_batch", module, local, clip, chunk=(slot,))
            assert torch.equal(alone[slot], whole[slot])


@pytest.mark.parametrize("into", [True, False])
def test_an_adapted_layer_and_its_gradients_are_those_of_its_two_terms(into):
    torch.manual_seed(0)
    layer = nn.Linear(5, 7).requires_grad_(False)
    x = torch.randn(6, 4, 5, requires_grad=into)  # two clients, three samples of four positions
    a = torch.randn(2, 3, 5, requires_grad=True)
    b = torch.randn(2, 7, 3, requires_grad=True)
    each = x.unflatten(0, (2, 3))
    expected = layer(x) + 0.5 * (each @ a.mT[:, None] @ b.mT[:, None]).flatten(0, 1)
    found = frozen_base.AdaptedLinear.apply(layer, layer.weight.T, 0.5, x, a, b)
    assert torch.allclose(found, expected, atol=1e-6)
    parts = [a, b, x] if into else [a, b]
    g = torch.randn_like(found)
    ours = torch.autograd.grad(found, parts, g)
    theirs = torch.autograd.grad(expected, parts, g)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def hooked() -> nn.Module:
    """A module that does something of its own after a layer, and GELU in two forms."""

    def forward(self, x):
        return self.own(self.act(F.gelu(self.plain(input=self.embed(x)))))

    layers = {"embed": nn.Embedding(6, 8), "plain": nn.Linear(8, 8), "own": nn.Linear(8, 6)}
    layers["own"].register_forward_hook(lambda layer, given, made: made.tanh())
    return net("Hooked", forward, **layers, act=nn.GELU(approximate="tanh"))


def test_a_layer_with_a_hook_of_its_own_keeps_it_and_others_take_adapter_and_layer_as_one(
    monkeypatch,
):
    module = build({"kind": f"{__name__}:hooked", "lora": LORA})
    local = Sgd(steps=2, batch=2, lr=0.5)
    expected = train("loop", module, local)
    ranks: list[tuple[int, ...]] = []
    adapted = frozen_base.AdaptedLinear.apply
    noted = lambda *given: (ranks.append(given[5].shape), adapted(*given))[1]  # noqa: E731
    monkeypatch.setattr(frozen_base.AdaptedLinear, "apply", noted)
    assert close(train("one_batch", module, local), expected)
    # once for a sample alone, to count, and once a step
    assert ranks == [(1, 8, 2), (4, 8, 2), (4, 8, 2)]


def dropping(noise: float = 0.0) -> nn.Module:
    """Dropout in a layer, and within attention; and noise that is drawn by the module itself."""

    def forward(self, x):
        x = self.drop(self.embed(x)).unflatten(2, (2, 4)).transpose(1, 2)
        x = F.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
        outputs = self.layer(x.transpose(1, 2).flatten(2))
        return outputs + noise * torch.randn(len(x), 1, 1) if noise else outputs

    layers = {"embed": nn.Embedding(6, 8), "layer": nn.Linear(8, 6)}
    return net("Dropping", forward, **layers, drop=nn.Dropout(0.3))


def test_masks_of_dropout_are_those_that_the_loop_draws_for_each_client():
    module = build({"kind": f"{__name__}:dropping", "lora": LORA})
    local = Sgd(steps=2, batch=2, lr=0.5)
    assert choose_backend(module, local, TOKENS) == "one_batch"
    assert close(train("one_batch", module, local), train("loop", module, local))


def test_a_module_that_draws_otherwise_is_left_to_the_loop_and_said(caplog):
    module = build({"kind": f"{__name__}:dropping", "args": {"noise": 0.1}, "lora": LORA})
    assert choose_backend(module, Sgd(steps=2, batch=2), TOKENS) == "loop"
    assert "one_batch does not fit the model" in caplog.text
    assert "it draws random numbers, and not by dropout" in caplog.text


def test_a_wrong_gradient_behind_a_matrix_of_zeros_is_noticed(monkeypatch):
    module = build({**SMALL, "lora": {**LORA, "targets": ["into"]}})
    right = frozen_base.OneBatch._means

    def skewed(self, named, *given):
        gradients, losses = right(self, named, *given)
        gradients["2.into.lora_A.weight"] *= 1.5
        return gradients, losses

    monkeypatch.setattr(frozen_base.OneBatch, "_means", skewed)
    assert choose_backend(module, Sgd(steps=2, batch=2), TOKENS) == "vmap"


# --- a run ---


def asked(tmp_path, model, **sections):
    return experiment(
        data=play(tmp_path, length=6),
        model=model,
        selection={"kind": "full"},
        local={"kind": "sgd", "steps": 3, "batch": 2, "lr": 0.5},
        server={"kind": "sgd"},
        rounds=2,
        **sections,
    )


MODELS = {"transformer": SMALL, "gpt2": STILL}


@pytest.mark.parametrize("kind", ["transformer", "gpt2"])
def test_a_run_trains_bounds_and_sends_adapters_alone(kind, tmp_path):
    if kind == "gpt2":
        pytest.importorskip("transformers")
    targets = {"transformer": ["into", "6"], "gpt2": ["c_attn"]}[kind]
    model = {**MODELS[kind], "lora": {**LORA, "targets": targets}}
    none = {"kind": "none"}
    plan = resolve(asked(tmp_path, model, noise=none, bounding=none))
    assert plan.experiment.client.backend == "one_batch"
    result = raydpfl.run(plan.experiment, tmp_path / "out")
    before = models.build(
        plan.experiment.model, Shards.open(plan.shards).form(plan.experiment.data.task), 3
    )
    assert torch.allclose(models.flatten(result.model), by_the_book(plan), atol=1e-5)
    state = result.model.state_dict()
    moved = {name for name, each in before.state_dict().items() if not each.equal(state[name])}
    assert moved == models.adapters(before) == set(trained_names(before))
    assert len(moved) == 2 * {"transformer": 3, "gpt2": 2}[kind]
    size = sum(state[name].numel() for name in moved)
    assert result.summary["parameters"] == plan.d == size
    noised = resolve(asked(tmp_path, model, bounding={"kind": "clip", "bound": 1e-3}))
    watched = run_plan(noised, tmp_path / "noised")
    assert {len(total) for total in watched.totals} == {size}
    spread = watched.totals[0].std() / noised.sum_std(0, 1e-3)
    assert spread == pytest.approx(1, abs=5 / (2 * size) ** 0.5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with adapters, and its result."""
    folder = tmp_path_factory.mktemp("adapters")
    model = {**SMALL, "lora": {**LORA, "targets": ["into"], "trained": ["6.*"]}}
    return folder / "run", raydpfl.run(asked(folder, model), folder / "run")


@pytest.mark.slow
def test_a_run_leaves_adapters_merged_weights_and_a_model_that_is_loaded(finished, tmp_path):
    folder, result = finished
    loaded = raydpfl.load(folder).module
    state = result.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    out = str(tmp_path / "adapters.safetensors")
    assert CliRunner().invoke(app, ["export", str(folder), "--out", out]).exit_code == 0
    held = load_file(out)
    assert sorted(held) == sorted(trained_names(loaded))
    assert all(torch.equal(tensor, state[name]) for name, tensor in held.items())
    whole = tmp_path / "merged.safetensors"
    called = CliRunner().invoke(app, ["export", str(folder), "--merged", "--out", str(whole)])
    assert called.exit_code == 0
    x = torch.arange(6)[None]
    of = form((6,), state["6.bias"].numel(), "sequence", (6,), tokens=state["0.weight"].shape[0])
    plain = build({**SMALL, "init": str(whole)}, of)
    assert torch.allclose(plain(x), loaded(x), atol=1e-5)
    with pytest.raises(ConfigError, match="--out = None: expected a file for the merged weights"):
        export.export(folder, merged=True)
    run = tmp_path / "plain"
    raydpfl.run(experiment(rounds=1), run)
    with pytest.raises(ConfigError, match="--merged = True: expected a run with adapters"):
        export.export(run, whole, merged=True)


def test_training_starts_from_weights_of_the_base_of_the_adapters_or_of_both(finished, tmp_path):
    folder, result = finished
    state = result.model.state_dict()
    of = form((6,), state["6.bias"].numel(), "sequence", (6,), tokens=state["0.weight"].shape[0])
    base = build(SMALL, of, seed=9)
    added = {name: tensor.clone() for name, tensor in state.items() if ".lora_" in name}
    added |= {name: state[name].clone() for name in ("6.weight", "6.bias")}
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    save_file(added, tmp_path / "added.safetensors")
    asked = {**SMALL, "lora": {**LORA, "targets": ["into"], "trained": ["6.*"]}}
    fresh = build(asked, of).state_dict()
    for init, expected in {
        str(folder): state,
        str(tmp_path / "base.safetensors"): {**fresh, **base.state_dict()},
        str(tmp_path / "added.safetensors"): {**fresh, **added},
    }.items():
        found = build({**asked, "init": init}, of).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    added.pop("2.into.lora_A.weight")
    save_file(added, tmp_path / "some.safetensors")
    with refusal("weights with 0.weight"):
        build({**asked, "init": str(tmp_path / "some.safetensors")}, of)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
@pytest.mark.parametrize("field", ["frozen", "local"])
def test_a_file_of_adapters_holds_both_halves_also_one_that_is_frozen_or_of_clients(
    field, half, tmp_path
):
    asked = {**SMALL, "lora": LORA, field: [f"*.{half}.*"]}
    module = build(asked)
    file_tensors = export._exported_tensors(module, merged=False)
    assert file_tensors.keys() == models.adapters(module)
    path = tmp_path / "adapters.safetensors"
    path.write_bytes(models.weights.serialize(file_tensors, path, {}))
    again = build({**asked, "init": str(path)}, seed=1).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in file_tensors.items())


# --- models of the transformers library ---


def test_a_transformers_model_is_trained_with_its_dropout_as_the_loop_trains_it():
    pytest.importorskip("transformers")
    module = build({**GPT, "lora": {**LORA, "targets": ["c_attn", "c_proj"]}})
    local = Sgd(steps=2, batch=2, lr=0.5)
    assert choose_backend(module, local, TOKENS) == "one_batch"
    assert close(train("one_batch", module, local), train("loop", module, local))


def test_a_transformers_model_takes_its_sizes_from_the_data_and_its_weights_from_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    module = build(STILL)
    assert module(torch.zeros(2, 6, dtype=torch.long)).shape == (2, 6, 6)
    one = build(STILL, form((6,), 6, tokens=6))  # a target for each sample: of the last position
    assert one(torch.zeros(2, 6, dtype=torch.long)).shape == (2, 6)
    other = transformers.GPT2LMHeadModel(module.config)
    other.save_pretrained(tmp_path)  # without the tied weights of the last layer
    for lora in (None, {"targets": ["c_attn"]}):
        found = build({**STILL, "lora": lora, "init": str(tmp_path / "model.safetensors")})
        x = TOKENS.inputs(2, np.random.default_rng(0))
        assert torch.equal(found.eval()(x), other.eval()(x).logits)
    with refusal("fields of GPT2Config", line="model.args = "):
        build({**STILL, "args": {"n_embd": 7, "n_head": 2}})
