"""Products by oneDNN against torch's own, in value, gradient and bits."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from raydpfl import hardware
from raydpfl.local import products

pytestmark = pytest.mark.skipif(
    products.OPERATOR is None, reason="this torch has no oneDNN; products are torch's own"
)


@pytest.fixture(autouse=True)
def of_onednn(monkeypatch):
    """Whatever this processor's maker."""
    monkeypatch.setattr(products, "_dnnl", products.OPERATOR)


BIG = (64, 400, 300)
SMALL = (6, 40, 30)


def test_large_products_alone_go_to_onednn():
    assert products._pays(torch.zeros(BIG[:2]), BIG[2]) and not products._pays(
        torch.zeros(SMALL[:2]), SMALL[2]
    )
    assert not products._pays(torch.zeros(BIG[:2], dtype=torch.float64), BIG[2])


@pytest.mark.parametrize("shape", [BIG, SMALL])
@pytest.mark.parametrize("turned", ["neither", "first", "second", "both"])
def test_a_product_is_torchs_however_its_factors_lie(shape, turned):
    m, k, n = shape
    a = torch.randn(k, m).T if turned in ("first", "both") else torch.randn(m, k)
    b = torch.randn(n, k).T if turned in ("second", "both") else torch.randn(k, n)
    torch.testing.assert_close(
        products.product(a, b), (a.double() @ b.double()).float(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("shape", [BIG, SMALL])
@pytest.mark.parametrize("beta", [0.0, 0.9, 1.0])
def test_a_product_is_added_in_place(shape, beta):
    m, k, n = shape
    a = torch.randn(m, k)
    b = torch.randn(k, n)
    to = torch.full((m, n), torch.nan) if beta == 0 else torch.randn(m, n)
    expected = -0.1 * (a.double() @ b.double()) + (beta * to.double() if beta else 0)
    products.add_product_(to, a, b, beta=beta, alpha=-0.1)
    torch.testing.assert_close(to, expected.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("maker", "library"), [("GenuineIntel", "torch"), ("AuthenticAMD", "oneDNN")]
)
def test_a_processor_of_intels_takes_torchs_own(maker, library, monkeypatch):
    """As it is chosen where the module is imported."""
    monkeypatch.setattr(hardware, "maker", lambda: maker)
    anew = importlib.util.spec_from_file_location("products_anew", products.__file__)
    module = importlib.util.module_from_spec(anew)
    anew.loader.exec_module(module)
    assert module.library == library


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_gives_what_it_gave_and_so_do_its_gradients(bias, dimensions):
    rows, inputs, outputs = BIG
    plain = nn.Sequential(
        nn.Linear(inputs, outputs, bias=bias), nn.Tanh(), nn.Linear(outputs, 300, bias=bias)
    )
    fast = copy.deepcopy(plain)
    products.speed_up(fast)
    x = torch.randn(rows, inputs).reshape(*(rows,) if dimensions == 2 else (8, rows // 8), inputs)
    seen = []
    for module in (plain, fast):
        each = x.clone().requires_grad_()
        outputs = module(each)
        seen.append(
            [
                outputs.detach(),
                *torch.autograd.grad(outputs.square().mean(), [each, *module.parameters()]),
            ]
        )
    for ours, theirs in zip(*seen, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_with_inputs_only_nothing_goes_back_to_the_parameters():
    layer = nn.Linear(*BIG[1:])
    x = torch.randn(BIG[:2], requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    products.speed_up(layer, inputs_only=True)
    by_x, *by_parameters = torch.autograd.grad(
        layer(x).square().sum(), [x, *layer.parameters()], allow_unused=True
    )
    torch.testing.assert_close(by_x, expected, rtol=1e-4, atol=1e-3)
    assert by_parameters == [None, None]


class Penalised(nn.Module):
    """Gives the squared norm of its layer's gradient by the input."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(*BIG[1:])

    def forward(self, x):
        by_x = torch.autograd.grad(torch.tanh(self.layer(input=x)).sum(), x, create_graph=True)[0]
        return by_x.square().sum()


def test_a_gradient_of_a_gradient_is_torchs():
    plain = Penalised()
    x = torch.randn(BIG[:2], requires_grad=True)
    expected = torch.autograd.grad(plain(x), list(plain.parameters()))
    products.speed_up(plain)
    for ours, theirs in zip(
        torch.autograd.grad(plain(x), list(plain.parameters())), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_layer_works_under_torch_func_and_autocast_as_it_did():
    layer = nn.Linear(*BIG[1:])
    x = torch.randn(2, *BIG[:2])
    expected = torch.func.vmap(layer)(x)
    products.speed_up(layer)
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected, rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_a_class_of_the_users_own_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    module = nn.Sequential(Doubled(*BIG[1:]))
    x = torch.randn(BIG[:2])
    expected = module(x)
    products.speed_up(module)
    assert torch.equal(module(x), expected)


def test_bits_do_not_depend_on_where_factors_lie_in_memory():
    """A client's rows and weights are views into larger buffers, at any multiple of 4 bytes."""
    m, k, n = BIG
    a = torch.randn(m * k + 16)
    b = torch.randn(k * n + 16)
    factors = a[: m * k].view(m, k).clone(), b[: k * n].view(k, n).clone()
    expected = products.product(*factors)
    for offset in (1, 3, 8, 15):
        a[offset : offset + m * k] = factors[0].flatten()
        b[offset : offset + k * n] = factors[1].flatten()
        assert torch.equal(
            products.product(
                a[offset : offset + m * k].view(m, k), b[offset : offset + k * n].view(k, n)
            ),
            expected,
        )
