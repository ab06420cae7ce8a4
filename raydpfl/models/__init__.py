"""What is trained: a module from a config, its initial parameters, and those as one flat vector.

>>> model = parse({"kind": "mlp", "hidden": 200})
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> module = build(model, form, seed=0)
>>> parameter_count(module), flatten(module).shape
(159010, torch.Size([159010]))

A module of the user's own is named by import path and used unchanged:

>>> args = {"in_features": 60, "out_features": 10}
>>> form = Form((60,), Target(classes=10), Classification())
>>> module = build(parse({"kind": "torch.nn:Linear", "args": args}), form, seed=0)
>>> parameter_count(module)
610

The parameters that a run sends, bounds and noises are the trainable ones, each once however many
layers share it, in the order of `module.parameters()`; frozen ones stay as they were built
(`raydpfl.models.shared_and_local`).

Every convolutional net is a stack of ordinary torch layers in a `torch.nn.Sequential`, pooled
before the activation where that is monotone (they commute, and the activation then works on a
quarter of the numbers). None has dropout or BatchNorm. Of AlexNet, 000 gives the number of
parameters and not the layers. `width` makes those that have one narrower, for reduced runs.
The parameters:

| kind         | on 1 x 28 x 28     | on 3 x 32 x 32 | at width 1/4     | source                  |
|--------------|--------------------|----------------|------------------|-------------------------|
| softmax      | 7,850              | 30,730         |                  | 001 sec. 6, 002 sec. VI |
| linear       | 200 (200 features) |                |                  | 001 sec. 5.3            |
| mlp          | 159,010            | 616,610        |                  | 000 Table 3: 159K       |
| cnn          | 833,322            | 1,079,882      | 52,338, 67,898   | 003 sec. VI-C           |
| dp_cnn       | 435,306            | 550,570        | 27,618, 34,930   | Tramer, Boneh 2021      |
| alexnet      | 3,348,490          | 3,349,066      | 211,594, 211,738 | 000 Table 3: 3.3M       |
| mobilenet_v2 | 2,236,106          | 2,236,682      | 250,778, 250,922 | 000 Table 3: 2.3M       |
| resnet18     | 11,172,810         | 11,173,962     | 701,178, 701,466 | 000 Table 3: 11.1M      |
"""

from raydpfl.models.base import Model
from raydpfl.models.builder import activations, build, check_parameters, parse
from raydpfl.models.lora import Lora, adapt, adapters, exported_names, merged
from raydpfl.models.networks import FAMILY
from raydpfl.models.networks.module import Module, factory
from raydpfl.models.norms import group_norm
from raydpfl.models.shared_and_local import (
    ParameterSplit,
    flatten,
    has_frozen_buffer,
    load,
    parameter_count,
    set_trained,
    trained,
)
from raydpfl.models.tasks import Classification, Form, Target  # noqa: F401  (the examples above)

__all__ = [
    "FAMILY", "Lora", "Model", "Module", "ParameterSplit", "activations", "adapt", "adapters",
    "build", "check_parameters", "exported_names", "factory", "flatten", "group_norm",
    "has_frozen_buffer", "load", "merged", "parameter_count", "parse", "set_trained", "trained",
]  # fmt: skip
