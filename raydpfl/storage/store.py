"""An object store, or any other file system that has an address, below one folder of it.

>>> is_address("s3://bucket/run"), is_address("runs/one"), is_address("file:///runs/one")
(True, False, False)
>>> join_address("s3://bucket/sweep?region=eu-west-1", "trials", "a1b2")
's3://bucket/sweep/trials/a1b2?region=eu-west-1'

pyarrow.fs has S3, Google Cloud Storage, Azure and Hadoop; any other address is fsspec's, with the
package that fsspec names for it. S3 is reached as AWS's own tools reach it: AWS_ACCESS_KEY_ID,
AWS_PROFILE, AWS_ENDPOINT_URL and the like, or the address has `?endpoint_override=HOST:PORT&
scheme=http`.
"""

import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from raydpfl.errors import ConfigError, FileError, message

# Where an object is there whole or not at all. Anywhere else a file is written aside and renamed.
ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "memory"})
PAUSES = (1.0, 3.0, 9.0)  # seconds before a request is made again
LASTING = ("ACCESS_DENIED", "NO_SUCH_BUCKET", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT")
FETCH_THREADS = 8  # files fetched at once
Answer = TypeVar("Answer")


def is_address(name: object) -> bool:
    """Whether a name is an address, and no path of this machine's."""
    return re.match(r"(?!file:)[a-z][a-z0-9+.-]+://", str(name), re.IGNORECASE) is not None


def local_path(name: str | Path) -> Path:
    """The path that a name is, also one that begins with file://. Raises `ConfigError` for one of
    another machine, or that is not whole.
    """
    text = str(name)
    if not re.match("file:/", text, re.IGNORECASE):
        return Path(name)
    whole = re.fullmatch(r"file:(?://(?:localhost)?)?(/(?!/).*)", text, re.IGNORECASE | re.DOTALL)
    if whole is None:
        raise ConfigError("address", text, "file:///WHOLE/PATH, or a path")
    return Path(unquote(whole[1]))


def join_address(address: str | Path, *names: str) -> str:
    """The address of a file or a folder in the folder at `address`; of a path, the path."""
    if not is_address(address):
        return str(Path(local_path(address), *names))
    address = str(address)
    place, mark, query = address.partition("?")
    return "/".join((place.rstrip("/"), *names)) + mark + query


class Store:
    """The folder at an address, which need not be there. Names are relative to it, with slashes.
    Raises `ConfigError` where what is at such an address cannot be reached.
    """

    def __init__(self, address: str):
        self.address = address
        self._atomic = address.partition("://")[0].lower() in ATOMIC
        try:
            self._files, root = _connect(address)
            self._root = root.rstrip("/")
            self._times("")
        except Exception as error:  # of any library that fsspec takes
            expected = f"a folder that can be reached ({message(error)})"
            raise ConfigError("--out", address, expected) from None

    def times(self, names: str = "") -> dict[str, int | None]:
        """When each file (with `names`: of that folder within) was written, in nanoseconds of the
        store's own clock; None: unknown. Raises `FileError` where the store does not answer for a
        quarter of a minute, here and below.
        """
        return self._request(names, "listed", lambda: self._times(names))

    def _times(self, names: str) -> dict[str, int | None]:
        from pyarrow.fs import FileSelector

        place = f"{self._root}/{names}".rstrip("/")
        selector = FileSelector(place, recursive=True, allow_not_found=True)
        files = [info for info in self._files.get_file_info(selector) if info.is_file]
        return {info.path[len(self._root) + 1 :]: info.mtime_ns for info in files}

    def put(self, name: str, content: Any) -> None:
        """Puts a file of `content`, bytes or a buffer, there, or in the place of that of this name,
        whole or not at all; it is durable when this returns. Raises `FileError`.
        """
        self._request(name, "written", lambda: self._write(f"{self._root}/{name}", content))

    def put_file(self, name: str, path: Path) -> None:
        """As `put`, of what a file of this machine holds."""
        import pyarrow as pa

        if not path.stat().st_size:
            self.put(name, b"")
            return
        with pa.memory_map(str(path)) as file:
            self.put(name, file.read_buffer())

    def _write(self, path: str, content: Any) -> None:
        if self._atomic:
            with self._files.open_output_stream(path) as file:
                file.write(content)
            return
        folder, _, name = path.rpartition("/")
        self._files.create_dir(folder, recursive=True)
        part = f"{folder}/.{name}.part"
        with self._files.open_output_stream(part) as file:
            file.write(content)
        self._files.move(part, path)

    def get(self, name: str) -> bytes:
        """What a file holds. Raises FileNotFoundError, `FileError`."""
        return self._request(name, "read", lambda: self._read(name))

    def _read(self, name: str) -> bytes:
        with self._files.open_input_stream(f"{self._root}/{name}") as file:
            return file.read()

    def fetch(self, names: Iterable[str], folder: Path) -> None:
        """Copies files to a folder of this machine, but those now gone. Raises `FileError`."""
        file_names = list(names)
        for parent in {(folder / name).parent for name in file_names}:
            parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(FETCH_THREADS) as pool:
            list(pool.map(lambda name: self._fetch(name, folder / name), file_names))

    def _fetch(self, name: str, path: Path) -> None:
        from pyarrow.fs import LocalFileSystem, copy_files

        copy_args = (f"{self._root}/{name}", str(path), self._files, LocalFileSystem())
        with suppress(FileNotFoundError):
            self._request(name, "read", lambda: copy_files(*copy_args))

    def remove(self, names: Iterable[str]) -> None:
        """Removes files; those that are not there are passed over. Raises `FileError`."""
        for name in names:
            with suppress(FileNotFoundError):
                self._request(name, "removed", partial(self._remove, name))

    def _remove(self, name: str) -> None:
        self._files.delete_file(f"{self._root}/{name}")

    def _request(self, name: str, action: str, call: Callable[[], Answer]) -> Answer:
        """What a request of a file answers; it is made again for a quarter of a minute. Raises
        FileNotFoundError, `FileError`.
        """
        pauses = iter(PAUSES)
        while True:
            try:
                return call()
            except FileNotFoundError:
                raise
            except Exception as error:  # of any library that fsspec takes
                pause = next(pauses, None)
                if pause is None or any(reason in str(error) for reason in LASTING):
                    place = join_address(self.address, name)
                    raise FileError(f"{place} cannot be {action} ({message(error)})") from None
                time.sleep(pause)


@lru_cache
def open_store(address: str) -> Store:
    """The store at an address, with the connections of this process to it."""
    return Store(address)


def _connect(address: str) -> tuple[Any, str]:
    import pyarrow as pa
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    # else three requests are made for every small file; older versions of Arrow do not know it
    quick = address + ("&" if "?" in address else "?") + "allow_delayed_open=true"
    for uri in (quick, address) if address.startswith("s3://") else (address,):
        try:
            return FileSystem.from_uri(uri)
        except pa.ArrowInvalid as error:
            is_supported = "Unrecognized filesystem type" not in str(error)
            if is_supported and uri == address:
                raise
    from fsspec.core import url_to_fs

    files, path = url_to_fs(address)
    return PyFileSystem(FSSpecHandler(files)), path
