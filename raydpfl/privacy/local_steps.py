"""Noise at local steps: what it costs each client's samples, and how much of it each client's own
budget needs (002, 003).

A client clips every sample's gradient, adds Gaussian noise to the mean gradient of a batch at each
of its steps, and sends its update as it is. Every single update is seen, so only a client's own
noise protects its samples, and only its own participations compose. These are known before
training, since cohorts depend on the seed and on public sizes and budgets.

>>> # 002 on MNIST (PRIVACY.md sec. 4): one client takes part once, another four times
>>> steps = LocalSteps.calibrated(
...     samples=[600, 600, 600], batch=10, steps=300, bound=1.0, participations=[1, 4, 0],
...     budgets=[0.3, 0.3, 0.3], delta=1e-2)
>>> steps.stds.round(2)  # of the noise on the mean gradient; none where there is nothing to hide
array([0.34, 0.61, 0.  ])
>>> steps.epsilons("pld", [1, 2, 0]).round(2)  # half-way
array([0.3 , 0.18, 0.  ])
>>> paper = LocalSteps.calibrated(
...     samples=[500], batch=250, steps=1, bound=1.0, participations=[1], budgets=[20.0],
...     delta=1e-5, calibration="paper")
>>> paper.epsilons("pld", [1]).round(2)  # where 003 claims 20 (PRIVACY.md sec. 5)
array([22.51])

Design note. Each client is a mechanism of its own (`Mechanism.of_local_steps`), and the tests
compare this module with that, one client at a time. Here clients of the same size, batches, steps
and noise are accounted for once, and one composition serves all numbers of rounds. The search for a
client's noise starts from the central limit theorem [1], corrected by what the most similar client
needed, so that two or three evaluations suffice.

Public: sizes, budgets, participations, noise. A client with an infinite budget is public too: it
draws no noise.

[1] Bu, Dong, Long, Su. Deep learning with Gaussian differential privacy. HDSR 2020. Section 3.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.config.user_classes import is_user_defined
from raydpfl.errors import BudgetError, ConfigError
from raydpfl.privacy import paper_formulas, pld
from raydpfl.privacy.accountants import ACCOUNTANTS, FORMULAS, Accountant, Formula, named, standing
from raydpfl.privacy.accounting import NOISELESS, UNREACHED
from raydpfl.privacy.calibration import cached
from raydpfl.privacy.guarantee import (
    Guarantee,
    Nobody,
    Observer,
    OneClient,
    Scope,
    column,
    quantiles,
)
from raydpfl.privacy.mechanism import Event, Query, Release, Sampling
from raydpfl.privacy.search import halved, near_guess
from raydpfl.privacy.types import Terms, Unit, one_of

Calibration = Literal["rigorous", "paper", "tcdp"]
_TOLERANCE = 5e-4  # of log z: calibrated noise is at most 1e-3 above the smallest that is enough
_MOST_BESIDE = 0.99  # the share of a budget that may be spent besides the steps
_CLAIM = 1e-6  # relative: how far a true epsilon may exceed a claim

Participations = Mapping[int, int] | ArrayLike


@dataclass(frozen=True, eq=False)
class LocalSteps(Release):
    """What N clients release, and what each of them was promised.

    Args:
        samples: n_k, int64 [N].
        batch: B; a client with fewer samples uses all of them. Or B_k of each, int64 [N]. None: all
            samples at every step.
        steps: Q, local steps of one participation; or Q_k of each client, int64 [N].
        bound: the per-sample clip norm.
        delta: the delta of all epsilons.
        stds: of each client's noise on the mean gradient of a batch, in the units of `bound`,
            float64 [N] or one for all; 0: no noise.
        sampling: `fresh`, a uniform subset at each step; or `epochs`, shuffled samples in turn,
            which amplify nothing (see `compositions`).
        claims: the epsilon promised to each client for its participations in the whole run,
            float64 [N]; infinite for a public client. None: nothing was promised.
        calibration: what the noise was calibrated by; None: it was given.
        exclusions: what is not accounted for, in words.
        beside: a query that every participation answers in addition, by the mean over the client's
            n_k samples of values within [-bound, bound] plus noise of its std: replacing a sample
            moves it by 2 bound / n_k. No paper's formula counts it. None: there is none.
        unfit: the clients whom the formula that calibrates does not cover, with the conditions of
            it that fail; `accountant` calibrates their noise.
        accountant: the rigorous accountant that calibrates what no formula does.

    Raises:
        ConfigError: a field is out of range.
    """

    samples: np.ndarray
    batch: int | np.ndarray | None
    steps: int | np.ndarray
    bound: float
    delta: float
    stds: np.ndarray
    sampling: Literal["fresh", "epochs"] = "fresh"
    claims: np.ndarray | None = None
    calibration: Calibration | None = None
    exclusions: tuple[str, ...] = ()
    beside: Query | None = None
    unfit: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    accountant: str | None = None
    unit: Unit = field(default="sample", init=False, repr=False)
    _spent: dict = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        one_of("sampling", self.sampling, Literal["fresh", "epochs"])
        self._check_counts("batch", self.batch)
        self._check_counts("steps", self.steps)
        if not (0 < self.bound < math.inf):
            raise ConfigError("bound", self.bound, "a positive finite number")
        if not (0 < self.delta < 1):
            raise ConfigError("delta", self.delta, "a number between 0 and 1, both excluded")
        object.__setattr__(self, "samples", np.asarray(self.samples, np.int64))
        stds = np.broadcast_to(np.asarray(self.stds, np.float64), self.samples.shape)
        if not ((stds >= 0) & np.isfinite(stds)).all():
            raise ConfigError("stds", self.stds, "finite numbers, zero or above, one per client")
        object.__setattr__(self, "stds", np.array(stds))
        if self.claims is not None:
            object.__setattr__(self, "claims", _budgets(self.claims, len(self.samples)))

    def _check_counts(self, name: str, counts: int | np.ndarray | None) -> None:
        """Raises `ConfigError` for what is no number of samples or steps, nor one per client."""
        if counts is None and name == "batch":
            return
        given = np.asarray(counts)
        least = np.minimum(self.samples, 1) if given.ndim else 1
        fits = given.shape in ((), np.shape(self.samples))
        if not (fits and given.dtype.kind in "iu" and (given >= least).all()):
            raise ConfigError(name, counts, "an integer, at least 1, or one per client")

    @classmethod
    def calibrated(
        cls,
        *,
        samples: ArrayLike,
        batch: int | np.ndarray | None,
        steps: int | np.ndarray,
        bound: float,
        delta: float,
        participations: Participations,
        budgets: ArrayLike,
        calibration: Calibration = "rigorous",
        accountant: str = "pld",
        sampling: Literal["fresh", "epochs"] = "fresh",
        exclusions: Sequence[str] = (),
        beside: Query | None = None,
    ) -> LocalSteps:
        """The noise with which each client spends its own budget over the whole run.

        `budgets` are epsilons, one or [N]. `rigorous` is by `accountant` (pld or rdp), at most 1e-3
        above the smallest noise that is enough, with what is released `beside`; `paper` is sigma_k
        of 003 eq. 6; `tcdp` the usable form of 002 Theorem 5 (PRIVACY.md sec. 4), and the rigorous
        noise for the clients for whom a condition of it fails (`unfit`). Public clients and those
        that never take part draw no noise. Raises `ConfigError` if no noise reaches some budget, or
        `beside` leaves less than 1 % to the steps.
        """
        one_of("calibration", calibration, Calibration)
        sizes = np.asarray(samples, np.int64)
        claims = _budgets(budgets, len(sizes))
        silent = cls(
            sizes, batch, steps, bound, delta, np.zeros(len(sizes)), sampling, claims, calibration
        )
        silent = replace(silent, exclusions=tuple(exclusions), beside=beside)
        return silent._noised(silent._counts(participations), accountant)

    def _noised(self, counts: np.ndarray, accountant: str) -> LocalSteps:
        """Itself with the noise that its claims need for these participations, int64 [N]."""
        assert self.claims is not None
        assert self.calibration is not None
        needy = np.flatnonzero((counts > 0) & (self.samples > 0) & np.isfinite(self.claims))
        stds = np.zeros(len(counts))
        unfit: dict[int, tuple[str, ...]] = {}
        if self.calibration != "rigorous":
            stds[needy], unfit = self._printed_stds(needy, counts, _formula(self.calibration))
            needy = np.array(list(unfit), np.int64)
        if len(needy):
            stds[needy] = self._rigorous_stds(needy, counts, accountant)
        by = accountant if self.calibration == "rigorous" or unfit else None
        return replace(self, stds=stds, unfit=unfit, accountant=by)

    @property
    def batches(self) -> np.ndarray:
        """B_k int64 [N]: the samples in each batch of a client."""
        return self.samples if self.batch is None else np.minimum(self.batch, self.samples)

    @property
    def own_steps(self) -> np.ndarray:
        """Q_k int64 [N]: the local steps of a client in one participation."""
        return np.broadcast_to(np.asarray(self.steps, np.int64), self.samples.shape)

    @property
    def amplified(self) -> np.ndarray:
        """Bool [N]: whether a batch is a secret subset, which amplifies privacy."""
        return (self.batches < self.samples) & (self.sampling == "fresh")

    @property
    def compositions(self) -> np.ndarray:
        """Int64 [N]: how many Gaussians one participation composes, each over a hidden subset or
        over one that certainly holds the sample.

        Fresh batches: one for each of the Q steps. Shuffled epochs, whose order is taken as known:
        a sample is used once in each of the ceil(Q B / n) epochs begun. Where n is no multiple of
        B, a batch that ends one epoch and begins the next may hold it twice, which moves the sum
        twice as far and costs as much as four Gaussians; at worst every second time.
        """
        n = self.samples
        b = np.maximum(self.batches, 1)
        steps = self.own_steps
        if self.sampling == "fresh":
            return steps
        seen = -(-steps * b // np.maximum(n, 1))
        return np.where(n == b, steps, np.where(n % b == 0, seen, 4 * (seen // 2) + seen % 2))

    @property
    def beside_mu(self) -> np.ndarray:
        """Sensitivity / std of what a participation releases `beside` its steps, float64 [N]; 0
        where that is nothing.
        """
        return (
            2 * self.beside.bound / (np.maximum(self.samples, 1) * self.beside.std)
            if self.beside
            else np.zeros(len(self.samples))
        )

    def event(self, k: int) -> Event:
        """What one participation of client k releases about one of its samples."""
        return Event(
            self._batch_law(k),
            2 * self.bound / (int(self.batches[k]) * float(self.stds[k])),
            int(self.compositions[k]),
            float(self.beside_mu[k]),
        )

    @property
    def largest(self) -> int:
        """The largest number of samples of any client."""
        return int(self.samples.max())

    def client_facts(self) -> tuple[np.ndarray, ...]:
        return (self.stds,)

    def of_clients(self) -> Mapping[str, np.ndarray]:
        if self.claims is None:
            return {"noise_std": self.stds}
        held = np.maximum(self.samples, 1)  # a client without samples never takes part
        batches = np.maximum(self.batches, 1)
        variance = paper_formulas.budget_variance(
            self.claims, self.delta, batch=batches, samples=held
        )
        return {"budget": self.claims, "noise_std": self.stds, "variance": variance}

    def step_stds(self, clients: np.ndarray) -> np.ndarray:
        return self.stds[clients]

    @property
    def private(self) -> bool:
        """True if any client draws noise."""
        return bool((self.stds > 0).any())

    @property
    def public(self) -> np.ndarray:
        """Bool [N]: clients with an infinite budget, which need no protection."""
        return np.zeros(len(self.samples), bool) if self.claims is None else np.isinf(self.claims)

    def batch_words(self) -> str:
        """How many samples a client's batches have, in words."""
        if self.batch is None:
            return "all samples"
        if not isinstance(self.batch, np.ndarray):
            return f"{self.batch} samples"
        return f"{self.batch.min()} to {self.batch.max()} samples, by the client's size"

    def step_words(self) -> str:
        """How many local steps a participation has, in words."""
        if not isinstance(self.steps, np.ndarray):
            return f"{self.steps} local steps"
        held = self.steps[self.samples > 0]
        return f"{held.min()} to {held.max()} local steps, by the client's size"

    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal."""
        plain: list[Any] = [
            self.batch.tolist() if isinstance(self.batch, np.ndarray) else self.batch,
            self.steps.tolist() if isinstance(self.steps, np.ndarray) else self.steps,
            self.bound,
            self.delta,
            self.sampling,
            self.calibration,
            list(self.exclusions),
        ]
        plain += [asdict(self.beside)] if self.beside else []
        found = hashlib.sha256(json.dumps(plain).encode())
        for array in (self.samples, self.stds, *([] if self.claims is None else [self.claims])):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()

    def epsilons(self, accountant: str, participations: Participations) -> np.ndarray:
        """Epsilon of every client's samples.

        Args:
            accountant: pld, rdp or one of `FORMULAS`.
            participations: how often each client takes part, by id or int64 [N].

        Returns:
            float64 [N], at `delta` (002 Theorem 5 has a delta of its own). 0 for a client that took
            no part, infinite for one that took part without noise.
        """
        counts = self._counts(participations)
        found = np.zeros(len(self.samples))
        exposed = (counts > 0) & (self.samples > 0)
        found[exposed & (self.stds == 0)] = math.inf
        noisy = np.flatnonzero(exposed & (self.stds > 0))
        # float64, exact for these integers
        columns = [self.samples, self.batches, self.own_steps, self.stds, counts]
        kinds = np.stack([column[noisy] for column in columns], 1)
        _, first, member = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        found[noisy] = self._spent_by(accountant, noisy[first], counts)[member.reshape(-1)]
        return found

    def _spent_by(self, accountant: str, clients: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Epsilon float64 [k] of each of these clients, who have noise, after its participations,
        of which `counts` int64 [N] are all.
        """
        if accountant in FORMULAS:
            whose: dict[str, Any] = {"bound": self.bound, "steps": self.own_steps[clients]}
            whose |= {"batch": self.batches[clients], "samples": self.samples[clients]}
            claims = FORMULAS[accountant].claims
            return claims(self.stds[clients], self.delta, counts[clients], **whose)
        each = [
            self._curve(accountant, k, int(counts[k]), int(counts[k]))[0] for k in clients.tolist()
        ]
        return np.array(each)

    def curves(
        self,
        accountants: Sequence[str],
        draws: Sequence[ArrayLike] | None,
        exposures: np.ndarray | None = None,
        terms: Terms | None = None,
        surveys: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """The largest epsilon of any client's samples after each round, by every accountant; public
        clients are left out.

        The last value is the largest of `epsilons`, to the bit.

        Args:
            accountants: their names; `paper` stands for `FORMULAS`.
            draws: for every release its clients, one drawn twice listed twice.
            exposures: [rounds], of which only the length is read: the last so many draws are the
                rounds; None: all of them.
            terms: not read; they are this object's own.
            surveys: not read; noise at local steps goes with none.

        Returns:
            By accountant (named as in `guarantees`), epsilon float64 [rounds].
        """
        assert draws is not None
        rounds = [np.unique(np.asarray(drawn, np.int64), return_counts=True) for drawn in draws]
        finals = np.zeros(len(self.samples), np.int64)
        for clients, times in rounds:
            finals[clients] += times
        found = {}
        for name in standing(accountants, self.unit):
            curve = self._worst(name, rounds, finals)
            found[name] = curve if exposures is None else curve[-len(exposures) :]
        return found

    def _worst(
        self, name: str, rounds: list[tuple[np.ndarray, np.ndarray]], finals: np.ndarray
    ) -> np.ndarray:
        """The largest epsilon of any client after each round, float64 [rounds].

        `rounds` are pairs (clients, how often each is drawn); `finals` int64 [N] is how often each
        client is drawn in all.
        """
        most = np.where(self._spoken_of(name), self.epsilons(name, finals), 0.0)
        counts = np.zeros_like(finals)
        worst = 0.0
        curve = np.zeros(len(rounds))
        for t, (clients, times) in enumerate(rounds):
            counts[clients] += times
            # First those with nothing to come, which are known; a client that cannot exceed the
            # worst need not be known.
            order = np.lexsort((-most[clients], finals[clients] - counts[clients]))
            for k in clients[order].tolist():
                if most[k] <= worst:
                    continue
                now = most[k]
                if counts[k] < finals[k] and math.isfinite(now):
                    after = self._curve(name, k, 1, int(finals[k]))[int(counts[k]) - 1]
                    now = min(after, now)
                worst = max(worst, float(now))
            curve[t] = worst
        return curve

    def guarantees(
        self,
        participations: Participations | None,
        accountants: Sequence[str] = ("pld", "rdp", "paper"),
        rounds: int | None = None,
        terms: Terms | None = None,
        surveys: int = 0,
    ) -> list[Guarantee]:
        """What holds for the client that has spent most, by every accountant; its id and the
        quantiles over clients are in `sampling`.

        `paper` stands for `FORMULAS`, with the conditions that fail for that client. Public clients
        have no guarantee and are listed in the exclusions; if nobody else takes part, epsilon is
        infinite. `rounds`, `terms` and `surveys` are not read; they are this object's own.
        """
        assert participations is not None
        counts = self._counts(participations)
        who = np.flatnonzero((counts > 0) & (self.samples > 0))
        return [self._guarantee(name, counts, who) for name in standing(accountants, self.unit)]

    def _guarantee(self, name: str, counts: np.ndarray, who: np.ndarray) -> Guarantee:
        """By one accountant or formula, for the worst of the clients that it speaks of, among those
        `who` took part.
        """
        kept = who[self._spoken_of(name)[who]]
        public = int(self.public[who].sum())
        others = self._unfit_words() if len(who) - len(kept) > public else ()
        epsilon = 0.0
        delta = self.delta
        failed: tuple[str, ...] = ()
        scope: Scope = Nobody(public=len(who) > 0)
        if len(kept):
            spent = self.epsilons(name, counts)[kept]
            worst = int(kept[np.argmax(spent)])
            epsilon = float(spent.max())
            scope = self.scope(worst, int(counts[worst]), spent)
            delta, failed = self._conditions(name, worst, int(counts[worst]), epsilon)
        elif len(who):
            epsilon = math.inf
            failed = (NOISELESS,)
        rigorous = name not in FORMULAS
        return Guarantee(
            "rigorous" if rigorous else "paper",
            name,
            self.unit,
            "replace_one" if rigorous else FORMULAS[name].relation,
            Observer.UPDATES,
            scope,
            epsilon,
            delta,
            (*self.exclusions, *others, *self._public_words(public)),
            failed,
        )

    def quantiles(self, accountant: str, participations: Participations) -> np.ndarray:
        """Quantiles at `SHARES` of the epsilons of the clients that took part, float64 [5], public
        ones left out; [0] where there are none.
        """
        counts = self._counts(participations)
        spent = self.epsilons(accountant, counts)[(counts > 0) & (self.samples > 0) & ~self.public]
        return quantiles(spent) if len(spent) else np.zeros(0)

    def table(
        self, participations: Participations, accountants: Sequence[str] = ("pld", "rdp", "paper")
    ) -> list[dict[str, Any]]:
        """A row for each client that took part: sizes, participations, steps, noise, the promised
        epsilon, and every accountant's.

        `noise_std` is that of the noise on the mean gradient, `calibrated_by` names the accountant
        or the formula that it comes from, if any, `epsilon_claimed` is None where nothing was
        promised, and `conditions_failed` lists "formula: condition". Floats may be infinite.
        """
        counts = self._counts(participations)
        names = standing(accountants, self.unit)
        spent = {name: self.epsilons(name, counts) for name in names}
        rows = []
        for k in np.flatnonzero(counts).tolist():
            row: dict[str, Any] = {
                "client": k,
                "samples": int(self.samples[k]),
                "batch": int(self.batches[k]),
                "participations": int(counts[k]),
            }
            row |= {
                "steps": int(self.own_steps[k] * counts[k]),
                "noise_std": float(self.stds[k]),
                "delta": self.delta,
            }
            row["calibrated_by"] = self.calibrated_by(k)
            row["epsilon_claimed"] = None if self.claims is None else float(self.claims[k])
            failed = []
            for name in names:
                row[column(name)] = float(spent[name][k])
                delta, reasons = self._conditions(name, k, int(counts[k]), row[column(name)])
                failed += [f"{name}: {reason}" for reason in reasons]
                if name in FORMULAS and FORMULAS[name].own_delta():
                    row[column(name).replace("epsilon", "delta", 1)] = delta
            rows.append(row | {"conditions_failed": failed})
        return rows

    def check_claims(self, participations: Participations) -> None:
        """Raises `BudgetError` naming the clients whose true epsilon, the smaller of pld and rdp,
        exceeds what they were promised by more than a relative 1e-6.
        """
        if self.claims is None:
            return
        truth = self.epsilons("pld", participations)
        limit = self.claims * (1 + _CLAIM)
        if (truth > limit).any():
            truth = np.minimum(truth, self.epsilons("rdp", participations))
        broken = np.flatnonzero(truth > limit)
        if len(broken):
            worst = broken[np.argsort(self.claims[broken] / truth[broken], kind="stable")]
            named = [
                f"client {k} (claimed epsilon {self.claims[k]:.4g}, true {truth[k]:.4g})"
                for k in worst[:5].tolist()
            ]
            more = f" and {len(broken) - 5} more" if len(broken) > 5 else ""
            whose = "this run" if self.calibration == "rigorous" else self.formula
            raise BudgetError(
                f"the noise of {whose} protects {len(broken)} of {int((truth > 0).sum())} clients "
                f"less than it claims: {', '.join(named)}{more}"
            )

    def warnings(self, participations: Participations) -> tuple[str, ...]:
        """What else a reader should know: which deltas would allow a sample to be published, whose
        noise is not that of the formula that calibrates, and how many clients are public.
        """
        counts = self._counts(participations)
        exposed = counts > 0
        lax = np.flatnonzero(exposed & (self.delta * self.samples > 1))
        found = [
            f"delta {self.delta:g} is above 1/n for {len(lax)} clients ({_some(lax.tolist())}): "
            "it would allow a sample to be published outright"
        ]
        return (
            *(found if len(lax) else ()),
            *self._unfit_words(),
            *self._public_words(int((exposed & self.public).sum())),
        )

    @property
    def formula(self) -> str:
        """The name of the formula that the noise was calibrated by; 003's for any other noise."""
        return _formula("tcdp" if self.calibration == "tcdp" else "paper").name

    def _counts(self, participations: Participations) -> np.ndarray:
        if isinstance(participations, Mapping):
            counts = np.zeros(len(self.samples), np.int64)
            counts[list(participations)] = list(participations.values())
            return counts
        counts = np.asarray(participations, np.int64)
        if counts.shape != self.samples.shape or (counts < 0).any():
            raise ConfigError(
                "participations",
                participations,
                f"{len(self.samples)} whole numbers from 0, one per client",
            )
        return counts

    def _client(self, k: int, count: int) -> dict[str, Any]:
        """The arguments of the papers' formulas."""
        return {
            "bound": self.bound,
            "batch": int(self.batches[k]),
            "samples": int(self.samples[k]),
            "steps": int(self.own_steps[k]) * count,
        }

    def _curve(self, name: str, k: int, first: int, last: int) -> np.ndarray:
        """Epsilon of client k after first, ..., last participations, computed once for all clients
        of its size, batches, steps and noise.
        """
        sizes = (int(self.samples[k]), int(self.batches[k]), int(self.own_steps[k]))
        key = (name, *sizes, float(self.stds[k]), first, last)
        if key not in self._spent:
            self._spent[key] = self._account(name, k, first, last)
        return self._spent[key]

    def _account(self, name: str, k: int, first: int, last: int) -> np.ndarray:
        counts = np.arange(first, last + 1)
        if name in FORMULAS:
            return FORMULAS[name].claims(
                float(self.stds[k]), self.delta, counts, **self._client(k, 1)
            )
        return _rigorous(name).curve(self.event(k), self.delta, counts)

    def _conditions(
        self, name: str, k: int, count: int, epsilon: float
    ) -> tuple[float, tuple[str, ...]]:
        """The delta, and the conditions that fail, of an accountant's or a formula's `epsilon` for
        client k.
        """
        if self.stds[k] == 0:
            return self.delta, (NOISELESS,)
        if name not in FORMULAS:
            return self.delta, (UNREACHED.format(name),) if math.isinf(epsilon) else ()
        delta, failed = FORMULAS[name].conditions(
            epsilon, float(self.stds[k]), self.delta, **self._client(k, count)
        )
        return delta, self._steps_alone(failed)

    def _steps_alone(self, failed: tuple[str, ...]) -> tuple[str, ...]:
        """With the conditions of every formula: fresh batches, and no other release."""
        failed += (
            ()
            if self.sampling == "fresh"
            else ("a fresh batch at each step (here: shuffled epochs)",)
        )
        return (
            (*failed, f"nothing is released beside the steps (here too: the {self.beside.name})")
            if self.beside
            else failed
        )

    def scope(self, k: int, count: int, spent: ArrayLike = ()) -> OneClient:
        """What a guarantee of client k relies on after `count` participations. `spent` are the
        epsilons of all clients that took part, of which client k spent most; empty: not known.
        """
        others = np.asarray(spent, np.float64)
        return OneClient(
            client=k,
            batch=int(self.batches[k]),
            samples=int(self.samples[k]),
            hidden=bool(self.amplified[k]),
            gaussians=int(self.compositions[k]) * count,
            steps=int(self.own_steps[k]) * count,
            times=count,
            besides=self.beside.name if self.beside else "",
            spread=tuple(quantiles(others).tolist()) if len(others) else (),
            among=max(len(others), 1),
        )

    def calibrated_by(self, k: int) -> str | None:
        """The accountant or the formula that client k's noise is calibrated by; None where it was
        given, or there is none.
        """
        if self.calibration is None or self.stds[k] == 0:
            return None
        by_formula = self.calibration != "rigorous" and k not in self.unfit
        return self.formula if by_formula else self.accountant

    def _unfit_words(self) -> tuple[str, ...]:
        if not self.unfit:
            return ()
        k, reasons = next(iter(self.unfit.items()))
        private = int((self.stds > 0).sum())
        whose = f"{len(self.unfit)} of {private} clients ({_some(self.unfit)})"
        sizes = f"with {self.samples[k]} samples and batches of {self.batches[k]}"
        return (
            f"{self.formula} does not calibrate the noise of {whose}, for whom conditions of it "
            f"fail, and who have that of {self.accountant} instead; for client {k}, {sizes}: "
            f"{'; '.join(reasons)}",
        )

    def _spoken_of(self, name: str) -> np.ndarray:
        """Bool [N]: the clients that an accountant or a formula speaks of: no public ones, and
        where the formula has calibrated any noise those alone whose noise it has.
        """
        found = ~self.public
        if self.unfit and name == self.formula:
            fit = found & (self.stds > 0)
            fit[list(self.unfit)] = False
            found = fit if fit.any() else found
        return found

    def _public_words(self, count: int) -> tuple[str, ...]:
        return (
            (f"{count} public clients, who have an infinite budget and draw no noise",)
            if count
            else ()
        )

    def _printed_stds(
        self, clients: np.ndarray, counts: np.ndarray, formula: Formula
    ) -> tuple[np.ndarray, dict[int, tuple[str, ...]]]:
        """Stds of these clients by a paper's formula, float64 [k]; and the clients that it refuses,
        with the conditions that fail.
        """
        assert self.claims is not None
        stds = np.zeros(len(clients))
        failed: dict[int, tuple[str, ...]] = {}
        for place, k in enumerate(clients.tolist()):
            client = self._client(k, int(counts[k]))
            printed = formula.noise(float(self.claims[k]), self.delta, **client)
            stds[place] = printed.value
            reasons = formula.refused(self._steps_alone(printed.conditions_failed))
            if reasons:
                failed[k] = reasons
        return stds, failed

    def _rigorous_stds(
        self, clients: np.ndarray, counts: np.ndarray, accountant: str
    ) -> np.ndarray:
        assert self.claims is not None
        _rigorous(accountant)
        b = self.batches[clients]
        q = np.where(self.amplified[clients], b / self.samples[clients], 1.0)
        self._check_seen(clients, q, self.compositions[clients] * counts[clients])
        columns = [
            q,
            self.compositions[clients],
            counts[clients],
            self.claims[clients],
            self.beside_mu[clients],
        ]
        kinds, first, member = np.unique(
            np.stack(columns, 1), axis=0, return_index=True, return_inverse=True
        )
        if self.beside:
            self._check_left(clients[first], kinds, accountant)
        samplings = [self._batch_law(k) for k in clients[first].tolist()]
        question = ["local steps", kinds.tolist(), self.delta, accountant]

        def solved() -> list[float]:
            return _noise_multipliers(samplings, kinds, self.delta, accountant).tolist()

        # the name of a user's own accountant does not say what its code computes
        own = is_user_defined(type(named(accountant)))
        z = solved() if own else cached(question, solved, len(kinds))
        return np.array(z)[member.reshape(-1)] * self.bound / b

    def _check_seen(self, clients: np.ndarray, q: np.ndarray, times: np.ndarray) -> None:
        """Raises `ConfigError` for clients that need no noise at this delta, because their samples
        are in no batch with a probability of at least 1 - delta.
        """
        with np.errstate(divide="ignore"):
            seen = -np.expm1(times * np.log1p(-q))
        idle = clients[seen <= self.delta]
        if len(idle):
            expected = f"below {seen.min():.3g}, the chance that a sample of client {idle[0]} is "
            expected += "used at all: at this delta no noise is called for by "
            expected += f"{len(idle)} clients ({_some(idle.tolist())})"
            raise ConfigError("delta", self.delta, expected)

    def _batch_law(self, k: int) -> Sampling:
        """The law of client k's batches: a secret subset, or all samples."""
        n = int(self.samples[k])
        return Sampling("fixed", n, int(self.batches[k]) if self.amplified[k] else n)

    def _check_left(self, clients: np.ndarray, kinds: np.ndarray, accountant: str) -> None:
        """Raises `ConfigError` where what is released `beside` the steps takes nearly all of a
        client's budget.
        """
        everyone = Sampling("full", 1, 1)
        by = _rigorous(accountant)
        alone = np.array(
            [
                by.curve(Event(everyone, mu), self.delta, np.array([int(count)]))[0]
                for _, _, count, _, mu in kinds.tolist()
            ]
        )
        budgets = kinds[:, 3]
        assert self.beside is not None
        if (alone > _MOST_BESIDE * budgets).any():
            worst = int(np.argmax(alone / budgets))
            k = clients[worst]
            what = f"the {self.beside.name} of client {k}, with {self.samples[k]} samples"
            spent = f"spend epsilon {alone[worst]:.4g} of its {budgets[worst]:.4g} "
            spent += f"in {kinds[worst, 2]:.0f} rounds, by {accountant}"
            raise ConfigError(
                "beside",
                self.beside.std,
                f"more, as {what}, {spent} (99% at most, which leaves some to its steps)",
            )


def _rigorous(name: str) -> Accountant:
    """The rigorous accountant of this name. Raises `ConfigError` if there is none."""
    found = named(name)
    if not found.rigorous:
        known = [each for each, member in ACCOUNTANTS.items() if member.rigorous]
        raise ConfigError("accountant", name, f"one of {', '.join(known)}")
    return found


def _formula(calibration: str) -> Formula:
    """The paper's formula for this calibration."""
    return next(member for member in FORMULAS.values() if member.calibration == calibration)


def _noise_multipliers(
    samplings: Sequence[Sampling], kinds: np.ndarray, delta: float, accountant: str
) -> np.ndarray:
    """z = std of the sum / bound with which clients spend at most their targets, float64 [k]; at
    most 1e-3 (relative) above the smallest.

    `kinds` float64 [k, 5] has the fraction q of a batch, the Gaussians of each participation,
    participations, targets, and mu of the one Gaussian besides the steps of a participation.
    """
    q, each, counts, targets, beside = kinds.T
    by = _rigorous(accountant)
    times = each * counts
    others = beside * np.sqrt(counts)
    mu = _central_limit_mu(q, times, targets, others, delta)
    features = np.log(np.stack([mu, targets, q, times]))
    log_z = np.log(2 / mu)
    offsets = np.zeros(len(q))
    order = np.argsort(log_z, kind="stable")
    for place, k in enumerate(order.tolist()):
        solved = order[:place]
        if place:  # what the approximation was off by for the client most like this one
            near = solved[np.argmin(np.abs(features[:, solved] - features[:, [k]]).sum(axis=0))]
            offsets[k] = offsets[near]
        start = log_z[k] + offsets[k]
        release = Event(samplings[k], 0.0, int(each[k]), float(beside[k]))
        excess = _excess(by, release, int(counts[k]), float(targets[k]), delta, start)
        slope = -_steepness(mu[k] * math.exp(-offsets[k]), q[k], times[k], others[k], delta)
        enough = near_guess(excess, start, slope, _TOLERANCE)
        if enough is None:
            expected = "an epsilon that some noise reaches at this delta"
            raise ConfigError("budgets", float(targets[k]), expected)
        offsets[k] += enough - start
    return np.exp(log_z + offsets)


def _excess(
    by: Accountant, release: Event, count: int, target: float, delta: float, start: float
) -> Callable[[float], float]:
    """A function of log z: the log of epsilon / target, from -20 to 20, after `count` events like
    `release` at that noise. It raises `ConfigError` where delta is out of reach far beyond `start`.
    """
    aim = target * (1 - _CLAIM)

    def excess(x: float) -> float:
        event = replace(release, mu=2 * math.exp(-x))
        spent = by.curve(event, delta, np.array([count]))[0]
        # so much more noise than expected changes nothing any more
        if math.isinf(spent) and x > start + 5:
            expected = f"more, or rdp as the first accountant: {UNREACHED.format(by.name)}"
            raise ConfigError("delta", delta, f"{expected} after {release.each * count} steps")
        return min(max(math.log(max(spent, 1e-9 * aim) / aim), -20.0), 20.0)

    return excess


def _total_mu(mu: np.ndarray, q: np.ndarray, times: np.ndarray) -> np.ndarray:
    """mu of the one Gaussian that `times` subsampled ones approach ([1], replace-one); exact at
    q = 1.
    """
    from scipy.special import ndtr

    # e^(mu^2) must not overflow; any epsilon below 300 needs more noise than this mu has
    mu = np.minimum(mu, 26.0)
    spread = np.exp(mu**2) * ndtr(1.5 * mu) + 3 * ndtr(-mu / 2) - 2
    spread = np.where(mu < 1e-3, mu**2 / 2, spread)  # cancellation would spoil it
    return np.where(q == 1, mu * np.sqrt(times), q * np.sqrt(2 * times * spread))


def _central_limit_mu(
    q: np.ndarray, times: np.ndarray, targets: np.ndarray, others: np.ndarray, delta: float
) -> np.ndarray:
    """The mu at which `_total_mu`, together with one Gaussian of mu `others`, has the epsilons
    `targets`, float64 [k].
    """

    def least(unsafe: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        # of -log mu, which falls as the noise grows
        low = np.full(len(q), -math.log(1e3))
        high = np.full(len(q), -math.log(1e-9))
        return np.exp(-halved(lambda x: unsafe(np.exp(-x)), low, high, times=50))

    total = least(lambda mu: pld.gaussian_delta(targets, mu) > delta)
    total = np.where(others > 0, np.sqrt(np.maximum(total**2 - others**2, 1e-3 * total**2)), total)
    return least(lambda mu: _total_mu(mu, q, times) > total)


def _steepness(mu: float, q: float, times: float, other: float, delta: float) -> float:
    """-d log epsilon / d log z by the central limit theorem, from 0.3 to 20; from 0.03 where a
    Gaussian of mu `other` takes part of epsilon.
    """
    apart = _total_mu(mu * np.exp([0.01, -0.01]), np.full(2, q), np.full(2, times))
    more, less = np.log(np.maximum(pld.gaussian_epsilon(np.hypot(apart, other), delta), 1e-12))
    return float(np.clip((more - less) / 0.02, 0.03 if other else 0.3, 20.0))


def _budgets(values: ArrayLike, clients: int) -> np.ndarray:
    budgets = np.array(np.broadcast_to(np.asarray(values, np.float64), clients))
    if not (budgets > 0).all():
        bad = int(np.flatnonzero(~(budgets > 0))[0])
        raise ConfigError(
            "budgets",
            float(budgets[bad]),
            f"positive numbers, infinity for a public client; this is client {bad}'s",
        )
    return budgets


def _some(clients: Iterable[int]) -> str:
    """The ids of clients, the first ten if there are many."""
    clients = list(clients)
    return ", ".join(map(str, clients[:10])) + (", ..." if len(clients) > 10 else "")
