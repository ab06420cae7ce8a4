"""The server's step: from the model and the mean update to the next model.

A member turns the model x and the mean update u (both float64 [d]) into the next model. A member
holds nothing but its settings. What lasts is in a state, a dictionary of float64 arrays
that the run passes in, lets it change in place, and writes to every checkpoint.

A user-defined member is a class of `Server` with `direction`, and with `start` if it has a state:

>>> import numpy as np
>>> class Nesterov(Server):
...     beta: float = 0.9
...     def start(self, d):
...         return {"v": np.zeros(d)}
...     def direction(self, update, state):
...         state["v"] = self.beta * state["v"] + update
...         return self.beta * state["v"] + update
>>> member = Nesterov(lr=0.5)
>>> state = member.start(2)
>>> member.step(np.zeros(2), np.array([1.0, -1.0]), state, t=0)
array([ 0.95, -0.95], dtype=float32)
"""

from __future__ import annotations

from raydpfl.config.registry import family
from raydpfl.methods.server.base import Server, State
from raydpfl.methods.server.sgd import ServerSgd

__all__ = ["FAMILY", "Server", "ServerSgd", "State"]

FIRST = ("sgd", "momentum", "adam", "yogi")
FAMILY: dict[str, type[Server]] = family(__name__, Server, first=FIRST)
