"""Runs at the address of a store: those on a disk, and resumed after a kill at any instant."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from conftest import experiment, refusal
from test_storage_kills import spent

from raydpfl import Experiment, load, run, storage
from raydpfl.data import prepare, shard_writer
from raydpfl.errors import FileError, RunError
from raydpfl.privacy import Ledger
from raydpfl.report import write
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.storage import lock, synced_folder
from raydpfl.storage.files import is_intact as sound
from raydpfl.storage.run_files import Pace
from raydpfl.storage.store import Store

pytestmark = pytest.mark.slow  # they start a server of their own
# what a run writes that is the same whenever and wherever it is run
SAME = ("config.yaml", "ledger.jsonl", "trajectory.bin")


def described() -> Experiment:
    return experiment(rounds=4, measure=["clients", "trajectory"], client={"backend": "fused"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run on a disk."""
    return run(described(), tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture
def place(tmp_path) -> str:
    """An address whose store is a folder of this machine, which pyarrow.fs reaches as any other."""
    return f"local://{tmp_path}/store/run"


@pytest.fixture
def snapshots(monkeypatch):
    """After every round, where a run's own pace would make none in so short a time."""
    monkeypatch.setattr(Pace, "due", lambda pace: True)


def files(address: str) -> dict[str, bytes]:
    found = Store(address)
    return {name: found.get(name) for name in found.times()}


def check_whole(address: str, whole) -> None:
    """The directory there is that of the whole run."""
    found = files(address)
    folder = Path(whole.out)
    for name in SAME:
        assert found[name] == (folder / name).read_bytes(), name
    told = json.loads(found["summary.json"])
    for name in ("model_sha256", "guarantees", "status", "rounds"):
        assert told[name] == whole.summary[name]
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    # checkpoints besides the last are of the rounds that a snapshot was made after
    kept = {name for name in here | found.keys() if "checkpoints/round-" not in name}
    assert kept & here == kept & found.keys()
    assert max(here) == max(found)


def test_a_run_on_s3_leaves_the_files_that_it_leaves_on_a_disk(s3, whole):
    place = storage.join_address(s3(), "runs", "one")
    result = run(described(), place)
    assert result.out == place
    check_whole(place, whole)
    assert result.rounds.drop(unlike(result.rounds)) == whole.rounds.drop(unlike(whole.rounds))
    assert not any((Path(os.environ["RAYDPFL_CACHE"]) / "elsewhere").rglob("*.npz"))
    with refusal(r"--out = 's3://.*/runs/one.*a new or empty directory"):
        run(described(), place)


def unlike(rounds) -> list[str]:
    """The columns that tell how long it took."""
    timed = ("seconds", "clients_per_second")
    return [name for name in rounds.column_names if name.startswith(timed)]


def test_what_is_read_of_a_run_is_read_of_an_address(s3, whole):
    place = storage.join_address(s3(), "run")
    run(described(), place)
    assert load(place).summary["model_sha256"] == whole.summary["model_sha256"]
    assert write([place]) == storage.join_address(place, "report")
    assert b"raydpfl report" in files(place)["report/index.html"]


def test_the_commands_take_addresses(s3, tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(described().to_yaml())
    place = storage.join_address(s3(), "run")

    def said(*words: str) -> str:
        code, out, told = typed(*words)
        assert code == 0, told
        return out

    assert f"Run directory: {place}" in said("run", "small.yaml", "--out", place)
    assert f"Run directory: {place}" in said("run", place, "--resume", "rounds=5")
    assert "rounds: 5\n" in said("show", place)
    assert said("export", place).strip() == f"{place}/model.safetensors"
    assert said("export", place, "--out", "model.pt").strip() == "model.pt"
    assert Path("model.pt").exists()
    assert "5" in said("budget", place)
    said("run", "small.yaml", "--out", "here", "seed=4")
    assert "report-run-here/index.html" in said("compare", place, "here")
    assert not list(Path().glob("s3*"))


def test_a_coordinator_in_an_actor_keeps_its_store(place, shared_ray, whole):
    told = described().to_dict()
    told["client"] |= {"actors": 2}
    run(Experiment.from_dict(told), place)
    found = files(place)
    assert found["ledger.jsonl"] == (Path(whole.out) / "ledger.jsonl").read_bytes()
    summary = json.loads(found["summary.json"])
    assert summary["model_sha256"] == whole.summary["model_sha256"] and summary["ray"]["used"]


def test_a_run_goes_on_at_an_address_from_any_machine(s3, whole, tmp_path, monkeypatch):
    place = storage.join_address(s3(), "run")
    run(described(), place, on_rows=lambda rows: rows[-1]["round"] == 1)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))  # nothing is here of what was there
    assert run(described(), place, resume=True).summary["rounds"] == 4
    check_whole(place, whole)


def test_fsspec_reaches_what_pyarrow_does_not(whole):
    run(described(), "memory://somewhere/run", on_rows=lambda rows: True)
    run(described(), "memory://somewhere/run", resume=True)
    check_whole("memory://somewhere/run", whole)


class Death(BaseException):
    """The end of a process, which no handler of errors takes for one."""


def dying(monkeypatch, after: int) -> list[str]:
    """Lets so many changes reach stores, and then none; what reached them."""
    reached: list[str] = []
    originals = {name: getattr(Store, name) for name in ("put", "remove")}

    def change(name):
        def guarded(self, names, *content):
            mine = names if isinstance(names, str) else "".join(list(names))
            if not mine.startswith(lock.FOLDER):
                if len(reached) == after:
                    raise Death
                reached.append(mine)
            return originals[name](self, names, *content)

        return guarded

    for name in originals:
        monkeypatch.setattr(Store, name, change(name))
    return reached


CHANGES = 34  # of the run, with a snapshot after every round; the last deaths find it ended


@pytest.fixture
def released(monkeypatch) -> list[int]:
    """The rounds that are released."""
    rounds = []
    release = Coordinator.release
    noted = lambda self, t, total: rounds.append(t) or release(self, t, total)  # noqa: E731
    monkeypatch.setattr(Coordinator, "release", noted)
    return rounds


@pytest.mark.parametrize("after", range(0, CHANGES, 3))
def test_death_at_any_change_of_a_store_loses_nothing(
    place, whole, after, released, monkeypatch, snapshots
):
    with monkeypatch.context() as patch:
        dying(patch, after)
        with pytest.raises(Death):
            run(described(), place)
            raise Death  # it came through
    lines = spent(files(place))
    assert lines == (Path(whole.out) / "ledger.jsonl").read_bytes().splitlines()[: len(lines)]
    assert len(lines) > max(released, default=-1)
    run(described(), place, resume="config.yaml" in files(place))
    check_whole(place, whole)


def test_nothing_is_released_that_the_store_has_not_taken(place, released, monkeypatch):
    put = Store._write

    def full(self, path, content):
        if ".from-" in path and len(spent(files(place))) == 2:
            raise OSError("no room")
        put(self, path, content)

    monkeypatch.setattr(Store, "_write", full)
    monkeypatch.setattr("raydpfl.storage.store.PAUSES", (0.0,))
    with pytest.raises(FileError, match=r"local://.*/run/ledger.*no room.*go on with --resume"):
        run(described(), place)
    assert released == [0, 1]
    assert json.loads(files(place)["summary.json"])["status"] == "failed"


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_every_request_that_fails_is_made_again(place, fails, monkeypatch):
    monkeypatch.setattr("raydpfl.storage.store.PAUSES", (0.0,))
    store = Store(place)

    class Failing:
        """The file system of a store, of whose every request the first fail."""

        def __init__(self, files):
            self.files = files
            self.left = fails

        def __getattr__(self, name):
            if self.left:
                self.left -= 1
                raise OSError("busy")
            self.left = fails
            return getattr(self.files, name)

    store.put("a", b"1")
    store._files = Failing(store._files)
    requests = [lambda: store.get("a"), store.times, lambda: store.remove(["a"])]
    for request in requests:
        if fails < 2:
            request()
        else:
            with pytest.raises(FileError, match=r"local://.*(read|listed|removed) \(busy\)"):
                request()
            store._files.left = fails
    assert fails == 2 or "a" not in store.times()


def test_of_a_run_that_ends_before_it_begins_nothing_is_left(place):
    def interrupted(plan):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(described(), place, on_start=interrupted)
    assert files(place) == {}


def test_a_long_ledger_is_put_whole_now_and_then(place, monkeypatch):
    monkeypatch.setattr(synced_folder, "TAIL", 1000)
    names = []
    put = Store.put
    noted = lambda self, name, content: names.append(name) or put(self, name, content)  # noqa: E731
    monkeypatch.setattr(Store, "put", noted)
    release = {"mechanism": "a", "bound": 1.0, "std": 1.0}
    with storage.open_folder(place) as folder:
        mine = Ledger(folder / "ledger.jsonl")
        for t in range(40):
            mine.record(t=t, epsilon={"rdp": 0.1 * t}, **release)
            assert len(spent(files(place))) == t + 1
        lines = (folder / "ledger.jsonl").read_bytes()
    assert 3 < names.count("ledger.jsonl") < 9
    assert files(place) == {"ledger.jsonl": lines}


@pytest.fixture
def quick(monkeypatch):
    for name, seconds in {"LAPSE": 0.6, "MARGIN": 0.1, "BEAT": 0.1, "TICK": 0.002}.items():
        monkeypatch.setattr(lock, name, seconds)


def test_of_two_processes_one_has_the_directory(place, tmp_path, quick):
    with storage.open_folder(place), refusal("no other run is writing to"):
        storage.open_folder(place).__enter__()
    with storage.open_folder(place):  # by another cache on this machine, or another machine
        mine = Store(place)
        held = refusal(rf"held by process {os.getpid()} on ")
        with held, lock.hold_lock(mine, tmp_path / "held"):
            pass


def left(place: str, name: str = "theirs") -> str:
    """Leaves the lock of another process."""
    owner = {"host": "theirs", "pid": 1, "since": 0}
    Store(place).put(f"{lock.FOLDER}/{name}.json", json.dumps(owner).encode())
    return f"{lock.FOLDER}/{name}.json"


def test_a_dead_process_of_this_machine_holds_nothing(place, cache):
    with storage.open_folder(place) as folder:
        note = synced_folder.lock_note(folder)
    note.write_text(f"{left(place)} 1.0")  # as it is where that process was killed
    began = time.monotonic()
    with storage.open_folder(place):
        assert time.monotonic() - began < lock.LAPSE / 2  # it is not waited for
    assert files(place) == {}


def test_a_process_elsewhere_is_dead_when_its_lock_lapses(place, quick):
    left(place)
    with storage.open_folder(place):
        assert len(files(place)) == 1
    over = threading.Event()

    def renew():
        while not over.wait(0.1):
            left(place)

    left(place)
    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with refusal("held by process 1 on theirs"):
            storage.open_folder(place).__enter__()
    finally:
        over.set()
        thread.join()


def test_who_has_lost_the_directory_writes_no_more(place, monkeypatch):
    monkeypatch.setattr(lock, "LAPSE", 0.3)
    monkeypatch.setattr(lock, "MARGIN", 0.1)
    monkeypatch.setattr(lock, "BEAT", 1.0)  # it stands still
    lost = pytest.raises(FileError, match="another may have taken")
    with lost, storage.open_folder(place) as folder:
        (folder / "before").write_text("a")
        storage.push(folder)
        time.sleep(0.4)
        left(place)  # who found ours lapsed
        time.sleep(0.8)
        (folder / "after").write_text("b")
        storage.push(folder)
    assert set(files(place)) == {"before", f"{lock.FOLDER}/theirs.json"}


def test_what_cannot_be_reached_is_refused_in_one_line(monkeypatch, tmp_path):
    for address in ("nonsense://somewhere/run", "s3:///run"):
        with refusal(r"--out = .*a folder that can be reached"):
            run(described(), address)
    with refusal(r"run = 'nonsense.*can be reached"):
        load("nonsense://somewhere/run")
    monkeypatch.setenv("RAYDPFL_CACHE", "nonsense://somewhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with refusal(r"RAYDPFL_CACHE = 'nonsense.*can be reached"):
        prepared()


def test_what_is_said_of_a_directory_names_its_address(place):
    with storage.open_folder(place) as folder:
        (folder / "notes").write_text("mine")
    with refusal(rf"--out = '{place}'"):
        run(described(), place)
    with refusal(rf"--resume = '{place}'.*no config.yaml"):
        run(described(), place, resume=True)
    with pytest.raises(RunError, match=f"of {place}"), storage.open_folder(place) as folder:
        raise RunError(f"of {folder}")


# --- caches ---


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """The address that caches share, and what makes this another machine."""
    address = f"local://{tmp_path}/shared"
    monkeypatch.setenv("RAYDPFL_CACHE", address)

    def move(name: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("first")
    return address, move


def prepared() -> Path:
    e = described()
    return prepare(e.data, e.seed)


def never(*_):
    raise AssertionError("it is prepared again")


def test_what_one_machine_has_prepared_another_fetches(shared, tmp_path, monkeypatch):
    address, move = shared
    mine = prepared()
    assert mine.is_relative_to(tmp_path / "first")
    content = {f"data/{mine.name}/{path.name}": path.read_bytes() for path in mine.iterdir()}
    assert files(address) == content
    move("second")
    monkeypatch.setattr(shard_writer, "_load_split", never)
    theirs = prepared()
    assert theirs.is_relative_to(tmp_path / "second") and theirs.name == mine.name
    assert {path.name: path.read_bytes() for path in theirs.iterdir()} == {
        path.name: path.read_bytes() for path in mine.iterdir()
    }
    monkeypatch.setattr(Store, "times", never)
    assert prepared() == theirs, "what is here is not looked for"


@pytest.mark.parametrize("name, content", [("digests.json", None), ("test.arrow", b"cut")])
def test_what_is_not_whole_at_the_address_is_prepared_again(shared, name, content, caplog):
    address, move = shared
    mine = prepared()
    store = Store(address)
    if content is None:  # a machine was cut off while it put it there
        store.remove([f"data/{mine.name}/{name}"])
    else:
        store.put(f"data/{mine.name}/{name}", content)
    move("second")
    assert sound(prepared())
    assert ("not whole there" in caplog.text) == (content is not None)
    move("third")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "_load_split", never)
        assert sound(prepared()), "it has been mended"
