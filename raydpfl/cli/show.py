"""What a file asks for, before any of it is run (`raydpfl show`): an experiment complete, with all
defaults; a sweep with its settings, or a study with its cells, whether each can be run, and how
long that would take here.

The text is YAML: what is said besides stands in comments, so it is a config again. So does which
keys are at their defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydpfl.config import defaults
from raydpfl.config.yaml import dump, read
from raydpfl.errors import ConfigError
from raydpfl.experiment import DEFAULTS, Experiment, is_space, overridden

DIRECTORIES = ("config.yaml", "sweep.yaml", "study.yaml")


@dataclass(frozen=True)
class Outline:
    """`text` is what to print. `refused`: why the first setting that cannot be run cannot be."""

    text: str
    refused: ConfigError | None = None


def outline(
    asked: str, overrides: Sequence[str] = (), timed: bool = False, root: Path | None = None
) -> Outline:
    """What a file, a directory or the name of a study asks for.

    Nothing is imported that it names, unless it is `timed`.

    Args:
        asked: A YAML file, the directory of a run, a sweep or a study, or a study's name.
        overrides: As `section.key=value`; none for a study.
        timed: Prepares the data, puts the plan of every setting together, and times a round of each
            kind of run that was not timed here before.
        root: Where data sets lie.

    Raises:
        ConfigError: For what is no experiment, sweep or study.
    """
    imports = None if timed else ()
    path = _path(asked)
    given = read(path) if path else {}
    if path is None or (isinstance(given, Mapping) and "study" in given):
        return _study(asked, overrides, imports, timed, root)
    tree = overridden(given, overrides)
    if "sweep" in tree or _searched(tree):
        return _sweep(tree, imports, timed, root)
    return _experiment(tree, imports, timed, root)


def _path(asked: str) -> Path | None:
    """The file to read; None for what can only be the name of a study."""
    path = Path(asked)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None if _ships(asked) or not path.suffix else path
    except (OSError, ValueError):  # a name that no file has: who reads it says so
        return path
    if path.is_dir():
        found = [path / name for name in DIRECTORIES if (path / name).exists()]
        if not found and _ships(asked):
            return None
        return next(iter(found), path / DIRECTORIES[0])
    return path


def _ships(name: str) -> bool:
    from raydpfl.sweep.study import builtin

    return builtin.known(name)


def _searched(node: Mapping[str, Any]) -> bool:
    """Whether some field has a search space."""
    nodes = [value for value in node.values() if isinstance(value, Mapping)]
    return any(is_space(value) or _searched(value) for value in nodes)


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _unread(experiment: Experiment) -> list[str]:
    return [
        f"{section}: {path} was not imported, so its own defaults are not here."
        for section, path in experiment.unread.items()
    ]


def _experiment(
    tree: Mapping[str, Any], imports: Iterable[str] | None, timed: bool, root: Path | None
) -> Outline:
    experiment = Experiment.from_dict(tree, imports=imports)
    said = _unread(experiment)
    if timed:
        from raydpfl.sweep.estimate import measure

        said.append(f"That takes {measure([(experiment, 1)], root).words()}.")
    text = defaults.marked(experiment.to_yaml(), set(defaults.keys(experiment, tree, DEFAULTS)))
    return Outline(text + _comments(said))


def _sweep(
    tree: Mapping[str, Any], imports: Iterable[str] | None, timed: bool, root: Path | None
) -> Outline:
    from raydpfl.sweep import Sweep
    from raydpfl.sweep.dry_run import dry_run

    found = dry_run(Sweep.untried(tree, imports=imports), timed, root)
    unread = dict.fromkeys(line for each in found.made.values() for line in _unread(each))
    refused = next(iter(found.refused.values()), None)
    text = defaults.marked(dump(found.complete()), found.usual())
    return Outline(text + _comments([*unread, *found.lines()]), refused)


def _study(
    asked: str,
    overrides: Sequence[str],
    imports: tuple[str, ...] | None,
    timed: bool,
    root: Path | None,
) -> Outline:
    from raydpfl.sweep.study import Study
    from raydpfl.sweep.study.catalogue import plan
    from raydpfl.sweep.study.estimate import estimate, measure, runs

    if overrides:
        expected = "none for a study: change its file (raydpfl reproduce has --scale and --seeds)"
        raise ConfigError("override", overrides[0], expected)
    study = Study.named(asked, imports=imports)
    taken = measure(study, root) if timed else estimate(study)
    unread = dict.fromkeys(line for run, _ in runs(study) for line in _unread(run))
    return Outline(study.to_yaml() + _comments([*unread, *plan(study, taken).splitlines()]))
