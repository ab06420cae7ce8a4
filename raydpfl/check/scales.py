"""What bounds an influence keeps to its bound at every scale of floating point, or refuses it."""

import math

import numpy as np
import torch
from torch import nn

from raydpfl.check.contract import hold, normals
from raydpfl.check.example import Example
from raydpfl.core import native
from raydpfl.core.messages import check_bound
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import ConfigError
from raydpfl.methods.bounding import Bounding
from raydpfl.methods.local import Sgd
from raydpfl.models import flatten
from raydpfl.models.tasks.regression import Regression
from raydpfl.training.backends import BACKENDS, missing_requirement
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
    has_bound = "bound" in case.values
    scales = [
        exponent
        for exponent in (EXPONENTS if has_bound else (0,))
        if _accepts_bound(case, {"bound": 10.0**exponent} if has_bound else {})
    ]
    hold(scales, "no bound is taken")
    return f"bounds of 1e{scales[0]} to 1e{scales[-1]}" if has_bound else "the bound that it has"


def _accepts_bound(case: Example, bound: dict[str, float]) -> bool:
    """Whether a bound is taken. Raises `BrokenClause` for one that is taken and not kept."""
    values = case.values | bound
    try:
        member: Bounding = Example(case.section, values).member
        limit = member.initial_bound or member.sample_bound
        assert limit is not None
        check_bound("bounding.bound", limit)
    except ConfigError:
        return False
    if member.initial_bound is not None:
        _check_vectors(member, limit)
    else:
        for backend in (name for name in BACKENDS if not missing_requirement(name, Sgd(), limit)):
            check_samples(backend, limit)
    return True


def _check_vectors(member: Bounding, bound: float) -> None:
    rows = torch.from_numpy(normals(WIDTH)).float() * 10.0 ** torch.tensor(EXPONENTS)[:, None]
    for vectors in (rows, rows.double()):
        norms = torch.from_numpy(native.norms(vectors))
        with keyed_globals(1):
            factors = member.factors(norms.clone(), bound)
        outputs = (factors[:, None] * vectors.double()).tolist()
        for exponent, norm in zip(EXPONENTS, (math.hypot(*row) for row in outputs), strict=True):
            message = f"a vector of size 1e{exponent} is sent with norm {norm:g}, above {bound:g}"
            hold(norm <= bound * (1 + 1e-9), message)


def check_samples(backend: str, bound: float) -> None:
    """Raises `BrokenClause` unless a step of this backend, of one sample, is within the bound on
    its gradient, for inputs and errors of every size, or shows as not finite. Only weights that
    are 0 are looked at, as others round the step that they are moved by.
    """
    sizes = [(inputs, errors) for inputs in PARTIAL for errors in PARTIAL]
    x = torch.from_numpy(normals(len(sizes), 1, 1, 6, 6)).float()
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
                message = f"{backend}: inputs of 1e{inputs}, an error of 1e{errors}: {norm:g}"
                is_bounded = norm <= bound * (1 + ROUNDING) or not math.isfinite(norm)
                hold(is_bounded, f"{message}, above {bound:g}")


def _module(backend: str, bias: bool) -> tuple[nn.Module, int]:
    """A regression that begins at 0, and its number of weights; for convolutions, after filters
    that are too small to move it.
    """
    last = nn.Linear(36 if backend != "convolutional" else 8, 1, bias=bias)
    layers: list[nn.Module] = [nn.Flatten()]
    if backend == "convolutional":
        filters = nn.Conv2d(1, 2, 3, bias=False)
        nn.init.constant_(filters.weight, 2.0**-30)
        layers = [filters, nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers, last), sum(weight.numel() for weight in last.parameters())
