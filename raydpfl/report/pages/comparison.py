"""Several runs side by side: which of them are seeds of one setting, in what the settings differ,
their numbers, and the page that shows them.

Runs whose configs differ by the seed alone, and by how they are carried out (`EXECUTION_KEYS`), are
seeds of one setting. Two of them with one seed are labelled by how they are carried out, and if
that is the same too, by their directories.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl.config.overrides import flatten
from raydpfl.errors import ConfigError
from raydpfl.models.metric_columns import is_score
from raydpfl.report.figures import Piece, Plot
from raydpfl.report.figures.curves import X_WORDS
from raydpfl.report.html import Page, PageSection, Tile
from raydpfl.report.labels import (
    Quantity,
    accountant,
    axis,
    count_text,
    format_value,
    join_names,
    number,
    quantity,
)
from raydpfl.report.pages.run import RunSource, default_pieces, guarantee_row, run_sections, state
from raydpfl.report.plot_style import PALETTE
from raydpfl.report.run_reader import LabelledRun, Run, group_by, largest_epsilon, stated_epsilons
from raydpfl.report.statistics import SeedSpread, SeedValues
from raydpfl.report.tables import Row, Table

# Of `data`, what decides which client has which rows, and how a row is put: not which there are.
PARTITION_KEYS = ("clients", "sizes", "partition", "seed", "features", "normalize", "mean", "std")
# Beginnings of keys that say how a run is carried out, and nothing of what it computes.
EXECUTION_KEYS = (
    *("client.actors", "client.num_cpus", "client.num_gpus", "client.timeout"),
    *("client.chunk", "client.backend", "measure", "track"),
)
VALUE_LIMIT = 24  # characters of a value in a label
TERMS = ("unit", "relation", "delta", "observer")  # of a guarantee, as labels of an epsilon


def leaves(tree: Mapping[str, Any]) -> dict[str, str]:
    """The leaves of a config in print, by dotted key.

    >>> leaves({"seed": 1, "local": {"kind": "sgd", "lr": 0.1}})
    {'seed': '1', 'local.kind': 'sgd', 'local.lr': '0.1'}
    """
    return {key: json.dumps(value, default=str).strip('"') for key, value in flatten(tree).items()}


def differing_keys(trees: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys in which some of the trees of leaves differ, in the order in which they come."""
    names = dict.fromkeys(name for tree in trees for name in tree)
    return [name for name in names if len({tree.get(name) for tree in trees}) > 1]


def label(tree: Mapping[str, str], trees: Sequence[Mapping[str, str]], keys: Sequence[str]) -> str:
    """How a tree of leaves differs from the `trees` by these keys, in words. A key of a member is
    named where others with the same member have another value of it.
    """
    words = []
    for key in keys:
        if key not in tree:
            continue
        # the kinds of the member, and of those around it, that the key is a field of
        kinds = [kind for kind in keys if _is_kind(kind) and kind != key]
        kinds = [kind for kind in kinds if key.startswith(kind.removesuffix("kind"))]
        peers = [other for other in trees if all(other.get(k) == tree.get(k) for k in kinds)]
        if len({other.get(key) for other in peers}) > 1:
            value = tree[key]
            value = value if len(value) <= VALUE_LIMIT else f"{value[: VALUE_LIMIT - 3]}..."
            words.append(value if _is_kind(key) else f"{axis(key)} {value}")
    return ", ".join(words)


def labels(values: Sequence[Any]) -> list[str]:
    """A label for each of the values that a field takes in a sweep: a section by how it differs
    from the others, any other value in print. No two sections have the same one.

    >>> labels([{"kind": "clip", "bound": 1}, {"kind": "clip", "bound": 2}, {"kind": "none"}, 0.5])
    ['clip, bound 1', 'clip, bound 2', 'none', '0.5']
    """
    trees = {i: leaves(value) for i, value in enumerate(values) if isinstance(value, Mapping)}
    keys = sorted(differing_keys([*trees.values()]), key=lambda key: not _is_kind(key))
    labels = [*map(format_value, values)]
    for i, tree in trees.items():
        labels[i] = label(tree, [*trees.values()], keys) or tree.get("kind", "{}")
    for i in [i for i in trees if labels.count(labels[i]) > 1]:
        labels[i] = ", ".join(f"{key} {value}" for key, value in trees[i].items())
    return labels


@dataclass(frozen=True, eq=False)
class SeedGroup:
    """Runs that are seeds of one setting. `label`: what differs from the others; `values`: the
    keys in which the settings differ, in print.
    """

    label: str
    values: Mapping[str, str]
    runs: Sequence[Run]

    def spread(self, name: str) -> SeedSpread:
        """A number of the last round, over the runs."""
        return SeedValues({place: last(run, name) for place, run in enumerate(self.runs)}).spread()

    @property
    def epsilon(self) -> float | None:
        """The largest that holds, over the runs; None where one of them has none."""
        return largest_epsilon(self.runs)

    @property
    def accountants(self) -> list[str]:
        return sorted({run.holds[0].accountant for run in self.runs if run.holds})

    @property
    def private(self) -> bool:
        """Whether any guarantee is stated."""
        return any(run.guarantees for run in self.runs)


class Comparison:
    """Runs, each with a name of its own, by their settings: `settings`, in the order of their first
    runs. `keys`: those in which the settings differ, by section, kinds first. `metric`: the score
    that they are compared by; None: that by which each of them is followed. Raises `ConfigError`
    where they are of different data, or one does not have that score.
    """

    def __init__(self, runs: Sequence[Run], metric: str | None = None):
        self.runs = runs
        _check_data(runs)
        self.metric = _metric(runs, metric)
        self._leaves = {run: leaves(run.config) for run in runs}
        names = self._differing_keys(runs)
        printed_keys = [name for name in names if not name.startswith(EXECUTION_KEYS)]
        clashes = filter(_clash, self._group_runs(printed_keys))
        printed_keys += [name for clash in clashes for name in self._differing_keys(clash)]
        sections = [name.partition(".")[0] for name in names]
        self.keys = sorted(
            (name for name in names if name in printed_keys),
            key=lambda name: (sections.index(name.partition(".")[0]), not _is_kind(name)),
        )
        self.settings = self._settings()

    def _differing_keys(self, runs: Iterable[Run]) -> list[str]:
        names = differing_keys([self._leaves[run] for run in runs])
        return [name for name in names if name != "seed"]

    def _group_runs(self, keys: Sequence[str]) -> list[list[Run]]:
        """The runs with the same values of these keys together."""
        values = {run: tuple(self._leaves[run].get(key) for key in keys) for run in self.runs}
        return [*group_by(self.runs, lambda run: values[run]).values()]

    def _settings(self) -> list[SeedGroup]:
        groups: list[list[Run]] = []
        for group in self._group_runs(self.keys):
            groups += [[run] for run in group] if _clash(group) else [group]
        trees = [self._leaves[group[0]] for group in groups]
        names = [label(tree, trees, self.keys) for tree in trees]
        settings = []
        for group, tree, name in zip(groups, trees, names, strict=True):
            if not name or names.count(name) > 1:
                name = ", ".join(filter(None, (name, group[0].name)))
            settings.append(SeedGroup(name, {key: tree.get(key, "") for key in self.keys}, group))
        return settings

    def ranking(self) -> list[SeedGroup]:
        """The best mean of the metric first, where one is better; those without one last."""
        sign = quantity(self.metric).better
        means = {setting: setting.spread(self.metric).mean for setting in self.settings}
        missing = {setting for setting, mean in means.items() if math.isnan(mean)}
        rest = [setting for setting in self.settings if setting not in missing]
        return [*sorted(rest, key=lambda setting: -sign * means[setting]), *missing]

    @property
    def epsilon_warnings(self) -> list[str]:
        """A line that says in what the epsilons that hold differ, where not of one kind."""
        held_guarantees = [run.holds[0] for run in self.runs if run.holds]
        values = {
            name: dict.fromkeys(str(getattr(g, name)).replace("_", " ") for g in held_guarantees)
            for name in TERMS
        }
        parts = [f"{k}: {join_names([*v])}" for k, v in values.items() if len(v) > 1]
        text = f"The epsilons are not of one kind. They differ in {'; '.join(parts)}."
        return [text] if parts else []


def last(run: Run, name: str) -> float | None:
    """A number of a run in its last round: that of its summary, or of the last row that has it."""
    value = run.number(name)
    column = run.series(name) if value is None else None
    finite = column[np.isfinite(column)].tolist() if column is not None else []
    return finite[-1] if finite else value


def _clash(runs: Sequence[Run]) -> bool:
    """Whether two of these have one seed."""
    return len({run.config.get("seed") for run in runs}) < len(runs)


def _is_kind(key: str) -> bool:
    return key == "kind" or key.endswith(".kind")


def _check_data(runs: Sequence[Run]) -> None:
    """Raises `ConfigError` for runs on different data."""
    data = []
    for run in runs:
        section = run.config.get("data")
        section = section if isinstance(section, Mapping) else {}
        data.append(leaves({k: v for k, v in section.items() if k not in PARTITION_KEYS}))
    for run, tree in zip(runs, data, strict=True):
        for key in differing_keys([data[0], tree]):
            expected = f"runs on the same data; data.{key} is {data[0].get(key)} in {runs[0].name}"
            raise ConfigError("DIR", str(run.folder), f"{expected} and {tree.get(key)} here")


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    scores = {run.name: _scores(run) for run in runs}
    common = [name for name in scores[runs[0].name] if all(name in s for s in scores.values())]
    expected = f"a score that all of them have ({', '.join(common) or 'there is none'})"
    if metric is not None:
        for name, run_scores in scores.items():
            if metric not in run_scores:
                raise ConfigError("--metric", metric, f"{expected}; {name} does not have it")
        return metric
    leads = dict.fromkeys(s[0] if s else "nothing" for s in scores.values())
    if len(leads) > 1 or not common:
        expected += f"; they are followed by {join_names([*leads])}"
        raise ConfigError("--metric", None, expected)
    return common[0]


def _scores(run: Run) -> list[str]:
    """The scores that a run has, that by which it is followed first."""
    columns = dict.fromkeys([*run.summary, *run.table("rounds")])
    return [name for name in columns if is_score(name) and last(run, name) is not None]


SCORES = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss")
EPSILON_NOTE = "Each epsilon holds for its own run alone; showing several runs spends several."


def names(folders: Sequence[Path]) -> list[str]:
    """The directories' names, with so many of their parents' that no two are alike."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(part) for part in parts) + 1):
        names = ["/".join(part[-depth:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part[-1:])} ({place})" for place, part in enumerate(parts, 1)]


def comparison_page(comparison: Comparison) -> Page:
    """The page: of many settings the best are drawn, and the tables have all."""
    settings = comparison.settings
    runs = comparison.runs
    metric = comparison.metric
    metric_quantity = quantity(metric)
    ranking = comparison.ranking()
    best = [setting for setting in settings if setting in ranking[: len(PALETTE)]]
    cases = [LabelledRun({"run": setting.label}, run) for setting in best for run in setting.runs]
    curves = [piece for x in X_WORDS for piece in default_pieces({"curves": metric, "x": x}, cases)]
    curve_names = {piece.name for piece in curves if isinstance(piece, Plot)}
    other_sections = [
        replace(part, pieces=[p for p in part.pieces if getattr(p, "name", "") not in curve_names])
        for part in run_sections(cases, guarantees(settings))
    ]
    first_source = RunSource(runs[0].folder)
    sections = [
        PageSection("Results", [results(comparison), differences(comparison)]),
        PageSection(f"{metric_quantity.words.capitalize()} by round, second and epsilon", curves),
        *other_sections,
        PageSection("Config of the first", [first_source.file_text(first_source.file)]),
    ]

    def mean(setting: SeedGroup) -> str:
        return number(setting.spread(metric).mean, metric_quantity.percent)

    title = f"{count_text(len(settings), 'setting')} compared"
    lead = f"{count_text(len(runs), 'run')} of {count_text(len(settings), 'setting')}."
    if metric_quantity.better:
        lead += f" The best {metric_quantity.words} in the last round is {mean(ranking[0])}, of "
        lead += f"{ranking[0].label}."
    tiles = [Tile(setting.label, mean(setting), epsilon_words(setting)) for setting in settings[:8]]
    flaws = [f"{run.name}: {flaw}" for run in runs for flaw in run.flaws]
    flaws += [f"{runs[0].name}: {flaw}" for flaw in first_source.flaws]
    warning_lines = warnings(comparison, len(best))
    return Page(title, [lead, EPSILON_NOTE], tiles, sections, warning_lines, flaws)


def warnings(comparison: Comparison, drawn_count: int) -> list[str]:
    lines = [f"{run.name}: {line}" for run in comparison.runs for line in state(run)]
    lines += comparison.epsilon_warnings
    if drawn_count < len(comparison.settings):
        metric_quantity = quantity(comparison.metric)
        best = f" with the best {metric_quantity.words}" if metric_quantity.better else ""
        text = f"Figures have the {drawn_count} settings{best} of {len(comparison.settings)}"
        lines.append(f"{text}; the tables have all.")
    return lines


def epsilon_words(setting: SeedGroup) -> str:
    if setting.epsilon is None:
        return "no rigorous guarantee" if setting.private else "not private"
    guarantee = setting.runs[0].holds[0]
    return f"epsilon {number(setting.epsilon)} holds, delta {guarantee.delta:g}"


def results(comparison: Comparison) -> Table:
    """Scores, and every accountant's epsilon as it is stated first, a row for each setting."""
    metric = comparison.metric
    all_guarantees = [g for run in comparison.runs for g in run.guarantees]
    kinds = dict.fromkeys((g.accountant, g.kind) for g in all_guarantees)
    scores = [name for name in SCORES if any(r.number(name) is not None for r in comparison.runs)]
    other_scores = [f"best_{metric}", *(name for name in scores if name != metric)]
    std = Quantity("std", "std", percent=quantity(metric).percent)
    rows: list[Row] = []
    for setting in comparison.settings:
        score = setting.spread(metric)
        row: Row = {"setting": setting.label, "seeds": len(setting.runs)}
        row |= {quantity(metric): score.mean, std: score.std}
        row |= {quantity(name): setting.spread(name).mean for name in other_scores}
        row["epsilon that holds"] = setting.epsilon
        largest_epsilons = stated_epsilons(setting.runs)
        for name, kind in kinds:
            row[f"epsilon, {accountant(name)} ({kind})"] = largest_epsilons.get((name, kind))
        row |= {quantity(name): setting.spread(name).mean for name in ("rounds", "seconds")}
        rows.append(row)
    caption = "Means over the seeds, with the sample standard deviation of the first score; of "
    caption += "epsilons the largest. The best round is chosen on what is shown, which flatters it."
    return Table("results", "Results", f"{caption} From summary.json.", rows)


def differences(comparison: Comparison) -> Table:
    rows: list[Row] = [{"setting": s.label, **s.values} for s in comparison.settings]
    caption = "What the configs differ in, but for the seed; empty where one has no such key. "
    return Table("differences", "Differences", f"{caption}From config.yaml.", rows)


def guarantees(settings: Sequence[SeedGroup]) -> list[Piece]:
    rows: list[Row] = [
        {"setting": setting.label, **guarantee_row(guarantee, setting.runs[0])}
        for setting in settings
        for guarantee in setting.runs[0].guarantees
    ]
    caption = "Of each setting those of its first run. Epsilons of different kinds are never "
    caption += "compared. From summary.json."
    return [Table("guarantees", "Guarantees", caption, rows)] if rows else []
