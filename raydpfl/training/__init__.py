"""Local training of a whole chunk of clients: the trainer, its backends, minibatches and layers.

`raydpfl.methods.local` says what a step does with its gradient, `choose_backend` of
`backend_choice` which backend does it, and `trainer.Trainer` does it. All backends have the
mathematics of a plain loop over the clients and the loss of the task. All but compiled, which takes
linear rules alone, carry out any rule and add corrections (`Scaffold`). All of them can clip every
sample's gradient and add noise to every step (the loop sample by sample):

| backend       | for                                     | how                                    |
|---------------|-----------------------------------------|----------------------------------------|
| compiled      | stacks of linear layers, linear rules   | C code, client by client, in threads   |
| fused         | any stack of linear layers              | batched products, step in the backward |
| convolutional | convolutions, max-pooling, then linear  | client after client, layers by hand    |
| one_batch     | modules with frozen parameters          | the chunk's rows as one batch          |
| vmap          | modules without convolution, recurrence | torch.func over the chunk              |
| layerwise     | per-sample clipping of networks         | norms, sums by layer in one pass       |
| loop          | any module                              | client after client, on a flat vector  |

>>> from torch import nn
>>> from raydpfl.methods.local import Sgd
>>> from raydpfl.models.tasks import Classification, Form, Target
>>> from raydpfl.training.backend_choice import choose_backend
>>> module = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(5408, 10))
>>> choose_backend(module, Sgd(), Form((1, 28, 28), Target(classes=10), Classification()))
'convolutional'
"""
