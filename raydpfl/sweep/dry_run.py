"""A dry run of a sweep: every setting that it would try put together, and none of them run."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raydpfl.config import defaults
from raydpfl.errors import ConfigError
from raydpfl.experiment import DEFAULTS, Experiment, as_fields, at
from raydpfl.models.metric_columns import named
from raydpfl.simulation.plan import Plan, foretold
from raydpfl.sweep.estimate import Estimate, Runs, estimate, measure
from raydpfl.sweep.sweep import Sweep, shown

LINES = 50  # settings that are listed


@dataclass
class DryRun:
    """What became of the settings of `sweep`, by their values in print: the experiments that they
    make, and why one cannot be run.
    """

    sweep: Sweep
    made: dict[str, Experiment] = field(default_factory=dict)
    refused: dict[str, ConfigError] = field(default_factory=dict)
    planned: bool = False  # whether each was put together with its data
    taken: Estimate | None = None

    def complete(self) -> dict[str, Any]:
        """The config with all defaults, but for what is searched; as it was given, where no setting
        makes an experiment.
        """
        sweep = self.sweep
        search = {"sweep": sweep.search.complete()}
        if not self.made:
            return {**sweep.tree, **search}
        tree = copy.deepcopy(next(iter(self.made.values())).to_dict())
        for key in sweep.spaces:
            place = key.removesuffix(".kind")  # which decides what keys there are
            *sections, last = place.split(".")
            node = tree
            for name in sections:
                node = node[name]
            node[last] = copy.deepcopy(at(sweep.tree, place))
        return {**tree, **search}

    def usual(self) -> set[defaults.Key]:
        """The keys of `complete` that are at their defaults; none that is searched."""
        search = self.sweep.search
        given = dict.fromkeys(search.model_fields_set)
        found = set(defaults.within(search, given, place=("sweep",)))
        for experiment in [*self.made.values()][:1]:
            found |= set(defaults.keys(experiment, self.sweep.tree, DEFAULTS))
        spaces = [tuple(key.removesuffix(".kind").split(".")) for key in self.sweep.spaces]
        return {key for key in found if not any(key[: len(one)] == one for one in spaces)}

    def lines(self) -> Iterator[str]:
        """What to say of it."""
        yield from self._counted()
        names = [*dict.fromkeys([*self.refused, *self.made])]
        for name in names[:LINES]:
            error = self.refused.get(name)
            told = name or "as it stands"
            yield f"  {told}  cannot be run: {error}" if error else f"  {told}"
        if len(names) > LINES:
            yield f"  ... and {len(names) - LINES:,} more"
        if self.refused:
            yield f"{len(self.refused):,} of these {len(names):,} cannot be run."
            return
        yield "All of them can be run." if self.planned else "All of them make an experiment."
        if self.taken and self.taken.seconds is None:
            yield f"How long that takes is {self.taken.words()}; --timed says it."
        elif self.taken:
            most = "at most " if self.sweep.search.scheduler != "none" else ""
            yield f"That takes {most}{self.taken.words()}."

    def _counted(self) -> Iterator[str]:
        """How many settings and runs there are, and what is chosen by."""
        sweep = self.sweep
        search = sweep.search
        fields = ", ".join(sweep.spaces) or "the seed alone"
        seeds = "1 seed" if search.repeats == 1 else f"{search.repeats} seeds"
        rounds = sorted({experiment.rounds for experiment in self.made.values()})
        told = "-".join(str(number) for number in (*rounds[:1], *rounds[1:][-1:]))
        runs = f"{sweep.size * search.repeats:,} runs" + (f" of {told} rounds" if told else "")
        settings = "1 setting" if sweep.size == 1 else f"{sweep.size:,} settings"
        yield f"{settings} of {fields}, each with {seeds}: {runs}."
        seen = any(sweep.trial(each).evaluate.test for each in self.made.values())
        unseen = "" if seen or not self.made else "; none of them looks at the test set"
        yield f"The best is chosen by {named(search.metric)}{unseen}."
        if search.search == "optuna":
            yield "What Optuna proposes depends on the results; these are the ends of the spaces:"


def dry_run(sweep: Sweep, timed: bool, root: Path | None) -> DryRun:
    """Puts every setting together.

    Args:
        sweep: What to try; its settings may be such that make no experiment.
        timed: The plan of every setting too, with its data, and a round of each kind of run that
            was not timed here before.
        root: Where data sets lie.

    Raises:
        ConfigError: For what is no sweep, whatever its settings are; or, where each of them can be
            run, for what they rule out together.
    """
    sweep.check_search()
    found = DryRun(sweep, planned=timed)
    for values in sweep.tried():
        name = shown(values)
        try:
            experiment = sweep.setting(values).experiment
            if timed:
                Plan.make(sweep.trial(experiment), root)
            elif not experiment.unread:
                with as_fields():
                    foretold(experiment, root)
            found.made[name] = experiment
        except ConfigError as error:
            found.refused[name] = error
    if not found.refused:
        sweep.check_settings()
        if not any(each.unread for each in found.made.values()):
            found.taken = measure(_runs(found), root) if timed else estimate(_runs(found))
    return found


def _runs(found: DryRun) -> Runs:
    """All that the sweep runs."""
    sweep = found.sweep
    if sweep.search.search == "grid":
        return [(sweep.trial(each), sweep.search.repeats) for each in found.made.values()]
    one = next(iter(found.made.values()))
    return [(sweep.trial(one), sweep.size * sweep.search.repeats)]
