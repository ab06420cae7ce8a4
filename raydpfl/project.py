"""A project of one's own to begin with (`raydpfl new`): a method, its test, a config that runs it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     [path.name for path in make(f"{folder}/mine")]
['README.md', 'experiment.yaml', 'mine.py', 'test_mine.py']
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from raydpfl.errors import ConfigError

TEMPLATE = resources.files("raydpfl") / "template"
CODE = ".txt"  # what the names of code end in there, as it is none of the package


def make(folder: str | Path) -> list[Path]:
    """Writes a project into a directory.

    Args:
        folder: a new directory, or one that is empty.

    Returns:
        Its files.

    Raises:
        ConfigError: there is something in it, or it cannot be written to.
    """
    place = Path(folder)
    try:
        if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError("DIR", str(folder), "a new directory, or one that is empty")
        place.mkdir(parents=True, exist_ok=True)
        found = []
        for source in sorted(TEMPLATE.iterdir(), key=lambda each: each.name):
            path = place / source.name.removesuffix(CODE)
            path.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
            found.append(path)
    except OSError as error:
        accepted = f"a directory that can be written to ({error.strerror})"
        raise ConfigError("DIR", str(folder), accepted) from None
    return found
