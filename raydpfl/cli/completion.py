"""What a shell completes of the words after `raydpfl`: kinds, members and studies. Commands and
options typer completes, and files the shell itself.

The kinds come from the classes (`raydpfl.cli.kinds`), which takes seconds to import, so their names
are kept in the cache.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import raydpfl
from raydpfl.storage.files import cache_root, keep_json, read_own_json


def kinds(incomplete: str) -> list[str]:
    """For `raydpfl kinds`: families, and the members of one once no other is meant."""
    family_kinds = kinds_by_family()
    names = _matches(family_kinds, incomplete)
    for family in family_kinds:
        if names == [family] or incomplete.startswith(family):
            names += [f"{family}.{kind}" for kind in family_kinds[family]]
    return _matches(names, incomplete)


def members(incomplete: str) -> list[str]:
    """For `raydpfl check`: the members that come with the project, as `family:kind`."""
    names = [f"{family}:{kind}" for family, kinds in kinds_by_family().items() for kind in kinds]
    return _matches(names, incomplete)


def data_kinds(incomplete: str) -> list[str]:
    """For `raydpfl data`: the data sets that come with the project."""
    return _matches(kinds_by_family()["data"], incomplete)


def studies(incomplete: str) -> list[str]:
    """For `raydpfl reproduce`: the studies that come with the project, and their papers."""
    paths = (Path(raydpfl.__file__).parent / "sweep" / "study" / "papers").glob("*/*.yaml")
    ids = sorted(f"{path.parent.name}/{path.stem}" for path in paths)
    papers = dict.fromkeys(study_id.partition("/")[0] for study_id in ids)
    return _matches((*papers, *ids, "all"), incomplete)


def completer(words: Iterable[str]) -> Callable[[str], list[str]]:
    """What completes one of these words."""
    return lambda incomplete: _matches(words, incomplete)


def _matches(words: Iterable[str], incomplete: str) -> list[str]:
    """Those of the words that begin with what is there."""
    return [word for word in words if word.startswith(incomplete)]


def kinds_by_family() -> dict[str, list[str]]:
    """The kinds of each family, none of a section without kinds; from the cache, or the classes."""
    path = cache_root() / "completion" / f"{_code_version()}.json"
    try:
        return read_own_json(path)
    except (OSError, ValueError):
        family_kinds = _import_kinds()
        keep_json(path, family_kinds)
        return family_kinds


def _code_version() -> str:
    """Another one whenever the code is another."""
    folder = Path(raydpfl.__file__).parent
    times = [os.stat(path).st_mtime_ns for path in folder.rglob("*.py")]
    return f"{raydpfl.__version__}-{len(times)}-{max(times)}"


def _import_kinds() -> dict[str, list[str]]:
    from raydpfl.cli.kinds import list_references

    family_kinds: dict[str, list[str]] = {}
    for reference in list_references():
        kinds = family_kinds.setdefault(reference.family, [])
        kinds += filter(None, [reference.kind])
    return family_kinds
