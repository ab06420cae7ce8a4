"""What is said of a config, a sweep or a study before any of it is run."""

import pytest
import yaml
from conftest import SMALL, experiment, refusal

from raydpfl import Experiment
from raydpfl.cli.preview import preview
from raydpfl.sweep import Sweep, estimate, trials

STUDY = {
    "study": {"id": "rates", "title": "Two methods", "seeds": 2},
    **SMALL,
    "arms": {"Clip": {}, "Normalise": {"bounding": {"kind": "normalize", "bound": 1.0}}},
}

NONE = estimate.Estimate(None, 1, 0)


@pytest.fixture
def shown(tmp_path, monkeypatch, typed):
    """What `raydpfl show` prints of a tree."""
    monkeypatch.chdir(tmp_path)

    def show(tree, *arguments):
        (tmp_path / "asked.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        code, out, _ = typed("show", "asked.yaml", *arguments)
        assert code == 0
        return out

    return show


def remarks(text):
    return [line.removeprefix("# ") for line in text.splitlines() if line.startswith("#")]


SEARCHED = {
    "a grid": [{"local": {"grid": [0.1, 0.2]}}, {"repeats": 3}, "6 runs"],
    "stopped early": [
        {"bounding": {"powers_of_two": [-1, 1]}},
        {"scheduler": "asha", "grace": 2},
        "3 runs",
    ],
    "drawn": [{"local": {"loguniform": [0.01, 1.0]}}, {"search": "random", "samples": 4}, "4 runs"],
    "proposed": [{"local": {"uniform": [0.1, 1.0]}}, {"search": "optuna", "samples": 5}, "5 runs"],
}
FIELDS = {"local": "lr", "bounding": "bound"}


@pytest.mark.parametrize("name", SEARCHED)
def test_a_sweep_is_shown_complete_and_is_that_sweep(name, shown):
    (spaces, search, runs) = SEARCHED[name]
    tree = {**SMALL, "sweep": search}
    for section, space in spaces.items():
        tree[section] = {**SMALL[section], FIELDS[section]: space}
    text = shown(tree)
    sweep = Sweep.from_dict(tree)
    again = Sweep.from_dict(yaml.safe_load(text))
    assert again.differs(sweep) is None and again.spaces == sweep.spaces
    if search.get("search") != "optuna":
        assert [*again.setting_values()] == [*sweep.setting_values()]
    written = yaml.safe_load(text)
    assert written["local"]["momentum"] == 0.0 and "timeout" in written["sweep"]  # defaults
    said = remarks(text)
    assert said[0].endswith(f"{runs} of 4 rounds.")
    for line in map(trials.override_text, sweep.probe_values()):
        assert f"  {line}" in said
    assert "All of them make an experiment." in said


def test_whole_sections_and_kinds_that_are_searched_stand_as_they_were_given(shown):
    servers = {"grid": [{"kind": "sgd"}, {"kind": "adam", "lr": 0.01}]}
    bounding = {"kind": {"grid": ["clip", "normalize"]}, "bound": 0.5}
    tree = {**SMALL, "server": servers, "bounding": bounding}
    written = yaml.safe_load(shown(tree))
    assert written["server"] == servers and written["bounding"] == bounding
    assert Sweep.from_dict(written).size == 4


def test_every_setting_that_cannot_be_run_is_named_with_its_reason(tmp_path, typed):
    tree = {**SMALL, "selection": {"kind": "uniform", "cohort": {"grid": [20, 51, 0, 10]}}}
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(tree))
    text = preview(str(tmp_path / "asked.yaml")).text
    said = remarks(text)
    least = "a number greater than or equal to 1"
    most = "at most the population of 50 clients"
    assert f"  selection.cohort=0  cannot be run: selection.cohort = 0: expected {least}" in said
    assert f"  selection.cohort=51  cannot be run: selection.cohort = 51: expected {most}" in said
    assert "  selection.cohort=20" in said and "  selection.cohort=10" in said
    assert "2 of these 4 cannot be run." in said
    ended = typed("show", tmp_path / "asked.yaml")
    assert ended == (2, text, f"raydpfl: selection.cohort = 51: expected {most}\n")


def test_what_is_no_sweep_whatever_its_settings_is_refused_in_one_line(small, complain):
    cases = {
        "sweep.search=tpe": "sweep.search = 'tpe': expected 'grid'",
        "local.lr={uniform: [0.1, 1]}": "local.lr = {'uniform': [0.1, 1]}: expected a grid, choice",
        "local.lr={grid: [1, 1.0]}": "local.lr = {'grid': [1, 1.0]}: expected values that differ",
    }
    for override, line in cases.items():
        assert complain(["show", small, override]).startswith(line)


def test_only_data_show_that_a_setting_cannot_be_dealt(shown):
    """200 shards a client are more than the data have; that is looked at when it is asked for."""
    shards = {"kind": "shards", "per_client": {"grid": [5, 200]}}
    tree = {**SMALL, "data": {**SMALL["data"], "partition": shards}}
    assert "All of them make an experiment." in remarks(shown(tree))
    found = preview("asked.yaml", timing=True)
    assert found.refused.field == "data.clients"
    assert "1 of these 2 cannot be run." in remarks(found.text)


def marked(text):
    """The dotted keys that are marked, of a text and of a flat list of its sections."""
    found = set()
    section = ""
    for line in text.splitlines():
        if not line.startswith((" ", "-", "#")):
            section = ""
        key = section + line.partition(":")[0].strip()
        if line.rstrip().endswith(":") and not line.startswith(" "):
            section = f"{key}."
        if line.endswith("# default"):
            found.add(key)
    return found


def test_every_key_that_is_at_its_default_is_marked_and_the_marks_are_in_one_column(shown):
    local = {"kind": "sgd", "lr": 0.1, "momentum": 0.5}
    text = shown({**SMALL, "local": local})
    found = marked(text)
    assert found >= {"local.kind", "local.lr", "local.steps", "weights.kind", "noise.placement"}
    assert not found & {"seed", "local.momentum", "bounding.kind", "noise.multiplier", "track"}
    assert len({line.index("# default") for line in text.splitlines() if "# default" in line}) == 1
    assert max(map(len, text.splitlines())) <= 80
    assert Experiment.from_dict(yaml.safe_load(text)).local.momentum == 0.5
    bare = "".join(f"{line.partition('  # default')[0].rstrip()}\n" for line in text.splitlines())
    assert bare == experiment(local=local).to_yaml()
    assert "track" in marked(shown({key: SMALL[key] for key in SMALL if key != "track"}))


def test_what_a_sweep_searches_is_not_at_its_default_and_the_rest_is(shown):
    servers = {"grid": [{"kind": "sgd"}, {"kind": "adam", "lr": 0.01}]}
    text = shown({**SMALL, "server": servers, "local": {"kind": "sgd", "lr": {"grid": [0.1, 1]}}})
    found = marked(text)
    assert {"local.momentum", "sweep.repeats"} <= found
    assert not any(key.startswith("server") or key.startswith("local.lr:") for key in found)
    assert "local.lr" not in found


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_sweep_is_timed_where_that_is_asked_for(shown, tmp_path):
    tree = {**SMALL, "local": {**SMALL["local"], "lr": {"grid": [0.1, 0.2]}}}
    untimed = "How long that takes is not timed here yet (0 of 1 kinds of runs are); --timed says"
    assert remarks(shown(tree))[-1].startswith(untimed)
    said = remarks(shown(tree, "--timed"))
    assert said[-2] == "All of them can be run."
    assert said[-1].startswith("That takes about ") and said[-1].endswith(" s here.")
    assert remarks(shown(tree))[-1] == said[-1]  # what was timed is known
    stopped = remarks(shown(tree, "sweep={scheduler: asha, grace: 2}"))
    assert stopped[-1].startswith("That takes at most about ")
    assert not list(tmp_path.glob("runs*"))


def test_what_runs_take_is_counted_by_their_rounds(monkeypatch):
    monkeypatch.setattr(estimate, "_timing", lambda name: (0.4, 0.01))
    monkeypatch.setattr(estimate, "cores", lambda: 4)
    runs = [(experiment(seed=seed), 2) for seed in range(10)]
    found = estimate.estimate([*runs, *runs])  # each counted once
    assert found.seconds == pytest.approx(20 * (0.5 + 4 * 0.01) / 4)
    assert (found.kinds, found.timed) == (1, 1)
    alone = estimate.estimate([(experiment(), 1)])
    assert alone.seconds == pytest.approx(0.54)  # a single run has a single core


@pytest.mark.parametrize(
    ("search", "rounds"),
    [({"search": "random", "samples": 3}, 12), ({"search": "optuna", "samples": 6}, 24)],
)
def test_a_search_takes_what_all_of_its_settings_take(search, rounds, shown, monkeypatch):
    """Of Optuna, which decides later, the mean of what it may propose."""
    counted = []
    monkeypatch.setattr("raydpfl.cli.preview.estimate", lambda runs: counted.extend(runs) or NONE)
    shown({**SMALL, "rounds": {"grid": [1, 4, 7]}, "sweep": search})
    assert sum(run.rounds * count for run, count in counted) == rounds


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_an_experiment_is_shown_with_what_it_takes(shown):
    text = shown(SMALL, "--timed")
    assert Experiment.from_dict(yaml.safe_load(text)) == experiment()
    assert remarks(text)[0].startswith("That takes about ")
    assert remarks(shown(SMALL)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
def test_a_study_is_shown_with_its_cells(shown):
    text = shown(STUDY)
    assert yaml.safe_load(text)["arms"] == STUDY["arms"]
    said = remarks(text)
    assert said[0].startswith("at scale small: 2 cells, 4 final runs over 2 seeds; not timed")
    assert [line.partition(";")[0] for line in said[1:]] == ["Clip", "Normalise"]
    assert "; about " in remarks(shown(STUDY, "--timed"))[0]
    with refusal("none for a study"):
        preview("asked.yaml", ["rounds=3"])
    with refusal("study = 'nowhere': expected the file of a study, or one of"):
        preview("nowhere")
    first = preview("002/fig1").text
    assert yaml.safe_load(first)["study"]["id"] == "002/fig1"


@pytest.mark.slow
def test_a_study_is_found_by_every_name_though_folders_have_it_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "000" / "table1").mkdir(parents=True)  # its tables, say
    for name, found in (("000/claim2.1", "000/claims"), ("000/table1", "000/table1")):
        assert yaml.safe_load(preview(name).text)["study"]["id"] == found
    for name in ("nowhere.yaml", "000"):
        with refusal():
            preview(name)


OWN = """
from pathlib import Path
from raydpfl.methods.bounding import Clip
Path(__file__).with_name("imported").touch()
class Own(Clip):
    pass
"""
TUNED = {"bounding": {"kind": "own_clip:Own", "bound": {"tune": [0.5, 1.0]}}}
GRID = {"bounding": {"kind": "own_clip:Own", "bound": {"grid": [0.5, 1.0]}}}


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("tree", "timed"),
    [({**STUDY, "arms": {"Mine": TUNED}}, "; about "), (SMALL | GRID, "All of them can be run.")],
    ids=["a study", "a sweep"],
)
def test_own_members_are_not_imported_unless_they_are_timed(
    tree, timed, shown, own_module, tmp_path
):
    own_module("own_clip", OWN)
    said = remarks(shown(tree))
    assert said[0] == "bounding: own_clip:Own was not imported, so its own defaults are not here."
    assert not (tmp_path / "imported").exists()
    assert timed in "".join(remarks(shown(tree, "--timed")))
    assert (tmp_path / "imported").exists()


def test_the_directory_of_a_sweep_is_shown_as_its_file_is(tmp_path):
    tree = {**SMALL, "sweep": {"repeats": 2}}
    (tmp_path / "sweep.yaml").write_text(Sweep.from_dict(tree).to_yaml())
    said = remarks(preview(str(tmp_path)).text)
    assert said[0] == "1 setting of the seed alone, each with 2 seeds: 2 runs of 4 rounds."
