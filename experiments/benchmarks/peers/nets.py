"""The nets of the jobs, and their loss, as a user of torch writes them."""

from functools import partial

import torch
import torch.nn.functional as F
from job import Job
from torch import nn

TOKENS = 65  # characters of Shakespeare's plays
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


def cifar(rates: tuple[float, float] = (0.0, 0.0)) -> nn.Module:
    """pfl-research's for CIFAR-10, of Reddi et al. 2021."""
    drops = [[nn.Dropout(rate)] if rate else [] for rate in rates]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *drops[0],
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        *drops[1],
        nn.Linear(128, 10),
    )


def resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10, norm_layer=partial(nn.GroupNorm, 32))


class Lstm(nn.Module):
    """That of LEAF's Shakespeare: the next character, from the last position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.lstm = nn.LSTM(8, 256, 2, batch_first=True)
        self.out = nn.Linear(256, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.out(states[:, -1])


class Transformer(nn.Module):
    """That of Wang et al. 2021: the next token at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 96)
        self.positions = nn.Parameter(0.02 * torch.randn(20, 96))
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer(96, 8, 1536, **options)
        norm = nn.LayerNorm(96)
        self.blocks = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
        self.out = nn.Linear(96, TOKENS)
        self.register_buffer("later", nn.Transformer.generate_square_subsequent_mask(20))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = self.embed(x) + self.positions
        return self.out(self.blocks(states, self.later, is_causal=True)).transpose(1, 2)


NETS = {
    "softmax": softmax,
    "mlp": mlp,
    "cnn": cnn,
    "cifar": cifar,
    "cifar_dropout": partial(cifar, (0.25, 0.5)),
    "resnet18": resnet18,
    "lstm": Lstm,
    "transformer": Transformer,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETS[name]()


@torch.no_grad()
def loss(net: nn.Module, job: Job) -> float:
    """The mean loss of the first rows."""
    device = next(net.parameters()).device
    x, y = (torch.tensor(each[:LOSS_ROWS], device=device) for each in job.arrays())
    outputs = net.eval()(x)
    by_position = outputs.shape[1:2] == y.shape[1:2]  # raydpfl's scores are [rows, length, tokens]
    return float(F.cross_entropy(outputs.mT if by_position else outputs, y))
