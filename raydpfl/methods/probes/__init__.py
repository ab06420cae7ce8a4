"""What a run records beyond its rounds: `measure: [clients, bounding, ...]`, a file a member. A
member with fields is a mapping. By default a run has none, as each costs more than 2 % of some
round.
"""

from typing import Any

from raydpfl.config.registry import choose_members, family
from raydpfl.methods.probes.base import Finished, Probe, Problem, Round, Sent

__all__ = ["FAMILY", "Finished", "Probe", "Problem", "Round", "Sent"]

FAMILY: dict[str, type[Probe]] = family(__name__, Probe)


def parse(values: Any) -> tuple[Probe, ...]:
    """The members of a list of kinds and mappings. Raises `ConfigError`."""
    return choose_members("measure", values, FAMILY, Probe)
