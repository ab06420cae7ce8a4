from pydantic import Field

from raydpfl.methods.bounding.base import Bound
from raydpfl.methods.bounding.none import Unbounded


class PerSampleClip(Unbounded):
    """clip(g_j, G) for the gradient of every sample of a local batch, with the norm over all
    parameters (002 Assumption 1, 003 Alg. 1).

    When a sample is added the sum over a batch moves by at most G, when one is replaced by 2 G; the
    mean over B moves by 2 G / B. What the client sends after its steps is not bounded again. 002
    assumes gradients bounded by G and never clips them.

    In clients.parquet `clipped` is the share of a client's (sample, step) pairs whose gradient was
    longer than G, NaN without samples or after an error. In rounds.parquet it is the mean over the
    other clients.
    """

    examples = ({"bound": 1.0},)
    kind: str = "per_sample_clip"
    bound: Bound = Field(description="C: the largest L2 norm of one sample's gradient")

    @property
    def initial_bound(self) -> float | None:
        return None

    @property
    def sample_bound(self) -> float | None:
        return self.bound
