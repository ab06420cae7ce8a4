"""The base of the family, and what a member gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field, SerializeAsAny, field_validator, model_validator

from raydpfl.config.registry import Member, choose
from raydpfl.core.prng import Purpose, stream
from raydpfl.data.columns import Columns
from raydpfl.data.features import FAMILY as FEATURES
from raydpfl.data.features import Features
from raydpfl.data.partitions import FAMILY as PARTITIONS
from raydpfl.data.partitions import Iid, Partition
from raydpfl.data.sizes import FAMILY as SIZES
from raydpfl.data.sizes import Balanced, Sizes
from raydpfl.errors import ConfigError
from raydpfl.models.tasks import Classification, Target, Task
from raydpfl.models.tasks import parse as parse_task

LARGEST = 3 << 26  # numbers of a sample at most: a colour image of 67 million pixels
SHARED_NOTE = (
    "a sample that several clients hold: it is in the rows of each, and what is protected is the "
    "rows of one client"
)

Maker = Callable[[int, int], Iterator[tuple[np.ndarray, np.ndarray]]]


@dataclass(frozen=True)
class Split:
    """Samples of clients. `rows(first, last)` and `test()` give (x [rows, *shape], y [rows,
    *targets]).

    x is uint8, pixels that are scaled to [0, 1] when read; float32; or int64, whole numbers from 0
    to `tokens` - 1. y is int64, classes from 0 to `classes` - 1; or float32 numbers, where
    `classes` is 0.

    Args:
        sizes: int64 [clients], samples of each.
        shape: of one sample.
        classes: how many there are; 0: targets are numbers.
        rows: training rows of clients first to last - 1, client after client.
        test: the test rows.
        mean, std: per channel, of samples scaled to [0, 1]; empty: not normalised.
        unused: training samples that no client holds.
        optimum: the least test loss of any model of `kind: linear`, where it is known.
        samples: the sample of each of `rows`, int64 [rows], where clients share samples.
        at: x and y of samples by number, ascending; then each sample is kept once.
        tokens: x is whole numbers below it; 0: x is no tokens.
        targets: the shape of the targets of one sample.
        names: of the classes, or of the targets, where they have any.
        ids: of the clients, as the data have them; None: the data name no clients.
        without: the same, learnt without these samples, int64; None: nothing is learnt of any.
    """

    sizes: np.ndarray
    shape: tuple[int, ...]
    classes: int
    rows: Callable[[int, int], tuple[np.ndarray, np.ndarray]]
    test: Callable[[], tuple[np.ndarray, np.ndarray]]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    unused: int = 0
    optimum: float | None = None
    samples: Callable[[int, int], np.ndarray] | None = None
    at: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    tokens: int = 0
    targets: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    ids: Sequence[str] | None = None
    without: Callable[[np.ndarray], Split] | None = None


@dataclass(frozen=True)
class Samples:
    """A data set in memory.

    Args:
        x: [rows, *shape] uint8 (0 to 255), float32 or int64 (from 0).
        y: [rows, *targets] in int64 (classes) or float32 (numbers).
        test_x, test_y: the same, of test rows.
        client: int64 [rows], who holds each training row; None: the rows do not tell.
        target: what y is; None: as many classes as the largest y says, or numbers.
        tokens: see `Split`; None: as many as the largest x says.
        ids: of the clients that `client` numbers; None: the numbers are their ids.
    """

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    client: np.ndarray | None = None
    target: Target | None = None
    tokens: int | None = None
    ids: Sequence[str] | None = None

    def known_target(self) -> Target:
        """What y is."""
        if self.target is not None:
            return self.target
        numbers = self.y.dtype.kind == "f"
        classes = 0 if numbers else 1 + int(max(self.y.max(), self.test_y.max(initial=0)))
        return Target(self.y.shape[1:], classes)

    def known_tokens(self) -> int:
        """The number of tokens; 0: x is no tokens."""
        if self.tokens is not None:
            return self.tokens
        if self.x.dtype.kind != "i":
            return 0
        return 1 + int(max(self.x.max(), self.test_x.max(initial=0)))


class Data(Member):
    """Base of the family; a user's own source derives from it, or from `InMemoryData`."""

    added_fields: ClassVar[frozenset[str]] = frozenset({"task", "seed"})
    location: ClassVar[str] = "given by its class"  # see `located`
    # fields that say which rows there are, and whose each is; others are of how rows look
    division: ClassVar[frozenset[str]] = frozenset({"kind", "clients"})

    clients: int | None = Field(
        default=None, ge=1, le=10**9, description="N; None: as many as the data have"
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        lt=1 << 64,
        description=(
            "of the partition, of rows held out and of synthetic samples, so that runs with other "
            "seeds have the same clients; None: the run's"
        ),
    )
    task: SerializeAsAny[Task] = Field(default=Classification(), description="what is learnt")

    @field_validator("task", mode="before")
    @classmethod
    def _task(cls, value: Any) -> Task:
        task = parse_task(value)
        if not task.is_placeholder():
            cls.check_task(task)
        return task

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Raises `ConfigError` for a task that takes other targets than the default one does."""
        default = cls.model_fields["task"].default
        if task.takes != default.takes:
            expected = f"a task whose targets are those of the data ({default.kind}, or a loss of"
            raise ConfigError("data.task.kind", task.kind, f"{expected} your own with its base)")

    def split(self, seed: int, root: Path | None) -> Split:
        """The samples and who holds them; writes nothing. Raises `ConfigError`."""
        raise NotImplementedError

    def maker(self, seed: int) -> Maker | None:
        """What makes a client's training rows, of so many, in pieces that fit memory, by this
        config, the seed and the client alone; None: they are written. Data that would take much of
        a disk are made whenever a client trains. A user's is asked by one thread of a process at a
        time.
        """
        return None

    def identity(self, root: Path | None) -> list:
        """The files' contents, in JSON types (`raydpfl.storage.files.file_identity`)."""
        return []

    def facts(self) -> dict[str, Any]:
        """The config of the data in JSON types, without names of files (see `identity`)."""
        return {key: value for key, value in self.meaning().items() if key not in self.file_fields}

    def absent_files(self, root: Path | None) -> list[str]:
        """What it reads and is not on this machine, in words."""
        return []

    def table(self, root: Path | None) -> Columns | None:
        """The columns of its training rows, where it is a table. Raises `ConfigError`."""
        return None

    def counted(self, root: Path | None) -> dict[str, int]:
        """Counts of a column of text for `raydpfl data describe`, by name. Raises `ConfigError`."""
        return {}

    def knows_clients(self) -> bool:
        """Whether its rows say who holds them."""
        return False

    @classmethod
    def located(cls, root: Path) -> str:
        """Where its samples are read from, in words (`raydpfl data list`); `root`: of data."""
        return cls.location

    @classmethod
    def fetch(cls, root: Path) -> Path | None:
        """The root of its downloaded files; None: nothing is downloaded. Raises `ConfigError`."""
        return None

    @property
    def exclusions(self) -> tuple[str, ...]:
        """What of the training data no accountant counts, in words: queries of them, and samples
        that are not one client's."""
        return ()

    @property
    def sample_exclusions(self) -> tuple[str, ...]:
        """The same, in words, of guarantees that protect one sample: what is in more than one."""
        return ()

    def overlaps(self) -> bool:
        """Whether one sample may be held by several clients."""
        return False

    @property
    def names_clients(self) -> bool:
        """Whether the clients are those that the data name."""
        return False

    @property
    def tests_clients(self) -> bool:
        """Whether test rows are rows of the clients, so that no epsilon covers their scores. So it
        is unless a class says otherwise.
        """
        return True


class SizedData(Data):
    """Data of which each client may hold another number of samples."""

    division: ClassVar[frozenset[str]] = Data.division | {"sizes"}

    sizes: SerializeAsAny[Sizes] = Field(
        default=Balanced(), description="how many samples each client has"
    )

    @field_validator("sizes", mode="before")
    @classmethod
    def _sizes(cls, value: Any) -> Sizes:
        return choose("data.sizes", value, SIZES, Sizes)


class InMemoryData(SizedData):
    """A data set in memory, its samples made columns by `features` if asked for, divided among
    clients by a partition.
    """

    division: ClassVar[frozenset[str]] = SizedData.division | {"partition"}

    partition: SerializeAsAny[Partition] = Field(
        default=Iid(), description="which samples each client has"
    )
    features: SerializeAsAny[Features] | None = Field(
        default=None, description="a front end that makes columns of samples"
    )

    def overlaps(self) -> bool:
        return self.partition.overlaps()

    @property
    def names_clients(self) -> bool:
        return self.partition.by == "client"

    @field_validator("partition", mode="before")
    @classmethod
    def _partition(cls, value: Any) -> Partition:
        return choose("data.partition", value, PARTITIONS, Partition)

    @field_validator("features", mode="before")
    @classmethod
    def _features(cls, value: Any) -> Features | None:
        return None if value is None else choose("data.features", value, FEATURES, Features)

    @model_validator(mode="after")
    def _check_features(self) -> InMemoryData:
        self.partition.check_sizes(self.sizes)
        if self.features and self.constants() != ((), ()):
            constants = "constants to normalise pixels by (data.normalize, data.mean)"
            expected = f"none with {constants}: it scales them itself"
            raise ConfigError("data.features.kind", self.features.kind, expected)
        return self

    def samples(self, seed: int, root: Path | None) -> Samples:
        raise NotImplementedError

    def absent_files(self, root: Path | None) -> list[str]:
        return self.features.absent_files() if self.features else []

    def sources(self, root: Path | None) -> list:
        """What `samples` reads, as `identity` has it."""
        return []

    def identity(self, root: Path | None) -> list:
        return [*self.sources(root), *(self.features.identity(root) if self.features else [])]

    def facts(self) -> dict[str, Any]:
        facts = super().facts()
        if self.features:
            for name in self.features.file_fields:
                del facts["features"][name]
        return facts

    def constants(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation per channel, of samples scaled to [0, 1]; empty: not
        normalised.
        """
        return (), ()

    @property
    def exclusions(self) -> tuple[str, ...]:
        exclusions = self.features.exclusions if self.features else ()
        return (*exclusions, SHARED_NOTE) if self.overlaps() else exclusions

    def split(self, seed: int, root: Path | None) -> Split:
        samples = self.samples(seed, root)
        if int(np.prod(samples.x.shape[1:], dtype=object)) > LARGEST:
            expected = f"samples of at most {LARGEST:,} numbers, not {samples.x.shape[1:]}"
            raise ConfigError("data.kind", self.kind, expected)
        order, sizes = self.partition.partition(
            samples.y, samples.client, self.clients, self.sizes, stream(seed, Purpose.PARTITION)
        )
        if self.features is None:
            return self._build_split(samples, order, sizes)
        features = self.features

        def assemble(columns: tuple[np.ndarray, np.ndarray]) -> Split:
            feature_samples = replace(samples, x=columns[0], test_x=columns[1], tokens=0)
            return self._build_split(feature_samples, order, sizes)

        def without(rows: np.ndarray) -> Split:
            return assemble(features.columns_without(samples.x, samples.test_x, rows, root))

        return replace(assemble(features.columns(samples.x, samples.test_x, root)), without=without)

    def _build_split(self, dataset: Samples, order: np.ndarray, sizes: np.ndarray) -> Split:
        """Samples by client: `order`, int64, client after client, of so many `sizes`."""
        ends = np.concatenate([[0], np.cumsum(sizes)])

        def samples(first: int, last: int) -> np.ndarray:
            return order[ends[first] : ends[last]]

        def at(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return dataset.x[indices], dataset.y[indices]

        ids = None
        if self.names_clients and dataset.client is not None and sizes.all():
            owners = dataset.client[order]
            firsts = owners[ends[:-1]].tolist()
            if (owners == np.repeat(firsts, sizes)).all():
                ids = [str(k) if dataset.ids is None else dataset.ids[k] for k in firsts]
        mean, std = self.constants()
        target = dataset.known_target()
        return Split(
            sizes=sizes,
            shape=dataset.x.shape[1:],
            classes=target.classes,
            rows=lambda first, last: at(samples(first, last)),
            test=lambda: (dataset.test_x, dataset.test_y),
            mean=mean,
            std=std,
            unused=len(dataset.y) - len(np.unique(order)),
            samples=samples,
            at=at if self.overlaps() else None,
            tokens=dataset.known_tokens(),
            targets=target.shape,
            names=target.names,
            ids=ids,
        )
