"""What a study shows: its section `show`, a list of outputs, and the published tables they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.study import shipped

KINDS = ("curves", "table", "points", "cloud", "trajectory", "selection", "values")
OPTIONS = (
    "x",
    "y",
    "colour",
    "facet",
    "rows",
    "columns",
    "published",
    "best",
    "against",
    "only",
    "title",
    "note",
)


def check_outputs(given: Any) -> list[dict[str, Any]]:
    """The outputs. Raises `ConfigError` for one that is of no kind, or has an option of none."""
    if not isinstance(given, list):
        raise ConfigError("show", given, "a list of outputs")
    for place, each in enumerate(given):
        where = f"show.{place}"
        kinds = [kind for kind in KINDS if isinstance(each, Mapping) and kind in each]
        if len(kinds) != 1:
            raise ConfigError(where, each, f"a mapping with one of {', '.join(KINDS)}")
        unknown = [key for key in each if key not in (*KINDS, *OPTIONS)]
        if unknown:
            accepted = f"no such option; they are {', '.join(OPTIONS)}"
            raise ConfigError(f"{where}.{unknown[0]}", each[unknown[0]], accepted)
    return [dict(each) for each in given]


def published(show: Iterable[Mapping[str, Any]], place: Path | None) -> dict[str, Path]:
    """The tables of published numbers that outputs name, by name: files beside the study, in a
    folder `published` there, or among those that come with the package.

    Raises `ConfigError` for one that is nowhere.
    """
    found: dict[str, Path] = {}
    folders = [place, place / "published"] if place else []
    for number, each in enumerate(show):
        name = each.get("published")
        if isinstance(name, Mapping):  # the file, and how its columns are read
            name = name.get("file", name)
        if name is None:
            continue
        tried = [folder / str(name) for folder in (*folders, shipped.PUBLISHED)]
        path = next((path for path in tried if path.is_file()), None)
        if path is None:
            known = ", ".join(sorted(path.name for path in shipped.PUBLISHED.glob("*.csv")))
            accepted = f"a file beside the study, or one of {known}"
            raise ConfigError(f"show.{number}.published", name, accepted)
        found[Path(str(name)).name] = path
    return found
