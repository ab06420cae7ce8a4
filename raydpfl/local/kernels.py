"""Products of each client's rows with one another, kept from round to round.

>>> kernels = Kernels()
>>> x = torch.tensor([[[1.0, 0.0], [1.0, 2.0]], [[0.0, 3.0], [0.0, 0.0]]])
>>> kernels.of(x, owners=np.array([7, -1]))[0]
tensor([[1., 1.],
        [1., 5.]])
>>> kernels.of(x[:1] * 0, owners=np.array([7]))  # those of client 7, whose rows stay the same
tensor([[[1., 1.],
         [1., 5.]]])
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from raydpfl.local.way import BEGINS

MEMORY = 1 << 24  # bytes that are kept, for each number of rows
COUNTS = 4  # numbers of rows that are kept at once: the others are computed anew


@dataclass
class _Kept:
    """A table with one place for all clients whose numbers leave the same remainder."""

    values: torch.Tensor  # float32 [places, n, n]
    owners: np.ndarray  # int64 [places], -1 for none

    @classmethod
    def empty(cls, n: int) -> _Kept:
        places = MEMORY // (4 * n * n)
        return cls(torch.empty(places, n, n), np.full(places, -1))


class Kernels:
    """X X^T of clients. What is kept has the bits that it had when it was computed, which are those
    that it would have again.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}

    def of(self, x: torch.Tensor, owners: np.ndarray | None = None) -> torch.Tensor:
        """X X^T, float32 [C, n, n], of rows [C, n, p].

        `owners`, int64 [C], are the clients whose rows these are in every round; -1 for other rows.
        """
        kept = None if owners is None else self._table(x)
        if kept is None or owners is None or not len(kept.owners):
            return torch.bmm(x, x.mT)
        places = owners % len(kept.owners)
        fresh = np.flatnonzero((kept.owners[places] != owners) | (owners < 0))
        found = kept.values.index_select(0, torch.from_numpy(places))
        if len(fresh):
            some = torch.from_numpy(fresh)
            rows = x if len(fresh) == len(x) else x.index_select(0, some)
            computed = torch.bmm(rows, rows.mT)
            found.index_copy_(0, some, computed)
            self._keep(kept, owners[fresh], computed)
        return found

    def _table(self, x: torch.Tensor) -> _Kept | None:
        """What is kept for as many rows. None where they are computed as fast as they are kept, or
        where a client's rows begin at another place within `BEGINS` bytes in another slot, on which
        the bits of its products may depend.
        """
        n = x.shape[1]
        if x.device.type != "cpu" or 4 * x[0].numel() % BEGINS:
            return None
        if n not in self._kept and len(self._kept) == COUNTS:
            return None
        return self._kept.setdefault(n, _Kept.empty(n))

    @staticmethod
    def _keep(kept: _Kept, owners: np.ndarray, computed: torch.Tensor) -> None:
        """Of several clients in one place one."""
        named = np.flatnonzero(owners >= 0)
        places, first = np.unique(owners[named] % len(kept.owners), return_index=True)
        some = named[first]
        kept.owners[places] = owners[some]
        chosen = computed.index_select(0, torch.from_numpy(some))
        kept.values.index_copy_(0, torch.from_numpy(places), chosen)
