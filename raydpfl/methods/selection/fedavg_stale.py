"""FedAvg with stale models."""

from __future__ import annotations

from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.methods.selection.base import Population
from raydpfl.methods.selection.uniform import Uniform


class FedAvgStale(Uniform):
    """The average of FedAvg (McMahan et al. 2017; the comparison of 002 Fig. 5).

    The cohort is that of `uniform`, but the N - r clients that were not drawn count with the
    unchanged global model, so the divisor is N. It is biased towards standing still: each round
    moves r/N as far.
    """

    examples = ({"cohort": 6},)
    kind: str = "fedavg_stale"

    def check(self, setting: Setting) -> None:
        if "bounding" in setting.stateful:
            expected = (
                f"another with bounding.kind {setting.kinds['bounding']}, whose mean has every "
                "client's memory in it, drawn or not"
            )
            raise ConfigError("selection.kind", self.kind, expected)

    def divisor(self, population: Population) -> float:
        return float(len(population))
