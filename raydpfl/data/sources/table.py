"""A data set of one's own, as a table in a file.

>>> TableFile(train="faces/train.parquet", test="faces/test.parquet", x="image", clients=100).kind
'table'

What `x` may be: one column of encoded images (bytes, or a struct with a field `bytes`; see
`raydpfl.data.inputs`), all of one size; one column of lists of one length; or several columns of
numbers. In NPZ one array [rows, ...]: uint8 is taken for images, grey [rows, h, w] or channels
first [rows, c, h, w], or channels last if only that gives 1 or 3 channels. Images are kept
as uint8 and scaled to [0, 1] when read; whole numbers in lists or arrays stay int64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from raydpfl.data.columns import Columns, read_columns
from raydpfl.data.sources.table_base import Tabular
from raydpfl.storage.files import file_identity


class TableFile(Tabular):
    """Training rows, test rows from a second file or held out at random, and columns by name.

    `train`, `test`: files (.csv, .tsv, .jsonl, .parquet, .arrow, .feather, .npz), absolute, or
    relative to the data root or the working folder.
    """

    named: ClassVar[frozenset[str]] = Tabular.named | {"train", "test"}

    kind: str = "table"
    location: ClassVar[str] = "your own file"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a file
    train: str
    test: str | None = None

    def sources(self, root: Path | None) -> list:
        files = {"train": self.train} | ({"test": self.test} if self.test else {})
        return [file_identity(f"data.{key}", name, root) for key, name in files.items()]

    def columns(self, part: str, root: Path | None) -> Columns | None:
        name = getattr(self, part)
        return None if name is None else read_columns(f"data.{part}", name, root, part)
