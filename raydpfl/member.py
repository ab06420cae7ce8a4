"""A member of a family: one choice of the six that make an algorithm, and its own section of the
config.

A family is a dictionary of the members that come with the project, found by looking into its
package (`family`). A user's own member is a class of the same base, named by import path, and needs
no change here:

>>> class Scale(Member):
...     kind: str = "scale"
...     bound: float = 1.0
>>> choose("bounding", {"kind": "scale", "bound": 2}, {"scale": Scale}, Member)
Scale(kind='scale', bound=2.0)
>>> choose("bounding", {"kind": "scale", "bond": 2}, {"scale": Scale}, Member)
Traceback (most recent call last):
raydpfl.errors.ConfigError: bounding.bond = 2: no such key; the keys here are kind, bound
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from raydpfl import own
from raydpfl.errors import RAISED, ConfigError
from raydpfl.files import digest

if TYPE_CHECKING:
    from raydpfl.config import Experiment


class Member(BaseModel):
    """Frozen, typed, and refusing keys it does not know; its fields are the keys of its config
    section.

    `examples` are settings worth running, each a mapping of fields. The suite that every member has
    to pass, a user's own too, runs each of them.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    # the other sections that what it spends depends on
    accounted_with: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    named: ClassVar[frozenset[str]] = frozenset()  # the fields that name files
    # fields that there were not always: see `meaning`
    newer: ClassVar[frozenset[str]] = frozenset()

    kind: str = ""

    @property
    def is_own(self) -> bool:
        """Whether code of the user's own takes part in what this member does."""
        return own.is_own(type(self))

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for an experiment that this member cannot be part of.

        It is asked once the config is read, before the data are touched. A member names the
        combinations that it refuses itself; nobody else knows of them. The `check` of its bases is
        asked too, the first base first, so that a class need not call it.
        """

    def warnings(self, experiment: Experiment) -> tuple[str, ...]:
        """What whoever reads the results of this experiment should know, in words."""
        return ()

    def files(self) -> dict[str, str]:
        """The files that this member names, by field."""
        given = {name: getattr(self, name) for name in sorted(self.named)}
        return {name: value for name, value in given.items() if isinstance(value, str)}

    def meaning(self) -> dict[str, Any]:
        """Its section of the config in JSON types, of which the keys of noise and of prepared data
        are made.

        A field that is `newer` is left out at its default, which does what was done before there
        was such a field: so a config that does not use it keeps its bits.
        """
        found = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.newer and value == field.get_default(call_default_factory=True):
                del found[name]
            elif isinstance(value, Member):
                found[name] = value.meaning()
        return found

    @classmethod
    def unread(cls) -> bool:
        """Whether this stands for a class that was not imported: its keys are as the config has
        them, without defaults."""
        return cls.__name__ == "Unread"


M = TypeVar("M", bound=BaseModel)
K = TypeVar("K", bound="Member")
T = TypeVar("T")
_IMPORTS: ContextVar[tuple[str, ...] | None] = ContextVar("imports", default=None)


@contextmanager
def importing(sections: Iterable[str] | None) -> Iterator[None]:
    """Within it `choose` imports what these sections of a config name, and what stands within them
    (None: all); of any other import path it makes a member that is `unread`. An import runs code,
    which a question about a config need not do."""
    token = _IMPORTS.set(None if sections is None else tuple(sections))
    try:
        yield
    finally:
        _IMPORTS.reset(token)


def imports(section: str) -> bool:
    """Whether what this section names may be imported here."""
    allowed = _IMPORTS.get()
    if allowed is None:
        return True
    return any(section == name or section.startswith(f"{name}.") for name in allowed)


@functools.cache
def _stand_in(base: type[M]) -> type[M]:
    """A member of this family with whatever keys it is given."""
    config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    return type("Unread", (base,), {"model_config": config, "__module__": __name__})


def family(
    package: str, base: type[T], first: Sequence[str] = (), name: str = "kind"
) -> dict[str, type[T]]:
    """The classes of `base` that the modules of a package define, by their names.

    A member is a file of the package (`base.py` is none). A class without a name is a base of
    others.

    Args:
        package: the package's `__name__`, whose `__init__` is calling.
        base: the base of the family.
        first: names that come first, in this order, as messages list them; the others follow by
            file and line.
        name: the field or class constant that holds a class's name.
    """
    found: dict[str, type[T]] = {}
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        loaded = importlib.import_module(f"{package}.{module.name}")
        for cls in vars(loaded).values():
            here = inspect.isclass(cls) and cls.__module__ == loaded.__name__
            if here and issubclass(cls, base) and _name_of(cls, name):
                found[_name_of(cls, name)] = cls
    return {**{kind: found[kind] for kind in first}, **found}


def _name_of(cls: type, field: str) -> str:
    """What a class is named by: a constant, or the default of a field."""
    fields = getattr(cls, "model_fields", {})
    return fields[field].default if field in fields else getattr(cls, field, "")


def home(cls: object, bases: Mapping[str, type]) -> str | None:
    """The family that a class belongs to, the first of these whose base it is derived from, and is
    not itself; None: of none.
    """
    if not isinstance(cls, type):
        return None
    found = (name for name, base in bases.items() if issubclass(cls, base) and cls is not base)
    return next(found, None)


def validate(cls: type[M], section: str, values: Mapping[str, Any]) -> M:
    """`cls(**values)`, with pydantic's first complaint as a `ConfigError` on `section.key`."""
    if not isinstance(values, Mapping):
        raise ConfigError(section, values, "a mapping of keys to values")
    try:
        found = cls.model_validate(dict(values))
    except ValidationError as error:
        raise _complaint(cls, section, error) from None
    for name, value in values.items():
        # pydantic would take `yes` for 1
        if isinstance(value, bool) and not isinstance(getattr(found, name), bool):
            raise ConfigError(f"{section}.{name}".lstrip("."), value, "a number, not a truth value")
    return found


def choose(section: str, values: Any, family: Mapping[str, type[K]], base: type[K]) -> K:
    """The member that `values["kind"]` names, from `family` or by import path, validated.

    Raises `ConfigError` for an unknown kind, a module that cannot be imported, a class that is not
    a `base`, a field that the member refuses, or a class with methods or fields that nothing would
    read (see `raydpfl.own`).
    """
    if isinstance(values, base):
        return _named(section, values, family, base)
    if not isinstance(values, Mapping):
        known = isinstance(values, str) and values in family
        example = f", as in {section}.kind={values}" if known else ""
        raise ConfigError(section, values, f"a mapping with a kind{example}")
    kind = values.get("kind")
    accepted = (
        f"one of {', '.join(family)}, or the import path of your own class (package.module:Name)"
    )
    if not isinstance(kind, str) or not (kind in family or ":" in kind or "." in kind):
        raise ConfigError(f"{section}.kind", kind, accepted)
    if kind in family:
        return validate(family[kind], section, values)
    if not imports(section):
        return validate(_stand_in(base), section, values)
    return validate(own_class(kind, section, base), section, values)


def own_class(kind: str, section: str, base: type[K]) -> type[K]:
    """The class at an import path, a `base` with nothing in it that would not be looked at.

    Raises `ConfigError`.
    """
    cls = load(kind, f"{section}.kind")
    if not (isinstance(cls, type) and issubclass(cls, base) and cls is not base):
        raise ConfigError(
            f"{section}.kind",
            kind,
            f"a subclass of {base.__module__.removesuffix('.base')}.{base.__qualname__}",
        )
    if cls.model_fields["kind"].annotation is not str:
        accepted = "a class without a field kind of its own: the config's kind is its import path"
        raise ConfigError(f"{section}.kind", kind, accepted)
    own.check(cls, base, section, kind)
    return cls


def _named(section: str, values: K, family: Mapping[str, type[K]], base: type[K]) -> K:
    """A member that was made in Python, its `kind` what a config would name it by."""
    cls = type(values)
    named = family.get(values.kind) is cls or ":" in values.kind
    if named or values.unread() or not own.is_own(cls):
        return values
    path = f"{cls.__module__}:{cls.__qualname__}"
    own.check(cls, base, section, path)
    return values.model_copy(update={"kind": path})


def within(value: Any, section: str) -> Iterator[tuple[str, Member]]:
    """A member and those within it, with their sections."""
    if isinstance(value, Member):
        yield section, value
        for name in type(value).model_fields:
            yield from within(getattr(value, name), f"{section}.{name}")
    elif isinstance(value, tuple):
        for each in value:
            yield from within(each, section)


def fields_of(found: Any) -> dict[str, Any] | None:
    """The fields of a class of members, by name; None for what is none."""
    if isinstance(found, type) and issubclass(found, Member):
        return dict(found.model_fields)
    return None


def own_code(member: Member) -> dict[str, str | None]:
    """The digest of the source of each module that a class of this member, or of one in its fields,
    comes from.

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
    """The object at `package.module:Name` (or `package.module.Name`), which may be a class within a
    class. Nothing of it is called."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        *outer, last = name.split(".")
        for part in outer:
            found = getattr(found, part)
            if not isinstance(found, type):
                raise TypeError(f"{part} is no class")
        return getattr(found, last)
    except RAISED as error:  # a user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            field, path, f"an import path package.module:Name that can be imported ({reason})"
        ) from None


def _complaint(cls: type[BaseModel], section: str, error: ValidationError) -> ConfigError:
    errors = error.errors()
    first = errors[0]
    if isinstance(first.get("ctx", {}).get("error"), ConfigError):
        return first["ctx"]["error"]
    path = _path(cls, first["loc"])
    where = ".".join([section, *path] if section else path)
    if first["type"] == "extra_forbidden":
        return ConfigError(
            where, first["input"], f"no such key; the keys here are {', '.join(cls.model_fields)}"
        )
    if first["type"] == "missing":
        return ConfigError(where, None, "required")
    messages = [
        each["msg"].removeprefix("Value error, ").removeprefix("Input ")
        for each in errors
        if _path(cls, each["loc"]) == path
    ]
    said = " or ".join(messages).replace("a valid tuple", "a list")
    return ConfigError(where, first["input"], said.replace("a valid dictionary", "a mapping"))


def _path(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The keys of a pydantic location, without its names for the branches of a union."""
    return [
        str(part)
        for depth, part in enumerate(location)
        if depth == 0 or isinstance(part, int) or part in cls.model_fields
    ]
