"""The command line. Every command is a few lines over the Python API."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Annotated

import typer

from raydpfl.cli import exit_codes
from raydpfl.cli.commands import data, privacy, reference, report, run, search

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Differentially private federated learning, simulated on Ray. A config is code where it "
    "names an import path (kind: package.module:Name): run, sweep, reproduce, audit and submit "
    "import it. Run no config that you have not read. Commands that read a run directory (export, "
    "budget, data describe, audit) import what it names with --trust-code alone; report, compare "
    "and show import nothing, but for show --timed.",
)
COMMANDS: list[Callable[..., None]] = []
COMMANDS += [run.run, run.new, run.export, search.sweep, search.reproduce, run.submit]
COMMANDS += [reference.show, privacy.budget, privacy.audit, reference.check, reference.kinds]
COMMANDS += [report.report, report.compare]
for command in COMMANDS:
    app.command()(command)
datasets = typer.Typer(no_args_is_help=True, help="What there is to train on.")
app.add_typer(datasets, name="data")
datasets.command("list")(data.list_kinds)
datasets.command("fetch")(data.fetch)
datasets.command("describe")(data.describe)


def _version(flag: bool) -> None:
    if flag:
        import raydpfl

        print(f"raydpfl {raydpfl.__version__}")
        raise typer.Exit


def _show_frames(flag: bool) -> None:
    if flag:
        os.environ[exit_codes.DEBUG] = "1"


FRAMES = f"Show all frames of an error, as {exit_codes.DEBUG}=1 does; anywhere on the command line."
DEBUG = typer.Option("--debug", help=FRAMES, callback=_show_frames)
VERSION = typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)


@app.callback()
def _whole_command(
    version: Annotated[bool, VERSION] = False, debug: Annotated[bool, DEBUG] = False
) -> None:
    pass


def main() -> None:
    """The `raydpfl` command."""
    if "--debug" in sys.argv[2:]:
        sys.argv.remove("--debug")
        sys.argv.insert(1, "--debug")
    sys.path.insert(0, "")  # a user's own members are found where the command is run
    exit_codes.carry_out(partial(app, standalone_mode=False))
