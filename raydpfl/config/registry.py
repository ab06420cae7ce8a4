"""Members of families. A member is one of the choices that make an algorithm, and has its own
section in the config.

A family is a dictionary of the members that come with the project, found by looking into its
package (`family`). A user's own member is a class with the same base, named by import path; nothing
has to be changed here:

>>> class Scale(Member):
...     kind: str = "scale"
...     bound: float = 1.0
>>> choose("bounding", {"kind": "scale", "bound": 2}, {"scale": Scale}, Member)
Scale(kind='scale', bound=2.0)
>>> choose("bounding", {"kind": "scale", "bond": 2}, {"scale": Scale}, Member)  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: bounding.bond = 2: expected one of the keys ...; nearest: bound
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
from typing import Any, ClassVar, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict

from raydpfl.config import hints, user_classes
from raydpfl.config.setting import Setting
from raydpfl.config.validation import M, validate
from raydpfl.errors import RAISED, ConfigError, in_line, know
from raydpfl.storage.files import digest


class Section(BaseModel):
    """A part of a config: frozen and typed; it refuses other keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )


class Member(Section):
    """Base of all members. Its fields are the keys of its section in the config.

    `examples` are settings worth running, each a mapping of fields. `raydpfl check` runs each of
    them, a user's own too.
    """

    # other sections that the privacy it spends depends on
    accounted_with: ClassVar[tuple[str, ...]] = ()
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    named: ClassVar[frozenset[str]] = frozenset()  # fields that name files
    # fields that there were not always: see `meaning`
    newer: ClassVar[frozenset[str]] = frozenset()

    kind: str = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Notes whose a class is: on an actor it comes with the experiment, and is not loaded."""
        super().__pydantic_init_subclass__(**options)
        if user_classes.is_user_defined(cls):
            know(cls.__module__)

    @property
    def is_user_defined(self) -> bool:
        """Whether this member's class is a user's own."""
        return user_classes.is_user_defined(type(self))

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for an experiment that this member cannot be part of.

        It is called when the config has been read, before any data are. Only the member itself
        knows the combinations that it refuses. The `check` of each base is called too, the first
        base first, so a class need not call it.
        """

    def warnings(self, setting: Setting) -> tuple[str, ...]:
        """What readers of this experiment's results should know, in words."""
        return ()

    def files(self) -> dict[str, str]:
        """The files that this member names, by field (`named`)."""
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
        """Whether this stands for a class that was not imported: its keys are as in the config,
        without defaults."""
        return cls.__name__ == "Unread"


K = TypeVar("K", bound="Member")
PLAIN = {bool, float, int, str, type(None)}  # of values in which there is no member
T = TypeVar("T")
_IMPORTS: ContextVar[tuple[str, ...] | None] = ContextVar("imports", default=None)


@contextmanager
def importing(sections: Iterable[str] | None) -> Iterator[None]:
    """Within it `choose` imports only what these sections of a config, and sections in them, name.
    Other import paths become members that are `unread`. An import runs code, which a question about
    a config need not do.

    Args:
        sections: their names; None: all.
    """
    token = _IMPORTS.set(None if sections is None else tuple(sections))
    try:
        yield
    finally:
        _IMPORTS.reset(token)


def is_path(kind: object) -> TypeGuard[str]:
    """Whether a kind is an import path."""
    return isinstance(kind, str) and (":" in kind or "." in kind)


def imports(section: str) -> bool:
    """Whether what this section names may be imported here."""
    allowed = _IMPORTS.get()
    if allowed is None:
        return True
    return any(section == name or section.startswith(f"{name}.") for name in allowed)


@functools.cache
def _stand_in(base: type[M]) -> type[M]:
    """A member of this family with any keys."""
    config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    return type("Unread", (base,), {"model_config": config, "__module__": __name__})


def family(
    package: str, base: type[T], first: Sequence[str] = (), name: str = "kind"
) -> dict[str, type[T]]:
    """The classes with this base that the modules of a package define, by name.

    A class without a name is a base of others.

    Args:
        package: the `__name__` of the package whose `__init__` is calling.
        base: the base of the family.
        first: names that come first, in this order, as messages list them; the others follow by
            file and line.
        name: the field, or class constant, that holds the name of a class.
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
    """The name of a class: a constant, or the default of a field."""
    fields = getattr(cls, "model_fields", {})
    return fields[field].default if field in fields else getattr(cls, field, "")


def home(cls: object, bases: Mapping[str, type]) -> str | None:
    """The family that a class belongs to: the first of these with a base that it is derived from
    (and is not itself); None: of none.

    Args:
        cls: a class, or anything else.
        bases: the base of each family, by the family's name.
    """
    if not isinstance(cls, type):
        return None
    found = (name for name, base in bases.items() if issubclass(cls, base) and cls is not base)
    return next(found, None)


def choose(section: str, values: Any, family: Mapping[str, type[K]], base: type[K]) -> K:
    """The member that a section of the config names.

    Args:
        section: its name in the config, for messages.
        values: a mapping with a `kind`, which is in `family` or an import path, and the member's
            fields; or the member itself.
        family: the members that come with the project, by kind.
        base: the base of the family.

    Raises:
        ConfigError: the kind is unknown, its module cannot be imported, its class does not have
            this base, the member refuses a field, or the class has a method that cannot be used or
            is probably misspelt (`raydpfl.config.user_classes`).
    """
    if isinstance(values, base):
        return _named(section, values, family, base)
    if not isinstance(values, Mapping):
        known = isinstance(values, str) and values in family
        example = f", as in {section}.kind={values}" if known else ""
        raise ConfigError(section, values, f"a mapping with a kind{example}")
    kind = values.get("kind")
    expected = (
        f"one of {', '.join(family)}, or the import path of your own class (package.module:Name)"
    )
    if "kind" not in values:
        raise ConfigError(section, dict(values), f"a section with its kind, {expected}")
    if not isinstance(kind, str) or not (kind in family or is_path(kind)):
        near = hints.said(kind, family) if isinstance(kind, str) else ""
        raise ConfigError(f"{section}.kind", kind, f"{expected}{near}")
    if kind in family:
        return validate(family[kind], section, values)
    if not imports(section):
        return validate(_stand_in(base), section, values)
    return validate(own_class(kind, section, base), section, values)


def own_class(kind: str, section: str, base: type[K]) -> type[K]:
    """The class at an import path.

    Raises:
        ConfigError: it cannot be imported, does not have this base, or has what cannot be used.
    """
    cls = load(kind, f"{section}.kind")
    if not (isinstance(cls, type) and issubclass(cls, base) and cls is not base):
        raise ConfigError(
            f"{section}.kind",
            kind,
            f"a subclass of {base.__module__.removesuffix('.base')}.{base.__qualname__}",
        )
    if cls.model_fields["kind"].annotation is not str:
        expected = "a class without a field kind of its own: the config's kind is its import path"
        raise ConfigError(f"{section}.kind", kind, expected)
    user_classes.check(cls, base, section, kind)
    return cls


def _named(section: str, values: K, family: Mapping[str, type[K]], base: type[K]) -> K:
    """A member that was made in Python, with the `kind` by which a config would name it."""
    cls = type(values)
    named = family.get(values.kind) is cls or ":" in values.kind
    if named or values.unread() or not user_classes.is_user_defined(cls):
        return values
    path = f"{cls.__module__}:{cls.__qualname__}"
    user_classes.check(cls, base, section, path)
    return values.model_copy(update={"kind": path})


def within(value: Any, section: str) -> Iterator[tuple[str, Member]]:
    """A member and those in its fields, each with its section; of a section those in its fields."""
    if isinstance(value, Member):
        yield section, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            part = getattr(value, name)
            if type(part) not in PLAIN:  # of which there are most
                yield from within(part, f"{section}.{name}")
    elif isinstance(value, tuple):
        for each in value:
            yield from within(each, section)


def unread(value: Any) -> list[str]:
    """The import paths that a member, a section or an experiment names and that were not
    imported."""
    return [member.kind for _, member in within(value, "") if member.unread()]


def refuse_code(run: str | Path, paths: Iterable[str]) -> None:
    """Raises `ConfigError` where a run directory names code by these import paths, which would be
    imported to answer.
    """
    names = ", ".join(dict.fromkeys(paths))
    if names:
        expected = f"the directory of a run that needs no import of {names}, which runs its code; "
        expected += "where you trust it: --trust-code (in Python trust_code=True)"
        raise ConfigError("run", str(run), expected)


def fields_of(found: Any) -> dict[str, Any] | None:
    """The fields of a class of members, by name; None for anything else."""
    if isinstance(found, type) and issubclass(found, Member):
        return dict(found.model_fields)
    return None


def own_code(member: Member) -> dict[str, str | None]:
    """The user's own modules that the classes of this member, and of those in its fields, come
    from.

    Returns:
        The digest of each module's source, by the module's name; None for a module without a file.
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
    class. It is imported and not called.

    Args:
        path: the import path.
        field: what names it, for the message.

    Raises:
        ConfigError: it cannot be imported.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found: Any = importlib.import_module(module)
        know(module)
        *outer, last = name.split(".")
        for part in outer:
            found = getattr(found, part)
            if not isinstance(found, type):
                raise TypeError(f"{part} is no class")
        return getattr(found, last)
    except RAISED as error:  # a user's module may raise anything
        expected = f"an import path package.module:Name that can be imported ({in_line(error)})"
        raise ConfigError(field, path, expected) from None
