"""What unequal clients cost: samples a second with log-normal sizes (sigma 1) against equal ones.

    python experiments/benchmarks/unequal.py [--only "softmax, all rows" "cnn"] [--seconds 10]
        [--alone]

A line for each case of `CASES`: the same model and number of samples on average, in one process, a
round of each in turn, by the clock of the processor. In 20 steps of 10 rows every client takes
about as many samples a round; on all of their rows, or in epochs, their work goes by their size.
`--sizes` takes other sizes: `huge` gives the largest of 3,000 clients a ninth of all samples.
`--alone` prints what the largest client of a round takes by itself, by what equal clients take
together: its steps follow one another whatever is beside them.
`--actors 2` deals chunks to so many actors of Ray, and takes the clock on the wall.

Not all of a difference is lost. In the span of its n rows a step of a client has n products a
sample and output, by weights of p inputs 2 p: on all rows, one of few rows has fewer operations to
do a sample than one of many. And a step on all of 20 rows changes as many weights as one on all of
500.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from two_actors import started

from raydpfl import Experiment, models
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve

WARM = 3  # rounds that are not counted
ROUNDS = 1000  # at most
LEAST = 5  # that are counted

SIZES = {
    "equal": {"kind": "balanced"},
    "lognormal": {"kind": "lognormal", "sigma": 1.0},
    "huge": {"kind": "power-law", "exponent": 1.0},
}
SAMPLES = {"kind": "synthetic", "clients": 3000, "samples": 80, "features": 60}
LARGE = {**SAMPLES, "clients": 600, "features": 784}
IMAGES = {"kind": "fashion_mnist_mini", "clients": 100, "partition": {"kind": "iid"}}
STEPS = {"steps": 20, "batch": 10}
ALL = {"steps": 20, "batch": "full"}
EPOCHS = {"epochs": 3, "batch": 10}
TANH = {"kind": "mlp", "activation": "tanh"}
ADAPTERS = {"kind": "mlp", "hidden": [200, 200], "lora": {"rank": 4}}
PRIVATE = {
    "bounding": {"kind": "per_sample_clip", "bound": 1.0},
    "noise": {"kind": "gaussian", "std": 0.01, "placement": "step"},
}


def case(model: Any, local: dict, data: dict = SAMPLES, cohort: int = 150, **sections: Any) -> dict:
    """A config but for the sizes."""
    return {
        "rounds": ROUNDS,
        "data": data,
        "model": model if isinstance(model, dict) else {"kind": model},
        "selection": {"kind": "uniform", "cohort": cohort},
        "local": {"kind": "sgd", "lr": 0.1, **local},
        "bounding": {"kind": "clip", "bound": 1.0},
        "evaluate": {"every": ROUNDS},
        "measure": [],
        **sections,
    }


CASES = {
    "softmax": case("softmax", STEPS),
    "softmax, all rows": case("softmax", ALL),
    "softmax, epochs": case("softmax", EPOCHS),
    "softmax 784": case("softmax", STEPS, LARGE),
    "softmax 784, all rows": case("softmax", ALL, LARGE),
    "softmax 784, epochs": case("softmax", EPOCHS, LARGE),
    "mlp": case("mlp", STEPS),
    "mlp, all rows": case("mlp", ALL),
    "mlp, epochs": case("mlp", EPOCHS),
    "private softmax": case("softmax", STEPS, **PRIVATE),
    "private softmax, all rows": case("softmax", ALL, **PRIVATE),
    "private softmax, epochs": case("softmax", EPOCHS, **PRIVATE),
    "private mlp": case("mlp", STEPS, cohort=40, **PRIVATE),
    "private mlp, all rows": case("mlp", ALL, cohort=40, **PRIVATE),
    "private mlp, epochs": case("mlp", EPOCHS, cohort=40, **PRIVATE),
    "tanh mlp": case(TANH, STEPS),
    "tanh mlp, all rows": case(TANH, ALL),
    "tanh mlp, epochs": case(TANH, EPOCHS),
    "private tanh mlp, epochs": case(TANH, EPOCHS, cohort=40, **PRIVATE),
    "adam": case("mlp", {**STEPS, "kind": "adam", "lr": 0.001}, cohort=40),
    "adam, epochs": case("mlp", {**EPOCHS, "kind": "adam", "lr": 0.001}, cohort=40),
    "vmap": case("mlp", STEPS, cohort=40, client={"backend": "vmap"}),
    "vmap, all rows": case("mlp", ALL, cohort=40, client={"backend": "vmap"}),
    "vmap, epochs": case("mlp", EPOCHS, cohort=40, client={"backend": "vmap"}),
    "adapters": case(ADAPTERS, STEPS),
    "adapters, all rows": case(ADAPTERS, ALL),
    "adapters, epochs": case(ADAPTERS, EPOCHS),
    "cnn": case("cnn", {"steps": 5, "batch": 10}, IMAGES, cohort=20),
    "cnn, all rows": case("cnn", {"steps": 2, "batch": "full"}, IMAGES, cohort=20),
    "cnn, epochs": case("cnn", {"epochs": 1, "batch": 10}, IMAGES, cohort=20),
    "private cnn, epochs": case("cnn", {"epochs": 1, "batch": 10}, IMAGES, cohort=20, **PRIVATE),
    "loop, epochs": case("mlp", EPOCHS, cohort=20, client={"backend": "loop"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", default=list(CASES))
    parser.add_argument("--seconds", type=float, default=5, help="of rounds, for each case")
    parser.add_argument("--sizes", choices=[*SIZES][1:], default="lognormal")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--actors", type=int, default=0)
    options = parser.parse_args()
    if options.actors:
        quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
        ray.init(address="local", num_cpus=2 * options.actors, **quiet)
    print(f"{'samples/s':26} {'backend':13} {'equal':>12} {options.sizes:>12}  ratio")
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            backend, rates, alone = measured(CASES[name], Path(folder), options)
        equal, other = (float(np.median(each)) for each in rates)
        line = f"{name:26} {backend:13} {equal:12,.0f} {other:12,.0f}  {other / equal:5.2f}"
        print(line + f"  alone {alone:.2f}" * options.alone, flush=True)


def measured(
    config: dict, folder: Path, options: argparse.Namespace
) -> tuple[str, list[list[float]], float]:
    """The backend; the samples a second of each round: of equal sizes, and of others; and what the
    largest client of a round takes alone, by what a round of equal ones takes.
    """
    clock = time.perf_counter if options.actors else time.process_time
    runs = [run_of(config, folder, name, options) for name in ("equal", options.sizes)]
    rates: list[list[float]] = [[], []]
    shares = []
    begun = time.perf_counter()
    for t in range(ROUNDS):
        if t == WARM:
            begun = time.perf_counter()
        if t >= WARM + LEAST and time.perf_counter() - begun > options.seconds:
            break
        for run, found in zip(runs, rates, strict=True):
            began = clock()
            run.round()
            took = clock() - began
            found.append(samples(run.plan, t) / took)
            if options.alone:
                shares.append(largest(run, t) if run is runs[1] else took)
    for run in runs:
        run.pool.close()
    each = np.array(shares or [1.0, 0.0]).reshape(-1, 2)
    alone = float(np.median(each[:, 1]) / np.median(each[:, 0]))
    return runs[0].experiment.client.backend, [found[WARM:] for found in rates], alone


def run_of(config: dict, folder: Path, name: str, options: argparse.Namespace) -> Coordinator:
    """A run of a case with sizes of this name."""
    data = {**config["data"], "sizes": SIZES[name]}
    client = {**config.get("client", {}), "actors": options.actors}
    plan = resolve(Experiment.from_dict({**config, "data": data, "client": client}))
    return started(plan, folder / name, options.actors)


def largest(run: Coordinator, t: int) -> float:
    """Seconds of the processor that the largest client of a round takes to train by itself."""
    plan = run.plan
    client = run.pool.client
    clients = plan.experiment.selection.exposed(plan.experiment.seed, t, plan.population)
    who = clients[[np.argmax(plan.population.sizes[clients])]]
    rows = int(plan.population.sizes[who].max())
    x, y, sizes = client.shards.chunk(who, rows)
    model = models.trained(client.module)
    began = time.process_time()
    for _ in client.trainer.chunk(model, x, y, sizes, t=t, clients=who, draws=[0]):
        pass
    return time.process_time() - began


def samples(plan: Plan, t: int) -> int:
    """The samples that the clients of a round take in all their steps."""
    local = plan.experiment.local
    population = plan.population
    clients = plan.experiment.selection.exposed(plan.experiment.seed, t, population)
    sizes = population.sizes[clients]
    return int((local.step_counts(sizes) * local.batch_sizes(sizes)).sum())


if __name__ == "__main__":
    main()
