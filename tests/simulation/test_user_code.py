"""The source of user-defined classes: what a run keeps and goes on with, and nothing unasked."""

import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import processes
import pytest
import yaml
from conftest import SMALL
from safetensors.torch import load_file, save_file

import raydpfl
from raydpfl.config.source_code import _statements, module_files
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment, overridden
from raydpfl.jobs import packaging
from raydpfl.simulation import user_code

MINE = '''"""Of mine."""
from pkg.helper import bound_of
from raydpfl.methods.bounding import Clip


class Half(Clip):
    """Half of a clip."""

    def factor(self, norm, bound):
        import late  # when it is called
        from plain.deep.there import THERE

        return THERE * late.HALF * super().factor(norm, bound_of(bound))
'''
FILES = {
    "mine.py": MINE,
    "late.py": "HALF = 0.5\n",
    "plain/deep/there.py": "THERE = 1.0\n",
    "pkg/__init__.py": "ONE = 1.0\n",
    "pkg/helper.py": "from . import ONE\n\n\ndef bound_of(bound):\n    return bound * ONE\n",
    "unused.py": "",
}
LATE = {"late.py", "plain/deep/there.py"}
KEPT = {"mine.py", "pkg/__init__.py", "pkg/helper.py"} | LATE
CONFIG = {**SMALL, "bounding": {"kind": "mine:Half", "bound": 0.5}, "rounds": 6}
STOPPED = """
from raydpfl import Experiment, run
e = Experiment.from_yaml("c.yaml")
run(e, "run", on_rows=lambda rows: rows[0]["round"] == 2)
"""


def written(folder: Path, **changes: str) -> Path:
    """The files in a folder, some of them with other text."""
    for name, text in {**FILES, **changes}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


def command(folder: Path, *words: object, code: int = 0) -> str:
    """What a command that is run in a folder says on its standard error."""
    told = [sys.executable, *map(str, words)]
    done = processes.run(told, cwd=folder)
    assert done.returncode == code, done.stderr
    return done.stderr


def sha(run: Path) -> str:
    return json.loads((run / "summary.json").read_text())["model_sha256"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was stopped after half of its rounds, and what it would have come to."""
    folder = written(tmp_path_factory.mktemp("home"))
    command(folder, "-m", "raydpfl", "run", "c.yaml", "--out", "whole", "--quiet")
    command(folder, "-c", "import sys; sys.path.insert(0, '')" + STOPPED)
    return folder / "run", sha(folder / "whole")


def moved(begun: tuple[Path, str], place: Path) -> Path:
    return Path(shutil.copytree(begun[0], place))


@pytest.mark.slow
def test_a_run_keeps_the_source_of_what_it_names_and_of_what_that_imports(begun):
    code = begun[0] / "code"
    files = {path.relative_to(code).as_posix() for path in code.rglob("*.py")}
    assert files == KEPT
    assert all((code / name).read_text() == FILES[name] for name in files)


@pytest.mark.slow
@pytest.mark.parametrize("actors", [0, 2])
def test_it_goes_on_where_there_is_no_such_module_to_the_same_bits(begun, tmp_path, actors):
    run = moved(begun, tmp_path / "elsewhere")
    change = f"client.actors={actors}"
    said = command(tmp_path, "-m", "raydpfl", "run", run, change, "--resume", "--quiet")
    assert sha(run) == begun[1] and "differs" not in said


@pytest.mark.slow
def test_it_goes_on_with_what_it_began_with_and_says_that_other_code_is_here(begun, tmp_path):
    run = moved(begun, tmp_path / "run")
    here = written(tmp_path / "here", **{"late.py": "HALF = 0.25\n"})
    said = command(here, "-m", "raydpfl", "run", run, "--resume", "--quiet")
    assert sha(run) == begun[1]
    assert said.count("\n") == 1 and str(here / "late.py") in said and "mine.py" not in said


@pytest.mark.slow
def test_fresh_noise_takes_the_code_that_is_here_and_keeps_it(begun, tmp_path):
    run = moved(begun, tmp_path / "run")
    here = written(tmp_path / "here", **{"late.py": "HALF = 0.25\n"})
    options = ("--resume", "--fresh-noise", "--quiet")
    command(here, "-m", "raydpfl", "run", run, *options)
    assert sha(run) != begun[1] and (run / "code" / "late.py").read_text() == "HALF = 0.25\n"


@pytest.mark.slow
def test_what_another_user_could_have_written_is_not_gone_on_with(begun, tmp_path):
    run = moved(begun, tmp_path / "run")
    (run / "code" / "mine.py").chmod(0o666)
    options = ("-m", "raydpfl", "run", run, "--resume")
    assert "take a copy of it" in command(tmp_path, *options, code=2)
    (run / "code" / "mine.py").unlink()
    (run / "code" / "mine.py").symlink_to(begun[0] / "code" / "mine.py")
    assert "take a copy of it" in command(tmp_path, *options, code=2)


@pytest.fixture
def forgotten(monkeypatch):
    """Imports from this folder, forgotten after the test."""
    before = set(sys.modules)
    path = list(sys.path)
    yield lambda folder: monkeypatch.syspath_prepend(str(folder))
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "late", "plain", "pkg", "profile", "evil"):
            del sys.modules[name]


def digest_of(tmp_path, forgotten, **changes: str) -> str:
    folder = written(tmp_path, **changes)
    forgotten(folder)
    (found,) = user_code.sources(Experiment.from_dict(CONFIG)).values()
    return found


SAME = {
    "a comment": ("mine.py", MINE + "\n# more\n"),
    "a docstring": ("mine.py", MINE.replace("Half of a clip.", "One half.")),
    "no docstring": ("mine.py", MINE.replace('    """Half of a clip."""\n\n', "")),
    "a docstring where there was none": (
        "pkg/helper.py",
        FILES["pkg/helper.py"].replace(":\n    return", ":\n    '''Of it.'''\n    return"),
    ),
    "parentheses, quotes and lines": ("late.py", "HALF = (\n    0.50\n)\n"),
    "a module that nothing imports": ("unused.py", "x = 1"),
}
OTHER = {
    "a number": ("late.py", "HALF = 0.51\n"),
    "an operator": ("mine.py", MINE.replace("late.HALF *", "late.HALF +")),
    "a name": (
        "mine.py",
        MINE.replace("(Clip)", "(Other)").replace("import Clip", "import Clip as Other"),
    ),
    "a package": ("pkg/__init__.py", "ONE = 1.5\n"),
    "a folder without an init file": ("plain/deep/there.py", "THERE = 1.5\n"),
    "a list for a tuple": ("late.py", "HALF = 0.5\nMORE = [1]\n"),
}


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_a_change_is_another_code_if_it_computes_something_else(change, tmp_path, forgotten):
    name, text = {**SAME, **OTHER}[change]
    before = digest_of(tmp_path, forgotten)
    assert (digest_of(tmp_path, forgotten, **{name: text}) == before) == (change in SAME)


def test_a_module_named_like_one_of_the_standard_library_is_a_users(
    tmp_path, forgotten, monkeypatch
):
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    texts = {"mine.py": f"import json, profile\n{MINE}", "profile.py": "SCALE = 0.5\n"}
    before = digest_of(tmp_path, forgotten, **texts)
    assert module_files(sys.modules["mine"]).keys() >= {"mine", "profile", "late"}
    assert "json" not in module_files(sys.modules["mine"])
    assert digest_of(tmp_path, forgotten, **{**texts, "profile.py": "SCALE = 0.6\n"}) != before


def test_that_code_is_imported_when_it_is_called_is_no_change(tmp_path, forgotten):
    before = digest_of(tmp_path, forgotten)
    assert "late" not in sys.modules
    Experiment.from_dict(CONFIG).bounding.factor(1.0, 1.0)
    assert "late" in sys.modules and digest_of(tmp_path, forgotten) == before


def test_a_digest_tells_trees_apart_that_have_the_same_nodes():
    pairs = [("a(b(c))", "a(b, c)"), ("x = [1]", "x = (1,)"), ("f(a=1)", "f(b=1)"),
             ("x = 'a'", "x = b'a'"), ("if a:\n f()\ng()", "if a:\n f()\n g()"),
             ("x = 1", "x = True"), ("a - (b - c)", "a - b - c")]  # fmt: skip
    for one, other in pairs:
        assert _statements(one.encode()) != _statements(other.encode()), one


def test_what_a_run_keeps_is_sent_with_a_job(tmp_path, forgotten, monkeypatch):
    written(tmp_path / "code")
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with user_code.stored_code(tmp_path, prefer_stored=True) as kept:
        experiment = Experiment.from_dict(CONFIG)
        _, files = packaging.pack(CONFIG, [experiment], here, stored_folder=kept)
    assert set(files) == KEPT - LATE and str(kept) not in sys.path


def test_nothing_is_touched_where_kept_code_is_a_link(tmp_path, forgotten):
    cache = written(tmp_path / "away") / "__pycache__"
    cache.mkdir()
    (tmp_path / "code").symlink_to(tmp_path / "away")
    with pytest.raises(ConfigError, match="take a copy of it"), user_code.stored_code(tmp_path):
        pass
    assert cache.exists()


def test_kept_code_does_not_stand_in_for_another_that_is_imported(tmp_path, forgotten):
    forgotten(written(tmp_path / "here"))
    Experiment.from_dict(CONFIG)
    written(tmp_path / "run" / "code", **{"mine.py": MINE.replace("norm, bound_of", "2, bound_of")})
    refused = pytest.raises(ConfigError, match="a process that has not imported another mine")
    with refused, user_code.stored_code(tmp_path / "run", prefer_stored=True):
        pass


# ---- a stranger's run directory ----

EVIL = "from pathlib import Path\nPath({mark!r}).touch()\nraise RuntimeError('imported')\n"
# where a config may name code
PLACES = [
    "model.kind", "selection.kind", "local.kind", "bounding.kind", "noise.kind", "weights.kind",
    "server.kind", "data.kind", "data.task", "data.partition", "data.tokenizer", "personal",
    "measure", "track", "privacy.accountants", "evaluate.metrics", "evaluate.fine_tune",
]  # fmt: skip
READS = (
    ["report"], ["compare"], ["show"], ["export", "--out", "m.pt"], ["budget"], ["audit"],
    ["data", "describe"],
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    raydpfl.run(Experiment.from_dict({**SMALL, "rounds": 1, "track": []}), folder)
    return folder


def hostile(finished: Path, place: Path, field: str) -> Path:
    """A run directory that names `evil:Thing`, in itself and in what it says of its model."""
    shutil.copytree(finished, place)
    tree = yaml.safe_load((place / "config.yaml").read_text())
    value: object = {"kind": "evil:Thing"}
    if field.endswith(".kind"):
        value = "evil:Thing"
    elif field in ("measure", "track", "evaluate.metrics"):
        value = [value]
    elif field == "privacy.accountants":
        value = ["evil:Thing"]
    elif field == "data.tokenizer":
        value = "evil:Thing"
        text = {"x": "text", "train": "rows.csv", "vocabulary": 5, "length": 3}
        tree["data"] = {"kind": "table", "clients": tree["data"]["clients"], **text}
    tree = overridden(tree, [f"{field}={json.dumps(value)}"])
    (place / "config.yaml").write_text(yaml.safe_dump(tree))
    (place / "code").mkdir()
    (place / "code" / "evil.py").write_text(EVIL.format(mark=str(place / "code" / "ran")))
    return place


@pytest.mark.slow
@pytest.mark.parametrize("field", PLACES)
def test_no_command_that_reads_a_run_directory_imports_what_it_names(
    field, finished, tmp_path, typed, monkeypatch, forgotten
):
    run = hostile(finished, tmp_path / "run", field)
    mark = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.chdir(tmp_path)
    pages = field in ("bounding.kind", "data.task")  # which take the longest
    for words in READS if pages else READS[2:]:
        code, out, said = typed(
            *words[:1], *words[1:2][: words[0] == "data"], run, *words[1 + (words[0] == "data") :]
        )
        assert not mark.exists() and not (run / "code" / "ran").exists(), words
        if code:
            assert code == 2 and said.count("\n") == 1 and "Traceback" not in out + said, words
        if words[0] == "audit" and field != "evaluate.fine_tune":
            assert "no import of evil:Thing, which runs its code" in said, said
            assert "--trust-code" in said
    with pytest.raises(ConfigError) if field == "model.kind" else suppress(ConfigError):
        raydpfl.load(run)
    assert not mark.exists() and "evil" not in sys.modules


def test_a_task_that_only_the_weights_name_is_not_imported(finished, tmp_path, forgotten):
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "ran")))
    forgotten(tmp_path)
    path = tmp_path / "run" / "model.safetensors"
    from raydpfl.models import weights

    said = dict(weights.facts(path))
    form = json.loads(said["form"]) | {"task": {"kind": "evil:Thing"}}
    save_file(load_file(path), path, {**said, "form": json.dumps(form)})
    with pytest.raises(ConfigError, match=r"no import of evil:Thing, .* --trust-code"):
        raydpfl.load(tmp_path / "run")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_with_trust_a_model_of_user_defined_code_comes_from_what_the_run_keeps(
    tmp_path, monkeypatch
):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))\n"
    )
    tree = {**SMALL, "rounds": 1, "model": {"kind": "net:Net"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    command(tmp_path, "-m", "raydpfl", "run", "c.yaml", "--out", "run", "--quiet")
    os.remove(tmp_path / "net.py")
    words = ("-m", "raydpfl", "export", "run", "--out", "m.pt")
    assert "net:Net" in command(tmp_path, *words, code=2)
    command(tmp_path, *words, "--trust-code")
    assert (tmp_path / "m.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sweep", "reproduce"])
def test_many_runs_go_on_with_the_code_they_began_with(kind, tmp_path):
    here = written(tmp_path / "here")
    spaces: dict = {"bounding": {"kind": "mine:Half", "bound": {"grid": [0.5, 1.0]}}}
    if kind == "reproduce":
        about = {"id": "mine/x", "seeds": 2, "tuning_seeds": 1, "grow": 0}
        spaces = {"study": about, "arms": {"Mine": {}}, "show": []}
    (here / "c.yaml").write_text(yaml.safe_dump({**CONFIG, "rounds": 2, **spaces}))
    command(here, "-m", "raydpfl", kind, "c.yaml", "--out", tmp_path / "out", "--quiet")
    assert (tmp_path / "out" / "code" / "mine.py").read_text() == MINE
    trials = sorted((tmp_path / "out" / "trials").iterdir())
    assert len(trials) == 2
    before = sha(trials[0])
    written(tmp_path / "other", **{"late.py": "HALF = 0.25\n"})
    for folder, scheme in ((tmp_path, ""), (tmp_path / "other", "file://")):
        shutil.rmtree(trials[0])
        command(folder, "-m", "raydpfl", kind, f"{scheme}{tmp_path}/out", "--resume", "--quiet")
        assert sha(trials[0]) == before
