"""Noise of members from outside the package, in runs: what is drawn is what was accounted for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from conftest import experiment
from test_noise_law import TINY

from raydpfl.bounding import Query
from raydpfl.bounding.clip import Clip
from raydpfl.bounding.quantile_clip import QuantileClip
from raydpfl.check import bounding as looks
from raydpfl.check.cases import Case
from raydpfl.check.promise import Broken
from raydpfl.errors import ConfigError, RunError
from raydpfl.keys import Purpose, stream
from raydpfl.noise.drawn import query_noise
from raydpfl.plan import Plan
from raydpfl.runner import run


class Asking(QuantileClip):
    """Asks for the same count under several names."""

    names: tuple[str, ...] = ()

    def queries(self) -> tuple[Query, ...]:
        counts = (Query(name, bound=0.5, share=0.05) for name in self.names)
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
        Plan.make(experiment(**{**TINY, "bounding": bounding}))


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
        low, high = self.low, self.high
        if self.computed:
            low, high = math.exp(math.sin(low)), math.exp(math.sin(low)) * (1 + high)
        within = (norms >= low) & (norms <= high)
        return torch.where(within, 1.0, super().factors(norms, bound))


@pytest.mark.parametrize(
    "settings",
    [
        {"low": 2.0, "high": 2.02},
        {"low": 1e6, "high": 1.1e6},
        {"low": 7.3, "high": 7.35},
        {"low": 3.3e17, "high": 3.3001e17},
        {"low": 31.7, "high": 31.7000000001},
        {"low": 1.0, "high": 1e-3, "computed": True},
        {"low": 0.4, "high": 2e-4, "computed": True},
    ],
)
def test_a_bound_that_does_not_hold_in_a_narrow_range_of_norms_is_found(settings):
    case = Case("bounding", {"kind": f"{__name__}:Narrow", "bound": 1.0, **settings})
    with pytest.raises(Broken, match=r"norm \S+ is sent with length .* times the bound of 1"):
        looks.bound(case)


def test_a_sound_bound_is_held_with_the_resolution_of_the_search():
    """The largest length is at a norm of the bound, and a member's own factor is asked."""
    sound = {"kind": f"{__name__}:Narrow", "bound": 1.0, "low": 0.2, "high": 1 + 5e-13}
    assert "of a norm apart" in looks.bound(Case("bounding", sound))


class Growing(Clip):
    """Keeps what it sent, and sends ten times of it in round 1."""

    def remember(self, vectors: torch.Tensor, sent: torch.Tensor, view: Any) -> torch.Tensor:
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
    with pytest.raises(RunError, match=message):
        run(experiment(**{**TINY, **plain, "bounding": bounding}, rounds=3), tmp_path / "run")
