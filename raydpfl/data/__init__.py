"""Data sets, how they are dealt to clients, and the files that clients train from.

>>> import tempfile
>>> shards = {"kind": "shards", "per_client": 5}
>>> data = parse({"kind": "fashion_mnist_mini", "clients": 300, "partition": shards})
>>> with tempfile.TemporaryDirectory() as cache:
...     done = Shards.open(prepare(data, seed=0, cache=Path(cache))).describe()
>>> done["samples_per_client"], done["classes_per_client"]
({'min': 30, 'median': 30.0, 'max': 30}, {'min': 2, 'median': 4.0, 'max': 5})

A source (`sources`, `table`, `synthetic`, `quadratics`) gives samples, a front end may make columns
of them (`features`), a partition (`partitions`) says whose they are, some rows of each client may
be held out of training (`heldout`), `prepare` writes them once in
client order, and `Shards` reads them (`shards`). Public to the run: shapes, the numbers of clients,
of samples per client and of classes. Everything random is keyed by (seed, PARTITION) or (seed,
DATA, client).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydpfl.data.features import FEATURES
from raydpfl.data.partitions import PARTITIONS, SIZES, Partition, Sizes
from raydpfl.data.quadratics import Quadratics, ScalarQuadratics
from raydpfl.data.shards import Room, Shards, prepare
from raydpfl.data.sources import (
    Cifar10,
    Cifar100,
    Data,
    Dealt,
    EmnistDigits,
    FashionMnist,
    FashionMnistMini,
    Mnist,
    Samples,
    Split,
    Svhn,
    TorchvisionImages,
)
from raydpfl.data.synthetic import Synthetic
from raydpfl.data.table import Table
from raydpfl.errors import ConfigError
from raydpfl.files import data_root
from raydpfl.member import choose

__all__ = [
    "FAMILY", "FEATURES", "PARTITIONS", "SIZES", "Data", "Dealt", "Partition", "Room", "Samples",
    "Shards", "Sizes", "Split", "catalogue", "describe", "fetch", "parse", "prepare",
]  # fmt: skip

FAMILY: dict[str, type[Data]] = {
    "fashion_mnist_mini": FashionMnistMini,
    "mnist": Mnist,
    "fashion_mnist": FashionMnist,
    "emnist_digits": EmnistDigits,
    "cifar10": Cifar10,
    "cifar100": Cifar100,
    "svhn": Svhn,
    "table": Table,
    "synthetic": Synthetic,
    "quadratics": Quadratics,
    "scalar_quadratics": ScalarQuadratics,
}


def parse(values: Mapping[str, Any]) -> Data:
    """The `data` section of a config. Raises `ConfigError`."""
    return choose("data", values, FAMILY, Data)


def catalogue(root: Path | None = None) -> list[dict[str, str]]:
    """A row per kind: `kind`, `summary`, and `where` its samples are (`raydpfl data list`)."""
    folder = data_root(root)
    rows = []
    for kind, cls in FAMILY.items():
        where = (
            "in the package"
            if cls is FashionMnistMini
            else "your own file"
            if cls is Table
            else "generated"
        )
        if issubclass(cls, TorchvisionImages):
            where = (
                str(folder)
                if cls.present(folder)
                else f"not under {folder}; raydpfl data fetch {kind}"
            )
        rows.append({"kind": kind, "summary": (cls.__doc__ or "").split("\n\n")[0], "where": where})
    return rows


def fetch(kind: str, root: Path | None = None) -> Path:
    """Downloads a data set unless it is there, and returns the root that holds it (`raydpfl data
    fetch`). Raises `ConfigError`.
    """
    cls = FAMILY.get(kind)
    if cls is None or not issubclass(cls, TorchvisionImages):
        fetched = ", ".join(
            name for name, member in FAMILY.items() if issubclass(member, TorchvisionImages)
        )
        raise ConfigError("data.kind", kind, f"one that can be fetched: {fetched}")
    return cls().ensure(root)


def describe(data: Data, seed: int = 0, root: Path | None = None, validation: float = 0.0) -> dict:
    """What each client gets, in numbers (`raydpfl data describe`); prepares the data. See
    `prepare` and `Shards.describe`.
    """
    return Shards.open(prepare(data, seed, root, validation=validation)).describe()
