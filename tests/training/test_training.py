"""Training beyond plain SGD: epochs, schedules, Adam, SAM, user loops; each against torch's own."""

import copy
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import experiment, form, messages, refusal
from plain_loop import CLIENTS, DRAWS, SHAPE, SIZES, drawn, made, rows, train

from raydpfl import models, run
from raydpfl.check import check, render
from raydpfl.core.prng import Purpose, torch_stream
from raydpfl.methods.local import Local, Sgd
from raydpfl.privacy import LocalSteps, calibrate_local_steps, report_of
from raydpfl.training.backend_choice import choose_backend

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("backend", ["fused", "vmap", "loop"])
def test_a_client_that_is_done_reads_no_row_that_is_in_none_of_its_batches(backend):
    module = made("mlp")
    local = Sgd(lr=0.1, epochs=0.6, batch=4)
    sizes = np.array([13, 5, 13, 0, 13])
    assert local.step_counts(sizes).tolist() == [2, 1, 2, 0, 2]
    x, y = rows(sizes=[13] * 5)
    before = train(backend, module, local, x, y, sizes)
    (idle,) = set(range(5)) - set(drawn(local, 1, sizes)[0].tolist())
    x[1, idle] = torch.nan
    after = train(backend, module, local, x, y, sizes)
    assert all(torch.equal(before[slot][0], after[slot][0]) for slot in before)


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
    local = cls(lr=0.02, lr_decay=0.5)
    x, y = rows()
    given = x.nan_to_num(), y.clone()
    assert choose_backend(module, local, form=form(SHAPE)) == "loop"
    got = train("loop", module, local, x, y)
    assert torch.equal(x.nan_to_num(), given[0])
    assert torch.equal(y, given[1])
    for slot, (delta, loss) in got.items():
        own = copy.deepcopy(module)
        key = {"t": 2, "client": CLIENTS[slot], "draw": DRAWS[slot]}
        generator = torch_stream(4, Purpose.MODULE, **key)
        size = SIZES[slot]
        before = F.cross_entropy(own(x[slot, :size]), y[slot, :size]).item()
        Mine(lr=0.005).train(own, x[slot, :size], y[slot, :size], generator)
        assert torch.equal(delta, models.flatten(own) - models.flatten(module))
        assert loss == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
def test_a_user_defined_loop_fulfils_the_contract_of_its_family():
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


# --- what is spent ---


@pytest.mark.parametrize("sampling", ["fresh", "epochs"])
def test_a_clients_epsilon_is_that_of_a_run_where_all_make_its_steps(sampling):
    samples = np.array([40, 100, 100, 60])
    steps = np.array([8, 20, 5, 12])
    counts = [2, 1, 3, 2]
    what: dict[str, Any] = {"samples": samples, "batch": 10, "bound": 1.0, "delta": 1e-3}
    what |= {"stds": np.array([0.4, 0.2, 0.2, 0.3]), "sampling": sampling}
    own = LocalSteps(steps=steps, **what)
    named = {each.accountant for each in report_of(own).guarantees(counts)}
    names = named & {"pld", "rdp", "Xu 2026", "Chen 2024"}
    assert {"pld", "rdp"} < names
    for k, count in enumerate(steps.tolist()):
        same = LocalSteps(steps=count, **what)
        costs = [report_of(each, ("pld", "paper")) for each in (own, same)]
        for name in names:
            assert costs[0].epsilons(name, counts)[k] == costs[1].epsilons(name, counts)[k]
        one, other = (each.client_table(counts)[k] for each in costs)
        assert one == other
        assert own.event(k) == same.event(k)
    assert own.digest() != LocalSteps(steps=steps + 1, **what).digest()
    report = report_of(own, ["pld"])
    curves = report.curves([np.repeat(np.arange(4), counts)])
    assert curves["pld"][-1] == report.epsilons("pld", counts).max()


def test_noise_is_calibrated_to_each_clients_own_steps():
    what: dict[str, Any] = {"batch": 10, "bound": 1.0, "delta": 1e-3, "budgets": 2.0}
    own = calibrate_local_steps(
        samples=[100, 100], steps=np.array([4, 16]), participations=[2, 2], **what
    )
    for k, count in enumerate([4, 16]):
        alone = calibrate_local_steps(samples=[100], steps=count, participations=[2], **what)
        assert own.stds[k] == pytest.approx(alone.stds[0], rel=2e-3)
        assert report_of(own).epsilons("pld", [2, 2])[k] == pytest.approx(2.0, rel=2e-3)


@pytest.mark.slow
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
    of_samples = [one for one in found.guarantees if one.unit == "sample"]
    worst = max(one.epsilon for one in of_samples if one.accountant == "rdp")
    assert worst == pytest.approx(4.0, rel=2e-3)


# --- schedules ---


def test_learning_rates_go_on_as_torchs_schedulers_have_them():
    parameter = torch.nn.Parameter(torch.zeros(1))

    def falling(t: int) -> float:
        return (t + 1) ** -0.5

    def inverse(t):
        return 3 / (3 + t)

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
        ({"schedule": "inverse", "lr_period": 3}, lambda o: later.LambdaLR(o, inverse)),
        (
            {"schedule": "cosine", "lr_period": 6, "lr_last": 0.1},
            lambda o: later.CosineAnnealingLR(o, 6, eta_min=0.04),
        ),
    ):
        local = Sgd(lr=0.4, **values)
        assert [local.learning_rate(t) for t in range(7)] == pytest.approx(rates(make))


@pytest.mark.parametrize(("values", "field"), messages("local rules").items())
def test_what_is_wrong_or_would_not_be_read_is_refused_by_name(values, field):
    with refusal(begins=f"local.{field}: "):
        experiment(local={"kind": "sgd", **yaml.safe_load(f"{{{values}}}")})
