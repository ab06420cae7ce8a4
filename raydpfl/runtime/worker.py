"""How the process of an actor starts on its node, and what it says of itself."""

import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raydpfl.core import device
from raydpfl.errors import ConfigError
from raydpfl.models.linear_stack import NoStack
from raydpfl.runtime import file_transfer
from raydpfl.runtime.session import place
from raydpfl.simulation import provenance, user_code
from raydpfl.simulation.client.actor import ClientActor


@dataclass(frozen=True)
class Started:
    """What a process says of itself once it can work."""

    pid: int
    host: str
    node: str  # Ray's id of its node
    gpu: Mapping[str, str] = field(default_factory=dict)  # as `raydpfl.core.device.facts` says
    batches: int = 0  # of rows that a model is evaluated on


def start_worker(
    process: ClientActor,
    pickled_experiment: bytes,
    shards: str,
    path: Sequence[str],
    platform: Mapping[str, str] | None = None,
    source: str = "",
) -> Started:
    """Where a process runs, once it can work. Raises `ConfigError`, naming the host, what it lacks
    and what to set; and what `check` raises.

    Args:
        process: of this actor, not made yet.
        pickled_experiment: the experiment.
        shards: the folder of its data.
        path: where the process that started the run has found modules of the user's own.
        platform: of the run (`raydpfl.simulation.provenance.platform_facts`), what its node has to
            compute like; None: anything.
        source: Ray's id of the node that has the data, which sends them where they are not
            (`raydpfl.runtime.file_transfer`); empty: they are here.
    """
    user_code.search(path)
    host = place()
    if source:
        shards = str(file_transfer.fetch_folder(shards, source))
    if not os.path.exists(os.path.join(shards, "data.json")):
        expected = f"one directory for all nodes of the cluster; on node {host} it has no "
        expected += "prepared data"
        raise ConfigError("RAYDPFL_CACHE", os.path.dirname(os.path.dirname(shards)), expected)
    try:
        experiment = pickle.loads(pickled_experiment)
    except (ImportError, AttributeError) as error:
        expected = f"directories that all nodes of the cluster have; on node {host}: {error}"
        raise ConfigError("PYTHONPATH", path[0] if path else "", expected) from None
    init = experiment.model.init  # a whole path: the plan has seen to that
    if source and init:
        init = str(file_transfer.fetch_file(init, source))
        model = experiment.model.model_copy(update={"init": init})
        experiment = experiment.model_copy(update={"model": model})
    gpus = experiment.client.num_gpus
    device.choose_device(gpus, f"node {host}")
    try:
        process.make(experiment, shards)
    except ConfigError as error:  # where the run was started it was none
        remedy = "needs the directory of your modules in PYTHONPATH"
        expected = f"{error.expected}; so it is on node {host}, which {remedy}"
        raise ConfigError(error.field, error.value, expected) from None
    except NoStack as error:  # a backend that the driver's machine can take, and this one cannot
        expected = f"another backend, or what it needs on node {host}: {error}"
        raise ConfigError("client.backend", experiment.client.backend, expected) from None
    gpu = device.facts(gpus)
    if platform:
        user_code.check_code(host, platform, experiment)
        provenance.check_node(host, platform, gpu)
    process.check()
    import ray

    node = ray.get_runtime_context().get_node_id()
    batches = len(process.evaluator.batches)
    return Started(os.getpid(), host, node, gpu, batches)
