"""Kills what is left of a Ray when the process that started it is gone: all processes that have a
mark in their environment.

As a program, it waits for the end of its standard input, which its parent holds open for as long as
it lives: so a parent that was itself killed with SIGKILL leaves no process behind. Of Ray's own,
agents outlive that by a minute, and stopped ones stay for good.
"""

import os
import sys
import time
from contextlib import suppress

import psutil

MARK = "RAYDPFL_STARTED_BY"
PATIENCE = 10.0  # seconds in which all marked processes are to be gone


def marked_processes(mark: str) -> list[psutil.Process]:
    """The other processes whose environment has this mark."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                processes.append(process)
    return processes


def kill(mark: str) -> None:
    """Kills all marked processes, and those that they have started meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while (processes := marked_processes(mark)) and time.monotonic() < deadline:
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=0.5)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill(sys.argv[1])
