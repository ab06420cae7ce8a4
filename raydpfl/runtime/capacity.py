"""How many client actors there is room for, on this machine or on a cluster."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import psutil

from raydpfl.errors import ConfigError
from raydpfl.sections import Client


def capacity(num_cpus: float, num_gpus: float, nodes: Sequence[dict[str, float]]) -> int:
    """How many actors of that size the nodes hold, a GPU fraction being packed into one device at a
    time.

    >>> capacity(1, 0.6, [{"CPU": 16, "GPU": 4}])  # 0.6 fits once on each, whatever the sum says
    4
    >>> capacity(2, 0, [{"CPU": 3}, {"CPU": 3}])
    2
    """
    total = 0
    for node in nodes:
        fits = []
        if num_cpus > 0:
            fits.append(int(node.get("CPU", 0) / num_cpus + 1e-9))
        if num_gpus >= 1:
            fits.append(int(node.get("GPU", 0) // num_gpus))
        elif num_gpus > 0:
            fits.append(int(node.get("GPU", 0)) * int(1 / num_gpus + 1e-9))
        total += min(fits, default=sys.maxsize)
    return total


def wanted(
    client: Client,
    population: int,
    most_chunks: int,
    nodes: Sequence[dict[str, float]],
    elastic: bool,
    d: int = 0,
    left: Sequence[dict[str, float]] | None = None,
    inline: bool = False,
) -> int:
    """How many actors to start.

    Args:
        client: how many are asked for, and the resources of each.
        population: clients of the run.
        most_chunks: chunks of a round, so many actors at most have work.
        nodes: the resources of each node.
        elastic: whether Ray is started here for this run, which then sets the logical CPUs: only
            memory limits an explicit count. On a shared cluster Ray's resources do.
        d: parameters of the model.
        left: the resources that other runs have left of the nodes, which `auto` fills; None: all.
        inline: whether `auto` may also run in the caller's process, so that no place need be left.

    Raises:
        ConfigError: they do not fit.
    """
    _check_sizes(client, nodes)
    if client.actors == "auto":
        slots = _slots(client, nodes, left, inline)
        if elastic:
            slots = min(slots, _fit(d)[0])
        return max(1, min(slots, most_chunks))
    count = population if client.actors == "per-client" else int(client.actors)
    held = capacity(0 if elastic else client.num_cpus, client.num_gpus, nodes)
    if elastic:
        fitting, megabytes = _fit(d)
        held = min(held, fitting)
        fit = f"at most {held} actors fit here ({megabytes:.0f} MB of memory each)"
        expected = f"{fit}; {count} are asked for"
    else:
        size = f"{client.num_cpus:g} CPU and {client.num_gpus:g} GPU"
        fit = f"at most {held} actors of {size}, which the cluster holds"
        expected = f"{fit}, or lower client.num_cpus; {count} are asked for"
    if count > held:
        raise ConfigError("client.actors", client.actors, expected)
    return count


def _fit(d: int) -> tuple[int, float]:
    """How many actors the memory of this machine that is free holds, for a model of d parameters,
    and the MB of each.
    """
    # An actor imports what this process has imported and shares its libraries, so it takes about
    # this one's own memory, and some models.
    memory = psutil.Process().memory_info()
    megabytes = (memory.rss - getattr(memory, "shared", 0)) / 1e6 + 6 * 4 * d / 1e6
    return int(psutil.virtual_memory().available / 1e6 / megabytes), megabytes


def _check_sizes(client: Client, nodes: Sequence[dict[str, float]]) -> None:
    """Raises `ConfigError` for an actor that no node holds."""
    if client.num_gpus > 1 and client.num_gpus != int(client.num_gpus):
        expected = "a fraction of one GPU, or a whole number"
        raise ConfigError("client.num_gpus", client.num_gpus, expected)
    if client.num_gpus > 0 and capacity(0, client.num_gpus, nodes) == 0:
        gpus = sum(node.get("GPU", 0) for node in nodes)
        expected = f"at most what one node has; the machine has {gpus:g} GPUs"
        raise ConfigError("client.num_gpus", client.num_gpus, expected)
    most = max(node.get("CPU", 0) for node in nodes)
    if client.num_cpus > most:
        expected = f"at most the {most:g} CPUs of one node"
        raise ConfigError("client.num_cpus", client.num_cpus, expected)


def _slots(
    client: Client,
    nodes: Sequence[dict[str, float]],
    left: Sequence[dict[str, float]] | None,
    inline: bool,
) -> int:
    """How many actors fill what is left of the nodes. Raises `ConfigError`."""
    if client.num_cpus == 0:
        expected = "a number above 0 with client.actors auto, which fills the CPUs"
        raise ConfigError("client.num_cpus", 0, expected)
    slots = capacity(client.num_cpus, client.num_gpus, nodes)
    if slots == 0:
        needs = f"smaller actors: one takes {client.num_cpus:g} CPU and {client.num_gpus:g} GPU"
        raise ConfigError("client.actors", "auto", f"{needs}, which no node has")
    if left is None:
        return slots
    slots = capacity(client.num_cpus, client.num_gpus, left)
    if slots == 0 and not inline:
        expected = "a number, which waits for its place: other runs have all that the cluster has, "
        expected += "and auto fills what they leave"
        raise ConfigError("client.actors", "auto", expected)
    return slots
