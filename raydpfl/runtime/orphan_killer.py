"""What is left of a Ray when the process that started it is gone: found by a mark in the
environment, and killed.

As a program, it waits for the end of its standard input, which its parent holds open for as long as
it lives: so that a parent that was itself killed with SIGKILL leaves no process behind. Of Ray's
own, agents outlive that by a minute, and stopped ones stay for good.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time

import psutil

MARK = "RAYDPFL_STARTED_BY"
PATIENCE = 10.0  # seconds in which all marked processes are to be gone


def marked(mark: str) -> list[psutil.Process]:
    """The processes, this one apart, whose environment has this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def reap(mark: str) -> None:
    """Kills all marked processes, and those that they have started meanwhile."""
    until = time.monotonic() + PATIENCE
    found = marked(mark)
    while found and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=0.5)
        found = marked(mark)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    reap(sys.argv[1])
