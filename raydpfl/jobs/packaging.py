"""What a job takes along to a cluster: the config, the user's modules, and the files that the
config names.

Sent are, of the folder where the command is run,

- the modules and packages that reading the config has imported: their Python files (.py, .pyi) and
  compiled modules, whether a
  package has an `__init__.py` or not, and the data that `[tool.setuptools.package-data]` of
  `pyproject.toml` declares for them;
- of a run directory, the modules that it keeps and that are not in that folder;
- every file that the config names, and every folder (of images, of a data set) with its files,
  under a name of its contents, which the config that is sent has in its place. (Another file of the
  old name may lie on the cluster.)

Never sent are hidden files and folders (.env, .git), links, `__pycache__`, and more than `LIMIT`
bytes or `COUNT` files together. Sizes are looked at before anything is copied.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from raydpfl.config.overrides import SPACES
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.storage.files import check, data_root, digest

LIMIT = 100 * 10**6  # bytes
COUNT = 10_000
CODE = (".py", ".pyi", *EXTENSION_SUFFIXES)
Files = dict[str, Path]  # where each goes, relative -> where it is


def packed(
    tree: Mapping[str, Any],
    experiments: Iterable[Experiment],
    here: Path,
    *,
    kept: Path | None = None,
    there: bool = False,
) -> tuple[dict[str, Any], Files]:
    """The config to send in the place of `tree`, and the files to send with it.

    `experiments`: all that the config describes, imported from the folder `here`, or from what a
    run directory has kept in the folder `kept`. `there`: the files that it names lie on the cluster
    and are not sent. Raises `ConfigError` for a file that is not here, or that is not sent.
    """
    files = user_modules(here, *([kept] if kept else []))
    _checked(files)
    named = set() if there else {file for one in experiments for file in one.named_files()}
    found = {(field, name): _found(field, name, here) for field, name in sorted(named)}
    inside = {path: _inside(path) for path in found.values()}
    _checked(files | {str(each): each for held in inside.values() for each in held.values()})
    renamed: dict[tuple[str, str], str] = {}
    for (field, name), path in found.items():
        new = f"files/{_contents(inside[path])}/{path.name}"
        renamed[field.rpartition(".")[2], name] = new
        files |= {f"{new}/{held}" if held else new: each for held, each in inside[path].items()}
    return _renamed(tree, renamed), files


def _inside(path: Path) -> Files:
    """The file, under no name; of a folder, its files."""
    if not path.is_dir():
        return {"": path}
    return {each.relative_to(path).as_posix(): each for each in _walk(path)}


def _contents(files: Files) -> str:
    """Sixteen hexadecimal digits that name what these files hold."""
    if [*files] == [""]:
        return digest(files[""])[:16]
    return check({name: digest(path) for name, path in files.items()})[:16]


def copy(files: Files, stage: Path) -> None:
    """Copies the files to their places under `stage`."""
    stage.mkdir()
    for name, path in files.items():
        (stage / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, stage / name, follow_symlinks=False)


def package(folder: Path) -> Files:
    """All files of a package that is whole as it stands, without hidden ones, links and caches."""
    return {path.relative_to(folder).as_posix(): path for path in _walk(folder)}


def user_modules(*folders: Path) -> Files:
    """The files of the modules and packages of these folders that have been imported."""
    files: Files = {}
    for here in folders:
        files |= _modules_of(here)
    for here in folders:
        _all_there(here, files)
    return files


def _modules_of(here: Path) -> Files:
    files: Files = {}
    declared = _declared(here)
    for name in sorted({name.partition(".")[0] for name in sys.modules} - {"raydpfl"}):
        module = sys.modules.get(name)
        places = [Path(each) for each in getattr(module, "__path__", ())]
        source = getattr(module, "__file__", None)
        if any(_same(place, here / name) for place in places):
            for path in _walk(here / name):
                inside = path.relative_to(here / name).as_posix()
                data = any(fnmatch(inside, each) for each in declared(path.parent))
                if path.name.endswith(CODE) or data:
                    files[path.relative_to(here).as_posix()] = path
        elif source and _same(Path(source).parent, here) and _plain(Path(source)):
            files[Path(source).name] = Path(source)
    return files


def _all_there(here: Path, files: Files) -> None:
    """Raises `ConfigError` for a module that was imported from the folder and is not among the
    files.
    """
    sent = {os.path.realpath(path) for path in files.values()}
    for name, module in sorted(sys.modules.items()):
        source = getattr(module, "__file__", None)
        shipped = name.partition(".")[0] in ("raydpfl", "__main__")
        if shipped or not source or not source.endswith(CODE):
            continue
        whole = Path(os.path.abspath(source))
        installed = {"site-packages", "dist-packages"} & set(whole.parts)
        if installed or not whole.is_relative_to(here) or not whole.exists():
            continue
        if os.path.realpath(source) not in sent or not _plain(whole):
            expected = "modules that are no links, and neither hidden nor in a hidden folder"
            place = os.path.relpath(whole, here)
            raise ConfigError("submit", place, f"{expected}; {name} is not sent")


def _declared(here: Path) -> Callable[[Path], list[str]]:
    """Of a folder of a package, the patterns of the data that pyproject.toml declares for it or for
    all.
    """
    try:
        project = tomllib.loads((here / "pyproject.toml").read_text())
        package_data = project.get("tool", {}).get("setuptools", {}).get("package-data", {})
    except (OSError, ValueError):
        package_data = {}

    def patterns(folder: Path) -> list[str]:
        parts = folder.relative_to(here).parts
        wanted = list(package_data.get("*", []))
        for depth in range(1, len(parts) + 1):  # those of a package are relative to it
            inside = "/".join(parts[1:depth])
            own = package_data.get(".".join(parts[:depth]), [])
            wanted += [f"{inside}/{pattern}" if inside else pattern for pattern in own]
        wanted += ["/".join((*parts[1:], pattern)) for pattern in package_data.get("*", [])]
        return wanted

    return patterns


def _walk(folder: Path) -> Iterator[Path]:
    """The regular files under a folder, without hidden ones, links and caches."""
    if not _plain(folder, folder=True):
        return
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if _plain(path, folder=True):
            yield from _walk(path)
        elif _plain(path):
            yield path


def _plain(path: Path, folder: bool = False) -> bool:
    """Whether it is a regular file, or a folder, and no link."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return False


def _found(field: str, name: str, here: Path) -> Path:
    """The file or folder that a config names. Raises `ConfigError`."""
    places = (data_root(None) / name, Path(name))
    path = next((place for place in places if os.path.isfile(place) or os.path.isdir(place)), None)
    if path is None:
        expected = "a file or folder that is here, to be sent; "
        expected += "or --there, if the cluster has what it names"
        raise ConfigError(field, name, expected)
    whole = Path(os.path.abspath(path))
    within = next((each for each in (here, data_root(None)) if whole.is_relative_to(each)), None)
    if any(part.startswith(".") for part in (whole.relative_to(within) if within else whole).parts):
        raise ConfigError(field, name, "a file that is not hidden: none such is sent")
    if not _plain(path, folder=path.is_dir()):
        raise ConfigError(field, name, "a regular file or folder, no link: none such is sent")
    return path


def _checked(files: Files) -> None:
    """Raises `ConfigError` for more than is sent."""
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


def _renamed(value: Any, names: Mapping[tuple[str, str], str], key: str = "") -> Any:
    """A tree with other values in the place of some, each known by its key (or that of the search
    space it is in).
    """
    if isinstance(value, Mapping):
        return {
            name: _renamed(each, names, key if name in SPACES else name)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_renamed(each, names, key) for each in value]
    return names.get((key, value), value) if isinstance(value, str) else value
