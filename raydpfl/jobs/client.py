"""A run on a cluster elsewhere, through Ray's job server: `raydpfl submit`.

The job is an ordinary `raydpfl run` or `raydpfl sweep` on the head, with what
`raydpfl.jobs.packaging` sends; it goes on when this process ends. It writes to an address, or to
RAYDPFL_CACHE/runs there. From there a second, short job packs it into the head's log folder, whose
files the job server gives out: its port is often the only one that a firewall lets through.

The head is not trusted with this machine. A run directory comes back to where its user says, or to
where this machine has it on record; archives and printouts are read as `raydpfl.jobs.archive` says.

>>> entrypoint("run", "mnist-1", address=True).replace(RUNS, "RUNS")
'exec python -m raydpfl run config.yaml --out RUNS/mnist-1 --address auto'
"""

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import tarfile
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import requests

from raydpfl import storage
from raydpfl.core import signals
from raydpfl.errors import ConfigError, RunError, message
from raydpfl.jobs.archive import SIZE, ArchiveError, plain, unpack
from raydpfl.storage.files import cache_root, keep_json, read_own_json

ADDRESS = "http://127.0.0.1:8265"
# of the head: cache_root of raydpfl.storage.files, said in shell
OWN = "${XDG_CACHE_HOME:-$HOME/.cache}/raydpfl"
CHOSEN = f'in *://*) echo "{OWN}";; *) echo "$RAYDPFL_CACHE";;'
RUNS = f'"$(case "${{RAYDPFL_CACHE:-://}}" {CHOSEN} esac)"/runs'
NOTE = "job.json"  # in the run directory here: whose it is
PATIENCE = 60.0  # seconds without an answer, after which a job is given up
NONE = 3  # exit code of a job that finds no run directory
AGENT = (
    "where another Ray of that machine has its agent's port, "
    "start the head with --dashboard-agent-listen-port 52366"
)
TOKEN = (
    "RAY_AUTH_MODE=token and, as RAY_AUTH_TOKEN_PATH, "
    "the file with the token that the cluster was started with"
)
ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
LOCAL = re.compile(r"localhost|127(\.\d+){3}|::1")  # hosts that no network lies before
CHATTY = ("ray", "ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")
log = logging.getLogger("raydpfl")


def entrypoint(
    command: str, run: str, *, address: bool, resume: bool = False, out: str | None = None
) -> str:
    """The command line for the head's shell, of a `raydpfl run` or `sweep` that uses the cluster
    (`address`) or not. Its directory is at `out`; None: on the head, named by the id `run`.
    """
    options = " --resume" * resume + " --address auto" * address
    place = shlex.quote(out) if out else f"{RUNS}/{shlex.quote(run)}"
    return f"exec python -m raydpfl {command} config.yaml --out {place}{options}"


class JobServer:
    """The job server of a cluster at an address (None: RAY_API_SERVER_ADDRESS, or port 8265 of this
    machine). Raises `ConfigError` where none answers, or it refuses the token.

    A job has an id. What it writes is known by the id of the first job that wrote there, its run.
    """

    def __init__(self, address: str | None = None):
        address = address or os.environ.get("RAY_API_SERVER_ADDRESS") or ADDRESS
        self.address = address if "://" in address else f"http://{address}"
        # which Ray heeds before its own argument
        os.environ["RAY_API_SERVER_ADDRESS"] = self.address
        with self._refusals():
            self._headers = _headers(self.address)
            from ray.job_submission import JobSubmissionClient

            for chatty in CHATTY:
                logging.getLogger(chatty).setLevel(logging.WARNING)
            self._client: Any = JobSubmissionClient(self.address, headers=self._headers)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        # the last three: what Ray makes of the answers of another service
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            expected = f"the address of a Ray cluster's job server, such as {ADDRESS}"
            expected += f" ({_line(error)})"
            raise ConfigError("--address", self.address, expected) from None
        except Exception as error:
            if type(error).__name__ != "AuthenticationError":
                raise
            expected = f"a cluster that accepts this side's token; set {TOKEN} ({_line(error)})"
            raise ConfigError("--address", self.address, expected) from None

    def submit(
        self,
        config: str | Path,
        overrides: Sequence[str] = (),
        out: str | Path | None = None,
        *,
        resume: str | None = None,
        files_on_cluster: bool = False,
    ) -> str:
        """Starts a job that runs a config, or the sweep that it describes; returns the job's id.

        Args:
            config, overrides: the path of its file, and changes to it.
            out: where `fetch` brings the run directory; None: runs/ID. An address: written there.
            resume: a run of this cluster to continue.
            files_on_cluster: whether the files that the config names are already on the cluster.

        Raises:
            ConfigError: for what can be refused without the data; the job refuses the rest.
        """
        # they load torch, which following a job can do without
        from raydpfl.jobs import packaging
        from raydpfl.simulation import user_code

        with user_code.stored_code(config, prefer_stored=resume is not None) as stored_folder:
            submission = packaging.read(config, overrides)
            payload = packaging.pack(
                submission.tree,
                submission.experiments,
                Path.cwd(),
                stored_folder=stored_folder,
                files_on_cluster=files_on_cluster,
            )
        run, recorded_place = self._find_run(resume, strict=False) if resume else ("", None)
        job = _new_id(submission.path, run)
        run = run or job
        place = out or recorded_place or Path("runs") / (resume or job)
        address = str(place) if storage.is_address(place) else None
        folder = Path(storage.location(place)).absolute()
        if not address:
            _check(folder, run)
            folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"address": not submission.inline, "resume": resume is not None}
        with tempfile.TemporaryDirectory(prefix="raydpfl-") as stage:
            environment = packaging.stage_job(*payload, Path(stage))
            with self._refusals():
                self._start(
                    runtime_env=environment,
                    submission_id=job,
                    entrypoint=entrypoint(submission.command, run, out=address, **options),
                    metadata={"run": run} | ({"out": address} if address else {}),
                )
        self._record(run, job, address or folder)
        if not address:
            self._note(run, job, folder)
        return job

    def run_of(self, job: str) -> str:
        """The id of the run of a job. Raises `ConfigError` if the cluster does not know the job."""
        return self._find_run(job)[0]

    def follow(self, job: str, write: Callable[[str], Any] = lambda text: None) -> int:
        """Waits for a job to end; its exit code, 1 if it has none. A broken connection is made
        again; raises `RunError` where the cluster has not answered for `PATIENCE`. `write` is
        called with everything that the job prints, without escape codes.
        """
        run = self.run_of(job)
        printed_length = 0
        answer_time = time.monotonic()
        while True:
            start_time = time.monotonic()
            try:
                details = self._client.get_job_info(job)
                text = self._client.get_job_logs(job)
                answer_time = time.monotonic()
                write(plain(text[printed_length:]))
                printed_length = max(printed_length, len(text))
                if details.status.is_terminal():
                    break
            except (OSError, RuntimeError) as error:
                signals.check()  # a connection that a signal ended is no error
                if time.monotonic() - answer_time > PATIENCE:
                    problem = f"the cluster at {self.address} does not answer ({_line(error)})"
                    hint = f"follow it with {self.command('--follow', job)}, or go on with it on"
                    hint += f" a new cluster: raydpfl submit CONFIG --resume {run}"
                    raise RunError(f"{problem}; {hint}") from None
            signals.check()
            # all that it has printed comes each time: a tenth of the time at most goes into that
            time.sleep(max(1.0, 9 * (time.monotonic() - start_time)))
        if details.status == "FAILED" and details.driver_exit_code is None:
            write(f"{plain(details.message)}\n")
        return 0 if details.status == "SUCCEEDED" else details.driver_exit_code or 1

    def stop(self, job: str) -> None:
        """Stops a job as Ctrl-C would: after its round, with a checkpoint. Returns at once."""
        self.run_of(job)
        with self._refusals():
            self._client.stop_job(job)

    def fetch(self, job: str, out: str | Path | None = None) -> Path | str | None:
        """Brings back the run directory of a job that has ended, unless it is at an address: the
        directory, or its address; None if the job never made one.

        Args:
            job: its id.
            out: where to; None: where `submit` on this machine said, or runs/ID.

        Raises:
            ConfigError: `out` is an address.
            RunError: it did not come back complete; `out` is free for another call.
        """
        run, place = self._find_run(job)
        address = place if place and storage.is_address(place) else None
        if address and out in (None, address):
            return address
        if out and storage.is_address(out):
            raise ConfigError("--out", out, "a folder of this machine, for the run to come back to")
        folder = Path(storage.location(out or place or Path("runs") / job))
        _check(folder, run)
        try:
            if address:
                with storage.readable_folder(address) as remote_folder:
                    self._note(run, job, folder)
                    shutil.copytree(remote_folder, folder, dirs_exist_ok=True)
            elif not self._fetch(run, job, folder):
                return None
        except ArchiveError as error:  # it would be the same another time
            raise RunError(f"the run directory is not brought back: {_line(error)}") from None
        except (OSError, EOFError, RuntimeError, tarfile.TarError, zlib.error) as error:
            hint = f"try again with {self.command('--follow', job)}, or take it from"
            hint += f" {address or f'RAYDPFL_CACHE/runs/{run} there'}"
            problem = f"the run directory did not come back ({_line(error)})"
            raise RunError(f"{problem}; {hint}") from None
        if not address:  # where the run is written stays as it is recorded
            self._record(run, job, folder)
        self._note(run, job, folder)
        return folder

    def _fetch(self, run: str, job: str, folder: Path) -> bool:
        fetch_job = f"{run}-fetch-{uuid.uuid4().hex[:4]}"
        name = shlex.quote(run)
        archive = f"raydpfl-{run}.tar.gz"
        # that of the file to which Ray writes what this job prints
        logs = '"$(dirname "$(readlink /proc/$$/fd/1)")"'
        shell = f"cd {RUNS} && [ -d {name} ] || exit {NONE}; "
        self._start(entrypoint=f"{shell}tar -czf {logs}/{archive} {name}", submission_id=fetch_job)
        while not (details := self._client.get_job_info(fetch_job)).status.is_terminal():
            signals.check()
            time.sleep(0.1)
        self._client.delete_job(fetch_job)
        if details.driver_exit_code == NONE:
            return False
        if details.status != "SUCCEEDED":
            raise RuntimeError(f"it could not be packed: {details.message}")
        with tempfile.TemporaryFile() as archive_file:
            self._download(details.driver_node_id, archive, archive_file)
            archive_file.seek(0)
            unpack(archive_file, run, folder, on_verified=lambda: self._note(run, job, folder))
        return True

    def _download(self, node: str, name: str, into: IO[bytes]) -> None:
        # lines: all of it; timeout: seconds for the whole of it
        query = {"node_id": node, "filename": name, "lines": "-1", "timeout": "86400"}
        with requests.get(
            f"{self.address}/api/v0/logs/file",
            params=query,
            headers=self._headers,
            timeout=PATIENCE,
            stream=True,
            allow_redirects=False,
        ) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"the job server answers {answer.status_code}")
            for piece in answer.iter_content(1 << 20):
                into.write(piece)
                if into.tell() > SIZE:
                    raise ArchiveError(f"it is larger than {SIZE / 1e9:g} GB")

    def command(self, option: str, job: str) -> str:
        """What to type for this option of `raydpfl submit` with this job."""
        address_option = f" --address {self.address}" if self.address != ADDRESS else ""
        return f"raydpfl submit {option} {job}{address_option}"

    def _start(self, **job: Any) -> None:
        """Starts a job; tries again, as a new head answers before it can take jobs."""
        start_time = time.monotonic()
        while True:
            try:
                self._client.submit_job(**job)
                return
            except RuntimeError as error:
                if "No available agent" not in str(error):
                    raise
                if time.monotonic() - start_time > PATIENCE:
                    expected = f"a head that takes jobs; {AGENT} ({_line(error)})"
                    raise ConfigError("--address", self.address, expected) from None
                time.sleep(1)

    def _record(self, run: str, job: str, place: str | Path) -> None:
        keep_json(self._record_path(job), {"run": run, "out": str(place)})

    def _note(self, run: str, job: str, folder: Path) -> None:
        """Notes in a folder which run it is for; it is made where it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"run": run, "job": job, "address": self.address}) + "\n"
        (folder / NOTE).unlink(missing_ok=True)  # a link is not followed
        (folder / NOTE).write_text(text)

    def _record_path(self, job: str) -> Path:
        name = hashlib.sha256(f"{self.address}\n{job}".encode()).hexdigest()[:32]
        return cache_root() / "jobs" / f"{name}.json"

    def _find_run(self, job: str, strict: bool = True) -> tuple[str, str | None]:
        """The run that a job belongs to, and where its directory goes, None if nobody says: by this
        machine's record, else by the cluster, which can name an address, but no folder here.
        `strict`: a job that the cluster does not know is refused.
        """
        if not ID.fullmatch(job):
            raise ConfigError("job", job, "the id of a job: letters, digits, '.', '_' and '-'")
        metadata: dict[str, Any] = {}  # what `submit` gave the cluster with the job
        with self._refusals():
            try:
                metadata = self._client.get_job_info(job).metadata or {}
            except RuntimeError as error:
                if "404" not in str(error):
                    raise
                if strict:
                    expected = f"the id of a job of the cluster at {self.address}"
                    raise ConfigError("job", job, expected) from None
        try:
            record = read_own_json(self._record_path(job))
        except (OSError, ValueError):
            record = {}
        run = record.get("run") or metadata.get("run", job)
        if not isinstance(run, str) or not ID.fullmatch(run):
            problem = f"names the run of {job} as no run of ours is named: {plain(run)[:100]!r}"
            raise RunError(f"the cluster at {self.address} {problem}")
        address = str(metadata.get("out"))
        return run, record.get("out") or (address if storage.is_address(address) else None)


def _check(folder: Path, run: str) -> None:
    """Raises `ConfigError` unless `folder` is free, or noted to be for `run`."""
    try:
        free = (
            not folder.exists()
            or not any(folder.iterdir())
            or json.loads((folder / NOTE).read_text())["run"] == run
        )
    except (OSError, ValueError, KeyError, TypeError):
        free = False
    if not free:
        expected = f"a new or empty directory, or the one that {run} was submitted with"
        raise ConfigError("--out", str(folder), expected)


def _new_id(path: Path, run: str) -> str:
    has_own_name = path.name not in ("config.yaml", "sweep.yaml")
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.stem if has_own_name else path.parent.name)
    stem = stem.lstrip(".-")[:80] or "run"
    base_id = f"{run[:100]}-again" if run else stem + time.strftime("-%Y%m%d-%H%M%S")
    return f"{base_id}-{uuid.uuid4().hex[:4]}"


def _headers(address: str) -> dict[str, str]:
    """The headers of requests: the token that Ray would find for a cluster, if there is one. Raises
    ValueError or OSError if nothing listens at `address`; warns of a token that others could read.
    """
    url = urlsplit(address)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError("it begins with http:// or https://")
    port = url.port or (443 if url.scheme == "https" else 80)
    socket.create_connection((url.hostname, port), timeout=5).close()
    token = _token()
    if token and url.scheme == "http" and not LOCAL.fullmatch(url.hostname):
        risk = "where anyone in between can read it; use https, or a tunnel to localhost"
        log.warning("the cluster's token goes to %s over http, %s", url.hostname, risk)
    return {"authorization": f"Bearer {token}"} if token else {}


def _token() -> str | None:
    """By RAY_AUTH_TOKEN, the file of RAY_AUTH_TOKEN_PATH, or that where Ray puts it."""
    if os.environ.get("RAY_AUTH_MODE", "token") not in ("", "token"):
        return None
    token_path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(token_path or os.path.expanduser("~/.ray/auth_token"))
    token = os.environ.get("RAY_AUTH_TOKEN")
    return token or (path.read_text().strip() if token_path or path.exists() else None)


def _line(error: BaseException) -> str:
    return plain(message(error, 200))
