"""What a run releases, described once, for sampler, ledger and accountants alike.

A `Release` is the description that plan, coordinator, budget and audit ask. Its members are
`Mechanism`, sums over cohorts, and `raydpfl.privacy.personal.LocalSteps`, sums over batches at
clients' local steps. Accountants are handed an `Event`: what one unit's data meet in one round.

>>> query = Query("update", bound=0.5, std=2.0)
>>> mechanism = Mechanism(Sampling("fixed", population=1920, cohort=80), (query,), rounds=100)
>>> mechanism.noise_multiplier
4.0
>>> mechanism.mu("replace_one")  # two clients trade places, so the sum moves by 2 * bound
0.5
>>> steps = Mechanism.of_local_steps(samples=600, batch=10, steps=300, bound=1.0, std=0.5)
>>> steps.noise_multiplier  # 0.5 is the std of the mean gradient
5.0
>>> Sampling("fixed", population=10, cohort=11)
Traceback (most recent call last):
raydpfl.errors.ConfigError: cohort = 11: an integer from 1 to the population of 10

Every field is public: a mechanism holds no data and no randomness. Bound and std are those of any
one round: where a bound adapts, std adapts with it, so only their ratio counts and every round is
the same event.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError
from raydpfl.own import is_own
from raydpfl.privacy import accounting, memory
from raydpfl.privacy.facts import Placement, Relation, Terms, Unit, one_of
from raydpfl.privacy.guarantee import Guarantee
from raydpfl.privacy.laws import Law, law_of
from raydpfl.privacy.places import Place, place_of


@dataclass(frozen=True)
class Query:
    """One Gaussian sum released in every round.

    `bound`: the L2 norm that one client can contribute to the sum, its weight included. `std`: the
    standard deviation of the Gaussian on each coordinate of the *sum*, in the same units; 0 means
    no noise. A count of indicators is centred first (indicator - 1/2), so its bound is 1/2.

    `apart`: every client's contribution is released on its own with noise of that std, which is
    given: `Mechanism.with_noise` leaves it as it is, and whoever sees single updates meets no less
    of it.
    """

    name: str
    bound: float
    std: float
    apart: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.bound < math.inf):
            raise ConfigError(f"{self.name}.bound", self.bound, "a positive finite number")
        if not (0 <= self.std < math.inf):
            raise ConfigError(f"{self.name}.std", self.std, "a finite number, zero or above")


@dataclass(frozen=True)
class Sampling:
    """Who takes part in a round: `cohort` of `population` (the expected number under Poisson), by a
    law of `raydpfl.privacy.laws`.

    `kind`: the name of a law, or one of one's own. `fixed`: a uniform subset of fixed size;
    `poisson`: each independently with probability cohort / population; `full`: everyone;
    `with_replacement`: `cohort` draws, uniform or with no client likelier than `p_max` at each;
    `public`: cohorts that a public rule names whatever the data are, so that only the rounds a
    client takes part in count, and `rounds` of the mechanism counts those. `rule`, in words, is
    public too: whom the population consists of, or how a public cohort came about. Raises
    `ConfigError` for numbers that the law cannot have.
    """

    kind: str | Law
    population: int
    cohort: int
    p_max: float | None = None
    rule: str = ""

    def __post_init__(self) -> None:
        law_of(self.kind)
        if not (_is_count(self.population) and self.population >= 1):
            raise ConfigError("population", self.population, "an integer, at least 1")
        if not (_is_count(self.cohort) and self.cohort >= 1):
            raise ConfigError(
                "cohort",
                self.cohort,
                f"an integer from 1 to the population of {self.population}",
            )
        if self.p_max is not None and not self.repeats:
            accepted = f"from 1/{self.population} to 1, for draws with replacement"
            raise ConfigError("p_max", self.p_max, accepted)
        self.law.check(self)

    @property
    def law(self) -> Law:
        return law_of(self.kind)

    @property
    def q(self) -> float:
        """cohort / population; 1 for a public cohort, whose rounds are a client's own."""
        return self.law.q(self)

    @property
    def everyone(self) -> bool:
        """True when every round takes everyone, whatever the scheme is called: there is nothing to
        amplify.
        """
        return self.law.everyone(self)

    @property
    def hidden(self) -> bool:
        """True when there is a secret about who takes part, which amplifies privacy against whoever
        does not know it.
        """
        return self.law.hidden(self)

    @property
    def size(self) -> int | None:
        """The size of every cohort; None where it varies."""
        return self.law.size(self)

    @property
    def coins(self) -> float | None:
        """The chance of each client's own coin; None where clients depend on each other."""
        return self.law.coins(self)

    @property
    def repeats(self) -> bool:
        """Whether a client may stand in a cohort more than once."""
        return self.law.repeats()

    @property
    def by_participation(self) -> bool:
        """True when only the rounds that a client takes part in count, as everyone knows them."""
        return not (self.hidden or self.everyone)

    def __str__(self) -> str:
        words = f"all {self.population}" if self.everyone else self.law.words(self)
        return f"{words} ({self.rule})" if self.rule else words


@dataclass(frozen=True)
class Event:
    """What accountants compose: what one round (or participation) releases about one unit.

    `each` Gaussians, every one over a sample of its own drawn by `sampling`, with `mu` =
    sensitivity / std; and, unless `also` is 0, one Gaussian of that mu over everyone.
    """

    sampling: Sampling
    mu: float
    each: int = 1
    also: float = 0.0

    def unamplified(self, counts: ArrayLike) -> np.ndarray:
        """mu float64 [counts] of the one Gaussian that `counts` events amount to, where no sample
        is a secret.
        """
        if self.each == 1 and not self.also:
            return self.mu * np.sqrt(counts)  # mu itself, unrounded
        return np.sqrt(np.asarray(counts) * (self.each * self.mu**2 + self.also**2))


class Release:
    """Base of the two descriptions of what a run releases; everything that the rest asks of one.

    The answers given here are those of sums over cohorts with nothing to say of single clients.
    """

    unit: Unit

    def digest(self) -> str:
        """Its name in the ledger and the cache."""
        raise NotImplementedError

    @property
    def private(self) -> bool:
        """Whether there is any noise to account for."""
        raise NotImplementedError

    @property
    def noise_multiplier(self) -> float | None:
        """Std of the noise on the sum / bound; None where each client has its own."""
        return None

    @property
    def largest(self) -> int:
        """How many units are protected together: the largest number that delta is held against."""
        raise NotImplementedError

    @property
    def cohorts(self) -> Sampling | None:
        """The law of the cohorts, where accountants count on it; None where they count draws."""
        return None

    @property
    def by_draws(self) -> bool:
        """Whether what is spent depends on who was drawn, client by client."""
        return self.cohorts is None

    @property
    def hidden(self) -> bool:
        """Whether accountants count on the cohort being a secret."""
        return self.cohorts is not None and self.cohorts.hidden

    @property
    def unproved(self) -> str | None:
        """Why what it guarantees is not proved, in words; None where it is."""
        return None

    def uncovered(self, accountant: str, relation: Relation) -> str | None:
        """Why an accountant does not cover it under a relation, in words; None where it does."""
        return None

    def curves(
        self,
        accountants: Sequence[str],
        draws: Sequence[ArrayLike] | None,
        exposures: np.ndarray,
        terms: Terms,
    ) -> dict[str, np.ndarray]:
        """Epsilon after each of the rounds that count, float64 [rounds], by accountant: of one
        client, or of the sample that has spent most.

        Args:
            accountants: whose curves are wanted; each has the name that `guarantees` gives it.
            draws: the clients of every release, one drawn twice standing twice; only read where
                `by_draws`.
            exposures: int64 [rounds], how many releases a guarantee composes over by each round.
            terms: relation, delta and v.
        """
        raise NotImplementedError

    def guarantees(
        self,
        participations: Mapping[int, int] | ArrayLike | None,
        accountants: Sequence[str],
        rounds: int,
        terms: Terms,
    ) -> list[Guarantee]:
        """What holds after the run, by every accountant, against each observer worth telling apart.

        Args:
            participations: how often each client was drawn; None where that is not known.
            accountants: whose guarantees are wanted.
            rounds: how many releases a guarantee composes over.
            terms: relation, delta and v.
        """
        raise NotImplementedError

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        """By query, std of the noise on the sum of a round over its bound, where `cohort` clients
        run instead of the nominal number; empty where sums have no noise.
        """
        return {}

    def client_facts(self) -> tuple[np.ndarray, ...]:
        """What it holds of each client, arrays [N]; part of the digests that noise is keyed by."""
        return ()

    def step_stds(self, clients: np.ndarray) -> np.ndarray | None:
        """Stds float64 [r] of the noise of these clients on the mean gradient of a local step;
        None where none is drawn there.
        """
        return None

    def table(
        self, participations: Mapping[int, int] | ArrayLike, accountants: Sequence[str]
    ) -> list[dict[str, Any]] | None:
        """A row for each client that took part; None where no client has a guarantee of its own."""
        return None

    def quantiles(
        self, accountant: str, participations: Mapping[int, int] | ArrayLike
    ) -> np.ndarray:
        """Epsilon float64 [5] at quantiles over the clients; [0] where none has one of its own."""
        return np.zeros(0)

    def warnings(self, participations: Mapping[int, int] | ArrayLike) -> tuple[str, ...]:
        """What a reader should know of single clients, in words."""
        return ()

    def check_claims(self, participations: Mapping[int, int] | ArrayLike) -> None:
        """Raises `BudgetError` where some client was promised more than holds."""


@dataclass(frozen=True)
class Mechanism(Release):
    """`rounds` times: sample, bound, add, noise, release. What every accountant reads, and nothing
    else.

    `unit` is whose data a guarantee protects. `placement` is who draws the noise: `server`, one
    draw on the sum; `client`, each of the r clients of a cohort draws std / sqrt(r), so that the
    sum carries std; `step`, one draw on the sum over a mini-batch at each local step (`rounds`
    counts steps, the population are samples). Against k participants who know their own noise, or
    after k dropouts, account for `with_noise(z * sqrt((r - k) / r))`. `exclusions` are the
    data-dependent choices that are not accounted for, in words. `memory` names the member by which
    a client's contribution depends on the rounds that it took part in before; empty where none does
    (see `raydpfl.privacy.memory`); with `remembers_noise` that is what it sent, the noise that it
    drew on it included, of which an observer sees only the sum.
    """

    sampling: Sampling
    queries: tuple[Query, ...]
    rounds: int
    unit: Unit = "client"
    placement: Placement = "server"
    exclusions: tuple[str, ...] = ()
    memory: str = ""
    remembers_noise: bool = False

    def __post_init__(self) -> None:
        one_of("placement", self.placement, Placement)
        one_of("unit", self.unit, Unit)
        if not (_is_count(self.rounds) and self.rounds >= 1):
            raise ConfigError("rounds", self.rounds, "an integer, at least 1")
        if not self.queries:
            raise ConfigError("queries", self.queries, "at least one query")
        if all(query.apart for query in self.queries):
            raise ConfigError("queries", self.queries, "at least one query of a sum")
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "exclusions", tuple(self.exclusions))

    @classmethod
    def of_local_steps(
        cls,
        *,
        samples: int,
        batch: int,
        steps: int,
        bound: float,
        std: float,
        exclusions: tuple[str, ...] = (),
    ) -> Mechanism:
        """One client's DP-SGD (002, 003; PRIVACY.md sec. 2): `steps` fresh mini-batches of `batch`
        of its `samples`.

        `bound` is the per-sample clip norm, `std` that of the noise on the *mean* gradient of a
        batch; `steps` is the realised number over the whole run. Shuffled epochs are not this
        mechanism.
        """
        queries = (Query("gradient", bound, batch * std),)
        return cls(
            Sampling("fixed", samples, batch),
            queries,
            steps,
            unit="sample",
            placement="step",
            exclusions=exclusions,
        )

    @property
    def private(self) -> bool:
        """False when a query carries no noise."""
        return all(query.std > 0 for query in self.queries)

    @property
    def noise_multiplier(self) -> float:
        """z, std of the sum / bound, of the single Gaussian that the sums of a round amount to:
        1/z^2 = sum (bound/std)^2. None of `apart`.
        """
        return _together(query for query in self.queries if not query.apart)

    def mu(self, relation: Relation) -> float:
        """Sensitivity / std, all queries of a round together, those `apart` too: k / z, with k = 2
        under replace-one and 1 otherwise.
        """
        one_of("relation", relation, Relation)
        return (
            (2 if relation == "replace_one" else 1) / _together(self.queries)
            if self.private
            else math.inf
        )

    @property
    def place(self) -> Place:
        return place_of(self.placement)

    @property
    def largest(self) -> int:
        return self.sampling.population

    @property
    def cohorts(self) -> Sampling:
        return self.sampling

    @property
    def unproved(self) -> str | None:
        return memory.unproved(self)

    def uncovered(self, accountant: str, relation: Relation) -> str | None:
        return accounting.covers(accountant, self, relation)

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        scale = cohort / self.sampling.cohort
        sums = (query for query in self.queries if not query.apart)
        return {query.name: query.std / query.bound * scale for query in sums}

    def event(self, relation: Relation) -> Event:
        """What accountants compose over the rounds."""
        return Event(self.sampling, self.mu(relation))

    def curves(
        self,
        accountants: Sequence[str],
        draws: Sequence[ArrayLike] | None,
        exposures: np.ndarray,
        terms: Terms,
    ) -> dict[str, np.ndarray]:
        """As `Release.curves`; infinite by an accountant that does not cover this."""
        most = max(int(exposures[-1]), 1)
        found = {name: np.full(len(exposures), np.inf) for name in accountants}
        for name in accountants:
            if self.uncovered(name, terms.relation):
                continue
            curve = accounting.epsilon_curve(
                self, terms.relation, terms.delta, most, name, v=terms.v
            )
            found[name] = np.concatenate([[0.0], curve])[exposures]
        return found

    def guarantees(
        self,
        participations: Mapping[int, int] | ArrayLike | None,
        accountants: Sequence[str],
        rounds: int,
        terms: Terms,
    ) -> list[Guarantee]:
        most = None
        if isinstance(participations, Mapping):
            most = max(participations.values(), default=0)
        elif participations is not None:
            most = int(np.max(participations, initial=0))
        return accounting.guarantees(
            self,
            terms.relation,
            terms.delta,
            rounds,
            accountants,
            participations=most,
            v=terms.v,
        )

    def unsampled(self) -> Mechanism:
        """The same mechanism as one meets it who knows the cohorts: everyone in every round."""
        everyone = Sampling("full", self.sampling.population, self.sampling.population)
        return replace(self, sampling=everyone)

    def with_noise(self, multiplier: float) -> Mechanism:
        """The same mechanism at this noise multiplier (std of the sum / bound): every std scaled by
        one factor, but for queries `apart`.

        A mechanism that has no noise yet gets equal shares: each of k queries std = sqrt(k) z
        bound.
        """
        if not (0 <= multiplier < math.inf):
            raise ConfigError("multiplier", multiplier, "a finite number, zero or above")
        sums = [query for query in self.queries if not query.apart]
        now = self.noise_multiplier
        if not now and any(query.std for query in sums):
            bare = next(query for query in sums if query.std == 0)
            raise ConfigError(f"{bare.name}.std", bare.std, "noise on every query, or on none")

        def scaled(query: Query) -> Query:
            if query.apart:
                return query
            if now:
                return replace(query, std=query.std * multiplier / now)
            return replace(query, std=math.sqrt(len(sums)) * multiplier * query.bound)

        return replace(self, queries=tuple(map(scaled, self.queries)))

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of all fields: its name in the ledger and the cache.

        `p_max`, `rule`, `apart`, `memory` and `remembers_noise` are left out where there are none.
        A sampling law of a user's own stands there by its words too.
        """
        tree = asdict(self)
        law = self.sampling.law
        tree["sampling"]["kind"] = law.kind
        if is_own(type(law)):
            tree["sampling"]["law"] = law.words(self.sampling)
        if not self.memory:
            del tree["memory"]
        if not self.remembers_noise:
            del tree["remembers_noise"]
        tree["queries"] = [
            {name: value for name, value in query.items() if value is not False}
            for query in tree["queries"]
        ]
        tree["sampling"] = {
            name: value for name, value in tree["sampling"].items() if value not in (None, "")
        }
        return hashlib.sha256(
            json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
        ).hexdigest()


def _together(queries: Iterable[Query]) -> float:
    """std / bound of the single Gaussian that Gaussian queries amount to; 0 when one of them has no
    noise.
    """
    queries = tuple(queries)
    return (
        1 / math.sqrt(sum((query.bound / query.std) ** 2 for query in queries))
        if all(query.std > 0 for query in queries)
        else 0.0
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
