"""What of a model is trained, what travels, and what stays with each client."""

import copy

import numpy as np
import pytest
import torch
from conftest import experiment, form, messages, refusal
from torch import nn

import raydpfl
from raydpfl import models
from raydpfl.check.runs import run_plan
from raydpfl.core.messages import LOCAL_PART, ChunkResult
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Shards
from raydpfl.errors import ClientError, ConfigError
from raydpfl.methods.local import Sgd
from raydpfl.simulation.client import personalization
from raydpfl.simulation.client_state import ClientStates
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches

NET = {"kind": "test_personal_models:normed"}


def normed() -> nn.Module:
    """A net with a BatchNorm, whose statistics are not those that it starts with by itself."""
    norm = nn.BatchNorm1d(12)
    with torch.no_grad():
        norm.running_mean.uniform_(-0.1, 0.1)
        norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 12), norm, nn.ReLU(), nn.Linear(12, 10))


def build(**keys) -> nn.Module:
    return models.build(models.parse({**NET, **keys}), form((1, 28, 28)), seed=3)


# --- frozen parts ---


@pytest.mark.slow
def test_what_is_frozen_does_not_travel_and_keeps_its_bits(tmp_path):
    frozen = ["1.*", "2.running_*"]
    result = raydpfl.run(experiment(model={**NET, "frozen": frozen}, rounds=2), out=tmp_path)
    before = build(frozen=frozen)
    assert result.summary["parameters"] == models.parameter_count(before) == 2 * 12 + 130
    after = raydpfl.load(tmp_path, trust_code=True).module.state_dict()
    same = {name for name, tensor in before.state_dict().items() if tensor.equal(after[name])}
    buffers = {"2.running_mean", "2.running_var", "2.num_batches_tracked"}
    assert same == {"1.weight", "1.bias"} | buffers


def test_a_batchnorm_with_frozen_statistics_keeps_samples_apart():
    module = build(frozen=["2.running_*"])
    x = form((1, 28, 28)).inputs(4, stream(0, Purpose.DATA))
    together = module.train()(x)
    assert torch.allclose(together, torch.cat([module.train()(each) for each in x.split(1)]))
    assert models.has_frozen_buffer(module[2]) and not models.has_frozen_buffer(module[1])
    # so that each sample's gradient can be clipped, as the loop does it
    assert choose_backend(module, Sgd(), form((1, 28, 28)), clip=1.0) == "layerwise"


# --- what stays with each client ---

SCORED = {"every": 1, "test": False, "validation": 0.2}
PLAIN = {
    "data": {"clients": 5, "partition": {"kind": "dominant-labels"}},
    "selection": {"kind": "full"},
    "bounding": {"kind": "none"},
    "noise": {"kind": "none"},
    "server": {"kind": "sgd"},
    "evaluate": SCORED,
    "rounds": 3,
}


def steps_by_hand(net, rows, drawn, lr, pull=lambda: 0.0) -> nn.Module:
    """Plain SGD of a net on x and y, by these batches."""
    x, y = (torch.tensor(values[0]) for values in rows)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for batch in drawn:
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(x[batch]), y[batch]) + pull()).backward()
        optimizer.step()
    return net


def start_of(plan: Plan) -> tuple[Shards, nn.Module]:
    """The clients' rows, and the model before the first round."""
    shards = Shards.open(plan.shards)
    e = plan.experiment
    return shards, models.build(e.model, shards.form(e.data.task), e.seed)


def by_hand(plan: Plan, own: str, rounds: int) -> tuple[torch.Tensor, list[nn.Module], list[float]]:
    """Federated averaging of all but the layers `own`, in a plain loop: the parameters that travel,
    the clients' models under these, and the norm of what each client last sent.
    """
    e = plan.experiment
    shards, start = start_of(plan)
    clients = [copy.deepcopy(start) for _ in range(len(shards.sizes))]
    kept = [name for name, _ in start.named_parameters() if not name.startswith(own)]
    shared = {name: start.get_parameter(name).detach().clone() for name in kept}
    norms = []
    for t in range(rounds):
        sent = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        norms = []
        for client, net in enumerate(clients):
            net.load_state_dict({**net.state_dict(), **shared})
            x, y, sizes = shards.chunk([client], int(shards.sizes[client]))
            drawn, _ = batches(e.seed, t, [client], [0], sizes, e.local)
            steps_by_hand(net.train(), (x, y), drawn[0], e.local.learning_rate(t))
            moved = {name: net.get_parameter(name).detach() - shared[name] for name in kept}
            norms.append(float(torch.cat([each.flatten() for each in moved.values()]).norm()))
            sent = {name: sent[name] + moved[name] for name in kept}
        shared = {name: shared[name] + sent[name] / len(clients) for name in kept}
    for net in clients:
        net.load_state_dict({**net.state_dict(), **shared})
    return torch.cat([tensor.flatten() for tensor in shared.values()]), clients, norms


def accuracy(plan: Plan, clients: list[nn.Module]) -> float:
    """Of the clients' models together, each on the rows that its client holds out."""
    shards = Shards.open(plan.shards)
    right = []
    first = 0
    for client, net in enumerate(clients):
        x, y = shards.client_batch(range(client, client + 1), first)
        first += len(y)
        right.append(net.eval()(torch.from_numpy(x)).argmax(1).eq(torch.from_numpy(y)))
    return float(torch.cat(right).double().mean())


@pytest.mark.parametrize(
    ("model", "own", "backend"),
    [
        ({"kind": "softmax"}, "none", "fused"),  # FedAvg
        ({**NET, "local": ["2.*"]}, "2.", "loop"),  # FedBN
        ({"kind": "mlp", "hidden": [8], "local": ["3.*"]}, "3.", "vmap"),
        ({"kind": "cnn", "width": 0.1, "local": ["9.*"]}, "9.", "convolutional"),
    ],
)
def test_clients_train_as_in_a_plain_loop_whatever_is_their_own(tmp_path, model, own, backend):
    client = {"backend": backend} if own == "none" else {}
    plan = resolve(experiment(**{**PLAIN, "model": model, "client": client}))
    assert plan.experiment.client.backend == backend
    run = run_plan(plan, tmp_path)
    shared, clients, norms = by_hand(plan, own, 3)
    assert plan.d == len(shared)
    torch.testing.assert_close(torch.from_numpy(run.state.model), shared, rtol=1e-4, atol=1e-6)
    # what is bounded and noised is what travels alone
    assert np.allclose(run.columns[-1]["norm"], norms, rtol=1e-4)
    split = models.ParameterSplit.of(clients[0])
    assert len(run.state.memory.own) == (0 if own == "none" else 5)
    for client, kept in run.state.memory.own.items():
        numbers = split.local_part(models.trained(clients[client])[None])[0]
        assert torch.allclose(numbers, torch.from_numpy(kept), atol=1e-4)
    row = run.record.rounds.arrow().to_pylist()[-1]
    assert row["validation_accuracy"] == pytest.approx(accuracy(plan, clients))


def test_own_parts_are_in_the_checkpoint_and_nowhere_else(tmp_path):
    model = {"kind": "mlp", "hidden": [8], "local": ["3.*"]}
    few = {"selection": {"kind": "uniform", "cohort": 2}, "rounds": 1}
    e = experiment(**{**PLAIN, **few, "model": model})
    result = raydpfl.run(e, out=tmp_path)
    before = models.build(e.model, form((1, 28, 28)), e.seed).state_dict()
    after = raydpfl.load(tmp_path, trust_code=True).module.state_dict()
    moved = {name for name, tensor in before.items() if not tensor.equal(after[name])}
    assert moved == {"1.weight", "1.bias"} and result.summary["parameters"] == 785 * 8
    with np.load(max((tmp_path / "checkpoints").glob("*.npz"))) as stored:
        # those of the two that took part
        assert stored["memory.own"].shape == (2, 90) and len(stored["members.own"]) == 2
        assert stored["model"].shape == (785 * 8,)
        first, last = stored["members.own"].tolist()
        part = torch.from_numpy(stored["memory.own"][1])
    own = raydpfl.load(tmp_path, client=last).module.state_dict()
    assert torch.equal(torch.cat([own["3.weight"].flatten(), own["3.bias"]]), part)
    assert own["1.weight"].equal(after["1.weight"])
    others = {*range(5)} - {first, last}
    whose = f"one of the 2 clients of .* with a model of its own \\({first}, {last}\\)"
    with pytest.raises(ConfigError, match=whose):
        raydpfl.load(tmp_path, client=others.pop())


def test_who_has_not_taken_part_is_not_scored(tmp_path):
    model = {"kind": "mlp", "hidden": [8], "local": ["3.*"]}
    nobody = {"kind": "poisson", "cohort": 1}
    scored = {**SCORED, "per_client": "accuracy"}
    e = experiment(**{**PLAIN, "selection": nobody, "evaluate": scored, "model": model})
    run = run_plan(resolve(e), tmp_path)
    table = run.record.tables["client_scores"].arrow().to_pylist()
    for t, row in enumerate(run.record.rounds.arrow().to_pylist()):
        took_part = set(np.concatenate([each["client"] for each in run.columns[: t + 1]]))
        known = {each["client"] for each in table if each["round"] == t and each["accuracy"]}
        assert known == took_part and (row["validation_accuracy"] is None) == (not took_part)


class Sick(nn.Module):
    """Of its own is a buffer that is put restarted in every pass, and no number for some inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(784, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + (torch.log(13.0 - x.flatten(1).sum(1).max() / 30) * 0 + 1)
        return self.layer(x.flatten(1)) * (1 + 0.1 * self.seen)


def test_an_own_part_that_is_no_number_is_its_clients_error(tmp_path):
    sick = {**PLAIN, "model": {"kind": "test_personal_models:Sick", "local": ["seen"]}}
    wild = {**PLAIN, "personal": {**DITTO, "lr": 1e30, "steps": 9}}
    for name, sections, message in (
        ("sick", sick, r"client \d+: its update has norm nan"),
        ("wild", wild, r"client \d: its personal model is not finite"),
    ):
        with pytest.raises(ClientError, match=message):
            run_plan(resolve(experiment(**sections)), tmp_path / name)
    drop = {"client": {"on_error": "drop"}}
    run = run_plan(resolve(experiment(**sick, **drop)), tmp_path / "sick drop")
    kept = np.sum([np.isfinite(columns["norm"]) for columns in run.columns], axis=0)
    assert 0 < kept.sum() < 15
    # what it had before the round, five steps of each that it was part of
    assert [float(run.state.memory.own[client][0]) for client in range(5)] == (5 * kept).tolist()
    plan = resolve(experiment(**wild, **drop))
    run = run_plan(plan, tmp_path / "wild drop")
    _, start = start_of(plan)
    assert all(np.array_equal(own, models.flatten(start)) for own in run.state.memory.own.values())
    assert (np.concatenate([columns["norm"] for columns in run.columns]) > 0).all()


def test_what_a_client_drawn_twice_keeps_is_the_mean(tmp_path):
    memory = ClientStates({}, {})
    columns = {"client": np.array([4, 4]), "draw": np.arange(2)}
    parts = np.array([[1.0, 3.0], [2.0, 5.0]], np.float32)
    for _ in range(2):
        memory.keep([ChunkResult(np.zeros(1), columns, {LOCAL_PART: parts})])
        assert memory.own[4].tolist() == [1.5, 4.0]


def test_what_travels_alone_is_bounded_and_noised(tmp_path):
    noised = {
        "selection": {"kind": "uniform", "cohort": 1},
        "bounding": {"kind": "clip", "bound": 0.05},
        "noise": {"kind": "gaussian", "multiplier": 2.0, "placement": "server"},
    }
    plan = resolve(experiment(**{**PLAIN, **noised, **OWN_HEAD}))
    run = run_plan(plan, tmp_path)
    _, start = start_of(plan)
    initial = models.ParameterSplit.of(start).local_part(models.trained(start)[None])[0].numpy()
    for total, added in zip(run.totals, run.server_noise, strict=True):
        assert total.shape == added.shape == (plan.d,)
        assert np.linalg.norm(total) == pytest.approx(0.05, rel=1e-6)  # all of it is what travels
        assert np.std(added) == pytest.approx(2.0 * 0.05, rel=0.1)
    # what stays is neither bounded nor noised
    moved = [np.linalg.norm(own - initial) for own in run.state.memory.own.values()]
    assert min(moved) > 0.05


def test_the_guarantee_says_what_stays_with_clients():
    few = {"selection": {"kind": "uniform", "cohort": 2}, "noise": {"kind": "gaussian", "std": 1.0}}
    bound = {"kind": "clip", "bound": 1.0}
    model = {"kind": "mlp", "hidden": [8], "local": ["3.*"]}
    plan = resolve(experiment(**{**PLAIN, **few, "bounding": bound, "model": model}))
    hidden, *known = plan.guarantees(3, {0: 3})
    said = " ".join(hidden.exclusions)
    assert "own part of the model (model.local: 3.*)" in said and "no epsilon covers it" in said
    # what a client sends depends on the rounds in which it took part before
    assert "hidden cohort amplifies privacy is proved" in said
    assert hidden.kind == "unproven" and {each.kind for each in known} == {"rigorous"}


# --- fine-tuning before evaluation ---

TUNE = {"kind": "sgd", "steps": 4, "batch": "full", "lr": 0.2}
TUNED = {**SCORED, "test": True, "per_client": "accuracy", "fine_tune": TUNE}


def tuned_by_hand(plan: Plan, net: nn.Module, client: int) -> nn.Module:
    """The net trained on all rows of a client."""
    shards, _ = start_of(plan)
    rule = plan.experiment.evaluate.fine_tune
    x, y, _ = shards.chunk([client], int(shards.sizes[client]))
    every = [slice(None)] * rule.steps
    return steps_by_hand(copy.deepcopy(net).train(), (x, y), every, rule.lr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"client": {"backend": "compiled"}},  # which the tuning of a softmax takes too
        {"model": {**NET, "local": ["2.*"]}, "evaluate": {**TUNED, "test": False}},
    ],
)
def test_scores_are_those_of_clients_that_fine_tune_in_a_plain_loop(tmp_path, sections):
    e = experiment(**{**PLAIN, "evaluate": TUNED, "rounds": 2, **sections})
    plan = resolve(e)
    run = run_plan(plan, tmp_path)
    nets = []
    _, start = start_of(plan)
    for client in range(5):
        models.load(start, torch.from_numpy(run.state.model))
        if client in run.state.memory.own:
            own = torch.from_numpy(run.state.memory.own[client])[None]
            every = models.ParameterSplit.of(start).whole(torch.from_numpy(run.state.model), own)
            models.set_trained(start, every[0])
        nets.append(tuned_by_hand(plan, start, client))
    row = run.record.rounds.arrow().to_pylist()[-1]
    # clients hold out as many rows each
    assert row["client_accuracy_mean"] == pytest.approx(accuracy(plan, nets))
    if "model" in sections:
        assert row["validation_accuracy"] == pytest.approx(accuracy(plan, nets))
    else:  # of the model itself, which nobody has trained further
        assert row["validation_accuracy"] < row["client_accuracy_mean"] - 0.05
        plain = resolve(experiment(**{**PLAIN, **sections, "rounds": 2}))
        plain = run_plan(plain, tmp_path / "plain")
        assert np.array_equal(run.state.model, plain.state.model)


# --- a model of each client's own, trained beside ---

DITTO = {"steps": 3, "batch": 8, "lr": 0.3, "proximal": 0.5}


def ditto_by_hand(plan: Plan, received: list[torch.Tensor], client: int) -> nn.Module:
    """The client's own model after it has received these, in a plain loop."""
    e = plan.experiment
    shards, net = start_of(plan)
    model = copy.deepcopy(net)
    x, y, sizes = shards.chunk([client], int(shards.sizes[client]))

    def pull() -> torch.Tensor:
        away = zip(net.parameters(), model.parameters(), strict=True)
        squares = sum((own - other.detach()).square().sum() for own, other in away)
        return e.personal.proximal / 2 * squares

    for t, flat in enumerate(received):
        models.load(model, flat)
        drawn, _ = batches(e.seed, t, [client], [personalization.PERSONAL_DRAW], sizes, e.personal)
        steps_by_hand(net, (x, y), drawn[0], e.personal.lr, pull)
    return net


@pytest.mark.slow
@pytest.mark.parametrize("sections", [{}, {"model": {"kind": "cnn", "width": 0.1}}])
def test_ditto_is_that_of_a_plain_loop_and_changes_nothing_that_is_sent(tmp_path, sections):
    scored = {**SCORED, "per_client": "accuracy"}
    e = experiment(**{**PLAIN, "evaluate": scored, **sections, "personal": DITTO})
    plan = resolve(e)
    plain = resolve(experiment(**{**PLAIN, "evaluate": scored, **sections}))
    _, start = start_of(plan)
    received = [models.flatten(start)]
    for t in range(1, 3):
        before = run_plan(plain, tmp_path / f"plain {t}", stop_round=t)
        received.append(torch.from_numpy(before.state.model))
    run = run_plan(plan, tmp_path / "run")
    without = run_plan(plain, tmp_path / "plain")
    assert np.array_equal(run.state.model, without.state.model) and not without.state.memory.own
    nets = [ditto_by_hand(plan, received, client) for client in range(5)]
    for client, net in enumerate(nets):
        own = torch.from_numpy(run.state.memory.own[client])
        assert torch.allclose(models.flatten(net), own, atol=1e-5)
    last, same = (each.record.rounds.arrow().to_pylist()[-1] for each in (run, without))
    assert last["client_accuracy_mean"] == pytest.approx(accuracy(plan, nets))
    assert last["validation_accuracy"] == same["validation_accuracy"]  # of the model itself


def test_what_ditto_keeps_is_named_and_costs_nothing():
    noised = {
        "bounding": {"kind": "clip", "bound": 1.0},
        "noise": {"kind": "gaussian", "multiplier": 1.0},
        "selection": {"kind": "uniform", "cohort": 2},
    }
    with_it, without = (
        resolve(experiment(**{**PLAIN, **noised, **more})).guarantees(3, {0: 3})
        for more in ({"personal": DITTO}, {})
    )
    assert [each.epsilon for each in with_it] == [each.epsilon for each in without]
    assert [each.kind for each in with_it] == [each.kind for each in without]
    more = {said for each in with_it for said in each.exclusions}
    (said,) = more - {said for each in without for said in each.exclusions}
    assert said.startswith("each client's own model (personal): it is not released")


OWN_HEAD = {"model": {"kind": "mlp", "hidden": [8], "local": ["3.*"]}, "evaluate": SCORED}


@pytest.mark.parametrize(("sections", "message"), messages("personal models"))
def test_what_has_no_meaning_is_refused_in_one_line(sections, message):
    with refusal(line=message):
        resolve(experiment(**{**PLAIN, **OWN_HEAD, **sections}))
