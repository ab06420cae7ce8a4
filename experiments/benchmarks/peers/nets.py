"""The nets of the jobs, and their loss, as a user of torch writes them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from job import Job
from torch import nn

LOSS_ROWS = 1000  # the first rows of all clients, whose loss is told at the end


def softmax() -> nn.Module:
    return nn.Linear(784, 10)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Module:
    """That of Xu 2026."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 512),
        nn.ReLU(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


NETS = {"softmax": softmax, "mlp": mlp, "cnn": cnn}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


@torch.no_grad()
def loss(net: nn.Module, job: Job) -> float:
    """The mean loss of the first rows."""
    x, y = (torch.tensor(each[:LOSS_ROWS]) for each in job.arrays())
    return float(F.cross_entropy(net.eval()(x), y))
