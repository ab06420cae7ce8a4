"""Sweeps: an experiment whose fields may take search spaces, run by Ray Tune.

A field takes a space in the place of its value, and a section `sweep` says how they are searched. A
*setting* is one choice of all searched values, a *trial* one run of a setting with one seed.

>>> sweep = Sweep.from_dict({
...     "local": {"kind": "sgd", "lr": {"grid": [0.05, 0.1]}},
...     "bounding": {"kind": "clip", "bound": {"powers_of_two": [-1, 1]}},
...     "sweep": {"repeats": 3},
... })
>>> [tuple(values.values()) for values in sweep.listed()]
[(0.05, 0.5), (0.05, 1), (0.05, 2), (0.1, 0.5), (0.1, 1), (0.1, 2)]
>>> sweep.setting({"local.lr": 0.1, "bounding.bound": 2}).experiment.bounding.bound
2.0

`run(sweep, out)` carries it out (`raydpfl sweep`).

Design note. What a sweep tries is a function of its config alone: a grid in its order, random
values from keyed streams, and Optuna's proposals asked and told in a fixed order. A trial's
directory is named by its values and seed, and it says itself whether it has finished. So a sweep
that was killed is resumed by running it again: finished trials answer from their directories, the
others go on from their checkpoints, and nothing of Ray Tune's own state is needed. Only which
trials `asha` and `median` stop early depends on the order in which results arrive, as those methods
have it.
"""

from raydpfl.sweep.results import Result
from raydpfl.sweep.runner import run
from raydpfl.sweep.sweep import Setting, Sweep, Trial

__all__ = ["Result", "Setting", "Sweep", "Trial", "run"]
