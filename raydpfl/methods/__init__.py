"""The six choices of an algorithm, and what is measured of them: the bases of the families."""

from raydpfl.methods.bounding import Bounding
from raydpfl.methods.local import Local
from raydpfl.methods.noise import Noise
from raydpfl.methods.probes import Probe
from raydpfl.methods.selection import Selection
from raydpfl.methods.server import Server
from raydpfl.methods.weights import Weights

__all__ = ["Bounding", "Local", "Noise", "Probe", "Selection", "Server", "Weights"]
