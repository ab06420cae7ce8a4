"""The networks that a config names. Those of one kind share a file."""

from raydpfl.config import registry
from raydpfl.models.base import Model

FIRST = (
    "softmax", "mlp", "cnn", "dp_cnn", "alexnet", "mobilenet_v2", "resnet18", "linear",
    "char_lstm", "transformer", "dropout_cnn", "embedding_mean", "lenet",
)  # fmt: skip
FAMILY: dict[str, type[Model]] = registry.family(__name__, Model, FIRST)
