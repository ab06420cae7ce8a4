"""A process of the run that works for others: how it starts, and what it says of itself."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from raydpfl.core import device
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.models.linear_stack import NoStack
from raydpfl.runtime import file_transfer
from raydpfl.runtime.session import place
from raydpfl.simulation import provenance


def peak_rss_mb() -> float:
    """The largest resident set this process has had, in MB (10^6 bytes)."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


@dataclass(frozen=True)
class Started:
    """What a process says of itself once it can work."""

    pid: int
    host: str
    node: str  # Ray's id of its node
    # a file of that host, which holds the client in training, an int64; empty where there is none
    progress: str
    gpu: Mapping[str, str] = field(default_factory=dict)  # as `raydpfl.core.device.facts` says
    address: str = ""  # of its door (`raydpfl.runtime.shared_memory`), for processes of its machine; empty: none


class Progress:
    """The client in training; if shared, in a file of memory that others on this machine can read
    even when this process is stopped.
    """

    def __init__(self, shared: bool) -> None:
        self.path = ""
        self._client = np.zeros(1, np.int64)
        if shared and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("raydpfl-progress")
            os.ftruncate(descriptor, self._client.nbytes)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
            self._client = np.memmap(self.path, np.int64, "r+")
        self.at(-1)

    @property
    def client(self) -> int:
        return int(self._client[0])

    def at(self, client: int) -> None:
        """-1: none."""
        self._client[0] = client


class Process:
    """Base of what runs in a process of its own: `make` opens all that the work needs.

    In the process of the caller that is done at once. An actor's process starts without them, and
    `ready` makes it: so a process may start before there is an experiment, and what its node lacks
    comes back as an error that names both.
    """

    def __init__(self, experiment: Experiment | None = None, shards: str = ""):
        self.own = False  # whether code of the user's own takes part
        self.here = experiment is not None  # in the process of the caller
        self.progress = Progress(shared=not self.here)
        if experiment is not None:
            self.make(experiment, shards)
            self.check()

    def make(self, experiment: Experiment, shards: str) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Tries what could go wrong on this node alone. Raises `ConfigError`."""

    def keyed(self, seed: int, **key: int) -> AbstractContextManager[None]:
        """What code of the user's own draws within from the generators of the process is keyed."""
        return keyed_globals(seed, **key) if self.own else nullcontext()

    def _make_here(self, experiment: Experiment, shards: str, host: str) -> None:
        try:
            self.make(experiment, shards)
        except ConfigError as error:  # where the run was started it was none
            where = "needs the directory of your modules in PYTHONPATH"
            accepted = f"{error.expected}; so it is on node {host}, which {where}"
            raise ConfigError(error.field, error.value, accepted) from None
        except NoStack as error:  # a way that the driver's machine can take, and this one cannot
            accepted = f"another way, or what it needs on node {host}: {error}"
            raise ConfigError("client.way", experiment.client.way, accepted) from None

    def ready(
        self,
        pickled: bytes,
        shards: str,
        path: Sequence[str],
        capability: Mapping[str, str] | None = None,
        source: str = "",
    ) -> Started:
        """Where it runs, once it can work.

        Args:
            pickled: the experiment.
            shards: the folder of its data.
            path: where the process that started the run has found modules of the user's own.
            capability: of the run (`raydpfl.simulation.provenance.capability`), what its node has to compute like,
                its GPU (`raydpfl.core.device.facts`), where known, and `raydpfl.simulation.provenance.of_code`.
            source: Ray's id of the node that has the data, which sends them where they are not
                (`raydpfl.runtime.file_transfer`); empty: they are here.

        Raises:
            ConfigError: naming the host, what it lacks, and what to set; and what `check` raises.
        """
        provenance.search(path)
        host = place()
        if source:
            shards = str(file_transfer.prepared(shards, source))
        _check_data(shards, host)
        experiment = _experiment(pickled, path, host, source)
        gpus = experiment.client.num_gpus
        device.chosen(gpus, f"node {host}")
        self._make_here(experiment, shards, host)
        gpu = device.facts(gpus)
        provenance.check_code(host, capability, experiment)
        provenance.check_node(host, capability, gpu)
        self.check()
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Started(os.getpid(), host, node, self.progress.path, gpu)


def _experiment(pickled: bytes, path: Sequence[str], host: str, source: str) -> Experiment:
    """What is unpickled, with the weights that it starts from where this node has them. Raises
    `ConfigError` for modules that the node `host` has not.
    """
    try:
        experiment = pickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        accepted = f"directories that all nodes of the cluster have; on node {host}: {error}"
        raise ConfigError("PYTHONPATH", path[0] if path else "", accepted) from None
    init = experiment.model.init
    if not (source and init):
        return experiment
    # a whole path: the plan has seen to that
    model = experiment.model.model_copy(update={"init": str(file_transfer.file(init, source))})
    return experiment.model_copy(update={"model": model})


def _check_data(shards: str, host: str) -> None:
    """Raises `ConfigError` where the node `host` has no prepared data in the folder `shards`."""
    if not os.path.exists(os.path.join(shards, "data.json")):
        accepted = f"one directory for all nodes of the cluster; on node {host} it has no "
        accepted += "prepared data"
        raise ConfigError("RAYDPFL_CACHE", os.path.dirname(os.path.dirname(shards)), accepted)


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is warned of within, which the log of an actor would keep to itself."""
    found: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("raydpfl")
    log.addHandler(listener)
    try:
        yield found
    finally:
        log.removeHandler(listener)


def own_code(experiment: Experiment) -> bool:
    """Whether code of the user's own takes part in what a client does."""
    e = experiment
    every = (e.local, e.bounding, e.model, e.evaluate.fine_tune, e.personal)
    return any(each is not None and each.is_own for each in every)


def any_own(experiment: Experiment) -> bool:
    """Whether code of the user's own takes part in anything that a process of the run does."""
    e = experiment
    others = (e.noise, e.selection, e.data.task, *e.measure, *e.metrics)
    return own_code(e) or any(each.is_own for each in others)
