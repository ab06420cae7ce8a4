"""experiments/benchmarks/compare.py: what it counts is what it says, and it runs."""

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import processes
import psutil
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).parent.parent / "experiments" / "benchmarks"
PEERS = {"pfl": "pfl", "flwr": "Flower", "blazefl": "BlazeFL"}


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("compare")


@pytest.fixture
def nets(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER / "peers")
    return importlib.import_module("nets")


def run_tiny(out: Path, *options: str) -> dict:
    """What compare.py writes of a few rounds of softmax."""
    least = ["--tiny", "--blocks", "1", "--seconds", "0.1", "--out", out, *options]
    command = [sys.executable, FOLDER / "compare.py", *least]
    done = processes.run(command, timeout=600)
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    return json.loads(out.read_text())


@pytest.mark.parametrize("net", ["softmax", "mlp", "cnn"])
def test_the_flops_of_a_round_are_those_that_torch_counts(net, compare, nets):
    work = compare.WORK[net]
    module = nets.build(net)
    x = torch.rand(work.batch, *work.shape)
    with FlopCounterMode(display=False) as counter:
        F.cross_entropy(module(x), torch.zeros(work.batch, dtype=torch.int64)).backward()
    assert work.flops == work.cohort * work.steps * counter.get_total_flops()


@pytest.mark.slow
def test_processes_that_have_ended_count(compare):
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    parent = (
        f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {spin!r}])\n"
        "print(flush=True)\ntime.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        seconds = compare.processor_seconds(psutil.Process(process.pid))
        process.kill()
    assert seconds >= 0.45


def test_who_cannot_be_imported_is_left_out_in_one_line(compare, capsys, monkeypatch):
    monkeypatch.setitem(compare.NEEDS, "a peer", ("json",))
    assert compare.has("a peer", sys.executable)
    assert not compare.has("a peer", "no/such/python")
    monkeypatch.setitem(compare.NEEDS, "a peer", ("json", "no_such_package"))
    assert not compare.has("a peer", sys.executable)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("a peer is left out") and "no/such/python" in first
    assert "no_such_package" in second


def test_ratios_are_of_each_side_at_its_best(compare):
    rows = [
        {"peer": peer, "wall_seconds": wall, "processor_seconds": processor}
        for peer, wall, processor in (
            ("raydpfl", 2.0, 2.0),
            ("raydpfl", 1.0, 4.0),
            ("pfl", 12.0, 10.0),
            ("pfl", 8.0, 16.0),
        )
    ]
    found = compare.ratios({"contenders": rows})
    assert found == [{"peer": "pfl", "wall": 8.0, "processor": 5.0}]


def test_a_contender_that_fails_is_told_of_and_leaves_nothing(compare, tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("import sys\nprint('what was wrong', file=sys.stderr)\nsys.exit(3)\n")
    entered = compare.Contender("a peer", "a peer", str(program), sys.executable, {})
    work = replace(compare.WORK["softmax"], clients=2, cohort=1)
    with pytest.raises(SystemExit, match=r"(?s)a peer ended with 3.*what was wrong"):
        compare.run_block(entered, work, "softmax", tmp_path, timeout=60.0)
    assert not [each for each in psutil.Process().children() if str(program) in each.cmdline()]


@pytest.mark.slow
def test_all_numbers_of_a_run_are_written(tmp_path):
    who = ("--contenders", "inline")
    (job,) = run_tiny(tmp_path / "out.json", *who, "--jobs", "softmax")["jobs"]
    (ours,) = job["contenders"]
    assert job["job"] == "softmax" and job["peak_flops"] > 1e9 and job["ratios"] == []
    assert ours["name"] == "raydpfl, inline" and ours["rounds"] >= 3 and ours["blocks"] == 1
    assert ours["startup_seconds"] > ours["wall_seconds"] > 0
    assert ours["peak_mb"] >= ours["client_mb"] > 50 and 1 < ours["loss"] < 3
    flops = ours["share_of_peak"] * ours["wall_seconds"] * job["peak_flops"]
    assert flops == pytest.approx(3 * 20 * 10 * 4 * 7840)  # clients, steps, rows, a row's


@pytest.mark.slow
@pytest.mark.parametrize("module", PEERS)
def test_peers_run_where_they_are_installed(module, tmp_path):
    pytest.importorskip(module)
    who = ("--contenders", "inline", PEERS[module])
    (job,) = run_tiny(tmp_path / "out.json", *who, "--jobs", "softmax")["jobs"]
    assert PEERS[module] in [each["peer"] for each in job["ratios"]]
