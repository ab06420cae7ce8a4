"""What lies in a sweep's directory is checked before it is believed, and all of it counts."""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from conftest import experiment
from test_sweep import printed, settings_of, tree

from raydpfl import run as run_one
from raydpfl.cli.search_display import settings_table
from raydpfl.errors import ConfigError, FileError
from raydpfl.methods.bounding import Bounding
from raydpfl.sweep import Sweep, results, run, runner, search_runner, trials
from raydpfl.sweep.runner import SweepRunner
from raydpfl.sweep.spaces import parse
from raydpfl.sweep.timeouts import Timeouts

pytestmark = pytest.mark.slow

RATES = {"grid": [0.1, 1]}
KEPT = {"rounds": 2, "evaluate": {"every": 1}, "sweep": {"repeats": 2}}
AWAY = "within trials/, where it still counts, to train the trial again)"


def config(path: Path, rates: dict = RATES, **sections) -> Path:
    path.write_text(yaml.safe_dump(tree(local={"lr": rates}, **{**KEPT, **sections})))
    return path


def sweep_of(rates: dict = RATES, **sections) -> Sweep:
    return Sweep.from_dict(tree(local={"lr": rates}, **{**KEPT, **sections}))


@pytest.fixture(scope="module")
def finished(shared_ray, tmp_path_factory) -> Path:
    """Two learning rates with two seeds each, all completed and private."""
    out = tmp_path_factory.mktemp("finished") / "out"
    assert run(sweep_of(), out).problem is None
    return out


@pytest.fixture
def out(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


def of(out: Path, rate: float, seed: int) -> Path:
    """The directory of a trial, by what its config says."""
    for path in (out / "trials").glob("*/config.yaml"):
        stored = yaml.safe_load(path.read_text())
        if (stored["local"]["lr"], stored["seed"]) == (rate, seed):
            return path.parent
    raise AssertionError(f"no trial has lr {rate} and seed {seed}")


# --- among how many runs a choice was made ---


def test_a_resume_with_fewer_values_and_seeds_counts_all_that_was_trained(out, tmp_path, typed):
    given = config(tmp_path / "fewer.yaml", {"grid": [0.1]}, sweep={"repeats": 1})
    code, said, _ = typed("sweep", given, "--out", out, "--resume")
    assert code == 0
    assert "best of 1 setting was chosen by the test accuracy of 1 run on one test set" in said
    assert "4 runs were trained in this directory" in said
    for text in (said, (out / "best.yaml").read_text()):
        assert "Choosing among 4 private runs is itself a query" in text
    assert json.loads((out / "summary.json").read_text())["trained"] == {"runs": 4, "private": 4}


def test_other_values_count_beside_the_former_ones(out):
    again = run(sweep_of({"grid": [0.2]}, sweep={"repeats": 1}), out, resume=True)
    assert again.summary["trained"] == {"runs": 5, "private": 5} and again.summary["settings"] == 1
    assert "Choosing among 5 private runs" in again.summary["choice"]


LEDGER = '{"round": 0, "epsilon": {}}\n'


def write(**files: str | None):
    """Writes files into a directory, by name with `_` for a dot; None: makes a directory there."""

    def make(place: Path) -> None:
        for name, text in files.items():
            path = place / name.replace("_", ".")
            if text is None:
                path.mkdir()
            else:
                path.write_text(text)

    return make


def checkpoint(rounds: int, **files: str):
    def make(place: Path) -> None:
        (place / "checkpoints").mkdir()
        (place / "checkpoints" / f"round-{rounds:08d}.npz").touch()
        write(**files)(place)

    return make


# What a directory under trials/ holds, and whether it counts as a private run (None: it was not
# trained).
TRAINED = {
    "a round in the ledger, and nothing else": (write(ledger_jsonl=LEDGER), True),
    "a torn first line": (write(ledger_jsonl='{"rou'), True),
    "no round begun": (write(ledger_jsonl=""), None),
    "a config alone": (write(), None),
    "a run without noise": (checkpoint(4, config_yaml="noise: {kind: none}\n"), False),
    "no config and no ledger": (write(rounds_parquet=""), True),
    "a broken config": (write(config_yaml="[", summary_json=""), True),
    "a config that is a list": (checkpoint(9, config_yaml="[1]"), True),
    "a snapshot of the start": (checkpoint(0), None),
    "a run that failed in its first round": (
        write(summary_json='{"rounds": 0, "status": "failed"}'),
        True,
    ),
    "a run that ended before its first round": (write(summary_json='{"rounds": 0}'), None),
    "a ledger that is a directory": (write(ledger_jsonl=None), True),
}


@pytest.mark.parametrize("case", TRAINED)
def test_whatever_was_trained_counts_under_any_name(case, tmp_path):
    make, private = TRAINED[case]
    name = "a copy [of] it"
    place = tmp_path / "trials" / name
    place.mkdir(parents=True)
    make(place)
    (tmp_path / "trials" / "notes.txt").touch()
    assert trials.trained_runs(tmp_path / "trials") == ({} if private is None else {name: private})


def test_a_trial_that_failed_before_its_first_round_has_shown_nothing(tmp_path):
    asked = sweep_of()
    settings = settings_of(asked, tmp_path)
    first, second = settings[0].trials
    first.status = second.status = "failed"
    first.folder.mkdir(parents=True)
    write(ledger_jsonl=LEDGER)(first.folder)
    every = [trial for setting in settings for trial in setting.trials]
    assert results.count_runs(every, tmp_path) == results.Runs(own=3, all=3, private=3)


# --- the tables ---


def test_the_tables_of_a_sweep_have_one_schema_whatever_has_run(finished, tmp_path):
    asked = sweep_of()
    waiting = settings_of(asked, tmp_path)
    for settings in ([], waiting):
        found = results.gather(tmp_path, settings, asked, False, {})
        SweepRunner(asked, tmp_path, lambda runner: None).write(found)
        for name in ("results.parquet", "settings.parquet"):
            schema = pq.read_schema(tmp_path / name)
            assert schema == pq.read_schema(finished / name)
            assert len(schema.names) == len({*schema.names}) and "epsilon_rdp" in schema.names
            assert str(schema.field("local.lr").type) == "double"


COLUMNS = {
    "an interval": ({"uniform": [0.1, 1]}, "double", 0.5, 0.5),
    "whole numbers": ({"grid": [1, 2]}, "int64", 1, 1),
    "whole numbers beyond 64 bits": ({"powers_of_two": [60, 70]}, "double", 2**70, 2.0**70),
    "numbers": ({"grid": [1, 0.5]}, "double", 1, 1.0),
    "truths": ({"choice": [True, False]}, "bool", True, True),
    "texts": ({"grid": ["clip", "none"]}, "string", "clip", "clip"),
    "values of several kinds": ({"grid": [1, "auto"]}, "string", 1, "1"),
    "sections": ({"grid": [{"kind": "sgd"}]}, "string", {"kind": "sgd"}, '{"kind": "sgd"}'),
    "nothing, or a number": ({"grid": [None, 2]}, "int64", None, None),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_a_searched_value_has_a_column_of_its_spaces_kind(case, tmp_path):
    space, kind, value, held = COLUMNS[case]
    search = {"search": "random", "samples": 1}
    asked = sweep_of(sweep=search)
    asked.spaces["local.lr"] = parse("local.lr", space)
    setting = asked.setting({"local.lr": 0.1})
    setting.values["local.lr"] = value
    for settings in ([], [setting]):
        column = results.gather(tmp_path, settings, asked, False, {}).settings["local.lr"]
        assert str(column.type) == kind and column.to_pylist() == [held] * len(settings)


# --- trials that fail ---

FAILING = {"bounding": {"kind": "none"}, "noise": {"kind": "none"}, "client": {"actors": "auto"}}


def test_failed_trials_are_told_first_and_leave_no_best_unless_asked_for(
    shared_ray, tmp_path, typed
):
    path = config(tmp_path / "failing.yaml", {"grid": [0.1]}, **FAILING)
    out = tmp_path / "out"
    assert typed("sweep", path, "--out", out)[0] == 0
    assert (out / "best.yaml").exists()

    more = [path, "local.lr={grid: [0.1, 1.0e+30]}", "--out", out, "--resume"]
    code, said, last = typed("sweep", *more)
    lines = [line for line in said.splitlines() if not re.match(r"\d+/\d+ ", line)]
    assert code == 1 and lines[0] == "Failed: 2 of 4 trials"
    for seed, line in zip((3, 4), lines[1:3], strict=True):
        assert line.split()[:2] == ["local.lr=1e+30", f"seed={seed}"]
        assert "diverged" in line and "trials/" in line
    assert "Best:" not in said and "No setting was chosen" in said
    assert not (out / "best.yaml").exists()
    assert last.startswith("raydpfl: 2 of 4 trials failed, and no best setting was chosen")
    assert last.count("\n") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "failed" and "best" not in summary and summary["reason"] in last
    assert len(summary["failed"]) == 2
    for failed in summary["failed"]:
        assert failed["directory"].startswith("trials/") and "diverged" in failed["reason"]

    code, said, last = typed("sweep", *more, "sweep.on_error=choose")
    assert code == 0, last
    assert "Failed: 2 of 4 trials" in said and "Best: local.lr=0.1" in said
    assert json.loads((out / "summary.json").read_text())["status"] == "completed"
    assert (out / "best.yaml").exists()


def test_a_trial_that_goes_on_keeps_what_its_first_try_has_settled(shared_ray, tmp_path):
    asked = sweep_of({"grid": [0.1]}, **FAILING, sweep={"repeats": 1, "cpus": 1})
    (setting,) = settings_of(asked, tmp_path)
    (trial,) = setting.trials
    client = trial.experiment.client.model_copy(update={"backend": "loop"})
    begun = trial.experiment.model_copy(update={"client": client})
    run_one(begun, trial.folder, on_rows=lambda rows: True)
    (trial.folder / "summary.json").unlink()
    (tmp_path / "sweep.yaml").write_text(asked.to_yaml())
    result = run(asked, tmp_path, resume=True)
    assert result.trials["status"].to_pylist() == ["completed"]
    stored = yaml.safe_load((trial.folder / "config.yaml").read_text())
    assert stored["client"]["backend"] == "loop" and trial.experiment.client.backend == "auto"


@pytest.mark.parametrize("kind", ["buffered_gaussian", "square_root_gaussian", "banded_gaussian"])
def test_a_trial_goes_on_with_what_its_noise_and_its_model_were_resolved_to(
    kind, tmp_path, monkeypatch
):
    """The matrix that is fitted to the run, and a path that the config has as a relative one."""
    monkeypatch.chdir(tmp_path)
    run_one(experiment(rounds=1), "first")
    full = {"kind": "full"}
    bands = {"bands": 1} if kind == "banded_gaussian" else {}
    noise = {"kind": kind, "multiplier": 1.0, "delta": 1e-5, **bands}
    init = {"init": "first"}
    whole = experiment(selection=full, noise=noise, model=init, rounds=2)
    folder = tmp_path / "sweep" / "trials" / "one"
    run_one(whole, folder)
    trials.check(folder, whole, (), "trial one")
    other = experiment(selection=full, noise={**noise, "multiplier": 2.0}, model=init, rounds=2)
    with pytest.raises(ConfigError, match="multiplier"):
        trials.check(folder, other, (), "trial one")


def test_what_a_killed_sweep_left_and_removes_itself_stands_in_nobodys_way(tmp_path, monkeypatch):
    (tmp_path / ".tune-1").mkdir()
    (tmp_path / ".tune-1" / "state").touch()
    monkeypatch.setattr("os.rmdir", lambda *args, **more: os.listdir("/nowhere"))  # written to
    SweepRunner(sweep_of(), tmp_path, lambda runner: None).tidy()
    assert not (tmp_path / ".tune-1" / "state").exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_sweep_does_not_go_on_in_a_folder_that_another_took_meanwhile(tmp_path, resume):
    first, second = (
        SweepRunner(asked, tmp_path / "out", lambda runner: None)
        for asked in (sweep_of(), sweep_of(rounds=3))
    )
    for asked in (first, second):
        asked.check_directory(resume)
    with first.started(resume):
        pass
    said = "to be resumed" if resume else "a new or empty directory"
    with pytest.raises(ConfigError, match=said), second.started(resume):
        pass


def full(path, write):
    raise FileError(f"{path.name} cannot be written (No space left on device)")


def test_results_that_cannot_be_written_are_none(out, monkeypatch, typed):
    finish = SweepRunner.finish

    def finish_full(self, processes):
        monkeypatch.setattr(search_runner, "replace_file", full)
        monkeypatch.setattr(runner, "replace_file", full)
        return finish(self, processes)

    monkeypatch.setattr(SweepRunner, "finish", finish_full)
    code, said, last = typed("sweep", out, "--resume")
    assert code == 1 and "Best:" not in said and not (out / "best.yaml").exists()
    what = "best.yaml cannot be written (No space left on device)"
    assert f"the results could not be written ({what}); go on" in last
    assert last.count("\n") == 1 and not (out / "summary.json").exists()


def test_a_disk_that_is_full_at_the_start_is_said_in_one_line(out, monkeypatch, complain):
    monkeypatch.setattr(search_runner, "replace_file", full)
    what = "sweep.yaml cannot be written (No space left on device)"
    said = complain(["sweep", str(out), "--resume"])
    assert said.endswith(f": expected a directory that can be written to ({what})")


# --- a trial is what its config says ---


@pytest.mark.parametrize(
    ("rate", "seed", "differs"),
    [(1.0, 3, "local.lr is 1.0, not 0.1"), (0.1, 4, "seed is 4, not 3")],
)
def test_a_trial_copied_over_another_is_not_taken_for_it(rate, seed, differs, out, complain):
    a = of(out, 0.1, 3)
    b = of(out, rate, seed)
    shutil.rmtree(a)
    shutil.copytree(b, a)
    said = complain(["sweep", str(out), "--resume"])
    assert said == (
        f"--resume = 'trials/{a.name}/config.yaml': expected the config of local.lr=0.1 seed=3; "
        f"its {differs} (rename {a.name} {AWAY}"
    )


def test_a_trial_renamed_as_it_says_is_trained_again_and_counts(out, typed):
    place = of(out, 0.1, 3)
    (place / "config.yaml").write_text("")
    place.rename(place.with_name("broken"))
    code, said, _ = typed("sweep", out, "--resume")
    assert code == 0 and "Choosing among 5 private runs" in said


@pytest.mark.parametrize(("before", "least"), [(1000.0, 1000.0), (math.nan, 0.0)])
def test_the_seconds_of_a_resumed_sweep_are_those_of_all_its_starts(before, least, out, typed):
    shutil.rmtree(of(out, 0.1, 3))
    summary = json.loads((out / "summary.json").read_text())
    (out / "summary.json").write_text(json.dumps({**summary, "seconds": before}))
    assert typed("sweep", out, "--resume")[0] == 0
    seconds = json.loads((out / "summary.json").read_text())["seconds"]
    assert math.isfinite(seconds) and seconds > least
    assert typed("sweep", out, "--resume")[0] == 0  # nothing is left to run
    assert json.loads((out / "summary.json").read_text())["seconds"] == seconds


def test_the_summary_of_another_trial_is_set_aside_and_made_again(out, caplog, typed):
    before = pq.read_table(out / "results.parquet").drop_columns(["seconds"])
    shutil.copy(of(out, 1.0, 3) / "summary.json", (a := of(out, 0.1, 3)) / "summary.json")
    assert typed("sweep", out, "--resume")[0] == 0
    assert f"{a.name}/summary.json is set aside (its test_accuracy is" in caplog.text
    assert pq.read_table(out / "results.parquet").drop_columns(["seconds"]).equals(before)


@pytest.mark.parametrize("torn", ["{}", "[]", "", '{"status": "done"}', "[" * 100_000])
def test_a_summary_that_is_none_is_set_aside_and_the_trial_goes_on(torn, out, caplog, typed):
    place = of(out, 0.1, 3)
    before = json.loads((place / "summary.json").read_text())["model_sha256"]
    (place / "summary.json").write_text(torn)
    assert typed("sweep", out, "--resume")[0] == 0
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{place.name}/summary.json is set aside (")
    assert json.loads((place / "summary.json").read_text())["model_sha256"] == before


def test_what_means_the_same_is_the_same_trial(out):
    asked = tree(**{**KEPT, "sweep": {"repeats": 2, "search": "grid", "metric": "test_accuracy"}})
    asked["server"] = {"kind": "momentum", "lr": 1}
    asked["local"] |= {"lr": {"choice": [1.0, 0.1]}, "momentum": 0}
    asked["client"].update(actors="auto", on_error="fail")
    again = run(Sweep.from_dict(asked), out, resume=True)
    assert again.summary["processes"] == 0 and again.summary["trained"]["runs"] == 4
    assert again.trials["status"].to_pylist() == ["completed"] * 4


@pytest.mark.parametrize(
    "change",
    [
        "rounds=3",
        "local.momentum=0.5",
        "sweep.metric=test_loss",
        "local.lr=0.1",
        "bounding.bound={grid: [1, 2]}",
    ],
)
def test_another_sweep_is_refused(change, out, tmp_path, complain):
    given = config(tmp_path / "other.yaml")
    said = complain(["sweep", str(given), change, "--out", str(out), "--resume"])
    assert said.startswith(change.partition("=")[0]) and "as in the sweep to be resumed" in said


# --- one line for what stands in the way ---


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def directory(path: Path) -> None:
    """An empty one in the place of a file."""
    path.unlink(missing_ok=True)
    path.mkdir()


def instead_of(path: Path, text: str = "") -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    path.write_text(text)


def trial_config(text: str):
    return lambda out: (of(out, 0.1, 3) / "config.yaml").write_text(text)


def sweep_yaml(text: str):
    return lambda out: (out / "sweep.yaml").write_text(text)


# What is done to the finished sweep, and what the one line has in it.
BROKEN = {
    "sweep.yaml is a list": (sweep_yaml("- 1\n"), "the sweep.yaml of a sweep; it is a list"),
    "sweep.yaml is null": (sweep_yaml("null\n...\n"), "the sweep.yaml of a sweep; it is empty"),
    "sweep.yaml lacks its end": (
        lambda out: (out / "sweep.yaml").write_text((out / "sweep.yaml").read_text()[:-4]),
        "it is cut",
    ),
    "sweep.yaml has a field that is no more": (
        sweep_yaml("local: {kind: sgd, pace: 1}\nsweep: {repeats: 2}\n...\n"),
        "local.pace = 1: expected one of the keys",
    ),
    "trials leads nowhere": (
        lambda out: (shutil.rmtree(out / "trials"), (out / "trials").symlink_to("gone")),
        "trials/ is a directory; it is a file",
    ),
    "a trial's config is empty": (trial_config(""), "seed=3; it is empty"),
    "a trial's config is a sweep's": (
        lambda out: shutil.copy(out / "sweep.yaml", of(out, 0.1, 3) / "config.yaml"),
        "expected none in the config of one run",
    ),
    "a trial's config has a field that is no more": (
        trial_config("local: {kind: sgd, batches: 10}\n"),
        "local.batches = 10: expected one of the keys",
    ),
    "a trial's config is missing": (
        lambda out: (of(out, 0.1, 3) / "config.yaml").unlink(),
        "it has ledger.jsonl but no config.yaml",
    ),
    "a trial has other code": (
        lambda out: ((code := of(out, 0.1, 3) / "code").mkdir(), (code / "a.py").touch()),
        "seed=3; its code of a is not that of this process",
    ),
    "a trial is a file": (
        lambda out: instead_of(of(out, 0.1, 3)),
        "the directory of local.lr=0.1 seed=3; it is no directory",
    ),
    "a trial leads nowhere": (
        lambda out: (shutil.move(place := of(out, 0.1, 3), out / "away"), place.symlink_to("gone")),
        "it is no directory",
    ),
}


def times_of(folder: Path) -> list:
    paths = folder.rglob("*")
    return sorted((str(path), path.is_file() and path.stat().st_mtime_ns) for path in paths)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_directory_is_refused_in_one_line_and_left_as_it_is(case, out, tmp_path, complain):
    spoil, expected = BROKEN[case]
    spoil(out)
    before = times_of(out)
    for given in ([str(out)], [str(config(tmp_path / "same.yaml")), "--out", str(out)]):
        said = complain(["sweep", *given, "--resume"])
        assert re.search(expected, said), said
    assert times_of(out) == before


TABLES = ("results.parquet", "settings.parquet", "summary.json", "best.yaml")
# What a resume goes on beside: it is made again, or is nobody's concern.
HARMLESS = {
    "tables that are cut": lambda out: [cut(out / name) for name in TABLES],
    "a summary of the sweep that is a list": lambda out: (out / "summary.json").write_text("[]"),
    "directories where files should be": lambda out: [directory(out / name) for name in TABLES],
    "no tables": lambda out: [(out / name).unlink() for name in TABLES],
    "what a kill left": lambda out: ((out / ".tune-x").mkdir(), (out / ".best.yaml.1").touch()),
    "a rounds table that is cut": lambda out: cut(of(out, 0.1, 3) / "rounds.parquet"),
    "a rounds table that is a directory": lambda out: directory(of(out, 0.1, 3) / "rounds.parquet"),
    "a directory of something else": lambda out: (out / "trials" / "my [notes] \n here").mkdir(),
    "a file among the trials": lambda out: (out / "trials" / "notes").write_text("x"),
}


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_made_again_stands_in_nobodys_way(case, out, typed):
    expected = pq.read_table(out / "results.parquet")
    HARMLESS[case](out)
    code, said, _ = typed("sweep", out, "--resume")
    assert code == 0 and "Choosing among 4 private runs" in said
    assert pq.read_table(out / "results.parquet").equals(expected) and (out / "best.yaml").exists()


def test_values_with_brackets_are_shown_as_they_are(out):
    asked = sweep_of()
    settings = settings_of(asked, out)
    for setting in settings:
        setting.values["local.lr"] = "[/b] [red]x"
    assert "".join(printed(settings_table(settings, asked))).count("[/b] [red]x") == 2


# --- trials that hang ---


class Sleepy(Bounding):
    """A member that never comes back."""

    bound: float = 1.0

    def factor(self, norm: float, bound: float) -> float:
        time.sleep(100_000)


HANGING = {
    "in its own process": ({"bounding": {"kind": "test_sweep_folder:Sleepy"}}, 1),
    "in its client actors": ({**FAILING, "rounds": 100_000, "client": {"actors": 1}}, 5),
}


@pytest.mark.parametrize("case", HANGING)
def test_a_trial_that_hangs_is_killed_and_the_next_one_has_its_place(case, shared_ray, tmp_path):
    sections, seconds = HANGING[case]
    search = {"concurrent": 1, "timeout": seconds, "repeats": 2}
    result = run(sweep_of({"grid": [0.1]}, **sections, sweep=search), tmp_path / "out")
    for reason in result.trials["reason"].to_pylist():
        assert re.fullmatch(rf"not done after \d+ s, where sweep.timeout is {seconds}", reason)
    assert result.trials["status"].to_pylist() == ["failed"] * 2 and result.best is None
    assert result.problem.startswith("2 of 2 trials failed")


def limits(*times: float, timeout: float | None = None) -> Timeouts:
    return Timeouts(timeout, clock=iter(times).__next__)


def trial_of(folder: Path, **sections) -> trials.Trial:
    return trials.Trial("", experiment(**sections), folder)


def reasons(held: Timeouts) -> list[str]:
    return [reason for _, reason in held.overdue_trials()]


def test_a_trial_has_ten_times_as_long_as_the_longest(tmp_path):
    held = limits(0, 30, 60, 450, 461, 900, 901, 902)
    first, second = trial_of(tmp_path), trial_of(tmp_path, seed=9, local={"lr": 0.5})
    held.begin(first)
    first.status = "completed"
    held.end(first)  # 30 s
    held.add(40.0)
    held.begin(second)
    assert not reasons(held)  # after 390 s
    assert reasons(held) == ["no round in 401 s, where the longest of the others took 40 s in all"]
    (tmp_path / "ledger.jsonl").touch()
    assert not reasons(held)  # it goes on
    held.end(second)
    assert not reasons(held)


def test_short_trials_hold_nobody_to_less_than_the_least(tmp_path):
    held = limits(0, 300, 301)
    held.add(2.0)
    held.begin(trial_of(tmp_path))
    assert not reasons(held) and len(reasons(held)) == 1


def test_nothing_is_known_before_a_trial_has_finished_but_a_timeout_holds_for_all(tmp_path):
    trial = trial_of(tmp_path)
    held = limits(0, 1e9)
    held.begin(trial)
    assert not reasons(held)
    held = limits(0, 10, 51, timeout=50)
    held.begin(trial)
    held.begin(trial)  # its process had died; its time goes on
    assert reasons(held) == ["not done after 51 s, where sweep.timeout is 50"]
