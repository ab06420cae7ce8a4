"""What a run's bits depend on besides its experiment: versions, the user's own code, how the
processor computes, and the GPU where clients train on one.

The same experiment gives the same bits on the same kind of hardware, whatever runs where. Another
processor, or a setting that keeps libraries from using it fully (ATEN_CPU_CAPABILITY,
MKL_ENABLE_INSTRUCTIONS, ...), rounds differently: torch, MKL, oneDNN, OpenBLAS and numpy choose
their vector instructions at run time. `capability` says what they chose, by the names that the
libraries give and by the bits of a fixed computation. Two processes that agree on it give the same
bits. Clients on GPUs give the same bits where these agree too (`raydpfl.device.facts`): the model
of the GPU, the versions of CUDA and cuDNN, and the workspace of cuBLAS.

>>> stored = {"torch": "2.14.1", "code mine:Tanh": "5f70bf", "cpu": "AVX512"}
>>> differences(stored, {"torch": "2.14.1", "code mine:Tanh": "90cd1a", "cpu": "AVX2"})
'code mine:Tanh has changed; cpu was AVX512, now AVX2'
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel

from raydpfl import device
from raydpfl.errors import RunError
from raydpfl.member import is_path

PACKAGES = ("raydpfl", "torch", "torchvision", "numpy", "ray", "pyarrow", "dp-accounting")
# packages whose version may change a model's bits
COMPUTING = ("raydpfl", "torch", "torchvision", "numpy")
# packages with models that a config may name, whose version stands for their code
LIBRARIES = ("transformers",)
# types whose text determines the value
PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Python, the machine's architecture and the packages that a run uses, with their versions."""
    known = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), "machine": platform.machine()} | known


@functools.cache
def capability() -> dict[str, str]:
    """How this process computes.

    Returns:
        `cpu`, torch's vector instructions; `settings`, environment variables that affect products;
        and `arithmetic`, a digest of the results of products, convolutions, sums and elementary
        functions in float32 and float64, on one thread (about 10 ms).
    """
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]
    found = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "arithmetic": _arithmetic(),
    }
    return found | ({"settings": " ".join(settings)} if settings else {})


def of_capability(facts: Mapping[str, str]) -> dict[str, str]:
    """The part of `of` that comes from `capability`."""
    names = ("cpu", "arithmetic", "bfloat16", "settings")
    return {name: facts[name] for name in names if name in facts}


def of_device(facts: Mapping[str, str]) -> dict[str, str]:
    """The part of `of` that says on which GPUs clients train; empty where they train on none, or
    where the process that planned the run sees none.
    """
    return {name: facts[name] for name in ("device", "cuda", "cudnn", "cublas") if name in facts}


def check_node(
    host: str, expected: Mapping[str, str] | None, gpu: Mapping[str, str] | None = None
) -> None:
    """Raises `RunError` if this process does not compute as the run does.

    Args:
        host: this process's node, for the message.
        expected: the run's `capability`, and its GPUs where it knows them; None: nothing is
            expected.
        gpu: what this process's GPU computes like.
    """
    here = dict(capability())
    if expected and "bfloat16" in expected:
        here |= of_bfloat16()
    if gpu and expected and of_device(expected):
        here |= gpu
    if expected is None or expected == here:
        return
    names = [
        name for name in dict.fromkeys([*expected, *here]) if expected.get(name) != here.get(name)
    ]
    other = ", ".join(
        f"{name} {here.get(name, 'unset')} instead of {expected.get(name, 'unset')}"
        for name in names
    )
    raise RunError(
        f"node {host} computes otherwise than the run ({other}), so that its clients would have "
        "other bits; use nodes of one kind, or set ATEN_CPU_CAPABILITY=avx2 and "
        "MKL_ENABLE_INSTRUCTIONS=AVX2 for the run and where Ray is started on each node"
    )


def _arithmetic() -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            results = list(_computed())
    finally:
        torch.set_num_threads(threads)
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def _computed() -> Iterator[np.ndarray]:
    """A fixed computation by each of the kernels that training, noise and sums use."""
    raw = np.random.Philox(counter=1, key=2).random_raw(1 << 15).astype(np.float64) / 2.0**63 - 1.0
    # in torch's own alignment, as all that is computed with
    x = torch.empty(1 << 15, dtype=torch.float32)
    x.copy_(torch.from_numpy(raw))
    wide = x.view(128, 256)
    tall = x.view(256, 128)
    yield (wide @ tall).numpy()
    yield (wide.double() @ tall.double()).numpy()
    yield torch.bmm(x[:30000].view(10, 50, 60), x[:30000].view(10, 60, 50)).numpy()
    yield torch.nn.functional.linear(wide[:10], tall.T).numpy()
    yield torch.nn.functional.conv2d(x[:6272].view(2, 4, 28, 28), x[:800].view(8, 4, 5, 5)).numpy()
    for function in (torch.exp, torch.tanh, torch.sigmoid, torch.log1p):
        yield function(x.abs()).numpy()
    yield torch.log_softmax(wide, 1).numpy()
    yield np.array(
        [float(x.sum()), float(torch.linalg.vector_norm(x, dtype=torch.float64)), float(raw.sum())]
    )
    positive = x.abs().numpy() + np.float32(1e-6)
    for elementary in (np.log, np.cos, np.sin, np.sqrt):
        yield elementary(positive)
    square = raw[:10000].reshape(100, 100)
    yield square @ square


def sources(experiment: BaseModel) -> dict[str, str]:
    """Digests of the user's own code that the experiment names.

    A digest covers the file of the module and all of the user's own modules that it imports, even
    if only when a function runs. Own modules are neither in the standard library nor installed,
    except those of the package that the member itself belongs to. For code without a file, typed
    into an interpreter, the digest covers the code itself and what it names, and for a model of
    transformers the version.

    Returns:
        16 hexadecimal digits by "code MODULE:NAME".
    """
    found = {}
    for name, module, member in _own(experiment):
        parts = _code_parts(module, member)
        found[f"code {name}"] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return dict(sorted(found.items()))


def _code_parts(module: ModuleType | None, member: Any) -> list[bytes]:
    """What a digest of a member's code covers."""
    if module is not None:
        top = module.__name__.partition(".")[0]
        if top in LIBRARIES:
            return [importlib.metadata.version(top).encode()]
        path = Path(getattr(module, "__file__", None) or "")
        files = sorted(_files(module.__name__, path))
        if files:
            return [file.read_bytes() for file in files]
    return [] if member is None else [_code(member)]


def _own(node: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """(name, module, class or function) of each member of the tree, and of a model's kind, that is
    not raydpfl's or torch's.
    """
    if isinstance(node, BaseModel):
        cls = type(node)
        if not _shipped(cls.__module__):
            yield f"{cls.__module__}:{cls.__qualname__}", sys.modules.get(cls.__module__), cls
        else:
            kind = getattr(node, "kind", None)
            module = _of_kind(kind)
            if module is not None:
                yield str(kind), module, getattr(module, re.split("[:.]", str(kind))[-1], None)
        for name in cls.model_fields:
            yield from _own(getattr(node, name))
    elif isinstance(node, (list, tuple)):
        for each in node:
            module = _of_kind(each) if isinstance(each, str) and ":" in each else None
            if module is not None:  # an accountant
                yield each, module, getattr(module, each.partition(":")[2], None)
            yield from _own(each)


def _of_kind(kind: Any) -> ModuleType | None:
    """The user's own module that a kind names by import path; None: it names none."""
    if not is_path(kind):
        return None
    path = kind.partition(":")[0] if ":" in kind else kind.rpartition(".")[0]
    return None if _shipped(path) else sys.modules.get(path)


def _shipped(module: str) -> bool:
    return module.partition(".")[0] in {*COMPUTING, "pydantic", "builtins"}


def _files(name: str, path: Path, seen: set[str] | None = None) -> set[Path]:
    """The file `path` of the module `name`, and those of the user's own modules that it imports, at
    any depth.
    """
    seen = set() if seen is None else seen
    if name in seen or not path.is_file():
        return set()
    seen.add(name)
    files = {path}
    if path.suffix == ".py":
        for other in _imported(path, name):
            place = None if _shipped(other) else _place(other)
            if place is not None and _follows(other, place, name):
                files |= _files(other, place, seen)
    return files


def _imported(path: Path, name: str) -> Iterator[str]:
    """Names of the modules that a file may import anywhere in it, also within packages."""
    package = name if path.stem == "__init__" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = importlib.util.resolve_name("." * node.level + base, package)
            parts = base.split(".")
            yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _place(name: str) -> Path | None:
    """The file of a module, which need not have been imported; None: it has none, or there is no
    such module. Nothing is imported.
    """
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return Path(path) if path else None
    within: Sequence[str] | None = None
    spec = None
    parts = name.split(".")
    for depth in range(len(parts)):
        spec = importlib.machinery.PathFinder.find_spec(".".join(parts[: depth + 1]), within)
        if spec is None:
            return None
        within = spec.submodule_search_locations or []
    located = spec is not None and spec.has_location and spec.origin
    return Path(located) if located else None


def _follows(other: str, place: Path, name: str) -> bool:
    top = other.partition(".")[0]
    if top == name.partition(".")[0]:
        return True
    installed = [
        sysconfig.get_path(each) for each in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    return top not in sys.stdlib_module_names and not any(
        place.is_relative_to(each) for each in installed
    )


def _code(member: Any) -> bytes:
    """The code of a class or function without a file, and of what it names: functions and classes
    of its module, and numbers.
    """
    waiting = [member]
    seen = set()
    found = []
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, type):
            values = sorted(vars(each).items())
            waiting += [base for base in each.__bases__ if base.__module__ == each.__module__]
            values = [
                (name, getattr(value, "fget", None) or getattr(value, "__func__", value))
                for name, value in values
            ]
            found += [f"{name}={value!r}" for name, value in values if isinstance(value, PLAIN)]
            waiting += [value for _, value in values if inspect.isfunction(value)]
        elif inspect.isfunction(each):
            found.append(f"{each.__qualname__}{each.__defaults__!r}{each.__kwdefaults__!r}")
            for code in _parts(each.__code__):
                constants = [value for value in code.co_consts if not inspect.iscode(value)]
                names = f"{code.co_names}{code.co_varnames}{code.co_freevars}"
                found.append(f"{code.co_code.hex()}{constants!r}{names}")
                used = [(name, each.__globals__.get(name)) for name in code.co_names]
                found += [f"{name}={value!r}" for name, value in used if isinstance(value, PLAIN)]
                waiting += [
                    value
                    for _, value in used
                    if getattr(value, "__module__", None) == each.__module__
                ]
    return "\n".join(found).encode()


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for value in code.co_consts:
        if inspect.iscode(value):
            yield from _parts(value)


def of(experiment: BaseModel) -> dict[str, str]:
    """Everything that a run of `experiment` in this process depends on, by name."""
    known = {name: version for name, version in versions().items() if name in COMPUTING}
    known |= {"torch": str(torch.__version__), "numpy": np.__version__}
    gpu = device.facts(experiment.client.num_gpus)  # type: ignore[attr-defined]
    half = experiment.client.precision == "bfloat16"  # type: ignore[attr-defined]
    return known | sources(experiment) | capability() | (of_bfloat16() if half else {}) | gpu


@functools.cache
def of_bfloat16() -> dict[str, str]:
    """By the name bfloat16, a digest of products and convolutions in it: some processors have
    instructions for them, which round otherwise.
    """
    x = torch.linspace(-1, 1, 1 << 14).bfloat16()
    image = x[:6272].view(2, 4, 28, 28)
    with torch.inference_mode():
        products = x.view(64, 256) @ x.view(256, 64)
        images = torch.nn.functional.conv2d(image, x[:800].view(8, 4, 5, 5))
    computed = [each.float().numpy().tobytes() for each in (products, images)]
    return {"bfloat16": hashlib.sha256(b"".join(computed)).hexdigest()[:16]}


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What has changed, in words; empty: nothing."""
    found = []
    for name in dict.fromkeys([*stored, *now]):
        before = stored.get(name)
        after = now.get(name)
        if before == after:
            continue
        digests = name.startswith(
            ("code ", "experiment", "data", "clients", "cohorts", "mechanism", "arithmetic")
        )
        if digests and before is not None and after is not None:
            found.append(f"{name} has changed")
        else:
            found.append(f"{name} was {before or 'unset'}, now {after or 'unset'}")
    return "; ".join(found)
