"""How the noise goes on from round to round."""

import math

from pydantic import Field, model_validator

from raydpfl.config.registry import Section
from raydpfl.errors import ConfigError


class NoiseSchedule(Section):
    """Std of the noise in round t, from 0, over that of the whole run's size:

        phase(t) decay^floor(t / every),

    as Opacus' ExponentialNoise (`decay` alone) and StepNoise (with `every`), and phases. What a
    round then costs is accounted for round by round; where `noise.epsilon` is given, the whole
    schedule is scaled to spend it.

    >>> halved = NoiseSchedule(decay=0.5, every=10, phases=[(15, 3.0)])
    >>> [halved.at(t) for t in (9, 10, 15, 20)]
    [1.0, 0.5, 1.5, 0.75]
    """

    decay: float = Field(default=1.0, gt=0, description="the factor after every so many rounds")
    every: int = Field(default=1, ge=1, description="the rounds after which it decays")
    phases: tuple[tuple[int, float], ...] = Field(
        default=(), description="pairs of a phase's first round and its factor, 1 before the first"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> "NoiseSchedule":
        first_rounds = [t for t, _ in self.phases]
        if min(first_rounds, default=0) < 0 or len({*first_rounds}) < len(first_rounds):
            expected = "pairs whose first rounds are 0 or more, each once"
            raise ConfigError("noise.schedule.phases", self.phases, expected)
        if self.every > 1 and self.decay == 1:
            raise ConfigError("noise.schedule.every", self.every, "1 unless decay is given")
        return self

    def at(self, t: int) -> float:
        """The factor of round t, from 0."""
        _, phase = max((phase for phase in self.phases if phase[0] <= t), default=(0, 1.0))
        try:
            return phase * self.decay ** (t // self.every)
        except OverflowError:
            return math.inf
