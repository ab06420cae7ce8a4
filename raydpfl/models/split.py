"""Which numbers of a module travel: those that are trained, but for what is frozen.

Parameters and buffers have the names that torch gives them, and are chosen by patterns of the
shell:

>>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
>>> freeze(net, chosen("model.frozen", ("0.*", "1.running_*"), net))
>>> parameter_count(net), flatten(net)
(14, tensor([ 1.0000,  1.0000,  1.0000,  0.0000,  0.0000,  0.0000, ...]))

A layer with a frozen buffer is in evaluation mode for good, so that a BatchNorm with frozen
statistics treats every sample by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from raydpfl import hints
from raydpfl.errors import ConfigError

NAMES = 3  # that a message lists


def chosen(field: str, patterns: Iterable[str], module: nn.Module) -> set[str]:
    """The names of the parameters and buffers that some pattern chooses; a tied parameter has each
    of its own.

    Raises:
        ConfigError: on `field`, for a pattern that chooses nothing.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    names = [name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))]
    found: set[str] = set()
    for pattern in patterns:
        here = [name for name in names if fnmatchcase(name, pattern)]
        if not here:
            more = ", ..." if len(names) > NAMES else ""
            accepted = f"names that the model has, or patterns of them: {', '.join(names[:NAMES])}"
            near = hints.nearest(pattern.rstrip("*?."), _parts(names))
            raise ConfigError(field, pattern, f"{accepted}{more}{near}")
        found.update(here)
    return found


def _parts(names: Iterable[str]) -> list[str]:
    """The names, and those of the modules that they are in."""
    found: dict[str, None] = {}
    for name in names:
        steps = name.split(".")
        found |= dict.fromkeys(".".join(steps[:end]) for end in range(1, len(steps) + 1))
    return list(found)


def freeze(module: nn.Module, names: Set[str]) -> None:
    """Has parameters and buffers stay as they are, in training too."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)
    for layer, buffers in _buffers(module):
        if buffers & names and not is_still(layer):
            layer.register_forward_pre_hook(_evaluates)


def _buffers(module: nn.Module) -> list[tuple[nn.Module, set[str]]]:
    """Each layer that has buffers of its own, and their names."""
    found = []
    for prefix, layer in module.named_modules():
        own = {f"{prefix}.{name}".lstrip(".") for name, _ in layer.named_buffers(recurse=False)}
        if own:
            found.append((layer, own))
    return found


def _evaluates(layer: nn.Module, inputs: Any) -> None:
    """A hook before forward."""
    layer.training = False


def is_still(layer: nn.Module) -> bool:
    """Whether a layer has a frozen buffer, and so is never in training mode."""
    return _evaluates in layer._forward_pre_hooks.values()


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def parameter_count(module: nn.Module) -> int:
    """Trainable parameters, shared ones counted once: the length d of `flatten`."""
    return sum(parameter.numel() for parameter in _trainable(module))


def flatten(module: nn.Module) -> torch.Tensor:
    """A copy of the trainable parameters as float32 [d], each in its logical (row-major) order,
    whatever its memory layout.
    """
    return torch.cat([parameter.detach().reshape(-1) for parameter in _trainable(module)])


def load(module: nn.Module, flat: torch.Tensor) -> nn.Module:
    """Copies `flat` [d] into the trainable parameters in place, and returns the module; the inverse
    of `flatten`.

    Raises ValueError for another length than d.
    """
    parameters = _trainable(module)
    if flat.shape != (parameter_count(module),):
        raise ValueError(f"{list(flat.shape)} numbers for {parameter_count(module)} parameters")
    with torch.no_grad():
        for parameter, part in zip(
            parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True
        ):
            parameter.copy_(part.view(parameter.shape))
    return module
