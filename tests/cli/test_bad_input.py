"""What cannot be run is refused before anything starts: exit code 2, and one line with field, value
and what is accepted.
"""

from __future__ import annotations

import functools

import pytest
import yaml
from conftest import SMALL, experiment

from raydpfl import Experiment
from raydpfl.config.yaml import dump, parse_yaml
from raydpfl.errors import ConfigError

# What is changed (overrides of the small experiment), and how the one line begins.
BAD = {
    "unknown section": (
        ["sever.kind=sgd"],
        "sever = {'kind': 'sgd'}: expected one of the sections seed, rounds, data,",
    ),
    "unknown key": (["local.lrr=0.1"], "local.lrr = 0.1: expected one of the keys"),
    "unknown key of a plain section": (
        ["client.actor=2"],
        "client.actor = 2: expected one of the keys actors,",
    ),
    "key of another member": (
        ["bounding.quantile=0.5"],
        "bounding.quantile = 0.5: expected one of the keys",
    ),
    "no number": (["local.lr=fast"], "local.lr = 'fast': expected a valid number"),
    "no whole number": (["rounds=2.5"], "rounds = 2.5: expected a valid integer"),
    "truth value for a number": (
        ["local.lr=yes"],
        "local.lr = True: expected a number, not a truth value",
    ),
    "truth value for a count": (
        ["rounds=true"],
        "rounds = True: expected a number, not a truth value",
    ),
    "truth value for a count of a plain section": (
        ["evaluate.every=on"],
        "evaluate.every = True: expected a number, not a truth value",
    ),
    "no rounds": (["rounds=0"], "rounds = 0: expected a number greater than or equal to 1"),
    "more rounds than can be": (
        ["rounds=1000000000000"],
        "rounds = 1000000000000: expected a number less than or equal to 1000000000",
    ),
    "more clients than can be": (
        ["data.clients=100000000000000000000"],
        "data.clients = 100000000000000000000: expected a number less than or equal to 1000000000",
    ),
    "more draws than can be": (
        ["selection={kind: multinomial, cohort: 1000000000000}"],
        "selection.cohort = 1000000000000: expected a number less than or equal to",
    ),
    "negative seed": (["seed=-1"], "seed = -1: expected a number greater than or equal to 0"),
    "seed too large": (
        ["seed=18446744073709551616"],
        "seed = 18446744073709551616: expected a number less than 18446744073709551616",
    ),
    "negative learning rate": (
        ["local.lr=-0.1"],
        "local.lr = -0.1: expected a number greater than 0",
    ),
    "infinite learning rate": (["server.lr=.inf"], "server.lr = inf: expected a finite number"),
    "no steps": (["local.steps=0"], "local.steps = 0: expected "),
    "no batch": (
        ["local.batch=0"],
        "local.batch = 0: expected a number greater than or equal to 1 or 'full'",
    ),
    "section that is no mapping": (["local=3"], "local = 3: expected a mapping with a kind"),
    "unknown kind": (
        ["bounding.kind=clp"],
        "bounding.kind = 'clp': expected one of none, clip, model_clip, normalize, "
        "smooth_normalize, "
        "quantile_clip, per_sample_clip, alpha_norm_ec, or the import path",
    ),
    "unknown server": (
        ["server.kind=adan"],
        "server.kind = 'adan': expected one of sgd, momentum, adam, yogi, adagrad, or",
    ),
    "unknown selection": (
        ["selection.kind=lottery"],
        "selection.kind = 'lottery': expected one of uniform, poisson, full",
    ),
    "unknown model": (
        ["model.kind=perceptron"],
        "model.kind = 'perceptron': expected one of softmax, mlp, cnn,",
    ),
    "section without a kind": (
        ["selection={cohort: 5}"],
        "selection = {'cohort': 5}: expected a section with its kind, one of uniform, "
        "poisson, full",
    ),
    "unknown data": (
        ["data.kind=imagenet"],
        "data.kind = 'imagenet': expected one of fashion_mnist_mini,",
    ),
    "unknown partition": (
        ["data.partition.kind=pie"],
        "data.partition.kind = 'pie': expected one of iid,",
    ),
    "module that is not there": (
        ["bounding.kind=nowhere.at_all:Member"],
        "bounding.kind = 'nowhere.at_all:Member': expected an import path "
        "package.module:Name that can be "
        "imported (ModuleNotFoundError",
    ),
    "name that is not there": (
        ["server.kind=raydpfl.methods.server:Nothing"],
        "server.kind = 'raydpfl.methods.server:Nothing': expected an import path "
        "package.module:Name that can be "
        "imported (AttributeError",
    ),
    "class of another family": (
        ["server.kind=raydpfl.methods.bounding:Clip"],
        "server.kind = 'raydpfl.methods.bounding:Clip': expected a subclass of "
        "raydpfl.methods.server.Server",
    ),
    "model that cannot be imported": (
        ["model.kind=nowhere:Net"],
        "model.kind = 'nowhere:Net': expected an import path package.module:Name that can "
        "be imported "
        "(ModuleNotFoundError",
    ),
    "cohort above the population": (
        ["selection.cohort=51"],
        "selection.cohort = 51: expected at most the population of 50 clients",
    ),
    "no cohort": (
        ["selection.cohort=0"],
        "selection.cohort = 0: expected a number greater than or equal to 1",
    ),
    "noise without a bound": (
        ["bounding.kind=none"],
        "noise.kind = 'gaussian': expected none without a bound; set bounding.kind to clip",
    ),
    "no bound": (
        ["bounding={kind: clip}"],
        "bounding.bound = None: expected a value, as it has no default",
    ),
    "models sent by a cohort of no fixed size": (
        [
            "bounding={kind: model_clip, bound: 1}",
            "selection={kind: poisson, cohort: 20}",
            "noise.placement=server",
        ],
        "selection.kind = 'poisson': expected one whose cohorts all have "
        "the size that the sum is divided by",
    ),
    "bound of nothing": (
        ["bounding.bound=0"],
        "bounding.bound = 0: expected a number greater than or equal to",
    ),
    "noise of two sizes": (
        ["noise.epsilon=1"],
        "noise = ['epsilon', 'multiplier']: expected exactly one of epsilon, multiplier and std",
    ),
    "noise of no size": (
        ["noise={kind: gaussian}"],
        "noise = None: expected exactly one of epsilon, multiplier and std",
    ),
    "epsilon of nothing": (
        ["noise={kind: gaussian, epsilon: 0}"],
        "noise.epsilon = 0: expected a number greater than 0",
    ),
    "negative epsilon": (
        ["noise={kind: gaussian, epsilon: -3}"],
        "noise.epsilon = -3: expected a number greater than 0",
    ),
    "epsilon that is no number": (
        ["noise={kind: gaussian, epsilon: .nan}"],
        "noise.epsilon = nan: expected a finite number",
    ),
    "delta of one": (["noise.delta=1"], "noise.delta = 1: expected a number less than 1"),
    "std with an adaptive bound": (
        ["bounding={kind: quantile_clip, bound: 1}", "noise={kind: gaussian, std: 1}"],
        "noise.std = 1.0: expected none with an adaptive bound, with which the noise moves",
    ),
    "epsilon without an accountant": (
        ["noise={kind: gaussian, epsilon: 3}", "privacy.accountants=[]"],
        "privacy.accountants = []: expected pld or rdp, to calibrate the noise",
    ),
    "unknown accountant": (
        ["privacy.accountants=[gdp]"],
        "privacy.accountants.0 = 'gdp': expected 'pld', 'rdp' or 'paper'",
    ),
    "budget without noise": (
        ["noise={kind: none}", "privacy.budget=2"],
        "privacy.budget = 2.0: expected none without noise and an accountant",
    ),
    "accountant that does not cover the mechanism": (
        ["privacy.relation=add_remove"],
        "privacy.relation = 'add_remove': expected replace_one with "
        "selection.kind uniform; add_remove needs",
    ),
    "noise that tells the size of a secret cohort": (
        ["selection={kind: poisson, cohort: 20}", "noise.placement=client"],
        "noise.placement = 'client': expected server or auto: noise drawn by",
    ),
    "more clients than samples": (["data.clients=9001"], "data.clients = 9001: expected "),
    "shards that the data cannot give": (
        ["data.partition={kind: shards, per_client: 200}"],
        "data.clients = 50: expected from 1 to 45 with 200 one-class shards each",
    ),
    "more classes than there are": (
        ["data.partition={kind: classes-per-client, k: 11}"],
        "data.partition.k = 11: expected ",
    ),
    "data that is not there": (
        ["data={kind: mnist, clients: 50}"],
        "data.kind = 'mnist': expected ",
    ),
    "table that is not there": (
        ["data={kind: table, clients: 50, train: nowhere.parquet}"],
        "data.train = 'nowhere.parquet': expected ",
    ),
    "negative actors": (
        ["client.actors=-1"],
        "client.actors = -1: expected a number of at least 0",
    ),
    "actors in words": (
        ["client.actors=many"],
        "client.actors = 'many': expected a valid integer or 'auto' or 'per-client'",
    ),
    "more actors than the machine can hold": (
        ["client.actors=1000000"],
        "client.actors = 1000000: expected at most ",
    ),
    "more CPUs than a node has": (
        ["client.actors=1", "client.num_cpus=4096"],
        "client.num_cpus = 4096.0: expected at most the ",
    ),
    "a GPU and a half": (
        ["client.actors=1", "client.num_gpus=1.5"],
        "client.num_gpus = 1.5: expected a fraction of one GPU, or a whole number",
    ),
    "TF32 without a GPU": (
        ["client.precision=tf32"],
        "client.precision = 'tf32': expected float32 or bfloat16 without a GPU",
    ),
    "bfloat16 where samples are clipped": (
        ["client.precision=bfloat16", "bounding={kind: per_sample_clip, bound: 1.0}"],
        "client.precision = 'bfloat16': expected float32 where every sample's gradient is clipped",
    ),
    "backend that has no bfloat16": (
        ["client.precision=bfloat16", "client.backend=fused"],
        "client.backend = 'fused': expected auto or one of convolutional, one_batch, vmap, loop",
    ),
    "unknown backend": (["client.backend=fast"], "client.backend = 'fast': expected 'auto',"),
    "backend that is no longer there": (
        ["client.backend=sample_space"],
        "client.backend = 'sample_space': expected 'auto', 'compiled', 'fused',",
    ),
    "backend that the model cannot go": (
        ["model.kind=cnn", "client.backend=fused"],
        "client.backend = 'fused': expected ",
    ),
    "override without a value": (["rounds"], "override = 'rounds': expected section.key=value"),
    "override into a number": (
        ["rounds.more=3"],
        "rounds.more = 3: expected a key of a section; rounds is 4",
    ),
    "override that is no YAML": (["local.lr=[1"], "local.lr = '[1': expected a value in YAML"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_in_one_line_and_nothing_is_started_or_written(
    bad, tmp_path, monkeypatch, complain
):
    overrides, line = BAD[bad]
    monkeypatch.delenv("RAYDPFL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("Ray was started"))
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(SMALL))
    said = complain(["run", config, *overrides, "--out", tmp_path / "out"])
    assert said.startswith(line)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.yaml"]


def test_a_budget_in_letters_is_told_in_the_words_of_a_config():
    with pytest.raises(ConfigError) as told:
        experiment(noise={"kind": "gaussian", "epsilon": "abc", "delta": 1e-5})
    said = "noise.epsilon = 'abc': expected a valid number or a mapping"
    assert str(told.value) == said


@pytest.mark.parametrize("command", ["run", "audit", "sweep"])
def test_data_that_are_not_there_leave_nothing_behind(
    command, tmp_path, tmp_path_factory, monkeypatch, complain
):
    def offline(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.utils.urllib.request.urlopen", offline)
    monkeypatch.setenv("RAYDPFL_DATA", str(tmp_path / "data" / "root"))
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "small.yaml"
    repeats = {"sweep": {"repeats": 2}} if command == "sweep" else {}
    config.write_text(yaml.safe_dump(SMALL | repeats))
    arguments = [command, config, "data={kind: mnist, clients: 50}", "--out", tmp_path / "out"]
    said = complain(arguments)
    assert said.startswith(
        f"data.kind = 'mnist': expected a data set that is under {tmp_path}/data/root "
    )
    assert "and was not downloaded (" in said and said.endswith("no network)")
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]


def test_a_chunk_that_no_memory_holds_ends_a_run_in_one_line(tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"noise": {"kind": "none"}}))
    said = complain(
        [
            "run",
            tmp_path / "small.yaml",
            "client.actors=0",
            "client.chunk=1000000000000000",
            "--out",
            tmp_path / "out",
        ],
        code=1,
    )
    assert said.startswith("not enough memory: Unable to allocate 7.11 PiB")


def test_a_config_that_is_not_there(tmp_path, complain):
    assert complain(["run", tmp_path / "no.yaml"]).endswith(
        "a file that can be read (No such file or directory)"
    )


def test_a_config_that_is_no_yaml(tmp_path, complain):
    (tmp_path / "bad.yaml").write_text("rounds: [1")
    assert "a YAML file (" in complain(["show", tmp_path / "bad.yaml"])


def test_a_config_that_is_a_list(tmp_path, complain):
    (tmp_path / "bad.yaml").write_text("- rounds")
    assert (
        complain(["show", tmp_path / "bad.yaml"])
        == "config = ['rounds']: expected a mapping of sections"
    )


def test_a_directory_that_holds_something_else(tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    said = complain(["run", tmp_path / "small.yaml", "--out", tmp_path])
    assert said.endswith("a new or empty directory, or --resume to go on with the run in it")


@pytest.mark.parametrize("command", ["run", "audit", "sweep"])
def test_a_directory_that_cannot_be_made(command, tmp_path, complain):
    (tmp_path / "file").write_text("")
    (tmp_path / "small.yaml").write_text(
        yaml.safe_dump(SMALL | ({"sweep": {"repeats": 2}} if command == "sweep" else {}))
    )
    said = complain([command, tmp_path / "small.yaml", "--out", tmp_path / "file" / "out"])
    assert (
        said
        == f"--out = '{tmp_path}/file/out': expected a directory that can be made (Not a directory)"
    )


def test_resuming_what_is_no_run(tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    said = complain(["run", tmp_path / "small.yaml", "--out", tmp_path / "new", "--resume"])
    assert said.endswith("the directory of a run; it has no config.yaml")


def test_resuming_another_experiment(tmp_path, complain):
    from conftest import experiment

    from raydpfl import run

    run(experiment(rounds=2), tmp_path / "out")
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL | {"rounds": 2}))
    for change, refused in [
        ("local.lr=0.2", "local.lr = 0.2: expected 0.1, as in the run to be resumed"),
        ("rounds=1", "rounds = 1: expected 2 or more, as in the run to be resumed"),
    ]:
        given = ["run", tmp_path / "small.yaml", change, "--out", tmp_path / "out", "--resume"]
        assert complain(given) == refused


def test_an_address_for_a_run_without_ray(tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    said = complain(["run", tmp_path / "small.yaml", "--address", "auto"])
    assert (
        said == "--address = 'auto': expected client.actors auto or above 0; "
        "0 runs in this process, without Ray"
    )


def test_an_address_where_nothing_answers(tmp_path, monkeypatch, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    said = complain(
        ["run", tmp_path / "small.yaml", "client.actors=1", "--address", "127.0.0.1:1"],
    )
    assert said.startswith(
        "--address = '127.0.0.1:1': expected the address of a running Ray cluster (if it "
        "asks for a token,"
    )


def test_an_unknown_option_of_the_command(complain):
    assert "No such option" in complain(["run", "a.yaml", "--fast"])


SAID = {
    "bounding=clip": "bounding = 'clip': expected a mapping with a kind, as in bounding.kind=clip",
    "data.partition=iid": "data.partition = 'iid': expected a mapping with a kind, as in "
    "data.partition.",
    "privacy.accountants=": "privacy.accountants = None: expected a list",
    "privacy.accountants=pld,rdp": "privacy.accountants.0 = 'pld,rdp': expected 'pld'",
    "model={kind: torch.nn:Linear, args: [1]}": "model.args = [1]: expected a mapping",
    "rounds=1e-1": "rounds = 0.1: expected a valid integer, got a number with a fractional part",
    "rounds=1e400": "rounds = inf: expected a finite number",
    "selection.cohort=1e3": "selection.cohort = 1000: expected at most the population of 50 "
    "clients",
}


@pytest.mark.parametrize("override", SAID)
def test_what_is_said_names_what_to_give(override, tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    words = ["run", tmp_path / "small.yaml", override, "--out", tmp_path / "out"]
    assert complain(words).startswith(SAID[override])


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


@pytest.mark.parametrize("command", ["run", "audit", "budget"])
def test_a_sweep_is_told_from_a_run(command, tmp_path, complain):
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    config = tmp_path / "small.yaml"
    for override in ("sweep.repeats=3", "local.lr={grid: [0.1, 0.2]}", "bounding={choice: [a, b]}"):
        said = complain([command, config, override])
        assert said.startswith(override.split("=")[0].split(".r")[0]) and "raydpfl sweep" in said
    (tmp_path / "swept").mkdir()
    (tmp_path / "swept" / "sweep.yaml").write_text("sweep: {repeats: 2}")
    said = complain([command, tmp_path / "swept"])
    assert f"raydpfl sweep {tmp_path / 'swept'} --resume" in said


@pytest.mark.slow
def test_options_that_count_take_an_exponent_too(typed, complain):
    words = ["budget", "--population", "2e3", "--cohort", "8e1", "--epsilon", "2"]
    found = [typed(*words, "--json", "--rounds", rounds) for rounds in ("1e1", "10")]
    assert found[0] == found[1] and found[0][0] == 0
    for wrong in ("1.5", "x", "1e400"):
        said = complain([*words, "--rounds", wrong])
        assert said == f"Invalid value for '--rounds': '{wrong}' is not a whole number"
