"""The ledger of runs that are killed fifty times, at random instants and in the midst of
what they write.

This file is also the program that does the killing (`python test_ledger_kills.py FOLDER`): it
imports all once, and forks a process for every attempt at a run. Whatever was released is noted in
a file beside the run, at the moment of its release.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import processes
import pytest

from raydpfl import Experiment
from raydpfl.privacy import Ledger
from raydpfl.runtime import runner
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.storage import run_files

pytestmark = pytest.mark.slow

KILLS = 50
ROUNDS = 10
EXPERIMENT = {
    "seed": 5,
    "rounds": ROUNDS,
    "data": {"kind": "synthetic", "clients": 20, "samples": 10, "test_samples": 20,
             "sizes": {"kind": "balanced"}},
    "selection": {"kind": "uniform", "cohort": 6},
    "local": {"kind": "sgd", "steps": 2, "batch": 5, "lr": 0.1},
    "bounding": {"kind": "quantile_clip", "bound": 0.2},
    "noise": {"kind": "gaussian", "multiplier": 2.0, "delta": 1e-5},
    "server": {"kind": "momentum"},
    "privacy": {"accountants": ["rdp"]},
    "client": {"actors": 0, "chunk": 3, "backend": "fused"},
    "measure": [],
}  # fmt: skip


def note_releases(folder: Path) -> None:
    """Has the runs of this process note each release beside their folder, and snapshot each round,
    which their own pace would not in so short a time.
    """
    release, write = Coordinator.release, os.write
    notes = os.open(f"{folder}.released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def noting(self, t, total):
        released = release(self, t, total)
        write(notes, f"{t} {hashlib.sha256(released.tobytes()).hexdigest()}\n".encode())
        return released

    Coordinator.release = noting
    runner.versions = dict  # what is installed takes longer to list than the run takes
    run_files.SHARE = 1e9


def attempt(folder: Path, resume: bool, mine: int | None) -> None:
    """An attempt at the run in `folder`; before its `mine`-th durable change it dies."""
    write = os.write
    fsync = os.fsync
    replace = os.replace
    done = 0

    def fatal(call, half=None):
        def guarded(*arguments, **options):
            nonlocal done
            done += 1
            if done == mine:
                if half:
                    half(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return guarded

    note_releases(folder)
    # Of a line that is written, half arrives.
    os.write = fatal(write, lambda descriptor, line: write(descriptor, line[: len(line) // 2]))
    os.fsync = fatal(fsync)
    os.replace = fatal(replace)
    runner.run(Experiment.from_dict(EXPERIMENT), folder, resume=resume)


def spawned(attempt, *given, seconds: float | None = None) -> bool:
    """Whether an attempt was killed: by itself, or from here after some `seconds`."""
    child = os.fork()  # this process has imported all
    if child == 0:
        try:
            attempt(*given)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    killed = os.WTERMSIG(status) == signal.SIGKILL
    assert status == 0 or killed, f"an attempt ended with status {status}"
    return status != 0


def released(folder: Path) -> list[list[str]]:
    """(round, digest of what was released) of all releases so far."""
    path = Path(f"{folder}.released")
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def check_after_a_kill(folder: Path, reference: Path) -> int:
    """The ledger parses, is the beginning of the uninterrupted run's, and has every round that was
    released. Returns its rounds, and removes what an attempt left that died before it was a run.
    """
    path = folder / "ledger.jsonl"
    whole = (reference / "ledger.jsonl").read_bytes()
    text = path.read_bytes() if path.exists() else b""
    assert whole.startswith(text), "the ledger differs from that of the uninterrupted run"
    copy = folder.parent / "copy.jsonl"
    copy.write_bytes(text)
    spent = Ledger(copy, resume=True).spending()
    last = max((int(t) for t, _ in released(folder)), default=-1)
    assert spent.rounds > last, f"{last} was released, {spent.rounds} are recorded"
    if last >= 0:
        assert spent.epsilon["rdp"] >= json.loads(whole.splitlines()[last])["epsilon"]["rdp"]
    if not (folder / "config.yaml").exists():
        assert last < 0
        shutil.rmtree(folder, ignore_errors=True)
    return spent.rounds


def check_finished(folder: Path, reference: Path) -> None:
    """A run that came through has the reference's ledger, config, model and guarantees."""
    for name in ("ledger.jsonl", "config.yaml"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()
    ours, theirs = (json.loads((each / "summary.json").read_text()) for each in (folder, reference))
    for name in ("model_sha256", "guarantees"):
        assert ours[name] == theirs[name]


def releases(folders: list[Path], reference: Path) -> int:
    """How many releases there were; a round done again releases the same."""
    truth = dict(released(reference))
    made = [pair for folder in folders for pair in released(folder)]
    other = [t for t, digest in made if truth[t] != digest]
    assert not other, f"rounds {other}, done again, released something else"
    return len(made)


def fire(base: Path) -> None:
    """Kills attempts at a run, starting over where one comes through; prints a report as JSON."""
    reference = base / "reference"
    # here, so that no attempt has to import anything
    runner.run(Experiment.from_dict(EXPERIMENT), base / "first")
    assert not spawned(attempt, reference, False, None)
    chance = random.Random(3)
    began = time.monotonic()
    assert not spawned(attempt, base / "timed", False, None)
    span = time.monotonic() - began
    hits = []
    finished = 0
    turn = 0
    folder = base / "run-0"
    seen = []
    while len(hits) < KILLS:
        turn += 1
        by_time = turn % 2 == 0
        before = len(released(folder))
        mine = None if by_time else chance.randrange(1, 40)
        seconds = chance.random() * span if by_time else None
        resume = (folder / "config.yaml").exists()
        killed = spawned(attempt, folder, resume, mine, seconds=seconds)
        if by_time:  # how fast the machine is just now
            span *= 0.7 if not killed else 1.3 if len(released(folder)) == before else 1.0
        if killed:
            hits.append("time" if by_time else "write")
            seen.append(check_after_a_kill(folder, reference))
            continue
        check_finished(folder, reference)
        finished += 1
        folder = base / f"run-{finished}"
    # the last one comes through too
    assert not spawned(attempt, folder, (folder / "config.yaml").exists(), None)
    check_finished(folder, reference)
    count = releases([base / f"run-{k}" for k in range(finished + 1)], reference)
    report = {"hits": hits, "finished": finished + 1, "recorded": seen, "releases": count}
    print(json.dumps(report))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fifty_kills_lose_no_spending_and_change_no_bit(tmp_path):
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    program = processes.run(command, timeout=300, env=os.environ | path)
    assert program.returncode == 0, program.stderr[-3000:]
    report = json.loads(program.stdout.splitlines()[-1])
    assert len(report["hits"]) == KILLS and report["hits"].count("write") >= 15
    # kills hit early and late
    assert report["finished"] >= 2 and len(set(report["recorded"])) > ROUNDS // 2
    # some rounds were released, lost, and done again
    assert report["releases"] > ROUNDS * report["finished"]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    fire(Path(sys.argv[1]))
    shutil.rmtree(sys.argv[1], ignore_errors=True)
