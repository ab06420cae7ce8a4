"""How a data set is dealt to clients: how many samples each one gets, and which.

A partition promises: it is a function of (seed, labels) alone; it deals whole samples; and it
neither drops nor duplicates one unless its definition says so (only `overlapping` does).

>>> labels = np.repeat(np.arange(4), 6)
>>> order, sizes = LabelShards(per_client=2).deal(labels, 6, Balanced(), np.random.default_rng(1))
>>> sizes
array([4, 4, 4, 4, 4, 4])
>>> labels[order].reshape(6, 2, 2)[0]  # client 0: two shards of two samples, each of one class
array([[1, 1],
       [3, 3]])

Partitions that ask for a mixture of classes per client (`dominant-labels`, `classes-per-client`,
`dirichlet`) meet three demands that rarely agree: the mixture, the sizes, and every sample dealt
once. The last two hold exactly; the table of counts [clients, classes] is the one nearest in
relative entropy to the mixture asked for (iterative proportional fitting, Deming and Stephan 1940),
rounded to whole samples by a flow on the entries that the mixture allows.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from raydpfl.errors import ConfigError
from raydpfl.member import Member


class Sizes(Member):
    """Base of the family: how many samples each client holds."""

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Float64 [clients], positive: the sizes up to a common factor."""
        raise NotImplementedError

    def counts(self, total: int, clients: int, generator: np.random.Generator) -> np.ndarray:
        """Int64 [clients] with sum `total`: in proportion to the weights, but never below 1. Raises
        `ConfigError` if total < clients.
        """
        if clients > total:
            raise ConfigError(
                "data.clients",
                clients,
                f"at most the {total} training samples, so that each client has one",
            )
        weights = self.weights(clients, generator)
        return 1 + _apportion(
            total - clients, np.maximum(weights * (total / weights.sum()) - 1, 1e-12)
        )


class Balanced(Sizes):
    """The same for all; when it does not come out even, the first clients hold one sample more."""

    kind: str = "balanced"

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return np.ones(clients)


class PowerLaw(Sizes):
    """Proportional to rank^-exponent, the ranks dealt to the clients at random (the unbalanced
    settings of 002).
    """

    kind: str = "power-law"
    exponent: float = Field(default=1.0, gt=0)

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return (1.0 + generator.permutation(clients)) ** -self.exponent


class Spread(Sizes):
    """n v_k / sum v with v_k ~ U(low, high) (003 sec. VI)."""

    kind: str = "spread"
    low: float = Field(default=0.5, gt=0)
    high: float = Field(default=1.5, gt=0)

    @model_validator(mode="after")
    def _interval(self) -> Spread:
        if self.high < self.low:
            raise ConfigError("data.sizes.high", self.high, f"at least data.sizes.low, {self.low}")
        return self

    def weights(self, clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.uniform(self.low, self.high, clients)


SIZES: dict[str, type[Sizes]] = {"balanced": Balanced, "power-law": PowerLaw, "spread": Spread}


class Partition(Member):
    """Base of the family; `sized` says whether it follows `data.sizes`, `by` which column it deals
    by: row, none but their number.
    """

    sized: ClassVar[bool] = True
    by: ClassVar[Literal["label", "client", "row"]] = "label"

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Which samples each client holds: rows of the data set in client order, int64 [samples],
        and sizes, int64 [clients].

        `labels` is the int64 column [n] that `by` names, or float32 targets for a partition by row.
        Raises `ConfigError` naming the `data.partition` key, or `data.clients`, that the data
        cannot give.
        """
        raise NotImplementedError

    def overlaps(self) -> bool:
        """Whether one sample may be held by several clients."""
        return False


class Iid(Partition):
    """Every client an equally likely subset of its size."""

    by: ClassVar[Literal["label", "client", "row"]] = "row"
    kind: str = "iid"

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = sizes.counts(len(labels), clients, generator)
        return generator.permutation(len(labels)), counts


class Overlapping(Partition):
    """Every client `per_client` samples of its own drawing, as even over the classes as can be;
    clients may share samples, and some samples go unused (000 sec. 2.2, CIFAR-10: 500 samples, 50
    of each class, for each of 1920 clients).
    """

    sized: ClassVar[bool] = False
    kind: str = "overlapping"
    per_client: int = Field(ge=1)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"per_client": 20},)

    def overlaps(self) -> bool:
        return True

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        each = _apportion(self.per_client, np.ones(len(rows)))
        if any(want > len(have) for want, have in zip(each, rows, strict=True)):
            most = len(rows) * min(map(len, rows))
            raise ConfigError(
                "data.partition.per_client",
                self.per_client,
                f"at most {most}: the smallest class times the classes",
            )
        draws = [
            generator.choice(have, want, replace=False)
            for _ in range(clients)
            for want, have in zip(each, rows, strict=True)
        ]
        return np.concatenate(draws), np.full(clients, self.per_client)


class LabelShards(Partition):
    """`per_client` one-class shards each, dealt at random (001 App. G, with 5).

    The samples are sorted by label and cut into clients * per_client shards. A class gets shards in
    proportion to its samples (at least one), and cuts its samples into that many, equal to within
    one sample; so a shard never straddles two classes, whatever the counts, and Fashion-MNIST for
    3000 clients gives 15,000 shards of exactly 4.
    """

    sized: ClassVar[bool] = False
    kind: str = "shards"
    per_client: int = Field(default=5, ge=1)

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        present, counts = np.unique(labels, return_counts=True)
        shards = clients * self.per_client
        if not len(present) <= shards <= len(labels):
            least = -(-len(present) // self.per_client)
            most = len(labels) // self.per_client
            dealt = f"{len(labels)} samples of {len(present)} classes"
            accepted = f"{least} to {most} with {self.per_client} one-class shards each: {dealt}"
            raise ConfigError("data.clients", clients, accepted)
        quotas = 1 + _apportion(
            shards - len(present),
            np.maximum(counts * (shards / counts.sum()) - 1, 1e-12),
            counts - 1,
        )
        rows = generator.permutation(len(labels))
        rows = rows[np.argsort(labels[rows], kind="stable")]
        lengths = np.concatenate(
            [_apportion(count, np.ones(quota)) for count, quota in zip(counts, quotas, strict=True)]
        )
        owner = np.empty(shards, np.int64)
        owner[generator.permutation(shards)] = np.arange(shards) // self.per_client
        return rows[np.argsort(np.repeat(owner, lengths), kind="stable")], np.bincount(
            owner, lengths, clients
        ).astype(np.int64)


class DominantLabels(Partition):
    """A `share` of each client's samples from `classes` dominant classes, evenly, the rest evenly
    from all others.

    000 sec. 2.2: of 500 samples, 2 classes with 230 each and 8 with about 5 each, a share of 0.92.
    Each class is dominant for a number of clients in proportion to its samples.
    """

    kind: str = "dominant-labels"
    classes: int = Field(default=2, ge=1)
    share: float = Field(default=0.92, gt=0, le=1)

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        if not self.classes < len(supply):
            raise ConfigError(
                "data.partition.classes",
                self.classes,
                f"fewer than the {len(supply)} classes of the data",
            )
        counts = sizes.counts(len(labels), clients, generator)
        dominant = _choose_classes(clients, self.classes, supply, generator, least=0)
        mixture = np.where(
            dominant, self.share / self.classes, (1 - self.share) / (len(supply) - self.classes)
        )
        table = _fit(mixture, counts, supply)
        if table is None:
            raise ConfigError(
                "data.partition.share",
                self.share,
                "below 1: these dominant classes alone cannot hold every sample",
            )
        return _deal_table(table, labels, generator), counts


class ClassesPerClient(Partition):
    """Every client holds samples of exactly `k` classes (002 sec. VI, with 7), each class held by
    clients in proportion to its samples.
    """

    kind: str = "classes-per-client"
    k: int = Field(default=7, ge=1)

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        if not self.k <= len(supply):
            raise ConfigError(
                "data.partition.k", self.k, f"at most the {len(supply)} classes of the data"
            )
        counts = sizes.counts(len(labels), clients, generator)
        if counts.min() < self.k:
            raise ConfigError(
                "data.partition.k",
                self.k,
                f"at most {counts.min()}, the samples of the smallest client",
            )
        if clients * self.k < len(supply):
            least = -(-len(supply) // clients)
            aim = f"so that {clients} clients can hold all {len(supply)} classes"
            accepted = f"at least {least}, {aim}"
            raise ConfigError("data.partition.k", self.k, accepted)
        held = _choose_classes(clients, self.k, supply, generator, least=1)
        table = None
        if (supply >= held.sum(0)).all():
            table = _fit(held.astype(float), counts - self.k, supply - held.sum(0))
        if table is None:
            wish = f"a k for which {sizes.kind} sizes leave no sample over"
            accepted = f"{wish}; a larger k or more even sizes make it easier"
            raise ConfigError("data.partition.k", self.k, accepted)
        return _deal_table(table + held, labels, generator), counts


class Dirichlet(Partition):
    """Each client's mixture of classes is a draw from the symmetric Dirichlet(psi) (Hsu, Qi, Brown
    2019; 002: psi = 100, 5, 0.1).
    """

    kind: str = "dirichlet"
    psi: float = Field(gt=0)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"psi": 0.1}, {"psi": 100.0})

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        supply = np.unique(labels, return_counts=True)[1]
        counts = sizes.counts(len(labels), clients, generator)
        # so that a solution exists at any psi
        mixture = np.maximum(generator.dirichlet(np.full(len(supply), self.psi), clients), 1e-9)
        table = _fit(mixture, counts, supply)
        assert table is not None  # a mixture that is positive everywhere has a solution
        return _deal_table(table, labels, generator), counts


class Similarity(Partition):
    """`s` percent of each client's samples drawn iid, the rest a stretch of what remains sorted by
    label (003 sec. VI: 100, 70, 30, 0).
    """

    kind: str = "similarity"
    s: float = Field(ge=0, le=100)
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"s": 0}, {"s": 70}, {"s": 100})

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        counts = sizes.counts(len(labels), clients, generator)
        ends = np.round(np.cumsum(counts) * (self.s / 100)).astype(np.int64)
        drawn = np.diff(ends, prepend=0)
        rows = generator.permutation(len(labels))
        rest = rows[ends[-1] :]
        rest = rest[np.argsort(labels[rest], kind="stable")]
        # which client takes which stretch, so that a client's number does not tell its class
        turn = generator.permutation(clients)
        owner = np.concatenate(
            [np.repeat(np.arange(clients), drawn), np.repeat(turn, (counts - drawn)[turn])]
        )
        return np.concatenate([rows[: ends[-1]], rest])[np.argsort(owner, kind="stable")], counts


class Natural(Partition):
    """The column of a table that `data.client` names is the client; clients are numbered in the
    order of its sorted values.
    """

    sized: ClassVar[bool] = False
    by: ClassVar[Literal["label", "client", "row"]] = "client"
    kind: str = "natural"

    def deal(
        self, labels: np.ndarray, clients: int, sizes: Sizes, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.argsort(labels, kind="stable"), np.bincount(labels, minlength=clients)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "shards": LabelShards,
    "dominant-labels": DominantLabels,
    "classes-per-client": ClassesPerClient,
    "dirichlet": Dirichlet,
    "similarity": Similarity,
    "overlapping": Overlapping,
    "natural": Natural,
}


def _apportion(total: int, weights: np.ndarray, most: np.ndarray | None = None) -> np.ndarray:
    """`total` in whole parts [n] in proportion to `weights` (largest remainders, ties to the
    first), none above `most`.
    """
    parts = np.zeros(len(weights), np.int64)
    free = np.ones(len(weights), bool)
    while True:
        rest = total - parts[~free].sum()
        share = np.where(free, weights, 0.0) * (rest / weights[free].sum() if free.any() else 0.0)
        parts = np.where(free, np.floor(share), parts).astype(np.int64)
        parts[np.argsort(parts - share, kind="stable")[: total - parts.sum()]] += 1
        if most is None:
            return parts
        over = free & (parts > most)
        if not over.any():
            return parts
        parts[over] = most[over]
        free &= ~over


def _choose_classes(
    clients: int, k: int, supply: np.ndarray, generator: np.random.Generator, least: int
) -> np.ndarray:
    """Bool [clients, classes], `k` true in each row, each class true for clients in proportion to
    its supply, and for `least` at least.
    """
    classes = len(supply)
    left = least + _apportion(
        clients * k - classes * least, supply * 1.0, np.full(classes, clients - least)
    )
    chosen = np.zeros((clients, classes), bool)
    for row in range(clients):
        # A class wanted by as many clients as are left must be taken; so no row ever runs short of
        # classes.
        must = np.flatnonzero(left == clients - row)
        weights = np.where(left == clients - row, 0, left)
        chosen[row, must] = True
        if len(must) < k:
            p = weights / weights.sum()
            chosen[row, generator.choice(classes, k - len(must), replace=False, p=p)] = True
        left -= chosen[row]
    return chosen[generator.permutation(clients)]


def _fit(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray | None:
    """Whole counts [clients, classes] with these row and column sums, near `mixture` and 0 where it
    is; None if there are none.

    Where proportional fitting converges, no count is further than 1 from the fitted real number.
    """
    real = _fitted(mixture, rows, columns)
    whole = np.floor(real).astype(np.int64)
    short = rows - whole.sum(1)
    spare = columns - whole.sum(0)
    # What rounding down left over goes to a row's largest fractions, as few of them beyond its
    # largest remainders as will do.
    rank = np.argsort(np.argsort(whole - real - (mixture > 0), axis=1, kind="stable"), axis=1)
    classes = len(columns)
    widening = [(1 << power, 1) for power in range(1 + classes.bit_length())]
    for extra, most in (*widening, (classes, int(short.sum()))):
        allowed = (mixture > 0) & (rank < (short + extra)[:, None])
        added = _flow(allowed, most, short, spare)
        if added is not None:
            return whole + added
    return None


def _fitted(mixture: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Float64 [clients, classes]: `mixture` fitted in proportion to these row and column sums, none
    of which it exceeds.
    """
    real = mixture.astype(np.float64)
    for _ in range(1000):
        sums = real.sum(0)
        real *= np.divide(columns, sums, out=np.zeros(len(columns)), where=sums > 0)
        sums = real.sum(1)
        real *= np.divide(rows, sums, out=np.zeros(len(rows)), where=sums > 0)[:, None]
        if np.abs(real.sum(0) - columns).max() < 1e-6:
            break
    sums = real.sum(0)
    real *= min(1.0, np.divide(columns, sums, out=np.ones(len(columns)), where=sums > 0).min())
    return real


def _flow(
    allowed: np.ndarray, most: int, short: np.ndarray, spare: np.ndarray
) -> np.ndarray | None:
    """Whole counts [clients, classes] of at most `most`, where `allowed`, that sum to `short` by
    client and stay below `spare` by class; None if there are none.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import maximum_flow

    clients, classes = allowed.shape
    source = clients + classes
    row, column = np.nonzero(allowed)
    tails = np.concatenate([row, np.full(clients, source), clients + np.arange(classes)])
    heads = np.concatenate([clients + column, np.arange(clients), np.full(classes, source + 1)])
    capacity = np.concatenate([np.full(len(row), most), short, spare]).astype(np.int32)
    ends = (tails.astype(np.int32), heads.astype(np.int32))
    graph = coo_array((capacity, ends), shape=(source + 2, source + 2)).tocsr()
    flow = maximum_flow(graph, source, source + 1)
    if flow.flow_value != short.sum():
        return None
    return flow.flow[:clients, clients:source].toarray()


def _deal_table(
    table: np.ndarray, labels: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Rows in client order, int64 [n], of each class as many to each client as `table` [clients,
    classes] says.
    """
    rows = generator.permutation(len(labels))
    rows = rows[np.argsort(labels[rows], kind="stable")]
    owner = np.concatenate([np.repeat(np.arange(len(table)), column) for column in table.T])
    return rows[np.argsort(owner, kind="stable")]
