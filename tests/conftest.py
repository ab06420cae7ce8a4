"""What the tests share: one Ray, started by the first test that needs it, and a small experiment
that trains in a second.
"""

import contextlib
import copy
import functools
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml

CONTROLLER = "PYTEST_XDIST_WORKER" not in os.environ  # of the workers that share the tests
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AIR_NEW_OUTPUT="0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if CONTROLLER:  # the workers, and the processes that tests start, share its cache
    os.environ["RAYDPFL_CACHE"] = tempfile.mkdtemp(prefix="raydpfl-tests-")

SMALL = {
    "seed": 3,
    "rounds": 4,
    "data": {"kind": "fashion_mnist_mini", "clients": 50, "partition": {"kind": "iid"}},
    "model": {"kind": "softmax"},
    "selection": {"kind": "uniform", "cohort": 20},
    "local": {"kind": "sgd", "steps": 5, "batch": 10, "lr": 0.1},
    "bounding": {"kind": "clip", "bound": 1.0},
    "noise": {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-5},
    "server": {"kind": "momentum"},
    "privacy": {"accountants": ["rdp"]},
    "client": {"actors": 0, "num_cpus": 0.01, "chunk": 8},
    "evaluate": {"every": 2},
    "measure": [],
    "track": [],
}


@functools.cache
def _messages():
    return yaml.safe_load((Path(__file__).parent / "messages.yaml").read_text())


def messages(subject: str):
    """What is refused of a subject, with its messages: `tests/messages.yaml`."""
    return _messages()[subject]


@contextlib.contextmanager
def refusal(pattern: str | None = None, begins: str = "", line: str = ""):
    """Within it a `ConfigError` of one line is raised, in which the pattern is found; `begins`: the
    beginning of its field and what was expected; `line`: the beginning of the line.
    """
    from raydpfl.errors import ConfigError

    with pytest.raises(ConfigError, match=pattern) as caught:
        yield caught
    error = caught.value
    assert "\n" not in str(error) and str(error).startswith(line)
    assert f"{error.field}: {error.expected}".startswith(begins)


def experiment(**sections):
    """The small experiment with keys of sections changed: `experiment(client={"actors": 2})`."""
    from raydpfl import Experiment

    tree = copy.deepcopy(SMALL)
    for name, value in sections.items():
        if isinstance(value, dict):
            tree[name] = value if "kind" in value else {**tree.get(name, {}), **value}
        else:
            tree[name] = value
    return Experiment.from_dict(tree)


def start_coordinator(out: Path, **sections):
    """The coordinator of a run of the small experiment, before its first round."""
    from raydpfl.simulation.coordinator import Coordinator
    from raydpfl.simulation.resolution import resolve

    out.mkdir(exist_ok=True)
    coordinator = Coordinator(resolve(experiment(**sections)), str(out))
    coordinator.start()
    return coordinator


def mechanism(kind="fixed", population=1920, cohort=80, std=4.0, rounds=100, **fields):
    """Noised sums over cohorts of updates within 1; by default those of PRIVACY.md sec. 2."""
    from raydpfl.privacy import Mechanism, Query, Sampling

    sampling = Sampling(kind, population, cohort)
    return Mechanism(sampling, (Query("updates", 1.0, std),), rounds, **fields)


def local_steps(*, samples: int, batch: int, steps: int, bound: float, std: float):
    """One client's DP-SGD: `std` is that of the noise on the mean gradient of a batch."""
    from raydpfl.privacy import Mechanism, Query, Sampling

    query = Query("gradient", bound, batch * std)
    return Mechanism(Sampling("fixed", samples, batch), (query,), steps, "sample", "step")


def batches(shards, name, size=100):
    """The `test` or `validation` rows of opened data for training, `size` at a time: x and y."""
    return itertools.starmap(shards.decode, shards.stored_batches(name, size))


def form(shape, classes=10, task="classification", targets=(), tokens=0):
    """Samples of this shape, and what is learnt of them."""
    from raydpfl.models import tasks

    return tasks.Form(tuple(shape), tasks.Target(targets, classes), tasks.parse(task), tokens)


def task_of(y):
    """The task for single targets."""
    from raydpfl.models import tasks

    numbers = "float" in str(y.dtype)  # torch's, or numpy's
    return tasks.parse("regression" if numbers else "classification")


@pytest.fixture(autouse=True)
def forgotten():
    """Modules that a test wrote into its own directory are imported anew by the next test."""
    last = next(reversed(sys.modules))
    yield
    # they come last, in the order of their import
    for name in list(itertools.takewhile(lambda name: name != last, reversed(sys.modules))):
        if "pytest-of-" in (getattr(sys.modules[name], "__file__", None) or ""):
            sys.modules.pop(name)


@pytest.fixture
def typed(monkeypatch, capsys):
    """Runs the command line in this process: its exit code, and what it prints to both streams."""
    from raydpfl.cli import app

    def run(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["raydpfl", *map(str, words)])
        code = 0
        try:
            app.main()
        except SystemExit as stop:
            code = stop.code
        out, said = capsys.readouterr()
        assert "--debug" in words or "Traceback" not in out + said
        return code, out, said

    return run


@pytest.fixture
def complain(typed):
    """The one line that a command prints to standard error, after it has ended with `code`. What is
    refused prints nothing else, but for `show`, which shows what is not.
    """

    def complain(words, code=2) -> str:
        ended, out, said = typed(*words)
        assert ended == code, said
        assert out == "" or code == 1 or words[0] == "show", out
        assert said.count("\n") == 1 and said.startswith("raydpfl: "), said
        return said.removeprefix("raydpfl: ").rstrip()

    return complain


@pytest.fixture
def small(tmp_path):
    """The small experiment in a file."""
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


@pytest.fixture(scope="session")
def result(tmp_path_factory):
    """The result of a run that has reached the epsilon of its noise; nobody writes to it."""
    from raydpfl import run

    noise = {"kind": "gaussian", "epsilon": 6.0, "delta": 1e-5}
    out = tmp_path_factory.mktemp("private") / "a folder with a long name" / "<run>"
    return run(experiment(noise=noise, privacy={"accountants": ["rdp", "paper"]}), out)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Makes a module of a user's own, in a directory from which it is imported."""

    def make(name: str, source: str) -> Path:
        monkeypatch.syspath_prepend(tmp_path)
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        return path

    return make


@pytest.fixture
def one_thread():
    """As in an actor."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def offline(monkeypatch):
    """Nothing can be downloaded."""

    def refuse(*_, **__):
        raise OSError("no network")

    for name in ("torchvision.datasets.utils.urllib.request.urlopen", "torch.hub.urlopen"):
        monkeypatch.setattr(name, refuse)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """Client actors of other tests' runs take no core from this test's."""
    if "raydpfl.runtime.launcher" in sys.modules:
        monkeypatch.setattr(
            sys.modules["raydpfl.runtime.launcher"], "count_client_actors", lambda: 0
        )


@pytest.fixture(scope="session")
def shared_ray():
    """One Ray with room for what the small experiments ask, however few cores there are."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()


@pytest.fixture(scope="session")
def s3():
    """A local S3 server, started when first needed; makes a new bucket, returns its address."""
    pytest.importorskip("moto.server", reason="the local S3 server: pip install 'raydpfl[test]'")
    from pyarrow.fs import FileSystem

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    try:
        until = time.monotonic() + 30
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert server.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        made = itertools.count()

        def bucket() -> str:
            name = f"bucket-{next(made)}"
            FileSystem.from_uri(f"s3://{name}?allow_bucket_creation=true")[0].create_dir(name)
            return f"s3://{name}"

        yield bucket
    finally:
        server.kill()
        server.wait()


def pytest_configure() -> None:
    """Compiles the native code once, ahead of the workers."""
    if CONTROLLER:
        from raydpfl.core import native

        native.library()


def pytest_unconfigure() -> None:
    if CONTROLLER:
        shutil.rmtree(os.environ["RAYDPFL_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow: tests that start Ray, examples of docstrings that train clients for seconds,
    and all cases of a test but the first. All others without that mark are fast.
    """
    seen = set()
    for item in items:
        name = item.nodeid.split("[")[0]
        starts_ray = "shared_ray" in getattr(item, "fixturenames", ())
        if name in seen or starts_ray or item.name in ("raydpfl.check", "raydpfl.audit"):
            item.add_marker("slow")
        seen.add(name)
        if item.get_closest_marker("slow") is None:
            item.add_marker("fast")
