"""What a user's own class may define: nothing that nobody would read.

Public methods and constants are those of the base, which the project calls or reads, and those that
the class's own code uses. New fields are those that its own code reads. Anything else is a mistake
(a hook of another family, a misspelt name) that would silently change nothing, so it is refused by
name:

>>> class Base:
...     def of(self, x): ...
>>> class Mine(Base):
...     model_fields, scale = {}, 2.0
...     def of(self, x): return self.scale * x
...     def loss(self, x): return x
>>> Base.__module__, Mine.__module__ = "raydpfl.example", "mine"
>>> check(Mine, Base, "a", "m:A")  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: a.kind = 'm:A': expected a class without loss, which nothing reads ...

Names with an underscore, validators and inner classes are not checked. Code that reads by computed
names (`getattr`, `model_dump`, ...) may read any field. Code is inspected and never run.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import cached_property, partialmethod
from types import CodeType, FunctionType, ModuleType
from typing import Any

from raydpfl.errors import ConfigError

# A class whose code mentions one of these may read fields by computed names.
COMPUTED = {
    "getattr",
    "vars",
    "__dict__",
    "model_dump",
    "model_dump_json",
    "model_fields",
    "attrgetter",
}
DECORATED = (  # methods that pydantic calls
    "validators", "field_validators", "root_validators", "model_validators",
    "field_serializers", "model_serializers", "computed_fields",
)  # fmt: skip
# hooks of a base that messages do not offer
INNER = {"accounted_with", "files", "named", "unread"}
MOST = 2000  # functions that are inspected
# of each function its name, the names that it mentions, and the strings in it
Code = list[tuple[str, set[str], set[str]]]


def is_user_defined(cls: type) -> bool:
    """Whether a class is not part of this package."""
    return cls.__module__.partition(".")[0] != "raydpfl"


def check(cls: type, base: type, section: str, kind: str) -> None:
    """Checks that something reads each public method, constant and field of a class.

    Args:
        cls: the class.
        base: the base of its family.
        section: the section of the config that names it, for messages.
        kind: what it is named there.

    Raises:
        ConfigError: nothing reads one of them, or it cannot be used as that of the base.
    """
    own = [each for each in cls.__mro__ if issubclass(each, base) and is_user_defined(each)]
    if not own:
        return
    # classes of the package, `Member` among them
    theirs = [each for each in cls.__mro__ if not is_user_defined(each)]
    code = _code(own)
    hooks = {name: value for each in reversed(theirs) for name, value in _public(each).items()}
    known = hooks.keys() | {name for each in theirs for name in _fields(each)}
    for each in own:
        for name, value in _public(each).items():
            if name in hooks:
                _same_use(name, value, hooks[name], section, kind)
            elif name not in known and not any(
                name in names for other, names, _ in code if other != name
            ):
                offered = ", ".join(sorted(name for name in hooks if name not in INNER))
                reason = f"a class without {name}, which nothing reads (its base: {offered})"
                raise ConfigError(f"{section}.kind", kind, reason)
    computed = any(COMPUTED & names for _, names, _ in code)
    said = {text for _, _, texts in _code(theirs) for text in texts}  # what bases look up by name
    for name in _fields(cls) if not computed else ():
        if name not in known | said and not any(name in names for _, names, _ in code):
            raise ConfigError(
                f"{section}.{name}",
                kind,
                f"a class without the field {name}, which none of its methods reads",
            )


def mentioned(cls: type, base: type) -> set[str]:
    """The names of `base`'s fields that a user's own class reads, or may read by computed names."""
    own = [each for each in cls.__mro__ if issubclass(each, base) and is_user_defined(each)]
    names = {name for _, some, _ in _code(own) for name in some}
    return set(_fields(base)) if COMPUTED & names else names


def numbers(cls: type, base: type) -> set[float]:
    """The finite numbers in the code of a user's own class, as constants or global names."""
    own = [each for each in cls.__mro__ if issubclass(each, base) and is_user_defined(each)]
    found: set[float] = set()
    for _, function in _walked(own):
        codes = [function.__code__]
        for code in codes:
            codes += [const for const in code.co_consts if isinstance(const, CodeType)]
            values = [*code.co_consts, *(function.__globals__.get(name) for name in code.co_names)]
            found |= {float(each) for each in values if isinstance(each, (int, float))}
    return {each for each in found if abs(each) < 1e300}


def complete(cls: type, section: str, kind: str) -> None:
    """Raises `ConfigError` for a class without a method that its base leaves to it."""
    for name in sorted(dir(cls)):
        found = inspect.getattr_static(cls, name)
        left = isinstance(found, FunctionType) and "NotImplementedError" in found.__code__.co_names
        if left and found.__module__.partition(".")[0] == "raydpfl":
            raise ConfigError(
                f"{section}.kind",
                kind,
                f"a class with a method {name}{_named(inspect.signature(found))}",
            )


def _fields(cls: type) -> list[str]:
    return [name for name in getattr(cls, "model_fields", ()) if name != "kind"]


def _public(cls: type) -> dict[str, Any]:
    """The public methods, properties and constants that a class itself defines, without validators
    and inner classes."""
    decorators = getattr(cls, "__pydantic_decorators__", None)
    validators = {name for group in DECORATED for name in getattr(decorators, group, ())}
    return {
        name: value
        for name, value in vars(cls).items()
        if not (
            name.startswith(("_", "model_"))
            or name in validators
            or name == "kind"
            or isinstance(value, type)
        )
    }


def _same_use(name: str, mine: Any, theirs: Any, section: str, kind: str) -> None:
    """Raises `ConfigError` if the project would call something with arguments that it does not
    take, or read a method as a value."""
    if not isinstance(theirs, FunctionType):
        if isinstance(mine, FunctionType):
            raise ConfigError(
                f"{section}.kind",
                kind,
                f"a class whose {name} is a property or constant, not a method",
            )
        return
    wanted = inspect.signature(theirs)
    if not (callable(mine) or isinstance(mine, (classmethod, staticmethod, partialmethod))):
        raise ConfigError(
            f"{section}.kind", kind, f"a class whose {name} is a method, {name}{wanted}"
        )
    if isinstance(mine, FunctionType):
        given = inspect.signature(mine)
        try:
            given.bind(*wanted.parameters)
        except TypeError:
            raise ConfigError(
                f"{section}.kind",
                kind,
                f"a class whose {name} takes {_named(wanted)}, not {_named(given)}",
            ) from None


def _named(signature: inspect.Signature) -> str:
    """The names of the parameters, self left out."""
    return f"({', '.join([*signature.parameters][1:])})"


def _code(classes: list[type]) -> Code:
    """What the functions of these classes mention."""
    found: Code = []
    for name, function in _walked(classes):
        names, texts = _mentioned(function.__code__)
        found.append((name, names | texts, texts))
    return found


def _walked(classes: list[type]) -> Iterator[tuple[str, FunctionType]]:
    """All functions of these classes, by name, and those that they use by global names, each
    once.
    """
    waiting = [
        (name, function)
        for each in classes
        for name, value in vars(each).items()
        for function in _functions(value)
    ]
    seen: set[int] = set()
    while waiting and len(seen) < MOST:
        name, function = waiting.pop()
        if id(function) in seen or (function.__module__ or "").startswith("pydantic"):
            continue
        seen.add(id(function))
        yield name, function
        names, _ = _mentioned(function.__code__)
        waiting += [("", each) for each in _reached(function, names)]


def _functions(value: Any) -> Iterator[FunctionType]:
    """The Python functions of a class attribute, decorated ones too."""
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, (classmethod, staticmethod)):
        parts = [value.__func__]
    elif isinstance(value, (cached_property, partialmethod)):
        parts = [value.func]
    elif isinstance(value, FunctionType):
        yield value
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        parts = [
            each
            for each in [getattr(value, "__wrapped__", None), *cells]
            if isinstance(each, FunctionType)
        ]
    else:
        parts = [getattr(value, "__wrapped__", None)]
    for part in parts:
        if part is not None:
            yield from _functions(part)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _mentioned(code: CodeType) -> tuple[set[str], set[str]]:
    """The names (globals and attributes) and the strings in a function and its inner functions."""
    names = set(code.co_names)
    texts = {const for const in code.co_consts if isinstance(const, str)}
    for const in code.co_consts:
        if isinstance(const, CodeType):
            more, others = _mentioned(const)
            names = names | more
            texts = texts | others
    return names, texts


def _reached(function: FunctionType, names: set[str]) -> Iterator[FunctionType]:
    """The user's own functions that a function may pass its object to: by a global name, or a name
    in a module or class that it mentions."""
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _users(value.__name__):
            named = (vars(value).get(other) for other in names)
            yield from (each for each in named if isinstance(each, FunctionType))
        elif isinstance(value, FunctionType) and _users(value.__module__):
            yield value
        elif (
            isinstance(value, type)
            and _users(value.__module__)
            and not hasattr(value, "model_fields")
        ):
            yield from (part for each in vars(value).values() for part in _functions(each))


def _users(module: str | None) -> bool:
    """Whether a module belongs neither to this package, nor to Python or this package's own
    dependencies."""
    top = (module or "").partition(".")[0]
    return (
        top
        not in {"raydpfl", "torch", "torchvision", "numpy", "scipy", "pydantic", "ray"}
        | sys.stdlib_module_names
    )
