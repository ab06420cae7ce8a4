"""No process imports what it does not need: each of these costs a start as much as some rounds."""

import json
import pickle
import sys

import processes
import pytest
import yaml
from conftest import SMALL, experiment

from raydpfl.simulation.resolution import resolve

pytestmark = pytest.mark.slow

NEVER = (
    "torchvision", "matplotlib", "cvxpy", "optuna", "pandas", "dp_accounting",
    "scipy.optimize", "scipy.signal", "scipy.stats", "PIL", "raydpfl.sweep", "raydpfl.jobs.client",
    "torch._dynamo", "torch._inductor",
)  # fmt: skip
RAY = ("ray", "raydpfl.runtime.actor_pool")
# what accounting, tables and pages need, and those who train do not
ABOVE = (
    *("scipy", "tensorboard", "rich", "typer"),
    *("raydpfl.simulation.coordinator", "raydpfl.simulation.plan"),
)
COMMAND = """
import json, os, sys
from raydpfl.cli.app import main
main()
sys.argv[-1] += "-auto"
os.environ["OMP_NUM_THREADS"] = "1"  # actors would gain, so a round is timed
sys.argv.append("client.actors=auto")
main()
print(json.dumps(sorted(sys.modules)))
"""


def test_a_run_in_one_process_imports_neither_ray_nor_what_it_does_not_need(tmp_path):
    config = tmp_path / "small.yaml"
    asked = {"client": {**SMALL["client"], "actors": 0}, "measure": ["clients"]}
    asked["track"] = ["tensorboard", "ray"]
    noise = {"kind": "gaussian", "epsilon": 8.0, "delta": 1e-5}
    asked |= {"noise": noise, "privacy": {"accountants": ["pld", "rdp", "paper"]}}
    config.write_text(yaml.safe_dump(SMALL | asked))
    command = [sys.executable, "-c", COMMAND, "run", config, "--quiet", "--out", tmp_path / "out"]
    done = processes.run(command)
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert {"torch", "raydpfl.runtime.runner"} <= loaded
    assert not loaded & {*NEVER, *RAY}
    summary = json.loads((tmp_path / "out-auto" / "summary.json").read_text())
    assert "and starting Ray 8 s" in summary["ray"]["why_not"]


CLIENT = """
import json, pickle, sys
from raydpfl.simulation.client.actor import ClientActor

experiment, shards, d = pickle.load(open(sys.argv[1], "rb"))
client = ClientActor(experiment, shards)
import numpy as np
from raydpfl.core.messages import Broadcast, Grid, Chunk, Work

model = np.zeros(d, np.float32)
chunk = Chunk(np.arange(8), np.zeros(8, int), np.ones(8), int(client.shards.sizes.max()))
result = client.train(Broadcast(model), Work(0, 0, 1, 1.0, 0.5, Grid.of(8, 1.0, 0.5)), [chunk])
assert len(result.columns["norm"]) == 8
assert client.evaluate(model, 0, [0], {})[0].rows == "test"
print(json.dumps(sorted(sys.modules)))
"""


def test_a_client_imports_what_training_and_evaluating_need_and_no_more(tmp_path):
    plan = resolve(experiment())
    (tmp_path / "given").write_bytes(pickle.dumps((plan.experiment, str(plan.shards), plan.d)))
    done = processes.run([sys.executable, "-c", CLIENT, tmp_path / "given"])
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert {"torch", "raydpfl.simulation.client.actor"} <= loaded
    assert not loaded & {*NEVER, *RAY, *ABOVE}


READING = "raydpfl.runtime.runner, raydpfl.cli.app, raydpfl.cli.run_display, raydpfl.report.figures"


def test_the_commands_are_there_and_a_study_is_read_without_ray_and_matplotlib():
    code = f"import sys, {READING}; print(sorted({{'ray', 'matplotlib'}} & set(sys.modules)))"
    done = processes.run([sys.executable, "-c", code])
    assert done.stdout == "[]\n", done.stderr


def test_a_budget_question_by_options_imports_no_torch():
    code = """
import sys
from raydpfl.cli.app import main
main()
print(sorted({"ray", "torch", "matplotlib"} & set(sys.modules)))
"""
    question = ["budget", "--population", "50", "--cohort", "5"]
    question += ["--rounds", "9", "--noise-multiplier", "2"]
    done = processes.run([sys.executable, "-c", code, *question])
    assert done.stdout.endswith("\n[]\n"), done.stderr
