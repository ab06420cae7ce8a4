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
USER_EXCEPTIONS = (Exception, SystemExit)
# Where code is installed, whose frames are not the user's.
_INSTALL_PATHS = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)

_USER_FILES: set[str] = set()  # of user-defined modules (`register_user_module`)


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
            value_text = repr(value)
        except Exception:  # more digits than Python prints, or values nested too deeply
            value_text = f"<{type(value).__name__} that cannot be shown>"
        value_text = value_text if len(value_text) <= 120 else value_text[:117] + "..."
        super().__init__(f"{field} = {value_text}: expected {' '.join(expected.split())}")

    def __reduce__(self):
        return ConfigError, (self.field, self.value, self.expected)


@contextmanager
def rename_fields(name: Callable[[str], str]) -> Iterator[None]:
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


def exit_message(error: SystemExit) -> str:
    """Where user-defined code called sys.exit, in words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"called sys.exit({error.code!r}) ({place.filename}, line {place.lineno})"


@contextmanager
def wrap_user_errors(run_part: str = "") -> Iterator[None]:
    """Turns what user-defined code raises within, SystemExit too, into a `RunError` that shows its
    frames first (`traceback_text`); `run_part` is the part of a run, in words. Errors of memory
    pass unchanged, and those of files that no user-defined module has raised (`is_user_error`).
    """
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code that the config names {exit_message(error)}") from None
    except (ConfigError, RunError, MemoryError):
        raise
    except Exception as error:
        if not (is_user_error(error) if isinstance(error, OSError) else frames_of_user(error)):
            raise
        raise RunError(traceback_text(error, run_part)) from error


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
        names_client = f"client {client} " in detail
        super().__init__(detail if names_client else f"client {client}: {detail}")

    def __reduce__(self):
        return ClientError, (self.client, self.detail)


class BudgetError(RunError):
    """The next round would exceed the privacy budget, or a client's guarantee does not hold."""


FRAMES_HEADING = "\nall frames:\n"  # in what `traceback_text` says, before them
DEBUG_HINT = "all frames: the same with --debug"


def _is_package_file(file: str) -> bool:
    return file.startswith(_INSTALL_PATHS[0])


def frames_of_user(error: BaseException) -> list[tuple[traceback.FrameSummary, str]]:
    """The frames of user-defined code that this package has called, through which an exception was
    raised, each with the name of its function (`Mine.factor`), the outermost first.
    """
    walk = traceback.walk_tb(error.__traceback__)
    frames = list(dropwhile(lambda pair: not _is_package_file(pair[0].f_code.co_filename), walk))
    names = [frame.f_code.co_qualname for frame, _ in frames]
    pairs = zip(traceback.StackSummary.extract(iter(frames)), names, strict=True)
    return [pair for pair in pairs if not pair[0].filename.startswith((*_INSTALL_PATHS, "<"))]


def register_user_module(module: str) -> None:
    """Registers a user-defined module, which a config names or has a class of."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file and not file.startswith(_INSTALL_PATHS):
        _USER_FILES.add(file)


def is_user_error(error: BaseException) -> bool:
    """Whether an exception was raised in a user-defined module (`register_user_module`), or in what
    that called, and not in this package.
    """
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost_files = takewhile(lambda file: not _is_package_file(file), reversed(files))
    return not _USER_FILES.isdisjoint(innermost_files)


def traceback_text(error: BaseException, run_part: str = "") -> str:
    """An exception and where it was raised, in several lines: the place in user-defined code, what
    was raised, the hook, then all frames; `run_part` is the part of a run, in words.
    """
    summary = "".join(traceback.format_exception_only(error)).strip()
    all_frames = FRAMES_HEADING + "".join(traceback.format_exception(error)).rstrip()
    user_frames = frames_of_user(error)
    if not user_frames:
        return f"{run_part} raised {summary}{all_frames}" if run_part else f"{summary}{all_frames}"
    (last_frame, _), *callers = reversed(user_frames)
    lines = [f"{last_frame.filename}:{last_frame.lineno}: {summary}", f"    {last_frame.line}"]
    for frame, name in callers:
        lines.append(f"  called by {frame.filename}:{frame.lineno}, in {name}")
        lines.append(f"    {frame.line}")
    lines.append(f"in {user_frames[0][1]}{f', {run_part}' if run_part else ''}")
    return "\n".join(lines) + all_frames


def brief_traceback(text: str) -> str:
    """What `traceback_text` said, without all frames."""
    short_text, heading, _ = text.partition(FRAMES_HEADING)
    return f"{short_text}\n{DEBUG_HINT}" if heading else short_text


def one_line(error: BaseException, max_length: int = 300) -> str:
    """An exception in one line of at most so many characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:max_length]


def message(error: BaseException, max_length: int = 300) -> str:
    """What an exception says, as `one_line`; its type where it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def located_message(error: BaseException) -> str:
    """An exception, and where it was raised in user-defined code, in one line."""
    summary = one_line(error, 200)
    user_frames = frames_of_user(error)
    if not user_frames:
        return summary
    last_frame, _ = user_frames[-1]
    return f"{summary}; {last_frame.filename}, line {last_frame.lineno}: {last_frame.line}"
