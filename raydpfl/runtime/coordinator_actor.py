"""The coordinator in an actor of Ray, whose process starts before there is a run to coordinate."""

import pickle
from typing import Any

from raydpfl.errors import contained
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.pool import Pool
from raydpfl.simulation.user_code import search
from raydpfl.training.process_settings import tune_allocator


class CoordinatorActor(Coordinator):
    """See `raydpfl.simulation.coordinator.Coordinator`."""

    def __init__(self) -> None:
        pass

    def begin(
        self,
        plan: bytes,
        path: tuple[str, ...],
        out: str,
        pool: Pool,
        resume: bool,
        fresh_noise: bool,
    ) -> tuple[int, list[str]]:
        """As `start`, of a pickled plan. `path`: where the user's modules are found."""
        search(path)
        tune_allocator()
        super().__init__(pickle.loads(plan), out, pool, resume, fresh_noise)
        with contained():
            return self.start()

    def round(self) -> dict[str, Any]:
        with contained(f"round {self.state.t}"):
            return super().round()


CoordinatorActor.__name__ = "Coordinator"  # in Ray's dashboard
