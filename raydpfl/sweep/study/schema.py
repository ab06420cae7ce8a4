"""A study as its file says it: `Study`. See `raydpfl.sweep.study` for the file."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from raydpfl.config.registry import Section, allow_imports
from raydpfl.config.validation import validate
from raydpfl.config.yaml import dump, read
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.models.metric_columns import VALIDATION, score_set, sign
from raydpfl.report.figures import parse
from raydpfl.sweep.search_runner import Difference, read_config_tree
from raydpfl.sweep.spaces import Options, points
from raydpfl.sweep.study import builtin
from raydpfl.sweep.study.cells import StudyCell, apply_changes, is_private, label, strip_mark
from raydpfl.sweep.study.claims import Claim, claim
from raydpfl.sweep.study.identities import Identity, identity, split
from raydpfl.sweep.trials import name_of

SCALES = ("smoke", "small", "paper")
SECTIONS = tuple(Experiment.model_fields)
PARTS = ("study", "scales", "panels", "arms", "show", *SECTIONS)
# columns of the tables of a study, which no axis may be called
RESERVED = frozenset(
    ("arm", "accounting", "seed", "status", "values", "chosen", "seconds", "directory", "reason")
) | {"model_sha256", "tuning_seeds"}
STATISTICS = ("mean", "std", "seeds")  # columns of tables of cells
Tree = Mapping[str, Any]
LabelLimits = Mapping[str, tuple[str, ...]]  # the labels of axes that are meant


class About(Section):
    """The section `study`."""

    id: str = Field(min_length=1, pattern=r"^\.*[\w-][\w.-]*(/\.*[\w-][\w.-]*)*$")
    title: str = ""
    shows: str = ""  # what the paper claims with it
    answers: tuple[str, ...] = ()  # other names by which it is found
    lost: str = ""  # what the paper does not state, and what was chosen for it
    seeds: int = Field(default=10, ge=1)  # of final runs, which follow the tuning seeds
    tuning_seeds: int = Field(default=2, ge=1, le=4)  # of every setting: seed, seed + 1, ...
    last: int = Field(default=3, ge=1)  # evaluations of which every score is the mean
    grow: int = Field(default=2, ge=0)  # values put to each end of a grid that is chosen
    judge: str = "validation_accuracy"  # the number by which values are chosen
    better: Literal["larger", "smaller"] | None = None  # of a judge that is no loss or accuracy
    validation: float = Field(default=0.1, ge=0, lt=1)  # held out while values are chosen
    chosen_at: Mapping[str, Any] = {}  # labels of axes along which values are chosen at one alone
    accounting: Any = None  # labels of the axis, or a mapping of each to what it means
    same_bits: tuple[Any, ...] = ()
    claims: tuple[Any, ...] = ()  # see `raydpfl.sweep.study.claims`
    scale: Literal["smoke", "small", "paper"] | None = None  # of one that was begun
    only: Mapping[str, Any] = {}  # labels of its cells, as --only says

    @property
    def sign(self) -> int:
        """That which makes more of the judge better; 0: nobody knows."""
        return {"larger": 1, "smaller": -1, None: sign(self.judge)}[self.better]


class Arm(Section):
    """What an arm changes: `puts` are sections and dotted keys."""

    puts: Tree
    accounting: Mapping[str, Tree] = {}  # by label: what it means for this arm
    only: Mapping[str, tuple[str, ...]] = {}


class Scale(Section):
    """What a scale changes: `puts` are sections and dotted keys of all cells."""

    puts: Mapping[str, Any] = {}
    seeds: int | None = Field(default=None, ge=1)
    tuning_seeds: int | None = Field(default=None, ge=1, le=4)
    grow: int | None = Field(default=None, ge=0)
    tries: int | None = Field(default=None, ge=1)  # the first so many values of every grid
    only: Mapping[str, tuple[str, ...]] = {}


C = TypeVar("C", Arm, Scale)


@dataclass(frozen=True)
class Study:
    """A study at one scale."""

    tree: Tree  # of the file
    about: About
    scale: str  # smoke, small or paper
    seeds: int  # final runs of a cell
    place: Path | None = None  # the folder that its tables of published numbers are named from
    imports: tuple[str, ...] | None = None  # sections whose import paths are imported; None: all

    @classmethod
    def from_dict(
        cls,
        values: Tree,
        scale: str | None = None,
        seeds: int | None = None,
        place: Path | None = None,
        imports: tuple[str, ...] | None = None,
        only: Mapping[str, Sequence[str]] | None = None,
    ) -> Study:
        """Raises `ConfigError` naming the first field of the file's tree that is wrong; every
        experiment that the study may make is tried on. The scale is by default the one that the
        tree says, or small; `only` are labels by axis: the cells with others are left out.
        """
        if not isinstance(values, Mapping) or "study" not in values:
            raise ConfigError("study", None, "a section with the study's id")
        for name in values:
            if name not in PARTS:
                raise ConfigError(name, values[name], f"one of the sections {', '.join(PARTS)}")
        about = validate(About, "study", values["study"])
        scale = scale or about.scale or "small"
        _check_one_of("--scale", scale, SCALES)
        tree = copy.deepcopy(dict(values))
        if only:
            tree["study"]["only"] = {**about.only, **{axis: [*only[axis]] for axis in only}}
            about = validate(About, "study", tree["study"])
        if seeds is None:
            seeds = _scales(tree).get(scale, Scale()).seeds or about.seeds
        if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 1:
            raise ConfigError("--seeds", seeds, "a whole number of at least 1")
        study = cls(tree, about, scale, seeds, place, imports)
        for axis, names in (only or {}).items():
            _check_one_of("--only", strip_mark(axis), study.labels)
            for name in names:
                _check_one_of(f"--only {axis}", name, study.labels[strip_mark(axis)])
        study._check()
        return study

    @classmethod
    def named(
        cls, name: str | Path, scale: str | None = None, seeds: int | None = None, **options: Any
    ) -> Study:
        """The study of this id, or of another name that one answers to; in this file; or begun in
        this directory. Raises `ConfigError` where there is none; the rest is as in `from_dict`.
        """
        path = Path(name)
        if path.is_dir() and (path / "study.yaml").exists():
            return cls.from_directory(path, scale, seeds, **options)
        path = path if path.is_file() else builtin.find(str(name))
        place = path.absolute().parent
        return cls.from_dict(read(path, "study"), scale, seeds, place, **options)

    @classmethod
    def from_directory(
        cls, folder: Path, scale: str | None = None, seeds: int | None = None, **options: Any
    ) -> Study:
        """As `named`, of a directory. Raises `ConfigError` unless its study.yaml is whole."""
        return cls.from_dict(read_config_tree(folder, "study"), scale, seeds, folder, **options)

    def to_yaml(self) -> str:
        """The file with its scale and seeds, of which `...`, its last line, marks the end."""
        tree = copy.deepcopy(dict(self.tree))
        tree["study"] |= {"seeds": self.seeds, "scale": self.scale}
        scale_section = (tree.get("scales") or {}).get(self.scale)
        if scale_section:
            scale_section.pop("seeds", None)
        return dump(tree) + "...\n"

    def differs(self, other: Study) -> Difference:
        """(field, own value, that of `other`) of what makes it another study or another scale."""
        if self.about.id != other.about.id:
            return "study.id", self.about.id, other.about.id
        return ("--scale", self.scale, other.scale) if self.scale != other.scale else None

    def tries_others(self, other: Study) -> bool:
        """Whether a cell with values to try is none of `other`, whatever its labels."""
        known = [(cell.tree, cell.limit) for cell in other.cells]
        return any(cell.grid and (cell.tree, cell.limit) not in known for cell in self.cells)

    @cached_property
    def panels(self) -> dict[str, dict[str, Any]]:
        """What each label changes, by axis (with its `?`) and label."""
        panels = {}
        for axis, labels in _mapping("panels", self.tree.get("panels")).items():
            field = f"panels.{axis}"
            if isinstance(labels, list):
                labels = {label(text): text for text in labels}
            if not labels:
                raise ConfigError(field, labels, "at least one label")
            name = strip_mark(axis)
            is_number = name in STATISTICS or sign(name.removeprefix("best_"))
            if name in RESERVED | {self.about.judge} or is_number or axis.startswith("epsilon_"):
                expected = "another name; tables have a column of this one"
                raise ConfigError(field, [*labels], expected)
            panels[axis] = _mapping(field, labels)
        return panels

    @cached_property
    def arms(self) -> dict[str, Arm]:
        fields = _mapping("arms", self.tree.get("arms"))
        if not fields:
            raise ConfigError("arms", self.tree.get("arms"), "at least one arm, by its name")
        return {name: _changes(Arm, f"arms.{name}", value) for name, value in fields.items()}

    @cached_property
    def accounting(self) -> dict[str, Tree | None]:
        """By label: what it means, if for all arms."""
        section = self.about.accounting
        if isinstance(section, list):
            return dict.fromkeys(label(item) for item in section)
        return {**_mappings("study.accounting", section)}

    @property
    def show(self) -> Sequence[Tree]:
        return self.tree.get("show") or ()

    @cached_property
    def _scale(self) -> Scale:
        return _scales(self.tree).get(self.scale, Scale())

    @property
    def grow(self) -> int:
        """Values that are put to each end of a grid that is chosen, at most."""
        return self.about.grow if self._scale.grow is None else self._scale.grow

    @cached_property
    def seed(self) -> int:
        return Experiment.from_dict({"seed": self.tree.get("seed", 0)}).seed

    def tuning_seeds(self) -> range:
        count = self._scale.tuning_seeds or self.about.tuning_seeds
        return range(self.seed, self.seed + count)

    def final_seeds(self) -> range:
        first_seed = self.tuning_seeds().stop
        return range(first_seed, first_seed + self.seeds)

    @property
    def axes(self) -> list[str]:
        """Of the panels."""
        return [strip_mark(axis) for axis in self.panels]

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """The labels of every axis, whatever the scale."""
        panels = {strip_mark(axis): [*labels] for axis, labels in self.panels.items()}
        return panels | {"arm": [*self.arms], "accounting": [*self.accounting]}

    @cached_property
    def cells(self) -> list[StudyCell]:
        """Panels in the order of the file, in each the accountings, in each of these the arms."""
        with allow_imports(self.imports):
            only = _parse_label_limits("study.only", self.about.only)
            return [self._cell(place) for place in self._placements({**self._scale.only, **only})]

    @property
    def planned_places(self) -> list[dict[str, str | None]]:
        """The labels of the cells of its scale, which claims are about, whatever --only leaves."""
        return [*self._placements(self._scale.only)]

    @cached_property
    def same_bits(self) -> list[Identity]:
        placements = [*self._placements({})]
        claims = {f"study.same_bits.{number}": c for number, c in enumerate(self.about.same_bits)}
        return [identity(field, claim, self.cells, placements) for field, claim in claims.items()]

    @cached_property
    def claims(self) -> list[Claim]:
        placements = [*self._placements({})]
        claims = {f"study.claims.{number}": item for number, item in enumerate(self.about.claims)}
        return [claim(field, item, self.labels, placements) for field, item in claims.items()]

    def _placements(self, only_labels: LabelLimits) -> Iterator[dict[str, str | None]]:
        """The labels of the cells that `only_labels` allows, `accounting` and `arm` last."""
        axes = {axis: tuple(names) or (None,) for axis, names in self.labels.items()}
        axes["arm"] = axes.pop("arm")
        for place in points({axis: Options(names) for axis, names in axes.items()}):
            label_limits = [*self.arms[place["arm"]].only.items(), *only_labels.items()]
            if all(place[axis] in names for axis, names in label_limits):
                yield place

    def _cell(self, place: Mapping[str, Any]) -> StudyCell:
        name, accounting = place["arm"], place["accounting"]
        arm = self.arms[name]
        tree = {key: self.tree[key] for key in self.tree if key in SECTIONS}
        tree = apply_changes(tree, arm.puts)
        for axis, values in self.panels.items():
            value = values[place[strip_mark(axis)]]
            # else several sections and dotted keys
            is_single = strip_mark(axis) in SECTIONS or "." in axis
            changes = {axis: value} if is_single else _puts(f"panels.{axis}", value)
            tree = apply_changes(tree, changes)
        if accounting is not None and is_private(tree):
            meaning = arm.accounting.get(accounting, self.accounting[accounting])
            if meaning is None:
                field = f"arms.{name}.accounting.{accounting}"
                expected = "dotted keys, as study.accounting has no meaning for all arms"
                raise ConfigError(field, None, expected)
            tree = apply_changes(tree, meaning)
        tree = apply_changes(tree, self._scale.puts, keep=True)
        labels = {axis: place[axis] for axis in self.axes}
        return StudyCell(name, labels, accounting, tree, self._scale.tries, self.imports)

    def published_tables(self) -> dict[str, Path]:
        """The tables of published numbers that its outputs name, by that name: files next to the
        study or below, in a folder `published` there, or among those that come with the package.
        Raises `ConfigError` for one that does not exist.
        """
        tables = {}
        folders = [self.place, self.place / "published"] if self.place else []
        for number, name in enumerate(output.get("published") for output in self.show):
            if not name:
                continue
            candidates = [folder / name for folder in (*folders, builtin.PUBLISHED)]
            path = next((path for path in candidates if path.is_file()), None)
            if path is None or Path(name).is_absolute() or ".." in Path(name).parts:
                files = ", ".join(sorted(path.name for path in builtin.PUBLISHED.glob("*.csv")))
                expected = f"a file in the folder of the study, or one of {files}"
                raise ConfigError(f"show.{number}.published", name, expected)
            tables[name] = path
        return tables

    def chooser(self, cell: StudyCell) -> StudyCell:
        """The cell whose choice of values this one takes: itself, or that at `study.chosen_at`.
        Raises `ConfigError` where there is none with the same values to try.
        """
        labels = {axis: label(name) for axis, name in self.about.chosen_at.items()}
        if not cell.grid or cell.at(labels):
            return cell
        for candidate in self.cells:
            if candidate.at(cell.place | labels) and candidate.grid == cell.grid:
                return candidate
        expected = f"labels at which {cell.arm} stands with the same values to try"
        raise ConfigError("study.chosen_at", dict(self.about.chosen_at), expected)

    def sources(self, cell: StudyCell) -> dict[str, StudyCell]:
        """The cell that gives each number which this one takes, by dotted key."""
        sources = {}
        for key, reference in cell.references.items():
            panel_labels = {axis: label(name) for axis, name in reference.panel.items()}
            labels = {**cell.place, **panel_labels, "arm": reference.arm}
            source = next((cell for cell in self.cells if cell.at(labels)), None)
            if source is None:
                arms = ", ".join(self.arms)
                expected = f"one of the arms that stand at the same labels ({arms})"
                raise ConfigError(f"{key}.from.arm", reference.arm, expected)
            sources[key] = source
        return sources

    @cached_property
    def tuning_runs(self) -> list[Experiment]:
        """The runs that values are chosen by, at the first tuning seed; with placeholders for
        numbers of other arms.
        """
        return [
            cell.experiment(values, self.seed, self.about.validation)
            for cell in self.cells
            if cell.grid and self.chooser(cell) is cell
            for values in cell.setting_values()
        ]

    def planned_runs(self) -> Iterator[tuple[Experiment, int]]:
        """Each experiment that would be run, at one seed, and how often; the first of the values to
        be chosen stand for all in final runs.
        """
        yield from ((experiment, len(self.tuning_seeds())) for experiment in self.tuning_runs)
        for cell in self.cells:
            yield cell.first_experiment(self.final_seeds().start), self.seeds

    def runs(self) -> dict[str, int]:
        """Numbers of runs: `tried`, those that values are chosen by, before any grid grows, and
        `final`, if all tuning seeds choose one setting and no two cells the same.
        """
        tuning_names = {name_of(experiment) for experiment in self.tuning_runs}
        seed = self.final_seeds().start
        final_names = {
            (name_of(cell.first_experiment(seed)), str(cell.grid)) for cell in self.cells
        }
        tried = len(tuning_names) * len(self.tuning_seeds())
        return {"tried": tried, "final": len(final_names) * self.seeds}

    def _check(self) -> None:
        """Raises `ConfigError` for what cannot be run, or shown."""
        judge = self.about.judge
        if "test_" in judge:
            expected = "a number that does not look at the test set, such as validation_accuracy"
            raise ConfigError("study.judge", judge, expected)
        if not self.about.sign:
            expected = "a score of rows held out such as validation_accuracy or validation_loss, "
            expected += "or study.better besides (larger or smaller)"
            raise ConfigError("study.judge", judge, expected)
        self._check_labels()
        if not isinstance(self.show, (list, tuple)):
            raise ConfigError("show", self.show, "a list of outputs")
        for number, output in enumerate(self.show):
            parse(output, f"show.{number}", self.labels)
        if not self.cells:
            raise ConfigError("study", self.about.id, "at least one cell; `only` leaves none")
        for cell in self.cells:
            _check_evaluate(cell)
            for values in cell.setting_values():
                cell.experiment(values, self.final_seeds().start)
        _ = self.tuning_runs
        has_choice = any(cell.grid for cell in self.cells)
        if score_set(judge) == VALIDATION and has_choice and not self.about.validation:
            raise ConfigError("study.validation", 0, f"a share above 0, as study.judge is {judge}")
        _ = self.same_bits, self.claims
        self.published_tables()
        self._check_sources()

    def _check_labels(self) -> None:
        limits = {f"scales.{name}.only": scale.only for name, scale in _scales(self.tree).items()}
        limits |= {f"arms.{name}.only": arm.only for name, arm in self.arms.items()}
        limits["study.only"] = _parse_label_limits("study.only", self.about.only)
        limits["study.chosen_at"] = _parse_label_limits("study.chosen_at", self.about.chosen_at)
        for number, item in enumerate(self.about.same_bits):
            field = f"study.same_bits.{number}"
            limits[field] = _parse_label_limits(field, split(item)[1])
        for field, label_limits in limits.items():
            for axis, names in label_limits.items():
                _check_one_of(field, axis, self.labels)
                for name in names:
                    _check_one_of(f"{field}.{axis}", name, self.labels[axis])

    def _check_sources(self) -> None:
        needs = {
            cell: {*self.sources(cell).values()} | ({self.chooser(cell)} - {cell})
            for cell in self.cells
        }
        try:
            TopologicalSorter(needs).prepare()
        except CycleError as error:
            cell = next(cell for cell in error.args[1] if cell.references)
            key, reference = next(iter(cell.references.items()))
            expected = f"an arm that does not wait for {cell.arm} in its turn"
            raise ConfigError(f"{key}.from.arm", reference.arm, expected) from None


def _check_one_of(field: str, name: Any, allowed_names: Sequence[str] | Tree) -> None:
    if name not in allowed_names:
        raise ConfigError(field, name, f"one of {', '.join(allowed_names)}")


def _mapping(field: str, value: Any) -> dict[str, Any]:
    """By label; empty for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(field, value, "a mapping")
    mapping = {label(key): entry for key, entry in value.items()}
    if len(mapping) < len(value):
        raise ConfigError(field, [*value], "labels that differ as texts")
    return mapping


def _mappings(field: str, value: Any) -> dict[str, dict[str, Any]]:
    mappings = _mapping(field, value)
    return {name: _mapping(f"{field}.{name}", entry) for name, entry in mappings.items()}


def _parse_label_limits(field: str, value: Any) -> LabelLimits:
    return {
        strip_mark(axis): tuple(map(label, labels if isinstance(labels, list) else [labels]))
        for axis, labels in _mapping(field, value).items()
    }


def _puts(field: str, value: Any) -> dict[str, Any]:
    """Sections and dotted keys."""
    puts = _mapping(field, value)
    for name in puts:
        if strip_mark(name) == "seed":
            expected = "none here: the seeds of all runs follow from the file's own and study.seeds"
            raise ConfigError(f"{field}.{name}", puts[name], expected)
        if strip_mark(name) not in SECTIONS and "." not in name:
            expected = f"a dotted key, or one of the sections {', '.join(SECTIONS)}"
            raise ConfigError(f"{field}.{name}", puts[name], expected)
    return puts


def _changes(cls: type[C], field: str, value: Any) -> C:
    """An arm or a scale: its own keys, and the sections and dotted keys that it changes."""
    fields = _mapping(field, value)
    names = cls.model_fields.keys() & fields.keys() - {"puts"}
    own_fields: dict[str, Any] = {name: fields.pop(name) for name in names}
    for key, parse_entry in (("only", _parse_label_limits), ("accounting", _mappings)):
        if key in own_fields:
            own_fields[key] = parse_entry(f"{field}.{key}", own_fields[key])
    return validate(cls, field, {**own_fields, "puts": _puts(field, fields)})


def _scales(tree: Tree) -> dict[str, Scale]:
    scales = _mapping("scales", tree.get("scales"))
    for name in scales:
        _check_one_of("scales", name, SCALES)
    return {name: _changes(Scale, f"scales.{name}", value) for name, value in scales.items()}


def _check_evaluate(cell: StudyCell) -> None:
    """Raises `ConfigError` for what the runs of a study settle by themselves."""
    section = cell.tree.get("evaluate")
    for key in ("test", "validation"):
        if isinstance(section, Mapping) and key in section:
            expected = "none in a study: final runs have all rows and the test set; "
            expected += "study.validation is for runs that choose values"
            expected += f" (in {cell.display_name()})"
            raise ConfigError(f"evaluate.{key}", section[key], expected)
