"""Commands of many runs: sweeps and studies."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from raydpfl import storage
from raydpfl.cli import completion, options
from raydpfl.cli.exit_codes import resumable
from raydpfl.cli.experiment_reader import new_folder, read_sweep, redirect_errors, refuse_resume
from raydpfl.cli.options import argument, count, directory, option, plain_console
from raydpfl.errors import ConfigError, RunError

SWEPT = "Sweep directory, or its address (s3://BUCKET/SWEEP); default: a new one under runs/."


def sweep(
    config: options.Config,
    overrides: options.Overrides = None,
    out: Annotated[str | None, directory(SWEPT)] = None,
    resume: options.Resume = False,
    data_root: options.DataRoot = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
) -> None:
    """Run an experiment whose fields have search spaces, once for every setting and seed, by Ray
    Tune.
    """
    from raydpfl import sweep as tune
    from raydpfl.cli.search_display import SweepDisplay
    from raydpfl.simulation import user_code

    with user_code.stored_code(out or config if resume else config, prefer_stored=resume):
        sweep_spec, folder = read_sweep(config, overrides or (), resume)
        if resume and out is None:
            out = config if folder else refuse_resume(config, "sweep")
        out = out or new_folder(config)
        run_options: dict[str, Any] = {"resume": resume, "data_root": data_root, "address": address}
        with SweepDisplay(plain_console(quiet)) as display, resumable(out, "sweep"):
            result = tune.run(sweep_spec, out, on_change=display.show, **run_options)
    display.report(result, sweep_spec)
    if result.problem:
        raise RunError(result.problem)


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


def reproduce(
    studies: Annotated[list[str] | None, argument(REPRODUCED, "STUDY", completion.studies)] = None,
    scale: Annotated[str | None, option(f"{SCALED} Default: small.", words=SCALES)] = None,
    out: Annotated[str | None, directory(INTO)] = None,
    resume: options.Resume = False,
    seeds: Annotated[int | None, count(SEEDS)] = None,
    only: Annotated[list[str] | None, option(ONLY)] = None,
    listed: Annotated[bool, typer.Option("--list", help=LIST)] = False,
    data_root: options.DataRoot = None,
    address: options.Address = None,
    quiet: options.Quiet = False,
) -> None:
    """Run a paper's table or figure: tune every arm alike, run it with fresh seeds, compare."""
    from raydpfl.cli.preview import list_studies
    from raydpfl.cli.search_display import StudyDisplay
    from raydpfl.simulation import user_code
    from raydpfl.sweep import study as studying

    console = plain_console(quiet)
    if listed:
        for name, value in {"out": out, "resume": resume, "address": address, "only": only}.items():
            if value:
                raise ConfigError(f"--{name}", str(value), "none with --list, which runs nothing")
        list_studies(console, studies or (), scale, seeds, data_root)
        return
    if not studies:
        raise ConfigError("study", None, "the name of a study; raydpfl reproduce --list shows them")
    if resume and out is None:
        study = studies[0]
        is_place = storage.is_address(study) or os.path.isdir(storage.location(study))
        is_folder = len(studies) == 1 and is_place
        out = study if is_folder else refuse_resume(" ".join(studies), "study", "reproduce")
    run_options: dict[str, Any] = {"resume": resume, "data_root": data_root, "address": address}
    with ExitStack() as stack:
        names = [name for study_name in studies for name in studying.several(study_name)]
        for place, name in enumerate(names):
            if "://" in name:
                folder = stack.enter_context(storage.readable_folder(name, "study", _is_study_file))
                names[place] = str(folder)
            code_source = out if out and resume and len(names) == 1 else names[place]
            stack.enter_context(user_code.stored_code(code_source, prefer_stored=resume))
        with redirect_errors("reproduce", *studies):
            labels = _labels_by_axis(only or ())
            study_specs = [studying.Study.named(name, scale, seeds, only=labels) for name in names]
        display = stack.enter_context(StudyDisplay(console, study_specs))
        stack.enter_context(resumable(out, "reproduce"))
        results = studying.reproduce(*study_specs, out=out, on_change=display.show, **run_options)
    for result in results:
        display.report(result)
    problems = "; ".join(
        f"{result.study.about.id}: {result.problem}" for result in results if result.problem
    )
    if problems:
        raise RunError(problems)


def _labels_by_axis(filters: Sequence[str]) -> dict[str, list[str]]:
    """The labels that --only names. Raises `ConfigError`."""
    labels: dict[str, list[str]] = {}
    for text in filters:
        axis, _, names = text.partition("=")
        if not names:
            raise ConfigError("--only", text, "AXIS=LABEL, or AXIS=LABEL,LABEL")
        labels.setdefault(axis, []).extend(names.split(","))
    return labels


def _is_study_file(file: str) -> bool:
    """Whether a file of a study's directory is read where the study is run."""
    return file == "study.yaml" or file.startswith(("published/", "code/"))
