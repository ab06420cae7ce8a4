"""Makes a module from the `model` section of a config, and checks that it can be trained."""

import contextlib
import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl.config import registry
from raydpfl.core.prng import Purpose, keyed_globals, stream, torch_stream
from raydpfl.core.signals import time_limit
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message
from raydpfl.models import shared_and_local
from raydpfl.models.base import Model
from raydpfl.models.hidden_state import changed_names, python_state
from raydpfl.models.lora import adapt, adapters, exported_names
from raydpfl.models.networks import FAMILY, hugging_face
from raydpfl.models.networks.hugging_face import HuggingFace
from raydpfl.models.networks.module import Module, factory
from raydpfl.models.shared_and_local import (
    ParameterSplit,
    freeze,
    matching_names,
    parameter_count,
    set_local,
    shared_batch_norms,
)
from raydpfl.models.tasks import Form
from raydpfl.models.weights import fill

REMEDY = "use GroupNorm: raydpfl.models.group_norm converts it; or model.frozen, or model.local"
FORWARD = 60.0  # seconds that a module may take for a batch of 2
TRIAL = 2.0  # likewise, with parameters of other sizes
LARGE = 100.0  # times their size, at which parameters meet a bound that a forward sets them


def parse(values: Mapping[str, Any]) -> Model:
    """The `model` section of a config. Raises `ConfigError`.

    An import path may name a `Model` (then the other keys are its fields), or what makes a module
    (then `args`; see `factory`).
    """
    kind = values.get("kind") if isinstance(values, Mapping) else None
    family = dict(FAMILY)
    if registry.is_path(kind) and kind not in FAMILY and registry.is_import_allowed("model"):
        model = factory(kind)
        if not (isinstance(model, type) and issubclass(model, Model)):
            family[kind] = HuggingFace if hugging_face.is_transformers_class(model) else Module
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
            raise _kind_error(model, f"a torch.nn.Module, not {type(module).__name__}")
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
    frozen_names = matching_names("model.frozen", model.frozen, module)
    local_names = matching_names("model.local", model.local, module)
    overlap = sorted(frozen_names & local_names)
    if overlap:
        expected = f"patterns of what model.frozen has not; {overlap[0]} is in both"
        raise ConfigError("model.local", list(model.local), expected)
    freeze(module, frozen_names)
    set_local(module, local_names)
    if local_names and not ParameterSplit.of(module).own:
        expected = "patterns of parameters that are trained, or of buffers"
        raise ConfigError("model.local", list(model.local), expected)


def _parts(module: nn.Module) -> tuple[set[str], ...]:
    """The names that a file of weights may lack: of a model with adapters it may be of the module
    without them, or of what is exported.
    """
    adapter_names = adapters(module)
    if not adapter_names:
        return ()
    return adapter_names, set(module.state_dict()) - exported_names(module)


def _check(module: nn.Module, model: Model, form: Form) -> None:
    """Raises `ConfigError` for a module that cannot be trained; see `build`."""
    batch_norms = shared_batch_norms(module)
    if batch_norms:
        expected = f"a module without BatchNorm ({batch_norms[0]}), which mixes samples"
        raise _kind_error(model, f"{expected}; {REMEDY}")
    _check_forward(module, model, form)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype != torch.float32 and (tensor.is_floating_point() or tensor.is_complex()):
            raise _kind_error(model, f"a float32 module; {name} is {tensor.dtype}")
    if parameter_count(module):
        return
    for field, patterns in (("local", model.local), ("frozen", model.frozen)):
        if patterns:
            expected = "patterns that leave parameters to be trained and sent"
            raise ConfigError(f"model.{field}", list(patterns), expected)
    raise _kind_error(model, "a module with trainable parameters")


def _scores(
    module: nn.Module,
    model: Model,
    form: Form,
    generator: np.random.Generator | None = None,
    seconds: float = FORWARD,
) -> Any:
    """What a module gives for a batch of 2, within so many seconds. Raises `ConfigError` for one
    that does not take it.
    """
    try:
        timeout = TimeoutError(f"its forward takes more than {seconds:g} s for 2 samples")
        with torch.no_grad(), time_limit(seconds, timeout):
            return module(form.inputs(2, generator))
    except USER_EXCEPTIONS as error:  # a user's module may raise anything
        expected = f"a module that takes {form.dtype} {['batch', *form.shape]}"
        raise _kind_error(model, f"{expected} ({located_message(error)})") from None


def _check_forward(module: nn.Module, model: Model, form: Form) -> None:
    """Raises `ConfigError` for what a forward pass gives, or changes or keeps in training."""
    local_values = shared_and_local.concatenate(shared_and_local.local_buffers(module))
    _scores(module.train(), model, form)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    state = python_state(module)
    _check_scores(_scores(module, model, form, stream(0, Purpose.DATA)), model, form)
    local_names = shared_and_local.local_names(module)
    for name, buffer in module.named_buffers():
        if not torch.equal(buffer, before[name]) and name not in local_names:
            expected = "a module that changes no buffer in training"
            remedy = "model.frozen keeps it as it is, model.local leaves it to each client"
            raise _kind_error(model, f"{expected}; {name} changes ({remedy})")
    shared_and_local.fill(shared_and_local.local_buffers(module), local_values)
    names = ", ".join(changed_names(state, python_state(module))[:5])
    if names:
        expected = "a module that keeps nothing from one batch to the next"
        raise _kind_error(model, f"{expected}; {names} changes")
    _check_scores(_scores(module.eval(), model, form), model, form, " in evaluation mode")


def _check_scores(scores: Any, model: Model, form: Form, mode: str = "") -> None:
    """Raises `ConfigError` for what a module gives for a batch of 2, in `mode`."""
    if not isinstance(scores, torch.Tensor) or scores.shape != (2, *form.outputs):
        actual = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        output_text = ", ".join(map(str, ["batch", *form.outputs]))
        input_text = f"{form.dtype} {['batch', *form.shape]}"
        expected = f"a module that returns [{output_text}] for {input_text}"
        raise _kind_error(model, f"{expected}; for a batch of 2 it returns {actual}{mode}")


def check_parameters(module: nn.Module, model: Model, form: Form) -> None:
    """Raises `ConfigError` for a module whose forward pass in training changes its parameters, or
    puts others in their place: training would go on with those before. It is tried on a copy. What
    torch's Embedding changes stays in place.
    """
    trial = copy.deepcopy(module).train()
    for layer in trial.modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            layer.max_norm = None
    originals = dict(module.named_parameters())
    parameters = dict(trial.named_parameters())
    addresses = {name: part.data_ptr() for name, part in parameters.items()}

    def values(name: str, factor: float) -> torch.Tensor:
        original = originals[name].detach()
        return original * factor if original.is_floating_point() else original

    for factor in (LARGE, -LARGE):
        for name, part in parameters.items():
            part.data.copy_(values(name, factor))
        # such numbers may be too large for it
        with contextlib.suppress(ConfigError), keyed_globals(0):
            _scores(trial, model, form, stream(0, Purpose.DATA), TRIAL)
        after = dict(trial.named_parameters())
        for name, part in parameters.items():
            same = after.get(name) is part and part.data_ptr() == addresses[name]
            if not (same and ((part == values(name, factor)) | (part != part)).all()):
                expected = f"a module whose forward changes no parameter; it changes {name}"
                remedy = "torch.nn.utils.parametrize computes with a changed copy"
                raise _kind_error(model, f"{expected} ({remedy})")


def _kind_error(model: Model, expected: str) -> ConfigError:
    return ConfigError("model.kind", model.kind, expected)


def activations(module: nn.Module, form: Form) -> int:
    """How many numbers the layers of a module give for a sample of this form."""
    counts: list[int] = []

    def count(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        counts.extend(tensor.numel() for tensor in (outputs,) if isinstance(tensor, torch.Tensor))

    module_copy = copy.deepcopy(module)
    for layer in module_copy.modules():
        layer.register_forward_hook(count)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module_copy(form.inputs(1))
    return sum(counts)
