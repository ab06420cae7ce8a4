"""Tables grow by what is new, are whole at any instant, and keep the type of every column."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydpfl.errors import FileError
from raydpfl.storage.run_files import Extent, Pace
from raydpfl.storage.tables import StoredTable, read_log, schema, write_table

COLUMNS = schema(["round", "client", "norm", "angle"])


def table(folder) -> StoredTable:
    return StoredTable(folder, "clients", COLUMNS)


def rows(t: int, clients: int = 3) -> dict:
    norms = np.linspace(t, t + 1.0, clients)
    return {"round": np.full(clients, t), "client": np.arange(clients), "norm": norms}


def grow(found: StoredTable, rounds: range) -> list[Extent]:
    extents = []
    for t in rounds:
        found.append(rows(t))
        extents.append(found.flush())
    return extents


def test_a_flush_adds_the_new_rows_to_the_log_and_leaves_the_old_bytes_alone(tmp_path):
    grown = table(tmp_path)
    first = grow(grown, range(2))[-1]
    before = grown.log.read_bytes()
    inode = grown.log.stat().st_ino
    lengths = [first.length, *(extent.length for extent in grow(grown, range(2, 200)))]
    assert set(np.diff(lengths)) == {lengths[1] - lengths[0]}  # however many rows there are
    assert grown.log.read_bytes()[: len(before)] == before
    assert grown.log.stat().st_ino == inode and grown.log.stat().st_size == lengths[-1]


def test_nothing_new_costs_nothing(tmp_path):
    grown = table(tmp_path)
    (extent,) = grow(grown, range(1))
    assert grown.flush() == extent and grown.log.stat().st_size == extent.length


@pytest.mark.parametrize("torn", [b"", b"\xff\xff\xff\xff", b"x" * 10_000])
def test_a_table_goes_on_from_any_extent_whatever_stands_beyond_it(torn, tmp_path):
    whole = table(tmp_path / "whole")
    (tmp_path / "whole").mkdir()
    grow(whole, range(6))
    grown = table(tmp_path)
    extents = grow(grown, range(4))
    with open(grown.log, "ab") as file:
        file.write(torn)
    again = table(tmp_path)
    again.resume(extents[2])
    assert again.arrow().equals(whole.arrow().slice(0, 9))
    grow(again, range(3, 6))
    assert again.log.read_bytes() == whole.log.read_bytes()
    again.copy()
    assert pq.read_table(again.path).equals(whole.arrow())


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_the_copy_is_whole_after_the_first_flush_and_after_the_last_copy(content, tmp_path):
    grown = table(tmp_path)
    if content is not None:
        grown.path.write_bytes(content)
    grow(grown, range(1))
    assert pq.read_table(grown.path).num_rows == 3
    grow(grown, range(1, 9))
    grown.copy()
    assert pq.read_table(grown.path).equals(grown.arrow())


def test_columns_have_the_types_of_their_names_whatever_they_hold(tmp_path):
    grown = StoredTable(tmp_path, "rounds", schema(["round", "test_loss", "test_accuracy"]))
    grown.append({"round": [0], "test_loss": [None]})
    grown.append({"round": np.array([1]), "test_loss": [float("nan")], "test_accuracy": [1]})
    grown.flush()
    found = pq.read_table(grown.path)
    assert [str(field.type) for field in found.schema] == ["int64", "double", "double"]
    assert found["test_accuracy"].to_pylist() == [None, 1.0]
    assert found["test_loss"].null_count == 1 and np.isnan(found["test_loss"][1].as_py())
    assert str(schema(["conditions_failed"]).field(0).type) == "list<item: string>"


@pytest.mark.parametrize(
    "columns, reason",
    [({"round": [0], "speed": [1.0]}, "no column speed"), ({"round": [0], "norm": []}, "lengths")],
)
def test_rows_that_do_not_fit_are_refused(columns, reason, tmp_path):
    with pytest.raises(ValueError, match=reason):
        table(tmp_path).append(columns)


def test_what_is_pending_is_read_and_not_yet_on_disk(tmp_path):
    grown = table(tmp_path)
    grow(grown, range(2))
    grown.append(rows(2))
    assert grown.arrow().num_rows == 9 and pq.read_table(grown.path).num_rows <= 6
    found = read_log(tmp_path, "clients")
    assert found is not None and found.num_rows == 6


def test_the_log_of_a_killed_run_is_read_as_far_as_it_is_whole(tmp_path):
    grown = table(tmp_path)
    grow(grown, range(3))
    content = grown.log.read_bytes()
    for cut in (len(content) - 1, len(content) - 40):
        grown.log.write_bytes(content[:cut])
        found = read_log(tmp_path, "clients")
        assert found is not None and found.num_rows == 6
    grown.log.write_bytes(b"nonsense")
    assert read_log(tmp_path, "clients") is None
    grown.log.unlink()
    assert read_log(tmp_path, "clients") is None


def test_a_log_that_another_process_cut_is_not_written_on(tmp_path):
    grown = table(tmp_path)
    grow(grown, range(2))
    grown.log.write_bytes(b"")
    grown.append(rows(2))
    with pytest.raises(FileError, match="cut short"):
        grown.flush()


def test_a_table_without_rows_has_no_file(tmp_path):
    path = tmp_path / "t.parquet"
    write_table(path, pa.table({"client": [1]}))
    assert path.exists()
    write_table(path, schema(["client"]).empty_table())
    assert not path.exists()


def test_snapshots_that_cost_little_are_a_second_apart_and_others_take_their_share(monkeypatch):
    now = 100.0
    monkeypatch.setattr("raydpfl.storage.run_files.time.monotonic", lambda: now)
    pace = Pace()
    for cost, apart in ((0.001, 1.0), (0.05, 1.0), (0.5, 10.0)):
        pace.record_cost(cost)
        now += apart - 0.01
        assert not pace.due()
        now += 0.02
        assert pace.due()
