"""The directory of a sweep or a study: who may write to it, and what a kill has left there.

Its config is `KIND.yaml`, whose last line, `...`, tells a whole file from one that was cut.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from raydpfl.config.yaml import read
from raydpfl.errors import ConfigError, FileError
from raydpfl.runtime.runner import alone
from raydpfl.storage.files import LOCK, read_text

BUSY = 10.0  # seconds that what another one has started may take to let go of its directory
Stored = TypeVar("Stored")


@dataclass(frozen=True)
class Directory:
    """`kind` is "sweep" or "study", `outputs` what is written there besides the trials."""

    folder: Path
    kind: str
    outputs: tuple[str, ...]

    @contextmanager
    def writable(self) -> Iterator[None]:
        """Raises `ConfigError` where the directory cannot be read or written."""
        try:
            yield
        except (OSError, FileError) as error:
            expected = f"a directory that can be written to ({said(error)})"
            raise ConfigError("--out", str(self.folder), expected) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keeps all others out. Raises `ConfigError` where another holds the directory."""
        with alone(self.folder, BUSY):
            yield

    def check(self, resume: bool) -> None:
        """Raises `ConfigError` unless it can be written to, or made."""
        folder = self.folder
        taken = not folder.is_dir() or any(file.name != LOCK for file in folder.iterdir())
        if folder.exists() and taken and not (folder.is_dir() and resume):
            expected = f"a new or empty directory, or --resume to go on with the {self.kind} in it"
            raise ConfigError("--out", str(folder), expected)
        trials = folder / "trials"
        if (trials.exists() or trials.is_symlink()) and not trials.is_dir():
            expected = "a directory whose trials/ is a directory; it is a file"
            raise ConfigError("--out", str(folder), expected)

    def begun(self, parse: Callable[[Path], Stored]) -> Stored | None:
        """What was begun here, as `parse` reads it; None if nothing was.

        Raises `ConfigError` when the directory holds something else.
        """
        path = self.folder / f"{self.kind}.yaml"
        if not path.exists():
            known = {*self.left_over(), self.folder / LOCK}
            if self.folder.exists() and {*self.folder.iterdir()} - known:
                expected = f"the directory of a {self.kind}; it has no {path.name}"
                raise ConfigError("--resume", str(self.folder), expected)
            return None
        try:
            return parse(self.folder)
        except ConfigError as error:
            if error.field == "--resume":
                raise
            expected = f"the {path.name} of a {self.kind}; {error}"
            raise ConfigError("--resume", str(path), expected) from None

    def left_over(self) -> list[Path]:
        """What a kill has left half written."""
        patterns = (".tune-*", *(f".{name}.*" for name in self.outputs))
        return [left for pattern in patterns for left in self.folder.glob(pattern)]

    def tidy(self) -> None:
        """Removes what a kill has left. Processes of what was killed may end, and write, only
        now.
        """
        for left in self.left_over():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def stored(folder: Path, kind: str) -> Mapping[str, Any]:
    """The tree in the `KIND.yaml` of a directory. Raises `ConfigError` unless it is whole."""
    path = folder / f"{kind}.yaml"
    tree = read(path)
    why = None
    if not isinstance(tree, Mapping):
        why = f"it is a {type(tree).__name__}"
    elif not tree:
        why = "it is empty"
    elif not read_text(path).endswith("\n...\n"):
        why = "it is cut, as its last line is not '...'"
    if why:
        raise ConfigError("--resume", str(path), f"the {path.name} of a {kind}; {why}")
    return tree


def difference(
    here: Mapping[str, Any], there: Mapping[str, Any], changeable: Collection[str]
) -> tuple[str, Any, Any] | None:
    """(key, here, there) of the first difference that what is resumed may not have.

    A value is None where its key is missing.
    """
    for key in dict.fromkeys([*here, *there]):
        if here.get(key) != there.get(key) and key not in changeable:
            return key, here.get(key), there.get(key)
    return None


def said(error: OSError | FileError) -> str:
    """What failed, and on which file, in one line."""
    if isinstance(error, FileError):
        return str(error)
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
