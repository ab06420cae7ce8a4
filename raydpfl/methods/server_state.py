"""What a member keeps at the server from round to round."""

from raydpfl.config.registry import Member
from raydpfl.core.messages import State


class WithServerState(Member):
    """Base of the families whose members may keep a state at the server, and broadcast it."""

    def start(self, d: int) -> State:
        """The server's state before the first round, for a model of `d` parameters: float64 arrays
        by name. It is in the checkpoint; one without one of these names is refused.
        """
        return {}

    def broadcast_state(self, state: State) -> State:
        """What of it every round broadcasts to clients, float32 arrays by name."""
        return {}
