"""What a sweep costs beside its trials: 24 small trials, one process per core.

    python experiments/benchmarks/sweep.py [--rounds 100]

Ray is started first, and is not counted. The sweep's whole time, with the starting of its
processes, is compared with the seconds that the rounds of its trials took, added up and divided by
the cores.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from raydpfl.core.hardware import cores
from raydpfl.runtime.session import Session
from raydpfl.sweep import Sweep, run

CONFIG = {
    "data": {
        "kind": "fashion_mnist_mini",
        "clients": 900,
        "partition": {"kind": "shards", "per_client": 5},
    },
    "model": {"kind": "softmax"},
    "selection": {"kind": "uniform", "cohort": 90},
    "local": {
        "kind": "sgd",
        "steps": 20,
        "batch": 10,
        "lr": {"grid": [0.05, 0.1, 0.2, 0.4]},
        "lr_decay": 0.99,
        "weight_decay": 1e-4,
    },
    "bounding": {"kind": "normalize", "bound": {"powers_of_two": [-1, 0]}},
    "noise": {"kind": "gaussian", "epsilon": 8.0, "delta": 1e-4},
    "server": {"kind": "momentum", "lr": 0.5, "momentum": 0.8},
    "sweep": {"repeats": 3},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="of each trial")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Session("local", num_cpus=cores())
    sweep = Sweep.from_dict({**CONFIG, "rounds": options.rounds})
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        result = run(sweep, Path(folder) / "sweep")
        wall = time.monotonic() - began
    trained = sum(result.trials["seconds"].to_pylist())
    share = trained / cores()
    trials = result.trials.num_rows
    processes = result.summary["processes"]
    print(
        f"{trials} trials of {trained / trials:.1f} s in {processes} processes on {cores()} cores"
    )
    print(f"in all {wall:.1f} s; their training, divided by the cores, {share:.1f} s")
    print(f"ratio {wall / share:.2f}")


if __name__ == "__main__":
    main()
