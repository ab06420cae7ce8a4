"""A config that trains on given data files, suggested before anything runs.

Names of columns decide first (`label`, `user`, ...), then their contents. Notes say what was
guessed; a field of `data` replaces a guess, as in `data.y=price`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.data.columns import KINDS, READERS, Columns, column_error, is_list, is_text, labels
from raydpfl.data.inputs import inputs
from raydpfl.data.sources import Split, parse
from raydpfl.data.sources.image_folder import SUFFIXES
from raydpfl.errors import ConfigError
from raydpfl.storage.files import find_file

TARGETS = (
    "label", "labels", "target", "targets", "y", "class", "category", "sentiment", "outcome",
    "output",
)  # fmt: skip
USERS = (
    "client", "user", "author", "speaker", "who", "owner", "device", "subject", "patient",
    "person", "writer", "customer", "account", "hospital", "site",
)  # fmt: skip
ROW_NUMBERS = ("id", "index", "idx", "row", "unnamed: 0", "")
SPLITS = ("split", "set", "subset", "partition")
# fields that say where a source is
LOCATION = ("kind", "train", "test", "path", "client", "size", "channels")
# fields that a text has not, or that say what it is
TABLE_FIELDS = ("kind", "x", "task", "classes", "tokenizer", "vocabulary")
# the overrides that make the suggested config private for clients
PRIVATE_OVERRIDES = "'bounding={kind: clip, bound: 1.0}' 'noise={kind: gaussian, epsilon: 8}'"
CLASSES = 100  # whole numbers of at most so many values are taken for classes
CLIENTS = 10  # among whom rows are divided where no column names a client
LEAK = 0.9999  # correlation with the target from which on a column is left out
LR = 0.1
MAX_INPUT = 1e3  # inputs up to this size need no smaller learning rate for a loss of classes


class Suggestion:
    """What was understood, line by line, warnings, and a config that trains on the data.

    Args:
        files: the names of training rows, and of test rows if there are two; or of a folder.
        overrides: fields of the `data` section that are not guessed.
        root: where data sets lie (None: RAYDPFL_DATA).

    Raises:
        ConfigError: for what cannot be trained on.
    """

    def __init__(self, files: list[str], overrides: Mapping[str, Any], root: Path | None = None):
        self.notes: list[str] = []
        self.warnings: list[str] = []
        keys = {**_source(files, root), **overrides}
        location = {name: keys[name] for name in LOCATION if name in keys}
        table = parse(location).table(root)
        if table is not None:
            fields = self._columns(table, keys, overrides)
            keys = {**({} if "kind" in fields else location), **fields, **overrides}
        texts = (f"{name}: {keys[name]}" for name in LOCATION[:4] if name in keys)
        self.notes.insert(0, f"data: {', '.join(texts)}")
        split = self._clients(keys, root)
        counts = parse(keys).counted(root)
        self.notes += [f"{name}: {count:,}" for name, count in counts.items()]
        self.notes.append(f"no noise; private for each client with {PRIVATE_OVERRIDES}")
        self.tree: dict[str, Any] = {
            "seed": 0,
            "rounds": 20,
            "data": keys,
            "model": _model(split, "tokenizer" in keys),
            "selection": {"kind": "uniform", "cohort": min(10, len(split.sizes))},
            "local": {"kind": "sgd", "steps": 5, "batch": 10, "lr": self._rate(split)},
            "bounding": {"kind": "none"},
            "noise": {"kind": "none"},
        }

    def _columns(
        self, table: Columns, keys: Mapping[str, Any], overrides: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Which columns are inputs, targets and clients, as fields."""
        _check_rows(table)
        self.notes += [f"column {name}: {_type(column)}" for name, column in table.items()]
        roles = [_list(keys.get(key)) for key in ("x", "y", "client", "split_by")]
        names = [name for name in table if not any(name in role for role in roles)]
        lower_names = [name.lower() for name in names]
        stems = [name.replace("_", "").replace(" ", "").removesuffix("id") for name in lower_names]
        client = keys.get("client") or _first_match(USERS, stems, names)
        y = keys.get("y") or _first_match(TARGETS, [name.strip() for name in lower_names], names)
        texts = [name for name in names if name not in (client, y) and is_text(table[name])]
        is_speech = client and not y and overrides.keys().isdisjoint(TABLE_FIELDS)
        if texts and is_speech and Path(keys.get("train", "")).suffix in READERS:
            self.notes.append(f"text: {texts[0]}, of {client}; the next character is learnt")
            return {"kind": "text", "path": keys["train"], "text": texts[0], "client": client}
        split = keys.get("split_by")
        if not keys.get("test"):
            split = split or _first_match(SPLITS, lower_names, names)
        if split in names and not _is_split_column(table[split]):
            split = None
        names = [name for name in names if name not in (client, split)]
        if not y and names:
            y = names[-1]
            self.warnings.append(f"target: {y}, the last column (another: data.y=NAME)")
        targets = _list(y) or [""]
        for name in targets:
            if name not in table:
                raise column_error("data.y", name or None, table)
        x = _list(keys.get("x")) or (texts[:1] if "tokenizer" in keys else [])
        x = x or self._inputs(table, [name for name in names if name not in targets], targets)
        fields = {"x": x if len(x) > 1 else x[0], "y": y, "client": client, "split_by": split}
        fields |= {"task": keys["task"]} if "task" in keys else _task(table, targets, x)
        self.notes.append(f"input: {fields['x']}; target: {y}; task: {fields['task']}")
        self.notes.append(f"user: {client or 'no column; rows are divided evenly'}")
        if split:
            self.notes.append(f"training and test rows: by {split}, which says train or test")
        elif not keys.get("test"):
            self.notes.append("test rows: a tenth of all, held out (data.test_fraction)")
        return {name: value for name, value in fields.items() if value is not None}

    def _inputs(self, table: Columns, names: list[str], targets: list[str]) -> list[str]:
        """The input columns: one of images, lists or arrays, or all of numbers."""
        for name in names:
            if is_list(table[name]) or "binary" in _type(table[name]):
                return [name]
        reasons = {name: reason for name in names if (reason := _flaw(table[name], name))}
        fit_names = [name for name in names if name not in reasons]
        leaking_names = [name for name in fit_names if _leaks(table[name], table, targets)]
        if len(leaking_names) < len(fit_names):
            reasons |= dict.fromkeys(leaking_names, f"it says what the target {targets[0]} is")
        messages = [f"column {name} is left out: {reason}" for name, reason in reasons.items()]
        self.warnings += messages
        if len(reasons) == len(names):
            expected = f"columns of numbers, lists or images, which {table.name} has not"
            raise ConfigError("data.x", None, "; ".join([expected, *messages]))
        return [name for name in names if name not in reasons]

    def _clients(self, keys: dict[str, Any], root: Path | None) -> Split:
        """The samples of the clients, with notes; adds the partition to `keys`."""
        natural = parse(keys).knows_clients()
        keys.setdefault(*("partition", {"kind": "natural"}) if natural else ("clients", CLIENTS))
        try:
            split = parse(keys).split(0, root)
        except ConfigError:
            if natural or keys["clients"] == 2:
                raise
            split = parse({**keys, "clients": 2}).split(0, root)  # of so few rows
        count = int((split.sizes < 2).sum())
        if natural and count:
            remedy = "data.partition.least=2 leaves them out"
            self.warnings.append(f"{count} of {len(split.sizes)} users have a single row: {remedy}")
        test_x, _ = split.test()
        tokens = f", whole numbers below {split.tokens}" if split.tokens else ""
        spread = f"{split.sizes.min()} to {split.sizes.max()}, median {np.median(split.sizes):g}"
        names = ", ".join([*map(repr, split.names[:20]), *["..."] * (len(split.names) > 20)])
        targets = f"targets: {list(split.targets) or 'one number'}"
        targets = f"{split.classes} classes" if split.classes else targets
        self.notes += [
            f"a sample: {list(split.shape)}, {test_x.dtype}{tokens}",
            f"{len(split.sizes)} clients with {spread} rows; {len(test_x)} test rows",
            f"{targets}: {names}" if names else targets,
        ]
        has_class_labels = split.classes and not split.targets
        if has_class_labels and len(np.unique(split.rows(0, len(split.sizes))[1])) == 1:
            expected = "labels of two classes or more: no classes are left to distinguish"
            raise ConfigError("data.y", str(keys.get("y", "label")), expected)
        return split

    def _rate(self, split: Split) -> float:
        """A learning rate with which a linear model does not diverge: below 2 / L, as the squared
        error of a row x has curvature 2 (|x|^2 + 1).
        """
        if split.tokens or len(split.shape) > 2:  # images are scaled
            return LR
        x = split.rows(0, len(split.sizes))[0].astype(np.float64)
        rate = float(f"{0.5 / (np.square(x.reshape(len(x), -1)).sum(1).max() + 1):.0e}")
        # gradients of a loss of classes are bounded
        if rate >= LR or (split.classes and np.abs(x).max() <= MAX_INPUT):
            return LR
        self.warnings.append(f"local.lr is {rate:g}, as inputs are large: scale them for more")
        return rate


def _source(files: list[str], root: Path | None) -> dict[str, Any]:
    """The kind of data that the files are, and the fields that name them. Raises `ConfigError`."""
    if len(files) > 2:
        raise ConfigError("FILE", files, "one file or folder, or two: training and test rows")
    path, *_ = [find_file("FILE", name, root, "file or folder") for name in files]
    parts = dict(zip(("train", "test"), files, strict=False))
    if path.is_dir():
        return _folder(path, parts)
    if path.suffix in (*READERS, ".npz"):
        return {"kind": "table", **parts}
    if path.suffix in ("", ".txt", ".text", ".md"):
        return {"kind": "text", "path": files[0]}
    expected = f"{KINDS}, a text, a folder of images, or one that save_to_disk wrote"
    raise ConfigError("FILE", files[0], expected)


def _folder(path: Path, parts: dict[str, str]) -> dict[str, Any]:
    """The kind of data that a folder holds. Raises `ConfigError`."""
    name = parts["train"]
    if (path / "state.json").exists():
        return {"kind": "hugging_face", "path": name}
    if (path / "dataset_dict.json").exists():
        splits = sorted(state.parent.name for state in path.glob("*/state.json"))
        train = "train" if "train" in splits else splits[0]
        test = [part for part in ("test", "validation") if part in splits and part != train]
        split_names = dict(zip(("train", "test"), [train, *test], strict=False))
        return {"kind": "hugging_face", "path": name, **split_names}
    if (path / "train").is_dir():
        parts = {key: f"{name}/{key}" for key in ("train", "test") if (path / key).is_dir()}
        path = path / "train"
    for levels, client in (("*/*", {}), ("*/*/*", {"client": "client"})):
        if any(image.suffix.lower() in SUFFIXES for image in path.glob(levels)):
            return {"kind": "image_folder", **parts, **client}
    expected = "a folder with a folder of images for each class, or one that save_to_disk wrote"
    raise ConfigError("FILE", name, expected)


def _check_rows(table: Columns) -> None:
    """Raises `ConfigError` for a table without rows, or with columns of several lengths."""
    rows = {len(column) for column in table.values() if getattr(column, "ndim", 1)}
    expected = "a table with rows; this one has none"
    if len(rows) > 1:
        lengths = ", ".join(f"{name} {len(column)}" for name, column in table.items())
        expected = f"columns of as many rows each, test rows in a file of their own ({lengths})"
    if len(rows) > 1 or not max(rows, default=0):
        raise ConfigError(f"data.{table.part}", table.name, expected)


def _list(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())


def _first_match(candidates: Sequence[str], spellings: list[str], names: list[str]) -> str | None:
    """The one of `names` whose spelling comes first among `candidates`; None: there is none."""
    by_name = dict(zip(spellings, names, strict=True))
    return next((by_name[name] for name in candidates if name in by_name), None)


def _is_split_column(column: Any) -> bool:
    """Whether a column says which rows are for training, and which for testing."""
    if is_list(column):
        return False
    return {"train", "test"} <= {str(value).lower() for value in set(np.asarray(column).tolist())}


def _type(column: Any) -> str:
    if isinstance(column, np.ndarray):
        return f"{column.dtype} {list(column.shape[1:])}" if column.ndim > 1 else str(column.dtype)
    return f"{column.type}, {column.null_count} gaps" if column.null_count else str(column.type)


def _flaw(column: Any, name: str) -> str | None:
    """Why a column of single values is no input; None: it is one."""
    remedy = "fill them, or leave out these rows"
    if not isinstance(column, np.ndarray) and column.null_count:
        return f"{column.null_count} gaps ({remedy})"
    try:
        values = inputs(column, name)
    except ConfigError:
        return f"no numbers but {_type(column)} (encode it as numbers, or as text: data.tokenizer)"
    if not np.isfinite(values).all():
        return f"numbers that are not finite ({remedy})"
    if name.lower().strip() in ROW_NUMBERS and len(np.unique(values)) == len(values):
        return "it numbers the rows"
    return None


def _leaks(column: Any, table: Columns, targets: list[str]) -> bool:
    """Whether numbers say what the only target is."""
    target = table[targets[0]]
    if len(targets) > 1 or is_list(target):
        return False
    y = np.asarray(target)
    if y.dtype.kind not in "biuf":
        y = np.unique(y.astype(str), return_inverse=True)[1]
    with np.errstate(invalid="ignore"):  # of constant columns
        values = np.asarray(column).astype(float)
        return bool(abs(np.corrcoef(values, y.astype(float))[0, 1]) > LEAK)


def _task(table: Columns, targets: list[str], x: list[str]) -> dict[str, Any]:
    """The task, and classes, that the targets suggest. Raises `ConfigError`."""
    y = labels([table[name] for name in targets], targets, "data.y")
    if y.dtype == object and not isinstance(y[0], str):
        texts = any(isinstance(value, str) for row in y for value in row)
        return {"task": "multi_label" if texts else "sequence"}
    if y.ndim > 1:
        if y.dtype.kind in "biu" and set(np.unique(y)) <= {0, 1}:
            return {"task": "multi_label"}
        is_aligned = is_list(table[x[0]]) and inputs(table[x[0]], x[0]).shape[1:] == y.shape[1:]
        return {"task": "sequence" if y.dtype.kind in "iu" and is_aligned else "regression"}
    if y.dtype.kind not in "biuf":
        return {"task": "classification"}
    if not np.isfinite(y.astype(np.float64)).all():
        expected = "a column without gaps: fill them, or leave out the rows"
        raise ConfigError("data.y", targets[0], expected)
    values = np.unique(y)
    if (values != np.floor(values)).any() or len(values) > CLASSES:
        return {"task": "regression"}
    if len(values) > 1 and (values[0] < 0 or values[-1] > 2 * len(values)):
        return {"task": "classification", "classes": [str(int(value)) for value in values]}
    return {"task": "classification"}


def _model(split: Split, tokenizer: bool) -> dict[str, Any]:
    if tokenizer and not split.targets:
        return {"kind": "embedding_mean"}
    if split.tokens and len(split.shape) == 1:
        return {"kind": "transformer", "width": 32, "layers": 1}
    if len(split.shape) == 3 and min(split.shape[1:]) >= 8:
        return {"kind": "cnn", "width": 0.5}
    return {"kind": "softmax"} if split.classes else {"kind": "linear", "bias": True}
