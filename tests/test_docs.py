"""What docs/, README.md and docstrings say is there: links, commands, keys of configs, snippets."""

import doctest
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
from pathlib import Path

import processes
import pytest
import yaml
from typer.main import get_command

import raydpfl
from raydpfl import Experiment, check
from raydpfl.cli import new_project
from raydpfl.cli.app import app
from raydpfl.config.setting import Setting
from raydpfl.core import messages
from raydpfl.data import Samples, Split
from raydpfl.methods import probes
from raydpfl.methods.bounding import BoundingQuery
from raydpfl.methods.local import Step
from raydpfl.methods.noise import RunFacts, SideQuery
from raydpfl.methods.selection import Cohort, Population
from raydpfl.models import tasks
from raydpfl.models.tasks import Form, Target
from raydpfl.privacy import Sampling, Terms
from raydpfl.sweep import Sweep
from raydpfl.tracking import Tracked

ROOT = Path(raydpfl.__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
GENERATED = {DOCS / "reference/config.md", DOCS / "reference/commands.md", DOCS / "assets/fig1.svg"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
QUICK = ("kinds", "show", "budget", "data list")  # commands that are run as they stand


def fences(language):
    """(page, text) of every snippet in a language."""
    return [
        pytest.param(page, text, id=f"{page.stem}-{number}")
        for page in [ROOT / "README.md", *PAGES]
        for number, (name, text) in enumerate(FENCE.findall(page.read_text()))
        if name == language
    ]


def commands():
    """(page, words) of every command of raydpfl in a snippet."""
    found = []
    for given in fences("bash"):
        page, text = given.values
        for line in text.replace("\\\n", " ").splitlines():
            for part in line.split("&&"):
                words = shlex.split(part, comments=True)
                if words and words[0].split("/")[-1] == "raydpfl":
                    found.append(pytest.param(page, words[1:], id=" ".join(words[1:])[:50]))
    return found


def anchors(page):
    """The anchors of a page's headings."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {
        re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in titles
    }


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_every_link_leads_somewhere(page):
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there in GENERATED or there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_every_page_is_in_the_menu():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [name for value in values for name in pages(value)]

    listed = {
        DOCS / name for name in pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    }
    assert listed == {*PAGES, *(each for each in GENERATED if each.suffix == ".md")}


WRITTEN = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")), *PAGES]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_lines_of_text_have_a_hundred_columns_and_snippets_fit_a_page_of_the_site(page):
    text = FENCE.sub("", page.read_text())
    assert not [line for line in text.splitlines() if len(line) > 100 and line[0] not in "|!"]
    snippets = [text for _, text in FENCE.findall(page.read_text()) if page in PAGES]
    assert not [line for text in snippets for line in text.splitlines() if len(line) > 83]


@pytest.mark.parametrize("page, words", commands())
def test_every_command_and_its_options_are_there(page, words, monkeypatch, typed):
    command = get_command(app)
    given = list(words)
    while hasattr(command, "commands") and given[0] in command.commands:
        command = command.commands[given.pop(0)]
    assert not hasattr(command, "commands"), words
    known = {name for each in command.params for name in each.opts}
    assert {each for each in given if each.startswith("--")} <= known
    configs = [each for each in given if re.match(r"experiments/.*\.yaml$", each)]
    changes = [each for each in given if re.match(r"[a-z_.]+=", each) and ":net" not in each]
    for name in configs:
        read = Sweep.from_yaml if "sweep" in name else Experiment.from_yaml
        if not any("mine:" in each for each in changes):
            read(ROOT / name, changes)
    if " ".join(words).startswith(QUICK) and "--timed" not in words:
        monkeypatch.chdir(ROOT)
        assert typed(*words)[0] == 0


@pytest.mark.parametrize("page, text", fences("yaml"))
def test_every_config_can_be_read(page, text):
    if "transformers:" in text:
        pytest.importorskip("transformers")
    tree = yaml.safe_load(text)
    if "study" not in tree:  # tests/sweep reads it
        read = Sweep if "sweep" in tree else Experiment
        read.from_dict(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, text", [each for each in fences("python") if each.values[0].stem != "members"]
)
def test_every_snippet_runs(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "mine.py").write_text(text)
    (tmp_path / "net.py").write_text(text)
    rows = [{"text": "some words here", "label": place % 2} for place in range(60)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = {}
    exec(compile(text, str(page), "exec"), done)
    small = {"rounds": 2, "client": {"actors": 0}}
    for name, given in SECTIONS.items():
        if name in done:
            ran = raydpfl.run(Experiment.from_dict(small | given), tmp_path / "ran")
            assert ran.summary["rounds"] == 2
    assert done.keys() & {*SECTIONS, "result"}


# How a config has what snippets define, by its name.
SECTIONS = {
    "Tanh": {"bounding": {"kind": "mine:Tanh", "bound": 1.0}},
    "ProxMomentum": {"local": {"kind": "mine:ProxMomentum", "steps": 2}},
    "Smoothed": {"local": {"kind": "mine:Smoothed", "lr": 0.05}},
    "net": {"model": {"kind": "net:net"}},
    "Lines": {"track": ["mine:Lines"]},
    "Visits": {"data": {"kind": "mine:Visits"}, "model": {"kind": "softmax"}},
    "tokenize": yaml.safe_load("""
        data: {kind: table, train: texts.jsonl, x: text, clients: 30, length: 20,
               tokenizer: "mine:ids", vocabulary: 257}
        model: {kind: embedding_mean}
    """),
    "Exact": yaml.safe_load("""
        selection: {kind: full}
        bounding: {kind: clip, bound: 1.0}
        privacy: {accountants: [pld, "mine:Exact"], relation: zero_out}
        noise: {kind: gaussian, multiplier: 1.0}
    """),
}


HELPERS = {"OnSums", "Plain", "File"}  # a source or a log, which no config names


def classes_to_check(page, text) -> set[str]:
    """The members in a snippet that keep a contract: all of members.md, and some of other pages."""
    names = {*re.findall(r"^(?:class|def) (\w+)", text, re.M)}
    return names - HELPERS if page.stem == "members" else names & {"Tanh", "Visits", "Exact"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page, text", [each for each in fences("python") if classes_to_check(*each.values)]
)
def test_every_member_of_the_docs_keeps_its_contract(page, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(text)
    for name in classes_to_check(page, text):
        found = check.check(f"mine:{name}")
        assert all(clause.kept is not False for clause in found), check.render(found)


@pytest.mark.slow
def test_the_task_of_a_docstring_keeps_its_contract(tmp_path, monkeypatch):
    found = doctest.DocTestFinder().find(tasks)
    examples = next(each.examples for each in found if "class Focal" in (each.docstring or ""))
    source = "from raydpfl.models.tasks import *\nimport numpy as np\nimport torch\n"
    source += "".join(each.source for each in examples)
    (tmp_path / "documented.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    clauses = check.check("documented:Focal")
    assert all(clause.kept is not False for clause in clauses), check.render(clauses)


GIVEN = (
    Setting, messages.View, messages.Facts, Step, RunFacts, SideQuery, BoundingQuery, Population,
    Cohort, Sampling, Terms, probes.Sent, probes.Round, probes.Problem, probes.Finished, Form,
    Target, Split, Samples, Tracked,
)  # fmt: skip


@pytest.mark.parametrize("cls", GIVEN, ids=lambda cls: cls.__qualname__)
def test_what_a_hook_is_given_is_documented_field_by_field(cls):
    page = (DOCS / "members.md").read_text()
    names = [*getattr(cls, "__dataclass_fields__", inspect.signature(cls).parameters)]
    for name in names:
        # `v` is the constant of papers' formulas, of which no member says more
        assert name == "v" or re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", page), name
    assert f".{cls.__qualname__}\n" in (DOCS / "reference/api.md").read_text()


def test_the_examples_of_the_docs_are_those_of_new_projects():
    page = (DOCS / "members.md").read_text()
    for family in new_project.FAMILIES:
        text = (new_project.TEMPLATE / f"{family}.py.txt").read_text()
        assert f"```python\n{text}```" in page, family


def test_no_page_sends_its_reader_to_the_source():
    pages = [ROOT / "README.md", *PAGES]
    pages.remove(ROOT / "docs/papers.md")  # whose subject it is
    assert not [page for page in pages if re.search(r"raydpfl/\w+/|tests/str", page.read_text())]


@pytest.mark.slow
def test_a_table_is_described_and_trained_on_as_the_docs_say(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    rows = [f"u{i % 40},{20 + i % 50},{i % 9},{i % 7}.5\n" for i in range(240)]
    Path("visits.csv").write_text("".join(["user,age,visits,price\n", *rows]))
    _, described, _ = typed("data", "describe", "visits.csv", "data.y=price")
    written = yaml.safe_load(described)
    tables = [
        text for page, text in (each.values for each in fences("yaml")) if "visits.csv" in text
    ]
    assert written["data"] == yaml.safe_load(tables[0])["data"]
    Path("mine.yaml").write_text(described)
    assert typed("run", "mine.yaml", "rounds=2", "client.actors=0", "--quiet")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["--out runs/first", "--out runs/compared"])
def test_runs_are_gone_on_with_reported_and_compared_as_the_docs_say(
    place, tmp_path, monkeypatch, typed
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    block = next(each.values[1] for each in fences("bash") if place in each.values[1])
    for line in block.replace("\\\n", " ").splitlines():
        code, _, said = typed(*line.split()[1:])
        assert code == 0, (line, said)
    made = {"--out runs/first": "model.safetensors", "--out runs/compared": "runs/compared"}
    assert (tmp_path / made[place]).exists()


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    if not all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = processes.run(command, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert "bounding.clip" in (tmp_path / "site/reference/config/index.html").read_text()


def test_the_generated_references_have_every_command_and_member(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    hooks = importlib.import_module("hooks")
    commands_page = hooks.commands_page()
    for name in get_command(app).commands:
        assert f"## raydpfl {name}" in commands_page
    assert "### bounding.clip" in hooks.config_page() and hooks.FIGURE.exists()


PUBLIC = (
    "raydpfl", "raydpfl.privacy", "raydpfl.methods.selection", "raydpfl.methods.noise",
    "raydpfl.methods.bounding", "raydpfl.methods.server", "raydpfl.methods.weights",
    "raydpfl.audit",
)  # fmt: skip


def is_code(found: object) -> bool:
    return inspect.isfunction(found) or isinstance(found, type)


def unsaid(found: object) -> str:
    """What the docstring of a public class or function leaves out; empty: nothing."""
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    if not text:
        return "has no docstring"
    takes = 0 if inspect.isclass(found) else len(inspect.signature(found).parameters)
    if takes > 1 and "Args:" not in text and ">>>" not in text:
        return f"has {takes} parameters, and neither Args nor an example"
    return ""


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_say_what_they_take(package):
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    code = {name: each for name, each in public.items() if is_code(each)}
    assert not {name: unsaid(each) for name, each in code.items() if unsaid(each)}
