"""What a report can show, a file a kind, found by looking.

A kind is named in the `show` list of a study by its first key: `{curves: test_accuracy, x: round}`
is the kind `curves` with `of: test_accuracy`.

>>> item = parse({"curves": "test_accuracy", "x": "seconds", "facet": "data"}, "study.show[0]")
>>> item.kind, item.of, item.x, item.facet
('curves', ('test_accuracy',), 'seconds', ('data',))
>>> parse({"curve": "test_accuracy"}, "study.show[0]")  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = {'curve': 'test_accuracy'}: expected one of curv...
>>> axes = {"arm": ["Clip", "Free"], "data": ["iid"]}
>>> parse({"points": "test_accuracy", "x": "date"}, "study.show[0]", axes)  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: study.show[0] = 'date': expected one of the axes of the study: ...
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from raydpfl.config.registry import choose, family
from raydpfl.errors import ConfigError
from raydpfl.report.figures.base import Missing, Piece, Plot, PlotItem, ReportItem, Words

__all__ = ["FAMILY", "Missing", "Piece", "Plot", "PlotItem", "ReportItem", "Words", "parse"]

FIRST = ("curves", "points")
FAMILY: dict[str, type[ReportItem]] = family(__name__, ReportItem, FIRST)


def parse(item: Any, field: str, axes: Mapping[str, Sequence[str]] | None = None) -> ReportItem:
    """An item of a `show` list: a mapping whose first key is a kind, or a member. `field`: its
    dotted key, for messages; `axes`: that the cases of the study have, each with its labels; None:
    they are not known yet. Raises `ConfigError` for an unknown kind, field, axis or label.
    """
    kinds = [key for key in item if key in FAMILY] if isinstance(item, Mapping) else []
    if not kinds:
        raise ConfigError(field, item, f"one of {', '.join(FAMILY)}, as in {{curves: test_loss}}")
    kind = kinds[0]
    fields = {"kind": kind, **{key: value for key, value in item.items() if key != kind}}
    if item[kind] not in (None, {}):
        if "of" not in FAMILY[kind].model_fields:
            expected = "{}: it shows no number of one's choice"
            raise ConfigError(f"{field}.{kind}", item[kind], expected)
        fields["of"] = item[kind]
    report_item = choose(field, fields, FAMILY, ReportItem)
    if axes is not None:
        for axis in report_item.axes():
            _check(field, axis, axes, "axes of the study")
        for axis, label in report_item.labels():
            _check(field, label, axes[axis], f"labels of {axis}")
    return report_item


def _check(field: str, name: str, names: Collection[str], noun: str) -> None:
    if name not in names:
        hints = [f"; nearest: {match}" for match in difflib.get_close_matches(name, names, 1)]
        raise ConfigError(field, name, f"one of the {noun}: {', '.join(names)}{''.join(hints)}")
