"""What `raydpfl run` shows: on a terminal, in a file, and of what came of it."""

import io
import json
import re
import shlex
from dataclasses import replace

import pytest
from conftest import experiment
from rich.console import Console

from raydpfl import privacy, run
from raydpfl.cli import exit_codes, guarantee_table, run_display
from raydpfl.methods.noise.tree_gaussian import TreeGaussian
from raydpfl.privacy import Guarantee
from raydpfl.privacy.guarantee import Observer, Scope
from raydpfl.runtime import launcher, runner


def console(terminal=False, width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def printed(show, terminal=False):
    to = console(terminal)
    show(to)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", to.file.getvalue())


ROW = {
    "round": 1,
    "test_accuracy": None,
    "validation_balanced_accuracy": 0.75125,
    "epsilon_rdp": 1234.5678,
    "clients_per_second": 123456.7,
}


def test_what_lives_on_a_terminal_fits_into_eighty_columns_and_a_file_has_plain_lines():
    def show(to):
        with run_display.Display(to, 100_000) as display:
            display._accountants = ["epsilon_rdp"]
            display._epsilon_target = 1500.0
            for place in range(3):
                display.rows([{**ROW, "round": place}])
            to.print(display._renderable())

    lines = printed(show, terminal=True).splitlines()
    assert max(map(len, lines)) <= 80
    state = "validation balanced accuracy 75.12%  epsilon 1.23e+03 of 1500  123,457 clients/s"
    assert any("round      3/100000" in line and line.endswith("left") for line in lines)
    assert " ".join(state.split()) in " ".join(" ".join(lines).split())
    plain = printed(show).splitlines()
    assert plain[2] == f"round 3/100000  {state}"


@pytest.mark.slow
def test_what_is_done_before_the_first_round_is_shown_with_the_time_since_the_start(tmp_path):
    stages = []
    run(experiment(), tmp_path / "out", on_stage=stages.append)
    assert stages == [runner.PREPARING, runner.FIRST]
    with run_display.Display(console(), 4, start_time=0.0) as display:
        display.stage("starting Ray")
        assert re.fullmatch(r"starting Ray  \d{9,} s", display.state)
        display.stage(runner.FIRST)
        assert " s in all, " in display.duration_text()


def test_that_an_interrupted_run_stops_is_shown_at_once(tmp_path):
    stages = []

    def interrupt(plan):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment(), tmp_path / "out", on_stage=stages.append, on_start=interrupt)
    assert stages == [runner.PREPARING, launcher.STOPPING]


def test_a_terminal_that_moves_no_cursor_has_plain_lines_too(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    def show(to):
        with run_display.Display(to, 4) as display:
            display.rows([{**ROW, "round": 3}])

    assert printed(show, terminal=True).startswith("round 4/4  validation balanced accuracy")


def test_client_actors_that_start_are_counted_before_the_first_round(tmp_path, shared_ray):
    stages = []
    run(experiment(client={"actors": 1}), tmp_path / "out", on_stage=stages.append)
    assert stages[0] == runner.PREPARING and stages[-1] == runner.FIRST
    start = stages.index("0 of 1 client actors started")  # after Ray, where that was not up
    assert set(stages[start + 1 : -1]) <= {"1 of 1 client actors started"}


def test_actors_that_take_long_to_start_are_counted_in_lines_where_no_other_lives(monkeypatch):
    def show(to):
        with run_display.Display(to, 4) as display:
            for started in range(3):
                display.stage(f"{started} of 3 client actors started")

    assert printed(show) == ""
    monkeypatch.setattr(run_display, "WAIT", 0.0)
    assert printed(show).splitlines() == [f"{k} of 3 client actors started" for k in range(3)]
    silent = Console(file=io.StringIO(), quiet=True)
    show(silent)
    assert silent.file.getvalue() == ""


def test_the_time_left_is_that_of_the_last_rounds():
    display = run_display.Display(console(), 1000)
    assert display.remaining_text() == ""
    display._ends.extend([100.0, 102.0, 104.0])
    display._rounds_done = 500
    assert display.remaining_text() == "0:16:40 left"


def test_guarantees_are_one_table_of_observers_by_accountants(result):
    text = printed(lambda to: run_display.report(to, result, "5.0 s in all"), terminal=True)
    lines = text.splitlines()
    assert "5.0 s in all." in lines
    assert f"Epsilon {result.guarantees[0].terms_text()}:" in " ".join(text.split())
    head = next(line for line in lines if "against an observer of" in line)
    assert head.split()[4:] == ["rdp", "Zhang,", "Das", "2021"]
    rows = [line for line in lines if "every " in line and line.lstrip("> ").startswith("every")]
    assert [row.lstrip().startswith(">") for row in rows] == [True, False, False]
    held = [f"{one.epsilon:.4g}" for one in result.guarantees if one.kind == "rigorous"]
    assert [row.split()[-1 - ("*" in row)] for row in rows] == held
    assert rows[0].split()[-1] == f"{result.guarantees[-1].epsilon:.4g}*"
    assert any(line.startswith("* paper, the formula as printed") for line in lines)


def test_no_word_is_broken_on_a_terminal_and_a_command_stays_whole(result):
    text = printed(lambda to: run_display.report(to, result), terminal=True)
    report = [line for line in text.splitlines() if str(result.out) not in line]
    assert max(map(len, report)) <= 80
    words = set(re.findall(r"\w+", " ".join(result.summary["sentences"])))
    for note in run_display.notes(
        result.guarantees, privacy.tightest_guarantees(result.guarantees)
    ):
        assert set(re.findall(r"\w+", note)) <= set(re.findall(r"\w+", text)) | words
        assert note in " ".join(line.strip() for line in report)
    assert (
        f"  its page and figures:  raydpfl report {shlex.quote(str(result.out))}"
        in text.splitlines()
    )


def test_the_sentences_of_all_guarantees_stand_in_the_summary(result):
    written = json.loads((result.out / "summary.json").read_text())
    assert written["sentences"] == privacy.brief_sentences(result.guarantees)
    assert written["sentences"][0].startswith("epsilon ")
    assert written["sentences"][-1].startswith("Not accounted for: ")
    assert result.guarantees[1].sampling.knows == "cohort known"


def test_more_rounds_are_asked_for_with_the_rounds_that_the_noise_is_for(result):
    more = run_display.next_commands(result)[-1]
    assert more.endswith("--resume rounds=8 noise.rounds=4")
    tree = result.experiment.model_copy(update={"noise": TreeGaussian(epsilon=4.0, delta=1e-3)})
    more = run_display.next_commands(replace(result, experiment=tree))[-1]
    assert (
        f"model.init={shlex.quote(str(result.out))} --out DIR" in more
    )  # its noise is for these rounds
    other = replace(result, summary={**result.summary, "status": "stopped"})
    out = shlex.quote(str(result.out))
    assert run_display.next_commands(other)[-1].endswith(f"raydpfl run {out} --resume")
    other = replace(result, summary={**result.summary, "reason": "evaluate.stop: ..."})
    assert "resume" not in "".join(run_display.next_commands(other))


def guarantee(**changes):
    given = {"kind": "rigorous", "accountant": "pld", "unit": "client", "epsilon": 1.5}
    given |= {"relation": "replace_one", "observer": Observer.AGGREGATES, "delta": 1e-5}
    return Guarantee(**{**given, "sampling": Scope("full"), **changes})


def test_a_number_that_nothing_proves_is_signed_and_none_is_a_dash():
    unproven = guarantee(kind="unproven", accountant="rdp")
    nothing = guarantee(accountant="mine:Own", epsilon=float("inf"), conditions_failed=("x",))
    printed = [run_display.epsilon(each) for each in (guarantee(), unproven, nothing)]
    assert printed == ["1.5", "1.5?", "-"]
    notes = run_display.notes([unproven, nothing], [])
    assert "? rdp, not proved." in notes
    assert "mine:Own, rigorous. Conditions that fail: x." in notes


def test_the_sampling_stands_once_and_the_zcdp_of_each_observer_by_name():
    updates = guarantee(observer=Observer.UPDATES, rho=50.0)
    notes = run_display.notes([], [guarantee(rho=2.0), updates])
    assert [line.partition(": ")[0] for line in notes[1:]] == [
        "Sampling",
        "Against an observer of every aggregate",
        "Against an observer of every single update",
    ]


def test_other_relations_have_rows_of_their_own_and_papers_join_the_first():
    removed = guarantee(relation="add_remove")
    paper = guarantee(kind="paper", relation="unstated", accountant="paper")
    rows = guarantee_table.by_observer([(each, "1") for each in (guarantee(), removed, paper)])
    assert [row.relation for row in rows] == ["replace_one", "add_remove"]
    assert [len(row.cells) for row in rows] == [2, 1]


def test_helps_are_wrapped_at_words_and_by_nothing_else(monkeypatch, typed):
    monkeypatch.setenv("COLUMNS", "80")
    text = typed("--help")[1]
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())
    assert "whether each of it can be, and how long it takes." in joined
    lines = [line.strip("\N{BOX DRAWINGS LIGHT VERTICAL} ") for line in text.splitlines()]
    show = next(place for place, line in enumerate(lines) if line.startswith("show "))
    assert len(lines[show + 1]) > 50  # not where a docstring's line ends


def test_an_interrupt_says_how_to_go_on_with_what_there_is(tmp_path):
    with pytest.raises(KeyboardInterrupt), exit_codes.resumable(tmp_path / "out"):
        raise KeyboardInterrupt
    said = "interrupted before its first round was done; nothing is left of it"
    assert exit_codes.interrupt_message() == said
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    go_on = f"go on with: raydpfl run {tmp_path / 'out'} --resume"
    assert exit_codes.interrupt_message("it failed") == f"interrupted (it failed); {go_on}"
    with exit_codes.resumable(None, "reproduce"):
        pass
    assert exit_codes.interrupt_message() == "interrupted"
