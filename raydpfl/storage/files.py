"""The data root, the cache and its folders, and digests of files.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as place:
...     folder = Path(place) / "answer"
...     fill_folder(folder, lambda scratch: (scratch / "number").write_text("42"))
...     is_intact(folder), (folder / "number").write_text("43"), is_intact(folder)
(True, 2, False)

A folder of the cache also holds `SEAL`: the size and the digest of each file, as written. What is
cut, edited or missing is noticed when the folder is used, and the folder is then made once more.
"""

import atexit
import hashlib
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock

from raydpfl.errors import ConfigError

SEAL = "digests.json"
LOCK = ".lock"
RUNS = "runs"  # a folder of the cache: the run directories of submitted jobs
STILL = "a file that stays as it is while it is read; this one was changed"
# nanoseconds after which another write to a file is sure to move its time of change
CERTAIN = 2 * 10**9
# what may be looked for, and whether it is there
FOUND = {"file": Path.is_file, "folder": Path.is_dir, "file or folder": Path.exists}
log = logging.getLogger("raydpfl")
# by the cache that is not believed: the folder of this process in its place
_private: dict[Path, Path] = {}


def cache_root() -> Path:
    """RAYDPFL_CACHE, or, where that is none or an address, raydpfl under XDG_CACHE_HOME, or
    ~/.cache/raydpfl; made where it is missing, for this user alone.

    Where another user could have put something there, it is a folder of this process instead, which
    a warning says once. Raises `ConfigError` where there is no home directory.
    """
    cache_setting = os.environ.get("RAYDPFL_CACHE")
    if cache_setting and not cache_address():
        root = Path(cache_setting).absolute()  # client actors have another working directory
    else:
        try:
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raydpfl"
        except RuntimeError:
            expected = "a folder, as this user has no home directory"
            raise ConfigError("RAYDPFL_CACHE", cache_setting, expected) from None
    try:
        make(root)
        foreign = _foreign_within(root)
    except OSError:  # whatever is then read or written there says so
        return root
    if foreign is None:
        return root
    if root not in _private:
        _private[root] = _make_private(root, foreign)
    return _private[root]


def make(folder: Path) -> None:
    """Makes a folder of the cache, with parents, for this user alone. Raises OSError."""
    if not folder.is_dir():
        if folder.parent != folder:
            make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def foreign(place: Path | int) -> str | None:
    """Why what is in a file or folder (or an open one) may be from another user; None: it is of
    this user or root, and no other user can write to it. Raises OSError.
    """
    status = os.stat(place)
    if status.st_uid not in (0, os.geteuid()):
        return "belongs to another user"
    return "can be written to by others" if status.st_mode & 0o022 else None


def _foreign_within(root: Path) -> str | None:
    """The same of the cache, its folders, and links to them, and of which; but for `RUNS`, of which
    the cache takes nothing. Raises OSError.
    """
    with os.scandir(root) as entries:
        folders = [Path(entry.path) for entry in entries if entry.is_dir() and entry.name != RUNS]
    for folder in (root, *folders):
        theirs = os.lstat(folder).st_uid not in (0, os.geteuid())
        reason = "belongs to another user" if theirs else foreign(folder)
        if reason:
            return f"{folder} {reason}"
    return None


def _make_private(root: Path, reason: str) -> Path:
    """A folder in the cache's place, for this process and those that it starts; removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="raydpfl-cache-"))
    maker = os.getpid()
    atexit.register(lambda: remove(folder) if os.getpid() == maker else None)
    if not cache_address():
        os.environ["RAYDPFL_CACHE"] = str(folder)
    log.warning(
        "the cache is not used, as %s; a private one takes its place until this process ends "
        "(to use it again: chmod -R go-w %s)",
        reason,
        root,
    )
    return folder


def cache_address() -> str | None:
    """RAYDPFL_CACHE, where that is an address (see `raydpfl.storage.cache`)."""
    cache_setting = os.environ.get("RAYDPFL_CACHE", "")
    return cache_setting if "://" in cache_setting else None


def data_root(root: Path | None) -> Path:
    """`root`, or RAYDPFL_DATA, or a folder of downloads in the cache."""
    data_folder = root or os.environ.get("RAYDPFL_DATA")
    if data_folder:
        return Path(data_folder)
    folder = cache_root() / "downloads"
    with suppress(OSError):  # the download meets what is there
        make(folder)
    return folder


def find_file(field: str, name: str, root: Path | None, kind: str = "file") -> Path:
    """The path of a file (or of another `kind`, a key of `FOUND`) that `name` gives absolute, or
    relative to the data root or the working folder. Raises `ConfigError` naming `field` where
    there is none.
    """
    for path in (data_root(root) / name, Path(name)):
        with suppress(OSError):  # a name that is too long, or a folder that may not be entered
            if FOUND[kind](path):
                return path
    search_places = f"{data_root(root)} (--data-root) or {Path.cwd()}"
    raise ConfigError(field, name, f"a {kind}, absolute or under {search_places}")


def file_identity(field: str, name: str, root: Path | None) -> list[str]:
    """Suffix and digest of the file `name`, which any other contents change, and any other reader.
    Raises `ConfigError` naming `field` where the file is missing or cannot be read.
    """
    path = find_file(field, name, root)
    try:
        return [path.suffix, digest(path)]
    except OSError as error:
        raise ConfigError(field, name, f"a file that can be read ({error.strerror})") from None


def digest(path: Path) -> str:
    """SHA-256 of a regular file's contents, in hex. Raises OSError.

    It is kept in the cache, so that a file is read once. A file is recognised by its device,
    inode, size, and times of writing and of change in nanoseconds: whatever replaces the file or
    changes it moves one of them, as the time of change cannot be set. Nothing is kept of a
    file that changed just now, as a write within the same tick of the clock would not show, nor of
    one whose times are whole seconds, as file systems without a clock make them up.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "no regular file", str(path))
    with path.open("rb") as file:
        facts = _facts(file.fileno())
        entry = cache_root() / "digests" / f"{facts['device']:x}-{facts['inode']:x}.json"
        with suppress(OSError, ValueError, LookupError, TypeError):
            record = read_own_json(entry)
            if record["check"] == check(facts, record["sha256"]):
                return record["sha256"]
        certain = time.time_ns() - facts["changed"] > CERTAIN  # before any of it is read
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if certain and facts == _facts(file.fileno()) and facts["changed"] % 10**9:
            keep_json(entry, {"sha256": sha256, "check": check(facts, sha256)})
    return sha256


def _facts(descriptor: int) -> dict[str, int]:
    status = os.fstat(descriptor)
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "written": status.st_mtime_ns,
        "changed": status.st_ctime_ns,
    }


def check(*values: object) -> str:
    """A digest of JSON values, kept with them so that a change to them is noticed."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def keep_json(path: Path, value: object) -> None:
    """Puts `value` into a file of the cache, whole or not at all; failure costs time later."""
    part = None
    try:
        make(path.parent)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            part = file.name
            json.dump(value, file)
        os.replace(part, path)
    except OSError:
        if part:
            Path(part).unlink(missing_ok=True)


def read_own_json(path: Path) -> Any:
    """What `keep_json` put there. Raises OSError, also for what another user may have put there,
    and ValueError for anything that is no JSON.
    """
    with open_own_file(path) as file:
        return _json(file.read())


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError, and ValueError for anything that is no JSON."""
    return _json(read_text(path))


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values within values, too deep") from None


def open_own_file(path: Path) -> BufferedReader:
    """A regular file, no link to one, that this user has written. Raises OSError for any other."""
    # a pipe is not waited for
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
    reason = foreign(descriptor) if regular else "is no regular file"
    if reason:
        os.close(descriptor)
        raise OSError(0, reason, str(path))
    return os.fdopen(descriptor, "rb")


def read_text(path: Path, max_bytes: int = 16 << 20) -> str:
    """The text of a regular file of at most `max_bytes` bytes, or of a pipe that this process was
    started with.

    Raises OSError, also for what would never end (a device, a pipe that nobody writes to), and
    UnicodeDecodeError.
    """
    is_inherited = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    if not stat.S_ISREG(path.stat().st_mode) and not is_inherited:
        raise OSError(0, "Is a directory" if path.is_dir() else "Is no regular file", str(path))
    with path.open("rb") as file:
        text = file.read(max_bytes + 1)
    if len(text) > max_bytes:
        raise OSError(0, f"Has more than {max_bytes:,} bytes", str(path))
    return text.decode()


def is_intact(folder: Path) -> bool:
    """Whether a folder is there as `fill_folder` made it; a warning says why one there is not."""
    if not os.path.lexists(folder):
        return False
    flaw = _flaw(folder)
    if flaw:
        log.warning("%s is made again: %s", folder, flaw)
    return flaw is None


def fill_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Has `fill` write files into a folder of the cache that takes the place `folder`, whole or not
    at all. One that is there already and whole stays; one that is not is replaced. Raises
    `ConfigError` for a cache that cannot be written or has no room, and whatever `fill` raises.
    """
    scratch, aside = (folder.parent / f".{folder.name}-{uuid.uuid4().hex}" for _ in range(2))
    try:
        make(scratch)
        fill(scratch)
        files = {
            path.name: [path.stat().st_size, digest(path)] for path in sorted(scratch.iterdir())
        }
        (scratch / SEAL).write_text(json.dumps({"files": files, "check": check(files)}))
        for path in scratch.iterdir():  # whatever the umask is
            path.chmod(path.stat().st_mode & ~0o022)
        with folder_lock(folder.parent):
            if os.path.lexists(folder) and _flaw(folder) is None:
                return  # another run's
            if os.path.lexists(folder):
                folder.rename(aside)
            scratch.rename(folder)
    except OSError as error:
        room = f"a folder that can be written, with room ({error.strerror})"
        raise ConfigError("RAYDPFL_CACHE", str(cache_root()), room) from None
    finally:
        remove(scratch)
        remove(aside)


def _flaw(folder: Path) -> str | None:
    """What is wrong with a folder that `fill_folder` made; None: nothing."""
    try:
        seal = read_json(folder / SEAL)
        files = seal["files"]
        for path in (folder, *(folder / name for name in (SEAL, *files))):
            reason = foreign(path)
            if reason:
                return f"{path.name} {reason}"
        if seal["check"] != check(files):
            return f"{SEAL} is damaged"
        for name, (size, _) in files.items():  # at no cost
            actual = (folder / name).stat().st_size
            if actual != size:
                return f"{name} has {actual:,} bytes instead of {size:,}"
        for name, (_, sha256) in files.items():
            if digest(folder / name) != sha256:
                return f"{name} has been changed"
    except OSError as error:
        return f"{Path(error.filename or folder).name}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{SEAL} is damaged"
    return None


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        path.unlink()


@contextmanager
def folder_lock(folder: Path, patience: float = -1) -> Iterator[None]:
    """Holds `folder` against other processes, by its lock file `LOCK`, which goes with it.

    The lock is the operating system's, so a killed process holds it no longer; filelock takes a
    file for none that was removed after another process had opened it. Raises filelock.Timeout when
    another process holds it after `patience` seconds (below 0, it is waited for), and OSError where
    no lock file can be made or locked.
    """
    path = folder / LOCK
    with FileLock(path, timeout=patience):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_memory(required_bytes: int) -> None:
    """Raises MemoryError where so many bytes are more than the memory that is free."""
    free = psutil.virtual_memory().available
    if required_bytes > free:
        raise MemoryError(f"{required_bytes / 1e9:,.1f} GB are needed, {free / 1e9:,.1f} are free")


@contextmanager
def network_timeout() -> Iterator[None]:
    """A network that does not answer is an error after 30 seconds."""
    old_timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)
    try:
        yield
    finally:
        socket.setdefaulttimeout(old_timeout)
