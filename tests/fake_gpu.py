"""A fake GPU: tensors of the CPU that are marked as being on `cuda`.

Their operations run on the CPU, so they have its bits. What a GPU would refuse is refused: an
operation of tensors on both sides, numpy's view of a marked tensor, pinning one, and what has no
deterministic form there where only such is allowed. What goes from one side to the other, and what
waits for the device, is counted: as on a GPU a copy to it waits for all that was asked before,
unless it is from pinned memory and not to be waited for. Such memory must hold what it held until
somebody waits for the device, or another is overwritten while it is copied.

Two modes see it all. `Marks` is told of every operation of torch's core, also of those of autograd
and vmap; `FakeGpu` of every call of torch's functions and methods, where devices are named.
"""

import weakref
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch._C import _functorch as functorch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten
# that take a tensor on the other side
COPY = {aten.copy_.default}
INDEX = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
INDEX |= {aten._index_put_impl_.default, aten._unsafe_index.Tensor}
# whose result the CPU must see to go on
WAITS = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default}
WAITS |= {aten.masked_select.default, aten.is_nonzero.default}
# that raise on a GPU where deterministic algorithms alone are allowed: what
# `torch.use_deterministic_algorithms` lists, but for what does so with some arguments alone
# (`_random`)
RANDOM = {
    "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward",
    "adaptive_max_pool2d_backward", "fractional_max_pool2d_backward",
    "fractional_max_pool3d_backward", "max_unpool2d", "max_unpool3d", "upsample_linear1d_backward",
    "upsample_bilinear2d_backward", "upsample_bicubic2d_backward", "upsample_trilinear3d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward",
    "_ctc_loss_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward", "median.dim",
    "median.dim_values", "nanmedian.dim", "nanmedian.dim_values", "put", "put_",
}  # fmt: skip


class Mixed(RuntimeError):
    """What CUDA says of tensors on several devices."""


class Random(RuntimeError):
    """What torch says of an operation that has no deterministic form on a GPU."""


class OneByOne(RuntimeError):
    """What vmap warns of: it goes back through the clients one by one."""


class Overwritten(RuntimeError):
    """Pinned memory was written to before what was in it was copied, of which CUDA says nothing."""


def _random(func, args, kwargs) -> bool:
    """Whether an operation has no deterministic form on a GPU."""
    name = func._schema.name.removeprefix("aten::")
    if name in RANDOM or f"{name}.{func._overloadname}" in RANDOM:
        return True
    given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
    if name == "nll_loss2d_forward":
        return given["reduction"] != 0
    if name == "histc":
        return given["self"].is_floating_point()
    if name == "scatter_reduce":
        return given["reduce"] not in ("sum", "mean")
    return name == "bincount" and given.get("weights") is not None


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without what vmap and grad wrap it in."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _tensors(given) -> list[torch.Tensor]:
    """All in what is given to an operation, or made by one; torch's own trees take far longer."""
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, dict):
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        return []
    return [tensor for each in given for tensor in _tensors(each)]


def _is_cuda(device) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Marks(TorchDispatchMode):
    """Which tensors are on the fake GPU: those whose storage is marked."""

    def __init__(self):
        super().__init__()
        self._marked: dict[int, StorageWeakRef] = {}  # which keeps an address from being used again
        self.inside = False  # an operation of marked tensors, which makes others
        self.counts: Counter = Counter()
        self._pinned: dict[int, StorageWeakRef] = {}
        # tensors in pinned memory that are being copied, by weak references, and what they held
        self._copied: list[tuple[weakref.ref, torch.Tensor]] = []

    def pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        return tensor.untyped_storage()._cdata in self._pinned

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory."""
        if self.has(tensor):
            raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be")
        with torch.utils._python_dispatch._disable_current_modes():
            made = tensor.clone()
        storage = made.untyped_storage()
        self._pinned = {key: ref for key, ref in self._pinned.items() if not ref.expired()}
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return made

    def sent(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        """Takes note of a copy to the device."""
        self.counts["to device"] += 1
        if not (non_blocking and self.pinned(source)):
            self.waited()
            return
        with torch.utils._python_dispatch._disable_current_modes():
            self._copied.append((weakref.ref(source), source.clone()))

    def waited(self) -> None:
        """Takes note of a wait for the device."""
        self.counts["waits"] += 1
        copied, self._copied = self._copied, []
        with torch.utils._python_dispatch._disable_current_modes():
            for reference, held in copied:
                source = reference()
                if source is not None and not torch.equal(source, held):
                    raise Overwritten("pinned memory was written to while it was copied")

    def has(self, tensor: torch.Tensor) -> bool:
        tensor = _plain(tensor)
        return tensor.untyped_storage()._cdata in self._marked

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = _plain(tensor).untyped_storage()
        if len(self._marked) > 4096:
            self._marked = {key: ref for key, ref in self._marked.items() if not ref.expired()}
        self._marked[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        there = [self.has(each) for each in given]
        if func in COPY and there[0] != there[1]:
            if there[0]:
                self.sent(args[1], *args[2:])
            else:
                self.counts["to host"] += 1
                self.waited()
            return func(*args, **kwargs)
        if any(there):
            self._check(func, given, there)
            if torch.are_deterministic_algorithms_enabled() and _random(func, args, kwargs):
                raise Random(f"{func} does not have a deterministic implementation")
            if func in WAITS or (func in INDEX and _masks(given)):
                self.waited()
            self.counts["operations"] += 1
        made = func(*args, **kwargs)
        if any(there) or (self.inside and not given):
            for each in _tensors(made):
                self.mark(each)
        return made

    def _check(self, func, given, there) -> None:
        """Raises `Mixed` for tensors on both sides, but for single numbers."""
        apart = [each for each, marked in zip(given, there, strict=True) if not marked]
        if func in INDEX and there[0]:
            for each in apart:
                self.sent(each)
            return
        if any(each.dim() or func in INDEX for each in apart):
            raise Mixed(f"Expected all tensors to be on the same device ({func})")


def _masks(given) -> bool:
    return any(each.dtype == torch.bool for each in given[1:])


class FakeGpu(TorchFunctionMode):
    """What a program sees of the devices of tensors, and where it puts them."""

    def __init__(self, marks: Marks):
        super().__init__()
        self.marks = marks

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        own = HANDLERS.get(func)
        if own is not None:
            return own(self.marks, func, args, kwargs)
        if func is torch.Tensor.tolist and self.marks.has(args[0]):  # torch's core is not asked
            self.marks.waited()
        there = _is_cuda(kwargs.get("device"))
        if there:
            kwargs["device"] = "cpu"
        if func is F.scaled_dot_product_attention:
            self._check_attention(args)
        given = any(self.marks.has(each) for each in _tensors((args, kwargs)))
        before = self.marks.inside
        self.marks.inside = there or given
        try:
            made = func(*args, **kwargs)
        finally:
            self.marks.inside = before
        if func is torch.tensor and there:
            self.marks.sent(made)
            self.marks.mark(made)
        return made

    def _check_attention(self, args) -> None:
        """Raises `OneByOne` where vmap would go through attention client by client."""
        within = torch._C._are_functorch_transforms_active()
        fused = torch.backends.cuda.mem_efficient_sdp_enabled()
        if within and fused and any(self.marks.has(each) for each in _tensors(args)):
            raise OneByOne("There is a performance drop: vmap has no batching rule for attention")


def _device(marks, func, args, kwargs):
    return CUDA if marks.has(args[0]) else func(*args, **kwargs)


def _numpy(marks, func, args, kwargs):
    if marks.has(args[0]):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")
    return func(*args, **kwargs)


def _moved(marks, tensor, there: bool, non_blocking: bool = False):
    """The tensor on that side, copied if it is on the other."""
    here = marks.has(tensor)
    if here == there:
        return tensor
    if there and isinstance(tensor, torch.nn.Parameter):  # waits too, before anything is asked
        marks.counts["set up"] += 1
        marks.counts["to device"] += 1
    elif there:
        marks.sent(tensor, non_blocking)
    else:
        if non_blocking:
            raise AssertionError("what is copied to the host is read without a wait for it")
        marks.counts["to host"] += 1
        marks.waited()
    with torch.utils._python_dispatch._disable_current_modes():
        made = tensor.clone()
    return marks.mark(made) if there else made


def _to(marks, func, args, kwargs):
    tensor, *rest = args
    named = kwargs.pop("device", None)
    non_blocking = kwargs.pop("non_blocking", False)
    kept = []
    for each in rest:
        if isinstance(each, (str, torch.device)):
            named = each
        elif isinstance(each, torch.Tensor):
            named = CUDA if marks.has(each) else "cpu"
            kept.append(each.dtype)
        elif not (isinstance(each, bool) and len(kept) + 1 < len(rest)):
            kept.append(each)
    there = marks.has(tensor) if named is None else _is_cuda(named)
    copies = kwargs.get("copy") and marks.has(tensor) == there
    if not copies:
        kwargs.pop("copy", None)
    tensor = _moved(marks, tensor, there, non_blocking)
    return func(tensor, *kept, **kwargs) if kept or kwargs else tensor


def _as_tensor(marks, func, args, kwargs):
    device = kwargs.pop("device", None)
    made = func(*args, **kwargs)
    return made if device is None else _moved(marks, made, _is_cuda(device))


HANDLERS = {
    torch.Tensor.device.__get__: _device,
    torch.Tensor.is_cuda.__get__: lambda marks, func, args, kwargs: marks.has(args[0]),
    torch.Tensor.is_cpu.__get__: lambda marks, func, args, kwargs: not marks.has(args[0]),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.to: _to,
    torch.Tensor.cpu: lambda marks, func, args, kwargs: _moved(marks, args[0], False),
    torch.Tensor.cuda: lambda marks, func, args, kwargs: _moved(marks, args[0], True),
    torch.Tensor.pin_memory: lambda marks, func, args, kwargs: marks.pin(args[0]),
    torch.as_tensor: _as_tensor,
    # which lays the weights of a recurrent layer out for cuDNN
    torch._cudnn_rnn_flatten_weight: lambda *given: None,
}


@contextmanager
def fake_gpu(monkeypatch):
    """A GPU within; gives the counts of `waits`, `to device`, `to host` and `operations`."""
    marks = Marks()

    state = torch.zeros(16, dtype=torch.uint8)
    found = SimpleNamespace(name="Fake", major=9, minor=0, multi_processor_count=1)
    found.total_memory = 1 << 33
    for name, instead in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: marks.waited(),
        "empty_cache": lambda: None,
        "set_per_process_memory_fraction": lambda *_: None,
        "get_per_process_memory_fraction": lambda *_: 1.0,
        "get_device_properties": lambda *_: found,
        "get_device_capability": lambda *_: (9, 0),
        "get_rng_state": lambda *_: state,
        "set_rng_state": lambda *_: None,
        "manual_seed": lambda *_: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, instead)
    with marks, FakeGpu(marks):
        yield marks.counts
