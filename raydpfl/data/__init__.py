"""Data sets, how they are divided among clients, and the files that clients train from.

>>> import tempfile
>>> shards = {"kind": "shards", "per_client": 5}
>>> data = parse({"kind": "fashion_mnist_mini", "clients": 300, "partition": shards})
>>> with tempfile.TemporaryDirectory() as cache:
...     done = Shards.open(prepare(data, seed=0, cache=Path(cache))).describe()
>>> done["samples_per_client"], done["classes_per_client"]
({'min': 30, 'median': 30.0, 'max': 30}, {'min': 2, 'median': 4.0, 'max': 5})

A source gives samples, a front end may make columns of them (`features`), a partition says whose
they are, `prepare` writes them once in client order, and `Shards` reads them. Public to the run:
shapes, the numbers of clients, of samples per client and of classes. Everything random is keyed by
(seed, PARTITION) or (seed, DATA, client).
"""

from collections.abc import Sequence
from pathlib import Path

from raydpfl.config.registry import is_path, user_class
from raydpfl.data.features import FAMILY as FEATURES
from raydpfl.data.partitions import FAMILY as PARTITIONS
from raydpfl.data.partitions import Partition
from raydpfl.data.row_readers import RowReader
from raydpfl.data.shard_writer import prepare
from raydpfl.data.shards import Shards
from raydpfl.data.sizes import FAMILY as SIZES
from raydpfl.data.sizes import Sizes
from raydpfl.data.sources import FAMILY, Data, InMemoryData, Maker, Samples, Split, parse
from raydpfl.data.suggestion import Suggestion
from raydpfl.errors import ConfigError
from raydpfl.storage.files import data_root

__all__ = [
    "FAMILY", "FEATURES", "PARTITIONS", "SIZES", "Data", "InMemoryData", "Maker",
    "Partition", "RowReader", "Samples", "Shards", "Sizes", "Split", "Suggestion",
    "catalogue", "fetch", "parse", "prepare",
]  # fmt: skip


def catalogue(root: Path | None = None, kinds: Sequence[str] = ()) -> list[dict[str, str]]:
    """A row per kind, or import path of a user's class: `kind`, `summary`, and `where` its samples
    are; without `kinds`, all of the project's. Raises `ConfigError`.
    """
    rows = []
    for kind in kinds or FAMILY:
        cls = _class(kind)
        summary = (cls.__doc__ or "").split("\n\n")[0]
        rows.append({"kind": kind, "summary": summary, "where": cls.located(data_root(root))})
    return rows


def fetch(kind: str, root: Path | None = None) -> Path:
    """The root that holds a data set, downloaded unless it is there. Raises `ConfigError`."""
    path = _class(kind).fetch(data_root(root))
    if path is None:
        raise ConfigError("data.kind", kind, "one that is downloaded (see raydpfl data list)")
    return path


def _class(kind: str) -> type[Data]:
    """The class that a `data.kind` names. Raises `ConfigError`."""
    if kind in FAMILY:
        return FAMILY[kind]
    if is_path(kind):
        return user_class(kind, "data", Data)
    expected = f"one of {', '.join(FAMILY)}, or the import path of your own class"
    raise ConfigError("data.kind", kind, expected)
