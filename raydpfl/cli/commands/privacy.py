"""Commands of privacy: what a budget allows, and whether a run keeps to it."""

from __future__ import annotations

import os
import shlex
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from raydpfl import storage
from raydpfl.cli import options
from raydpfl.cli.experiment_reader import new_folder, path_kind, read, read_sweep, stored_code
from raydpfl.cli.options import argument, count, directory, option, plain_console, print_json
from raydpfl.errors import ConfigError, RunError

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
TAKEN = "Rounds K that any one client takes part in. Default: all."
STRATEGY = (
    "Of the server's noise, correlated over the rounds: tree, square-root, banded or buffered."
)
STRATEGIES = ("tree", "square-root", "banded", "buffered")
SEPARATION = "The fewest rounds from one of a client's to its next, with --strategy. Default: 1."
RESTART = "Rounds of one tree, with --strategy tree. Default: all."
BANDS = "Rounds that noise is correlated over, with --strategy banded. Default: --separation."
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


def budget(
    context: typer.Context,
    config: Annotated[str | None, argument(ASKED, "CONFIG")] = None,
    overrides: options.Overrides = None,
    epsilon: Annotated[float | None, option("Of the guarantee, at --delta.", GIVE)] = None,
    noise_multiplier: Annotated[float | None, option(MULTIPLIER, GIVE)] = None,
    std: Annotated[float | None, option(STD, GIVE)] = None,
    rounds: Annotated[int | None, count("Rounds T; of a sample: --participations.", GIVE)] = None,
    delta: Annotated[float | None, option("Of the guarantee. Default: 1e-5.")] = None,
    bound: Annotated[float | None, option(BOUND)] = None,
    sampling: Annotated[str | None, option(SAMPLING, words=SAMPLINGS)] = None,
    cap: Annotated[int | None, count(CAP)] = None,
    epoch: Annotated[int | None, count(EPOCH)] = None,
    per_epoch: Annotated[int | None, count(PER_EPOCH)] = None,
    relation: Annotated[str | None, option(RELATION, words=RELATIONS)] = None,
    participations: Annotated[int | None, count(TAKEN)] = None,
    strategy: Annotated[str | None, option(STRATEGY, CLIENT, STRATEGIES)] = None,
    separation: Annotated[int | None, count(SEPARATION, CLIENT)] = None,
    restart: Annotated[int | None, count(RESTART, CLIENT)] = None,
    bands: Annotated[int | None, count(BANDS, CLIENT)] = None,
    buffers: Annotated[int | None, count("With --strategy buffered. Default: 3.", CLIENT)] = None,
    noise: Annotated[str | None, option(NOISE, CLIENT, NOISES)] = None,
    bits: Annotated[int | None, count(BITS, CLIENT)] = None,
    parameters: Annotated[int | None, count("Of the model, with --noise.", CLIENT)] = None,
    unit: Annotated[str | None, option(UNIT, words=("client", "sample"))] = None,
    population: Annotated[int | None, count("Clients N.", CLIENT)] = None,
    cohort: Annotated[int | None, count("Clients r of a round.", CLIENT)] = None,
    placement: Annotated[str | None, option(DRAWS, CLIENT, ("client", "server"))] = None,
    colluders: Annotated[int | None, count(COLLUDERS, CLIENT)] = None,
    v: Annotated[float | None, option(CONSTANT, CLIENT)] = None,
    samples: Annotated[int | None, count("Samples n of the client.", SAMPLE)] = None,
    batch: Annotated[int | None, count("Samples B of a batch.", SAMPLE)] = None,
    steps: Annotated[int | None, count("Local steps Q of a round.", SAMPLE)] = None,
    person: Annotated[int | None, count(PERSON, SAMPLE)] = None,
    as_json: options.Json = False,
    data_root: options.DataRoot = None,
    trust_code: options.Trust = False,
) -> None:
    """Epsilon from noise, noise from epsilon, or rounds from both, by every accountant."""
    from raydpfl.cli import budget_display
    from raydpfl.privacy import calculator

    values = {
        name: value
        for name, value in context.params.items()
        if name not in NO_OPTIONS and value is not None
    }
    runs = [name for name in overrides or () if "=" not in name or os.path.exists(name)]
    if config and runs:
        answer = _compose_runs([config, *runs], overrides or [], values, data_root, trust_code)
    elif config:
        search = path_kind(config, overrides or ()) == "a private search"
        expected = "none with a CONFIG; change its fields, as in noise.epsilon=3"
        _check_options(values, {"data_root"} if search else {"data_root", "person"}, expected)
        from raydpfl.experiment import Experiment
        from raydpfl.simulation import composed_runs, planned_guarantee

        imports = set(Experiment.model_fields) - {"model", "server"}
        with stored_code(config, trust_code):
            if search:
                from raydpfl.sweep.search_privacy import private_search_composition

                sweep = read_sweep(config, overrides or (), False)[0]
                answer = private_search_composition(sweep, data_root)
            else:
                experiment, folder = read("budget", config, overrides, imports, trust_code)
                ledger_folder = None if overrides else folder
                with _ledger_place(ledger_folder) as place:
                    run = composed_runs.StoredRun.of(config, experiment, place)
                facts = person, config, run.ledger or ()
                answer = planned_guarantee.planned_budget(experiment, data_root, *facts)
    else:
        answer = calculator.from_options(**values)
    if as_json:
        print_json(answer.to_dict())
    else:
        Console(highlight=False).print(budget_display.render_budget(answer))


def _check_options(values: dict[str, Any], allowed_names: set[str], expected: str) -> None:
    for name in (name for name in values if name not in allowed_names):
        raise ConfigError(f"--{name.replace('_', '-')}", values[name], expected)


def _compose_runs(
    runs: list[str], words: list[str], values: dict[str, Any], root: Path | None, trust_code: bool
) -> Any:
    """What several runs spend together."""
    from raydpfl.experiment import Experiment
    from raydpfl.simulation import composed_runs

    _check_options(values, {"delta", "data_root"}, "none but --delta with RUNs")
    for change in (change for change in words if change not in runs):
        raise ConfigError(*change.partition("=")[::2], "no change of fields with several RUNs")
    imports = set(Experiment.model_fields) - {"model", "server"}
    stored_runs = []
    with ExitStack() as stack:
        for name in runs:
            stack.enter_context(stored_code(name, trust_code))
            experiment, folder = read("budget", name, None, imports, trust_code)
            place = stack.enter_context(_ledger_place(folder))
            stored_runs.append(composed_runs.StoredRun.of(name, experiment, place))
        return composed_runs.compose(stored_runs, root, values.get("delta"))


def _ledger_place(folder: str | None) -> AbstractContextManager[Path | None]:
    """Where the ledger of a run directory can be read; None: there is no directory."""
    if folder is None:
        return nullcontext()
    return storage.readable_folder(folder, "run", "ledger.jsonl".__eq__)


AUDITED = "Where audit.json and scores.parquet go; default: a new one under runs/."
CANARIES = "Clients (with noise at local steps, samples) that a coin puts in or leaves out."
CLAIMED = "Where claims are looked at. Default: the run's own."
REPLAYED = (
    "No canaries: neighbouring populations under the same keys, each released sum's change against "
    "the sensitivity that is declared, and all else against itself."
)


def audit(
    config: options.Config,
    overrides: options.Overrides = None,
    out: Annotated[str | None, directory(AUDITED)] = None,
    canaries: Annotated[int, count(CANARIES)] = 2000,
    confidence: Annotated[float, option("Of each lower bound.")] = 0.95,
    delta: Annotated[float | None, option(CLAIMED)] = None,
    replay: Annotated[bool, option(REPLAYED)] = False,
    as_json: options.Json = False,
    data_root: options.DataRoot = None,
    trust_code: options.Trust = False,
) -> None:
    """Run an experiment with canaries in it: what they prove of its privacy, next to what is
    claimed; with --replay on neighbouring populations. Exit code 1: not as claimed.
    """
    from rich import progress

    from raydpfl import audit as auditor
    from raydpfl.audit import replay as replays

    guesses: dict[str, Any] = {"canaries": canaries, "confidence": confidence, "delta": delta}
    if replay and [*guesses.values()] != [2000, 0.95, None]:
        expected = "none of --canaries, --confidence and --delta, as a replay guesses nothing"
        raise ConfigError("--replay", True, expected)
    out = out or new_folder(config, "-replay" if replay else "-audit")
    console = plain_console()
    bar = progress.Progress(
        "world" if replay else "round",
        progress.MofNCompleteColumn(),
        progress.BarColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=as_json or not console.is_terminal,
    )
    task = bar.add_task("", total=None)

    def show(done_count: int, total: int) -> None:
        bar.update(task, completed=done_count, total=total)

    with stored_code(config, trust_code), bar:
        experiment, _ = read("audit", config, overrides, trust_code=trust_code)
        result: Any
        if replay:
            result = replays.replay(experiment, out, data_root=data_root, on_world=show)
        else:
            result = auditor.audit(experiment, out, data_root=data_root, on_round=show, **guesses)
    if as_json:
        print_json(result.to_dict())
    else:
        console.print(result.text(), markup=False)
        page = f"raydpfl report {shlex.quote(str(out))}"
        directory_note = f"Audit directory: {out}\n  its page and figures:  {page}"
        console.print(directory_note, markup=False, soft_wrap=True)
    if not result.passed:
        results = storage.join_address(out, "audit.json")
        raise RunError(f"the run is not as private as it claims; see {results}")
