"""Words with a fixed meaning that mechanisms, accountants and guarantees share."""

from dataclasses import dataclass
from typing import Literal, get_args

from raydpfl.errors import ConfigError

Relation = Literal["add_remove", "zero_out", "replace_one"]
Placement = Literal["client", "server", "step"]
# a person: some samples, or all, of a client together
Unit = Literal["client", "sample", "person"]
LEAST_DELTA = 1e-300  # below it float64 has few digits, or none


@dataclass(frozen=True)
class Terms:
    """What guarantees are asked for: the neighbouring relation, the delta that epsilons are at
    (from 1e-300 and below 1, else `ConfigError`), and the constant v that 000 Theorem 3.2 and 001
    Theorem 1 leave open; rigorous accountants have none.
    """

    relation: Relation
    delta: float
    v: float = 4.0

    def __post_init__(self) -> None:
        if not LEAST_DELTA <= self.delta < 1:
            raise ConfigError("noise.delta", self.delta, "a number from 1e-300, and below 1")


def one_of(field: str, value: object, choices: object) -> None:
    """Raises `ConfigError` unless `value` is one of the strings of a `Literal`."""
    if value not in get_args(choices):
        raise ConfigError(field, value, f"one of {', '.join(get_args(choices))}")


def is_count(value: object) -> bool:
    """Whether a value is an integer and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool)
