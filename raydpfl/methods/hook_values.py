"""What the hooks of members give, held against what they are to give."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from raydpfl.errors import RunError


def array_of(subject: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The real numbers of this shape that `subject`, a hook in words, gave. Raises `RunError` for
    any other value.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # a ragged list, a tensor elsewhere
        array = np.asarray(None)
    if array.shape != shape or not np.can_cast(array.dtype, np.float64, "same_kind"):
        expected = f"float64 {list(shape)}" if shape else "a number"
        raise RunError(f"{subject} gives {_text(value)}, not {expected}")
    return array


def check_names(subject: str, values: Any, names: Collection[str]) -> None:
    """Raises `RunError` unless `values`, which `subject` gave, are a mapping from some of `names`,
    which its class declares.
    """
    if not (isinstance(values, Mapping) and values.keys() <= set(names)):
        given = ", ".join(map(str, values)) if isinstance(values, Mapping) else _text(values)
        raise RunError(f"{subject} gives {given}; declared are {', '.join(names) or 'none'}")


def _text(value: Any) -> str:
    has_shape = hasattr(value, "dtype") and hasattr(value, "shape")
    return f"{value.dtype} {list(value.shape)}" if has_shape else type(value).__name__
