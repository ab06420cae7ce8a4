"""The errors: what was asked for cannot be run (`ConfigError`), or a run failed (`RunError`).

>>> raise ConfigError("selection.cohort", 500, "at most the 300 clients of data.clients")
Traceback (most recent call last):
raydpfl.errors.ConfigError: selection.cohort = 500: at most the 300 clients of data.clients
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# What a user's own code may raise by mistake: sys.exit() in a module must not end a run.
RAISED = (Exception, SystemExit)
# Where code is installed: its frames say little to the author of a module of their own.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


class ConfigError(ValueError):
    """What was asked for cannot be run. Nothing has been started or written; exit code 2.

    Args:
        field: the dotted key of the config, or the name of a parameter.
        value: what was given.
        accepted: what would be right, in words.
    """

    def __init__(self, field: str, value: object, accepted: str):
        self.field = field
        self.value = value
        self.accepted = accepted
        shown = _shown(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(f"{field} = {shown}: {' '.join(accepted.split())}")

    def __reduce__(self):
        return ConfigError, (self.field, self.value, self.accepted)


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
        raise ConfigError(name(error.field), error.value, error.accepted) from None


class RunError(RuntimeError):
    """A run that had started cannot go on; exit code 1."""


class FileError(RunError):
    """A file of a run cannot be read or written; once it can, the run continues with `--resume`."""


def exited(error: SystemExit) -> str:
    """What a user's own code did when it raised this, and where, in words."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"called sys.exit({error.code!r}) ({place.filename}, line {place.lineno})"


@contextmanager
def contained() -> Iterator[None]:
    """Turns a SystemExit from within, which only a user's own code raises, into a `RunError`."""
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code that the config names {exited(error)}") from None


class DeviceError(RunError):
    """The device that trains could not; no client is to blame."""


class DeviceLost(DeviceError):
    """Nothing that a process asks of its device works any more: another process has to go on."""


class ClientError(RunError):
    """One client's part of a round failed.

    Args:
        client: its id in the population.
        detail: the reason, or the client's own traceback.
    """

    def __init__(self, client: int, detail: str):
        self.client = client
        self.detail = detail
        super().__init__(f"client {client}: {detail}")

    def __reduce__(self):
        return ClientError, (self.client, self.detail)


class BudgetError(RunError):
    """The next round would spend more than the run's privacy budget, or a client was promised more
    than holds.
    """


def told(error: BaseException) -> str:
    """An exception and where it was raised, in several lines: what was raised, the frames of the
    user's own code, then all frames.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<"))]
    what = "".join(traceback.format_exception_only(error)).rstrip()
    where = "".join(traceback.format_list(theirs))
    whole = "".join(traceback.format_exception(error)).rstrip()
    return f"{what}\n{where}all frames:\n{whole}"
