"""What a model is scored by where it is evaluated: `evaluate.metrics`, a list. Metrics of one kind
share a file.

A metric is what each batch of rows comes to, added up over the batches: so it does not depend on
who evaluated which of them. A kind alone stands for its defaults; a metric of one's own is a class
with the base `Metric`, named by import path:

>>> [metric.name for metric in parse(["perplexity", {"kind": "top_k", "k": 5}])]
['perplexity', 'top_5']
>>> parse(["mse", "mse"])  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: evaluate.metrics = ['mse', 'mse']: expected a list that ...
>>> find_metric("f1_micro"), find_metric("test_f1")
(F1(kind='f1', average='micro'), None)
"""

from typing import Any

from raydpfl.config.registry import choose, family
from raydpfl.errors import ConfigError
from raydpfl.models.metrics.base import Metric, Total

__all__ = ["FAMILY", "Metric", "Total", "add_defaults", "find_metric", "parse"]

FIRST = (
    "accuracy", "loss", "top_k", "balanced_accuracy", "f1", "auc", "perplexity", "mse", "mae", "r2",
)  # fmt: skip
FAMILY: dict[str, type[Metric]] = family(__name__, Metric, FIRST)
SECTION = "evaluate.metrics"
DEFAULT_KINDS = ("loss", "accuracy")  # every evaluation has these


def parse(values: Any, section: str = SECTION) -> tuple[Metric, ...]:
    """The members of a list of kinds and mappings. Raises `ConfigError` on the field `section`."""
    if not isinstance(values, (list, tuple)) or not values:
        expected = f"auto, or a list of {', '.join(FAMILY)} or your own classes"
        raise ConfigError(section, values, expected)
    members = [{"kind": value} if isinstance(value, str) else value for value in values]
    metrics = tuple(choose(section, member, FAMILY, Metric) for member in members)
    for metric in metrics:
        if metric.is_user_defined and find_metric(metric.name):
            expected = f"a class with another name, as {metric.name} is a metric of the package"
            raise ConfigError(section, metric.kind, expected)
    if len({metric.name for metric in metrics}) < len(metrics):
        raise ConfigError(SECTION, values, "a list that has each metric once")
    return metrics


def add_defaults(metrics: tuple[Metric, ...]) -> tuple[Metric, ...]:
    """With those that every evaluation has, last."""
    names = {metric.name for metric in metrics}
    return (*metrics, *(FAMILY[kind]() for kind in DEFAULT_KINDS if kind not in names))


def find_metric(name: str) -> Metric | None:
    """The metric that comes with the project and has this name; None: there is none."""
    groups = (cls.parse_name(name) for cls in FAMILY.values())
    return next((metric for metric in groups if metric is not None), None)
