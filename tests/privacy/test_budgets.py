"""Distributions of personal budgets: what is drawn, and what is refused."""

import math

import numpy as np
import pyarrow as pa
import pytest
from conftest import messages, refusal
from pyarrow import csv, feather, parquet
from scipy.stats import binomtest, ks_2samp, kstest, norm, uniform

from raydpfl.core import prng
from raydpfl.errors import ConfigError
from raydpfl.privacy.budgets import BudgetDistribution, distribution, parse

FALSE_ALARM = 1e-4  # of each statistical test; all seeds are fixed


def mixture(low: float, high: float) -> BudgetDistribution:
    """0.3 N(low, 0.04) + 0.7 N(high, 1), second arguments variances (003 sec. VI-D2)."""
    parts = [{"weight": 0.3, "mean": low, "std": 0.2}, {"weight": 0.7, "mean": high, "std": 1}]
    return parse({"kind": "normal_mixture", "components": parts})


def test_uniform_budgets_have_their_law_above_the_floor():
    drawn = parse({"kind": "uniform", "low": 0.5, "high": 2}).draw(seed=1, clients=20_000)
    assert kstest(drawn, uniform(0.5, 1.5).cdf).pvalue > FALSE_ALARM
    unit = parse({"kind": "uniform"}).draw(seed=1, clients=20_000)  # 003: U(0, 1)
    floored = binomtest(int((unit == 0.01).sum()), 20_000, 0.01)
    assert unit.min() == 0.01 and floored.pvalue > FALSE_ALARM


@pytest.mark.parametrize(("low", "high"), [(0.5, 10), (2, 8)])
def test_the_mixtures_of_003_have_the_law_of_drawing_again_while_negative(low, high):
    drawn = mixture(low, high).draw(seed=2, clients=20_000)

    generator = prng.stream(3, prng.Purpose.BUDGET, step=1)
    which = generator.random(200_000) < 0.3
    slow = np.where(which, generator.normal(low, 0.2, 200_000), generator.normal(high, 1, 200_000))
    assert ks_2samp(drawn, np.maximum(slow[slow >= 0], 0.01)).pvalue > FALSE_ALARM
    assert drawn.min() >= 0.01


def test_a_component_that_is_nearly_always_negative_is_drawn_from_its_tail():
    parts = [{"weight": 1, "mean": -4, "std": 0.5}]
    tail = parse({"kind": "normal_mixture", "floor": 1e-9, "components": parts})
    drawn = tail.draw(seed=4, clients=2000)
    law = norm(-4, 0.5)
    below = kstest(drawn, lambda x: 1 - law.sf(x) / law.sf(0))
    assert (drawn > 0).all() and below.pvalue > FALSE_ALARM


@pytest.mark.parametrize(
    "law", [distribution(0.3), parse({"kind": "uniform", "public": 0.3}), mixture(0.5, 10)]
)
def test_a_clients_budget_depends_on_its_number_and_the_seed_alone(law):
    many = law.draw(seed=5, clients=1000)
    for count in (1, 7, 999):
        assert (law.draw(seed=5, clients=count) == many[:count]).all()
    if law.kind != "constant":
        assert (law.draw(seed=6, clients=1000) != many).mean() > 0.5


def test_a_share_of_the_clients_is_public_whatever_the_law():
    law = {"kind": "uniform", "low": 1, "high": 2, "public": 0.25}
    drawn = parse(law).draw(seed=7, clients=20_000)
    assert binomtest(int(np.isinf(drawn).sum()), 20_000, 0.25).pvalue > FALSE_ALARM
    private = parse(law | {"public": 0}).draw(seed=7, clients=20_000)
    # nobody else's budget moved
    assert (drawn[np.isfinite(drawn)] == private[np.isfinite(drawn)]).all()
    constant = parse({"kind": "constant", "epsilon": 3, "public": 0.25}).draw(7, 20_000)
    assert (np.isinf(drawn) == np.isinf(constant)).all()


@pytest.mark.parametrize("suffix", ["csv", "parquet", "arrow", "npz"])
def test_a_column_of_any_table_file_gives_the_budgets_and_inf_is_public(suffix, tmp_path, caplog):
    columns = {"epsilon": np.array([0.5, math.inf, 0.001, 4.0]), "who": np.array([30, 10, 20, 40])}
    path = tmp_path / f"budgets.{suffix}"
    table = pa.table(columns)
    write = {
        "csv": csv.write_csv,
        "parquet": parquet.write_table,
        "arrow": feather.write_feather,
        "npz": lambda *_: np.savez(path, **columns),
    }
    write[suffix](table, path)
    law = {"kind": "column", "path": str(path)}
    assert parse(law).draw(0, 4).tolist() == [0.5, math.inf, 0.01, 4.0]
    assert "below noise.epsilon.floor are raised to 0.01: 1 of" in caplog.text
    assert "the first in row 2, which asks for 0.001" in caplog.text
    by_id = parse(law | {"client": "who"}).draw(0, 3, ids=["40", "10", "30"])
    assert by_id.tolist() == [4.0, math.inf, 0.5]
    there = parse({**law, "path": path.name}).draw(0, 4, root=tmp_path)
    assert there.tolist() == [0.5, math.inf, 0.01, 4.0]


def test_a_table_with_a_row_per_sample_says_each_clients_budget_once(tmp_path):
    parquet.write_table(
        pa.table({"name": list("bab"), "epsilon": [1.0, 2.0, 1.0], "torn": [1.0, 2.0, 3.0]}),
        tmp_path / "t.parquet",
    )
    law = {"kind": "column", "path": "t.parquet", "client": "name"}
    assert parse(law).draw(0, 2, tmp_path, ["a", "b"]).tolist() == [2.0, 1.0]
    with pytest.raises(ConfigError, match="one budget for each client; client b has several"):
        parse(law | {"column": "torn"}).draw(0, 2, root=tmp_path)


@pytest.mark.parametrize(("law", "message"), messages("distributions of budgets"))
def test_a_law_that_cannot_be_is_refused_in_one_line(law, message, tmp_path):
    (tmp_path / "t.csv").write_text("a,text,bad\n1,x,1\n2,y,0\n")
    (tmp_path / "broken.parquet").write_bytes(b"nonsense")
    with refusal(line=f"noise.epsilon{message}"):
        parse(law).draw(0, 3, root=tmp_path)


def test_a_plain_number_has_no_floor_above_it():
    assert distribution(0.001).draw(0, 2).tolist() == [0.001, 0.001]
