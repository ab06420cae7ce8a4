"""Adapters of low rank on the linear layers of a frozen module (Hu et al. 2022, LoRA).

A layer x W^T + b becomes x W^T + b + scale (x A^T) B^T with A [rank, in] and B [out, rank]; W and b
stay as they are. A is drawn as torch draws a linear layer, B is 0, so the module starts as it was.
The names are those that others use: A of the layer `h.0.attn` is `h.0.attn.lora_A.weight`.

>>> import torch
>>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
>>> adapt(net, Lora(rank=1, targets=("0",)), lambda: net(torch.ones(1, 4)))
>>> [name for name, parameter in net.named_parameters() if parameter.requires_grad]
['0.lora_A.weight', '0.lora_B.weight']
>>> sorted(merged(net))
['0.bias', '0.weight', '2.bias', '2.weight']
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from raydpfl.config.registry import Section
from raydpfl.errors import ConfigError
from raydpfl.models.shared_and_local import local_names, matching_names

MAX_NAMES = 6  # layers that a message names
A = "lora_A"
B = "lora_B"


class Lora(Section):
    """Which layers have adapters, and of what rank. What else is to be trained is `trained`."""

    rank: int = Field(default=8, ge=1, description="of B A")
    scale: float = Field(
        default=1.0, gt=0, description="what B A is multiplied by: alpha / r of the paper"
    )
    targets: tuple[str, ...] = Field(
        default=("*",),
        min_length=1,
        description="patterns of linear layers, by their names or the last parts of these: "
        '["c_attn"]; of a layer that is trained as a whole none',
    )
    freeze_a: bool = Field(
        default=False,
        description="A stays as it was drawn, and B alone is trained and sent (Sun et al. 2024, "
        "FFA-LoRA)",
    )
    trained: tuple[str, ...] = Field(
        default=(), description='patterns of parameters that are trained too: ["head.*"]'
    )


def adapt(module: nn.Module, lora: Lora, forward: Callable[[], Any]) -> None:
    """Gives layers of a module their adapters, in place, and freezes all else but what is named.

    Args:
        module: it draws from torch's default generator.
        lora: what is asked for.
        forward: runs the module once.

    Raises:
        ConfigError: for a pattern that chooses nothing.
    """
    trained_names = matching_names("model.lora.trained", lora.trained, module)
    layers = _linear_layers(module, forward)
    trained_layers = {name for name in layers if f"{name}.weight".lstrip(".") in trained_names}
    targets = _targets(lora, [name for name in layers if name not in trained_layers])
    names: dict[int, set[str]] = {}  # those of a tied parameter are of one
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    for parameter in module.parameters():
        parameter.requires_grad_(not trained_names.isdisjoint(names[id(parameter)]))
    for name in targets:
        layer = layers[name]
        inputs, outputs = input_major_weight(layer).shape
        layer.add_module(A, nn.Linear(inputs, lora.rank, bias=False))
        layer.add_module(B, nn.Linear(lora.rank, outputs, bias=False))
        nn.init.zeros_(layer.get_parameter(f"{B}.weight"))
        layer.get_parameter(f"{A}.weight").requires_grad_(not lora.freeze_a)
        layer.register_forward_hook(partial(_adapter_hook, lora.scale), with_kwargs=True)


def _targets(lora: Lora, names: list[str]) -> list[str]:
    """The names that some pattern chooses."""
    target_names: dict[str, None] = {}
    for pattern in lora.targets:
        matches = [name for name in names if fnmatchcase(f".{name}", f"*.{pattern}")]
        if not matches:
            ellipsis = ", ..." if len(names) > MAX_NAMES else ""
            text = ", ".join(names[:MAX_NAMES]) or "it has none"
            expected = f"linear layers that the model calls, or patterns of them: {text}{ellipsis}"
            raise ConfigError("model.lora.targets", pattern, expected)
        target_names |= dict.fromkeys(matches)
    return list(target_names)


def _linear_layers(module: nn.Module, forward: Callable[[], Any]) -> dict[str, nn.Module]:
    """The linear layers that are called in a pass, by name: others are used by their weights alone,
    as in `nn.MultiheadAttention`; of some the weight is computed, as by `weight_norm`.
    """
    called_ids: set[int] = set()

    def note(layer: nn.Module, inputs: Any, outputs: Any) -> None:
        called_ids.add(id(layer))

    linear = {
        name: layer
        for name, layer in module.named_modules()
        if (isinstance(layer, nn.Linear) or _is_transposed(layer)) and "weight" in layer._parameters
    }
    hooks = [layer.register_forward_hook(note) for layer in linear.values()]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: layer for name, layer in linear.items() if id(layer) in called_ids}


def _is_transposed(layer: nn.Module) -> bool:
    """Whether it is the linear layer of GPT-2 in transformers, whose weight is [in, out]."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _adapter_hook(
    scale: float, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> Tensor:
    """A hook after forward."""
    x = inputs[0] if inputs else next(iter(kwargs.values()))
    return outputs + layer.get_submodule(B)(scale * layer.get_submodule(A)(x))


def adapters(module: nn.Module) -> set[str]:
    """The names of the parameters of all adapters."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return {name for name in names if name.split(".")[-2:-1] in ([A], [B])}


def exported_names(module: nn.Module) -> set[str]:
    """The names of what a file of adapters holds: all of them, as they need not be trained or
    shared to be needed, and what else is trained and travels.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    trained_names = {name for name, parameter in parameters if parameter.requires_grad}
    return trained_names - local_names(module) | adapters(module)


def adapter_factors(layer: nn.Module) -> tuple[nn.Parameter, ...]:
    """A and B of a layer's adapter; nothing where it has none."""
    parameters = dict(layer.named_parameters())
    names = (f"{A}.weight", f"{B}.weight")
    return tuple(parameters[name] for name in names if name in parameters)


def remove_adapter(layer: nn.Module) -> float | None:
    """Takes a layer's adapter out of its forward, in place, which is then that of the frozen layer.

    Returns:
        The adapter's scale; None, and nothing is changed, where there is none, or where the layer
        is of a class of its own or does something else as well.
    """
    hook_registry = layer._forward_hooks
    hooks = list(hook_registry.values())
    if len(hooks) != 1 or not isinstance(hooks[0], partial) or hooks[0].func is not _adapter_hook:
        return None
    if type(layer) is not nn.Linear and not _is_transposed(layer):
        return None
    (place,) = hook_registry
    del hook_registry[place]
    layer._forward_hooks_with_kwargs.pop(place, None)
    return hooks[0].args[0]


def input_major_weight(layer: nn.Module) -> Tensor:
    """The weight of a linear layer, [in, out]."""
    weight = layer.get_parameter("weight")
    return weight if _is_transposed(layer) else weight.T


def merged(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module without adapters that does what this one does, under
    the names that they had before. Raises `ConfigError` where there is none, as another layer has
    the weight of an adapted one too.
    """
    names = adapters(module)
    tensors = {name: part for name, part in module.state_dict().items() if name not in names}
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for layer in module.modules():
        for weight in layer.parameters(recurse=False):
            owners.setdefault(weight, set()).add(layer)
    for prefix, layer in module.named_modules(remove_duplicate=False):
        for hook in layer._forward_hooks.values():
            if isinstance(hook, partial) and hook.func is _adapter_hook:
                name = f"{prefix}.weight".lstrip(".")
                if len(owners[layer.get_parameter("weight")]) > 1:
                    expected = f"none of this model: other layers have the weight of {name} too, "
                    raise ConfigError("--merged", True, f"{expected}without its adapter")
                a = layer.get_parameter(f"{A}.weight").detach().double()
                b = layer.get_parameter(f"{B}.weight").detach().double()
                change = hook.args[0] * (b @ a)
                change = change.T if _is_transposed(layer) else change
                tensors[name] = (tensors[name].double() + change).float()
    return tensors
