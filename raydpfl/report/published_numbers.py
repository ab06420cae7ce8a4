"""What a paper prints, next to what was measured here.

A table of printed numbers has a row for each, and columns that say what it is of. A column is an
axis of the study if it has its name, or shares labels with it; a study may say so itself. Only
numbers of the same data set are put next to ours.

>>> printed = PublishedTable([{"algorithm": "dpnfl", "dataset": "mnist", "accuracy": "80.59"}])
>>> columns = printed.columns({"arm": ["DPNFL", "DPFedAvg"]}, {})
>>> columns, printed.number({"arm": "DPNFL"}, columns, "mnist", {}).text
({'algorithm': 'arm'}, '80.59')
>>> printed.number({"arm": "DPNFL"}, columns, "fashion_mnist_mini", {}).other
'mnist'
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydpfl.report.labels import numeric

VALUES = ("accuracy", "std", "note", "source")  # columns that no label stands in


@dataclass(frozen=True)
class PublishedNumber:
    """A printed number as it stands; `std` as printed, empty for none; `other`: the data set that
    it is of, where that is not ours.
    """

    text: str
    std: str = ""
    other: str = ""


@dataclass(frozen=True)
class PublishedTable:
    """The rows of a table of printed numbers, by column."""

    rows: Sequence[Mapping[str, str]]

    @classmethod
    def read(cls, path: Path) -> PublishedTable:
        """The table in a CSV file. Raises OSError, ValueError."""
        with path.open(newline="") as file:
            rows = csv.DictReader(file)
            return cls([{name: text or "" for name, text in row.items()} for row in rows])

    def columns(
        self, axes: Mapping[str, Sequence[str]], stated: Mapping[str, str]
    ) -> dict[str, str]:
        """Which axis each column of labels is.

        Args:
            axes: the labels of every axis.
            stated: what the study says of it, by column.
        """
        columns = dict(stated)
        for name in self.rows[0] if self.rows else ():
            if name in columns or name in VALUES:
                continue
            labels = {plain(row[name]) for row in self.rows} - {""}
            free = [axis for axis in axes if axis not in columns.values()]
            like = [axis for axis in free if labels & {*map(plain, axes[axis])}]
            if like:
                columns[name] = like[0]
        return columns

    def number(
        self,
        labels: Mapping[str, str],
        columns: Mapping[str, str],
        data: str,
        where: Mapping[str, str],
        value: str = "accuracy",
    ) -> PublishedNumber | None:
        """The number that is printed for these labels; None where there is none, or several.

        Args:
            labels: of the cell, by axis.
            columns: the axis of each column of labels.
            data: the kind of data that was trained on.
            where: further columns and what must stand in them.
            value: the column of the number.
        """

        def fits(row: Mapping[str, str]) -> bool:
            if any(plain(row.get(name, "")) != plain(label) for name, label in where.items()):
                return False
            # where no label is printed, it is all of them
            pairs = [(plain(row.get(name, "")), labels.get(axis)) for name, axis in columns.items()]
            return all(label is not None and text in ("", plain(label)) for text, label in pairs)

        fitting = [row for row in self.rows if numeric([row.get(value) or "none"]) and fits(row)]
        # the data set itself, or features of it
        same = [row for row in fitting if f"{row.get('dataset', '')}_".startswith(f"{data}_")]
        if len(same or fitting) != 1:
            return None
        row = (same or fitting)[0]
        other = "" if same else (row.get("dataset") or "unknown data")
        return PublishedNumber(row[value], row.get("std", ""), other)


def plain(label: str) -> str:
    """A label without case and punctuation, a number as itself.

    >>> plain("DP-FedAvg"), plain("power_law"), plain("0.30"), plain("1-1")
    ('dpfedavg', 'powerlaw', '0.3', '11')
    """
    try:
        return f"{float(label):g}"
    except ValueError:
        return "".join(character for character in label.lower() if character.isalnum())
