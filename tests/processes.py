"""Commands that tests start, as processes of their own."""

import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def run(
    command: list, timeout: float = 120, said: str = "", check: bool = False, **options: Any
) -> subprocess.CompletedProcess:
    """`subprocess.run` with the standard input `said`, and both outputs as text."""
    return subprocess.run(
        command, input=said, timeout=timeout, check=check, capture_output=True, text=True, **options
    )


def wait_for_rounds(rounds: int, out: Path, process: subprocess.Popen) -> None:
    """Until the run of a process has finished so many rounds, and has a checkpoint."""
    ledger = out / "ledger.jsonl"
    deadline = time.monotonic() + 180
    while True:
        finished = len(ledger.read_text().splitlines()) if ledger.exists() else 0
        if finished >= rounds and [*out.glob("checkpoints/round-*.npz")]:
            return
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.02)


def client_actors(at_work: bool = False) -> list[psutil.Process]:
    """The client actors of this process's Ray, or those of them that train."""
    title = "ray::ClientActor.train" if at_work else "ray::ClientActor"
    actors = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(title):
                actors.append(process)
    return actors


def none_left(processes: list[psutil.Process]) -> bool:
    """Whether all of them end within 20 seconds."""
    return not psutil.wait_procs(processes, timeout=20)[1]
