"""The contract of a model: see `raydpfl.models`.

It is tried on made-up samples: images of 28 x 28 and of 3 x 32 x 32 of ten classes, eight numbers,
or six tokens with a target for each; the first that it takes. Others are named by overrides, as
`data.shape=[60] data.classes=4`, or by a section `data` of the user's own.
"""

import copy
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.check.contract import backends, hold
from raydpfl.check.example import Example
from raydpfl.core.prng import Purpose, keyed_globals, stream
from raydpfl.data import Shards
from raydpfl.errors import USER_EXCEPTIONS, ConfigError
from raydpfl.methods.local.sgd import Sgd
from raydpfl.models import weights
from raydpfl.models.tasks import Form
from raydpfl.training.backend_check import BATCH_ERROR, TOLERANCE, FirstSteps, row_dependence
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backends import BACKENDS, REFERENCE
from raydpfl.training.validation import check_no_mixing, foreign_generator

CLOSE = 1e-5  # of the model's norm: what rounding in another order may come to


def _form(case: Example) -> Form:
    """The samples of the experiment around it."""
    return Shards.open(case.plan.shards).form(case.plan.experiment.data.task)


def _module_and_form(case: Example) -> tuple[nn.Module, Form]:
    """A copy of the module as it begins, which is made once, and its samples."""
    if case.module is None:
        case.module = _build_module(case, 0)
    return copy.deepcopy(case.module), _form(case)


def _rows(form: Form, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of so many samples."""
    generator = stream(0, Purpose.DATA)
    x = form.inputs(count, generator)
    y = form.task.random_targets(generator, count, form.outputs)
    return x, y.reshape(count, *form.target.shape)


def _build_module(case: Example, seed: int) -> nn.Module:
    return models.build(case.plan.experiment.model, _form(case), seed)


def shapes(case: Example) -> str:
    """Of any number of rows it gives float32 outputs of the right shape, in training and out of
    it.
    """
    module, form = _module_and_form(case)
    for rows in (1, 2, 7):
        x = form.inputs(rows, stream(0, Purpose.DATA))
        for mode in (module.train(), module.eval()):
            outputs = mode(x)
            detail = f"{rows} rows give {outputs.dtype} {list(outputs.shape)}"
            hold(outputs.dtype == torch.float32 and outputs.shape == (rows, *form.outputs), detail)
            hold(torch.isfinite(outputs).all(), f"{rows} rows give what is not finite")
    shape = ", ".join(map(str, form.shape))
    return f"[{shape}] to [{', '.join(map(str, form.outputs))}], {case.d:,} parameters"


def each_row_alone(case: Example) -> str:
    """What it gives for a row does not depend on the other rows of the batch, which may be far from
    it.
    """
    module, form = _module_and_form(case)
    x = form.inputs(5, stream(0, Purpose.DATA))
    with torch.no_grad():
        batch = module.eval()(x)
        rows = torch.cat([module(row) for row in x.split(1)])
    error = float((batch - rows).abs().max() / batch.abs().max().clamp(min=1e-30))
    hold(error <= BATCH_ERROR, f"by itself, a row's output is off by {error:.1e} of it")
    dependence = row_dependence(module, form)
    hold(not dependence, f"{dependence}")
    return f"to {error:.0e} of it"


def initial_parameters(case: Example) -> str:
    """What it begins with is a function of the seed, whatever the process has drawn before."""
    vectors = []
    for process_seed, seed in ((0, 0), (1, 0), (0, 1)):
        with keyed_globals(process_seed):
            np.random.rand(process_seed)
            vectors.append(models.flatten(_build_module(case, seed)))
    hold(torch.equal(vectors[0], vectors[1]), "made twice, it begins with others")
    return "the same for every seed" if torch.equal(vectors[0], vectors[2]) else "by the seed"


def same_bits_twice(case: Example) -> str:
    """Asked twice, outputs and gradients are the same to the last bit."""
    module, form = _module_and_form(case)
    x, y = _rows(form, 4)
    module.train()
    first = _gradients(module, form, x, y)
    _gradients(module, form, x.flip(0), y.flip(0))
    second = _gradients(module, form, x, y)
    hold(all(map(torch.equal, first, second)), "it gives others after another batch")
    return f"{len(first) - 1} gradients"


def _gradients(
    module: nn.Module, form: Form, x: torch.Tensor, y: torch.Tensor
) -> list[torch.Tensor]:
    """The outputs, and the gradient by each trained parameter that has one."""
    trained_parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with keyed_globals(0):
        outputs = module(x)
        loss = form.task.loss(outputs, y).mean()
        gradients = torch.autograd.grad(loss, trained_parameters, allow_unused=True)
    return [outputs.detach(), *(gradient for gradient in gradients if gradient is not None)]


def every_parameter(case: Example) -> str:
    """Each trained parameter has a gradient: what has none is sent, with noise, for nothing."""
    module, form = _module_and_form(case)
    x, y = _rows(form, 4)
    with keyed_globals(0):
        form.task.loss(module(x), y).mean().backward()
    tensors = [(name, tensor) for name, tensor in module.named_parameters() if tensor.requires_grad]
    names = [name for name, tensor in tensors if tensor.grad is None]
    remedy = f"model.frozen={names[:3]} keeps them out"
    hold(not names, f"{', '.join(names[:3])} of {len(tensors)} have none ({remedy})")
    return f"{len(tensors)} tensors"


def copies(case: Example) -> str:
    """A copy, and one that is filled from a file of its weights, give the same bits."""
    module, form = _module_and_form(case)
    x = form.inputs(3, stream(0, Purpose.DATA))
    file = case.folder / "weights.safetensors"
    file.write_bytes(weights.serialize(module.state_dict(), file, {}))
    other = _build_module(case, seed=1)
    weights.fill(other, str(file))
    with torch.no_grad():
        expected = module.eval()(x)
        for second, kind in ((copy.deepcopy(module), "copied"), (other, "filled from a file")):
            hold(torch.equal(second.eval()(x), expected), f"{kind}, it gives something else")
    return "copied, and through safetensors"


def every_backend(case: Example) -> str:
    """The backend that a run takes, like every other one that fits, comes to where the loop does:
    to 1e-5 of the model, or to 1e-3 of the step where a ReLU's input rounds across 0.
    """
    return _compare_backends(case, None)


def every_backend_with_clipping(case: Example) -> str:
    """The same where every sample's gradient is clipped."""
    module, form = _module_and_form(case)
    try:
        check_no_mixing(module, form)
    except ConfigError as error:
        return f"none: expected {error.expected}"
    return _compare_backends(case, 0.5)


def _compare_backends(case: Example, clip: float | None) -> str:
    module, form = _module_and_form(case)
    local = Sgd()
    random_source = foreign_generator(module, form)
    steps = FirstSteps(module, local, form, clip)
    fits = {REFERENCE: REFERENCE}
    misfits: dict[str, list[str]] = {}
    for backend in backends(local, clip):
        result = _difference(steps, backend)
        if random_source and not BACKENDS[backend].one_by_one:
            result = f"it draws from {random_source}, client by client"
        if isinstance(result, str):
            misfits.setdefault(result, []).append(backend)
        else:
            fits[backend] = f"{backend} ({result:.0e})"
    with _silence_warnings():
        chosen_backend = choose_backend(module, local, form, clip=clip)
    hold(chosen_backend in fits, f"a run takes {chosen_backend}, {'; '.join(misfits)}")
    detail = f"a run takes {chosen_backend} of {', '.join(fits.values())}"
    notes = (f"{', '.join(names)}: {reason}" for reason, names in misfits.items())
    return "; not ".join([detail, *notes])


@contextmanager
def _silence_warnings() -> Iterator[None]:
    """Without what is said of backends that do not fit, or that are slow for some layers."""
    logger = logging.getLogger("raydpfl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)


def _difference(steps: FirstSteps, backend: str) -> float | str:
    """The distance to the loop's update over the model's norm, or why the backend does not fit."""
    try:
        with _silence_warnings():
            backend_updates, loop_updates = steps.by(backend)
    except USER_EXCEPTIONS as error:  # a module may do anything when it is traced or vmapped
        return " ".join(str(error).split())[:80] or type(error).__name__
    distances = (backend_updates - loop_updates).norm(dim=1)
    distance = float((distances / (models.flatten(steps.module) + loop_updates).norm(dim=1)).max())
    fits = distance <= CLOSE or float((distances / loop_updates.norm(dim=1)).max()) <= TOLERANCE
    return distance if fits else f"off by {distance:.0e}"
