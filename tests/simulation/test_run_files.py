"""The files of a run: whatever becomes of them, it goes on to the same bits and rows."""

import hashlib
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import experiment
from test_run import DROP, cursed

from raydpfl import Experiment, run
from raydpfl.errors import RunError
from raydpfl.storage.run_files import Dropped

pytestmark = pytest.mark.slow

ROUNDS = 6


def described(rounds: int = ROUNDS) -> Experiment:
    return experiment(rounds=rounds, measure=["clients", "trajectory"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing happened to, and its directory."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    return run(described(), folder)


def halfway(folder, of: Experiment, rounds: int) -> None:
    """A run that was stopped after so many rounds; evaluations hide one round behind."""
    run(of, folder, on_rows=lambda rows: any(row["round"] >= rounds - 1 for row in rows))


def rows(path, leave=("seconds", "clients_per_second")) -> list[dict]:
    kept = pq.read_table(path).to_pylist()
    return [
        {name: value for name, value in row.items() if not name.startswith(leave)} for row in kept
    ]


def damage(path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "edited":
        path.write_bytes(bytes(byte ^ 1 for byte in content))
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "another table":
        pq.write_table(pa.table({"x": [1, 2]}), path)
    else:
        path.unlink()
        if how == "a folder":
            (path / "within").mkdir(parents=True)
        elif how == "a pipe":
            os.mkfifo(path)
        elif how == "a link to itself":
            path.symlink_to(path)


HOW = ["cut", "edited", "emptied", "another table", "missing", "a folder", "a pipe"]
HOW += ["a link to itself"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ["rounds.parquet", "clients.parquet"])
def test_damaged_tables_block_no_checkpoint_and_lose_no_row(name, how, whole, tmp_path):
    halfway(tmp_path / "out", described(), 3)
    damage(tmp_path / "out" / name, how)
    again = run(described(), tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == whole.summary["model_sha256"]
    for table in ("rounds.parquet", "clients.parquet"):
        assert rows(tmp_path / "out" / table) == rows(whole.out / table)


@pytest.mark.parametrize("how", [each for each in HOW if each != "another table"])
def test_a_trajectory_that_was_cut_has_nan_for_what_it_lost(how, whole, tmp_path, caplog):
    halfway(tmp_path / "out", described(), 3)
    damage(tmp_path / "out" / "trajectory.bin", how)
    again = run(described(), tmp_path / "out", resume=True)
    d = 7850
    models = np.fromfile(tmp_path / "out" / "trajectory.bin", "<f4").reshape(-1, d)
    assert models.shape == (ROUNDS + 1, d)
    assert again.summary["model_sha256"] == whole.summary["model_sha256"]
    expected = np.fromfile(whole.out / "trajectory.bin", "<f4").reshape(-1, d)
    lost = np.isnan(models).all(1)
    if how != "edited":
        assert np.array_equal(models[~lost], expected[~lost])
        assert lost.any() and not lost[4:].any() and "has lost the models" in caplog.text


def test_what_was_dropped_is_neither_torn_nor_doubled(tmp_path):
    dropping = cursed(tmp_path, overflow=True, client=DROP)
    run(dropping, tmp_path / "whole")
    expected = (tmp_path / "whole" / "dropped.jsonl").read_text()
    for checkpoints in (True, False):
        out = tmp_path / f"out-{checkpoints}"
        halfway(out, dropping, 1)
        with open(out / "dropped.jsonl", "a") as file:
            file.write('{"round": 1, "client"')
        if not checkpoints:
            shutil.rmtree(out / "checkpoints")
        run(dropping, out, resume=True)
        assert (out / "dropped.jsonl").read_text() == expected


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe\x00", b"[]\n", b"3\n", b'{"round": "0"}\n', b"[" * 100_000, b"\n\n", None],
)
def test_whatever_stands_in_dropped_blocks_nothing(content, tmp_path):
    sound = '{"round": 0, "client": 4, "detail": "\\u2028 kept"}\n'
    path = tmp_path / "dropped.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(sound.encode() + content)
    log = Dropped(path, 1)
    log.append(1, [(7, "a\nb"), (8, "c")])
    entries = [json.loads(line) for line in path.read_text().split("\n") if line]
    assert [entry["client"] for entry in entries] == ([4] if content is not None else []) + [7, 8]
    assert entries[-2]["detail"] == "a\nb"


def rewritten(path, save=np.savez, **arrays) -> None:
    with np.load(path) as stored:
        save(path, **(dict(stored) | arrays))


def test_a_checkpoint_that_does_not_fit_is_passed_over_for_the_one_before(
    whole, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("raydpfl.storage.run_files.SHARE", 1e9)  # a checkpoint after every round
    halfway(tmp_path / "out", described(), 3)
    *_, newest = sorted((tmp_path / "out" / "checkpoints").glob("round-*"))
    rewritten(newest, model=np.full(7850, np.nan, np.float32))
    again = run(described(), tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == whole.summary["model_sha256"]
    assert f"{newest} is passed over: it has been changed since it was written" in caplog.text
    assert rows(tmp_path / "out" / "clients.parquet") == rows(whole.out / "clients.parquet")


@pytest.mark.parametrize(
    "arrays",
    [
        {"model": np.zeros(10, np.float32)},
        {"model": np.zeros(7850, np.float32)},
        {"server.v": np.full(7850, np.nan)},
        {"participations": np.array([[3, 1]])},
    ],
)
def test_a_run_whose_checkpoints_have_all_been_changed_is_refused(arrays, tmp_path):
    run(experiment(rounds=2), tmp_path / "out")
    for path in (tmp_path / "out" / "checkpoints").glob("round-*"):
        rewritten(path, **arrays)
    reason = "it has been changed since it was written"
    with pytest.raises(RunError, match=f"no checkpoint can be gone on with; .*: {reason}"):
        run(experiment(rounds=2), tmp_path / "out", resume=True)


def relogged(path, table: pa.Table) -> None:
    """Another log of rounds beside a checkpoint, which vouches for it."""
    log = path.with_name("rounds.arrows")
    with pa.ipc.new_stream(log, table.schema) as writer:
        writer.write_table(table)
    content = log.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    extent = {"rows": table.num_rows, "length": len(content), "sha256": digest}
    rewritten(path, facts=facts(path, tables={"rounds": extent}))


def edited(path, rows: int | None = None, **columns) -> None:
    """The log of rounds with other values in some columns, or with so many rows."""
    with pa.ipc.open_stream(path.with_name("rounds.arrows")) as reader:
        table = reader.read_all()
    for name, values in columns.items():
        index = table.schema.get_field_index(name)
        table = table.set_column(index, table.schema.field(name), pa.array(values))
    relogged(path, table.take([0] * rows) if rows else table)


def facts(path, **changed) -> np.ndarray:
    with np.load(path) as stored:
        known = json.loads(stored["facts"].tobytes())
    return np.frombuffer(json.dumps(known | changed).encode(), np.uint8)


HOSTILE = {
    "torn": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "packed": lambda path: rewritten(path, np.savez_compressed, model=np.zeros(10**6, np.float32)),
    "far larger": lambda path: rewritten(path, more=np.zeros(10**7)),
    "many rows": lambda path: edited(path, rows=10**5),
    "other rows": lambda path: relogged(path, pa.table({"x": ["a"] * 2})),
    "rows of other rounds": lambda path: edited(path, round=[1, 2]),
    "rows without numbers": lambda path: edited(path, test_loss=[0.5, np.nan]),
    "rows that are no file": lambda path: damage(path.with_name("rounds.arrows"), "a folder"),
    "rows that were cut": lambda path: damage(path.with_name("rounds.arrows"), "cut"),
    "rows that were edited": lambda path: damage(path.with_name("rounds.arrows"), "edited"),
    "no origin": lambda path: rewritten(path, facts=facts(path, origin=[1])),
    "counts of three": lambda path: rewritten(path, participations=np.ones((1, 3), np.int64)),
    "negative counts": lambda path: rewritten(path, participations=np.array([[1, -5]])),
    "a server of words": lambda path: rewritten(path, **{"server.v": np.array(["a"] * 7850)}),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_checkpoint_that_no_run_wrote_is_passed_over(how, tmp_path, caplog):
    first = run(experiment(rounds=2), tmp_path / "out")
    *_, newest = sorted((tmp_path / "out" / "checkpoints").glob("round-*"))
    HOSTILE[how](newest)
    again = run(experiment(rounds=2), tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert f"{newest} is passed over" in caplog.text


@pytest.mark.parametrize(
    "lr, reason",
    [(1e38, "the test loss is (nan|inf) after round"), (1e300, "the model is no longer")],
)
def test_a_model_that_leaves_all_bounds_ends_its_run_in_one_line(lr, reason, tmp_path):
    with pytest.raises(RunError, match=f"^{reason}.*lower server.lr") as raised:
        run(experiment(server={"kind": "sgd", "lr": lr}), tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize("actors", [0, 1])
def test_checkpoints_that_cannot_be_read_at_all_start_the_run_again_and_say_so_once(
    actors, tmp_path, caplog, request
):
    if actors:  # the coordinator is another process
        request.getfixturevalue("shared_ray")
    first = run(experiment(rounds=2), tmp_path / "out")
    for path in (tmp_path / "out" / "checkpoints").iterdir():
        damage(path, "emptied" if actors else "a folder")
    again = run(experiment(rounds=2, client={"actors": actors}), tmp_path / "out", resume=True)
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert again.rounds.num_rows == 2
    assert caplog.text.count("the run starts again from its first round") == 1


def test_tensorboard_goes_on_where_a_file_was_in_its_way(tmp_path):
    shown = experiment(track=["tensorboard"])
    halfway(tmp_path / "out", shown, 2)
    shutil.rmtree(tmp_path / "out" / "tensorboard")
    (tmp_path / "out" / "tensorboard").write_text("")
    run(shown, tmp_path / "out", resume=True)
    assert list((tmp_path / "out" / "tensorboard").glob("events.*"))


@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("how", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["curves", "checkpoint", "client"])
def test_a_run_that_is_broken_off_while_it_starts_leaves_nothing_behind(
    where, how, made, tmp_path, monkeypatch
):
    def broken(*_, **__):
        raise how("stop")

    place = {
        "curves": "simulation.plan.Plan.curves",
        "checkpoint": "simulation.coordinator.Coordinator.start",
        "client": "simulation.pool.ClientActor",
    }
    with monkeypatch.context() as patch:
        patch.setattr(f"raydpfl.{place[where]}", broken)
        if not made:
            (tmp_path / "out").mkdir()
        small = experiment(rounds=1, measure=["trajectory"], track=["tensorboard"])
        with pytest.raises(how):
            run(small, tmp_path / "out")
    assert (tmp_path / "out").exists() != made and not list(tmp_path.glob("out/*"))
    assert run(experiment(rounds=1), tmp_path / "out").summary["status"] == "completed"


def test_a_run_that_has_recorded_a_round_is_left_as_it_is(tmp_path, monkeypatch):
    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("raydpfl.simulation.coordinator.Coordinator.collect", broken)
        with pytest.raises(KeyboardInterrupt):
            run(experiment(), tmp_path / "out")
    assert {"ledger.jsonl", "config.yaml"} <= {each.name for each in (tmp_path / "out").iterdir()}
    assert run(experiment(), tmp_path / "out", resume=True).summary["status"] == "completed"
