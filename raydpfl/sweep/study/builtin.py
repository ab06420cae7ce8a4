"""The studies that come with the package, by their paths and by other names."""

from functools import cache
from pathlib import Path
from typing import Any

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError

ROOT = Path(__file__).with_name("papers")
PUBLISHED = ROOT / "published"  # what the papers print, a table a file


def paths() -> dict[str, Path]:
    """The files, by id."""
    files = sorted(ROOT.glob("*/*.yaml"))
    return {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in files}


def header(path: Path) -> dict[str, Any]:
    """The section `study` of a file, as it stands there."""
    tree = read(path, "study")
    section = tree.get("study") if isinstance(tree, dict) else None
    return section if isinstance(section, dict) else {}


@cache
def _paths_by_name() -> dict[str, Path]:
    """The files, by id and by the other names that they answer to."""
    files = paths()
    return {n: path for path in files.values() for n in header(path).get("answers", ())} | files


def is_builtin(name: str) -> bool:
    """Whether a study has this id, or answers to this name."""
    return name in _paths_by_name()


def find(name: str) -> Path:
    """The file of the study that has this id, or answers to this name. Raises `ConfigError`."""
    if is_builtin(name):
        return _paths_by_name()[name]
    expected = f"the file of a study, or one of {', '.join(paths())} "
    expected += "(raydpfl reproduce --list says what each shows, and what else it answers to)"
    raise ConfigError("study", name, expected)


def several(name: str) -> list[str]:
    """The ids that a name stands for: `all`, or the folder of a paper; else the name alone."""
    return [path for path in paths() if name in ("all", path.partition("/")[0])] or [name]
