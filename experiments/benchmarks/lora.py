"""What the engine gains over a plain loop on adapters of a frozen GPT-2: `python
experiments/benchmarks/lora.py [--shape small]`. Needs transformers.

The module is a GPT-2 of two layers with random weights, and adapters of rank 4 on `c_attn`. The
plain loop is `torch.optim.SGD` on the adapters for one client after another, on the same module;
the engine trains a chunk of clients. Both train the same clients on the same batches, by turns, a
cohort each, on one thread; the medians of the processor seconds are compared, so a busy neighbour
troubles both alike. `busy` is the share of a side's time that the frozen layers' products of
matrices take by themselves, on a chunk's rows: at 100 % nothing is left to gain. `apart` is the
largest relative distance between the updates. With `--cores` both have a single-thread process for
each core with its share of the cohort, and seconds of the clock are compared. Tokens are random.
"""

import argparse
import time
import warnings
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from engine import Worker, distance, started, timed
from torch import nn

from raydpfl import models
from raydpfl.methods.local import Sgd
from raydpfl.models import tasks
from raydpfl.models.tasks import Form, Target
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

SEED = 0
CHUNK = 16


@dataclass(frozen=True)
class Shape:
    """A GPT-2 of two layers, and what clients have of it."""

    width: int
    tokens: int
    local: Sgd
    length: int = 32
    sequences: int = 8
    cohort: int = 32

    @property
    def form(self) -> Form:
        task = tasks.parse("sequence")
        target = Target((self.length,), self.tokens)
        return Form((self.length,), target, task, self.tokens)

    @property
    def model(self) -> models.Model:
        args = {"n_layer": 2, "n_head": 4, "n_embd": self.width, "n_positions": self.length}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        lora = {"rank": 4, "scale": 2.0, "targets": ["c_attn"]}
        kind = "transformers:GPT2LMHeadModel"
        return models.parse({"kind": kind, "args": {**args, **dropout, **ends}, "lora": lora})

    @property
    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the frozen layers' products, forward and back: nothing goes back
        through the first, whose inputs are not trained.
        """
        w = self.width
        block = [(w, 3 * w), (w, w), (w, 4 * w), (4 * w, w)]
        forward = [*block, *block, (w, self.tokens)]
        return [*forward, *((outputs, inputs) for inputs, outputs in forward[1:])]


SHAPES = {
    "small": Shape(64, 65, Sgd(steps=8, batch=2, lr=0.1)),
    "batch 4": Shape(64, 65, Sgd(steps=8, batch=4, lr=0.1)),
    "batch 8": Shape(64, 65, Sgd(steps=8, batch=8, lr=0.1)),
    "wide 2": Shape(128, 256, Sgd(steps=8, batch=2, lr=0.1)),
    "wide": Shape(128, 256, Sgd(steps=8, batch=4, lr=0.1)),
    "wide 8": Shape(128, 256, Sgd(steps=8, batch=8, lr=0.1)),
}


class Side(Worker):
    """A share of the cohort: its module, its model as one vector, and its clients' tokens."""

    def __init__(self, shape: Shape, width: int = CHUNK, share: int = 0, processes: int = 1):
        single_thread()
        tune_allocator()
        self.shape = shape
        self.module = models.build(shape.model, shape.form, SEED)
        self.model = models.flatten(self.module)
        generator = np.random.default_rng(SEED)
        size = (2, shape.cohort, shape.sequences, shape.length)
        self.x, self.y = torch.from_numpy(generator.integers(shape.tokens, size=size))
        firsts = np.array_split(np.arange(0, shape.cohort, width), processes)[share]
        self.chunks = [np.arange(first, first + width) for first in firsts]

    def train(self, t: int) -> torch.Tensor:
        """The sum of the updates of round t, float64 [d]."""
        return self.updates(t).sum(0, dtype=torch.float64)

    def updates(self, t: int) -> torch.Tensor:
        """Those of its clients, float32 [clients, d]."""
        return torch.cat([self.chunk(chunk, t) for chunk in self.chunks])

    def chunk(self, clients: np.ndarray, t: int) -> torch.Tensor:
        raise NotImplementedError


class Engine(Side):
    backend = "auto"

    def __init__(self, *given):
        super().__init__(*given)
        shape = self.shape
        backend = choose_backend(self.module, shape.local, shape.form, self.backend)
        task = shape.form.task
        self.trainer = Trainer(
            self.module, shape.local, backend=backend, seed=SEED, user_defined=True, task=task
        )

    def chunk(self, clients: np.ndarray, t: int) -> torch.Tensor:
        sizes = [self.shape.sequences] * len(clients)
        rows = self.x[clients], self.y[clients]
        draws = [0] * len(clients)
        blocks = self.trainer.chunk(self.model, *rows, sizes, t=t, clients=clients, draws=draws)
        return torch.cat([block.updates for block in blocks])


class Vmap(Engine):
    backend = "vmap"


class Loop(Side):
    def __init__(self, *given):
        super().__init__(*given)
        self.trained: list[nn.Parameter] = [
            parameter for parameter in self.module.parameters() if parameter.requires_grad
        ]

    def chunk(self, clients: np.ndarray, t: int) -> torch.Tensor:
        sizes = [self.shape.sequences] * len(clients)
        index, _ = batches(SEED, t, clients, [0] * len(clients), sizes, self.shape.local)
        return torch.stack(
            [
                self.client(self.x[client], self.y[client], torch.from_numpy(rows))
                for client, rows in zip(clients, index, strict=True)
            ]
        )

    def client(self, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        models.load(self.module, self.model)
        optimizer = torch.optim.SGD(self.trained, lr=self.shape.local.lr)
        for rows in index:
            optimizer.zero_grad()
            outputs = self.module(x[rows])
            F.cross_entropy(outputs.flatten(0, 1), y[rows].flatten()).backward()
            optimizer.step()
        return models.flatten(self.module) - self.model


def bare(shape: Shape) -> float:
    """The processor seconds of a client's step that the frozen layers' products take."""
    rows = CHUNK * shape.local.batch * shape.length
    total = 0.0
    for inputs, outputs in shape.products:
        a = torch.randn(rows, inputs)
        b = torch.randn(inputs, outputs)
        taken = []
        for _ in range(7):
            began = time.process_time()
            a @ b
            taken.append(time.process_time() - began)
        total += median(taken[2:])
    return total / CHUNK


def processor(name: str, rounds: int) -> None:
    """Prints the processor time of all sides, on one thread."""
    sides = {side.__name__.lower(): side(SHAPES[name]) for side in (Loop, Vmap, Engine)}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    apart = dict.fromkeys(sides, 0.0)
    for t in range(rounds + 1):  # the first warms up
        updates = {}
        for side, worker in sides.items():
            began = time.process_time()
            updates[side] = worker.updates(t)
            seconds[side].append(time.process_time() - began)
        for side, found in updates.items():
            away = float((found - updates["loop"]).norm() / updates["loop"].norm())
            apart[side] = max(apart[side], away)
    shape = SHAPES[name]
    steps = shape.cohort * shape.local.steps
    least = bare(shape)
    for side, taken in seconds.items():
        ratio = median(a / b for a, b in zip(seconds["loop"][1:], taken[1:], strict=True))
        step = median(taken[1:]) / steps
        busy = f"{least / step:4.0%} busy"
        took = f"{step * 1e3:7.2f} ms a step {ratio:6.2f} times"
        print(f"{name:8} {side:7} {took} {busy}   {apart[side]:.0e} apart", flush=True)


def clock(name: str, rounds: int, cores: int) -> None:
    """Prints the seconds of all sides, each on so many cores."""
    kinds = (Loop, Engine)
    seconds: dict[type[Worker], list[float]] = {side: [] for side in kinds}
    apart = 0.0
    with started(kinds, SHAPES[name], CHUNK, cores) as sides:
        for t in range(rounds + 1):
            sums = {}
            for side, connections in sides.items():
                took, sums[side] = timed(connections, t)
                seconds[side].append(took)
            apart = max(apart, distance([sums[Engine]], [sums[Loop]]))
    engine = median(seconds[Engine][1:])
    for side in kinds:
        took = median(seconds[side][1:])
        times = f"{took * 1e3:7.0f} ms a round {took / engine:6.2f} times the engine's"
        print(f"{name:8} {side.__name__.lower():7} {times}   {apart:.0e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="one of the shapes")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cores", type=int, help="take so many cores, and the clock")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap
    for name in [options.shape] if options.shape else SHAPES:
        if options.cores:
            clock(name, options.rounds, options.cores)
        else:
            processor(name, options.rounds)


if __name__ == "__main__":
    main()
