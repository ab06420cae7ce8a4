"""The tables of studies that are committed: what computed them, and what is said of them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from raydpfl.simulation.provenance import COMPILED
from raydpfl.sweep.study import builtin

ROOT = Path(__file__).parent.parent / "experiments"
TABLES = sorted(ROOT.glob("0*/*/*.md"))
CLAIMS = sorted(ROOT.glob("0*/*/claims.csv"))


def test_every_committed_table_was_computed_by_the_noise_of_now():
    assert TABLES
    for path in TABLES:
        by = re.search(
            r"Computed by raydpfl [^ ]+ at commit (\w+), compiled code (\w+),", path.read_text()
        )
        assert by, f"{path.relative_to(ROOT)} does not say what it was computed by"
        assert by[2] == COMPILED, (
            f"{path.relative_to(ROOT)} was computed by compiled code {by[2]}, now {COMPILED}: "
            f"run the study again"
        )


@pytest.mark.parametrize("path", CLAIMS, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_a_readme_has_the_verdict_on_every_claim_of_its_studies(path):
    readme = (path.parent.parent / "README.md").read_text()
    rows = path.with_suffix(".md").read_text().splitlines()
    table = [row for row in rows if row.startswith("|")]
    missing = [row for row in table if row not in readme]
    assert len(table) > 2 and not missing, f"{path.parts[-3]}/README.md has not: {missing}"


def test_every_committed_folder_is_of_a_study_and_its_claims_are_those_of_its_file():
    for path in CLAIMS:
        name = "/".join(path.parts[-3:-1])
        stated = [claim["says"] for claim in builtin.header(builtin.find(name))["claims"]]
        with path.open(newline="") as file:
            assert [row["claim"] for row in csv.DictReader(file)] == stated, name
