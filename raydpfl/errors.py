"""The errors: what was asked for cannot be run (`ConfigError`), or a run failed (`RunError`).

>>> raise ConfigError("selection.cohort", 500, "at most the 300 clients of data.clients")
Traceback (most recent call last):
raydpfl.errors.ConfigError: selection.cohort = 500: expected at most the 300 clients of data.clients
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, takewhile
from pathlib import Path

# What a user's own code may raise by mistake: sys.exit() in a module must not end a run.
RAISED = (Exception, SystemExit)
# Where code is installed: its frames say little to the author of a module of their own.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)

_THEIRS: set[str] = set()  # the files of users' own modules, as far as they are known


class ConfigError(ValueError):
    """What was asked for cannot be run. Nothing has been started or written; exit code 2.

    Args:
        field: the dotted key of the config, or the name of a parameter.
        value: what was given.
        expected: what would be right, in words that follow "expected".
    """

    def __init__(self, field: str, value: object, expected: str):
        self.field = field
        self.value = value
        self.expected = expected
        shown = _shown(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{field} = {shown}: expected {' '.join(expected.split())}")

    def __reduce__(self):
        return ConfigError, (self.field, self.value, self.expected)


def _shown(value: object) -> str:
    try:
        return repr(value)
    # a number with more digits than Python prints, or values nested too deeply
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Raises a `ConfigError` from within again, with `name(field)` for its field. For callers that
    know where the value of a parameter came from.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(name(error.field), error.value, error.expected) from None


class RunError(RuntimeError):
    """A run that had started cannot go on; exit code 1."""


class FileError(RunError):
    """A file of a run cannot be read or written; once it can, the run continues with `--resume`."""


def exited(error: SystemExit) -> str:
    """What a user's own code did when it raised this, and where, in words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"called sys.exit({error.code!r}) ({place.filename}, line {place.lineno})"


@contextmanager
def contained(where: str = "") -> Iterator[None]:
    """Turns what user-defined code raises within, SystemExit too, into a `RunError` that shows its
    frames first (`traceback_text`). Errors of memory stay what they are, and those of files that no
    user-defined module has raised (`is_theirs`).

    Args:
        where: in which part of a run, in words.
    """
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code that the config names {exited(error)}") from None
    except (ConfigError, RunError, MemoryError):
        raise
    except Exception as error:
        if not (is_theirs(error) if isinstance(error, OSError) else frames_of_user(error)):
            raise
        raise RunError(traceback_text(error, where)) from error


class DeviceError(RunError):
    """The device that trains could not; no client is to blame."""


class DeviceLost(DeviceError):
    """Nothing that a process asks of its device works any more: another process has to go on."""


class ClientError(RunError):
    """One client's part of a round failed.

    Args:
        client: its id in the population.
        detail: the reason, or what was raised, which names the client itself.
    """

    def __init__(self, client: int, detail: str):
        self.client = client
        self.detail = detail
        named = f"client {client} " in detail
        super().__init__(detail if named else f"client {client}: {detail}")

    def __reduce__(self):
        return ClientError, (self.client, self.detail)


class BudgetError(RunError):
    """The next round would spend more than the run's privacy budget, or a client was promised more
    than holds.
    """


ALL = "\nall frames:\n"  # in what `traceback_text` says, before them
MORE = "all frames: the same with --debug"


def _ours(file: str) -> bool:
    return file.startswith(_INSTALLED[0])


def frames_of_user(error: BaseException) -> list[tuple[traceback.FrameSummary, str]]:
    """The frames of a user's own code that an exception was raised through, each with the name of
    its function (`Mine.factor`), the outermost first: of code that this package has called, and not
    of what called it.
    """
    every = traceback.walk_tb(error.__traceback__)
    walked = list(dropwhile(lambda each: not _ours(each[0].f_code.co_filename), every))
    named = [frame.f_code.co_qualname for frame, _ in walked]
    found = zip(traceback.StackSummary.extract(iter(walked)), named, strict=True)
    return [each for each in found if not each[0].filename.startswith((*_INSTALLED, "<"))]


def know(module: str) -> None:
    """Notes that a module is a user's own, which a config names or has a class of."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and not file.startswith(_INSTALLED):
        _THEIRS.add(file)


def is_theirs(error: BaseException) -> bool:
    """Whether an exception was raised in a module of the user's own (`know`), or in what that
    called, and not in this package.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    within = takewhile(lambda file: not _ours(file), reversed(files))
    return not _THEIRS.isdisjoint(within)


def traceback_text(error: BaseException, where: str = "") -> str:
    """An exception and where it was raised, in several lines: the place in the user's own code,
    what was raised, the hook that it was raised in, then all frames.

    Args:
        error: what was raised.
        where: in which part of a run, in words.
    """
    what = "".join(traceback.format_exception_only(error)).strip()
    whole = "".join(traceback.format_exception(error)).rstrip()
    theirs = frames_of_user(error)
    if not theirs:
        return f"{where} raised {what}{ALL}{whole}" if where else f"{what}{ALL}{whole}"
    (last, _), *before = reversed(theirs)
    lines = [f"{last.filename}:{last.lineno}: {what}", f"    {last.line}"]
    for frame, name in before:
        lines.append(f"  called by {frame.filename}:{frame.lineno}, in {name}")
        lines.append(f"    {frame.line}")
    lines.append(f"in {theirs[0][1]}{f', {where}' if where else ''}")
    return "\n".join(lines) + ALL + whole


def brief(text: str) -> str:
    """What `traceback_text` said, without all frames."""
    shown, more, _ = text.partition(ALL)
    return f"{shown}\n{MORE}" if more else shown


def in_line(error: BaseException) -> str:
    """An exception, and where it was raised in the user's own code, in one line."""
    what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    theirs = frames_of_user(error)
    if not theirs:
        return what
    last, _ = theirs[-1]
    return f"{what}; {last.filename}, line {last.lineno}: {last.line}"
