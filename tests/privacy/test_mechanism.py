"""The mechanism and the guarantee: plain data that refuse nonsense and keep their names."""

import json
import math
import operator
from collections import Counter
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from conftest import experiment, mechanism, refusal

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.experiment import report_config_fields
from raydpfl.privacy import Guarantee, Mechanism, Query, Sampling
from raydpfl.privacy.guarantee import Observer, Scope
from raydpfl.privacy.sampling import Participations, SamplingScheme
from raydpfl.simulation.resolution import resolve

SAMPLING = Sampling("fixed", 1920, 80)
QUERY = Query("update", 0.5, 2.0)
LOSSES = Query("losses", 1.0, 1.0, per_client=True)
MECHANISM = Mechanism(SAMPLING, (QUERY,), 100, exclusions=("the clip bound was learned",))
GUARANTEE = Guarantee(
    "rigorous", "pld", "client", "replace_one", Observer.AGGREGATES, Scope.from_cohorts(SAMPLING),
    1.5, 1e-5, ("a",), ("b",),
)  # fmt: skip


def test_the_digest_is_the_same_in_every_process_and_version():
    assert MECHANISM.digest() == "907e02f750a1f9a6b8c68e9fe16263d5691bfcac9bc10a4ec99c0fa1045e17fe"


def test_any_change_changes_the_digest():
    samplings = [
        Sampling("poisson", 1920, 80),
        Sampling("fixed", 1921, 80),
        Sampling("fixed", 1920, 80, rule="those awake"),
        Sampling("public", 1920, 80),
        Sampling("with_replacement", 1920, 80),
        Sampling("with_replacement", 1920, 80, p_max=0.001),
    ]
    queries = [(Query("update", 0.5, 2.0000001),), (QUERY, QUERY), (QUERY, LOSSES)]
    changes = [{"sampling": one} for one in samplings] + [{"queries": each} for each in queries]
    changes += [{"rounds": 101}, {"unit": "sample"}, {"placement": "client"}, {"exclusions": ()}]
    digests = {MECHANISM.digest(), *(replace(MECHANISM, **each).digest() for each in changes)}
    assert len(digests) == len(changes) + 1


SAMPLED = {
    "kind": [("cyclic", 10, 5)], "population": [("fixed", 0, 1)],
    "cohort": [("fixed", 10, 11), ("fixed", 10, 0), ("poisson", 10, 2.5), ("full", 10, 9),
               ("public", 10, 11)],
    "p_max": [("with_replacement", 10, 5, 0.09), ("with_replacement", 10, 5, 1.1),
              ("fixed", 10, 5, 0.5)],
}  # fmt: skip
OTHERS = {
    "update.bound": [lambda: Query("update", 0.0, 1.0), lambda: Query("update", math.inf, 1.0)],
    "update.std": [lambda: Query("update", 1.0, -1.0), lambda: Query("update", 1.0, math.nan)],
    "queries": [partial(replace, MECHANISM, queries=each) for each in ((), (LOSSES,))],
    "rounds": [partial(replace, MECHANISM, rounds=each) for each in (0, True)],
    "placement": [lambda: replace(MECHANISM, placement="cloud")],
    "multiplier": [lambda: MECHANISM.with_noise(-1.0)],
    "count.std": [
        lambda: replace(MECHANISM, queries=(QUERY, Query("count", 0.5, 0.0))).with_noise(1.0)
    ],
}


@pytest.mark.parametrize("field", [*SAMPLED, *OTHERS])
def test_nonsense_is_refused_by_name(field):
    made = OTHERS.get(field) or [partial(Sampling, *each) for each in SAMPLED[field]]
    for make in made:
        with refusal(begins=f"{field}: "):
            make()


def test_a_sampling_says_in_words_who_takes_part_and_whether_that_is_secret():
    words = {
        Sampling("fixed", 20, 5, rule="those awake"): ("fixed size 5 of 20 (those awake)", True),
        Sampling("fixed", 20, 20): ("all 20", False),
        Sampling("poisson", 20, 5): ("Poisson, 5 of 20 expected", True),
        Sampling("with_replacement", 20, 5, p_max=0.25): (
            "5 draws with replacement from 20, no client likelier than 0.25",
            True,
        ),
        Sampling("with_replacement", 20, 20): ("20 draws with replacement from 20", True),
        Sampling("public", 20, 5): ("public cohorts of 5 of 20", False),
        Sampling("public", 20, 20): ("public cohorts of 20 of 20", False),
    }
    for sampling, (text, hidden) in words.items():
        assert (str(sampling), sampling.hidden) == (text, hidden)


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_with_noise_sets_the_joint_noise_multiplier(start):
    both = replace(MECHANISM, queries=(Query("update", 3.0, 3 * start), Query("count", 0.5, start)))
    assert both.with_noise(1.7).noise_multiplier == pytest.approx(1.7)
    assert not both.with_noise(0.0).private and both.with_noise(0.0).mu("zero_out") == math.inf


def test_a_per_client_query_keeps_its_noise_and_counts_with_the_sums():
    losses = Query("losses", 1.0, 5.0, per_client=True)
    both = replace(MECHANISM, queries=(*MECHANISM.queries, losses))
    assert both.noise_multiplier == MECHANISM.noise_multiplier == 4.0
    for z in (0.5, 4.0, 20.0):
        louder = both.with_noise(z)
        assert louder.noise_multiplier == pytest.approx(z) and louder.queries[1] == losses
        assert louder.mu("replace_one") == pytest.approx(2 * math.hypot(1 / z, 1 / 5))
    silent = replace(both, queries=(Query("update", 0.5, 0.0), losses))
    assert silent.mu("replace_one") == math.inf and silent.with_noise(4.0) == both


def test_guarantees_cannot_be_ordered_or_added():
    for operation in (operator.lt, operator.le, operator.gt, operator.add, operator.sub, max):
        with pytest.raises(TypeError):
            operation(GUARANTEE, GUARANTEE)


def test_a_guarantee_has_the_fields_of_the_summary_survives_json_and_says_all_of_them():
    names = "kind accountant unit relation observer sampling epsilon delta exclusions "
    names += "conditions_failed rho"
    assert [field.name for field in fields(Guarantee)] == [*names.split(), "curve"]
    assert set(GUARANTEE.to_dict()) == {*names.split(), "knows"}
    for guarantee in (GUARANTEE, replace(GUARANTEE, epsilon=math.inf)):
        text = json.dumps(guarantee.to_dict(), allow_nan=False)
        assert Guarantee.from_dict(json.loads(text)) == guarantee
    parts = ("1.5", "1e-05", "client", "replaced", "every aggregate", "rigorous", "pld", "for: a")
    for part in (*parts, "fixed size 80 of 1920, cohort hidden", "fail: b"):
        assert part in GUARANTEE.sentence()


def test_a_guarantee_is_made_of_facts_and_what_is_read_back_has_their_words_alone():
    run = replace(MECHANISM, placement="client")
    hidden, known, seen = privacy.guarantees(
        run, "replace_one", 1e-5, accountants=["rdp"], participations=7
    )
    observers = [str(one.observer) for one in (hidden, known, seen)]
    assert observers == ["every aggregate", "every aggregate", "every single update"]
    knows = [one.sampling.knows for one in (hidden, known, seen)]
    assert knows == ["cohort hidden", "cohort known", "cohort known"]
    assert hidden.sampling.participations is None
    assert known.sampling.participations == Participations(most=7, gaussians=7, rounds=100)
    read = Guarantee.from_dict(hidden.to_dict())
    assert read == hidden and read.sampling == Scope("fixed size 80 of 1920, cohort hidden")
    assert read.sampling.participations is None and read.observer is Observer.AGGREGATES
    by_curve = float(hidden.curve().true_positives(0.05))
    by_epsilon = 0.05 * math.exp(hidden.epsilon) + 1e-5  # the curve is not read back
    assert by_curve < 0.9 * by_epsilon
    for one, power in ((hidden, by_curve), (read, by_epsilon)):
        assert "not who was in the cohorts" in one.detection()
        stated = float(one.detection().split("at most ")[1].split("%")[0])
        assert 100 * power <= stated < 100 * power + 0.011  # rounded up
    assert Scope.from_batches(run.sampling).knows == "batch hidden"
    assert Scope.from_cohorts(Sampling("full", 80, 80)).knows == ""


class Halves(SamplingScheme):
    """A user-defined scheme: fixed size, by pld alone."""

    kind = "halves"

    def words(self, sampling):
        return f"{sampling.cohort} of {sampling.population}, by halves"

    def refuses(self, relation):
        return None if relation == "replace_one" else "halves are covered under replace_one only"

    def curves(self, sampling, mu, relation):
        curve = privacy.pld.fixed_size_curve(sampling.q, mu)
        return ((curve, curve),)


def test_a_sampling_law_of_ones_own_needs_no_change_of_an_accountant():
    mine, fixed = (mechanism(kind) for kind in (Halves(), "fixed"))
    assert str(mine.sampling) == "80 of 1920, by halves" and mine.sampling.hidden
    assert privacy.epsilon(mine, "replace_one", 1e-5) == privacy.epsilon(fixed, "replace_one", 1e-5)
    reason = "cohorts by sampling scheme halves are not covered by rdp; nearest: pld"
    assert privacy.covers("rdp", mine, "replace_one") == reason
    assert privacy.covers("pld", mine, "zero_out") == "halves are covered under replace_one only"
    found = privacy.guarantees(
        mine, "replace_one", 1e-5, accountants=["pld", "rdp"], participations=12
    )
    finite = [(one.accountant, math.isfinite(one.epsilon)) for one in found]
    assert finite == [("pld", True), ("pld", True), ("rdp", False), ("rdp", True)]
    assert mine.digest() != fixed.digest()


LOSSES_TOO = replace(MECHANISM, queries=(QUERY, LOSSES))
STEPS = privacy.LocalSteps([100, 60, 80], 10, 5, 1.0, 1e-5, [2.0, 2.0, 0.5])
SUMS = mechanism("poisson", 60, 10, rounds=4)


@pytest.mark.parametrize("release", [SUMS, STEPS], ids=["sums over cohorts", "local steps"])
def test_both_descriptions_answer_all_that_a_run_asks(release):
    """The last point of a curve is the guarantee, whichever description stands behind it."""
    draws = [[0, 1], [1, 2], [1], [0]]
    counts = Counter(client for drawn in draws for client in drawn)
    terms = privacy.Terms("zero_out", 1e-5)
    report = privacy.report_of(release, ("rdp",), terms)
    curves = report.curves(draws, np.arange(1, 5))
    assert [len(curve) for curve in curves.values()] == [4] and (np.diff(curves["rdp"]) >= 0).all()
    first = report.guarantees(counts, 4)[0]
    assert curves["rdp"][-1] == pytest.approx(first.epsilon) and first.unit == release.unit
    asked = report.curves(draws, np.arange(3, 5))
    assert asked["rdp"].tolist() == curves["rdp"][2:].tolist()
    assert release.by_draws == (release.cohorts is None) and release.largest in (60, 100)
    assert (release.stds is not None) == release.by_draws
    assert release.proof_gap is None
    assert len(release.digest()) == 64


def test_a_parameter_is_refused_by_its_own_name_and_by_the_fields_name_in_a_run():
    more = "= 0.001: expected more: at delta 1e-05 no noise"
    with pytest.raises(ConfigError, match=f"^target {more}"):
        privacy.noise_for(0.001, LOSSES_TOO, "replace_one", 1e-5)
    with pytest.raises(ConfigError, match=f"^noise.epsilon {more}"), report_config_fields():
        privacy.noise_for(0.001, LOSSES_TOO, "replace_one", 1e-5)
    noise = {"epsilon": 1.0, "multiplier": None, "delta": 0.999}
    with pytest.raises(ConfigError, match=r"^noise.delta = 0.999: expected less"):
        resolve(experiment(noise=noise, privacy={"accountants": ["pld"]}))
