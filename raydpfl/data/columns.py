"""Columns of tables in files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.errors import ConfigError
from raydpfl.files import check_memory, find_file


def read_columns(path: Path) -> dict[str, Any]:
    """The columns of a Parquet, Arrow or NPZ file by name; raises whatever its reader does, and
    MemoryError for one whose columns are larger than the memory that is free."""
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            check_memory(sum(each.file_size for each in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    if path.suffix in (".arrow", ".feather"):
        from pyarrow import feather

        table = feather.read_table(path)
    else:
        with pq.ParquetFile(path) as file:
            check_memory(_bytes(file.metadata))
        table = pq.read_table(path)
    return dict(zip(table.column_names, table.columns, strict=True))


def _bytes(parquet: pq.FileMetaData) -> int:
    """Bytes that the columns of a Parquet file take at least when read, however they are packed."""
    widths = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}
    total = 0
    for group in range(parquet.num_row_groups):
        for index in range(parquet.num_columns):
            column = parquet.row_group(group).column(index)
            packed = column.num_values * widths.get(column.physical_type, 0)
            total += max(packed, column.total_uncompressed_size)
    return total


def plain(column: Any, name: str, field: str) -> np.ndarray:
    """[rows] without gaps, of numbers or strings."""
    if not isinstance(column, np.ndarray):
        if column.null_count:
            raise ConfigError(
                field, name, f"a column without gaps; this one lacks {column.null_count} values"
            )
        if pa.types.is_nested(column.type):
            raise ConfigError(field, name, f"one number or name to a row, not {column.type}")
        listed = pa.types.is_dictionary(column.type)
        try:
            column = np.asarray(column.to_pylist()) if listed else column.to_numpy()
        except (pa.ArrowException, NotImplementedError, ValueError) as error:
            accepted = f"one number or name to a row, not {column.type} ({error})"
            raise ConfigError(field, name, accepted) from None
    if column.ndim != 1:
        raise ConfigError(
            field, name, f"one number or name to a row; this array has shape {column.shape}"
        )
    return column


def clients_table(
    field: str, path: str, root: Path | None, **wanted: str | None
) -> dict[str, np.ndarray]:
    """Columns of a CSV, Parquet, Arrow or NPZ file that says something of every client: by the key
    of the section `field` that names it, where one does (`column="epsilon"`). `path`: absolute, or
    relative to the data root or the working folder. Raises `ConfigError` naming the field.
    """
    file = find_file(f"{field}.path", path, root)
    try:
        columns = _csv_columns(file) if file.suffix == ".csv" else read_columns(file)
    except Exception as error:  # whatever a broken file makes its reader raise
        raise ConfigError(
            f"{field}.path",
            path,
            f"a CSV, Parquet, Arrow or NPZ file ({type(error).__name__}: {error})",
        ) from None
    for key, name in wanted.items():
        if name is not None and name not in columns:
            raise ConfigError(
                f"{field}.{key}", name, f"a column of {file.name}: {', '.join(columns)}"
            )
    return {
        key: plain(columns[name], name, f"{field}.{key}")
        for key, name in wanted.items()
        if name is not None
    }


def numbers(field: str, name: str, column: np.ndarray) -> np.ndarray:
    """The column as float64 [n]. Raises `ConfigError` naming `field` if it is none of numbers."""
    if column.dtype.kind not in "iuf" or column.ndim != 1:
        raise ConfigError(field, name, f"a column of numbers, not {column.dtype}")
    return column.astype(np.float64)


def _csv_columns(path: Path) -> dict[str, Any]:
    from pyarrow import csv

    table = csv.read_csv(path)
    return dict(zip(table.column_names, table.columns, strict=True))
