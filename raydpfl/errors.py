"""The two ways a run can go wrong, told apart by whose fault it is.

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

# What code of a user's own may raise that is an error in it: sys.exit() in a module ends no run of
# ours.
RAISED = (Exception, SystemExit)
# Of whose frames whoever wrote a module of their own learns little.
_INSTALLED = (
    str(Path(__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)


class ConfigError(ValueError):
    """What was asked for cannot be run. Nothing has been started or written; exit code 2.

    `field` is the dotted key of the config, `value` what was given, `accepted` what would be right.
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
    # a number with more digits than Python prints, values within values beyond counting
    except Exception:
        return f"<{type(value).__name__} that cannot be shown>"


@contextmanager
def renamed(name: Callable[[str], str]) -> Iterator[None]:
    """A `ConfigError` within is raised with `name(field)` for its field: by whoever knows what a
    function's parameter is called where its value came from.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(name(error.field), error.value, error.accepted) from None


class RunError(RuntimeError):
    """A run that had started could not go on; exit code 1."""


class FileError(RunError):
    """A file of a run that cannot be read or written; once it can be, the run goes on with
    `--resume`.
    """


def exited(error: SystemExit) -> str:
    """What code of a user's own did when it raised this, and where."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"called sys.exit({error.code!r}) ({place.filename}, line {place.lineno})"


@contextmanager
def contained() -> Iterator[None]:
    """A SystemExit within, which only code of a user's own raises, is a `RunError`."""
    try:
        yield
    except SystemExit as error:
        raise RunError(f"code that the config names {exited(error)}") from None


class ClientError(RunError):
    """One client's share of a round failed: its id, and what happened there.

    `client` is the client's id in the population, `detail` the reason or the client's own
    traceback.
    """

    def __init__(self, client: int, detail: str):
        self.client = client
        self.detail = detail
        super().__init__(f"client {client}: {detail}")

    def __reduce__(self):
        return ClientError, (self.client, self.detail)


class BudgetError(RunError):
    """The next round would spend more than the privacy budget of the run."""


def told(error: BaseException) -> str:
    """An exception and where it was raised: the frames of the user's own code first, then all.

    Several lines, of which the first says what was raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*_INSTALLED, "<"))]
    what = "".join(traceback.format_exception_only(error)).rstrip()
    where = "".join(traceback.format_list(theirs))
    whole = "".join(traceback.format_exception(error)).rstrip()
    return f"{what}\n{where}all frames:\n{whole}"
