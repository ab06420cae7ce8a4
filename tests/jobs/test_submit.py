"""`raydpfl submit` against a real head with job server and token, started by `ray start`."""

import http.server
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from conftest import experiment, refusal
from ray.job_submission import JobStatus

from raydpfl import run, storage
from raydpfl.errors import RunError
from raydpfl.jobs import client as submit
from raydpfl.jobs import packaging
from raydpfl.storage.files import cache_root

pytestmark = pytest.mark.slow

OWN = """
import math
import helper
from raydpfl.methods.bounding import Bounding

class Tanh(Bounding):
    bound: float = 1.0

    def factor(self, norm: float, bound: float) -> float:
        helper.wait()
        return bound * math.tanh(norm / bound) / norm if norm > 0 else 0.0
"""

HELPER = """
import os, time

def wait():
    if os.path.exists({gate!r}):
        time.sleep(0.05)
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def token_environment(folder: Path) -> dict[str, str]:
    """An environment with its own token, and no trace of a Ray of this process."""
    (folder / "token").write_text("f" * 32)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"  # jobs run `python`
    ray = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {**kept, **ray, "HOME": str(folder), "PATH": path}


def end(process: subprocess.Popen) -> None:
    """Ends a process that leads its session, and kills what is left of the session."""
    if process.stdin:
        process.stdin.close()
    else:
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def head():
    """The environment to use the cluster with, its address included."""
    folder = Path(tempfile.mkdtemp(prefix="rd", dir="/tmp"))  # short: socket paths have 107 bytes
    environment = token_environment(folder)
    gcs, dashboard, agent, client = free_ports(4)
    command = f"start --head --block --num-cpus 2 --port {gcs} --dashboard-port {dashboard}"
    command += f" --dashboard-agent-listen-port {agent} --ray-client-server-port {client}"
    command += " --min-worker-port 0 --max-worker-port 0 --object-store-memory 100000000"
    with open(folder / "head.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *command.split()],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 120
    while "Ray runtime started" not in (folder / "head.log").read_text():
        said = (folder / "head.log").read_text()
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.2)
    yield {**environment, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    end(process)
    shutil.rmtree(folder, ignore_errors=True)


def start(head: dict, folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "raydpfl", "submit", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=head, cwd=folder, **pipes)


def finish(process: subprocess.Popen, code: int = 0) -> str:
    said = process.communicate(timeout=240)[0]
    assert process.returncode == code, said
    return said


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


OWN_RUN = {
    "rounds": 60,
    "evaluate": {"every": 1},
    "bounding": {"kind": "mine:Tanh", "bound": 0.5},
    "client": {"actors": 0},
}


def left_behind(terminal: subprocess.Popen) -> tuple[str, str]:
    """A job that is followed until its second round, and then left by Ctrl-C; and what is said."""
    said = ""
    while "round 2/60  accuracy" not in said:
        line = terminal.stdout.readline()
        said += line
        assert line, said
    terminal.send_signal(signal.SIGINT)
    return said.split()[1].rstrip("."), finish(terminal, code=130)


def test_a_job_takes_own_code_along_outlives_its_terminal_stops_and_resumes_to_the_same_bits(
    tmp_path, head, monkeypatch
):
    gate = tmp_path / "gate"
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text(HELPER.format(gate=str(gate)))
    gate.touch()  # a round takes at least a second while it is there
    monkeypatch.syspath_prepend(tmp_path)
    own = experiment(**OWN_RUN)
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own.to_dict()))

    job, left = left_behind(start(head, tmp_path, "own.yaml"))
    assert "goes on without this terminal" in left and "Traceback" not in left
    assert f"--follow {job}" in left and f"--stop {job}" in left

    out = tmp_path / "runs" / job
    assert [each.name for each in out.iterdir()] == ["job.json"]
    said = finish(start(head, tmp_path, "--stop", job))
    assert f"{job} was stopped; its run goes on with: raydpfl submit CONFIG --resume {job}" in said
    stopped = summary(out)
    assert stopped["status"] == "interrupted" and 2 <= stopped["rounds"] < 60
    assert list((out / "checkpoints").iterdir())

    gate.unlink()
    finish(start(head, tmp_path, "own.yaml", "client.actors=1", "--resume", job))
    assert summary(out)["status"] == "completed"
    here = run(own, tmp_path / "here").summary
    assert summary(out)["model_sha256"] == here["model_sha256"]
    names = {"config.yaml", "rounds.parquet", "ledger.jsonl", "checkpoints", "job.json"}
    assert {each.name for each in out.iterdir()} >= names

    resumed = json.loads((out / "job.json").read_text())["job"]
    again = finish(start(head, tmp_path, "--follow", resumed, "--out", "again"))
    assert "round 60/60  accuracy" in again and summary(tmp_path / "again") == summary(out)


@pytest.mark.parametrize("token", [None, "another"])
def test_a_refused_token_says_what_to_set(token, tmp_path, head):
    (tmp_path / "token").write_text("0" * 32)
    environment = {key: value for key, value in head.items() if not key.startswith("RAY_AUTH")}
    if token:
        environment["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "token")
    said = finish(start(environment, tmp_path, "--stop", "job"), code=2)
    assert said.count("\n") == 1 and "RAY_AUTH_MODE=token" in said and "RAY_AUTH_TOKEN_PATH" in said


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:{}", "127.0.0.1:{}", "ray://h:{}", "http://"]
)
def test_an_address_without_a_job_server_is_refused_in_one_line(address, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # which `JobServer` sets
    expected = r"--address = .*: expected the address of a Ray cluster's job server, such as http"
    with refusal(expected):
        submit.JobServer(address.format(free_ports(1)[0]))


def test_another_service_at_the_address_is_refused_in_one_line(monkeypatch):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"status": "ok"}')

    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "")  # which `JobServer` sets
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with refusal("expected the address of a Ray cluster's job server"):
            submit.JobServer(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


CACHES = [
    {"RAYDPFL_CACHE": "/a b", "XDG_CACHE_HOME": "/x"},
    {"XDG_CACHE_HOME": "/x"},
    {"RAYDPFL_CACHE": "s3://bucket/cache", "XDG_CACHE_HOME": "/x y"},
    {"HOME": "/home/me"},
]


@pytest.mark.parametrize("names", CACHES)
def test_the_run_directory_of_a_job_lies_in_the_cache_of_the_head(names, monkeypatch):
    for name in ("RAYDPFL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    printed = subprocess.check_output(["sh", "-c", f"echo {submit.RUNS}"], text=True)
    assert printed == f"{cache_root() / 'runs'}\n"


def test_a_config_with_search_spaces_is_a_sweep_and_is_checked_here(tmp_path):
    def read(tree, *overrides):
        (tmp_path / "tried.yaml").write_text(yaml.safe_dump(tree))
        asked = packaging.read(tmp_path / "tried.yaml", overrides)
        return asked.command, asked.inline

    plain = experiment(client={"actors": 2}).to_dict()
    assert read(plain) == ("run", False) and read(plain, "client.actors=0") == ("run", True)
    assert read(plain, "bounding.bound={grid: [0.5, 1.0]}") == ("sweep", False)
    assert read({**plain, "sweep": {"repeats": 2}}) == ("sweep", False)
    for wrong in ("rounds=0", "sweep.repeats=0", "bounding.bound={grid: [0.5, -1.0]}"):
        with refusal(wrong.partition("=")[0]):
            read(plain, wrong)
    shell = submit.entrypoint("sweep", "s 1", address=True, resume=True)
    assert shell.replace(submit.RUNS, "RUNS") == (
        "exec python -m raydpfl sweep config.yaml --out RUNS/'s 1' --resume --address auto"
    )


@pytest.mark.parametrize(("name", "more"), [("config", []), ("sweep", ["sweep.repeats=2"])])
def test_the_directory_of_a_run_or_of_a_sweep_is_its_config(name, more, tmp_path):
    path = tmp_path / f"{name}.yaml"
    path.write_text("rounds: 2\n")
    assert packaging.read(tmp_path, more).path == path


def test_an_out_directory_that_holds_anything_else_is_refused(tmp_path):
    submit._check(tmp_path / "new", "a")
    submit._check(tmp_path, "a")
    (tmp_path / submit.NOTE).write_text('{"run": "a"}')
    submit._check(tmp_path, "a")
    for text in ('{"run": "b"}', "{}", "[", '"a"'):
        (tmp_path / submit.NOTE).write_text(text)
        with refusal("--out"):
            submit._check(tmp_path, "a")


class Client:
    """A job server in this process, of one job. `output`: what it has printed at each look, or the
    error that this raises; `fetched`: the archive of its run directory, None: there is none. It
    runs until the last look, and ends with `code`. `metadata`: of each of its jobs.
    """

    # how many jobs were handed in, and how many of them came too early
    asked = 0
    early = 0

    def __init__(self, output, fetched, code, metadata):
        self.output = list(output)
        self.fetched, self.code, self.metadata = fetched, code, metadata

    def get_job_logs(self, job):
        piece = self.output.pop(0) if self.output else ""
        if isinstance(piece, Exception):
            raise piece
        return piece

    def submit_job(self, **options):
        self.asked += 1
        self.given = options
        if self.asked <= self.early:
            raise RuntimeError(
                "Request failed with status code 500: "
                "No available agent to submit job, please try again later.."
            )

    def delete_job(self, job):
        pass

    def get_job_info(self, job):
        if job == "other":
            raise RuntimeError("Request failed with status code 404: it does not exist.")
        code = self.code
        if "-fetch-" in job:
            code = submit.NONE if self.fetched is None else 0
        ended = JobStatus.FAILED if code else JobStatus.SUCCEEDED
        return SimpleNamespace(
            metadata=self.metadata,
            status=JobStatus.RUNNING if len(self.output) > 1 else ended,
            driver_exit_code=code,
            driver_node_id="node",
        )


def server(*output, fetched=None, code=0, metadata=None) -> submit.JobServer:
    made = object.__new__(submit.JobServer)
    made.address = submit.ADDRESS
    made._client = Client(output, fetched, code, metadata or {"run": "job"})

    def download(node, name, into):
        into.write(fetched)
        if into.tell() > submit.SIZE:
            raise submit.ArchiveError(f"it is larger than {submit.SIZE / 1e9:g} GB")

    made._download = download
    return made


def member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, **more) -> tuple:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def packed(*members: tuple, form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive, as a head sends it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=form) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


FOLDER = member("job", kind=tarfile.DIRTYPE)


def test_a_head_that_has_just_started_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b.yaml").write_text("rounds: 2\n")
    young = server()
    young._client.early = 3
    job = young.submit("a b.yaml")
    assert young._client.asked == 4 and job.startswith("a-b-")
    assert json.loads((tmp_path / "runs" / job / submit.NOTE).read_text())["run"] == job
    young._client.early = 10**9
    monkeypatch.setattr(submit, "PATIENCE", 0.01)
    with refusal("start the head with --dashboard-agent-listen-port"):
        young.submit("a b.yaml")


def test_a_job_may_write_to_an_address_which_is_told_to_whoever_follows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "mine"))
    (tmp_path / "a.yaml").write_text("rounds: 2\n")
    place = f"local://{tmp_path}/store/run"
    head = server()
    job = head.submit("a.yaml", out=place)
    assert f"--out {place}" in head._client.given["entrypoint"]
    metadata = head._client.given["metadata"]
    assert metadata == {"run": job, "out": place} and not (tmp_path / "runs").exists()
    head._client.metadata = metadata
    assert head.fetch(job) == head.fetch(job, place) == place
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "another"))  # which remembers nothing
    assert head.fetch(job) == place
    again = head.submit("a.yaml", resume=job)
    assert f"--out {place} --resume" in head._client.given["entrypoint"] and again.startswith(job)
    with storage.open_folder(place) as folder:
        (folder / "summary.json").write_text("{}")
    assert head.fetch(job, tmp_path / "here") == tmp_path / "here"
    assert (tmp_path / "here" / "summary.json").read_text() == "{}"
    assert head.fetch(job) == place  # a copy is no other place of the run
    with refusal("a folder of this machine"):
        head.fetch(job, "s3://bucket/run")


def test_a_run_directory_that_did_not_come_back_may_be_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))

    def fail(archive, member, folder, **_):
        (folder / member.name).write_text("cut sh")
        raise OSError("No space left on device")

    head = server(fetched=packed(FOLDER, member("job/data")))
    with monkeypatch.context() as full:
        full.setattr(tarfile.TarFile, "extract", fail)
        with pytest.raises(RunError, match="try again with raydpfl submit --follow job"):
            head.fetch("job", tmp_path / "out")
    assert head.fetch("job", tmp_path / "out") == tmp_path / "out"
    assert (tmp_path / "out" / "data").read_bytes() == b"x"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_job_ends_with_its_own_exit_code_and_one_that_had_begun_says_how_to_go_on(
    code, tmp_path, monkeypatch, typed
):
    stub = server("its words\n", fetched=packed(FOLDER), code=code)
    monkeypatch.setattr(submit, "JobServer", lambda address: stub)
    monkeypatch.chdir(tmp_path)
    ended, out, said = typed("submit", "--follow", "job", "--out", "out")
    assert ended == code and out.endswith(f"its words\nBrought back to: {tmp_path / 'out'}\n")
    assert ("raydpfl submit CONFIG --resume job" in said) == (code == 1)


def test_a_connection_that_breaks_is_made_anew_and_nothing_is_shown_twice(monkeypatch):
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    shown = []
    breaks = ConnectionResetError(), RuntimeError("502")
    broken = server("one\ntw", *breaks, "one\ntwo\nthr", "one\ntwo\nthree\n", code=3)
    assert broken.follow("job", shown.append) == 3
    assert "".join(shown) == "one\ntwo\nthree\n"


def test_a_cluster_that_has_gone_ends_the_following_with_what_to_do(monkeypatch):
    monkeypatch.setattr(submit, "PATIENCE", 0.5)
    said = (
        r"does not answer \(gone\); follow it with raydpfl submit --follow job, or .* --resume job"
    )
    with pytest.raises(RunError, match=said):
        server("one", *[ConnectionResetError("gone")] * 9).follow("job")
    with refusal("job = 'other'"):
        server().follow("other")


def test_a_job_that_made_no_run_directory_brings_none_back(tmp_path):
    assert server().fetch("job", tmp_path / "out") is None and not (tmp_path / "out").exists()
