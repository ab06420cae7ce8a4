"""A case: one example of a member, in a small experiment around it."""

import copy
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raydpfl import experiment, models
from raydpfl.check.contract import UnsupportedMember, UntriedClause, tensor
from raydpfl.check.runs import RecordingCoordinator, run_plan
from raydpfl.config.overrides import Spec
from raydpfl.config.registry import choose, is_path
from raydpfl.core.messages import View
from raydpfl.errors import USER_EXCEPTIONS, ConfigError
from raydpfl.experiment import Experiment, overridden
from raydpfl.models.hidden_state import python_state
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve

CLIENTS = 24
ROUNDS = 4
BASE_CONFIG: dict[str, Any] = {
    "seed": 5,
    "rounds": ROUNDS,
    "data": {
        "kind": "synthetic",
        "clients": CLIENTS,
        "samples": 12,
        "test_samples": 48,
        "features": 8,
        "classes": 3,
        "sizes": {"kind": "spread"},
    },
    "model": {"kind": "softmax"},
    "selection": {"kind": "uniform", "cohort": 9},
    "local": {"kind": "sgd", "steps": 3, "batch": 4, "lr": 0.1},
    "bounding": {"kind": "clip", "bound": 0.5},
    "noise": {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-3},
    "weights": {"kind": "uniform"},
    "server": {"kind": "sgd"},
    "privacy": {"accountants": ["pld", "rdp"]},
    "client": {"actors": 0, "num_cpus": 0.01, "chunk": 4},
    "evaluate": {"every": 100},
    "measure": [],
    "track": [],
}
SAMPLES = {"kind": "per_sample_clip", "bound": 0.5}
BUDGETS = {"kind": "gaussian", "placement": "step", "epsilon": 3.0, "delta": 1e-3}
TURNS = {"kind": "cyclic", "period": 3}
NONE = {"kind": "none"}
DECAY = {**BASE_CONFIG["local"], "weight_decay": 0.01}
# Scalar problems, which every client takes full gradients of (000 sec. 2.1).
SCALAR: dict[str, Any] = {
    "data": {"kind": "scalar_quadratics", "a": [1, 2, 6], "b": [4, 1, -1]},
    "model": {"kind": "linear"},
    "selection": {"kind": "full"},
    "local": {"kind": "sgd", "steps": 3, "batch": "full", "lr": 0.01},
    "noise": NONE,
}
# The problem and step sizes of a theorem on convergence (002 Theorem 1, with L = 4, lambda = 1).
THEOREM: dict[str, Any] = {
    "data": {"kind": "scalar_quadratics", "a": [1, 2, 1], "b": [1, -1, 0]},
    "model": {"kind": "linear"},
    "selection": {"kind": "uniform", "cohort": 2},
    "local": {"kind": "sgd", "steps": 3, "batch": "full", "schedule": "inverse", "lr_period": 64,
              "lr": 1 / 48},
    "bounding": {"kind": "per_sample_clip", "bound": 30.0},
    "noise": {"kind": "gaussian", "std": 0.1, "delta": 1e-3},
    "weights": {"kind": "data"},
}  # fmt: skip
# The experiments around a member, private ones first: the first that takes it is used.
BASE_SECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"noise": {"kind": "gaussian", "multiplier": 1.0, "delta": 1e-3, "placement": "server"}},
    {"selection": TURNS},
    {"bounding": SAMPLES},
    {"bounding": {"kind": "clip_l1", "bound": 0.5}},
    {"bounding": SAMPLES, "noise": BUDGETS},
    {"noise": NONE},
    {"noise": NONE, "selection": {"kind": "full"}},
    {"noise": NONE, "bounding": NONE},
    {"local": DECAY},
    SCALAR,
    THEOREM,
)
# The same, around what has its own samples: few clients with few rows.
SMALL_RUN: dict[str, Any] = {
    "rounds": 2,
    "selection": {"kind": "uniform", "cohort": 3},
    "local": {"kind": "sgd", "steps": 2, "batch": 2, "lr": 0.01},
    "client": {"actors": 0, "num_cpus": 0.01, "chunk": 2},
}
RANDOM_SAMPLES = {"kind": "raydpfl.check.tasks:RandomSamples"}
SAMPLES_OF_MODELS: tuple[dict[str, Any], ...] = (
    {**RANDOM_SAMPLES, "shape": [1, 28, 28], "classes": 10},
    {**RANDOM_SAMPLES, "shape": [3, 32, 32], "classes": 10},
    {**RANDOM_SAMPLES, "shape": [8], "classes": 3},
    {**RANDOM_SAMPLES, "shape": [8], "classes": 0, "task": "regression"},
    {**RANDOM_SAMPLES, "shape": [6], "classes": 9, "tokens": 9, "targets": [6], "task": "sequence"},
    {**RANDOM_SAMPLES, "shape": [6], "classes": 9, "tokens": 9},
)
LINEAR_NET = "raydpfl.check.tasks:LinearNet"
MODELS_OF_SOURCES = ({"kind": "softmax"}, {"kind": LINEAR_NET})
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"noise": NONE}, {"noise": NONE, "bounding": NONE})
# What members of a section are tried in, where that is not BASE_SECTIONS.
BASE_SECTIONS_OF: dict[str, tuple[dict[str, Any], ...]] = {
    "model": tuple(
        {**SMALL_RUN, **private, "data": data} for private in VARIANTS for data in SAMPLES_OF_MODELS
    ),
    "data": tuple(
        {**SMALL_RUN, **private, "selection": selection, "model": model}
        for private in VARIANTS
        for selection in (SMALL_RUN["selection"], {"kind": "full"})
        for model in MODELS_OF_SOURCES
    ),
}
# The sections of a config whose members are checked.
SECTIONS: dict[str, Spec] = {
    name.removeprefix("data."): experiment.SECTIONS[name]
    for name in ("selection", "local", "bounding", "noise", "weights", "server", "measure", "track",
                 "data.task", "model", "data")
}  # fmt: skip


@dataclass(eq=False)
class Example:
    """An example of a member of a section, and the experiments that it is tried in."""

    section: str
    values: dict[str, Any]  # the section as a config has it
    overrides: tuple[str, ...] = ()
    module: nn.Module | None = field(default=None, init=False)  # of a model, as it begins
    _run_failed: bool = field(default=False, init=False)  # the inline run

    @cached_property
    def folder(self) -> Path:
        """The folder of its runs, which is removed with the case."""
        self._holder = tempfile.TemporaryDirectory(prefix="raydpfl-check-")
        return Path(self._holder.name)

    @cached_property
    def member(self) -> Any:
        """The member. Raises `ConfigError`."""
        if self.section == "model":  # whose own may be a module
            return models.parse(self.values)
        spec = SECTIONS[self.section]
        return choose(self.section, self.values, spec.family or {}, spec.base)

    @cached_property
    def first_state(self) -> dict[str, bytes]:
        """What the member's class and file keep in Python when it is made."""
        return self.state()

    def state(self) -> dict[str, bytes]:
        """What they keep now."""
        kind = self.values["kind"]
        own_model = self.section == "model" and is_path(kind)
        return python_state(models.factory(kind) if own_model else self.member)

    @property
    def fields(self) -> dict[str, Any]:
        """Its settings without its kind."""
        return {name: value for name, value in self.values.items() if name != "kind"}

    def tree(self, **sections: Any) -> dict[str, Any]:
        """A config with the member in it."""
        tree = {**copy.deepcopy(BASE_CONFIG), **copy.deepcopy(sections)}
        if self.section == "task":
            data = {**RANDOM_SAMPLES, "clients": CLIENTS, "task": self.values}
            return {**tree, "data": data, "model": {"kind": LINEAR_NET}}
        section = [self.values] if self.section in ("measure", "track") else self.values
        return {**tree, self.section: section}

    @cached_property
    def _resolution(self) -> tuple[Plan | None, str]:
        """The first plan that nobody refuses, and why the first of all was refused, if it was."""
        refusal = ""
        # the example has those of its own section
        overrides = [text for text in self.overrides if not text.startswith(f"{self.section}.")]
        for sections in BASE_SECTIONS_OF.get(self.section, BASE_SECTIONS):
            tree = overridden(self.tree(**sections), overrides)
            try:
                return resolve(Experiment.from_dict(tree)), refusal
            except ConfigError as error:
                refusal = refusal or str(error)
        if self.section == "model":
            refusal += "; data.shape=[60] data.classes=4 say what its samples are, or data.kind=..."
        return None, refusal

    @property
    def plan(self) -> Plan:
        """The plan of a small experiment with the member in it, private if possible. Raises
        `UnsupportedMember` if none takes it.
        """
        plan, reason = self._resolution
        if plan is None:
            raise UnsupportedMember(reason)
        return plan

    @property
    def refusal(self) -> str:
        """Why an earlier experiment was refused, in words; empty: the first was taken."""
        return self._resolution[1]

    @property
    def d(self) -> int:
        """Parameters of its model."""
        return self.plan.d

    def view(self, k: int) -> View:
        """Round 2 as k clients know it that keep a state each, the first the same for every k."""
        states = self.member.broadcast_state(self.member.start(self.d))
        broadcast = {name: torch.tensor(state) for name, state in states.items()}
        experiment = self.plan.experiment
        lr = experiment.local.learning_rate(2)
        model = tensor(self.d, step=2).float()
        state = tensor(k, self.d, step=1).float()
        return View(2, lr, experiment.bounding.initial_bound, model, broadcast, lambda: state)

    def run(self, name: str, **options: Any) -> RecordingCoordinator:
        """As `run_plan`, in a folder of this name; `UntriedClause` once the inline run failed."""
        if self._run_failed:
            raise UntriedClause("it needs a run, which fails")
        return run_plan(self.plan, self.folder / name, **options)

    @cached_property
    def inline_run(self) -> RecordingCoordinator:
        """The inline run, from the first round to the last."""
        try:
            return self.run("whole")
        except USER_EXCEPTIONS as error:  # a user's code may raise anything
            self._run_failed = not isinstance(error, UnsupportedMember)
            raise
