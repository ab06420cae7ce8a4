"""TensorBoard's event files, in the run's directory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydpfl import events
from raydpfl.track.base import Log, Row, Tracked, Tracker
from raydpfl.tracking import clear, writing


class TensorBoard(Tracker):
    """Every number of the rounds table as scalars of TensorBoard, in tensorboard/ of the run's
    directory. TensorBoard itself is not needed to write them.
    """

    kind: str = "tensorboard"

    def open(self, run: Tracked) -> Log:
        return Events(run.folder / "tensorboard", run.first)


class Events(Log):
    """An event file. Events of rounds from `first` on in other files of `folder` are made void."""

    def __init__(self, folder: Path, first: int):
        self.folder = folder
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        with writing(folder):
            clear(folder, folder=True)
            folder.mkdir(exist_ok=True)
            while (folder / name).exists():  # by a run of this process within the same second
                name += ".1"
            self._file = open(folder / name, "wb")  # noqa: SIM115
        with writing(folder):
            self._write(version="brain.Event:2")
            if first:
                self._write(step=first, started=True)
            self._file.flush()

    def write(self, rows: Sequence[Row]) -> None:
        with writing(self.folder):
            for row in rows:
                scalars = {
                    name: value
                    for name, value in row.items()
                    if name != "round" and isinstance(value, (int, float))
                }
                self._write(step=row["round"], scalars=scalars)
            self._file.flush()

    def _write(self, **what: Any) -> None:
        self._file.write(events.record(events.event(time.time(), **what)))

    def close(self, summary: Mapping[str, Any]) -> None:
        with writing(self.folder):
            self._file.close()
