"""What a module and a rule must be for what is asked of them, tried out on made-up numbers."""

import contextlib
import copy
import pickle
import random

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raydpfl import models
from raydpfl.core import prng
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message
from raydpfl.methods.local.base import Local, Step
from raydpfl.models.tasks import Form

CLOSE = 1e-4  # relative: rounding gives less than 1e-6 on the few numbers that a rule is tried on


def foreign_generator(module: nn.Module, form: Form) -> str | None:
    """The generator, other than torch's, that a module in training draws from, or None: seen in
    each of a few tries, as other threads may draw too.
    """
    name = _trial_generator(module, form)
    is_same = all(name and _trial_generator(module, form) == name for _ in range(2))
    return name if is_same else None


def _trial_generator(module: nn.Module, form: Form) -> str | None:
    with prng.keyed_globals(0):
        python_state = random.getstate()
        numpy_state = pickle.dumps(np.random.get_state())
        with contextlib.suppress(Exception):  # what it raises it will raise in training too
            copy.deepcopy(module).train()(_inputs(form))
        if random.getstate() != python_state:
            return "Python's random"
        return "np.random" if pickle.dumps(np.random.get_state()) != numpy_state else None


def _inputs(form: Form) -> torch.Tensor:
    """Two made-up inputs, float32 [2, *shape] of ones or int64 ones drawn."""
    inputs = form.inputs(2, prng.stream(0, prng.Purpose.DATA))
    return inputs if form.tokens else torch.ones_like(inputs)


def check_loss(module: nn.Module, form: Form) -> None:
    """Raises `ConfigError` for a loss that does not fit the outputs, or mixes samples."""
    task = form.task
    generator = prng.stream(0, prng.Purpose.DATA)
    inputs = form.inputs(4, generator)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = copy.deepcopy(module).eval()(inputs)
    except USER_EXCEPTIONS:  # it will raise in training too, and be reported with its client
        return
    # of classes a module may know more than there are
    shape = tuple(outputs.shape[1:]) if form.target.classes else form.outputs
    y = task.random_targets(generator, 4, shape)
    expected = f"a task with a loss for each sample of outputs {list(outputs.shape)}"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            losses = task.loss(outputs, y)
            singles = [task.loss(outputs[k : k + 1], y[k : k + 1]) for k in range(4)]
    except USER_EXCEPTIONS as error:
        message = located_message(error)
        raise ConfigError("data.task.kind", task.kind, f"{expected} ({message})") from None
    reason = ""
    if losses.shape != (4,):
        reason = f"for a batch of 4 it gives shape {list(losses.shape)}"
    elif not torch.allclose(losses, torch.cat(singles), rtol=CLOSE, atol=CLOSE, equal_nan=True):
        reason = "that of one does not depend on the others"
    if reason:
        raise ConfigError("data.task.kind", task.kind, f"{expected}; {reason}")


def check_no_mixing(module: nn.Module, form: Form) -> None:
    """Raises `ConfigError` for a module in which a sample's gradient depends on the others by
    another path than the noisy parameters.
    """
    for name, layer in module.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm) and not models.has_frozen_buffer(layer):
            remedy = "use GroupNorm: raydpfl.models.group_norm converts it; or model.frozen"
            raise _mixing_error(module, f"{name or 'it'} is a {kind} ({remedy})")
        # of an Embedding: it shortens the rows that it is asked for
        if getattr(layer, "max_norm", None) is not None:
            reason = "with max_norm, which changes its weight with what it is given"
            raise _mixing_error(module, f"{name or 'it'} is a {kind} {reason}")
    trial_module = copy.deepcopy(module).train()
    # what it raises it will raise in training too
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
        trial_module(_inputs(form))
    for kind, named_tensors, trial_tensors in (
        ("buffer", module.named_buffers(), trial_module.buffers()),
        ("parameter", module.named_parameters(), trial_module.parameters()),
    ):
        for (name, before), after in zip(named_tensors, trial_tensors, strict=True):
            if not torch.equal(before, after):
                raise _mixing_error(module, f"its {kind} {name} changes with what it is given")


def _mixing_error(module: nn.Module, reason: str) -> ConfigError:
    expected = "a module that mixes no samples, as they are clipped one by one"
    return ConfigError("model", type(module).__name__, f"{expected}; {reason}")


def check_rule(local: Local) -> None:
    """Raises `ConfigError` for a learning rate that depends on more than the round, and a user's
    step that raises, changes its arguments, or mixes clients. What a `train` does shows later.
    """
    rates = [local.learning_rate(t) for t in (0, 1, 2, 0, 1, 2)]
    if rates[:3] != rates[3:]:
        expected = "a class whose learning_rate depends on the round alone"
        raise ConfigError("local.kind", local.kind, expected)
    if local.linear() is not None or local.trains:
        return
    normals = prng.stream(0, prng.Purpose.DATA).standard_normal((4, 3, 7))
    (model, *_), *gradients = torch.from_numpy(normals).float()
    try:
        steps = _steps(local, model, model.repeat(3, 1), gradients)
        singles = [
            _steps(local, model, model, [gradient[client] for gradient in gradients])
            for client in range(3)
        ]
    except USER_EXCEPTIONS as error:
        reason = f"whose step can be made; it raised {located_message(error)}"
        raise ConfigError("local.kind", local.kind, f"a class {reason}") from None
    if not torch.allclose(steps, torch.stack(singles), rtol=CLOSE, atol=CLOSE, equal_nan=True):
        reason = "whose step for clients [C, P] is that for each of them; this one mixes clients, "
        reason += "or draws: let it reduce along dim=-1 alone, with keepdim=True"
        raise ConfigError("local.kind", local.kind, f"a class {reason}")


def check_counts(local: Local, sizes: np.ndarray) -> None:
    """Raises `ConfigError` for a user-defined rule whose batches or steps are not a matter of a
    client's own rows, `sizes` int64 [N]: a chunk would train by others than are accounted for.
    """
    if not local.is_user_defined or local.trains:
        return
    distinct, places = np.unique(sizes, return_inverse=True)
    for name in ("batch_sizes", "step_counts"):
        counts = getattr(local, name)
        singles = np.concatenate([counts(distinct[k : k + 1]) for k in range(len(distinct))])
        if not np.array_equal(counts(sizes), singles[places]):
            reason = f"a class whose {name} for a client depend on its own rows alone"
            raise ConfigError("local.kind", local.kind, reason)


def _steps(
    local: Local, model: torch.Tensor, x: torch.Tensor, gradients: list[torch.Tensor]
) -> torch.Tensor:
    """x after a step along each of the gradients. Raises ValueError for what is no step."""
    state = local.fresh(x)
    for k, gradient in enumerate(gradients):
        step = Step(k, local.learning_rate(0), model)
        before = x.clone(), gradient.clone()
        perturbed_x = local.perturb(x, gradient, state, step)
        after, state = local.step(x, gradient, state, step)
        if not (torch.equal(x, before[0]) and torch.equal(gradient, before[1])):
            raise ValueError("it changes what it is given in place")
        for result in (after, perturbed_x):
            if result.shape != x.shape or result.dtype != x.dtype:
                description = f"{result.dtype} {list(result.shape)}"
                raise ValueError(f"from x {list(x.shape)} it gives {description}")
        x = after + (perturbed_x - before[0])  # so that neither may depend on other clients
    return x
