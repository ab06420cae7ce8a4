"""What a file asks for, before any of it is run (`raydpfl show`): an experiment complete, with all
defaults; a sweep with its settings, or a study with its cells, whether each can be run, and how
long that would take here. And the list of studies (`raydpfl reproduce --list`).

The text is YAML with remarks, and marks of keys that are at their defaults, in comments: it is a
config again.

>>> text = "local:\\n  lr: 0.5\\n  momentum: 0.0\\n"
>>> print(annotate_defaults(text, {("local", "momentum")}), end="")
local:
  lr: 0.5
  momentum: 0.0  # default
"""

import copy
import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from rich.console import Console

from raydpfl.cli.experiment_reader import CONFIGS
from raydpfl.config.overrides import value_at
from raydpfl.config.yaml import dump, read
from raydpfl.errors import ConfigError
from raydpfl.experiment import DEFAULTS, Experiment, overridden, report_config_fields
from raydpfl.models.metric_columns import score_label
from raydpfl.report.labels import count_text
from raydpfl.simulation.resolution import preview as preview_release
from raydpfl.simulation.resolution import resolve
from raydpfl.sweep import Sweep
from raydpfl.sweep.estimate import Estimate, Runs, estimate, measure
from raydpfl.sweep.spaces import find
from raydpfl.sweep.study import Study, builtin
from raydpfl.sweep.study.schema import SCALES
from raydpfl.sweep.trials import override_text

LINES = 50  # settings that are listed
WIDTH = 78
MARK = "# default"
MAX_MARK_COLUMN = 60  # columns; a longer line does not move the marks of all others
Key = tuple[str, ...]  # the names from the outermost section to the key


@dataclass(frozen=True)
class Preview:
    """`text` is what to print. `refused`: why the first setting that cannot be run cannot be."""

    text: str
    refused: ConfigError | None = None


def preview(
    target: str, overrides: Sequence[str] = (), timing: bool = False, root: Path | None = None
) -> Preview:
    """What a file, a directory or the name of a study asks for.

    Args:
        target: a YAML file, the directory of a run, a sweep or a study, or a study's name.
        overrides: as `section.key=value`; none for a study.
        timing: imports what it names, prepares the data, puts the plan of every setting together,
            and times a round of each kind of run that was not timed here before.
        root: where data sets lie.

    Raises:
        ConfigError: for what is no experiment, sweep or study, and for a `root` that nothing reads.
    """
    imports = None if timing else ()
    path = _path(target)
    content = read(path) if path else {}
    is_study = path is None or (isinstance(content, Mapping) and "study" in content)
    tree = {} if is_study else overridden(content, overrides)
    if tree and ("sweep" in tree or find(tree)):
        return _sweep(tree, imports, timing, root)
    if root and not timing:
        raise ConfigError("--data-root", str(root), "none without --timed, but for a sweep")
    if is_study:
        return _study(target, overrides, imports, timing, root)
    experiment = Experiment.from_dict(tree, imports=imports)
    remarks = _unread([experiment])
    if timing:
        remarks.append(f"That takes {measure([(experiment, 1)], root).words()}.")
    marks = set(default_keys(experiment, tree, DEFAULTS))
    return Preview(annotate_defaults(experiment.to_yaml(), marks) + _comments(remarks))


def _path(target: str) -> Path | None:
    """The file to read; None for what can only be the name of a study."""
    path = Path(target)
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None if builtin.is_builtin(target) or not path.suffix else path
    except (OSError, ValueError):  # a name that no file has: reading it says so
        return path
    if path.is_dir():
        files = [path / name for name in CONFIGS if (path / name).exists()]
        if not files and builtin.is_builtin(target):
            return None
        return next(iter(files), path / CONFIGS[0])
    return path


def _comments(lines: Iterable[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)


def _unread(experiments: Iterable[Experiment]) -> list[str]:
    """A remark for each user-defined class that was not imported."""
    remarks = (
        f"{section}: {path} was not imported, so its own defaults are not here."
        for experiment in experiments
        for section, path in experiment.unimported_kinds.items()
    )
    return [*dict.fromkeys(remarks)]


def _sweep(
    tree: Mapping[str, Any], imports: Iterable[str] | None, timing: bool, root: Path | None
) -> Preview:
    """Puts every setting together.

    Raises `ConfigError` for what is no sweep, whatever its settings are; or, where each of them can
    be run, for what they rule out together.
    """
    sweep = Sweep.parse_unchecked(tree, imports=imports)
    sweep.check_search()
    experiments: dict[str, Experiment] = {}  # by the values in print
    refusals: dict[str, ConfigError] = {}
    for values in sweep.probe_values():
        name = override_text(values)
        try:
            experiment = sweep.setting(values).experiment
            if timing:
                resolve(sweep.trial(experiment), root)
            elif not experiment.unimported_kinds:
                with report_config_fields():
                    preview_release(experiment, root)
            experiments[name] = experiment
        except ConfigError as error:
            refusals[name] = error
    unread = _unread(experiments.values())
    lines = _settings(experiments, refusals)
    if not refusals:
        sweep.check_settings()
        lines += ["All of them can be run." if timing else "All of them make an experiment."]
    if not refusals and not unread:
        runs = _runs(sweep, experiments)
        lines += _duration(sweep, measure(runs, root) if timing else estimate(runs))
    first_experiment = next(iter(experiments.values()), None)
    marks = _unsearched_defaults(sweep, first_experiment)
    text = annotate_defaults(dump(_complete(sweep, first_experiment)), marks)
    first_refusal = next(iter(refusals.values()), None)
    return Preview(text + _comments([*unread, *_counts(sweep, experiments), *lines]), first_refusal)


def _runs(sweep: Sweep, experiments: Mapping[str, Experiment]) -> Runs:
    """All that the sweep runs; of Optuna as many runs, of the ends of its spaces in turn."""
    names: Iterable[str] = (override_text(values) for values in sweep.setting_values())
    if sweep.search.search == "optuna":
        names = itertools.islice(itertools.cycle(experiments), sweep.size)
    counts = Counter(names).items()
    return [(sweep.trial(experiments[k]), count * sweep.search.repeats) for k, count in counts]


def _complete(sweep: Sweep, experiment: Experiment | None) -> dict[str, Any]:
    """The config with its defaults and spaces; as given where no setting makes an experiment."""
    search = {"sweep": sweep.search.effective_fields()}
    if experiment is None:
        return {**sweep.tree, **search}
    tree = copy.deepcopy(experiment.to_dict())
    for key in sweep.spaces:
        place = key.removesuffix(".kind")  # which decides what keys there are
        section, _, last = place.rpartition(".")
        node = value_at(tree, section) if section else tree
        node[last] = copy.deepcopy(value_at(sweep.tree, place))
    return {**tree, **search}


def _unsearched_defaults(sweep: Sweep, experiment: Experiment | None) -> set[Key]:
    """The keys of `_complete` that are at their defaults, but for those in search spaces."""
    fields = dict.fromkeys(sweep.search.model_fields_set)
    keys = [*default_keys(sweep.search, fields, place=("sweep",))]
    if experiment:
        keys += default_keys(experiment, sweep.tree, DEFAULTS)
    spaces = [tuple(name.removesuffix(".kind").split(".")) for name in sweep.spaces]
    return {key for key in keys if not any(key[: len(space)] == space for space in spaces)}


def _counts(sweep: Sweep, experiments: Mapping[str, Experiment]) -> Iterator[str]:
    """How many settings and runs there are, and what the best is chosen by."""
    search = sweep.search
    fields = ", ".join(sweep.spaces) or "the seed alone"
    rounds = sorted({experiment.rounds for experiment in experiments.values()})
    ends = "-".join(str(number) for number in (*rounds[:1], *rounds[1:][-1:]))
    runs = f"{sweep.size * search.repeats:,} runs" + (f" of {ends} rounds" if ends else "")
    settings = f"{count_text(sweep.size, 'setting')} of {fields}"
    yield f"{settings}, each with {count_text(search.repeats, 'seed')}: {runs}."
    has_test = any(sweep.trial(experiment).evaluate.test for experiment in experiments.values())
    test_note = "" if has_test or not experiments else "; none of them looks at the test set"
    yield f"The best is chosen by {score_label(search.metric)}{test_note}."
    if search.search == "optuna":
        yield "What Optuna proposes depends on the results; these are the ends of the spaces:"


def _settings(
    experiments: Mapping[str, Experiment], refusals: Mapping[str, ConfigError]
) -> list[str]:
    """A line for each setting."""
    names = [*dict.fromkeys([*refusals, *experiments])]
    lines = []
    for name in names[:LINES]:
        refusal_note = f"  cannot be run: {refusals[name]}" if name in refusals else ""
        lines.append(f"  {name or 'as it stands'}{refusal_note}")
    if len(names) > LINES:
        lines.append(f"  ... and {len(names) - LINES:,} more")
    if refusals:
        lines.append(f"{len(refusals):,} of these {len(names):,} cannot be run.")
    return lines


def _duration(sweep: Sweep, duration: Estimate) -> list[str]:
    if duration.seconds is None:
        return [f"How long that takes is {duration.words()}; --timed says it."]
    bound_note = "at most " if sweep.search.scheduler != "none" else ""
    return [f"That takes {bound_note}{duration.words()}."]


def _study(
    target: str,
    overrides: Sequence[str],
    imports: tuple[str, ...] | None,
    timing: bool,
    root: Path | None,
) -> Preview:
    if overrides:
        expected = "none for a study: change its file (raydpfl reproduce has --scale and --seeds)"
        raise ConfigError("override", overrides[0], expected)
    study = Study.named(target, imports=imports)
    runs = [*study.planned_runs()]
    duration = measure(runs, root) if timing else estimate(runs)
    unread = _unread(experiment for experiment, _ in runs)
    return Preview(study.to_yaml() + _comments([*unread, *_cells(study, duration)]))


def _cells(study: Study, duration: Estimate) -> list[str]:
    """What a study would run at its scale, a line per cell, and what that takes here."""
    lines = [f"at scale {study.scale}: {_runs_of(study)}; {duration.words()}"]
    for cell in study.cells:
        experiment = cell.experiment(next(cell.setting_values()), study.final_seeds().start)
        grid_text = ", ".join(
            f"{key} of {', '.join(map(str, space.options))}" for key, space in cell.grid.items()
        )
        sources = ", ".join(
            f"{key} from {source.arm}" for key, source in study.sources(cell).items()
        )
        parts = [cell.display_name(), f"{experiment.rounds} rounds", grid_text, sources]
        lines.append("; ".join(part for part in parts if part))
    return lines


def _runs_of(study: Study) -> str:
    """How many cells and runs there are."""
    runs = study.runs()
    text = f"{len(study.cells)} cells, {runs['final']} final runs"
    text += f" over {count_text(study.seeds, 'seed')}"
    return f"{text}, {runs['tried']} to choose values by" if runs["tried"] else text


def list_studies(
    console: Console,
    names: Sequence[str] = (),
    scale: str | None = None,
    seeds: int | None = None,
    root: Path | None = None,
) -> None:
    """Prints all studies that come with the package, with what is known of their cost here; or the
    named ones with all that they run at one scale. What was not timed yet is timed, unless it would
    be downloaded.

    Raises `ConfigError` for a scale, seeds or a root without a name, and for a name of no study.
    """
    options = {"--scale": scale, "--seeds": seeds, "--data-root": root and str(root)}
    for field, value in options.items():
        if not names and value is not None:
            raise ConfigError(field, value, "the name of a study as well, with --list")
    for name in [] if names else builtin.paths():
        scales = [Study.named(name, scale) for scale in SCALES]
        lines = [
            f"  {study.scale}: {_runs_of(study)}; {estimate(study.planned_runs()).words()}"
            for study in scales
        ]
        console.print("\n".join([_about(scales[0]), *lines]), markup=False)
    for name in [name for study_name in names for name in builtin.several(study_name)]:
        study = Study.named(name, scale, seeds)
        console.print(_about(study), markup=False)
        runs = [*study.planned_runs()]
        absent_files = [experiment.data.absent_files(root) for experiment, _ in runs]
        with console.status("timing a round of each kind of run"):
            measure([run for run, names in zip(runs, absent_files, strict=True) if not names], root)
        duration = estimate(runs)
        lines = _cells(study, duration)
        names = ", ".join(dict.fromkeys(itertools.chain(*absent_files)))
        if names and duration.seconds is None:
            lines.append(f"not timed, as it is not here: {names}")
        console.print("\n".join(f"  {line}" for line in lines), markup=False)


def _about(study: Study) -> str:
    """What a study shows, in some lines."""
    about = study.about
    lines = [textwrap.fill(f"{about.id}  {about.title}", WIDTH + 2, subsequent_indent="  ")]
    texts = {"also": ", ".join(about.answers), "shows": about.shows, "lost": about.lost}
    for name, text in texts.items():
        if text:
            paragraph = textwrap.fill(" ".join(f"{name}: {text}".split()), WIDTH)
            lines.append(textwrap.indent(paragraph, "  "))
    return "\n".join(lines)


def default_keys(
    section: BaseModel,
    values: Any,
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    kind: Any = None,
    place: Key = (),
) -> Iterator[Key]:
    """The keys that a config leaves, or puts, at their defaults.

    Args:
        section: an experiment, or one of its sections.
        values: its tree, in which keys may be missing; a kind alone; or None.
        kinds: the fields of default sections, as `raydpfl.experiment.DEFAULTS`.
        kind: the default kind of the section.
        place: the names that lead to it.
    """
    if not isinstance(values, Mapping):
        values = {} if values is None else {"kind": values}
    for name, field in type(section).model_fields.items():
        key = (*place, name)
        value = getattr(section, name)
        default = field.get_default(call_default_factory=True)
        if isinstance(value, BaseModel):
            default_kind = (kinds or {}).get(name, {}).get("kind", getattr(default, "kind", None))
            yield from default_keys(value, values.get(name), kind=default_kind, place=key)
        elif name not in values or (values[name] == kind if name == "kind" else value == default):
            yield key


def annotate_defaults(text: str, marked_keys: Collection[Key]) -> str:
    """A config in YAML, as `dump` writes it, with a comment at the keys that are at defaults."""
    lines = text.splitlines()
    places = {place for key, place in _places(yaml.compose(text), ()) if key in marked_keys}
    lengths = [len(lines[place]) for place in places]
    column = max((length for length in lengths if length < MAX_MARK_COLUMN), default=0)
    for place in places:
        lines[place] = f"{lines[place]:<{column}}  {MARK}"
    return "".join(f"{line}\n" for line in lines)


def _places(node: yaml.Node | None, place: Key) -> Iterator[tuple[Key, int]]:
    """Every key with a value in its line, which a comment may end, and that line."""
    if not isinstance(node, yaml.MappingNode):
        return
    for name, value in node.value:
        key = (*place, name.value)
        line = name.start_mark.line
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _places(value, key)
        elif isinstance(value, yaml.SequenceNode) or value.end_mark.line == line:
            yield key, line
