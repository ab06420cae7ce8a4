"""What the engine gains over the best plain loop on convolutional nets: `python
experiments/benchmarks/cnn.py [--shape paper]`.

The plain loops are a module and `torch.optim.SGD` for one client after another, on one thread:
`plain` as a user would write it, `best` channels-last with the fused optimiser, its gradients set
to None. All sides train the same clients on the same batches, by turns, a client each; the medians
of the clients' processor seconds are compared, so a busy neighbour troubles all alike. `apart` is
the largest relative distance between the updates and those of `plain` (a ReLU or a maximum that
rounds to the other side can give 1e-2). Rows are random.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from raydpfl import models
from raydpfl.methods.local import Sgd
from raydpfl.models.tasks import Classification, Form, Target
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.minibatches import batches
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

SEED = 0
CLASSES = 10


@dataclass(frozen=True)
class Shape:
    model: dict[str, object]
    image: tuple[int, ...]
    rows: int
    local: Sgd


SHAPES = {
    "paper": Shape({"kind": "cnn"}, (1, 28, 28), 80, Sgd(steps=10, batch=64, lr=0.05)),
    "small batch": Shape({"kind": "cnn"}, (1, 28, 28), 50, Sgd(steps=20, batch=10, lr=0.05)),
    "narrow": Shape({"kind": "cnn", "kernel": 3}, (1, 28, 28), 80, Sgd(steps=10, batch=32)),
    "colours": Shape({"kind": "cnn"}, (3, 32, 32), 80, Sgd(steps=10, batch=32, lr=0.05)),
    "alexnet": Shape({"kind": "alexnet"}, (3, 32, 32), 80, Sgd(steps=3, batch=32, lr=0.05)),
}

Train = Callable[[np.ndarray, np.ndarray, np.ndarray, int], torch.Tensor]
"""From a client's rows, classes, batches [Q, B] and number to its update, float32 [d]."""


def plain(shape: Shape, module: nn.Module, start: torch.Tensor, best: bool) -> Train:
    layout = torch.channels_last if best else torch.contiguous_format
    module = module.to(memory_format=layout)
    local = shape.local

    def train(x: np.ndarray, y: np.ndarray, index: np.ndarray, client: int) -> torch.Tensor:
        models.load(module, start)
        images = torch.from_numpy(x).to(memory_format=layout)
        labels = torch.from_numpy(y)
        settings = {"lr": local.lr, "weight_decay": local.weight_decay, "fused": best or None}
        optimizer = torch.optim.SGD(module.parameters(), **settings)
        for rows in torch.from_numpy(index):
            optimizer.zero_grad(set_to_none=True)
            batch = images[rows].to(memory_format=layout)
            F.cross_entropy(module(batch), labels[rows]).backward()
            optimizer.step()
        return models.flatten(module) - start

    return train


def engine(shape: Shape, module: nn.Module, start: torch.Tensor, backend: str) -> Train:
    trainer = Trainer(module, shape.local, backend=backend, seed=SEED)

    def train(x: np.ndarray, y: np.ndarray, index: np.ndarray, client: int) -> torch.Tensor:
        who = {"t": 0, "clients": [client], "draws": [0]}
        (block,) = trainer.chunk(start, x[None], y[None], [len(y)], **who)
        return block.updates[0]

    return train


def compare(name: str, clients: int, backends: list[str]) -> None:
    shape = SHAPES[name]
    form = Form(shape.image, Target(classes=CLASSES), Classification())

    def fresh() -> nn.Module:
        return models.build(models.parse(shape.model), form, SEED)

    start = models.flatten(fresh())
    sides = {each: plain(shape, fresh(), start, each == "best") for each in ("plain", "best")}
    chosen = choose_backend(fresh(), shape.local, form)
    sides |= {backend: engine(shape, fresh(), start, backend) for backend in backends or [chosen]}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    updates: dict[str, torch.Tensor] = {}
    apart = dict.fromkeys(sides, 0.0)
    generator = np.random.default_rng(0)
    for client in range(clients):
        x = generator.random((shape.rows, *shape.image), dtype=np.float32)
        y = generator.integers(CLASSES, size=shape.rows)
        index, _ = batches(SEED, 0, [client], [0], [shape.rows], shape.local)
        for side, train in sides.items():
            began = time.process_time()
            updates[side] = train(x, y, index[0], client)
            seconds[side].append(time.process_time() - began)
            away = (updates[side] - updates["plain"]).norm() / updates["plain"].norm()
            apart[side] = max(apart[side], float(away))
    for side, each in seconds.items():
        step = median(each[len(each) // 5 :]) / shape.local.steps * 1e3  # the first warm up
        ratios = [
            median(a / b for a, b in zip(seconds[other], each, strict=True))
            for other in ("plain", "best")
        ]
        against = "   ".join(f"{ratio:5.2f}" for ratio in ratios)
        print(f"{name:12} {side:14} {step:8.2f} ms a step   {against}   apart {apart[side]:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="one of the shapes")
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument(
        "--backends", nargs="*", default=[], help="default: the backend that is chosen"
    )
    options = parser.parse_args()
    single_thread()
    tune_allocator()
    print("processor time a step, and how many times that `plain` and `best` take")
    for name in [options.shape] if options.shape else SHAPES:
        compare(name, options.clients, options.backends)


if __name__ == "__main__":
    main()
