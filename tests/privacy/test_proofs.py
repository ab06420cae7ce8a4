"""The pages of what is proven and of the papers say what the code says."""

import re
from pathlib import Path
from typing import get_args

import pytest

from raydpfl.privacy import Mechanism, Query, Relation, Sampling, covers
from raydpfl.privacy.sampling import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
PROOFS = (ROOT / "docs" / "proofs.md").read_text()
PAPERS = (ROOT / "docs" / "papers.md").read_text()


def ticked() -> dict[tuple[str, str, str], tuple[bool, bool]]:
    """Whether the first table says that pld and rdp cover a scheme, a relation and a placement."""
    ticks = {}
    for row in re.findall(
        r"^\| `(\w+)` \| ([\w, ]+) \| ([\w, ]+) \| (\w+) \| (\w+) \|", PROOFS, re.M
    ):
        scheme, relations, placements, *by = row
        for relation in relations.split(", "):
            for placement in placements.split(", "):
                ticks[scheme, relation, placement] = (by[0] == "yes", by[1] == "yes")
    return ticks


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_tick_stands_where_an_accountant_covers_a_scheme_and_nowhere_else(scheme):
    ticks = ticked()
    allocated = {"epoch": 2, "per_epoch": 1} if scheme == "random_allocation" else {}
    allocated |= {"cap": 6} if scheme == "truncated_poisson" else {}
    sampling = Sampling(scheme, 10, 10 if scheme == "full" else 5, **allocated)
    for relation in get_args(Relation):
        for placement in ("server", "client"):
            run = Mechanism(sampling, (Query("updates", 1.0, 1.0),), 2, placement=placement)
            covered = tuple(covers(name, run, relation) is None for name in ("pld", "rdp"))
            assert ticks.get((scheme, relation, placement), (False, False)) == covered


def test_the_tests_behind_the_ticks_exist():
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = re.findall(r"`(test_\w+)`", PROOFS + PAPERS)
    assert len(names) > 10 and not [name for name in names if f"def {name}(" not in source]


def test_the_files_that_the_papers_are_in_exist():
    files = re.findall(r"`((?:raydpfl|experiments|tests)/[\w./-]+)`", PAPERS)
    assert len(files) > 50 and not [file for file in files if not (ROOT / file).exists()]
