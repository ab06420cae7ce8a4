"""Commands that tests start, as processes of their own."""

import subprocess
from typing import Any


def run(
    command: list, timeout: float = 120, said: str = "", check: bool = False, **options: Any
) -> subprocess.CompletedProcess:
    """`subprocess.run` with the standard input `said`, and both outputs as text."""
    return subprocess.run(
        command,
        input=said,
        timeout=timeout,
        check=check,
        capture_output=True,
        text=True,
        **options,
    )
