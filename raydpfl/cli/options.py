"""Options and arguments that several commands have, and how they print.

>>> whole_number("1e3")
1000
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raydpfl.cli import completion
from raydpfl.errors import ConfigError


def option(text: str = "", panel: str | None = None, words: tuple[str, ...] = ()) -> Any:
    """An option. `words`: what a shell completes."""
    complete = completion.completer(words) if words else None
    return typer.Option(help=text, rich_help_panel=panel, autocompletion=complete)


def directory(text: str) -> Any:
    """An option for a directory to write, or its address."""
    return typer.Option(help=text, callback=_check_directory)


def _check_directory(name: str | None) -> str | None:
    if name and name.lower().startswith("memory:"):
        raise ConfigError("--out", name, "a path, or an address that outlasts the command")
    return name


def argument(text: str, metavar: str, complete: Callable[..., list[str]] | None = None) -> Any:
    return typer.Argument(help=text, metavar=metavar, autocompletion=complete)


def count(text: str = "", panel: str | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, parser=whole_number, metavar="<int>")


def whole_number(number: str | int) -> int:
    """A whole number, which may be written as 1e3 too; a default is one already."""
    text = str(number)
    try:
        value = float(text)
        return int(value) if value.is_integer() and not text.strip("+-").isdigit() else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


READ = "A YAML file, or the directory of a run. The import paths in it are code that runs."
CHANGES = "Fields to change, each section.key=value: rounds=50, bounding.bound=0.5."
AGAIN = "Go on with what is in --out, or in the directory that is named."
TRUSTED = "Import the code that a run directory names, which runs it; else such a run is refused."
Config = Annotated[str, argument(READ, "CONFIG")]
Overrides = Annotated[list[str] | None, argument(CHANGES, "KEY=VALUE")]
DataRoot = Annotated[Path | None, option("Where data sets lie; default: $RAYDPFL_DATA.")]
Address = Annotated[str | None, option("A running Ray cluster to join; auto finds the local one.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Resume = Annotated[bool, typer.Option("--resume", help=AGAIN)]
Trust = Annotated[bool, typer.Option("--trust-code", help=TRUSTED)]


def plain_console(quiet: bool = False) -> Console:
    """Lines are wrapped at words on a terminal, and whole in a file."""
    return Console(quiet=quiet, highlight=False, soft_wrap=not sys.stdout.isatty())


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, allow_nan=False))
