"""What all clients are asked for next to the rounds: a histogram of a score of theirs.

>>> survey = Survey("accuracy", std=20.0, clients=300, times=10)
>>> round(survey.mu("replace_one"), 4)  # 10 Gaussians of sensitivity sqrt(2) and std 20, together
0.2236
>>> round(survey.of_one().std, 4)  # of what each of 300 clients draws on its own answer
1.1547
>>> print(survey)
10 noisy histograms of the accuracy of all clients
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from raydpfl.errors import ConfigError
from raydpfl.privacy.types import Relation


@dataclass(frozen=True)
class Survey:
    """A histogram over all clients, released after some of the rounds with noise of its own.

    A client is in one bin, or in none. One that is there or not moves one count by 1; one that is
    replaced by another moves two counts by 1, a distance of sqrt(2). Nothing is amplified, as
    everyone answers.

    Args:
        name: of the score, in messages, guarantees and the ledger.
        std: of the noise on a count, in clients; positive and finite.
        clients: who are asked, and draw the noise where clients do.
        times: how many of these are composed with the rounds.
    """

    name: str
    std: float
    clients: int = 1
    times: int = 0

    def __post_init__(self) -> None:
        if not (0 < self.std < math.inf):
            raise ConfigError(f"{self.name}.std", self.std, "a positive finite number")

    def mu(self, relation: Relation) -> float:
        """Sensitivity / std of the one Gaussian that all `times` amount to."""
        moves = math.sqrt(2.0) if relation == "replace_one" else 1.0
        return moves / self.std * math.sqrt(self.times)

    def of_one(self) -> Survey:
        """What an observer of single answers sees, where clients draw their parts of the noise."""
        return replace(self, std=self.std / math.sqrt(self.clients), clients=1)

    def __str__(self) -> str:
        histograms = "histogram" if self.times == 1 else "histograms"
        return f"{self.times} noisy {histograms} of the {self.name} of all clients"
