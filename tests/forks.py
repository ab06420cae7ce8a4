"""Workers of Ray that have all imported: forked from one process that has.

A worker that Ray starts by itself imports Ray twice, and then torch and this package: seconds of a
core, for each actor of each small run. With this file in the place of Ray's `setup_worker.py`, the
process that Ray starts (`ask`) has a server (`serve`) fork the worker; either ends with the other.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

SERVER = "RAYDPFL_TESTS_FORKS"  # the variable with the path of the server's socket
NEEDED = (
    "ray._private.workers.default_worker",
    "ray._private.workers.setup_worker",
    "raydpfl.hosted",
    "raydpfl.tune.trial",
)
DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
SET_SIGNAL = 10  # fcntl's F_SETSIG


@contextmanager
def served() -> Iterator[dict[str, str]]:
    """A server, and what the environment of the Ray that uses it has to hold. All workers have the
    settings of the first one, such as its token.
    """
    folder = tempfile.mkdtemp(prefix="raydpfl-forks-")
    path = f"{folder}/socket"
    server = subprocess.Popen([sys.executable, "-P", __file__, path], stdin=subprocess.PIPE)
    try:
        yield {SERVER: path}
    finally:
        server.communicate()
        shutil.rmtree(folder)


def ask() -> None:
    """Has the worker forked that this process was to be, and waits for its end."""
    asked = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SERVER])
        socket.send_fds(server, [len(asked).to_bytes(8, "big")], [1, 2])
        server.sendall(asked)
        server.recv(1)


def serve(path: str) -> None:
    """Forks a worker for everyone who asks, until there is no more of the standard input."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(100)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        asking = listener.accept()[0]
        length, outputs, *_ = socket.recv_fds(asking, 8, 2)
        with asking.makefile("rb") as whole:
            asked = json.loads(whole.read(int.from_bytes(length, "big")))
        _import(asked[1])
        if os.fork() == 0:  # which leaves the connection open for as long as it lives
            listener.close()
            _die_with(asking.fileno())
            _become(outputs, *asked)
            os._exit(0)
        for each in (asking.fileno(), *outputs):
            os.close(each)
        asking.detach()


def _import(environment: dict[str, str]) -> None:
    """All that workers need; Ray takes its settings from the environment as it is imported."""
    if "ray" not in sys.modules:
        os.environ.update(environment)
        for name in NEEDED:
            importlib.import_module(name)
        gc.freeze()


def _die_with(connection: int) -> None:
    """Has the system kill this process as soon as the other end, a child of Ray's, has ended."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, SET_SIGNAL, signal.SIGKILL)
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)


def _become(outputs: list[int], arguments: list[str], environment: dict, folder: str) -> None:
    """This process becomes the worker."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)  # Ray kills the group that a dead worker was of
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL)
    for mine, theirs in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(theirs, mine)
        os.close(theirs)
    os.chdir(folder)
    told, sys.argv = setup_worker.parser.parse_known_args(arguments)
    context = RuntimeEnvContext.deserialize(told.serialized_runtime_env_context or "{}")
    os.environ.clear()
    os.environ.update(environment | context.env_vars)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        ask()
