"""Runs and sweeps on three nodes: the bits of one process, whatever node is lost; cluster files."""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import jsonschema
import processes
import pyarrow.parquet as pq
import pytest
import ray
import yaml
from conftest import experiment
from processes import wait_for_rounds
from test_study import check_same_tables, command, cut_short, longer
from test_submit import end, summary, token_environment
from test_sweep import finished

from raydpfl import Experiment, run
from raydpfl.cli import app
from raydpfl.sweep.study import Study, reproduce

pytestmark = pytest.mark.slow

# A head of one CPU, and the nodes that code in the first argument adds; a line with a number kills
# that node, with all its processes. (In a process of its own: Ray joins one cluster a process.)
HOST = """
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80_000_000}
head = {**node, "include_dashboard": False}
cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
nodes = [cluster.head_node]
exec(sys.argv[1])
cluster.wait_for_nodes()
print("address", cluster.address, flush=True)
for line in sys.stdin:
    cluster.remove_node(nodes[int(line)], allow_graceful=False)
    print("killed", flush=True)
cluster.shutdown()
"""
HEAVY = {
    "rounds": 20,
    "local": {"kind": "sgd", "steps": 400, "batch": 10, "lr": 0.1},
    "selection": {"kind": "uniform", "cohort": 48},
}


@contextlib.contextmanager
def hosted(*words: str):
    """The process of a cluster, by HOST with these words, and the environment to join it with."""
    folder = Path(tempfile.mkdtemp(prefix="rd", dir="/tmp"))  # short: socket paths have 107 bytes
    environment = token_environment(folder)
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options |= {"env": environment, "start_new_session": True}
    with open(folder / "log", "w") as log:
        command = [sys.executable, "-c", HOST, *words]
        process = subprocess.Popen(command, stderr=log, **options)
    said = until(process, "address", folder / "log")
    yield process, {**environment, "RAY_ADDRESS": said.split()[1]}
    end(process)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster():
    """As `hosted`, with two more nodes of one CPU each."""
    with hosted("nodes += [cluster.add_node(**node), cluster.add_node(**node)]") as joined:
        yield joined


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run in one process."""
    return run(
        experiment(**HEAVY, client={"actors": 0, "backend": "fused"}),
        tmp_path_factory.mktemp("inline") / "out",
    )


def until(process: subprocess.Popen, word: str, log: Path | None = None) -> str:
    for line in process.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(log.read_text() if log else f"ended without {word!r}")


def lose_node(cluster: tuple, node: int, actors: int, out: Path, timeout: float) -> tuple[int, str]:
    """A run on so many actors that loses a node after five rounds: its exit code and its output."""
    host, environment = cluster
    config = out.with_suffix(".yaml")
    client = {"actors": actors, "num_cpus": 1, "backend": "fused"}
    config.write_text(experiment(**HEAVY, client=client).to_yaml())
    words = ["run", str(config), "--out", str(out), "--address", "auto", "--quiet"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "raydpfl", *words]
    process = subprocess.Popen(command, env=environment, **pipes)
    wait_for_rounds(5, out, process)
    host.stdin.write(f"{node}\n")
    host.stdin.flush()
    until(host, "killed")
    said = process.communicate(timeout=timeout)[0]
    return process.returncode, said


def carry_out(*words, timeout: float = 240, **options) -> None:
    """A command in a process of its own, on the cluster of its environment."""
    command = [sys.executable, "-m", "raydpfl", *map(str, words), "--address", "auto"]
    done = processes.run(command, timeout=timeout, **options)
    assert done.returncode == 0, done.stderr[-3000:]


def test_trials_of_two_actors_share_three_nodes_of_one_core(tmp_path, cluster):
    # A client actor outside its trial's placement group would find one free core where two are
    # wanted, and the trial fail.
    config = tmp_path / "sweep.yaml"
    out = tmp_path / "out"
    small = experiment(client={"actors": 2, "num_cpus": 1}).to_dict()
    small["local"]["lr"] = {"grid": [0.05, 0.1]}
    config.write_text(yaml.safe_dump(small))
    carry_out("sweep", config, "--out", out, env=cluster[1])
    rows = pq.read_table(out / "results.parquet").to_pylist()
    assert [row["local.lr"] for row in rows] == [0.05, 0.1]
    for row in rows:
        alone = run(experiment(local={"lr": row["local.lr"]}), tmp_path / str(row["local.lr"]))
        assert row["status"] == "completed" and row["model_sha256"] == alone.summary["model_sha256"]


def test_a_study_over_three_nodes_that_was_killed_and_resumed_has_the_tables_of_one_node(
    tmp_path, cluster
):
    config = longer(tmp_path)
    (whole,) = reproduce(Study.named(config), out=tmp_path / "whole")
    out = tmp_path / "out"
    quiet = {"env": cluster[1], "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(config, out, "--address", "auto"), **quiet)
    done = cut_short(process, out, 4)
    resume = ["reproduce", config, "--out", out, "--quiet", "--resume"]
    carry_out(*resume, timeout=600, env=cluster[1])
    assert done.items() <= finished(out).items()
    check_same_tables(whole.out, out)


def test_a_run_over_three_nodes_that_loses_one_of_them_gives_the_bits_of_an_inline_run(
    tmp_path, cluster, whole
):
    code, said = lose_node(cluster, 1, 3, tmp_path / "nodes", 240)
    assert code == 0, said
    assert summary(tmp_path / "nodes")["model_sha256"] == whole.summary["model_sha256"]
    rows = pq.read_table(tmp_path / "nodes" / "rounds.parquet").to_pydict()
    # one a node, of one CPU; there is no room for a third on two
    assert rows["actors"][:4] == [3] * 4 and rows["actors"][-1] == 2
    for name in ("train_loss", "update_norm", "test_accuracy", "epsilon_rdp"):
        assert rows[name] == whole.rounds[name].to_pylist()


def test_the_loss_of_the_head_node_ends_in_a_clear_error_and_resume_elsewhere_gives_the_bits(
    tmp_path, cluster, whole
):
    out = tmp_path / "out"
    code, said = lose_node(cluster, 0, 1, out, 120)
    assert code == 1, said
    last = said.strip().splitlines()[-1]
    assert last.startswith("raydpfl: the coordinator died") and "--resume" in last
    assert [*(out / "checkpoints").iterdir()]
    assert len((out / "ledger.jsonl").read_text().splitlines()) < HEAVY["rounds"]

    resumed = run(experiment(**HEAVY, client={"actors": 0, "backend": "fused"}), out, resume=True)
    assert resumed.summary["rounds"] == HEAVY["rounds"]
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]


# The files of cluster/, without a cluster.

FOLDER = Path(__file__).parents[2] / "cluster"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
QUANTITY = {"type": ["integer", "string"]}


def mapping(required: str, **properties) -> dict:
    """The schema of a mapping with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def listed(item: dict) -> dict:
    return {"type": "array", "items": item, "minItems": 1}


AMOUNTS = {
    "type": "object",
    "propertyNames": {"enum": ["cpu", "memory", "nvidia.com/gpu"]},
    "additionalProperties": QUANTITY,
}
CONTAINER = mapping(
    "name image resources",
    name=TEXT,
    image=TEXT,
    env=listed(mapping("name value", name=TEXT, value=TEXT)),
    resources=mapping("requests limits", requests=AMOUNTS, limits=AMOUNTS),
    volumeMounts=listed(mapping("name mountPath", name=TEXT, mountPath=TEXT)),
)
VOLUME = mapping(
    "name persistentVolumeClaim",
    name=TEXT,
    persistentVolumeClaim=mapping("claimName", claimName=TEXT),
)
POD = mapping(
    "containers",
    containers=listed(CONTAINER),
    volumes=listed(VOLUME),
    securityContext=mapping("", fsGroup=COUNT),
)
START = {"type": "object", "additionalProperties": TEXT}
GROUP = {
    "rayStartParams": START,
    "template": mapping("spec", metadata={"type": "object"}, spec=POD),
}
SCALE = {"groupName": TEXT, "replicas": COUNT, "minReplicas": COUNT, "maxReplicas": COUNT}
RAY_CLUSTER = mapping(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=mapping("mode", mode={"enum": ["disabled", "token"]}, secretName=TEXT),
    enableInTreeAutoscaling={"type": "boolean"},
    headGroupSpec=mapping("rayStartParams template", **GROUP),
    workerGroupSpecs=listed(
        mapping("groupName minReplicas maxReplicas rayStartParams template", **SCALE, **GROUP)
    ),
)
RAY_JOB = mapping(
    "entrypoint rayClusterSpec",
    entrypoint=TEXT,
    rayClusterSpec=RAY_CLUSTER,
    shutdownAfterJobFinishes={"type": "boolean"},
    ttlSecondsAfterFinished=COUNT,
    backoffLimit=COUNT,
)
STORAGE = mapping("requests", requests=mapping("storage", storage=TEXT))
CLAIM = mapping(
    "accessModes resources", accessModes=listed(TEXT), resources=STORAGE, storageClassName=TEXT
)
KINDS = {
    "kuberay-cluster": ("ray.io/v1", "RayCluster", RAY_CLUSTER),
    "kuberay-job": ("ray.io/v1", "RayJob", RAY_JOB),
    "kuberay-volume": ("v1", "PersistentVolumeClaim", CLAIM),
}


def manifest(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_manifest_has_the_fields_that_kubernetes_requires_and_no_others(name):
    version, kind, spec = KINDS[name]
    schema = mapping(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=mapping("name", name=TEXT),
        spec=spec,
    )
    jsonschema.validate(manifest(name), schema)
    broken = manifest(name)
    broken["spec"]["sepc"] = broken["spec"].popitem()[1]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


@pytest.mark.parametrize("name", ["kuberay-cluster", "kuberay-job"])
def test_all_pods_mount_the_shared_volume_and_keep_the_cache_on_it(name):
    spec = manifest(name)["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (volume,) = pod["volumes"]
        claim = volume["persistentVolumeClaim"]["claimName"]
        assert claim == manifest("kuberay-volume")["metadata"]["name"]
        for container in pod["containers"]:
            (mount,) = container["volumeMounts"]
            assert mount["name"] == volume["name"]
            values = {each["name"]: each["value"] for each in container["env"]}
            for name in ("RAYDPFL_CACHE", "RAYDPFL_DATA"):
                assert values[name].startswith(f"{mount['mountPath']}/")
    assert cluster == manifest("kuberay-cluster")["spec"]


def test_the_entrypoint_of_the_job_is_a_run_that_this_version_understands(monkeypatch):
    words = shlex.split(manifest("kuberay-job")["spec"]["entrypoint"])
    calls = []
    monkeypatch.setattr(
        "raydpfl.runtime.runner.run",
        lambda experiment, out, **options: calls.append((experiment, str(out), options)),
    )
    monkeypatch.setattr("raydpfl.cli.run_display.report", lambda *given, **named: None)
    words = [word.replace("/home/ray/raydpfl", str(FOLDER.parent)) for word in words]
    monkeypatch.setattr(sys, "argv", words)
    app.main()
    ((ran, out, options),) = calls
    assert ran == Experiment.from_yaml(FOLDER.parent / "experiments" / "quickstart.yaml")
    assert out.startswith("/shared/") and options["address"] == "auto"


@pytest.mark.parametrize("name", ["onpremise", "aws"])
def test_a_launcher_file_passes_the_cluster_launchers_own_check(name):
    schema = json.loads((Path(ray.__file__).parent / "autoscaler/ray-schema.json").read_text())
    config = manifest(name)
    jsonschema.validate(config, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**config, "setup_command": []}, schema)
    everything = yaml.safe_dump(config)
    for text in ("RAY_AUTH_MODE=token", "auth_token", "RAYDPFL_CACHE=/shared/"):
        assert text in everything


def test_the_slurm_script_is_sound():
    script = FOLDER / "slurm.sh"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    shellcheck = shutil.which("shellcheck", path=PATH)
    if not shellcheck:
        pytest.skip("shellcheck is not installed")
    assert processes.run([shellcheck, script]).stdout == ""


def slurm(tmp_path: Path) -> list[str]:
    """What slurm.sh says in a job of 3 nodes: how srun is told Ray's token, and arguments."""
    (tmp_path / "srun").write_text(
        '#!/bin/sh\nprintf "%s\\n" "$RAY_AUTH_MODE" "$(cat "$RAY_AUTH_TOKEN_PATH" | wc -c)" "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_ON_NODE": "16"}
    environment = {**os.environ, **job, "PATH": f"{tmp_path}{os.pathsep}{PATH}"}
    command = ["bash", FOLDER / "slurm.sh", "my config.yaml", "out"]
    called = processes.run(command, env=environment, cwd=tmp_path)
    assert called.returncode == 0, called.stderr
    return called.stdout.splitlines()


@pytest.mark.parametrize("resume", [False, True])
def test_the_slurm_script_runs_the_config_over_all_nodes_and_goes_on_with_a_run_that_was_cut_off(
    resume, tmp_path
):
    (tmp_path / "out").mkdir()
    if resume:
        (tmp_path / "out" / "config.yaml").touch()
    mode, length, *words = slurm(tmp_path)
    assert mode == "token"
    assert int(length) == 65
    assert (tmp_path / ".cache" / "ray_token").stat().st_mode & 0o077 == 0
    assert words[words.index("--min-nodes") + 1] == "3"
    assert words[words.index("--num-cpus") + 1] == "16"
    more = ["--out", "out", "--address", "auto", *["--resume"] * resume]
    assert words[words.index("--") + 1 :] == ["raydpfl", "run", "my config.yaml", *more]


def test_the_image_has_all_that_installing_takes_and_a_python_that_may_have_it():
    text = (FOLDER / "Dockerfile").read_text()
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    assert {line[0] for line in lines} == {"ARG", "FROM", "WORKDIR", "COPY", "RUN"}
    copied = {word for line in lines if line[0] == "COPY" for word in line[2:-1]}
    assert all((FOLDER.parent / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "LICENSE", "raydpfl"} <= copied
    version, python = re.fullmatch(r"RAY=([\d.]+)-py(\d+)", lines[0][1]).groups()
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11.4" and int(python) >= 311
    assert {version} == {
        manifest("kuberay-cluster")["spec"]["rayVersion"],
        manifest("kuberay-job")["spec"]["rayClusterSpec"]["rayVersion"],
    }


def test_the_readme_names_every_file_and_its_commands_name_files_that_exist():
    text = (FOLDER / "README.md").read_text()
    names = {each.name for each in FOLDER.iterdir()} - {"README.md"}
    assert not [name for name in names if name not in text]
    paths = re.findall(r"(?:cluster|experiments)/[\w./-]+\w", text)
    assert not [path for path in paths if not (FOLDER.parent / path).exists()]
