"""Who takes part: the law of every member against an obvious reference, unbiasedness by
enumeration, and what a draw may cost.

Chi-square tests have a fixed seed and a false-alarm rate of 1e-4 each.
"""

import itertools
import math
import pickle
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
import yaml
from conftest import messages, refusal
from pyarrow import csv, parquet
from scipy import stats

from raydpfl.config.registry import choose
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.keyed_noise import query_noise
from raydpfl.methods.selection import FAMILY, Cohort, Population, Selection
from raydpfl.methods.selection.power_of_choice import successive_sample
from raydpfl.methods.weights.data import DataWeights
from raydpfl.privacy import Mechanism, Query, Sampling


def member(kind: str, **fields) -> Selection:
    return choose("selection", {"kind": kind, **fields}, FAMILY, Selection)


def example(kind: str, **fields) -> Selection:
    return member(kind, **{**FAMILY[kind].examples[0], **fields})


def clients(count: int = 50) -> Population:
    random = stream(0, Purpose.DATA)
    return Population(random.integers(1, 40, count), random.uniform(0, 3, count))


def drawn(chosen: Selection, seed: int, t: int, population: Population) -> Cohort:
    """The cohort; where losses decide, a client's loss is its number modulo 10."""
    return chosen.draw(seed, t, population, lambda clients: clients % 10.0)


def p_value(cohorts: Counter, law: dict[tuple, float]) -> float:
    """Of the chi-square test that `cohorts`, counted by their clients, follow `law`."""
    assert set(cohorts) <= set(law) and math.isclose(sum(law.values()), 1)
    return stats.chisquare(
        [cohorts[key] for key in law], [chance * cohorts.total() for chance in law.values()]
    ).pvalue


def counted(chosen: Selection, population: Population, rounds: range) -> Counter:
    return Counter(tuple(chosen.draw(0, t, population).clients.tolist()) for t in rounds)


def subsets(items, size: int) -> dict[tuple, float]:
    found = list(itertools.combinations(items, size))
    return dict.fromkeys(found, 1 / len(found))


# What holds for all.


@pytest.mark.parametrize("kind", [kind for kind in FAMILY if kind != "full"])
def test_a_draw_among_a_million_clients_makes_no_array_over_them_after_the_first(kind):
    fields = {"first_responders": {"contacted": 1000, "spread": 0.3}, "cyclic": {"cohort": 7}}
    fields |= {name: {"epoch": 10_000} for name in ("random_allocation", "balls_in_bins")}
    chosen = example(kind, **fields.get(kind, {}))
    population = Population(np.arange(1_000_000) % 7 + 1, np.arange(1_000_000) % 5)

    def one_round(t: int) -> None:
        drawn(chosen, 0, t, population)
        chosen.sampling(population), chosen.divisor(population), chosen.corrections(population)

    one_round(0)
    tracemalloc.start()
    try:
        for t in range(1, 4):
            one_round(t)
        assert tracemalloc.get_traced_memory()[1] < 500_000  # one byte a client would be a million
    finally:
        tracemalloc.stop()


def test_a_population_is_pickled_without_what_it_remembers():
    population = clients(10_000)
    before = len(pickle.dumps(population))
    cohort = example("privacy_aware").draw(0, 0, population)
    assert len(pickle.dumps(population)) == before < 170_000
    copy = pickle.loads(pickle.dumps(population))
    assert np.array_equal(example("privacy_aware").draw(0, 0, copy).clients, cohort.clients)


@pytest.mark.parametrize("sizes", [[], [0, 0], [-1, 2], [[1, 2]]])
def test_a_population_without_samples_is_refused(sizes):
    with pytest.raises(ConfigError, match="sizes"):
        Population(sizes)


@pytest.mark.parametrize("cost", [[1.0], [1.0, -1.0], [1.0, math.nan]])
def test_costs_that_are_not_one_per_client_from_0_are_refused(cost):
    with pytest.raises(ConfigError, match="privacy_cost"):
        Population([1, 2], cost)


# Subsets.


def test_every_pair_of_clients_is_as_likely_as_another():
    found = counted(member("uniform", cohort=2), Population.balanced(10), range(4500))
    assert p_value(found, subsets(range(10), 2)) > 1e-4


def test_data_weights_over_uniform_cohorts_are_unbiased_and_stale_models_shrink_the_step():
    """002 Lemma 5, all 20 cohorts: mean of (N/r) sum p_i Delta_i; r/N of it with divisor N."""
    sizes = np.array([1, 2, 3, 5, 8, 13])
    updates = np.array([0.3, -1.0, 2.0, 0.7, -0.2, 0.05])
    population = Population(sizes)
    target = sizes @ updates / sizes.sum()
    for kind, share in (("uniform", 1.0), ("fedavg_stale", 3 / 6)):
        divisor = member(kind, cohort=3).divisor(population)
        mean = 0.0
        for cohort, chance in subsets(range(6), 3).items():
            part = list(cohort)
            weights = DataWeights().of(sizes[part], population.samples, 6)
            mean += chance * (weights @ updates[part]) / divisor
        assert mean == pytest.approx(share * target, rel=1e-12)


# Draws with replacement.


@pytest.mark.parametrize("power", [None, -1.0, 0.0, 0.4, 1.0, 2.5])
def test_means_over_draws_with_replacement_are_unbiased(power):
    """Over all 4^3 sequences of three draws, weighted by their probability."""
    population = Population([2, 3, 7, 11])
    updates = np.array([0.3, -1.0, 2.0, 0.7])
    fields = {"kind": "multinomial"} if power is None else {"kind": "importance", "power": power}
    chosen = member(**fields, cohort=3)
    p = chosen.probabilities(population)
    corrections = chosen.corrections(population)
    factors = np.ones(4) if corrections is None else corrections
    found = sum(
        np.prod(p[list(s)]) * (factors * updates)[list(s)].sum()
        for s in itertools.product(range(4), repeat=3)
    ) / chosen.divisor(population)
    assert found == pytest.approx(population.shares @ updates, rel=1e-12)


@pytest.mark.parametrize("kind", ["unbiased", "importance", "privacy_aware"])
def test_cohorts_with_replacement_follow_the_multinomial_law_of_the_members_probabilities(kind):
    population = Population([1, 0, 4, 5], [9.0, 0.0, 2.0, 0.1])
    chosen = example(kind, cohort=2)
    p = chosen.probabilities(population)
    law = {}
    for first, second in itertools.product(range(4), repeat=2):
        key = tuple(sorted((first, second)))
        law[key] = law.get(key, 0.0) + p[first] * p[second]
    law = {key: chance for key, chance in law.items() if chance > 0}
    assert p_value(counted(chosen, population, range(4000)), law) > 1e-4
    other = member("importance", cohort=2, power=1.7)
    assert p_value(counted(other, population, range(4000)), law) < 1e-9  # another p is noticed


def test_multinomial_draws_by_shares_of_the_data_and_accountants_count_the_likeliest():
    population = Population([1, 2, 5])
    chosen = member("multinomial", cohort=4)
    uniform = member("importance", cohort=4, power=0.0)
    assert chosen.probabilities(population).tolist() == [1 / 8, 2 / 8, 5 / 8]
    assert chosen.sampling(population) == Sampling("with_replacement", 3, 4, p_max=5 / 8)
    assert chosen.sampling(Population.balanced(7)) == Sampling("with_replacement", 7, 4)
    assert uniform.sampling(population) == Sampling("with_replacement", 3, 4)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_importance_probabilities_may_come_from_a_column(suffix, tmp_path):
    path = tmp_path / f"chances.{suffix}"
    write = csv.write_csv if suffix == "csv" else parquet.write_table
    table = pa.table({"name": ["a", "b", "c"], "chance": [2.0, 1.0, 1.0]})
    write(table, path)
    chosen = member("importance", cohort=2, path=str(path), column="chance")
    population = Population([1, 1, 2])
    assert chosen.probabilities(population).tolist() == [0.5, 0.25, 0.25]
    assert chosen.corrections(population).tolist() == [0.5, 1.0, 2.0]
    # relative to the data root, and read once, wherever a draw is made
    named = member("importance", cohort=2, path=path.name, column="chance")
    carried = Population([1, 1, 2], table=named.table(3, tmp_path))
    path.unlink()
    assert named.probabilities(pickle.loads(pickle.dumps(carried))).tolist() == [0.5, 0.25, 0.25]
    write(table, path)
    for column, others, field in (
        ("other", population, "column"),
        ("name", population, "column"),
        ("chance", Population([1, 2]), "path"),
    ):
        with pytest.raises(ConfigError, match=f"selection.{field}"):
            member("importance", cohort=2, path=str(path), column=column).probabilities(others)
    absent = member("importance", cohort=2, path=str(tmp_path / "no.csv"), column="chance")
    with pytest.raises(ConfigError, match=r"selection\.path"):
        absent.probabilities(population)


def test_a_client_with_data_that_could_never_be_drawn_is_refused(tmp_path):
    parquet.write_table(pa.table({"chance": [1.0, 0.0, 1.0]}), tmp_path / "chances.parquet")
    chosen = member("importance", cohort=2, path=str(tmp_path / "chances.parquet"), column="chance")
    with pytest.raises(ConfigError, match=r"selection\.column"):
        chosen.probabilities(Population([1, 1, 2]))
    assert chosen.corrections(Population([1, 0, 3])).tolist() == [0.5, 0.0, 1.5]
    with pytest.raises(ConfigError, match=r"selection\.power"):
        member("importance", cohort=2, power=-1.0).probabilities(Population([1, 0, 3]))


@pytest.mark.parametrize("solver", ["exact", "cvxpy"])
def test_a_client_without_data_is_never_asked_however_little_it_costs(solver):
    population = Population([0, 50, 0, 50], np.array([3.0, 100.0, 0.0, 1000.0]))
    p = member("privacy_aware", cohort=5, solver=solver).probabilities(population)
    assert (p > 0).tolist() == [False, True, False, True] and p.sum() == pytest.approx(1)


def test_privacy_aware_selection_needs_budgets():
    with pytest.raises(ConfigError, match="'privacy_aware': expected clients with privacy budgets"):
        example("privacy_aware").draw(0, 0, Population.balanced(9))


# First responders.


RESPONSES = {
    "exponential": ({}, stats.expon()),
    "lognormal": ({"sigma": 2.0}, stats.lognorm(2.0)),
    "pareto": ({"alpha": 0.8}, stats.pareto(0.8)),
}


@pytest.mark.parametrize("kind", RESPONSES)
@pytest.mark.parametrize("contacted", [None, 4])
def test_first_responders_of_one_scale_are_a_uniform_cohort(kind, contacted):
    """All 20 cohorts (002 sec. IV); a spread of scales is accounted without amplification."""
    population = Population.balanced(6)
    law = subsets(range(6), 3)
    fields = {"cohort": 3, "contacted": contacted, "response": {"kind": kind, **RESPONSES[kind][0]}}
    alike = member("first_responders", **fields)
    assert p_value(counted(alike, population, range(3000)), law) > 1e-4
    assert alike.sampling(population) == member("uniform", cohort=3).sampling(population)
    unlike = member("first_responders", **fields, spread=3.0)
    assert p_value(counted(unlike, population, range(3000)), law) < 1e-9
    assert unlike.sampling(population).kind == "public"


def test_equal_response_times_favour_nobody():
    population = Population.balanced(6)
    response = {"kind": "pareto", "alpha": 1e17}  # all times round to 1
    selection = member("first_responders", cohort=3, response=response)
    law = subsets(range(6), 3)
    assert p_value(counted(selection, population, range(3000)), law) > 1e-4


@pytest.mark.parametrize(("contacted", "cohort", "always"), [(40, 10, 8), (20, 5, 4)])
def test_fast_clients_stay_fast_from_round_to_round(contacted, cohort, always):
    """Scales far apart, hardly any luck: the fastest always come, the slowest half never."""
    population = Population.balanced(40)
    fields = {"response": {"kind": "lognormal", "sigma": 0.1}, "spread": 5.0}
    chosen = member("first_responders", cohort=cohort, contacted=contacted, **fields)
    cohorts = [chosen.draw(0, t, population).clients for t in range(200)]
    found = np.bincount(np.concatenate(cohorts), minlength=40)
    order = np.argsort(stream(0, Purpose.RESPONSE, step=1).standard_normal(40))
    assert found[order[:always]].min() > 0.8 * 200 * contacted / 40 and found[order[20:]].max() == 0


@pytest.mark.parametrize("kind", RESPONSES)
def test_response_times_follow_their_law(kind):
    """Kolmogorov-Smirnov over 5000 times; false-alarm rate 1e-4."""
    fields, law = RESPONSES[kind]
    response = member("first_responders", cohort=1, response={"kind": kind, **fields}).response
    times = response.times(stream(0, Purpose.RESPONSE), 5000)
    assert stats.kstest(times, law.cdf).pvalue > 1e-4


def test_at_most_ten_thousand_are_asked_unless_more_are_wanted():
    chosen = member("first_responders", cohort=10)
    assert (chosen.asked(50), chosen.asked(1_000_000)) == (50, 10_000)
    assert member("first_responders", cohort=2000).asked(1_000_000) == 20_000
    assert member("first_responders", cohort=10, contacted=30).asked(1_000_000) == 30


# Windows.


@pytest.mark.parametrize(
    ("count", "period", "window"),
    [(c, p, w) for c in (1, 5, 12, 13, 17) for p in (1, 3, 5, 7) for w in range(1, p + 1)],
)
def test_the_available_clients_are_those_whose_window_is_open(count, period, window):
    chosen = member("availability", period=period, window=window, cohort=1)
    sizes = []
    turned = np.zeros((count, 15), int)
    for t in range(15):
        open_now = [k for k in range(count) if (t - k) % period < window]
        size = chosen.available(count, t)
        assert chosen.clients_at(np.arange(size), t).tolist() == open_now
        sizes.append(size)
        turned[open_now, t] = 1
    assert chosen.fewest_available(count) == min(sizes)
    most = turned.cumsum(1).max(0)
    composed = chosen.composed_rounds(0, 15, Population.balanced(count))
    assert (composed >= most).all() and (count < period or (composed == most).all())


def test_a_cycle_of_whole_groups_gives_every_client_the_same_say_and_one_turn():
    chosen = member("cyclic", period=3)
    population = Population.balanced(10)
    updates = np.arange(10.0) ** 2
    groups = [chosen.draw(0, t, population).clients for t in range(3)]
    steps = [updates[group].sum() / chosen.divisor(population) for group in groups]
    assert np.mean(steps) == pytest.approx(updates.mean(), rel=1e-12)
    assert sorted(np.concatenate(groups).tolist()) == list(range(10))
    sampling = chosen.sampling(population)
    assert (sampling.kind, sampling.cohort) == ("public", 3)
    assert "each 1 round of 3" in str(sampling)
    assert chosen.composed_rounds(0, 7, population).tolist() == [1, 1, 1, 2, 2, 2, 3]


def test_a_poisson_law_within_a_group_keeps_its_expected_size():
    chosen = member("cyclic", period=2, cohort=2, scheme="poisson")
    population = Population.balanced(8)
    law = {s: 0.5**4 for size in range(5) for s in itertools.combinations((1, 3, 5, 7), size)}
    assert p_value(counted(chosen, population, range(1, 4000, 2)), law) > 1e-4
    assert (chosen.divisor(population), chosen.sampling(population).kind) == (2.0, "poisson")


def test_sampling_within_windows_is_that_of_the_emptiest_round():
    inside = member("cyclic", period=3, cohort=2).sampling(Population.balanced(11))
    assert (inside.kind, inside.population, inside.cohort) == ("fixed", 3, 2)
    daily = member("availability", period=5, window=2, cohort=3).sampling(Population.balanced(11))
    assert (daily.kind, daily.population, daily.cohort) == ("fixed", 4, 3)
    for all_of_them in (
        member("cyclic", period=3, cohort=3),
        member("availability", period=5, window=2, cohort=4),
    ):
        # nobody is left who might have been taken instead
        assert all_of_them.sampling(Population.balanced(11)).kind == "public"


# A minimum separation.


@pytest.mark.slow
@pytest.mark.parametrize("count, separation, most", [(20, 4, None), (30, 5, 4), (12, 1, 9)])
def test_a_cohort_is_a_uniform_subset_of_those_who_waited_and_took_part_seldom_enough(
    count, separation, most
):
    """Against a plain list of who may take part, in 24 rounds of many seeds."""
    chosen = member("min_separation", cohort=3, min_separation=separation, participations=most)
    population = Population.balanced(count)
    rounds = 24
    drawn_then: Counter = Counter()
    expected = np.zeros(count)
    for seed in range(300):
        rows = [chosen.draw(seed, t, population).clients for t in range(rounds)]
        counts = np.zeros(count, int)
        for t, row in enumerate(rows):
            recent = {k for before in rows[max(0, t - separation + 1) : t] for k in before.tolist()}
            may = [k for k in range(count) if k not in recent and counts[k] < (most or rounds)]
            assert set(row.tolist()) <= set(may) and len(set(row.tolist())) == 3
            counts[row] += 1
            if t == rounds - 6:
                drawn_then.update(row.tolist())
                expected[may] += 3 / len(may)
    observed = np.array([drawn_then[k] for k in range(count)])
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    again = chosen.draw(5, 11, Population.balanced(count)).clients  # by itself, without the others
    assert np.array_equal(again, chosen.draw(5, 11, population).clients)
    composed = chosen.composed_rounds(0, rounds, population)
    turns = -(-np.arange(1, rounds + 1) // separation)
    assert composed.tolist() == np.minimum(turns, most or rounds).tolist()
    assert chosen.most_participations(rounds) == composed[-1]


def test_too_few_clients_for_a_minimum_separation_are_refused_before_the_run():
    chosen = member("min_separation", cohort=3, min_separation=2, participations=2)
    with pytest.raises(ConfigError, match=r"at most the \d clients that may still take .* [56]"):
        chosen.composed_rounds(0, 10, Population.balanced(9))


# Power-of-choice.


@pytest.mark.parametrize("attempts", [8, 0])
def test_candidates_are_drawn_one_by_one_in_proportion_to_their_data(attempts):
    """All ordered triples of five clients, one without data: repeated draws, exponential clocks."""
    sizes = np.array([1, 0, 2, 3, 10])
    law: dict[tuple, float] = {}
    for a, b, c in itertools.permutations([0, 2, 3, 4], 3):
        key = tuple(sorted((a, b, c)))
        left = sizes.sum() - np.array([0, sizes[a], sizes[a] + sizes[b]])
        law[key] = law.get(key, 0.0) + np.prod(sizes[[a, b, c]] / left)
    population = Population(sizes)
    streams = (stream(0, Purpose.COHORT, t=t) for t in range(4000))
    triples = (successive_sample(each, population, 3, attempts) for each in streams)
    found = Counter(tuple(sorted(triple.tolist())) for triple in triples)
    assert p_value(found, law) > 1e-4


def test_candidates_are_found_where_one_client_holds_nearly_all_data():
    population = Population(np.append(np.ones(50, np.int64), 10**12))
    chosen = member("power_of_choice", cohort=2, pool=30)
    for t in range(5):
        found = chosen.exposed(0, t, population)
        assert len(found) == 30 == len(set(found.tolist())) and found[-1] == 50
    with pytest.raises(
        ConfigError, match=r"selection\.pool = 30: expected at most the 29 clients that have data"
    ):
        chosen.exposed(0, 0, Population(np.repeat([1, 0], [29, 20])))


def test_the_largest_losses_are_chosen():
    chosen = member("power_of_choice", cohort=2, pool=5)
    # those of five clients, whom it asks in any order of theirs
    population = Population(np.isin(np.arange(13), [3, 5, 8, 9, 12]).astype(int))
    for losses, expected in (
        ([0.1, 0.9, 0.3, 0.8, 0.2], [5, 9]),
        ([0.5, 0.5, 0.5, 0.5, 0.5], [3, 5]),
        ([math.nan, 0.1, math.nan, 0.0, math.nan], [5, 9]),
        ([0.0, math.inf, 1.0, math.nan, -math.inf], [5, 8]),
    ):
        asked = []

        def ask(clients, asked=asked, losses=losses):
            asked.append(clients.tolist())
            return np.array(losses)

        assert chosen.select(0, 0, population, ask).clients.tolist() == expected
        assert asked == [[3, 5, 8, 9, 12]]


def test_power_of_choice_cannot_draw_without_losses_and_says_what_its_guarantee_leaves_out():
    with pytest.raises(ConfigError, match="asks for losses"):
        example("power_of_choice").draw(0, 0, clients())
    assert "local losses" in example("power_of_choice").exclusions[0]
    assert not any(example(kind).exclusions for kind in FAMILY if kind != "power_of_choice")


def noised(bound: float = 2.0, std: float = 0.5) -> Selection:
    return example("power_of_choice", loss_bound=bound, loss_std=std)


def test_a_loss_without_noise_keeps_the_label_and_one_with_noise_is_a_query_instead():
    for fields in ({}, {"loss_bound": 2.0}, {"loss_bound": 2.0, "loss_std": 0.0}):
        exact = example("power_of_choice", **fields)
        assert len(exact.exclusions) == 1 and exact.loss_query is None
        assert "noised" not in exact.sampling(clients()).rule
    assert noised().exclusions == ()
    assert noised().loss_query == Query("losses", 1.0, 0.5, per_client=True)
    assert "noised" in noised().sampling(clients()).rule


def test_answers_move_by_no_more_than_their_sensitivity_over_all_small_tables():
    """L when a client's whole table changes, L / n when one of its n samples does, the middle when
    it gives nothing: each of them attained.
    """
    bound = 2.0
    values = [-math.inf, -1.0, 0.0, 0.3, 2.0, 7.0, math.inf, math.nan]
    chosen = example("power_of_choice", loss_bound=bound)
    found = {}
    for n in (1, 2, 3):
        tables = list(itertools.product(range(len(values)), repeat=n))
        found |= {table: chosen.answer(np.array(values)[list(table)], 0, 0, 0) for table in tables}
        one = [
            abs(found[a] - found[(*a[:i], v, *a[i + 1 :])])
            for a in tables
            for i in range(n)
            for v in range(len(values))
        ]
        assert max(one) == pytest.approx(bound / n, rel=1e-12)
    answers = np.array(list(found.values()))
    assert answers.max() - answers.min() == bound and np.abs(answers - bound / 2).max() == bound / 2
    queries = (Query("updates", 1.0, 1e12), noised(bound).loss_query)
    release = Mechanism(noised(bound).sampling(clients()), queries, 1)
    assert release.mu("replace_one") == pytest.approx(bound / 0.5)
    assert release.mu("zero_out") == pytest.approx(bound / 2 / 0.5)


def test_the_noise_of_answers_is_normal_of_the_given_std_and_its_keys_are_nobody_elses():
    """KS, and correlation of 4000 answers with counts' noise; false alarms 1e-4 and 6e-7."""
    losses = np.array([0.5, 1.0, 5.0])
    places = [(t, k) for t in range(80) for k in range(50)]
    exact = example("power_of_choice", loss_bound=2.0).answer(losses, 0, 0, 0)
    noise = np.array([noised().answer(losses, 7, t, k) for t, k in places]) - exact
    assert stats.kstest(noise / 0.5, "norm").pvalue > 1e-4
    assert len(set(noise.tolist())) == len(places)
    counts = np.array([query_noise(7, t, 1.0, k) for t, k in places])
    assert abs(np.corrcoef(noise, counts)[0, 1]) < 5 / math.sqrt(len(places))
    answer = noised().answer(losses, 7, 3, 4)
    assert answer == noised().answer(losses[::-1], 7, 3, 4) != noised().answer(losses, 8, 3, 4)


# What accountants ask.


def test_clients_drop_out_with_the_given_probability_whoever_else_is_drawn():
    """0.7 of 6000 survive, within five stds (false alarms 6e-7); the divisor stays."""
    population = Population.balanced(40)
    chosen = member("uniform", cohort=20, dropout=0.3)
    full = member("full", dropout=0.3)
    kept = 0
    for t in range(300):
        whole = chosen.select(0, t, population, None)
        cohort = chosen.draw(0, t, population)
        assert len(cohort) + cohort.lost == len(whole) == 20 and set(cohort.clients) <= set(
            whole.clients
        )
        assert set(cohort.clients) == set(whole.clients) & set(full.draw(0, t, population).clients)
        kept += len(cohort)
    assert abs(kept - 4200) < 5 * math.sqrt(6000 * 0.3 * 0.7)
    assert chosen.divisor(population) == 20.0


def test_the_draws_of_one_client_fail_one_by_one():
    chosen = member("multinomial", cohort=30, dropout=0.5)
    population = Population.balanced(1)
    left = [chosen.draw(0, t, population).draws.tolist() for t in range(20)]
    assert all(0 < len(draws) < 30 for draws in left) and len(set(map(tuple, left))) == 20


@pytest.mark.parametrize("kind", ["uniform", "multinomial", "availability", "first_responders"])
def test_survivors_are_the_fewest_of_any_round(kind):
    population = clients()
    failing = example(kind, dropout=0.4)
    assert example(kind).clients_left(0, 50, population) == failing.cohort
    left = failing.clients_left(0, 50, population)
    fewest = min(len(failing.draw(0, t, population)) for t in range(50))
    assert left == fewest < failing.cohort


def test_survivors_of_a_choice_by_losses_are_never_fewer_than_promised():
    chosen = example("power_of_choice", cohort=11, dropout=0.2)
    population = clients()
    promised = chosen.clients_left(0, 40, population)
    assert 0 < promised <= min(len(drawn(chosen, 0, t, population)) for t in range(40))
    assert example("power_of_choice").clients_left(0, 40, population) == 5


@pytest.mark.parametrize(("fields", "field"), messages("cohorts").items())
def test_cohorts_that_fifty_clients_cannot_give_are_refused_by_name(fields, field):
    with refusal(begins=f"selection.{field}: "):
        member(**yaml.safe_load(f"{{kind: {fields}}}")).fits(50)


@pytest.mark.parametrize(("epoch", "per_epoch"), [(5, 1), (6, 2), (5, 4), (3, 3)])
def test_a_random_allocation_gives_every_client_a_uniform_choice_of_rounds(epoch, per_epoch):
    clients = Population.balanced(3000)
    chosen = example("random_allocation", epoch=epoch, per_epoch=per_epoch)
    patterns = []
    for first in (0, epoch, 2 * epoch):
        taken = np.zeros((epoch, len(clients)), bool)
        # in any order: a cohort depends on seed and round alone
        for t in reversed(range(epoch)):
            taken[t, chosen.draw(3, first + t, clients).clients] = True
        assert (taken.sum(0) == per_epoch).all()
        patterns.append(2 ** np.arange(epoch) @ taken)
    subsets = math.comb(epoch, per_epoch)
    for pattern in patterns:
        counts = np.unique(pattern, return_counts=True)[1]
        assert len(counts) == subsets
        assert subsets == 1 or stats.chisquare(counts).pvalue > 1e-4
    # epochs are independent: a client's choices agree as often as by chance
    agreed = int((patterns[0] == patterns[1]).sum())
    assert stats.binomtest(agreed, len(clients), 1 / subsets).pvalue > 1e-4
