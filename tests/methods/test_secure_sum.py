"""Runs with integer noise on sums modulo a power of two."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import experiment, messages, refusal

from raydpfl import Experiment
from raydpfl.audit import audit
from raydpfl.check.runs import RecordingCoordinator, run_plan
from raydpfl.errors import ConfigError, RunError
from raydpfl.experiment import overridden
from raydpfl.methods.noise.secure_sum import DiscreteGaussian, Skellam
from raydpfl.simulation.resolution import resolve
from raydpfl.simulation.resume import check_repeatable

TINY = {
    "rounds": 3,
    "data": {"kind": "synthetic", "clients": 30, "samples": 20, "test_samples": 10},
    "model": {"kind": "softmax"},
    "selection": {"kind": "uniform", "cohort": 8},
    "bounding": {"kind": "clip", "bound": 0.5},
    "privacy": {"accountants": ["rdp", "pld"]},
    "client": {"actors": 0, "chunk": 4},
}
KINDS = ("discrete_gaussian", "skellam")


def of(kind, **fields):
    return experiment(**{**TINY, "noise": {"kind": kind, "multiplier": 1.0, **fields}})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_says_how_its_sums_were_taken_and_is_that_of_exact_sums(kind, tmp_path):
    """The released sum is the clients' plus noise of the std that was asked for: 0.5 times z."""
    plan = resolve(of(kind, bits=14))
    run = run_plan(plan, tmp_path / "run")
    said = run.finish("completed", save=True)["secure_sums"]
    assert said["bits"] == 14 and said["bits_sent"] == 14 * plan.d and said["wrapped"] == 0
    assert said["repeatable"] and 1 <= said["sensitivity"] < 1.1
    assert plan.sum_std(0, 0.5) == pytest.approx(said["noise_steps"] * said["step"] * 0.5)
    # in one round with the same keys but next to no noise the clients' sum is what is left
    quiet = resolve(of(kind, multiplier=1.0, bits=32))
    lattice = replace(quiet.mechanism.integer.lattice(1.0), std=1e-3)
    quiet.__dict__["lattice"] = lattice
    exact = run_plan(quiet, tmp_path / "quiet", stop_round=1)
    plain = run_plan(
        resolve(experiment(**{**TINY, "noise": {"kind": "none"}})), tmp_path / "plain", stop_round=1
    )
    sums = quiet.modular_sum(0, 0.5)
    total = exact.totals[0]
    np.testing.assert_allclose(sums.decode(total), plain.totals[0], atol=20 * sums.step)


@pytest.mark.slow
def test_sums_too_wide_for_their_bits_wrap_around_and_are_counted(tmp_path):
    """All clients send the same coordinate, which no rotation spreads."""
    plan = resolve(of("skellam", bits=8, multiplier=3.0, rotation=False))
    lattice = plan.lattice
    finer = {"step": lattice.step / 16, "square": lattice.square * 300, "std": lattice.std * 16}
    plan.__dict__["lattice"] = replace(lattice, **finer)
    run = run_plan(plan, tmp_path)
    wrapped = run.finish("completed", save=True)["secure_sums"]["wrapped"]
    half = 2.0**7
    beyond = sum(int(((total < -half) | (total >= half)).sum()) for total in run.totals)
    assert wrapped == beyond > 0
    assert wrapped == sum(run.record.rounds.arrow()["wrapped"].to_pylist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_client_moves_no_sum_by_more_than_was_accounted_for(kind, tmp_path):
    """The same keys, one client's data replaced: exact sums of integers, without noise."""
    plan = resolve(of(kind))
    whole = run_plan(plan, tmp_path / "whole", stop_round=1)
    rows = whole.shards
    assert rows is not None
    client = int(whole.columns[0]["client"][0])

    class Other(RecordingCoordinator):
        def collect(self, t, cohort):
            chunked = self.pool.client.contribution

            def contribution(state):
                added = chunked(state)
                before = added.unbounded_vectors

                def unbounded(state, slots, updates):
                    vectors = before(state, slots, updates)
                    vectors[state.chunk.clients[slots] == client] *= -1e6
                    return vectors

                added.unbounded_vectors = unbounded
                return added

            self.pool.client.contribution = contribution
            return super().collect(t, cohort)

    (tmp_path / "other").mkdir()
    other = Other(plan, str(tmp_path / "other"))
    other.start()
    other.round()
    moved = other.totals[0] - whole.totals[0]
    square = float(moved @ moved)
    assert 0 < square <= 4 * plan.lattice.square
    assert square > 3 * plan.lattice.square  # it was sent in full, in both directions
    released = plan.mechanism.event("replace_one")
    assert released.mu >= 2 * np.sqrt(plan.lattice.square) / plan.lattice.std


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_noise_of_the_system_is_another_every_time_and_no_resume_takes_it_for_the_same(
    kind, tmp_path
):
    mine = of(kind, source="system")
    plan = resolve(mine)
    models = [run_plan(plan, tmp_path / name, stop_round=1).parameters() for name in "ab"]
    assert not np.array_equal(*models)
    with pytest.raises(ConfigError, match=r"--resume = True: expected --fresh-noise as well"):
        check_repeatable(mine, False)
    check_repeatable(mine, True)
    check_repeatable(of(kind), False)
    assert any("cannot be repeated" in text for text in mine.warnings())


class Narrow(DiscreteGaussian):
    """Draws too little."""

    kind: str = "narrow"

    def on_server(self, seed, d):
        source = super().on_server(seed, d)
        draw = source.on_sum
        source.on_sum = lambda t, std: draw(t, 0.8 * std)
        return source


class Seldom(Skellam):
    """Draws integers of another distribution of this variance."""

    kind: str = "seldom"

    def on_clients(self, seed, t, clients, draws, std, d):
        drawn = super().on_clients(seed, t, clients, draws, std, d)
        return np.round(std) * np.sign(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Narrow, Seldom])
def test_integer_noise_of_ones_own_that_is_not_what_was_accounted_for_ends_a_run(cls, tmp_path):
    mine = of(f"{__name__}:{cls.__name__}")
    with pytest.raises(RunError, match=r"noise .* in round \d+ .* was accounted for"):
        run_plan(resolve(mine), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_integer_noise_of_ones_own_that_is_sound_is_let_pass(kind, tmp_path):
    cls = type(
        "Sound", (Skellam if kind == "skellam" else DiscreteGaussian,), {"__module__": __name__}
    )
    globals()["Sound"] = cls
    run = run_plan(resolve(of(f"{__name__}:Sound")), tmp_path)
    assert run.position() == 3


@pytest.mark.parametrize("case", messages("secure sums"))
def test_what_sums_of_integers_do_not_take_is_refused(case):
    overrides, message = messages("secure sums")[case]
    with refusal(line=message):
        resolve(Experiment.from_dict(overridden(of("skellam").to_dict(), overrides)))


def test_an_audit_by_canaries_is_refused():
    with pytest.raises(ConfigError, match=r"noise.kind = 'skellam': expected gaussian noise"):
        audit(of("skellam"), canaries=20)
