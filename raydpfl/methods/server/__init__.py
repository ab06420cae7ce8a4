"""The server's step: from the model and the mean update to the next model.

A member holds nothing but its settings. What lasts is in a state, a dictionary of float64 arrays
that the run passes in, lets it change in place, and writes to every checkpoint.
"""

from raydpfl.config.registry import family
from raydpfl.methods.server.base import Server, State
from raydpfl.methods.server.sgd import ServerSgd

__all__ = ["FAMILY", "Server", "ServerSgd", "State"]

FIRST = ("sgd", "momentum", "adam", "yogi")
FAMILY: dict[str, type[Server]] = family(__name__, Server, leading_kinds=FIRST)
