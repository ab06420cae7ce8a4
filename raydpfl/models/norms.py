"""GroupNorm in place of BatchNorm, which federated and private training cannot use.

BatchNorm's output for one sample depends on the others of its batch, so clipping one sample's
gradient bounds nothing; and its running statistics are state that clients would change outside of
what they send.

>>> net = group_norm(nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48)))
>>> type(net[1]).__name__, net[1].num_groups
('GroupNorm', 16)
"""

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def group_norm(module: nn.Module, groups: int = 32) -> nn.Module:
    """`module` with each BatchNorm replaced by a GroupNorm of gcd(groups, channels) groups and the
    same weight and bias.

    Children are replaced in place; the result is the module itself unless that is a BatchNorm (Wu
    and He 2018 use 32 groups).
    """
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        norm = nn.GroupNorm(
            math.gcd(groups, channels), channels, eps=module.eps, affine=module.affine
        )
        if module.affine:
            norm.weight = module.weight
            norm.bias = module.bias
        return norm
    for name, child in module.named_children():
        setattr(module, name, group_norm(child, groups))
    return module
