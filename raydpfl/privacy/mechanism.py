"""What a run releases, described once, for sampler, ledger and accountants alike; all of it is
public. A `Release` is a `Mechanism`, sums over cohorts, or `LocalSteps`, a mechanism per client.
Accountants compose its `Event`.

>>> query = Query("update", bound=0.5, std=2.0)
>>> mechanism = Mechanism(Sampling("fixed", population=1920, cohort=80), (query,), rounds=100)
>>> mechanism.noise_multiplier
4.0
>>> mechanism.mu("replace_one")  # two clients trade places, so the sum moves by 2 * bound
0.5
>>> survey = Survey("accuracy", std=20.0, clients=300, times=10)
>>> round(survey.mu("replace_one"), 4)  # 10 Gaussians of sensitivity sqrt(2) and std 20, together
0.2236
>>> print(survey)
10 noisy histograms of the accuracy of all clients

Where a bound adapts, std adapts with it: every round is the same event.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy.group import GroupSampling, group_sampling
from raydpfl.privacy.integer_noise import IntegerNoise, SkellamLoss
from raydpfl.privacy.laplace import laplace_sampling
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.types import Placement, Relation, Unit, is_count, one_of


@dataclass(frozen=True)
class Query:
    """One Gaussian sum that every round releases. Raises `ConfigError` for a bound that is not
    positive and finite, or a std that is negative or infinite.
    """

    name: str  # in messages and in the ledger
    # the largest L2 norm that one client can add to the sum, its weight included; of a centred
    # count (indicator - 1/2) it is 1/2
    bound: float
    std: float  # of the noise on a coordinate of the *sum*, in the units of `bound`; 0: no noise
    # whether each client's contribution is released by itself, with noise of this std, which
    # `Mechanism.with_noise` leaves as it is
    per_client: bool = False

    def __post_init__(self) -> None:
        if not (0 < self.bound < math.inf):
            raise ConfigError(f"{self.name}.bound", self.bound, "a positive finite number")
        if not (0 <= self.std < math.inf):
            raise ConfigError(f"{self.name}.std", self.std, "a finite number, zero or above")


@dataclass(frozen=True)
class Survey:
    """A histogram over all clients of a score, released after some of the rounds; nothing is
    amplified, as everyone answers. A client is in one bin or none: one that is there or not moves
    one count by 1, one that is replaced moves two counts, a distance of sqrt(2).
    """

    name: str  # of the score, in messages, guarantees and the ledger
    std: float  # of the noise on a count, in clients; positive and finite, else `ConfigError`
    clients: int = 1  # who are asked, and draw the noise where clients do
    times: int = 0  # how many of these are composed with the rounds

    def __post_init__(self) -> None:
        if not (0 < self.std < math.inf):
            raise ConfigError(f"{self.name}.std", self.std, "a positive finite number")

    def mu(self, relation: Relation) -> float:
        """Sensitivity / std of the one Gaussian that all `times` amount to."""
        moves = math.sqrt(2.0) if relation == "replace_one" else 1.0
        return moves / self.std * math.sqrt(self.times)

    def single_answer(self) -> Survey:
        """What an observer of single answers sees, where clients draw their parts of the noise."""
        return replace(self, std=self.std / math.sqrt(self.clients), clients=1)

    def __str__(self) -> str:
        histograms = "histogram" if self.times == 1 else "histograms"
        return f"{self.times} noisy {histograms} of the {self.name} of all clients"


@dataclass(frozen=True)
class Event:
    """What accountants compose: what one round (or participation) releases about one unit."""

    sampling: Sampling  # of its Gaussians
    mu: float  # sensitivity / std of one of these Gaussians; both of the sum
    gaussians: int = 1  # how many there are, over a fresh sample each
    also: float = 0.0  # mu of one more Gaussian, over everyone; 0: there is none
    once: float = 0.0  # mu of a Gaussian over everyone released once for all events; 0: none
    relation: Relation = "replace_one"
    skellam: SkellamLoss | None = None  # of noise that is no Gaussian; `mu` is of its variance
    # how many independent events 1, 2, ... with correlated noise amount to; empty: as many
    squares: tuple[float, ...] = ()
    # mu of the first, second, ... event where these differ; `mu` is then the largest of them, and
    # that of any event beyond
    mus: tuple[float, ...] = ()

    def effective_counts(self, counts: ArrayLike) -> np.ndarray:
        """How many events with independent noise `counts` amount to where no sample is a secret,
        float64 [...]; more than `squares` has are bounded by Cauchy and Schwarz, in groups.
        """
        counts = np.asarray(counts)
        if not self.squares:
            return counts
        squares = np.array((0.0, *self.squares))
        size = len(self.squares)
        bound = np.ceil(counts / size) * counts * (squares[1:] / np.arange(1, size + 1)).max()
        return np.where(counts > size, bound, squares[np.minimum(counts, size)])

    @property
    def convex(self) -> bool:
        """See `SamplingScheme.convex`."""
        return self.sampling.convex(self.relation)

    def events_by_mu(self, count: int) -> list[tuple[Event, int]]:
        """The first `count` events as events of one kind each, and how many these are."""
        if not self.mus:
            return [(self, count)]
        kinds, counts = np.unique(self.first(count), return_counts=True)
        return [
            (replace(self, mu=mu, mus=(), once=0.0 if place else self.once), n)
            for place, (mu, n) in enumerate(zip(kinds.tolist(), counts.tolist(), strict=True))
        ]

    def first(self, count: int) -> np.ndarray:
        """mu of each of the first `count` events, float64 [count]."""
        given_mus = np.array(self.mus[:count])
        return np.append(given_mus, np.full(count - len(given_mus), self.mu))

    def unamplified(self, counts: ArrayLike) -> np.ndarray:
        """mu of the single Gaussian that `counts` events amount to where no sample is a secret,
        float64 [...]: sqrt(n (gaussians mu^2 + also^2) + once^2) for n `effective_counts`.
        """
        if self.mus:
            squares = np.append(0.0, np.square(self.first(int(np.max(counts)))).cumsum())
            return np.sqrt(squares[np.asarray(counts)] + self.once**2)
        counts = self.effective_counts(counts)
        if self.gaussians == 1 and not self.also and not self.once:
            return self.mu * np.sqrt(counts)  # mu itself, unrounded
        square = self.gaussians * self.mu**2 + self.also**2
        return np.sqrt(np.asarray(counts) * square + self.once**2)

    def mu_bound(self, counts: ArrayLike) -> np.ndarray:
        """As `unamplified` over any cohorts, where samples are secrets; infinite: unknown."""
        scheme, counts = self.sampling.scheme, np.asarray(counts)
        factor = scheme.moved(self.sampling, self.relation)
        if math.isinf(factor):
            return np.full(counts.shape, math.inf)
        event = replace(self, mu=factor * self.mu, mus=tuple(factor * mu for mu in self.mus))
        # of an epoch a client is in `per_epoch` rounds
        times, _ = scheme.charged(self.sampling, counts)
        return event.unamplified(np.minimum(counts, times * (self.sampling.per_epoch or 1)))


@dataclass(frozen=True)
class Mechanism:
    """`rounds` times: sample, bound, sum, add noise, release. After k dropouts of clients with
    their noise, account for `with_noise(z * sqrt((r - k) / r))`. `ConfigError` for a field out of
    range.

    Args:
        sampling, queries: who takes part in a round, and the sums that it releases.
        rounds: how many rounds are composed.
        unit: whose data a guarantee protects.
        placement: who draws the noise. `server`: one draw on the sum. `client`: each of the r
            clients of a cohort draws std / sqrt(r). `step`: one draw on the sum over a batch, at
            every local step; `rounds` then counts steps, and the population is a client's samples.
        exclusions: data-dependent choices that are not accounted for, in words.
        stateful: the kind of the member by which a client's contribution depends on its earlier
            rounds; empty: none does (docs/proofs.md).
        noise_in_state: whether a client's state holds what it sent with the noise that it drew.
        survey: what all clients also answer; None: nothing.
        colluders: clients who tell an observer whether they took part and which noise they drew
            (`raydpfl.privacy.accounting.views`); where clients draw it, and cohorts are known or of
            fixed size.
        squares: where the noise on the first query is correlated over the rounds, the squared
            sensitivity of 1, 2, ... participations of a client, in bounds, z being the noise that
            is correlated (`raydpfl.privacy.factorization`), and `rounds` the participations.
        integer: how sums of integers are taken, and their noise; None: noise is Gaussian.
        laplace: whether noise is Laplace, on the sum of one query with an L1 bound.
        factors: std of the noise on the sums of the first, second, ... round over that of
            `queries`, above 0; empty: 1 in all. Rounds beyond them have the smallest.
        turns: whether a client can be in some rounds alone, as cohorts that take turns; the rounds
            that are composed are then taken to be those with the least noise.
    """

    sampling: Sampling
    queries: tuple[Query, ...]
    rounds: int
    unit: Unit = "client"
    placement: Placement = "server"
    exclusions: tuple[str, ...] = ()
    stateful: str = ""
    noise_in_state: bool = False
    survey: Survey | None = None
    squares: tuple[float, ...] = ()
    integer: IntegerNoise | None = None
    factors: tuple[float, ...] = ()
    laplace: bool = False
    colluders: int = 0
    turns: bool = False

    # what `LocalSteps` has otherwise, which see
    by_draws: ClassVar[bool] = False
    stds: ClassVar[np.ndarray | None] = None

    def __post_init__(self) -> None:
        one_of("placement", self.placement, Placement)
        one_of("unit", self.unit, Unit)
        if not (is_count(self.rounds) and self.rounds >= 1):
            raise ConfigError("rounds", self.rounds, "an integer, at least 1")
        if not self.queries:
            raise ConfigError("queries", self.queries, "at least one query")
        if all(query.per_client for query in self.queries):
            raise ConfigError("queries", self.queries, "at least one query of a sum")
        if not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError("factors", self.factors, "positive finite numbers, one a round")
        is_elsewhere = {"server": False}.get(self.placement, True)
        if self.laplace and (len(self.queries) > 1 or self.survey or is_elsewhere):
            expected = "false, or one query, no survey, and noise that the server draws"
            raise ConfigError("laplace", True, expected)
        factors_differ = any(factor != 1 for factor in self.factors)
        object.__setattr__(self, "factors", tuple(self.factors) if factors_differ else ())
        if self.colluders:
            self._check_colluders()
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "exclusions", tuple(self.exclusions))

    def _check_colluders(self) -> None:
        sampling = self.sampling
        if not (is_count(self.colluders) and 0 < self.colluders < sampling.population):
            expected = f"an integer from 0, below the {sampling.population} clients"
            raise ConfigError("colluders", self.colluders, expected)
        if not self.distributed or self.integer:
            expected = "0 where clients do not draw Gaussian noise on sums"
            raise ConfigError("colluders", self.colluders, expected)
        if sampling.hidden and sampling.scheme.against(sampling, self.colluders) is None:
            expected = f"0 with {sampling}; cohorts that all know, or of a fixed size, are covered"
            raise ConfigError("colluders", self.colluders, expected)

    def with_colluders(self, known_cohorts: bool) -> Mechanism:
        """What an observer with the `colluders` sees: of hidden cohorts how many of them took part,
        of known ones as many as may be there with a client.
        """
        k, r = self.colluders, self.sampling.cohort
        survey = self.survey
        if survey:
            remaining_share = max(survey.clients - k, 1) / survey.clients
            survey = replace(survey, std=survey.std * math.sqrt(remaining_share))
        release = replace(self, survey=survey, colluders=0)
        if self.sampling.hidden and not known_cohorts:
            sampling = self.sampling.scheme.against(self.sampling, k)
            assert sampling is not None
            return replace(release, sampling=sampling)
        return release.with_noise(self.noise_multiplier * math.sqrt((r - min(k, r - 1)) / r))

    @property
    def private(self) -> bool:
        """Whether every query has noise, of a size that a guarantee is known for."""
        noisy = all(query.std > 0 for query in self.queries)
        if not (noisy and self.integer):
            return noisy
        return self.integer.reaches(self.noise_multiplier, self._times)

    @property
    def sums(self) -> tuple[Query, ...]:
        """The queries that are not released per client."""
        return tuple(query for query in self.queries if not query.per_client)

    @property
    def noise_multiplier(self) -> float:
        """z of the Gaussian that a round's sums amount to, 1/z^2 = sum of (bound / std)^2, or 0."""
        return _joint_multiplier(self.sums)

    def mu(self, relation: Relation) -> float:
        """Sensitivity / std of a round, all queries together: k / z, k = 2 under replace_one, else
        1; infinite without noise.
        """
        if not self.private:
            return math.inf
        if self.integer:
            return self.integer.mu(self._sensitivity(relation), self.noise_multiplier, self._times)
        return self._sensitivity(relation) / _joint_multiplier(self.queries)

    @property
    def _times(self) -> int:
        """The sensitivities up to which curves go: of draws, or of an absent client's place too."""
        return self.sampling.cohort if self.sampling.repeats else 2

    def _sensitivity(self, relation: Relation) -> int:
        return 2 if relation == "replace_one" else 1

    @property
    def largest(self) -> int:
        """The largest number of units protected together; delta should be below its inverse."""
        return self.sampling.population

    @property
    def cohorts(self) -> Sampling:
        """The sampling that accountants rely on."""
        return self.sampling

    @property
    def hidden(self) -> bool:
        """Whether accountants rely on the cohort being a secret."""
        return self.sampling.hidden

    def client_columns(self) -> Mapping[str, np.ndarray]:
        return {}

    @property
    def proof_gap(self) -> str | None:
        """Why sums of clients with state have no proof (docs/proofs.md); None: they have."""
        reasons = []
        if self.stateful and self.sampling.hidden and self.sampling.coins is None:
            reasons.append(
                "that a hidden cohort amplifies privacy is proved for clients without state, or "
                f"under Poisson; {self.stateful} has state"
            )
        if self.noise_in_state:
            reasons.append(
                "that the noise of all protects a client in their sum is proved where no client's "
                f"state holds its own; with {self.stateful} each does"
            )
        return ", and ".join(reasons) or None

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        """Std of the noise on a round's sum / bound, by query, where `cohort` clients run."""
        scale = cohort / self.sampling.cohort
        return {query.name: query.std / query.bound * scale for query in self.sums}

    def event(self, relation: Relation) -> Event:
        """What accountants compose under this relation: one round, and all surveys once. Where not
        all rounds are a client's, or the rounds of an epoch depend on each other, they are taken to
        have the least noise of any.
        """
        survey_mu = self.survey.mu(relation) if self.survey else 0.0
        loss = None
        if self.integer:
            loss = self.integer.skellam_loss(self._sensitivity(relation), self.noise_multiplier)
        sampling = laplace_sampling(self.sampling) if self.laplace else self.sampling
        event = Event(sampling, self.mu(relation), once=survey_mu, relation=relation, skellam=loss)
        if self.factors and self.private:
            is_any_round = self.sampling.by_participation or self.turns
            factors = sorted(self.factors) if is_any_round else self.factors
            client_queries = [query for query in self.queries if query.per_client]
            per_client_inverse = sum((query.bound / query.std) ** 2 for query in client_queries)
            inverse = (self.noise_multiplier * np.array(factors)) ** -2 + per_client_inverse
            mus = self._sensitivity(relation) * np.sqrt(inverse)
            event = replace(event, mu=float(mus.max()))
            # a larger mu dominates (docs/proofs.md, Random allocation)
            return event if self.sampling.epoch else replace(event, mus=tuple(mus.tolist()))
        if not (self.squares and self.private):
            return event
        # the other queries of a round have noise of their own
        first_query = self.queries[0]
        share = (first_query.bound / first_query.std * _joint_multiplier(self.queries)) ** 2
        squares = enumerate(self.squares, 1)
        return replace(event, squares=tuple(share * s + (1 - share) * n for n, s in squares))

    def restarted_release(self, max_participations: int) -> Mechanism:
        """The same for a run that was restarted with fresh noise, where the participations of a
        client, at most `max_participations`, may be of different segments.
        """
        costliest = max((s / n for n, s in enumerate(self.squares, 1)), default=0.0)
        counts = range(1, max_participations + 1) if self.squares else ()
        return replace(self, squares=tuple(costliest * n for n in counts))

    @property
    def min_multiplier(self) -> float:
        """`noise_multiplier` of the round with least noise."""
        return self.noise_multiplier * min(self.factors, default=1.0)

    def with_surveys(self, times: int) -> Mechanism:
        """The same mechanism, with its survey released so many times; itself without one."""
        return replace(self, survey=replace(self.survey, times=times)) if self.survey else self

    @property
    def distributed(self) -> bool:
        """Whether each client of a cohort draws its part of the noise on a sum."""
        return {"client": True}.get(self.placement, False)

    @property
    def draws(self) -> float:
        """Std of the noise on the sum / std of one draw: sqrt(r) where r clients draw it, B where a
        client draws it on the mean of a batch, else 1.
        """
        r = self.sampling.cohort
        return {"server": 1.0, "client": math.sqrt(r), "step": float(r)}[self.placement]

    def refuses(self, relation: Relation) -> str | None:
        """Why no accountant covers noise drawn where it is, and the nearest that is; or None."""
        if self.stateful and relation == "replace_one" and self.sampling.coins is not None:
            coverage = "covered where a client may be absent, nearest: zero_out or add_remove"
            return f"clients with state ({self.stateful}) in a Poisson cohort are {coverage}"
        if self.sampling.colluders and relation == "add_remove":
            reason = "colluders know how many of them were drawn, which tells whether a client is"
            return f"{reason} there; nearest: zero_out or replace_one"
        if not self.distributed:
            return None
        nearest = "nearest: noise.placement server"
        if self.sampling.size_secret:
            reason = "has a std that depends on the secret size of a cohort"
            return f"noise drawn by the clients {reason}; {nearest}"
        if relation == "add_remove" and (self.survey or not self.sampling.hidden):
            reason = "comes and goes with a client under add_remove"
            return f"noise drawn by the clients {reason}; {nearest}, or replace_one"
        return None

    def with_known_cohorts(self) -> Mechanism:
        """The same mechanism for an observer who knows the cohorts: everyone in every round. What
        has no proof where they are hidden is no exclusion here.
        """
        everyone = Sampling("full", self.sampling.population, self.sampling.population)
        # which rounds a client is in is not known: those with the least noise come first, and all
        # draws of a client may be of one
        factors = self.factors if self.sampling.everyone else sorted(self.factors)
        factors = factors[:1] if self.sampling.repeats else factors
        exclusions = tuple(words for words in self.exclusions if words != self.proof_gap)
        return replace(self, sampling=everyone, factors=tuple(factors), exclusions=exclusions)

    def person_mechanism(self, group: int) -> Mechanism:
        """The same for `group` units of the population together, from 1 to all, of one person."""
        if not (is_count(group) and 1 <= group <= self.sampling.population):
            expected = f"an integer from 1 to the {self.sampling.population} samples"
            raise ConfigError("person", group, expected)
        if self.sampling.cap or self.sampling.epoch:
            expected = f"none with sampling {self.sampling.scheme.kind}: together samples are "
            expected += "covered if fixed, poisson, full or with_replacement"
            raise ConfigError("person", group, expected)
        sampling, factor = group_sampling(self.sampling, group)
        queries = [replace(query, bound=factor * query.bound) for query in self.queries]
        return replace(self, sampling=sampling, queries=tuple(queries), unit="person")

    def with_noise(self, multiplier: float) -> Mechanism:
        """The same mechanism at another noise multiplier: every std of `sums` is scaled alike, or,
        without noise yet, is sqrt(k) z bound for k sums. Raises `ConfigError` if z is negative or
        infinite, or only some queries have noise.
        """
        if not (0 <= multiplier < math.inf):
            raise ConfigError("multiplier", multiplier, "a finite number, zero or above")
        sums = self.sums
        current_multiplier = self.noise_multiplier
        if not current_multiplier and any(query.std for query in sums):
            bare = next(query for query in sums if query.std == 0)
            raise ConfigError(f"{bare.name}.std", bare.std, "noise on every query, or on none")

        def scale_query(query: Query) -> Query:
            if query.per_client:
                return query
            if current_multiplier:
                return replace(query, std=query.std * multiplier / current_multiplier)
            return replace(query, std=math.sqrt(len(sums)) * multiplier * query.bound)

        return replace(self, queries=tuple(map(scale_query, self.queries)))

    def seen(self, share: float) -> Mechanism:
        """The same for an observer to whom this share of the std of the noise is unknown."""
        release = self.with_noise(self.noise_multiplier * share)
        return replace(release, integer=self.integer.seen(share)) if self.integer else release

    def round_digest(self) -> str:
        """The digest of one round, the same for runs that differ in their number of rounds."""
        return replace(self.with_surveys(0), rounds=1, squares=(), factors=()).digest()

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of the fields that are set, in hexadecimal. The keys are
        part of every run's noise: add, never rename.
        """
        sampling = asdict(self.sampling)
        scheme = self.sampling.scheme
        sampling["kind"] = scheme.kind
        if isinstance(scheme, GroupSampling):
            sampling["group"] = [scheme.scheme.kind, scheme.group]
        if is_user_defined(type(scheme)):
            sampling["law"] = scheme.words(self.sampling)
        tree = {
            "sampling": {key: value for key, value in sampling.items() if value not in (None, "")},
            "queries": [
                {"name": query.name, "bound": query.bound, "std": query.std}
                | ({"apart": True} if query.per_client else {})
                for query in self.queries
            ],
            "rounds": self.rounds,
            "unit": self.unit,
            "placement": self.placement,
            "exclusions": self.exclusions,
        }
        options = {
            "memory": self.stateful,
            "remembers_noise": self.noise_in_state,
            "survey": self.survey and asdict(self.survey),
            "squares": self.squares,
            "integer": self.integer and [type(self.integer).__name__, asdict(self.integer)],
            "factors": self.factors,
            "laplace": self.laplace,
        }
        tree |= {name: value for name, value in options.items() if value}
        text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _joint_multiplier(queries: Sequence[Query]) -> float:
    """std / bound of the single Gaussian that these queries amount to; 0 if one has no noise."""
    if any(query.std == 0 for query in queries):
        return 0.0
    return 1 / math.sqrt(sum((query.bound / query.std) ** 2 for query in queries))
