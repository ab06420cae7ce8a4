"""A cluster whose nodes share no disk: what a node lacks is sent to it once, and the bits are those
of one process.
"""

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from conftest import experiment
from test_cluster import carry_out, hosted

from raydpfl import Experiment, run, storage
from raydpfl.errors import ConfigError, FileError
from raydpfl.runtime import file_transfer
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.files import SEAL, fill_folder, is_intact

pytestmark = pytest.mark.slow

# A node of two CPUs whose processes, all started anew, do not see the folder HIDDEN and have a
# cache of their own.
NODE = """
sys.executable = sys.argv[5]
apart = {"RAYDPFL_CACHE": sys.argv[2], "HIDDEN": sys.argv[3], "PYTHONPATH": sys.argv[4]}
cluster.add_node(**{**node, "num_cpus": 2}, env_vars=apart)
"""
BLIND = """
import os, sys

hidden = os.environ["HIDDEN"]

def gone(path):
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(hidden)

def hide(event, arguments):
    if event == "open" and gone(arguments[0]):
        raise FileNotFoundError(2, "it is another machine's", os.fspath(arguments[0]))

def blind(call):
    def guarded(path, *more, **options):
        if gone(path):
            raise FileNotFoundError(2, "it is another machine's", os.fspath(path))
        return call(path, *more, **options)
    return guarded

sys.addaudithook(hide)
os.stat = blind(os.stat)
os.lstat = blind(os.lstat)
"""


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """The environment to join a cluster with such a node, its folder HIDDEN, and its cache."""
    base = tmp_path_factory.mktemp("apart")
    blind, theirs, hidden = (base / name for name in ("blind", "theirs", "hidden"))
    blind.mkdir()
    hidden.mkdir()
    (blind / "sitecustomize.py").write_text(BLIND)
    path = f"{blind}:{os.environ.get('PYTHONPATH', '')}"
    with hosted(NODE, str(theirs), str(hidden), path, sys.executable) as (_, environment):
        yield {**environment, "RAYDPFL_CACHE": str(hidden / "cache")}, hidden, theirs


def test_a_run_over_nodes_that_share_no_disk_has_the_bits_of_one_process(apart, tmp_path):
    environment, hidden, theirs = apart
    first = run(experiment(client={"actors": 0, "backend": "fused"}), tmp_path / "first")
    weights = hidden / "start.safetensors"
    shutil.copy(Path(first.out) / "model.safetensors", weights)
    told = {"model": {"kind": "softmax", "init": str(weights)}}
    alone = run(experiment(**told, client={"actors": 0, "backend": "fused"}), tmp_path / "alone")
    config = hidden / "config.yaml"
    client = {"actors": 2, "num_cpus": 1, "backend": "fused"}
    config.write_text(experiment(**told, client=client).to_yaml())
    carry_out("run", config, "--out", hidden / "out", env=environment, cwd=hidden)
    summary = json.loads((hidden / "out" / "summary.json").read_text())
    assert summary["model_sha256"] == alone.summary["model_sha256"]
    assert summary["ray"]["actors"] == 2
    name = resolve(experiment()).shards.name
    assert is_intact(theirs / "data" / name)
    assert [path.name for path in theirs.glob("sent/*/*.safetensors")] == ["start.safetensors"]


def test_trials_on_a_node_that_sees_no_disk_are_sent_their_data(apart, tmp_path):
    environment, hidden, theirs = apart
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 4)).astype(np.float32)
    np.savez(hidden / "table.npz", x=x, y=(x[:, 0] > 0).astype(np.int64))
    data = {"kind": "table", "train": str(hidden / "table.npz"), "x": ["x"], "y": "y"}
    tree = experiment(data={**data, "clients": 10}, selection={"cohort": 5}).to_dict()
    tree["local"]["lr"] = {"grid": [0.05]}
    tree["client"] |= {"actors": 0, "backend": "fused"}
    tree["sweep"] = {"cpus": 2}  # which the head has not
    config = hidden / "sweep.yaml"
    config.write_text(yaml.safe_dump(tree))
    place = f"local://{tmp_path}/store/sweep"
    carry_out("sweep", config, "--out", place, env=environment, cwd=hidden)
    with storage.readable_folder(place) as folder:
        (row,) = pq.read_table(folder / "results.parquet").to_pylist()
        told = Experiment.from_yaml(folder / row["directory"] / "config.yaml")
    alone = run(told, tmp_path / "alone")
    assert row["status"] == "completed"
    assert row["model_sha256"] == alone.summary["model_sha256"]
    name = resolve(told).shards.name
    assert is_intact(theirs / "data" / name)


@pytest.fixture
def node(shared_ray, monkeypatch):
    monkeypatch.setattr(file_transfer, "PIECE", 10_000)
    return shared_ray.get_runtime_context().get_node_id()


def test_a_prepared_folder_is_sent_once_to_many_processes_of_a_node(node, tmp_path, monkeypatch):
    folder = resolve(experiment(data={"kind": "synthetic", "clients": 20})).shards
    assert sum(path.stat().st_size for path in folder.iterdir()) > 20 * file_transfer.PIECE
    sent = []
    pieces = file_transfer._pieces
    monkeypatch.setattr(
        file_transfer, "_pieces", lambda *given: sent.append(given[0]) or pieces(*given)
    )
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    place = tmp_path / "data" / folder.name
    with ThreadPoolExecutor(3) as pool:
        files = partial(file_transfer._call, node, file_transfer._sealed_files, str(folder))
        copies = [pool.submit(file_transfer._copy, folder, place, node, files) for _ in range(3)]
        assert {copy.result() for copy in copies} == {place}
    assert is_intact(place)
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in place.iterdir()} == names
    for name in names - {SEAL}:
        assert (place / name).read_bytes() == (folder / name).read_bytes()
    assert len(sent) == len(set(sent)) == len(names) - 1


def test_what_is_here_is_not_sent(tmp_path):
    fill_folder(tmp_path / "here", lambda scratch: (scratch / "a").write_text("1"))
    assert file_transfer.fetch_folder(str(tmp_path / "here"), "no node") == tmp_path / "here"
    assert (
        file_transfer.fetch_file(str(tmp_path / "here" / "a"), "no node") == tmp_path / "here" / "a"
    )


def test_a_file_arrives_under_each_of_its_names(node, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"weights")
    with monkeypatch.context() as there:
        there.setattr(file_transfer.Path, "is_file", lambda path: False)
        sent = [file_transfer.fetch_file(str(tmp_path / name), node) for name in ("a", "b")]
    assert [path.name for path in sent] == ["a", "b"]
    assert [path.read_bytes() for path in sent] == [b"weights"] * 2


@pytest.mark.parametrize(
    ("files", "error", "reason"),
    [
        ({"a": (25_000, "another digest")}, FileError, "did not arrive as it is"),
        ({"a": (1 << 60, "")}, ConfigError, r"RAYDPFL_CACHE = .*MB free"),
        ({"gone": (10, "")}, FileError, r"did not arrive.*No such file"),
    ],
)
def test_what_arrives_otherwise_or_finds_no_room_is_refused(
    files, error, reason, node, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a").write_bytes(bytes(25_000))
    target = tmp_path / "cache" / "b"
    with pytest.raises(error, match=reason):
        file_transfer._copy(tmp_path, target, node, lambda: files)
    assert not target.exists()
