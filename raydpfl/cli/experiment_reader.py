"""The experiment that a command line names: a config or the directory of a run, with overrides."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raydpfl import storage
from raydpfl.cli.wrong_command import redirect_errors
from raydpfl.errors import ConfigError

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.sweep import Sweep

CONFIGS = ("config.yaml", "sweep.yaml", "study.yaml")


def read_config(config: str) -> AbstractContextManager[Path]:
    """Within, the file or directory of this name or address."""
    return storage.readable_folder(config, "config", CONFIGS.__contains__)


def read(
    command: str,
    config: str,
    overrides: Sequence[str] | None,
    imports: Collection[str] | None = None,
    trust_code: bool = True,
) -> tuple[Experiment, str | None]:
    """The experiment that a command was given, and the run directory it was read from, if it was.
    `imports`: see `Experiment.from_dict`; with `trust_code` also of what a run directory names.
    """
    from raydpfl.config.registry import refuse_code
    from raydpfl.experiment import Experiment

    with redirect_errors(command, config), read_config(config) as place:
        folder = os.path.isdir(place)
        path = place / "config.yaml" if folder else place
        if folder and not trust_code:
            experiment = Experiment.from_yaml(path, overrides or (), ())
            refuse_code(config, experiment.code(imports))
        return Experiment.from_yaml(path, overrides or (), imports), config if folder else None


def read_sweep(config: str, overrides: Sequence[str], resume: bool) -> tuple[Sweep, bool]:
    """The sweep that a command was given, and whether it was read from a directory."""
    from raydpfl.sweep import Sweep

    with redirect_errors("sweep", config, overrides=overrides), read_config(config) as place:
        if not os.path.isdir(place):
            return Sweep.from_yaml(place, overrides), False
        if resume:
            return Sweep.from_directory(place, overrides), True
        return Sweep.from_yaml(place / "sweep.yaml", overrides), True


def stored_code(config: str, trust_code: bool) -> AbstractContextManager[Any]:
    """Within, what a run directory keeps of the code that it names can be imported."""
    from raydpfl.simulation import user_code

    return user_code.stored_code(config) if trust_code else nullcontext()


def new_folder(config: str, suffix: str = "") -> str:
    """A directory under runs/ for what begins now, named by the config."""
    return str(storage.new(f"{Path(config).stem}{suffix}"))


def refuse_resume(config: str, kind: str, command: str = "") -> NoReturn:
    """Raises `ConfigError` for --resume of what is no directory."""
    expected = f"a {kind} directory: raydpfl {command or kind} DIR --resume, or --out DIR"
    raise ConfigError("--resume", config, expected)
