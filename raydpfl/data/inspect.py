"""What is understood of data files before anything runs, and the config that would train on them.

Names of columns decide first (`label`, `user`, `image`, ...), then what is in them. All that is
guessed is said, and can be given instead: a field of `data`, as in `data.y=price`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as compute

from raydpfl.config.registry import choose
from raydpfl.data.columns import KINDS, READERS, Columns, is_list, labels
from raydpfl.data.inputs import inputs
from raydpfl.data.sources import FAMILY, Data, Split
from raydpfl.data.sources.image_folder import SUFFIXES
from raydpfl.errors import ConfigError
from raydpfl.storage.files import find_file

TARGETS = ("label", "labels", "target", "targets", "y", "class", "category", "outcome", "output")
USERS = (
    "client", "user", "author", "speaker", "who", "owner", "device", "subject", "patient",
    "person", "writer", "customer", "account", "hospital", "site",
)  # fmt: skip
INPUTS = (
    "image", "img", "images", "x", "features", "pixels", "input_ids", "tokens", "input", "data",
)  # fmt: skip
ROWS = ("id", "index", "idx", "row", "row_id", "unnamed: 0", "")  # numbers of rows
SPLITS = ("split", "set", "subset", "partition")
# What makes the advice private for clients, as overrides.
PRIVATE = "'bounding={kind: clip, bound: 1.0}' 'noise={kind: gaussian, epsilon: 8}'"
FEW = 100  # whole numbers of so many values at most are taken for classes
CLIENTS = 10  # that rows are dealt to where no column says whose they are
ALIKE = 0.9999  # a correlation from which a column says what the target is
ENCODE = "encode it as numbers, or as text: data.tokenizer"
FRACTION = re.compile(r"-?\d+\.\d+(e-?\d+)?")  # which no column is called
NUMBER = r"^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"
HUGE = 1e12  # numbers beyond which gradients may overflow, however they are bounded
LR = 0.1
WIDE = 1e3  # numbers beyond which a column is better scaled


@dataclass
class Understood:
    """What was understood, line by line, what is odd about it, and a config that trains on it."""

    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    tree: dict[str, Any] = field(default_factory=dict)


def understood(files: list[str], given: Mapping[str, Any], root: Path | None = None) -> Understood:
    """What is understood of some files or a folder: training rows, and test rows if there are two.

    Args:
        files: their names.
        given: fields of the `data` section that are not to be guessed.
        root: where data sets lie (None: RAYDPFL_DATA).

    Raises:
        ConfigError: for what cannot be trained on, whatever is given, in one line that says what to
            do.
    """
    found = Understood()
    keys = _source(files, root)
    keys = {**keys, **given}
    source = choose("data", _whole(keys), FAMILY, Data)
    train = source.table(root)
    if train is not None:
        keys = {**_columns(train, {**keys, **given}, found), **given}
    where = {name: keys[name] for name in ("kind", "train", "test", "path") if name in keys}
    told = ", ".join(f"{name}: {value}" for name, value in where.items())
    found.notes.insert(0, f"data: {told}")
    split = _dealt(keys, root, found)
    counted = choose("data", keys, FAMILY, Data).counted(root)
    found.notes += [f"{name}: {count:,}" for name, count in counted.items()]
    found.notes.append(f"no noise; private for each client with {PRIVATE}")
    found.tree = {"seed": 0, "rounds": 20, "data": keys, **_training(split, keys, found)}
    return found


def _whole(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that say where a source is, which is all that is asked of it at first."""
    wanted = ("kind", "train", "test", "path", "client", "size", "channels")
    return {name: value for name, value in keys.items() if name in wanted}


def _source(files: list[str], root: Path | None) -> dict[str, Any]:
    """The kind of data that the files are, and the fields that name them. Raises `ConfigError`."""
    if len(files) > 2:
        raise ConfigError("FILE", files, "one file or folder, or two: training and test rows")
    paths = [find_file("FILE", name, root, "file or folder") for name in files]
    first = paths[0]
    parts = dict(zip(("train", "test"), files, strict=False))
    if first.is_dir():
        keys = _folder(first, parts)
    elif first.suffix in (*READERS, ".npz"):
        keys = {"kind": "table", **parts}
    elif first.suffix in ("", ".txt", ".text", ".md"):
        keys = {"kind": "text", "path": files[0]}
    else:
        expected = f"{KINDS}, a text, a folder of images, or one that save_to_disk wrote"
        raise ConfigError("FILE", files[0], expected)
    return keys


def _folder(path: Path, parts: dict[str, str]) -> dict[str, Any]:
    """The kind of data that a folder holds. Raises `ConfigError`."""
    name = parts["train"]
    if (path / "dataset_dict.json").exists():
        splits = sorted(each.parent.name for each in path.glob("*/state.json"))
        train = "train" if "train" in splits else splits[0]
        test = [each for each in ("test", "validation") if each in splits and each != train]
        keys = {"kind": "hugging_face", "path": name, "train": train}
        return keys | ({"test": test[0]} if test else {})
    if (path / "state.json").exists():
        return {"kind": "hugging_face", "path": name}
    if (path / "train").is_dir():
        parts = {key: f"{name}/{key}" for key in ("train", "test") if (path / key).is_dir()}
        path = path / "train"
    if any(each.suffix.lower() in SUFFIXES for each in path.glob("*/*")):
        return {"kind": "image_folder", **parts}
    if any(each.suffix.lower() in SUFFIXES for each in path.glob("*/*/*")):
        return {"kind": "image_folder", **parts, "client": "client"}
    expected = "a folder with a folder of images for each class, or one that save_to_disk wrote"
    raise ConfigError("FILE", name, expected)


def _columns(train: Columns, keys: dict[str, Any], found: Understood) -> dict[str, Any]:
    """The fields of a table: which columns are inputs, targets, users. Raises `ConfigError`."""
    rows = [len(column) for column in train.values() if not isinstance(column, np.ndarray)]
    rows += [len(column) for column in train.values() if np.ndim(column)]
    if not max(rows, default=0):
        raise ConfigError(f"data.{train.part}", train.name, "a table with rows; this one has none")
    if len(set(rows)) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in train.items())
        expected = f"columns of as many rows each, test rows in a file of their own ({lengths})"
        raise ConfigError(f"data.{train.part}", train.name, expected)
    for name, column in train.items():
        found.notes.append(f"column {name}: {_type(column)}")
    where: dict[str, Any] = {}
    where |= {
        name: keys[name]
        for name in ("kind", "train", "test", "path", "size", "channels")
        if name in keys
    }
    left = [name for name in train if name not in _given(keys)]
    client = keys.get("client") or _user(left)
    y = keys.get("y") or _named(left, TARGETS)
    texts = _texts(train, left, client)
    if texts and client and not y and Path(keys.get("train", "")).suffix in READERS:
        found.notes.append(f"text: {texts[0]}, of {client}; the next character is learnt")
        return {"kind": "text", "path": keys["train"], "text": texts[0], "client": client}
    fields = _roles(train, left, {**keys, "y": y, "client": client}, found)
    _suspicious(train, _listed(fields["x"]), _listed(fields["y"]), found)
    usual = FAMILY[keys["kind"]].model_fields
    for name, value in fields.items():
        default = usual[name].default
        kind = getattr(default, "kind", default)
        if value is not None and value != kind and (value,) != kind:
            where[name] = value
    return where


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _roles(
    train: Columns, left: list[str], keys: Mapping[str, Any], found: Understood
) -> dict[str, Any]:
    """What each column is taken for. Raises `ConfigError`."""
    client = keys["client"]
    y = keys["y"]
    split = keys.get("split_by") or _split(train, left)
    if not y:
        rest = [name for name in left if name not in (client, split)]
        if not rest:
            raise ConfigError("data.y", None, f"a column of {train.name}: {', '.join(train)}")
        y = rest[-1]
        found.warnings.append(f"target: {y}, the last column (another: data.y=NAME)")
    taken = {*_listed(y), client, split}
    free = [name for name in left if name not in taken]
    if "tokenizer" in keys and not keys.get("x"):
        keys = {**keys, "x": next(iter(_texts(train, free, client)), None)}
    x = keys.get("x") or _untold(train, _inputs(train, free, found), _listed(y), found)
    if not x:
        reasons = "".join(f"; {each}" for each in found.warnings if "left out" in each)
        expected = f"columns of numbers, lists or images, of which {train.name} has none to take"
        raise ConfigError("data.x", None, f"{expected}{reasons}")
    names = _listed(x)
    fields = {"x": names if len(names) > 1 else names[0], "y": y}
    fields |= {"client": client, "split_by": split}
    fields |= _task(train, _listed(y), names, keys)
    fields |= _dtype(train, fields, keys, found)
    if fields["task"] == "regression" and "task" not in keys and _whole_numbers(train, _listed(y)):
        remedy = "data.task=classification data.classes=N: as classes 0 to N - 1"
        found.warnings.append(f"{y}: whole numbers taken as amounts ({remedy})")
    found.notes.append(f"input: {fields['x']}; target: {y}; task: {fields['task']}")
    found.notes.append(f"user: {client or 'no column; rows are dealt evenly'}")
    if split:
        found.notes.append(f"training and test rows: by {split}, which says train or test")
    elif not keys.get("test"):
        found.notes.append("test rows: a tenth of all, held out (data.test_fraction)")
    return fields


def _given(keys: Mapping[str, Any]) -> set[str]:
    """The columns that are named already."""
    named: set[str] = set()
    for name in ("x", "y", "client", "split_by"):
        value = keys.get(name)
        named |= {value} if isinstance(value, str) else set(value or ())
    return named


def _named(names: Iterable[str], known: tuple[str, ...]) -> str | None:
    """The column with the first of these names, whatever their case."""
    lower = {name.lower().strip(): name for name in names}
    return next((lower[name] for name in known if name in lower), None)


def _user(names: list[str]) -> str | None:
    """The column that names users: user, user_id, userId, ..."""
    plain = {
        name.lower().replace("_", "").replace(" ", "").removesuffix("id"): name for name in names
    }
    return next((plain[name] for name in USERS if name in plain), None)


def _split(train: Columns, names: list[str]) -> str | None:
    """The column that says which rows are for training, and which for testing."""
    name = _named(names, SPLITS)
    if name is None or is_list(train[name]):
        return None
    values = {str(value).lower() for value in np.unique(np.asarray(train[name]).astype(str))}
    return name if {"train", "test"} <= values else None


def _texts(train: Columns, names: list[str], client: str | None) -> list[str]:
    """The columns of text."""
    kinds = ("string", "large_string")
    return [name for name in names if name != client and _type(train[name]) in kinds]


def _type(column: Any) -> str:
    if isinstance(column, np.ndarray):
        shape = f" {list(column.shape[1:])}" if column.ndim > 1 else ""
        return f"{column.dtype}{shape}"
    gaps = f", {column.null_count} gaps" if column.null_count else ""
    return f"{column.type}{gaps}"


def _inputs(train: Columns, names: list[str], found: Understood) -> list[str]:
    """The columns to take as inputs: one of images, lists or arrays, or all of numbers."""
    known = _named(names, INPUTS)
    if known is not None and (is_list(train[known]) or _encoded(train[known])):
        return [known]
    for name in names:
        if is_list(train[name]) or _encoded(train[name]):
            return [name]
    taken = []
    for name in names:
        reason = _unfit(train[name], name)
        if reason:
            found.warnings.append(f"column {name} is left out: {reason}")
        else:
            taken.append(name)
    return taken


def _encoded(column: Any) -> bool:
    """Whether these are encoded images."""
    if isinstance(column, np.ndarray):
        return False
    kind = column.type
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_struct(kind)


def _unfit(column: Any, name: str) -> str | None:
    """Why a column of single values is no input; None: it is one."""
    if not isinstance(column, np.ndarray) and column.null_count:
        return f"{column.null_count} gaps (fill them, or leave out these rows)"
    try:
        values = inputs(column, name)
    except ConfigError:
        return _stray(column) or f"no numbers but {_type(column)} ({ENCODE})"
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        return "numbers that are not finite (fill them, or leave out these rows)"
    most = np.abs(values.astype(np.float64)).max(initial=0)
    if most > HUGE:
        return f"numbers up to {most:g} (scale it)"
    if name.lower().strip() in ROWS and len(np.unique(values)) == len(values):
        return "it numbers the rows"
    return None


def _stray(column: Any) -> str | None:
    """What is none among numbers, in a column of text that are numbers for the most part."""
    if not isinstance(column, pa.ChunkedArray) or not pa.types.is_string(column.type):
        return None
    fits = np.asarray(compute.match_substring_regex(column, NUMBER))
    if fits.mean() < 0.5 or fits.all():
        return None
    row = int(np.argmin(fits))
    return f"row {row} says {column[row].as_py()!r}, which is no number (mend or empty it)"


def _task(
    train: Columns, targets: list[str], x: list[str], keys: Mapping[str, Any]
) -> dict[str, Any]:
    """The task and the classes that the targets suggest. Raises `ConfigError`."""
    if "task" in keys:
        return {"task": keys["task"]}
    for name in targets:
        if name not in train:
            raise ConfigError("data.y", name, f"a column of {train.name}: {', '.join(train)}")
    y = labels([train[name] for name in targets], targets, "data.y")
    if y.dtype == object and not isinstance(y[0], str):
        texts = any(isinstance(each, str) for row in y for each in row)
        return {"task": "multi_label" if texts else "sequence"}
    if y.ndim > 1:
        if y.dtype.kind in "biu" and set(np.unique(y)) <= {0, 1}:
            return {"task": "multi_label"}
        return {"task": "sequence" if y.dtype.kind in "iu" and _same(train, x, y) else "regression"}
    return _of_single(y, targets[0])


def _of_single(y: np.ndarray, name: str) -> dict[str, Any]:
    """The task that one number or name to a row suggests. Raises `ConfigError`."""
    if y.dtype.kind not in "biuf":
        return {"task": "classification"}
    if not np.isfinite(y.astype(np.float64)).all():
        raise ConfigError("data.y", name, "a column without gaps: fill them, or leave out the rows")
    values = np.unique(y)
    if (values != np.floor(values)).any() or len(values) > FEW:
        return {"task": "regression"}
    numbers = [int(each) for each in values]
    if len(numbers) > 1 and (numbers[0] < 0 or numbers[-1] > 2 * len(numbers)):
        return {"task": "classification", "classes": [str(each) for each in numbers]}
    return {"task": "classification"}


def _whole_numbers(train: Columns, targets: list[str]) -> bool:
    """Whether the only target is whole numbers by its type, one to a row."""
    column = train[targets[0]]
    if len(targets) > 1 or is_list(column):
        return False
    return np.asarray(column).dtype.kind in "iu"


def _dtype(
    train: Columns, fields: dict[str, Any], keys: Mapping[str, Any], found: Understood
) -> dict[str, Any]:
    """float32 for lists and arrays of whole numbers that are not called tokens."""
    name = fields["x"] if isinstance(fields["x"], str) else fields["x"][0]
    if name not in train or not is_list(train[name]) or "dtype" in keys:
        return {}
    known = any(word in name.lower() for word in ("token", "ids", "word", "char", "text"))
    if inputs(train[name], name).dtype.kind not in "iu" or known or fields["task"] == "sequence":
        return {}
    if inputs(train[name], name).ndim > 3:  # images
        return {}
    found.warnings.append(f"{name}: whole numbers taken as numbers (data.dtype=int64: as tokens)")
    return {"dtype": "float32"}


def _same(train: Columns, x: list[str], y: np.ndarray) -> bool:
    """Whether inputs are lists as long as the targets."""
    name = x[0]
    return is_list(train[name]) and inputs(train[name], name).shape[1:] == y.shape[1:]


def _untold(train: Columns, x: list[str], targets: list[str], found: Understood) -> list[str]:
    """The inputs that do not say what the target is; all of them, where there is no other."""
    telling = _telling(train, x, targets)
    if len(telling) == len(x):
        return x
    for name in telling:
        found.warnings.append(f"column {name} is left out: it says what the target {targets[0]} is")
    return [name for name in x if name not in telling]


def _telling(train: Columns, x: list[str], targets: list[str]) -> list[str]:
    """The inputs that say what the only target is."""
    if len(targets) != 1 or targets[0] not in train or is_list(train[targets[0]]):
        return []
    y = np.asarray(train[targets[0]])
    if y.ndim != 1 or (y.dtype == object and not isinstance(y[0], str)):
        return []
    codes = np.unique(y.astype(str) if y.dtype == object else y, return_inverse=True)[1]
    codes = (y if y.dtype.kind in "biuf" else codes).astype(np.float64)
    telling = []
    for name in x:
        values = _numbers(train, name)
        if values is None or len(values) != len(codes) or not (values.std() and codes.std()):
            continue
        if abs(np.corrcoef(values, codes)[0, 1]) > ALIKE:
            telling.append(name)
    return telling


def _numbers(train: Columns, name: str) -> np.ndarray | None:
    """The numbers of a column that has one to a row, float64 [rows]; None for any other."""
    if name not in train or is_list(train[name]) or _encoded(train[name]):
        return None
    values = np.asarray(train[name])
    return values.astype(np.float64) if values.dtype.kind in "biuf" else None


def _suspicious(train: Columns, x: list[str], targets: list[str], found: Understood) -> None:
    """Warns of inputs that say what the target is, of numbers that are far from 1, and of a first
    line that is no header.
    """
    for name in _telling(train, x, targets):
        found.warnings.append(f"column {name} says what the target {targets[0]} is: leave it out")
    for name in (*targets, *x):
        values = _numbers(train, name)
        if values is not None and np.abs(values).max(initial=0) > WIDE:
            found.warnings.append(
                f"column {name} has numbers up to {np.abs(values).max():g}: scale it"
            )
    odd = [name for name in train if FRACTION.fullmatch(name)]
    if odd:
        expected = "if the first line is a row, put a line of names above it"
        found.warnings.append(f"a column is called {odd[0]}: {expected}")


def _dealt(keys: dict[str, Any], root: Path | None, found: Understood) -> Split:
    """The samples as they would be trained on; adds to the keys how they are dealt. Raises
    `ConfigError`.
    """
    by_client = choose("data", _whole(keys), FAMILY, Data).knows_clients()
    if "client" in keys and "path" not in keys:
        keys.setdefault("partition", {"kind": "natural"})
    if not by_client:
        keys.setdefault("clients", CLIENTS)
    split = _split_of(keys, root, by_client)
    small = int((split.sizes < 2).sum())
    if by_client and small:
        remedy = "data.partition.least=2 leaves them out"
        found.warnings.append(f"{small} of {len(split.sizes)} users have a single row: {remedy}")
    test_x, _ = split.test()
    kind = f"{test_x.dtype}, whole numbers below {split.tokens}" if split.tokens else test_x.dtype
    found.notes.append(f"a sample: {list(split.shape)}, {kind}")
    spread = f"{split.sizes.min()} to {split.sizes.max()}, median {np.median(split.sizes):g}"
    found.notes.append(f"{len(split.sizes)} clients with {spread} rows; {len(test_x)} test rows")
    _tell_targets(split, str(keys.get("y", "label")), found)
    return split


def _split_of(keys: dict[str, Any], root: Path | None, by_client: bool) -> Split:
    """The split, by as many clients as there are rows for."""
    try:
        return choose("data", keys, FAMILY, Data).split(0, root)
    except ConfigError:
        if by_client or keys["clients"] == 2:
            raise
        return choose("data", {**keys, "clients": 2}, FAMILY, Data).split(0, root)


def _tell_targets(split: Split, y_name: str, found: Understood) -> None:
    if not split.classes:
        named = f" ({', '.join(split.names)})" if split.names else ""
        found.notes.append(f"targets: {list(split.targets) or 'one number'}{named}")
        return
    names = [repr(name) for name in split.names[:20]]
    named = f": {', '.join(names)}{', ...' if len(split.names) > 20 else ''}" if names else ""
    found.notes.append(f"{split.classes} classes{named}")
    folded = {name.strip().lower() for name in split.names}
    if not split.targets and len(folded) < len(split.names):
        found.warnings.append("classes differ in case or blanks alone: write them alike")
    _, y = split.rows(0, len(split.sizes))
    present = np.unique(y)
    if not split.targets and len(present) == 1:
        expected = "labels of two classes or more: there is nothing to tell apart"
        raise ConfigError("data.y", y_name, expected)
    missing = split.classes - len(present[present >= 0])
    if missing:
        found.warnings.append(f"{missing} of {split.classes} classes have no training row")


def _rate(split: Split, found: Understood) -> float:
    """A learning rate with which a linear model does not diverge: a step of less than 2 / L, where
    the squared error of a row x has curvature 2 (|x|^2 + 1), and so has no batch more than L.
    """
    if split.tokens or len(split.shape) > 2:  # images are scaled
        return LR
    x = split.rows(0, len(split.sizes))[0].reshape(-1, math.prod(split.shape)).astype(np.float64)
    stable = float(f"{0.5 / (np.square(x).sum(1).max() + 1):.0e}")
    bounded = split.classes and np.abs(x).max() <= WIDE  # gradients of losses of classes are
    if bounded or stable >= LR:
        return LR
    found.warnings.append(f"local.lr is {stable:g}, as inputs are large: scale them for a larger")
    return stable


def _training(split: Split, keys: Mapping[str, Any], found: Understood) -> dict[str, Any]:
    """Sections that train on it, without noise and so without clipping."""
    clients = len(split.sizes)
    return {
        "model": _model(split, "tokenizer" in keys),
        "selection": {"kind": "uniform", "cohort": min(10, clients)},
        "local": {"kind": "sgd", "steps": 5, "batch": 10, "lr": _rate(split, found)},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
    }


def _model(split: Split, tokenizer: bool) -> dict[str, Any]:
    if tokenizer and not split.targets:
        return {"kind": "embedding_mean"}
    if split.tokens and len(split.shape) == 1:
        return {"kind": "transformer", "width": 32, "layers": 1}
    image = len(split.shape) == 3 and min(split.shape[1:]) >= 8
    if image:
        return {"kind": "cnn", "width": 0.5}
    if split.classes:
        return {"kind": "softmax"}
    return {"kind": "linear", "bias": True}
