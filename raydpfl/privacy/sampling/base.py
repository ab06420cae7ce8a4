"""Sampling, and the base of sampling schemes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy import pld
from raydpfl.privacy.pld import CurvePair
from raydpfl.privacy.types import Relation, is_count


@dataclass(frozen=True)
class Sampling:
    """Who takes part in a round. What its properties mean is said at `SamplingScheme`.

    >>> Sampling("fixed", population=10, cohort=11)
    Traceback (most recent call last):
    raydpfl.errors.ConfigError: cohort = 11: expected an integer from 1 to the population of 10

    Args:
        kind: a sampling scheme, by name, or an object of a user-defined `SamplingScheme`:

            - `fixed`: a uniform subset of fixed size;
            - `poisson`: clients independently, with probability cohort / population;
            - `truncated_poisson`: the same, and of more than `cap` clients a uniform subset of cap;
            - `full`: everyone;
            - `with_replacement`: `cohort` draws, uniform or with no client likelier than `p_max`;
            - `random_allocation`: each client in `per_epoch` rounds of every `epoch`, drawn afresh;
            - `public`: cohorts by a public rule; the mechanism's `rounds` are a client's own.
        population, cohort: clients (or samples) to draw from, and how many take part; the expected
            number where it varies. `ConfigError` if the scheme cannot have these.
        p_max: the largest probability of any client at one draw; None: draws are uniform.
        epoch, per_epoch: T and k of a random allocation, integers with 1 <= k <= T; else None.
        rule: in words, how the population or a public cohort came about. It is public too.
        cap: the largest size of a cohort, under `truncated_poisson`.
        colluders: clients who tell an observer whether they took part and which noise they drew;
            None: there are none. Covered under `fixed`.
    """

    kind: str | SamplingScheme
    population: int
    cohort: int
    p_max: float | None = None
    rule: str = ""
    epoch: int | None = None
    per_epoch: int | None = None
    cap: int | None = None
    colluders: int | None = None

    def __post_init__(self) -> None:
        scheme = self.scheme
        if not (is_count(self.population) and self.population >= 1):
            raise ConfigError("population", self.population, "an integer, at least 1")
        if not (is_count(self.cohort) and self.cohort >= 1):
            expected = f"an integer from 1 to the population of {self.population}"
            raise ConfigError("cohort", self.cohort, expected)
        if self.p_max is not None and not self.repeats:
            expected = f"a number from 1/{self.population} to 1, for draws with replacement"
            raise ConfigError("p_max", self.p_max, expected)
        if self.epoch is not None and not scheme.in_epochs():
            raise ConfigError("epoch", self.epoch, "none, but for sampling random_allocation")
        if (self.cap is None) == scheme.capped():
            expected = "an integer from the cohort on" if scheme.capped() else "none"
            raise ConfigError("cap", self.cap, f"{expected} under {scheme.kind}")
        scheme.check(self)

    @property
    def scheme(self) -> SamplingScheme:
        return scheme_of(self.kind)

    @property
    def q(self) -> float:
        return self.scheme.q(self)

    @property
    def everyone(self) -> bool:
        return self.scheme.everyone(self)

    @property
    def hidden(self) -> bool:
        return self.scheme.hidden(self)

    @property
    def size(self) -> int | None:
        return self.scheme.size(self)

    @property
    def coins(self) -> float | None:
        return self.scheme.coins(self)

    @property
    def size_secret(self) -> bool:
        return self.scheme.size_secret(self)

    @property
    def repeats(self) -> bool:
        return self.scheme.repeats()

    def convex(self, relation: Relation) -> bool:
        """As `SamplingScheme.convex`, of the schemes of the package alone, without colluders."""
        return (
            self.colluders is None
            and self.scheme.convex(relation)
            and not is_user_defined(type(self.scheme))
        )

    @property
    def by_participation(self) -> bool:
        """Whether only the rounds that a client takes part in count, because they are public."""
        return not (self.hidden or self.everyone)

    def __str__(self) -> str:
        words = f"all {self.population}" if self.everyone else self.scheme.words(self)
        return f"{words} ({self.rule})" if self.rule else words


@dataclass(frozen=True)
class Participations:
    """What a client spends against an observer who knows the cohorts."""

    most: int  # the largest number of times that any client was drawn
    gaussians: int  # how many Gaussians that composes
    rounds: int | None = None  # out of how many; None where only a client's own rounds are counted
    repeats: bool = False  # whether a client may be drawn several times in a round

    def __str__(self) -> str:
        if self.repeats:
            return f"a client drawn at most {self.most} times"
        rounds_text = "" if self.rounds is None else f" of {self.rounds}"
        return f"a client in at most {self.most}{rounds_text} rounds"


class SamplingScheme:
    """Base of the sampling schemes. A member has no state: population, cohort and the rest are
    those of the `Sampling` that it is asked about.

    A member gives `kind` and `words`. Where a cohort is a secret it also gives `refuses`, and
    `curves` (for pld) or `renyi` (for rdp). The other defaults are those of a cohort of fixed size
    without replacement, all subsets equally likely.
    """

    kind: ClassVar[str] = ""
    # fields of a `Sampling` that `raydpfl check` tries the scheme with
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"population": 100, "cohort": 10},
        {"population": 20, "cohort": 9},
    )

    def check(self, sampling: Sampling) -> None:
        """Raises `ConfigError` for a population, cohort or p_max that the scheme cannot have."""
        if sampling.cohort > sampling.population:
            expected = f"an integer from 1 to the population of {sampling.population}"
            raise ConfigError("cohort", sampling.cohort, expected)

    def default(
        self, population: int, epoch: int | None = None, per_epoch: int | None = None
    ) -> int | None:
        """The default cohort; None: there is none."""
        return None

    def q(self, sampling: Sampling) -> float:
        """The probability that a client is in a cohort; 1 for a public cohort."""
        return sampling.cohort / sampling.population

    def everyone(self, sampling: Sampling) -> bool:
        """Whether every round takes everyone, so that nothing is amplified."""
        return sampling.cohort == sampling.population

    def hidden(self, sampling: Sampling) -> bool:
        """Whether who takes part is a secret, which amplifies privacy."""
        return not self.everyone(sampling)

    def size(self, sampling: Sampling) -> int | None:
        """The size of every cohort; None where it varies."""
        return sampling.cohort

    def coins(self, sampling: Sampling) -> float | None:
        """The probability with which each client takes part where clients are independent, so that
        the size of a cohort is a secret too; else None.
        """
        return None

    def capped(self) -> bool:
        """Whether cohorts have a `cap`."""
        return False

    def against(self, sampling: Sampling, colluders: int) -> Sampling | None:
        """The sampling against an observer with so many `colluders`; None: not covered."""
        return None

    def size_secret(self, sampling: Sampling) -> bool:
        """Whether the size of a cohort is a secret."""
        return self.coins(sampling) is not None

    def repeats(self) -> bool:
        """Whether a client may be in a cohort more than once."""
        return False

    def in_epochs(self) -> bool:
        """Whether the rounds of an epoch depend on each other, as each client takes part in
        `per_epoch` of them. `curves` are then those of an epoch.
        """
        return False

    def charged(self, sampling: Sampling, rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is composed after so many rounds, int64 [n], never too few: the number of rounds, or
        epochs, by `curves`, and 0; or 1, and the rounds of the first epoch, by `part_curves`.
        """
        return rounds, 0 * rounds

    def part_curves(
        self, sampling: Sampling, mu: float, relation: Relation, rounds: int
    ) -> tuple[CurvePair, ...]:
        """As `curves`, of the first `rounds` rounds of an epoch, as `charged` names them."""
        raise NotImplementedError

    def any_subset(self, sampling: Sampling) -> bool:
        """Whether, for its size, a cohort is a uniform subset, independent of other rounds: a run
        then checks how many clients two consecutive cohorts share.
        """
        return self.as_in_the_papers(sampling)

    def as_in_the_papers(self, sampling: Sampling) -> bool:
        """Whether cohorts have one size, and all subsets are equally likely."""
        return True

    def gives(self, method: str) -> bool:
        """Whether this scheme has a method that an accountant needs (`curves` or `renyi`)."""
        return bool(method) and getattr(type(self), method) is not getattr(SamplingScheme, method)

    def by_group_privacy(self, method: str) -> bool:
        """Whether what this method says is of a group of units, by group privacy from one."""
        return False

    def plural(self) -> str:
        """What its cohorts are called in messages."""
        return f"cohorts by sampling scheme {self.kind}"

    def words(self, sampling: Sampling) -> str:
        """The scheme in a few words, for guarantees."""
        raise NotImplementedError

    def refuses(self, relation: Relation) -> str | None:
        """Why no accountant covers it under `relation`, and the nearest that is; or None."""
        return None

    def curves(self, sampling: Sampling, mu: float, relation: Relation) -> tuple[CurvePair, ...]:
        """The privacy curves delta(epsilon), at epsilon >= 0, of one round (as
        `raydpfl.privacy.pld` has them): for each direction that differs (one under replace_one, two
        where a client is removed or added) its curve and that of the opposite one. `mu` is
        sensitivity / std of the Gaussian sum: a client moves it by 2 bounds under replace_one, else
        by one. Without this method pld does not cover the scheme.
        """
        raise NotImplementedError

    def renyi(self, sampling: Sampling, mu: float, relation: Relation) -> np.ndarray:
        """Renyi divergences of that round at `raydpfl.privacy.rdp.ORDERS`, float64 [orders];
        without this method rdp does not cover the scheme.
        """
        raise NotImplementedError

    def group_curves(
        self, sampling: Sampling, mu: float, group: int, relation: Relation
    ) -> tuple[CurvePair, ...]:
        """As `curves`, of `group` units together; by default the bound of group privacy."""
        return tuple(
            (pld.group_privacy(up, group), pld.group_privacy(down, group))
            for up, down in self.curves(sampling, mu, relation)
        )

    def amplified(
        self, sampling: Sampling, renyi: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Renyi divergences of a round of any mechanism under replace_one, as by `renyi`, from the
        function that bounds those over everyone at whole orders from 2 on; without this method rdp
        covers Gaussian sums alone.
        """
        raise NotImplementedError

    def moved(self, sampling: Sampling, relation: Relation) -> float:
        """How many `mu` a client moves a round's sum at most, whatever the cohort (docs/proofs.md,
        Sums over cohorts); infinite: unknown.
        """
        return math.inf

    def largest_loss(self, sampling: Sampling, mu: float) -> float:
        """The largest privacy loss of a round; infinite where there is none."""
        return math.inf

    def convex(self, relation: Relation) -> bool:
        """Whether `curves` are sums, with positive weights that do not depend on mu, of
        `raydpfl.privacy.gaussian_delta` at mu and any function of epsilon.
        """
        return False

    def participations(
        self, sampling: Sampling, rounds: int, max_draws: int | None
    ) -> Participations:
        """What a client spends against an observer who knows the cohorts; `max_draws`: the largest
        number of times that any was drawn, None: unknown.
        """
        times = rounds if max_draws is None else min(max_draws, rounds)
        return Participations(times, times, rounds)

    def most(self, sampling: Sampling, rounds: int, composed_rounds: int) -> tuple[int, float]:
        """For the check of a run's draws, where accountants compose `composed_rounds`: trials, and
        the largest chance of any client in one.
        """
        return composed_rounds, self.q(sampling)


class VaryingCohorts(SamplingScheme):
    """Base of schemes whose cohorts vary in size, as those of the papers do not."""

    def size(self, sampling):
        return None

    def as_in_the_papers(self, sampling):
        return False


SCHEMES: dict[str, SamplingScheme] = {}  # by name; the package's `__init__` puts them here


def scheme_of(kind: str | SamplingScheme) -> SamplingScheme:
    """The scheme of this name, or the scheme itself. Raises `ConfigError` for an unknown name."""
    if isinstance(kind, SamplingScheme):
        return kind
    if kind not in SCHEMES:
        raise ConfigError("kind", kind, f"one of {', '.join(SCHEMES)}")
    return SCHEMES[kind]
