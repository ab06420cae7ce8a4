"""What all contenders of compare.py are given, and how they tell of their rounds."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Job:
    """Federated averaging of clients of equal size, their updates clipped.

    `folder` holds the rows, x.npy (float32 or int64) and y.npy (int64), those of client i at
    [i * rows, (i + 1) * rows); with the client of every row also in rows.npz. A client of the
    `cohort` takes `steps` steps of `batch` rows, which are `epochs` epochs. `settings` are those of
    the contender; `model` and `targets` name the net and the rows to raydpfl.
    """

    folder: str
    net: str
    clients: int
    rows: int
    cohort: int
    epochs: int
    steps: int
    batch: int
    lr: float
    clip: float
    rounds: int
    settings: dict[str, Any]
    model: dict[str, Any]
    targets: dict[str, Any]

    @classmethod
    def given(cls) -> Job:
        """The job of the file that the first argument names."""
        return cls(**json.loads(Path(sys.argv[1]).read_text()))

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """x and y of all clients, mapped: pages are read where they are used."""
        folder = Path(self.folder)
        return np.load(folder / "x.npy", mmap_mode="r"), np.load(folder / "y.npy", mmap_mode="r")

    def client(self, index: int) -> slice:
        """Where a client's rows are."""
        return slice(index * self.rows, (index + 1) * self.rows)


class Teller:
    """Writes lines of JSON to the standard output; whatever else is printed goes to the standard
    error.
    """

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def tell(self, **values: float) -> None:
        self.out.write(json.dumps(values) + "\n")
        self.out.flush()

    def round_ended(self) -> None:
        """By a clock that all processes of a machine share."""
        self.tell(ended=time.monotonic())
