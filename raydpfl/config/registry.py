"""Members of families: the choices that make an algorithm, each a section of the config.

A family is a dictionary of the members in its package (`family`). A user-defined member is a class
with the same base, named by import path.
"""

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar, TypeGuard, TypeVar

from pydantic import BaseModel, ConfigDict

from raydpfl.config import hints, user_classes
from raydpfl.config.setting import Setting
from raydpfl.config.source_code import code_digest
from raydpfl.config.validation import M, validate
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message, register_user_module

Examples = tuple[dict[str, Any], ...]


class Section(BaseModel):
    """A part of a config: frozen and typed; it refuses other keys."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True
    )

    def import_paths(self) -> tuple[str, ...]:
        """The import paths that its fields name, next to its kind."""
        return ()


class Member(Section):
    """Base of all members. Its fields are the keys of its section in the config."""

    # settings worth running, each a mapping of fields: `raydpfl check` runs each of them
    examples: ClassVar[Examples] = ({},)
    file_fields: ClassVar[frozenset[str]] = frozenset()  # fields that name files
    added_fields: ClassVar[frozenset[str]] = frozenset()  # fields added later: see `meaning`

    kind: str = ""

    @property
    def accounted_with(self) -> tuple[str, ...]:
        """Sections, its own too, on which the privacy that a run spends depends by it."""
        return ()

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Registers the module of a user-defined class, which on an actor is not loaded by name."""
        super().__pydantic_init_subclass__(**options)
        if user_classes.is_user_defined(cls):
            register_user_module(cls.__module__)

    @property
    def is_user_defined(self) -> bool:
        """Whether this member's class is user-defined."""
        return user_classes.is_user_defined(type(self))

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for an experiment that this member cannot be part of.

        Called when the config has been read, before any data are. The `check` of each base is
        called too, the first base first, so a class need not call it.
        """

    def warnings(self, setting: Setting) -> tuple[str, ...]:
        """What readers of this experiment's results should know, in words."""
        return ()

    def files(self) -> dict[str, str]:
        """The files that this member names, by field (`file_fields`)."""
        values = {name: getattr(self, name) for name in sorted(self.file_fields)}
        return {name: value for name, value in values.items() if isinstance(value, str)}

    def meaning(self) -> dict[str, Any]:
        """Its section of the config in JSON types; the keys of noise and of prepared data are made
        of it. A field of `added_fields` is left out at its default: so older configs keep their
        bits.
        """
        section = self.model_dump(mode="json")
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name in self.added_fields and value == field.get_default(call_default_factory=True):
                del section[name]
            elif isinstance(value, Member):
                section[name] = value.meaning()
        return section

    @classmethod
    def is_placeholder(cls) -> bool:
        """Whether the class was not imported: its keys are as in the config, without defaults."""
        return cls.__name__ == "Unread"


def overrides(hook: Callable[..., Any]) -> property:
    """Of a base of a family: whether a member's class has another hook than this one.

    >>> class Base:
    ...     def send(self): return None
    ...     sends = overrides(send)
    >>> Base().sends, type("Mine", (Base,), {"send": None})().sends
    (False, True)
    """
    return property(lambda member: getattr(type(member), hook.__name__) is not hook)


K = TypeVar("K", bound="Member")
T = TypeVar("T")
SCALAR_TYPES = {bool, float, int, str, type(None)}  # of values in which there is no member
_IMPORTS: ContextVar[tuple[str, ...] | None] = ContextVar("imports", default=None)


@contextmanager
def allow_imports(sections: Iterable[str] | None) -> Iterator[None]:
    """Within it `choose` imports only what these sections of a config, and sections in them, name
    (None: all). Other import paths become placeholders (`Member.is_placeholder`), as an import runs
    code.
    """
    token = _IMPORTS.set(None if sections is None else tuple(sections))
    try:
        yield
    finally:
        _IMPORTS.reset(token)


def is_import_allowed(section: str) -> bool:
    """Whether what this section names may be imported here."""
    names = _IMPORTS.get()
    return names is None or any(f"{section}.".startswith(f"{name}.") for name in names)


def is_path(kind: object) -> TypeGuard[str]:
    """Whether a kind is an import path."""
    return isinstance(kind, str) and (":" in kind or "." in kind)


@functools.cache
def _stand_in(base: type[M]) -> type[M]:
    """A member of this family with any keys."""
    config = ConfigDict(frozen=True, extra="allow", allow_inf_nan=False)
    return type("Unread", (base,), {"model_config": config, "__module__": __name__})


def family(
    package: str, base: type[T], leading_kinds: Sequence[str] = (), name: str = "kind"
) -> dict[str, type[T]]:
    """The classes with this base that the modules of a package define, by name; a class without a
    name is a base of others.

    Args:
        package: the `__name__` of the package whose `__init__` is calling.
        base: the base of the family.
        leading_kinds: names in the order of messages; the others follow by file and line.
        name: the field, or class constant, that holds the name of a class.
    """
    members: dict[str, type[T]] = {}
    for info in pkgutil.iter_modules(sys.modules[package].__path__):
        module = importlib.import_module(f"{package}.{info.name}")
        for cls in vars(module).values():
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and issubclass(cls, base):
                field = getattr(cls, "model_fields", {}).get(name)
                if kind := field.default if field else getattr(cls, name, ""):
                    members[kind] = cls
    return {**{kind: members[kind] for kind in leading_kinds}, **members}


def choose(section: str, values: Any, family: Mapping[str, type[K]], base: type[K]) -> K:
    """The member that a section of the config names. Raises `ConfigError` for an unknown kind, for
    a class that cannot be imported or is refused (`user_class`), and for a field that is refused.

    Args:
        section: its name in the config, for messages.
        values: a mapping with a `kind`, which is in `family` or an import path, and the member's
            fields; or the member itself.
        family: the members that come with the project, by kind.
        base: the base of the family.
    """
    if isinstance(values, base):
        return _assign_kind(section, values, family, base)
    if not isinstance(values, Mapping):
        is_kind = isinstance(values, str) and values in family
        example = f", as in {section}.kind={values}" if is_kind else ""
        raise ConfigError(section, values, f"a mapping with a kind{example}")
    kind = values.get("kind")
    expected = f"one of {', '.join(family)}, or the import path of your own class "
    expected += "(package.module:Name)"
    if "kind" not in values:
        raise ConfigError(section, dict(values), f"a section with its kind, {expected}")
    if isinstance(kind, str) and kind in family:
        return validate(family[kind], section, values)
    if not is_path(kind):
        hint = hints.suggestion(kind, family) if isinstance(kind, str) else ""
        raise ConfigError(f"{section}.kind", kind, f"{expected}{hint}")
    cls = user_class(kind, section, base) if is_import_allowed(section) else _stand_in(base)
    return validate(cls, section, values)


def choose_members(
    section: str, values: Any, family: Mapping[str, type[K]], base: type[K]
) -> tuple[K, ...]:
    """As `choose`, of a list of kinds and mappings, each kind once."""
    if not isinstance(values, (list, tuple)):
        raise ConfigError(section, values, f"a list, of {', '.join(family)} or your own classes")
    fields = [{"kind": value} if isinstance(value, str) else value for value in values]
    members = tuple(choose(section, member_fields, family, base) for member_fields in fields)
    if len({member.kind for member in members}) < len(members):
        raise ConfigError(section, values, "a list that has each kind once")
    return members


def user_class(kind: str, section: str, base: type[K]) -> type[K]:
    """The class at an import path. Raises `ConfigError` where it cannot be imported, does not have
    this base, or has a method that cannot be used or is probably misspelt.
    """
    field = f"{section}.kind"
    cls = load(kind, field)
    if not (isinstance(cls, type) and issubclass(cls, base) and cls is not base):
        family = f"{base.__module__.removesuffix('.base')}.{base.__qualname__}"
        raise ConfigError(field, kind, f"a subclass of {family}")
    if cls.model_fields["kind"].annotation is not str:
        expected = "a class without a field kind of its own: the config's kind is its import path"
        raise ConfigError(field, kind, expected)
    user_classes.check(cls, base, section, kind)
    return cls


def _assign_kind(section: str, values: K, family: Mapping[str, type[K]], base: type[K]) -> K:
    """A member that was made in Python, with the `kind` by which a config would name it."""
    cls = type(values)
    has_config_kind = family.get(values.kind) is cls or ":" in values.kind
    if has_config_kind or values.is_placeholder() or not user_classes.is_user_defined(cls):
        return values
    path = f"{cls.__module__}:{cls.__qualname__}"
    user_classes.check(cls, base, section, path)
    return values.model_copy(update={"kind": path})


def iter_members(value: Any, section: str) -> Iterator[tuple[str, Member]]:
    """A member and those in its fields, each with its section; of a section those in its fields."""
    if isinstance(value, Member):
        yield section, value
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            part = getattr(value, name)
            if type(part) not in SCALAR_TYPES:  # of which there are most
                yield from iter_members(part, f"{section}.{name}")
    elif isinstance(value, tuple):
        for part in value:
            yield from iter_members(part, section)


def unimported_paths(value: Any) -> list[str]:
    """The import paths of a member or a section that was read without importing them."""
    members = [member for _, member in iter_members(value, "")]
    paths = [member.kind for member in members if member.is_placeholder()]
    is_section = isinstance(value, Section) and not isinstance(value, Member)
    sections = [*members, value] if is_section else members
    return paths + [path for section in sections for path in section.import_paths()]


def refuse_code(run: str | Path, paths: Iterable[str]) -> None:
    """Raises `ConfigError` where a run directory names code by these import paths."""
    names = ", ".join(dict.fromkeys(paths))
    if names:
        expected = f"the directory of a run that needs no import of {names}, which runs its code; "
        expected += "where you trust it: --trust-code (in Python trust_code=True)"
        raise ConfigError("run", str(run), expected)


def code_digests(member: Member) -> dict[str, str]:
    """The digest of each user-defined class of this member and of those in its fields."""
    return {
        f"{cls.__module__}:{cls.__qualname__}": code_digest(sys.modules.get(cls.__module__), cls)
        for _, part in iter_members(member, "")
        for cls in type(part).__mro__
        if issubclass(cls, Member) and user_classes.is_user_defined(cls)
    }


def load(path: str, field: str) -> Any:
    """The object at `package.module:Name` (or `package.module.Name`), which may be a class within a
    class; it is imported and not called. Raises `ConfigError`, on the `field` that names it.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        value: Any = importlib.import_module(module)
        register_user_module(module)
        *outer, last = name.split(".")
        for part in outer:
            value = getattr(value, part)
            if not isinstance(value, type):
                raise TypeError(f"{part} is no class")
        return getattr(value, last)
    except USER_EXCEPTIONS as error:  # a user's module may raise anything
        reason = located_message(error)
        expected = f"an import path package.module:Name that can be imported ({reason})"
        raise ConfigError(field, path, expected) from None
