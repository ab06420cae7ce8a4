"""The client in an actor of Ray: on the coordinator's machine it takes calls through a door, which
one call of Ray's serves; from other machines each is a call of Ray's.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from raydpfl.core.fast_import import quickly

with quickly():
    from raydpfl.runtime import shared_memory
    from raydpfl.runtime.worker import Started, ready
    from raydpfl.simulation.client import actor


class ClientActor:
    """Calls on a `raydpfl.simulation.client.actor.ClientActor`, whose process starts before there
    is an experiment.

    What comes through a door holds until it is answered, and an answer until the next call.
    """

    def __init__(self) -> None:
        self._client = actor.ClientActor()

    def begin(self, *given: Any) -> Started:
        """As `raydpfl.runtime.worker.ready`, with the address of its door."""
        started = ready(self._client, *given)
        if not shared_memory.AVAILABLE:
            return started
        self._listener, address = shared_memory.listening()
        self._outbox = shared_memory.Outbox()
        return replace(started, address=address)

    def serve(self) -> None:
        """Answers the calls of the next who opens the door, until they close it. Raises what a call
        raises.
        """
        with closing(shared_memory.accepted(self._listener)) as door, suppress(shared_memory.Gone):
            while True:
                given, (method, *others) = door.take()
                answer = getattr(self._client, method)(given, *others)
                door.send(*self._outbox.put(answer))

    def train(self, *given: Any) -> Any:
        """As `raydpfl.simulation.client.actor.ClientActor.train`."""
        return self._client.train(*given)

    def losses(self, *given: Any) -> Any:
        """As `raydpfl.simulation.client.actor.ClientActor.losses`."""
        return self._client.losses(*given)

    def evaluate(self, *given: Any) -> Any:
        """As `raydpfl.simulation.client.actor.ClientActor.evaluate`."""
        return self._client.evaluate(*given)
