"""Makes a module from the `model` section of a config, and checks that it can be trained."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl.config import registry
from raydpfl.core.prng import Purpose, keyed_globals, stream, torch_stream
from raydpfl.core.signals import limited
from raydpfl.errors import RAISED, ConfigError, in_line
from raydpfl.models import shared_and_local
from raydpfl.models.base import Model
from raydpfl.models.hidden_state import changed, kept
from raydpfl.models.lora import adapt, adapters
from raydpfl.models.networks import FAMILY, hugging_face
from raydpfl.models.networks.hugging_face import HuggingFace
from raydpfl.models.networks.module import Module, factory
from raydpfl.models.shared_and_local import (
    ParameterSplit,
    chosen,
    freeze,
    parameter_count,
    set_local,
    unsettled,
)
from raydpfl.models.tasks import Classification, Form, Target  # noqa: F401  (the examples above)
from raydpfl.models.weights import fill

REMEDY = "use GroupNorm: raydpfl.models.group_norm converts it; or model.frozen, or model.local"
FORWARD = 60.0  # seconds that a module may take for a batch of 2


def parse(values: Mapping[str, Any]) -> Model:
    """The `model` section of a config. Raises `ConfigError`.

    An import path may name a `Model` (then the other keys are its fields), or what makes a module
    (then `args`; see `factory`).
    """
    kind = values.get("kind") if isinstance(values, Mapping) else None
    family = dict(FAMILY)
    if registry.is_path(kind) and kind not in FAMILY and registry.imports("model"):
        model = factory(kind)
        if not (isinstance(model, type) and issubclass(model, Model)):
            family[kind] = HuggingFace if hugging_face.is_one(model) else Module
    return registry.choose("model", values, family, Model)


def build(model: Model, form: Form, seed: int) -> nn.Module:
    """A float32 module on the CPU whose initial parameters (torch's default ones, or those of the
    file that the model starts from) are a function of (model, form, seed).

    The global random state is left as it was. Raises `ConfigError` for a model that is not for such
    samples, and for a module that does not take [batch, *form.shape] to [batch, *form.outputs], has
    nothing to train, is not float32 throughout, or in training changes buffers that are not
    clients' own (as BatchNorm does), or what it keeps in Python.
    """
    with keyed_globals(seed):
        torch.set_rng_state(torch_stream(seed, Purpose.MODEL).get_state())
        module = model.of(form)
        if not isinstance(module, nn.Module):
            raise _refuse(model, f"a torch.nn.Module, not {type(module).__name__}")
        _scores(module.eval(), model, form)  # also gives lazy layers their parameters
        if model.lora is not None:
            adapt(module, model.lora, partial(_scores, module.train(), model, form))
        _divide(module, model)
        _check(module, model, form)
    if model.init is not None:
        fill(module, model.init, _parts(module))
    return module.train()


def _divide(module: nn.Module, model: Model) -> None:
    """Marks what of a module is frozen, and what each client has of its own."""
    still = chosen("model.frozen", model.frozen, module)
    own = chosen("model.local", model.local, module)
    both = sorted(still & own)
    if both:
        expected = f"patterns of what model.frozen has not; {both[0]} is in both"
        raise ConfigError("model.local", list(model.local), expected)
    freeze(module, still)
    set_local(module, own)
    if own and not ParameterSplit.of(module).own:
        expected = "patterns of parameters that are trained, or of buffers"
        raise ConfigError("model.local", list(model.local), expected)


def _parts(module: nn.Module) -> tuple[set[str], ...]:
    """The names that a file of weights may lack: of a model with adapters it may be of the module
    without them, or of what is trained.
    """
    added = adapters(module)
    if not added:
        return ()
    every = module.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in every if parameter.requires_grad}
    return added, set(module.state_dict()) - trained


def _check(module: nn.Module, model: Model, form: Form) -> None:
    """Raises `ConfigError` for a module that cannot be trained; see `build`."""
    mixing = unsettled(module)
    if mixing:
        expected = f"a module without BatchNorm ({mixing[0]}), which mixes samples"
        raise _refuse(model, f"{expected}; {REMEDY}")
    _check_forward(module, model, form)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype != torch.float32 and (tensor.is_floating_point() or tensor.is_complex()):
            raise _refuse(model, f"a float32 module; {name} is {tensor.dtype}")
    if parameter_count(module):
        return
    for field, patterns in (("local", model.local), ("frozen", model.frozen)):
        if patterns:
            expected = "patterns that leave parameters to be trained and sent"
            raise ConfigError(f"model.{field}", list(patterns), expected)
    raise _refuse(model, "a module with trainable parameters")


def _scores(
    module: nn.Module, model: Model, form: Form, generator: np.random.Generator | None = None
) -> Any:
    """What a module gives for a batch of 2. Raises `ConfigError` for one that does not take it."""
    try:
        late = TimeoutError(f"its forward takes more than {FORWARD:g} s for 2 samples")
        with torch.no_grad(), limited(FORWARD, late):
            return module(form.inputs(2, generator))
    except RAISED as error:  # a user's module may raise anything
        taken = f"{form.dtype} {['batch', *form.shape]}"
        raise _refuse(model, f"a module that takes {taken} ({in_line(error)})") from None


def _check_forward(module: nn.Module, model: Model, form: Form) -> None:
    """Raises `ConfigError` for what a forward pass in training gives, changes or keeps."""
    taken = f"{form.dtype} {['batch', *form.shape]}"
    own = shared_and_local.joined(shared_and_local.local_buffers(module))
    _scores(module.train(), model, form)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = kept(module)
    scores = _scores(module, model, form, stream(0, Purpose.DATA))
    if not isinstance(scores, torch.Tensor) or scores.shape != (2, *form.outputs):
        got = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        returned = ", ".join(map(str, ["batch", *form.outputs]))
        expected = f"a module that returns [{returned}] for {taken}"
        raise _refuse(model, f"{expected}; for a batch of 2 it returns {got}")
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]) and name not in shared_and_local.local(module):
            expected = "a module that changes no buffer in training"
            remedy = "model.frozen keeps it as it is, model.local leaves it to each client"
            raise _refuse(model, f"{expected}; {name} changes ({remedy})")
    shared_and_local.fill(shared_and_local.local_buffers(module), own)
    names = ", ".join(changed(state, kept(module))[:5])
    if names:
        expected = "a module that keeps nothing from one batch to the next"
        raise _refuse(model, f"{expected}; {names} changes")


def _refuse(model: Model, expected: str) -> ConfigError:
    return ConfigError("model.kind", model.kind, expected)


def activations(module: nn.Module, form: Form) -> int:
    """How many numbers the layers of a module give for a sample of this form."""
    counted: list[int] = []

    def count(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        counted.extend(tensor.numel() for tensor in (outputs,) if isinstance(tensor, torch.Tensor))

    tried = copy.deepcopy(module)
    for layer in tried.modules():
        layer.register_forward_hook(count)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        tried(form.inputs(1))
    return sum(counted)
