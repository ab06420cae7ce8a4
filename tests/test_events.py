"""Event files are those that tensorboard itself writes."""

from __future__ import annotations

import io
import math

import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from raydpfl.events import event, record


def theirs(**fields) -> bytes:
    written = io.BytesIO()
    RecordWriter(written).write(Event(**fields).SerializeToString())
    return written.getvalue()


@pytest.mark.parametrize("step", [1, 127, 128, 300, 10**6])
def test_an_event_of_scalars_is_the_record_that_tensorboard_writes(step):
    values = {"loss": 0.1, "zero": 0.0, "x" * 200: -1e30, "none": math.nan, "all": math.inf}
    summary = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in values.items()])
    ours = record(event(1.5, step, scalars=values))
    assert ours == theirs(wall_time=1.5, step=step, summary=summary)


def test_the_first_events_of_a_file_are_those_that_tensorboard_writes():
    version = record(event(2.0, version="brain.Event:2"))
    assert version == theirs(wall_time=2.0, file_version="brain.Event:2")
    log = SessionLog(status=SessionLog.START)
    assert record(event(2.0, 7, started=True)) == theirs(wall_time=2.0, step=7, session_log=log)


def test_a_number_beyond_float32_is_infinite():
    assert event(0.0, 1, scalars={"x": -1e300}) == event(0.0, 1, scalars={"x": -math.inf})
