"""What a run records beyond its rounds: `measure: [clients, bounding, ...]`, a file a member. A
member with fields is a mapping. By default a run has none, as each costs more than 2 % of some
round.
"""

from typing import Any

from raydpfl.config.registry import choose, family
from raydpfl.errors import ConfigError
from raydpfl.methods.probes.base import Finished, Probe, Problem, Round, Sent

__all__ = ["FAMILY", "Finished", "Probe", "Problem", "Round", "Sent"]

FAMILY: dict[str, type[Probe]] = family(__name__, Probe)


def parse(values: Any) -> tuple[Probe, ...]:
    """The members of a list of kinds and mappings. Raises `ConfigError`."""
    if not isinstance(values, (list, tuple)):
        raise ConfigError("measure", values, f"a list, of {', '.join(FAMILY)} or your own classes")
    sections = [{"kind": value} if isinstance(value, str) else value for value in values]
    probes = tuple(choose("measure", section, FAMILY, Probe) for section in sections)
    if len({probe.kind for probe in probes}) < len(probes):
        raise ConfigError("measure", values, "a list that has each kind once")
    return probes
