"""A histogram of clients' scores with noise (`evaluate.histogram`): its noise, cost and effects."""

import json
import math
from dataclasses import replace

import dp_accounting as dp
import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import experiment, mechanism, refusal
from dp_accounting import pld as dp_pld
from dp_accounting import rdp as dp_rdp
from scipy.special import ndtri
from scipy.stats import chi2

from raydpfl import run
from raydpfl.core import prng
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.keyed_noise import survey_noise
from raydpfl.models import metric_columns
from raydpfl.models.client_histogram import Histogram
from raydpfl.models.metrics import find_metric
from raydpfl.privacy import Survey, Terms, epsilon, gaussian_epsilon, guarantees, report_of
from raydpfl.simulation.planned_guarantee import planned_budget
from raydpfl.simulation.resolution import resolve

DELTA = 1e-5
ADD = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp.NeighboringRelation.REPLACE_ONE
ASKED = {"every": 2, "per_client": "accuracy", "histogram": {"std": 5.0}}
DITTO = {"kind": "sgd", "steps": 2, "batch": 2, "lr": 0.1, "proximal": 0.5}
TUNE = {"kind": "sgd", "steps": 4, "batch": "full"}
APART = {"test": False, "validation": 0.2}
SERVER = {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5, "placement": "server"}


def survey_mechanism(kind, rounds=40, times=4, std=20.0):
    survey = Survey("accuracy", std, clients=200, times=times)
    return mechanism(kind, 200, 200 if kind == "full" else 20, 3.0, rounds, survey=survey)


# --- what it costs, against dp-accounting composed by hand ---


@pytest.mark.parametrize("std", [1.5, 20.0])
def test_under_poisson_the_loss_is_that_of_all_rounds_and_all_surveys(std):
    accountant = dp_pld.PLDAccountant(ADD, value_discretization_interval=2e-4)
    accountant.compose(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(3.0)), 40)
    accountant.compose(dp.GaussianDpEvent(std), 4)  # add or remove a client: one count, by 1
    truth = accountant.get_epsilon(DELTA)
    found = epsilon(survey_mechanism("poisson", std=std), "add_remove", DELTA)
    assert truth * (1 - 1e-4) <= found <= truth * (1 + 1e-3)


@pytest.mark.parametrize(
    ("kind", "relation", "moves"),
    [("poisson", "add_remove", 1.0), ("fixed", "replace_one", math.sqrt(2))],
)
def test_renyi_divergences_of_rounds_and_surveys_add_up(kind, relation, moves):
    accountant = dp_rdp.RdpAccountant(neighboring_relation=REPLACE if kind == "fixed" else ADD)
    gaussian = dp.GaussianDpEvent(3.0 / (2 if kind == "fixed" else 1))
    sampled = (
        dp.SampledWithoutReplacementDpEvent(200, 20, gaussian)
        if kind == "fixed"
        else dp.PoissonSampledDpEvent(0.1, gaussian)
    )
    accountant.compose(sampled, 40).compose(dp.GaussianDpEvent(20.0 / moves), 4)
    found = epsilon(survey_mechanism(kind), relation, DELTA, accountant="rdp")
    assert found == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-6)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
def test_with_everyone_in_every_round_all_is_one_gaussian(relation):
    replaced = relation == "replace_one"
    update = 2 if replaced else 1
    count = math.sqrt(2) if replaced else 1
    mu = math.sqrt(40 * (update / 3) ** 2 + 4 * (count / 20) ** 2)
    found = epsilon(survey_mechanism("full"), relation, DELTA)
    assert found == pytest.approx(float(gaussian_epsilon(mu, DELTA)), rel=1e-9)


@pytest.mark.parametrize("kind", ["fixed", "poisson", "with_replacement"])
def test_a_loss_with_surveys_lies_between_that_of_the_rounds_and_simple_composition(kind):
    relation = "add_remove" if kind == "poisson" else "replace_one"
    whole = survey_mechanism(kind)
    bare = epsilon(whole.with_surveys(0), relation, DELTA / 2)
    alone = float(gaussian_epsilon(whole.survey.mu(relation), DELTA / 2))
    found = epsilon(whole, relation, DELTA)
    assert epsilon(whole.with_surveys(0), relation, DELTA) < found < bare + alone
    assert found > float(gaussian_epsilon(whole.survey.mu(relation), DELTA))


@pytest.mark.parametrize("kind", ["fixed", "full"])
def test_a_curve_counts_the_surveys_that_were_released_until_then(kind):
    whole = survey_mechanism(kind)
    rounds = np.arange(1, 41)
    report = report_of(whole, ["pld"], Terms("replace_one", DELTA))
    found = report.curves(None, rounds, rounds // 10)["pld"]
    expected = [
        epsilon(whole.with_surveys(t // 10), "replace_one", DELTA, t) for t in (1, 9, 10, 25, 40)
    ]
    assert found[[0, 8, 9, 24, 39]] == pytest.approx(expected, rel=1e-4)
    assert (np.diff(found) > 0).all()


def test_of_many_surveys_a_curve_counts_some_early_and_none_late():
    whole = survey_mechanism("full", rounds=100)
    rounds = np.arange(1, 101)
    report = report_of(whole, ["pld"], Terms("replace_one", DELTA))
    found = report.curves(None, rounds, rounds)["pld"]
    exact = [epsilon(whole.with_surveys(t), "replace_one", DELTA, t) for t in rounds.tolist()]
    assert (found >= exact).all() and found[-1] == pytest.approx(exact[-1], rel=1e-12)


def test_who_sees_single_answers_sees_each_clients_part_of_the_noise():
    whole = replace(survey_mechanism("fixed"), placement="client")
    found = {
        str(one.observer): one for one in guarantees(whole, "replace_one", DELTA, None, ["pld"])
    }
    alone = found["every single update"].epsilon
    rounds = 40 * 20 * (2 / 3) ** 2  # each of a cohort of 20 draws its part of the noise
    answers = 4 * 200 * 2 / 20**2  # as does each of 200 clients
    assert alone == pytest.approx(float(gaussian_epsilon(math.sqrt(rounds + answers), DELTA)))


# --- runs ---


def planned(**sections):
    return resolve(
        experiment(**{"evaluate": ASKED, "privacy": {"accountants": ["pld"]}, **sections})
    )


def test_a_run_guarantees_what_its_rounds_and_surveys_spend_together(tmp_path):
    """Everyone takes part and is asked twice: by hand, one Gaussian."""
    sections = {"selection": {"kind": "full"}, "noise": SERVER, "privacy": {"accountants": ["pld"]}}
    found = run(experiment(evaluate=ASKED, **sections), tmp_path / "a")
    mu = math.sqrt(4 * 2**2 + 2 * 2 / 5.0**2)
    truth = float(gaussian_epsilon(mu, DELTA))
    (guarantee,) = found.guarantees
    assert guarantee.epsilon == pytest.approx(truth, rel=1e-9)
    assert "2 noisy histograms of the accuracy of all clients" in str(guarantee.sampling)
    assert not any("per_client" in said for said in guarantee.exclusions)
    assert found.rounds["epsilon_pld"].to_pylist()[-1] == pytest.approx(truth, rel=1e-9)
    lines = [json.loads(line) for line in (tmp_path / "a/ledger.jsonl").read_text().splitlines()]
    assert [line["survey_std"] for line in lines] == [0.0, 5.0, 0.0, 5.0]
    assert lines[1]["epsilon"]["pld"] > float(gaussian_epsilon(math.sqrt(2 * 2**2), DELTA)) + 0.01
    plain = run(experiment(evaluate={"every": 2}, **sections), tmp_path / "b")
    assert plain.summary["model_sha256"] == found.summary["model_sha256"]  # the model is as it was


def test_a_budget_is_for_surveys_too(tmp_path):
    noise = {"kind": "gaussian", "epsilon": 8.0, "delta": 1e-5}
    with_surveys, without = (
        planned(noise=noise, evaluate=asked) for asked in (ASKED, {"every": 2})
    )
    least = without.mechanism.noise_multiplier * 1.001
    assert with_surveys.mechanism.noise_multiplier > least
    spent = with_surveys.curves()["pld"][-1]
    assert 8.0 * (1 - 2e-3) < spent <= 8.0
    few = {**ASKED, "histogram": {"std": 0.1}}
    with pytest.raises(ConfigError, match=r"noise\.epsilon = 8\.0.*2 noisy histograms of the acc"):
        planned(noise=noise, evaluate=few)


def test_a_budget_is_told_with_surveys_and_where_they_alone_exceed_it():
    made = experiment(
        noise={"kind": "gaussian", "epsilon": 8.0, "delta": 1e-5},
        evaluate=ASKED,
        privacy={"accountants": ["pld"]},
    )
    budget = planned_budget(made)
    assert budget.released.endswith("; and 2 noisy histograms of the accuracy of all clients")
    by_pld = [one for one in budget.answers if one.guarantee.accountant == "pld"]
    hidden, known, single = by_pld
    assert hidden.guarantee.epsilon == pytest.approx(8.0, rel=2e-3)
    assert math.isfinite(known.noise_multiplier)
    # each of 50 clients draws 5 / sqrt(50) on its own answer, whatever is drawn on updates
    assert single.noise_multiplier == math.inf
    alone = float(gaussian_epsilon(math.sqrt(2 * 2 * 50) / 5, DELTA))
    assert single.guarantee.epsilon == pytest.approx(alone, rel=1e-6) and alone > 8


@pytest.mark.slow
def test_what_is_written_are_the_noised_counts_alone(tmp_path):
    evaluate = {**ASKED, "histogram": {"std": 5.0, "bins": 8}, "validation": 0.3}
    found = run(experiment(evaluate=evaluate), tmp_path / "a")
    exact = run(experiment(evaluate={**evaluate, "histogram": None}), tmp_path / "b")
    assert not (tmp_path / "a" / "client_scores.parquet").exists()
    rows = pq.read_table(tmp_path / "a" / "client_histogram.parquet").to_pylist()
    each = pq.read_table(tmp_path / "b" / "client_scores.parquet").to_pylist()
    histogram = Histogram(std=5.0, bins=8)
    made = resolve(experiment(evaluate=evaluate))
    for t in (1, 3):
        values = np.array([row["accuracy"] for row in each if row["round"] == t], float)
        drawn = made.experiment.noise.on_survey(made.survey_seed, t, 5.0, 8, 50)
        counts = histogram.counts(values) + drawn
        assert [row["count"] for row in rows if row["round"] == t] == counts.tolist()
        told = metric_columns.histogram_statistics(find_metric("accuracy"), histogram, counts)
        row = found.rounds.slice(t, 1).to_pylist()[0]
        assert {name: row[name] for name in told} == told
    assert found.summary["client_accuracy_mean"] != exact.summary["client_accuracy_mean"]


@pytest.mark.slow
def test_a_run_that_is_taken_up_or_goes_on_releases_and_spends_the_same(tmp_path):
    names = [*metric_columns.client_statistics(find_metric("accuracy")), "epsilon_rdp"]
    for evaluate in (ASKED, {**ASKED, "every": 1}):
        where = tmp_path / str(evaluate["every"])
        whole = run(experiment(evaluate=evaluate, rounds=6), where / "whole")
        run(experiment(evaluate=evaluate), where / "on")  # of four rounds
        again = run(experiment(evaluate=evaluate, rounds=6), where / "on", resume=True)
        assert again.rounds.select(names).equals(whole.rounds.select(names))
        assert again.guarantees == whole.guarantees
        table = "client_histogram.parquet"
        assert pq.read_table(where / "on" / table).equals(pq.read_table(where / "whole" / table))


def test_surveys_before_a_run_was_restarted_count_too(tmp_path):
    from raydpfl.privacy import Segment

    plan = planned(
        selection={"kind": "full"}, noise=SERVER, rounds=6, evaluate={**ASKED, "every": 1}
    )
    restarted = plan.extend_history((Segment(0, 0, 4), Segment(1, 2, 2)))
    assert plan.surveys.tolist() == [1, 2, 3, 4, 5, 6]
    assert restarted.surveys.tolist() == [3, 4, 5, 6, 7, 8]  # four before, then from round 3
    mu = math.sqrt(8 * 2**2 + 8 * 2 / 5.0**2)
    assert restarted.curves()["pld"][-1] == pytest.approx(float(gaussian_epsilon(mu, DELTA)))
    assert restarted.survey_seed != plan.survey_seed


def test_histograms_that_differ_in_anything_have_noise_of_their_own():
    asked = [ASKED, {**ASKED, "histogram": {"std": 6.0}}, {**ASKED, "per_client": "loss"}]
    asked += [{**ASKED, "histogram": {"std": 5.0, "bins": 11}}, {**ASKED, "every": 4}]
    held = {**ASKED, "validation": 0.2}
    asked += [held, *({**held, "fine_tune": {**TUNE, "lr": lr}} for lr in (0.2, 0.3))]
    noise = {**SERVER, "common": True}  # under which the noise on updates is the same
    plans = [planned(evaluate=each, noise=noise) for each in asked]
    assert len({plan.noise_seed for plan in plans}) == 1
    assert len({plan.survey_seed for plan in plans}) == len(plans)


GAUSSIAN = {"kind": "gaussian", "multiplier": 1.0}
PER_SAMPLE = {"kind": "per_sample_clip", "bound": 1.0}
LOCAL_BIAS = {"kind": "softmax", "local": ["*bias"]}
REFUSED = [
    ("evaluate.histogram", {"noise": {"kind": "none"}}),
    ("evaluate.histogram", {"noise": GAUSSIAN, "bounding": PER_SAMPLE}),
    ("evaluate.histogram", {"noise": {**GAUSSIAN, "virtual_cohort": 40}}),
    ("evaluate.histogram", {"evaluate": {"every": 2, "histogram": {"std": 1.0}}}),
    ("evaluate.histogram", {"personal": DITTO, "evaluate": {**ASKED, **APART}}),
    ("evaluate.histogram", {"model": LOCAL_BIAS, "evaluate": {**ASKED, **APART}}),
    ("rounds", {"evaluate": {**ASKED, "every": 3}}),
    ("evaluate.histogram.std", {"evaluate": {**ASKED, "histogram": {"std": 0}}}),
    ("evaluate.histogram.high", {"evaluate": {**ASKED, "histogram": {"std": 1, "low": 1}}}),
]


@pytest.mark.parametrize(("field", "sections"), REFUSED)
def test_what_cannot_be_accounted_for_is_refused(field, sections):
    with refusal(begins=f"{field}: "):
        experiment(**{"evaluate": ASKED, **sections})


# --- the noise, and what follows from noised counts ---


@pytest.mark.parametrize("clients", [None, 1, 300, 5000])
def test_the_noise_on_each_count_has_its_std_whoever_draws_it(clients):
    """Chi-squared; false-alarm rate 1e-4, fixed seeds."""
    rounds = 20 if clients == 5000 else 200
    drawn = np.stack([survey_noise(7, t, 3.0, 10, clients) for t in range(rounds)])
    square = (drawn**2).sum() / 9
    assert chi2.ppf(5e-5, drawn.size) < square < chi2.isf(5e-5, drawn.size)
    assert abs(drawn.mean()) < 3 / math.sqrt(drawn.size) * -ndtri(5e-5)
    among = np.corrcoef(drawn, rowvar=False)[np.triu_indices(10, 1)]
    assert np.abs(among).max() * math.sqrt(rounds) < 5.5
    assert np.array_equal(survey_noise(7, 3, 3.0, 10, clients), drawn[3])


def test_each_client_draws_its_own_part():
    parts = [
        prng.normals(7, prng.Purpose.SURVEY_NOISE, 4, t=2, client=client).double().numpy()
        for client in range(30)
    ]
    assert survey_noise(7, 2, 3.0, 4, 30) == pytest.approx(np.sum(parts, 0) * 3 / math.sqrt(30))


@pytest.mark.parametrize("seed", range(4))
def test_without_noise_the_statistics_are_those_of_the_clients_but_for_the_width_of_a_bin(seed):
    values = np.random.default_rng(seed).beta(4, 2, size=1000)
    histogram = Histogram(std=1.0, bins=200)
    for metric in (find_metric("accuracy"), find_metric("loss")):
        found = metric_columns.histogram_statistics(metric, histogram, histogram.counts(values))
        assert list(found.values()) == pytest.approx(
            list(metric_columns.client_statistics(metric, values).values()), abs=0.005
        )


def test_noised_shares_rise_to_one_and_statistics_stay_in_range():
    histogram = Histogram(std=1.0, bins=12, low=-1.0, high=3.0)
    generator = np.random.default_rng(0)
    for scale in (1, 30, 1000):
        for _ in range(200):
            counts = generator.standard_normal(12) * scale + 20
            shares = histogram.shares(counts)
            if counts.sum() <= 0:
                assert shares is None and histogram.statistics(counts, -1) is None
                continue
            assert (np.diff(shares, prepend=0.0) >= 0).all() and shares[-1] == 1.0
            found = histogram.statistics(counts, -1)
            assert found["p10"] <= found["p50"] <= found["p90"]
            assert found["worst_tenth"] <= found["p10"] + 1e-9
            assert all(-1 <= found[name] <= 3 for name in ("mean", "p10", "p90", "worst_tenth"))


@pytest.mark.slow
def test_the_mean_and_the_median_are_as_far_off_as_the_documents_say():
    """sqrt(bins / 12) / clients for a mean, sqrt(bins) / (2 clients) for a share, on [0, 1]."""
    histogram = Histogram(std=8.0, bins=10)
    counts = np.full(10, 100.0)
    generator = np.random.default_rng(1)
    noised = counts + 8.0 * generator.standard_normal((2000, 10))
    means = [histogram.statistics(each, -1)["mean"] for each in noised]
    halves = [histogram.shares(each)[4] for each in noised]
    assert np.std(means) == pytest.approx(8 * math.sqrt(10 / 12) / 1000, rel=0.08)
    assert np.std(halves) == pytest.approx(8 * math.sqrt(10) / 2000, rel=0.08)
    assert np.mean(means) == pytest.approx(0.5, abs=2e-3)
