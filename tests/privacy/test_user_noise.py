"""Noise of members from outside the package, in runs: what is drawn is what was accounted for."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import experiment
from scipy.special import ndtr
from test_noise_distribution import TINY

from raydpfl.check import bounding as looks
from raydpfl.check import noise as noise_looks
from raydpfl.check.contract import BrokenClause
from raydpfl.check.example import Example
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.bounding import BoundingQuery
from raydpfl.methods.bounding.clip import Clip
from raydpfl.methods.bounding.quantile_clip import QuantileClip
from raydpfl.methods.noise import Noise, NoiseSource, SideQuery
from raydpfl.methods.noise.banded_gaussian import BandedGaussian
from raydpfl.methods.noise.gaussian import Gaussian
from raydpfl.methods.noise.keyed_noise import query_noise, server_noise, survey_noise
from raydpfl.runtime.runner import run
from raydpfl.simulation import noise_monitor
from raydpfl.simulation.resolution import resolve


class Asking(QuantileClip):
    """Asks for the same count under several names."""

    names: tuple[str, ...] = ()

    def queries(self) -> tuple[BoundingQuery, ...]:
        counts = (BoundingQuery(name, bound=0.5, share=0.05) for name in self.names)
        return (*super().queries(), *counts)

    def answers(self, columns: Any, bound: float) -> dict[str, np.ndarray]:
        count = super().answers(columns, bound)["count"]
        return dict.fromkeys(["count", *self.names], count)


# --- side queries ---


@pytest.mark.parametrize(
    "names", [("count",), ("q", "q"), ("losses",), ("updates",), ("loss",), ("survey",)]
)
def test_queries_of_one_name_are_refused(names):
    bounding = {"kind": f"{__name__}:Asking", "bound": 0.5, "names": names}
    with pytest.raises(ConfigError, match=r"bounding\.kind = .*queries have names that differ"):
        resolve(experiment(**{**TINY, "bounding": bounding}))


def test_queries_of_two_names_share_no_noise():
    """Also of names with one crc32, and of those that are one number modulo 2^20."""
    names = ["count", "losses", "q9", "q41950", "plumless", "buckeroo", "", "Count", "count "]
    names += [f"q{i}" for i in range(10, 3000)]
    drawn = [query_noise(7, 3, 1.0, query=name) for name in names]
    assert len(set(drawn)) == len(names)
    assert drawn == [query_noise(7, 3, 1.0, query=name) for name in names]
    places = itertools.product((0, 1), (0, 2), (5, 6))
    every = {query_noise(7, t, 1.0, client, draw, "q9") for draw, client, t in places}
    assert len(every) == 8


def test_the_noise_of_the_packages_queries_has_the_bits_that_it_had():
    for step, name in enumerate(("count", "losses")):
        key = {"t": 3, "client": 4, "draw": 1, "step": step}
        was = float(stream(7, Purpose.QUERY_NOISE, **key).standard_normal() * 2.0)
        assert query_noise(7, 3, 2.0, 4, 1, name) == was


# --- bounds ---


class Narrow(Clip):
    """Does not bound norms from `low` to `high`, or does so at `high` times what it should."""

    low: float = 1.0
    high: float = 1.0
    computed: bool = False  # its range is in no number of its code

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        low = math.exp(math.sin(self.low)) if self.computed else self.low
        high = low * (1 + self.high) if self.computed else self.high
        within = (norms >= low) & (norms <= high)
        return torch.where(within, 1.0, super().factors(norms, bound))


NARROW = [{"low": low, "high": high} for low, high in (
    (2.0, 2.02), (1e6, 1.1e6), (7.3, 7.35), (3.3e17, 3.3001e17), (31.7, 31.7000000001),
)]  # fmt: skip
NARROW += [{"low": low, "high": high, "computed": True} for low, high in ((1.0, 1e-3), (0.4, 2e-4))]


@pytest.mark.parametrize("settings", NARROW)
def test_a_bound_that_does_not_hold_in_a_narrow_range_of_norms_is_found(settings):
    case = Example("bounding", {"kind": f"{__name__}:Narrow", "bound": 1.0, **settings})
    with pytest.raises(
        BrokenClause, match=r"norm \S+ is sent with length \S+, above the bound of 1.0"
    ):
        looks.bound(case)


@pytest.mark.slow
def test_a_sound_bound_is_held_with_the_resolution_of_the_search():
    """The largest length is at a norm of the bound, and a member's own factor is asked."""
    sound = {"kind": f"{__name__}:Narrow", "bound": 1.0, "low": 0.2, "high": 1 + 5e-13}
    assert "of a norm between" in looks.bound(Example("bounding", sound))


class Growing(Clip):
    """Keeps what it sent, and sends ten times of it in round 1."""

    def next_state(self, vectors: torch.Tensor, sent: torch.Tensor, view: Any) -> torch.Tensor:
        if view.t == 1:
            sent *= 10
        return sent.clone()


class Narrowing(Clip):
    """Lets norms of round 1 pass, in every way of adding up."""

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        return torch.full_like(norms, 2 * bound) / norms


@pytest.mark.parametrize(
    "kind, message",
    [
        ("Growing", r"client \d+ sends norm \S+ in round 1, above the bound of 0\.01"),
        ("Narrowing", r"lets client \d+ send norm \S+ times factor \S+ in round 0, above"),
    ],
)
def test_a_run_ends_where_a_client_sends_more_than_the_bound(kind, message, tmp_path):
    bounding = {"kind": f"{__name__}:{kind}", "bound": 0.01}
    plain = {"noise": {"kind": "none"}, "weights": {"kind": "uniform"}, "client": {"actors": 0}}
    plain["local"] = {"kind": "sgd", "steps": 2, "batch": 5, "lr": 0.1}
    with pytest.raises(RunError, match=message):
        run(experiment(**{**TINY, **plain, "bounding": bounding}, rounds=3), tmp_path / "run")


# --- noise ---


class Wrong(NoiseSource):
    """The server's noise, changed by `how`."""

    def __init__(self, seed: int, d: int, how: str):
        self.seed = seed
        self.d = d
        self.how = how

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        z = server_noise(self.seed, t, 1.0, self.d)
        before = server_noise(self.seed, max(t - 1, 0), 1.0, self.d)
        made = {
            "sound": lambda: z,
            "none": lambda: None,
            "zero": lambda: 0 * z,
            "nan": lambda: z * math.nan,
            "decays": lambda: z * 0.97**t,
            "less after 8": lambda: z * (1 if t < 8 else 0.7),
            "less": lambda: z * 0.97,
            "more": lambda: z * 1.03,
            "uniform": lambda: math.sqrt(3) * (2 * ndtr(z) - 1),
            "laplace": lambda: -np.sign(z) * np.log(2 * ndtr(-np.abs(z))) / math.sqrt(2),
            "cut off": lambda: np.clip(z, -2.5, 2.5),
            "moved": lambda: z + 0.05,
            "again": lambda: server_noise(self.seed, t % 20, 1.0, self.d),
            "follows": lambda: 0.1 * before + math.sqrt(0.99) * z,
            "tiled": lambda: np.resize(z[: self.d // 5], self.d),
            "one length": lambda: z * math.sqrt(self.d) / np.linalg.norm(z),
            "some": lambda: np.where(np.arange(self.d) < 10, 0, z),
        }[self.how]()
        return made if made is None else made * std


class OnSums(Noise):
    """Noise of the server, changed by `how`; that on queries by `on`."""

    how: str = "sound"
    on: str = "sound"

    def size(self, outline: Any, facts: Any) -> float:
        return 2.0

    def source(self, seed: int, d: int) -> NoiseSource:
        return Wrong(seed, d, self.how)

    def on_query(self, query: SideQuery) -> float:
        key = (query.seed, query.t, query.std)
        made = {
            "sound": lambda: query_noise(*key, query=query.name),
            "none": lambda: 0.0,
            "of one name": lambda: query_noise(*key),
            "less": lambda: 0.6 * query_noise(*key, query=query.name),
            "again": lambda: query_noise(query.seed, query.t % 5, query.std, query=query.name),
        }
        return made[self.on]()

    def on_survey(self, seed: int, t: int, std: float, bins: int, clients: int) -> np.ndarray:
        share = 0.1 if self.on == "less" else 1.0
        return survey_noise(seed, t, share * std, bins)


class OfClients(Gaussian):
    """Noise of clients, changed by `how`."""

    kind: str = "of clients"
    how: str = "sound"

    def client_std(self, std: float, clients_left: int) -> float:
        return super().client_std(std, clients_left) * (0.9 if self.how == "declared" else 1)

    def on_clients(self, seed, t, clients, draws, std, d) -> np.ndarray | None:
        sound = super().on_clients(seed, t, clients, draws, std, d)
        made = {
            "sound": lambda: sound,
            "declared": lambda: sound,
            "none": lambda: None,
            "decays": lambda: sound * 0.97**t,
            "less after 8": lambda: sound * (1 if t < 8 else 0.7),
            "one for all": lambda: np.broadcast_to(server_noise(seed, t, std, d), sound.shape),
            "one client": lambda: sound * np.where(clients % 3 == 0, 0.8, 1.0)[:, None],
            "again": lambda: super(OfClients, self).on_clients(seed, 0, clients, draws, std, d),
        }
        return made[self.how]()


NOISE = ("how", "on", "multiplier", "placement", "epsilon", "bands", "coefficients")


def looked(kind: str, folder: Path, rounds: int, **fields: Any) -> Any:
    noise = {"kind": f"{__name__}:{kind}"} | {k: v for k, v in fields.items() if k in NOISE}
    rest = {name: value for name, value in fields.items() if name not in NOISE}
    tree = {**TINY, "evaluate": {"every": 1000}, **rest, "noise": noise}
    return run(experiment(**tree, rounds=rounds), folder / "run")


SERVER = (
    "none", "zero", "nan", "decays", "less after 8", "less", "more", "uniform", "laplace",
    "cut off", "moved", "again", "follows", "tiled", "one length", "some",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("how", SERVER)
def test_noise_of_the_server_that_is_not_what_was_accounted_for_ends_the_run(how, tmp_path):
    with pytest.raises(RunError, match=r"noise\.kind .*OnSums.* in round \d+ .* accounted for"):
        looked("OnSums", tmp_path, 260, how=how)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["declared", "none", "decays", "less after 8", "one for all", "one client", "again"]
)
@pytest.mark.parametrize("backend", ["fused", "auto"])
def test_noise_of_clients_that_is_not_what_was_accounted_for_ends_the_run(how, backend, tmp_path):
    fields = {"how": how, "multiplier": 2.0, "placement": "client"}
    client = {**TINY["client"], "backend": backend}
    with pytest.raises(RunError, match=r"noise\.kind .*OfClients.* in round \d+.* accounted for"):
        looked("OfClients", tmp_path, 40, client=client, **fields)


ASKING = {"kind": f"{__name__}:Asking", "bound": 0.5, "names": ["q"]}


@pytest.mark.parametrize("on", ["none", "of one name", "less", "again"])
def test_noise_on_queries_that_is_not_what_was_accounted_for_ends_the_run(on, tmp_path):
    with pytest.raises(RunError, match=r"the noise on the query \w+ in round \d+ .* accounted for"):
        looked("OnSums", tmp_path, 260, on=on, bounding=ASKING)


@pytest.mark.slow
def test_noise_on_a_histogram_that_is_not_what_was_accounted_for_ends_the_run(tmp_path):
    histogram = {"bins": 20, "std": 3.0, "low": 0.0, "high": 1.0}
    evaluate = {"every": 1, "per_client": "accuracy", "histogram": histogram}
    with pytest.raises(RunError, match=r"the noise on the histogram in round \d+ .* accounted for"):
        looked("OnSums", tmp_path, 9, on="less", evaluate=evaluate)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, fields",
    [("OnSums", {"bounding": ASKING}), ("OfClients", {"multiplier": 2.0, "placement": "client"})],
)
def test_sound_noise_is_let_pass(kind, fields, tmp_path):
    """A false alarm has probability 1e-6; the seed is fixed."""
    assert looked(kind, tmp_path, 150, **fields).summary["status"] == "completed"


class Banded(BandedGaussian):
    """Correlated noise, some of it."""

    kind: str = "banded"
    how: str = "sound"

    def source(self, seed: int, d: int) -> NoiseSource:
        source = super().source(seed, d)
        if self.how == "white":  # what accountants count on is less than this
            return Wrong(seed, d, "sound")
        return source

    def whitening(self, t: int) -> np.ndarray:
        return super().whitening(t) * (2 if self.how == "longer" else 1)


BANDED = {
    "bounding": {"kind": "clip", "bound": 0.5},
    "selection": {"kind": "cyclic", "period": 3},
    "multiplier": 1.0,
    "bands": 3,
}


@pytest.mark.slow
def test_correlated_noise_is_held_against_the_law_of_what_is_independent_of_it(tmp_path):
    assert looked("Banded", tmp_path, 40, **BANDED).summary["status"] == "completed"
    norm = r"1 participations move the sums whitened by whitening\(\) by 2, where 1 was accounted"
    for how, message in (("white", "accounted for"), ("longer", norm)):
        with pytest.raises(RunError, match=message):
            looked("Banded", tmp_path / how, 40, how=how, **BANDED)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_looks(tmp_path):
    """Also where the noise of a round takes back that of rounds before."""
    tree = {**TINY, **BANDED, "evaluate": {"every": 1000}}
    noise = {name: tree.pop(name) for name in ("multiplier", "bands")}
    tree["noise"] = {"kind": f"{__name__}:Banded", **noise}
    whole = experiment(**tree, rounds=12)
    stop = iter(range(100))
    run(whole, tmp_path / "run", on_rows=lambda rows: next(stop) == 6)
    assert run(whole, tmp_path / "run", resume=True).summary["rounds"] == 12


@pytest.mark.slow
def test_sound_draws_raise_no_more_alarms_than_is_stated(monkeypatch):
    """At a rate of 1 in 5 a run, of 60 runs: 30 or more have a probability of 1e-7 at most."""
    monkeypatch.setattr(noise_monitor, "FALSE_ALARM", 0.4)  # of the first kind of draws half of it
    alarms = 0
    for again in range(60):
        draws = noise_monitor.Draws("the noise", 0)
        rng = np.random.default_rng(again)
        try:
            for t in range(12):
                z = rng.standard_normal((1, 40))
                draws.see(t, 1.0, {**noise_monitor.numbers(z, [z * 0 + 1]), "z": z[0]})
        except RunError:
            alarms += 1
    assert alarms < 30


@pytest.mark.slow
@pytest.mark.parametrize("how", ["decays", "less after 8", "again"])
def test_noise_that_is_wrong_in_late_rounds_alone_fails_its_check(how):
    case = Example("noise", {"kind": f"{__name__}:OnSums", "how": how})
    with pytest.raises(BrokenClause):
        for look in (noise_looks.late_rounds, noise_looks.on_sums):
            look(case)
    assert "p = " in noise_looks.late_rounds(Example("noise", {"kind": f"{__name__}:OnSums"}))
