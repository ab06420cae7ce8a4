"""One run, seen from outside: its directory, its guarantees, its ends."""

import hashlib
import json
import math
import subprocess
import sys
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import SMALL, experiment, start_coordinator

from raydpfl import Experiment, models, privacy, run
from raydpfl.cli import run_display
from raydpfl.core.messages import View
from raydpfl.data import prepare
from raydpfl.errors import ClientError, ConfigError, RunError
from raydpfl.experiment import overridden
from raydpfl.methods import bounding, noise
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.files import LOCK

SUMMARY = """
status rounds test_accuracy test_loss model_sha256 seconds clients_per_second peak_rss_mb
seed versions guarantees
"""
GUARANTEE = """
kind accountant unit relation observer sampling knows epsilon delta rho exclusions
conditions_failed
"""
FILES = """
config.yaml rounds.parquet clients.parquet ledger.jsonl summary.json model.safetensors
checkpoints tensorboard trackers.json
"""
STEP = {
    "bounding": {"kind": "per_sample_clip", "bound": 5.0},
    "noise": {"kind": "gaussian", "epsilon": 4.0, "delta": 1e-5},
}


@pytest.mark.slow
def test_a_run_directory_holds_all_that_others_rely_on(tmp_path):
    result = run(experiment(measure=["clients"], track=["tensorboard"]), tmp_path / "out")
    assert {path.name for path in result.out.iterdir()} == set(FILES.split())
    summary = json.loads((result.out / "summary.json").read_text())
    assert summary.keys() >= set(SUMMARY.split()) and summary["status"] == "completed"
    stated = set(GUARANTEE.split())
    assert all(guarantee.keys() == stated for guarantee in summary["guarantees"])
    flat = models.flatten(result.model).numpy()
    assert summary["model_sha256"] == hashlib.sha256(flat.astype("<f4").tobytes()).hexdigest()
    assert isinstance(summary["peak_rss_mb"], float)
    assert list((result.out / "tensorboard").glob("events.out.tfevents.*"))
    clients = pq.read_table(result.out / "clients.parquet")
    columns = ["round", "client", "norm", "factor", "clipped", "train_loss"]
    assert clients.num_rows == 4 * 20 and sorted(clients.column_names) == sorted(columns)
    norms = clients["norm"].to_numpy()
    factors = clients["factor"].to_numpy()
    assert np.all(norms * factors <= 1.0 + 1e-12)
    assert np.array_equal(clients["clipped"].to_numpy(), factors < 1.0)


@pytest.mark.slow
def test_tensorboard_shows_every_number_of_every_row(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(experiment(track=["tensorboard"]), tmp_path / "out")
    events = EventAccumulator(str(tmp_path / "out" / "tensorboard"))
    events.Reload()
    for name in ("train_loss", "test_accuracy", "epsilon_rdp", "cohort"):
        expected = [
            (row["round"], row[name]) for row in result.rounds.to_pylist() if row[name] is not None
        ]
        assert [(event.step, event.value) for event in events.Scalars(name)] == [
            (t, pytest.approx(value, rel=1e-6)) for t, value in expected
        ]


@pytest.mark.slow
def test_the_written_config_is_complete_and_gives_the_run_again(tmp_path):
    first = run(experiment(), tmp_path / "a")
    again = Experiment.from_yaml(first.out / "config.yaml")
    assert "auto" not in (again.client.chunk, again.client.backend)
    assert run(again, tmp_path / "b").summary["model_sha256"] == first.summary["model_sha256"]


def test_a_resumed_run_keeps_to_what_it_has_chosen(tmp_path):
    chosen = experiment(client={"actors": 0, "backend": "loop", "chunk": 3})
    run(chosen, tmp_path / "out", on_rows=lambda rows: rows[-1]["round"] == 1)
    # by itself it would choose another backend and another chunk
    left_open = experiment(client={"actors": 0, "backend": "auto", "chunk": "auto"})
    result = run(left_open, tmp_path / "out", resume=True)
    assert (result.experiment.client.backend, result.experiment.client.chunk) == ("loop", 3)


def test_every_row_has_the_epsilon_so_far_and_observers_are_reported_apart(tmp_path):
    result = run(experiment(privacy={"accountants": ["pld", "rdp", "paper"]}), tmp_path / "out")
    for name in ("pld", "rdp", "paper"):
        spent = result.rounds[f"epsilon_{name}"].to_pylist()
        assert spent == sorted(spent) and spent[0] > 0
        first = next(one for one in result.guarantees if one.accountant == name)
        assert spent[-1] == pytest.approx(first.epsilon, rel=1e-6)
    hidden, known, single = (one for one in result.guarantees if one.accountant == "pld")
    assert "cohort hidden" in str(hidden.sampling) and "cohort known" in str(known.sampling)
    observers = ("every aggregate", "every aggregate", "every single update")
    assert (hidden.observer, known.observer, single.observer) == observers
    assert hidden.epsilon < known.epsilon < single.epsilon


def test_noise_for_a_target_epsilon_spends_that_and_no_more(tmp_path):
    noise = {"kind": "gaussian", "epsilon": 6.0, "delta": 1e-4}
    result = run(experiment(noise=noise, privacy={"accountants": ["pld"]}), tmp_path / "out")
    assert 5.97 < result.guarantees[0].epsilon <= 6.0


def test_the_ledger_is_written_before_the_clients_are_asked(tmp_path, monkeypatch):
    coordinator = start_coordinator(tmp_path)
    seen = []
    collect = coordinator.collect

    def noted(t, cohort):
        seen.append((tmp_path / "ledger.jsonl").read_text().count("\n"))
        return collect(t, cohort)

    monkeypatch.setattr(coordinator, "collect", noted)
    for _ in range(3):
        coordinator.round()
    assert seen == [1, 2, 3]


def test_a_budget_stops_the_run_before_the_round_that_would_overspend(tmp_path):
    free = run(experiment(), tmp_path / "free")
    spent = free.rounds["epsilon_rdp"].to_pylist()
    budget = (spent[1] + spent[2]) / 2
    capped = experiment(privacy={"accountants": ["rdp"], "budget": budget})
    result = run(capped, tmp_path / "capped")
    assert result.summary["status"] == "budget" and result.summary["rounds"] == 2
    assert "budget" in result.summary["reason"]
    assert result.guarantees[0].epsilon == pytest.approx(spent[1])
    assert result.guarantees[0].epsilon <= budget
    assert len((result.out / "ledger.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_a_papers_epsilon_never_stands_by_itself(tmp_path):
    result = run(experiment(privacy={"accountants": ["paper"]}), tmp_path / "client")
    assert {guarantee.kind for guarantee in result.guarantees} == {"paper", "rigorous"}
    sections = {**STEP, "noise": {"kind": "gaussian", "std": 0.5, "delta": 1e-5}}
    result = run(experiment(**sections, privacy={"accountants": ["paper"]}), tmp_path / "step")
    assert {one.accountant for one in result.guarantees if one.kind == "rigorous"} == {"rdp"}
    assert "epsilon_rdp" in pq.read_table(tmp_path / "step" / "guarantees.parquet").column_names


@pytest.mark.slow
@pytest.mark.parametrize("delta,warned", [(0.019, False), (0.021, True)])  # of 50 clients
def test_a_delta_that_allows_someones_data_to_be_published_is_warned_of(
    delta, warned, tmp_path, caplog
):
    run(experiment(noise={"delta": delta}, rounds=1), tmp_path / "out")
    said = "is above 1/50: it would allow some client's data to be published outright"
    assert (said in caplog.text) == warned


def test_a_run_without_noise_says_that_it_is_not_private(tmp_path):
    result = run(experiment(noise={"kind": "none"}), tmp_path / "out")
    assert result.guarantees == []
    assert not [name for name in result.rounds.column_names if name.startswith("epsilon")]


@pytest.mark.slow
def test_the_adaptive_bound_of_a_round_sets_its_noise(tmp_path):
    adaptive = {"kind": "quantile_clip", "bound": 0.05, "lr": 1.0}
    result = run(experiment(bounding=adaptive, rounds=6), tmp_path / "out")
    bounds = result.rounds["bound"].to_numpy()
    stds = result.rounds["noise_std"].to_numpy()
    assert len(set(bounds)) == 6
    np.testing.assert_allclose(stds / bounds, 1.0 / math.sqrt(1 - 0.05), rtol=1e-12)
    plain = privacy.epsilon(resolve(experiment()).mechanism, "replace_one", 1e-5, 4, "rdp")
    # the count's share is inside z
    assert result.rounds["epsilon_rdp"].to_pylist()[3] == pytest.approx(plain, rel=1e-9)


@pytest.mark.slow
def test_both_scalings_of_001_agree_when_the_bound_is_scaled_too(tmp_path):
    """Bounding -Delta/lr at c and multiplying by lr again is bounding Delta at lr c."""
    base = {"noise": {"kind": "none"}, "server": {"kind": "sgd"}, "local": {"lr": 0.25}}
    found = []
    for keys in ({"bound": 0.05}, {"bound": 0.2, "scaling": "gradient"}):
        bounded = experiment(**base, bounding={"kind": "clip", **keys})
        found.append(models.flatten(run(bounded, tmp_path / str(len(found))).model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


class Fragile(torch.nn.Module):
    """A softmax that raises on one client's rows, NaN on another's (by a marked pixel)."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, x):
        if self.training and 90 < float(x.max()) < 100:
            raise ValueError("this row is cursed")
        return self.linear(x)


def cursed(tmp_path, overflow: bool, client: dict | None = None, **sections) -> Experiment:
    """6 natural clients of 3 rows: on 2 `Fragile` raises, on 4 it may overflow."""
    x = np.random.default_rng(0).normal(size=(18, 4)).astype(np.float32)
    who = np.repeat(np.arange(6), 3)
    x[7, 1] = 99.0
    x[13:15, 2] = 1e30 if overflow else 0.5
    columns = {f"x{j}": x[:, j] for j in range(4)}
    path = str(tmp_path / "cursed.parquet")
    pq.write_table(pa.table({**columns, "y": np.arange(18) % 2, "who": who}), path)
    named = {"x": list(columns), "y": "y", "client": "who", "partition": {"kind": "natural"}}
    usual = {
        "data": {"kind": "table", "train": path, "test": path, **named},
        "model": {"kind": f"{__name__}:Fragile"},
        "selection": {"kind": "full"},
        "local": {"kind": "sgd", "steps": 2, "batch": 3},
        "rounds": 2,
    }
    return experiment(**usual | sections, client={"chunk": 4, **(client or {})})


DROP = {"on_error": "drop"}


@pytest.mark.slow
@pytest.mark.parametrize("actors", [0, 2])
def test_a_client_that_raises_is_named_with_its_own_traceback(actors, tmp_path, request):
    if actors:
        request.getfixturevalue("shared_ray")
    with pytest.raises(ClientError, match="the training of client 2 in round 0") as caught:
        run(cursed(tmp_path, overflow=False, client={"actors": actors}), tmp_path / "out")
    said = str(caught.value)
    assert said.startswith(__file__) and "this row is cursed" in said and "in forward" in said
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


def test_clients_that_fail_can_be_dropped_and_are_written_down(tmp_path):
    result = run(cursed(tmp_path, overflow=True, client=DROP), tmp_path / "out")
    assert result.rounds["dropped"].to_pylist() == [2, 2]
    assert result.summary["status"] == "completed"
    lines = (tmp_path / "out" / "dropped.jsonl").read_text().splitlines()
    dropped = [json.loads(line) for line in lines]
    assert {(row["round"], row["client"]) for row in dropped} == {(0, 2), (0, 4), (1, 2), (1, 4)}
    assert any("this row is cursed" in row["detail"] for row in dropped)


def test_the_share_of_samples_clipped_leaves_out_clients_that_failed(tmp_path):
    bounding = {"kind": "per_sample_clip", "bound": 1e-6}
    changes = {"bounding": bounding, "noise": {"kind": "none"}, "measure": ["clients"]}
    result = run(cursed(tmp_path, overflow=True, client=DROP, **changes), tmp_path / "out")
    assert result.rounds["dropped"].to_pylist() == [2, 2]
    assert result.rounds["clipped"].to_pylist() == [1.0, 1.0]
    each = pq.read_table(result.out / "clients.parquet")
    np.testing.assert_array_equal(each["clipped"].to_numpy(), 2 * [1, 1, np.nan, 1, np.nan, 1])


def test_a_dropped_client_leaves_the_same_bits_on_ray(tmp_path, shared_ray):
    bits = set()
    for actors in (0, 2):
        dropping = cursed(tmp_path, overflow=True, client={**DROP, "actors": actors})
        bits.add(run(dropping, tmp_path / str(actors)).summary["model_sha256"])
    assert len(bits) == 1


def test_a_nan_in_an_update_is_the_clients_error_and_never_passes(tmp_path):
    healthy = cursed(tmp_path, overflow=True, model={"kind": "softmax"})
    with pytest.raises(ClientError, match=r"client 4: its update has norm nan in round 0"):
        run(healthy, tmp_path / "out")


ADAM = {"kind": "adam", "lr": 0.01, "beta1": 0.8}


LEFT_OUT = "{} leaves out what {} had of {}; give next to it what is to stay"


@pytest.mark.parametrize(
    ("overrides", "server", "left"),
    [
        (["server.kind=sgd"], {"kind": "sgd"}, "adam: lr=0.01, beta1=0.8"),
        # in whatever order
        (["server.lr=0.5", "server.kind=momentum"], {"kind": "momentum", "lr": 0.5}, "beta1=0.8"),
        (["server.kind=adam"], ADAM, ""),
        (["server.kind=adam", "server.beta1=0.7"], {**ADAM, "beta1": 0.7}, ""),
        (["server={kind: sgd}"], {"kind": "sgd"}, ""),  # a whole section
        (["server.kind=yogi", "server.lr=1", "server.beta1=0.8"], {"kind": "yogi", "lr": 1}, ""),
    ],
)
def test_another_kind_keeps_nothing_of_the_old_one_but_what_is_given_beside_it(
    overrides, server, left, caplog
):
    """A learning rate for Adam is none for the plain mean."""
    changed = Experiment.from_dict({**SMALL, "server": ADAM}, overrides).server
    if server["kind"] == "yogi":
        server = {**server, "beta1": 0.8}
    assert changed == Experiment.from_dict({**SMALL, "server": server}).server
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(left) and all(left in line for line in said)


def test_a_section_of_defaults_or_that_is_not_written_is_of_another_kind_too(caplog):
    whole = Experiment.from_dict({**SMALL, "server": {"kind": "adam"}}).to_dict()
    Experiment.from_dict(whole, ["server.kind=sgd"])
    assert not caplog.records  # all that it had were its own defaults
    assert Experiment.from_dict({}, ["selection.kind=full"]).selection.kind == "full"
    with pytest.raises(
        ConfigError, match=r"selection\.cohort = None: expected a value, as it has no default"
    ):
        Experiment.from_dict({}, ["selection.kind=poisson"])
    assert [record.getMessage() for record in caplog.records] == [
        LEFT_OUT.format(f"selection.kind={kind}", "selection", "uniform: cohort=30")
        for kind in ("full", "poisson")
    ]


def test_an_unknown_kind_is_what_is_complained_of(caplog):
    with pytest.raises(ConfigError, match=r"server\.kind = 'sdg': expected one of"):
        Experiment.from_dict({**SMALL, "server": ADAM}, ["server.kind=sdg"])
    assert not caplog.records


def test_a_member_of_the_users_own_starts_from_its_own_defaults(own_module):
    own_module(
        "own",
        "from raydpfl.methods.server import Server\nclass Plain(Server):\n    kind: str = ''\n",
    )
    server = Experiment.from_dict({**SMALL, "server": ADAM}, ["server.kind=own:Plain"]).server
    assert (server.kind, server.lr) == ("own:Plain", 1.0)
    model = {"kind": "mlp", "hidden": [9]}
    made = Experiment.from_dict({**SMALL, "model": model}, ["model.kind=torch.nn:Flatten"]).model
    assert made.args == {}


def test_several_kinds_to_try_keep_nothing_of_the_old_one_either():
    tree = overridden({**SMALL, "server": ADAM}, ["server.kind={grid: [adam, sgd]}"])
    assert tree["server"] == {"kind": {"grid": ["adam", "sgd"]}}
    tried = {"kind": {"grid": ["adam", "sgd"]}, "lr": 0.5}  # as the config itself has it
    assert overridden({**SMALL, "server": tried})["server"] == tried


def test_a_new_kind_of_a_section_within_a_section_leaves_all_of_the_old_one_behind():
    law = {"kind": "uniform", "high": 2.0, "public": 0.1}
    shards = {"kind": "shards", "per_client": 5}
    tree = experiment(
        data={"sizes": {"kind": "balanced"}, "partition": shards, "features": None},
        bounding={"kind": "per_sample_clip", "bound": 1.0},
        noise={"kind": "gaussian", "epsilon": law},
    ).to_dict()
    changes = [
        "data.partition.s=30",
        "data.partition.kind=similarity",
        "data.sizes.kind=power-law",
        "data.features.kind=pca",
        "data.features.components=9",
        "noise.epsilon.kind=constant",
        "noise.epsilon.epsilon=3",
    ]
    changed = Experiment.from_dict(tree, changes)
    assert (changed.data.partition.kind, changed.data.partition.s) == ("similarity", 30)
    assert changed.data.sizes.kind == "power-law" and changed.data.clients == 50
    assert (changed.data.features.kind, changed.data.features.components) == ("pca", 9)
    assert (changed.noise.epsilon.epsilon, changed.noise.epsilon.public) == (3, 0.0)
    # the outer one first, wherever it stands
    inner_first = ["data.partition.kind=iid", "data.kind=mnist", "data.clients=7"]
    changed = Experiment.from_dict(tree, inner_first).data
    assert (changed.kind, changed.clients, changed.partition.kind) == ("mnist", 7, "iid")
    features = Experiment.from_dict(tree, ["data.kind=synthetic", "data.clients=30"]).data.features
    assert features == 60  # null where features were a section


def test_progress_shows_the_epsilon_of_the_accountant_that_covers_the_run(tmp_path, typed):
    told = experiment(
        selection={"kind": "multinomial", "cohort": 10},
        noise={"kind": "gaussian", "epsilon": 6.0},
        privacy={"accountants": ["rdp", "pld"]},
    )
    (tmp_path / "run.yaml").write_text(told.to_yaml())
    code, said, _ = typed("run", tmp_path / "run.yaml", "--out", tmp_path / "out")
    lines = [line for line in said.splitlines() if line.startswith("round ")]
    assert code == 0 and "epsilon 6 " in lines[-1] and not any("inf" in line for line in lines)


@pytest.mark.slow
def test_columns_that_hold_nothing_have_the_dtypes_that_they_have_in_other_runs(tmp_path):
    every = ["bounding", "clients"]
    full = run(experiment(measure=every), tmp_path / "full")
    empty = run(experiment(**STEP, measure=every), tmp_path / "empty")
    for name in ("noise_std", "alpha_mean"):
        assert empty.rounds[name].null_count == empty.rounds.num_rows
    assert {field.name: str(field.type) for field in empty.rounds.schema} == {
        field.name: str(field.type) for field in full.rounds.schema
    }
    noise = {"kind": "gaussian", "std": 3.0, "delta": 1e-5}
    rdp = {"accountants": ["rdp"]}
    run(experiment(**{**STEP, "noise": noise}, privacy=rdp), tmp_path / "stated")
    promised = pq.read_schema(tmp_path / "empty" / "guarantees.parquet")
    table = pq.read_table(tmp_path / "stated" / "guarantees.parquet")
    assert table["epsilon_claimed"].null_count == table.num_rows
    assert not any(table["conditions_failed"].to_pylist())
    assert all(str(field.type) == str(promised.field(field.name).type) for field in table.schema)


@pytest.mark.slow
def test_clipping_of_samples_shows_its_bound_and_the_share_clipped_and_no_noise_multiplier(
    tmp_path,
):
    result = run(experiment(**STEP, measure=["clients"]), tmp_path / "out")
    clients = pq.read_table(result.out / "clients.parquet")
    for row in result.rounds.to_pylist():
        shares = clients["clipped"].to_numpy()[clients["round"].to_numpy() == row["round"]]
        assert row["bound"] == 5.0 and 0 < row["clipped"] < 1
        assert row["clipped"] == pytest.approx(shares.mean())
        # 5 steps of 10 samples
        np.testing.assert_allclose(shares * 50, np.round(shares * 50), rtol=0, atol=1e-9)
    # every client has its own: guarantees.parquet
    assert result.summary["noise_multiplier"] is None


@pytest.mark.parametrize(
    ("value", "said"), [(0.0421, "0.0421"), (1.25, "1.25"), (37.28, "37.3"), (3607.2, "3,607")]
)
def test_slow_clients_are_not_shown_as_none_per_second(value, said):
    assert run_display.rate({"clients_per_second": value}) == f"{said} clients/s"


HOLDER = """
import sys, time
from pathlib import Path
from raydpfl.storage.files import folder_lock

with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def holder(folder, seconds: float) -> subprocess.Popen:
    """A process that holds a run directory for so long."""
    arguments = [sys.executable, "-c", HOLDER, str(folder), str(seconds)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.mark.slow
def test_a_run_that_goes_on_has_no_summary_of_an_earlier_end(tmp_path):
    run(experiment(rounds=1), tmp_path)
    seen = []

    def look(rows):
        seen.extend((tmp_path / "summary.json").exists() for _ in rows)

    summary = run(experiment(rounds=3), tmp_path, resume=True, on_rows=look).summary
    assert seen == [False, False] and summary["rounds"] == 3
    assert json.loads((tmp_path / "summary.json").read_text())["rounds"] == 3
    run(experiment(rounds=3), tmp_path, resume=True, on_rows=look)
    assert len(seen) == 2


@pytest.mark.slow
def test_two_runs_cannot_write_to_one_directory_and_a_killed_one_holds_it_no_longer(tmp_path):
    other = holder(tmp_path, 600)
    try:
        with pytest.raises(ConfigError, match="no other run is writing to"):
            run(experiment(), tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    finally:
        other.kill()
        other.communicate()
    other = holder(tmp_path, 0.3)  # which is waited for
    assert run(experiment(rounds=1), tmp_path).summary["status"] == "completed"
    assert not (tmp_path / LOCK).exists()
    other.communicate()


def test_a_run_that_ended_while_another_prepared_is_not_overwritten(tmp_path):
    def slow(*arguments, **options):
        run(experiment(rounds=1), tmp_path / "run")
        return prepare(*arguments, **options)

    with pytest.raises(ConfigError, match="a new or empty directory"):
        run(experiment(rounds=2), tmp_path / "run", prepare=slow)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 1
    (tmp_path / "run" / ".trackers.json.1").touch()  # as a kill leaves it
    run(experiment(rounds=1), tmp_path / "run", resume=True)
    assert not (tmp_path / "run" / ".trackers.json.1").exists()


def test_a_directory_that_cannot_be_held_is_refused_in_one_line(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"--out = .*a directory that can be written to \("):
        run(experiment(), tmp_path)


class Typed(bounding.Clip):
    """A member whose vectors and norms are of another kind than float64."""

    kind: str = "typed"
    dtype: ClassVar[torch.dtype]

    def send(self, updates: torch.Tensor, view: View) -> torch.Tensor:
        return (updates * 1024).round().to(self.dtype)


@pytest.mark.slow
def test_vectors_of_another_kind_are_bounded_as_the_numbers_that_they_hold(tmp_path, monkeypatch):
    given = experiment(bounding={"kind": f"{__name__}:Typed", "bound": 1.0})

    def ended(dtype: torch.dtype) -> str:
        monkeypatch.setattr(Typed, "dtype", dtype, raising=False)
        return run(given, tmp_path / str(dtype)).summary["model_sha256"]

    assert ended(torch.float32) == ended(torch.int64) == ended(torch.float64)


class Drawn(noise.Gaussian):
    kind: str = "drawn"
    dtype: ClassVar[type] = np.float64
    rows: ClassVar[int | None] = None

    def on_clients(self, *given):
        return super().on_clients(*given).astype(self.dtype)[: self.rows]


@pytest.mark.slow
def test_noise_of_another_kind_is_the_numbers_that_it_holds(tmp_path, monkeypatch):
    sections = {"multiplier": 1.0, "delta": 1e-5, "placement": "client"}
    given = experiment(noise={"kind": f"{__name__}:Drawn", **sections})
    exact = models.flatten(run(given, tmp_path / "exact").model)
    monkeypatch.setattr(Drawn, "dtype", np.float32)
    found = models.flatten(run(given, tmp_path / "found").model)
    assert (found - exact).norm() <= 1e-6 * exact.norm()
    monkeypatch.setattr(Drawn, "rows", 1)  # one row in the place of a row for each
    with pytest.raises(RunError, match=r"draws \[1, 7850\], not \["):
        run(given, tmp_path / "row")


def test_a_run_whose_ledger_is_lost_is_not_resumed(tmp_path):
    run(experiment(), tmp_path / "out")
    (tmp_path / "out" / "ledger.jsonl").unlink()
    with pytest.raises(RunError, match="what this run has spent is unknown"):
        run(experiment(), tmp_path / "out", resume=True)


@pytest.mark.slow
def test_rounds_without_clients_are_rounds_all_the_same(tmp_path):
    """Poisson cohorts of 1 expected: some are empty, and the run still resumes."""
    lonely = experiment(
        selection={"kind": "poisson", "cohort": 1},
        noise={"kind": "gaussian", "multiplier": 1.0, "placement": "server"},
        measure=["clients"],
        rounds=8,
    )
    first = run(lonely, tmp_path / "out")
    assert 0 in first.rounds["cohort"].to_pylist()
    again = run(lonely, tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == first.summary["model_sha256"]


class Loose(bounding.Clip):
    def factor(self, norm, bound):
        return 1.0


class Sly(bounding.Clip):
    """Changes the norms that it is held to."""

    def factors(self, norms, bound):
        norms.zero_()
        return torch.ones_like(norms)


class Column(bounding.Clip):
    def factors(self, norms, bound):
        return super().factors(norms, bound)[:, None]


class Short(bounding.Clip):
    def send(self, updates, view):
        return updates[:, :10]


class Shapeless(bounding.Clip):
    """Remembers a number where a vector is due."""

    def next_state(self, vectors, sent, view):
        return sent[:, :1]


class Misnamed(bounding.Clip):
    """Asks for one thing and answers another."""

    def queries(self):
        return (bounding.BoundingQuery("size", bound=1.0, share=0.1),)

    def answers(self, columns, bound):
        return {"sizes": np.ones(len(columns["norm"]))}

    def adapt(self, bound, sums, clients, state):
        return bound


@pytest.mark.parametrize("placement", ["client", "server"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Loose", r"client \d+ send norm .* above its bound of 0\.01"),
        ("Sly", r"client \d+ send norm .* above its bound of 0\.01"),
        ("Column", r"factors \[1, 1\], not \[1\]"),
        ("Short", r"sends \[1, 10\], not \[1, 7850\]"),
        ("Shapeless", r"the state of bounding is \[\d+, 1\], not \[\d+, 7850\]"),
        ("Misnamed", r"gives no answers to its query size; it answers sizes"),
    ],
)
def test_a_bounding_that_answers_amiss_ends_the_run_by_name(name, said, placement, tmp_path):
    own = {"kind": f"{__name__}:{name}", "bound": 0.01}
    with pytest.raises(RunError, match=said):
        run(experiment(bounding=own, noise={"placement": placement}), tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 5])
def test_more_rounds_stop_where_as_many_at_once_do(tmp_path, seed):
    """The evaluation after what was the last round is no further one."""
    given = {
        "seed": seed,
        "data": {"kind": "fashion_mnist_mini", "clients": 50, "partition": {"kind": "iid"}},
        "local": {"kind": "sgd", "steps": 2, "batch": 4, "lr": 3.0},
        "server": {"kind": "sgd"},
        "noise": {"kind": "none"},
        "bounding": {"kind": "none"},
        "selection": {"kind": "uniform", "cohort": 5},
        "evaluate": {"every": 4, "validation": 0.2, "stop": {"patience": 1}},
    }
    once = run(experiment(**given, rounds=16), tmp_path / "once")
    run(experiment(**given, rounds=6), tmp_path / "more")
    more = run(experiment(**given, rounds=16), tmp_path / "more", resume=True)
    assert once.summary["rounds"] == more.summary["rounds"]
