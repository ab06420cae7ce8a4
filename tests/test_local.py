"""Local training: every way against a plain loop of nn.Module and torch.optim.SGD, and every client's bits against its neighbours'."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

from raydpfl import models
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, torch_stream
from raydpfl.local import FAMILY, Local, Sgd, Trainer, batches, linear, resolve
from raydpfl.local.linear import Fused, SampleSpace
from raydpfl.local.stack import NoStack, stack
from raydpfl.local.vmap import Vmap
from raydpfl.member import choose


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


SHAPE, CLASSES = (1, 6, 6), 4


class Residual(nn.Module):
    """No stack of linear layers: a branch, LayerNorm, a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(36, 12), nn.LayerNorm(12), nn.Linear(12, CLASSES)
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.last(h + self.scale * torch.tanh(self.norm(h)))


class Functional(nn.Module):
    """A stack of linear layers written in functions."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(36, 9), nn.Linear(9, 7, bias=False), nn.Linear(7, CLASSES)

    def forward(self, x):
        x = F.leaky_relu(self.a(x.view(x.size(0), -1)), 0.2)
        return self.c(torch.sigmoid(F.linear(x, self.b.weight)))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.square, self.leave = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.leave(torch.relu(self.square(torch.relu(self.square(self.enter(x.flatten(1)))))))


MODULES = {
    "softmax": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),
    "softmax without bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES, bias=False)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 17), nn.Tanh(), nn.Linear(17, CLASSES)),
    "deep mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 11, bias=False), nn.Sigmoid(), nn.Linear(11, CLASSES)),
    "functional": Functional,
    "residual": Residual,
    "tied": Tied,
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(54, CLASSES)
    ),
    "group norm": lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)),
}
STACKS = ["softmax", "softmax without bias", "mlp", "deep mlp", "functional"]
PAIRS = [
    *((way, name) for way in ("sample_space", "sample_space, picking rows", "fused") for name in STACKS),
    *(("vmap", name) for name in ("softmax", "deep mlp", "residual", "tied")),
    *(("loop", name) for name in MODULES),
]
LOCALS = {
    "plain": Sgd(steps=5, batch=6, lr=0.3),
    "decay": Sgd(steps=5, batch=6, lr=0.3, weight_decay=0.1),
    "momentum": Sgd(steps=6, batch=6, lr=0.1, momentum=0.9),
    "both": Sgd(steps=6, batch=6, lr=0.1, momentum=0.7, weight_decay=0.05, lr_decay=0.9),
    "full gradient": Sgd(steps=3, batch="full", lr=0.3, momentum=0.5, weight_decay=0.02),
    "epochs": Sgd(steps=7, batch=6, lr=0.2, sampling="epochs"),
}
SIZES = [13, 4, 9, 0, 6]  # one with fewer rows than a batch, one empty slot, one with exactly a batch
CLIENTS, DRAWS = [2, 5, 5, -1, 30], [0, 0, 1, 0, 0]


def made(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return MODULES[name]()


def rows(sizes=SIZES, n=13, seed=1, shape=SHAPE):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), n, *shape, generator=generator)
    y = torch.randint(0, CLASSES, (len(sizes), n), generator=generator)
    for slot, size in enumerate(sizes):  # whoever looks at padding will show it
        x[slot, size:], y[slot, size:] = float("nan"), -7
    return x, y


def reference(module: nn.Module, local: Sgd, x, y, batches_of_client, round: int):
    """One client by the book: its update, flat, and its mean loss."""
    module = copy.deepcopy(module).train()
    start = models.flatten(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=local.learning_rate(round), momentum=local.momentum, weight_decay=local.weight_decay)
    losses = []
    for batch in batches_of_client:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return models.flatten(module) - start, float(np.mean(losses))


def train(way, module, local, x, y, sizes=SIZES, clients=CLIENTS, draws=DRAWS, round=2, seed=4):
    way, _, picking = way.partition(", ")
    with pytest.MonkeyPatch.context() as patch:
        if picking:  # as in a lane too large to be worth taking whole, its updates formed one by one
            patch.setattr(linear, "PICK", -1)
            patch.setattr(linear, "CHUNK", 1)
        lane = Trainer(module, local, way=way, seed=seed).lane(models.flatten(module), x, y, sizes, round=round, clients=clients, draws=draws)
        return {slot: (delta, loss) for slot, delta, loss in lane}


@pytest.mark.parametrize("method", LOCALS)
@pytest.mark.parametrize("way,name", PAIRS)
def test_every_way_does_what_the_plain_loop_with_an_optimizer_does(way, name, method):
    module, local = made(name), LOCALS[method]
    x, y = rows()
    before = models.flatten(module)
    got = train(way, module, local, x, y)
    assert torch.equal(models.flatten(module), before)
    assert list(got) == [0, 1, 2, 4]
    index, batch_sizes = batches(4, 2, CLIENTS, DRAWS, SIZES, local)
    for slot, (delta, loss) in got.items():
        expected, expected_loss = reference(module, local, x[slot], y[slot], index[slot, :, : batch_sizes[slot]], 2)
        assert torch.linalg.vector_norm(delta - expected) <= 2e-5 * torch.linalg.vector_norm(expected)
        assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize("way,name", PAIRS)
def test_a_clients_bits_depend_on_no_other_slot_of_its_lane(way, name):
    for local in (LOCALS["both"], LOCALS["epochs"], LOCALS["full gradient"]):
        module = made(name)
        x, y = rows()
        together = train(way, module, local, x, y)
        again = train(way, module, local, x, y)
        for slot, (delta, loss) in together.items():
            assert torch.equal(delta, again[slot][0])
            alone_x, alone_y = torch.zeros_like(x), torch.zeros_like(y)
            alone_x[slot], alone_y[slot] = x[slot], y[slot]
            others_x, others_y = rows(sizes=[13] * 5, seed=9)
            others_x[slot], others_y[slot] = x[slot], y[slot]
            keep = np.arange(5) == slot
            alone = train(way, module, local, alone_x, alone_y, np.where(keep, SIZES, 0), np.where(keep, CLIENTS, -1))
            among = train(way, module, local, others_x, others_y, np.where(keep, SIZES, 13), np.where(keep, CLIENTS, np.arange(40, 45)), DRAWS)
            assert list(alone) == [slot]
            for other_delta, other_loss in (alone[slot], among[slot]):
                assert torch.equal(delta, other_delta) and loss == other_loss


@pytest.mark.parametrize("kind,n,batch,steps", [("softmax", 20, 10, 20), ("mlp", 31, 16, 6), ("mlp", 37, 16, 3)])
@pytest.mark.parametrize("way", ["sample_space", "fused", "vmap", "loop"])
def test_bits_hold_at_the_sizes_of_the_papers_and_wherever_the_rows_lie_in_memory(way, kind, n, batch, steps):
    module = models.build(models.parse({"kind": kind}), (1, 28, 28), 10, seed=0)
    local = Sgd(steps=steps, batch=batch, lr=0.1, weight_decay=1e-4)
    generator = np.random.default_rng(0)
    sizes = [n, n, n - 3, n, 5, n, n, n]
    y = generator.integers(0, 10, (8, n))
    bits: dict[int, set[bytes]] = {slot: set() for slot in range(8)}
    memory = np.empty(8 * n * 784 + 16, np.float32)
    for shift in (0, 1, 5, 12):
        x = memory[shift : shift + 8 * n * 784].reshape(8, n, 1, 28, 28)
        x[:] = np.random.default_rng(1).random(x.shape, dtype=np.float32)
        for slot, (delta, _) in train(way, module, local, x, y, sizes, range(8), [0] * 8).items():
            bits[slot].add(delta.numpy().tobytes())
    for slot in (0, 2, 7):
        clients = np.where(np.arange(8) == slot, np.arange(8), -1)
        bits[slot].add(train(way, module, local, x, y, np.where(clients < 0, 0, sizes), clients, [0] * 8)[slot][0].numpy().tobytes())
    assert all(len(each) == 1 for each in bits.values())


class Draws(nn.Module):
    """Dropout, a draw of its own, and a buffer that counts its calls and is part of the output."""

    def __init__(self):
        super().__init__()
        self.linear, self.dropout = nn.Linear(36, CLASSES), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.dropout(x.flatten(1))
        return self.linear(x + torch.randn(1)) * self.calls


def test_what_a_module_draws_and_keeps_is_the_clients_own():
    module, local = Draws(), Sgd(steps=4, batch=6, lr=0.1)
    x, y = rows()
    torch.manual_seed(0)
    state = torch.get_rng_state()
    together = train("loop", module, local, x, y)
    assert torch.equal(torch.get_rng_state(), state) and module.calls == 0
    torch.manual_seed(1)
    for slot, (delta, _) in together.items():
        alone = train("loop", module, local, x, y, np.where(np.arange(5) == slot, SIZES, 0), np.where(np.arange(5) == slot, CLIENTS, -1))
        assert torch.equal(alone[slot][0], delta)
    index, batch_sizes = batches(4, 2, CLIENTS, DRAWS, SIZES, local)
    with torch.random.fork_rng():
        torch.set_rng_state(torch_stream(4, Purpose.MODULE, round=2, client=5, draw=1).get_state())
        expected, _ = reference(module, local, x[2], y[2], index[2, :, : batch_sizes[2]], 2)
    torch.testing.assert_close(together[2][0], expected, rtol=1e-4, atol=1e-6)


def test_an_update_that_is_handed_out_is_not_written_to_again():
    module = made("mlp")
    x, y = rows()
    for way in ("sample_space", "fused", "vmap", "loop", "noop"):
        trainer = Trainer(module, LOCALS["plain"], way=way, seed=0)
        lane = dict(round=0, clients=CLIENTS, draws=DRAWS)
        held = [delta for _, delta, _ in trainer.lane(models.flatten(module), x, y, SIZES, **lane)]
        copies = [delta.clone() for delta in held]
        list(trainer.lane(models.flatten(module) * 2, x, y, SIZES, **lane))
        assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))


@pytest.mark.parametrize("way", ["sample_space", "fused", "vmap", "loop"])
def test_a_diverged_client_shows_it_and_spares_the_others(way):
    module = made("mlp")
    x, y = rows()
    healthy = train(way, module, LOCALS["plain"], x, y)
    x[2, 0] = float("inf")
    local = LOCALS["plain"].model_copy(update={"batch": "full"})
    assert not torch.isfinite(train(way, module, local, x, y)[2][0]).all()
    sick = train(way, module, LOCALS["plain"], x, y)
    assert all(torch.equal(healthy[slot][0], sick[slot][0]) for slot in (0, 1, 4))


@pytest.mark.parametrize("way", ["sample_space", "fused", "vmap", "loop", "noop"])
def test_a_client_without_rows_sends_nothing(way):
    module = made("mlp")
    x, y = rows()
    got = train(way, module, LOCALS["both"], x, y, clients=[2, 5, 5, 7, 30])
    assert list(got) == [0, 1, 2, 3, 4]
    assert torch.equal(got[3][0], torch.zeros(models.parameter_count(module))) and np.isnan(got[3][1])


@pytest.mark.parametrize("way", ["sample_space", "fused", "vmap", "loop"])
def test_a_label_that_the_model_does_not_know_is_an_error(way):
    x, y = rows()
    y[0, 3] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        train(way, made("mlp"), LOCALS["full gradient"], x, y)


# ----------------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
@pytest.mark.parametrize("batch", [1, 3, 8, "full"])
def test_a_clients_batches_depend_on_its_key_and_size_alone(sampling, batch):
    local = Sgd(steps=6, batch=batch, sampling=sampling)
    sizes, clients, draws = [5, 80, 1, 17, 0], [3, 4, 4, 1 << 40, 0], [0, 0, 1, 0, 0]
    index, batch_sizes = batches(7, 3, clients, draws, sizes, local, rows=100)
    for slot, size in enumerate(sizes):
        alone, alone_size = batches(7, 3, clients[slot : slot + 1], draws[slot : slot + 1], [size], local)
        assert batch_sizes[slot] == alone_size[0] == local.batch_size(size)
        assert np.array_equal(index[slot, :, : batch_sizes[slot]], alone[0, :, : alone_size[0]])
        assert not index[slot, :, batch_sizes[slot] :].any()
        assert index[slot].max() < max(size, 1)
    assert index.shape == (5, 6, 100 if batch == "full" else batch)
    if batch != "full":
        for name in ((8, 3, [4], [0]), (7, 4, [4], [0]), (7, 3, [5], [0]), (7, 3, [4], [1])):
            assert not np.array_equal(index[1], batches(*name, [80], local, rows=100)[0][0])


@pytest.mark.parametrize("n,b", [(6, 3), (40, 2)])  # the two ways of drawing: by rank and row by row
def test_every_subset_is_as_likely_as_another_and_steps_are_independent(n, b):
    """Chi-square over subsets, over pairs (row in step 0, row in step 1), and over first places; false-alarm rate 1e-4 each."""
    local = Sgd(steps=2, batch=b)
    index, _ = batches(0, 0, np.arange(20_000), np.zeros(20_000, int), np.full(20_000, n), local)
    subsets = {subset: k for k, subset in enumerate(combinations(range(n), b))}
    ordered = np.sort(index, axis=2)
    counts = np.bincount([subsets[tuple(subset)] for subset in ordered.reshape(-1, b).tolist()], minlength=len(subsets))
    assert stats.chisquare(counts).pvalue > 1e-4
    ranks = np.array([[min(3, 4 * subsets[tuple(subset)] // len(subsets)) for subset in pair] for pair in ordered.tolist()])
    assert stats.chi2_contingency(np.histogram2d(*ranks.T, bins=4)[0]).pvalue > 1e-4


def test_shuffled_epochs_show_each_row_once_before_any_twice():
    for n, b, steps in [(7, 3, 14), (10, 5, 5), (33, 8, 20)]:
        index, _ = batches(1, 0, [9], [0], [n], Sgd(steps=steps, batch=b, sampling="epochs"))
        seen = index[0].ravel()
        whole = len(seen) // n * n
        epochs = seen[:whole].reshape(-1, n)
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (len(epochs), 1)))
        assert len(np.unique(seen[whole:])) == len(seen) - whole
        assert len({tuple(epoch) for epoch in epochs.tolist()}) == len(epochs)


# ----------------------------------------------------------------------------------------------------- which way


def test_the_learning_rate_follows_its_schedule():
    assert Sgd(lr=0.2, lr_decay=0.5).learning_rate(3) == pytest.approx(0.025)
    assert Sgd(lr=0.2, schedule="inverse_sqrt").learning_rate(3) == pytest.approx(0.1)
    assert Sgd(lr=0.2).learning_rate(100) == 0.2


@pytest.mark.parametrize(
    "values,field",
    [
        ({"steps": 0}, "local.steps"),
        ({"batch": 0}, "local.batch"),
        ({"batch": "half"}, "local.batch"),
        ({"lr": -1}, "local.lr"),
        ({"lr": float("nan")}, "local.lr"),
        ({"momentum": 1.0}, "local.momentum"),
        ({"weight_decay": -0.1}, "local.weight_decay"),
        ({"lr_decay": 0.9, "schedule": "inverse_sqrt"}, "local.lr_decay"),
        ({"lr_deacy": 0.9}, "local.lr_deacy"),
    ],
)
def test_a_wrong_value_is_refused_by_name(values, field):
    with pytest.raises(ConfigError) as refused:
        choose("local", {"kind": "sgd", **values}, FAMILY, Local)
    assert refused.value.field.startswith(field) and "\n" not in str(refused.value)


def by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layers that `stack` found, one after another on the flat parameters."""
    a, flat = x.flatten(1), models.flatten(module)
    for layer in stack(module):
        weight, *bias = layer.views(flat)
        a = a @ weight.mT + (bias[0] if bias else 0)
        a = layer.activation.forward(a) if layer.activation else a
    return a


def hooked() -> nn.Module:
    module = made("mlp")
    module[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    return module


def frozen() -> nn.Module:
    module = made("mlp")
    module[1].weight.requires_grad_(False)
    return module


def tied_weights() -> nn.Module:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.ReLU(), nn.Linear(36, 36))
    module[3].weight = module[1].weight
    return module


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_of_linear_layers_is_found_however_it_is_written(name):
    module, x = made(name), torch.randn(3, *SHAPE)
    torch.testing.assert_close(by_hand(module, x), module(x))


def test_what_changes_nothing_does_not_hide_a_stack():
    for module in (nn.Linear(36, 4), nn.Sequential(nn.Flatten(), nn.Identity(), nn.Linear(36, 5), nn.Dropout(0.0), nn.LeakyReLU(), nn.Linear(5, 4))):
        x = torch.randn(3, 36)
        torch.testing.assert_close(by_hand(module, x), module(x))


OTHERS = {
    "tied": lambda: made("tied"),
    "tied weights": tied_weights,
    "residual": lambda: made("residual"),
    "convolution": lambda: made("cnn"),
    "hook": hooked,
    "frozen": frozen,
    "dropout": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.1), nn.Linear(8, 4)),
    "batch norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)),
    "normalised weights": lambda: nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(36, 4))),
    "activation first": lambda: nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Linear(36, 4)),
    "two activations": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Tanh(), nn.Linear(8, 4)),
    "softplus": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Softplus(), nn.Linear(8, 4)),
    "negative slope": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.LeakyReLU(-0.1), nn.Linear(8, 4)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of weight_norm
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_stack_is_not_taken_for_one_and_is_trained_right(kind):
    module = OTHERS[kind]()
    with pytest.raises(NoStack):
        stack(module)
    local = LOCALS["both"]
    x, y = rows(sizes=[13] * 5)
    way = resolve(module, local, 13, SHAPE)
    got = train(way, module, local, x, y, [13] * 5, range(5), [0] * 5)
    index, _ = batches(4, 2, range(5), [0] * 5, [13] * 5, local)
    if kind != "dropout":
        for slot, (delta, _) in got.items():
            expected, _ = reference(module, local, x[slot], y[slot], index[slot], 2)
            assert torch.linalg.vector_norm(delta - expected) <= 2e-5 * torch.linalg.vector_norm(expected)


class Mixing(nn.Module):
    """Looks like a flatten and a linear layer, but its view cuts each sample in two."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(18, 2)

    def forward(self, x):
        return self.linear(x.view(-1, 18)).view(-1, 4)


@pytest.mark.parametrize("module,way", [(Mixing(), "fused"), (OTHERS["dropout"](), "vmap"), (OTHERS["batch norm"](), "vmap")])
def test_a_way_that_would_train_a_module_wrongly_is_given_up_for_the_loop_and_says_so(module, way, caplog):
    with caplog.at_level(logging.WARNING, "raydpfl"):
        assert resolve(module, Sgd(steps=1), 20, SHAPE) == "loop"
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"clients are trained by the loop; {way}")
    with pytest.raises(ConfigError, match=rf"client\.way = '{way}': auto or loop"):
        resolve(module, Sgd(), 20, SHAPE, way)


@pytest.mark.parametrize("name", ["mlp", "residual"])
def test_a_step_that_is_slightly_wrong_is_noticed(name, monkeypatch):
    def skewed(self, parameters, lane):
        yield from ((slot, delta * 1.01, loss) for slot, delta, loss in self.straight(parameters, lane))

    for way in (Fused, SampleSpace, Vmap):
        monkeypatch.setattr(way, "straight", way.run, raising=False)
        monkeypatch.setattr(way, "run", skewed)
    assert resolve(made(name), Sgd(), 20, SHAPE) == "loop"


@pytest.mark.parametrize(
    "kind,shape,rows,local,way",
    [
        ("softmax", (1, 28, 28), 20, Sgd(steps=20, batch=10), "sample_space"),
        ("softmax", (1, 28, 28), 600, Sgd(steps=300, batch=10), "fused"),
        ("softmax", (1, 28, 28), 20, Sgd(steps=1, batch=10), "fused"),
        ("softmax", (60,), 20, Sgd(steps=20, batch=10), "sample_space"),
        ("mlp", (1, 28, 28), 31, Sgd(steps=32, batch=16), "sample_space"),
        ("mlp", (1, 28, 28), 31, Sgd(steps=32, batch="full"), "sample_space"),
        ("mlp", (1, 28, 28), 600, Sgd(steps=10, batch=64), "fused"),
        ("cnn", (1, 28, 28), 64, Sgd(), "loop"),
    ],
)
def test_the_way_follows_from_the_architecture_and_the_shapes(kind, shape, rows, local, way):
    module = models.build(models.parse({"kind": kind}), shape, 10, seed=0)
    assert resolve(module, local, rows, shape) == way
    assert resolve(module, local, rows, shape, "loop") == "loop"


def test_an_unknown_way_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"client\.way = 'lopo': auto or one of sample_space, fused, vmap, loop, noop"):
        resolve(made("mlp"), Sgd(), 20, SHAPE, "lopo")


HASHES = """
import sys, hashlib, numpy as np, torch
from raydpfl import models
from raydpfl.local import Sgd, Trainer, single_thread, tune_allocator
single_thread()
if sys.argv[1] == "tuned":
    tune_allocator()
    waste = [torch.rand(100_003) for _ in range(7)]
torch.manual_seed(int(sys.argv[2]))
for kind, ways in (("softmax", ("sample_space", "fused", "vmap")), ("mlp", ("sample_space", "fused", "vmap")), ("cnn", ("loop",))):
    module = models.build(models.parse({"kind": kind}), (1, 28, 28), 10, seed=0)
    generator = np.random.default_rng(0)
    x, y = generator.random((3, 13, 1, 28, 28), dtype=np.float32), generator.integers(0, 10, (3, 13))
    for way in ways:
        trainer = Trainer(module, Sgd(steps=3, batch=8, momentum=0.5), way=way, seed=1)
        lane = trainer.lane(models.flatten(module), x, y, [13, 7, 13], round=0, clients=[1, 2, 3], draws=[0, 0, 0])
        print(way, hashlib.sha256(b"".join(delta.numpy().tobytes() for _, delta, _ in lane)).hexdigest())
"""


def test_two_processes_give_the_same_bits():
    said = [
        subprocess.run([sys.executable, "-c", HASHES, *arguments], capture_output=True, text=True, check=True).stdout
        for arguments in (("plain", "1"), ("tuned", "2"))
    ]
    assert said[0] == said[1] and len(set(said[0].splitlines())) == 7
