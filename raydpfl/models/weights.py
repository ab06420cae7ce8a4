"""The weights of a module in a file: its parameters and buffers by name, in safetensors or in a
`state_dict` that torch reads without running code.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
>>> _ = path.write_bytes(packed(nn.Linear(2, 1).state_dict(), path.suffix, {"rounds": "40"}))
>>> sorted(read(path)), facts(path)
(['bias', 'weight'], {'rounds': '40'})
"""

import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from raydpfl.errors import RAISED, ConfigError, one_line

SAVED = "model.safetensors"  # of a run, in its directory
TENSORS = ".safetensors"
STATES = (".pt", ".pth", ".bin", ".ckpt")
NAMES = 3  # that a message lists


def place(path: str | Path) -> Path:
    """The file of weights that a path names: itself, or that of a run, by its directory."""
    found = Path(path)
    return found / SAVED if found.is_dir() else found


def packed(tensors: Mapping[str, Tensor], suffix: str, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file with this suffix: tensors, each whole under every name that it has, and
    `metadata` of them, which a `state_dict` has no room for.

    Raises:
        ConfigError: there is no such file of weights.
    """
    held = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    if suffix == TENSORS:
        return save(held, dict(metadata))
    if suffix not in STATES:
        expected = f"a file *{TENSORS}, or *{', *'.join(STATES)} for a state_dict"
        raise ConfigError("--out", suffix, expected)
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, on the CPU. Raises `ConfigError` on `model.init`."""
    file = place(path)
    try:
        if file.suffix == TENSORS:
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except RAISED as error:
        raise _refused(path, f"a file that can be read ({one_line(error, 200)})") from None
    named = isinstance(loaded, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    )
    if not named:
        raise _refused(path, f"a state_dict, tensors by name; it holds {type(loaded).__name__}")
    return dict(loaded)


def facts(path: Path) -> dict[str, str]:
    """What is said of the weights in a file of safetensors."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


def fill(module: nn.Module, path: str, parts: Sequence[Set[str]] = ()) -> None:
    """Gives a module the parameters and buffers that a file holds.

    Args:
        module: changed in place.
        path: the file holds all of them, a tied one under one of its names at least.
        parts: sets of names; the file may lack those of one.

    Raises:
        ConfigError: for a file that cannot be read, or is another module's.
    """
    tensors = read(path)
    wanted = module.state_dict()
    pointers = {wanted[name].data_ptr() for name in tensors if name in wanted}
    missing = [name for name, tensor in wanted.items() if tensor.data_ptr() not in pointers]
    for what, names in (
        ("without", [name for name in tensors if name not in wanted]),
        ("with", [] if set(missing) in parts else missing),
    ):
        if names:
            more = ", ..." if len(names) > NAMES else ""
            raise _refused(path, f"weights {what} {', '.join(names[:NAMES])}{more}")
    names_of: dict[tuple[int, ...], str] = {}  # the first name, of those that stand for one tensor
    for name, tensor in tensors.items():
        shape = list(wanted[name].shape)
        if list(tensor.shape) != shape:
            raise _refused(path, f"weights with {name} {shape}, not {list(tensor.shape)}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _refused(path, f"weights that are finite; {name} is not")
        first = names_of.setdefault((wanted[name].data_ptr(), *shape), name)
        if first != name and not torch.equal(tensors[first], tensor):
            raise _refused(path, f"the same weights as {first} and {name}, which are one here")
    module.load_state_dict(tensors, strict=False)


def _refused(path: str | Path, expected: str) -> ConfigError:
    return ConfigError("model.init", str(path), expected)
