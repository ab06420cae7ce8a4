"""SIGINT stops a command also where its parent ignored it, as a script's `raydpfl ... &` does."""

import json
import signal
import subprocess
import sys
import time

import processes
import pytest
import yaml
from conftest import SMALL
from test_same_bits import RUN

pytestmark = pytest.mark.slow

IGNORING = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh"]
IGNORED = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # as it begins then
# Commands whose work is a wait that says when it begins.
WAITING = {
    "sweep": "from raydpfl import sweep as module; module.run = wait",
    "audit": "from raydpfl import audit as module; module.audit = wait",
    "submit": "from raydpfl.jobs import client as module; module.JobServer = wait",
}
WAIT = """
import time
def wait(*args, **options):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def start():
    """Starts a command; whatever of them goes on after the test is killed."""
    begun = []

    def start(code: str, *words: object) -> subprocess.Popen:
        ignoring = IGNORING if code == RUN else []
        code = code if code == RUN else f"{IGNORED}\n{code}"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [*ignoring, sys.executable, "-c", code, *map(str, words)]
        begun.append(subprocess.Popen(command, **pipes))
        return begun[-1]

    yield start
    for process in begun:
        process.kill()


@pytest.mark.parametrize("command", WAITING)
def test_a_command_whose_parent_ignores_sigint_is_stopped_by_it(command, tmp_path, start):
    config = tmp_path / "small.yaml"
    config.write_text(
        yaml.safe_dump(SMALL | ({"sweep": {"repeats": 2}} if command == "sweep" else {}))
    )
    process = start(f"{WAIT}\n{WAITING[command]}\n{RUN}", command, config)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "Traceback" not in said, said


def test_a_command_in_a_folder_that_is_gone_says_so_in_one_line(tmp_path):
    code = "import os; os.rmdir(os.getcwd()); from raydpfl.__main__ import main; main()"
    (tmp_path / "gone").mkdir()
    done = processes.run([sys.executable, "-c", code], cwd=tmp_path / "gone")
    assert (done.returncode, done.stderr) == (2, "raydpfl: the working directory is gone\n")


def test_a_run_whose_parent_ignores_sigint_ends_after_its_round(tmp_path, start):
    config = tmp_path / "long.yaml"
    out = tmp_path / "out"
    config.write_text(yaml.safe_dump(SMALL | {"rounds": 100_000}))
    process = start(RUN, "run", config, "--out", out, "--quiet")
    deadline = time.monotonic() + 120
    while not (out / "ledger.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and "--resume" in said, said
    assert json.loads((out / "summary.json").read_text())["status"] == "interrupted"
