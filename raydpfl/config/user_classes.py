"""Checks of user-defined classes: methods and constants that are those of the base, used as it uses
them, and no name that was probably meant to be one of them. Names with an underscore, fields,
validators and inner classes are not checked.
"""

import inspect
from collections.abc import Iterable
from functools import partialmethod
from types import FunctionType
from typing import Any

from raydpfl.config.hints import misspelt
from raydpfl.errors import ConfigError

DECORATED = (  # methods that pydantic calls
    "validators", "field_validators", "root_validators", "model_validators",
    "field_serializers", "model_serializers", "computed_fields",
)  # fmt: skip


def is_user_defined(cls: type) -> bool:
    """Whether a class is not part of this package."""
    return cls.__module__.partition(".")[0] != "raydpfl"


def check(cls: type, base: type, section: str, kind: str) -> None:
    """Raises `ConfigError` for a public method or constant of a class that cannot be used as that
    of the base of its family, or has nearly its name. `section` names it as `kind`.
    """
    hooks = _public(other for other in reversed(cls.__mro__) if not is_user_defined(other))
    mine = [other for other in cls.__mro__ if issubclass(other, base) and is_user_defined(other)]
    for name, value in _public(mine).items():
        if name in hooks:
            _same_use(name, value, hooks[name], section, kind)
        elif meant := misspelt(name, hooks):
            expected = f"a class without {name}; nearest: {meant}"
            raise ConfigError(f"{section}.kind", kind, expected)


def complete(cls: type, section: str, kind: str) -> None:
    """Raises `ConfigError` for a class without a method that its base leaves to it."""
    for name in sorted(dir(cls)):
        hook = inspect.getattr_static(cls, name)
        left = isinstance(hook, FunctionType) and "NotImplementedError" in hook.__code__.co_names
        if left and hook.__module__.partition(".")[0] == "raydpfl":
            expected = f"a class with a method {name}{_named(inspect.signature(hook))}"
            raise ConfigError(f"{section}.kind", kind, expected)


def _public(classes: Iterable[type]) -> dict[str, Any]:
    """The public methods, properties and constants that classes define; of one name the last."""
    values: dict[str, Any] = {}
    for cls in classes:
        decorators = getattr(cls, "__pydantic_decorators__", None)
        validators = {name for group in DECORATED for name in getattr(decorators, group, ())}
        for name, value in vars(cls).items():
            private = name.startswith(("_", "model_")) or name in {*validators, "kind"}
            if not private and not isinstance(value, type):
                values[name] = value
    return values


def _same_use(name: str, mine: Any, theirs: Any, section: str, kind: str) -> None:
    """Raises `ConfigError` for a method where a value is read, or with other arguments."""
    expected = ""
    wanted = inspect.signature(theirs) if isinstance(theirs, FunctionType) else None
    if wanted is None:
        if isinstance(mine, FunctionType):
            expected = f"a class whose {name} is a property or constant, not a method"
    elif not (callable(mine) or isinstance(mine, (classmethod, staticmethod, partialmethod))):
        expected = f"a class whose {name} is a method, {name}{wanted}"
    elif isinstance(mine, FunctionType):
        signature = inspect.signature(mine)
        try:
            signature.bind(*wanted.parameters)
        except TypeError:
            expected = f"a class whose {name} takes {_named(wanted)}, not {_named(signature)}"
    if expected:
        raise ConfigError(f"{section}.kind", kind, expected)


def _named(signature: inspect.Signature) -> str:
    """The names of the parameters, self left out."""
    return f"({', '.join([*signature.parameters][1:])})"
