"""Builds a section from its part of a config; errors name key, value and what is expected."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from raydpfl.config import hints
from raydpfl.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
# what pydantic's messages say, as patterns, and what messages have after "expected" instead
MESSAGE_PATTERNS = {
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
        model = cls.model_validate(dict(values))
    except ValidationError as error:
        raise _config_error(cls, section, error) from None
    for name, value in values.items():
        _check_booleans(f"{section}.{name}".lstrip("."), value, getattr(model, name, None))
    return model


def _check_booleans(field: str, value: Any, parsed_value: Any) -> None:
    """Raises `ConfigError` for a truth value of which pydantic made a number, at any depth."""
    if isinstance(value, bool):
        if not isinstance(parsed_value, bool) and isinstance(parsed_value, int | float):
            raise ConfigError(field, value, "a number, not a truth value")
    elif isinstance(value, Mapping) and isinstance(parsed_value, BaseModel):
        for name, part in value.items():
            _check_booleans(f"{field}.{name}", part, getattr(parsed_value, str(name), None))
    elif isinstance(value, list | tuple) and isinstance(parsed_value, list | tuple):
        for part, parsed_part in zip(value, parsed_value, strict=False):
            _check_booleans(field, part, parsed_part)


def _config_error(cls: type[BaseModel], section: str, error: ValidationError) -> ConfigError:
    errors = error.errors()
    # a key that is misspelt is missing too: extra keys come first, and of the branches of a union
    # the deepest error
    detail = min(errors, key=lambda e: (e["type"] == "missing", -len(_path(cls, e["loc"]))))
    if isinstance(detail.get("ctx", {}).get("error"), ConfigError):
        return detail["ctx"]["error"]
    is_extra = detail["type"] == "extra_forbidden"
    owner, path = _inner_class(cls, detail["loc"]) if is_extra else (cls, _path(cls, detail["loc"]))
    key_path = ".".join([section, *path] if section else path)
    if is_extra:
        keys = ", ".join(owner.model_fields)
        expected = f"one of the keys {keys}{hints.suggestion(key_path, owner.model_fields)}"
        return ConfigError(key_path, detail["input"], expected)
    if detail["type"] == "missing":
        return ConfigError(key_path, None, "a value, as it has no default")
    messages = [error["msg"] for error in errors if _path(cls, error["loc"]) == path]
    for pattern, words in MESSAGE_PATTERNS.items():
        messages = [re.sub(pattern, words, message) for message in messages]
    return ConfigError(key_path, detail["input"], " or ".join(dict.fromkeys(messages)))


def _inner_class(
    cls: type[BaseModel], location: tuple[int | str, ...]
) -> tuple[type[BaseModel], list[str]]:
    """The class at a location, this one or that of one of its fields, and the keys up to there."""
    field = str(location[0])
    if len(location) == 1:
        return cls, [field]
    section_classes = _sections(cls, field)
    return (section_classes[0] if section_classes else cls), [field, str(location[-1])]


def _sections(cls: type[BaseModel], field: str) -> list[type[BaseModel]]:
    """The classes of sections that a field may have as its value."""
    annotation = cls.model_fields[field].annotation if field in cls.model_fields else None
    branches = [part for part in (annotation, *get_args(annotation)) if isinstance(part, type)]
    return [branch for branch in branches if issubclass(branch, BaseModel)]


def _path(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys in a pydantic location, without pydantic's names for the branches of a union."""
    classes = (cls, *_sections(cls, str(location[0]) if location else ""))
    names = {name for section in classes for name in section.model_fields}
    return [
        str(part)
        for depth, part in enumerate(location)
        if depth == 0 or isinstance(part, int) or part in names
    ]
