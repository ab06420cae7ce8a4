"""What unequal clients cost: samples a second with log-normal sizes (sigma 1) against equal ones.

    python experiments/benchmarks/unequal.py [--rounds 40] [--actors 0] [--batch 10]

The same softmax and number of samples on average, in turn, several times. `--batch` 10: 20 steps
of 10, so that every client takes about as many samples a round. `--batch full`: 20 steps on all
that it has, so that a client's work goes by its size.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from raydpfl import Experiment, run
from raydpfl.plan import Plan

SIZES = {
    "equal": {"kind": "balanced"},
    "lognormal": {"kind": "lognormal", "sigma": 1.0},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--actors", type=int, default=0)
    parser.add_argument(
        "--batch", type=lambda text: text if text == "full" else int(text), default=10
    )
    options = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in SIZES}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(options.repeats):
            for name in SIZES:
                asked = Experiment.from_dict(tree(name, options))
                plan = Plan.make(asked)
                sizes = plan.population.sizes
                taken = sizes if options.batch == "full" else np.minimum(sizes, options.batch)
                drawn = plan.draws(options.rounds)
                used = np.array([20 * taken[clients].sum() for clients in drawn])
                result = run(asked, Path(folder) / f"{name}-{repeat}")
                rates[name].append(float(np.median((used / result.rounds["seconds"])[5:])))
    best = {name: max(each) for name, each in rates.items()}
    print(", ".join(f"{name} {rate:,.0f} samples/s" for name, rate in best.items()))
    print(f"lognormal against equal: {best['lognormal'] / best['equal']:.2f}")


def tree(name: str, options: argparse.Namespace) -> dict:
    return {
        "rounds": options.rounds,
        "data": {"kind": "synthetic", "clients": 3000, "samples": 80, "sizes": SIZES[name]},
        "model": {"kind": "softmax"},
        "selection": {"kind": "uniform", "cohort": 150},
        "local": {"kind": "sgd", "steps": 20, "batch": options.batch, "lr": 0.1},
        "bounding": {"kind": "clip", "bound": 1.0},
        "client": {"actors": options.actors},
        "evaluate": {"every": options.rounds},
        "measure": [],
    }


if __name__ == "__main__":
    main()
