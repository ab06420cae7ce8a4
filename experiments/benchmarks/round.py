"""A round of the softmax job in this checkout against another checkout of the project:

    git worktree add ../before 6d5486e
    python experiments/benchmarks/round.py ../before

The job is the one that rounds are tuned for: 7,850 parameters, 150 of 3,000 clients a round, 20
steps on batches of 10 of a client's 20 rows, trained inline. Each checkout runs in a process of
its own and both take turns, a short run each, so that what else the machine does hits both alike.
Each run starts afresh, and its first rounds are left out. Three times are printed: the median over
rounds of `seconds` in rounds.parquet, and the wall and the processor time that a run takes for each
round beyond its first, which have all in them that happens between rounds. On a machine that others
use, the processor's is the one to trust. The runs must end with the same model, or, where a sum has
changed its form between the checkouts, with one whose test loss is the same to rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2]
WARM = 5  # rounds of every run that do not count
ROUNDING = 1e-4  # by which the losses of models of different roundings may differ


def job(rounds: int, multiplier: float, mnist: bool) -> dict[str, Any]:
    """The experiment, of public config keys alone, so that any version reads it."""
    data: dict[str, Any] = {"kind": "synthetic", "clients": 3000, "samples": 20, "features": 784}
    data["sizes"] = {"kind": "balanced"}
    if mnist:
        partition = {"kind": "shards", "per_client": 5}
        data = {"kind": "mnist", "clients": 3000, "partition": partition}
    noise: dict[str, Any] = {"kind": "none"}
    if multiplier:
        noise = {"kind": "gaussian", "multiplier": multiplier}
    return {
        "rounds": rounds,
        "data": data,
        "model": {"kind": "softmax"},
        "selection": {"kind": "uniform", "cohort": 150},
        "local": {"kind": "sgd", "steps": 20, "batch": 10, "lr": 0.1, "weight_decay": 1e-4},
        "bounding": {"kind": "clip", "bound": 1.0},
        "noise": noise,
        "client": {"actors": 0},
        "evaluate": {"every": rounds},
    }


def serve() -> None:
    """A checkout's process: runs each experiment that it reads, and answers with what it took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a run prints is no answer
    import raydpfl

    answers.write(json.dumps(raydpfl.__file__) + "\n")
    answers.flush()
    for line in sys.stdin:
        tree = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            worked = time.process_time()
            result = raydpfl.run(raydpfl.Experiment.from_dict(tree), Path(folder) / "run")
            wall = time.perf_counter() - began
            worked = time.process_time() - worked
        answer = {
            "wall": wall,
            "worked": worked,
            "seconds": result.rounds["seconds"].to_pylist(),
            "model": result.summary["model_sha256"],
            "loss": result.summary["test_loss"],
        }
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


@dataclass
class Side:
    """One checkout: its process, and the seconds of its rounds so far."""

    checkout: Path
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)
    models: set[str] = field(default_factory=set)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, checkout: Path, cache: Path, data: Path | None) -> Side:
        """Starts the process. Raises SystemExit where it would not be this checkout's code."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "RAYDPFL_CACHE": str(cache),
            "OMP_NUM_THREADS": "1",
        }
        if data is not None:
            environment["RAYDPFL_DATA"] = str(data)
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        side = cls(checkout, process)
        package = Path(side.answer())
        if checkout not in package.resolve().parents:
            raise SystemExit(f"{checkout} has no package raydpfl: {package} would run")
        return side

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.checkout} ended")
        return json.loads(line)

    def run(self, tree: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(tree) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def block(self, tree: dict[str, Any]) -> None:
        """A run of one round and one of all, counted."""
        first = self.run({**tree, "rounds": 1, "evaluate": {"every": 1}})
        whole = self.run(tree)
        self.seconds += whole["seconds"][WARM:-1]  # the last one evaluates
        beyond = tree["rounds"] - 1
        self.walls.append((whole["wall"] - first["wall"]) / beyond)
        self.worked.append((whole["worked"] - first["worked"]) / beyond)
        self.models.add(whole["model"])
        self.losses.append(whole["loss"])

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def report(before: Side, after: Side) -> None:
    print(f"{'ms a round':28}{'before':>10}{'here':>10}{'ratio':>8}")
    for name, values in (
        ("median of rounds.parquet", "seconds"),
        ("wall, median of runs", "walls"),
        ("processor, median of runs", "worked"),
    ):
        old = median(getattr(before, values)) * 1e3
        new = median(getattr(after, values)) * 1e3
        print(f"{name:28}{old:10.2f}{new:10.2f}{new / old:8.2f}")


def compare(before: Side, after: Side) -> None:
    """Raises SystemExit where the runs did not end alike."""
    models = before.models | after.models
    if len(models) == 1:
        print(f"all models alike: {models.pop()}")
        return
    apart = abs(after.losses[0] / before.losses[0] - 1)
    print(f"models before {before.models}, here {after.models}; test losses {apart:.1e} apart")
    if len(before.models) > 1 or len(after.models) > 1 or apart > ROUNDING:
        raise SystemExit("the runs did not end alike")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", nargs="?", type=Path, help="the other checkout's directory")
    parser.add_argument("--rounds", type=int, default=60, help="of each run")
    parser.add_argument("--blocks", type=int, default=6, help="runs of each checkout, by turns")
    parser.add_argument("--multiplier", type=float, default=0.0, help="of the noise; 0: none")
    parser.add_argument("--data", type=Path, help="a data root: MNIST of it, not synthetic data")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.before is None or options.rounds < WARM + 2:
        parser.error(f"the other checkout's directory, and at least {WARM + 2} rounds")
    tree = job(options.rounds, options.multiplier, options.data is not None)
    with tempfile.TemporaryDirectory() as folder:
        sides = [
            Side.start(checkout.resolve(), Path(folder) / name, options.data)
            for name, checkout in (("before", options.before), ("here", HERE))
        ]
        for side in sides:
            side.run(tree)  # prepares the data
        for _ in range(options.blocks):
            for side in sides:
                side.block(tree)
        for side in sides:
            side.stop()
    report(*sides)
    compare(*sides)


if __name__ == "__main__":
    main()
