"""Data sets of Hugging Face."""

import hashlib
import json
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
from pydantic import Field

from raydpfl.data.columns import Columns, read_stream, table_columns
from raydpfl.data.sources.table import Tabular
from raydpfl.errors import ConfigError, one_line
from raydpfl.storage.files import data_root, digest

EXTRA = "pip install 'raydpfl[hf]'"


class HuggingFaceData(Tabular):
    """A data set of Hugging Face: a folder that `save_to_disk` wrote, or a name, `owner/name` or
    `owner/name:config`, which the library `datasets` finds in its cache or downloads (pip install
    'raydpfl[hf]'). Of a folder with a single split, that is `train`.
    """

    file_fields: ClassVar[frozenset[str]] = Tabular.file_fields | {"path"}

    division: ClassVar[frozenset[str]] = Tabular.division | {"path"}
    kind: str = "hugging_face"
    location: ClassVar[str] = "your own folder, or its hub"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ()  # it needs a data set
    path: str = Field(description="a folder, or a name")
    train: str = Field(default="train", description="a split")
    test: str | None = Field(default=None, description="a split; None: rows of `train`")

    def source(self, part: str, name: str, root: Path | None) -> list[str]:
        folder = self.folder(root)
        if folder is None:
            return [name, _load_split(self.path, name)._fingerprint]
        file_digests = map(digest, self._files(folder, name))
        return [name, hashlib.sha256("".join(file_digests).encode()).hexdigest()]

    def read(self, part: str, name: str, root: Path | None) -> Columns:
        folder = self.folder(root)
        try:
            if folder is None:
                table = _load_split(self.path, name).with_format("arrow")[:]
            else:
                table = pa.concat_tables(map(read_stream, self._files(folder, name)))
            return table_columns(table, f"{self.path} ({name})", part)
        except ConfigError:
            raise
        except (pa.ArrowException, ValueError, OSError) as error:
            expected = f"a data set that can be read ({one_line(error)})"
            raise ConfigError("data.path", self.path, expected) from None

    def absent_files(self, root: Path | None) -> list[str]:
        place = [f"{self.path} of the hub"] if self.folder(root) is None else []
        return place + super().absent_files(root)

    def folder(self, root: Path | None) -> Path | None:
        """The folder that `path` names; None: it is the name of a data set."""
        places = (data_root(root) / self.path, Path(self.path))
        return next((path for path in places if path.is_dir()), None)

    def _files(self, folder: Path, split: str) -> list[Path]:
        """The Arrow files of a split, in order. Raises `ConfigError`."""
        subfolder = folder / split
        source = subfolder if subfolder.is_dir() else folder
        if source is folder and ((folder / "dataset_dict.json").exists() or split != self.train):
            splits = ", ".join(sorted(path.parent.name for path in folder.glob("*/state.json")))
            field = "data.train" if split == self.train else "data.test"
            expected = f"a split of {folder.name}: {splits or 'it has one, data.train'}"
            raise ConfigError(field, split, expected)
        try:
            state = json.loads((source / "state.json").read_text())
            return [source / entry["filename"] for entry in state["_data_files"]]
        except (OSError, ValueError, LookupError, TypeError):
            expected = "a folder that save_to_disk of datasets wrote, or the name of a data set"
            raise ConfigError("data.path", self.path, expected) from None


def _load_split(path: str, split: str) -> Any:
    """A split of a data set by name. Raises `ConfigError`."""
    try:
        from datasets import load_dataset
    except ImportError:
        expected = f"a folder that save_to_disk wrote; a name needs the library datasets ({EXTRA})"
        raise ConfigError("data.path", path, expected) from None
    name, _, config = path.partition(":")
    try:
        return load_dataset(name, config or None, split=split)
    except Exception as error:  # no network, no such data set, a split that it lacks
        expected = f"a data set that can be loaded ({one_line(error)})"
        raise ConfigError("data.path", path, expected) from None
