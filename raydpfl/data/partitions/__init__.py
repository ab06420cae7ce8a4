"""Which samples of a data set each client holds, `data.partition`.

The contract of a partition: it is a function of (seed, labels) alone; it assigns whole samples; and
it neither drops nor duplicates one unless its definition says so (only `overlapping` does).

>>> import numpy as np
>>> labels = np.repeat(np.arange(4), 6)
>>> shards = FAMILY["shards"](per_client=2)
>>> from raydpfl.data.sizes import Balanced
>>> order, sizes = shards.assign(labels, 6, Balanced(), np.random.default_rng(1))
>>> sizes
array([4, 4, 4, 4, 4, 4])
>>> labels[order].reshape(6, 2, 2)[0]  # client 0: two shards of two samples, each of one class
array([[1, 1],
       [3, 3]])

Partitions that ask for a mixture of classes per client (`dominant-labels`, `classes-per-client`,
`dirichlet`) meet three demands that rarely agree: the mixture, the sizes, and every sample held
once. The last two hold exactly; the table of counts [clients, classes] is the one nearest in
relative entropy to the mixture asked for (iterative proportional fitting, Deming and Stephan 1940),
rounded to whole samples by a flow on the entries that the mixture allows (`label_mixture`).
"""

from raydpfl.config.registry import family
from raydpfl.data.partitions.base import Partition
from raydpfl.data.partitions.iid import Iid
from raydpfl.data.partitions.natural import Natural

__all__ = ["FAMILY", "Iid", "Natural", "Partition"]

FIRST = ("iid", "shards", "dominant-labels", "classes-per-client", "dirichlet", "similarity")
FAMILY: dict[str, type[Partition]] = family(__name__, Partition, (*FIRST, "overlapping", "natural"))
