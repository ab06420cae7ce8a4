"""What a study shows: its section `show`, a list of outputs, and the published tables they name.

An output is written `{KIND: OF, option: value, ...}`. The kinds are the files of
`raydpfl.report.figures`, which say what each takes: `curves` (a number of every round), `points`
(of the last round, over an axis), `table`, `values`, `cloud`, `trajectory`, `selection`, `norms`
and others. All take `only: {axis: [labels]}`, `title` and `note`, and figures `colour` and `facet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.report.figures import parse
from raydpfl.sweep.study import builtin


def check_outputs(given: Any, axes: Mapping[str, Sequence[str]]) -> None:
    """Raises `ConfigError` for what cannot be shown.

    Args:
        given: The section `show`.
        axes: All that outputs may name, each with its labels.

    Raises:
        ConfigError: For one that is of no kind, or has an option or names an axis or a label that
            is none.
    """
    if not isinstance(given, (list, tuple)):
        raise ConfigError("show", given, "a list of outputs")
    for place, each in enumerate(given):
        parse(each, f"show.{place}", axes)


def published(show: Iterable[Mapping[str, Any]], place: Path | None) -> dict[str, Path]:
    """The tables of published numbers that outputs name, by the name as it stands there: files
    beside the study or below, in a folder `published` there, or among those that come with the
    package.

    Raises `ConfigError` for one that is nowhere.
    """
    found: dict[str, Path] = {}
    folders = [place, place / "published"] if place else []
    for number, each in enumerate(show):
        name = each.get("published")
        if not name:
            continue
        tried = [folder / name for folder in (*folders, builtin.PUBLISHED)]
        path = next((path for path in tried if path.is_file()), None)
        if path is None or Path(name).is_absolute() or ".." in Path(name).parts:
            known = ", ".join(sorted(path.name for path in builtin.PUBLISHED.glob("*.csv")))
            expected = f"a file beside the study, or one of {known}"
            raise ConfigError(f"show.{number}.published", name, expected)
        found[name] = path
    return found
