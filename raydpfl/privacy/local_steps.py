"""Noise at local steps (002, 003), as accountants read it: a mechanism per client.

A client clips every sample's gradient, adds Gaussian noise to the mean gradient of a batch at every
step, and sends its update, which is seen: only its own noise protects its samples, and only its own
participations compose. These are public before training, as are sizes, budgets and noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike

from raydpfl.errors import ConfigError
from raydpfl.privacy.accountants.xu_2026 import budget_variance
from raydpfl.privacy.group import group_sampling
from raydpfl.privacy.mechanism import Event, Mechanism, Query, Survey
from raydpfl.privacy.sampling import Sampling
from raydpfl.privacy.types import Unit, one_of

Method = Literal["rigorous", "paper", "tcdp"]
Participations = Mapping[int, int] | ArrayLike


@dataclass(frozen=True)
class Calibration:
    """What the noise was calibrated by: an accountant (`rigorous`), or the formula of 003 (`paper`)
    or 002 (`tcdp`), and the accountant for the `unfit` clients, of whom conditions of it fail.
    """

    method: Method
    accountant: str | None = None
    unfit: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class LocalSteps:
    """What N clients release, and what they were promised. Raises `ConfigError` for a field out of
    range.
    """

    samples: np.ndarray  # n_k, int64 [N]
    # B, a client with fewer samples uses all of them, or B_k, int64 [N]; None: all at every step
    batch: int | np.ndarray | None
    steps: int | np.ndarray  # Q, local steps of one participation; or Q_k, int64 [N]
    bound: float  # the per-sample clip norm
    delta: float  # of all epsilons
    # of the noise on the mean gradient of a batch, in the units of `bound`, float64 [N] or one for
    # all; 0: no noise
    stds: np.ndarray
    # a uniform subset at every step; or shuffled samples in turn, which amplify nothing
    sampling: Literal["fresh", "epochs"] = "fresh"
    # the epsilon promised to a client for its participations in the whole run, float64 [N];
    # infinite for a public client; None: nothing was promised
    claims: np.ndarray | None = None
    calibration: Calibration | None = None  # of the noise; None: it was specified
    exclusions: tuple[str, ...] = ()  # what is not accounted for, in words
    # what every participation also answers, by the mean over the client's n_k samples of values
    # within [-bound, bound] plus noise of its std: a replaced sample moves it by 2 bound / n_k
    side_query: Query | None = None

    # what a `Mechanism` has otherwise
    by_draws: ClassVar[bool] = True  # spending is counted client by client, by the rounds drawn in
    unit: ClassVar[Unit] = "sample"
    cohorts: ClassVar[Sampling | None] = None
    survey: ClassVar[Survey | None] = None
    noise_multiplier: ClassVar[float | None] = None
    integer: ClassVar[None] = None  # noise at local steps is Gaussian
    proof_gap: ClassVar[str | None] = None
    hidden: ClassVar[bool] = False
    factors: ClassVar[tuple[float, ...]] = ()

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
            claims = np.array(np.broadcast_to(self.claims, self.samples.shape), np.float64)
            wrong = np.flatnonzero(~(claims > 0))
            if len(wrong):
                expected = "positive numbers, infinity for a public client; this is client "
                raise ConfigError("budgets", claims[wrong[0]].item(), f"{expected}{wrong[0]}'s")
            object.__setattr__(self, "claims", claims)

    def _check_counts(self, name: str, counts: int | np.ndarray | None) -> None:
        """Raises `ConfigError` for what is no number of samples or steps, nor one per client."""
        if counts is None and name == "batch":
            return
        numbers = np.asarray(counts)
        min_counts = np.minimum(self.samples, 1) if numbers.ndim else 1
        fits = numbers.shape in ((), np.shape(self.samples))
        if not (fits and numbers.dtype.kind in "iu" and (numbers >= min_counts).all()):
            raise ConfigError(name, counts, "an integer, at least 1, or one per client")

    @property
    def batches(self) -> np.ndarray:
        """B_k int64 [N]: the samples in a batch of a client."""
        return self.samples if self.batch is None else np.minimum(self.batch, self.samples)

    @property
    def client_steps(self) -> np.ndarray:
        """Q_k int64 [N]: the local steps of a client in one participation."""
        return np.broadcast_to(np.asarray(self.steps, np.int64), self.samples.shape)

    @property
    def amplified(self) -> np.ndarray:
        """Bool [N]: whether a batch is a secret subset, which amplifies privacy."""
        return (self.batches < self.samples) & (self.sampling == "fresh")

    @property
    def compositions(self) -> np.ndarray:
        """Int64 [N]: how many Gaussians one participation composes. Fresh batches: one a step, of a
        hidden subset. Shuffled epochs, whose order is public: a sample is used once in each of the
        ceil(Q B / n). Where n is no multiple of B, a batch across two epochs may hold it twice, at
        the cost of four Gaussians; at worst every second time.
        """
        n = self.samples
        b = np.maximum(self.batches, 1)
        steps = self.client_steps
        if self.sampling == "fresh":
            return steps
        uses = -(-steps * b // np.maximum(n, 1))
        return np.where(n == b, steps, np.where(n % b == 0, uses, 4 * (uses // 2) + uses % 2))

    @property
    def side_mu(self) -> np.ndarray:
        """Sensitivity / std of a participation's answer to `side_query`, float64 [N]."""
        if self.side_query is None:
            return np.zeros(len(self.samples))
        return 2 * self.side_query.bound / (np.maximum(self.samples, 1) * self.side_query.std)

    def batch_sampling(self, k: int) -> Sampling:
        """The sampling of client k's batches: a secret subset, or all samples."""
        n = int(self.samples[k])
        return Sampling("fixed", n, int(self.batches[k]) if self.amplified[k] else n)

    def event(self, k: int, group: int = 1) -> Event:
        """What one participation of client k releases about up to `group` of its samples."""
        sampling, factor = self.batch_sampling(k), 1
        batch, gaussians = int(self.batches[k]), int(self.compositions[k])
        group = min(group, int(self.samples[k]))
        if group > 1:
            sampling, factor = group_sampling(sampling, group)
            # a batch is no more than all of them; in epochs their Gaussians may be more
            steps = int(self.client_steps[k])
            if not self.amplified[k] and batch**2 * steps <= group**2 * gaussians:
                factor, gaussians = batch, steps
        return Event(
            sampling,
            factor * 2 * self.bound / (batch * float(self.stds[k])),
            gaussians,
            group * float(self.side_mu[k]),
        )

    def formula_arguments(self, k: int, count: int) -> dict[str, Any]:
        """What the papers' formulas read of client k after `count` participations."""
        return {
            "bound": self.bound,
            "batch": int(self.batches[k]),
            "samples": int(self.samples[k]),
            "steps": int(self.client_steps[k]) * count,
        }

    def unmet_conditions(self) -> tuple[str, ...]:
        """The conditions of every paper's formula that fail, in words."""
        query = self.side_query
        failures = {
            "a fresh batch at each step (here: shuffled epochs)": self.sampling != "fresh",
            f"nothing is released next to the steps (here too: the {query and query.name})": query,
        }
        return tuple(words for words, holds in failures.items() if holds)

    def counts(self, participations: Participations) -> np.ndarray:
        """Participations, int64 [N], from these numbers or by id. Raises `ConfigError`."""
        if isinstance(participations, Mapping):
            counts = np.zeros(len(self.samples), np.int64)
            counts[list(participations)] = list(participations.values())
            return counts
        counts = np.asarray(participations, np.int64)
        if counts.shape != self.samples.shape or (counts < 0).any():
            expected = f"{len(self.samples)} whole numbers from 0, one per client"
            raise ConfigError("participations", participations, expected)
        return counts

    @property
    def largest(self) -> int:
        return int(self.samples.max())

    def sum_stds(self, cohort: int) -> Mapping[str, float]:
        return {}

    def client_columns(self) -> Mapping[str, np.ndarray]:
        """What is public of clients' privacy, float64 [N] by name: `budget`, the epsilon promised
        to a client's samples, infinite for a public client; `noise_std`, on the mean gradient;
        `variance`, V_k of 003.
        """
        if self.claims is None:
            return {"noise_std": self.stds}
        samples = np.maximum(self.samples, 1)  # a client without samples never takes part
        batches = np.maximum(self.batches, 1)
        variance = budget_variance(self.claims, self.delta, batch=batches, samples=samples)
        return {"budget": self.claims, "noise_std": self.stds, "variance": variance}

    @property
    def public(self) -> np.ndarray:
        """Bool [N]: clients with an infinite budget, which need no protection."""
        return np.zeros(len(self.samples), bool) if self.claims is None else np.isinf(self.claims)

    def digest(self) -> str:
        """SHA-256 of all fields, in hexadecimal. Its form is part of every run's noise."""
        query = self.side_query
        plain: list[Any] = [
            self.batch.tolist() if isinstance(self.batch, np.ndarray) else self.batch,
            self.steps.tolist() if isinstance(self.steps, np.ndarray) else self.steps,
            self.bound,
            self.delta,
            self.sampling,
            self.calibration and self.calibration.method,
            list(self.exclusions),
        ]
        if query:
            fields = {"name": query.name, "bound": query.bound, "std": query.std}
            plain.append(fields | {"apart": query.per_client})
        digest = hashlib.sha256(json.dumps(plain).encode())
        for array in (self.samples, self.stds, *([] if self.claims is None else [self.claims])):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def restarted_release(self, max_participations: int) -> LocalSteps:
        """The same for a run that was restarted with fresh noise: steps have noise of their own."""
        return self

    def round_digest(self) -> str:
        return self.digest()


Release = Mechanism | LocalSteps


def client_list(clients: list[int]) -> str:
    """The ids of clients in words, the first ten if there are many."""
    return ", ".join(map(str, clients[:10])) + (", ..." if len(clients) > 10 else "")
