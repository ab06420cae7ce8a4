"""What hooks of user-defined classes give that is not what they are to give."""

from types import MappingProxyType

import numpy as np
import pytest
import torch
from conftest import experiment, start_coordinator

from raydpfl import run
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding import BoundingQuery, Clip
from raydpfl.methods.noise import Noise, NoiseSource
from raydpfl.methods.probes import Probe
from raydpfl.methods.selection import Selection
from raydpfl.methods.selection.base import Cohort
from raydpfl.methods.server import Server, ServerSgd
from raydpfl.models.metrics import Metric
from raydpfl.privacy import Sampling


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


Taken = probe(columns=("norm",))
Drawn = probe(columns=("contribution",))
Bound = probe(values=("bound",))
Rounds = probe(tables={"rounds": ["round"]})
Narrow = probe(columns=("peak",), chunk={"peak": np.zeros(1)})
Missing = probe(columns=("peak",))
Secret = probe(chunk={"norm": np.zeros(1)})
Undeclared = probe(round={"epsilon_rdp": 0.0})
Vector = probe(values=("drift",), round={"drift": np.ones(2)})


class Reals(Probe):
    def afterwards(self, run):
        return MappingProxyType({"a": np.float32(2.5), "b": np.arange(3)})


class Infinite(Probe):
    def afterwards(self, run):
        return {"a": float("inf")}


class Nothing(Probe):
    def afterwards(self, run):
        return None


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


class Crowd(Asking):
    """Every client answers with what most have."""

    def answers(self, columns, bound):
        is_clipped = columns["norm"] > np.median(columns["norm"])
        return {"short": np.where(is_clipped, 0.5, -0.5)}


class Counted(Clip):
    """A model of how many clients took part."""

    def receive(self, noisy_sum, state, facts):
        return np.full_like(noisy_sum, facts.cohort)


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


def direction(value):
    """A server that gives what `value` makes of the update."""

    class Given(Server):
        def direction(self, update, state):
            return value(update)

    return Given


Shorter = direction(lambda update: update[:-1])
Scalar = direction(lambda update: float(update.mean()))
Complex = direction(np.fft.fft)
Changing = direction(lambda update: None)
Tensor = direction(torch.from_numpy)


class Bare(Selection):
    def sampling(self, population):
        return Sampling("fixed", len(population), 20)

    def select(self, seed, t, population, ask):
        return np.arange(20)


def size(value, **given):
    """A noise of this size."""

    class Given(Noise):
        def size(self, outline, facts):
            return value

        def source(self, seed, d):
            return given.get("source", NoiseSource)(seed, d)

    return Given


Text = size("1")
Zero = size(0)
Single = size(np.float32(1))


class Cut(NoiseSource):
    def on_sum(self, t, std):
        return super().on_sum(t, std)[:-1]


Lacking = size(1.0, source=Cut)


class Sums(Metric):
    """Gives its sums as a list."""

    def sums(self, form, outputs, y):
        return [0.0, 1.0]

    def value(self, total):
        return 0.0


class Loss(Sums):
    def sums(self, form, outputs, y):
        return torch.zeros(2)


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
        ("Infinite", "Infinite: afterwards gives what summary.json cannot hold: Out of range"),
        ("Nothing", "Nothing: afterwards gives NoneType, not a mapping"),
        ("Vector", r"round, of drift, gives float64 \[2\], not a number"),
    ],
)
def test_a_probe_that_gives_what_it_may_not_is_refused_by_name(name, said, tmp_path):
    with pytest.raises((ConfigError, RunError), match=said):
        run(experiment(measure=[kind(name)]), tmp_path / "out")


def test_a_summary_holds_the_numbers_that_a_probe_gives_afterwards(tmp_path):
    summary = run(experiment(measure=[kind("Reals")]), tmp_path / "out").summary
    assert summary[f"{__name__}:Reals"] == {"a": 2.5, "b": [0, 1, 2]}


def test_two_probes_share_no_name(tmp_path):
    with pytest.raises(ConfigError, match="Missing': expected one with no column or table peak"):
        run(experiment(measure=[kind("Narrow"), kind("Missing")]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [
        ("bounding", "Twice", r"answers, to short, gives float64 \[40\], not float64 \[20\]"),
        ("bounding", "Textual", "bounding.kind .*:Textual: adapt gives str, not a number"),
        ("server", "Listed", "Listed: start gives list, not a dict of arrays by name"),
        ("server", "Numbers", "Numbers: start gives int by 'steps', not an array by a name"),
        ("server", "Tensors", "the state of server is Tensor by 'v', not an array by a name"),
        ("server", "Shorter", r"direction gives float64 \[7849\], not float64 \[7850\]"),
        ("server", "Scalar", "server.kind .*:Scalar: direction gives float, not float64"),
        ("server", "Complex", r"direction gives complex128 \[7850\], not float64"),
        ("server", "Changing", "direction gives NoneType, not float64"),
        ("selection", "Bare", "selection.kind .*:Bare: select gives ndarray, not a Cohort"),
        ("noise", "Text", "noise.kind .*:Text: size gives str, not a number"),
        ("noise", "Zero", "noise.kind = .*:Zero': expected one whose size is .* above 0, not 0"),
        ("noise", "Lacking", r"on_sum gives float64 \[7849\], not float64 \[7850\]"),
    ],
)
def test_a_member_that_gives_what_it_may_not_is_refused_by_name(section, name, said, tmp_path):
    own = kind(name, bound=1.0) if section == "bounding" else kind(name)
    with pytest.raises((ConfigError, RunError), match=said):
        run(experiment(**{section: own}), tmp_path / "out")


@pytest.mark.parametrize(("noise", "count"), [({"multiplier": 1.0}, 20), ({"kind": "none"}, 7)])
def test_receive_is_not_told_the_count_that_noise_hides(noise, count, tmp_path):
    poisson = {"kind": "poisson", "cohort": 20}
    sections = {"bounding": kind("Counted", bound=1.0), "selection": poisson, "noise": noise}
    coordinator = start_coordinator(tmp_path, **sections)
    mean = coordinator.aggregate(0, Cohort.of(np.arange(7)), np.zeros(7850))
    assert (mean == count).all()


def test_what_a_client_answers_is_asked_of_it_alone(tmp_path):
    sections = {"bounding": kind("Crowd", bound=1.0), "noise": {"multiplier": 1e-9}}
    coordinator = start_coordinator(tmp_path, **sections)
    columns = {"client": np.arange(7), "norm": np.linspace(0.5, 2, 7)}
    sums = coordinator.noisy_answers(0, Cohort.of(np.arange(7)), columns)
    assert sums["short"] == pytest.approx(-3.5, abs=1e-3)


@pytest.mark.parametrize(("section", "name"), [("server", "Tensor"), ("noise", "Single")])
def test_numbers_of_another_kind_are_the_numbers_that_they_are(section, name, tmp_path):
    assert run(experiment(**{section: kind(name)}), tmp_path / "out").summary["rounds"] == 4


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Sums", "Sums': expected a class whose sums gives a tensor .*, not list"),
        ("Loss", "Loss': expected a class with another name, as loss is a metric of the package"),
    ],
)
def test_a_metric_that_gives_what_it_may_not_is_refused_by_name(name, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        run(experiment(evaluate={"metrics": [kind(name)]}), tmp_path / "out")


def test_a_bound_that_is_a_whole_number_is_gone_on_with(tmp_path):
    whole = experiment(bounding=kind("Whole", bound=1.0))
    run(whole, tmp_path / "out", on_rows=lambda rows: rows[0]["round"] == 1)
    assert run(whole, tmp_path / "out", resume=True).summary["rounds"] == 4


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
