"""Which backend trains a model: what it fits, what is refused, and what the log says."""

import logging
import math
import re
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import form
from plain_loop import (
    CLASSES,
    CONVOLUTIONAL,
    LAYERS,
    METHODS,
    MODULES,
    SHAPE,
    STACKS,
    check_updates,
    made,
    mlp,
    net,
    rows,
    train,
)
from torch import nn

from raydpfl import models
from raydpfl.core import native
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Adam, Sam, Scaffold, Sgd
from raydpfl.models.linear_stack import NoStack, stack
from raydpfl.training import backend_check, validation
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backend_timing import StepTimes, Workload
from raydpfl.training.backends import BACKENDS, convolutional, fused, ghost_clipping, vmap
from raydpfl.training.trainer import Trainer
from raydpfl.training.value_reads import value_read

pytestmark = pytest.mark.usefixtures("one_thread")
made_mlp = partial(made, "mlp")
needs = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")


def by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layers that `stack` found, one after another on the flat parameters."""
    a = x.flatten(1)
    flat = models.flatten(module)
    for layer in stack(module):
        weight, *bias = layer.views(flat)
        a = a @ weight.mT + (bias[0] if bias else 0)
        a = layer.activation.forward(a) if layer.activation else a
    return a


def hooked(module: nn.Module, layer: int) -> nn.Module:
    module[layer].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def frozen_weight() -> nn.Module:
    module = made("mlp")
    module[1].weight.requires_grad_(False)
    return module


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_linear_layers_is_found_however_it_is_written(name):
    module = made(name)
    x = torch.randn(3, *SHAPE)
    torch.testing.assert_close(by_hand(module, x), module(x))


def test_what_changes_nothing_does_not_hide_a_stack():
    idle = (nn.Identity(), nn.Linear(72, 5), nn.Dropout(0.0), nn.LeakyReLU(), nn.Linear(5, 4))
    for module in (nn.Linear(72, 4), mlp(*idle)):
        x = torch.randn(3, 72)
        torch.testing.assert_close(by_hand(module, x), module(x))


OTHERS = {
    "reused": lambda: made("reused"),
    "tied weights": lambda: made("tied"),
    "residual": lambda: made("residual"),
    "convolution": lambda: made("cnn"),
    "hook": lambda: hooked(made("mlp"), 1),
    "frozen": frozen_weight,
    "dropout": lambda: mlp(nn.Linear(72, 8), nn.Dropout(0.1), nn.Linear(8, 4)),
    "batch norm": lambda: mlp(nn.Linear(72, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    "normalised weights": lambda: mlp(nn.utils.parametrizations.weight_norm(nn.Linear(72, 4))),
    "activation first": lambda: mlp(nn.ReLU(), nn.Linear(72, 4)),
    "two activations": lambda: mlp(nn.Linear(72, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 4)),
    "softplus": lambda: mlp(nn.Linear(72, 8), nn.Softplus(), nn.Linear(8, 4)),
    "negative slope": lambda: mlp(nn.Linear(72, 8), nn.LeakyReLU(-0.1), nn.Linear(8, 4)),
}


def test_windows_that_may_miss_the_image_are_not_compiled():
    pool = nn.MaxPool2d((2, 1), (1, 1), (1, 0), dilation=(2, 1))
    module = nn.Sequential(nn.Conv2d(2, 3, (6, 6)), pool, nn.Flatten(), nn.Linear(3, CLASSES))
    with pytest.raises(NoStack, match="padding and dilation"):
        convolutional.links(module)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of weight_norm
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_stack_is_not_taken_for_one_and_is_trained_right(kind):
    module = OTHERS[kind]()
    with pytest.raises(NoStack):
        stack(module)
    local = METHODS["all"]
    taken = choose_backend(module, local, form(SHAPE))
    if kind == "dropout":  # whose masks the plain loop does not draw
        train(taken, module, local, *rows())
    else:
        check_updates(taken, module, local, *rows())


def last(inputs: int) -> nn.Linear:
    return nn.Linear(inputs, CLASSES)


def mixing() -> nn.Module:
    """Looks like a flatten and a linear layer, but its view cuts each sample in two."""
    forward = lambda self, x: self.last(x.view(-1, 36)).view(-1, 4)  # noqa: E731
    return net("Mixing", forward, last=nn.Linear(36, 2))


def scanned() -> nn.Module:
    """A recurrent layer over the rows of an image."""
    forward = lambda self, x: self.cells(x.flatten(1, 2))[0][:, -1]  # noqa: E731
    return net("Scanned", forward, cells=nn.LSTM(6, 4, batch_first=True))


def branched() -> nn.Module:
    """A residual of convolutions."""
    forward = lambda self, x: self.last((x + self.first(x)).flatten(1))  # noqa: E731
    return net("Branched", forward, first=nn.Conv2d(2, 2, 3, padding=1), last=last(72))


def drawn_by_numpy() -> nn.Module:
    forward = lambda self, x: self.last(x.flatten(1)) + float(np.random.normal())  # noqa: E731
    return net("Noised", forward, last=last(72))


def normed() -> nn.Module:
    """BatchNorm whose statistics are each client's own."""
    forward = lambda self, x: self.last(self.norm(x).flatten(1))  # noqa: E731
    module = net("Normed", forward, norm=nn.BatchNorm2d(2), last=last(72))
    models.shared_and_local.set_local(module, {"norm.running_mean", "norm.running_var"})
    return module


def overwriting() -> nn.Module:
    """Changes a layer's input after the layer has seen it, and made a padded copy."""

    def forward(self, x):
        x = x + 0
        return self.last((self.first(x) + x.mul_(3)).flatten(1))

    first = nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular")
    return net("Overwriting", forward, first=first, last=last(72))


def samples_second() -> nn.Module:
    """A layer whose first axis is not the samples'."""

    def forward(self, x):
        rows = self.first(x.transpose(0, 1).reshape(12, -1, 6))
        return self.last(rows.transpose(0, 1).reshape(len(x), -1))

    return net("SamplesSecond", forward, first=nn.Linear(6, 5), last=last(60))


def unused() -> nn.Module:
    forward = lambda self, x: self.last(x.flatten(1))  # noqa: E731
    return net("Unused", forward, spare=nn.Linear(3, 3), last=last(72))


def drawing() -> nn.Module:
    """A layer with a parameter and a dropout of its own."""
    forward = lambda self, x: self.dropout(x.flatten(1) * self.weight)  # noqa: E731
    weight = nn.Parameter(torch.ones(72))
    return net("Drawing", forward, weight=weight, dropout=nn.Dropout(0.5))


def shrinking() -> nn.Module:
    """Writes to its parameter while it is run."""

    def forward(self, x):
        with torch.no_grad():
            self.linear.weight[:, x.flatten(1).mean(0) > 0] *= 0.9
        return self.linear(x.flatten(1))

    return net("Shrinking", forward, linear=last(72))


def centred() -> nn.Module:
    """Subtracts the mean of the batch, so that a gradient is no sum over samples."""
    forward = lambda self, x: self.last((x - x.mean(0) / 2).flatten(1))  # noqa: E731
    return net("Centred", forward, last=last(72))


def counting() -> nn.Module:
    """Keeps a running mean of what it is given."""

    def forward(self, x):
        x = x.flatten(1)
        self.mean.mul_(0.9).add_(x.mean(0).detach(), alpha=0.1)
        return self.last(x - self.mean)

    module = net("Counting", forward, last=last(72))
    module.register_buffer("mean", torch.zeros(72))
    return module


class Trained(Sgd):
    """Trains a client whole."""

    def train(self, *given):
        raise NotImplementedError


@pytest.mark.parametrize(
    "module,wrong,taken",
    [(mixing(), ["compiled", "fused"], "vmap"), (OTHERS["batch norm"](), ["vmap"], "loop")],
)
def test_a_backend_that_would_train_a_module_wrongly_gives_way_and_says_so(
    module, wrong, taken, caplog
):
    assert choose_backend(module, Sgd(steps=1), form(SHAPE)) == taken
    assert len(caplog.messages) == len(wrong)
    if taken == "loop":
        assert caplog.messages[0].startswith(
            "clients are trained by the loop, one at a time, which is slow: vmap does not fit"
        )
    for backend in wrong:
        assert any(f"{backend} does not fit" in message for message in caplog.messages)
        said = rf"client\.backend = '{backend}': expected auto or loop"
        with pytest.raises(ConfigError, match=said):
            choose_backend(module, Sgd(), form(SHAPE), backend)


def altered(change):
    """A backend's `run` with a change of the chunk, or of the blocks."""

    def run(self, parameters, chunk):
        chunk, factor = change(self, chunk)
        for block in self.right(parameters, chunk):
            yield replace(block, updates=block.updates * factor)

    return run


def without_proximal(self, chunk):
    self.local = self.local.model_copy(update={"proximal": 0.0})
    return chunk, 1.0


FAULTS = {
    "a longer step": (Sgd(), lambda self, chunk: (chunk, 1.01)),
    "no proximal term": (Sgd(proximal=0.1), without_proximal),
    "no corrections": (Scaffold(), lambda self, chunk: (replace(chunk, corrections=None), 1.0)),
    "other targets": (Sgd(steps=1), lambda self, chunk: (replace(chunk, y=chunk.y * 1.01), 1.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["leaky mlp", "residual", "cnn"])
def test_a_step_that_is_slightly_wrong_is_noticed(name, fault, monkeypatch):
    local, change = FAULTS[fault]
    regression = fault == "other targets"
    module = made(name, regression)
    of = form(SHAPE, 0, "regression") if regression else form(SHAPE)
    taken = choose_backend(module, local, of)
    assert taken != "loop"
    kind = BACKENDS[taken]
    monkeypatch.setattr(kind, "right", kind.run, raising=False)
    monkeypatch.setattr(kind, "run", altered(change))
    if fault == "no proximal term" and taken == "convolutional":
        return  # its rule is made anew for each client
    assert choose_backend(module, local, of) == ("vmap" if taken == "fused" else "loop")


@pytest.mark.parametrize(
    "module,local,backend,said",
    [
        (OTHERS["batch norm"], Sgd(), "auto", "vmap does not fit.*faster: a model that vmap fits"),
        (scanned, Sgd(), "auto", "LSTM is recurrent.*; faster: a model without recurrent layers"),
        (scanned, Sgd(), "loop", "LSTM is recurrent.*; faster: a model without recurrent layers"),
        (branched, Sgd(), "auto", "convolutional does not fit .*; faster: .*activ.*GPU"),
        (drawn_by_numpy, Sgd(), "auto", "draws from np.random; faster: a module that draws no"),
        (made_mlp, Trained(), "auto", "a user-defined train; faster: a step in its place"),
        (made_mlp, Sgd(), "loop", "client.backend asks for it; faster: client.backend=auto, which"),
        (normed, Sgd(), "auto", "buffers of the model are clients' own.*without BatchNorm"),
    ],
)
def test_a_loop_that_is_slow_says_why_and_what_would_be_faster(
    module, local, backend, said, caplog
):
    assert choose_backend(module(), local, form(SHAPE), backend) == "loop"
    (message,) = caplog.messages
    assert re.search(f"trained by the loop, one at a time.*{said}", message)


@needs
@pytest.mark.parametrize(
    "kind,local,clip,backend",
    [
        ("softmax", Sgd(steps=20), None, "compiled"),
        ("softmax", Sgd(steps=20), 1.0, "compiled"),
        ("softmax", Adam(steps=300), None, "fused"),
        ("mlp", Sgd(steps=32, batch="full"), None, "compiled"),
        ("mlp", Sgd(steps=32), 1.0, "compiled"),
        ("mlp", Scaffold(steps=10, batch=64), None, "compiled"),
        ("cnn", Sgd(), None, "convolutional"),
        ("cnn", Sgd(), 1.0, "convolutional"),
        ("dp_cnn", Sgd(), 1.0, "layerwise"),
    ],
)
def test_the_models_of_the_papers_have_a_fast_backend(kind, local, clip, backend, caplog):
    of = form((1, 28, 28))
    module = models.build(models.parse({"kind": kind}), of, seed=0)
    assert choose_backend(module, local, of, clip=clip) == backend
    assert not caplog.messages
    assert choose_backend(module, local, of, "loop", clip) == "loop"


def padded(layered: bool, frozen: bool) -> nn.Module:
    """Has a table of 66 tokens, of which one is padding."""

    def forward(self, x):
        tokens = x.long()  # the plain loop has them as numbers
        rows = self.table(tokens) if layered else F.embedding(tokens, self.weight, 65)
        return self.last(torch.tanh(rows)).mean(1)

    table = {"table": nn.Embedding(66, 3, padding_idx=40)}
    if not layered:
        table = {"weight": nn.Parameter(torch.randn(66, 3))}
    last = nn.Linear(3, CLASSES).requires_grad_(not frozen)
    return net("Padded", forward, **table, last=last)


@pytest.mark.parametrize(
    "layered,frozen,taken", [(True, False, "vmap"), (True, True, "vmap"), (False, False, "loop")]
)
def test_padding_that_a_backend_would_train_is_noticed(layered, frozen, taken, caplog):
    """Of a table that is no layer; of a layer the padding is trained by no client."""
    of = replace(form((5,), CLASSES), tokens=66)
    module = padded(layered, frozen)
    assert choose_backend(module, METHODS["all"], of) == taken
    assert ("a trained Embedding has a padding_idx" in caplog.text) == frozen
    _, y = rows()
    x = torch.randint(39, 42, (*y.shape, 5))
    if layered:
        check_updates(taken, module, METHODS["all"], x, y)


@pytest.mark.parametrize("always", [False, True])
def test_a_maximum_that_rounds_the_other_way_on_some_rows_is_no_mismatch(always, monkeypatch):
    def flipped(self, backend):
        ours, theirs = by(self, backend)
        ours[0 if always else self.seed] *= 1.01
        return ours, theirs

    by = backend_check.FirstSteps.by
    monkeypatch.setattr(backend_check.FirstSteps, "by", flipped)
    reason = backend_check.mismatch(made("mlp"), Sgd(), form(SHAPE), "fused", None)
    assert (reason or "").startswith("its first step is off by") == always


@pytest.mark.parametrize(
    "name,local,backend,clip,expected",
    [
        ("softmax", Adam(), "compiled", None, ".*compiled cannot do a rule that is not linear"),
        ("mlp", Sam(), "fused", None, ".*fused cannot do a second gradient in a step"),
        ("mlp", Sgd(), "lopo", None, "compiled, fused"),
        ("softmax", Sgd(), "layerwise", None, ".*layerwise cannot do samples that are not clipped"),
    ],
)
def test_a_backend_that_cannot_do_what_is_asked_is_refused_by_name(
    name, local, backend, clip, expected
):
    expected = rf"client\.backend = '{backend}': expected auto or one of {expected}"
    with pytest.raises(ConfigError, match=expected):
        choose_backend(made(name), local, form(SHAPE), backend, clip)
    with pytest.raises(ConfigError, match=expected):
        Trainer(made(name), local, backend=backend, seed=0, clip=clip)


def test_a_rule_that_needs_corrections_is_refused_without_them():
    with pytest.raises(ValueError, match="scaffold needs corrections"):
        train("fused", made("softmax"), Scaffold(), *rows())


@pytest.mark.parametrize("backend", ["auto", "fused", "vmap", "loop"])
def test_regression_needs_a_module_with_an_output_for_each_target(backend):
    for name in ("mlp", "residual"):
        said = r"data.task.kind = 'regression': .* for each sample of outputs \[4, 4\] \(RuntimeErr"
        with pytest.raises(ConfigError, match=said):
            choose_backend(made(name), Sgd(), form(SHAPE, 0, "regression"), backend)
    if backend != "auto":
        with pytest.raises(RuntimeError):
            train(backend, made("mlp"), Sgd(), *rows(regression=True))


def test_what_another_thread_draws_is_not_taken_for_the_modules(monkeypatch):
    drawn = validation._trial_generator
    asked = []

    def beside_a_thread(module, shape):
        asked.append(drawn(module, shape))
        return "Python's random" if len(asked) == 1 else asked[-1]

    monkeypatch.setattr(validation, "_trial_generator", beside_a_thread)
    module = mlp(nn.Linear(784, 10))
    assert choose_backend(module, Sgd(), form((1, 28, 28))) == "compiled"
    assert asked == [None] * 2  # one try without is enough


@needs
@pytest.mark.parametrize("name", MODULES)
def test_the_backend_follows_from_the_architecture(name, caplog):
    backend = choose_backend(made(name), Sgd(), form(SHAPE), clip=1.0)
    expected = "layerwise" if name in LAYERS or name in CONVOLUTIONAL else "vmap"
    if name in STACKS:
        expected = "fused" if name in ("leaky mlp", "functional") else "compiled"
    special = {"pooled": "convolutional", "cnn of functions": "convolutional"}
    special |= {"frozen": "one_batch", "adapters": "one_batch", "viewed": "convolutional"}
    assert backend == special.get(name, expected)
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "clients are trained by vmap"
    ] * (backend == "vmap")


@pytest.mark.parametrize(
    "name,reason",
    [
        ("residual", "Residual has parameters outside of its layers"),
        ("reused", "Linear is called more than once"),
        ("tied", "a parameter of Linear is tied to another layer's"),
        ("tied by hand", "its first step is off by"),
    ],
)
def test_a_module_that_layerwise_would_get_wrong_is_refused_with_the_reason(name, reason):
    said = rf"'layerwise': expected auto or loop; this backend does not fit the model: {reason}"
    with pytest.raises(ConfigError, match=said):
        choose_backend(made(name), Sgd(), form(SHAPE), "layerwise", clip=1.0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "kind,reason",
    [
        (scanned, "LSTM takes or gives more than tensors"),
        (overwriting, "the input of Conv2d is changed in place after it"),
        (samples_second, "the first axis of Linear's input is not that of the samples"),
        (unused, "Linear is not called"),
    ],
)
def test_what_layerwise_cannot_do_is_left_to_vmap_or_the_loop_and_said(kind, reason, caplog):
    assert choose_backend(kind(), Sgd(), form(SHAPE), clip=1.0) in ("vmap", "loop")
    assert reason in caplog.messages[0]


def gated(gate: float) -> nn.Module:
    """A branch behind a gate (ReZero, LayerScale) that uses a layer's weight once more."""

    def forward(self, x):
        h = torch.tanh(self.first(x.flatten(1)))
        branch = F.linear(torch.relu(self.square(h)), self.square.weight.T)
        return self.last(h + self.gate(branch))

    scale = nn.Parameter(torch.full((8,), gate))
    scaled = net("Scale", lambda self, x: self.by * x, by=scale)
    layers = {"first": nn.Linear(72, 8), "square": nn.Linear(8, 16, bias=False), "last": last(8)}
    return net("Gated", forward, **layers, gate=scaled)


@pytest.mark.parametrize("gate", [0.0, 1e-6, -1e-3])
@pytest.mark.parametrize("backend", ["layerwise", "one_batch"])
def test_a_branch_that_a_small_gate_hides_is_compared_too(gate, backend):
    module = gated(gate)
    module.first.requires_grad_(backend == "layerwise")
    assert choose_backend(module, Sgd(), form(SHAPE), clip=1.0) == "vmap"
    with pytest.raises(ConfigError, match="its first step is off by"):
        choose_backend(module, Sgd(), form(SHAPE), backend, clip=1.0)


def test_a_gate_without_an_axis_keeps_no_net_from_a_backend():
    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.last(h + self.gate * torch.relu(h))

    gate = nn.Parameter(torch.tensor(0.0))
    module = net("Rezero", forward, gate=gate, first=nn.Linear(72, 6), last=last(6))
    assert choose_backend(module, Sgd(), form(SHAPE), "vmap") == "vmap"


def test_an_activation_behind_another_and_a_flattening_is_left_to_other_backends():
    """It would write into what the first one's gradient is taken of."""
    layers = (nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.Sigmoid(), nn.Flatten(), nn.Tanh())
    with pytest.raises(NoStack, match="an activation follows another"):
        convolutional.links(nn.Sequential(*layers, nn.Linear(16, CLASSES)))


def test_a_small_parameter_keeps_its_signs_where_it_is_compared():
    """Of a net with the square root of one, no backend would fit else."""
    forward = lambda self, x: self.last(x.flatten(1)) * self.variance.sqrt()  # noqa: E731
    variance = nn.Parameter(torch.full((CLASSES,), 1e-4))
    module = net("Deviation", forward, variance=variance, last=last(72))
    assert choose_backend(module, Sgd(), form(SHAPE), "vmap") == "vmap"


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.mean() > 1e3,
        lambda x: sum(x.flatten().tolist()) > 1e3,
        lambda x: x.detach().numpy().max() > 1e3,
        lambda x: len(x[x > 1e3]),
    ],
)
@pytest.mark.parametrize("backend", ["layerwise", "one_batch"])
def test_whole_batches_run_through_no_module_that_may_branch_on_them(backend, read):
    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.last(h * h.mean(0) if read(x) else h)

    module = net("Branches", forward, first=nn.Linear(72, 6), last=nn.Linear(6, CLASSES))
    module.first.requires_grad_(False)
    assert choose_backend(module, Sgd(), form(SHAPE), clip=1.0) == "loop"
    with pytest.raises(ConfigError, match="reads values of its rows"):
        choose_backend(module, Sgd(), form(SHAPE), backend, clip=1.0)


@pytest.mark.parametrize(
    "size",
    [lambda x: x.amax(), lambda x: x.amax() / 1e5, lambda x: -x.amin()],
)
@pytest.mark.parametrize("backend", ["layerwise", "one_batch"])
def test_whole_batches_run_through_no_module_that_mixes_rows_far_from_each_other(backend, size):
    def forward(self, x):
        rows = x.flatten(1)
        rows = rows / size(rows).clamp(min=1)  # of rows in [0, 1) that is x
        return self.last(torch.relu(self.first(rows)))

    module = net("Loudest", forward, first=nn.Linear(72, 6), last=last(6))
    module.first.requires_grad_(False)
    assert choose_backend(module, Sgd(), form(SHAPE), clip=1.0) == "vmap"
    said = "with one row times .* its outputs for the others are off by"
    with pytest.raises(ConfigError, match=said):
        choose_backend(module, Sgd(), form(SHAPE), backend, clip=1.0)


def test_a_net_that_takes_no_far_rows_is_trained_in_whole_batches():
    def forward(self, x):
        return self.last(self.table((9 * x.flatten(1)).long()).mean(1))

    module = net("Levels", forward, table=nn.Embedding(10, 3), last=last(3))
    assert choose_backend(module, Sgd(), form(SHAPE), "layerwise", clip=1.0) == "layerwise"


def test_whole_batches_run_through_no_module_that_mixes_rows_of_a_token():
    def forward(self, x):
        return self.last(self.table(x).mean(1)) * torch.where((x == 65).all(1).any(), 2, 1)

    module = net("Counts", forward, table=nn.Embedding(66, 3), last=last(3))
    of = replace(form((5,), CLASSES), tokens=66)
    with pytest.raises(ConfigError, match="with one row of 65 alone its outputs for the others"):
        choose_backend(module, Sgd(), of, "layerwise", clip=1.0)


def test_values_that_no_row_has_gone_into_may_be_read():
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(6)
        x = self.layers(x.flatten(1, 2).view(-1, 6, 12), mask=mask)  # looks whether it is causal
        x = torch.sparse.mm(torch.eye(12).to_sparse(), x[torch.arange(len(x)), 0].T).T
        return self.last(x[:, torch.ones(12, dtype=torch.bool)])

    layer = nn.TransformerEncoderLayer(12, 2, 8, dropout=0.0, batch_first=True)
    layers = nn.TransformerEncoder(layer, 1)
    module = net("Masked", forward, layers=layers, last=last(12))
    assert value_read(module, torch.rand(4, *SHAPE)) is None


def test_a_layer_that_layerwise_cannot_draw_sample_by_sample_is_left_to_vmap():
    module = nn.Sequential(drawing(), nn.Linear(72, CLASSES))
    assert choose_backend(module, Sgd(), form(SHAPE), clip=1.0) == "vmap"
    module[0].dropout.p = 0.0
    assert choose_backend(module, Sgd(), form(SHAPE), clip=1.0) == "layerwise"


MIXING = {
    "model = 'Shrinking': .*its parameter linear.weight changes": shrinking,
    "model = 'Counting': .*its buffer mean changes": counting,
    "model = 'Sequential': .*1 is a EmbeddingBag with max_norm": lambda: mlp(
        nn.EmbeddingBag(5, CLASSES, max_norm=1e9)
    ),
    "model = 'Sequential': .*1 is a BatchNorm2d .*group_norm": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, CLASSES)
    ),
}


@pytest.mark.parametrize("said", MIXING)
@pytest.mark.parametrize("backend", ["auto", "layerwise", "vmap", "loop"])
def test_a_module_that_mixes_samples_is_refused_where_they_are_clipped(said, backend):
    """Also one that writes to its own parameters, as no noise hides that."""
    with pytest.raises(ConfigError, match=said) as error:
        choose_backend(MIXING[said](), Sgd(), form(SHAPE), backend, clip=1.0)
    assert "expected a module that mixes no samples" in str(error.value)


def test_a_module_that_mixes_samples_by_its_gradients_is_clipped_one_sample_at_a_time():
    assert choose_backend(centred(), Sgd(), form(SHAPE), clip=1.0) in ("vmap", "loop")


@pytest.mark.parametrize(
    "backend,name",
    [
        pytest.param("convolutional", "pooled", marks=needs),
        *(("fused", "softmax"), ("fused", "mlp"), ("vmap", "residual")),
        *(("layerwise", "channels last"), ("layerwise", "in place")),
    ],
)
@pytest.mark.parametrize("fault", ["a norm too small", "a bound of the mean gradient"])
def test_a_backend_that_clips_slightly_wrong_is_noticed(backend, name, fault, monkeypatch):
    right = ghost_clipping.clip_factors
    wrong = {
        "a norm too small": lambda norms, bound: right(0.97 * norms, bound),
        "a bound of the mean gradient": lambda norms, bound: right(norms * 0 + norms.mean(), bound),
    }[fault]
    assert backend_check.mismatch(made(name), Sgd(), form(SHAPE), backend, 1.0) is None
    for module in (convolutional, ghost_clipping, fused, vmap):
        monkeypatch.setattr(module, "clip_factors", wrong)
    assert "off by" in backend_check.mismatch(made(name), Sgd(), form(SHAPE), backend, 1.0)


def timed(module, local, seconds, steps=1e6):
    """Step times that were measured, by backend."""
    times = StepTimes(module, local, form(SHAPE), None, "float32", Workload(8, 20, steps))
    times.of = lambda backend, at_most=0.0: seconds[backend]
    return times


@pytest.mark.parametrize(
    "seconds,steps,taken",
    [
        ({"vmap": 2e-3, "loop": 1e-3}, 1e6, "loop"),
        ({"vmap": 1e-3, "loop": 2e-3}, 1e6, "vmap"),
        ({"vmap": 1e-3, "loop": 0.95e-3}, 1e6, "vmap"),  # a tenth is within the noise
        ({"vmap": 2e-3, "loop": 1e-3}, 100, "vmap"),  # a run of 0.2 s
    ],
)
def test_the_fastest_backend_is_taken_where_the_run_is_worth_it(seconds, steps, taken, caplog):
    module, local = made("residual"), Sgd()
    with caplog.at_level(logging.INFO, "raydpfl"):
        times = timed(module, local, seconds, steps)
        assert choose_backend(module, local, form(SHAPE), times=times) == taken
    assert ("the fastest here: ms a step of a client: vmap" in caplog.text) == (steps > 100)


def test_a_backend_that_does_not_fit_is_not_timed():
    module = OTHERS["batch norm"]()
    assert choose_backend(module, Sgd(), form(SHAPE), times=timed(module, Sgd(), {})) == "loop"


class Slow(nn.Linear):
    """Takes 20 ms a forward pass, however many clients it has."""

    def forward(self, x):
        began = time.thread_time()
        while time.thread_time() - began < 0.02:
            pass
        return super().forward(x)


@pytest.mark.parametrize(
    "local,clip", [(Sgd(), None), (Sgd(epochs=2), None), (Adam(batch=4), 1.0), (Scaffold(), None)]
)
def test_a_step_is_timed_by_what_it_takes(local, clip):
    module = mlp(Slow(72, CLASSES))
    times = StepTimes(module, local, form(SHAPE), clip, "float32", Workload(10, 20, 1.0))
    assert times.of("loop") >= (0.02 if clip is None else 0.08)
    assert times.of("vmap") < times.of("loop")  # several clients at once


def test_a_step_that_raises_is_never_the_fastest():
    local = Trained()
    times = StepTimes(made("mlp"), local, form(SHAPE), None, "float32", Workload(10, 20, 1.0))
    assert times.of("loop") == math.inf
    module = made("residual")
    for first, other in ((math.inf, 1e-3), (1e-3, math.inf), (math.inf, math.inf)):
        times = timed(module, Sgd(), {"vmap": first, "loop": other})
        taken = choose_backend(module, Sgd(), form(SHAPE), times=times)
        assert taken == ("loop" if other < first else "vmap")


def test_steps_much_slower_than_those_of_another_backend_are_timed_once(monkeypatch):
    runs = []

    def timed(self, trainer, clients):
        runs.append(clients)
        return 1.0

    monkeypatch.setattr(StepTimes, "_run", timed)
    rest = (made("residual"), Sgd(), form(SHAPE), None, "float32", Workload(10, 20, 1.0))
    assert StepTimes(*rest).of("vmap", best_seconds=0.1) == 1.0 and runs == [3]
    assert StepTimes(*rest).of("vmap", best_seconds=0.5) == 1.0 and runs == [3, 3, 3]
