"""Local training beyond plain SGD: epochs, schedules within a round, Adam, SAM, and a whole loop of
a user's own; each against torch's own on a module.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import experiment
from test_local import CLIENTS, DRAWS, SHAPE, SIZES, form, made, put, rows, train
from test_rules import gradient_of

from raydpfl import models, run
from raydpfl.check import check, render
from raydpfl.core.prng import Purpose, normals, torch_stream
from raydpfl.errors import ConfigError
from raydpfl.methods.local import Adam, AdamW, Local, Sam, Sgd
from raydpfl.methods.schedules import Schedule
from raydpfl.privacy import LocalSteps, calibrate_local_steps, report_of
from raydpfl.training.backend_choice import resolve
from raydpfl.training.backends import lacking
from raydpfl.training.minibatches import batches
from raydpfl.training.trainer import Trainer

COSINE = Schedule(schedule="cosine", lr_period=3, lr_last=0.2, lr_warmup=1)
EPOCHS = {"epochs": 1.5, "batch": 4}
RULES = {
    "plain": Sgd(lr=0.3, **EPOCHS),
    "sgd": Sgd(lr=0.2, momentum=0.6, weight_decay=0.1, proximal=0.3, **EPOCHS),
    "within": Sgd(lr=0.2, momentum=0.6, within=COSINE, **EPOCHS),
    "shuffled": Sgd(lr=0.2, sampling="epochs", **EPOCHS),
    "full": Sgd(lr=0.2, epochs=2.5, batch="full", weight_decay=0.1),
    "adam": Adam(lr=0.03, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3, **EPOCHS),
    "adamw": AdamW(lr=0.03, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-3, within=COSINE, **EPOCHS),
    "sam": Sam(lr=0.2, rho=0.3, momentum=0.5, weight_decay=0.05, **EPOCHS),
}
STEPS = {"full": [3, 3, 3, 0, 3]}
BACKENDS = [
    ("compiled", "softmax"),
    ("compiled", "softmax without bias"),
    ("convolutional", "cnn"),
    ("fused", "softmax"),
    ("fused", "mlp"),
    ("vmap", "residual"),
    ("loop", "cnn"),
    ("loop", "mlp"),
]


pytestmark = pytest.mark.usefixtures("one_thread")


def able(backend: str, local: Local) -> bool:
    return lacking(backend, local, None) is None


PAIRS = [
    (backend, name, rule)
    for backend, name in BACKENDS
    for rule in RULES
    if able(backend, RULES[rule])
]


def optimizer_of(local: Local, module: torch.nn.Module, t: int) -> Any:
    """torch's own, with the settings of a rule."""
    lr = local.learning_rate(t)
    if isinstance(local, Sgd):
        kept = {"momentum": local.momentum, "weight_decay": local.weight_decay}
        return torch.optim.SGD(module.parameters(), lr, **kept)
    kind = torch.optim.AdamW if isinstance(local, AdamW) else torch.optim.Adam
    kept = {"betas": local.betas, "eps": local.eps, "weight_decay": local.weight_decay}
    return kind(module.parameters(), lr, **kept)


def cosine_of(optimizer: Any) -> Any:
    """torch's schedulers for `COSINE`."""
    lr = optimizer.param_groups[0]["lr"]
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0.2 * lr)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [1])


def by_the_book(local, module, x, y, index, t=2, clip=None, noise=None):
    """One client's update, flat, by torch.optim."""
    module = copy.deepcopy(module).train()
    start = models.flatten(module)
    parameters = list(module.parameters())
    sizes = [part.numel() for part in parameters]
    optimizer = optimizer_of(local, module, t)
    scheduler = cosine_of(optimizer) if local.within else None
    for k, batch in enumerate(index):
        if clip is None:
            gradient = gradient_of(module, x[batch], y[batch])
        else:
            samples = [gradient_of(module, x[row][None], y[row][None]) for row in batch]
            scaled = [one * min(1.0, clip / float(one.norm())) for one in samples]
            gradient = torch.stack(scaled).sum(0) / len(batch) + noise(k)
        if isinstance(local, Sam):
            now = models.flatten(module)
            models.load(module, now + local.rho * gradient / gradient.norm())
            gradient = gradient_of(module, x[batch], y[batch])
            models.load(module, now)
        pull = getattr(local, "proximal", 0.0) * (models.flatten(module) - start)
        for part, own in zip(parameters, (gradient + pull).split(sizes), strict=True):
            part.grad = own.view_as(part).clone()
        optimizer.step()
        if scheduler and k < 4:  # beyond its end torch's goes up again
            scheduler.step()
    return models.flatten(module) - start


def drawn(local, slot):
    index, batch_sizes = batches(4, 2, CLIENTS, DRAWS, SIZES, local)
    steps = local.step_counts(np.array(SIZES))
    return index[slot, : steps[slot], : batch_sizes[slot]]


@cache
def by_torch(name: str, rule: str) -> dict[int, torch.Tensor]:
    """The update of each client by the book, which every backend is compared with."""
    x, y = rows()
    local = RULES[rule]
    return {
        slot: by_the_book(local, made(name), x[slot], y[slot], drawn(local, slot))
        for slot in (0, 1, 2, 4)
    }


@pytest.mark.parametrize("backend,name,rule", PAIRS)
def test_unequal_clients_train_as_torch_has_them_trained(backend, name, rule):
    module = made(name)
    local = RULES[rule]
    x, y = rows()
    wanted = STEPS.get(rule, [5, 2, 4, 0, 3])
    assert local.step_counts(np.array(SIZES)).tolist() == wanted
    got = train(backend, module, local, x, y)
    assert list(got) == [0, 1, 2, 4]
    for slot, (delta, _) in got.items():
        expected = by_torch(name, rule)[slot]
        assert (delta - expected).norm() <= 1e-4 * expected.norm()


def test_the_loss_is_the_mean_over_a_clients_own_steps():
    module = made("mlp")
    local = Sgd(lr=1e-9, **EPOCHS)
    x, y = rows()
    for backend in ("fused", "vmap", "loop"):
        for slot, (_, loss) in train(backend, module, local, x, y).items():
            each = [
                F.cross_entropy(module(x[slot][b]), y[slot][b]).item() for b in drawn(local, slot)
            ]
            assert loss == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.parametrize("rule", ["plain", "sgd", "adam"])
@pytest.mark.parametrize("backend", ["fused", "vmap", "layerwise", "loop"])
def test_a_client_that_is_done_draws_no_more_noise_and_clips_no_more(backend, rule):
    module = made("mlp")
    local = RULES[rule]
    x, y = rows()
    d = models.parameter_count(module)
    clipped = np.zeros(5)
    trainer = Trainer(module, local, backend=backend, seed=4, clip=0.5)
    who = {"t": 2, "clients": CLIENTS, "draws": DRAWS}
    stds = np.full(5, 0.02)
    chunk = trainer.chunk(models.flatten(module), x, y, SIZES, stds=stds, clipped=clipped, **who)
    for slot, delta, _ in (one for block in chunk for one in block.clients()):

        def noise(k, slot=slot):
            key = {"t": 2, "client": CLIENTS[slot], "draw": DRAWS[slot], "step": k}
            return 0.02 * normals(4, Purpose.STEP_NOISE, d, **key)

        index = drawn(local, slot)
        expected = by_the_book(local, module, x[slot], y[slot], index, clip=0.5, noise=noise)
        assert (delta - expected).norm() <= 1e-4 * expected.norm()
        assert clipped[slot] == 1.0  # all gradients here are longer than 0.5


@pytest.mark.parametrize("backend,name,rule", PAIRS)
def test_bits_are_the_clients_own_whoever_makes_more_steps_beside_it(backend, name, rule):
    module = made(name)
    local = RULES[rule]
    x, y = rows()
    together = train(backend, module, local, x, y)
    others = rows(sizes=[13] * 5, seed=9)
    for slot, (delta, loss) in together.items():
        mine = np.arange(5) == slot
        chunk = put((x, y), others, slot)
        alone = train(backend, module, local, *chunk, np.where(mine, SIZES, 0))
        beside = train(
            backend, module, local, *chunk, np.where(mine, SIZES, 13), np.where(mine, CLIENTS, 40)
        )
        for other_delta, other_loss in (alone[slot], beside[slot]):
            assert torch.equal(delta, other_delta)
            assert loss == other_loss


@pytest.mark.parametrize("backend", ["fused", "vmap", "loop"])
def test_a_client_that_is_done_reads_no_row_that_is_in_none_of_its_batches(backend):
    module = made("mlp")
    local = Sgd(lr=0.1, epochs=0.6, batch=4)
    sizes = np.array([13, 5, 13, 0, 13])
    assert local.step_counts(sizes).tolist() == [2, 1, 2, 0, 2]
    x, y = rows(sizes=[13] * 5)
    before = train(backend, module, local, x, y, sizes)
    index, _ = batches(4, 2, CLIENTS, DRAWS, sizes, local)
    (idle,) = set(range(5)) - set(index[1, 0].tolist())
    x[1, idle] = torch.nan
    after = train(backend, module, local, x, y, sizes)
    assert all(torch.equal(before[slot][0], after[slot][0]) for slot in before)


@pytest.mark.parametrize("rule,backend", [("sgd", "fused"), ("adam", "fused"), ("sam", "vmap")])
def test_backends_that_cannot_do_what_is_asked_give_way(rule, backend):
    assert resolve(made("leaky mlp"), RULES[rule], form=form(SHAPE)) == backend
    if rule != "sgd":
        with pytest.raises(ConfigError, match=r"client\.backend.*compiled cannot do"):
            resolve(made("relu mlp"), RULES[rule], form=form(SHAPE), backend="compiled")


# --- a whole loop of one's own ---


class Mine(Local):
    """Adam with a cross-entropy that is smoothed, over shuffled epochs."""

    examples: ClassVar = ({"lr": 0.01, "passes": 2},)
    passes: int = 2

    def train(self, module, x, y, generator):
        optimizer = torch.optim.Adam(module.parameters(), lr=self.lr)
        loss_of = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
        for _ in range(self.passes):
            for batch in torch.randperm(len(x), generator=generator).split(4):
                optimizer.zero_grad()
                loss_of(module(x[batch]), y[batch]).backward()
                optimizer.step()


class Untidy(Mine):
    """Leaves behind whatever it can."""

    examples: ClassVar = ({"lr": 0.01},)

    def train(self, module, x, y, generator):
        super().train(module, x, y, generator)
        module.register_forward_hook(lambda *_: 1 / 0)
        x.zero_()
        y.zero_()
        for parameter in module.parameters():
            parameter.data = parameter.data.clone()
            parameter.grad = None
        module.eval()


class Replaced(Mine):
    """Trains other parameters than it was given."""

    def train(self, module, x, y, generator):
        for layer in module.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.weight = torch.nn.Parameter(layer.weight.detach().clone())
        super().train(module, x, y, generator)


def test_a_loop_that_trains_other_parameters_is_an_error():
    with pytest.raises(ValueError, match="other parameters in the place"):
        train("loop", made("mlp"), Replaced(lr=0.1), *rows())


class Both(Mine):
    def step(self, x, gradient, state, at):
        return x, state


@pytest.mark.parametrize("cls", [Mine, Untidy])
def test_a_loop_of_ones_own_is_run_client_by_client_on_a_module_of_its_own(cls):
    module = made("mlp")
    local = cls(lr=0.02)
    x, y = rows()
    given = x.nan_to_num(), y.clone()
    assert resolve(module, local, form=form(SHAPE)) == "loop"
    got = train("loop", module, local, x, y)
    assert torch.equal(x.nan_to_num(), given[0])
    assert torch.equal(y, given[1])
    for slot, (delta, loss) in got.items():
        own = copy.deepcopy(module)
        key = {"t": 2, "client": CLIENTS[slot], "draw": DRAWS[slot]}
        generator = torch_stream(4, Purpose.MODULE, **key)
        size = SIZES[slot]
        before = F.cross_entropy(own(x[slot, :size]), y[slot, :size]).item()
        Mine(lr=0.02).train(own, x[slot, :size], y[slot, :size], generator)
        assert torch.equal(delta, models.flatten(own) - models.flatten(module))
        assert loss == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
def test_a_loop_of_ones_own_keeps_the_promises_of_its_family():
    found = check(Mine)
    assert all(clause.kept for clause in found), render(found)
    assert any("by itself" in str(clause.finding) for clause in found)


class Wandering(Mine):
    """Draws from a generator of its own."""

    drawn: ClassVar = torch.Generator().manual_seed(1)

    def train(self, module, x, y, generator):
        super().train(module, x, y, self.drawn)


class Rebuilt(Mine):
    """Trains something else."""

    def train(self, module, x, y, generator):
        super().train(copy.deepcopy(module), x, y, generator)


@pytest.mark.slow
@pytest.mark.parametrize("cls,said", [(Wandering, "something else"), (Rebuilt, "as it was")])
def test_a_loop_that_lies_is_caught(cls, said):
    found = {clause.name: clause for clause in check(cls)}
    assert not found["training"].kept
    assert said in found["training"].finding


@pytest.mark.parametrize(
    "local,field",
    [
        ({"kind": f"{__name__}:Both"}, "local.kind"),
        ({"kind": "sgd", "epochs": 3, "steps": 2}, "local.epochs"),
        ({"kind": "scaffold", "epochs": 3}, "local.epochs"),
        ({"kind": "adam", "momentum": 0.9}, "local.momentum"),
        ({"kind": "adam", "betas": [0.9, 1]}, "local.betas.1"),
    ],
)
def test_what_nothing_would_read_is_refused_by_name(local, field):
    with pytest.raises(ConfigError) as refused:
        experiment(local=local)
    assert refused.value.field == field


@pytest.mark.parametrize("kind", ["sam", f"{__name__}:Mine"])
def test_gradients_of_single_samples_are_clipped_for_rules_that_take_one_alone(kind):
    with pytest.raises(ConfigError, match=r"bounding\.kind"):
        experiment(local={"kind": kind}, bounding={"kind": "per_sample_clip", "bound": 1.0})


def test_selection_by_what_noise_costs_needs_clients_with_as_many_steps_each():
    budgets = {"kind": "gaussian", "placement": "step", "delta": 1e-3}
    budgets["epsilon"] = {"kind": "uniform", "low": 1.0, "high": 9.0}
    with pytest.raises(ConfigError, match=r"local\.epochs = 1\.0: expected none.*privacy_aware"):
        experiment(
            selection={"kind": "privacy_aware", "cohort": 6},
            local={"kind": "sgd", "epochs": 1},
            bounding={"kind": "per_sample_clip", "bound": 1.0},
            noise=budgets,
        )


# --- what is spent ---


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_a_clients_epsilon_is_that_of_a_run_where_all_make_its_steps(sampling):
    samples = np.array([40, 100, 100, 60])
    steps = np.array([8, 20, 5, 12])
    counts = [2, 1, 3, 2]
    what: dict[str, Any] = {"samples": samples, "batch": 10, "bound": 1.0, "delta": 1e-3}
    what |= {"stds": np.array([0.4, 0.2, 0.2, 0.3]), "sampling": sampling}
    own = LocalSteps(steps=steps, **what)
    names = ("pld", "rdp", "Xu 2026", "Chen 2024")
    names = [name for name in names if name in {row for row in own_names(own, counts)}]
    assert {"pld", "rdp"} < set(names)
    for k, count in enumerate(steps.tolist()):
        same = LocalSteps(steps=count, **what)
        costs = [report_of(each, ("pld", "paper")) for each in (own, same)]
        for name in names:
            assert costs[0].epsilons(name, counts)[k] == costs[1].epsilons(name, counts)[k]
        one, other = (each.table(counts)[k] for each in costs)
        assert one == other
        assert own.event(k) == same.event(k)
    assert own.digest() != LocalSteps(steps=steps + 1, **what).digest()
    report = report_of(own, ["pld"])
    curves = report.curves([np.repeat(np.arange(4), counts)])
    assert curves["pld"][-1] == report.epsilons("pld", counts).max()


def own_names(steps: LocalSteps, counts: list[int]) -> list[str]:
    return [one.accountant for one in report_of(steps).guarantees(counts)]


def test_noise_is_calibrated_to_each_clients_own_steps():
    what: dict[str, Any] = {"batch": 10, "bound": 1.0, "delta": 1e-3, "budgets": 2.0}
    own = calibrate_local_steps(
        samples=[100, 100], steps=np.array([4, 16]), participations=[2, 2], **what
    )
    for k, count in enumerate([4, 16]):
        alone = calibrate_local_steps(samples=[100], steps=count, participations=[2], **what)
        assert own.stds[k] == pytest.approx(alone.stds[0], rel=2e-3)
        assert report_of(own).epsilons("pld", [2, 2])[k] == pytest.approx(2.0, rel=2e-3)


def test_a_run_by_epochs_accounts_for_each_clients_own_steps(tmp_path):
    found = run(
        experiment(
            data={"kind": "fashion_mnist_mini", "clients": 20, "sizes": {"kind": "spread"}},
            selection={"cohort": 8},
            local={"kind": "sgd", "epochs": 0.5, "batch": 10, "lr": 0.1},
            bounding={"kind": "per_sample_clip", "bound": 1.0},
            noise={"kind": "gaussian", "placement": "step", "epsilon": 4.0, "delta": 1e-3},
        ),
        tmp_path / "run",
    )
    worst = max(one.epsilon for one in found.guarantees if one.accountant == "rdp")
    assert worst == pytest.approx(4.0, rel=2e-3)


# --- schedules ---


def test_learning_rates_go_on_as_torchs_schedulers_have_them():
    parameter = torch.nn.Parameter(torch.zeros(1))

    def falling(t: int) -> float:
        return (t + 1) ** -0.5

    def rates(make) -> list[float]:
        optimizer = torch.optim.SGD([parameter], lr=0.4)
        scheduler = make(optimizer)
        found = []
        for _ in range(7):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    later = torch.optim.lr_scheduler
    for values, make in (
        ({"schedule": "constant"}, lambda o: later.ConstantLR(o, 1.0)),
        ({"lr_decay": 0.9}, lambda o: later.ExponentialLR(o, 0.9)),
        ({"schedule": "inverse_sqrt"}, lambda o: later.LambdaLR(o, falling)),
        (
            {"schedule": "cosine", "lr_period": 6, "lr_last": 0.1},
            lambda o: later.CosineAnnealingLR(o, 6, eta_min=0.04),
        ),
    ):
        local = Sgd(lr=0.4, **values)
        assert [local.learning_rate(t) for t in range(7)] == pytest.approx(rates(make))


@pytest.mark.parametrize(
    "values,field",
    [
        ({"schedule": "cosine"}, "local.lr_period"),
        ({"lr_period": 4}, "local.lr_period"),
        ({"lr_last": 0.5}, "local.lr_last"),
        ({"schedule": "constant", "lr_decay": 0.5}, "local.lr_decay"),
        ({"within": {"schedule": "cosine"}}, "local.within.lr_period"),
        ({"within": {"decay": 0.5}}, "local.within.decay"),
    ],
)
def test_a_schedule_that_does_not_fit_together_is_refused_by_name(values, field):
    with pytest.raises(ConfigError) as refused:
        experiment(local={"kind": "sgd", **values})
    assert refused.value.field == field
