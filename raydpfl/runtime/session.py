"""The Ray that a run or a sweep works on: started here, or joined by address; watched while it is
used, and gone afterwards.

Ray's own processes die with the one that started them, but not all of them and not soon; and a
driver whose control store has died waits for a minute, to be aborted then. So every process of a
Ray that was started here carries a mark, by which it is killed (`raydpfl.runtime.orphan_cleanup`),
and a thread watches the control store. A joined cluster is shared: nothing there is killed.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import psutil

from raydpfl.core import signals
from raydpfl.errors import ConfigError, FileError, RunError
from raydpfl.runtime import orphan_cleanup

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # frees models and sums of past rounds at once, where it would take up to a second
    "RAY_free_objects_period_milliseconds": "0",
    # a process that Ray gives a title keeps its environment readable, and the mark in it
    "SPT_NOENV": "1",
    # a warning of a raylet, where `client.actors: per-client` asks for a process for each client
    "RAY_DEDUP_LOGS_SKIP_REGEX": "worker processes have been started",
}
LOOK = 1.0  # seconds between two looks at the control store
SILENCE = 5.0  # seconds without an answer, after which a joined cluster's control store is lost
# seconds from there to the end of the process, where the main thread waits in Ray itself and does
# not hear of it
GRACE = 7.0
SETTLES = 1.0  # seconds that Ray may take to know what is free again
ANSWER = 5.0  # seconds that a control store has for its first word
ENTRY = (
    "a running Ray cluster (if it asks for a token, RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH "
    "give it)"
)
# What a client of gRPC says first: the preface of HTTP/2, and an empty frame of settings.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"


class Session:
    """A connection of this process to Ray, until `close`: to a new one where `address` is "local",
    else to that of a cluster. `options` are those of `ray.init`. Raises `ConfigError` where the
    cluster cannot be joined or this process is connected already, `RunError` if Ray does not start.
    """

    def __init__(self, address: str, **options: Any):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import ray

        if ray.is_initialized():
            expected = "none: this process is connected to a Ray cluster already"
            raise ConfigError("--address", address, expected)
        self.lost: str | None = None  # why it cannot be used any more
        self.coordinator: int | None = None  # the process of one on this node, once there is one
        self._stop_event = threading.Event()
        # the control store and the raylet of a Ray that was started here
        self._essential: list[psutil.Process] = []
        self._mark: str | None = None
        self._cleanup: subprocess.Popen | None = None
        if address == "local":
            self._start(options)
        else:
            self._join(address, options)
        threading.Thread(target=self._watch, name="raydpfl-control-store", daemon=True).start()

    def _start(self, options: dict[str, Any]) -> None:
        mark = self._mark = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._cleanup = subprocess.Popen(
            [sys.executable, "-P", str(orphan_cleanup.__file__), mark],
            start_new_session=True,  # where no Ctrl-C of a terminal reaches it
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.environ[orphan_cleanup.MARK] = mark
        try:
            _init("local", {**options, "include_dashboard": False})
            processes = orphan_cleanup.marked_processes(mark)
            self._essential = [
                process for process in processes if process.name() in ("gcs_server", "raylet")
            ]
        except BaseException as error:
            self.close()
            if isinstance(error, Exception):
                reason = f"{error}; a run with client.actors=0 needs none"
                raise RunError(f"Ray could not be started: {reason}") from None
            raise
        finally:
            os.environ.pop(orphan_cleanup.MARK)

    def _join(self, address: str, options: dict[str, Any]) -> None:
        import ray

        cluster_address = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
        try:
            _greet(cluster_address)  # Ray itself would try for minutes
            _init(address, options)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise ConfigError("--address", address, f"the address of {ENTRY}: {error}") from None
        self._store = ray.get_runtime_context().gcs_address

    def check(self) -> None:
        """Raises `RunError` if the control store is lost."""
        if self.lost:
            raise RunError(self.lost)

    def close(self) -> None:
        """Disconnects; a Ray that was started here ends, with every process of it."""
        import ray

        try:
            ray.shutdown()
        finally:
            if self._cleanup and self._mark and self._cleanup.stdin:
                orphan_cleanup.kill(self._mark)
                self._cleanup.stdin.close()
                self._cleanup.wait()
            self._stop_event.set()

    def _alive(self) -> bool:
        with suppress(OSError, psutil.Error):
            if not self._essential:
                _greet(self._store)
            return all(process.status() != psutil.STATUS_ZOMBIE for process in self._essential)
        return False

    def _watch(self) -> None:
        last_answer = time.monotonic()
        while not self._stop_event.wait(LOOK):
            if self._alive():
                last_answer = time.monotonic()
            elif self._essential or time.monotonic() - last_answer > SILENCE:
                break
        else:
            return
        cause = (
            "Ray's control store or raylet has died"
            if self._essential
            else "the cluster's control store does not answer"
        )
        if self.coordinator and not psutil.pid_exists(self.coordinator):
            cause = f"the coordinator died: {cause}"
        self.lost = f"{cause}; go on with --resume"
        if self._mark:
            orphan_cleanup.kill(self._mark)
        if not self._stop_event.wait(GRACE):
            # a progress bar has hidden the cursor
            cursor_code = "\x1b[?25h" if sys.stderr.isatty() else ""
            os.write(2, f"{cursor_code}raydpfl: {self.lost}\n".encode())
            os._exit(1)


def free_resources() -> dict[str, float]:
    """The resources of the cluster that nothing has taken, of all nodes together. What a run that
    has just ended gives back is waited for, for a moment.
    """
    import ray

    deadline = time.monotonic() + SETTLES
    total = ray.cluster_resources()
    while True:
        resources = ray.available_resources()
        is_used = any(resources.get(name, 0.0) < total.get(name, 0.0) for name in ("CPU", "GPU"))
        if not is_used or time.monotonic() > deadline:
            return resources
        time.sleep(0.1)


def count_client_actors() -> int:
    """Client actors on this machine, of runs that have each started a Ray."""
    count = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            title = process.cmdline()[:1]
            if title and title[0].startswith("ray::ClientActor"):
                count += orphan_cleanup.MARK in process.environ()
    return count


def place() -> str:
    """What this node is called in messages."""
    import ray

    name = socket.gethostname()
    return f"{name} ({ray.util.get_node_ip_address()})" if ray.is_initialized() else name


def pin_to_node(remote: Any, node: str, **options: Any) -> Any:
    """`remote` on the node with this id of Ray's, without a core of its own."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(remote).options(num_cpus=0, scheduling_strategy=strategy, **options)


def unwrap_error(error: Exception, failure: str) -> Exception:
    """A call's RayTaskError as if raised here: an error of ours, or one that says `failure`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, (ConfigError, RunError)):
        return cause
    return FileError(str(cause)) if isinstance(cause, OSError) else RunError(f"{failure}\n{error}")


def _init(address: str, options: dict[str, Any]) -> None:
    """`ray.init`, whose own handlers of signals stay no longer than that."""
    import ray

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception:
        signals.check()  # what came of a signal is no error
        raise
    except SystemExit:  # by Ray's handler of SIGTERM
        raise KeyboardInterrupt from None
    finally:
        signals.install()
    signals.check()


def _greet(address: str) -> None:
    """Raises OSError unless a server of gRPC answers at host:port, or it is another address."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return
    place = (host.rpartition("/")[2].strip("[]"), int(port))
    with socket.create_connection(place, timeout=ANSWER) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        connection.sendall(PREFACE)
        try:
            answer = connection.recv(9)
        except TimeoutError:
            raise OSError(
                f"{address} takes connections but says nothing for {ANSWER:g} s; is it stopped?"
            ) from None
        if len(answer) < 4 or answer[3] != 4:  # the first frame is of settings
            raise OSError(
                f"what listens at {address} is no control store of Ray "
                "(its port is 6379 unless another was given)"
            )
