"""What the tests share: one Ray, started by the first test that needs it, and a small experiment
that trains in a second.
"""

from __future__ import annotations

import compileall
import copy
import fcntl
import gc
import importlib
import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import forks
import pytest

from raydpfl.core import hardware, kernel_build

gc.disable()  # until all is imported, which makes much and leaves little behind
sys.dont_write_bytecode = False  # pytest rewrites a test file once, and not in each process
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # of those that share the tests
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
SHARED = os.environ.get("RAYDPFL_CACHE", "") if WORKERS > 1 else ""  # of who started the workers
# The caches of data and calibrations are the tests' own, and shared by the processes they start.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_AIR_NEW_OUTPUT="0",
    RAYDPFL_CACHE=tempfile.mkdtemp(prefix="raydpfl-tests-"),
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A kill loses nothing that was written; what a power cut would lose, no test can tell. It is eleven
# waits for the disk in every small run.
os.fsync = lambda descriptor: None

collect_ignore = ["forked.py"]  # a program, which would look for its server

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


def experiment(**sections):
    """The small experiment with some keys of some sections changed: `experiment(client={"actors":
    2})`.
    """
    from raydpfl import Experiment

    tree = copy.deepcopy(SMALL)
    for name, value in sections.items():
        if isinstance(value, dict):
            tree[name] = value if "kind" in value else {**tree.get(name, {}), **value}
        else:
            tree[name] = value
    return Experiment.from_dict(tree)


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
    """Modules that a test wrote into its own directory are imported anew by the next test that has
    one of that name.
    """
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
def one_thread():
    """As in an actor."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the test's own."""
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch):
    """Client actors of other tests' runs take no core from this test's."""
    if "raydpfl.runtime.launcher" in sys.modules:
        monkeypatch.setattr(sys.modules["raydpfl.runtime.launcher"], "at_work", lambda: 0)


@pytest.fixture(scope="session")
def shared_ray():
    """One Ray with room for what the small experiments ask, however few cores there are. Its
    processes are forked (`forks`), and it has none that no run asks for.
    """
    import ray
    from ray._private import node

    from raydpfl.runtime import session as cluster

    # has what Ray's agents need imported, before Ray waits half a minute for them and no longer
    forks.run([sys.executable, "-c", ""], ray=False, check=True)
    with forks.forking(), pytest.MonkeyPatch.context() as patch:
        for name in cluster.UNUSED:
            patch.setattr(node.Node, name, lambda *given, **more: None)
        # workers would give way to all else on the machine, other tests' too
        patch.setenv("RAY_worker_niceness", "0")
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
    """A local S3 server, started by the first test that needs it; makes a new bucket, and returns
    its address.
    """
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


# The files that take longest. They begin first, so that no worker has one left when the others have
# nothing more; files that wait for processes of their own stand between files that compute.
LONGEST = (
    "test_cluster", "test_same_bits", "test_contract", "test_sweep", "test_gpu", "test_failures",
    "test_studies", "test_local", "test_study", "test_submit", "test_native", "test_launch",
    "test_delivery", "test_run", "test_audit", "test_sweep_folder", "test_budget",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Has test files begin in the order of `LONGEST`, and compiles the package once, ahead of the
    processes that tests start: where PYTHONDONTWRITEBYTECODE is set, each would compile it again,
    which takes a third of a second.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist's own order, by the number of tests
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parent.parent / "raydpfl", quiet=2)
        if getattr(config.option, "numprocesses", None):
            _compile_for_workers()


def _compile_for_workers() -> None:
    """Begins to compile what is native, in a thread that holds its lock until it is there, or until
    it is known that it cannot be: a worker then says why.
    """
    command = kernel_build.command(hardware.vectors())
    if command is None:
        return
    folder = Path(os.environ["RAYDPFL_CACHE"], "native")
    folder.mkdir()
    lock = (folder / "lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def work() -> None:
        with lock, suppress(OSError, subprocess.SubprocessError):
            kernel_build.compiled(command, kernel_build.place(kernel_build.name(command)))

    Thread(target=work, daemon=True).start()


def pytest_sessionstart(session: pytest.Session) -> None:
    """What one process compiles, none compiles again: each worker imports a share of the test files
    ahead of the others, which then find them rewritten; and they have one folder of compiled
    libraries, which has its first when torch is imported, or soon after.
    """
    if WORKERS == 1:
        return
    compiled = Path(SHARED, "native")
    compiled.mkdir(exist_ok=True)
    Path(os.environ["RAYDPFL_CACHE"], "native").symlink_to(compiled)
    importlib.import_module("torch")
    with (compiled / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
    if session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    files = sorted(Path(__file__).parent.rglob("test_*.py"), key=lambda file: file.stat().st_size)
    for file in files[WORKER::WORKERS]:
        sys.path.append(str(file.parent))
        # pytest imports it once more and tells what is wrong with it
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(file.stem)


def pytest_collection_finish() -> None:
    """What is there now stays, so nobody needs to look through it for garbage; nor as often as
    usual through what tests leave, in a process of this size.
    """
    gc.freeze()
    gc.set_threshold(10_000, 10, 20)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    gc.unfreeze()
    forks.end()
    shutil.rmtree(os.environ["RAYDPFL_CACHE"], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What starts Ray is slow, besides what is marked so, and of a test of many cases all but the
    first; all else is fast.
    """
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    seen = set()
    for item in items:
        name = item.nodeid.split("[")[0]
        if name in seen or "shared_ray" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
        seen.add(name)
        if item.get_closest_marker("slow") is None:
            item.add_marker("fast")
