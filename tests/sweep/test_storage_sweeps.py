"""Sweeps and studies at a store: trials keep their directories there, the sweep its results."""

import json
import threading
import time
from pathlib import Path

import pytest
from conftest import SMALL
from test_storage import files

from raydpfl import Experiment, run, storage, sweep
from raydpfl.audit import audit
from raydpfl.storage import lock, synced_folder
from raydpfl.storage.store import Store
from raydpfl.sweep.sweep import Sweep
from raydpfl.sweep.timeouts import Timeouts
from raydpfl.sweep.trials import Trial

pytestmark = pytest.mark.slow


def swept(*rates: float) -> Sweep:
    tree = {**SMALL, "rounds": 2, "evaluate": {"every": 1}}
    tree["local"] = {**SMALL["local"], "lr": {"grid": [*rates]}}
    return Sweep.from_dict({**tree, "sweep": {}})


@pytest.fixture(scope="module")
def ran(shared_ray, tmp_path_factory):
    """A sweep at an address."""
    place = f"local://{tmp_path_factory.mktemp('sweeps')}/store/sweep"
    return place, sweep.run(swept(0.05, 0.1), place)


def test_a_sweep_elsewhere_leaves_what_it_leaves_on_a_disk(ran, tmp_path):
    place, result = ran
    assert result.out == place and result.problem is None
    there = files(place)
    written = {"sweep.yaml", "best.yaml", "results.parquet", "settings.parquet", "summary.json"}
    assert {name for name in there if "/" not in name} == written
    assert json.loads(there["summary.json"])["trained"] == {"runs": 2, "private": 2}
    for row in result.trials.to_pylist():
        folder = storage.join_address(place, row["directory"])
        with storage.readable_folder(folder) as here:
            experiment = Experiment.from_yaml(here / "config.yaml")
        alone = run(experiment, tmp_path / str(row["setting"]))
        assert row["status"] == "completed"
        assert row["model_sha256"] == alone.summary["model_sha256"]
        ledger = (Path(alone.out) / "ledger.jsonl").read_bytes()
        assert there[f"{row['directory']}/ledger.jsonl"] == ledger
        again = run(experiment, folder, resume=True)  # a run at an address of its own
        assert again.summary["model_sha256"] == row["model_sha256"]


def test_it_goes_on_where_nothing_is_left_of_it(ran, tmp_path, monkeypatch):
    place = ran[0]
    before = files(place)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    fetched = []
    fetch = Store.fetch
    monkeypatch.setattr(
        Store, "fetch", lambda self, names, into: fetched.extend(names) or fetch(self, names, into)
    )
    result = sweep.run(swept(0.05, 0.1, 0.2), place, resume=True)
    assert result.summary["trained"] == {"runs": 3, "private": 3}
    assert not any(synced_folder.CHECKPOINT.fullmatch(name) for name in fetched)
    after = files(place)
    trials = {name for name in before if name.startswith("trials/")}
    assert all(after[name] == before[name] for name in trials), "finished trials are left alone"
    assert result.trials.num_rows == 3


def test_a_trial_that_makes_progress_elsewhere_is_seen_to(tmp_path):
    place = f"local://{tmp_path}/store"
    with storage.open_folder(place) as folder:
        clock = iter([0.0, 20.0, 30.0, 200.0, 240.0]).__next__
        limits = Timeouts(None, clock=clock)
        experiment = Experiment.from_dict({})
        first, second = (Trial(name, experiment, folder / "trials" / name) for name in "ab")
        limits.begin(first)
        first.status = "completed"
        limits.end(first)
        limits.begin(second)
        assert not list(limits.overdue_trials())
        Store(place).put("trials/b/ledger.jsonl", b"{}")
        assert not list(limits.overdue_trials())  # 210 s without a round but for this one


def test_what_a_trial_writes_is_never_written_by_its_sweep(tmp_path):
    place = f"local://{tmp_path}/store"
    with storage.open_folder(place) as folder:
        address = storage.origin(folder / "trials" / "a")
        with storage.open_folder(address) as own:
            (own / "ledger.jsonl").write_text("one\n")
            storage.push(own)
            storage.refetch(folder / "trials" / "a")
            (own / "ledger.jsonl").write_text("one\ntwo\n")
        storage.push(folder)
        assert (folder / "trials" / "a" / "ledger.jsonl").read_text() == "one\n"
    assert files(place) == {"trials/a/ledger.jsonl": b"one\ntwo\n"}


def test_a_living_process_is_given_time_to_let_go(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "TICK", 0.001)
    place = f"local://{tmp_path}/store"
    store = Store(place)
    theirs = f"{lock.FOLDER}/theirs.json"

    def live() -> None:
        for _ in range(5):
            store.put(theirs, b"{}")
            time.sleep(0.05)
        store.remove([theirs])

    store.put(theirs, b"{}")
    thread = threading.Thread(target=live)
    thread.start()
    with storage.open_folder(place, patience=60):
        assert not thread.is_alive() or theirs not in files(place)
    thread.join()


def test_an_audit_may_be_elsewhere(tmp_path):
    place = f"local://{tmp_path}/audit"
    audit(Experiment.from_dict({**SMALL, "rounds": 1}), place, canaries=20)
    assert files(place).keys() == {"audit.json", "config.yaml", "scores.parquet"}
