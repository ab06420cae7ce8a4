"""Checks of the rows that a source gives; errors of user-defined sources as `ConfigError`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from raydpfl.config.registry import iter_members
from raydpfl.data.sources import Data, Split
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message
from raydpfl.models.tasks import Form, Target


@contextmanager
def source_errors(data: Data) -> Iterator[None]:
    """Turns what user-defined code of a source raises within into a `ConfigError` of one line."""
    try:
        yield
    except (ConfigError, MemoryError):
        raise
    except USER_EXCEPTIONS as error:
        if not any(member.is_user_defined for _, member in iter_members(data, "")):
            raise
        expected = f"a source that gives its samples ({located_message(error)})"
        raise ConfigError("data.kind", data.kind, expected) from None


def add_checks(data: Data, split: Split) -> Split:
    """The split, whose functions raise `ConfigError` for errors and for rows of another form."""
    form = Form(split.shape, Target(split.targets, split.classes), data.task, split.tokens)

    def wrap_rows(rows: Callable[..., Any]) -> Callable[..., Any]:
        def checked_rows(*arguments: Any) -> tuple[np.ndarray, np.ndarray]:
            with source_errors(data):
                x, y = rows(*arguments)
                check_rows(data, form, x, y)
            return x, y

        return checked_rows

    if split.ids is not None and len(split.ids) != len(split.sizes):
        expected = f"a source with an id for each of {len(split.sizes)} clients"
        raise ConfigError("data.kind", data.kind, f"{expected}, not {len(split.ids)}")
    return replace(
        split,
        rows=wrap_rows(split.rows),
        test=wrap_rows(split.test),
        at=split.at and wrap_rows(split.at),
        samples=split.samples and source_errors(data)(split.samples),
    )


def check_rows(data: Data, form: Form, x: np.ndarray, y: np.ndarray) -> None:
    """Raises `ConfigError` for rows x, y that are not of this form."""
    for expected in _flaws(form, x, y):
        raise ConfigError("data.kind", data.kind, f"a source whose {expected}")


def _flaws(form: Form, x: np.ndarray, y: np.ndarray) -> Iterator[str]:
    """What is expected of rows that they are not."""
    target = form.target
    if len(x) != len(y):
        yield f"rows have a target each ({len(x)} rows, {len(y)} targets)"
    for name, values, shape in (("x", x, form.shape), ("y", y, target.shape)):
        if values.shape[1:] != tuple(shape):
            actual_shape = list(values.shape[1:])
            yield f"{name} of a row is of shape {list(shape)}, as it says (it gives {actual_shape})"
    labels = y[y != form.task.ignore_index()] if target.shape and target.classes else y
    for name, values, limit in (("targets", labels, target.classes), ("tokens", x, form.tokens)):
        low, high = values.min(initial=0), values.max(initial=0)
        if limit and values.size and (values.dtype.kind not in "iu" or low < 0 or high >= limit):
            yield f"{name} are from 0 to {limit - 1} (it gives {values.dtype}, {low} to {high})"
