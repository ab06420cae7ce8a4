"""Where samples come from: the base of the family, what a member gives, and the data sets.

The contract of a member: a `Split` that is a function of (its fields, seed, the files it reads)
alone, and checks all it can before the first byte is written. A named data set is read from
torchvision's own layout under a root:

>>> data = FAMILY["fashion_mnist_mini"](clients=300)
>>> split = data.split(seed=0, root=None)
>>> split.shape, split.classes, split.sizes[:3]
((1, 28, 28), 10, array([30, 30, 30]))

Public, because published: the normalisation constants. They belong to the published files, so
`normalize` is refused for files whose own mean or standard deviation is off by more than 0.01: they
are not the published ones.
"""

from collections.abc import Mapping
from typing import Any

from raydpfl.config.registry import choose, family
from raydpfl.data.sources.base import Data, InMemoryData, Maker, Samples, Split

__all__ = ["FAMILY", "Data", "InMemoryData", "Maker", "Samples", "Split", "parse"]

FIRST = (
    "fashion_mnist_mini", "mnist", "fashion_mnist", "emnist_digits", "cifar10", "cifar10_jpeg",
    "cifar100", "svhn",
    "table", "text", "image_folder", "hugging_face", "synthetic", "quadratics", "scalar_quadratics",
)  # fmt: skip
FAMILY: dict[str, type[Data]] = family(__name__, Data, FIRST)


def parse(values: Mapping[str, Any]) -> Data:
    """The `data` section of a config. Raises `ConfigError`."""
    return choose("data", values, FAMILY, Data)
