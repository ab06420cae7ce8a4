"""What a command line names: a config or the directory of a run, with overrides; and for those who
gave it to another command, which one takes it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder, redirect_errors("run", f"{folder}/s.yaml"):
...     _ = Path(f"{folder}/s.yaml").write_text("sweep: {repeats: 2}")
...     raise ConfigError("sweep", {"repeats": 2}, "...")  # doctest: +ELLIPSIS
Traceback (most recent call last):
raydpfl.errors.ConfigError: config = '...': ... this is a sweep: raydpfl sweep ...s.yaml
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from raydpfl import storage
from raydpfl.config.yaml import read as read_yaml
from raydpfl.errors import ConfigError

if TYPE_CHECKING:
    from raydpfl.experiment import Experiment
    from raydpfl.sweep import Sweep

CONFIGS = ("config.yaml", "sweep.yaml", "study.yaml")
EXPERIMENT = "the YAML file of an experiment, or the directory of a run"
RUN = ("an experiment", "a run's directory")
STUDY = ("a study", "a study's directory")
SWEEP = ("a sweep", "a private search")
FILES = {  # by which a directory is known, the first that is there
    "audit.json": "an audit's directory",
    "study.yaml": "a study's directory",
    "sweep.yaml": "a sweep's directory",
    "config.yaml": "a run's directory",
}
# what each command takes: in words, and as `path_kind` names it
ACCEPTED_PATHS = {
    **dict.fromkeys(("run", "audit", "data describe"), (EXPERIMENT, RUN)),
    "budget": (f"{EXPERIMENT}; or, alone, the YAML file of a sweep with sweep.private", RUN),
    "sweep": ("the YAML file, or the directory, of a sweep", (*SWEEP, "a sweep's directory")),
    "submit": (
        "the YAML file of an experiment or a sweep, or the directory of a run",
        (*RUN, *SWEEP),
    ),
    "reproduce": ("a study: its name, its YAML file or its directory", STUDY),
    "export": ("the directory of a run", ("a run's directory",)),
    "report": ("the directory of a run, a sweep, an audit or a study", tuple(FILES.values())),
}
ACCEPTED_PATHS["compare"] = ACCEPTED_PATHS["report"]
# what to do with it
ADVICE = {
    "an experiment": "raydpfl run {}",
    "a sweep": "raydpfl sweep {}",
    "a private search": "raydpfl sweep {}",
    "a study": "raydpfl reproduce {}",
    "a run's directory": "raydpfl report {}, or raydpfl run {} --resume",
    "a sweep's directory": "raydpfl report {}, or raydpfl sweep {} --resume",
    "a study's directory": "raydpfl report {}, or raydpfl reproduce {} --resume",
    "an audit's directory": "raydpfl report {}",
}
CLUSTER_NOTE = " (--address auto, on a node of a cluster, runs it there)"


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


def path_kind(target: str, overrides: Sequence[str] = ()) -> str | None:
    """What a path with overrides, or the name of a study, stands for; None: nothing can be said.
    Of a file nothing of sweeps is imported (1.5 s) to see it.
    """
    from raydpfl.config.overrides import has_space
    from raydpfl.experiment import overridden

    path = Path(target)
    if os.path.isdir(path):
        return next((kind for name, kind in FILES.items() if (path / name).exists()), None)
    if not os.path.isfile(path):
        from raydpfl.sweep.study import builtin

        is_study = builtin.several(target) != [target] or builtin.is_builtin(target)
        return "a study" if is_study else None
    try:
        tree = read_yaml(path)
    except ConfigError:
        return None
    if not isinstance(tree, Mapping):
        return None
    is_config = path.suffix in (".yaml", ".yml")  # of another file a private search alone is told
    if "study" in tree:
        return "a study" if is_config else None
    kind = "a sweep"
    with suppress(ConfigError):
        tree = overridden(tree, overrides)
        sweep = tree.get("sweep")
        if isinstance(sweep, Mapping) and sweep.get("private"):
            return "a private search"
        kind = "a sweep" if "sweep" in tree or has_space(tree) else "an experiment"
    return kind if is_config else None


@contextmanager
def redirect_errors(command: str, *targets: str, overrides: Sequence[str] = ()) -> Iterator[None]:
    """Where something within is refused, and one of `targets` is no such thing as `command` takes,
    the `ConfigError` says what it is and which command takes it.
    """
    try:
        yield
    except ConfigError as error:
        expected, kinds = ACCEPTED_PATHS[command]
        cluster_note = CLUSTER_NOTE if command == "submit" else ""
        for path in targets:
            kind = path_kind(path, overrides) if "://" not in path else None
            if kind and kind not in kinds:
                advice = ADVICE[kind].replace("{}", path)
                message = f"{expected}; this is {kind}: {advice}{cluster_note}"
                raise ConfigError("config", os.fspath(path), message) from None
            if kind is None and error.field == "config" and os.path.isdir(path):
                raise ConfigError("config", path, f"{expected}; this folder is none") from None
        raise
