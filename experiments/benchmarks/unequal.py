"""What unequal clients cost: samples a second with log-normal sizes (sigma 1) against equal ones.

    python experiments/benchmarks/unequal.py [--batch 10] [--model softmax] [--features 60]

The same model and number of samples on average, in one process, a round of each in turn, by the
clock of the processor. `--batch` 10: 20 steps of 10, so that every client takes about as many
samples a round. `--batch full`: 20 steps on all that it has, so that a client's work goes by its
size. `--features 784`: rows of the size of an MNIST image.

Not all of the difference is lost: on full batches a client of few rows takes fewer operations a
sample in the span of its rows, and one of many has no such way.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from raydpfl import Experiment
from raydpfl.coordinator import Coordinator
from raydpfl.plan import Plan

WARM = 5  # rounds that are not counted

SIZES = {
    "equal": {"kind": "balanced"},
    "lognormal": {"kind": "lognormal", "sigma": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--batch", type=lambda text: text if text == "full" else int(text), default=10
    )
    parser.add_argument("--model", choices=["softmax", "mlp"], default="softmax")
    parser.add_argument("--features", type=int, default=60)
    parser.add_argument("--clients", type=int, default=3000)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for name in SIZES:
            plan = Plan.make(Experiment.from_dict(tree(name, options)))
            (Path(folder) / name).mkdir()
            runs[name] = Coordinator(plan, str(Path(folder) / name))
            runs[name].start()
        for t in range(WARM + options.rounds):
            for name, coordinator in runs.items():
                began = time.process_time()
                coordinator.round()
                seconds = time.process_time() - began
                if t >= WARM:
                    rates[name].append(samples(coordinator.plan, t) / seconds)
    typical = {name: float(np.median(each)) for name, each in rates.items()}
    print(", ".join(f"{name} {rate:,.0f} samples/s" for name, rate in typical.items()))
    print(f"lognormal against equal: {typical['lognormal'] / typical['equal']:.2f}")


def samples(plan: Plan, t: int) -> int:
    """The samples that the clients of a round take in all their steps."""
    local = plan.experiment.local
    population = plan.population
    clients = plan.experiment.selection.exposed(plan.experiment.seed, t, population)
    sizes = population.sizes[clients]
    return int((local.step_counts(sizes) * local.batch_sizes(sizes)).sum())


def tree(name: str, options: argparse.Namespace) -> dict:
    return {
        "rounds": WARM + options.rounds,
        "data": {
            "kind": "synthetic",
            "clients": options.clients,
            "samples": 80,
            "features": options.features,
            "sizes": SIZES[name],
        },
        "model": {"kind": options.model},
        "selection": {"kind": "uniform", "cohort": 150},
        "local": {"kind": "sgd", "steps": 20, "batch": options.batch, "lr": 0.1},
        "bounding": {"kind": "clip", "bound": 1.0},
        "client": {"actors": 0},
        "evaluate": {"every": WARM + options.rounds},
        "measure": [],
    }


if __name__ == "__main__":
    main()
