"""Rounds whose noise differs, against the library, closed forms and equal rounds."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import experiment, mechanism
from dp_accounting import dp_event, pld, rdp

from raydpfl import privacy, run
from raydpfl.methods.noise import Gaussian
from raydpfl.privacy import epsilon, epsilon_curve, unequal_rounds
from raydpfl.privacy.accountants import accountant_of
from raydpfl.privacy.accountants import pld as pld_accountant
from raydpfl.privacy.composition import RunRelease, together
from raydpfl.privacy.pld import epsilon_at
from raydpfl.simulation.resolution import resolve

DELTA = 1e-5
POISSON = ("poisson", 100, 20, 4.0)


def of(kind, population, cohort, z, factors, rounds=None, **fields):
    fields["factors"] = factors
    return mechanism(kind, population, cohort, z, rounds or len(factors), **fields)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_phases_cost_what_the_library_says_of_their_composition(accountant):
    phases = {1.0: 50, 2.0: 40, 0.7: 10}
    factors = [factor for factor, count in phases.items() for _ in range(count)]
    library = pld.PLDAccountant(value_discretization_interval=1e-3)
    library = library if accountant == "pld" else rdp.RdpAccountant()
    for factor, count in phases.items():
        gaussian = dp_event.GaussianDpEvent(1.2 * factor)
        library.compose(dp_event.PoissonSampledDpEvent(0.02, gaussian), count)
    schedule = of("poisson", 1000, 20, 1.2, factors)
    spent = epsilon_curve(schedule, "add_remove", DELTA, accountant=accountant)
    assert spent[-1] == pytest.approx(library.get_epsilon(DELTA), rel=2e-3)
    equal = epsilon(of("poisson", 1000, 20, 1.2, (), 50), "add_remove", DELTA, 50, accountant)
    assert spent[49] == pytest.approx(equal, rel=1e-3)
    assert (np.diff(spent) > 0).all()
    back = privacy.delta(schedule, "add_remove", float(spent[-1]), accountant=accountant)
    assert back == pytest.approx(DELTA, rel=1e-3)
    joint = accountant_of(accountant).together([(schedule.event("add_remove"), 100)], DELTA)
    assert joint == pytest.approx(spent[-1], rel=1e-3)  # as runs are composed


def test_what_nothing_amplifies_is_one_gaussian_and_known_cohorts_count_the_least_noise():
    factors = (2.0, 0.5, 1.0, 4.0)
    curve = epsilon_curve(of("full", 10, 10, 1.0, factors), "zero_out", DELTA)
    squares = np.cumsum(np.array(factors) ** -2.0)
    assert curve == pytest.approx(privacy.gaussian_epsilon(np.sqrt(squares), DELTA))
    asked = {"accountants": ["pld"], "participations": 2}
    for kind, rounds in (("poisson", 4), ("public", 2)):
        schedule = of(kind, 10, 5, 1.0, factors)
        claims = privacy.guarantees(schedule, "zero_out", DELTA, rounds, **asked)
        (known,) = (one for one in claims if one.sampling.participations)
        assert known.epsilon == pytest.approx(float(privacy.gaussian_epsilon(math.sqrt(5), DELTA)))


def test_a_std_of_every_round_costs_hardly_more_than_all_of_them_counted(monkeypatch):
    factors = tuple(np.linspace(2.0, 1.0, 40))
    exact = of("fixed", 100, 5, 1.0, factors)
    spent = [epsilon(exact, "replace_one", DELTA, accountant=name) for name in ("pld", "rdp")]
    monkeypatch.setattr(unequal_rounds, "LEVELS", 16)
    curves = exact.sampling.scheme.curves
    mus = np.array(exact.event("replace_one").mus)
    few = unequal_rounds.Rounds(lambda mu: curves(exact.sampling, mu, "replace_one"), mus, True)
    assert few.levels == 16
    tail = next(few.deltas(0, len(mus)))
    assert spent[0] <= epsilon_at(DELTA, few.step, tail) <= spent[0] * 1.01
    assert spent[0] < spent[1]


def test_rdp_is_asked_only_where_it_may_have_less(monkeypatch):
    """Of 40 stds under Poisson it takes seconds, and a calibration asks six times and more."""
    asked = []
    monkeypatch.setattr(pld_accountant.Rdp, "curve", lambda *a: asked.append(a) or [math.inf])
    decay = of("poisson", 100, 20, 2.09, [0.99**t for t in range(40)])
    assert epsilon(decay, "add_remove", DELTA) == pytest.approx(4.0, rel=1e-2) and not asked
    known = epsilon(decay.with_known_cohorts(), "zero_out", 1e-14)
    assert epsilon(decay, "add_remove", 1e-14) <= known and len(asked) == 1


@pytest.mark.slow
def test_rdp_has_no_less_where_it_is_not_asked():
    for mu, q, delta in itertools.product([0.1, 1.0, 30.0], [0.01, 0.9], [1e-2, 1e-10]):
        schedule = of("poisson", 1000, int(1000 * q), 1 / mu, [1.0] * 20 + [1.3] * 5)
        by_rdp = epsilon(schedule, "add_remove", delta, accountant="rdp")
        assert epsilon(schedule, "add_remove", delta) <= by_rdp


@pytest.mark.parametrize("mu", [0.3, 2.0, 6.0])
def test_delta_of_a_gaussian_is_convex_in_a_power_of_the_std(mu):
    """On which the mixture of two levels rests: m = mu^2 / 4 - 1, at least 1."""
    power = max(1.0, mu**2 / 4 - 1)
    epsilons = np.linspace(-6, 30, 400)
    for other in (0.5 * mu, 0.8 * mu, 0.97 * mu):
        for share in (0.2, 0.5, 0.9):
            between = (share * mu**-power + (1 - share) * other**-power) ** (-1 / power)
            mixed = share * privacy.gaussian_delta(epsilons, mu)
            mixed = mixed + (1 - share) * privacy.gaussian_delta(epsilons, other)
            assert (privacy.gaussian_delta(epsilons, between) <= mixed + 1e-15).all()


def test_an_epsilon_scales_the_schedule_and_the_ledger_has_the_std_of_every_round(tmp_path):
    noise = {"kind": "gaussian", "epsilon": 6.0, "schedule": {"decay": 0.5, "phases": [[3, 8.0]]}}
    chosen = experiment(noise=noise, privacy={"accountants": ["pld", "rdp"]})
    result = run(chosen, tmp_path / "out")
    lines = (tmp_path / "out" / "ledger.jsonl").read_text().splitlines()
    stds = np.array([json.loads(line)["std"] for line in lines])
    assert stds / stds[0] == pytest.approx([1, 0.5, 0.25, 1])
    assert result.rounds["noise_std"].to_pylist() == pytest.approx(stds.tolist())
    hidden = [one for one in result.guarantees if one.sampling.knows == "cohort hidden"]
    assert 5.9 < min(one.epsilon for one in hidden) <= 6.0
    plan = resolve(chosen)
    release = of("fixed", 50, 20, float(stds[0]), tuple(stds / stds[0]))
    assert epsilon(release, "replace_one", DELTA) == pytest.approx(hidden[0].epsilon, rel=1e-6)
    again = plan.extend_history((privacy.Segment(0, 0, 3),), 1)
    assert again.mechanism.factors == pytest.approx((1, 0.5, 0.25, 0.5, 0.25, 1))
    assert resolve(experiment(noise={**noise, "schedule": {"decay": 0.6}})).noise_seed != (
        plan.noise_seed
    )


class Halving(Gaussian):
    """The std of round t is the size over t + 1."""

    kind: str = "halving"
    keeps: bool = True

    def factor(self, t):
        return 1 / (t + 1)

    def source(self, seed, d):
        source = super().source(seed, d)
        if not self.keeps:
            drawn = source.on_sum
            source.on_sum = lambda t, std: drawn(t, std / (t + 1))
        return source


@pytest.mark.slow
def test_a_class_says_the_std_of_each_round_and_is_held_to_it(tmp_path):
    noise = {"kind": f"{__name__}:Halving", "multiplier": 2.0, "placement": "server"}
    plan = resolve(experiment(noise=noise))
    assert plan.mechanism.factors == (1, 1 / 2, 1 / 3, 1 / 4)
    result = run(experiment(noise=noise), tmp_path / "out")
    assert result.rounds["noise_std"].to_pylist() == pytest.approx([2, 1, 2 / 3, 0.5])
    with pytest.raises(Exception, match=r"round 1 has .*was accounted for"):
        run(experiment(noise={**noise, "keeps": False}), tmp_path / "less")


@pytest.mark.slow
@pytest.mark.parametrize(("q", "relation"), [(1, "replace_one"), (20, "add_remove")])
def test_at_any_delta_a_schedule_spends_at_most_what_all_rounds_of_its_least_noise_do(q, relation):
    factors = tuple(np.geomspace(0.5, 0.6, 10))
    for delta in (1e-5, 1e-13):
        schedule, equal = of("poisson", 1000, q, 1.0, factors), of("poisson", 1000, q, 0.5, (), 10)
        spent = epsilon(schedule, relation, delta)
        assert 0 < spent <= epsilon(equal, relation, delta)
        assert privacy.delta(schedule, relation, spent) <= delta * (1 + 1e-6)


@pytest.mark.parametrize(
    "selection",
    [
        {"kind": "cyclic", "period": 4, "cohort": 5},
        {"kind": "cyclic", "period": 4, "cohort": 5, "scheme": "poisson"},
        {"kind": "availability", "period": 4, "window": 1, "cohort": 5},
    ],
)
def test_of_clients_that_take_turns_the_rounds_with_the_least_noise_count(selection):
    noise = {"kind": "gaussian", "multiplier": 8.0, "delta": 1e-4, "schedule": {"decay": 0.9}}
    given = {"selection": selection, "noise": {**noise, "placement": "server"}, "rounds": 8}
    plan = resolve(experiment(**given))
    release, relation = plan.mechanism, plan.experiment.relation
    assert release.turns and plan.composed_rounds[-1] == 2
    for accountant in ("pld", "rdp"):
        stated = epsilon_curve(release, relation, 1e-4, 2, accountant=accountant)
        for turn in range(4):
            own = [plan.factor(t) for t in range(turn, 8, 4)]
            group = replace(release, rounds=2, factors=tuple(own), turns=False)
            spent = epsilon_curve(group, relation, 1e-4, accountant=accountant)
            assert (spent <= stated).all()


def test_two_runs_of_one_seed_whose_clients_take_turns_have_the_least_noise_of_each():
    runs = [
        RunRelease("a", of(*POISSON, factors, 2, turns=True), "add_remove", 2, None, 0, "")
        for factors in ((0.5, 1.0, 1.0, 1.0), (1.0, 0.5, 1.0, 1.0))
    ]
    secret = together(runs, DELTA, ["pld"]).guarantees[0]
    joint = of("poisson", 100, 20, 2.0 / math.sqrt(2), (), 2)
    expected = epsilon(joint, "add_remove", DELTA, 2)
    assert secret.epsilon == pytest.approx(expected, rel=1e-6)
