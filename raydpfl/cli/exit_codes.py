"""How a command ends: 0 done, 1 a run that failed midway, 2 something asked for that cannot be run
(one line, no traceback), 130 Ctrl-C.
"""

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer

from raydpfl import errors
from raydpfl.core import signals

DEBUG = "RAYDPFL_DEBUG"  # in the environment: errors show all frames


class _CurrentCommand:
    """What this process carries out, if it can be resumed, and its directory, once known."""

    command = ""
    folder: Path | str | None = None


@contextmanager
def resumable(folder: Path | str | None, command: str = "run") -> Iterator[None]:
    """Within it an interrupt says how to go on with what is in `folder`."""
    _CurrentCommand.command = command
    _CurrentCommand.folder = folder
    yield
    _CurrentCommand.command = ""


def interrupt_message(error: str = "") -> str:
    """What is said of an interrupt, by which something may have failed."""
    message = f"interrupted ({error})" if error else "interrupted"
    command, folder = _CurrentCommand.command, _CurrentCommand.folder
    if not command:
        return message
    if folder is None:
        return f"{message}; what had begun goes on with --resume"
    is_local = "://" not in str(folder)
    if is_local and not (os.path.isdir(folder) and os.listdir(folder)):
        return f"{message} before its first round was done; nothing is left of it"
    return f"{message}; go on with: raydpfl {command} {shlex.quote(str(folder))} --resume"


def carry_out(command: Callable[[], object]) -> None:
    """Does what the command line asks for, and exits with its code unless that is 0."""
    _CurrentCommand.command = ""
    # Both signals ask to stop, also where SIGINT was ignored at the start, which Python alone would
    # leave ignored: a script's `raydpfl ... &`, CI, a batch system before its time limit.
    with signals.handle_signals():
        message, code = "", 0
        try:
            if command() == 130:  # how typer passes Ctrl-C on
                raise KeyboardInterrupt
        except BaseException as error:
            if os.environ.get(DEBUG) and not isinstance(error, SystemExit):
                traceback.print_exception(error)
            ending = _ending(error)
            if ending is None:
                raise
            message, code = ending
        # what came of it may have been another error, or none
        if signals.is_stop_requested() and code != 130:
            message, code = interrupt_message(message), 130
    if code:
        fail(message, code)


# What ends a command, the exit code, and what is said of it; the first that fits.
ENDINGS: tuple[tuple[type[BaseException], int, Callable[[BaseException], str]], ...] = (
    (errors.ConfigError, 2, str),
    (errors.RunError, 1, str),
    (MemoryError, 1, lambda error: f"not enough memory: {error}"),  # numpy says how much
    (RecursionError, 1, lambda error: "values within values, deeper than Python goes"),
    # of files that no run is to blame for: no room, no right, no disk
    (OSError, 1, lambda error: " ".join(str(error).split()) or type(error).__name__),
    (KeyboardInterrupt, 130, lambda error: interrupt_message()),
    (typer.Abort, 130, lambda error: interrupt_message()),
)


def _ending(error: BaseException) -> tuple[str, int] | None:
    """What to say of an error, and the exit code; None for a defect, or what has been said."""
    for kind, code, say in ENDINGS:
        if isinstance(error, kind):
            return say(error), code
    if isinstance(error, SystemExit):
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if not error.code and Path(place).is_relative_to(Path(typer.__file__).parent):
            return "", 0  # typer has completed a command for a shell
        silent = isinstance(error, Failed) or isinstance(error.__context__, BrokenPipeError)
        return None if silent else (f"code that the config names {errors.exit_message(error)}", 1)
    if isinstance(error, Exception) and errors.frames_of_user(error):
        return errors.traceback_text(error), 1
    if not isinstance(error, Exception):  # of a kind that nothing but a user's own module has
        error_text = " ".join(f"{type(error).__name__}: {error}".split())
        return f"code that the config names raised {error_text}", 1
    if signals.is_stop_requested():
        return interrupt_message(), 130
    if hasattr(error, "format_message"):  # what typer says of an unusable command line
        return error.format_message() or "a command is missing", 2
    return None


class Failed(SystemExit):
    """The end of the command, said by `fail` and not by some module that a config names."""


def fail(message: str, code: int) -> NoReturn:
    """Prints why a command failed, and exits."""
    text = message if os.environ.get(DEBUG) else errors.brief_traceback(message)
    print(f"raydpfl: {text}", file=sys.stderr)
    raise Failed(code)
