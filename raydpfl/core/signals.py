"""Ctrl-C and SIGTERM, from the first instruction of a command to its last.

A signal raises KeyboardInterrupt at once, or inside `defer_signals` is only noted
(`is_stop_requested`); a second one always raises. What is raised inside a library may be lost there
(in a callback, in a destructor, while Ray starts), so it is noted too: `check`, called between one
step and the next, raises it once more.

>>> with handle_signals(), defer_signals():
...     signal.raise_signal(signal.SIGTERM)
...     is_stop_requested()
True
>>> is_stop_requested()
False
"""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("raydpfl")
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _State:
    """Of this process: whether handlers are ours, a signal came, and may wait."""

    installed = asked = deferring = False


def _handle(number: int, *_: Any) -> None:
    if number == signal.SIGTERM:
        # while Ray starts, another handler stands before this one, and has the process abort
        # in 3 s
        signal.alarm(0)
    if _State.asked or not _State.deferring:
        _State.asked = True
        raise KeyboardInterrupt
    _State.asked = True
    log.warning("stopping after this round; Ctrl-C again stops at once")


@contextmanager
def handle_signals() -> Iterator[None]:
    """Takes both signals until it is left. Does nothing within itself, or in another thread than
    the main one.
    """
    if _State.installed or threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.getsignal(number) for number in SIGNALS}
    _State.installed = True
    install()
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        _State.installed = _State.asked = False


def install() -> None:
    """Puts the handlers in their place again, after a library (Ray) has put others there."""
    if _State.installed and threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, _handle)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Within it a first signal raises nothing and is noted (`is_stop_requested`)."""
    was_deferring = _State.deferring
    _State.deferring = True
    try:
        yield
    finally:
        _State.deferring = was_deferring


@contextmanager
def time_limit(seconds: float | None, error: BaseException) -> Iterator[None]:
    """Raises `error` within, after so many seconds, even where it sleeps. Does nothing without
    seconds, or in another thread than the main one.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_error(*_: Any) -> None:
        raise error

    old_handler = signal.signal(signal.SIGALRM, raise_error)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def is_stop_requested() -> bool:
    """Whether a signal has come since `handle_signals` was entered."""
    return _State.asked


def check() -> None:
    """Raises KeyboardInterrupt if a signal has come, though it was raised before and lost."""
    if _State.asked:
        raise KeyboardInterrupt
