"""What a run's bits depend on next to its experiment: versions, user-defined code, how the
processor computes, and the GPU where clients train on one.

Another processor, or a setting that keeps libraries from using it fully (ATEN_CPU_CAPABILITY,
MKL_ENABLE_INSTRUCTIONS, ...), rounds differently: torch, MKL, oneDNN, OpenBLAS and numpy choose
their vector instructions at run time. Two processes that agree on `capability` give the same bits;
clients on GPUs where `raydpfl.core.device.facts` agree too: the model of the GPU, the versions of
CUDA and cuDNN, and the workspace of cuBLAS.

>>> stored = {"torch": "2.14.1", "code mine:Tanh": "5f70bf", "cpu": "AVX512"}
>>> differences(stored, {"torch": "2.14.1", "code mine:Tanh": "90cd1a", "cpu": "AVX2"})
'code mine:Tanh has changed; cpu was AVX512, now AVX2'
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import platform
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import methodcaller
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import nn

from raydpfl import models, storage
from raydpfl.config.registry import is_path
from raydpfl.core import device, hardware, native, prng
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.local import Sgd
from raydpfl.storage.run_files import make_folder, replace_file
from raydpfl.training.trainer import Trainer

log = logging.getLogger("raydpfl")
PACKAGES = ("raydpfl", "torch", "torchvision", "numpy", "ray", "pyarrow", "dp-accounting")
# packages whose version may change a model's bits
COMPUTING = ("raydpfl", "torch", "torchvision", "numpy")
# packages with models that a config may name, whose version stands for their code
LIBRARIES = ("transformers",)
KEPT = "code"  # the folder of a run directory with its user-defined modules
UNREAD = ("__doc__", "__firstlineno__", "__static_attributes__")  # of a class
# types whose text determines the value
PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
# the digest of what compiled code draws and trains to, on every processor
COMPILED = "fe354680ff3df63d"
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Python, the machine's architecture and the packages that a run uses, with their versions."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), "machine": platform.machine()} | versions


@functools.cache
def capability() -> dict[str, str]:
    """How this process computes.

    Returns:
        `cpu`, torch's vector instructions; `products`, whether MKL takes the processor for Intel's;
        `settings`, environment variables that affect products; `arithmetic`, a digest of products,
        convolutions, sums and elementary functions in float32 and float64, on one thread (about 10
        ms); and where compiled code does not draw or train to `COMPILED`, `native`, its digest.
    """
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]
    facts = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        # the keys of noise are made of these names
        "products": "torch" if hardware.maker() == "GenuineIntel" else "oneDNN",
        "arithmetic": _arithmetic(),
    }
    computed = COMPILED if native.library() is None else _digest(_compiled())
    if computed != COMPILED:
        facts["native"] = computed
    return facts | ({"settings": " ".join(settings)} if settings else {})


def of_capability(facts: Mapping[str, str]) -> dict[str, str]:
    """The part of `of` that comes from `capability`."""
    names = ("cpu", "products", "arithmetic", "native", "bfloat16", "settings")
    return {name: facts[name] for name in names if name in facts}


def of_device(facts: Mapping[str, str]) -> dict[str, str]:
    """The part of `of` that says on which GPUs clients train; empty: on none, or on none that the
    process that planned the run can see.
    """
    return {name: facts[name] for name in ("device", "cuda", "cudnn", "cublas") if name in facts}


def of_code(facts: Mapping[str, str]) -> dict[str, str]:
    """The part of `of` that comes from `sources`."""
    return {name: digest for name, digest in facts.items() if name.startswith("code ")}


def check_code(host: str, expected: Mapping[str, str] | None, experiment: BaseModel) -> None:
    """Raises `RunError` if the user-defined code of an experiment, as imported on the node `host`,
    is not that of the facts that the run expects.
    """
    stated = of_code(expected or {})
    here = sources(experiment) if stated else {}
    other = [name for name, digest in stated.items() if here.get(name) != digest]
    if other:
        what = f"node {host} has other source than the run for {', '.join(other)}"
        raise RunError(f"{what}; every node must see the same modules")


def check_node(
    host: str, expected: Mapping[str, str] | None, gpu: Mapping[str, str] | None = None
) -> None:
    """Raises `RunError` if this process, on the node `host`, does not compute as the run does.

    `expected`: the run's `capability`, and its GPUs where it knows them; None: nothing is expected.
    `gpu`: the facts of this process's GPU.
    """
    if expected is None:
        return
    here = dict(capability())
    if "bfloat16" in expected:
        here |= of_bfloat16()
    if gpu and of_device(expected):
        here |= gpu
    expected = {name: value for name, value in expected.items() if name not in of_code(expected)}
    other = ", ".join(
        f"{name} {here.get(name, 'unset')} instead of {expected.get(name, 'unset')}"
        for name in dict.fromkeys([*expected, *here])
        if expected.get(name) != here.get(name)
    )
    if not other:
        return
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
            return _digest(_computed())
    finally:
        torch.set_num_threads(threads)


def _digest(results: Iterable[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def _compiled() -> Iterator[np.ndarray]:
    """What compiled code makes of a fixed seed: normals, words, a norm, a sum, and clients that
    train with momentum, clipping and noise.
    """
    drawn = prng.normals(1, prng.Purpose.STEP_NOISE, 1000, t=2, client=3)
    yield drawn.numpy()
    yield native.norms(drawn[None])
    total = np.zeros(len(drawn))
    native.add(total, drawn[None].double().numpy(), 2.0**-30, 2.0**20)
    yield total
    with prng.keyed_globals(1):
        module = nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3))
    models.load(module, drawn[: models.parameter_count(module)])
    x = drawn[: 3 * 10 * 20].view(3, 10, 20)
    y = torch.arange(30).view(3, 10) % 3
    rule = Sgd(steps=3, batch=4, lr=0.1, momentum=0.5)
    trainer = Trainer(module, rule, backend="compiled", seed=1, clip=1.0)
    who: dict[str, Any] = {"clients": [3, 5, 8], "draws": [0, 0, 0], "stds": np.full(3, 0.5)}
    for block in trainer.chunk(models.flatten(module), x, y, [10, 7, 3], t=2, **who):
        yield block.updates.numpy()


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
    """Digests of the user-defined code that the experiment names: 16 hexadecimal digits by
    "code MODULE:NAME".

    A digest covers the module and all user-defined modules that it imports, even if only when a
    function runs: their statements, without comments, docstrings and formatting. User-defined
    modules are neither in the standard library nor installed, except those of the package that the
    member itself belongs to. For code without a file, typed into an interpreter, the digest covers
    the code itself and what it names, and for a model of transformers the version.
    """
    texts = {}
    for name, module, member in _user_defined(experiment):
        parts = _code_parts(module, member)
        texts[f"code {name}"] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return dict(sorted(texts.items()))


def _code_parts(module: ModuleType | None, member: Any) -> list[bytes]:
    """What a digest of a member's code covers."""
    if module is not None:
        top = module.__name__.partition(".")[0]
        if top in LIBRARIES:
            return [importlib.metadata.version(top).encode()]
        files = sorted(_files(module.__name__, _file(module)).items())
        if files:
            return [part for name, path in files for part in (name.encode(), _syntax_digest(path))]
    return [] if member is None else [_code(member)]


def modules(experiment: BaseModel) -> dict[str, Path]:
    """The files of the user-defined modules that the experiment names, and of those that they
    import, by their places below a folder of `sys.path`; what is installed is left out.
    """
    names = {}
    for _, module, _ in _user_defined(experiment):
        if module is None or _installed(_file(module)):
            continue
        for name, file in _files(module.__name__, _file(module)).items():
            if not _installed(file):
                folders = name.split(".")[: None if file.stem == "__init__" else -1]
                names["/".join([*folders, file.name])] = file
    return names


def store_code(experiments: Iterable[BaseModel], folder: Path, fresh: bool = False) -> None:
    """Writes the user-defined modules that the experiments name to `code/` in a run directory;
    `fresh`: in the place of those that are stored there.
    """
    files: dict[str, Path] = {}
    for experiment in experiments:
        files |= modules(experiment)
    for name, path in files.items():
        place = folder / KEPT / name
        if fresh or not place.exists():
            make_folder(place.parent)
            replace_file(place, methodcaller("write", path.read_bytes()))


@contextmanager
def stored_code(run: str | Path, first: bool = False) -> Iterator[Path | None]:
    """Within, the user-defined modules of the directory of a run (or its address) are imported
    where there are no others of their names.

    `first`: they are also imported where others of their names differ, with a warning. Raises
    `ConfigError` where another user can write them, or one that differs has been imported.
    """
    with storage.reading(run, "config", lambda name: name.startswith(f"{KEPT}/")) as folder:
        place = Path(os.path.abspath(folder / KEPT))
        if not os.path.isdir(place):  # False for a name that no file can have
            yield None
            return
        _check_private([place, *place.rglob("*")])
        for cache in [*place.rglob("__pycache__")]:  # what is run is what can be read
            shutil.rmtree(cache, ignore_errors=True)
        files = sorted(path for path in place.rglob("[!.]*") if path.is_file())
        other = [path for path in files if not _same(path, place)]
        if first and other:
            _warn(other, place)
        if not other:
            yield None
            return
        sys.path.insert(0 if first else len(sys.path), str(place))
        importlib.invalidate_caches()
        try:
            yield place
        finally:
            sys.path.remove(str(place))


def search(path: Sequence[str]) -> None:
    """Imports in this process from the `sys.path` of another: from what a run stores first, if that
    comes first there.
    """
    ahead = [entry for entry in path[:1] if os.path.basename(entry) == KEPT]
    sys.path[:] = dict.fromkeys([*ahead, *sys.path, *path])


def _check_private(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` for a link, and for what another user owns or anyone can write."""
    for path in paths:
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode) or status.st_mode & 0o002:
            expected = "stored code that is yours, that not everyone can write, and no link; "
            raise ConfigError("code", str(path), f"{expected}read it, then take a copy of it")


def _named(path: Path, place: Path) -> str:
    """The module of a stored file."""
    parts = path.relative_to(place).parts
    whole = parts[:-1] if path.stem == "__init__" else (*parts[:-1], path.name.partition(".")[0])
    return ".".join(whole)


def _same(path: Path, place: Path) -> bool:
    """Whether the module of a stored file also exists elsewhere, with the same code."""
    here = _place(_named(path, place))
    return here is not None and here.is_file() and _syntax_digest(here) == _syntax_digest(path)


def _warn(paths: Sequence[Path], place: Path) -> None:
    """Warns of modules here that differ from what is stored. Raises `ConfigError` for one that has
    been imported.
    """
    names = {_named(path, place): path for path in paths}
    for name in names.keys() & sys.modules.keys():
        expected = f"a process that has not imported another {name} ({_place(name)})"
        raise ConfigError("code", str(names[name]), expected)
    differ = [str(here) for here in map(_place, names) if here]
    if differ:
        log.warning(
            "%s differs from what the run began with, stored in %s: that is used; "
            "--fresh-noise would take the new code",
            ", ".join(differ),
            place,
        )


def _file(module: ModuleType | None) -> Path:
    return Path(getattr(module, "__file__", None) or "")


def _user_defined(node: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """(name, module, class or function) of every member of the tree, and of a model's kind, that is
    not raydpfl's or torch's.
    """
    if isinstance(node, BaseModel):
        cls = type(node)
        if not _shipped(cls.__module__):
            yield f"{cls.__module__}:{cls.__qualname__}", sys.modules.get(cls.__module__), cls
        else:
            yield from _imported_kind(getattr(node, "kind", None))
        for name in cls.model_fields:
            yield from _user_defined(getattr(node, name))
    elif isinstance(node, (list, tuple)):
        for child in node:
            if isinstance(child, str) and ":" in child:  # an accountant
                yield from _imported_kind(child)
            yield from _user_defined(child)


def _imported_kind(kind: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """As `_user_defined`, of what a kind names by import path."""
    if not is_path(kind):
        return
    path, _, member = kind.partition(":") if ":" in kind else kind.rpartition(".")
    module = None if _shipped(path) else sys.modules.get(path)
    if module is not None:
        yield kind, module, getattr(module, re.split("[:.]", member)[-1], None)


def _shipped(module: str) -> bool:
    return module.partition(".")[0] in {*COMPUTING, "pydantic", "builtins"}


def _files(name: str, path: Path, seen: dict[str, Path] | None = None) -> dict[str, Path]:
    """The file `path` of the module `name`, and those of the packages that it is in and of the
    user-defined modules that it imports, at any depth, by module.
    """
    seen = {} if seen is None else seen
    if name in seen or not path.is_file():
        return seen
    seen[name] = path
    if path.suffix == ".py":
        parents = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        for other in [*parents, *_imported(path, package)]:
            place = None if _shipped(other) else _place(other)
            if place is not None and _follows(other, place, name):
                _files(other, place, seen)
    return seen


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names of the modules that a file of a package may import anywhere in it."""
    for level, module, names in _parsed(path.read_bytes())[1]:
        base = importlib.util.resolve_name("." * level + module, package) if level else module
        parts = base.split(".")
        yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        yield from (f"{base}.{name}" for name in names)


def _syntax_digest(path: Path) -> bytes:
    """Of what a module does; of one that is not Python of its bytes."""
    source = path.read_bytes()
    return _parsed(source)[0] if path.suffix == ".py" else hashlib.sha256(source).digest()


@functools.lru_cache(maxsize=512)
def _parsed(source: bytes) -> tuple[bytes, tuple[tuple[int, str, tuple[str, ...]], ...]]:
    """A digest of the statements of a module but for those that do nothing (docstrings, `pass`),
    and its imports: level, module, and the names that are taken from it.
    """
    tree = ast.parse(source)
    imports: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            imports.append((node.level, node.module or "", names))
        for name, value in ast.iter_fields(node):
            if isinstance(value, list):
                setattr(node, name, [statement for statement in value if not _idle(statement)])
    digest = hashlib.sha256()
    for node in ast.walk(tree):  # breadth first: fields and their number determine the tree
        fields = [
            (name, [*map(_shown, value)] if isinstance(value, list) else _shown(value))
            for name, value in ast.iter_fields(node)
            if value not in (None, [])  # later versions of Python have more empty fields
        ]
        digest.update(f"{type(node).__name__}{fields}\n".encode())
    return digest.digest(), tuple(imports)


def _idle(node: Any) -> bool:
    """Whether a statement does nothing."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass)


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, ast.AST) else repr(value)


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
    own = top == name.partition(".")[0]
    return own or not (top in sys.stdlib_module_names or _installed(place))


def _installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


def _code(member: Any) -> bytes:
    """The code of a class or function without a file, and of what it names: functions and classes
    of its module, and numbers.
    """
    waiting = [member]
    seen = set()
    parts = []
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, type):
            values = [pair for pair in sorted(vars(item).items()) if pair[0] not in UNREAD]
            waiting += [base for base in item.__bases__ if base.__module__ == item.__module__]
            values = [
                (name, getattr(value, "fget", None) or getattr(value, "__func__", value))
                for name, value in values
            ]
            parts += [f"{name}={value!r}" for name, value in values if isinstance(value, PLAIN)]
            waiting += [value for _, value in values if inspect.isfunction(value)]
        elif inspect.isfunction(item):
            parts.append(f"{item.__qualname__}{item.__defaults__!r}{item.__kwdefaults__!r}")
            for code in _parts(item.__code__):
                parts += [  # a docstring is in none of the steps
                    f"{step.opname} {step.argval!r}"
                    for step in dis.get_instructions(code)
                    if isinstance(step.argval, PLAIN)
                ]
                used = [(name, item.__globals__.get(name)) for name in code.co_names]
                parts += [f"{name}={value!r}" for name, value in used if isinstance(value, PLAIN)]
                waiting += [
                    value
                    for _, value in used
                    if getattr(value, "__module__", None) == item.__module__
                ]
    return "\n".join(parts).encode()


def _parts(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for value in code.co_consts:
        if inspect.iscode(value):
            yield from _parts(value)


def of(experiment: BaseModel) -> dict[str, str]:
    """Everything that a run of `experiment` in this process depends on, by name."""
    libraries = {name: version for name, version in versions().items() if name in COMPUTING}
    libraries |= {"torch": str(torch.__version__), "numpy": np.__version__}
    gpu = device.facts(experiment.client.num_gpus)  # type: ignore[attr-defined]
    half = experiment.client.precision == "bfloat16"  # type: ignore[attr-defined]
    return libraries | sources(experiment) | capability() | (of_bfloat16() if half else {}) | gpu


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
    computed = [tensor.float().numpy().tobytes() for tensor in (products, images)]
    return {"bfloat16": hashlib.sha256(b"".join(computed)).hexdigest()[:16]}


def differences(stored: Mapping[str, str], now: Mapping[str, str]) -> str:
    """What has changed, in words; empty: nothing."""
    facts = ("experiment", "data", "clients", "cohorts", "mechanism", "arithmetic", "native")
    digests = ("code ", *facts)
    words = []
    for name in dict.fromkeys([*stored, *now]):
        before, after = stored.get(name), now.get(name)
        if before == after:
            continue
        if name.startswith(digests) and before is not None and after is not None:
            words.append(f"{name} has changed")
        else:
            words.append(f"{name} was {before or 'unset'}, now {after or 'unset'}")
    return "; ".join(words)
