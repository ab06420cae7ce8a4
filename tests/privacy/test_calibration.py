"""Calibration: always on the safe side, tight, cached, and honest about what cannot be reached."""

import json
import math
from functools import partial

import conftest
import pytest

from raydpfl import privacy
from raydpfl.errors import ConfigError
from raydpfl.privacy import Mechanism, Query, Sampling, calibration, epsilon, noise_for, rounds_for

pytestmark = pytest.mark.usefixtures("cache")


mechanism = partial(conftest.mechanism, std=0.0)


@pytest.mark.parametrize(
    ("kind", "relation", "accountant", "targets"),
    [
        ("fixed", "replace_one", "pld", [0.05, 1.5, 100.0]),
        ("poisson", "add_remove", "pld", [0.05, 1.5, 100.0]),
        ("poisson", "zero_out", "rdp", [0.05, 1.5, 100.0]),
        ("fixed", "replace_one", "rdp", [1.5]),
        ("with_replacement", "replace_one", "pld", [1.5]),
        ("fixed", "replace_one", "paper", [1.5]),
    ],
)
def test_the_noise_found_meets_the_target_and_hardly_less_would_not(
    kind, relation, accountant, targets
):
    run = mechanism(kind)
    for target in targets:
        z = noise_for(target, run, relation, 1e-5, accountant)
        enough, less = run.with_noise(z), run.with_noise(z * (1 - 3e-4))
        assert epsilon(enough, relation, 1e-5, accountant=accountant) <= target
        assert epsilon(less, relation, 1e-5, accountant=accountant) > target
        assert privacy.epsilon_curve(enough, relation, 1e-5, accountant=accountant)[-1] <= target


def test_full_participation_calibrates_to_the_exact_gaussian():
    run = mechanism("full", 10, 10, rounds=4)
    z = noise_for(4.377, run, "zero_out", 1e-5)  # mu = sqrt(4) / z = 1 gives 4.377
    assert z == pytest.approx(2.0, rel=5e-4)


def test_queries_keep_their_shares_of_the_noise():
    queries = (Query("update", 2.0, 1.0), Query("count", 0.5, 5.0))
    run = Mechanism(Sampling("full", 10, 10), queries, 3)
    update, count = run.with_noise(noise_for(2.0, run, "replace_one", 1e-5)).queries
    assert count.std / update.std == pytest.approx(5.0)


def test_the_rounds_found_are_the_most_that_fit():
    run = mechanism(std=6.0)
    most = rounds_for(1.0, run, "replace_one", 1e-5)
    spent = [epsilon(run, "replace_one", 1e-5, rounds) for rounds in (most, most + 1)]
    assert spent[0] <= 1.0 < spent[1]
    assert rounds_for(0.01, mechanism("full", 10, 10, std=1.0), "replace_one", 1e-5) == 0


def test_a_second_question_is_answered_from_the_cache(cache, monkeypatch):
    z = noise_for(1.5, mechanism(), "replace_one", 1e-5)
    monkeypatch.setattr(calibration, "_search", lambda *_: pytest.fail("computed again"))
    # the noise it has now does not matter
    assert noise_for(1.5, mechanism(std=7.0), "replace_one", 1e-5) == z
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    "content", ["", '{"noise_mul', "[]", *(f'{{"noise_multiplier": {z}}}' for z in ("NaN", "-1.0"))]
)
def test_an_unreadable_cache_is_ignored_and_repaired(cache, content):
    z = noise_for(2.0, mechanism("full", 10, 10), "zero_out", 1e-5)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert noise_for(2.0, mechanism("full", 10, 10), "zero_out", 1e-5) == z
    assert json.loads(file.read_text())["noise_multiplier"] == z


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "file" / "below"))
    assert noise_for(2.0, mechanism("full", 10, 10), "zero_out", 1e-5) > 0


@pytest.mark.parametrize("target", [math.nan, 0.0, -1.0, math.inf, "3"])
def test_a_target_that_is_no_budget_is_refused(target):
    for question in (noise_for, rounds_for):
        with conftest.refusal(begins="target: "):
            question(target, mechanism(std=1.0), "replace_one", 1e-5)


def test_a_combination_that_is_not_covered_is_refused():
    with pytest.raises(ConfigError, match=r"^accountant = "):
        noise_for(1.0, mechanism("with_replacement"), "add_remove", 1e-5)


def test_a_delta_at_which_any_noise_will_do_is_said_to_be_too_large():
    """A client drawn with probability 1e-4 is exposed with probability 1e-4 at most: at delta 1e-3
    there is nothing to calibrate.
    """
    less = r"^delta = 0\.001: expected less: .* any noise, however small, .* epsilon 5 in 1 rounds"
    with pytest.raises(ConfigError, match=less):
        noise_for(5.0, mechanism(population=10_000, cohort=1, rounds=1), "replace_one", 1e-3)
