"""The errors: what was asked for cannot be run (`ConfigError`), or a run failed (`RunError`).

>>> raise ConfigError("selection.cohort", 500, "at most the 300 clients of data.clients")
Traceback (most recent call last):
raydpfl.errors.ConfigError: selection.cohort = 500: expected at most the 300 clients of data.clients
"""

import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import dropwhile, takewhile
from pathlib import Path

# What user-defined code may raise by mistake: sys.exit() in a module must not end a run.
RAISED = (Exception, SystemExit)
# Where code is installed, whose frames are not the user's.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)

_THEIRS: set[str] = set()  # the files of user-defined modules, as registered by `know`


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
        try:
            shown = repr(value)
        except Exception:  # more digits than Python prints, or values nested too deeply
            shown = f"<{type(value).__name__} that cannot be shown>"
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{field} = {shown}: expected {' '.join(expected.split())}")

    def __reduce__(self):
        return ConfigError, (self.field, self.value, self.expected)


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """Raises a `ConfigError` from within with `name(field)` for its field: for callers that know
    where the value of a parameter came from.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(name(error.field), error.value, error.expected) from None


class RunError(RuntimeError):
    """A run that had started cannot continue; exit code 1."""


class FileError(RunError):
    """A file of a run cannot be read or written; once it can, the run continues with `--resume`."""


def exited(error: SystemExit) -> str:
    """Where user-defined code called sys.exit, in words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"called sys.exit({error.code!r}) ({place.filename}, line {place.lineno})"


@contextmanager
def contained(where: str = "") -> Iterator[None]:
    """Turns what user-defined code raises within, SystemExit too, into a `RunError` that shows its
    frames first (`traceback_text`); `where` is the part of a run, in words. Errors of memory pass
    unchanged, and those of files that no user-defined module has raised (`is_theirs`).
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
    """The device that trains failed; no client is to blame."""


class DeviceLost(DeviceError):
    """A process can no longer use its device: another process has to continue."""


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
    """The next round would exceed the privacy budget, or a client's guarantee does not hold."""


ALL = "\nall frames:\n"  # in what `traceback_text` says, before them
MORE = "all frames: the same with --debug"


def _ours(file: str) -> bool:
    return file.startswith(_INSTALLED[0])


def frames_of_user(error: BaseException) -> list[tuple[traceback.FrameSummary, str]]:
    """The frames of user-defined code that this package has called, through which an exception was
    raised, each with the name of its function (`Mine.factor`), the outermost first.
    """
    frames = traceback.walk_tb(error.__traceback__)
    walked = list(dropwhile(lambda frame: not _ours(frame[0].f_code.co_filename), frames))
    names = [frame.f_code.co_qualname for frame, _ in walked]
    named = zip(traceback.StackSummary.extract(iter(walked)), names, strict=True)
    return [pair for pair in named if not pair[0].filename.startswith((*_INSTALLED, "<"))]


def know(module: str) -> None:
    """Registers a user-defined module, which a config names or has a class of."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and not file.startswith(_INSTALLED):
        _THEIRS.add(file)


def is_theirs(error: BaseException) -> bool:
    """Whether an exception was raised in a user-defined module (`know`), or in what that called,
    and not in this package.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    within = takewhile(lambda file: not _ours(file), reversed(files))
    return not _THEIRS.isdisjoint(within)


def traceback_text(error: BaseException, where: str = "") -> str:
    """An exception and where it was raised, in several lines: the place in user-defined code, what
    was raised, the hook, then all frames; `where` is the part of a run, in words.
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


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception in one line of at most so many characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def message(error: BaseException, most: int = 300) -> str:
    """What an exception says, as `one_line`; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def in_line(error: BaseException) -> str:
    """An exception, and where it was raised in user-defined code, in one line."""
    what = one_line(error, 200)
    theirs = frames_of_user(error)
    if not theirs:
        return what
    last, _ = theirs[-1]
    return f"{what}; {last.filename}, line {last.lineno}: {last.line}"
