"""Builds a section from its part of a config; errors name key, value and what is expected."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from raydpfl.config import hints
from raydpfl.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
# what pydantic's messages say, as patterns, and what messages have after "expected" instead
PYDANTICS = {
    r"^(Value error, )?(Input )?(should be )?": "",
    r", unable to parse string as an? \w+| or instance of \w+| after validation": "",
    r"^(greater|less) than": r"a number \1 than",
    r"^(List|Tuple) should have": "a list with",
    r"^Dictionary should have": "a mapping with",
    r"^String should (have|match pattern)": "a text with",
    r"a valid tuple": "a list",
    r"a valid dictionary": "a mapping",
}


def validate(cls: type[M], section: str, values: Mapping[str, Any]) -> M:
    """`cls(**values)`, of a member or a section. Raises `ConfigError` for the first error of
    pydantic, on the field `section.key`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(section, values, "a mapping of keys to values")
    try:
        built = cls.model_validate(dict(values))
    except ValidationError as error:
        raise _complaint(cls, section, error) from None
    for name, value in values.items():
        _check_truths(f"{section}.{name}".lstrip("."), value, getattr(built, name))
    return built


def _check_truths(field: str, value: Any, built: Any) -> None:
    """Raises `ConfigError` for a truth value of which pydantic made a number, at any depth."""
    if isinstance(value, bool):
        if not isinstance(built, bool) and isinstance(built, int | float):
            raise ConfigError(field, value, "a number, not a truth value")
    elif isinstance(value, Mapping) and isinstance(built, BaseModel):
        for name, part in value.items():
            _check_truths(f"{field}.{name}", part, getattr(built, str(name), None))
    elif isinstance(value, list | tuple) and isinstance(built, list | tuple):
        for part, made in zip(value, built, strict=False):
            _check_truths(field, part, made)


def _complaint(cls: type[BaseModel], section: str, error: ValidationError) -> ConfigError:
    errors = error.errors()
    # a key that is misspelt is missing too: extra keys come first, and of the branches of a union
    # the deepest error
    first = min(errors, key=lambda e: (e["type"] == "missing", -len(_path(cls, e["loc"]))))
    if isinstance(first.get("ctx", {}).get("error"), ConfigError):
        return first["ctx"]["error"]
    extra = first["type"] == "extra_forbidden"
    inner, path = _inner(cls, first["loc"]) if extra else (cls, _path(cls, first["loc"]))
    where = ".".join([section, *path] if section else path)
    if extra:
        keys = ", ".join(inner.model_fields)
        expected = f"one of the keys {keys}{hints.suggestion(where, inner.model_fields)}"
        return ConfigError(where, first["input"], expected)
    if first["type"] == "missing":
        return ConfigError(where, None, "a value, as it has no default")
    messages = [error["msg"] for error in errors if _path(cls, error["loc"]) == path]
    for pattern, words in PYDANTICS.items():
        messages = [re.sub(pattern, words, message) for message in messages]
    return ConfigError(where, first["input"], " or ".join(dict.fromkeys(messages)))


def _inner(
    cls: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[type[BaseModel], list[str]]:
    """The class at a location, this one or that of one of its fields, and the keys up to there."""
    field = str(location[0])
    if len(location) == 1:
        return cls, [field]
    inner = _sections(cls, field)
    return (inner[0] if inner else cls), [field, str(location[-1])]


def _sections(cls: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """The classes of sections that a field may have as its value."""
    annotation = cls.model_fields[field].annotation if field in cls.model_fields else None
    branches = [one for one in (annotation, *get_args(annotation)) if isinstance(one, type)]
    return [one for one in branches if issubclass(one, BaseModel)]


def _path(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys in a pydantic location, without pydantic's names for the branches of a union."""
    inner = _sections(cls, str(location[0]) if location else "")
    names = {name for one in (cls, *inner) for name in one.model_fields}
    return [
        str(part)
        for depth, part in enumerate(location)
        if depth == 0 or isinstance(part, int) or part in names
    ]
