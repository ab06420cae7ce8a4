"""Processes that are forked for tests are as those that are started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import forks
import psutil
import pytest

pytestmark = pytest.mark.slow

ABOUT = """
import os, signal, sys, threading
numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
print(sys.argv, sys.path[0], __name__, os.getcwd(), os.environ.get("TOLD"), sys.stdin.read())
print([signal.getsignal(each) for each in numbers], signal.pthread_sigmask(0, ()))
print(os.getppid(), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.isatty(1))
print(len(os.listdir("/proc/self/task")), threading.active_count())
"""
ENDS = [
    "",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('said')",
    "import os; os.kill(os.getpid(), 15)",
    "import os; print('unheard'); os._exit(4)",
    "import ray; raise KeyboardInterrupt",
    "import atexit; atexit.register(print, 'last'); print('first')",
    "import threading; threading.Timer(0.1, print, ['late']).start()",
]


def said(command: list[str], started, **options) -> tuple[int, str, str]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with started(command, text=True, **pipes, **options) as process:
        told = process.communicate("given\n", timeout=60)
    return process.returncode, *told


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN])
def interrupts(request):
    """What this process does when it is interrupted."""
    before = signal.signal(signal.SIGINT, request.param)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("session", [False, True])
def test_a_command_that_is_forked_finds_what_a_started_one_does(session, interrupts, tmp_path):
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "TOLD": "1"},
        "start_new_session": session,
    }
    file = tmp_path / "about.py"
    file.write_text(ABOUT)
    backends = [["-c", ABOUT], [str(file)], ["-m", "about"]]
    for backend in backends:
        command = [sys.executable, *backend, "a", "-b"]
        expected = said(command, subprocess.Popen, **options)
        assert said(command, forks.Popen, **options) == expected
        assert not expected[0] and "given" in expected[1]


@pytest.mark.parametrize("code", ENDS)
def test_a_command_that_is_forked_ends_as_a_started_one_does(code):
    command = [sys.executable, "-c", code]
    started = said(command, subprocess.Popen)
    forked = said(command, forks.Popen)
    assert forked[:2] == started[:2] and forked[2].splitlines()[-1:] == started[2].splitlines()[-1:]


def test_a_process_that_is_forked_is_a_child_that_signals_reach():
    command = [sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"]
    with forks.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n" and process.poll() is None
        assert process.pid in [each.pid for each in psutil.Process().children()]
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
        assert not psutil.pid_exists(process.pid)


def test_what_a_command_starts_with_its_python_is_forked_and_ends_with_it():
    code = "import subprocess, sys; subprocess.call([sys.executable, '-c', sys.argv[1]])"
    inner = "import os, time; print(os.getpid(), os.environ['TOLD'], flush=True); time.sleep(60)"
    pipes = {"stdout": subprocess.PIPE, "env": {**os.environ, "TOLD": "1"}}
    with forks.Popen([sys.executable, "-c", code, inner], **pipes) as process:
        number, told = process.stdout.readline().split()
        assert told == b"1"
        forked = psutil.Process(int(number))
        process.kill()
        assert not psutil.wait_procs([forked], timeout=20)[1]
