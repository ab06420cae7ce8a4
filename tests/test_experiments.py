"""The tables of studies that are committed: what computed them, and what is said of them."""

import csv
import importlib
import json
import re
from pathlib import Path

import pytest

from raydpfl.simulation.provenance import COMPILED_DIGEST
from raydpfl.sweep.study import builtin

ROOT = Path(__file__).parent.parent / "experiments"
TABLES = sorted([*ROOT.glob("0*/*/*.md"), *ROOT.glob("simulators/*/*.md")])
CLAIMS = sorted([*ROOT.glob("0*/*/claims.csv"), *ROOT.glob("simulators/*/claims.csv")])


def test_every_committed_table_was_computed_by_the_noise_of_now():
    assert TABLES
    for path in TABLES:
        by = re.search(
            r"Computed by raydpfl [^ ]+ at commit (\w+), compiled code (\w+),", path.read_text()
        )
        assert by, f"{path.relative_to(ROOT)} does not say what it was computed by"
        assert by[2] == COMPILED_DIGEST, (
            f"{path.relative_to(ROOT)} was computed by compiled code {by[2]}, now "
            f"{COMPILED_DIGEST}: "
            f"run the study again"
        )


@pytest.mark.slow
def test_the_readmes_are_written_from_the_tables_that_lie_there(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    readmes = importlib.import_module("readmes")
    for paper in readmes.PAPERS:
        assert (ROOT / paper / "README.md").read_text() == readmes.readme(paper), paper
    front = (ROOT / "README.md").read_text()
    assert front == readmes.front(front)
    assert readmes.items().count("\n") == 80  # two lines of the head, and 79 items
    for where in re.findall(r"`pytest (\S+)`", readmes.items()):
        file, _, name = where.partition("::")
        assert f"def {name}(" in (ROOT.parent / file).read_text(), where


def test_every_committed_claim_is_one_of_its_studys_file():
    assert CLAIMS
    for path in CLAIMS:
        name = json.loads((path.parent / "summary.json").read_text())["study"]
        stated = [claim["says"] for claim in builtin.header(builtin.find(name))["claims"]]
        with path.open(newline="") as file:
            assert [row["claim"] for row in csv.DictReader(file)] == stated, name
