"""Noise that no other release has, what the bits depend on, and going on after it has changed."""

import json
import math
import os
import pickle
import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import processes
import pytest
import torch
from conftest import experiment, refusal, start_coordinator

from raydpfl import models, run
from raydpfl.audit import audit
from raydpfl.core import native
from raydpfl.errors import RunError
from raydpfl.methods.selection import Cohort, Selection
from raydpfl.methods.weights import Weights
from raydpfl.privacy import Ledger, Sampling, Segment, epsilon
from raydpfl.runtime.worker import start_worker
from raydpfl.simulation import provenance, user_code
from raydpfl.simulation.checkpoint import load
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.resolution import resolve

pytestmark = pytest.mark.slow

LOUD = {"noise": {"kind": "gaussian", "multiplier": 1000.0}, "server": {"kind": "sgd"}, "rounds": 1}
STEPS = {
    "bounding": {"kind": "per_sample_clip", "bound": 1.0},
    "noise": {"kind": "gaussian", "multiplier": 1000.0},
    "server": {"kind": "sgd"},
    "rounds": 1,
}


def flat(result) -> np.ndarray:
    return models.flatten(result.model).numpy().astype(np.float64)


@pytest.fixture
def elsewhere(monkeypatch):
    """Changes one of the facts that bits depend on: a version, or how a processor computes."""
    of = provenance.platform_facts

    def changed(fact: str) -> None:
        monkeypatch.setattr(
            provenance, "platform_facts", lambda asked: {**of(asked), fact: "other"}
        )

    return changed


@cache
def unchanged(sections: str) -> np.ndarray:
    """The model of a run that others are held against, flat float64 [d]."""
    with tempfile.TemporaryDirectory() as out:
        return flat(run(experiment(**json.loads(sections)), Path(out) / "run"))


# ---- the key of the noise ----


@pytest.mark.parametrize(
    "method", [LOUD, STEPS, {**LOUD, "noise": {**LOUD["noise"], "placement": "server"}}]
)
@pytest.mark.parametrize(
    "change",
    [
        {"local": {"lr": 0.2}},
        {"bounding": {"bound": 1.1}},
        {"server": {"kind": "sgd", "lr": 1.5}},
        {"client": {"chunk": 7}},
    ],
)
def test_two_runs_with_one_seed_do_not_cancel_each_others_noise(method, change, tmp_path):
    """The model is noise alone; 7,850 coordinates: a cosine by chance has std 0.011."""

    def cosine(common: bool) -> float:
        sections = {**method, "noise": {**method["noise"], "common": common}}
        moved = {name: {**sections.get(name, {}), **value} for name, value in change.items()}
        one = unchanged(json.dumps(sections))
        other = flat(run(experiment(**{**sections, **moved}), tmp_path / f"other{common}"))
        return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))

    assert abs(cosine(common=False)) < 0.06
    assert cosine(common=True) > 0.99


def test_the_same_release_has_the_same_noise_whatever_is_measured_and_wherever_it_runs():
    plan = resolve(experiment())
    for change in (
        {"client": {"actors": 2}},
        {"measure": ["bounding", "clients"]},
        {"evaluate": {"every": 1}},
        {"rounds": 9},
        {"privacy": {"accountants": ["pld"], "budget": 900.0}},
    ):
        assert resolve(experiment(**change)).noise_seed == plan.noise_seed, change
    # rounds to come may lose more clients, of which the server's noise does not depend
    lossy = {
        "selection": {"kind": "uniform", "cohort": 20, "dropout": 0.3},
        "noise": {"kind": "gaussian", "multiplier": 1.0, "placement": "server"},
    }
    plan, longer = (resolve(experiment(**lossy, rounds=rounds)) for rounds in (2, 30))
    assert plan.clients_left > longer.clients_left and plan.noise_seed == longer.noise_seed
    by_std = experiment(noise={"kind": "gaussian", "std": 1.0 / math.sqrt(20)})
    assert resolve(by_std).ratio == pytest.approx(1.0)


def test_any_other_release_has_other_noise():
    changes = [
        {},
        {"seed": 4},
        {"local": {"lr": 0.2}},
        {"local": {"steps": 6}},
        {"bounding": {"bound": 0.5}},
        {"bounding": {"kind": "normalize", "bound": 1.0}},
        {"noise": {"kind": "gaussian", "multiplier": 1.1}},
        {"noise": {"kind": "gaussian", "multiplier": 1.0, "placement": "server"}},
        {"data": {"clients": 60}},
        {"data": {"partition": {"kind": "shards", "per_client": 5}}},
        {"model": {"kind": "mlp", "hidden": [8]}},
        {"selection": {"kind": "uniform", "cohort": 19}},
        {"weights": {"kind": "data"}},
        {"client": {"chunk": 4}},
        {"server": {"kind": "momentum", "lr": 0.5}},
        {"client": {"backend": "loop"}},
        {"client": {"on_error": "drop"}},
    ]
    plan, *others = [resolve(experiment(**change)) for change in changes]
    for fact in (*plan.platform, "code mine:Tanh"):  # versions, the processor, code
        others.append(replace(plan, platform={**plan.platform, fact: "other"}))
    seeds = [plan.noise_seed, *(other.noise_seed for other in others)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 64 for seed in seeds)


def test_common_noise_is_the_seeds_and_the_guarantee_says_what_follows(tmp_path):
    common = experiment(noise={"kind": "gaussian", "multiplier": 1.0, "common": True})
    longer = experiment(**common.to_dict() | {"rounds": 7})
    assert resolve(common).noise_seed == 3 == resolve(longer).noise_seed
    for guarantee in run(common, tmp_path / "run").guarantees:
        assert any("no two of them may both be shown" in each for each in guarantee.exclusions)
    assert not any("noise.common" in each for each in resolve(experiment()).mechanism.exclusions)


# ---- what the bits depend on ----


def capability_under(**settings: str) -> dict[str, str]:
    code = "import json; from raydpfl.simulation.provenance import capability as known"
    code += "; print(json.dumps(known()))"
    command = [sys.executable, "-c", code]
    return json.loads(processes.run(command, env={**os.environ, **settings}, check=True).stdout)


def test_the_capability_tells_processors_apart_that_round_differently_and_no_others():
    here = provenance.capability()
    assert here == capability_under(OMP_NUM_THREADS="2")
    plain = capability_under(ATEN_CPU_CAPABILITY="default")
    assert plain["cpu"] == "DEFAULT" != here["cpu"] and plain["arithmetic"] != here["arithmetic"]
    settings = filter(None, ["ATEN_CPU_CAPABILITY=default", here.get("settings")])
    assert plain["settings"] == " ".join(settings)


@pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
def test_compiled_code_that_draws_or_trains_to_something_else_is_another_capability(monkeypatch):
    """Also one that passes what is looked at when it is loaded."""
    assert provenance._digest(provenance._native_results()) == provenance.COMPILED_DIGEST
    sound = provenance.capability()
    assert "native" not in sound
    drawn = native.normals
    monkeypatch.setattr(
        native, "normals", lambda names, stds, out: drawn(names, stds / np.float32(100), out)
    )
    provenance.capability.cache_clear()
    try:
        strange = provenance.capability()
    finally:
        provenance.capability.cache_clear()
    assert strange.keys() - sound.keys() == {"native"}
    assert provenance.differences(sound, strange).startswith("native was unset, now ")


def test_the_summary_and_the_checkpoint_say_how_the_processor_computed(tmp_path):
    result = run(experiment(), tmp_path / "run")
    assert result.summary["capability"] == provenance.capability()
    stored = load(tmp_path / "run" / "checkpoints").origin
    assert provenance.capability().items() <= stored.items()
    assert stored["torch"] == torch.__version__
    assert stored["raydpfl"] and stored["data"] == resolve(experiment()).shards.name


def test_a_node_that_computes_otherwise_is_named_with_what_to_set():
    """An actor's process compares itself with the run's as it comes up."""
    plan = resolve(experiment())
    expected = {**provenance.capability(), "cpu": "SVE256"}
    given = (pickle.dumps(plan.experiment), str(plan.shards), (), expected)
    here = provenance.capability()["cpu"]
    said = f"node .* computes otherwise .*cpu {here} instead of SVE256.* ATEN_CPU_CAPABILITY"
    with pytest.raises(RunError, match=said):
        start_worker(ClientActor(), *given)
    provenance.check_node("here", provenance.capability())


def test_a_run_whose_actors_would_compute_otherwise_is_refused(shared_ray, tmp_path, monkeypatch):
    """Ray was started before the setting was made, so that its workers lack it."""
    monkeypatch.setenv("MKL_DEBUG_CPU_TYPE", "5")
    provenance.capability.cache_clear()
    said = r"node .* computes otherwise .*settings .*instead of MKL_DEBUG_CPU_TYPE=5"
    try:
        with pytest.raises(RunError, match=said):
            run(experiment(client={"actors": 1}), tmp_path / "run")
    finally:
        provenance.capability.cache_clear()


@pytest.fixture
def mine(own_module):
    """A module of the user's own, `mine_origin`, with a bounding `Half`."""
    return own_module(
        "mine_origin",
        "from raydpfl.methods.bounding import Clip\n\nclass Half(Clip):\n"
        "    def factor(self, norm, bound):\n        return 0.5 * super().factor(norm, bound)\n",
    )


OWN = {"bounding": {"kind": "mine_origin:Half", "bound": 0.5}}


def test_an_own_module_is_known_by_its_source_and_torchs_by_its_version(mine):
    mine.write_text(
        "import torch\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, 10))\n"
    )
    own = user_code.sources(experiment(model={"kind": "mine_origin:Net"}))
    assert [*own] == ["code mine_origin:Net"]
    linear = {"kind": "torch.nn:Linear", "args": {"in_features": 60, "out_features": 10}}
    assert user_code.sources(experiment(model=linear)) == {}


# ---- going on ----


def begun(out, saved: int, releases: int, **sections) -> None:
    """A run with a checkpoint of `saved` rounds and `releases` released that was killed."""
    coordinator = start_coordinator(out, **sections)
    (out / "config.yaml").write_text(coordinator.experiment.to_yaml())
    for t in range(releases):
        coordinator.round()
        if t + 1 == saved:
            coordinator.save()
    for path in sorted((out / "checkpoints").glob("round-*.npz")):
        if int(path.stem.removeprefix("round-")) > saved:
            path.unlink()


LONG = {"rounds": 8, "evaluate": {"every": 100}}


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_change_of_code_is_refused_by_name_before_a_round_is_released_twice_under_one_key(
    mine, tmp_path, rounds
):
    out = tmp_path / "run"
    begun(out, rounds, 5, **OWN, **LONG)
    lines = (out / "ledger.jsonl").read_text()
    mine.write_text(mine.read_text().replace("0.5 *", "0.25 *"))
    said = r"code mine_origin:Half has changed; --resume --fresh-noise"
    with pytest.raises(RunError, match=said):
        run(experiment(**OWN, **LONG), out, resume=True)
    assert (out / "ledger.jsonl").read_text() == lines


@pytest.mark.parametrize("fact", ["raydpfl", "cpu", "arithmetic", "numpy"])
def test_a_change_of_version_or_processor_is_refused_by_name(fact, tmp_path, elsewhere):
    run(experiment(**LONG), tmp_path / "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    elsewhere(fact)
    with pytest.raises(RunError, match=f"its bits would differ: {fact} "):
        run(experiment(**{**LONG, "rounds": 9}), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "config.yaml").read_text() == config


def test_without_a_checkpoint_the_ledger_itself_knows_the_key(tmp_path, elsewhere):
    begun(tmp_path / "run", 0, 2, **LONG)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.unlink()
    elsewhere("numpy")
    with pytest.raises(RunError, match="round 0 was released before"):
        run(experiment(**LONG), tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "sections",
    [
        {"privacy": {"accountants": ["pld"]}},
        {"privacy": {"accountants": ["pld"]}, "selection": {"kind": "cyclic", "period": 2}},
        {"bounding": {"kind": "quantile_clip", "bound": 0.5}, "privacy": {"accountants": ["pld"]}},
    ],
    ids=["hidden", "public", "adaptive"],
)
def test_fresh_noise_goes_on_and_counts_what_was_released_twice(
    sections, tmp_path, elsewhere, typed
):
    """Five rounds were released, of which two lie beyond the checkpoint: they are released again,
    under noise of their own.
    """
    out = tmp_path / "run"
    begun(out, 3, 5, **sections, **LONG)
    elsewhere("torch")
    result = run(experiment(**sections, **LONG), out, resume=True, fresh_noise=True)
    assert result.summary["status"] == "completed" and result.summary["repeated_rounds"] == 2
    ledger = Ledger(out / "ledger.jsonl", resume=True)
    assert ledger.segments == (Segment(0, 0, 5), Segment(1, 3, 8))
    assert len({entry["key"] for entry in ledger.entries}) == 2
    plan = resolve(experiment(**sections, **LONG))
    once = int(plan.composed_rounds[-1])
    counts = range(once, once + 3)
    spent = {n: epsilon(plan.mechanism, "replace_one", 1e-5, n, "pld") for n in counts}
    assert ledger.spending().epsilon["pld"] == pytest.approx(spent[once + 2], rel=1e-9)
    # Of public cohorts the participations are known: 5 releases of either group.
    counted = once + 1 if sections.get("selection") else once + 2
    assert result.guarantees[0].epsilon == pytest.approx(spent[counted], rel=1e-9)
    assert spent[counted] > spent[once]
    # And again: the present segment goes on by itself.
    again = run(experiment(**sections, **LONG), out, resume=True)
    assert again.summary["model_sha256"] == result.summary["model_sha256"]
    assert again.guarantees == result.guarantees
    code, answer, _ = typed("budget", out, "--json")
    answer = json.loads(answer)
    assert code == 0 and "5 rounds from before a restart with fresh noise" in answer["notes"][-1]
    assert answer["guarantees"][0]["epsilon"] == pytest.approx(result.guarantees[0].epsilon)


def test_fresh_noise_at_local_steps_counts_each_clients_participations_of_both(tmp_path):
    steps = {**STEPS, "noise": {"kind": "gaussian", "multiplier": 2.0}, **LONG}
    out = tmp_path / "run"
    begun(out, 3, 5, **steps)
    result = run(experiment(**steps), out, resume=True, fresh_noise=True)
    plan = resolve(experiment(**steps))
    counts = np.zeros(len(plan.population), np.int64)
    for t in (*range(5), *range(3, 8)):  # cohorts are no secret here, and stay
        counts[plan.experiment.selection.draw(3, t, plan.population).clients] += 1
    worst = float(plan.report.epsilons("rdp", counts).max())
    assert result.guarantees[0].epsilon == pytest.approx(worst, rel=1e-9)
    assert result.rounds["epsilon_rdp"].to_pylist()[-1] == pytest.approx(worst, rel=1e-9)


def test_rounds_released_again_have_secret_cohorts_batches_and_noise_of_their_own(tmp_path):
    begun(tmp_path / "run", 3, 5, **LONG)
    plan = resolve(experiment(**LONG))
    restarted = plan.extend_history((Segment(0, 0, 5),), restart_round=3)
    assert len({plan.seed, restarted.seed, plan.noise_seed, restarted.noise_seed}) == 4
    assert restarted.cohort_seed() == restarted.seed and plan.cohort_seed() == 3
    public = resolve(experiment(selection={"kind": "cyclic", "period": 2}, **LONG))
    public = public.extend_history((Segment(0, 0, 5),), restart_round=3)
    assert public.cohort_seed() == 3 != public.seed
    assert len(restarted.draws(8)) == 5 + 5 and restarted.repeated == 2
    # of epochs of 4 rounds the old cohorts are of two, the new ones, from round 3 on, of two more
    bins = {"kind": "balls_in_bins", "epoch": 4}
    allocated = resolve(experiment(selection=bins, privacy={"accountants": ["pld"]}, **LONG))
    allocated = allocated.extend_history((Segment(0, 0, 5),), restart_round=3)
    composed = allocated.composed_rounds[3:] + allocated.extra_composed_rounds
    assert allocated.repeated == 2 and composed.tolist() == [12, 13, 14, 15, 16]


# ---- the ledger below the checkpoint ----


def with_fact(*rounds: int, **fact):
    """Gives the lines of a ledger, those of some rounds with another fact."""
    return lambda lines: [line | fact if line["round"] in rounds else line for line in lines]


DAMAGED = {
    "std 0.5 for round 0, where this run has 1.0": with_fact(0, 1, 2, 3, std=0.5),
    "bound 2.0 for round 1": with_fact(1, bound=2.0),
    "mechanism 0+ for round 2": with_fact(2, mechanism="0" * 64),
    "key 0+ for round 3": with_fact(3, key="0" * 16),
    "line 1, is damaged": lambda lines: lines[1:],
    "line 2, is damaged": lambda lines: [lines[0], *lines[2:]],
    "has 2 rounds and the checkpoint 4": lambda lines: lines[:2],
    "line 1, is damaged.*": with_fact(0, 1, 2, 3, restart=1),
    "line 3, is damaged": with_fact(2, 3, restart=2),
}


@pytest.mark.parametrize("said", DAMAGED)
def test_a_ledger_that_is_not_what_the_checkpoint_counts_on_is_refused(said, tmp_path):
    run(experiment(), tmp_path / "run")
    path = tmp_path / "run" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in DAMAGED[said](lines)))
    with pytest.raises(RunError, match=f"{said}.*what this run has spent is unknown"):
        run(experiment(), tmp_path / "run", resume=True)


def test_bounds_that_adapt_are_verified_as_far_as_they_are_known(tmp_path):
    adaptive = experiment(bounding={"kind": "quantile_clip", "bound": 0.5})
    run(adaptive, tmp_path / "run")
    path = tmp_path / "run" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["bound"] for line in lines}) == 4
    run(adaptive, tmp_path / "run", resume=True)
    lines[2]["bound"] *= 0.5
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(RunError, match=r"std .* for round 2"):
        run(adaptive, tmp_path / "run", resume=True)


class Moody(Weights):
    """Weights that depend on something outside: the largest is the same."""

    mood: ClassVar[int] = 0

    def of(self, sizes, samples, population):
        return np.where(np.arange(population) % 2 == self.mood, 1.0, 0.5)


def test_other_weights_have_other_noise_and_do_not_go_on_as_the_run_began(tmp_path, monkeypatch):
    """Whatever they come from: two runs that differ in them alone share no noise, and no round is
    released twice under one key.
    """
    before = resolve(experiment(weights=Moody(), **LONG))
    begun(tmp_path / "run", 3, 5, weights=Moody(), **LONG)
    monkeypatch.setattr(Moody, "mood", 1)
    after = resolve(experiment(weights=Moody(), **LONG))
    assert before.weight == after.weight and before.noise_seed != after.noise_seed
    with pytest.raises(RunError, match="clients has changed"):
        run(experiment(weights=Moody(), **LONG), tmp_path / "run", resume=True)


OF_FILES = """
import numpy as np
from torch import nn
from raydpfl.methods.selection import Uniform

def net(weights: list[str]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

class Ranks(Uniform):
    file_fields = frozenset({"path"})
    path: str

class Rates(Uniform):
    def table(self, count, root=None):
        return np.arange(count) * RATE[0]

RATE = [1.0]
"""


def test_another_file_of_a_user_defined_member_has_other_noise(tmp_path, own_module):
    """Of whichever of several files, and one in a folder; so have other numbers of a user-defined
    selection, wherever they come from.
    """
    own_module("of_files", OF_FILES)
    folder = tmp_path / "ranks"
    (folder / "inner").mkdir(parents=True)
    files = [tmp_path / "a.pt", tmp_path / "b.pt", folder / "inner" / "ranks.csv"]
    for path in files:
        path.write_text("one")
    of_model = {"kind": "of_files:net", "args": {"weights": [str(path) for path in files[:2]]}}
    changes = {
        "file model.args.weights": {"model": of_model},
        "file selection.path": {
            "selection": {"kind": "of_files:Ranks", "cohort": 20, "path": str(folder)}
        },
        "clients": {"selection": {"kind": "of_files:Rates", "cohort": 20}},
    }
    plans = {fact: resolve(experiment(**change)) for fact, change in changes.items()}
    files[0].write_text("two")
    files[2].write_text("two")
    sys.modules["of_files"].RATE[0] = 2.0
    for fact, change in changes.items():
        after = resolve(experiment(**change))
        assert after.noise_seed != plans[fact].noise_seed, fact
        assert provenance.differences(plans[fact].origin(), after.origin()) == f"{fact} has changed"
    folder.rename(tmp_path / "other")
    with refusal("selection.path"):
        resolve(experiment(**changes["file selection.path"]))


TYPED = """
import json, math
from pydantic import Field
from raydpfl.simulation import user_code
from raydpfl import Experiment
from raydpfl.methods.bounding import Bounding
import torch
GAIN = {gain}
def squash(x):
    {said}
    return (lambda y: math.{function}(y))(x)
class Typed(Bounding):
    bound: float = Field(default=0.5, gt=0)
    def factor(self, norm, bound):
        return GAIN * bound * squash(norm / bound) / norm if norm > 0 else 0.0
def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, {classes}))
tree = json.loads('''{tree}''')
tree["bounding"], tree["model"] = Typed(), {{"kind": "__main__:net"}}
print(json.dumps(user_code.sources(Experiment.from_dict(tree))))
"""


def test_code_that_was_typed_into_an_interpreter_is_known_by_what_it_does():
    tree = json.dumps(experiment().to_dict())

    usual = {"gain": "0.5", "function": "tanh", "classes": 10, "tree": tree, "said": ""}

    def found(*changes):
        """Of one interpreter, into which the code is typed with each of these changes in turn."""
        text = "".join(TYPED.format(**{**usual, **change}) for change in changes)
        done = processes.run([sys.executable, "-"], said=text, check=True)
        return [json.loads(line) for line in done.stdout.splitlines()]

    (here,) = found({})
    assert set(here) == {"code __main__:Typed", "code __main__:net"}
    again, gain, function, net = found({}, {"gain": "0.25"}, {"function": "sin"}, {"classes": 11})
    assert again == here
    assert found({"said": "'Squashes.'"}, {"said": "'Else.'"}) == [here, here]
    for other in (gain, function):
        assert other["code __main__:Typed"] != here["code __main__:Typed"]
    assert net["code __main__:net"] != here["code __main__:net"]


class Rotating(Selection):
    """Public cohorts by turns; how it does it may change between two processes."""

    kind: str = "rotating"
    turn: ClassVar[int] = 20

    def sampling(self, population):
        return Sampling("public", len(population), 20)

    def select(self, seed, t, population, ask):
        return Cohort.of((np.arange(20) + self.turn * t) % len(population))


def test_draws_that_cannot_be_made_again_are_not_counted_by_others(tmp_path, monkeypatch):
    """With fresh noise too: participations in the rounds before are known by drawing them again."""
    begun(tmp_path / "run", 3, 5, selection=Rotating(), **LONG)
    monkeypatch.setattr(Rotating, "turn", 0)
    for fresh in (False, True):
        again = experiment(selection=Rotating(), **LONG)
        with pytest.raises(RunError, match="cohorts has changed"):
            run(again, tmp_path / "run", resume=True, fresh_noise=fresh)


def test_a_kill_before_fresh_noise_was_used_leaves_a_run_that_says_how_to_go_on(
    tmp_path, elsewhere
):
    begun(tmp_path / "run", 5, 5, **LONG)
    elsewhere("torch")
    again = {"resume": True, "fresh_noise": True}
    Coordinator(resolve(experiment(**LONG)), str(tmp_path / "run"), **again).start()
    with pytest.raises(RunError, match=r"has key .* for round 0, .*--resume --fresh-noise goes on"):
        run(experiment(**LONG), tmp_path / "run", resume=True)
    done = run(experiment(**LONG), tmp_path / "run", resume=True, fresh_noise=True)
    assert done.summary["status"] == "completed" and done.summary["repeated_rounds"] == 0


def test_an_audit_shares_no_noise_with_the_run_that_it_audits(monkeypatch):
    """What it releases, canaries for clients, would otherwise tell the run's noise."""
    seen = []
    begin = Coordinator.start
    noted = lambda self: seen.append(self.plan.noise_seed) or begin(self)  # noqa: E731
    monkeypatch.setattr(Coordinator, "start", noted)
    audit(experiment(rounds=1), canaries=50)
    assert len(seen) == 1 and seen[0] != resolve(experiment(rounds=1)).noise_seed


@pytest.mark.parametrize("fresh", [False, True])
def test_a_checkpoint_of_another_run_is_refused(fresh, tmp_path):
    """Rounds beyond it would be released a second time, from another model under the same noise."""
    begun(tmp_path / "run", 3, 5, **LONG)
    begun(tmp_path / "other", 3, 5, local={"lr": 0.2}, **LONG)
    for path in (tmp_path / "run" / "checkpoints").iterdir():
        path.write_bytes((tmp_path / "other" / "checkpoints" / path.name).read_bytes())
    with pytest.raises(RunError, match="experiment has changed"):
        run(experiment(**LONG), tmp_path / "run", resume=True, fresh_noise=fresh)
