"""Columns of tables in files."""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raydpfl.errors import ConfigError, one_line
from raydpfl.storage.files import check_memory, find_file

KINDS = "a CSV, JSON lines, Parquet, Arrow or NPZ file"
DELIMITERS = ",;\t|"


class Columns(dict[str, Any]):
    """The columns of a table by name, of numpy or Arrow. For messages: `name`, of the table, and
    `rows`, their names; `part`: train or test; `names`: of classes, by columns of their numbers,
    where the file says them.
    """

    def __init__(
        self, name: str, columns: Mapping[str, Any], part: str = "train", rows: Sequence[str] = ()
    ):
        super().__init__(columns)
        self.name = name
        self.part = part
        self.names: dict[str, tuple[str, ...]] = {}
        self.rows = rows


def read_columns(field: str, name: str, root: Path | None, part: str = "train") -> Columns:
    """The columns of the file `name`: absolute, or relative to the data root or the working folder.

    Args:
        field: of the config, for messages.
        name: of the file.
        root: of data (None: RAYDPFL_DATA).
        part: what its rows are for.

    Raises:
        ConfigError: it is not there, or cannot be read.
    """
    path = find_file(field, name, root)
    try:
        if path.suffix == ".npz":
            return _npz(path, part)
        if path.suffix not in READERS:
            raise ValueError(f"its name ends in none of {', '.join([*READERS, '.npz'])}")
        return table_columns(READERS[path.suffix](path), path.name, part)
    except Exception as error:  # whatever a broken file makes its reader raise
        raise ConfigError(field, name, f"{KINDS} ({one_line(error)})") from None


def column_error(field: str, name: str | None, table: Columns) -> ConfigError:
    """The refusal of a name that is no column of a table."""
    return ConfigError(field, name, f"a column of {table.name}: {', '.join(table)}")


def _npz(path: Path, part: str) -> Columns:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no whole file of numpy.savez")
    with zipfile.ZipFile(path) as archive:
        check_memory(sum(entry.file_size for entry in archive.infolist()))
    columns = Columns(path.name, {}, part)
    with np.load(path, allow_pickle=False) as arrays:
        for name in arrays:
            try:
                columns[name] = arrays[name]
            except ValueError as error:
                if "Object arrays" not in str(error):
                    raise
                reason = f"the array {name!r} has objects: save numbers, rows of one length"
                raise ValueError(reason) from None
    return columns


def table_columns(table: pa.Table, name: str, part: str) -> Columns:
    """The columns of a table, decimals as float64. Raises ValueError for one that it has twice."""
    duplicates = [name for name in table.column_names if table.column_names.count(name) > 1]
    if duplicates:
        hint = " (is the first line a row?)" if duplicates[0].replace(".", "").isdigit() else ""
        raise ValueError(f"the column {duplicates[0]!r} twice{hint}")
    columns = [
        column.cast(pa.float64()) if pa.types.is_decimal(column.type) else column
        for column in table.columns
    ]
    named_columns = Columns(name, dict(zip(table.column_names, columns, strict=True)), part)
    metadata = (table.schema.metadata or {}).get(b"huggingface", b"{}")
    features = json.loads(metadata).get("info", {}).get("features", {})
    for column, feature in features.items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            named_columns.names[column] = tuple(feature.get("names") or ())
    return named_columns


def _csv(path: Path) -> pa.Table:
    """Commas, semicolons, tabs or bars between fields, whichever the first line has most of; where
    these are not commas, a number may have one for its decimal point.
    """
    check_memory(path.stat().st_size)
    with path.open("rb") as file:
        head = file.readline(1 << 16).decode("utf-8", "replace")
    delimiter = max(DELIMITERS, key=head.count)
    table = _parse_csv(path, delimiter)
    if delimiter != "," and _count_text_columns(table):
        table = min(table, _parse_csv(path, delimiter, decimal=","), key=_count_text_columns)
    for field in table.schema:
        if pa.types.is_binary(field.type):
            raise ValueError(f"the column {field.name!r} is no text in UTF-8: write it as that")
    return table


def _parse_csv(path: Path, delimiter: str, decimal: str = ".") -> pa.Table:
    from pyarrow import csv

    return csv.read_csv(
        path,
        # in one thread, whose errors have the number of the row
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=csv.ConvertOptions(strings_can_be_null=True, decimal_point=decimal),
    )


def _count_text_columns(table: pa.Table) -> int:
    """How many columns are of text."""
    return sum(pa.types.is_string(kind) for kind in table.schema.types)


def _json(path: Path) -> pa.Table:
    from pyarrow import json as lines

    check_memory(path.stat().st_size)
    with path.open("rb") as file:
        if file.read(64).lstrip()[:1] == b"[":
            raise ValueError("it is one JSON array: give an object per line, JSON lines")
    return lines.read_json(path)


def _arrow(path: Path) -> pa.Table:
    """An Arrow file, or stream."""
    from pyarrow import feather

    with path.open("rb") as file:
        stream = file.read(4) == b"\xff\xff\xff\xff"
    return read_stream(path) if stream else feather.read_table(path, memory_map=True)


def read_stream(path: Path) -> pa.Table:
    """The table in a file that holds an Arrow stream."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_stream(source).read_all()


def _parquet(path: Path) -> pa.Table:
    with pq.ParquetFile(path) as file:
        check_memory(_bytes(file.metadata))
    return pq.read_table(path)


READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".csv": _csv, ".tsv": _csv, ".jsonl": _json, ".ndjson": _json, ".json": _json,
    ".parquet": _parquet, ".arrow": _arrow, ".feather": _arrow,
}  # fmt: skip


def _bytes(parquet: pq.FileMetaData) -> int:
    """Bytes that the columns of a Parquet file take at least when read, however they are packed."""
    widths = {"INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 4}
    total = 0
    for group in range(parquet.num_row_groups):
        for index in range(parquet.num_columns):
            column = parquet.row_group(group).column(index)
            value_bytes = column.num_values * widths.get(column.physical_type, 0)
            total += max(value_bytes, column.total_uncompressed_size)
    return total


def check_gaps(column: Any, name: str, field: str) -> None:
    """Raises `ConfigError` for a column of Arrow that has gaps."""
    if column.null_count:
        reason = f"this one lacks {column.null_count} values (leave out these rows)"
        raise ConfigError(field, name, f"a column without gaps; {reason}")


def column_array(column: Any, name: str, field: str) -> np.ndarray:
    """[rows] without gaps, of numbers or strings."""
    requirement = "one number or name to a row"
    if not isinstance(column, np.ndarray):
        check_gaps(column, name, field)
        if pa.types.is_nested(column.type):
            raise ConfigError(field, name, f"{requirement}, not {column.type}")
        is_dictionary = pa.types.is_dictionary(column.type)
        try:
            column = np.asarray(column.to_pylist()) if is_dictionary else column.to_numpy()
        except (pa.ArrowException, NotImplementedError, ValueError) as error:
            raise ConfigError(field, name, f"{requirement}, not {column.type} ({error})") from None
    if column.ndim != 1:
        raise ConfigError(field, name, f"{requirement}; this array has shape {column.shape}")
    return column


def named_array(table: Columns, name: str, field: str) -> np.ndarray:
    """As `column_array`, of a column by name."""
    if name not in table:
        raise column_error(field, name, table)
    return column_array(table[name], name, field)


def labels(columns: Sequence[Any], names: Sequence[str], field: str) -> np.ndarray:
    """Targets as some columns have them: numbers or text [rows]; numbers [rows, n] of several
    columns, or of lists of one length; an object array [rows] of other lists. Raises `ConfigError`
    on the field.
    """
    if len(columns) > 1:
        arrays = [column_array(*pair, field) for pair in zip(columns, names, strict=True)]
        for column, name in zip(arrays, names, strict=True):
            if column.dtype.kind not in "biuf":
                raise ConfigError(field, name, "a column of numbers, where there are several")
        if len({len(column) for column in arrays}) > 1:
            raise ConfigError(field, list(names), "columns of one length")
        return np.stack(arrays, 1)
    (column,) = columns
    if isinstance(column, np.ndarray) and column.ndim == 2:
        return column
    if isinstance(column, np.ndarray) or not is_list(column):
        return column_array(column, names[0], field)
    check_gaps(column, names[0], field)
    rows = column.to_pylist()
    if any(value is None or isinstance(value, (list, dict)) for row in rows for value in row):
        raise ConfigError(field, names[0], "lists of numbers or names, without gaps")
    numeric = not any(isinstance(value, str) for row in rows for value in row)
    if numeric and len({len(row) for row in rows}) == 1:
        return np.array(rows)
    return np.array([*rows, None], object)[:-1]  # or numpy would look into lists of one length


def is_text(column: Any) -> bool:
    """Whether a column has a text to a row."""
    if isinstance(column, np.ndarray):
        return False
    return pa.types.is_string(column.type) or pa.types.is_large_string(column.type)


def is_list(column: Any) -> bool:
    """Whether a column has a list, or more than a number, to a row."""
    if isinstance(column, np.ndarray):
        return column.ndim > 1
    kind = column.type
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def clients_table(
    field: str, path: str, root: Path | None, **column_names: str | None
) -> dict[str, np.ndarray]:
    """Columns of a CSV, Parquet, Arrow or NPZ file that says something of every client: by the key
    of the section `field` that names it, where one does (`column="epsilon"`). `path`: absolute, or
    relative to the data root or the working folder. Raises `ConfigError` naming the field.
    """
    columns = read_columns(f"{field}.path", path, root)
    names = {key: name for key, name in column_names.items() if name is not None}
    return {key: named_array(columns, name, f"{field}.{key}") for key, name in names.items()}


def numbers(field: str, name: str, column: np.ndarray) -> np.ndarray:
    """The column as float64 [n]. Raises `ConfigError` naming `field` if it is not of numbers."""
    if column.dtype.kind not in "iuf" or column.ndim != 1:
        raise ConfigError(field, name, f"a column of numbers, not {column.dtype}")
    return column.astype(np.float64)
