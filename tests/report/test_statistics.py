"""Intervals over seeds hold what they say, tuning included."""

from itertools import combinations_with_replacement

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydpfl.core.prng import Purpose, stream
from raydpfl.report.run_reader import LabelledRun, Run, values_of
from raydpfl.report.statistics import SeedValues, total

SETTINGS = 7


def tuned(generator, gap, tuning, final, tuning_seeds):
    """The final numbers of an arm whose best of seven settings is 0, each next one `gap` worse;
    `tuning` and `final`: the stds of a number over tuning and final seeds.
    """
    truth = -gap * np.abs(np.arange(SETTINGS) - SETTINGS // 2)
    tries = truth + tuning * generator.standard_normal((tuning_seeds, SETTINGS))
    runs = truth[:, None] + final * generator.standard_normal((SETTINGS, 10))

    def at(resample):
        return dict(enumerate(runs[tries[list(resample)].mean(axis=0).argmax()]))

    resamples = combinations_with_replacement(range(tuning_seeds), tuning_seeds)
    return SeedValues(at(range(tuning_seeds)), {each: at(each) for each in resamples})


@pytest.mark.slow
@pytest.mark.parametrize("tuning_seeds", [3, 4])
@pytest.mark.parametrize(
    ("tuning", "gap", "final"),
    [(0.05, 0.05, 0.02), (0.05, 0.02, 0.01), (0.02, 0.05, 0.01), (0.1, 0.05, 0.01)],
)
def test_two_arms_that_are_equally_good_seldom_seem_to_differ(tuning, gap, final, tuning_seeds):
    generator = stream(tuning_seeds, Purpose.DATA)
    wrong = 0
    for _ in range(400):
        arms = [(sign, tuned(generator, gap, tuning, final, tuning_seeds)) for sign in (1, -1)]
        spread = total(arms).spread()
        wrong += abs(spread.mean) > spread.half_width(0.95)
    assert wrong / 400 < 0.08


def test_a_difference_resolves_no_less_than_the_numbers_it_is_of():
    ones = SeedValues(dict.fromkeys(range(10), 0.5))
    below = SeedValues(
        dict.fromkeys(range(10), float(np.nextafter(np.float32(0.5), np.float32(0))))
    )
    difference = total([(1, ones), (-1, below)]).spread()
    assert 0 < difference.mean < difference.half_width()


@pytest.mark.parametrize("lost", [{1: None}, {0: None, 1: None}, {1: float("nan")}])
def test_without_a_number_of_a_resample_nothing_is_known_of_the_error(lost):
    numbers = {0: 0.1, 1: 0.11}
    resamples = {(0, 0): numbers, (0, 1): numbers, (1, 1): {**numbers, **lost}}
    spread = SeedValues(numbers, resamples).spread()
    assert spread.mean == pytest.approx(0.105) and np.isnan(spread.half_width())
    # a run that all of them lack
    resamples = {key: {**numbers, 2: None} for key in resamples}
    assert SeedValues({**numbers, 2: None}, resamples).spread().half_width() > 0


def test_a_resample_whose_runs_have_not_ended_stays_one(tmp_path):
    case = LabelledRun({}, Run(tmp_path, "run", []), {"norm": 1.0}, 0, None, {(1, 1): None})
    assert values_of([case], "norm").resamples == {(1, 1): {0: None}}


def test_the_mean_of_a_runs_rounds_includes_tuning(tmp_path):
    def run(name, clipped):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table({"round": [0, 1], "clipped": [clipped] * 2}),
            tmp_path / name / "rounds.parquet",
        )
        return Run(tmp_path / name, name, [])

    other = LabelledRun({}, run("other", 0.4))
    cases = [
        LabelledRun({}, run(f"run{seed}", 0.2), seed=seed, resampled_runs={(0, 0): other})
        for seed in range(2)
    ]
    values = values_of(cases, "rounds.clipped")
    assert values.values == {0: 0.2, 1: 0.2} and values.resamples == {(0, 0): {0: 0.4, 1: 0.4}}
