"""What hooks of user-defined classes give that is not what they are to give."""

import numpy as np
import pytest
import torch
from conftest import experiment

from raydpfl import run
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding import BoundingQuery, Clip
from raydpfl.methods.probes import Probe
from raydpfl.methods.server import Server, ServerSgd


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


class Dotted(Server):
    """Momentum whose state has names as layers have them, and names that `start` does not give."""

    names: tuple[str, ...] = ("v.all",)

    def start(self, d):
        return {name: np.zeros(d) for name in self.names}

    def direction(self, update, state):
        assert state.keys() >= set(self.names)
        for name in (*self.names, "a", "a.b", ".", "50%2E", "ü/ö"):
            state[name] = 0.9 * state.get(name, 0.0) + update
        return sum(state.values())


class Listed(ServerSgd):
    def start(self, d):
        return [np.zeros(d)]


class Numbers(ServerSgd):
    def start(self, d):
        return {"steps": 0}


class Tensors(Server):
    def direction(self, update, state):
        state["v"] = torch.from_numpy(update)
        return update


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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Listed", "Listed: start gives list, not a dict of arrays by name"),
        ("Numbers", "Numbers: start gives int by 'steps', not an array by a name"),
        ("Tensors", "the state of server is Tensor by 'v', not an array by a name"),
    ],
)
def test_a_server_that_gives_what_it_may_not_ends_the_run_by_name(name, said, tmp_path):
    with pytest.raises(RunError, match=said):
        run(experiment(server=kind(name)), tmp_path / "out")


def test_a_state_is_resumed_whatever_its_names(tmp_path):
    dotted = experiment(server=kind("Dotted"))
    whole = run(dotted, tmp_path / "whole")
    run(dotted, tmp_path / "out", on_rows=lambda rows: rows[0]["round"] == 1)
    resumed = run(dotted, tmp_path / "out", resume=True)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


def test_a_checkpoint_without_a_state_that_the_class_starts_with_is_refused(tmp_path, monkeypatch):
    run(experiment(server=kind("Dotted")), tmp_path / "out", on_rows=lambda rows: True)
    started = {"v.all": np.zeros(1), "w": np.zeros(1)}
    monkeypatch.setattr(Dotted, "start", lambda self, d: started)
    with pytest.raises(RunError, match="the checkpoint has no state w of server"):
        run(experiment(server=kind("Dotted")), tmp_path / "out", resume=True)
