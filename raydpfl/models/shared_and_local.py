"""Which numbers of a module travel, which stay with each client, and which stay as they are.

Parameters and buffers have the names that torch gives them, and are chosen by patterns of the
shell:

>>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
>>> freeze(net, matching_names("model.frozen", ("0.*",), net))
>>> set_local(net, matching_names("model.local", ("1.*",), net))
>>> flatten(net).shape, parameter_count(net), ParameterSplit.of(net).own
(torch.Size([8]), 8, 13)

A layer with a frozen buffer is in evaluation mode for good, so that a BatchNorm with frozen
statistics treats every sample by itself. All else that is trained travels, but for what is local,
which each client has of its own: here the weight, bias and statistics of the BatchNorm (FedBN; Li
et al. 2021).
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from raydpfl.config import hints
from raydpfl.core.device import CPU, move_tensor
from raydpfl.errors import ConfigError

NAMES = 3  # that a message lists
LOCAL = "_stays_with_clients"  # the attribute of a module


def matching_names(field: str, patterns: Iterable[str], module: nn.Module) -> set[str]:
    """The names of the parameters and buffers that some pattern chooses; a tied parameter has each
    of its own.

    Raises:
        ConfigError: on `field`, for a pattern that chooses nothing.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    names = [name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))]
    matched_names: set[str] = set()
    for pattern in patterns:
        matches = [name for name in names if fnmatchcase(name, pattern)]
        if not matches:
            ellipsis = ", ..." if len(names) > NAMES else ""
            expected = f"names that the model has, or patterns of them: {', '.join(names[:NAMES])}"
            hint = hints.nearest_key_hint(pattern.rstrip("*?."), _parts(names))
            raise ConfigError(field, pattern, f"{expected}{ellipsis}{hint}")
        matched_names.update(matches)
    return matched_names


def _parts(names: Iterable[str]) -> list[str]:
    """The names, and those of the modules that they are in."""
    parts: dict[str, None] = {}
    for name in names:
        steps = name.split(".")
        parts |= dict.fromkeys(".".join(steps[:end]) for end in range(1, len(steps) + 1))
    return list(parts)


def freeze(module: nn.Module, names: Set[str]) -> None:
    """Has parameters and buffers stay as they are, in training too."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)
    for layer, buffers in _buffers(module):
        if buffers & names and not has_frozen_buffer(layer):
            layer.register_forward_pre_hook(_evaluation_hook, prepend=True)


def _buffers(module: nn.Module) -> list[tuple[nn.Module, set[str]]]:
    """Each layer that has buffers of its own, and their names."""
    layers = []
    for prefix, layer in module.named_modules():
        names = {f"{prefix}.{name}".lstrip(".") for name, _ in layer.named_buffers(recurse=False)}
        if names:
            layers.append((layer, names))
    return layers


def _evaluation_hook(layer: nn.Module, inputs: Any) -> None:
    """A hook before forward."""
    layer.training = False


def shared_batch_norms(module: nn.Module) -> list[str]:
    """The BatchNorms, by name, whose statistics are neither frozen nor each client's own."""
    layers = [layer for layer, buffers in _buffers(module) if buffers <= local_names(module)]
    return [
        name or "itself"
        for name, layer in module.named_modules()
        if isinstance(layer, _BatchNorm) and not has_frozen_buffer(layer) and layer not in layers
    ]


def has_frozen_buffer(layer: nn.Module) -> bool:
    """Whether a layer has a frozen buffer, and so is never in training mode."""
    return _evaluation_hook in layer._forward_pre_hooks.values()


def set_local(module: nn.Module, names: Set[str]) -> None:
    """Has parameters and buffers stay with each client. What is frozen is not theirs."""
    vars(module)[LOCAL] = frozenset(names)


def local_names(module: nn.Module) -> frozenset[str]:
    """The names of what stays with each client."""
    return vars(module).get(LOCAL, frozenset())


def _trainable(module: nn.Module) -> list[tuple[nn.Parameter, bool]]:
    """The parameters that are trained, and whether each travels."""
    names = local_names(module)
    local_ids = {
        id(parameter)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if name in names
    }
    trained_parameters = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return [(parameter, id(parameter) not in local_ids) for parameter in trained_parameters]


def _shared_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter, travels in _trainable(module) if travels]


def local_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that each client keeps."""
    names = local_names(module)
    return [buffer for name, buffer in module.named_buffers() if name in names]


def parameter_count(module: nn.Module) -> int:
    """Parameters that travel, tied ones counted once: the length d of `flatten`."""
    return sum(parameter.numel() for parameter in _shared_parameters(module))


def flatten(module: nn.Module) -> torch.Tensor:
    """A copy of the parameters that travel as float32 [d], each in its logical (row-major) order,
    whatever its memory layout.
    """
    return concatenate(_shared_parameters(module))


def concatenate(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A copy of tensors as one vector of the parameters' dtype, counts as float32."""
    vectors = [tensor.detach().reshape(-1) for tensor in tensors]
    numbers = [buffer if buffer.is_floating_point() else buffer.float() for buffer in vectors]
    return torch.cat(numbers) if numbers else torch.empty(0)


def load(module: nn.Module, flat: torch.Tensor) -> nn.Module:
    """Copies `flat` [d] into the parameters that travel, and returns the module; the inverse of
    `flatten`.

    Raises ValueError for another length than d.
    """
    fill(_shared_parameters(module), flat)
    return module


def trained(module: nn.Module) -> torch.Tensor:
    """A copy of all that training changes, float32 [D + b]: the D numbers of the parameters that
    are trained, whether they travel or not, and then those of the buffers that clients keep (counts
    of batches are exact below 2^24).
    """
    parameters = [parameter for parameter, _ in _trainable(module)]
    return concatenate([*parameters, *local_buffers(module)])


def set_trained(module: nn.Module, values: torch.Tensor) -> nn.Module:
    """The inverse of `trained`. Raises ValueError for another length."""
    parameters = [parameter for parameter, _ in _trainable(module)]
    fill([*parameters, *local_buffers(module)], values)
    return module


@torch.no_grad()
def fill(tensors: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """The inverse of `concatenate`. Raises ValueError for another length."""
    sizes = [tensor.numel() for tensor in tensors]
    if flat.shape != (sum(sizes),):
        raise ValueError(f"{list(flat.shape)} numbers for {sum(sizes)} parameters")
    for tensor, part in zip(tensors, flat.split(sizes), strict=True):
        whole = not tensor.is_floating_point()  # a count of batches
        tensor.copy_((part.round() if whole else part).view(tensor.shape))


@dataclass(frozen=True)
class ParameterSplit:
    """Of the D + b numbers of a module that training changes (`trained`): which travel, and which
    each client keeps.
    """

    travels: torch.Tensor  # bool [D + b], on the CPU
    buffers: int  # b
    device: torch.device = CPU  # where the numbers are

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        """That of a module."""
        parts = [
            torch.full((parameter.numel(),), travels) for parameter, travels in _trainable(module)
        ]
        buffers = sum(buffer.numel() for buffer in local_buffers(module))
        mask = torch.zeros(buffers, dtype=torch.bool)
        return cls(torch.cat([*parts, mask]), buffers, next(module.parameters()).device)

    @cached_property
    def own(self) -> int:
        """Numbers that each client keeps."""
        return len(self._local_indices)

    @property
    def parameters(self) -> int:
        """D."""
        return len(self.travels) - self.buffers

    @cached_property
    def _shared_indices(self) -> torch.Tensor:
        """The places of what travels, int64 [d]."""
        return move_tensor(self.travels.nonzero().flatten(), self.device)

    @cached_property
    def _local_indices(self) -> torch.Tensor:
        """The places of what stays, int64 [own]."""
        return move_tensor((~self.travels).nonzero().flatten(), self.device)

    def whole(self, model: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """All numbers, [k, D + b], of clients that keep `values`, [k, own], under a model, [d]."""
        vectors = values.new_empty(len(values), len(self.travels))
        vectors[:, self._shared_indices] = model
        vectors[:, self._local_indices] = values
        return vectors

    def shared_part(self, updates: torch.Tensor) -> torch.Tensor:
        """Of updates of what is trained, [k, D], what travels, [k, d]."""
        return updates[:, self._shared_indices]

    def local_part(self, numbers: torch.Tensor) -> torch.Tensor:
        """Of all numbers, [k, D + b], what stays, [k, own]."""
        return numbers[:, self._local_indices]

    def spread(self, vectors: torch.Tensor) -> torch.Tensor:
        """Vectors of what travels, [k, d], as those of what is trained, [k, D]: 0 for the rest."""
        whole = vectors.new_zeros(len(vectors), self.parameters)
        whole[:, self._shared_indices] = vectors
        return whole
