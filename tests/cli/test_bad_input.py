"""What cannot be run is refused before anything starts: exit code 2, one line, what is accepted."""

import functools

import pytest
import yaml
from conftest import SMALL, experiment, messages, refusal

from raydpfl import Experiment, run
from raydpfl.cli import experiment_reader
from raydpfl.config.yaml import dump, parse_yaml

# What is changed (overrides of the small experiment), and how the one line begins.
BAD = messages("configs")


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_in_one_line_and_nothing_is_started_or_written(
    bad, small, tmp_path, monkeypatch, complain
):
    overrides, line = BAD[bad]
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was started"))
    said = complain(["run", small, *overrides, "--out", tmp_path / "out"])
    assert said.startswith(line)
    assert [*tmp_path.iterdir()] == [small]


def test_a_section_whose_name_is_no_text_is_refused():
    with refusal(r"^True = 1: expected one of the sections seed, rounds, "):
        Experiment.from_dict({"rounds": 3, **parse_yaml("on: 1")})


def test_a_budget_in_letters_is_told_in_the_words_of_a_config():
    with refusal(r"^noise\.epsilon = 'abc': expected a valid number or a mapping$"):
        experiment(noise={"kind": "gaussian", "epsilon": "abc", "delta": 1e-5})


@pytest.mark.parametrize("command", ["run", "audit", "sweep"])
@pytest.mark.usefixtures("offline")
def test_data_that_are_not_there_leave_nothing_behind(
    command, small, tmp_path, tmp_path_factory, monkeypatch, complain
):
    monkeypatch.setenv("RAYDPFL_DATA", str(tmp_path / "data" / "root"))
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    data = ["data={kind: mnist, clients: 50}", *["sweep={repeats: 2}"] * (command == "sweep")]
    said = complain([command, small, *data, "--out", tmp_path / "out"])
    assert said.startswith(
        f"data.kind = 'mnist': expected a data set that is under {tmp_path}/data/root "
    )
    assert "and was not downloaded (" in said and said.endswith("no network)")
    assert [*tmp_path.iterdir()] == [small]


def test_a_chunk_that_no_memory_holds_ends_a_run_in_one_line(small, tmp_path, complain):
    overrides = ["noise={kind: none}", "client.actors=0", "client.chunk=1000000000000000"]
    said = complain(["run", small, *overrides, "--out", tmp_path / "out"], code=1)
    assert said.startswith("not enough memory: Unable to allocate 7.11 PiB")


def test_resuming_another_experiment(small, tmp_path, complain):
    run(experiment(rounds=2), tmp_path / "out")
    for change, refused in [
        ("local.lr=0.2", "local.lr = 0.2: expected 0.1, as in the run to be resumed"),
        ("rounds=1", "rounds = 1: expected 2 or more, as in the run to be resumed"),
    ]:
        given = ["run", small, "rounds=2", change, "--out", tmp_path / "out", "--resume"]
        assert complain(given) == refused


def test_an_address_where_nothing_answers(small, monkeypatch, complain):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    said = complain(["run", small, "client.actors=1", "--address", "127.0.0.1:1"])
    assert said.startswith(
        "--address = '127.0.0.1:1': expected the address of a running Ray cluster (if it "
        "asks for a token,"
    )


@pytest.mark.parametrize(("override", "message"), messages("overrides").items())
def test_what_is_said_names_what_to_give(override, message, small, tmp_path, complain):
    said = complain(["run", small, override, "--out", tmp_path / "out"])
    assert said.startswith(message)


WHOLE = {
    "rounds=1e1": ("rounds", 10),
    "seed=1E3": ("seed", 1000),
    "seed=1e19": ("seed", 10**19),
    "data.clients=1.5e2": ("data.clients", 150),
    "selection.cohort=+.1e2": ("selection.cohort", 10),
    "local.batch=5e0": ("local.batch", 5),
    "client.chunk=4e0": ("client.chunk", 4),
    "client.actors=2.0": ("client.actors", 2),
    "evaluate.every=1e0": ("evaluate.every", 1),
    "local.lr=1e-1": ("local.lr", 0.1),
    "privacy.accountants=pld": ("privacy.accountants", ("pld",)),
    "model={kind: mlp, hidden: 2e1}": ("model.hidden", (20,)),
}


@pytest.mark.parametrize("override", WHOLE)
def test_whole_numbers_may_be_written_with_an_exponent_and_one_accountant_without_a_list(override):
    path, expected = WHOLE[override]
    experiment = Experiment.from_dict(SMALL, [override])
    found = functools.reduce(getattr, path.split("."), experiment)
    assert found == expected and type(found) is type(expected)
    assert Experiment.from_dict(parse_yaml(experiment.to_yaml())) == experiment


def test_text_that_looks_like_a_number_is_read_back_as_text():
    tree = {"a": "1e1", "b": "1e-05", "c": 1e-05, "d": 10.0, "e": "-.5e+3", "f": "1e", "g": "e1"}
    assert parse_yaml(dump(tree)) == tree


@pytest.mark.slow
def test_options_that_count_take_an_exponent_too(typed, complain):
    words = ["budget", "--population", "2e3", "--cohort", "8e1", "--epsilon", "2"]
    found = [typed(*words, "--json", "--rounds", rounds) for rounds in ("1e1", "10")]
    assert found[0] == found[1] and found[0][0] == 0
    for wrong in ("1.5", "x", "1e400"):
        said = complain([*words, "--rounds", wrong])
        assert said == f"Invalid value for '--rounds': '{wrong}' is not a whole number"


# What is given to the wrong command is answered with the right one.

SPACE = {"kind": "sgd", "lr": {"grid": [0.1, 0.2]}}
PRIVATE = {"private": {"runs": "geometric", "mean": 3}}
ARMS = {"study": {"id": "rates", "title": "Two", "seeds": 2}, **SMALL, "arms": {"Clip": {}}}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a file and a directory of each kind."""
    monkeypatch.chdir(tmp_path)
    trees = {"experiment": SMALL, "sweep": {**SMALL, "local": SPACE}, "study": ARMS}
    (tmp_path / "private.yaml").write_text(yaml.safe_dump({**trees["sweep"], "sweep": PRIVATE}))
    for name, tree in trees.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree))
        (tmp_path / name).mkdir()
        file = "config.yaml" if name == "experiment" else f"{name}.yaml"
        (tmp_path / name / file).write_text(yaml.safe_dump(tree))
    return tmp_path


@pytest.mark.parametrize(("words", "said"), messages("commands"))
def test_another_command_is_named(words, said, place, complain):
    assert said in complain(words)


def test_what_is_of_the_right_kind_keeps_its_own_complaint(place, complain):
    wrong = "local.lr={grid: [0.1, -1]}"
    said = complain(["sweep", "experiment.yaml", wrong])
    assert said.startswith("local.lr = -1")
    said = complain(["run", "experiment.yaml", "rounds=0"])
    assert said.startswith("rounds = 0")


def test_every_command_that_takes_a_file_or_a_directory_is_known():
    every = {kind for _, kinds in experiment_reader.ACCEPTED_PATHS.values() for kind in kinds}
    assert every == experiment_reader.ADVICE.keys()
    assert set(experiment_reader.FILES.values()) <= every
