"""What a report can show, a file a kind, found by looking.

A kind is named in the `show` list of a study by its first key: `{curves: test_accuracy, x: round}`
is the kind `curves` with `of: test_accuracy`.

>>> item = parse({"curves": "test_accuracy", "x": "seconds", "facet": "data"}, "study.show[0]")
>>> item.kind, item.of, item.x, item.facet
('curves', ('test_accuracy',), 'seconds', ('data',))
>>> parse({"curve": "test_accuracy"}, "study.show[0]")  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = {'curve': 'test_accuracy'}: expected one of conf...
>>> axes = {"arm": ["Clip", "Free"], "data": ["iid"]}
>>> parse({"points": "test_accuracy", "x": "date"}, "study.show[0]", axes)  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = 'date': expected one of the axes of the study: ...
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raydpfl.config.registry import choose, family
from raydpfl.errors import ConfigError
from raydpfl.report.figures.base import Drawing, Figure, Missing, Need, Piece, Shown, Words

__all__ = ["FAMILY", "Drawing", "Figure", "Missing", "Need", "Piece", "Shown", "Words", "parse"]

FAMILY: dict[str, type[Shown]] = family(__name__, Shown)


def parse(item: Any, where: str, axes: Mapping[str, Sequence[str]] | None = None) -> Shown:
    """An item of a `show` list.

    Args:
        item: a mapping whose first key is a kind, or a member.
        where: the dotted key of the item, for messages.
        axes: that the cases of the study have, each with its labels; None: they are not known yet.

    Raises:
        ConfigError: for an unknown kind, field, axis or label.
    """
    kinds = [key for key in item if key in FAMILY] if isinstance(item, Mapping) else []
    if not kinds:
        raise ConfigError(where, item, f"one of {', '.join(FAMILY)}, as in {{curves: test_loss}}")
    fields = {key: value for key, value in item.items() if key != kinds[0]}
    given = {"kind": kinds[0], **fields}
    of = item[kinds[0]]
    if of not in (None, {}):
        if "of" not in FAMILY[kinds[0]].model_fields:
            raise ConfigError(f"{where}.{kinds[0]}", of, "{}: it shows no number of one's choice")
        given["of"] = of
    found = choose(where, given, FAMILY, Shown)
    if axes is None:
        return found
    for axis in found.axes():
        if axis not in axes:
            raise ConfigError(where, axis, f"one of the axes of the study: {_listed(axis, axes)}")
    for axis, label in found.labels():
        if label not in axes[axis]:
            raise ConfigError(
                where, label, f"one of the labels of {axis}: {_listed(label, axes[axis])}"
            )
    return found


def _listed(name: str, known: Collection[str]) -> str:
    """All that are known, and the one that may be meant."""
    near = difflib.get_close_matches(name, known, 1)
    return ", ".join(known) + (f" ({near[0]}?)" if near else "")
