from collections.abc import Mapping, Sequence

import numpy as np

from raydpfl.core.messages import Columns
from raydpfl.methods.probes.base import Probe, Round


class ClientsProbe(Probe):
    """All numbers of each client in each round, in clients.parquet."""

    kind: str = "clients"

    def tables(self, columns: Sequence[str]) -> Mapping[str, Sequence[str]]:
        return {"clients": ["round", *columns]}

    def rows(self, seen: Round) -> Mapping[str, Columns]:
        return {"clients": {"round": np.full(len(seen.columns["client"]), seen.t), **seen.columns}}
