"""Whether the course of a module's forward may depend on what it is given.

Code that takes numbers out of a batch, as by `if x.mean() > 0`, may let one sample decide what
becomes of all others, which no few rows need show. All operations on what the inputs have gone into
are watched here, but those that only compute.

>>> class Branch(nn.Module):
...     def forward(self, x):
...         return x if x.mean() > 0 else -x
>>> value_read(Branch(), torch.ones(2, 3)), value_read(nn.Linear(3, 3), torch.ones(2, 3))
('_local_scalar_dense', None)
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tag, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
TAGS = {Tag.data_dependent_output, Tag.dynamic_output_shape}
PACK = aten._pack_padded_sequence.default  # has no tag, and as many rows as the inputs say
INDEX = aten.index.Tensor  # has one for masks


def value_read(module: nn.Module, x: torch.Tensor) -> str | None:
    """The operation by which a forward in training takes numbers, or the shape of something, out of
    `x` [B, ...] or what it is computed from it; None if there is none.
    """
    module = copy.deepcopy(module).train()
    calls = _Calls(x)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), calls, _Operations(calls):
        module(x)
    return calls.reads[0] if calls.reads else None


class _Calls(TorchFunctionMode):
    """Notes what comes of the inputs, and the methods that torch's dispatcher does not see."""

    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.reads: list[str] = []
        self.tensors = [x]  # alive, so that no other has their memory
        self.storages = {_storage(x)}

    def has(self, values: Any) -> bool:
        """Whether inputs have gone into one of the values."""
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        return any(_storage(tensor) in self.storages for tensor in tensors)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        count = len(self.reads)
        outputs = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr") and self.has(args):
            self.reads.append(name)
        # it looks whether classes are at least 0
        if function is F.one_hot and outputs.shape[-1] in (*args[1:], *(kwargs or {}).values()):
            del self.reads[count:]
        return outputs


class _Operations(TorchDispatchMode):
    """Notes operations."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds

    def __init__(self, calls: _Calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = operation(*args, **(kwargs or {}))
        if not self.calls.has((args, kwargs)):
            return outputs
        masks = (torch.bool, torch.uint8)
        if operation is INDEX:
            is_mask = any(index is not None and index.dtype in masks for index in args[1])
            reads = is_mask and self.calls.has(args[1])
        else:
            reads = operation is PACK or bool(TAGS & {*operation.tags})
        if reads:
            self.calls.reads.append(operation.__name__.partition(".")[0])
        tensors = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor)]
        self.calls.tensors += tensors
        self.calls.storages |= {_storage(tensor) for tensor in tensors}
        return outputs


def _storage(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage()._cdata
