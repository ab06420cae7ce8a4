"""Processes of this Python that have all imported: forked from one that has.

A command that a test starts imports torch, Ray and this package: three seconds of a core. So does
every process of a Ray: its agents, and a worker for each actor of each small run. Here a server
imports them once, and forks what is asked for: `Popen` and `run` stand for those of `subprocess`,
and what they start, and `forking` has, Ray's own processes forked likewise. What is under test may
be the start itself, or the tree of Ray's processes: that is for `subprocess`, or for `ray=False`.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

# What is imported ahead of a fork: all but Ray first, which takes the settings of a worker from the
# environment as it is imported.
BASE = (
    "aiohttp",
    "grpc",
    "jsonschema",
    "pandas",
    "requests",
    "raydpfl.cli.app",
    "raydpfl.runtime.runner",
)
WORKER = (
    "ray._private.workers.default_worker",
    "ray._private.workers.setup_worker",
    "raydpfl.runtime.coordinator_actor",
    "raydpfl.sweep.trial",
)
COMMAND = (
    "raydpfl.check",
    "raydpfl.sweep.study",
    "raydpfl.jobs.client",
    "raydpfl.sweep.trial",
    "ray._private.log_monitor",
    "ray._private.runtime_env.agent.runtime_env_agent",
    "ray.autoscaler._private.monitor",
    "ray.cluster_utils",
    "ray.dashboard.agent",
    "ray.dashboard.dashboard",
)
# Variables that are read as modules are imported, if their names begin so; and those of them that
# are read later, or again, or that a process that has used Ray or a GPU sets to what they mean if
# they are not set.
AT_IMPORT = ("ATEN", "CUBLAS", "CUDA", "LD_", "MKL", "OMP", "OPENBLAS", "PYTHON", "RAY_", "TORCH")
LATER = (
    "CUBLAS_WORKSPACE_CONFIG",
    "PYTHONBREAKPOINT",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    "RAY_ADDRESS",
    "RAY_AIR_NEW_OUTPUT",
    "RAY_API_SERVER_ADDRESS",
    "RAY_AUTH_",
    "RAY_CLIENT_MODE",
    "RAY_TMPDIR",
    "RAY_USAGE_STATS_ENABLED",
    "TORCHINDUCTOR_CACHE_DIR",
)
# prctl's
DIES_WITH_PARENT = 1
ADOPTS = 36
SET_SIGNAL = 10  # fcntl's F_SETSIG


@dataclass
class Server:
    """One for all that is started with the same variables `AT_IMPORT`.

    In its folder are an executable, `python`, that has forked what it is told to be, and the
    sockets it asks by. The one in `kept` has workers forked with Ray imported: by settings of the
    first of them, so it is for those of one Ray.
    """

    folder: Path
    process: subprocess.Popen

    @classmethod
    def started(cls, environment: dict[str, str]) -> Server:
        folder = Path(tempfile.mkdtemp(prefix="raydpfl-forks-"))
        (folder / "kept").mkdir()
        (folder / "kept" / "commands").symlink_to("../commands")
        text = Path(__file__).with_name("forked.py").read_text()
        for python in (folder / "python", folder / "kept" / "python"):
            python.write_text(f"#!{sys.executable} -IS\n{text}")
            python.chmod(0o755)
        with ExitStack() as stack:
            listeners = []
            for name in ("commands", "workers", "kept/workers"):
                listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                listeners[-1].bind(str(folder / name))
                listeners[-1].listen(100)
            given = [each.fileno() for each in listeners]
            command = [sys.executable, __file__, str(folder), *map(str, given)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            process = subprocess.Popen(command, env=environment, pass_fds=given, **pipes)
        return cls(folder, process)

    def ask(self, descriptors: list[int], **asked: Any) -> int:
        """The process that was forked, which is a child of this one."""
        text = json.dumps(asked).encode()
        with socket.socket(socket.AF_UNIX) as server, _adopting():
            server.connect(str(self.folder / "commands"))
            socket.send_fds(server, [len(text).to_bytes(8, "big")], descriptors)
            server.sendall(text)
            return int.from_bytes(server.recv(8), "big")

    def end(self) -> None:
        self.process.communicate()
        shutil.rmtree(self.folder)


servers: dict[tuple, Server] = {}


def server(environment: dict[str, str]) -> Server:
    """The server for what is started with this environment."""
    key = tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(AT_IMPORT) and not name.startswith(LATER)
        )
    )
    if key not in servers:
        servers[key] = Server.started(environment)
    return servers[key]


def end() -> None:
    """Ends the servers, and what Rays of theirs are left."""
    while servers:
        servers.popitem()[1].end()


@contextmanager
def forking() -> Iterator[None]:
    """Within it, this process starts a Ray whose processes are forked; once."""
    before = sys.executable
    sys.executable = str(server(dict(os.environ)).folder / "kept" / "python")
    try:
        yield
    finally:
        sys.executable = before


class Popen(subprocess.Popen):
    """`subprocess.Popen` of this Python, with -c, -m or a file, which is forked. With `ray`, the
    processes of the Ray that it starts are too.
    """

    def __init__(self, command: list, ray: bool = True, **options: Any):
        assert command[0] == sys.executable
        self.ray = ray
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        told = inspect.signature(super()._execute_child).bind(*given).arguments
        assert not (told["shell"] or told["preexec_fn"] or told["pass_fds"])
        environment = dict(os.environ if told["env"] is None else told["env"])
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        mine = (told[name] for name in ("p2cread", "c2pwrite", "errwrite"))
        self.pid = server(environment).ask(
            [own if own >= 0 else usual for usual, own in enumerate(mine)],
            arguments=[os.fspath(each) for each in told["args"][1:]],
            environment=environment,
            folder=os.fspath(told["cwd"] or os.getcwd()),
            deaf=signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
            session=told["start_new_session"],
            ray=self.ray,
        )
        self._child_created = True
        self._close_pipe_fds(*(told[name] for name in pipes))


def run(
    command: list, timeout: float = 120, said: str = "", check: bool = False, **given: Any
) -> subprocess.CompletedProcess:
    """`subprocess.run` with what it is told, `said`, and what it says as text."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Popen(command, **pipes, text=True, **given) as process:
        try:
            told = process.communicate(said, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, *told)
    if check:
        done.check_returncode()
    return done


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it, orphans among the descendants of this process become its children."""
    ctypes.CDLL(None).prctl(ADOPTS, 1, 0, 0, 0)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(ADOPTS, 0, 0, 0, 0)


# The server's side.


def serve(listener: socket.socket, *needed: str) -> dict[str, Any] | None:
    """Forks a process for everyone who asks, until there is no more of the standard input. In such
    a process, what was asked. `needed`: modules to import under the first one's environment.
    """
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asking = listener.accept()[0]
        length, descriptors, *_ = socket.recv_fds(asking, 8, 3)
        with asking.makefile("rb") as whole:
            asked = json.loads(whole.read(int.from_bytes(length, "big")))
        if needed:
            os.environ.update(asked["environment"])
            _import(needed)
            needed = ()
        if os.fork() == 0:  # which leaves the connection open for as long as it lives
            listener.close()
            if asked.get("held"):
                _die_with(asking.detach())
            else:
                _be_adopted(asking)
            _take(descriptors)
            return asked
        asking.close()
        for each in descriptors:
            os.close(each)
    return None


def _import(names: Iterable[str]) -> None:
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _die_with(connection: int) -> None:
    """Has the system kill this process as soon as the other end, a child of Ray's, has ended; and
    what it forks leads a group, which Ray kills once it is dead.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, SET_SIGNAL, signal.SIGKILL)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)


def _be_adopted(asking: socket.socket) -> None:
    """Goes on in a child that is an orphan, and says who that is."""
    parent = os.getpid()
    if os.fork() > 0:
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.001)
    asking.sendall(os.getpid().to_bytes(8, "big"))
    asking.close()


def _take(descriptors: list[int]) -> None:
    """Takes them for the standard input, output and error output."""
    for mine, theirs in enumerate(descriptors):
        os.dup2(theirs, mine)
    for each in descriptors:
        os.close(each)
    sys.stdin = os.fdopen(0)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))


def become(
    python: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    blocked: list[int] = (),
    deaf: bool = False,
    session: bool = False,
    ray: bool = True,
    held: bool = False,
) -> None:
    """This process becomes what was asked for: `deaf`, where who started it ignores SIGINT."""
    if session:
        os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN if deaf else signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    if ray:
        sys.executable = python
    while arguments[0] in ("-u", "-P"):
        if arguments.pop(0) == "-u":
            sys.stdout.reconfigure(write_through=True)
    if "/ray/_private/workers/" in arguments[0]:
        _tell_apart()
    if Path(arguments[0]).name == "setup_worker.py":
        arguments = _worker(arguments[1:])
    elif "/ray/_private/workers/" not in arguments[0]:
        _settle(held)
    _carry_out(arguments, folder)


def _carry_out(arguments: list[str], folder: str) -> None:
    """Does what Python is told."""
    kind = arguments[0]
    sys.argv = arguments
    if kind in ("-c", "-"):
        code = arguments.pop(1) if kind == "-c" else sys.stdin.read()
        name = "<string>" if kind == "-c" else "<stdin>"
        sys.path.insert(0, "")
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(code, name, "exec"), vars(sys.modules["__main__"]))
    elif kind == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, folder)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(kind).parent.resolve()))
        runpy.run_path(kind, run_name="__main__")


def _settle(held: bool) -> None:
    """Has Ray, imported before, take its settings from the environment."""
    from ray._private import process_watcher
    from ray._raylet import Config

    def watched(_folder: Any, _client: Any, _dead: Any, loop: Any) -> asyncio.Task:
        return loop.create_task(asyncio.sleep(1e9))

    Config.initialize("")
    if held:  # no child of a raylet, as agents look whether they are; it ends with one
        process_watcher.create_check_raylet_task = watched


def _tell_apart() -> None:
    """Has Ray's generator of ids go on from a place of this process's own: those that are forked
    have one and the same. Two workers that begin at once would put one object twice, of which one
    dies, and Ray waits a minute for it.
    """
    from ray import ObjectRef

    for _ in range(8 * (os.getpid() % 1000)):
        ObjectRef.from_random()


def _worker(arguments: list[str]) -> list[str]:
    """What a worker of Ray's is started with, once its environment is as Ray wants it."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    told, arguments = setup_worker.parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(told.serialized_runtime_env_context or "{}")
    os.environ.update(context.env_vars)
    if context.command_prefix:  # cd to the folder of a job's files, and
        os.chdir(shlex.split(context.command_prefix[1])[0])
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [place for place in places if place and place not in sys.path]
    return arguments


def _end(call: Callable, *arguments: Any, **options: Any) -> NoReturn:
    """Ends this process as Python does after a call, but for the destructors of all that has been
    imported, which take half a second.
    """
    code = 0
    try:
        call(*arguments, **options)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1  # of KeyboardInterrupt too, once Ray is imported
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit((code or 0) & 255)


def main() -> None:
    folder = sys.argv[1]
    listeners = [socket.socket(fileno=int(each)) for each in sys.argv[2:]]
    python = f"{folder}/python"
    sys.path.pop(0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    _import(BASE)
    # each with its needs at once, and at the first that is asked for
    backends = [(listeners[1], (), ()), (listeners[2], (), WORKER), (listeners[0], COMMAND, ())]
    while len(backends) > 1 and os.fork() > 0:
        backends.pop(0)
    listener, now, later = backends[0]
    for each in listeners:
        if each is not listener:
            each.close()
    _import(now)
    asked = serve(listener, *later)
    if asked:
        _end(become, python, **asked)


if __name__ == "__main__":
    main()
