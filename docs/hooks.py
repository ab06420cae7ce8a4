"""What of the site is made when it is built: the references of the config and of the command line,
from the classes and commands themselves, and a figure of a study.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

FIGURE = Path(__file__).parent.parent / "experiments/002/fig1/test_accuracy-by-round.svg"

INDENT = " " * 6


def config_page() -> str:
    """Every key of a config, as `raydpfl kinds` prints it."""
    from raydpfl.cli import kinds

    lines = ["# The config", "", "As `raydpfl kinds` prints it, from the classes themselves."]
    for family, members in groupby(kinds.list_references(), key=lambda each: each.family):
        lines += ["", f"## {family}"]
        for member in members:
            if member.kind:
                lines += ["", f"### {member.name}"]
            lines += ["", "```text", member.render(), "```"]
    return "\n".join(lines) + "\n"


def commands_page() -> str:
    """Every command with its arguments and options, as `--help` prints them."""
    import typer
    from typer.main import get_command

    from raydpfl.cli.app import app

    lines = ["# The command line", ""]
    for name, command in _commands(get_command(app)):
        about = " ".join((command.help or "").split())
        lines += [f"## {name}", "", about.replace("<", "&lt;"), ""]
        context = typer.Context(command, info_name=name)
        usage = command.get_usage(context)
        lines += ["```text", usage, *_parameters(command, context), "```", ""]
    return "\n".join(lines)


def _commands(group: Any, before: str = "raydpfl") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def _parameters(command: Any, context: Any) -> Iterator[str]:
    for each in command.params:
        name, about = each.get_help_record(context)
        yield f"  {name}"
        yield from textwrap.wrap(about, 80, initial_indent=INDENT, subsequent_indent=INDENT)


def on_files(files: Any, config: Any) -> Any:
    """Adds what is made here to the files of the site (a hook of MkDocs)."""
    from mkdocs.structure.files import File

    made = {"reference/config.md": config_page(), "reference/commands.md": commands_page()}
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "assets/fig1.svg", abs_src_path=str(FIGURE)))
    return files
