"""The client in an actor of Ray: on the coordinator's machine it takes calls through a door, which
one call of Ray's serves; from other machines each is a call of Ray's.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from raydpfl.loading import quickly

with quickly():
    from raydpfl import client, shared
    from raydpfl.process import Started


class ClientActor:
    """Calls on a `raydpfl.client.ClientActor`, whose process starts before there is an experiment.

    What comes through a door holds until it is answered, and an answer until the next call.
    """

    def __init__(self) -> None:
        self._client = client.ClientActor()

    def begin(self, *given: Any) -> Started:
        """As `raydpfl.process.Process.ready`, with the address of its door."""
        started = self._client.ready(*given)
        if not shared.AVAILABLE:
            return started
        self._listener, address = shared.listening()
        self._outbox = shared.Outbox()
        return replace(started, address=address)

    def serve(self) -> None:
        """Answers the calls of the next who opens the door, until they close it. Raises what a call
        raises.
        """
        with closing(shared.accepted(self._listener)) as door, suppress(shared.Gone):
            while True:
                given, (method, *others) = door.take()
                answer = getattr(self._client, method)(given, *others)
                door.send(*self._outbox.put(answer))

    def train(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.train`."""
        return self._client.train(*given)

    def losses(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.losses`."""
        return self._client.losses(*given)

    def evaluate(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.evaluate`."""
        return self._client.evaluate(*given)
