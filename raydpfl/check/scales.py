"""What bounds an influence keeps to its bound at every scale of floating point, or refuses it."""

import math

import numpy as np
import torch
from torch import nn

from raydpfl.check.contract import hold, made_up
from raydpfl.check.example import Example
from raydpfl.core import native
from raydpfl.core.messages import check_bound
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import ConfigError
from raydpfl.methods.bounding import Bounding
from raydpfl.methods.local import Sgd
from raydpfl.models import flatten
from raydpfl.models.tasks.regression import Regression
from raydpfl.training.backends import BACKENDS, lacking
from raydpfl.training.trainer import Trainer

EXPONENTS = range(-30, 31, 3)
PARTIAL = (-30, -23, -14, 0, 9, 18)  # of inputs and of targets
ROUNDING = 1e-5
WIDTH = 16


def scales(case: Example) -> str:
    """Bounds and what is bounded may be of any size: a bound is kept, or refused as out of
    range.
    """
    member = case.member
    if member.initial_bound is None and member.sample_bound is None:
        return "bounds nothing"
    tried = "bound" in case.values
    scales = [
        exponent
        for exponent in (EXPONENTS if tried else (0,))
        if _keeps(case, {"bound": 10.0**exponent} if tried else {})
    ]
    hold(scales, "no bound is taken")
    return f"bounds of 1e{scales[0]} to 1e{scales[-1]}" if tried else "the bound that it has"


def _keeps(case: Example, bound: dict[str, float]) -> bool:
    """Whether a bound is taken. Raises `Broken` for one that is taken and not kept."""
    values = case.values | bound
    try:
        member: Bounding = Example(case.section, values).member
        most = member.initial_bound or member.sample_bound
        assert most is not None
        check_bound("bounding.bound", most)
    except ConfigError:
        return False
    if member.initial_bound is not None:
        _hold_vectors(member, most)
    else:
        for backend in (name for name in BACKENDS if not lacking(name, Sgd(), most)):
            hold_samples(backend, most)
    return True


def _hold_vectors(member: Bounding, most: float) -> None:
    rows = torch.from_numpy(made_up(WIDTH)).float() * 10.0 ** torch.tensor(EXPONENTS)[:, None]
    for vectors in (rows, rows.double()):
        norms = torch.from_numpy(native.norms(vectors))
        with keyed_globals(1):
            factors = member.factors(norms.clone(), most)
        sent = (factors[:, None] * vectors.double()).tolist()
        for exponent, norm in zip(EXPONENTS, (math.hypot(*row) for row in sent), strict=True):
            beyond = f"a vector of size 1e{exponent} is sent with norm {norm:g}, above {most:g}"
            hold(norm <= most * (1 + 1e-9), beyond)


def hold_samples(backend: str, bound: float) -> None:
    """Raises `Broken` unless a step of this backend, of one sample, is within the bound on its
    gradient, for inputs and errors of every size, or shows as not finite. Only weights that are 0
    are looked at, as others round the step that they are moved by.
    """
    sizes = [(one, other) for one in PARTIAL for other in PARTIAL]
    x = torch.from_numpy(made_up(len(sizes), 1, 1, 6, 6)).float()
    y = torch.ones(len(sizes), 1)
    for place, (inputs, errors) in enumerate(sizes):
        x[place] *= 10.0**inputs
        y[place] *= 10.0**errors
    rule = Sgd(steps=1, batch=1, lr=1.0)
    for bias in (True, False):
        module, count = _module(backend, bias)
        trainer = Trainer(module, rule, backend=backend, seed=0, clip=bound, task=Regression())
        model, rows = flatten(module), [1] * len(sizes)
        clients, draws = list(range(len(sizes))), [0] * len(sizes)
        for block in trainer.chunk(model, x, y, rows, t=0, clients=clients, draws=draws):
            steps = np.asarray(block.updates[:, -count:], np.float64)
            for slot, step in zip(block.slots.tolist(), steps, strict=True):
                norm = math.hypot(*step)
                inputs, errors = sizes[slot]
                beyond = f"{backend}: inputs of 1e{inputs}, an error of 1e{errors}: {norm:g}"
                within = norm <= bound * (1 + ROUNDING) or not math.isfinite(norm)
                hold(within, f"{beyond}, above {bound:g}")


def _module(backend: str, bias: bool) -> tuple[nn.Module, int]:
    """A regression that begins at 0, and its number of weights; for convolutions, after filters
    that are too small to move it.
    """
    last = nn.Linear(36 if backend != "convolutional" else 8, 1, bias=bias)
    before: list[nn.Module] = [nn.Flatten()]
    if backend == "convolutional":
        filters = nn.Conv2d(1, 2, 3, bias=False)
        nn.init.constant_(filters.weight, 2.0**-30)
        before = [filters, nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*before, last), sum(each.numel() for each in last.parameters())
