import numpy as np

from raydpfl.methods.selection.base import Ask, Cohort, Population, Selection
from raydpfl.privacy import Sampling


class Full(Selection):
    """Every client in every round (001 sec. 5.3)."""

    examples = ({}, {"dropout": 0.2})
    kind: str = "full"

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        return Cohort.of(np.arange(len(population)))

    def sampling(self, population: Population) -> Sampling:
        return Sampling("full", len(population), len(population))
