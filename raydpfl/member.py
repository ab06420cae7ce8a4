"""A member of a family: one choice of the six that make an algorithm, and its own section of the config.

A family is a dictionary of the members that come with the project. A user's own member is a class of the
same base, named by import path, and needs no change here:

>>> class Scale(Member):
...     kind: str = "scale"
...     bound: float = 1.0
>>> choose("bounding", {"kind": "scale", "bound": 2}, {"scale": Scale}, Member)
Scale(kind='scale', bound=2.0)
>>> choose("bounding", {"kind": "scael"}, {"scale": Scale}, Member)
Traceback (most recent call last):
raydpfl.errors.ConfigError: bounding.kind = 'scael': one of scale, or the import path of your own class (package.module:Name)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from raydpfl.errors import ConfigError
from raydpfl.files import digest


class Member(BaseModel):
    """Frozen, typed, and refusing keys it does not know; its fields are the keys of its config section."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    kind: str = ""


M = TypeVar("M", bound=BaseModel)


def validate(cls: type[M], section: str, values: Mapping[str, Any]) -> M:
    """`cls(**values)`, with pydantic's first complaint as a `ConfigError` that names `section.key`."""
    if not isinstance(values, Mapping):
        raise ConfigError(section, values, "a mapping of keys to values")
    try:
        found = cls.model_validate(dict(values))
    except ValidationError as error:
        raise _complaint(cls, section, error) from None
    for name, value in values.items():
        if isinstance(value, bool) and not isinstance(getattr(found, name), bool):  # pydantic would take `yes` for 1
            raise ConfigError(f"{section}.{name}".lstrip("."), value, "a number, not a truth value")
    return found


def choose(section: str, values: Any, family: Mapping[str, type[M]], base: type[M]) -> M:
    """The member that `values["kind"]` names, from `family` or by import path, validated.

    Raises `ConfigError` for an unknown kind, a module that cannot be imported, a class that is not a `base`,
    or a field the member refuses.
    """
    if isinstance(values, base):
        return values
    if not isinstance(values, Mapping):
        raise ConfigError(section, values, "a mapping with a kind")
    kind = values.get("kind")
    accepted = f"one of {', '.join(family)}, or the import path of your own class (package.module:Name)"
    if not isinstance(kind, str) or not (kind in family or ":" in kind or "." in kind):
        raise ConfigError(f"{section}.kind", kind, accepted)
    cls = family.get(kind) or load(kind, f"{section}.kind")
    if not (isinstance(cls, type) and issubclass(cls, base) and cls is not base):
        raise ConfigError(f"{section}.kind", kind, f"a subclass of {base.__module__}.{base.__qualname__}")
    return validate(cls, section, values)


def own_code(member: Member) -> dict[str, str | None]:
    """The digest of the source of each module that a class of this member, or of one in its fields, comes from.

    By the module's name; of raydpfl's own none, None for a module that is no file.
    """
    found: dict[str, str | None] = {}
    for cls in type(member).__mro__:
        module = cls.__module__
        if issubclass(cls, Member) and not module.startswith("raydpfl."):
            source = getattr(sys.modules.get(module), "__file__", None)
            found[module] = digest(Path(source)) if source else None
    for name in type(member).model_fields:
        value = getattr(member, name)
        if isinstance(value, Member):
            found |= own_code(value)
    return found


def load(path: str, field: str) -> Any:
    """The object at `package.module:Name` (or `package.module.Name`)."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found
    except Exception as error:  # a user's module may raise anything while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(field, path, f"an import path package.module:Name that can be imported ({reason})") from None


def _complaint(cls: type[BaseModel], section: str, error: ValidationError) -> ConfigError:
    errors = error.errors()
    first = errors[0]
    if isinstance(first.get("ctx", {}).get("error"), ConfigError):
        return first["ctx"]["error"]
    path = _path(cls, first["loc"])
    where = ".".join([section, *path] if section else path)
    if first["type"] == "extra_forbidden":
        return ConfigError(where, first["input"], f"no such key; the keys here are {', '.join(cls.model_fields)}")
    if first["type"] == "missing":
        return ConfigError(where, None, "required")
    messages = [each["msg"].removeprefix("Value error, ").removeprefix("Input ") for each in errors if _path(cls, each["loc"]) == path]
    return ConfigError(where, first["input"], " or ".join(messages))


def _path(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys of a pydantic location, without its names for the branches of a union."""
    return [str(part) for depth, part in enumerate(location) if depth == 0 or isinstance(part, int) or part in cls.model_fields]
