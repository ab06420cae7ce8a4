"""The client in an actor of Ray: what it is given and what it answers goes through memory that the
processes of a machine share, and between machines through Ray.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

from raydpfl import client
from raydpfl.process import Started
from raydpfl.shared import Gone, Inbox, Outbox, Put


class ClientActor:
    """Calls on a `raydpfl.client.ClientActor`, whose process starts before there is an experiment.

    A call is given the arguments; or, where they were put into shared memory, one pickled pair of a
    `Put` of the first and a `Put` of all others, and then the answer is a pickled `Put` too. What
    is put holds until the call is answered, and an answer until the next call.
    """

    def __init__(self) -> None:
        self._client = client.ClientActor()
        self._inbox = Inbox()
        self._outbox = Outbox()

    def begin(self, seen: Put | None, *given: Any) -> Started:
        """As `raydpfl.process.Process.ready`, of all that is given besides.

        Args:
            seen: what the caller has put; None: it cannot.

        Returns:
            With what this process has put, if it can and sees what the caller has.
        """
        started = self._client.ready(*given)
        try:
            if seen is None:
                return started
            self._inbox.take(seen)
            return replace(started, put=self._outbox.put(None)[0])
        except (Gone, OSError):
            return started

    def train(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.train`."""
        return self._call("train", given)

    def losses(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.losses`."""
        return self._call("losses", given)

    def evaluate(self, *given: Any) -> Any:
        """As `raydpfl.client.ClientActor.evaluate`."""
        return self._call("evaluate", given)

    def _call(self, method: str, given: tuple) -> Any:
        called = getattr(self._client, method)
        if not isinstance(given[0], bytes):
            return called(*given)
        first, others = map(self._inbox.take, pickle.loads(given[0]))
        answer = called(first, *others)
        return pickle.dumps(self._outbox.put(answer)[0])
