"""Runs whose directory is on an S3 server: each is killed again and again, at random
instants and at random requests, and goes on here or on what looks like another machine.

This file is also the program that does the killing (`python test_storage_kills.py FOLDER BUCKET`);
RAYDPFL_KILLS says how often (a few by default).
"""

import json
import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import processes
import pytest
from test_ledger_kills import EXPERIMENT, note_releases, released, spawned

from raydpfl import Experiment
from raydpfl.runtime import runner
from raydpfl.storage import lock
from raydpfl.storage.store import Store

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("RAYDPFL_KILLS", 4))
REQUESTS = 60  # about as many as a run makes
LAPSE = 1.0  # seconds, for a machine that is waited for


def attempt(place: str, notes: Path, machine: int, resume: bool, mine: int | None) -> None:
    """An attempt at the run at `place`; it dies before or after its `mine`-th change there."""
    os.environ["RAYDPFL_CACHE"] = f"{notes}-cache-{machine}"
    lock.LAPSE = LAPSE
    lock.MARGIN = lock.BEAT = LAPSE / 5
    lock.TICK = LAPSE / 50
    done = 0

    def fatal(call):
        def guarded(*arguments):
            nonlocal done
            done += 1
            if done == mine and done % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            call(*arguments)
            if done == mine:
                os.kill(os.getpid(), signal.SIGKILL)

        return guarded

    Store.put = fatal(Store.put)
    Store.remove = fatal(Store.remove)
    note_releases(notes)
    runner.run(Experiment.from_dict(EXPERIMENT), place, resume=resume)


class Bucket:
    """What the server has, read with a client that is not ours."""

    def __init__(self, name: str):
        import boto3

        self.name = name
        self.client = boto3.client("s3")

    def files(self, folder: str) -> dict[str, bytes]:
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix=f"{folder}/")
        names = [each["Key"] for each in listed.get("Contents", [])]
        read = {name: self.client.get_object(Bucket=self.name, Key=name) for name in names}
        found = {name: each["Body"].read() for name, each in read.items()}
        return {name.removeprefix(f"{folder}/"): text for name, text in found.items()}


def spent(files: dict[str, bytes]) -> list[bytes]:
    """The lines of the ledger, put together the plain way."""
    text = files.get("ledger.jsonl", b"")
    for name in sorted(name for name in files if name.startswith("ledger.jsonl.from-")):
        begins = int(name.rpartition("-")[2])
        rest = text[begins:]
        assert files[name].startswith(rest) or rest.startswith(files[name])
        text = max(text, text[:begins] + files[name], key=len)
    return text.splitlines()


@dataclass
class Fire:
    """The runs of a bucket that are killed, and the one that is not."""

    base: Path
    bucket: Bucket
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    hits: list[str] = field(default_factory=list)
    seen: list[int] = field(default_factory=list)
    finished: int = 0
    machine: int = 0

    def begin(self) -> None:
        """The run that nothing happens to."""
        runner.run(Experiment.from_dict(EXPERIMENT), self.base / "reference")
        began = time.monotonic()
        assert not spawned(attempt, *self.given("whole", False, None))
        self.span = time.monotonic() - began
        self.truth = dict(released(self.base / "whole"))
        self.whole = self.bucket.files("whole")

    def given(self, name: str, resume: bool, mine: int | None) -> tuple:
        return f"s3://{self.bucket.name}/{name}", self.base / name, self.machine, resume, mine

    def turn(self) -> None:
        """An attempt at the run that is under way, killed unless there were enough."""
        name = f"run-{self.finished}"
        over = len(self.hits) >= KILLS
        by_time = len(self.hits) % 2 == 0
        mine = None if by_time or over else self.chance.randrange(1, REQUESTS)
        seconds = self.chance.random() * self.span if by_time and not over else None
        before = len(released(self.base / name))
        resume = "config.yaml" in self.bucket.files(name)
        killed = spawned(attempt, *self.given(name, resume, mine), seconds=seconds)
        made = self.check(name)
        if by_time:  # how fast the machine is just now
            self.span *= 0.7 if not killed else 1.3 if made == before else 1.0
        if killed:
            self.hits.append("time" if by_time else "request")
            self.machine += self.chance.random() < 0.25
        else:
            self.check_finished(name)
            self.finished += 1

    def check(self, name: str) -> int:
        """The store's ledger is the beginning of the whole run's, and has every release."""
        lines = spent(self.bucket.files(name))
        assert lines == self.whole["ledger.jsonl"].splitlines()[: len(lines)]
        made = released(self.base / name)
        assert len(lines) > max((int(t) for t, _ in made), default=-1), "less than the truth"
        assert all(self.truth[t] == digest for t, digest in made), "another release of a round"
        self.seen.append(len(lines))
        return len(made)

    def check_finished(self, name: str) -> None:
        """A run that came through is the whole one, and that on a disk."""
        files = self.bucket.files(name)
        reference = self.base / "reference"
        for same in ("ledger.jsonl", "config.yaml"):
            assert files[same] == self.whole[same] == (reference / same).read_bytes()
        summaries = [files["summary.json"], self.whole["summary.json"]]
        summaries.append((reference / "summary.json").read_bytes())
        told = [json.loads(each) for each in summaries]
        for key in ("model_sha256", "guarantees", "rounds", "status"):
            assert told[0][key] == told[1][key] == told[2][key]


def fire(base: Path, bucket: Bucket) -> None:
    """Kills attempts at a run, starting over where one comes through; prints a report as JSON."""
    runs = Fire(base, bucket)
    runs.begin()
    while len(runs.hits) < KILLS or not runs.finished:
        runs.turn()
    report = {"kills": runs.hits, "rounds": runs.seen, "finished": runs.finished}
    print(json.dumps(report | {"machines": runs.machine + 1}))


def test_a_run_on_s3_that_is_killed_again_and_again_loses_nothing(s3, tmp_path):
    bucket = s3().partition("://")[2]
    command = [sys.executable, __file__, str(tmp_path), bucket]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = processes.run(command, timeout=600, env=os.environ | path)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["kills"]) == KILLS and report["finished"]
    assert {"time", "request"} == set(report["kills"])


if __name__ == "__main__":
    fire(Path(sys.argv[1]), Bucket(sys.argv[2]))
