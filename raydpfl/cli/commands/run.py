"""Commands of one experiment: to begin a project, run it here or on a cluster, export its model."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from raydpfl import storage
from raydpfl.cli import options
from raydpfl.cli.exit_codes import Failed, fail, resumable
from raydpfl.cli.experiment_reader import new_folder, read, redirect_errors, refuse_resume
from raydpfl.cli.options import argument, directory, option
from raydpfl.errors import ConfigError

BEGAN = time.time()  # that is a quarter of a second after the process
PLACE = "Run directory, or its address (s3://BUCKET/RUN); default: a new one under runs/."
FRESH = "With --resume, where code or processor have changed: new noise, both releases count."


def run(
    config: options.Config,
    overrides: options.Overrides = None,
    out: Annotated[str | None, directory(PLACE)] = None,
    resume: options.Resume = False,
    fresh_noise: Annotated[bool, typer.Option("--fresh-noise", help=FRESH)] = False,
    data_root: options.DataRoot = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
) -> None:
    """Run one experiment."""
    from raydpfl.cli import run_display
    from raydpfl.runtime import runner
    from raydpfl.simulation import user_code

    code_source = out or config if resume else config
    with user_code.stored_code(code_source, prefer_stored=resume and not fresh_noise):
        experiment, folder = read("run", config, overrides)
        if resume and out is None:
            out = folder or refuse_resume(config, "run")
        out = out or new_folder(config)
        if os.path.isfile(out):
            raise ConfigError("--out", out, "a directory; this is a file")
        console = Console(quiet=quiet, highlight=False)
        with run_display.Display(console, experiment.rounds, BEGAN) as display, resumable(out):
            result = runner.run(
                experiment,
                out,
                resume=resume,
                fresh_noise=fresh_noise,
                data_root=data_root,
                address=address,
                on_stage=display.stage,
                on_start=display.start,
                on_rows=display.rows,
                on_measure=display.measure,
            )
    run_display.report(console, result, display.duration_text())


FAMILY = """The family of the class: bounding, selection, local, noise, weights, server, measure,
metric, model, data or track."""
NEXT = """  cd {folder}
  python -m pytest -q            (the project's own tests; pip install pytest)
  raydpfl run experiment.yaml"""


def new(
    folder: Annotated[Path, argument("A new directory, or one that is empty.", "DIR")],
    family: Annotated[str, option(FAMILY)] = "bounding",
) -> None:
    """Make a project to begin with: a config, a class of your own of some family, and its test."""
    from raydpfl.cli import new_project

    print("\n".join(str(path) for path in new_project.make(folder, family)))
    print(NEXT.format(folder=shlex.quote(str(folder))))


EXPORTED = "A file *.safetensors, or *.pt for a state_dict; default: names the run's own file."
MERGED = "Add adapters to the weights of their layers, and write these under their own names."


def export(
    folder: Annotated[str, argument("A run directory.", "RUN")],
    out: Annotated[Path | None, option(EXPORTED)] = None,
    merged: Annotated[bool, typer.Option("--merged", help=MERGED)] = False,
    trust_code: options.Trust = False,
) -> None:
    """Write the model of a run to a file: of one with adapters what was trained."""
    from raydpfl.simulation import export as saved

    with redirect_errors("export", folder):
        if not storage.is_address(folder) and not os.path.exists(folder):
            raise ConfigError("run", folder, "the directory of a run; there is none of this name")
        print(saved.export(folder, out, merged, trust_code))


SENT = (
    "A YAML file (with a sweep section: a sweep), or the directory of a run. "
    "The import paths in it are code that runs, here too."
)
BACK = "Where the run directory is brought back to; default: runs/ID. An address: it stays there."
SERVER = "Of the cluster's job server; default: http://127.0.0.1:8265."
GO_ON = "Go on with what the cluster has of that run."
FOLLOW = "Show a submitted job, and bring its run directory back."
THERE = "The files that CONFIG names are on the cluster: send none."
STOP = "Stop a job after its round, and bring its run directory back."
RESUMED = "; its run goes on with: raydpfl submit CONFIG --resume {}"


def submit(
    config: Annotated[str | None, argument(SENT, "CONFIG")] = None,
    overrides: options.Overrides = None,
    out: Annotated[str | None, directory(BACK)] = None,
    address: Annotated[str | None, option(SERVER)] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help=GO_ON)] = None,
    follow: Annotated[str | None, typer.Option(metavar="ID", help=FOLLOW)] = None,
    there: Annotated[bool, typer.Option("--there", help=THERE)] = False,
    stop: Annotated[str | None, typer.Option(metavar="ID", help=STOP)] = None,
) -> None:
    """Run one experiment, or a sweep, on a cluster, by Ray's job server."""
    from raydpfl.jobs.client import JobServer

    targets = [name for name in (config, follow, stop) if name is not None]
    if len(targets) != 1:
        raise ConfigError("submit", config, "a CONFIG, or --follow ID, or --stop ID")
    if config is None and (resume or there):
        name, value = ("--resume", resume) if resume else ("--there", True)
        raise ConfigError(name, value, "a CONFIG next to it")
    job = targets[0]
    with redirect_errors("submit", *([config] if config else [])):
        server = JobServer(address)
        if config is not None:
            job = server.submit(config, overrides or (), out, resume=resume, files_on_cluster=there)
    if stop:
        server.stop(stop)
    hints = f"follow it with: {server.command('--follow', job)}\n"
    hints += f"  stop it with: {server.command('--stop', job)}"
    if config is not None:
        print(f"Submitted {job}. It does not need this terminal;\n{hints}", flush=True)
    try:
        code = server.follow(job, lambda text: print(text, end="", flush=True))
        folder = server.fetch(job, out)
    except KeyboardInterrupt:
        fail(f"{job} goes on without this terminal\n{hints}", 130)
    if code:
        hint = RESUMED.format(server.run_of(job)) if folder and code != 2 else ""
        ending = "was stopped" if stop else f"ended with exit code {code}"
        print(f"raydpfl: {job} {ending}{hint}", file=sys.stderr, flush=True)
    if folder:
        away = storage.is_address(folder)
        print(f"It is at: {folder}" if away else f"Brought back to: {os.path.abspath(folder)}")
    if code and not stop:
        raise Failed(code)
