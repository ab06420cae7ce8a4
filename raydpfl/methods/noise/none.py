from raydpfl.methods.noise.base import Noise, RunFacts
from raydpfl.privacy import Mechanism


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: str = "none"

    def drawn_by(self) -> None:
        return None

    def size(self, outline: Mechanism, facts: RunFacts) -> float:
        return 0.0
