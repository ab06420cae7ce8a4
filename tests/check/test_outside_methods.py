"""Five methods, each a file outside the package, keep the contract; their epsilons are exact."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import experiment, refusal

from raydpfl import privacy, run
from raydpfl.check import check, render
from raydpfl.privacy import Mechanism, Query, Sampling
from raydpfl.simulation.user_code import sources

HERE = Path(__file__).parent / "outside_methods"
METHODS = {
    "lion:Lion": "local",
    "feedback:Feedback": "bounding",
    "length:Length": "bounding",
    "amsgrad:AmsGrad": "server",
    "varying:Varying": "selection",
}
SETTINGS = {"local": {"lr": 0.01}, "bounding": {"bound": 0.2}, "selection": {"cohort": 10}}
EVERYONE = Mechanism(Sampling("full", 50, 50), (Query("updates", 1.0, 1.0),), rounds=3)


@pytest.fixture(autouse=True)
def beside(monkeypatch):
    """As where the command is run."""
    monkeypatch.syspath_prepend(str(HERE))


def around(name: str) -> dict:
    """The small experiment with this member in it."""
    section = METHODS[name]
    mine = {section: {"kind": name, **SETTINGS.get(section, {})}}
    # a noise of the server needs no number of clients that are left
    return {"noise": {"placement": "server"}, "privacy": {"accountants": ["pld"]}} | mine


def law(name: str) -> Sampling:
    """That of the cohorts, by hand."""
    if name != "varying:Varying":
        return Sampling("fixed", 50, 20)
    import varying

    return Sampling(varying.Spread(), 50, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*METHODS, "varying:Spread"])
def test_an_outside_method_keeps_the_contract(name):
    found = check(name)
    assert all(clause.kept for clause in found), render(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_an_outside_method_runs_privately_with_the_right_epsilon(name, tmp_path):
    result = run(experiment(**around(name)), tmp_path / "run")
    mechanism = Mechanism(law(name), EVERYONE.queries, rounds=4)
    expected = privacy.epsilon(mechanism, "replace_one", 1e-5)
    held = min(each.epsilon for each in result.guarantees)
    assert held == pytest.approx(expected, rel=1e-9)


def test_noise_for_a_law_of_ones_own_is_not_that_of_another_of_its_name(tmp_path, monkeypatch):
    """A cache that knew a law by its kind alone would give both the same noise."""
    import varying

    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    asked = [Sampling(varying.Spread(spread), 50, 10) for spread in (0, 8)]
    mechanisms = [Mechanism(each, EVERYONE.queries, rounds=4) for each in asked]
    assert mechanisms[0].digest() != mechanisms[1].digest()
    few, many = (privacy.noise_for(2.0, each, "replace_one", 1e-5) for each in mechanisms)
    fixed = Mechanism(Sampling("fixed", 50, 10), EVERYONE.queries, rounds=4)
    assert few == pytest.approx(privacy.noise_for(2.0, fixed, "replace_one", 1e-5), rel=2e-4)
    assert many > few


def test_an_accountant_of_ones_own_is_checked_and_named_in_a_config(tmp_path):
    assert all(clause.kept for clause in check("exact:Exact"))
    broken = [clause.name for clause in check("exact:Half") if not clause.kept]
    lone = ["no more private than a lone client", "no less than an attack"]
    assert broken == ["composes", "surveys", *lone]
    assert [clause.name for clause in check("exact:Once") if not clause.kept] == ["composes"]
    asked = {"accountants": ["exact:Exact", "pld"], "relation": "zero_out"}
    noise = {"multiplier": None, "epsilon": 3.0, "placement": "server"}
    given = experiment(selection={"kind": "full"}, noise=noise, privacy=asked)
    result = run(given, tmp_path / "run")
    assert any("accountant exact:Exact" in words for words in result.guarantees[0].declared)
    found = {each.accountant: each.epsilon for each in result.guarantees}
    assert found["exact:Exact"] == pytest.approx(found["pld"], rel=1e-6)
    assert found["exact:Exact"] == pytest.approx(3.0, rel=1e-3)
    spent = result.rounds["epsilon_exact_exact"].to_pylist()
    assert spent == sorted(spent) and spent[-1] == pytest.approx(3.0, rel=1e-3)
    assert any(name.startswith("code exact:") for name in sources(given))


@pytest.mark.parametrize(
    "name, why",
    [
        ("exact:Empty", "a class with a method curve"),
        ("lion:Lion", "a subclass of raydpfl.privacy.accountants.Accountant"),
        ("exact:Nobody", "an import path"),
    ],
)
def test_what_is_no_accountant_is_refused_in_one_line(name, why):
    with refusal(line=f"privacy.accountants = {name!r}: expected {why}"):
        experiment(privacy={"accountants": [name]})


@pytest.mark.parametrize("found", [np.nan, -1.0, [1.0], ["a", "b", "c"]])
def test_what_is_no_epsilon_is_no_guarantee(found, monkeypatch):
    import exact

    monkeypatch.setattr(exact.Wrong, "found", found)
    with refusal(r"^accountant = 'exact:Wrong': expected .* gives 3 epsilons"):
        privacy.epsilon_curve(EVERYONE, "zero_out", 1e-5, accountant="exact:Wrong")


def test_an_accountant_of_whole_mechanisms_needs_no_curve_and_covers_no_secret_cohort():
    found = privacy.epsilon_curve(EVERYONE, "zero_out", 1e-5, accountant="exact:Whole")
    assert found.tolist() == [0.5, 1.0, 1.5]
    why = privacy.covers("exact:Whole", Mechanism(law(""), EVERYONE.queries, 3), "replace_one")
    assert "not covered by exact:Whole; nearest: pld" in why


@pytest.fixture
def said(monkeypatch, typed):
    """Runs `raydpfl check` with these arguments: its exit code, and what it prints."""
    monkeypatch.chdir(HERE)
    return partial(typed, "check")


@pytest.mark.slow
def test_the_command_prints_a_table_and_says_what_is_broken(said):
    code, table, errors = said("amsgrad:AmsGrad", "rounds=2", "server.lr=0.02")
    assert code == 0 and not errors
    assert "kept    no hidden state" in table and "lr=0.02" in table
    code, table, errors = said("liar:Loud")
    assert code == 1 and len(errors.splitlines()) == 1
    assert re.search("BROKEN +bound", table)
    assert "Nothing that a client sends is longer than the bound" in errors
    code, table, errors = said("liar:Bare")
    assert code == 2 and not table and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    "asked,told",
    [
        (("liar:Nobody",), "liar:Nobody"),
        (("liar:Bare",), "bounding.examples = {}"),
        (("math:pi",), "a class derived from one of"),
        (("none",), "bounding:none or noise:none"),
        (("clip", ["nonsense"]), "section.key=value"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_one_line(asked, told):
    with refusal(re.escape(told)):
        check(*asked)
