"""User-defined classes: what may be subclassed, what is refused, and when it is imported."""

import re
import sys
import types

import pytest
import yaml
from conftest import SMALL, experiment, form, refusal
from torch import nn

from raydpfl import Experiment, models, run
from raydpfl.config.registry import choose
from raydpfl.experiment import SECTIONS
from raydpfl.simulation.resolution import resolve

FAMILIES = {name: (spec.family, spec.base) for name, spec in SECTIONS.items() if spec.family}

REQUIRED = {"path": "p", "train": "t", "epsilon": 1.0, "clients": 3, "a": [1.0], "b": [1.0]}
REQUIRED["components"] = [{"weight": 1, "mean": 1, "std": 1}]


@pytest.fixture
def mine(tmp_path, own_module, monkeypatch):
    """Writes a module `mine` of the user's own, which notes that it was imported."""
    monkeypatch.chdir(tmp_path)
    head = "from __future__ import annotations\nfrom typing import ClassVar, Literal\n"
    head += "from pathlib import Path\nPath('imported').touch()\n"
    return lambda text: own_module("mine", f"{head}{text}\n")


@pytest.mark.parametrize("section", FAMILIES)
def test_every_member_that_comes_along_can_be_subclassed(section, monkeypatch):
    family, base = FAMILIES[section]
    module = types.ModuleType("subclasses")
    monkeypatch.setitem(sys.modules, "subclasses", module)
    for cls in family.values():
        own = type(f"My{cls.__name__}", (cls,), {"__module__": "subclasses"})
        setattr(module, own.__name__, own)
        required = [name for name, field in cls.model_fields.items() if field.is_required()]
        fields = {name: REQUIRED.get(name) for name in required} | next(iter(cls.examples), {})
        found = choose(section, {"kind": f"subclasses:My{cls.__name__}", **fields}, family, base)
        assert type(found) is own and found.kind == f"subclasses:My{cls.__name__}"
        assert choose(section, found.model_dump(mode="json"), family, base) == found
        # made in Python, it is named as a config would
        assert choose(section, own(**fields), family, base) == found


def test_a_subclass_of_a_built_in_computes_what_it_computes(tmp_path, mine):
    mine("from raydpfl.methods.bounding import Clip\nclass MyClip(Clip):\n    pass")
    quiet = {"noise": {"kind": "none"}}  # noise is keyed by the member's source too
    found = set()
    for kind in ("clip", "mine:MyClip"):
        bounding = {"kind": kind, "bound": 0.5}
        result = run(experiment(**quiet, bounding=bounding), tmp_path / kind[:4])
        found.add(result.summary["model_sha256"])
    assert len(found) == 1


def test_a_subclass_counts_as_what_it_derives_from(mine):
    mine(
        "from raydpfl.methods.selection import Poisson\n"
        "from raydpfl.methods.noise.none import NoNoise\n"
        "from raydpfl.data.partitions.overlapping import Overlapping\n"
        "class Coins(Poisson):\n    pass\nclass Quiet(NoNoise):\n    pass\n"
        "class Shared(Overlapping):\n    pass"
    )
    coins = experiment(selection={"kind": "mine:Coins", "cohort": 20})
    assert (coins.noise.placement, coins.relation) == ("server", "add_remove")
    assert not experiment(noise={"kind": "mine:Quiet"}).private
    with refusal("one that gives a sample to a single client"):
        experiment(
            bounding={"kind": "per_sample_clip", "bound": 1},
            data={"partition": {"kind": "mine:Shared", "per_client": 9}},
        )


# section, base, body of the class, part of the message
UNREAD = {
    "a misspelt method": (
        "local", "methods.local:Sgd", "def learning_rates(self, t): return 0.1",
        "a class without learning_rates; nearest: learning_rate"),
    "a misspelt constant": (
        "server", "methods.server:ServerSgd", "exampels: ClassVar[tuple] = ()",
        "a class without exampels; nearest: examples"),
    "a misspelt property": (
        "bounding", "methods.bounding:Clip", "@property\n    def sampel_bound(self): return 2",
        "a class without sampel_bound; nearest: sample_bound"),
    "a method where a property is read": (
        "bounding", "methods.bounding:Clip", "def sample_bound(self): return 1.0",
        "a class whose sample_bound is a property"),
    "a property where a method is called": (
        "weights", "methods.weights.uniform:UniformWeights",
        "@property\n    def of(self): return 1", "a class whose of is a method, of(self, sizes"),
    "a method with other parameters": (
        "bounding", "methods.bounding:Clip", "def factor(self, norm): return 0.0",
        "whose factor takes (norm, bound), not (norm)"),
    "a method that is missing": (
        "bounding", "methods.bounding:Bounding", "bound: float",
        "a class with a method factor(norm, bound)"),
    "a kind of its own": (
        "bounding", "methods.bounding:Clip", "kind: Literal['own'] = 'own'",
        "a class without a field kind of its own"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNREAD)
def test_what_cannot_be_used_of_a_user_defined_member_is_refused_by_name(name, mine):
    section, path, body, message = UNREAD[name]
    module, base = path.split(":")
    mine(f"from raydpfl.{module} import {base}\nclass Own({base}):\n    {body}")
    with refusal(re.escape(message)) as caught:
        resolve(experiment(**{section: {**SMALL.get(section, {}), "kind": "mine:Own"}}))
    assert "mine:Own" in str(caught.value)


# lines of a module, part of the message
FIELDS = {
    "a method": ("class Own(ServerSgd):\n    step: int = 5", "without a field step"),
    "a property": ("class Own(ServerSgd):\n    is_user_defined: bool = True", "is_user_defined"),
    "a set": ("class Own(ServerSgd):\n    parts: dict[str, set[str]] = {'a': {'b'}}", "a tuple"),
    "bytes": ("class Own(ServerSgd):\n    key: bytes = b'\\xff'", "server.key = b'"),
    "an alias": ("class Own(ServerSgd):\n    a: int = Field(2, alias='lambda')", "by its name"),
    "excluded": ("class Own(ServerSgd):\n    a: int = Field(2, exclude=True)", "by its name"),
    "a dataclass": (
        "@dataclass\nclass A:\n    a: int = 2\nclass Own(A, ServerSgd):\n    pass", "a dataclass"),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_fields_that_a_config_cannot_name_or_hold_are_refused(name, mine):
    lines, message = FIELDS[name]
    imports = "from dataclasses import dataclass\nfrom pydantic import Field\n"
    mine(f"{imports}from raydpfl.methods.server import ServerSgd\n{lines}")
    with refusal(re.escape(message)):
        experiment(server={"kind": "mine:Own", **({"lambda": 0.7} if name == "an alias" else {})})


READ = """
import functools
from pydantic import computed_field, field_validator
from raydpfl.methods.bounding import Clip

class Mixin:
    def mixed(self): return 1.0

class Own(Mixin, Clip):
    softness: float = 0.0
    spare: float = 0.0
    warm: ClassVar[bool] = True
    _private = 3
    class Table: pass

    @field_validator("softness")
    @classmethod
    def at_least_nothing(cls, value): return max(value, 0.0)
    @functools.cached_property
    def half(self): return 0.5 * self.softness
    @computed_field
    @property
    def double(self) -> float: return 2 * self.softness
    @staticmethod
    def two(): return 2.0
    def factor(self, norm, bound):
        less = self.two() * self.half * self.mixed()
        return max(min(1.0, bound / max(norm, 1e-9)) - less, 0.0)
"""


def test_what_an_own_member_uses_itself_is_no_mistake(mine, tmp_path):
    """Helpers, properties, validators, inner classes and underscores."""
    mine(READ)
    chosen = experiment(rounds=1, bounding={"kind": "mine:Own", "bound": 1.0})
    assert Experiment.from_dict(chosen.to_dict()) == chosen
    assert run(chosen, tmp_path / "out").summary["rounds"] == 1


CALLABLE = (
    "subprocess:getoutput", "subprocess:Popen", "os:system", "builtins:eval", "torch.hub:load",
    "torch:load", "functools:partial", "mine:run", "mine:Own.touch",
)  # fmt: skip


@pytest.mark.parametrize("path", CALLABLE)
@pytest.mark.parametrize("command", ["run", "budget", "show", "audit"])
def test_nothing_is_called_that_is_no_model(path, command, mine, tmp_path, complain, typed):
    mine("class Own:\n    def touch(*a, **k): Path('pwned').touch()\nrun = Own().touch")
    model = {"kind": path, "args": {"cmd": "touch pwned", "args": ["touch", "pwned"]}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**SMALL, "model": model}))
    imports = command in ("run", "audit")
    if imports:
        line = complain([command, "c.yaml", "--out", "out"])
        assert line.startswith(f"model.kind = '{path}': expected ")
    else:
        assert typed(command, "c.yaml")[0] == 0
    assert not (tmp_path / "pwned").exists()
    assert (tmp_path / "imported").exists() == (imports and path.startswith("mine:"))


@pytest.mark.parametrize("section", sorted(FAMILIES))
def test_an_import_path_of_any_family_is_a_class_of_that_family(section):
    family, base = FAMILIES[section]
    own = f"{base.__module__}:{base.__qualname__}"
    others = ("subprocess:Popen", "os:system", "raydpfl.config.registry:Member")
    for path in (own, *others, "raydpfl.errors:ConfigError"):
        with refusal(rf"^{section}.kind = '{path}': expected "):
            choose(section, {"kind": path}, family, base)


def test_a_function_makes_a_model_if_it_says_so(mine):
    mine(
        "import torch\nfrom torch import nn\n"
        "def said() -> nn.Module: return nn.Linear(6, 6)\n"
        "def quoted() -> 'torch.nn.Linear': return nn.Linear(6, 6)\n"
        "def silent(): return nn.Linear(6, 6)\n"
        "def other() -> int: return nn.Linear(6, 6)\n"
        "def unknown() -> nowhere.Module: return nn.Linear(6, 6)"
    )
    for name in ("said", "quoted"):
        model = models.parse({"kind": f"mine:{name}"})
        assert isinstance(models.build(model, form((6,), 6), 0), nn.Linear)
    for name in ("silent", "other", "unknown"):
        expected = rf"or a function that says so: def {name}\(\.\.\.\) -> torch.nn.Module"
        with refusal(expected):
            models.parse({"kind": f"mine:{name}"})


def test_questions_about_a_config_import_no_more_than_they_must(mine, tmp_path, typed):
    mine(
        "from torch import nn\nfrom raydpfl.methods.server import ServerSgd\n"
        "class Net(nn.Linear):\n    pass\nclass Step(ServerSgd):\n    pass"
    )
    tree = {
        **SMALL,
        "model": {"kind": "mine:Net", "args": {"in_features": 784, "out_features": 10}},
        "server": {"kind": "mine:Step", "lr": 0.5},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))

    def say(*words: str) -> str:
        code, out, _ = typed(*words)
        assert code == 0
        return out

    shown = say("show", "c.yaml", "bounding.kind=mine:Clip", "data.partition.kind=mine:Deal")
    config = yaml.safe_load(shown)
    absent = {"init": None, "frozen": [], "local": [], "lora": None}
    assert config["model"] == {**tree["model"], **absent}
    assert config["bounding"]["kind"] == "mine:Clip"
    assert "# bounding: mine:Clip was not imported" in shown
    assert "# data: mine:Deal was not imported" in shown
    unread = ("bounding.kind=mine:Clip", "selection.kind=mine:Draw")
    assert "clients: 50" in say("data", "describe", "c.yaml", *unread)
    assert "noise multiplier  1 " in say("budget", "c.yaml")
    assert not (tmp_path / "imported").exists()
    # it decides what is spent
    with refusal(r"bounding.kind = 'mine:Missing'"):
        Experiment.from_dict(tree, ["bounding.kind=mine:Missing"], imports={"bounding"})
    assert (tmp_path / "imported").exists()


def test_help_says_that_a_config_is_code(typed):
    for words in ([], ["run"], ["budget"], ["submit"]):
        code, out, _ = typed(*words, "--help")
        said = " ".join(out.replace("│", " ").split())
        assert code == 0
        assert "import paths in it" in said or "where it names an import path" in said


def test_a_member_refuses_what_it_cannot_be_part_of(mine):
    mine(
        "from raydpfl.methods.bounding import Clip\nfrom raydpfl.errors import ConfigError\n"
        "class Few(Clip):\n"
        "    examples: ClassVar[tuple[dict, ...]] = ({'bound': 1.0},)\n"
        "    def check(self, experiment):\n"
        "        if experiment.rounds > 9:\n"
        "            raise ConfigError('rounds', experiment.rounds, 'at most 9')\n"
        "class Wrong(Clip):\n"
        "    def check(self, experiment): return 1 / 0"
    )
    few = {"kind": "mine:Few", "bound": 1.0}
    assert experiment(bounding=few).bounding.kind == "mine:Few"
    with refusal(r"^rounds = 10: expected at most 9$"):
        experiment(bounding=few, rounds=10)
    with refusal(r"a class whose check raises nothing but ConfigError"):
        experiment(bounding={**few, "kind": "mine:Wrong"})


NOISES = """
from raydpfl.methods.noise import Noise

class ByServer(Noise):
    z: float = 2.0
    def size(self, outline, facts): return self.z

class ByClients(ByServer):
    def drawn_by(self): return "client"
"""


@pytest.mark.slow
@pytest.mark.parametrize("name,placement", [("ByServer", "server"), ("ByClients", "client")])
def test_a_noise_of_ones_own_runs_from_its_base_alone(name, placement, mine, tmp_path):
    """With the epsilons of the built-in one of the same size, and as much noise."""
    mine(NOISES)
    own = experiment(noise={"kind": f"mine:{name}", "z": 2.0})
    like = experiment(noise={"kind": "gaussian", "multiplier": 2.0, "placement": placement})
    found = run(own, tmp_path / "own")
    expected = run(like, tmp_path / "like")
    assert [(one.observer, one.epsilon) for one in found.guarantees] == [
        (one.observer, one.epsilon) for one in expected.guarantees
    ]
    assert found.rounds["noise_std"] == expected.rounds["noise_std"]
    quiet = experiment(noise={"kind": "none"})
    plain = run(quiet, tmp_path / "plan").rounds["update_norm"].to_numpy()
    noisy = found.rounds["update_norm"].to_numpy()
    assert (noisy > 2 * plain).all()


def test_a_noise_of_ones_own_states_its_delta_by_a_field(mine):
    mine(f"{NOISES}\nclass Field(ByServer):\n    delta: float = 1e-3")
    guarantees = resolve(experiment(noise={"kind": "mine:Field"})).guarantees(2, {0: 2})
    assert {one.delta for one in guarantees} == {1e-3}
    with refusal(r"noise.delta = 1.0: expected a number from 1e-300"):
        resolve(experiment(noise={"kind": "mine:Field", "delta": 1.0}))


@pytest.mark.parametrize("bounding", [{"kind": "none"}, {"kind": "per_sample_clip", "bound": 1.0}])
@pytest.mark.parametrize("name", ["ByServer", "ByClients"])
def test_a_noise_of_ones_own_is_refused_where_nothing_bounds_what_clients_send(
    name, bounding, mine
):
    """It would claim an epsilon, and draw nothing, as its std is a multiple of the bound."""
    mine(NOISES)
    with refusal(rf"bounding.kind = '{bounding['kind']}': expected one that bound"):
        resolve(experiment(noise={"kind": f"mine:{name}"}, bounding=bounding))


def test_every_class_of_a_member_is_asked_what_it_refuses(mine):
    """A class that has a check of its own need not call that of its base."""
    mine(
        "from raydpfl.methods.noise import Gaussian\n"
        "class Careless(Gaussian):\n    def check(self, experiment): pass"
    )
    with refusal("none without a bound"):
        experiment(noise={"kind": "mine:Careless", "multiplier": 1.0}, bounding={"kind": "none"})


@pytest.mark.parametrize(
    "body",
    [
        "def scores(self, noise, std): return 10 * noise / std",
        "def noise_distribution(self, std): return super().noise_distribution(std / 10)",
        "laplace: ClassVar[bool] = True",
    ],
)
def test_noise_has_no_say_in_how_it_is_tested(body, mine):
    mine(f"from raydpfl.methods.noise import Gaussian\nclass Own(Gaussian):\n    {body}")
    name = body.split("(")[0].split(":")[0].split()[-1]
    with refusal(rf"noise\.kind = 'mine:Own': expected a class without {name}"):
        experiment(noise={"kind": "mine:Own", "multiplier": 1.0})


def test_what_the_config_alone_tells_is_refused_before_the_data_are_touched():
    def untouched(*args, **keys):
        pytest.fail("data were touched")

    with refusal(r"selection.cohort = 51: expected at most the population of 50"):
        resolve(experiment(selection={"cohort": 51}), prepare=untouched)
    with refusal(r"privacy.relation = 'add_remove'"):
        sections = {"selection": {"kind": "full"}, "privacy": {"relation": "add_remove"}}
        resolve(experiment(**sections), prepare=untouched)


def test_queries_whose_answers_nothing_takes_up_are_refused(mine):
    mine(
        "from raydpfl.methods.bounding import Clip, BoundingQuery\nclass Own(Clip):\n"
        "    def queries(self): return (BoundingQuery('count', 0.5, 0.1),)\n"
        "    def answers(self, columns, bound): return {'count': columns['norm'] * 0}"
    )
    with refusal(r"bounding\.kind = 'mine:Own': expected a class with adapt"):
        experiment(bounding={"kind": "mine:Own", "bound": 1.0})
