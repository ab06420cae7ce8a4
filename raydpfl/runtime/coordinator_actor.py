"""The coordinator in an actor of Ray, whose process starts before there is a run to coordinate."""

from __future__ import annotations

import pickle
from typing import Any

from raydpfl.core.fast_import import quickly
from raydpfl.errors import contained

with quickly():
    from raydpfl.simulation import coordinator
    from raydpfl.simulation.pool import Pool
    from raydpfl.simulation.provenance import search
    from raydpfl.training.process_settings import tune_allocator


class Coordinator(coordinator.Coordinator):
    """See `raydpfl.simulation.coordinator.Coordinator`."""

    def __init__(self) -> None:
        pass

    def warm(self, plan: bytes, path: tuple[str, ...]) -> None:
        """Computes what `begin` will need and this process then knows."""
        search(path)
        known = pickle.loads(plan)
        known.curves(known.counted_draws())

    def begin(
        self,
        plan: bytes,
        path: tuple[str, ...],
        out: str,
        pool: Pool,
        resume: bool,
        anew: bool,
    ) -> tuple[int, list[str]]:
        """As `start`, of a plan that is pickled. `path`: where modules of the user's own are."""
        search(path)
        tune_allocator()
        super().__init__(pickle.loads(plan), out, pool, resume, anew)
        with contained():
            return self.start()

    def round(self) -> dict[str, Any]:
        with contained(f"round {self.at.t}"):
            return super().round()
