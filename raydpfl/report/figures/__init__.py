"""What a report can show, a file a kind, found by looking.

A kind is named in the `show` list of a study by its first key: `{curves: test_accuracy, x: round}`
is the kind `curves` with `of: test_accuracy`.

>>> item = parse({"curves": "test_accuracy", "x": "seconds", "facet": "data"}, "study.show[0]")
>>> item.kind, item.of, item.x, item.facet
('curves', ('test_accuracy',), 'seconds', ('data',))
>>> parse({"curve": "test_accuracy"}, "study.show[0]")  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = {'curve': 'test_accuracy'}: one of cloud, curves, ...
>>> parse({"points": "test_accuracy", "x": "s"}, "study.show[0]", axes=["arm", "data"])
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = 's': of the axes of the study: arm, data
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raydpfl.errors import ConfigError
from raydpfl.member import choose, family
from raydpfl.report.figures.base import Drawing, Figure, Missing, Need, Piece, Shown, Words

__all__ = ["FAMILY", "Drawing", "Figure", "Missing", "Need", "Piece", "Shown", "Words", "parse"]

FAMILY: dict[str, type[Shown]] = family(__name__, Shown)


def parse(item: Any, where: str, axes: Sequence[str] | None = None) -> Shown:
    """An item of a `show` list.

    Args:
        item: a mapping whose first key is a kind, or a member.
        where: the dotted key of the item, for messages.
        axes: that the cases of the study have; None: they are not known yet.

    Raises:
        ConfigError: for an unknown kind, field or axis.
    """
    kinds = [key for key in item if key in FAMILY] if isinstance(item, Mapping) else []
    if not kinds:
        raise ConfigError(where, item, f"one of {', '.join(FAMILY)}, as in {{curves: test_loss}}")
    fields = {key: value for key, value in item.items() if key != kinds[0]}
    given = {"kind": kinds[0], **fields}
    if item[kinds[0]] not in (None, {}):
        given["of"] = item[kinds[0]]
    found = choose(where, given, FAMILY, Shown)
    for axis in found.axes():
        if axes is not None and axis not in axes:
            accepted = f"of the axes of the study: {', '.join(axes)}"
            raise ConfigError(where, axis, accepted)
    return found
