"""What a hostile cluster can send back: archives, printouts and redirects; none reaches beyond what
was asked for.
"""

from __future__ import annotations

import base64
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
from test_submit import free_ports, server

from raydpfl.errors import ConfigError, RunError
from raydpfl.jobs import archive
from raydpfl.jobs import client as submit
from raydpfl.jobs.archive import ArchiveError, Limits, Plain, place, plain, unpack


def member(name: str, data: bytes = b"x", kind: bytes = tarfile.REGTYPE, **more) -> tuple:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data) if kind == tarfile.REGTYPE else 0
    for key, value in more.items():
        setattr(info, key, value)
    return info, data


def packed(*members: tuple, form: int = tarfile.GNU_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", format=form) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


FOLDER = member("job", kind=tarfile.DIRTYPE)
HOSTILE = {
    "a path that leads up": [member("job/../../evil")],
    "an absolute path": [member("/tmp/evil")],
    "another folder": [member("other/evil")],
    "a path that begins with another folder's name": [member("job2/evil")],
    "a control character": [member("job/\x1b[31m")],
    "a newline": [member("job/a\nb")],
    "a symbolic link": [member("job/a", kind=tarfile.SYMTYPE, linkname="/etc")],
    "a chain of links": [
        member("job/a", kind=tarfile.SYMTYPE, linkname="."),
        member("job/a/b", kind=tarfile.SYMTYPE, linkname=".."),
        member("job/a/b/evil"),
    ],
    "a hard link": [member("job/a", kind=tarfile.LNKTYPE, linkname="/etc/passwd")],
    "a device": [member("job/a", kind=tarfile.CHRTYPE)],
    "a pipe": [member("job/a", kind=tarfile.FIFOTYPE)],
    "a sparse file": [member("job/a", kind=tarfile.GNUTYPE_SPARSE)],
    "a path that is too long": [member("job/" + "a/" * 20 + "b" * 200 + ("/" + "c" * 200) * 5)],
    "a path that is too deep": [member("job/" + "a/" * 40 + "b")],
    "the folder as a file": [member("job")],
}


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", HOSTILE)
def test_an_archive_that_holds_what_no_run_holds_is_refused(name, form, tmp_path):
    data = packed(FOLDER, member("job/first"), *HOSTILE[name], form=form)
    printed = f"{submit.BEGIN}\n{base64.b64encode(data).decode()}\n{submit.END}\n"
    out = tmp_path / "here" / "out"
    with pytest.raises(RunError, match="the run directory is not brought back: "):
        server(fetched=[[printed]]).fetch("job", out)
    assert [each.name for each in tmp_path.rglob("*") if each.is_file()] == []


def held(folder) -> int:
    """Bytes of all files in a folder."""
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def test_an_archive_is_cut_off_where_it_grows_too_large(tmp_path):
    many = packed(*(member(f"job/{i}") for i in range(30)))
    large = packed(member("job/zeros", bytes(10**6)))
    huge = packed(member("job/first"), member("job/zeros", bytes(10**6)))
    long = packed(member("job/" + "x" * (1 << 20)))
    cases = [
        (many, Limits(files=20), "more than 20 files"),
        (huge, Limits(size=10**5), "more than 0.0001 GB"),
        (large, Limits(ratio_from=10**5), "more than 100 times its own size"),
        (long, Limits(), "more than 65,536 bytes that are in no file"),
    ]
    for number, (data, limits, message) in enumerate(cases):
        with pytest.raises(ArchiveError, match=message):
            unpack(io.BytesIO(data), "job", tmp_path / str(number), limits)
        assert held(tmp_path / str(number)) <= 2 * limits.ratio_from
    assert held(tmp_path / "1") == 1  # the file that is too large was not begun
    unpack(io.BytesIO(large), "job", tmp_path / "fine")
    assert (tmp_path / "fine" / "zeros").read_bytes() == bytes(10**6)


def test_zeros_are_refused_long_before_they_are_all_written(tmp_path):
    info = tarfile.TarInfo("job/zeros")
    info.size = 10**8
    header = info.tobuf(tarfile.GNU_FORMAT)
    zeros = gzip.compress(header) + gzip.compress(bytes(10**7)) * 10
    with pytest.raises(ArchiveError, match="more than 100 times its own size"):
        unpack(io.BytesIO(zeros), "job", tmp_path / "zeros")
    assert held(tmp_path / "zeros") <= 3 * 10**7


def test_no_more_is_unpacked_than_the_disk_has_room_for(tmp_path, monkeypatch):
    usage = SimpleNamespace(free=10**4)
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda path: usage)
    data = packed(*(member(f"job/{i}", os.urandom(4000)) for i in range(4)))
    with pytest.raises(ArchiveError, match=r"more than the disk of .* has room for"):
        unpack(io.BytesIO(data), "job", tmp_path / "run")
    assert held(tmp_path / "run") == 8000


def test_a_broken_archive_is_told_from_a_hostile_one(tmp_path):
    """What is cut short may come whole another time."""
    whole = packed(FOLDER, *(member(f"job/{i}", os.urandom(3000)) for i in range(3)))
    plain = gzip.decompress(whole)
    negative, _ = member("job/a", b"")
    negative.size = -512
    broken = {
        "no archive": gzip.compress(b"no archive" * 100),
        "no gzip": b"no archive" * 100,
        "empty": b"",
        "cut in its midst": whole[: len(whole) // 2],
        "cut before it was packed": gzip.compress(plain[: len(plain) // 2]),
        "cut between two files": gzip.compress(plain[: 512 * 8]),
        "a negative size": gzip.compress(negative.tobuf(tarfile.GNU_FORMAT) + plain),
    }
    for name, data in broken.items():
        with pytest.raises((ValueError, EOFError, OSError)) as error:
            unpack(io.BytesIO(data), "job", tmp_path / name)
        assert not isinstance(error.value, ArchiveError), name


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
def test_an_honest_archive_comes_back_whole(form, tmp_path):
    long = "deeper/" * 12 + "b" * 90
    names = {"a": b"", "trials/0/config.yaml": b"rounds: 1", long: os.urandom(3000), "\u00e9": b"e"}
    members = [member(f"job/{name}", data, mtime=1.5) for name, data in names.items()]
    if form == tarfile.USTAR_FORMAT:
        members = [
            (info, data) for info, data in members if info.name.isascii() and len(info.name) < 99
        ]
        for info, _ in members:
            info.mtime = 1
    unpack(io.BytesIO(packed(FOLDER, *members, form=form)), "job", tmp_path / "new")
    for info, data in members:
        assert (tmp_path / "new" / info.name.removeprefix("job/")).read_bytes() == data


def test_what_lies_in_the_destination_leads_nowhere_else(tmp_path):
    source, out, away = (tmp_path / name for name in ("source", "out", "away"))
    (source / "trials").mkdir(parents=True)
    (source / "trials" / "a").write_text("new")
    (source / "b").write_text("new")
    out.mkdir()
    away.mkdir()
    (away / "b").write_text("old")
    (out / "b").symlink_to(away / "b")
    place(source, out)
    assert not (out / "b").is_symlink() and (away / "b").read_text() == "old"
    (out / "trials" / "a").unlink()
    (out / "trials").rmdir()
    (out / "trials").symlink_to(away)
    (out / "b").write_text("mine")
    with pytest.raises(ArchiveError, match="trials is here no folder, or a link"):
        place(source, out)
    (out / "trials").unlink()
    (out / "b").unlink()
    (out / "b").mkdir()
    with pytest.raises(ArchiveError, match="b is here a folder"):
        place(source, out)
    assert sorted(each.name for each in away.iterdir()) == ["b"] and not (out / "trials").exists()


def metadata(told: dict, *output, **more) -> submit.JobServer:
    """A job server whose head says `told` of its jobs."""
    made = server(*output, **more)
    asked = made._client.get_job_info

    def info(job):
        return SimpleNamespace(**{**vars(asked(job)), "metadata": told})

    made._client.get_job_info = info
    return made


def test_a_head_has_no_say_in_where_a_run_directory_goes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path / "cache"))  # which remembers no job
    (tmp_path / "site-packages").mkdir()
    data = packed(FOLDER, member("job/data"))
    printed = f"{submit.BEGIN}\n{base64.b64encode(data).decode()}\n{submit.END}\n"
    told = {"run": "job", "out": str(tmp_path / "site-packages")}
    assert metadata(told, fetched=[[printed]]).fetch("job") == submit.Path("runs/job")
    assert list((tmp_path / "site-packages").iterdir()) == []
    for run in ("../../evil", "/tmp/evil", "a/b", "..", "", 3, "a b; touch evil", "\x1b[2J"):
        with pytest.raises(RunError, match="names the run of job2 as no run of ours is named"):
            metadata({"run": run}, fetched=[[printed]]).fetch("job2", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for job in ("../job", "job/../..", ".job", "a b"):
        with pytest.raises(ConfigError, match="the id of a job"):
            server(fetched=[[printed]]).fetch(job)


def test_a_job_comes_back_to_where_this_machine_remembers_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("rounds: 2\nclient: {actors: 0}\n")
    here = server()
    job = here.submit("c.yaml", out="mine")
    data = packed(member(f"{job}/data"), member(f"{job}/job.json", b'{"run": "evil"}'))
    printed = f"{submit.BEGIN}\n{base64.b64encode(data).decode()}\n{submit.END}\n"
    monkeypatch.chdir("/")
    again = server(fetched=[[printed]])
    status = again._client.get_job_info("job").status
    told = SimpleNamespace(metadata={"run": "evil", "out": "/tmp/evil"}, status=status)
    again._client.get_job_info = lambda name: told
    assert again.fetch(job) == tmp_path / "mine"
    assert json.loads((tmp_path / "mine" / "job.json").read_text())["run"] == job


def test_printouts_without_end_are_cut_off(monkeypatch):
    monkeypatch.setattr(submit, "LINE", 1000)
    for pieces in (["x" * 600] * 3, ["noise\n" * 100] * 3, [f"{submit.BEGIN}\n", "QUJD" * 400]):
        with pytest.raises(ArchiveError, match="or too long"):
            submit._decode(iter(pieces), io.BytesIO())


ESCAPES = {
    "colours": ("\x1b[1;31mred\x1b[0m", "red"),
    "a title": ("\x1b]0;evil\x07a\x1b]2;evil\x1b\\b", "ab"),
    "the clipboard": ("\x1b]52;c;ZXZpbA==\x07ok", "ok"),
    "a device's string": ("\x1bPq#0\x1b\\ok\x90evil\x9cok", "okok"),
    "one-byte sequences": ("\x9b2Jok\x9d0;evil\x9cok", "okok"),
    "a character set": ("\x1b(0ok\x1b#8", "ok"),
    "a reset": ("\x1bcok", "ok"),
    "controls": ("a\x00\x07\x08\x0b\x0c\r\x7f\x85b\tc\r\nd", "ab\tc\nd"),
    "text that runs backwards": ("a\u202eb\u2066c\u200f", "abc"),
    "what is never ended": ("\x1b]0;evil\nnext\x1b[12\nlast\x1b", "\nnext\nlast"),
    "two in one": ("\x1b[\x1b[31mok", "ok"),
    "text": ("caf\u00e9 \u2713 [31m", "caf\u00e9 \u2713 [31m"),
}


@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_that_a_terminal_would_obey_is_left_however_it_is_cut(name):
    text, shown = ESCAPES[name]
    assert plain(text) == shown
    for cut in range(len(text)):
        clean = Plain()
        assert clean(text[:cut]) + clean(text[cut:]) == shown
    clean = Plain()
    assert "".join(map(clean, text)) == shown


def test_what_a_job_prints_and_what_a_head_answers_is_shown_without_escape_codes():
    shown = []
    server(["\x1b]0;ti", "tle\x07one\x1b[", "31m two\r\n"]).follow("job", shown.append)
    assert "".join(shown) == "one two\n"
    assert submit._line("\x1b[2Jgone\r") == "gone"


def test_a_string_that_never_ends_hides_no_more_than_a_little():
    text = "\x1b]0;" + "x" * 2 * archive.STRING
    assert 0 < len(plain(text)) < 2 * archive.STRING


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
    try:
        with pytest.raises(ConfigError, match="the address redirects elsewhere"):
            submit.JobServer(f"http://127.0.0.1:{first.server_port}")
        made = object.__new__(submit._client_class())
        made._address = f"http://127.0.0.1:{first.server_port}"
        made._headers = {"authorization": "s"}
        with pytest.raises(RuntimeError, match="the address redirects elsewhere"):
            list(server_output(made))
    finally:
        for each in (first, second):
            each.shutdown()
            each.server_close()
    assert {port for port, _ in Redirecting.seen} == {first.server_port} and len(
        Redirecting.seen
    ) == 2


def server_output(client):
    made = object.__new__(submit.JobServer)
    made._client = client
    return made._output("job")


@pytest.mark.parametrize(
    ("scheme", "host", "mode", "warned"),
    [
        ("http", "10.0.0.1", "token", True),
        ("http", "head.example", "token", True),
        ("http", "127.0.0.1.example", "token", True),
        ("http", "127.8.0.1", "token", False),
        ("http", "::1", "token", False),
        ("http", "localhost", "token", False),
        ("https", "head.example", "token", False),
        ("http", "head.example", "", False),
    ],
)
def test_a_token_over_plain_http_is_warned_of(scheme, host, mode, warned, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert bool(submit._open_token(scheme, host)) == warned
