"""Commands of data sets: data list, fetch and describe."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Annotated

from raydpfl import storage
from raydpfl.cli import completion
from raydpfl.cli.experiment_reader import read, stored_code
from raydpfl.cli.options import DataRoot, Trust, argument, option, plain_console
from raydpfl.config.hints import nearest_key_hint
from raydpfl.errors import ConfigError

SOME = "Some of them, or import paths of your own classes."
FETCHED = "One whose place raydpfl data list names raydpfl data fetch."
DESCRIBED = "A config and fields to change; or data files, or a folder, and fields of data."
PICTURE = "A picture of the classes of each client: a file .svg, .png or .pdf."


def list_kinds(
    kinds: Annotated[list[str] | None, argument(SOME, "KIND", completion.data_kinds)] = None,
    data_root: DataRoot = None,
) -> None:
    """All kinds of data, and where each would be read from; with kinds, these alone."""
    from raydpfl import data

    console = plain_console()
    for row in data.catalogue(data_root, kinds or ()):
        line = f"{row['kind']:20} {' '.join(row['summary'].split())}  [{row['where']}]"
        if console.is_terminal:
            line = textwrap.fill(line, console.width, subsequent_indent=" " * 21)
        print(line)


def fetch(
    kind: Annotated[str, argument(FETCHED, "KIND", completion.data_kinds)],
    data_root: DataRoot = None,
) -> None:
    """Download a data set, unless it is there."""
    from raydpfl import data

    try:
        print(data.fetch(kind, data_root))
    except ConfigError as error:
        hint = "" if kind in data.FAMILY else nearest_key_hint(kind, data.FAMILY)
        raise ConfigError(error.field, error.value, f"{error.expected}{hint}") from None


def describe(
    files: Annotated[list[str], argument(DESCRIBED, "CONFIG|FILE... [KEY=VALUE]...")],
    out: Annotated[Path | None, option(PICTURE)] = None,
    data_root: DataRoot = None,
    trust_code: Trust = False,
) -> None:
    """What each client of a config gets, in numbers, and with --out as a picture; or what is
    understood of data files, as a config that trains on them. `data.y=NAME` and the like say what
    else to take.
    """
    from raydpfl import data

    config, *overrides = files
    if not _is_config(config):
        if out is not None:
            expected = "none without a config, such as data describe prints of these files"
            raise ConfigError("--out", str(out), expected)
        print(_suggested_config(files, data_root), end="")
        return
    if out is not None:
        from raydpfl.report import class_histogram

        class_histogram.check(out)
    with stored_code(config, trust_code):
        experiment = read("data describe", config, overrides, ("data",), trust_code)[0]
        validation = experiment.evaluate.held_out
        folder = data.prepare(experiment.data, experiment.seed, data_root, validation=validation)
        shards = data.Shards.open(folder)
        source_counts = experiment.data.counted(data_root)
    for name, value in {**shards.describe(), **source_counts}.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:g}" for key, number in value.items())
        print(f"{name}: {value}")
    if out is not None:
        counts = shards.class_counts()
        if not counts.shape[1]:
            raise ConfigError("--out", str(out), "none for data whose samples have no class each")
        class_histogram.write(out, counts, shards.target.names)
        print(f"Picture: {out}")


def _is_config(name: str) -> bool:
    """Whether a name is that of a config or of a run's directory, and not of data."""
    if storage.is_address(name):
        return True
    folder = Path(name)
    if folder.is_dir():
        return any((folder / name).exists() for name in ("config.yaml", "sweep.yaml"))
    return folder.suffix in (".yaml", ".yml") or ("=" in name and not folder.exists())


def _suggested_config(arguments: list[str], data_root: Path | None) -> str:
    """A config for data files, with what was understood of them as its comments."""
    from raydpfl import data
    from raydpfl.config.yaml import dump
    from raydpfl.experiment import Experiment, overridden

    files = [argument for argument in arguments if "=" not in argument or os.path.exists(argument)]
    changes = [argument for argument in arguments if argument not in files]
    tree = overridden({"data": {}}, changes)
    names = [name for name in tree if name != "data"]
    if names:
        raise ConfigError(names[0], tree[names[0]], "fields of data alone, as in data.y=price")
    suggestion = data.Suggestion(files, tree["data"], data_root)
    Experiment.from_dict(suggestion.tree)
    notes = [*suggestion.notes, *(f"warning: {warning}" for warning in suggestion.warnings)]
    return "".join(f"# {note}\n" for note in notes) + dump(suggestion.tree)
