"""The ledger: a kill at any byte loses at most a round that was never released."""

import math

import pytest

from raydpfl.errors import BudgetError, ConfigError, RunError
from raydpfl.privacy import Ledger, Segment, Spent, check_budget

RELEASE = {"mechanism": "5f70bf", "bound": 1.0}
ROUNDS = [
    {"t": t, "epsilon": {"pld": 0.5 + t / 10, "rdp": 1.0 + t}, **RELEASE, "std": 4.0 + t}
    for t in range(3)
]


@pytest.fixture
def path(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for entry in ROUNDS:
        ledger.record(**entry)
    return ledger.path


def test_what_was_recorded_is_read_back(path):
    assert Ledger(path, resume=True).spending() == Spent(3, {"pld": 0.7, "rdp": 3.0})


def test_a_kill_at_any_byte_of_the_last_line_leaves_the_rounds_before_it(path):
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for end in range(start, len(whole) + 1):
        path.write_bytes(whole[:end])
        ledger = Ledger(path, resume=True)
        rounds = ledger.spending().rounds
        # without its newline alone the entry is still whole
        assert rounds == (3 if end >= len(whole) - 1 else 2)
        for entry in ROUNDS[rounds:]:
            ledger.record(**entry)
        assert path.read_bytes() == whole


def test_a_round_done_again_is_one_release(path):
    before = path.read_bytes()
    ledger = Ledger(path, resume=True)
    ledger.record(**ROUNDS[1])
    # another machine may round differently; the release is the same
    ledger.record(**{**ROUNDS[2], "epsilon": {"pld": 0.7 + 1e-13}})
    assert path.read_bytes() == before and ledger.spending().rounds == 3


@pytest.mark.parametrize("change", [{"std": 3.0}, {"mechanism": "other"}, {"extra": 1}])
def test_a_round_recorded_with_another_release_is_refused(path, change):
    before = path.read_bytes()
    with pytest.raises(RunError, match="round 1 was released before"):
        Ledger(path, resume=True).record(**{**ROUNDS[1], **change})
    assert path.read_bytes() == before


@pytest.mark.parametrize("t", [4, -1])
def test_no_round_is_left_out(path, t):
    with pytest.raises(RunError, match="cannot follow"):
        Ledger(path, resume=True).record(**{**ROUNDS[2], "t": t})


def test_a_fresh_run_refuses_the_ledger_of_another(path):
    with pytest.raises(ConfigError, match="--resume"):
        Ledger(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [lines[0][:9] + b"\n", *lines[1:]],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [*lines, b"{}\n"],
    ],
)
def test_damage_before_the_last_line_is_an_error_not_a_smaller_epsilon(path, damage):
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(RunError, match="damaged"):
        Ledger(path, resume=True)


def test_an_infinite_epsilon_is_kept(tmp_path):
    Ledger(tmp_path / "ledger.jsonl").record(t=0, epsilon={"pld": math.inf})
    assert Ledger(tmp_path / "ledger.jsonl", resume=True).spending().epsilon == {"pld": math.inf}


def test_the_budget_stops_the_round_that_would_overspend_and_no_other():
    check_budget(7, {"pld": 5.0, "rdp": 9.0}, {"pld": 5.0})
    with pytest.raises(BudgetError, match=r"round 8 .* 5.1 \(pld\), above the budget of 5"):
        check_budget(8, {"pld": 5.1, "rdp": 9.0}, {"pld": 5.0})


def test_a_restart_begins_a_segment_and_counts_what_was_released_before(tmp_path):
    path = tmp_path / "ledger.jsonl"
    released = {**RELEASE, "epsilon": {"pld": 0.5}, "std": 2.0}
    Ledger(path).record(t=0, **released)
    ledger = Ledger(path, resume=True)
    for t, restart in [(1, 0), (2, 0), (2, 0), (1, 1), (2, 1), (3, 1), (3, 1)]:
        ledger.record(t=t, restart=restart, **released)
    with pytest.raises(RunError, match="cannot follow"):
        ledger.record(t=0, restart=1, **released)
    assert ledger.segments == Ledger(path, resume=True).segments
    assert ledger.segments == (Segment(0, 0, 3), Segment(1, 1, 4))
