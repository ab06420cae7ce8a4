"""What a client runs: its local steps, carried out for a whole lane of clients at once.

`Sgd` says what is computed, `resolve` which way, `Trainer` does it. All ways have the mathematics
of a plain loop over the clients, with cross-entropy or, for float targets and a module with a
single output, half the squared error; corrections (`Scaffold`) are added by all but sample_space,
and all but sample_space can clip each sample's gradient and add noise to every step (the loop
sample by sample):

| way          | for                                                     | how                                                       |
|--------------|---------------------------------------------------------|-----------------------------------------------------------|
| sample_space | stacks of linear layers, several epochs over few rows   | the first layer's weights within the span of the rows     |
| fused        | any stack of linear layers                              | batched products, the step inside the backward product    |
| vmap         | other modules without convolutions or recurrent layers  | torch.func over the lane                                  |
| layerwise    | per-sample clipping of networks                         | one backward pass, norms and sums layer by layer          |
| loop         | any module                                              | one client after another on one flat vector of parameters |
| noop         | measuring                                               | no training                                               |

>>> from torch import nn
>>> resolve(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(5408, 10)), Sgd(), rows=20, shape=(1, 28, 28))
'loop'
"""

from raydpfl.local.batches import batches, picked
from raydpfl.local.engine import WAYS, Trainer, resolve
from raydpfl.local.process import single_thread, tune_allocator
from raydpfl.local.sgd import FAMILY, Local, Scaffold, Sgd
from raydpfl.local.way import Block

__all__ = [
    "FAMILY",
    "WAYS",
    "Block",
    "Local",
    "Scaffold",
    "Sgd",
    "Trainer",
    "batches",
    "picked",
    "resolve",
    "single_thread",
    "tune_allocator",
]
