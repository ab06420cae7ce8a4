"""The command line. Every command is a few lines over the Python API.

Exit codes: 0 done, 1 a run that failed on the way, 2 something asked for that cannot be run (one
line, no traceback), 130 Ctrl-C.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raydpfl import interrupts
from raydpfl.errors import ConfigError, RunError, exited

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Differentially private federated learning, simulated on Ray. A config is code where it "
    "names an import path (kind: package.module:Name): run, sweep, audit and submit import it. "
    "Run no config that you have not read.",
)
AGAIN = "a run that had begun goes on with --resume"
READ = "A YAML file, or the directory of a run. The import paths in it are code that runs."
Config = Annotated[str, typer.Argument(help=READ, metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Fields to change, such as rounds=50 or bounding.bound=0.5.",
        metavar="[section.key=value ...]",
    ),
]
DataRoot = Annotated[Path | None, typer.Option(help="Where data sets lie; default: $RAYDPFL_DATA.")]


@app.command()
def run(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory; default: a new one under runs/.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    fresh_noise: Annotated[
        bool,
        typer.Option(
            "--fresh-noise",
            help="With --resume, where code or processor have changed: new noise, both releases count.",
        ),
    ] = False,
    data_root: DataRoot = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster to join; auto finds the local one.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Run one experiment."""
    from raydpfl import runner

    experiment, folder = _read(config, overrides)
    if resume and out is None:
        if folder is None:
            raise ConfigError(
                "--resume", config, "a run directory: raydpfl run DIR --resume, or --out DIR"
            )
        out = folder
    out = out or Path("runs") / f"{(folder or Path(config)).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    with _Display(console, experiment.rounds) as display:
        where = {"data_root": data_root, "address": address}
        shown = {"on_start": display.start, "on_rows": display.rows, "on_measure": display.measure}
        result = runner.run(
            experiment, out, resume=resume, fresh_noise=fresh_noise, **where, **shown
        )
    _report(console, result)


@app.command()
def sweep(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Sweep directory; default: a new one under runs/.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out.")
    ] = False,
    data_root: DataRoot = None,
    address: Annotated[
        str | None, typer.Option(help="A running Ray cluster to join; auto finds the local one.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
) -> None:
    """Run an experiment whose fields have search spaces, once for every setting and seed, by Ray
    Tune.
    """
    from raydpfl import tune

    folder = Path(config) if os.path.isdir(config) else None
    if resume and out is None:
        if folder is None:
            raise ConfigError(
                "--resume", config, "a sweep directory: raydpfl sweep DIR --resume, or --out DIR"
            )
        out = folder
    if resume and folder:
        asked = tune.Sweep.stored(folder, overrides or ())
    else:
        asked = tune.Sweep.from_yaml(folder / "sweep.yaml" if folder else config, overrides or ())
    out = out or Path("runs") / f"{(folder or Path(config)).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    with tune.Display(console, asked) as display:
        result = tune.run(
            asked, out, resume=resume, data_root=data_root, address=address, on_change=display.show
        )
    display.report(result)
    if result.problem:
        raise RunError(result.problem)


THERE = "The files that CONFIG names are on the cluster: send none."
SENT = (
    "A YAML file (with a sweep section: a sweep), or the directory of a run. "
    "The import paths in it are code that runs, here too."
)


@app.command()
def submit(
    config: Annotated[str | None, typer.Argument(help=SENT, metavar="CONFIG")] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where the run directory is brought back to; default: runs/ID."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="Of the cluster's job server; default: http://127.0.0.1:8265."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with what the cluster has of that run.")
    ] = None,
    follow: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Show a submitted job again, and bring its run directory back."
        ),
    ] = None,
    there: Annotated[bool, typer.Option("--there", help=THERE)] = False,
    stop: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Stop a job after its round, and bring its run directory back."
        ),
    ] = None,
) -> None:
    """Run one experiment, or a sweep, on a cluster, by Ray's job server."""
    from raydpfl.submit import JobServer

    if [config, follow, stop].count(None) != 2:
        raise ConfigError("submit", config, "a CONFIG, or --follow ID, or --stop ID")
    server = JobServer(address)
    if stop:
        server.stop(stop)
    job = follow or stop or server.submit(config, overrides or (), out, resume=resume, there=there)
    again = f"follow it with: {server.command('--follow', job)}\n  stop it with: {server.command('--stop', job)}"
    if config:
        print(f"Submitted {job}. It does not need this terminal;\n{again}", flush=True)
    try:
        code = server.follow(job, lambda text: print(text, end="", flush=True))
        folder = server.fetch(job, out)
    except KeyboardInterrupt:
        _fail(f"{job} goes on without this terminal\n{again}", 130)
    if folder:
        print(f"Brought back to: {folder}")
    if code and not stop:
        hint = (
            f"; its run goes on with: raydpfl submit CONFIG --resume {server.run_of(job)}"
            if folder and code != 2
            else ""
        )
        _fail(f"{job} ended with exit code {code}{hint}", code)


@app.command()
def show(config: Config, overrides: Overrides = None) -> None:
    """Print a config complete, with defaults; own members are not imported and stand as written."""
    experiment = _read(config, overrides, imports=())[0]
    print(experiment.to_yaml(), end="")
    for section, path in experiment.unread.items():
        print(f"# {section}: {path} was not imported, so its own defaults are not here.")


TAKEN = "Rounds K that any one client takes part in. Default: all."
ASKED = (
    "A config, or the directory of a run, to answer for; "
    "the import paths in it that decide its privacy are code that runs."
)
GIVE = "Two of noise, epsilon and rounds; the third is computed"
CLIENT = "With --unit client"
SAMPLE = "With --unit sample"


def _option(panel: str | None, text: str = "") -> Any:
    return typer.Option(help=text, rich_help_panel=panel)


def _whole(given: str | int) -> int:
    """A whole number, which may be written as 1e3 too; a default is one already."""
    text = str(given)
    try:
        value = float(text)
        return int(value) if value.is_integer() and not text.strip("+-").isdigit() else int(text)
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _count(panel: str | None, text: str = "") -> Any:
    return typer.Option(help=text, rich_help_panel=panel, parser=_whole, metavar="<int>")


@app.command()
def budget(
    context: typer.Context,
    config: Annotated[str | None, typer.Argument(help=ASKED, metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
    epsilon: Annotated[float | None, _option(GIVE)] = None,
    noise_multiplier: Annotated[
        float | None, _option(GIVE, "Std of the noise on the sum / --bound.")
    ] = None,
    std: Annotated[
        float | None,
        _option(
            GIVE,
            "The noise in the units of --bound: of one client (of the sum, if the server draws it); "
            "with --unit sample, of the mean gradient.",
        ),
    ] = None,
    rounds: Annotated[int | None, _count(GIVE, "Rounds T; of a sample: --participations.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: 1e-5.")] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            help="L2 norm of what a client sends, or of a sample's gradient. Default: 1; with --std to be given."
        ),
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(help="fixed (size; the default), poisson, full, with-replacement or public."),
    ] = None,
    relation: Annotated[
        str | None,
        typer.Option(help="replace_one (the default), add_remove (for poisson) or zero_out."),
    ] = None,
    participations: Annotated[int | None, _count(None, TAKEN)] = None,
    unit: Annotated[
        str | None, typer.Option(help="What is protected: client (the default) or sample.")
    ] = None,
    population: Annotated[int | None, _count(CLIENT, "Clients N.")] = None,
    cohort: Annotated[int | None, _count(CLIENT, "Clients r of a round.")] = None,
    placement: Annotated[
        str | None,
        _option(CLIENT, "Who draws the noise: client (the default) or server (for poisson)."),
    ] = None,
    v: Annotated[
        float | None,
        _option(CLIENT, "The constant that the formula of 000 and 001 leaves open. Default: 4."),
    ] = None,
    samples: Annotated[int | None, _count(SAMPLE, "Samples n of the client.")] = None,
    batch: Annotated[int | None, _count(SAMPLE, "Samples B of a batch.")] = None,
    steps: Annotated[int | None, _count(SAMPLE, "Local steps Q of a round.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Epsilon from noise, noise from epsilon, or rounds from both, by every accountant."""
    from raydpfl import budget as calculator
    from raydpfl.config import Experiment

    apart = ("config", "overrides", "as_json")
    options = {
        name: value
        for name, value in context.params.items()
        if value is not None and name not in apart
    }
    if config:
        for name in (name for name in options if name != "data_root"):
            raise ConfigError(
                f"--{name.replace('_', '-')}",
                options[name],
                "not with a CONFIG; change its fields, as in noise.epsilon=3",
            )
        imports = set(Experiment.model_fields) - {"model", "server"}
        found = calculator.of_config(_read(config, overrides, imports)[0], data_root)
    else:
        found = calculator.from_options(**options)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        Console(highlight=False).print(calculator.render(found))


CANARIES = "Clients (with noise at local steps, samples) that a coin puts in or leaves out."


@app.command()
def audit(
    config: Config,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where audit.json and audit.png go; default: a new directory under runs/."
        ),
    ] = None,
    canaries: Annotated[int, _count(None, CANARIES)] = 2000,
    confidence: Annotated[float, typer.Option(help="Of each lower bound.")] = 0.95,
    delta: Annotated[
        float | None, typer.Option(help="Where claims are looked at. Default: the run's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    data_root: DataRoot = None,
) -> None:
    """Run an experiment with canaries in it: what they prove of its privacy, beside what is
    claimed. Exit code 1: not as claimed.
    """
    from raydpfl import audit as auditor

    experiment, folder = _read(config, overrides)
    out = (
        out
        or Path("runs") / f"{(folder or Path(config)).stem}-audit-{time.strftime('%Y%m%d-%H%M%S')}"
    )
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("round"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=as_json or not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        settings = {
            "canaries": canaries,
            "confidence": confidence,
            "delta": delta,
            "data_root": data_root,
        }
        found = auditor.audit(
            experiment,
            out,
            **settings,
            on_round=lambda done, of: progress.update(task, completed=done, total=of),
        )
    if as_json:
        print(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        console.print(found.text(), markup=False)
        console.print(f"Audit directory: {out}", markup=False)
    if not found.passed:
        raise RunError(f"the run is not as private as it claims; see {out / 'audit.json'}")


datasets = typer.Typer(no_args_is_help=True, help="What there is to train on.")
app.add_typer(datasets, name="data")


@datasets.command("list")
def data_list(data_root: DataRoot = None) -> None:
    """All kinds of data, and where each would be read from."""
    from raydpfl import data

    for row in data.catalogue(data_root):
        print(f"{row['kind']:20} {' '.join(row['summary'].split())}  [{row['where']}]")


@datasets.command("fetch")
def data_fetch(kind: str, data_root: DataRoot = None) -> None:
    """Download a data set, unless it is there."""
    from raydpfl import data

    print(data.fetch(kind, data_root))


@datasets.command("describe")
def data_describe(config: Config, overrides: Overrides = None, data_root: DataRoot = None) -> None:
    """What each client of a config gets, in numbers."""
    from raydpfl import data

    experiment = _read(config, overrides, imports=("data",))[0]
    for name, value in data.describe(experiment.data, experiment.seed, data_root).items():
        print(f"{name}: {value}")


def _read(config: str, overrides: list[str] | None, imports: Collection[str] | None = None):
    """The experiment, and the run directory it was read from, if it was. `imports`: see
    `Experiment.from_dict`."""
    from raydpfl.config import Experiment

    folder = Path(config) if os.path.isdir(config) else None
    if folder and (folder / "sweep.yaml").exists() and not (folder / "config.yaml").exists():
        accepted = "a YAML file, or a run's directory; this one is a sweep's: raydpfl sweep DIR"
        raise ConfigError("config", config, accepted)
    path = folder / "config.yaml" if folder else Path(config)
    return Experiment.from_yaml(path, overrides or (), imports), folder


class _Display:
    """A progress bar on a terminal, a line per evaluation elsewhere."""

    def __init__(self, console: Console, rounds: int):
        self.console = console
        self.total = rounds
        columns = (
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(
            *columns, console=console, disable=not console.is_terminal or console.quiet
        )

    def __enter__(self) -> _Display:
        self.progress.start()
        self.task = self.progress.add_task("", total=self.total, state="starting")
        self.score = ""
        self.said = -1.0
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def start(self, plan) -> None:
        e = plan.experiment
        self.spent = [f"epsilon_{name}" for name in plan.rigorous]
        noise = (
            f"noise multiplier {plan.ratio:.4g}"
            if plan.ratio
            else "noise at each local step"
            if plan.mechanism
            else "no noise: not private"
        )
        self.console.print(
            f"{e.data.kind}, {len(plan.population):,} clients, {plan.population.samples:,} samples; {e.model.kind}, {plan.d:,} parameters; "
            f"{e.bounding.kind}, {noise}; lanes of {e.client.lane}, trained by {e.client.way}"
        )

    def rows(self, rows: list[dict]) -> None:
        for row in rows:
            spent = [row[name] for name in self.spent if name in row]
            epsilon = f"epsilon {min(spent):.3g}" if spent else ""
            if row["test_loss"] is not None:
                self.score = (
                    f"loss {row['test_loss']:.4g}"
                    if row["test_accuracy"] is None
                    else f"accuracy {row['test_accuracy']:.2%}"
                )
                if not self.console.is_terminal:
                    self.console.print(
                        f"round {row['round'] + 1}/{self.total}  {self.score}  {epsilon}  {_rate(row)}"
                    )
            state = "  ".join(part for part in (self.score, epsilon, f"{_rate(row)}") if part)
            self.progress.update(self.task, completed=row["round"] + 1, state=state)

    def measure(self, done: int, of: int) -> None:
        share = f"measuring heterogeneity: {done / of:.0%}"
        self.progress.update(self.task, state=share)
        if not self.console.is_terminal and (done == of or done / of >= self.said + 0.1):
            self.said = done / of
            self.console.print(share)


def _rate(row: dict) -> str:
    """Clients per second in three digits, or all that stand before the point."""
    value = row["clients_per_second"]
    return f"{value:,.0f} clients/s" if value >= 100 else f"{value:.3g} clients/s"


def _report(console: Console, result) -> None:
    from raydpfl.privacy import sentences

    summary = result.summary
    if summary["status"] == "budget":
        console.print(f"[yellow]Stopped:[/] {summary['reason']}")
    if summary["test_loss"] is not None:
        accuracy = (
            "" if summary["test_accuracy"] is None else f"accuracy {summary['test_accuracy']:.2%}, "
        )
        console.print(
            f"Test {accuracy}loss {summary['test_loss']:.4g}, "
            f"after {summary['rounds']} rounds in {summary['seconds']:.1f} s ({_rate(summary)})"
        )
    if not result.guarantees and summary["status"] == "budget":
        console.print("No round was run: nothing of the data was released, and nothing spent.")
    elif not result.guarantees:
        console.print(
            "No privacy guarantee: the run had no noise that an accountant was asked to account for."
        )
    for sentence in sentences([replace(one, exclusions=()) for one in result.guarantees]):
        console.print(f"- {sentence}", markup=False)
    for exclusion in dict.fromkeys(
        each for guarantee in result.guarantees for each in guarantee.exclusions
    ):
        console.print(f"  Not accounted for: {exclusion}.", markup=False)
    console.print(f"Run directory: {result.out}", markup=False)


def main() -> None:
    """The `raydpfl` command."""
    sys.path.insert(0, "")  # a user's own members are found beside where the command is run
    # Both signals ask to stop, also where SIGINT was ignored at the start: a script's `raydpfl ...
    # &`,
    # CI, a batch system that signals before its time limit. Python alone would leave it ignored.
    with interrupts.handled():
        message, code = _carried_out()
        # what came of it may have been another error, or none
        if interrupts.asked() and code != 130:
            message = f"interrupted{f' ({message})' if message else ''}; {AGAIN}"
            code = 130
    if code:
        _fail(message, code)


def _carried_out() -> tuple[str, int]:
    """Does what the command line asks for: what to say of its failure, and the exit code."""
    try:
        if app(standalone_mode=False) == 130:  # how typer passes Ctrl-C on
            raise KeyboardInterrupt
    except ConfigError as error:
        return str(error), 2
    except RunError as error:
        return str(error), 1
    except MemoryError as error:  # numpy says how much was asked for
        return f"not enough memory: {error}", 1
    except SystemExit as error:
        if isinstance(error, _Failed) or isinstance(error.__context__, BrokenPipeError):
            raise
        return f"code that the config names {exited(error)}", 1
    except RecursionError:
        return "values within values, deeper than Python goes", 1
    except OSError as error:  # of files that no run is to blame for: no room, no right, no disk
        return " ".join(str(error).split()) or type(error).__name__, 1
    except (KeyboardInterrupt, typer.Abort):
        return f"interrupted; {AGAIN}", 130
    except Exception as error:
        if interrupts.asked():
            return f"interrupted; {AGAIN}", 130
        if not hasattr(error, "format_message"):  # what typer says of an unusable command line
            raise
        return error.format_message() or "a command is missing", 2
    except BaseException as error:  # of a kind that nothing but a module of the user's own has
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return f"code that the config names raised {said}", 1
    return "", 0


class _Failed(SystemExit):
    """The end of the command, said by `_fail` and not by some module that a config names."""


def _fail(message: str, code: int) -> None:
    print(f"raydpfl: {message}", file=sys.stderr)
    raise _Failed(code)


if __name__ == "__main__":
    main()
