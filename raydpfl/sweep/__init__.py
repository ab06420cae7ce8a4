"""Sweeps: an experiment whose fields may take search spaces, run by Ray Tune.

A field takes a space in place of its value, and a section `sweep` says how to search. A
*setting* is one choice of all searched values, a *trial* one run of a setting with one seed.

>>> sweep = Sweep.from_dict({
...     "local": {"kind": "sgd", "lr": {"grid": [0.05, 0.1]}},
...     "bounding": {"kind": "clip", "bound": {"powers_of_two": [-1, 1]}},
...     "sweep": {"repeats": 3},
... })
>>> [tuple(values.values()) for values in sweep.setting_values()]
[(0.05, 0.5), (0.05, 1), (0.05, 2), (0.1, 0.5), (0.1, 1), (0.1, 2)]
>>> sweep.setting({"local.lr": 0.1, "bounding.bound": 2}).experiment.bounding.bound
2.0

`run(sweep, out)` runs it (`raydpfl sweep`); a study is run alike. What a sweep tries is a function
of its config alone: a grid in its order, random values from keyed streams, Optuna's proposals in a
fixed order. A trial's directory is named by its values and seed, and says itself whether the trial
has finished. So a sweep that was killed is resumed by running it again, and nothing of Ray Tune's
own state is needed.
"""

from raydpfl.sweep.results import SweepResult
from raydpfl.sweep.runner import run
from raydpfl.sweep.sweep import Sweep

__all__ = ["Sweep", "SweepResult", "run"]
