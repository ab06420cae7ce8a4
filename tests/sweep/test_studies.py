"""All studies that ship, run at the scale of smoke: that they come to their end, that the
identities hold which the papers' mathematics gives, and what they leave behind. Never an accuracy.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raydpfl.cli import app
from raydpfl.sweep.study import Study, builtin

pytestmark = pytest.mark.slow
STUDIES = [*builtin.paths()]


@pytest.fixture(scope="module")
def smoke(shared_ray, tmp_path_factory) -> Path:
    """The directory of all studies, run in one go as by hand: without data sets, in one Ray."""
    out = tmp_path_factory.mktemp("smoke") / "out"
    words = ["reproduce", "all", "--scale", "smoke", "--out", str(out), "--data-root", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["raydpfl", *words])
        app.main()
    return out


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_comes_to_its_end_and_its_tables_have_every_cell(name, smoke):
    study = Study.from_directory(smoke / name)
    summary = json.loads((smoke / name / "summary.json").read_text())
    assert (summary["status"], study.scale) == ("completed", "smoke")
    results = pq.read_table(smoke / name / "results.parquet").to_pylist()
    assert len(results) == len(study.cells) * study.seeds
    cells = {
        (*(row[axis] for axis in study.axes), row["arm"], row["accounting"]) for row in results
    }
    assert cells == {(*cell.labels.values(), cell.arm, cell.accounting) for cell in study.cells}
    assert {row["status"] for row in results} <= {"completed", "budget"}
    assert (smoke / name / "report" / "index.html").stat().st_size > 0
    tried = pq.read_table(smoke / name / "tuning.parquet").to_pylist()
    tuned = [cell for cell in study.cells if cell.grid and study.chooser(cell) is cell]
    assert sum(row["chosen"] for row in tried) == len(tuned) * len(study.tuning_seeds())


@pytest.mark.parametrize("name", STUDIES)
def test_the_identities_of_a_study_hold(name, smoke):
    study = Study.from_directory(smoke / name)
    found = json.loads((smoke / name / "summary.json").read_text())["identities"]
    assert len(found) == len(study.about.same_bits)
    for identity in found:
        assert identity["held"] is True and identity["compared"] > identity["one_run"]
