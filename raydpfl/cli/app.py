"""The command line. Every command is a few lines over the Python API.

Exit codes: 0 done, 1 a run that failed midway, 2 something asked for that cannot be run (one
line, no traceback), 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from raydpfl import storage
from raydpfl.cli import completion
from raydpfl.cli.wrong_command import directed, private_search
from raydpfl.core import signals
from raydpfl.errors import ConfigError, RunError, brief, exited, frames_of_user, traceback_text

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.sweep import Sweep

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Differentially private federated learning, simulated on Ray. A config is code where it "
    "names an import path (kind: package.module:Name): run, sweep, audit and submit import it. "
    "Run no config that you have not read. Commands that read a run directory (export, budget, "
    "data describe, audit) import what it names with --trust-code alone; report, compare and show "
    "import nothing.",
)
MERGED = "Add adapters to the weights of their layers, and write these under their own names."
EXPORTED = "A file *.safetensors, or *.pt for a state_dict; default: names the run's own file."
SWEPT = "Sweep directory, or its address (s3://BUCKET/SWEEP); default: a new one under runs/."
PLACE = "Run directory, or its address (s3://BUCKET/RUN); default: a new one under runs/."
READ = "A YAML file, or the directory of a run. The import paths in it are code that runs."
CLUSTER = "A running Ray cluster to join; auto finds the local one."
BEGAN = time.time()  # that is a quarter of a second after the process
CONFIGS = ("config.yaml", "sweep.yaml", "study.yaml")
FRESH = "With --resume, where code or processor have changed: new noise, both releases count."


def _load() -> None:
    """Imports torch, and all that a config names."""
    import raydpfl.experiment  # noqa: F401


def _option(text: str = "", panel: str | None = None, words: tuple[str, ...] = ()) -> Any:
    """An option. `words`: what a shell completes."""
    complete = completion.one_of(*words) if words else None
    return typer.Option(help=text, rich_help_panel=panel, autocompletion=complete)


def _argument(text: str, metavar: str, complete: Callable[..., list[str]] | None = None) -> Any:
    return typer.Argument(help=text, metavar=metavar, autocompletion=complete)


def _count(text: str = "", panel: str | None = None) -> Any:
    return typer.Option(help=text, rich_help_panel=panel, parser=_whole, metavar="<int>")


def _whole(given: str | int) -> int:
    """A whole number, which may be written as 1e3 too; a default is one already."""
    text = str(given)
    try:
        value = float(text)
        return int(value) if value.is_integer() and not text.strip("+-").isdigit() else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _version(asked: bool) -> None:
    if asked:
        import raydpfl

        print(f"raydpfl {raydpfl.__version__}")
        raise typer.Exit


def _show_frames(asked: bool) -> None:
    if asked:
        os.environ[DEBUG] = "1"


DEBUG = "RAYDPFL_DEBUG"  # in the environment: errors show all frames
FRAMES = f"Show all frames of an error, as {DEBUG}=1 does; anywhere on the command line."
Debug = Annotated[bool, typer.Option("--debug", help=FRAMES, callback=_show_frames)]
VERSION = typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)


@app.callback()
def _whole_command(version: Annotated[bool, VERSION] = False, debug: Debug = False) -> None:
    pass


CHANGES = "Fields to change, each section.key=value: rounds=50, bounding.bound=0.5."
Config = Annotated[str, _argument(READ, "CONFIG")]
Overrides = Annotated[list[str] | None, _argument(CHANGES, "KEY=VALUE", completion.overrides)]
DataRoot = Annotated[Path | None, _option("Where data sets lie; default: $RAYDPFL_DATA.")]
Address = Annotated[str | None, _option(CLUSTER)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AGAIN = "Go on with what is in --out, or in the directory that is named."
Resume = Annotated[bool, typer.Option("--resume", help=AGAIN)]
TRUSTED = "Import the code that a run directory names, which runs it; else such a run is refused."
Trust = Annotated[bool, typer.Option("--trust-code", help=TRUSTED)]


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[str | None, _option(PLACE)] = None,
    resume: Resume = False,
    fresh_noise: Annotated[bool, typer.Option("--fresh-noise", help=FRESH)] = False,
    data_root: DataRoot = None,
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run one experiment."""
    _load()
    from raydpfl.cli import run_display
    from raydpfl.runtime import runner
    from raydpfl.simulation import user_code

    with user_code.stored_code(
        out or config if resume else config, first=resume and not fresh_noise
    ):
        experiment, folder = _read("run", config, overrides)
        if resume and out is None:
            out = folder or _no_folder(config, "run")
        out = out or _new_folder(config)
        console = Console(quiet=quiet, highlight=False)
        with (
            run_display.Display(console, experiment.rounds, BEGAN) as display,
            _resumable(out),
        ):
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
    run_display.report(console, result, display.took())


NEW = "A new directory, or one that is empty."
FAMILY = """The family of the class: bounding, selection, local, noise, weights, server, measure,
metric, model, data or track."""
NEXT = """  cd {folder}
  python -m pytest -q            (the project's own tests; pip install pytest)
  raydpfl run experiment.yaml"""


@app.command()
def new(
    folder: Annotated[Path, _argument(NEW, "DIR")],
    family: Annotated[str, _option(FAMILY)] = "bounding",
) -> None:
    """Make a project to begin with: a config, a class of your own of some family, and its test."""
    from raydpfl.cli import new_project

    print("\n".join(str(path) for path in new_project.make(folder, family)))
    print(NEXT.format(folder=shlex.quote(str(folder))))


@app.command()
def export(
    folder: Annotated[str, _argument("A run directory.", "RUN")],
    out: Annotated[Path | None, _option(EXPORTED)] = None,
    merged: Annotated[bool, typer.Option("--merged", help=MERGED)] = False,
    trust_code: Trust = False,
) -> None:
    """Write the model of a run to a file: of one with adapters what was trained."""
    _load()
    from raydpfl.simulation import export as saved

    with directed("export", folder):
        print(saved.export(folder, out, merged, trust_code))


@app.command()
def sweep(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[str | None, _option(SWEPT)] = None,
    resume: Resume = False,
    data_root: DataRoot = None,
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run an experiment whose fields have search spaces, once for every setting and seed, by Ray
    Tune.
    """
    _load()
    from raydpfl import sweep as tune
    from raydpfl.cli.search_display import SweepDisplay
    from raydpfl.simulation import user_code

    with user_code.stored_code(out or config if resume else config, first=resume):
        asked, folder = _swept(config, overrides or (), resume)
        if resume and out is None:
            out = config if folder else _no_folder(config, "sweep")
        out = out or _new_folder(config)
        options: dict[str, Any] = {"resume": resume, "data_root": data_root, "address": address}
        with SweepDisplay(_console(quiet)) as display, _resumable(out, "sweep"):
            result = tune.run(asked, out, on_change=display.show, **options)
    display.report(result, asked)
    if result.problem:
        raise RunError(result.problem)


def _swept(config: str, overrides: Sequence[str], resume: bool) -> tuple[Sweep, bool]:
    """The sweep that a command was given, and whether it was read from a directory."""
    from raydpfl.sweep import Sweep

    reading = storage.reading(config, "config", CONFIGS.__contains__)
    with directed("sweep", config, overrides=overrides), reading as place:
        if not os.path.isdir(place):
            return Sweep.from_yaml(place, overrides), False
        if resume:
            return Sweep.stored(place, overrides), True
        return Sweep.from_yaml(place / "sweep.yaml", overrides), True


REPRODUCED = (
    "A study that comes with the project (002/fig1, or another name that --list shows; 002 or all "
    "for several), the file of your own, or a study directory. "
    "The import paths in a study are code that runs."
)
LIST = (
    "Run nothing: say what each study shows, what was chosen for it and what it costs here; of a "
    "named one, all that it would run."
)
SCALED = "smoke (seconds), small (minutes to hours on two cores) or paper (the paper's own sizes)."
SEEDS = "Final runs of every cell. Default: as the study says."
ONLY = "AXIS=LABEL[,LABEL]: only the cells with these labels, of a panel or of arm."
INTO = "Study directory, or its address (of several, theirs are in it); default: under runs/."
SCALES = ("smoke", "small", "paper")


@app.command()
def reproduce(
    studies: Annotated[list[str] | None, _argument(REPRODUCED, "STUDY", completion.studies)] = None,
    scale: Annotated[str | None, _option(f"{SCALED} Default: small.", words=SCALES)] = None,
    out: Annotated[str | None, _option(INTO)] = None,
    resume: Resume = False,
    seeds: Annotated[int | None, _count(SEEDS)] = None,
    only: Annotated[list[str] | None, _option(ONLY)] = None,
    listed: Annotated[bool, typer.Option("--list", help=LIST)] = False,
    data_root: DataRoot = None,
    address: Address = None,
    quiet: Quiet = False,
) -> None:
    """Run a paper's table or figure: tune every arm alike, run it with fresh seeds, compare."""
    _load()
    from raydpfl.cli.preview import list_studies
    from raydpfl.cli.search_display import StudyDisplay
    from raydpfl.sweep import study as studying

    console = _console(quiet)
    if listed:
        for name, value in {"out": out, "resume": resume, "address": address, "only": only}.items():
            if value:
                raise ConfigError(f"--{name}", str(value), "none with --list, which runs nothing")
        list_studies(console, studies or (), scale, seeds, data_root)
        return
    if not studies:
        raise ConfigError("study", None, "the name of a study; raydpfl reproduce --list shows them")
    if resume and out is None:
        there = len(studies) == 1 and (os.path.isdir(studies[0]) or storage.elsewhere(studies[0]))
        out = studies[0] if there else _no_folder(" ".join(studies), "study", "reproduce")
    options: dict[str, Any] = {"resume": resume, "data_root": data_root, "address": address}
    with ExitStack() as stack:
        names = [name for study_name in studies for name in studying.several(study_name)]
        for place, name in enumerate(names):
            if storage.elsewhere(name):
                folder = stack.enter_context(storage.reading(name, "study", _of_study))
                names[place] = str(folder)
        with directed("reproduce", *studies):
            labels = _labels_by_axis(only or ())
            asked = [studying.Study.named(name, scale, seeds, only=labels) for name in names]
        display = stack.enter_context(StudyDisplay(console, asked))
        stack.enter_context(_resumable(out, "reproduce"))
        results = studying.reproduce(*asked, out=out, on_change=display.show, **options)
    for result in results:
        display.report(result)
    problems = "; ".join(
        f"{done.study.about.id}: {done.problem}" for done in results if done.problem
    )
    if problems:
        raise RunError(problems)


def _labels_by_axis(given: Sequence[str]) -> dict[str, list[str]]:
    """The labels that --only names. Raises `ConfigError`."""
    only: dict[str, list[str]] = {}
    for text in given:
        axis, _, names = text.partition("=")
        if not names:
            raise ConfigError("--only", text, "AXIS=LABEL, or AXIS=LABEL,LABEL")
        only.setdefault(axis, []).extend(names.split(","))
    return only


def _of_study(file: str) -> bool:
    """Whether a file of a study's directory is read where the study is run."""
    return file == "study.yaml" or file.startswith("published/")


THERE = "The files that CONFIG names are on the cluster: send none."
SENT = (
    "A YAML file (with a sweep section: a sweep), or the directory of a run. "
    "The import paths in it are code that runs, here too."
)
BACK = "Where the run directory is brought back to; default: runs/ID. An address: it stays there."
SERVER = "Of the cluster's job server; default: http://127.0.0.1:8265."
GO_ON = "Go on with what the cluster has of that run."
FOLLOW = "Show a submitted job, and bring its run directory back."
STOP = "Stop a job after its round, and bring its run directory back."
RESUMED = "; its run goes on with: raydpfl submit CONFIG --resume {}"


@app.command()
def submit(
    config: Annotated[str | None, _argument(SENT, "CONFIG")] = None,
    overrides: Overrides = None,
    out: Annotated[str | None, _option(BACK)] = None,
    address: Annotated[str | None, _option(SERVER)] = None,
    resume: Annotated[str | None, typer.Option(metavar="ID", help=GO_ON)] = None,
    follow: Annotated[str | None, typer.Option(metavar="ID", help=FOLLOW)] = None,
    there: Annotated[bool, typer.Option("--there", help=THERE)] = False,
    stop: Annotated[str | None, typer.Option(metavar="ID", help=STOP)] = None,
) -> None:
    """Run one experiment, or a sweep, on a cluster, by Ray's job server."""
    from raydpfl.jobs.client import JobServer

    options = [option for option in (config, follow, stop) if option is not None]
    if len(options) != 1:
        raise ConfigError("submit", config, "a CONFIG, or --follow ID, or --stop ID")
    if config is None and (resume or there):
        option, value = ("--resume", resume) if resume else ("--there", True)
        raise ConfigError(option, value, "a CONFIG next to it")
    job = options[0]
    with directed("submit", *([config] if config else [])):
        server = JobServer(address)
        if config is not None:
            job = server.submit(config, overrides or (), out, resume=resume, there=there)
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
        _fail(f"{job} goes on without this terminal\n{hints}", 130)
    if code and not stop:
        hint = RESUMED.format(server.run_of(job)) if folder and code != 2 else ""
        print(f"raydpfl: {job} ended with exit code {code}{hint}", file=sys.stderr, flush=True)
    if folder:
        away = storage.elsewhere(folder)
        print(f"It is at: {folder}" if away else f"Brought back to: {os.path.abspath(folder)}")
    if code and not stop:
        raise _Failed(code)


SHOWN = "A YAML file, the directory of a run, a sweep or a study, or the name of a study."
TIMED = (
    "Prepare the data, put every setting together with them, and time a round of each kind of run. "
    "The import paths in CONFIG are then code that runs."
)


@app.command()
def show(
    config: Annotated[str, _argument(SHOWN, "CONFIG")],
    overrides: Overrides = None,
    timed: Annotated[bool, typer.Option("--timed", help=TIMED)] = False,
    data_root: DataRoot = None,
) -> None:
    """Print a config complete, with each default marked as one; own members are not imported and
    stand as written. Of a sweep or a study also what it would run, whether each of it can be, and
    how long it takes.
    """
    _load()
    from raydpfl.cli.preview import preview
    from raydpfl.config.defaults import MARK

    with storage.reading(config, "config", CONFIGS.__contains__) as place:
        asked = str(place) if storage.elsewhere(config) else config
        shown = preview(asked, overrides or (), timed, data_root)
    console = Console(soft_wrap=True)
    for line in shown.text.splitlines():
        console.print(Text(line, style="dim" if line.endswith(MARK) else ""))
    if shown.refused:
        raise shown.refused


ASKED = (
    "A config, or the directory of a run, to answer for, or several: what they spend together; or "
    "a sweep with sweep.private: what the search spends; "
    "the import paths in it that decide its privacy are code that runs."
)
GIVE = "Two of noise, epsilon and rounds; the third is computed"
MULTIPLIER = "Std of the noise on the sum / --bound."
STD = (
    "The noise in the units of --bound: of one client (of the sum, if the server draws it); "
    "with --unit sample, of the mean gradient."
)
ROUNDS = "Rounds T; of a sample: --participations."
BOUND = (
    "L2 norm of what a client sends, or of a sample's gradient. Default: 1; with --std to be given."
)
SAMPLING = (
    "fixed (size; the default), poisson, truncated-poisson, full, with-replacement, public or "
    "random-allocation."
)
CAP = "Clients of a round (samples of a batch) at most, with --sampling truncated-poisson."
COLLUDERS = "Clients who tell all they know, where clients draw the noise."
EPOCH = "Rounds (local steps) T of an epoch, with --sampling random-allocation."
PER_EPOCH = "Of these, those that each client (sample) is in. Default: 1."
RELATION = "replace_one (the default), add_remove or zero_out; not each for every --sampling."
SAMPLINGS = (
    "fixed", "poisson", "truncated-poisson", "full", "with-replacement", "public",
    "random-allocation",
)  # fmt: skip
RELATIONS = ("replace_one", "add_remove", "zero_out")
UNITS = ("client", "sample")
DRAWERS = ("client", "server")
TAKEN = "Rounds K that any one client takes part in. Default: all."
STRATEGY = (
    "Of the server's noise, correlated over the rounds: tree, square-root, banded or buffered."
)
STRATEGIES = ("tree", "square-root", "banded", "buffered")
SEPARATION = "The fewest rounds from one of a client's to its next, with --strategy. Default: 1."
RESTART = "Rounds of one tree, with --strategy tree. Default: all."
BANDS = "Rounds that noise is correlated over, with --strategy banded. Default: --separation."
BUFFERS = "With --strategy buffered. Default: 3."
NOISE = "laplace, or on sums of integers discrete-gaussian or skellam. Default: Gaussian."
NOISES = ("discrete-gaussian", "skellam", "laplace")
BITS = "Width of the sum of a coordinate, of integers. Default: 16."
UNIT = "What is protected: client (the default) or sample."
CLIENT = "With --unit client"
DRAWS = "Who draws the noise: client (the default) or server (for poisson and random-allocation)."
CONSTANT = "The constant that the formula `paper` leaves open. Default: 4."
SAMPLE = "With --unit sample"
PERSON = "Samples of one person, protected together; with a CONFIG, all of a client by default."
NO_OPTIONS = ("config", "overrides", "as_json", "trust_code")  # of the calculator


@app.command()
def budget(
    context: typer.Context,
    config: Annotated[str | None, _argument(ASKED, "CONFIG")] = None,
    overrides: Overrides = None,
    epsilon: Annotated[float | None, _option("Of the guarantee, at --delta.", GIVE)] = None,
    noise_multiplier: Annotated[float | None, _option(MULTIPLIER, GIVE)] = None,
    std: Annotated[float | None, _option(STD, GIVE)] = None,
    rounds: Annotated[int | None, _count(ROUNDS, GIVE)] = None,
    delta: Annotated[float | None, _option("Of the guarantee. Default: 1e-5.")] = None,
    bound: Annotated[float | None, _option(BOUND)] = None,
    sampling: Annotated[str | None, _option(SAMPLING, words=SAMPLINGS)] = None,
    cap: Annotated[int | None, _count(CAP)] = None,
    epoch: Annotated[int | None, _count(EPOCH)] = None,
    per_epoch: Annotated[int | None, _count(PER_EPOCH)] = None,
    relation: Annotated[str | None, _option(RELATION, words=RELATIONS)] = None,
    participations: Annotated[int | None, _count(TAKEN)] = None,
    strategy: Annotated[str | None, _option(STRATEGY, CLIENT, STRATEGIES)] = None,
    separation: Annotated[int | None, _count(SEPARATION, CLIENT)] = None,
    restart: Annotated[int | None, _count(RESTART, CLIENT)] = None,
    bands: Annotated[int | None, _count(BANDS, CLIENT)] = None,
    buffers: Annotated[int | None, _count(BUFFERS, CLIENT)] = None,
    noise: Annotated[str | None, _option(NOISE, CLIENT, NOISES)] = None,
    bits: Annotated[int | None, _count(BITS, CLIENT)] = None,
    parameters: Annotated[int | None, _count("Of the model, with --noise.", CLIENT)] = None,
    unit: Annotated[str | None, _option(UNIT, words=UNITS)] = None,
    population: Annotated[int | None, _count("Clients N.", CLIENT)] = None,
    cohort: Annotated[int | None, _count("Clients r of a round.", CLIENT)] = None,
    placement: Annotated[str | None, _option(DRAWS, CLIENT, DRAWERS)] = None,
    colluders: Annotated[int | None, _count(COLLUDERS, CLIENT)] = None,
    v: Annotated[float | None, _option(CONSTANT, CLIENT)] = None,
    samples: Annotated[int | None, _count("Samples n of the client.", SAMPLE)] = None,
    batch: Annotated[int | None, _count("Samples B of a batch.", SAMPLE)] = None,
    steps: Annotated[int | None, _count("Local steps Q of a round.", SAMPLE)] = None,
    person: Annotated[int | None, _count(PERSON, SAMPLE)] = None,
    as_json: Json = False,
    data_root: DataRoot = None,
    trust_code: Trust = False,
) -> None:
    """Epsilon from noise, noise from epsilon, or rounds from both, by every accountant."""
    from raydpfl.cli import budget_display
    from raydpfl.privacy import calculator

    stated = {
        name: value
        for name, value in context.params.items()
        if name not in NO_OPTIONS and value is not None
    }
    runs = [name for name in overrides or () if "=" not in name or os.path.exists(name)]
    if config and runs:
        answer = _together([config, *runs], overrides or [], stated, data_root, trust_code)
    elif config:
        _load()
        search = private_search(config, overrides or ())
        expected = "none with a CONFIG; change its fields, as in noise.epsilon=3"
        read = ("data_root",) if search else ("data_root", "person")
        for name in (name for name in stated if name not in read):
            raise ConfigError(f"--{name.replace('_', '-')}", stated[name], expected)
        from raydpfl.experiment import Experiment
        from raydpfl.simulation import planned_guarantee

        imports = set(Experiment.model_fields) - {"model", "server"}
        with _kept(config, trust_code):
            if search:
                from raydpfl.sweep.search_privacy import of_the_best

                answer = of_the_best(_swept(config, overrides or (), False)[0], data_root)
            else:
                asked = _read("budget", config, overrides, imports, trust_code)[0]
                answer = planned_guarantee.of_config(asked, data_root, person)
    else:
        answer = calculator.from_options(**stated)
    if as_json:
        _print_json(answer.to_dict())
    else:
        Console(highlight=False).print(budget_display.shown(answer))


def _together(
    runs: list[str],
    others: list[str],
    stated: dict[str, Any],
    data_root: Path | None,
    trust_code: bool,
) -> Any:
    """What several runs spend together."""
    _load()
    from raydpfl.experiment import Experiment
    from raydpfl.simulation import composed_runs

    for name in (name for name in stated if name not in ("delta", "data_root")):
        raise ConfigError(f"--{name.replace('_', '-')}", stated[name], "none but --delta with RUNs")
    for change in (change for change in others if change not in runs):
        raise ConfigError(*change.partition("=")[::2], "no change of fields with several RUNs")
    imports = set(Experiment.model_fields) - {"model", "server"}
    stored = []
    with ExitStack() as stack:
        for name in runs:
            stack.enter_context(_kept(name, trust_code))
            experiment, folder = _read("budget", name, None, imports, trust_code)
            reading = storage.reading(name, "run", "ledger.jsonl".__eq__)
            place = stack.enter_context(reading) if folder else None
            stored.append(composed_runs.StoredRun.of(name, experiment, place))
        return composed_runs.compose(stored, data_root, stated.get("delta"))


AUDITED = "Where audit.json and scores.parquet go; default: a new one under runs/."
CANARIES = "Clients (with noise at local steps, samples) that a coin puts in or leaves out."
CLAIMED = "Where claims are looked at. Default: the run's own."
REPLAYED = (
    "No canaries: neighbouring populations under the same keys, each released sum's change against "
    "the sensitivity that is declared, and all else against itself."
)


@app.command()
def audit(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[str | None, _option(AUDITED)] = None,
    canaries: Annotated[int, _count(CANARIES)] = 2000,
    confidence: Annotated[float, _option("Of each lower bound.")] = 0.95,
    delta: Annotated[float | None, _option(CLAIMED)] = None,
    replay: Annotated[bool, _option(REPLAYED)] = False,
    as_json: Json = False,
    data_root: DataRoot = None,
    trust_code: Trust = False,
) -> None:
    """Run an experiment with canaries in it: what they prove of its privacy, next to what is
    claimed; with --replay on neighbouring populations. Exit code 1: not as claimed.
    """
    _load()
    from raydpfl import audit as auditor
    from raydpfl.audit import replay as replays

    if replay and (canaries, confidence, delta) != (2000, 0.95, None):
        expected = "none of --canaries, --confidence and --delta, as a replay guesses nothing"
        raise ConfigError("--replay", True, expected)
    out = out or _new_folder(config, "-replay" if replay else "-audit")
    console = _console()
    with _kept(config, trust_code), _bar(console, hidden=as_json) as progress:
        experiment, _ = _read("audit", config, overrides, trust_code=trust_code)
        result: Any
        if replay:
            result = replays.replay(experiment, out, data_root=data_root, on_world=progress)
        else:
            result = auditor.audit(
                experiment,
                out,
                canaries=canaries,
                confidence=confidence,
                delta=delta,
                data_root=data_root,
                on_round=progress,
            )
    if as_json:
        _print_json(result.to_dict())
    else:
        console.print(result.text(), markup=False)
        page = f"raydpfl report {shlex.quote(str(out))}"
        following = f"Audit directory: {out}\n  its page and figures:  {page}"
        console.print(following, markup=False, soft_wrap=True)
    if not result.passed:
        raise RunError(
            f"the run is not as private as it claims; see {storage.within(out, 'audit.json')}"
        )


CHECKED = (
    "A class by import path (mine:Tanh), or a member that comes with the project (bounding:clip). "
    "An import path is code that runs."
)
AROUND = "Fields of the small experiment around it, or of the member's own section."
Around = Annotated[list[str] | None, _argument(AROUND, "KEY=VALUE", completion.after_colon)]


@app.command()
def check(
    member: Annotated[str, _argument(CHECKED, "MEMBER", completion.members)],
    overrides: Around = None,
    as_json: Json = False,
) -> None:
    """Whether a member keeps the contract of its family, with each of its examples. Exit code 1:
    one is broken.
    """
    _load()
    from raydpfl import check as contract

    clauses = contract.check(member, overrides or ())
    if as_json:
        _print_json([asdict(clause) for clause in clauses])
    else:
        console = _console()
        print(contract.render(clauses, *[console.width] * console.is_terminal))
    broken = [clause for clause in clauses if clause.kept is False]
    if broken:
        first = broken[0]
        where = f" ({first.example})" if first.example else ""
        raise RunError(f"{member} breaks {first.name}{where}. {first.finding}")


NAMED = "A section of the config (bounding, data.partition, ...), or one of its kinds."


@app.command()
def kinds(
    name: Annotated[str | None, _argument(NAMED, "FAMILY[.KIND]", completion.kinds)] = None,
    as_json: Json = False,
    schema: Annotated[bool, _option("Print the JSON Schema of a config, for editors.")] = False,
) -> None:
    """Every choice that a config has: its keys, their types, bounds, defaults and units, and the
    paper that it is of. Of own classes `raydpfl check` says more.
    """
    _load()
    from raydpfl.cli import config_schema
    from raydpfl.cli import kinds as reference

    if schema:
        if name:
            raise ConfigError("--schema", True, f"no {name} next to it: it is of a whole config")
        _print_json(config_schema.schema())
    elif as_json:
        _print_json([asdict(kind) for kind in reference.of(name)])
    else:
        print(reference.render(reference.of(name)))


REPORTED = "The directory of a run, a sweep, an audit or a study; or several, as for compare."
WRITTEN = "Where the report goes. Default: DIR/report; of several, a new ./report-NAMES."
PRINTED = "Figures for 1 column of a paper (3.5 in) or 2 (7.16 in), text of 8 pt."


@app.command()
def report(
    directories: Annotated[list[str], _argument(REPORTED, "DIR")],
    out: Annotated[str | None, _option(WRITTEN)] = None,
    columns: Annotated[int | None, _option(PRINTED)] = None,
) -> None:
    """Make a page, figures and tables of what ran, from its directory alone. Nothing is trained."""
    _load()
    from raydpfl.report import write

    with directed("report", *directories):
        place = write(directories, out, columns)
    print(f"Report: {storage.within(place, 'index.html')}")


COMPARED = "Directories of runs, sweeps and studies."
SCORE = "The score to compare by. Default: that by which the runs are followed."
PAGE = "Where the page goes. Default: ./report-NAMES."


@app.command()
def compare(
    directories: Annotated[list[str], _argument(COMPARED, "DIR")],
    metric: Annotated[str | None, _option(SCORE)] = None,
    out: Annotated[str | None, _option(PAGE)] = None,
) -> None:
    """Set runs side by side: a table of how they differ, their scores, epsilons and times;
    and a page with the score over rounds, seconds and epsilon. Seeds are averaged. Nothing is
    trained.
    """
    _load()
    from raydpfl import report as reports
    from raydpfl.cli import comparison_table

    with directed("compare", *directories):
        comparison, place = reports.compare(directories, out, metric)
    comparison_table.show(Console(highlight=False), comparison)
    print(f"Page: {storage.within(place, 'index.html')}")


def _console(quiet: bool = False) -> Console:
    """Lines are wrapped at words on a terminal, and whole in a file."""
    return Console(quiet=quiet, highlight=False, soft_wrap=not sys.stdout.isatty())


def _print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, allow_nan=False))


@contextmanager
def _bar(console: Console, hidden: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar of rounds on a terminal, and what moves it: rounds done, of how many."""
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    hidden = hidden or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, of: progress.update(task, completed=done, total=of)


datasets = typer.Typer(no_args_is_help=True, help="What there is to train on.")
app.add_typer(datasets, name="data")
DATA = completion.of_family("data")
SOME = "Some of them, or import paths of your own classes."
FETCHED = "One whose place raydpfl data list names raydpfl data fetch."
DESCRIBED = "A config and fields to change; or data files, or a folder, and fields of data."
PICTURE = "A picture of the classes of each client: a file .svg, .png or .pdf."


@datasets.command("list")
def data_list(
    kinds: Annotated[list[str] | None, _argument(SOME, "KIND", DATA)] = None,
    data_root: DataRoot = None,
) -> None:
    """All kinds of data, and where each would be read from; with kinds, these alone."""
    _load()
    from raydpfl import data

    console = _console()
    for row in data.catalogue(data_root, kinds or ()):
        line = f"{row['kind']:20} {' '.join(row['summary'].split())}  [{row['where']}]"
        if console.is_terminal:
            line = textwrap.fill(line, console.width, subsequent_indent=" " * 21)
        print(line)


@datasets.command("fetch")
def data_fetch(
    kind: Annotated[str, _argument(FETCHED, "KIND", DATA)],
    data_root: DataRoot = None,
) -> None:
    """Download a data set, unless it is there."""
    _load()
    from raydpfl import data

    print(data.fetch(kind, data_root))


@datasets.command("describe")
def data_describe(
    files: Annotated[list[str], _argument(DESCRIBED, "CONFIG|FILE... [KEY=VALUE]...")],
    out: Annotated[Path | None, _option(PICTURE)] = None,
    data_root: DataRoot = None,
    trust_code: Trust = False,
) -> None:
    """What each client of a config gets, in numbers, and with --out as a picture; or what is
    understood of data files, as a config that trains on them. `data.y=NAME` and the like say what
    else to take.
    """
    _load()
    from raydpfl import data

    config, *overrides = files
    if not _is_config(config):
        if out is not None:
            expected = "none without a config, such as data describe prints of these files"
            raise ConfigError("--out", str(out), expected)
        print(_understood(files, data_root), end="")
        return
    if out is not None:
        from raydpfl.report import class_histogram

        class_histogram.check(out)
    with _kept(config, trust_code):
        experiment = _read("data describe", config, overrides, ("data",), trust_code)[0]
        held_out = experiment.evaluate.held_out
        folder = data.prepare(experiment.data, experiment.seed, data_root, validation=held_out)
        loaded = data.Shards.open(folder)
        counted = experiment.data.counted(data_root)
    for name, value in {**loaded.describe(), **counted}.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {number:g}" for key, number in value.items())
        print(f"{name}: {value}")
    if out is not None:
        counts = loaded.class_counts()
        if not counts.shape[1]:
            raise ConfigError("--out", str(out), "none for data whose samples have no class each")
        class_histogram.write(out, counts, loaded.target.names)
        print(f"Picture: {out}")


def _is_config(name: str) -> bool:
    """Whether a name is that of a config or of a run's directory, and not of data."""
    if storage.elsewhere(name):
        return True
    folder = Path(name)
    if folder.is_dir():
        return any((folder / name).exists() for name in ("config.yaml", "sweep.yaml"))
    return folder.suffix in (".yaml", ".yml") or ("=" in name and not folder.exists())


def _understood(arguments: list[str], data_root: Path | None) -> str:
    """A config for data files, with what was understood of them as its comments."""
    from raydpfl import data
    from raydpfl.config.yaml import dump
    from raydpfl.experiment import Experiment, overridden

    files = [argument for argument in arguments if "=" not in argument or os.path.exists(argument)]
    changes = [argument for argument in arguments if argument not in files]
    tree = overridden({"data": {}}, changes)
    other = [name for name in tree if name != "data"]
    if other:
        raise ConfigError(other[0], tree[other[0]], "fields of data alone, as in data.y=price")
    suggestion = data.Suggestion(files, tree["data"], data_root)
    Experiment.from_dict(suggestion.tree)
    notes = [*suggestion.notes, *(f"warning: {warning}" for warning in suggestion.warnings)]
    return "".join(f"# {note}\n" for note in notes) + dump(suggestion.tree)


def _read(
    command: str,
    config: str,
    overrides: list[str] | None,
    imports: Collection[str] | None = None,
    trust_code: bool = True,
) -> tuple[Experiment, str | None]:
    """The experiment that a command was given, and the run directory it was read from, if it was.
    `imports`: see `Experiment.from_dict`; with `trust_code` also of what a run directory names.
    """
    from raydpfl.config.registry import refuse_code
    from raydpfl.experiment import Experiment

    reading = storage.reading(config, "config", CONFIGS.__contains__)
    with directed(command, config), reading as place:
        folder = os.path.isdir(place)
        path = place / "config.yaml" if folder else place
        if folder and not trust_code:
            experiment = Experiment.from_yaml(path, overrides or (), ())
            refuse_code(config, experiment.code(imports))
        return Experiment.from_yaml(path, overrides or (), imports), config if folder else None


def _kept(config: str, trust_code: bool) -> AbstractContextManager[Any]:
    """Within, what a run directory keeps of the code that it names can be imported."""
    from raydpfl.simulation import user_code

    return user_code.stored_code(config) if trust_code else nullcontext()


def _new_folder(config: str, what: str = "") -> str:
    """A directory under runs/ for what begins now, named by the config."""
    return str(storage.new(f"{Path(config).stem}{what}"))


def _no_folder(asked: str, what: str, command: str = "") -> NoReturn:
    """Raises `ConfigError` for --resume of what is no directory."""
    expected = f"a {what} directory: raydpfl {command or what} DIR --resume, or --out DIR"
    raise ConfigError("--resume", asked, expected)


class _Begun:
    """What this process carries out, if it can be gone on with, and in which directory, if that is
    known yet.
    """

    command = ""
    folder: Path | str | None = None


@contextmanager
def _resumable(folder: Path | str | None, command: str = "run") -> Iterator[None]:
    """Within it an interrupt says how to go on with what is in `folder`."""
    _Begun.command = command
    _Begun.folder = folder
    yield
    _Begun.command = ""


def _interrupted(error: str = "") -> str:
    """What is said of an interrupt, by which something may have failed."""
    message = f"interrupted ({error})" if error else "interrupted"
    folder = _Begun.folder
    if not _Begun.command:
        return message
    if folder is None:
        return f"{message}; what had begun goes on with --resume"
    here = "://" not in str(folder)
    if here and not (os.path.isdir(folder) and os.listdir(folder)):
        return f"{message} before its first round was done; nothing is left of it"
    command = f"raydpfl {_Begun.command} {shlex.quote(str(folder))} --resume"
    return f"{message}; go on with: {command}"


def main() -> None:
    """The `raydpfl` command."""
    _Begun.command = ""
    if "--debug" in sys.argv[2:]:
        sys.argv.remove("--debug")
        sys.argv.insert(1, "--debug")
    sys.path.insert(0, "")  # a user's own members are found where the command is run
    # Both signals ask to stop, also where SIGINT was ignored at the start, which Python alone would
    # leave ignored: a script's `raydpfl ... &`, CI, a batch system before its time limit.
    with signals.handled():
        message, code = _carried_out()
        # what came of it may have been another error, or none
        if signals.asked() and code != 130:
            message = _interrupted(message)
            code = 130
    if code:
        _fail(message, code)


def _carried_out() -> tuple[str, int]:
    """Does what the command line asks for: what to say of its failure, and the exit code."""
    try:
        if app(standalone_mode=False) == 130:  # how typer passes Ctrl-C on
            raise KeyboardInterrupt
    except BaseException as error:
        if os.environ.get(DEBUG) and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        ended = _ended(error)
        if ended is None:
            raise
        return ended
    return "", 0


# What ends a command, the exit code, and what is said of it; the first that fits.
ENDINGS: tuple[tuple[type[BaseException], int, Callable[[BaseException], str]], ...] = (
    (ConfigError, 2, str),
    (RunError, 1, str),
    (MemoryError, 1, lambda error: f"not enough memory: {error}"),  # numpy says how much
    (RecursionError, 1, lambda error: "values within values, deeper than Python goes"),
    # of files that no run is to blame for: no room, no right, no disk
    (OSError, 1, lambda error: " ".join(str(error).split()) or type(error).__name__),
    (KeyboardInterrupt, 130, lambda error: _interrupted()),
    (typer.Abort, 130, lambda error: _interrupted()),
)


def _ended(error: BaseException) -> tuple[str, int] | None:
    """What to say of this end of a command, and the exit code; None for one that is a defect, or
    that has been said.
    """
    for kind, code, say in ENDINGS:
        if isinstance(error, kind):
            return say(error), code
    if isinstance(error, SystemExit):
        place = traceback.extract_tb(error.__traceback__)[-1].filename
        if not error.code and Path(place).is_relative_to(Path(typer.__file__).parent):
            return "", 0  # typer has completed a command for a shell
        silent = isinstance(error, _Failed) or isinstance(error.__context__, BrokenPipeError)
        return None if silent else (f"code that the config names {exited(error)}", 1)
    if isinstance(error, Exception) and frames_of_user(error):
        return traceback_text(error), 1
    if not isinstance(error, Exception):  # of a kind that nothing but a user's own module has
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return f"code that the config names raised {what}", 1
    if signals.asked():
        return _interrupted(), 130
    if hasattr(error, "format_message"):  # what typer says of an unusable command line
        return error.format_message() or "a command is missing", 2
    return None


class _Failed(SystemExit):
    """The end of the command, said by `_fail` and not by some module that a config names."""


def _fail(message: str, code: int) -> NoReturn:
    print(f"raydpfl: {message if os.environ.get(DEBUG) else brief(message)}", file=sys.stderr)
    raise _Failed(code)


if __name__ == "__main__":
    main()
