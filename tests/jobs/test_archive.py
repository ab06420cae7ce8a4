"""Archives, printouts and redirects of a hostile cluster reach nothing beyond what was asked."""

import gzip
import io
import json
import os
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import pytest
from conftest import refusal
from ray.job_submission import JobSubmissionClient
from test_submit import FOLDER, free_ports, member, packed, server

from raydpfl.errors import RunError
from raydpfl.jobs import archive
from raydpfl.jobs import client as submit
from raydpfl.jobs.archive import ArchiveError, plain, unpack

HOSTILE = {
    "a path that leads up": [member("job/../../evil")],
    "an absolute path": [member("/tmp/evil")],
    "another folder": [member("job2/evil")],
    "a control character": [member("job/\x1b[31m")],
    "a symbolic link": [member("job/a", kind=tarfile.SYMTYPE, linkname="/etc")],
    "a hard link": [member("job/a", kind=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a device": [member("job/a", kind=tarfile.CHRTYPE)],
    "a pipe": [member("job/a", kind=tarfile.FIFOTYPE)],
    "the folder as a file": [member("job")],
}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_holds_what_no_run_holds_is_refused(name, form, tmp_path):
    data = packed(FOLDER, member("job/first"), *HOSTILE[name], form=form)
    with pytest.raises(RunError, match="the run directory is not brought back: "):
        server(fetched=data).fetch("job", tmp_path / "here" / "out")
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == []


def test_an_archive_that_is_too_large_is_refused_before_it_is_written(tmp_path, monkeypatch):
    many = packed(*(member(f"job/{i}") for i in range(30)))
    large = packed(member("job/first"), member("job/zeros", bytes(10**6)))
    with monkeypatch.context() as few:
        few.setattr(archive, "FILES", 20)
        few.setattr(archive, "SIZE", 10**5)
        for data in (many, large):
            with pytest.raises(ArchiveError, match=r"more than 0.0001 GB, or than 20 files"):
                unpack(io.BytesIO(data), "job", tmp_path / "out")
    full = SimpleNamespace(free=10**4)
    with monkeypatch.context() as disk:
        disk.setattr(archive.shutil, "disk_usage", lambda path: full)
        with pytest.raises(ArchiveError, match="more than 1e-05 GB"):
            unpack(io.BytesIO(large), "job", tmp_path / "out")
    with monkeypatch.context() as sent:
        sent.setattr(submit, "SIZE", 100)
        with pytest.raises(RunError, match="larger than 1e-07 GB"):
            server(fetched=packed(member("job/a", os.urandom(500)))).fetch("job", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())
    unpack(io.BytesIO(large), "job", tmp_path / "out")
    assert (tmp_path / "out" / "zeros").read_bytes() == bytes(10**6)


def test_an_archive_that_is_cut_short_changes_nothing(tmp_path):
    whole = packed(FOLDER, *(member(f"job/{i}", os.urandom(3000)) for i in range(3)))
    other = b"no archive" * 100
    for data in (gzip.compress(other), other, b"", whole[:-9], whole[:4000]):
        with pytest.raises(RunError, match=r"did not come back .*raydpfl submit --follow job"):
            server(fetched=data).fetch("job", tmp_path / "out")
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_an_honest_archive_comes_back_whole(form, tmp_path):
    long = "deeper/" * 12 + "b" * 90
    names = {"a": b"", "trials/0/config.yaml": b"rounds: 1", long: os.urandom(3000), "\u00e9": b"e"}
    members = [member(f"job/{name}", data, mtime=1.5) for name, data in names.items()]
    (tmp_path / "a").write_text("old")
    unpack(io.BytesIO(packed(FOLDER, *members, form=form)), "job", tmp_path)
    for name, data in names.items():
        assert (tmp_path / name).read_bytes() == data


def test_what_lies_in_the_destination_leads_nowhere_else(tmp_path):
    out, away = (tmp_path / name for name in ("out", "away"))
    out.mkdir()
    away.mkdir()
    for link, name in ((out / "trials", "trials/a"), (out / "b", "b")):
        link.symlink_to(away / "b" if name == "b" else away)
        with pytest.raises(ArchiveError, match="outside the destination"):
            unpack(io.BytesIO(packed(member(f"job/{name}"))), "job", out)
        link.unlink()
    assert not any(away.iterdir())


def test_a_head_has_no_say_in_where_a_run_directory_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))  # which has no notes of jobs
    (tmp_path / "site-packages").mkdir()
    data = packed(FOLDER, member("job/data"))
    metadata = {"run": "job", "out": str(tmp_path / "site-packages")}
    assert server(fetched=data, metadata=metadata).fetch("job") == submit.Path("runs/job")
    assert list((tmp_path / "site-packages").iterdir()) == []
    for run in ("../../evil", "/tmp/evil", "a/b", "..", "", 3, "a b; touch evil", "\x1b[2J"):
        with pytest.raises(RunError, match="names the run of job2 as no run of ours is named"):
            server(fetched=data, metadata={"run": run}).fetch("job2", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for job in ("../job", "job/../..", ".job", "a b"):
        with refusal("the id of a job"):
            server(fetched=data).fetch(job)


def test_a_job_comes_back_to_where_this_machine_remembers_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("rounds: 2\nclient: {actors: 0}\n")
    job = server().submit("c.yaml", out="mine")
    data = packed(member(f"{job}/data"), member(f"{job}/job.json", b'{"run": "evil"}'))
    monkeypatch.chdir("/")
    metadata = {"run": "evil", "out": "/tmp/evil"}
    assert server(fetched=data, metadata=metadata).fetch(job) == tmp_path / "mine"
    assert json.loads((tmp_path / "mine" / "job.json").read_text())["run"] == job


ESCAPES = {
    "colours": ("\x1b[1;31mred\x1b[0m", "[1;31mred[0m"),
    "one-byte sequences": ("\x9b2Jok\x9d0;evil\x9cok", "2Jok0;evilok"),
    "controls": ("a\x00\x07\x08\x0b\x0c\r\x7f\x85b\tc\r\nd", "ab\tc\nd"),
    "text that runs backwards": ("a\u202eb\u2066c\u200f", "abc"),
    "text": ("caf\u00e9 \u2713 [31m", "caf\u00e9 \u2713 [31m"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_that_a_terminal_would_obey_is_shown(name):
    text, shown = ESCAPES[name]
    assert plain(text) == shown
    pieces = []
    server(text[:3], text).follow("job", pieces.append)
    assert "".join(pieces) == shown
    assert submit._line("\x1b[2Jgone\r") == "[2Jgone"


class Redirecting(BaseHTTPRequestHandler):
    """Answers every request with a redirect, and notes where a token arrived."""

    seen: ClassVar[list] = []
    target: ClassVar[str] = ""

    def do_GET(self):
        self.seen.append((self.server.server_port, self.headers.get("authorization")))
        self.send_response(307)
        self.send_header("Location", f"{self.target}{self.path}")
        self.end_headers()

    do_PUT = do_POST = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_token_goes_to_the_address_that_was_given_and_not_on(monkeypatch):
    first, second = (HTTPServer(("127.0.0.1", port), Redirecting) for port in free_ports(2))
    for each in (first, second):
        threading.Thread(target=each.serve_forever, daemon=True).start()
    Redirecting.seen = []
    Redirecting.target = f"http://localhost:{second.server_port}"
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "")
    given = f"http://127.0.0.1:{first.server_port}"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s")
    monkeypatch.setattr(JobSubmissionClient, "_check_connection_and_version", lambda *_, **__: None)
    made = submit.JobServer(given)
    monkeypatch.undo()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s")
    try:
        with refusal("the address of a Ray cluster's job server"):
            submit.JobServer(given)
        with pytest.raises(RuntimeError, match="the job server answers 307"):
            made._download("node", "file", io.BytesIO())
        with pytest.raises(Exception, match="redirects"):
            made._client.get_job_logs("job")
    finally:
        for each in (first, second):
            each.shutdown()
            each.server_close()
    assert {port for port, token in Redirecting.seen if token} == {first.server_port}


@pytest.mark.parametrize(
    ("address", "mode", "warned"),
    [
        ("http://10.0.0.1", "token", True),
        ("http://127.0.0.1.example", "", True),
        ("http://127.8.0.1", "token", False),
        ("http://[::1]", "token", False),
        ("http://localhost", "token", False),
        ("https://head.example", "token", False),
        ("http://head.example", "disabled", False),
    ],
)
def test_a_token_over_plain_http_is_warned_of(address, mode, warned, monkeypatch, caplog):
    monkeypatch.setattr(submit.socket, "create_connection", lambda *_, **__: io.BytesIO())
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "s")
    expected = {} if mode == "disabled" else {"authorization": "Bearer s"}
    assert submit._headers(address) == expected
    assert bool(caplog.records) == warned
