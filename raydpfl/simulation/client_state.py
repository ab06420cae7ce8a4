"""The state of clients between rounds.

The coordinator keeps it, since any actor may train any chunk, and may be lost. It is sent with the
chunk.

>>> memory = ClientStates({}, {})
>>> sent = {"local": np.ones((2, 3), np.float32)}
>>> columns = {"client": np.array([4, 9]), "draw": np.zeros(2, int)}
>>> memory.keep([ChunkResult(np.zeros(3), columns, sent)])
>>> chunk = Chunk(np.array([4, 5]), np.zeros(2, int), np.ones(2), rows=1)
>>> memory.attach_states(chunk).memory["local"]
{0: array([1., 1., 1.], dtype=float32)}
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from raydpfl.core.messages import LOCAL_PART, Chunk, ChunkResult


class ClientStates:
    """Vectors float32 [d], by member and client; zeros for a client that has none yet. Its own part
    of the model is among them, as `LOCAL_PART`.
    """

    def __init__(self, members: Mapping[str, np.ndarray], vectors: Mapping[str, np.ndarray]):
        """As `arrays` gives them; empty ones before the first round."""
        self._by_member = {
            name: dict(zip(clients.tolist(), vectors[name], strict=True))
            for name, clients in members.items()
        }

    def attach_states(self, chunk: Chunk) -> Chunk:
        """The chunk with the state of its clients."""
        if not self._by_member:
            return chunk
        slots = list(enumerate(chunk.clients.tolist()))
        memory = {
            name: {slot: states[client] for slot, client in slots if client in states}
            for name, states in self._by_member.items()
        }
        return replace(chunk, memory=memory)

    @property
    def own(self) -> Mapping[int, np.ndarray]:
        """The clients that have a part of the model of their own, and what it is."""
        return self._by_member.get(LOCAL_PART, {})

    def keep(self, results: Iterable[ChunkResult]) -> None:
        """Keeps the state of clients for their next round; the changes of one that was drawn
        several times add up, and parts of the model are averaged.
        """
        by_client: dict[tuple[str, int], dict[int, np.ndarray]] = {}
        for result in results:
            client_draws = [(result.columns[name].tolist()) for name in ("client", "draw")]
            for name, vectors in result.memory.items():
                for client, draw, vector in zip(*client_draws, vectors, strict=True):
                    by_client.setdefault((name, client), {})[draw] = vector
        for (name, client), by_draw in by_client.items():
            rows = [by_draw[draw] for draw in sorted(by_draw)]
            states = self._by_member.setdefault(name, {})
            if len(rows) == 1:
                states[client] = rows[0]
                continue
            previous_state = np.float64(states.get(client, np.float32(0.0)))
            total = np.sum(rows, axis=0, dtype=np.float64)
            mean = total / len(rows)
            new_state = mean if name == LOCAL_PART else total - (len(rows) - 1) * previous_state
            states[client] = new_state.astype(np.float32)

    def arrays(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """By member, the clients, int64 [m] and ascending, and their vectors, float32 [m, d]."""
        members = {
            name: np.array(sorted(states), np.int64)
            for name, states in self._by_member.items()
            if states
        }
        vectors = {
            name: np.stack([self._by_member[name][client] for client in clients.tolist()])
            for name, clients in members.items()
        }
        return members, vectors
