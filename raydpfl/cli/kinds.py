"""Every choice that a config has, read from the classes themselves (`raydpfl kinds`).

A key's type, bounds, default and description are those of its pydantic field; what is said of a
member is its docstring, with its paper.

>>> print(of("bounding.clip")[0].render())
bounding.clip
  (raydpfl.methods.bounding.clip:Clip)
  u min(1, c / ||u||) (Zhang 2021 eq. 3, Das 2021 eq. 4).
  scaling: update | gradient; default update
    what is bounded: the update, or update / lr, minus the sum of gradients, as
    Das 2021 writes it.
  bound: number, >= 1e-12, <= 1e+15; required
    c: the largest L2 norm of what one client sends.
"""

from __future__ import annotations

import inspect
import re
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from raydpfl import experiment
from raydpfl.config.hints import suggestion
from raydpfl.config.registry import fields_of
from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants import ACCOUNTANTS
from raydpfl.privacy.papers import cited
from raydpfl.privacy.sampling import SCHEMES

WIDTH = 80
BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
PLAIN = {
    bool: "true | false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
    dict: "mapping",
    Any: "any value",
}


@dataclass(frozen=True)
class KeyReference:
    """A key of a section."""

    name: str
    type: str  # in words, with its bounds
    required: bool
    default: Any  # in JSON types; None where it is required
    about: str  # its description; may be empty

    def lines(self) -> Iterator[str]:
        """As text of at most `WIDTH` columns."""
        default = "required" if self.required else f"default {_yaml(self.default)}"
        yield from _wrapped(f"{self.name}: {self.type}; {default}", "  ", "      ")
        yield from _wrapped(self.about, "    ")


@dataclass(frozen=True)
class KindReference:
    """A member of a family, or a section that has no kinds (`kind` is then empty)."""

    family: str  # the section of the config that it is a choice of
    kind: str
    source: str  # its class
    about: str  # its docstring
    keys: tuple[KeyReference, ...]

    @property
    def name(self) -> str:
        """As `raydpfl kinds NAME` takes it."""
        return f"{self.family}.{self.kind}".strip(".")

    def render(self) -> str:
        """As text of at most `WIDTH` columns."""
        lines = [self.name, f"  ({self.source})", *_paragraphs(self.about)]
        for key in self.keys:
            lines += key.lines()
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """In JSON types."""
        return {**asdict(self), "keys": [asdict(key) for key in self.keys]}


def of(name: str | None = None) -> list[KindReference]:
    """The members of all families, of one (`bounding`), or one of them (`bounding.clip`).

    Args:
        name: a section of the config, one of the kinds that it can have, or a section with a kind.
            The last word of a section is enough (`partition` for `data.partition`).

    Raises:
        ConfigError: there is none of this name.
    """
    every = _every()
    if name is None:
        return every
    matches = [kind for kind in every if name in (kind.family, kind.name)]
    matches = matches or [
        kind for kind in every if _ends(kind.family, name) or _ends(kind.name, name)
    ]
    if not matches:
        families = list(dict.fromkeys(kind.family for kind in every))
        expected = f"one of {', '.join(families)}; or FAMILY.KIND"
        near = suggestion(name.replace(".", " "), [*families, *(kind.name for kind in every)])
        raise ConfigError("kinds", name, f"{expected}{near}")
    return matches


def render(kinds: Iterable[KindReference]) -> str:
    """What `raydpfl kinds` prints."""
    return "\n\n".join(kind.render() for kind in kinds)


def _ends(full: str, name: str) -> bool:
    return full.endswith(f".{name}") or full.endswith(f".{name.removesuffix('s')}")


def _every() -> list[KindReference]:
    whole = {
        name: experiment.Experiment.model_fields[name] for name in ("seed", "rounds", "personal")
    }
    about = "What stands outside of all sections."
    top = KindReference("config", "", _path(experiment.Experiment), about, _keys(whole))
    kinds = [top]
    sections = experiment.SECTIONS.items()
    for name, spec in sections:
        if spec.family and not spec.usual:  # a rule of local, wherever else it may stand
            kinds += [_kind(name, kind, cls) for kind, cls in spec.family.items()]
    kinds += [_kind(name, "", spec.base) for name, spec in sections if spec.family is None]
    kinds += [
        _kind("privacy.accountants", kind, type(accountant))
        for kind, accountant in ACCOUNTANTS.items()
    ]
    return kinds + [
        _kind("selection.sampling", kind, type(scheme)) for kind, scheme in SCHEMES.items()
    ]


def _kind(family: str, kind: str, cls: type) -> KindReference:
    about = cited(inspect.cleandoc(cls.__doc__ or "").strip())
    fields = cls.model_fields if issubclass(cls, BaseModel) else {}
    keys = _keys({name: field for name, field in fields.items() if name != "kind"})
    return KindReference(family, kind, _path(cls), about, keys)


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _keys(fields: Mapping[str, FieldInfo]) -> tuple[KeyReference, ...]:
    return tuple(
        KeyReference(
            name,
            _type(field),
            field.is_required(),
            _default(field),
            cited(_sentence(field.description or "")),
        )
        for name, field in fields.items()
    )


def _default(field: FieldInfo) -> Any:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return None
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _yaml(value: Any) -> str:
    """A default on one line."""
    if isinstance(value, Mapping) and "kind" in value:
        return str(value["kind"])
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = [_yaml(item) for item in value]
    text = experiment.dump([value]).strip() if value != "" else "- ''"
    return " ".join(text.removeprefix("- ").split()) if "\n" not in text else str(value)


def _type(field: FieldInfo) -> str:
    return _with_bounds(_words(field.annotation), field.metadata)


def _with_bounds(words: str, metadata: Iterable[Any]) -> str:
    """A type with the bounds of an annotation, as in `number, > 0`."""
    limits: list[Any] = []
    for bound in metadata:
        limits += bound.metadata if isinstance(bound, FieldInfo) else [bound]
    for limit in limits:
        if isinstance(limit, annotated_types.MinLen):
            words += f", at least {limit.min_length}"
        for name, sign in BOUNDS:
            value = getattr(limit, name, None)
            if value is not None:
                words += f", {sign} {value:g}" if abs(value) >= 1e5 else f", {sign} {value}"
    return words


def _words(annotation: Any) -> str:
    """A type in words."""
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _with_bounds(_words(inner[0]), inner[1:])
    if origin is Literal:
        return " | ".join(str(argument) for argument in inner)
    if origin in (Union, types.UnionType):
        return " | ".join(_words(argument) for argument in inner)
    if origin in (tuple, list):
        texts = [_words(one) for one in inner if one is not Ellipsis]
        return "list of " + (" and ".join(texts) if texts else "values")
    if fields_of(annotation) is not None:
        return "a section with a kind"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "{" + ", ".join(annotation.model_fields) + "}"
    named = getattr(annotation, "__name__", str(annotation))
    return str(PLAIN.get(origin or annotation, named))


def _sentence(text: str) -> str:
    """With a full stop."""
    return text if not text or text.endswith((".", ":")) else f"{text}."


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraphs(text: str) -> Iterator[str]:
    """A docstring: prose wrapped, what is indented as it is, examples left out."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith(">>>"):
            continue
        if paragraph.startswith((" ", "|")):
            yield from textwrap.indent(paragraph, "  ").splitlines()
        elif paragraph.startswith("- "):
            for item in re.split(r"\n(?=- )", paragraph):
                yield from _wrapped(" ".join(item.split()), "  ", "    ")
        else:
            yield from _wrapped(paragraph, "  ")
