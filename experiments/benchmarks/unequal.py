"""What unequal clients cost: samples a second with log-normal sizes (sigma 1) against equal ones.

    python experiments/benchmarks/unequal.py [--rounds 60] [--batch 10]

The same softmax and number of samples on average, in one process, a round of each in turn, by the
clock of the processor. `--batch` 10: 20 steps of 10, so that every client takes about as many
samples a round. `--batch full`: 20 steps on all that it has, so that a client's work goes by its
size.
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
        "data": {"kind": "synthetic", "clients": 3000, "samples": 80, "sizes": SIZES[name]},
        "model": {"kind": "softmax"},
        "selection": {"kind": "uniform", "cohort": 150},
        "local": {"kind": "sgd", "steps": 20, "batch": options.batch, "lr": 0.1},
        "bounding": {"kind": "clip", "bound": 1.0},
        "client": {"actors": 0},
        "evaluate": {"every": WARM + options.rounds},
        "measure": [],
    }


if __name__ == "__main__":
    main()
