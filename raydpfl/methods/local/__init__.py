"""Local training: what a step of a client does with its gradient, a file a rule.

A user-defined rule is a class of `Local` with a `step`, or with a `train` that is a whole loop.
`raydpfl.training` carries rules out.
"""

from raydpfl.config.registry import family
from raydpfl.methods.local.adam import Adam, AdamW
from raydpfl.methods.local.base import LinearRule, Local, Step
from raydpfl.methods.local.sam import Sam
from raydpfl.methods.local.scaffold import Scaffold
from raydpfl.methods.local.sgd import Sgd

__all__ = ["FAMILY", "Adam", "AdamW", "LinearRule", "Local", "Sam", "Scaffold", "Sgd", "Step"]

FAMILY: dict[str, type[Local]] = family(__name__, Local, leading_kinds=("sgd",))
