"""Arrow's numbers as numpy's and back, without pandas, which pyarrow's own conversions import.

>>> column = pack_column([1.5, None], pa.float64())
>>> column.null_count, numbers(column)[0].item(), numbers(pack_column([3, 4], pa.int64())).tolist()
(1, 1.5, [3, 4])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa


def numbers(column: pa.Array) -> np.ndarray:
    """The values of a column of numbers, [n], read-only, not copied; a null is any value."""
    buffer = np.frombuffer(column.buffers()[1] or b"", column.type.to_pandas_dtype())
    return buffer[column.offset : column.offset + len(column)]


def pack_column(values: Sequence[Any] | np.ndarray, kind: pa.DataType) -> pa.Array:
    """Numbers, of which None is null in a list, as a column of the type `kind`."""
    dtype = kind.to_pandas_dtype()
    valid = None
    nulls = 0
    if not isinstance(values, np.ndarray):
        present = np.array([value is not None for value in values], bool)
        values = np.array([value or 0 for value in values])
        nulls = int((~present).sum())
        if nulls:
            valid = pa.py_buffer(np.packbits(present, bitorder="little"))
    data = pa.py_buffer(np.ascontiguousarray(values, dtype))
    return pa.Array.from_buffers(kind, len(values), [valid, data], nulls)
