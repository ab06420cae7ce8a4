"""How many client actors there is room for, on this machine or on a cluster."""

import sys
from collections.abc import Mapping, Sequence

import psutil

from raydpfl.errors import ConfigError
from raydpfl.sections import Client


def capacity(num_cpus: float, num_gpus: float, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many actors of that size the nodes hold, a GPU fraction being packed into one device at a
    time.

    >>> capacity(1, 0.6, [{"CPU": 16, "GPU": 4}])  # 0.6 fits once on each, whatever the sum says
    4
    >>> capacity(2, 0, [{"CPU": 3}, {"CPU": 3}])
    2
    >>> capacity(0, 0.25, [{"GPU": 1.5}])  # half of one is taken
    6
    """
    total = 0
    for node in nodes:
        fits = [sys.maxsize]
        if num_cpus > 0:
            fits.append(int(node.get("CPU", 0) / num_cpus + 1e-9))
        if num_gpus >= 1:
            fits.append(int(node.get("GPU", 0) // num_gpus))
        elif num_gpus > 0:
            whole, part = divmod(node.get("GPU", 0), 1)
            fits.append(int(whole) * int(1 / num_gpus + 1e-9) + int(part / num_gpus + 1e-9))
        total += min(fits)
    return total


def actor_count(
    client: Client,
    population: int,
    max_chunks: int,
    nodes: Sequence[dict[str, float]],
    elastic: bool,
    d: int = 0,
    available_resources: Mapping[str, float] | None = None,
    inline: bool = False,
) -> int:
    """How many actors to start. Raises `ConfigError` where they do not fit.

    Args:
        client: how many are asked for, and the resources of each.
        population: clients of the run.
        max_chunks: chunks of a round, so many actors at most have work.
        nodes: the resources of each node.
        elastic: whether Ray is started here for this run, which then sets the logical CPUs: only
            memory limits an explicit count. On a shared cluster Ray's resources do.
        d: parameters of the model.
        available_resources: what other runs have left of all nodes, which `auto` fills; None: all.
        inline: whether `auto` may also run in the caller's process, so that no place need be left.
    """
    num_cpus, num_gpus = client.num_cpus, client.num_gpus
    _check_sizes(num_cpus, num_gpus, nodes)
    memory_slots, megabytes = _fit(d) if elastic else (sys.maxsize, 0.0)
    if client.actors == "auto":
        slots = min(_slots(num_cpus, num_gpus, nodes, available_resources, inline), memory_slots)
        return max(1, min(slots, max_chunks))
    count = population if client.actors == "per-client" else int(client.actors)
    max_actors = min(capacity(0 if elastic else num_cpus, num_gpus, nodes), memory_slots)
    if count > max_actors:
        size = f"of {num_cpus:g} CPU and {num_gpus:g} GPU, which the cluster holds, or lower "
        size += "client.num_cpus"
        if elastic:
            size = f"fit here ({megabytes:.0f} MB of memory each)"
        expected = f"at most {max_actors} actors {size}; {count} are asked for"
        raise ConfigError("client.actors", client.actors, expected)
    return count


def _fit(d: int) -> tuple[int, float]:
    """How many actors with models of d parameters fit in free memory, and the MB of each."""
    # An actor imports what this process has imported and shares its libraries, so it takes about
    # this one's own memory, and some models.
    memory = psutil.Process().memory_info()
    megabytes = (memory.rss - getattr(memory, "shared", 0)) / 1e6 + 6 * 4 * d / 1e6
    return int(psutil.virtual_memory().available / 1e6 / megabytes), megabytes


def _check_sizes(num_cpus: float, num_gpus: float, nodes: Sequence[dict[str, float]]) -> None:
    """Raises `ConfigError` for an actor that no node holds."""
    if num_gpus > 1 and num_gpus != int(num_gpus):
        raise ConfigError("client.num_gpus", num_gpus, "a fraction of one GPU, or a whole number")
    if num_gpus > 0 and capacity(0, num_gpus, nodes) == 0:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        expected = f"at most what one node has; the machine has {gpus:g} GPUs"
        raise ConfigError("client.num_gpus", num_gpus, expected)
    max_cpus = max(node.get("CPU", 0) for node in nodes)
    if num_cpus > max_cpus:
        raise ConfigError("client.num_cpus", num_cpus, f"at most the {max_cpus:g} CPUs of one node")


def _slots(
    num_cpus: float,
    num_gpus: float,
    nodes: Sequence[dict[str, float]],
    available_resources: Mapping[str, float] | None,
    inline: bool,
) -> int:
    """How many actors fill what is left of the nodes. Raises `ConfigError`."""
    if num_cpus == 0:
        expected = "a number above 0 with client.actors auto, which fills the CPUs"
        raise ConfigError("client.num_cpus", 0, expected)
    slots = capacity(num_cpus, num_gpus, nodes)
    if slots == 0:
        needs = f"smaller actors: one takes {num_cpus:g} CPU and {num_gpus:g} GPU"
        raise ConfigError("client.actors", "auto", f"{needs}, which no node has")
    if available_resources is not None:
        slots = min(slots, capacity(num_cpus, num_gpus, [available_resources]))
    if slots == 0 and not inline:
        expected = "a number, which waits for its place: other runs have all that the cluster has, "
        expected += "and auto fills what they leave"
        raise ConfigError("client.actors", "auto", expected)
    return slots
