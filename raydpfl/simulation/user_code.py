"""User-defined code in a run: where it takes part, what it does as a digest, and the source that a
run directory keeps (`raydpfl.config.source_code`).
"""

import importlib
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from raydpfl import storage
from raydpfl.config.registry import Section, is_path
from raydpfl.config.source_code import (
    SHIPPED_PACKAGES,
    code_digest,
    is_installed,
    module_files,
    module_place,
    parse,
)
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import Experiment
from raydpfl.storage.run_files import make_folder, replace_file

log = logging.getLogger("raydpfl")
CODE_FOLDER = "code"  # the folder of a run directory with its user-defined modules


def trains_user_code(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in what a client does."""
    members = (experiment.local, experiment.bounding, experiment.model)
    personal = (experiment.evaluate.fine_tune, experiment.personal)
    return any(member.is_user_defined for member in (*members, *filter(None, personal)))


def runs_user_code(experiment: Experiment) -> bool:
    """Whether user-defined code takes part in anything that a process of the run does."""
    members = (experiment.noise, experiment.selection, experiment.data.task)
    run_members = (*members, *experiment.measure, *experiment.metrics)
    return trains_user_code(experiment) or any(member.is_user_defined for member in run_members)


# --- what it does ---


def sources(experiment: BaseModel) -> dict[str, str]:
    """Digests of the user-defined code that the experiment names (`code_digest`), by "code
    MODULE:NAME".
    """
    members = _user_members(experiment)
    return dict(sorted((f"code {name}", code_digest(*code)) for name, *code in members))


def check_code(host: str, expected: Mapping[str, str], experiment: BaseModel) -> None:
    """Raises `RunError` if user-defined code, as imported on `host`, is not the run's."""
    run_digests = {name: digest for name, digest in expected.items() if name.startswith("code ")}
    node_digests = sources(experiment) if run_digests else {}
    mismatches = [name for name, digest in run_digests.items() if node_digests.get(name) != digest]
    if mismatches:
        problem = f"node {host} has other source than the run for {', '.join(mismatches)}"
        raise RunError(f"{problem}; every node must see the same modules")


def _user_members(node: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """(name, module, class or function) of every user-defined member and model kind."""
    if isinstance(node, BaseModel):
        cls = type(node)
        if cls.__module__.partition(".")[0] in SHIPPED_PACKAGES:
            yield from _imported_kind(getattr(node, "kind", None))
        else:
            yield f"{cls.__module__}:{cls.__qualname__}", sys.modules.get(cls.__module__), cls
        for path in node.import_paths() if isinstance(node, Section) else ():
            yield from _imported_kind(path)
        for name in cls.model_fields:
            yield from _user_members(getattr(node, name))
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _user_members(child)


def _imported_kind(kind: Any) -> Iterator[tuple[str, ModuleType | None, Any]]:
    """As `_user_members`, of what a kind names by import path."""
    if is_path(kind):
        path, _, member = kind.partition(":") if ":" in kind else kind.rpartition(".")
        module = None if path.partition(".")[0] in SHIPPED_PACKAGES else sys.modules.get(path)
        if module is not None:
            yield kind, module, getattr(module, re.split("[:.]", member)[-1], None)


# --- what a run keeps of it ---


def store_code(experiments: Iterable[BaseModel], folder: Path, fresh: bool = False) -> None:
    """Writes the user-defined modules that the experiments name or import, but for what is
    installed, to `code/` in a run directory; `fresh`: over those that are stored there.
    """
    members = (member for experiment in experiments for member in _user_members(experiment))
    for module in {member[1].__name__: member[1] for member in members if member[1]}.values():
        files = module_files(module)
        if module.__name__ not in files or is_installed(files[module.__name__]):
            continue
        for name, file in files.items():
            folders = name.split(".")[: None if file.stem == "__init__" else -1]
            place = folder.joinpath(CODE_FOLDER, *folders, file.name)
            if not is_installed(file) and (fresh or not place.exists()):
                make_folder(place.parent)
                replace_file(place, methodcaller("write", file.read_bytes()))


@contextmanager
def stored_code(run: str | Path, prefer_stored: bool = False) -> Iterator[Path | None]:
    """Within, the user-defined modules of the directory of a run (or its address) are imported
    where there are no others of their names; if `prefer_stored` also where others differ, with a
    warning. Raises `ConfigError` where another user can write them, or one that differs has been
    imported.
    """
    prefix = f"{CODE_FOLDER}/"
    with storage.readable_folder(run, "config", lambda name: name.startswith(prefix)) as folder:
        place = Path(os.path.abspath(folder / CODE_FOLDER))
        if not os.path.isdir(place):  # False for a name that no file can have
            yield None
            return
        _check_private([place, *place.rglob("*")])
        for cache in [*place.rglob("__pycache__")]:  # what is run is what can be read
            shutil.rmtree(cache, ignore_errors=True)
        differing_files = differing_modules(place)
        if not differing_files:
            yield None
            return
        if prefer_stored:
            _warn(differing_files, place)
        sys.path.insert(0 if prefer_stored else len(sys.path), str(place))
        importlib.invalidate_caches()
        try:
            yield place
        finally:
            sys.path.remove(str(place))


def search(path: Sequence[str]) -> None:
    """Takes on another process's `sys.path`, with what a run stores first if it is there."""
    run_entries = [entry for entry in path[:1] if os.path.basename(entry) == CODE_FOLDER]
    sys.path[:] = dict.fromkeys([*run_entries, *sys.path, *path])


def _check_private(paths: Sequence[Path]) -> None:
    """Raises `ConfigError` for a link, and for what another user owns or anyone can write."""
    for path in paths:
        status = path.lstat()
        if status.st_uid != os.geteuid() or stat.S_ISLNK(status.st_mode) or status.st_mode & 0o002:
            expected = "stored code that is yours, that not everyone can write, and no link; "
            raise ConfigError("code", str(path), f"{expected}read it, then take a copy of it")


def differing_modules(place: Path) -> dict[str, tuple[Path, Path | None]]:
    """By module, stored files found nowhere else with the same statements; what is there."""
    differing_files = {}
    for path in sorted(path for path in place.rglob("[!.]*") if path.is_file()):
        parts = path.relative_to(place).parts
        name = ".".join(parts[:-1])
        if path.stem != "__init__":
            name = ".".join((*parts[:-1], path.name.partition(".")[0]))
        source = module_place(name)
        if source is None or not source.is_file() or parse(source)[0] != parse(path)[0]:
            differing_files[name] = (path, source)
    return differing_files


def _warn(differing_files: Mapping[str, tuple[Path, Path | None]], place: Path) -> None:
    """Warns of modules that differ here; `ConfigError` for one that is imported."""
    for name in differing_files.keys() & sys.modules.keys():
        path, source = differing_files[name]
        expected = f"a process that has not imported another {name} ({source})"
        raise ConfigError("code", str(path), expected)
    differ = ", ".join(str(source) for _, source in differing_files.values() if source)
    if differ:
        message = "%s differs from what the run began with, stored in %s: that is used; "
        log.warning(message + "of a run, --fresh-noise would take the new code", differ, place)
