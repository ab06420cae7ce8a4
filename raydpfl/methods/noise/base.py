"""The base of the noises: what a member draws, and what accountants take of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from raydpfl.config.registry import Member, overrides
from raydpfl.config.setting import Setting
from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import ConfigError
from raydpfl.methods.hook_values import array_of
from raydpfl.methods.local import Local
from raydpfl.methods.noise import on_sums
from raydpfl.methods.noise.keyed_noise import client_noise, query_noise, server_noise, survey_noise
from raydpfl.privacy import Mechanism, Relation, Release, Sampling, Terms
from raydpfl.privacy.integer_noise import IntegerNoise
from raydpfl.privacy.types import Placement

DELTA = 1e-5
FACTORS = (1e-6, 1e6)  # of the std of a round


@dataclass(frozen=True)
class RunFacts:
    """A run, as its noise is sized for it."""

    setting: Setting  # of the other sections of its config
    seed: int  # of the run
    local: Local  # the local rule
    sizes: np.ndarray  # int64 [N], samples of each client
    rounds: int  # how many a guarantee composes
    calibrated: int  # of these, the rounds that an epsilon is for
    weight: float  # the largest weight of any client
    clients_left: int  # the fewest clients that are left in any round
    # gives whose participations noise at local steps is sized for, int64 arrays of clients, with
    # repeats
    draws: Callable[[], list[np.ndarray]]
    d: int  # parameters of the model that travel
    surveys: int = 0  # histograms of all clients that a guarantee composes with the rounds
    calibrated_surveys: int = 0  # of these, those that an epsilon is for
    data_root: Path | None = None  # the folder of data sets; None: the default
    ids: Sequence[str] | None = None  # of clients, as the data have them; None: their numbers


@dataclass(frozen=True)
class SideQuery:
    """A side query of one round (such as the count of an adaptive bound), as noise is drawn on its
    sum.
    """

    name: str  # of the query
    seed: int  # the run's seed of noise
    t: int  # the round, from 0
    std: float  # of the noise on the sum of the answers, in the units of an answer
    clients: np.ndarray  # int64 [r], the cohort
    # int64 [r], the index of each draw among its client's draws of the round, from 0
    draws: np.ndarray
    clients_left: int  # the fewest clients that any round keeps


class NoiseSource:
    """The server's noise in one run: here independent over the rounds.

    It may keep a state, as long as a round's noise is a function of the run's seed and the round
    alone: after a resume, a new source is asked for the next round.
    """

    def __init__(self, seed: int, d: int):
        self.seed = seed
        self.d = d

    def on_sum(self, t: int, std: float) -> np.ndarray | None:
        """The noise on the sum of round t, from 0, float64 [d]; None: the server draws none. `std`
        is that of the noise, as accountants count it for the bound in force.
        """
        return server_noise(self.seed, t, std, self.d)


class Silent(NoiseSource):
    """The source of a server that draws no noise."""

    def on_sum(self, t: int, std: float) -> None:
        return None


class Noise(Member):
    """Base of the family: noise that protects clients, with one multiplier for the whole run.

    A member gives `size`. By default the server draws independent Gaussian noise on the sum; with
    `drawn_by` "client" each client draws its part of that on what it sends. A member that draws
    otherwise has `source` or `on_clients`. Noise must be Gaussian and have the std asked for, as
    accountants assume: a run tests every draw of a user-defined class before it is released
    (`raydpfl.simulation.noise_monitor`). The delta of its guarantees is the field `delta`, if it
    has one, else 1e-5; or that of `terms`.
    """

    laplace: ClassVar[bool] = False  # whether it is Laplace noise, for sums bounded in L1

    # --- what it draws ---

    def drawn_by(self) -> Placement | None:
        """Who draws it: the server, clients on what they send, or clients at their local steps
        ("step"), where samples are protected. None: nobody, and no privacy is claimed.
        """
        return "server"

    def private(self) -> bool:
        """Whether a run with it claims any privacy."""
        return self.drawn_by() is not None

    def on_clients(
        self, seed: int, t: int, clients: np.ndarray, draws: np.ndarray, std: float, d: int
    ) -> np.ndarray | None:
        """The noise that each of C clients adds to what it sends, float64 [C, d], each row a
        function of its client's key alone; None: they draw none.

        Args:
            seed, t: the run's seed of noise, and the round.
            clients: int64 [C].
            draws: int64 [C], the index of each draw among its client's draws this round, from 0.
            std: of one client's noise, as `client_std` gave it.
            d: parameters of the model.
        """
        if self.drawn_by() != "client":
            return None
        return client_noise(seed, t, clients, draws, std, d)

    def client_std(self, std: float, clients_left: int) -> float:
        """Std of one client's noise, for `std` on the sum where at least `clients_left` clients are
        left in any round; 0: clients draw none.
        """
        return std / math.sqrt(clients_left) if self.drawn_by() == "client" else 0.0

    def source(self, seed: int, d: int) -> NoiseSource:
        """The server's noise in a run with this seed of noise, for a model of `d` parameters."""
        return NoiseSource(seed, d) if self.drawn_by() == "server" else Silent(seed, d)

    def on_server(self, seed: int, d: int) -> NoiseSource:
        """`source`, by which a run asks for it: a member with a key of that name has this."""
        return self.source(seed, d)

    def scores(self, noise: np.ndarray, std: float) -> np.ndarray:
        """Noise on sums, or of clients on what they send, float64 [...] of this std each, as
        independent standard normals if it has its distribution: here over `std`. By these a run and
        `raydpfl check` test it.
        """
        return noise / std

    @property
    def repeatable(self) -> bool:
        """Whether noise is a function of its key, so that a run can be repeated and resumed."""
        return True

    def on_query(self, query: SideQuery) -> float:
        """The noise on the sum of the answers to a side query, of std `query.std`: drawn by the
        server, or by each client its part of std `client_std(query.std, clients_left)`. 0 where
        that std is 0, or noise is drawn at local steps.
        """
        if not query.std or self.drawn_by() == "step":
            return 0.0
        if self.drawn_by() == "server":
            return query_noise(query.seed, query.t, query.std, query=query.name)
        part = self.client_std(query.std, query.clients_left)
        keys = zip(query.clients.tolist(), query.draws.tolist(), strict=True)
        # in client order, whichever worker trained them
        return sum(
            query_noise(query.seed, query.t, part, client, draw, query.name)
            for client, draw in keys
        )

    def on_survey(self, seed: int, t: int, std: float, bins: int, clients: int) -> np.ndarray:
        """The noise on the counts of a histogram over all clients after round t, float64 [bins] of
        this std each, drawn by the server or by the `clients` together; `seed` is of the survey.
        """
        by_clients = clients if self.drawn_by() == "client" else None
        return survey_noise(seed, t, std, bins, by_clients)

    def factor(self, t: int) -> float:
        """Std of the noise on the sums of round t, from 0, over that of its size: here 1 in every
        round. A class with another accounts, and calibrates, round by round; noise that is
        correlated over the rounds has none.
        """
        return 1.0

    def whitening(self, t: int) -> np.ndarray:
        """What the released sums of rounds t, t - 1, ... have to be multiplied by and added up, so
        that the noise in the results is independent over the rounds and has the std asked for:
        float64 [at most t + 1]. A round that is left out is left out of all later ones too.
        """
        return np.ones(1)

    # whether noise of a round depends on that of others
    correlated = overrides(whitening)

    def by_norms(self) -> bool:
        """Whether what a client spends in a round follows from the norm of what it sends: the noise
        on the sum is Gaussian, and independent of that of other rounds.
        """
        return False

    @property
    def has_common_noise(self) -> bool:
        """Whether all runs with one seed have the same noise: the field `common`."""
        return getattr(self, "common", False)

    def release(self) -> dict[str, Any]:
        """The fields that a release depends on, without the size of the noise: part of the key."""
        return self.model_dump(mode="json")

    # --- what accountants take ---

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for a budget that nothing holds, and a user-defined class with a say
        in how its noise is tested.
        """
        own_names = {
            name for cls in type(self).__mro__ if is_user_defined(cls) for name in vars(cls)
        }
        for name in sorted(own_names & {"laplace", "scores", "noise_distribution"}):
            expected = f"a class without {name}: its noise is tested by that of its base"
            raise ConfigError("noise.kind", setting.kinds["noise"], expected)
        if setting.budget is not None and not (self.private() and setting.accountants):
            expected = "none without noise and an accountant: this run spends without bound"
            raise ConfigError("privacy.budget", setting.budget, expected)

    def terms(self, asked: str, natural: Relation) -> Terms:
        """The relation and delta of guarantees: by default `natural`, which suits the selection's
        cohorts, for `auto`, else `asked`; and the field `delta`, or 1e-5 of a class without it.

        Raises `ConfigError` for a delta that is not above 0 and below 1.
        """
        relation: Any = natural if asked == "auto" else asked
        return Terms(relation, getattr(self, "delta", DELTA))

    def terms_in(self, setting: Setting) -> Terms:
        """`terms` in this setting."""
        return self.terms(
            setting.relation, "add_remove" if setting.cohort_hidden else "replace_one"
        )

    def target(self) -> float | None:
        """The epsilon of all clients that the noise is calibrated for; None: it follows from the
        noise, or differs between clients.
        """
        return None

    def calibrated_over(self, rounds: int) -> int | None:
        """The rounds of a run of `rounds` that its size is for; None: it is the same for all."""
        return None

    def extension(self, rounds: int) -> str | None:
        """The override by which a run of `rounds` continues for more of them with the same noise;
        empty: none is needed. None: it cannot, as its size depends on all rounds.
        """
        calibrated_rounds = self.calibrated_over(rounds)
        if calibrated_rounds is None:
            return ""
        return None if self.drawn_by() == "step" else f"noise.rounds={calibrated_rounds}"

    @property
    def stands_for(self) -> int | None:
        """The clients of a round that guarantees are about, where those that run stand for more:
        the field `virtual_cohort`.
        """
        return getattr(self, "virtual_cohort", None)

    def sampling(self, cohorts: Sampling) -> Sampling:
        """The sampling scheme that accountants count, of that of the cohorts that run. Raises
        `ConfigError` for cohorts that cannot stand for it.
        """
        return cohorts

    def resolve_placement(self, per_sample: bool, cohort_hidden: bool) -> Self:
        """The same noise with `placement: auto` filled in, by whether samples' gradients are
        bounded, and whether the size of a cohort is a secret.
        """
        return self

    def resolve(self, setting: Setting, cohorts: Sampling) -> Self:
        """The same noise with all that depends on the run filled in, as its config is written.
        Raises `ConfigError` where it does not protect such cohorts.
        """
        return self

    def outline(self, setting: Setting, cohorts: Callable[[], Sampling]) -> Mechanism | None:
        """What the run releases at noise multiplier 1, of what the config and the sampling scheme
        of its cohorts say; None: sums over cohorts have no noise. Raises `ConfigError` where no
        rigorous accountant that was asked for covers it.
        """
        placement = self.drawn_by()
        if setting.colluders and (setting.dropout or setting.drops_failures):
            expected = "0 where clients may drop out with the noise that they would have drawn"
            raise ConfigError("privacy.colluders", setting.colluders, expected)
        if placement is None or placement == "step":
            if setting.colluders:
                expected = "0 where clients do not draw Gaussian noise on sums"
                raise ConfigError("privacy.colluders", setting.colluders, expected)
            return None
        if setting.bound is None:
            expected = "one that bounds what a client sends, as clip with a bound: noise "
            expected += f"{setting.kinds['noise']} is scaled by that bound"
            raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
        scheme = cohorts()
        sampling = self.sampling(scheme)
        stateful = setting.kinds[setting.stateful[0]] if setting.stateful else ""
        mechanism = Mechanism(
            sampling,
            on_sums.queries(setting, 1.0),
            setting.rounds,
            placement=placement,
            stateful=stateful
            or ("model.local" if setting.local_parameters else "")
            or ("privacy.individual" if setting.individual else ""),
            noise_in_state="local" in setting.stateful and placement == "client",
            survey=setting.survey,
            integer=self.integers(sampling.cohort, 1),
            laplace=self.laplace,
            colluders=setting.colluders,
        )
        exclusions = on_sums.list_exclusions(setting, self.has_common_noise, scheme=sampling.scheme)
        if self.stands_for is not None:
            exclusions += (
                f"the {scheme.cohort} clients simulated in a round stand for {sampling.cohort} of "
                f"{sampling.population}, whose guarantee this is",
            )
        if mechanism.proof_gap:
            exclusions += (mechanism.proof_gap,)
        mechanism = replace(mechanism, exclusions=exclusions, factors=self._factors(setting))
        on_sums.check_coverage(setting, mechanism, self.terms_in(setting).relation)
        return mechanism

    def integers(self, cohort: int, d: int) -> IntegerNoise | None:
        """How the sums of so many clients, of a model of d parameters, are taken of integers; None:
        they are not.
        """
        return None

    def _factors(self, setting: Setting) -> tuple[float, ...]:
        """`factor` of every round. Raises `ConfigError` for one that cannot be."""
        factors = tuple(float(self.factor(t)) for t in range(setting.rounds))
        wrong = [factor for factor in factors if not FACTORS[0] <= factor <= FACTORS[1]]
        if wrong:
            low, high = FACTORS
            expected = f"one whose factors of the std are from {low:g} to {high:g} in all rounds"
            raise ConfigError("noise.schedule", wrong[0], expected)
        integers = type(self).integers is not Noise.integers
        if any(factor != 1 for factor in factors) and (self.correlated or integers):
            expected = "none with noise that is correlated over the rounds, or of integers"
            raise ConfigError("noise.schedule", self.kind, expected)
        return factors

    def size(self, outline: Mechanism, facts: RunFacts) -> float:
        """The noise multiplier z = std of the noise on the sum / (bound x largest weight), all
        queries of a round together; `outline` is as the method gave it.
        """
        raise NotImplementedError

    def check_clients_left(self, clients_left: int, dropout: float) -> None:
        """Raises `ConfigError` where clients draw the noise and a round is left without any."""
        if self.drawn_by() == "client" and not clients_left:
            expected = "one that leaves some client, and its noise, in every round of the run"
            raise ConfigError("selection.dropout", dropout, expected)

    def calibrated(self, outline: Mechanism | None, facts: RunFacts) -> Release | None:
        """What the run releases, with noise of the size asked for; None: nothing is claimed."""
        if outline is None:
            return None
        self.check_clients_left(facts.clients_left, facts.setting.dropout)
        size = self.size(outline, facts)
        size = float(array_of(f"noise.kind {self.kind}: size", size, ()))
        if not 0 < size < math.inf:
            expected = f"one whose size is a finite number above 0, not {size:g}"
            raise ConfigError("noise.kind", self.kind, expected)
        queries = on_sums.queries(facts.setting, size)
        return replace(outline, queries=queries, rounds=facts.rounds).with_surveys(facts.surveys)

    def variances(
        self,
        seed: int,
        sizes: np.ndarray,
        batches: np.ndarray,
        root: Path | None,
        ids: Sequence[str] | None,
    ) -> np.ndarray | None:
        """V_k of 003 eq. 7, float64 [N]: the variance of each client's noise for one local step and
        a bound of 1, of its `sizes` and the rows of its `batches`, int64 [N]; None: clients have no
        budgets. `seed` is of the run, `root` the folder of data sets, `ids` as in `RunFacts`.
        """
        return None


class Whitening:
    """Turns released sums, float64 [d] round after round, into sums whose noise is independent over
    the rounds, by the rows of `Noise.whitening`.
    """

    def __init__(self, noise: Noise):
        self._noise = noise
        self._t = 0
        self._past = np.empty((0, 0))  # sums, of which the first `count` are there
        self._count = 0

    def __call__(self, row: np.ndarray) -> np.ndarray:
        if not self._noise.correlated:
            return row
        coefficients = self._noise.whitening(self._t)
        self._t += 1
        if self._count == len(self._past):
            recent_sums = self._past[self._count - min(self._count, len(coefficients) - 1) :]
            self._count = len(recent_sums)
            buffer = np.empty((2 * len(recent_sums) + 8, len(row)))
            buffer[: len(recent_sums)] = recent_sums.reshape(len(recent_sums), len(row))
            self._past = buffer
        self._past[self._count] = row
        self._count += 1
        return coefficients[::-1] @ self._past[self._count - len(coefficients) : self._count]


def whitening_matrix(noise: Noise, rounds: int) -> np.ndarray:
    """What `Whitening` multiplies the sums of so many rounds by: lower-triangular, float64 [rounds,
    rounds]. Its columns are what a participation adds to the whitened sums.

    Args:
        noise: resolved.
        rounds: of the run, or the first of them.
    """
    matrix = np.zeros((rounds, rounds))
    for t in range(rounds):
        row = noise.whitening(t)
        matrix[t, t + 1 - len(row) : t + 1] = row[::-1]
    return matrix
