"""What a client runs: its local steps, carried out for a whole lane of clients at once.

A member of the family says what a step does with its gradient, `resolve` which way of training
does it, and `Trainer` does it. A rule of one's own is a class of `Local` with a `step`, or with a
`train` that is a whole loop and is run by the loop alone (see there).
All ways have the mathematics of a plain loop over the clients and the loss of the task. All but
compiled and sample_space, which take linear rules alone, carry out any rule and add corrections
(`Scaffold`). All but these and convolutional can clip each sample's gradient and add noise to every
step (the loop sample by sample):

| way           | for                                     | how                                    |
|---------------|-----------------------------------------|----------------------------------------|
| compiled      | linear layers and ReLUs, as the next    | the same in C, client by client        |
| sample_space  | linear layers, many epochs on few rows  | first layer in the span of the rows    |
| fused         | any stack of linear layers              | batched products, step in the backward |
| convolutional | convolutions, max-pooling, then linear  | client after client, layers by hand    |
| one_batch     | modules with frozen parameters          | the lane's rows as one batch           |
| vmap          | modules without convolution, recurrence | torch.func over the lane               |
| layerwise     | per-sample clipping of networks         | norms, sums by layer in one pass       |
| loop          | any module                              | client after client, on a flat vector  |
| noop          | measuring                               | no training                            |

>>> from torch import nn
>>> module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(5408, 10))
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> resolve(module, Sgd(), 20, form)
'convolutional'
"""

from raydpfl.config.registry import family
from raydpfl.methods.local.adam import Adam
from raydpfl.methods.local.adamw import AdamW
from raydpfl.methods.local.base import Linear, Local, Step
from raydpfl.methods.local.sam import Sam
from raydpfl.methods.local.scaffold import Scaffold
from raydpfl.methods.local.sgd import Sgd
from raydpfl.models.tasks import Classification, Form, Target  # noqa: F401  (the example above)
from raydpfl.training.backend_choice import resolve
from raydpfl.training.backends import WAYS, costs
from raydpfl.training.backends.base import Block
from raydpfl.training.minibatches import batches, picked
from raydpfl.training.process_settings import single_thread, tune_allocator
from raydpfl.training.trainer import Trainer

__all__ = [
    "FAMILY",
    "WAYS",
    "Adam",
    "AdamW",
    "Block",
    "Linear",
    "Local",
    "Sam",
    "Scaffold",
    "Sgd",
    "Step",
    "Trainer",
    "batches",
    "costs",
    "picked",
    "resolve",
    "single_thread",
    "tune_allocator",
]

FAMILY: dict[str, type[Local]] = family(__name__, Local, first=("sgd",))
