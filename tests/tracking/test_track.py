"""Trackers: told every row once, whatever becomes of the run, and no part of what it is."""

import json
import logging
import struct
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import processes
import pytest
from conftest import experiment, refusal

from raydpfl import Experiment, tracking
from raydpfl import run as run_one
from raydpfl.runtime import runner
from raydpfl.sweep.trials import name_of
from raydpfl.tracking import Log, Tracker, sender
from raydpfl.tracking.base import numbers
from raydpfl.tracking.tensorboard import Events

TOLD: dict[str, list] = {}  # by what a tracker calls a run: the rounds it was told of, and its end


class Mine(Tracker):
    """Keeps what it is told in this process."""

    fails: str = ""  # where it raises: open, write or close; hang: it opens after the run has ended
    by_name: bool = False  # it calls a run by its group and name

    def open(self, run):
        if self.fails == "hang":
            HELD.wait(30)
        self.act("open")
        return Kept(self, replace(run, id=f"{run.group} {run.name}") if self.by_name else run)

    def act(self, where):
        if self.fails == where:
            raise ValueError("no such\nthing")


class Kept(Log):
    def __init__(self, tracker, run):
        self.tracker = tracker
        self.id = run.id or f"run {len(TOLD)}"
        TOLD.setdefault(self.id, [])

    def write(self, rows):
        self.tracker.act("write")
        assert rows
        TOLD[self.id] += [row["round"] for row in rows]

    def close(self, summary):
        self.tracker.act("close")
        TOLD[self.id].append(summary.get("status"))


HELD = threading.Event()
MINE = {"kind": "test_track:Mine"}
NAMED = {**MINE, "by_name": True}


@pytest.fixture(autouse=True)
def nothing_told():
    TOLD.clear()


def tracked(*trackers, **more):
    return experiment(track=list(trackers), **more)


def warned(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def book(folder):
    return json.loads((folder / "trackers.json").read_text())


def test_a_tracker_is_told_every_row_once_and_how_the_run_ended(tmp_path):
    run_one(tracked(MINE), tmp_path / "out")
    assert TOLD == {"run 0": [0, 1, 2, 3, "completed"]}
    assert book(tmp_path / "out") == {MINE["kind"]: {"id": "run 0", "rounds": 4}}


@pytest.mark.slow
def test_rows_are_handed_on_as_they_come_and_never_none_of_them(tmp_path):
    seen = []
    run_one(tracked(), tmp_path / "out", on_rows=seen.append)
    run_one(tracked(), tmp_path / "out", resume=True, on_rows=seen.append)  # no round is left
    assert [[row["round"] for row in rows] for rows in seen] == [[0], [1], [2], [3]]


def test_a_trial_is_named_by_its_sweep(tmp_path):
    run_one(tracked(NAMED), tmp_path / "swept" / "trials" / "0a1b")
    assert TOLD == {"swept swept/0a1b": [0, 1, 2, 3, "completed"]}


@pytest.mark.slow
def test_a_run_elsewhere_is_named_by_its_address_and_gone_on_with(tmp_path):
    place = f"local://{tmp_path}/store/far"
    run_one(tracked(NAMED), place, on_rows=lambda rows: rows[-1]["round"] == 1)
    run_one(tracked(NAMED), place, resume=True)
    assert TOLD == {" far": [0, 1, "stopped", 2, 3, "completed"]}
    assert book(tmp_path / "store" / "far") == {MINE["kind"]: {"id": " far", "rounds": 4}}


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_of_its_tracker_and_no_row_is_told_twice(tmp_path):
    out = tmp_path / "out"
    run_one(tracked(MINE), out, on_rows=lambda rows: rows[-1]["round"] == 1)
    run_one(tracked(MINE), out, resume=True)
    assert TOLD == {"run 0": [0, 1, "stopped", 2, 3, "completed"]}


@pytest.mark.slow
def test_another_tracker_is_told_all_rounds_and_one_that_was_killed_what_it_missed(tmp_path):
    out = tmp_path / "out"
    run_one(tracked(), out, on_rows=lambda rows: rows[-1]["round"] == 1)
    run_one(tracked(MINE), out, resume=True)
    assert TOLD == {"run 0": [0, 1, 2, 3, "completed"]}
    (out / "trackers.json").write_text(json.dumps({MINE["kind"]: {"id": "mine", "rounds": 1}}))
    run_one(tracked(MINE), out, resume=True)
    assert TOLD["mine"] == [1, 2, 3, "completed"]


@pytest.mark.slow
def test_rounds_that_are_computed_again_are_told_again_only_where_they_are_others(tmp_path):
    for anew, expected in ((False, [2, 3]), (True, [1, 2, 3])):
        TOLD.clear()
        out = tmp_path / str(anew)
        run_one(tracked(), out, on_rows=lambda rows: rows[-1]["round"] == 0)
        (out / "trackers.json").write_text(json.dumps({MINE["kind"]: {"id": "mine", "rounds": 2}}))
        run_one(tracked(MINE), out, resume=True, fresh_noise=anew)
        assert TOLD["mine"] == [*expected, "completed"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["open", "write", "close"])
def test_a_tracker_that_fails_is_one_warning_and_changes_nothing(fails, tmp_path, caplog):
    plain = run_one(tracked(), tmp_path / "plain")
    found = run_one(tracked({**MINE, "fails": fails}), tmp_path / "out")
    assert found.summary["status"] == "completed"
    assert found.summary["model_sha256"] == plain.summary["model_sha256"]
    reason = "ValueError: no such; the run goes on without it"
    assert warned(caplog) == [f"track {MINE['kind']}: {reason}"]
    assert book(tmp_path / "out")[MINE["kind"]]["failed"] == reason


@pytest.mark.slow
def test_a_tracker_that_hangs_is_waited_for_only_so_long(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(sender, "OPENING", 0.1)
    monkeypatch.setattr(runner, "PATIENCE", 0.1)
    try:
        slow = tracked({**MINE, "fails": "hang"})
        assert run_one(slow, tmp_path / "out").summary["status"] == "completed"
        reason = "it has not ended after 0.1 s; --resume sends it the rest"
        assert warned(caplog) == [f"track {MINE['kind']}: {reason}"]
        assert not TOLD
    finally:
        HELD.set()


@pytest.mark.parametrize("first_round", [0, 1])
def test_events_from_the_first_round_on_make_those_of_an_earlier_start_void(tmp_path, first_round):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value, first in ((1.0, 0), (2.0, first_round)):
        events = Events(tmp_path, first)
        events.write([{"round": t, "train_loss": value} for t in range(first, 3)])
        events.close({})
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("train_loss")
    values = {event.step: event.value for event in found}
    assert len(found) == 3 and values == {t: 2.0 if t >= first_round else 1.0 for t in range(3)}


def test_a_full_disk_under_tensorboard_ends_no_run(tmp_path, caplog, monkeypatch):
    def full(self, **what):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Events, "_write", full)
    assert run_one(tracked("tensorboard"), tmp_path / "out").summary["status"] == "completed"
    (said,) = warned(caplog)
    assert f"{tmp_path}/out/tensorboard cannot be written (No space left on device)" in said


@pytest.mark.slow
def test_a_book_that_is_damaged_is_begun_anew(tmp_path, caplog):
    run_one(tracked(MINE), tmp_path / "out")
    (tmp_path / "out" / "trackers.json").write_text('{"a": 3')
    run_one(tracked(MINE), tmp_path / "out", resume=True)
    assert "trackers start from nothing" in warned(caplog)[0]
    assert TOLD["run 1"] == [0, 1, 2, 3, "completed"]


def test_what_tracks_is_no_part_of_a_trials_name():
    assert name_of(tracked()) == name_of(tracked(MINE, "ray"))
    assert Experiment.from_dict({}).track == tracking.parse(["tensorboard"])


# the second: of a folder without code, as W&B leaves one in the working directory
@pytest.mark.parametrize("missing", [None, ModuleSpec("mlflow", None, is_package=True)])
def test_a_tracker_whose_library_is_missing_is_refused_before_anything_is_written(
    missing, tmp_path, monkeypatch, complain
):
    (tmp_path / "small.yaml").write_text(tracked().to_yaml())
    real = tracking.importlib.util.find_spec
    monkeypatch.setattr(
        tracking.importlib.util,
        "find_spec",
        lambda name: missing if name == "mlflow" else real(name),
    )
    words = ["run", tmp_path / "small.yaml", "track=[mlflow]", "--out", tmp_path / "out"]
    needed = "mlflow needs pip install 'raydpfl[mlflow]'"
    assert complain(words) == f"track = 'mlflow': expected others, or none (track=[]); {needed}"
    assert not (tmp_path / "out").exists()
    with refusal(r"track.kind = 'mlflw': expected one of mlflow, ray"):
        Experiment.from_dict({"track": ["mlflw"]})


@pytest.mark.slow
def test_gauges_of_a_run_without_ray_start_none(tmp_path):
    code = "from conftest import experiment; from raydpfl import run; import sys\n"
    code += "run(experiment(track=['ray']), sys.argv[1]); assert 'ray' not in sys.modules"
    asked = [sys.executable, "-c", code, tmp_path / "out"]
    done = processes.run(asked, cwd=Path(__file__).parents[1])
    assert done.returncode == 0 and "track" not in done.stderr, done.stderr


# --- the tools themselves, where they are installed, with stores in a folder ---


def expected(result, name):
    rows = result.rounds.to_pylist()
    return [(row["round"], row[name]) for row in rows if name in numbers(row)]


def twice(kind, out, **fields):
    """A run in two parts, shown by a tool that keeps what it knows in a folder beside it."""
    tracker = tracking.FAMILY[kind](**fields).kept_in(out.parent)
    asked = experiment().model_copy(update={"track": (tracker,)})
    run_one(asked, out, on_rows=lambda rows: rows[-1]["round"] == 1)
    return run_one(asked, out, resume=True)


@pytest.mark.slow
def test_mlflow_has_one_run_with_every_number_the_config_and_the_end(tmp_path, caplog):
    mlflow = pytest.importorskip("mlflow")
    result = twice("mlflow", tmp_path / "out", experiment="mine")
    assert not warned(caplog)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    for name in ("train_loss", "test_accuracy", "epsilon_rdp"):
        history = client.get_metric_history(found.info.run_id, name)
        assert [(each.step, each.value) for each in history] == expected(result, name)
    assert found.info.status == "FINISHED" and found.info.run_name == "out"
    assert found.data.params["bounding.kind"] == "clip"
    assert found.data.tags["model_sha256"] == result.summary["model_sha256"]
    assert float(found.data.tags["epsilon"]) == result.summary["holds"][0]["epsilon"]


@pytest.mark.slow
def test_wandb_has_one_run_with_every_number_and_the_config(tmp_path, caplog):
    pytest.importorskip("wandb")
    result = twice("wandb", tmp_path / "out")
    assert not warned(caplog)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1 and len(files) == 2  # synced, they are one
    rows = [row for file in files for row in _wandb_rows(file)]
    for name in ("train_loss", "test_accuracy"):
        found = [(row["round"], row[name]) for row in rows if name in row]
        assert found == expected(result, name)


def _wandb_rows(file):
    """The rows of history in the file of an offline run."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = []
    for data in _records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = record.history.item
        pairs = [(each.key or each.nested_key[0], json.loads(each.value_json)) for each in items]
        rows += [dict(pairs)] if pairs else []
    return rows


def _records(data):
    """The records of a log as LevelDB writes it: blocks of 32 KiB, parts with a header each."""
    at = 7  # of the file's own header
    whole = b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack("<4xHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or the last part of one
            yield whole
            whole = b""


@pytest.mark.slow
def test_trackio_has_one_run_with_every_number(tmp_path, caplog, capsys):
    if tracking.importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed")  # it reads where its store is when it is imported
    result = twice("trackio", tmp_path / "out")
    assert not warned(caplog) and "rackio" not in capsys.readouterr().out
    from trackio.sqlite_storage import SQLiteStorage

    name = book(tmp_path / "out")["trackio"]["id"]
    assert SQLiteStorage.get_runs("raydpfl").count(name) == 1
    rows = SQLiteStorage.get_logs("raydpfl", name)
    for column in ("train_loss", "test_accuracy"):
        found = [(row["step"], row[column]) for row in rows if column in row]
        assert found == expected(result, column)


@pytest.mark.slow
def test_rays_gauges_say_where_the_run_is(shared_ray, tmp_path, monkeypatch, caplog):
    from ray.util import metrics

    seen: dict[str, list] = {}
    monkeypatch.setattr(
        metrics.Gauge, "set",
        lambda self, value, tags: seen.setdefault(self.info["name"], []).append((value, tags)),
    )  # fmt: skip
    monkeypatch.setattr(sender, "PAUSE", 0.0)
    result = run_one(tracked("ray"), tmp_path / "out")
    assert not warned(caplog)
    tags = {"run": "out"}
    epsilon = result.rounds["epsilon_rdp"].to_pylist()[-1]
    assert seen["raydpfl_round"][-1] == (4.0, tags) and seen["raydpfl_epsilon"][-1][0] == epsilon
    assert seen["raydpfl_replaced"][-1][0] == 0 and seen["raydpfl_clients_per_second"][-1][0] > 0


def test_a_run_that_is_measured_after_its_rounds_is_not_interrupted_to_its_tracker(
    tmp_path, monkeypatch
):
    reasons = []
    monkeypatch.setattr(Kept, "close", lambda _, summary: reasons.append(summary["reason"]))
    of = tracked(MINE, measure=["selection"])
    assert run_one(of, tmp_path / "run").summary["status"] == "completed"
    assert reasons == [None]
