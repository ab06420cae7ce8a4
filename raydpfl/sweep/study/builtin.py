"""The studies that come with the package: files found by looking, known by their paths and by the
other names that they answer to.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError

ROOT = Path(__file__).with_name("papers")
PUBLISHED = ROOT / "published"  # what the papers print, a table a file


def paths() -> dict[str, Path]:
    """The files, by id."""
    found = sorted(ROOT.glob("*/*.yaml"))
    return {path.relative_to(ROOT).with_suffix("").as_posix(): path for path in found}


def header(path: Path) -> dict[str, Any]:
    """The section `study` of a file, as it stands there."""
    tree = read(path, "study")
    section = tree.get("study") if isinstance(tree, dict) else None
    return section if isinstance(section, dict) else {}


def known(name: str) -> bool:
    """Whether a study has this id, or answers to this name."""
    return _path(name) is not None


def _path(name: str) -> Path | None:
    files = paths()
    answering = (path for path in files.values() if name in _answers(path))
    return files.get(name) or next(answering, None)


@cache
def _answers(path: Path) -> tuple[str, ...]:
    """The other names of a study that comes with the package, whose file does not change."""
    return tuple(header(path).get("answers", ()))


def find(name: str) -> Path:
    """The file of the study that has this id, or answers to this name. Raises `ConfigError`."""
    path = _path(name)
    if path is not None:
        return path
    files = paths()
    expected = (
        f"the file of a study, or one of {', '.join(files)} "
        "(raydpfl reproduce --list says what each shows, and what else it answers to)"
    )
    raise ConfigError("study", name, expected)


def several(name: str) -> list[str]:
    """The ids that a name stands for: `all`, or the folder of a paper; else the name alone."""
    ids = [*paths()]
    if name == "all":
        return ids
    return [each for each in ids if each.partition("/")[0] == name] or [name]
