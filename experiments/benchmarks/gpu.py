"""pfl-research's CIFAR-10 workload on a GPU: `python experiments/benchmarks/gpu.py`.

1,000 clients of 50 images each, cohorts of 50, one local epoch in batches of 10 at learning rate
0.1, averaged for 1,500 rounds and evaluated every 10, with a net of two convolutions and 1.6
million parameters; nothing is clipped and no noise is drawn. The run is inline, on one GPU, as a
user would write it. It prints the seconds of the whole run and of a round (the median, and that of
rounds without an evaluation), clients a second, the test accuracy, and the GPU's peak memory; with
`--json` as JSON.

It has not yet run on a device. `--cpu` tries it on the CPU, which says nothing of a GPU's speed:

    python experiments/benchmarks/gpu.py --cpu --rounds 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from raydpfl import Experiment, device, run

EVERY = 10  # rounds between two evaluations


def two_convolutions() -> nn.Module:
    """pfl-research's `simple_cnn` without its dropout: 1,626,442 parameters on 3 x 32 x 32."""
    return nn.Sequential(
        nn.LazyConv2d(32, 3),
        nn.ReLU(),
        nn.LazyConv2d(64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(128),
        nn.ReLU(),
        nn.LazyLinear(10),
    )


def experiment(options: argparse.Namespace) -> Experiment:
    """The workload."""
    sections: dict[str, Any] = {
        "rounds": options.rounds,
        "data": {"kind": options.data, "clients": options.clients, "partition": {"kind": "iid"}},
        "model": {"kind": "gpu:two_convolutions"},
        "selection": {"kind": "uniform", "cohort": min(50, options.clients)},
        "local": {"kind": "sgd", "steps": 5, "batch": 10, "sampling": "epochs", "lr": 0.1},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
        "client": {"actors": 0, "num_gpus": 0 if options.cpu else 1, "way": options.way},
        "evaluate": {"every": EVERY},
        "measure": [],
    }
    return Experiment.from_dict(sections)


def measured(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The run, and what it took."""
    result = run(experiment(options), out)
    rows = result.rounds.to_pylist()
    seconds = [row["seconds"] for row in rows]
    plain = [row["seconds"] for row in rows if row["test_loss"] is None]
    found = {
        "device": device.facts(0 if options.cpu else 1).get("device", "the CPU"),
        "rounds": len(rows),
        "parameters": sum(each.numel() for each in result.model.parameters()),
        "seconds": result.summary["wall_seconds"],
        "seconds_round": median(seconds),
        "seconds_round_unevaluated": median(plain) if plain else None,
        "clients_per_second": result.summary["clients_per_second"],
        "test_accuracy": result.summary["test_accuracy"],
    }
    if not options.cpu:
        found["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--data", default="cifar10", help="a data set of images, of 10 classes")
    parser.add_argument("--way", default="auto", help="client.way: vmap, or loop for comparison")
    parser.add_argument("--cpu", action="store_true", help="tries it on the CPU")
    parser.add_argument("--json", action="store_true", help="prints JSON")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("gpu.py needs a GPU, and torch finds none; --cpu --rounds 2 tries it without")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options, Path(folder) / "run")
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:28} {value:.6g}" if isinstance(value, float) else f"{name:28} {value}")


if __name__ == "__main__":
    main()
