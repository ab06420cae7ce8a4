"""Inputs of samples from columns: numbers, lists of one length, arrays, encoded images."""

import io
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raydpfl.data.columns import check_gaps
from raydpfl.errors import ConfigError
from raydpfl.storage.files import check_memory

PIXELS = 1 << 26  # of an image at most
SIZE_LIMIT = f"images of at most {PIXELS:,} pixels"
WORK = 1 << 31  # pixels times scans of an image at most: some ten seconds
# bytes of images that are suspect where they are so many times what was encoded
BOMB = 1 << 31
RATIO = 200
# no others: some would run other programs
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
# modes of more than 8 bits, of which conversion would leave white alone
HIGH_DEPTH_MODES = ("I", "F")
EIGHT_BITS = "images of 8 bits a channel (scale others, or give them as numbers)"
INPUTS = "numbers, lists of numbers, or encoded images"
TOKENS = 1 << 20  # whole numbers that are taken for tokens of themselves are below it
DType = Literal["auto", "float32", "int64"]


def cast_inputs(
    x: np.ndarray, test_x: np.ndarray, names: tuple[str, ...], dtype: DType, is_list: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs [rows, *shape] in the type that they are trained on in: images stay uint8, all else is
    float32 or int64. With dtype auto, whole numbers from 0 in lists or arrays (`is_list`) stay
    such, for an embedding. Raises `ConfigError` on `data.dtype`.
    """
    arrays = (x, test_x)
    if all(array.dtype == np.uint8 and array.ndim > 3 for array in arrays):
        if dtype != "auto":
            raise ConfigError("data.dtype", dtype, "auto for images, which are scaled when read")
        return arrays
    tokens = dtype == "int64" or (dtype == "auto" and is_list and all(map(_has_token_ids, arrays)))
    if not tokens:
        with np.errstate(over="ignore"):  # it is refused as not finite
            return x.astype(np.float32), test_x.astype(np.float32)
    for array in arrays:
        whole = array.dtype.kind in "biu" or (array == np.floor(array)).all()
        if not whole or (array.size and not 0 <= array.min() <= array.max() < 1 << 31):
            expected = f"float32: {', '.join(names)} has other numbers than whole ones from 0"
            raise ConfigError("data.dtype", dtype, expected)
    return x.astype(np.int64), test_x.astype(np.int64)


def _has_token_ids(x: np.ndarray) -> bool:
    """Whether these are whole numbers that an embedding could take."""
    return x.dtype.kind in "iu" and (not x.size or bool(0 <= x.min() <= x.max() < TOKENS))


def inputs(column: Any, name: str, row_names: Sequence[str] = ()) -> np.ndarray:
    """[rows], or [rows, *shape]: uint8 (images), integers or floats as they are. `row_names`: the
    names of rows, for messages. Raises `ConfigError` on the field `data.x`.
    """
    if isinstance(column, np.ndarray):
        return _array(column, name, column.dtype)
    kind = column.type
    check_gaps(column, name, "data.x")
    try:
        column = column.combine_chunks()
        if pa.types.is_run_end_encoded(kind):
            column = pc.run_end_decode(column)
        if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
            column = column.field("bytes")
        if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            return _decode(column, name, row_names)
        shape = [len(column)]
        while pa.types.is_nested(column.type) and not pa.types.is_struct(column.type):
            shape.append(_length(column, name))
            column = column.flatten()
        if column.null_count:
            raise ConfigError("data.x", name, "lists without gaps")
        values = column.to_numpy(zero_copy_only=False).reshape(shape)
    except (pa.ArrowException, NotImplementedError) as error:
        raise ConfigError("data.x", name, f"{INPUTS}, not {kind} ({error})") from None
    return _array(values, name, kind)


def _length(column: pa.Array, name: str) -> int:
    """The length that all lists of a column have. Raises `ConfigError`."""
    if pa.types.is_fixed_size_list(column.type):
        return column.type.list_size
    lengths = sorted(length or 0 for length in column.value_lengths().unique().to_pylist())
    if len(lengths) > 1:
        expected = "lists of one length without gaps (cut or pad them); the lengths here are"
        raise ConfigError("data.x", name, f"{expected} {lengths[:5]}")
    return lengths[0] if lengths else 0


def _array(values: np.ndarray, name: str, kind: object) -> np.ndarray:
    """Numbers as they are, images with channels first. `kind`: what the file calls them."""
    if values.dtype.kind not in "biuf":
        raise ConfigError("data.x", name, f"{INPUTS}, not {kind} (encode it as numbers)")
    if not values.ndim or not all(values.shape[1:]):
        expected = f"at least one number to a row; this array has shape {values.shape}"
        raise ConfigError("data.x", name, expected)
    if values.dtype != np.uint8 or values.ndim < 3:
        return values
    if values.ndim == 3:
        return values[:, None]
    channels_last = values.ndim == 4 and values.shape[1] not in (1, 3) and values.shape[3] in (1, 3)
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2)) if channels_last else values


def _decode(column: pa.Array | pa.ChunkedArray, name: str, row_names: Sequence[str]) -> np.ndarray:
    """Uint8 [rows, channels, height, width], grey or RGB; sizes are checked before decoding."""
    from PIL import Image

    def image_error(expected: str) -> ConfigError:
        return ConfigError("data.x", name, expected)

    names = row_names or [f"row {row}" for row in range(len(column))]
    images = np.zeros((0, 1, 1, 1), np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for row, (row_name, data) in enumerate(zip(names, column, strict=True)):
            image_bytes = data.as_py() or b""
            try:
                with Image.open(io.BytesIO(image_bytes), formats=FORMATS) as image:
                    shape = (1 if image.mode == "L" else 3, image.height, image.width)
                    flaw = _flaw(image, image_bytes, row_name)
                    if flaw:
                        raise image_error(flaw)
                    if row == 0:
                        _check_size(column, len(column) * math.prod(shape), name)
                        images = np.empty((len(column), *shape), np.uint8)
                    if shape != images.shape[1:]:
                        difference = f"{row_name} is {shape}, {names[0]} is {images.shape[1:]}"
                        remedy = "data.size and data.channels convert those of an image_folder"
                        raise image_error(f"images of one size and mode ({remedy}); {difference}")
                    colours = np.asarray(image.convert("L" if shape[0] == 1 else "RGB"))
            except ConfigError:
                raise
            except MemoryError as error:
                raise image_error(f"images that memory holds: {error}") from None
            except (Image.DecompressionBombWarning, Image.DecompressionBombError):
                raise image_error(f"{SIZE_LIMIT}; {row_name} has more") from None
            except Exception as error:  # whatever a broken image makes its decoder raise
                formats = f"{', '.join(FORMATS)} ({type(error).__name__})"
                raise image_error(f"encoded images; {row_name} is not of {formats}") from None
            images[row] = np.atleast_3d(colours).transpose(2, 0, 1)
    return images


def _flaw(image: Any, image_bytes: bytes, name: str) -> str:
    """What is expected of an image that is too deep, too large or slow to decode; else empty."""
    if image.mode.startswith(HIGH_DEPTH_MODES):
        return f"{EIGHT_BITS}; {name} has more ({image.mode})"
    pixels = image.height * image.width
    if pixels > PIXELS:
        return f"{SIZE_LIMIT}; {name} has {pixels:,}"
    # a progressive JPEG goes over its pixels again in every scan
    scans = image_bytes.count(b"\xff\xda") if image_bytes.startswith(b"\xff\xd8") else 1
    expected = f"images that are soon decoded; {name} has {pixels:,} pixels in {scans:,} scans"
    return expected if pixels * scans > WORK else ""


def _check_size(column: pa.Array | pa.ChunkedArray, size: int, name: str) -> None:
    """Raises MemoryError for images that no memory holds, `ConfigError` for a bomb."""
    check_memory(size)
    if size > BOMB and size > RATIO * column.nbytes:
        amount = f"{size / 1e9:.1f} GB in {column.nbytes / 1e9:.4f}"
        raise ConfigError("data.x", name, f"images with something in them; these are {amount}")
