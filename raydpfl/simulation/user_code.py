"""User-defined code in a run: where it takes part, what it does as a digest, and the source that a
run directory keeps.

User-defined modules are neither in the standard library nor installed, except those of the package
that a member itself belongs to.
"""

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
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from pydantic import BaseModel

from raydpfl import storage
from raydpfl.config.registry import is_path
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.storage.run_files import make_folder, replace_file

log = logging.getLogger("raydpfl")
# packages that no config brings along
SHIPPED_PACKAGES = ("raydpfl", "torch", "torchvision", "numpy", "pydantic", "builtins")
# packages with models that a config may name, whose version stands for their code
LIBRARIES = ("transformers",)
CODE_FOLDER = "code"  # the folder of a run directory with its user-defined modules
IGNORED_ATTRIBUTES = ("__doc__", "__firstlineno__", "__static_attributes__")  # of a class
# types whose text determines the value
PLAIN_TYPES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


def trains_user_code(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in what a client does."""
    members = (experiment.local, experiment.bounding, experiment.model)
    personal = (experiment.evaluate.fine_tune, experiment.personal)
    return any(member.is_user_defined for member in (*members, *filter(None, personal)))


def runs_user_code(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in anything that a process of the run does."""
    members = (experiment.noise, experiment.selection, experiment.data.task)
    run_members = (*members, *experiment.measure, *experiment.metrics)
    return trains_user_code(experiment) or any(member.is_user_defined for member in run_members)


# --- what it does ---


def sources(experiment: BaseModel) -> dict[str, str]:
    """Digests of the user-defined code that the experiment names, by "code MODULE:NAME": 16
    hexadecimal digits of the module and all user-defined modules that it imports, even if only when
    a function runs: their statements, without comments, docstrings and formatting; of code without
    a file, typed into an interpreter, the code itself and what it names; of a model of transformers
    the version.
    """
    texts = {}
    for name, module, member in _user_members(experiment):
        top = "" if module is None else module.__name__.partition(".")[0]
        if top in LIBRARIES:
            parts = [importlib.metadata.version(top).encode()]
        else:
            files = [] if module is None else sorted(_files(module).items())
            parts = [part for file, path in files for part in (file.encode(), _parse(path)[0])]
            if not parts and member is not None:
                parts = [_code_bytes(member)]
        texts[f"code {name}"] = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    return dict(sorted(texts.items()))


def check_code(host: str, expected: Mapping[str, str], experiment: BaseModel) -> None:
    """Raises `RunError` if user-defined code, as imported on `host`, is not the run's."""
    run_digests = {name: digest for name, digest in expected.items() if name.startswith("code ")}
    node_digests = sources(experiment) if run_digests else {}
    mismatches = [name for name, digest in run_digests.items() if node_digests.get(name) != digest]
    if mismatches:
        problem = f"node {host} has other source than the run for {', '.join(mismatches)}"
        raise RunError(f"{problem}; every node must see the same modules")


def _user_members(node: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """(name, module, class or function) of every user-defined member and model kind."""
    if isinstance(node, BaseModel):
        cls = type(node)
        if cls.__module__.partition(".")[0] in SHIPPED_PACKAGES:
            yield from _imported_kind(getattr(node, "kind", None))
        else:
            yield f"{cls.__module__}:{cls.__qualname__}", sys.modules.get(cls.__module__), cls
        for name in cls.model_fields:
            yield from _user_members(getattr(node, name))
    elif isinstance(node, (list, tuple)):
        for child in node:
            if isinstance(child, str) and ":" in child:  # an accountant
                yield from _imported_kind(child)
            yield from _user_members(child)


def _imported_kind(kind: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """As `_user_members`, of what a kind names by import path."""
    if is_path(kind):
        path, _, member = kind.partition(":") if ":" in kind else kind.rpartition(".")
        module = None if path.partition(".")[0] in SHIPPED_PACKAGES else sys.modules.get(path)
        if module is not None:
            yield kind, module, getattr(module, re.split("[:.]", member)[-1], None)


def _files(module: ModuleType) -> dict[str, Path]:
    """By module, the files of it, its packages and the user-defined modules it imports."""
    files: dict[str, Path] = {}
    queue = [(module.__name__, Path(getattr(module, "__file__", None) or ""))]
    while queue:
        name, path = queue.pop()
        if name in files or not path.is_file():
            continue
        files[name] = path
        for import_name in _imports(name, path) if path.suffix == ".py" else ():
            top = import_name.partition(".")[0]
            place = None if top in SHIPPED_PACKAGES else _place(import_name)
            if place is None:
                continue
            same_package = top == name.partition(".")[0]
            if same_package or not (top in sys.stdlib_module_names or _is_installed(place)):
                queue.append((import_name, place))
    return files


def _imports(module: str, path: Path) -> Iterator[str]:
    """The packages that a module is in, and names of the modules that it may import anywhere."""
    yield from (".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 1))
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for level, name, imported_names in _parse(path)[1]:
        base = importlib.util.resolve_name("." * level + name, package) if level else name
        parts = base.split(".")
        yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        yield from (f"{base}.{name}" for name in imported_names)


def _place(name: str) -> Path | None:
    """The file of a module, imported or not; None: there is none. Imports nothing."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
        return Path(path) if path else None
    search_path: Sequence[str] | None = None
    spec = None
    # by its own name: by the whole one a folder without __init__.py asks for its parent module
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, search_path)
        if spec is None:
            return None
        search_path = spec.submodule_search_locations or []
    origin = spec is not None and spec.has_location and spec.origin
    return Path(origin) if origin else None


def _is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


Imports = tuple[tuple[int, str, tuple[str, ...]], ...]  # level, module, the names taken from it


def _parse(path: Path) -> tuple[bytes, Imports]:
    """A digest of a module's statements, and its imports; else of its bytes, and none."""
    source = path.read_bytes()
    return _statements(source) if path.suffix == ".py" else (hashlib.sha256(source).digest(), ())


@functools.lru_cache(maxsize=512)
def _statements(source: bytes) -> tuple[bytes, Imports]:
    def has_effect(node: Any) -> bool:
        constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        return not (constant or isinstance(node, ast.Pass))

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
                setattr(node, name, [child for child in value if has_effect(child)])
    return hashlib.sha256(ast.unparse(tree).encode()).digest(), tuple(imports)


def _code_bytes(member: Any) -> bytes:
    """What a class or function without a file does, and what it names of its module: functions,
    classes and plain values. A docstring is in none of the steps.
    """
    queue = [member]
    visited_ids = set()
    parts = []
    while queue:
        item = queue.pop()
        if id(item) in visited_ids:
            continue
        visited_ids.add(id(item))
        values: list[tuple[str, Any]] = []
        if isinstance(item, type):
            values = [("base", base) for base in item.__bases__]
            attributes = sorted(vars(item).items())
            values += [pair for pair in attributes if pair[0] not in IGNORED_ATTRIBUTES]
        elif inspect.isfunction(item):
            defaults = tuple((item.__kwdefaults__ or {}).items())
            values = [(item.__qualname__, item.__defaults__), ("keywords", defaults)]
            for code in _codes(item.__code__):
                ops = [(step.opname, step.argval) for step in dis.get_instructions(code)]
                parts += [f"{op} {value!r}" for op, value in ops if isinstance(value, PLAIN_TYPES)]
                values += [(name, item.__globals__.get(name)) for name in code.co_names]
        for name, value in values:
            value = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if isinstance(value, PLAIN_TYPES):
                parts.append(f"{name}={value!r}")
            elif getattr(value, "__module__", None) == member.__module__:
                queue.append(value)
    return "\n".join(parts).encode()


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for value in code.co_consts:
        if inspect.iscode(value):
            yield from _codes(value)


# --- what a run keeps of it ---


def store_code(experiments: Iterable[BaseModel], folder: Path, fresh: bool = False) -> None:
    """Writes the user-defined modules that the experiments name or import, but for what is
    installed, to `code/` in a run directory; `fresh`: over those that are stored there.
    """
    members = (member for experiment in experiments for member in _user_members(experiment))
    for module in {member[1].__name__: member[1] for member in members if member[1]}.values():
        files = _files(module)
        if module.__name__ not in files or _is_installed(files[module.__name__]):
            continue
        for name, file in files.items():
            folders = name.split(".")[: None if file.stem == "__init__" else -1]
            place = folder.joinpath(CODE_FOLDER, *folders, file.name)
            if not _is_installed(file) and (fresh or not place.exists()):
                make_folder(place.parent)
                replace_file(place, methodcaller("write", file.read_bytes()))


@contextmanager
def stored_code(run: str | Path, prefer_stored: bool = False) -> Iterator[Path | None]:
    """Within, the user-defined modules of the directory of a run (or its address) are imported
    where there are no others of their names; if `prefer_stored` also where others differ, with a
    warning. Raises `ConfigError` where another user can write them, or one that differs has been
    imported.
    """
    prefix = f"{CODE_FOLDER}/"
    with storage.readable_folder(run, "config", lambda name: name.startswith(prefix)) as folder:
        place = Path(os.path.abspath(folder / CODE_FOLDER))
        if not os.path.isdir(place):  # False for a name that no file can have
            yield None
            return
        _check_private([place, *place.rglob("*")])
        for cache in [*place.rglob("__pycache__")]:  # what is run is what can be read
            shutil.rmtree(cache, ignore_errors=True)
        differing_files = _differing_files(place)
        if not differing_files:
            yield None
            return
        if prefer_stored:
            _warn(differing_files, place)
        sys.path.insert(0 if prefer_stored else len(sys.path), str(place))
        importlib.invalidate_caches()
        try:
            yield place
        finally:
            sys.path.remove(str(place))


def search(path: Sequence[str]) -> None:
    """Takes on another process's `sys.path`, with what a run stores first if it is there."""
    run_entries = [entry for entry in path[:1] if os.path.basename(entry) == CODE_FOLDER]
    sys.path[:] = dict.fromkeys([*run_entries, *sys.path, *path])


def _check_private(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` for a link, and for what another user owns or anyone can write."""
    for path in paths:
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode) or status.st_mode & 0o002:
            expected = "stored code that is yours, that not everyone can write, and no link; "
            raise ConfigError("code", str(path), f"{expected}read it, then take a copy of it")


def _differing_files(place: Path) -> dict[str, tuple[Path, Path | None]]:
    """By module, stored files found nowhere else with the same statements; what is there."""
    differing_files = {}
    for path in sorted(path for path in place.rglob("[!.]*") if path.is_file()):
        parts = path.relative_to(place).parts
        name = ".".join(parts[:-1])
        if path.stem != "__init__":
            name = ".".join((*parts[:-1], path.name.partition(".")[0]))
        source = _place(name)
        if source is None or not source.is_file() or _parse(source)[0] != _parse(path)[0]:
            differing_files[name] = (path, source)
    return differing_files


def _warn(differing_files: Mapping[str, tuple[Path, Path | None]], place: Path) -> None:
    """Warns of modules that differ here; `ConfigError` for one that is imported."""
    for name in differing_files.keys() & sys.modules.keys():
        path, source = differing_files[name]
        expected = f"a process that has not imported another {name} ({source})"
        raise ConfigError("code", str(path), expected)
    differ = ", ".join(str(source) for _, source in differing_files.values() if source)
    if differ:
        message = "%s differs from what the run began with, stored in %s: that is used; "
        log.warning(message + "--fresh-noise would take the new code", differ, place)
