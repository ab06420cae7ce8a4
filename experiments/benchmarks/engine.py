"""What the engine of local training gains over the loop it replaces: `python
experiments/benchmarks/engine.py [--only softmax]`.

Both sides train the same clients on the same batches, each in one single-thread process per core
with its share of the cohort, by turns a few rounds each; the medians of the rounds' seconds are
compared. The reference is the loop of most simulators, a module and `torch.optim.SGD` for one
client after another, with its batches given; the engine draws its own. Both add up the updates in
float64, and `apart` is the largest relative distance between their sums (a ReLU whose input rounds
across 0 gives 1e-3). Rows are random.
"""

import argparse
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

from raydpfl import models
from raydpfl.methods.local import Sgd
from raydpfl.models.tasks import Classification, Form, Target
from raydpfl.simulation.scheduler import chunk_width
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

SHAPE = (1, 28, 28)
CLASSES = 10
FORM = Form(SHAPE, Target(classes=CLASSES), Classification())
SEED = 0
BLOCK = 3  # rounds of one side before the other's turn


@dataclass(frozen=True)
class Work:
    model: str
    cohort: int
    rows: int
    local: Sgd


WORK = {
    "softmax": Work("softmax", 150, 20, Sgd(steps=20, batch=10, lr=0.1, weight_decay=1e-4)),
    "mlp": Work("mlp", 80, 31, Sgd(steps=32, batch=16, lr=0.1)),
    "cnn": Work("cnn", 10, 80, Sgd(steps=10, batch=64, lr=0.05)),
}


class Worker:
    """One process's share of the cohort: the chunks `chunks[share::processes]`."""

    def __init__(self, work: Work, width: int, share: int, processes: int):
        single_thread()
        self.work = work
        self.module = models.build(models.parse({"kind": work.model}), FORM, SEED)
        self.model = models.flatten(self.module)
        self.width = width
        firsts = np.array_split(np.arange(0, work.cohort, width), processes)[share]
        self.chunks = [np.arange(first, first + width) for first in firsts]
        self.chunks = [np.where(chunk < work.cohort, chunk, -1) for chunk in self.chunks]
        generator = np.random.default_rng(share)
        self.x = [
            generator.random((width, work.rows, *SHAPE), dtype=np.float32) for _ in self.chunks
        ]
        self.y = [generator.integers(CLASSES, size=(width, work.rows)) for _ in self.chunks]
        self.draws = np.zeros(width, np.int64)
        self.sizes = [np.where(chunk < 0, 0, work.rows) for chunk in self.chunks]

    def prepare(self, t: int) -> None:
        """What a side may have ready before its seconds count."""

    def train(self, t: int) -> torch.Tensor:
        """The sum of the share's updates, float64 [d]."""
        raise NotImplementedError


class Engine(Worker):
    clip: float | None = None  # the bound on every sample's gradient

    def __init__(self, work: Work, width: int, share: int, processes: int):
        tune_allocator()
        super().__init__(work, width, share, processes)
        backend = choose_backend(self.module, work.local, FORM, clip=self.clip)
        self.trainer = Trainer(self.module, work.local, backend=backend, seed=SEED, clip=self.clip)

    def stds(self, t: int) -> np.ndarray | None:
        """Those of the noise on each client's mean gradients, float64 [width]; None for none."""
        return None

    def train(self, t: int) -> torch.Tensor:
        total = torch.zeros(len(self.model), dtype=torch.float64)
        common = {"t": t, "draws": self.draws, "stds": self.stds(t)}
        for clients, *rows in zip(self.chunks, self.x, self.y, self.sizes, strict=True):
            for block in self.trainer.chunk(self.model, *rows, clients=clients, **common):
                total.add_(block.updates.sum(0, dtype=torch.float64), alpha=1 / self.work.cohort)
        return total


class Reference(Worker):
    """One client after another, by a plain loop."""

    def prepare(self, t: int) -> None:
        self.batches = [
            batches(SEED, t, chunk, self.draws, sizes, self.work.local)[0]
            for chunk, sizes in zip(self.chunks, self.sizes, strict=True)
        ]

    def train(self, t: int) -> torch.Tensor:
        total = torch.zeros(len(self.model), dtype=torch.float64)
        for clients, *arrays in zip(self.chunks, self.x, self.y, self.batches, strict=True):
            for slot in np.flatnonzero(clients >= 0):
                x, y, rows = (torch.from_numpy(each[slot]) for each in arrays)
                update = (self.client(x, y, rows, t) - self.model).double()
                total.add_(update, alpha=1 / self.work.cohort)
        return total

    def client(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, t: int) -> torch.Tensor:
        """The client's model after its steps, flat."""
        local = self.work.local
        models.load(self.module, self.model)
        settings = {"lr": local.learning_rate(t), "weight_decay": local.weight_decay}
        optimizer = torch.optim.SGD(self.module.parameters(), **settings)
        for batch in rows:
            optimizer.zero_grad()
            F.cross_entropy(self.module(x[batch]), y[batch]).backward()
            optimizer.step()
        return models.flatten(self.module)


def serve(connection: Connection, side: type[Worker], *arguments: object) -> None:
    """A process: for each round number it receives, gets ready, says so, is told to go, and sends
    when it began and ended, and its sum.
    """
    worker = side(*arguments)
    for t in iter(connection.recv, None):
        worker.prepare(t)
        connection.send(True)
        connection.recv()
        began = time.monotonic()
        total = worker.train(t)
        connection.send((began, time.monotonic(), total.numpy()))


def timed(connections: list[Connection], t: int) -> tuple[float, np.ndarray]:
    """(seconds of a round, from the first process's start to the last one's end; its sum of
    updates).
    """
    for message in (t, True):
        for connection in connections:
            connection.send(message)
        replies = [connection.recv() for connection in connections]
    began, ended, sums = zip(*replies, strict=True)
    return max(ended) - min(began), np.sum(sums, axis=0)


Sides = dict[type[Worker], list[Connection]]


@contextmanager
def started(
    sides: Iterable[type[Worker]], work: Work, width: int, processes: int
) -> Iterator[Sides]:
    """The connections to so many processes of every side; they are ended afterwards."""
    context = multiprocessing.get_context("spawn")
    connections: Sides = {side: [] for side in sides}
    running = []
    for side in connections:
        for share in range(processes):
            here, there = context.Pipe()
            connections[side].append(here)
            arguments = (there, side, work, width, share, processes)
            running.append(context.Process(target=serve, args=arguments, daemon=True))
            running[-1].start()
    yield connections
    for connection in (each for side in connections.values() for each in side):
        connection.send(None)
    for process in running:
        process.join()


def turn(connections: list[Connection], first: int) -> tuple[list[float], list[np.ndarray]]:
    """A side's turn: (seconds, sum of updates) of each of its rounds, from round `first` on."""
    rounds = [timed(connections, t) for t in range(first, first + BLOCK)]
    return [took for took, _ in rounds], [total for _, total in rounds]


def distance(ours: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest relative distance between two sides' sums of a round."""
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


def compare(name: str, rounds: int, width: int, processes: int) -> None:
    seconds: dict[type[Worker], list[float]] = {Reference: [], Engine: []}
    apart = 0.0
    with started(seconds, WORK[name], width, processes) as sides:
        for first in range(0, rounds + BLOCK, BLOCK):
            sums: dict[type[Worker], list[np.ndarray]] = {}
            for side, connections in sides.items():
                took, sums[side] = turn(connections, first)
                if first:  # the first block warms up
                    seconds[side] += took
            apart = max(apart, distance(sums[Engine], sums[Reference]))
    reference = median(seconds[Reference])
    engine = median(seconds[Engine])
    times = f"reference {reference * 1e3:8.1f} ms   engine {engine * 1e3:8.1f} ms"
    print(f"{name:8} {times}   {reference / engine:6.1f} times   apart {apart:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WORK, help="one of the three workloads")
    parser.add_argument(
        "--rounds", type=int, default=9, help="of each side, counted in blocks of 3"
    )
    parser.add_argument(
        "--chunk",
        type=int,
        help="clients in a chunk (default: what a run would take; 1 for the CNN, in the loop)",
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for name in [options.only] if options.only else WORK:
        compare(
            name,
            options.rounds,
            options.chunk or (1 if name == "cnn" else chunk_width(WORK[name].cohort)),
            options.processes,
        )


if __name__ == "__main__":
    main()
