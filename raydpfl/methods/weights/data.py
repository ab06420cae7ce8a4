import numpy as np

from raydpfl.config.setting import Setting
from raydpfl.methods.weights.base import Weights


class DataWeights(Weights):
    """w_i = N p_i, p_i = n_i / sum n_j: unbiased for sum p_i Delta_i under uniform sampling (002
    Lemma 5).
    """

    kind: str = "data"

    def of(self, sizes: np.ndarray, samples: int, population: int) -> np.ndarray:
        # the product first, so that the weights of clients of one size are 1 to the bit
        return sizes * float(population) / samples

    def warnings(self, setting: Setting) -> tuple[str, ...]:
        if not setting.data_weighted:
            return ()
        return (
            f"weights.kind {self.kind} and selection.kind {setting.kinds['selection']} both weigh "
            "clients by their data; uniform weights are what the papers have",
        )
