"""Commands that say what a config can be and is: show, check, kinds."""

from __future__ import annotations

import difflib
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from raydpfl import storage
from raydpfl.cli import completion
from raydpfl.cli.experiment_reader import read_config
from raydpfl.cli.options import DataRoot, Json, Overrides, argument, option, print_json
from raydpfl.errors import ConfigError, RunError

SHOWN = "A YAML file, the directory of a run, a sweep or a study, or the name of a study."
TIMED = (
    "Prepare the data, put every setting together with them, and time a round of each kind of run. "
    "The import paths in CONFIG are then code that runs."
)


def show(
    config: Annotated[str, argument(SHOWN, "CONFIG")],
    overrides: Overrides = None,
    timed: Annotated[bool, typer.Option("--timed", help=TIMED)] = False,
    data_root: DataRoot = None,
) -> None:
    """Print a config complete, with each default marked as one; own members are not imported and
    stand as written. Of a sweep or a study also what it would run, whether each of it can be, and
    how long it takes.
    """
    from raydpfl.cli.preview import MARK, preview

    with read_config(config) as place:
        target = str(place) if storage.is_address(config) else config
        file_preview = preview(target, overrides or (), timed, data_root)
    console = Console(soft_wrap=True)
    for line in file_preview.text.splitlines():
        console.print(Text(line, style="dim" if line.endswith(MARK) else ""))
    if file_preview.refused:
        raise file_preview.refused


CHECKED = (
    "A class by import path (mine:Tanh), or a member that comes with the project (bounding:clip). "
    "An import path is code that runs."
)
AROUND = "Fields of the small experiment around it, or of the member's own section."


def check(
    member: Annotated[str, argument(CHECKED, "MEMBER", completion.members)],
    overrides: Annotated[list[str] | None, argument(AROUND, "KEY=VALUE")] = None,
    as_json: Json = False,
) -> None:
    """Whether a member keeps the contract of its family, with each of its examples. Exit code 1:
    one is broken.
    """
    from raydpfl import check as contract

    try:
        clauses = contract.check(member, overrides or ())
    except ConfigError as error:
        family, _, kind = member.partition(":")
        kinds = contract.FAMILIES.get(family, (None, {}))[1]
        if error.field != "member" or kind in kinds or not kinds:
            raise
        names = difflib.get_close_matches(kind, kinds, len(kinds), 0)  # the nearest first
        expected = f"{error.expected}; kinds of {family}: {', '.join(names)}"
        raise ConfigError("member", member, expected) from None
    if as_json:
        print_json([asdict(clause) for clause in clauses])
    else:
        console = Console()
        print(contract.render(clauses, *[console.width] * console.is_terminal))
    breach = next((clause for clause in clauses if clause.kept is False), None)
    if breach is not None:
        example = f" ({breach.example})" if breach.example else ""
        raise RunError(f"{member} breaks {breach.name}{example}. {breach.finding}")


NAMED = "A section of the config (bounding, data.partition, ...), or one of its kinds."


def kinds(
    name: Annotated[str | None, argument(NAMED, "FAMILY[.KIND]", completion.kinds)] = None,
    as_json: Json = False,
    schema: Annotated[bool, option("Print the JSON Schema of a config, for editors.")] = False,
) -> None:
    """Every choice that a config has: its keys, their types, bounds, defaults and units, and the
    paper that it is of. Of own classes `raydpfl check` says more.
    """
    from raydpfl.cli import kinds as reference

    if schema:
        if name:
            raise ConfigError("--schema", True, f"no {name} next to it: it is of a whole config")
        print_json(reference.config_schema())
    elif as_json:
        print_json([asdict(kind) for kind in reference.list_references(name)])
    else:
        print(reference.render(reference.list_references(name)))
