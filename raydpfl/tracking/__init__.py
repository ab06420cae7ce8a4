"""Where the rows of a run are shown while it goes on: `track: [tensorboard, mlflow, ...]`, a file a
member.

Without a word about it a run has its TensorBoard events. No library is imported unless its tracker
is named. What tracks is no part of what a run is: its bits, its guarantees and the names of a
sweep's trials are the same with any, and a run is gone on with others (`track=[]`: with none). A
tracker that fails never ends a run: it is left out, with one warning. A member with fields is given
as a mapping:

>>> [tracker.kind for tracker in parse(["tensorboard", {"kind": "mlflow", "experiment": "mine"}])]
['tensorboard', 'mlflow']
>>> parse(["ray", "ray"])
Traceback (most recent call last):
raydpfl.errors.ConfigError: track = ['ray', 'ray']: expected a list that has each kind once
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

from raydpfl.config.registry import choose_members, family
from raydpfl.errors import ConfigError
from raydpfl.tracking.base import Log, Row, Tracked, Tracker

__all__ = ["DEFAULT", "FAMILY", "Log", "Row", "Tracked", "Tracker", "check_installed", "parse"]

FAMILY: dict[str, type[Tracker]] = family(__name__, Tracker)
DEFAULT = ("tensorboard",)


def parse(values: Any) -> tuple[Tracker, ...]:
    """The members of a list of kinds and mappings. Raises `ConfigError`."""
    return choose_members("track", values, FAMILY, Tracker)


def check_installed(trackers: Sequence[Tracker]) -> None:
    """Raises `ConfigError` for a tracker whose library is not there."""
    for tracker in trackers:
        library = tracker.library
        # a folder without code, as W&B leaves one, has a spec too
        if library and getattr(importlib.util.find_spec(library), "origin", None) is None:
            expected = f"others, or none (track=[]); {tracker.kind} needs pip install "
            raise ConfigError("track", tracker.kind, f"{expected}'raydpfl[{library}]'")
