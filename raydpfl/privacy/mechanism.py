"""What a run releases, described once, for sampler, ledger and accountants alike.

A `Release` is the description that plan, coordinator, budget and audit ask. There are two:
`Mechanism`, sums over cohorts, and `raydpfl.privacy.local_steps.LocalSteps`, sums over batches at
clients' local steps. Accountants are given an `Event`: what one round releases about one unit.

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
raydpfl.errors.ConfigError: cohort = 11: expected an integer from 1 to the population of 10

Every field is public: a mechanism holds no data and no randomness. Bound and std are those of any
round. Where a bound adapts, std adapts with it: only their ratio counts, and every round is the
same event.
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

from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.privacy import accounting, stateful_clients
from raydpfl.privacy.guarantee import Guarantee
from raydpfl.privacy.histogram_query import Survey
from raydpfl.privacy.observers import Place, place_of
from raydpfl.privacy.sampling import Law, law_of
from raydpfl.privacy.types import Placement, Relation, Terms, Unit, one_of

_GROUPS = 32  # numbers of surveys that a curve tells apart


@dataclass(frozen=True)
class Query:
    """One Gaussian sum that every round releases.

    Args:
        name: of the sum, in messages and in the ledger.
        bound: the largest L2 norm that one client can add to the sum, its weight included. A count
            of indicators is centred first (indicator - 1/2), so its bound is 1/2.
        std: of the noise on each coordinate of the *sum*, in the units of `bound`; 0: no noise.
        apart: whether each client's contribution is released by itself, with noise of this std.
            `Mechanism.with_noise` leaves that std as it is, and an observer of single updates sees
            the same noise.

    Raises:
        ConfigError: the bound is not positive and finite, or the std is negative or infinite.
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
    """Who takes part in a round.

    Args:
        kind: a sampling law (`raydpfl.privacy.sampling`), by name, or an object of your own `Law`:

            - `fixed`: a uniform subset of fixed size;
            - `poisson`: each client independently, with probability cohort / population;
            - `full`: everyone;
            - `with_replacement`: `cohort` draws, uniform or with no client likelier than `p_max`;
            - `public`: cohorts named by a public rule, whatever the data are. Only the rounds that
              a client takes part in count, and the mechanism's `rounds` is their number.
        population: clients (or samples) to draw from.
        cohort: how many take part; the expected number under `poisson`.
        p_max: the largest probability of any client at one draw; None: draws are uniform.
        rule: in words, how the population or a public cohort came about. It is public too.

    Raises:
        ConfigError: the law cannot have these numbers.
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
            expected = f"a number from 1/{self.population} to 1, for draws with replacement"
            raise ConfigError("p_max", self.p_max, expected)
        self.law.check(self)

    @property
    def law(self) -> Law:
        return law_of(self.kind)

    @property
    def q(self) -> float:
        """The probability that a client is in a cohort: cohort / population, and 1 for a public
        cohort, where only the client's own rounds count.
        """
        return self.law.q(self)

    @property
    def everyone(self) -> bool:
        """Whether every round takes everyone, whatever the law is called: nothing is amplified."""
        return self.law.everyone(self)

    @property
    def hidden(self) -> bool:
        """Whether who takes part is a secret, which amplifies privacy against an observer who does
        not know it.
        """
        return self.law.hidden(self)

    @property
    def size(self) -> int | None:
        """The size of every cohort; None where it varies."""
        return self.law.size(self)

    @property
    def coins(self) -> float | None:
        """The probability with which each client takes part, independently of the others; None
        where clients are not independent.
        """
        return self.law.coins(self)

    @property
    def repeats(self) -> bool:
        """Whether a client may be in a cohort more than once."""
        return self.law.repeats()

    @property
    def by_participation(self) -> bool:
        """Whether only the rounds that a client takes part in count, because they are public."""
        return not (self.hidden or self.everyone)

    def __str__(self) -> str:
        words = f"all {self.population}" if self.everyone else self.law.words(self)
        return f"{words} ({self.rule})" if self.rule else words


@dataclass(frozen=True)
class Event:
    """What accountants compose: what one round (or participation) releases about one unit.

    Args:
        sampling: the law of the sample that each Gaussian is taken over.
        mu: sensitivity / std of each of these Gaussians; both of the sum.
        each: how many Gaussians there are, each over a fresh sample.
        also: mu of one more Gaussian, over everyone; 0: there is none.
        once: mu of a Gaussian over everyone that is released once besides, however many events
            there are (`Survey`); 0: there is none.
    """

    sampling: Sampling
    mu: float
    each: int = 1
    also: float = 0.0
    once: float = 0.0

    def unamplified(self, counts: ArrayLike) -> np.ndarray:
        """mu of the single Gaussian that `counts` events amount to where no sample is a secret,
        float64 with the shape of `counts`: sqrt(counts (each mu^2 + also^2) + once^2).
        """
        if self.each == 1 and not self.also and not self.once:
            return self.mu * np.sqrt(counts)  # mu itself, unrounded
        own = self.each * self.mu**2 + self.also**2
        return np.sqrt(np.asarray(counts) * own + self.once**2)


class Release:
    """Base of the two descriptions of what a run releases.

    The defaults suit sums over cohorts, which have nothing to say of single clients.
    """

    unit: Unit
    survey: Survey | None = None  # what all clients are asked for besides; None: nothing

    def digest(self) -> str:
        """Its name in the ledger and in the cache: a SHA-256, in hexadecimal."""
        raise NotImplementedError

    def round_digest(self) -> str:
        """The same of one round: runs have it that differ in their number of rounds alone."""
        return self.digest()

    @property
    def private(self) -> bool:
        """Whether there is any noise to account for."""
        raise NotImplementedError

    @property
    def noise_multiplier(self) -> float | None:
        """Std of the noise on the sum / bound; None where each client has noise of its own."""
        return None

    @property
    def largest(self) -> int:
        """The largest number of units that are protected together; delta should be below its
        inverse.
        """
        raise NotImplementedError

    @property
    def cohorts(self) -> Sampling | None:
        """The law of the cohorts, if accountants rely on it; None if they count draws instead."""
        return None

    @property
    def by_draws(self) -> bool:
        """Whether what is spent is counted client by client, from the rounds that each was drawn
        in.
        """
        return self.cohorts is None

    @property
    def hidden(self) -> bool:
        """Whether accountants rely on the cohort being a secret."""
        return self.cohorts is not None and self.cohorts.hidden

    @property
    def unproved(self) -> str | None:
        """Why its guarantees are not proved, in words; None: they are."""
        return None

    def uncovered(self, accountant: str, relation: Relation) -> str | None:
        """Why an accountant does not cover it under a relation, in words; None: it does."""
        return None

    def curves(
        self,
        accountants: Sequence[str],
        draws: Sequence[ArrayLike] | None,
        exposures: np.ndarray,
        terms: Terms,
        surveys: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Epsilon after each round, by every accountant.

        Args:
            accountants: their names.
            draws: for every release its clients, int64, a client drawn twice listed twice; only
                read if `by_draws` or `unproved`. The last of them are the rounds of `exposures`.
            exposures: int64 [rounds], the number of releases composed after each round.
            terms: relation, delta and v.
            surveys: int64 [rounds], how often all clients were asked until then; None: never.

        Returns:
            By accountant (named as in `guarantees`), epsilon float64 [rounds]: of any client, or of
            the sample that has spent most.
        """
        raise NotImplementedError

    def guarantees(
        self,
        participations: Mapping[int, int] | ArrayLike | None,
        accountants: Sequence[str],
        rounds: int,
        terms: Terms,
        surveys: int = 0,
    ) -> list[Guarantee]:
        """What holds after the run, by every accountant and against every observer that differs.

        Args:
            participations: how often each client was drawn, by id or int64 [N]; None: unknown.
            accountants: their names.
            rounds: the number of releases composed.
            terms: relation, delta and v.
            surveys: how often all clients were asked besides.
        """
        raise NotImplementedError

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        """Std of the noise on a round's sum / bound, by query; empty where sums have no noise.

        Args:
            cohort: the number of clients that run. The noise is scaled by it over the nominal
                number, which differs under a virtual cohort.
        """
        return {}

    def client_facts(self) -> tuple[np.ndarray, ...]:
        """What it knows of each client, arrays [N]; part of the digest that noise is keyed by."""
        return ()

    def of_clients(self) -> Mapping[str, np.ndarray]:
        """What is public of each client's privacy, float64 [N] by name: `budget`, the epsilon it
        was promised, infinite for a public client; `noise_std`, that of the noise on the mean
        gradient of its local steps; `variance`, V_k of 003. Empty where clients have none of it.
        """
        return {}

    def step_stds(self, clients: np.ndarray) -> np.ndarray | None:
        """Std of each client's noise on the mean gradient of a local step, float64 [r] for clients
        int64 [r]; None where no noise is drawn there.
        """
        return None

    def table(
        self, participations: Mapping[int, int] | ArrayLike, accountants: Sequence[str]
    ) -> list[dict[str, Any]] | None:
        """A row for each client that took part; None where clients have no guarantees of their
        own.
        """
        return None

    def quantiles(
        self, accountant: str, participations: Mapping[int, int] | ArrayLike
    ) -> np.ndarray:
        """Quantiles of the clients' epsilons, float64 [5], at `raydpfl.privacy.guarantee.SHARES`;
        [0] where clients have none of their own.
        """
        return np.zeros(0)

    def warnings(self, participations: Mapping[int, int] | ArrayLike) -> tuple[str, ...]:
        """What a reader should know of single clients, in words."""
        return ()

    def check_claims(self, participations: Mapping[int, int] | ArrayLike) -> None:
        """Raises `BudgetError` where some client was promised more than holds."""


@dataclass(frozen=True)
class Mechanism(Release):
    """`rounds` times: sample, bound, sum, add noise, release. Accountants read this and nothing
    else.

    Against k participants who know their own noise, or after k dropouts, account for
    `with_noise(z * sqrt((r - k) / r))`.

    Args:
        sampling: who takes part in a round.
        queries: the sums that every round releases.
        rounds: how many rounds are composed.
        unit: whose data a guarantee protects.
        placement: who draws the noise. `server`: one draw on the sum. `client`: each of the r
            clients of a cohort draws std / sqrt(r), so that the sum has std. `step`: one draw on
            the sum over a mini-batch, at each local step; `rounds` then counts steps, and the
            population are one client's samples.
        exclusions: data-dependent choices that are not accounted for, in words.
        memory: the kind of the member by which a client's contribution depends on its earlier
            rounds; empty: none does (`raydpfl.privacy.stateful_clients`).
        remembers_noise: whether a client remembers what it sent with the noise that it drew, of
            which an observer sees only the sum.
        survey: what all clients are asked for besides the rounds; None: nothing.

    Raises:
        ConfigError: a field is out of range.
    """

    sampling: Sampling
    queries: tuple[Query, ...]
    rounds: int
    unit: Unit = "client"
    placement: Placement = "server"
    exclusions: tuple[str, ...] = ()
    memory: str = ""
    remembers_noise: bool = False
    survey: Survey | None = None

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
        """One client's DP-SGD: a fresh mini-batch at every step (002 Alg. 1, 003 Alg. 1).

        Shuffled epochs are not this mechanism.

        Args:
            samples: n_i, the client's samples.
            batch: B, samples in a batch.
            steps: the client's local steps over the whole run, as they occur.
            bound: the per-sample clip norm.
            std: of the noise on the *mean* gradient of a batch, in the units of `bound`; the sum
                has `batch` times that.
            exclusions: what is not accounted for, in words.
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
        """Whether every query has noise."""
        return all(query.std > 0 for query in self.queries)

    @property
    def noise_multiplier(self) -> float:
        """z = std of the sum / bound, of the single Gaussian that the sums of a round amount to:
        1/z^2 = sum over queries of (bound / std)^2, those `apart` left out; 0 without noise.
        """
        return _together(query for query in self.queries if not query.apart)

    def mu(self, relation: Relation) -> float:
        """Sensitivity / std of a round, all queries together, those `apart` too; infinite without
        noise.

        It is k / z with k = 2 under replace-one, where a client leaves and another takes its
        place, and k = 1 under add_remove and zero_out.
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
        return stateful_clients.unproved(self)

    def uncovered(self, accountant: str, relation: Relation) -> str | None:
        return accounting.covers(accountant, self, relation)

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        scale = cohort / self.sampling.cohort
        sums = (query for query in self.queries if not query.apart)
        return {query.name: query.std / query.bound * scale for query in sums}

    def event(self, relation: Relation) -> Event:
        """What accountants compose: one round, and all surveys once, under this relation."""
        once = self.survey.mu(relation) if self.survey else 0.0
        return Event(self.sampling, self.mu(relation), once=once)

    def asking(self, times: int) -> Mechanism:
        """The same mechanism, with its survey released so many times; itself without one."""
        if self.survey is None or self.survey.times == times:
            return self
        return replace(self, survey=replace(self.survey, times=times))

    def curves(
        self,
        accountants: Sequence[str],
        draws: Sequence[ArrayLike] | None,
        exposures: np.ndarray,
        terms: Terms,
        surveys: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """See `Release.curves`; infinite for an accountant that does not cover the mechanism.

        Of many surveys an epsilon may count some before they are released, never too few. Where the
        mechanism is `unproved`, a rigorous accountant's epsilons are those against the first
        observer against whom there is a proof; without `draws` a client may be in every round.
        """
        found = {name: np.full(len(exposures), np.inf) for name in accountants}
        asked = _in_groups(np.zeros(len(exposures), int) if surveys is None else surveys)
        as_is = (self, exposures, terms)
        proved = self._proved(draws, exposures, terms) if self.unproved else as_is
        for name in accountants:
            known = proved if accounting.rigorous([name]) else as_is
            if known is None or known[0].uncovered(name, known[2].relation):
                continue
            seen, counts, at_terms = known
            for times in np.unique(asked).tolist():
                at = asked == times
                found[name][at] = seen.asking(times)._curve(name, counts[at], at_terms)
        return found

    def _proved(
        self, draws: Sequence[ArrayLike] | None, exposures: np.ndarray, terms: Terms
    ) -> tuple[Mechanism, np.ndarray, Terms] | None:
        """What the observer sees against whom guarantees are proved: its mechanism, how many
        rounds of it are composed after each round, int64 [rounds], and its terms. None: no
        guarantee is proved.
        """
        most: list[int | None] = [None] * len(exposures)
        if draws is not None:
            counts = np.zeros(self.sampling.population, np.int64)
            for place, drawn in enumerate(draws, len(exposures) - len(draws)):
                np.add.at(counts, np.asarray(drawn, np.int64), 1)
                if place >= 0:
                    most[place] = int(counts.max())
        composed = np.zeros(len(exposures), np.int64)
        seen = None
        for t, (rounds, times) in enumerate(zip(exposures.tolist(), most, strict=True)):
            views = self.place.views(self, terms.relation, rounds, times)
            view = next((each for each in views if not each.mechanism.unproved), None)
            if view is None:
                return None
            seen = view
            composed[t] = view.rounds
        assert seen is not None
        return seen.mechanism, composed, replace(terms, relation=seen.relation)

    def _curve(self, accountant: str, exposures: np.ndarray, terms: Terms) -> np.ndarray:
        """Epsilon, float64 [k], after these numbers of rounds, int64 [k], never falling."""
        first = max(int(exposures[0]), 1)
        most = max(int(exposures[-1]), 1)
        curve = accounting.epsilon_curve(
            self, terms.relation, terms.delta, most, accountant, v=terms.v, first=first
        )
        found = curve[np.maximum(exposures, 1) - first]
        return found if self.survey and self.survey.times else np.where(exposures, found, 0.0)

    def guarantees(
        self,
        participations: Mapping[int, int] | ArrayLike | None,
        accountants: Sequence[str],
        rounds: int,
        terms: Terms,
        surveys: int = 0,
    ) -> list[Guarantee]:
        most = None
        if isinstance(participations, Mapping):
            most = max(participations.values(), default=0)
        elif participations is not None:
            most = int(np.max(participations, initial=0))
        return accounting.guarantees(
            self.asking(surveys),
            terms.relation,
            terms.delta,
            rounds,
            accountants,
            participations=most,
            v=terms.v,
        )

    def unsampled(self) -> Mechanism:
        """The same mechanism for an observer who knows the cohorts: everyone in every round."""
        everyone = Sampling("full", self.sampling.population, self.sampling.population)
        return replace(self, sampling=everyone)

    def with_noise(self, multiplier: float) -> Mechanism:
        """The same mechanism at another noise multiplier.

        Every std is scaled by the same factor, except for queries `apart`. Where there is no noise
        yet, the k queries get equal shares, std = sqrt(k) z bound each.

        Args:
            multiplier: z = std of the sum / bound, all queries of a round together.

        Raises:
            ConfigError: it is negative or infinite, or only some queries have noise.
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

    def round_digest(self) -> str:
        return replace(self.asking(0), rounds=1).digest()

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of all fields, in hexadecimal.

        `p_max`, `rule`, `apart`, `memory`, `remembers_noise` and `survey` are left out where they
        are not set. A sampling law of a user's own is in it by its words too.
        """
        tree = asdict(self)
        law = self.sampling.law
        tree["sampling"]["kind"] = law.kind
        if is_user_defined(type(law)):
            tree["sampling"]["law"] = law.words(self.sampling)
        if not self.memory:
            del tree["memory"]
        if not self.remembers_noise:
            del tree["remembers_noise"]
        if not self.survey:
            del tree["survey"]
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
    """std / bound of the single Gaussian that these queries amount to; 0 if one has no noise."""
    queries = tuple(queries)
    return (
        1 / math.sqrt(sum((query.bound / query.std) ** 2 for query in queries))
        if all(query.std > 0 for query in queries)
        else 0.0
    )


def _in_groups(surveys: np.ndarray) -> np.ndarray:
    """How many surveys each value of a curve counts, int64 [n], where these were released: as many,
    or with many of them some more, so that few curves are composed. The last is itself.
    """
    step = max(1, -(-int(surveys.max(initial=0)) // _GROUPS))
    return np.minimum(-(-surveys // step) * step, int(surveys.max(initial=0)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
