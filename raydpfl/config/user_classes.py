"""Checks of user-defined classes: methods and constants that are those of the base, used as it uses
them, and no name that was probably meant to be one of them; fields that are the keys of a config,
and hold the same in every process. Names with an underscore, validators and inner classes are not
checked.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from functools import partialmethod
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from raydpfl.config.hints import intended_name
from raydpfl.errors import ConfigError

DECORATOR_GROUPS = (  # methods that pydantic calls
    "validators", "field_validators", "root_validators", "model_validators",
    "field_serializers", "model_serializers", "computed_fields",
)  # fmt: skip
METHODS = (FunctionType, classmethod, staticmethod, property)


def is_user_defined(cls: type) -> bool:
    """Whether a class is not part of this package."""
    return cls.__module__.partition(".")[0] != "raydpfl"


def check(cls: type[BaseModel], base: type, section: str, kind: str) -> None:
    """Raises `ConfigError` for a public method or constant of a class that cannot be used as that
    of the base of its family, or has nearly its name, and for fields that a config cannot name.
    `section` names it as `kind`.
    """
    hooks = _public(part for part in reversed(cls.__mro__) if not is_user_defined(part))
    _check_fields(cls, hooks, section, kind)
    parts = [part for part in cls.__mro__ if issubclass(part, base) and is_user_defined(part)]
    for name, value in _public(parts).items():
        if name in hooks:
            _check_usage(name, value, hooks[name], section, kind)
        elif hook_name := intended_name(name, hooks):
            expected = f"a class without {name}; nearest: {hook_name}"
            raise ConfigError(f"{section}.kind", kind, expected)


def check_options(member: BaseModel, section: str, kind: str) -> None:
    """Raises `ConfigError` for a field whose value a config cannot hold, or has no order."""
    for name in type(member).model_fields:
        try:
            member.model_dump(mode="json", include={name})
        except ValueError as error:
            expected = f"a value that a config can hold ({error})"
            raise ConfigError(f"{section}.{name}", getattr(member, name), expected) from None
        if _has_set(member.model_dump(include={name})):
            expected = f"a class whose {name} is a tuple: a set has another order in every process"
            raise ConfigError(f"{section}.kind", kind, expected)


def check_required_methods(cls: type, section: str, kind: str) -> None:
    """Raises `ConfigError` for a class without a method that its base leaves to it."""
    for name in sorted(dir(cls)):
        hook = inspect.getattr_static(cls, name)
        names = hook.__code__.co_names if isinstance(hook, FunctionType) else ()
        if "NotImplementedError" in names and hook.__module__.partition(".")[0] == "raydpfl":
            expected = f"a class with a method {name}{_names(inspect.signature(hook))}"
            raise ConfigError(f"{section}.kind", kind, expected)


def _public(classes: Iterable[type]) -> dict[str, Any]:
    """The public methods, properties and constants that classes define; of one name the last."""
    values: dict[str, Any] = {}
    for cls in classes:
        decorators = getattr(cls, "__pydantic_decorators__", None)
        validators = {name for group in DECORATOR_GROUPS for name in getattr(decorators, group, ())}
        for name, value in vars(cls).items():
            private = name.startswith(("_", "model_")) or name in {*validators, "kind"}
            if not private and not isinstance(value, type):
                values[name] = value
    return values


def _check_fields(cls: type[BaseModel], hooks: Mapping[str, Any], section: str, kind: str) -> None:
    """Raises `ConfigError` for fields that a config cannot name, and for those in place of a method
    or property of the base, which they do not replace.
    """
    expected = "a class without a dataclass as a base" if is_dataclass(cls) else ""
    parts = [part for part in cls.__mro__ if not is_user_defined(part)]
    base_fields = {name for part in parts for name in getattr(part, "model_fields", ())}
    for name, field in cls.model_fields.items():
        if field.alias or field.validation_alias or field.exclude:
            expected = f"a class whose {name} is in a config by its name, without alias or exclude"
        elif name not in base_fields and isinstance(hooks.get(name), METHODS):
            expected = f"a class without a field {name}, which is a method or property of its base"
    if expected:
        raise ConfigError(f"{section}.kind", kind, expected)


def _has_set(value: Any) -> bool:
    """Whether a value is a set or has one in it."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    is_sequence = isinstance(value, (list, tuple))
    return isinstance(value, (set, frozenset)) or (is_sequence and any(map(_has_set, value)))


def _check_usage(name: str, value: Any, hook: Any, section: str, kind: str) -> None:
    """Raises `ConfigError` for a method where a value is read, or with other arguments."""
    expected = ""
    target = inspect.signature(hook) if isinstance(hook, FunctionType) else None
    if target is None:
        if isinstance(value, FunctionType):
            expected = f"a class whose {name} is a property or constant, not a method"
    elif not (callable(value) or isinstance(value, (classmethod, staticmethod, partialmethod))):
        expected = f"a class whose {name} is a method, {name}{target}"
    elif isinstance(value, FunctionType):
        signature = inspect.signature(value)
        try:
            signature.bind(*target.parameters)
        except TypeError:
            expected = f"a class whose {name} takes {_names(target)}, not {_names(signature)}"
    if expected:
        raise ConfigError(f"{section}.kind", kind, expected)


def _names(signature: inspect.Signature) -> str:
    """The names of the parameters, self left out."""
    return f"({', '.join([*signature.parameters][1:])})"
