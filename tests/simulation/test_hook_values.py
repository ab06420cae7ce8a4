"""What hooks of user-defined classes give that is not what they are to give."""

import numpy as np
import pytest
from conftest import experiment

from raydpfl import run
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding import BoundingQuery, Clip
from raydpfl.methods.probes import Probe


def probe(columns=(), values=(), **given):
    """A probe that declares these columns and values, and gives others."""

    class Given(Probe):
        def columns(self, client_noise):
            return columns

        def chunk(self, sent):
            return given.get("chunk", {})

        def values(self):
            return values

        def round(self, seen, state):
            return given.get("round", {})

        def tables(self, columns):
            return given.get("tables", {})

    return Given


class Taken(probe(columns=("norm",))):
    pass


class Drawn(probe(columns=("contribution",))):
    pass


class Bound(probe(values=("bound",))):
    pass


class Rounds(probe(tables={"rounds": ["round"]})):
    pass


class Narrow(probe(columns=("peak",), chunk={"peak": np.zeros(1)})):
    pass


class Missing(probe(columns=("peak",))):
    pass


class Secret(probe(chunk={"norm": np.zeros(1)})):
    pass


class Undeclared(probe(round={"epsilon_rdp": 0.0})):
    pass


class Vector(probe(values=("drift",), round={"drift": np.ones(2)})):
    pass


class Asking(Clip):
    """Asks each client for one number."""

    def queries(self):
        return (BoundingQuery("short", bound=0.5, share=0.1),)

    def answers(self, columns, bound):
        return {"short": (columns["norm"] <= bound) - 0.5}

    def adapt(self, bound, sums, clients, state):
        return bound


class Twice(Asking):
    def answers(self, columns, bound):
        return {"short": np.zeros(2 * len(columns["norm"]))}


class Textual(Asking):
    def adapt(self, bound, sums, clients, state):
        return "1"


class Whole(Asking):
    def adapt(self, bound, sums, clients, state):
        return 2


def kind(name, **fields):
    return {"kind": f"{__name__}:{name}", **fields}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Taken", "measure = .*:Taken': expected one with no column or table norm"),
        ("Drawn", "one with no column or table contribution"),
        ("Bound", "one with no column or table bound"),
        ("Rounds", "one with no column or table rounds"),
        ("Narrow", r"measure .*:Narrow: chunk, of peak, gives float64 \[1\], not float64 \[\d+\]"),
        ("Missing", r"chunk, of peak, gives NoneType, not float64 \[\d+\]"),
        ("Secret", "chunk gives norm; declared are none"),
        ("Undeclared", "round gives epsilon_rdp; declared are none"),
        ("Vector", r"round, of drift, gives float64 \[2\], not a number"),
    ],
)
def test_a_probe_that_gives_what_it_may_not_is_refused_by_name(name, said, tmp_path):
    with pytest.raises((ConfigError, RunError), match=said):
        run(experiment(measure=[kind(name)]), tmp_path / "out")


def test_two_probes_share_no_name(tmp_path):
    with pytest.raises(ConfigError, match="Missing': expected one with no column or table peak"):
        run(experiment(measure=[kind("Narrow"), kind("Missing")]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Twice", r"Twice: answers, to short, gives float64 \[40\], not float64 \[20\]"),
        ("Textual", "bounding.kind .*:Textual: adapt gives str, not a number"),
    ],
)
def test_a_bounding_that_gives_what_it_may_not_ends_the_run_by_name(name, said, tmp_path):
    with pytest.raises(RunError, match=said):
        run(experiment(bounding=kind(name, bound=1.0)), tmp_path / "out")


def test_a_bound_that_is_a_whole_number_is_gone_on_with(tmp_path):
    whole = experiment(bounding=kind("Whole", bound=1.0))
    run(whole, tmp_path / "out", on_rows=lambda rows: rows[0]["round"] == 1)
    assert run(whole, tmp_path / "out", resume=True).summary["rounds"] == 4
