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


class Resources:
    """The Ray that the trials run on: started here, joined by `address`, or found running in this
    process. `root` is where data sets lie (None: RAYDPFL_DATA), `cpus` those of a trial's own
    process (None: 1 inline, 0 with client actors).
    """

    def __init__(self, root: str | Path | None, address: str | None, cpus: float | None = None):
        self.root = Path(root).absolute() if root else None
        self._address = address
        self._cpus = cpus
        self._session: Session | None = None

    def __enter__(self) -> Resources:
        if self._address:
            self._session = Session(self._address)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._session:
            self._session.close()

    def watch(self) -> None:
        """Raises `RunError` if Ray's control store is lost, KeyboardInterrupt after a signal."""
        if self._session:
            self._session.check()
        signals.check()

    def start(self) -> None:
        """Starts Ray, unless it runs or an address was given."""
        if not self._address and not ray.is_initialized():
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
        per_client = client.actors == "per-client"
        count = experiment.data.clients if per_client else int(client.actors)
        if not count:
            share = experiment.evaluate.held_out
            shards = data.prepare(experiment.data, experiment.seed, self.root, validation=share)
            count = len(Shards.open(shards).sizes)
        actor = {"CPU": client.num_cpus, "GPU": client.num_gpus}
        return [{"CPU": self._cpus or 0.0}, *[actor] * count]

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` for a trial that the cluster could never hold."""
        process, *actors = bundles = self.bundles(experiment)
        client = experiment.client
        cpus = ("client.num_cpus", client.num_cpus) if actors else ("sweep.cpus", self._cpus)
        gpus = ("client.num_gpus", client.num_gpus)
        if not any(bundles[-1].values()):
            expected = "a number above 0, by which trials that run at once are counted"
            raise ConfigError(*cpus, expected)
        if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
            raise ConfigError(*gpus, "a fraction of one GPU, or a whole number")
        nodes = self.nodes()
        if not fits(bundles, nodes):
            demand = f"a trial takes {_words(process)} for its own process"
            if actors:
                demand += f", and {_words(actors[0])} for each of {len(actors)} client actors"
            supply = ", ".join([*map(_words, nodes[:4]), *["..."] * (len(nodes) > 4)])
            resource = gpus if client.num_gpus else cpus
            cause: tuple[str, Any] = ("client.actors", client.actors) if actors else resource
            expected = f"a trial that fits the cluster at all: {demand}; the nodes have {supply}"
            raise ConfigError(*cause, expected)


def _words(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPU and {resources.get('GPU', 0):g} GPU"


def fits(bundles: Sequence[dict[str, float]], nodes: Sequence[dict[str, float]]) -> bool:
    """Whether empty nodes hold a trial: its first bundle, and the others, which are alike.

    >>> fits([{"CPU": 0}, {"CPU": 1}, {"CPU": 1}], [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}])
    True
    >>> fits([{"CPU": 1}, {"CPU": 2}], [{"CPU": 2}])
    False
    """
    process, *actors = bundles
    actor = actors[0] if actors else {}
    num_cpus, num_gpus = actor.get("CPU", 0), actor.get("GPU", 0)
    for place, node in enumerate(nodes):
        remainder = {name: node.get(name, 0) - process.get(name, 0) for name in ("CPU", "GPU")}
        free_nodes = [*nodes[:place], remainder, *nodes[place + 1 :]]
        if min(remainder.values()) >= 0 and capacity(num_cpus, num_gpus, free_nodes) >= len(actors):
            return True
    return False
