"""A process of the run that works for others, and which user-defined code runs in it."""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from raydpfl.core.prng import keyed_globals
from raydpfl.experiment import Experiment


def peak_rss_mb() -> float:
    """The largest resident set this process has had, in MB (10^6 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


class Progress:
    """The client in training; if shared, in a file of memory that others on this machine can read
    even when this process is stopped.
    """

    def __init__(self, shared: bool) -> None:
        self.path = ""
        self._client = np.zeros(1, np.int64)
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("raydpfl-progress")
            os.ftruncate(descriptor, self._client.nbytes)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._client = np.memmap(self.path, np.int64, "r+")
        self.at(-1)

    @property
    def client(self) -> int:
        return int(self._client[0])

    def at(self, client: int) -> None:
        """-1: none."""
        self._client[0] = client


class Process:
    """Base of what runs in a process of its own: `make` opens all that the work needs.

    In the process of the caller that is done at once. An actor's process starts without them, and
    `raydpfl.runtime.worker.ready` makes it: so a process may start before there is an experiment.
    """

    def __init__(self, experiment: Experiment | None = None, shards: str = ""):
        self.own = False  # whether code of the user's own takes part
        self.here = experiment is not None  # in the process of the caller
        self.progress = Progress(shared=not self.here)
        if experiment is not None:
            self.make(experiment, shards)
            self.check()

    def make(self, experiment: Experiment, shards: str) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Tries what could go wrong on this node alone. Raises `ConfigError`."""

    def keyed(self, seed: int, **key: int) -> AbstractContextManager[None]:
        """What code of the user's own draws within from the generators of the process is keyed."""
        return keyed_globals(seed, **key) if self.own else nullcontext()


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of within, which the log of an actor would keep to itself."""
    found: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("raydpfl")
    log.addHandler(listener)
    try:
        yield found
    finally:
        log.removeHandler(listener)


def own_code(experiment: Experiment) -> bool:
    """Whether code of the user's own takes part in what a client does."""
    e = experiment
    every = (e.local, e.bounding, e.model, e.evaluate.fine_tune, e.personal)
    return any(each is not None and each.is_user_defined for each in every)


def any_own(experiment: Experiment) -> bool:
    """Whether code of the user's own takes part in anything that a process of the run does."""
    e = experiment
    others = (e.noise, e.selection, e.data.task, *e.measure, *e.metrics)
    return own_code(e) or any(each.is_user_defined for each in others)
