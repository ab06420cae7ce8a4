"""A project to begin with (`raydpfl new`): a member of a family, its test, a config that runs it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     [path.name for path in make(f"{folder}/mine", "server")]
['README.md', 'experiment.yaml', 'mine.py', 'test_mine.py']
"""

import os
from importlib import resources
from pathlib import Path
from string import Template

from raydpfl.errors import ConfigError

TEMPLATE = resources.files("raydpfl.cli") / "template"
# The line of the config that names the member of a family.
FAMILIES = {
    "bounding": 'bounding: {kind: "mine:Tanh", bound: 1.0}',
    "selection": 'selection: {kind: "mine:Turns", cohort: 90}',
    "local": 'local: {kind: "mine:ProxMomentum", steps: 20, lr: 0.02}',
    "noise": 'noise: {kind: "mine:Growing", z: 8.0, delta: 1.0e-4}',
    "weights": 'weights: {kind: "mine:Capped", most: 8}',
    "server": 'server: {kind: "mine:Trimmed", lr: 0.3}',
    "measure": 'measure: ["mine:Peaks"]',
    "metric": 'evaluate: {metrics: [accuracy, "mine:Brier"]}',
    "model": 'model: {kind: "mine:net"}',
    "data": 'data: {kind: "mine:Visits"}',
    "track": 'track: ["mine:Lines"]',
}


def make(folder: str | Path, family: str = "bounding") -> list[Path]:
    """Writes a project, with a member of a family (a key of `FAMILIES`), into a new or empty
    directory: its files.

    Raises:
        ConfigError: there is no such family, or the directory cannot be written to or is not empty.
    """
    if family not in FAMILIES:
        raise ConfigError("--family", family, f"one of {', '.join(FAMILIES)}")
    place = Path(folder)
    try:
        if os.path.lexists(place) and (not place.is_dir() or any(place.iterdir())):
            raise ConfigError("DIR", str(folder), "a new directory, or one that is empty")
        place.mkdir(parents=True, exist_ok=True)
        files = {place / name: content for name, content in _files(family).items()}
        for path, content in files.items():
            path.write_text(content, encoding="utf-8")
    except OSError as error:
        expected = f"a directory that can be written to ({error.strerror})"
        raise ConfigError("DIR", str(folder), expected) from None
    return [*files]


def _files(family: str) -> dict[str, str]:
    """The content of each file, by name."""
    line = FAMILIES[family]
    key = line.partition(":")[0]
    name = line.partition("mine:")[2].partition('"')[0]
    config = _text("experiment.yaml")
    usual = next(line for line in config.splitlines() if line.startswith(f"{key}: "))
    words = {"family": family, "key": key, "name": name, "usual": usual.replace(": ", "=", 1)}
    return {
        "README.md": Template(_text("README.md")).substitute(words),
        "experiment.yaml": Template(config.replace(usual, line)).substitute(words),
        "mine.py": _text(f"{family}.py.txt"),
        "test_mine.py": _text(f"test_{family}.py.txt")
        + Template(_text("contract.py.txt")).substitute(words),
    }


def _text(name: str) -> str:
    return (TEMPLATE / name).read_text(encoding="utf-8")
