"""What a second client actor gains: blocks of rounds of one actor, of two, and of none, in turn.

    python experiments/benchmarks/two_actors.py [--rounds 60] [--cohort 80] [--model mlp]

The coordinator is this process, as in a sweep's trial, so that all three take turns. The first
round of a block is not counted: its caches are cold, and a checkpoint is due in it, as the others
have had their turns since the last one. `Processes` is what the machine gives at most: the chunks
of a round in each of both actors at the same time, against the same chunks in one actor alone, by
the clock of the actors themselves, in which Ray has no part. Two cores with a common memory and
clock do less than twice the work of one.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import ray

from raydpfl import Experiment
from raydpfl.core.messages import Broadcast, Chunk, ChunkResult, Work
from raydpfl.runtime.actor_pool import ActorPool
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve

BLOCK = 6  # rounds of one coordinator that are counted before another has its turn
MODELS = {
    "cnn": {"kind": "cnn"},
    "mlp": {"kind": "mlp", "hidden": 200},
    "softmax": {"kind": "softmax"},
}


class Repeated(ActorPool):
    """Client actors, which also do the last round's work again."""

    last: tuple[Broadcast, Work, list[Chunk]]

    def run(self, broadcast, work, assignments):
        self.last = broadcast, work, [chunk for chunks in assignments for chunk in chunks]
        return super().run(broadcast, work, assignments)

    def seconds(self, actors: int) -> float:
        """Mean seconds of an actor for half of the last round's chunks, with so many at work."""
        broadcast, work, chunks = self.last
        halves = [chunks[::2], chunks[1::2]][:actors]
        found: list[ChunkResult] = [result for _, result in super().run(broadcast, work, halves)]
        return float(np.mean([result.seconds for result in found]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--cohort", type=int, default=80)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    options = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    plan = resolve(Experiment.from_dict(tree(options)))
    seconds: dict[str, list[float]] = {name: [] for name in ("none", "one", "two", "1", "2")}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: started(plan, Path(folder) / name, actors, Repeated)
            for actors, name in enumerate(("none", "one", "two"))
        }
        pool = runs["two"].pool
        assert isinstance(pool, Repeated)
        for block in range(1 + -(-options.rounds // BLOCK)):
            for name, coordinator in runs.items():
                times = [timed(coordinator) for _ in range(1 + BLOCK)]
                seconds[name] += times[1:] if block else []
            for count in (1, 2) * BLOCK:
                seconds[str(count)].append(pool.seconds(count))
    counted = {name: np.array(each) * 1e3 for name, each in seconds.items()}
    for what, share in (("median", 0.5), ("best tenth", 0.1)):
        ms = {name: float(np.quantile(each, share)) for name, each in counted.items()}
        rounds = ", ".join(f"{name} {ms[name]:.1f}" for name in ("none", "one", "two"))
        print(
            f"{what} ms a round by actors: {rounds}; two against one: {ms['one'] / ms['two']:.2f}"
        )
        work = 2 * ms["1"] / ms["2"]
        print(f"{what}: two processes do {work:.2f} times the work of one", flush=True)


def timed(coordinator: Coordinator) -> float:
    """Seconds of its next round."""
    began = time.perf_counter()
    coordinator.round()
    return time.perf_counter() - began


def started(plan: Plan, out: Path, actors: int, kind: type[ActorPool] = ActorPool) -> Coordinator:
    """A coordinator of the plan with so many client actors, in a pool of this kind."""
    out.mkdir()
    pool = None
    if actors:
        pool = kind(plan.experiment, str(plan.shards), actors, plan.platform)
        pool.wait_until_up(lambda: None)
    coordinator = Coordinator(plan, str(out), pool)
    coordinator.start()
    return coordinator


def tree(options: argparse.Namespace) -> dict:
    rounds = (1 + -(-options.rounds // BLOCK)) * (1 + BLOCK)
    return {
        "rounds": rounds,
        "data": {"kind": "fashion_mnist_mini", "clients": 300},
        "model": MODELS[options.model],
        "selection": {"kind": "uniform", "cohort": options.cohort},
        "local": {"kind": "sgd", "steps": options.steps, "batch": options.batch, "lr": 0.1},
        "bounding": {"kind": "clip", "bound": 1.0},
        "evaluate": {"every": rounds},
        "measure": [],
    }


if __name__ == "__main__":
    if "OMP_NUM_THREADS" not in os.environ:
        # numpy makes threads when it is imported, which would wait for work on a core of the actors
        alone = os.environ | {"OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], alone)
    main()
