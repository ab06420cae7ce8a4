"""The weights of a module in a file: its parameters and buffers by name, in safetensors or in a
`state_dict` that torch reads without running code.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "weights.safetensors"
>>> _ = path.write_bytes(serialize(nn.Linear(2, 1).state_dict(), path, {"rounds": "40"}))
>>> sorted(read(path)), facts(path)
(['bias', 'weight'], {'rounds': '40'})
"""

import io
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn

from raydpfl.errors import USER_EXCEPTIONS, ConfigError, one_line

MODEL_FILE = "model.safetensors"  # of a run, in its directory
TENSORS = ".safetensors"
STATES = (".pt", ".pth", ".bin", ".ckpt")
NAMES = 3  # that a message lists


def place(path: str | Path) -> Path:
    """The file of weights that a path names: itself, or that of a run, by its directory."""
    location = Path(path)
    return location / MODEL_FILE if location.is_dir() else location


def serialize(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file with the suffix of `path`: tensors, each whole under every name that it
    has, and `metadata` of them, which a `state_dict` has no room for.

    Raises:
        ConfigError: there is no such file of weights.
    """
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    if path.suffix == TENSORS:
        return save(copies, dict(metadata))
    if path.suffix not in STATES:
        expected = f"a file *{TENSORS}, or *{', *'.join(STATES)} for a state_dict"
        raise ConfigError("--out", str(path), expected)
    buffer = io.BytesIO()
    torch.save(copies, buffer)
    return buffer.getvalue()


def read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file, by name, on the CPU. Raises `ConfigError` on `model.init`."""
    file = place(path)
    try:
        if file.suffix == TENSORS:
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except USER_EXCEPTIONS as error:
        raise _init_error(path, f"a file that can be read ({one_line(error, 200)})") from None
    is_state_dict = isinstance(content, Mapping) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    )
    if not is_state_dict:
        raise _init_error(path, f"a state_dict, tensors by name; it holds {type(content).__name__}")
    return dict(content)


def facts(path: Path) -> dict[str, str]:
    """What is said of the weights in a file of safetensors. Raises ValueError where it is none."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(str(error)) from None


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
    state = module.state_dict()
    pointers = {state[name].data_ptr() for name in tensors if name in state}
    missing = [name for name, tensor in state.items() if tensor.data_ptr() not in pointers]
    for wording, names in (
        ("without", [name for name in tensors if name not in state]),
        ("with", [] if set(missing) in parts else missing),
    ):
        if names:
            ellipsis = ", ..." if len(names) > NAMES else ""
            raise _init_error(path, f"weights {wording} {', '.join(names[:NAMES])}{ellipsis}")
    names_of: dict[tuple[int, ...], str] = {}  # the first name, of those that stand for one tensor
    for name, tensor in tensors.items():
        shape = list(state[name].shape)
        if list(tensor.shape) != shape:
            raise _init_error(path, f"weights with {name} {shape}, not {list(tensor.shape)}")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise _init_error(path, f"weights that are finite; {name} is not")
        alias = names_of.setdefault((state[name].data_ptr(), *shape), name)
        if alias != name and not torch.equal(tensors[alias], tensor):
            raise _init_error(path, f"the same weights as {alias} and {name}, which are one here")
    module.load_state_dict(tensors, strict=False)


def _init_error(path: str | Path, expected: str) -> ConfigError:
    return ConfigError("model.init", str(path), expected)
