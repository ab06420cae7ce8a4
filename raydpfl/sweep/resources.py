"""The Ray that trials run on, and what a trial takes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch

from raydpfl import data
from raydpfl.core import signals
from raydpfl.core.hardware import cores
from raydpfl.data import Shards
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.runtime.capacity import capacity
from raydpfl.runtime.session import Session


class Room:
    """The Ray that the trials run on: started here, joined by `address`, or found running in this
    process. `cpus` are of a trial's own process (default: 1 inline, 0 beside client actors); `root`
    is where data sets lie.
    """

    def __init__(self, cpus: float | None, root: Path | None, address: str | None):
        self._cpus = cpus
        self.root = root
        self._address = address
        self._session: Session | None = None

    def __enter__(self) -> Room:
        if self._address:
            self._session = Session(self._address)
        self._elastic = not ray.is_initialized()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._session:
            self._session.close()

    def watch(self) -> None:
        """Raises `RunError` where the control store of Ray is lost, KeyboardInterrupt where a
        signal was.
        """
        if self._session:
            self._session.check()
        signals.check()

    def start(self) -> None:
        """Starts Ray, unless there is one."""
        if self._elastic:
            self._session = Session("local", num_cpus=cores())

    def nodes(self) -> list[dict[str, float]]:
        """What each node has, by resource."""
        if not ray.is_initialized():
            return [{"CPU": cores(), "GPU": torch.cuda.device_count()}]
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def bundles(self, experiment: Experiment) -> list[dict[str, float]]:
        """What a trial holds: a bundle for its own process, which may be empty, and one for each
        client actor.
        """
        client = experiment.client
        if client.actors == 0:
            return [{"CPU": 1.0 if self._cpus is None else self._cpus, "GPU": client.num_gpus}]
        each = {"CPU": client.num_cpus, "GPU": client.num_gpus}
        return [{"CPU": self._cpus or 0.0}, *[each] * self._actors(experiment)]

    def _actors(self, experiment: Experiment) -> int:
        if experiment.client.actors != "per-client":
            return int(experiment.client.actors)
        if experiment.data.clients:
            return experiment.data.clients
        apart = experiment.evaluate.apart
        found = data.prepare(experiment.data, experiment.seed, self.root, validation=apart)
        return len(Shards.open(found).sizes)

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for a trial that the cluster could never hold."""
        bundles = self.bundles(experiment)
        nodes = self.nodes()
        client = experiment.client
        inline = len(bundles) == 1
        cpus = ("sweep.cpus", self._cpus) if inline else ("client.num_cpus", client.num_cpus)
        if not any(bundles[-1].values()):
            raise ConfigError(
                *cpus, "a number above 0, by which trials that run at once are counted"
            )
        gpus = ("client.num_gpus", client.num_gpus)
        if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
            raise ConfigError(*gpus, "a fraction of one GPU, or a whole number")
        if not fits(bundles, nodes):
            field, value = gpus if client.num_gpus else cpus
            wants = f"a trial that fits the cluster at all: {_wants(bundles)}"
            expected = f"{wants}; the nodes have {_have(nodes)}"
            if inline:
                raise ConfigError(field, value, expected)
            raise ConfigError("client.actors", client.actors, expected)


def _wants(bundles: Sequence[dict[str, float]]) -> str:
    """What a trial takes, in words."""
    own, *others = bundles
    text = f"a trial takes {own['CPU']:g} CPU"
    if own.get("GPU"):
        text += f" and {own['GPU']:g} GPU"
    text += " for its own process"
    if others:
        each = f"{others[0]['CPU']:g} CPU and {others[0]['GPU']:g} GPU"
        text += f", and {each} for each of {len(others)} client actors"
    return text


def _have(nodes: Sequence[dict[str, float]]) -> str:
    """What the first few nodes have, in words."""
    shown = [f"{node.get('CPU', 0):g} CPU and {node.get('GPU', 0):g} GPU" for node in nodes[:4]]
    return ", ".join([*shown, *["..."] * (len(nodes) > 4)])


def fits(bundles: Sequence[dict[str, float]], nodes: Sequence[dict[str, float]]) -> bool:
    """Whether empty nodes hold a trial: its first bundle, and the others, which are alike.

    >>> fits([{"CPU": 0}, {"CPU": 1}, {"CPU": 1}], [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    True
    >>> fits([{"CPU": 1}, {"CPU": 2}], [{"CPU": 2}])
    False
    """
    head, *others = bundles
    each = others[0] if others else {}
    for place, node in enumerate(nodes):
        left = {name: node.get(name, 0) - head.get(name, 0) for name in ("CPU", "GPU")}
        if min(left.values()) < 0:
            continue
        rest = [*nodes[:place], left, *nodes[place + 1 :]]
        if not others or capacity(each.get("CPU", 0), each.get("GPU", 0), rest) >= len(others):
            return True
    return False
