"""What a job takes along to a cluster: the config, the user's modules, and the files that the
config names.

Sent are, of the folder where the command is run,

- the modules and packages that reading the config has imported: their Python files (.py, .pyi) and
  compiled modules, whether a package has an `__init__.py` or not, and the data that
  `[tool.setuptools.package-data]` of `pyproject.toml` declares for them;
- of a run directory, the modules that it keeps and that are not in that folder;
- every file that the config names, and every folder (of images, of a data set) with its files,
  under a name of its contents, which the config that is sent has in its place. (Another file of the
  old name may lie on the cluster.)

Never sent are hidden files and folders (.env, .git), links, `__pycache__`, and more than `LIMIT`
bytes or `COUNT` files together. Sizes are looked at before anything is copied.
"""

import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import raydpfl
from raydpfl.config.overrides import SPACES
from raydpfl.config.yaml import dump
from raydpfl.config.yaml import read as read_yaml
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment, overridden
from raydpfl.storage.files import check, data_root, digest
from raydpfl.sweep import Sweep
from raydpfl.sweep.spaces import find

LIMIT = 100 * 10**6  # bytes
COUNT = 10_000
CODE = (".py", ".pyi", *EXTENSION_SUFFIXES)
Files = dict[str, Path]  # where each goes, relative -> where it is


@dataclass(frozen=True)
class Submission:
    """A config that is to be submitted."""

    path: Path  # the config's file
    command: str  # that runs it: run or sweep
    inline: bool  # it does without Ray
    experiments: list[Experiment]  # all that the config describes
    tree: dict[str, Any]  # the config with the overrides in it


def read(config: str | Path, overrides: Sequence[str] = ()) -> Submission:
    """The config of a file, or of the directory of a run or a sweep. Raises `ConfigError`."""
    path = Path(config).absolute()
    if path.is_dir():
        candidates = [path / name for name in ("config.yaml", "sweep.yaml")]
        path = next((file for file in candidates if file.exists()), candidates[0])
    tree = overridden(read_yaml(path), overrides)
    if "sweep" in tree or find(tree):
        return Submission(path, "sweep", False, Sweep.from_dict(tree).probes, tree)
    experiment = Experiment.from_dict(tree)
    return Submission(path, "run", experiment.client.actors == 0, [experiment], tree)


def pack(
    tree: Mapping[str, Any],
    experiments: Iterable[Experiment],
    working_folder: Path,
    *,
    stored_folder: Path | None = None,
    files_on_cluster: bool = False,
) -> tuple[dict[str, Any], Files]:
    """The config to send in the place of `tree`, and the files to send with it. Raises
    `ConfigError` for a file that is not here, or that is not sent.

    Args:
        tree, experiments: the config, and all that it describes.
        working_folder: the folder that the config's classes were imported from.
        stored_folder: a folder in which a run directory has kept such modules.
        files_on_cluster: the files that the config names lie on the cluster and are not sent.
    """
    folders = [working_folder, *([stored_folder] if stored_folder else [])]
    files = {name: path for folder in folders for name, path in _modules_of(folder).items()}
    for folder in folders:
        _check_modules(folder, files)
    sizes = dict(files)
    _check_size(sizes)
    sources = () if files_on_cluster else experiments
    named_files = {file for experiment in sources for file in experiment.named_files()}
    new_names: dict[tuple[str, str], str] = {}
    data: Files = {}
    for field, name in sorted(named_files):
        path = _find_file(field, name, working_folder)
        inside = _walk(path) if path.is_dir() else [path]
        members = {file.relative_to(path).as_posix(): file for file in inside}
        sizes |= {str(file): file for file in members.values()}
        _check_size(sizes)
        contents = check({name: digest(file) for name, file in members.items()})[:16]
        new = f"files/{contents}/{path.name}"
        new_names[field.rpartition(".")[2], name] = new
        data |= {f"{new}/{name}" if path.is_dir() else new: file for name, file in members.items()}
    return _replace_names(tree, new_names), files | data


def stage_job(tree: Mapping[str, Any], files: Files, stage: Path) -> dict[str, Any]:
    """Ray's runtime environment of a job: config, files and this package, copied into `stage`."""
    work, package = stage / "work", stage / "raydpfl"
    copy(files, work)
    (work / "config.yaml").write_text(dump(tree))
    whole = Path(raydpfl.__file__).parent
    copy({path.relative_to(whole).as_posix(): path for path in _walk(whole)}, package)
    stops = {"RAY_JOB_STOP_WAIT_TIME_S": "60"}  # for the current round and a checkpoint
    return {"working_dir": str(work), "py_modules": [str(package)], "env_vars": stops}


def copy(files: Files, stage: Path) -> None:
    """Copies the files to their places under `stage`."""
    stage.mkdir()
    for name, path in files.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, stage / name, follow_symlinks=False)


def _modules_of(folder: Path) -> Files:
    """The files of the modules and packages of a folder that have been imported."""
    files: Files = {}
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())
        data_patterns = project.get("tool", {}).get("setuptools", {}).get("package-data", {})
    except (OSError, ValueError):
        data_patterns = {}
    for name in sorted({name.partition(".")[0] for name in sys.modules} - {"raydpfl"}):
        module = sys.modules.get(name)
        source = getattr(module, "__file__", None)
        places = map(os.path.realpath, getattr(module, "__path__", ()))
        if os.path.realpath(folder / name) in places:
            for path in _walk(folder / name):
                inside = path.relative_to(folder)
                if path.name.endswith(CODE) or _is_data(inside, data_patterns):
                    files[inside.as_posix()] = path
        elif source and os.path.realpath(Path(source).parent) == os.path.realpath(folder):
            files |= {path.name: path for path in [Path(source)] if _plain(path)}
    return files


def _is_data(path: Path, patterns: Mapping[str, Sequence[str]]) -> bool:
    """Whether the patterns, by package or for all (*), have a file of a package."""
    packages = {".".join(path.parts[:depth]): depth for depth in range(1, len(path.parts))}
    return any(
        fnmatch("/".join(path.parts[depth:]), pattern)
        for package, depth in packages.items()
        for pattern in (*patterns.get(package, ()), *patterns.get("*", ()))
    )


def _check_modules(folder: Path, files: Files) -> None:
    """Raises `ConfigError` for a module that was imported from the folder and is not sent."""
    sent_paths = {os.path.realpath(path) for path in files.values()}
    for name, module in sorted(sys.modules.items()):
        source = getattr(module, "__file__", None)
        is_preinstalled = name.partition(".")[0] in ("raydpfl", "__main__")
        if is_preinstalled or not source or not source.endswith(CODE):
            continue
        whole = Path(os.path.abspath(source))
        site_folders = {"site-packages", "dist-packages"} & set(whole.parts)
        if site_folders or not whole.is_relative_to(folder) or not whole.exists():
            continue
        if os.path.realpath(source) not in sent_paths or not _plain(whole):
            expected = "modules that are no links, and neither hidden nor in a hidden folder"
            place = os.path.relpath(whole, folder)
            raise ConfigError("submit", place, f"{expected}; {name} is not sent")


def _walk(folder: Path) -> Iterator[Path]:
    """The regular files under a folder, without hidden ones, links and caches."""
    for place, folders, names in os.walk(folder) if not folder.is_symlink() else ():
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n != "__pycache__")
        paths = [Path(place, name) for name in sorted(names) if not name.startswith(".")]
        yield from filter(_plain, paths)


def _plain(path: Path) -> bool:
    """Whether it is a regular file or a folder, and no link."""
    return not path.is_symlink() and (path.is_file() or path.is_dir())


def _find_file(field: str, name: str, folder: Path) -> Path:
    places = (data_root(None) / name, Path(name))
    path = next((place for place in places if os.path.isfile(place) or os.path.isdir(place)), None)
    if path is None:
        expected = "a file or folder that is here, to be sent; "
        expected += "or --there, if the cluster has what it names"
        raise ConfigError(field, name, expected)
    whole = Path(os.path.abspath(path))
    within = next((base for base in (folder, data_root(None)) if whole.is_relative_to(base)), None)
    if any(part.startswith(".") for part in (whole.relative_to(within) if within else whole).parts):
        raise ConfigError(field, name, "a file that is not hidden: none such is sent")
    if not _plain(path):
        raise ConfigError(field, name, "a regular file or folder, no link: none such is sent")
    return path


def _check_size(files: Files) -> None:
    sizes = {name: path.stat().st_size for name, path in files.items()}
    if sum(sizes.values()) > LIMIT:
        largest = max(sizes, key=lambda name: sizes[name])
        expected = f"at most {LIMIT / 1e6:.0f} MB to be sent with a job; this file has "
        expected += f"{sizes[largest] / 1e6:,.0f} MB of {sum(sizes.values()) / 1e6:,.0f}; "
        expected += "put data where the cluster has them, and say --there"
        raise ConfigError("submit", str(files[largest]), expected)
    if len(files) > COUNT:
        top = next(iter(files)).partition("/")[0]
        expected = f"at most {COUNT:,} files to be sent with a job; there are {len(files):,}"
        raise ConfigError("submit", top, expected)


def _replace_names(value: Any, names: Mapping[tuple[str, str], str], key: str = "") -> Any:
    """A tree with other values in place of some, known by their keys (or their search spaces')."""
    if isinstance(value, Mapping):
        keys = {name: key if name in SPACES else name for name in value}
        return {name: _replace_names(child, names, keys[name]) for name, child in value.items()}
    if isinstance(value, list):
        return [_replace_names(child, names, key) for child in value]
    return names.get((key, value), value) if isinstance(value, str) else value
