"""Files are known by what is in them: sources, prepared data, and answers that the cache keeps."""

import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import processes
import pytest
from conftest import refusal

from raydpfl import data, storage
from raydpfl.data import Shards, prepare
from raydpfl.data.features.resnet18 import ResNet18Features
from raydpfl.jobs import client
from raydpfl.privacy import Mechanism, Query, Sampling, calibration, noise_for
from raydpfl.storage import files

PREPARED = ["train.arrow", "clients.arrow", "test.arrow", "data.json", files.SEAL]


@pytest.fixture(autouse=True)
def alone(cache, monkeypatch):
    """Each test has a cache of its own."""
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)


def table(root: Path, fill: float, name: str = "t.npz", **keys) -> data.Data:
    """A table of 20 rows that are all `fill`, written at time 0; all such have one size."""
    root.mkdir(exist_ok=True)
    np.savez(root / name, image=np.full((20, 4), fill, np.float32), label=np.arange(20) % 2)
    os.utime(root / name, (0, 0))
    return data.parse({"kind": "table", "train": name, "clients": 2} | keys)


def values(folder: Path) -> set[float]:
    return set(np.unique(Shards.open(folder).chunk([0, 1], 20)[0]).tolist()) - {0.0}


def small() -> data.Data:
    return data.parse({"kind": "synthetic", "clients": 3, "samples": 4, "test_samples": 5})


def test_a_table_that_is_replaced_at_its_place_is_noticed_at_any_time(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CERTAIN", 0)
    for fill in (1.0, 2.0, 3.0):
        described = table(tmp_path / "root", fill)
        time.sleep(0.02)  # so that the digest is remembered
        for _ in range(2):
            assert values(prepare(described, 0, tmp_path / "root")) == {fill}


def test_the_same_contents_are_the_same_data_wherever_they_are(tmp_path):
    for name in ("t.npz", "other.npz"):
        folder = prepare(table(tmp_path / name[:1], 1.0, name), 0, tmp_path / name[:1])
    assert len(list(folder.parent.iterdir())) == 1
    components = {"mean": np.zeros(4), "components": np.eye(4)}
    for name in ("pca.npz", "axes.npz"):
        np.savez(tmp_path / "t" / name, **components)
        front = {"kind": "pca", "components": 2, "file": name}
        folder = prepare(table(tmp_path / "t", 1.0, features=front), 0, tmp_path / "t")
    assert len(list(folder.parent.iterdir())) == 2


def test_what_torchvision_prefers_to_the_raw_files_counts(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    described = data.parse({"kind": "mnist", "clients": 2})
    for name in described.file_names:
        (tmp_path / name).write_bytes(b"raw")
    before = described.identity(tmp_path)
    (raw.parent / "processed").mkdir()
    (raw.parent / "processed" / "training.pt").write_bytes(b"older")
    assert described.identity(tmp_path) != before


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path, cache, monkeypatch):
    described = table(tmp_path / "root", 1.0)
    split = data.FAMILY["table"].split

    def late(self, seed, root):
        found = split(self, seed, root)
        table(tmp_path / "root", 2.0)
        return found

    monkeypatch.setattr(data.FAMILY["table"], "split", late)
    with refusal("stays as it is while it is read"):
        prepare(described, 0, tmp_path / "root")
    assert not list((cache / "data").iterdir())


def test_data_of_a_members_changed_code_are_made_again(own_module):
    code = (
        "import numpy as np\nfrom raydpfl import data\nclass Own(data.Data):\n    kind: str = ''\n"
        "    def split(self, seed, root):\n        x, y = np.full((4, 2), FILL, np.float32), "
        "np.arange(4) % 2\n"
        "        return data.Split(np.array([2, 2]), (2,), 2, lambda a, b: (x[2 * a : 2 * b], y[2 "
        "* a : 2 * b]), lambda: (x, y))\n"
    )
    own_module("ownsource", code.replace("FILL", "1.0"))
    described = data.parse({"kind": "ownsource:Own"})
    first = prepare(described, 0)
    own_module("ownsource", code.replace("FILL", "2.0"))
    assert prepare(described, 0) != first


def damage(path: Path, how: str) -> None:
    """Cuts, edits (size and time of writing stay), empties, removes or replaces a file."""
    stat = path.stat()
    content = bytearray(path.read_bytes())
    if how == "edited":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif how == "cut":
        os.truncate(path, len(content) - 1)
    elif how == "emptied":
        os.truncate(path, 0)
    else:
        path.unlink()
        if how == "a folder":
            path.mkdir()
        elif how == "a pipe":
            os.mkfifo(path)


@pytest.mark.parametrize("how", ["edited", "cut", "emptied", "missing", "a folder", "a pipe"])
@pytest.mark.parametrize("name", PREPARED)
def test_a_damaged_file_of_the_cache_is_prepared_again_and_says_so(name, how, caplog):
    folder = prepare(small(), 0)
    before = {each: (folder / each).read_bytes() for each in PREPARED}
    damage(folder / name, how)
    with caplog.at_level(logging.WARNING, logger="raydpfl"):
        assert prepare(small(), 0) == folder
    assert f"{folder} is made again: {name} " in caplog.text.replace(f"{name}:", f"{name} ")
    assert {each: (folder / each).read_bytes() for each in PREPARED} == before
    assert list(folder.parent.iterdir()) == [folder]
    caplog.clear()
    assert prepare(small(), 0) == folder and not caplog.text


@pytest.mark.parametrize("how", ["a file", "an empty folder", "a broken link"])
def test_whatever_stands_in_the_place_of_a_prepared_folder_gives_way(how, caplog):
    folder = prepare(small(), 0)
    shutil.rmtree(folder)
    if how == "a file":
        folder.write_text("")
    elif how == "an empty folder":
        folder.mkdir()
    else:
        folder.symlink_to("nowhere")
    assert Shards.open(prepare(small(), 0)).clients == 3 and "is made again" in caplog.text


def test_a_file_is_digested_once_and_again_after_any_change(tmp_path, monkeypatch):
    read = []
    path = tmp_path / "file"
    digest = files.hashlib.file_digest
    monkeypatch.setattr(files.hashlib, "file_digest", lambda *a: read.append(a) or digest(*a))
    path.write_text("one")
    assert files.digest(path) == files.digest(path) and len(read) == 2  # it has changed just now
    monkeypatch.setattr(files, "CERTAIN", 0)
    time.sleep(0.02)
    first = {files.digest(path) for _ in range(3)}
    assert len(read) == 3 and len(first) == 1
    for change in (
        lambda: path.write_text("two"),
        lambda: os.replace(shutil.copy(path, tmp_path / "x"), path),
    ):
        time.sleep(0.02)
        stat = path.stat()
        reads = len(read)
        change()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert files.digest(path) not in first and len(read) == reads + 1


def test_digests_are_not_remembered_where_times_are_made_up(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("one")
    made_up = dict.fromkeys(("device", "inode", "size", "written", "changed"), 10**9)
    monkeypatch.setattr(files, "_facts", lambda _: made_up)
    for text in ("one", "two"):
        (tmp_path / "file").write_text(text)
        assert files.digest(tmp_path / "file") == files.hashlib.sha256(text.encode()).hexdigest()


def test_a_remembered_digest_that_was_damaged_is_taken_again(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(files, "CERTAIN", 0)
    (tmp_path / "file").write_text("one")
    time.sleep(0.02)
    found = files.digest(tmp_path / "file")
    (entry,) = (cache / "digests").iterdir()
    for damaged in ("", "[]", "3", entry.read_text().replace(found, "0" * 64), "[" * 10_000):
        entry.write_text(damaged)
        assert files.digest(tmp_path / "file") == found


def test_a_calibration_that_was_edited_is_computed_again(cache):
    query = Query("update", bound=1.0, std=1.0)
    mechanism = Mechanism(Sampling("full", 10, 10), (query,), rounds=3)
    z = noise_for(2.0, mechanism, "zero_out", 1e-5)
    (kept,) = cache.glob("noise-*.json")
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"noise_multiplier": z / 2}))
    assert noise_for(2.0, mechanism, "zero_out", 1e-5) == z
    assert json.loads(kept.read_text())["noise_multiplier"] == z
    kept.write_text("[" * 10_000)
    assert noise_for(2.0, mechanism, "zero_out", 1e-5) == z
    assert calibration.cached_multipliers(["another"], lambda: 1.0) == 1.0 != z


def test_weights_in_the_place_of_imagenets_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.hub._hub_dir", str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "resnet18-f37072fd.pth").write_bytes(b"others")
    images = np.zeros((2, 1, 8, 8), np.uint8)
    with refusal(r"data.features.weights = 'imagenet': expected .* as it was published"):
        ResNet18Features().columns(images, images, None)


def test_a_file_whose_name_no_file_has_is_refused(tmp_path):
    for name in ("x" * 5000, "nowhere\0.npz", str(tmp_path)):
        with refusal(r"data.train = .*a file, absolute or under"):
            prepare(data.parse({"kind": "table", "train": name, "clients": 2}), 0)


# --- a cache that others can write to ---


def _other_owner(path):
    if os.geteuid() != 0:
        pytest.skip("to be owned by another takes root")
    os.chown(path, 12345, -1, follow_symlinks=False)


def _link(features):
    features.rename(features.parent.parent / "features")
    features.symlink_to(features.parent.parent / "features")


def _link_of_another(features):
    _link(features)
    _other_owner(features)


def _link_for_all(features):
    _link(features)
    features.chmod(0o777)  # what it leads to


# what leaves a cache, and its folder `features`, as ones that another user can, or could, write to
OPENED_UP = {
    "for all": lambda features: features.parent.chmod(0o777),
    "for all, sticky": lambda features: features.parent.chmod(0o1777),
    "for the group": lambda features: features.parent.chmod(0o770),
    "of another": lambda features: _other_owner(features.parent),
    "a folder for all": lambda features: features.chmod(0o777),
    "a folder of another": _other_owner,
    "a link to a folder for all": _link_for_all,
    "a link of another": _link_of_another,
}


@pytest.mark.parametrize("how", OPENED_UP)
def test_a_cache_that_others_can_write_to_is_not_believed(how, tmp_path, monkeypatch, caplog):
    root = tmp_path / "cache"
    monkeypatch.setenv("RAYDPFL_CACHE", str(root))
    assert files.cache_root() == root
    files.keep_json(root / "noise.json", 1)
    (root / "features").mkdir(mode=0o700, parents=True)
    OPENED_UP[how](root / "features")
    private = files.cache_root()
    assert private != root and private.stat().st_mode & 0o777 == 0o700
    assert not [*private.iterdir()]
    assert files.cache_root() == private == Path(os.environ["RAYDPFL_CACHE"])  # of children too
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the cache is not used") and f"go-w {root})" in said
    assert "\n" not in said
    monkeypatch.setenv("RAYDPFL_CACHE", str(root))
    assert files.cache_root() == private and len(caplog.records) == 1


def test_a_cache_at_an_address_or_none_named_is_private_too(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "raydpfl").mkdir()
    (tmp_path / "raydpfl").chmod(0o777)
    monkeypatch.setenv("RAYDPFL_CACHE", "s3://bucket/cache")
    private = files.cache_root()
    assert not private.is_relative_to(tmp_path)
    assert os.environ["RAYDPFL_CACHE"] == "s3://bucket/cache" and files.cache_root() == private


def test_without_a_home_directory_the_cache_is_to_be_named(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "RAYDPFL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with refusal("RAYDPFL_CACHE = None: expected a folder, as this user"):
        files.cache_root()
    assert client._token() is None


def test_a_private_cache_goes_with_its_process(tmp_path):
    code = "from raydpfl.storage import files; print(files.cache_root())"
    tmp_path.chmod(0o777)
    environment = {**os.environ, "RAYDPFL_CACHE": str(tmp_path)}
    done = processes.run([sys.executable, "-c", code], env=environment, check=True)
    assert not Path(done.stdout.strip()).exists() and "raydpfl-cache-" in done.stdout


def test_whatever_the_umask_what_the_cache_keeps_is_believed_again(tmp_path, monkeypatch):
    root = tmp_path / "far" / "cache"
    monkeypatch.setenv("RAYDPFL_CACHE", str(root))
    before = os.umask(0)
    try:
        files.keep_json(files.cache_root() / "rounds" / "one.json", [1])
        folder = files.cache_root() / "data" / "one"
        files.fill_folder(folder, lambda scratch: (scratch / "rows").write_text("1"))
        files.data_root(None)
        (root / "runs").mkdir(exist_ok=True)  # by a run that was submitted
        assert files.cache_root() == root and files.is_intact(folder)
        assert files.read_own_json(root / "rounds" / "one.json") == [1]
    finally:
        os.umask(before)
    made = {path for path in root.rglob("*") if path.stat().st_mode & 0o022}
    assert made == {root / "runs"} and root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["folder for all", "file for all", "folder", "file", "seal"])
def test_prepared_data_that_another_could_have_changed_are_made_again(how, cache, caplog):
    folder = files.cache_root() / "data" / "one"
    files.fill_folder(folder, lambda scratch: (scratch / "rows").write_text("1"))
    place = {"folder": folder, "file": folder / "rows", "seal": folder / files.SEAL}[how.split()[0]]
    if "for all" in how:
        place.chmod(0o777)
    else:
        _other_owner(place)
    assert not files.is_intact(folder)
    assert "is made again" in caplog.text
    files.fill_folder(folder, lambda scratch: (scratch / "rows").write_text("2"))
    assert files.is_intact(folder) and (folder / "rows").read_text() == "2"


@pytest.mark.parametrize("how", ["for all", "of another", "link", "pipe"])
def test_what_another_could_have_kept_is_not_read(how, cache):
    place = files.cache_root() / "rounds" / "one.json"
    files.keep_json(place, 1)
    assert files.read_own_json(place) == 1
    if how == "for all":
        place.chmod(0o666)
    elif how == "of another":
        _other_owner(place)
    else:
        place.unlink()
        if how == "pipe":
            os.mkfifo(place)
        else:
            (cache / "other.json").write_text("2")
            place.symlink_to(cache / "other.json")
    with pytest.raises(OSError):
        files.read_own_json(place)


def test_directories_that_begin_in_one_second_have_other_names():
    assert len({storage.new("run") for _ in range(5)}) == 5


@pytest.mark.parametrize("scheme", ["file://", "file://localhost", "file:", "FILE://"])
@pytest.mark.parametrize("name,path", [("a%20b", "a b"), ("a#b", "a#b"), ("a?b", "a?b")])
def test_a_file_address_is_a_path(scheme, name, path):
    assert storage.join_address(f"{scheme}/tmp/{name}", "c") == f"/tmp/{path}/c"


def test_a_file_address_of_another_machine_is_refused():
    with refusal("address = 'file://runs/one': expected file:///WHOLE/PATH"):
        storage.location("file://runs/one")


def test_a_relative_cache_is_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDPFL_CACHE", "cache")
    assert files.cache_root() == tmp_path / "cache"
