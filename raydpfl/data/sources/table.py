"""Samples from the columns of a table: in a file, or wherever else it comes from.

>>> TableFile(train="faces/train.parquet", test="faces/test.parquet", x="image", clients=100).kind
'table'

What `x` may be: one column of encoded images (bytes, or a struct with a field `bytes`; see
`raydpfl.data.inputs`), all of one size; one column of lists of one length; or several columns of
numbers. In NPZ one array [rows, ...]: uint8 is taken for images, grey [rows, h, w] or channels
first [rows, c, h, w], or channels last if only that gives 1 or 3 channels. Images are kept
as uint8 and scaled to [0, 1] when read; whole numbers in lists or arrays stay int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, field_validator, model_validator

from raydpfl.config.registry import is_import_allowed, is_path, load
from raydpfl.core.prng import Purpose, stream
from raydpfl.data.columns import Columns, column_error, is_list, labels, named_array, read_columns
from raydpfl.data.inputs import DType, cast_inputs, inputs
from raydpfl.data.sources.base import InMemoryData, Samples
from raydpfl.data.tokens import LARGEST, TOKENIZERS, Encoder, check, read_vocabulary
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Target, Task
from raydpfl.storage.files import file_identity

CLASSES = "which classes occur, and so how many outputs the model has (unless data.classes says it)"
POSITIONS = "how many targets the longest list has"
DECLARED_NOTE = (
    "what data.vocabulary and data.tokenizer were made of: they are taken as public, and no row is "
    "read for them"
)
TOKENS = "the largest of inputs that stay whole numbers (data.dtype), which sizes an embedding"


class Tabular(InMemoryData):
    """Base of the tables: `read` gives the training rows, or the test rows.

    Where there are no test rows, `split_by` says which rows are for testing (others than train and
    test are left out), or a `test_fraction` is drawn (but of no client, where `client` names them,
    its last). With a `tokenizer` the column of `x` is text (see `raydpfl.data.tokens`), and with
    the same column as `y` and the task sequence the next token is learnt at every position. `mean`,
    `std`: public constants, for images scaled to [0, 1].
    """

    division: ClassVar[frozenset[str]] = InMemoryData.division | {
        "client",
        "split_by",
        "test_fraction",
        "train",
    }

    added_fields: ClassVar[frozenset[str]] = InMemoryData.added_fields | {
        "classes", "dtype", "split_by", "tokenizer", "vocabulary", "length",
    }  # fmt: skip
    file_fields: ClassVar[frozenset[str]] = frozenset({"vocabulary"})

    test_fraction: float = Field(default=0.1, gt=0, lt=1, description="share of rows for testing")
    x: tuple[str, ...] = Field(default=("image",), description="the columns of the input")
    y: str | tuple[str, ...] = Field(default="label", description="the columns of the target")
    classes: int | tuple[str, ...] | None = Field(
        default=None, description="their number, or their labels in order; None: as the data say"
    )
    dtype: DType = Field(
        default="auto", description="of inputs; auto: lists of whole numbers stay such, as tokens"
    )
    client: str | None = Field(default=None, description="the column of each row's client")
    split_by: str | None = Field(default=None, description="the column that says train or test")
    tokenizer: str | None = Field(
        default=None,
        description="words, characters, or a function that gives tokens or ids, by path",
    )
    vocabulary: str | tuple[str, ...] | Annotated[int, Field(ge=2, le=LARGEST)] | None = Field(
        default=None, description="the tokens, or a file with one a line; of ids a number above all"
    )
    length: int | None = Field(default=None, ge=1, description="tokens of a text that are taken")
    mean: tuple[float, ...] = Field(
        default=(), description="of each channel, in [0, 1], to normalise images by: public"
    )
    std: tuple[float, ...] = Field(default=(), description="as `mean`")

    @field_validator("x", mode="before", json_schema_input_type=str | tuple[str, ...])
    @classmethod
    def _wrap_x(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator(
        "classes", mode="before",
        json_schema_input_type=int | tuple[str | float | bool, ...] | None,
    )  # fmt: skip
    @classmethod
    def _labels(cls, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(label if isinstance(label, str | None) else str(label) for label in value)
        return value

    @model_validator(mode="after")
    def _check_columns(self) -> Tabular:
        for field, is_invalid, expected in self._rules():
            if is_invalid:
                raise ConfigError(f"data.{field}", getattr(self, field), expected)
        if isinstance(self.vocabulary, tuple):
            check(self.vocabulary, list(self.vocabulary))
        for path in self.import_paths() if is_import_allowed("data") else ():
            load(path, "data.tokenizer")
        return self

    def import_paths(self) -> tuple[str, ...]:
        return (self.tokenizer,) if is_path(self.tokenizer) else ()

    def _rules(self) -> Iterator[tuple[str, Any, str]]:
        """Fields, whether each is wrong, and what is expected of it."""
        expected = f"positive numbers, one for each of data.mean = {self.mean}"
        yield "std", len(self.mean) != len(self.std) or min(self.std, default=1) <= 0, expected
        yield "x", not self.x, "the name of a column, or several"
        yield "y", not self.y, "the name of a column, or several"
        yield from (
            self._text_rules()
            if self.tokenizer is not None
            else (
                (name, getattr(self, name) is not None, "none without data.tokenizer")
                for name in ("vocabulary", "length")
            )
        )
        is_split_given = self.split_by is not None and "test" in self._parts()
        yield "split_by", is_split_given, "none with data.test, which names the test rows"
        overlap = ", ".join(name for name in self.x if name in self.targets)
        expected = f"columns without {overlap}, which is data.y: a model would read it off"
        yield "x", overlap and not self._predicts_next_token, expected
        class_count = self.classes if isinstance(self.classes, int) else len(self.classes or "two")
        has_duplicates = isinstance(self.classes, tuple) and len(set(self.classes)) < class_count
        yield "classes", class_count < 1 or has_duplicates, "a number of classes, or their names"

    def _text_rules(self) -> Iterator[tuple[str, Any, str]]:
        """As `_rules`, where a tokenizer makes tokens of a column."""
        tokenizer = self.tokenizer
        expected = f"{', '.join(TOKENIZERS)}, or the import path of a function of your own"
        yield "tokenizer", tokenizer not in TOKENIZERS and not is_path(tokenizer), expected
        is_vocabulary_size = isinstance(self.vocabulary, int) and tokenizer in TOKENIZERS
        expected = (
            "a file of tokens, one a line, or the list of them: one that is learnt from the data "
            "would be a query that no accountant counts"
        )
        yield "vocabulary", self.vocabulary is None or is_vocabulary_size, expected
        expected = "none where the next token is learnt: data.vocabulary says how many"
        yield "classes", self._predicts_next_token and self.classes is not None, expected
        yield "length", self.length is None, "how many tokens of a text are taken, the first ones"
        yield "x", len(self.x) > 1, "one column of text with data.tokenizer"
        fields = {"dtype": self.dtype == "float32", "mean": self.mean, "features": self.features}
        for name, present in fields.items():
            yield name, present, "none with data.tokenizer, whose token ids stay whole numbers"

    @property
    def _predicts_next_token(self) -> bool:
        """Whether the next token is learnt, at every position of a text."""
        is_same_column = self.tokenizer is not None and self.targets == self.x
        return is_same_column and self.task.takes == "positions"

    def _encoder(self, root: Path | None) -> Encoder | None:
        """The encoder of the column of text; None: no column is text. Raises `ConfigError`."""
        if self.tokenizer is None:
            return None
        assert self.vocabulary is not None and self.length is not None
        vocabulary = self.vocabulary
        if isinstance(vocabulary, str):
            vocabulary = read_vocabulary(vocabulary, root)
        return Encoder(self.tokenizer, vocabulary, self.length + self._predicts_next_token)

    def identity(self, root: Path | None) -> list:
        encoder = self._encoder(root)
        encoder_facts = [] if encoder is None else [encoder.vocabulary, encoder.code()]
        return [*super().identity(root), *encoder_facts]

    def counted(self, root: Path | None) -> dict[str, int]:
        encoder = self._encoder(root)
        return {} if encoder is None else encoder.counted(self._texts(self._train(root)))

    def _texts(self, columns: Columns) -> list[str]:
        """The column of text. Raises `ConfigError`."""
        (name,) = self.x
        texts = named_array(columns, name, "data.x").tolist()
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError("data.x", name, "a column of text with data.tokenizer")
        return texts

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of targets."""
        return (self.y,) if isinstance(self.y, str) else self.y

    @classmethod
    def check_task(cls, task: Task) -> None:
        """A table takes any task: the task has its targets from the columns."""

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.mean, self.std

    @property
    def exclusions(self) -> tuple[str, ...]:
        """See `Data.exclusions`: what sizes the model and is read off the rows."""
        exclusions = super().exclusions
        if self.tokenizer is not None:
            exclusions += (DECLARED_NOTE,)
        if self._predicts_next_token:
            return exclusions
        if self.task.takes != "numbers" and self.classes is None:
            exclusions += (CLASSES,)
        if self.task.takes == "positions":
            exclusions += (POSITIONS,)
        if self.tokenizer is not None:
            return exclusions
        # lists of whole numbers stay such by themselves, columns of them where that is asked for
        whole = self.dtype == "int64" or (self.dtype == "auto" and len(self.x) == 1)
        return (*exclusions, TOKENS) if whole and not (self.features or self.mean) else exclusions

    def read(self, part: str, name: str, root: Path | None) -> Columns:
        """The columns of the `train` or `test` rows, by what names them. Raises `ConfigError`."""
        raise NotImplementedError

    def source(self, part: str, name: str, root: Path | None) -> list[str]:
        """What the contents of these rows are known by. Raises `ConfigError`."""
        raise NotImplementedError

    def sources(self, root: Path | None) -> list:
        return [self.source(part, name, root) for part, name in self._parts().items()]

    def _parts(self) -> dict[str, str]:
        """What names the rows for training, and those for testing where there are any."""
        names = {part: getattr(self, part) for part in ("train", "test")}
        return {part: name for part, name in names.items() if name is not None}

    def _train(self, root: Path | None) -> Columns:
        return self.read("train", self._parts()["train"], root)

    def knows_clients(self) -> bool:
        return self.client is not None

    @property
    def tests_clients(self) -> bool:
        return self.client is not None and "test" not in self._parts()

    def table(self, root: Path | None) -> Columns | None:
        return self._train(root)

    def samples(self, seed: int, root: Path | None) -> Samples:
        train = self._train(root)
        encoder = self._encoder(root)
        x, y, client = self._rows(train, encoder)
        if "test" in self._parts():
            test = self.read("test", self._parts()["test"], root)
            test_x, test_y, _ = self._rows(test, encoder)
            if test_x.shape[1:] != x.shape[1:]:
                expected = f"samples like those of {train.name}: {x.shape[1:]}"
                raise ConfigError("data.test", test.name, f"{expected}, not {test_x.shape[1:]}")
            rows, test_rows = np.arange(len(x)), np.arange(len(test_x))
        else:
            test = train
            rows, test_rows = map(np.flatnonzero, self._split_rows(train, len(y), client, seed))
            test_x, test_y = x[test_rows], y[test_rows]
            x, y = x[rows], y[rows]
            client = None if client is None else client[rows]
        for part, count in (("train", len(y)), ("test", len(test_y))):
            if not count:
                expected = f"a table that leaves at least one row to {part}"
                if part == "test" and client is not None:
                    expected += ", or a file of test rows: each client keeps one row"
                raise ConfigError(f"data.{part}", getattr(self, part, None), expected)
        ids = None
        if client is not None:
            names, client = np.unique(client, return_inverse=True)
            ids = list(map(str, names.tolist()))
        if encoder is None:
            x, test_x = cast_inputs(x, test_x, self.x, self.dtype, is_list(train[self.x[0]]))
            self._check_numbers((x, rows, train.name), (test_x, test_rows, test.name))
        if encoder is not None and self._predicts_next_token:
            target = Target(y.shape[1:], encoder.size)
        else:
            y, test_y, target = self._targets(train, y, test_y)
            if test_y.shape[1:] != y.shape[1:]:
                expected = f"targets like those of {train.name}: {y.shape[1:]}"
                raise ConfigError("data.test", test.name, f"{expected}, not {test_y.shape[1:]}")
        tokens = encoder.size if encoder else None
        return Samples(x, y, test_x, test_y, client, target, tokens, ids)

    def _rows(
        self, columns: Columns, encoder: Encoder | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """x [rows, ...] and y [rows, ...] as the columns have them, of text the token ids; and of
        training rows, where a column names clients, who holds each.
        """
        owner = self.client if columns.part == "train" else None
        fields = {"x": self.x, "y": self.targets, "client": [owner] if owner else []}
        required_columns = [(field, column) for field, names in fields.items() for column in names]
        for field, column in required_columns:
            if column not in columns:
                raise column_error(f"data.{field}", column, columns)
        arrays = [columns[column] for _, column in required_columns]
        part = f"data.{columns.part}"
        if not all(len(array) for array in arrays if getattr(array, "ndim", 1)):
            raise ConfigError(part, columns.name, "a table with rows; this one has none")
        x = self._inputs(columns) if encoder is None else encoder.ids(self._texts(columns))
        if encoder is not None and self._predicts_next_token:
            x, y = x[:, :-1], np.where(encoder.known(x), x, self.task.ignore_index())[:, 1:]
        else:
            y = labels([columns[name] for name in self.targets], self.targets, "data.y")
        client = named_array(columns, owner, "data.client") if owner else None
        if client is not None and client.dtype.kind in "fmM" and not np.isfinite(client).all():
            row = np.argmin(np.isfinite(client))
            expected = f"a column without gaps; row {row} of {columns.name} is one"
            raise ConfigError("data.client", owner, expected)
        if len({len(values) for values in (x, y, client) if values is not None}) > 1:
            raise ConfigError(part, columns.name, "columns of one length")
        return x, y, client

    def _inputs(self, columns: Columns) -> np.ndarray:
        """Inputs [rows, *shape], as the columns have them."""
        parts = [inputs(columns[column], column, columns.rows) for column in self.x]
        if len(parts) > 1 and any(part.ndim > 1 for part in parts):
            expected = "one column of images or lists, or several of numbers"
            raise ConfigError("data.x", self.x, expected)
        if parts[0].ndim > 1:
            return parts[0]
        whole = all(part.dtype.kind in "biu" for part in parts)
        return np.stack([part if whole else part.astype(np.float64) for part in parts], 1)

    def _split_rows(
        self, train: Columns, rows: int, client: np.ndarray | None, seed: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which rows are for training, and which for testing, bool [rows]: as `split_by` says, or
        drawn. Of each client one row at least is for training.
        """
        if self.split_by is None:
            order = stream(seed, Purpose.PARTITION, step=1).permutation(rows)
            if client is not None:
                last_rows = rows - 1 - np.unique(client[order][::-1], return_index=True)[1]
                order = np.delete(order, last_rows)
            test_mask = np.zeros(rows, bool)
            test_mask[order[: max(1, round(self.test_fraction * rows))]] = True
            return ~test_mask, test_mask
        column = named_array(train, self.split_by, "data.split_by").astype(str)
        values = np.char.lower(column)
        train_mask, test_mask = values == "train", values == "test"
        if not train_mask.any() or not test_mask.any():
            examples = ", ".join(map(repr, np.unique(column)[:5].tolist()))
            expected = f"a column that says train or test of every row; this one says {examples}"
            raise ConfigError("data.split_by", self.split_by, expected)
        return train_mask, test_mask

    def _targets(
        self, train: Columns, y: np.ndarray, test_y: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Target]:
        """Targets of training and test rows, and what they are."""
        class_names = train.names.get(self.targets[0], ()) if len(self.targets) == 1 else ()
        uses_class_names = class_names and self.classes is None and y.dtype.kind in "iu"
        classes = len(class_names) if uses_class_names else self.classes
        column_names = ", ".join(self.targets)
        y, test_y, target = self.task.targets(column_names, y, test_y, classes)
        target_names = self.targets if len(self.targets) > 1 else ()
        names = target.names or (class_names if uses_class_names else ()) or target_names
        return y, test_y, replace(target, names=tuple(names))

    def _check_numbers(self, *parts: tuple[np.ndarray, np.ndarray, str]) -> None:
        """Raises `ConfigError` for inputs that are not finite, and constants for no images; of each
        of `parts` these are the inputs, their rows in a file, int64, and its name.
        """
        for x, rows, file in parts:
            if x.dtype == np.float32 and not np.isfinite(x).all():
                row = rows[np.argwhere(~np.isfinite(x))[0, 0]]
                expected = f"finite numbers; row {row} of {file} has another"
                raise ConfigError("data.x", self.x, expected)
        if self.mean and (x.dtype != np.uint8 or len(self.mean) != x.shape[1]):
            expected = "one number per channel of an image; the samples are"
            raise ConfigError("data.mean", self.mean, f"{expected} {x.dtype} {x.shape[1:]}")


class TableFile(Tabular):
    """Training rows, test rows from a second file or held out at random, and columns by name.

    Files are .csv, .tsv, .jsonl, .parquet, .arrow, .feather or .npz.
    """

    file_fields: ClassVar[frozenset[str]] = Tabular.file_fields | {"train", "test"}

    kind: str = "table"
    location: ClassVar[str] = "your own file"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a file
    train: str = Field(description="a file, absolute, or relative to data root or working folder")
    test: str | None = Field(default=None, description="as `train`")

    def source(self, part: str, name: str, root: Path | None) -> list[str]:
        return file_identity(f"data.{part}", name, root)

    def read(self, part: str, name: str, root: Path | None) -> Columns:
        return read_columns(f"data.{part}", name, root, part)
