"""raydpfl: differentially private federated learning, simulated on Ray.

>>> from raydpfl import Experiment
>>> Experiment.from_dict({"rounds": 2}).selection.cohort
30

`run(experiment)` carries it out and returns its rounds table, summary, guarantees and model.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Experiment", "Result", "run"]


def __getattr__(name: str) -> Any:  # the runtime imports Ray and torch; the name alone should not
    if name == "Experiment":
        from raydpfl.config import Experiment

        return Experiment
    if name in ("run", "Result"):
        from raydpfl import runner

        return getattr(runner, name)
    raise AttributeError(f"module 'raydpfl' has no attribute {name!r}")
