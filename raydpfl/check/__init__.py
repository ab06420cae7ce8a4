"""Does a member keep the contract of its family, built in or your own?

`raydpfl check mine:Tanh` runs every example of a class through the contract of its family: bound
and sensitivity for hostile vectors, the same bits however a run is carried out, noise and draws by
the declared sampling schemes, the epsilon of what is released, config and checkpoint round trips.
For the members that come with the project, the tests do the same.

>>> clauses = check("bounding:clip")
>>> all(clause.kept for clause in clauses)
True
>>> [clause.name for clause in clauses][:4]
['example', 'fits', 'config round trip', 'refusals']
>>> check("nothing")
Traceback (most recent call last):
raydpfl.errors.ConfigError: member = 'nothing': expected a class by import path \
(package.module:Name), or a member as in bounding:clip

Clauses are functions of a case, in a file for each family. One that is looked at by statistics
raises a false alarm in at most one check of a million.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

from raydpfl.check import (
    accountants,
    bounding,
    claims,
    formulas,
    hidden_state,
    local,
    measure,
    members,
    metrics,
    models,
    noise,
    rounds,
    sampling,
    selection,
    server,
    sources,
    tasks,
    track,
    weights,
)
from raydpfl.check.claims import Claims
from raydpfl.check.contract import Clause, ClauseFunction, check_clause, clauses_of
from raydpfl.check.example import BASE_CONFIG, BASE_SECTIONS, BASE_SECTIONS_OF, SECTIONS, Example
from raydpfl.config import user_classes
from raydpfl.config.registry import load, user_class
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment, overridden
from raydpfl.models import Module, factory
from raydpfl.models.metrics import FAMILY as METRICS
from raydpfl.models.metrics import Metric
from raydpfl.privacy import Sampling
from raydpfl.privacy.accountants import ACCOUNTANTS, FORMULAS, Accountant, Formula
from raydpfl.privacy.sampling import SCHEMES, SamplingScheme

__all__ = ["Clause", "check", "members_of", "render"]

# The modules with the clauses of each family.
CONTRACT: dict[str, tuple[ModuleType, ...]] = {
    "bounding": (bounding, hidden_state),
    "local": (local, hidden_state),
    "noise": (noise,),
    "weights": (weights,),
    "server": (server,),
    "selection": (selection,),
    "measure": (measure,),
    "task": (tasks,),
    "model": (models, hidden_state),
    "data": (sources,),
    "track": (track,),
    "metric": (metrics,),
    "sampling": (sampling, claims),
    "accountant": (accountants, claims),
    "formula": (formulas,),
}
# The base of each family, and the members that come with the project, by kind.
FAMILIES: dict[str, tuple[type, Mapping[str, Any]]] = {
    **{section: (spec.base, spec.family or {}) for section, spec in SECTIONS.items()},
    "sampling": (SamplingScheme, {name: type(scheme) for name, scheme in SCHEMES.items()}),
    "formula": (Formula, {name: type(formula) for name, formula in FORMULAS.items()}),
    "accountant": (
        Accountant,
        {name: type(member) for name, member in ACCOUNTANTS.items() if name not in FORMULAS},
    ),
    "metric": (Metric, METRICS),
}
ACCEPTED = "a class by import path (package.module:Name), or a member as in bounding:clip"


def check(
    target: str | type,
    overrides: Sequence[str] = (),
    on_clause: Callable[[Clause], object] = lambda clause: None,
) -> list[Clause]:
    """Looks at every clause, for every example of a member. Raises `ConfigError` for what is no
    member of any family, or has no valid examples.

    Args:
        target: the import path of your own class (`mine:Tanh`), a member that comes with the
            project (`bounding:clip`, or `clip`), or a class.
        overrides: fields of the small experiment around it, `section.key=value`. Those of the
            member's own section change its examples.
        on_clause: is given each as soon as it is known.
    """
    section, cls, path = resolve_member(target)
    clauses: list[Clause] = []
    for clause, case, example in _clause_cases(section, cls, path, tuple(overrides)):
        verdict = check_clause(clause, case, example)
        if verdict is not None:
            clauses.append(verdict)
            on_clause(verdict)
    return clauses


def members_of() -> Iterator[str]:
    """All members that come with the project, as `check` takes them."""
    for section, (_, family) in FAMILIES.items():
        for kind, cls in family.items():
            # sources that need no file of the user's have examples of their own
            if section != "data" or vars(cls).get("examples"):
                yield f"{section}:{kind}"


def resolve_member(target: str | type) -> tuple[str, type, str]:
    """The family of a member, its class, and what a config names it by. Raises `ConfigError`."""
    cls = target
    path = ""
    if isinstance(target, str):
        built_in = _built_in(target)
        if built_in:
            return built_in
        if ":" not in target and "." not in target:
            raise ConfigError("member", target, ACCEPTED)
        path = target
        cls = load(target, "member")
    if isinstance(cls, FunctionType) or (isinstance(cls, type) and issubclass(cls, nn.Module)):
        path = path or f"{cls.__module__}:{cls.__qualname__}"
        factory(path)
        return "model", Module, path
    bases = {name: base for name, (base, _) in FAMILIES.items()}
    section = ""
    if isinstance(cls, type):
        names = (name for name, base in bases.items() if issubclass(cls, base) and cls is not base)
        section = next(names, "")
    if not section:
        paths = [f"{one.__module__.removesuffix('.base')}.{one.__name__}" for one in bases.values()]
        expected = f"a class derived from one of {', '.join(paths)}"
        raise ConfigError("member", path or repr(cls), expected)
    assert isinstance(cls, type)
    base, family = FAMILIES[section]
    for kind, other in family.items():
        if other is cls:
            return section, cls, kind
    path = path or f"{cls.__module__}:{cls.__qualname__}"
    if section in SECTIONS:
        member_class: type = user_class(path, section, base)
        user_classes.check_required_methods(member_class, section, path)
    return section, cls, path


def _built_in(name: str) -> tuple[str, type, str] | None:
    """A member by `family:kind`, `family.kind`, or by its kind alone."""
    *parts, kind = re.split("[.:]", name)
    families = {section: family for section, (_, family) in FAMILIES.items()}
    sections = [".".join(parts)] if parts else families
    matches = [section for section in sections if kind in families.get(section, {})]
    if len(matches) > 1:
        raise ConfigError("member", name, " or ".join(f"{section}:{name}" for section in matches))
    return (matches[0], families[matches[0]][kind], kind) if matches else None


def _clause_cases(
    section: str, cls: Any, path: str, overrides: tuple[str, ...]
) -> Iterator[tuple[ClauseFunction, Any, str]]:
    """Every clause, the case that it is looked at in, and the case in words."""
    modules = CONTRACT[section]
    cases: list[tuple[Any, Mapping[str, Any]]]
    if section in SECTIONS:
        modules = (members, *modules, *([] if section == "track" else [rounds]))
        cases = [(case, case.fields) for case in _examples(section, cls, path, overrides)]
    elif overrides:
        expected = f"none: no experiment is around {path}"
        raise ConfigError("overrides", list(overrides), expected)
    elif section == "sampling":
        cases = [(Claims((Sampling(cls(), **numbers),)), numbers) for numbers in cls.examples]
    elif section == "metric":
        cases = [(metrics.MetricCase({"kind": path, **fields}), fields) for fields in cls.examples]
    elif section == "accountant":
        cases = [(Claims(accountants.SAMPLINGS, (cls(),)), {})]
    else:
        cases = [(cls(), {})]
    for case, fields in cases:
        settings = ", ".join(f"{name}={value}" for name, value in fields.items())
        yield from ((clause, case, settings) for clause in clauses_of(*modules))


def _examples(section: str, cls: Any, path: str, overrides: tuple[str, ...]) -> list[Example]:
    """The examples of a member, each valid, in the experiments around it. Raises `ConfigError`."""
    own_overrides = [text for text in overrides if text.startswith(f"{section}.")]
    outer_overrides = tuple(text for text in overrides if text not in own_overrides)
    _check_overrides(outer_overrides, section)
    expected = "a class variable examples, a tuple of mappings of fields, each a setting worth "
    expected += "running: examples: ClassVar = ({'bound': 1.0},)"
    if not isinstance(cls.examples, (tuple, list)) or not cls.examples:
        raise ConfigError(f"{section}.kind", path, f"a class with {expected}")
    if not all(isinstance(fields, Mapping) for fields in cls.examples):
        raise ConfigError(f"{section}.examples", cls.examples, expected)
    examples = [{"kind": path, **fields} for fields in cls.examples]
    cases = [
        Example(section, overridden({section: example}, own_overrides)[section], outer_overrides)
        for example in examples
    ]
    for case in cases:
        try:
            case.first_state  # noqa: B018 - of the member, which is made
        except ConfigError as error:
            expected = f"settings of {path} in its class variable examples, each valid; {error}"
            raise ConfigError(f"{section}.examples", case.fields, expected) from None
    return cases


def _check_overrides(overrides: tuple[str, ...], section: str) -> None:
    """Raises `ConfigError` for overrides that no experiment takes."""
    first_error = None
    for sections in BASE_SECTIONS_OF.get(section, BASE_SECTIONS):
        try:
            Experiment.from_dict(overridden({**BASE_CONFIG, **sections}, overrides))
            return
        except ConfigError as error:
            first_error = first_error or error
    assert first_error is not None
    raise first_error


def render(clauses: Sequence[Clause], columns: int = 1 << 20) -> str:
    """A table of the clauses, one a line, under each example. Findings are wrapped at words."""
    width = max(len(clause.name) for clause in clauses)
    words = {True: "kept", False: "BROKEN", None: "not tried"}
    pad = max(6, *(len(words[clause.kept]) for clause in clauses))
    indent = " " * (6 + pad + width)
    lines = []
    for example, group in groupby(clauses, lambda clause: clause.example):
        lines.append(f"{example or 'no fields set'}:")
        for clause in group:
            line = f"  {words[clause.kept]:{pad}}  {clause.name:{width}}  {clause.finding}"
            lines += [
                textwrap.fill(t, columns, subsequent_indent=indent) for t in line.splitlines()
            ]
    verdict_counts = Counter(clause.kept for clause in clauses)
    untried_note = f", {verdict_counts[None]} not tried" if verdict_counts[None] else ""
    lines.append(f"{verdict_counts[True]} of {len(clauses)} clauses are kept{untried_note}")
    return "\n".join(lines)
