"""Models: their parameters, their initial values, and what cannot be trained here."""

import sys
import types

import numpy as np
import pytest
import torch
from conftest import form, messages, refusal
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raydpfl import models
from raydpfl.core.prng import Purpose, keyed_globals, torch_stream

GREY = (1, 28, 28)
COLOUR = (3, 32, 32)


def build(shape=GREY, classes=10, seed=0, **keys):
    task = "classification" if classes else "regression"
    model, samples = models.parse(keys), form(shape, classes, task)
    module = models.build(model, samples, seed)
    models.check_parameters(module, model, samples)
    return module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(6, 6)
        self.two = nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(self.one(x))


class Half(nn.Linear):
    def __init__(self):
        super().__init__(6, 6, dtype=torch.float64)

    def forward(self, x):
        return super().forward(x.double())


class Counting(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return super().forward(x)


class Own(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)


class Held(Own):
    """Holds its weight to a bound, in place."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.copy_(torch.renorm(self.weight, 2, 0, 4.0))
        return super().forward(x)


class Replaced(Own):
    """Puts another weight in the place of its own."""

    def forward(self, x):
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1e9)
        return super().forward(x)


class Floored(Own):
    """Holds its bias above a bound, in place."""

    def forward(self, x):
        self.bias.data.clamp_(min=-1.0)
        return super().forward(x)


class ClassInEvaluation(Own):
    def forward(self, x):
        scores = super().forward(x)
        return scores if self.training else scores.argmax(1)


SHARED = nn.Linear(6, 6)


class OwnModel(models.Model):
    kind: str
    width: int = 3

    def module(self, shape, classes):
        return nn.Sequential(nn.Linear(shape[0], self.width), nn.Linear(self.width, classes))


def frozen_first_layer() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 6))
    net[0].requires_grad_(False)
    return net


def fail() -> nn.Module:
    raise RuntimeError("no\nsuch thing")


def spectral() -> nn.Linear:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))


class Quantized(Own):
    """A base of small integers, which is not trained."""

    def __init__(self):
        super().__init__()
        base = torch.arange(36, dtype=torch.int8).view(6, 6)
        self.base = nn.Parameter(base, requires_grad=False)

    def forward(self, x):
        return super().forward(x @ self.base.float())


def normed() -> nn.Linear:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))


def orthogonal() -> nn.Linear:
    return nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))


def old_spectral() -> nn.Linear:
    return nn.utils.spectral_norm(nn.Linear(6, 6))


def linear(wide=6) -> nn.Linear:
    return nn.Linear(wide, 6)


def shared() -> nn.Linear:
    return SHARED


@pytest.fixture(autouse=True)
def user_module(monkeypatch):
    """The classes above, and torch's, importable as a user's package would be."""
    module = types.SimpleNamespace(**{**vars(nn), **globals()}, number=3)
    monkeypatch.setitem(sys.modules, "user_nets", module)


@pytest.mark.parametrize(
    ("kind", "shape", "count"),
    [
        ("softmax", GREY, 7_850),
        ("softmax", (60,), 610),
        ("linear", (200,), 2_000),
        ("softmax", (512,), 5_130),
        ("mlp", GREY, 159_010),
        ("cnn", GREY, 833_322),
        ("cnn", COLOUR, 1_079_882),
        ("dp_cnn", COLOUR, 550_570),
        ("alexnet", GREY, 3_348_490),
        ("alexnet", COLOUR, 3_349_066),
        ("mobilenet_v2", GREY, 2_236_106),
        ("resnet18", COLOUR, 11_173_962),
        ("cnn width=0.25", COLOUR, 67_898),
        ("dp_cnn width=0.25", COLOUR, 34_930),
        ("alexnet width=0.25", COLOUR, 211_738),
        ("mobilenet_v2 width=0.25", COLOUR, 250_922),
        ("resnet18 width=0.25", COLOUR, 701_466),
    ],
)
def test_parameter_counts_are_those_in_the_table(kind, shape, count):
    kind, _, width = kind.partition(" width=")
    module = build(shape, kind=kind, **({"width": float(width)} if width else {}))
    assert models.parameter_count(module) == len(models.flatten(module)) == count


NETS = ["cnn", "dp_cnn", "alexnet", "mobilenet_v2", "resnet18"]


def channels(module):
    """What each convolution and linear layer gives."""
    layers = [each for each in module.modules() if isinstance(each, (nn.Conv2d, nn.Linear))]
    return [layer.weight.shape[0] for layer in layers]


@pytest.mark.parametrize("kind", ["cnn", "dp_cnn", "alexnet", "resnet18"])
def test_a_narrow_net_has_its_share_of_every_hidden_layer(kind):
    full = channels(build(COLOUR, kind=kind))
    quarter = channels(build(COLOUR, kind=kind, width=0.25))
    assert quarter == [*(each // 4 for each in full[:-1]), 10]
    double = models.parameter_count(build(COLOUR, kind=kind, width=0.5))
    # weights between hidden layers are as the square of the width
    assert 3.9 < models.parameter_count(build(COLOUR, kind=kind)) / double < 4


@pytest.mark.parametrize("width", [0.25, 0.5, 1, 1.4])
def test_mobilenet_is_as_wide_as_torchvisions_of_that_width(width):
    from torchvision.models import mobilenet_v2

    theirs = mobilenet_v2(num_classes=7, width_mult=width)
    ours = build(COLOUR, 7, kind="mobilenet_v2", width=width)
    assert channels(ours) == channels(theirs)
    assert models.parameter_count(ours) == models.parameter_count(theirs)


def test_resnet18_is_torchvisions_but_for_the_first_convolution():
    from torchvision.models import resnet18

    with keyed_globals(5):
        torch.set_rng_state(torch_stream(5, Purpose.MODEL).get_state())
        theirs = resnet18(num_classes=10)
    ours = build(COLOUR, kind="resnet18", seed=5)
    less = 64 * 3 * (7 * 7 - 3 * 3)
    assert models.parameter_count(ours) == models.parameter_count(theirs) - less
    same = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert name == "conv1.weight" or torch.equal(parameter, same[name])


def test_a_narrow_resnet_is_drawn_as_torchvision_draws_it():
    for name, part in build(COLOUR, kind="resnet18", width=0.5).named_modules():
        if isinstance(part, nn.Conv2d):
            fan = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
            # at least 864 draws: std of the ratio below 0.025
            assert part.weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.15), name


@pytest.mark.parametrize("kind", NETS)
def test_a_narrow_net_gives_finite_scores_that_depend_on_the_image(kind):
    module = build(GREY, kind=kind, width=0.125)
    scores = module(torch.rand(3, *GREY))
    assert scores.isfinite().all() and not torch.allclose(scores[0], scores[1])


@pytest.mark.slow
def test_a_narrow_resnet_has_as_many_channels_to_a_group():
    found = []
    for width in (1, 0.5, 0.125):
        parts = build(COLOUR, kind="resnet18", width=width).modules()
        norms = [part for part in parts if isinstance(part, nn.GroupNorm)]
        found.append([norm.num_channels // norm.num_groups for norm in norms])
    assert found[0] == found[1] == found[2] and {2, 4, 8, 16} == set(found[0])


@pytest.mark.parametrize("kind", NETS)
def test_width_1_is_what_was_before_there_was_a_width(kind):
    plain = models.parse({"kind": kind})
    assert plain == models.parse({"kind": kind, "width": 1}) and "width" not in plain.meaning()
    assert models.parse({"kind": kind, "width": 0.5}).meaning()["width"] == 0.5


@pytest.mark.parametrize("kind", ["softmax", "mlp", "cnn", "dp_cnn", "alexnet", "mobilenet_v2"])
def test_initial_parameters_depend_on_the_seed_alone(kind):
    torch.manual_seed(1)
    one = models.flatten(build(kind=kind, seed=7))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    same = models.flatten(build(kind=kind, seed=7))
    other = models.flatten(build(kind=kind, seed=7 + (1 << 32)))
    # seeds that agree in their low 32 bits are different seeds
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_initial_parameters_are_drawn_as_torch_draws_them():
    weight = models.flatten(build(kind="softmax"))
    assert weight.abs().max() <= 1 / 28  # U(-1/sqrt(784), 1/sqrt(784)), of std 1/sqrt(3 * 784)
    # 7850 draws: std of this ratio 0.005, 6 std
    assert weight.std().item() == pytest.approx(1 / (3 * 784) ** 0.5, rel=0.03)


def test_a_linear_model_starts_where_it_is_told():
    start, again = (
        models.flatten(build((300,), 1, kind="linear", start=-2, spread=0.2, seed=5))
        for _ in range(2)
    )
    # The least and greatest of 300 draws of U(0, 1) are within 0.05 of its ends but for a
    # probability below 5e-7.
    assert start.min() >= -2 and start.max() <= -1.8 and start.min() < -1.99 and start.max() > -1.81
    assert torch.equal(start, again)
    assert (models.flatten(build((7,), 1, kind="linear", start=0.3, bias=True)) == 0.3).all()
    assert (models.flatten(build((7,), 1, kind="linear")) == 0).all()


def test_models_for_regression_have_one_output_and_a_classifier_is_refused():
    for keys in ({"kind": "linear"}, {"kind": "mlp", "hidden": 3}, {"kind": "user_nets:OwnModel"}):
        assert build((6,), 0, **keys)(torch.rand(5, 6)).shape == (5, 1)
    with refusal(r"model.kind = 'softmax': expected linear, mlp or another that is no classifier"):
        build((6,), 0, kind="softmax")
    with refusal(r"a module that returns \[batch, 1\] for"):
        build((6,), 0, kind="user_nets:Tied")


def test_flatten_and_load_are_inverses_and_copies():
    module = build(kind="cnn")
    flat = models.flatten(module)
    every = torch.cat([parameter.flatten() for parameter in module.parameters()])
    assert flat.dtype == torch.float32 and torch.equal(flat, every)
    models.load(module, flat + 1)
    assert torch.equal(models.flatten(module), flat + 1)
    models.flatten(module).zero_()
    assert torch.equal(models.flatten(module), flat + 1)
    with pytest.raises(ValueError, match=r"\[5\] numbers for 833322 parameters"):
        models.load(module, torch.zeros(5))


def test_the_flat_vector_does_not_depend_on_the_memory_layout():
    module = build(kind="cnn")
    flat = models.flatten(module)
    module.to(memory_format=torch.channels_last)
    assert torch.equal(models.flatten(module), flat)
    models.load(module, flat.flip(0))
    assert torch.equal(models.flatten(module), flat.flip(0))
    assert not module[3].weight.is_contiguous()


def test_pooling_before_the_activation_changes_nothing():
    module = build(kind="cnn")
    x = torch.rand(4, *GREY)
    order = (0, 2, 1, 3, 5, 4, *range(6, len(module)))
    assert torch.equal(module(x), nn.Sequential(*[module[index] for index in order])(x))


@pytest.mark.parametrize("stem", ["small", "imagenet"])
@pytest.mark.parametrize("kind", ["mobilenet_v2", "resnet18"])
def test_torchvision_nets_have_group_norm_and_no_buffers(kind, stem):
    module = build(GREY, 7, kind=kind, stem=stem)
    assert not any(isinstance(layer, _BatchNorm) for layer in module.modules())
    assert any(isinstance(layer, nn.GroupNorm) for layer in module.modules())
    assert not [*module.buffers()]


@pytest.mark.slow
def test_a_small_stem_keeps_the_resolution():
    sizes = {}
    for stem in ("small", "imagenet"):
        module = build(COLOUR, kind="resnet18", stem=stem)
        module.layer4.register_forward_hook(
            lambda layer, x, y, stem=stem: sizes.update({stem: tuple(y.shape[2:])})
        )
        module(torch.rand(1, *COLOUR))
    assert sizes == {"small": (4, 4), "imagenet": (1, 1)}


def test_group_norm_replaces_every_batch_norm_at_any_depth_and_keeps_its_affine_part():
    net = nn.Sequential(
        nn.BatchNorm2d(48),
        nn.Sequential(nn.Conv2d(48, 7, 1), nn.BatchNorm2d(7, affine=False)),
        nn.Flatten(),
    )
    nn.init.constant_(net[0].weight, 3.0)
    converted = models.group_norm(net)
    assert converted is net and not any(isinstance(layer, _BatchNorm) for layer in net.modules())
    assert (net[0].num_groups, net[1][1].num_groups) == (16, 1)
    assert (net[0].weight == 3).all() and net[1][1].weight is None
    x = torch.rand(3, 48, 5, 5)
    assert torch.equal(net(x)[:1], net(x[:1]))  # a sample's output no longer depends on the others
    assert isinstance(models.group_norm(nn.BatchNorm1d(4)), nn.GroupNorm)


def test_hidden_layers_may_be_one_number_or_several():
    one, several = (models.parse({"kind": "mlp", "hidden": hidden}) for hidden in (50, [50]))
    assert one == several
    module = build((6,), 3, kind="mlp", hidden=[5, 4], activation="tanh")
    layers = "Flatten Linear Tanh Linear Tanh Linear"
    assert [type(layer).__name__ for layer in module] == layers.split()


def test_a_users_module_is_used_unchanged():
    module = build((6,), 6, kind="user_nets:Tied")
    # the shared weight once
    assert type(module) is Tied and models.parameter_count(module) == 36 + 6 + 6
    models.load(module, torch.arange(48.0))
    assert module.two.weight is module.one.weight
    assert torch.equal(models.flatten(module), torch.arange(48.0))


def test_a_factory_an_own_model_class_and_lazy_layers_are_taken():
    assert models.parameter_count(build((4,), 6, kind="user_nets:linear", args={"wide": 4})) == 30
    assert models.parameter_count(build((4,), 6, kind="user_nets.OwnModel", width=2)) == 28
    lazy = [
        models.flatten(build((4,), 6, kind="user_nets:LazyLinear", args={"out_features": 6}))
        for _ in range(2)
    ]
    assert torch.equal(*lazy) and len(lazy[0]) == 30


def test_a_function_that_returns_one_module_every_time_makes_a_copy_of_it():
    before = models.flatten(SHARED)
    models.load(build((6,), 6, kind="user_nets:shared"), torch.zeros(42))
    assert torch.equal(models.flatten(SHARED), before)
    assert torch.equal(models.flatten(build((6,), 6, kind="user_nets:shared")), before)


def test_only_trainable_parameters_are_sent():
    module = build((6,), 6, kind="user_nets:frozen_first_layer")
    assert models.parameter_count(module) == 36
    frozen = module[0].weight.clone()
    models.load(module, torch.zeros(36))
    assert torch.equal(module[0].weight, frozen)


def test_a_config_read_back_is_the_same_config():
    for keys in (
        {"kind": "mlp", "hidden": [3, 4]},
        {"kind": "user_nets:linear", "args": {"wide": 4}},
        {"kind": "user_nets:OwnModel", "width": 2},
    ):
        model = models.parse(keys)
        assert models.parse(model.model_dump(mode="json")) == model


@pytest.mark.parametrize(("keys", "message"), messages("models"))
def test_what_cannot_be_trained_is_refused_in_one_line(keys, message):
    with refusal(begins=message) as refused:
        build((6,), 6, **keys)
    if "BatchNorm" in str(refused.value):
        assert "raydpfl.models.group_norm" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "frozen"),
    [
        ("normed", []),
        ("orthogonal", []),
        ("old_spectral", ["weight_u", "weight_v"]),
        ("Quantized", []),
    ],
)
def test_layers_whose_weight_is_computed_are_trained(kind, frozen):
    module = build((6,), 6, kind=f"user_nets:{kind}", frozen=frozen)
    assert models.parameter_count(module) >= 42
    buffers = [buffer.clone() for buffer in module.buffers()]
    module.train()(torch.ones(2, 6))
    assert all(map(torch.equal, buffers, module.buffers()))


def test_images_that_are_too_small_are_refused():
    for kind, least in (("cnn", 4), ("dp_cnn", 8), ("alexnet", 12)):
        build((2, least, least + 1), 3, kind=kind)
        with refusal(f"{least} x {least} or more"):
            build((2, least - 1, least), 3, kind=kind)


@pytest.mark.slow
def test_the_nets_learn_to_tell_two_images_apart():
    x = torch.from_numpy(np.random.default_rng(0).random((2, *GREY), np.float32))
    y = torch.tensor([0, 1])
    for kind in ("softmax", "mlp", "cnn", "dp_cnn"):
        module = build(GREY, 2, kind=kind)
        optimiser = torch.optim.Adam(module.parameters(), 1e-3)
        for _ in range(30):
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(module(x), y)
            loss.backward()
            optimiser.step()
        assert loss < 0.3, kind
