"""Ray's own share of a round: two client actors, softmax of 7,850 parameters and an MLP of 159,010,
of clients that train on one row.

    python experiments/benchmarks/runtime.py [--rounds 300]

Runs the same experiment on two actors and inline, in turn, and prints the median milliseconds of a
round of each; their difference is what Ray costs. On a machine that
others use, the smallest tenth of the rounds tells more than the median does: both are printed.
"""

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np

from raydpfl import Experiment, run

TREE = {
    "data": {"kind": "fashion_mnist_mini", "clients": 300},
    "local": {"kind": "sgd", "steps": 1, "batch": 1, "lr": 0.1},
    "bounding": {"kind": "clip", "bound": 1.0},
    "evaluate": {"every": 10**6},
    "measure": [],
}
# models, and cohorts whose own sums take a few milliseconds
MODELS = {
    "softmax": ({"kind": "softmax"}, 150),
    "mlp": ({"kind": "mlp", "hidden": 200}, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    for name, (model, cohort) in MODELS.items():
        seconds: dict[int, list] = {0: [], 2: []}
        with tempfile.TemporaryDirectory() as folder:
            for repeat in range(options.repeats):
                for actors in (2, 0):
                    tree = {**TREE, "rounds": options.rounds, "model": model}
                    tree["selection"] = {"kind": "uniform", "cohort": cohort}
                    tree["client"] = {"actors": actors}
                    result = run(Experiment.from_dict(tree), Path(folder) / f"{actors}-{repeat}")
                    seconds[actors].append(result.rounds["seconds"].to_numpy()[5:])
        for what, share in (("median", 0.5), ("best tenth", 0.1)):
            inline, rayed = (
                float(np.quantile(np.concatenate(seconds[actors]), share)) * 1e3
                for actors in (0, 2)
            )
            times = f"inline {inline:.2f}, two actors {rayed:.2f}, difference {rayed - inline:.2f}"
            print(f"{name}, {what} ms a round, one step on one row: {times}", flush=True)


if __name__ == "__main__":
    main()
