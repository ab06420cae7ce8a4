"""The source of user-defined code: the files that a module is of and imports, and what they do as
a digest.

User-defined modules are neither in the standard library nor installed, except those of the package
that a member itself belongs to.
"""

import ast
import dis
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# packages that no config brings along
SHIPPED_PACKAGES = ("raydpfl", "torch", "torchvision", "numpy", "pydantic", "builtins")
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
# packages with models that a config may name, whose version stands for their code
LIBRARIES = ("transformers",)
IGNORED_ATTRIBUTES = ("__doc__", "__firstlineno__", "__static_attributes__")  # of a class
# types whose text determines the value
PLAIN_TYPES = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


def code_digest(module: ModuleType | None, member: Any) -> str:
    """What a module and all user-defined modules that it imports do, even if only when a function
    runs, as 16 hexadecimal digits of their statements, without comments, docstrings and formatting;
    of a `member` without a file, typed into an interpreter, of the code itself and what it names;
    of a module of transformers of the version.
    """
    top = "" if module is None else module.__name__.partition(".")[0]
    if top in LIBRARIES:
        parts = [importlib.metadata.version(top).encode()]
    else:
        files = [] if module is None else sorted(module_files(module).items())
        parts = [part for file, path in files for part in (file.encode(), parse(path)[0])]
        if not parts and member is not None:
            parts = [_code_bytes(member)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def module_files(module: ModuleType) -> dict[str, Path]:
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
            place = None if top in SHIPPED_PACKAGES else module_place(import_name)
            if place is None:
                continue
            same_package = top == name.partition(".")[0]
            if same_package or not (place.is_relative_to(STANDARD_LIBRARY) or is_installed(place)):
                queue.append((import_name, place))
    return files


def _imports(module: str, path: Path) -> Iterator[str]:
    """The packages that a module is in, and names of the modules that it may import anywhere."""
    yield from (".".join(module.split(".")[:depth]) for depth in range(1, module.count(".") + 1))
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    for level, name, imported_names in parse(path)[1]:
        base = importlib.util.resolve_name("." * level + name, package) if level else name
        parts = base.split(".")
        yield from (".".join(parts[: depth + 1]) for depth in range(len(parts)))
        yield from (f"{base}.{name}" for name in imported_names)


def module_place(name: str) -> Path | None:
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


def is_installed(path: Path) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


Imports = tuple[tuple[int, str, tuple[str, ...]], ...]  # level, module, the names taken from it


def parse(path: Path) -> tuple[bytes, Imports]:
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
