"""A data set of one's own, as a table in a Parquet, Arrow or NPZ file.

>>> Table(train="faces/train.parquet", test="faces/test.parquet", x="image", clients=100).kind
'table'

What `x` may be: one column of encoded images (see `FORMATS`; bytes, or a struct with a field
`bytes`), all of one size, which is at most `PIXELS`; one column of lists of one length; or several
columns of numbers. In NPZ one array [rows, ...]: uint8 is taken for images, grey [rows, h, w] or
channels first [rows, c, h, w], or channels last if only that way there are 1 or 3 channels;
anything else becomes float32 as it is. Images are kept as uint8 and scaled to [0, 1] when read.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import Field, field_validator, model_validator

from raydpfl.data.columns import plain, read_columns
from raydpfl.data.sources.base import Dealt, Samples
from raydpfl.errors import ConfigError
from raydpfl.files import check_memory, file_identity, find_file
from raydpfl.keys import Purpose, stream
from raydpfl.tasks import Task

PIXELS = 1 << 26  # of an image at most
SMALL_ENOUGH = f"images of at most {PIXELS:,} pixels"
WORK = 1 << 31  # pixels times scans of an image at most: some ten seconds
# bytes of images that are suspect where they are so many times what was encoded
BOMB = 1 << 31
RATIO = 200
# no others: some would run other programs
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
DEEP = ("I", "F")  # modes of more than 8 bits, of which conversion would leave white alone
EIGHT_BITS = "images of 8 bits a channel (scale others, or give them as numbers)"
# at most: a larger class number is an id or a mistake, and a model would have an output for each
# number below it
CLASSES = 1 << 20


class Table(Dealt):
    """Training rows, test rows from a second file or held out at random, and columns by name.

    `train`, `test`: files (.parquet, .arrow, .feather, .npz), absolute, or relative to the data
    root or the working folder. `test_fraction`: of the training rows, held out when there is no
    `test` (but from no client, where `client` names them, its last). `y`: whole numbers from 0, or
    names, which are numbered in sorted order; with `regression`, any numbers, the targets.
    `client`: column of client ids, for partition natural. `mean`, `std`: per channel, public
    constants to normalise images by, after scaling to [0, 1].
    """

    named: ClassVar[frozenset[str]] = frozenset({"train", "test"})

    kind: str = "table"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a file
    train: str
    test: str | None = None
    test_fraction: float = Field(default=0.1, gt=0, lt=1)
    x: tuple[str, ...] = ("image",)
    y: str = "label"
    client: str | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    @field_validator("x", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _constants(self) -> Table:
        if len(self.mean) != len(self.std) or min(self.std, default=1) <= 0:
            raise ConfigError(
                "data.std", self.std, f"positive numbers, one for each of data.mean = {self.mean}"
            )
        if not self.x:
            raise ConfigError("data.x", self.x, "the name of a column, or several")
        return self

    @classmethod
    def gives(cls, task: Task) -> None:
        pass  # the task takes its targets from the columns

    @classmethod
    def located(cls, root: Path) -> str:
        return "your own file"

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean, self.std

    def sources(self, root: Path | None) -> list:
        files = {"train": self.train} | ({"test": self.test} if self.test else {})
        return [file_identity(f"data.{key}", name, root) for key, name in files.items()]

    def samples(self, seed: int, root: Path | None) -> Samples:
        x, y, client = self._read("train", self.train, root)
        if self.test:
            test_x, test_y, _ = self._read("test", self.test, root)
            if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
                kinds = f"{x.dtype} {x.shape[1:]}, not {test_x.dtype} {test_x.shape[1:]}"
                accepted = f"samples like those of data.train: {kinds}"
                raise ConfigError("data.test", self.test, accepted)
        else:
            held = self._held_out(y, client, seed)
            test_x = x[held]
            test_y = y[held]
            x = x[~held]
            y = y[~held]
            client = None if client is None else client[~held]
        self._check_rows(len(y), len(test_y), client is not None)
        if self.mean and (x.dtype != np.uint8 or len(self.mean) != x.shape[1]):
            raise ConfigError(
                "data.mean",
                self.mean,
                f"one number per channel of an image; the samples are {x.dtype} {x.shape[1:]}",
            )
        y, test_y, target = self.task.targets(self.y, y, test_y, None)
        if client is not None:
            client = np.unique(client, return_inverse=True)[1].astype(np.int64)
        return Samples(x, y, test_x, test_y, client, target)

    def _held_out(self, y: np.ndarray, client: np.ndarray | None, seed: int) -> np.ndarray:
        """Which rows are kept for testing, bool [rows]; of each client one row is left to it."""
        order = stream(seed, Purpose.PARTITION, step=1).permutation(len(y))
        if client is not None:
            last = len(y) - 1 - np.unique(client[order][::-1], return_index=True)[1]
            order = np.delete(order, last)
        held = np.zeros(len(y), bool)
        held[order[: max(1, round(self.test_fraction * len(y)))]] = True
        return held

    def _check_rows(self, train: int, test: int, by_client: bool) -> None:
        """Raises `ConfigError` where no row is left to train on, or to test on."""
        if not train:
            accepted = "a table that leaves at least one row to train"
            raise ConfigError("data.train", self.train, accepted)
        if not test:
            accepted = "a table that leaves at least one row to test"
            if by_client:
                accepted += ", or a file of test rows: each client keeps one row"
            raise ConfigError("data.test", self.test, accepted)

    def _read(
        self, key: str, name: str, root: Path | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """x [rows, ...], y [rows] and, of the training table, who holds each row if it tells."""
        path = find_file(f"data.{key}", name, root)
        try:
            columns = read_columns(path)
        except Exception as error:  # whatever a broken file makes its reader raise
            accepted = f"a Parquet, Arrow or NPZ file ({type(error).__name__}: {error})"
            raise ConfigError(f"data.{key}", name, accepted) from None
        owner = self.client if key == "train" else None
        fields = {"data.x": self.x, "data.y": [self.y], "data.client": [owner] if owner else []}
        wanted = [(field, column) for field, named in fields.items() for column in named]
        for field, column in wanted:
            if column not in columns:
                raise ConfigError(field, column, f"a column of {path.name}: {', '.join(columns)}")
        arrays = [columns[column] for _, column in wanted]
        if not all(len(array) for array in arrays if getattr(array, "ndim", 1)):
            raise ConfigError(f"data.{key}", name, "a table with rows; this one has none")
        x = self._samples_of(columns, path.name)
        y = plain(columns[self.y], self.y, "data.y")
        client = self._clients_of(columns[owner], owner, path.name) if owner else None
        if len({len(part) for part in (x, y, client) if part is not None}) > 1:
            raise ConfigError(f"data.{key}", name, "columns of one length")
        return x, y, client

    def _samples_of(self, columns: dict[str, Any], file: str) -> np.ndarray:
        parts = [_features(columns[column], column) for column in self.x]
        if len(parts) > 1 and any(part.ndim > 1 for part in parts):
            accepted = "one column of images or lists, or several of numbers"
            raise ConfigError("data.x", self.x, accepted)
        if parts[0].ndim > 1:
            x = parts[0]
        else:
            x = np.stack([part.astype(np.float32) for part in parts], 1)
        if x.dtype == np.float32 and not np.isfinite(x).all():
            row = int(np.argwhere(~np.isfinite(x))[0, 0])
            accepted = f"finite numbers; row {row} of {file} has another"
            raise ConfigError("data.x", self.x, accepted)
        return x

    @staticmethod
    def _clients_of(column: Any, name: str, file: str) -> np.ndarray:
        client = plain(column, name, "data.client")
        if client.dtype.kind == "f" and not np.isfinite(client).all():
            row = np.argmin(np.isfinite(client))
            accepted = f"a column without gaps; row {row} of {file} is one"
            raise ConfigError("data.client", name, accepted)
        return client


def _features(column: Any, name: str) -> np.ndarray:
    """[rows], or [rows, *shape] in uint8 (images) or float32."""
    try:
        return _samples(column, name)
    except (pa.ArrowException, NotImplementedError) as error:
        accepted = f"numbers, lists of numbers, or encoded images, not {column.type} ({error})"
        raise ConfigError("data.x", name, accepted) from None


def _samples(column: Any, name: str) -> np.ndarray:
    if isinstance(column, np.ndarray):
        return _array(column, name)
    if column.null_count:
        raise ConfigError(
            "data.x", name, f"a column without gaps; this one lacks {column.null_count} values"
        )
    column = column.combine_chunks()
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.field("bytes")
    if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
        return _decoded(column, name)
    if (
        pa.types.is_fixed_size_list(column.type)
        or pa.types.is_list(column.type)
        or pa.types.is_large_list(column.type)
    ):
        values = column.flatten()
        rows = len(column)
        lengths = (
            {column.type.list_size}
            if pa.types.is_fixed_size_list(column.type)
            else set(column.value_lengths().unique().to_pylist())
        )
        if len(lengths) > 1 or values.null_count:
            raise ConfigError(
                "data.x",
                name,
                f"lists of one length without gaps; the lengths here are {sorted(lengths)[:5]}",
            )
        width = max(lengths, default=0) or 0
        return _array(values.to_numpy(zero_copy_only=False).reshape(rows, width), name)
    return _array(column.to_numpy(zero_copy_only=False), name)


def _array(values: np.ndarray, name: str) -> np.ndarray:
    if values.dtype.kind not in "biuf":
        raise ConfigError(
            "data.x", name, f"numbers, lists of numbers, or encoded images, not {values.dtype}"
        )
    if not values.ndim or not all(values.shape[1:]):
        raise ConfigError(
            "data.x", name, f"at least one number to a row; this array has shape {values.shape}"
        )
    if values.dtype != np.uint8 or values.ndim < 3:
        with np.errstate(over="ignore"):  # it is refused as not finite
            return values.astype(np.float32)
    if values.ndim == 3:
        return values[:, None]
    last = values.ndim == 4 and values.shape[1] not in (1, 3) and values.shape[3] in (1, 3)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if last else values


def _decoded(column: pa.Array | pa.ChunkedArray, name: str) -> np.ndarray:
    """Uint8 [rows, channels, height, width]; grey images have one channel, all others become RGB.

    Sizes are those that the images' headers say, and are checked before a pixel is decoded.
    """
    from PIL import Image

    images: np.ndarray | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for row, data in enumerate(column):
            encoded = data.as_py() or b""
            try:
                with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
                    if image.mode.startswith(DEEP):
                        accepted = f"{EIGHT_BITS}; row {row} has more ({image.mode})"
                        raise ConfigError("data.x", name, accepted)
                    shape = (1 if image.mode == "L" else 3, image.height, image.width)
                    _check_image(encoded, shape, name, row)
                    if images is None:
                        _check_images(column, shape, name)
                        images = np.empty((len(column), *shape), np.uint8)
                    if shape != images.shape[1:]:
                        others = f"row {row} is {shape}, row 0 is {images.shape[1:]}"
                        accepted = f"images of one size and mode; {others}"
                        raise ConfigError("data.x", name, accepted)
                    pixels = np.asarray(image if image.mode == "L" else image.convert("RGB"))
            except ConfigError:
                raise
            except (Image.DecompressionBombWarning, Image.DecompressionBombError):
                raise ConfigError("data.x", name, f"{SMALL_ENOUGH}; row {row} has more") from None
            except Exception as error:  # whatever a broken image makes its decoder raise
                known = f"{', '.join(FORMATS)} ({type(error).__name__})"
                accepted = f"encoded images; row {row} is none of {known}"
                raise ConfigError("data.x", name, accepted) from None
            images[row] = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.zeros((0, 1, 1, 1), np.uint8) if images is None else images


def _check_image(encoded: bytes, shape: tuple[int, int, int], name: str, row: int) -> None:
    """Raises `ConfigError` for an image that is too large, or would take for ever to decode."""
    pixels = shape[1] * shape[2]
    if pixels > PIXELS:
        raise ConfigError("data.x", name, f"{SMALL_ENOUGH}; row {row} has {pixels:,}")
    scans = encoded.count(b"\xff\xda") if encoded.startswith(b"\xff\xd8") else 1
    if pixels * scans > WORK:  # a progressive JPEG goes over its pixels again in every scan
        accepted = (
            f"images that are soon decoded; row {row} has {pixels:,} pixels in {scans:,} scans"
        )
        raise ConfigError("data.x", name, accepted)


def _check_images(
    column: pa.Array | pa.ChunkedArray, shape: tuple[int, int, int], name: str
) -> None:
    """Raises `ConfigError` for images that, all of one shape, no memory would hold, or no camera
    took.
    """
    decoded = len(column) * int(np.prod(shape))
    encoded = column.nbytes
    try:
        check_memory(decoded)
    except MemoryError as error:
        raise ConfigError("data.x", name, f"images that memory holds: {error}") from None
    if decoded > BOMB and decoded > RATIO * encoded:
        size = f"{decoded / 1e9:.1f} GB in {encoded / 1e9:.4f}"
        raise ConfigError("data.x", name, f"images with something in them; these are {size}")
