"""raydpfl: differentially private federated learning, simulated on Ray.

>>> from raydpfl import Experiment
>>> Experiment.from_dict({"rounds": 2}).selection.cohort
30

`run(experiment)` carries it out and returns its rounds table, summary, guarantees and model;
`load(directory)` gives the model, config and summary of a run that has ended.
"""

from typing import Any

__all__ = ["Experiment", "Result", "__version__", "load", "run"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:  # the runtime imports Ray and torch; the name alone should not
    if name == "Experiment":
        from raydpfl.experiment import Experiment

        return Experiment
    if name in ("run", "Result"):
        from raydpfl.cli import notebook

        return getattr(notebook, name)
    if name == "load":
        from raydpfl.simulation.export import load

        return load
    raise AttributeError(f"module 'raydpfl' has no attribute {name!r}")
