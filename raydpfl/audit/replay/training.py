"""Worlds of a replay in which clients train."""

from collections.abc import Mapping

from raydpfl.audit import local_step_canaries
from raydpfl.audit.replay.record import mechanism_of
from raydpfl.audit.replay.rows import ComparedRows, VictimRows
from raydpfl.audit.replay.world import World
from raydpfl.simulation.client.actor import ClientActor


class TrainingWorld(World):
    """A world in which clients train on their rows, by the code of every run; the victim on others
    in the neighbouring one.
    """

    def clients(self) -> ClientActor:
        """See `CanaryRun.clients`."""
        actor = ClientActor(self.experiment, str(self.plan.shards))
        actor.shards.reader = ComparedRows(actor.shards, self.faults)
        if self.neighbour is not None:
            actor.shards.reader = VictimRows(actor.shards.reader, self.neighbour.victim, -10)
        return actor

    def spent(self) -> Mapping[str, float]:
        return local_step_canaries.spent(self.plan, len(self.rounds))

    def finished(self) -> None:
        """See `CanaryRun.finished`: the ledger is read where no other world has it."""
        if mechanism_of(self.plan).by_draws:
            super().finished()
        else:
            self.pool.close()
