"""What the engine gains where every sample is clipped and every step noised: `python
experiments/benchmarks/per_sample.py [--only softmax]`.

The references are what a simulator would otherwise do for one client after another: a loop with
vmap of the per-sample gradient (`torch.func`), and for the CNN also Opacus' ghost clipping, where
it is installed (`pip install opacus`). All sides train the same clients on the same batches, each
in one single-thread process per core with its share of the cohort, by turns a few rounds each; the
medians of the rounds' seconds are compared. The first rounds warm up and have noise of std 0: in
them, `apart` is the largest relative distance between the sums of updates of the engine and of a
reference (a ReLU or a maximum that rounds to the other side can give 1e-2). In a turn of their own
the engine's processes do each of its rounds with noise and without: `noise` is the share of a round
that noise takes, the median over these pairs. Rows are random.
"""

import argparse
import importlib.util
import os
import warnings
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
from engine import BLOCK, Engine, Reference, Work, Worker, distance, started, timed, turn
from torch.func import functional_call, grad, vmap

from raydpfl import models
from raydpfl.methods.local import Sgd
from raydpfl.simulation.scheduler import chunk_width

WORK = {
    "softmax": Work("softmax", 10, 600, Sgd(steps=50, batch=10, lr=0.1)),
    "few_rows": Work("softmax", 150, 20, Sgd(steps=20, batch=10, lr=0.1)),
    "cnn": Work("cnn", 10, 600, Sgd(steps=10, batch=128, lr=0.1)),
}
CLIP = 1.0
STD = 0.01
QUIET = 1 << 20  # rounds from this one on are without noise


def std(t: int) -> float:
    """Of the noise on a batch's mean gradient."""
    return STD if t >= BLOCK else 0.0


class Private(Engine):
    clip = CLIP

    def stds(self, t: int) -> np.ndarray | None:
        return np.full(self.width, std(t)) if t < QUIET else None


class Vmap(Reference):
    def __init__(self, work: Work, width: int, share: int, processes: int):
        super().__init__(work, width, share, processes)
        self.each = vmap(grad(self.loss), in_dims=(None, 0, 0))

    def loss(
        self, parameters: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        return F.cross_entropy(functional_call(self.module, parameters, (x[None],)), y[None])

    def client(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, t: int) -> torch.Tensor:
        models.load(self.module, self.model)
        parameters = {
            name: parameter.detach().clone() for name, parameter in self.module.named_parameters()
        }
        sizes = [each.numel() for each in parameters.values()]
        for batch in rows:
            gradients = self.each(parameters, x[batch], y[batch])
            norms = torch.stack([each.flatten(1).norm(dim=1) for each in gradients.values()])
            factors = (CLIP / norms.norm(dim=0)).clamp(max=1) / len(batch)
            noise = torch.randn(len(self.model)).mul_(std(t)).split(sizes)
            for (name, each), drawn in zip(gradients.items(), noise, strict=True):
                step = torch.tensordot(factors, each, 1).add_(drawn.view(each.shape[1:]))
                parameters[name].sub_(step, alpha=self.work.local.lr)
        return torch.cat([parameter.flatten() for parameter in parameters.values()])


class Opacus(Reference):
    def __init__(self, work: Work, width: int, share: int, processes: int):
        from opacus import PrivacyEngine

        warnings.simplefilter("ignore")
        super().__init__(work, width, share, processes)
        data = torch.utils.data.TensorDataset(
            torch.from_numpy(self.x[0][0]), torch.from_numpy(self.y[0][0])
        )
        self.private, self.optimizer, self.criterion, _ = PrivacyEngine().make_private(
            module=self.module,
            optimizer=torch.optim.SGD(self.module.parameters(), lr=work.local.lr),
            criterion=torch.nn.CrossEntropyLoss(),
            data_loader=torch.utils.data.DataLoader(data, batch_size=work.local.batch),
            noise_multiplier=0.0,
            max_grad_norm=CLIP,
            poisson_sampling=False,
            grad_sample_mode="ghost",
        )
        self.optimizer.expected_batch_size = work.local.batch

    def client(self, x: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, t: int) -> torch.Tensor:
        models.load(self.module, self.model)
        self.optimizer.noise_multiplier = std(t) * self.work.local.batch / CLIP
        for batch in rows:
            self.optimizer.zero_grad()
            self.criterion(self.private(x[batch]), y[batch]).backward()
            self.optimizer.step()
        return models.flatten(self.module)


def noise_shares(connections: list[Connection], first: int) -> list[float]:
    """The share of a round's seconds that noise takes, of each pair of rounds with and without."""
    found = []
    for t in range(first, first + BLOCK):
        noised, _ = timed(connections, t)
        quiet, _ = timed(connections, QUIET + t)
        found.append(1 - quiet / noised)
    return found


def compare(name: str, rounds: int, width: int, processes: int, against: list[str]) -> None:
    seconds: dict[type[Worker], list[float]] = {Private: []}
    shares: list[float] = []
    if "vmap" in against:
        seconds[Vmap] = []
    if "opacus" in against and name == "cnn" and importlib.util.find_spec("opacus"):
        seconds[Opacus] = []
    apart: dict[type[Worker], float] = {}
    with started(seconds, WORK[name], width, processes) as sides:
        for first in range(0, rounds + BLOCK, BLOCK):
            sums: dict[type[Worker], list[np.ndarray]] = {}
            for side, connections in sides.items():
                took, sums[side] = turn(connections, first)
                if side is Private and first:
                    shares += noise_shares(connections, first)
                if first:
                    seconds[side] += took
                else:  # without noise
                    apart[side] = distance(sums[Private], sums[side])
    engine = median(seconds.pop(Private))
    print(f"{name:8} engine {engine * 1e3:8.1f} ms   noise {median(shares):.0%}")
    for side, all_seconds in seconds.items():
        reference = median(all_seconds)
        times = f"{side.__name__.lower():6} {reference * 1e3:8.1f} ms"
        print(f"{'':8} {times}   {reference / engine:6.1f} times   apart {apart[side]:.0e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=WORK, help="one of the three workloads")
    parser.add_argument(
        "--rounds", type=int, default=9, help="of each side, counted in blocks of 3"
    )
    sides = ("vmap", "opacus")
    parser.add_argument("--against", nargs="+", choices=sides, default=sides, help="references")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for name in [options.only] if options.only else WORK:
        compare(
            name,
            options.rounds,
            1 if name == "cnn" else chunk_width(WORK[name].cohort),
            options.processes,
            options.against,
        )


if __name__ == "__main__":
    main()
