"""TensorBoard's event files, in the run's directory."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raydpfl.storage.run_files import clear, file_errors
from raydpfl.tracking.base import Log, Row, Tracked, Tracker


class TensorBoard(Tracker):
    """Every number of the rounds table as scalars of TensorBoard, in tensorboard/ of the run's
    directory.
    """

    kind: str = "tensorboard"

    def is_external(self) -> bool:
        return False

    def open(self, run: Tracked) -> Log:
        return Events(run.folder / "tensorboard", run.first)


class Events(Log):
    """An event file. In other files of `folder` events from `first_round` on are made void."""

    def __init__(self, folder: Path, first_round: int):
        # not before a run has this tracker: importing them takes 0.3 s
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder = folder
        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        with file_errors(folder):
            clear(folder, folder=True)
            folder.mkdir(exist_ok=True)
            while (folder / name).exists():  # by a run of this process within the same second
                name += ".1"
            self._file = open(folder / name, "wb")  # noqa: SIM115
            self._records = RecordWriter(self._file)
            self._write(file_version="brain.Event:2")
            self._write(step=first_round, session_log=SessionLog(status=SessionLog.START))
            self._file.flush()

    def write(self, rows: Sequence[Row]) -> None:
        with file_errors(self.folder):
            for row in rows:
                values = [
                    self._summary.Value(tag=name, simple_value=value)
                    for name, value in row.items()
                    if name != "round" and isinstance(value, (int, float))
                ]
                self._write(step=row["round"], summary=self._summary(value=values))
            self._file.flush()

    def _write(self, **event_fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **event_fields).SerializeToString())

    def close(self, summary: Mapping[str, Any]) -> None:
        with file_errors(self.folder):
            self._file.close()
