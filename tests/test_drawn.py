"""Noise of members from outside the package, in runs: what is drawn is what was accounted for."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from conftest import experiment
from test_noise_law import TINY

from raydpfl.bounding import Query
from raydpfl.bounding.quantile_clip import QuantileClip
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream
from raydpfl.noise.drawn import query_noise
from raydpfl.plan import Plan


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
