"""Power-of-choice: the clients with the largest losses take part (Cho, Wang, Joshi 2020; the biased
baseline of 003 sec. VI-B).
"""

from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from raydpfl.config.setting import Setting
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.methods.noise.keyed_noise import query_noise
from raydpfl.methods.selection.base import Ask, Cohort, Population
from raydpfl.methods.selection.uniform import Sized
from raydpfl.privacy import Query, Sampling


class PowerOfChoice(Sized):
    """Of `pool` candidates, drawn without replacement in proportion to their data, the `cohort`
    with the largest local losses under the global model.

    All candidates are asked, so all are exposed. The weights are uniform.

    The losses are a query on the data; a candidate answers with the mean of its (clipped) losses
    plus Gaussian noise of std `loss_std`. Accountants count the answer in every round in which a
    client is a candidate. The observer may see all answers. The sensitivity of one answer is

    - L where a client is replaced by another;
    - L/2 where its contribution may be zero instead, which stands for the middle of the range;
    - L / n_k where one of its n_k samples is replaced (noise at local steps), if samples do not
      affect each other in the model's forward pass.

    Without noise no accountant covers the query, and every guarantee says so. Either way candidates
    are counted as if each took part in the round and everyone knew it.

    With `accounted: chosen` noise at local steps is that of a rival that looks at no losses: for
    the participations of `cohort` clients drawn blindly among the candidates, at least one for a
    client that is ever a candidate. The guarantees still count all candidates, and so exceed the
    budgets; epsilons that count the chosen alone stand next to them, and are not called rigorous.
    """

    examples = (
        {"cohort": 5, "pool": 12},
        {"cohort": 5, "pool": 12, "loss_bound": 3.0, "loss_std": 1.0},
        {"cohort": 5, "pool": 12, "accounted": "chosen"},
    )
    added_fields = frozenset({"accounted"})
    kind: str = "power_of_choice"
    pool: int = Field(ge=1, description="candidates, who are asked for their losses")
    loss_bound: float | None = Field(
        default=None, gt=0, le=1e15, description="L; a sample's loss is clipped to [0, L]"
    )
    loss_std: float = Field(default=0.0, ge=0, le=1e15, description="0: the losses are exact")
    accounted: Literal["candidates", "chosen"] = Field(
        default="candidates", description="whose participations noise at local steps is sized for"
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.pool < self.cohort:
            expected = f"at least selection.cohort, {self.cohort}"
            raise ConfigError("selection.pool", self.pool, expected)
        if self.accounted == "chosen" and self.loss_std:
            expected = "candidates with selection.loss_std: noised losses are counted, of all asked"
            raise ConfigError("selection.accounted", self.accounted, expected)
        if self.loss_std and self.loss_bound is None:
            expected = "a number with selection.loss_std, as else losses have no sensitivity"
            raise ConfigError("selection.loss_bound", None, expected)
        min_std = 1e-9 * (self.loss_bound or 0.0)
        if 0 < self.loss_std < min_std:
            expected = f"0, or at least {min_std:g}, a billionth of selection.loss_bound"
            raise ConfigError("selection.loss_std", self.loss_std, expected)
        return self

    @property
    def exclusions(self) -> tuple[str, ...]:
        query = (
            "clients are chosen by their local losses, a data-dependent query that is not noised"
        )
        return () if self.loss_std else (query,)

    @property
    def loss_query(self) -> Query | None:
        """Centred, so that answers lie within L/2 of 0."""
        if self.loss_bound is None or not self.loss_std:
            return None
        return Query("losses", self.loss_bound / 2, self.loss_std, per_client=True)

    def answer(self, losses: np.ndarray, noise_seed: int, t: int, client: int) -> float:
        if self.loss_bound is None:
            return super().answer(losses, noise_seed, t, client)
        clipped_losses = np.clip(np.where(np.isnan(losses), 0.0, losses), 0.0, self.loss_bound)
        noise = query_noise(noise_seed, t, self.loss_std, client, query="losses")
        return float(clipped_losses.mean()) + noise

    def check(self, setting: Setting) -> None:
        if self.accounted == "chosen" and setting.drawn_by != "step":
            expected = "candidates, unless noise is drawn at local steps"
            raise ConfigError("selection.accounted", self.accounted, expected)

    def fits(self, count: int) -> None:
        super().fits(count)
        if self.pool > count:
            expected = f"at most the population of {count} clients"
            raise ConfigError("selection.pool", self.pool, expected)

    def exposed(self, seed: int, t: int, population: Population) -> np.ndarray:
        """The candidates. Raises `ConfigError` when fewer than `pool` clients have data."""
        return np.sort(successive_sample(stream(seed, Purpose.COHORT, t=t), population, self.pool))

    def calibration_draws(self, seed: int, rounds: int, population: Population) -> list[np.ndarray]:
        """The candidates; or cohorts of them that no losses have chosen, those drawn first, and at
        last the candidates who have not come up.
        """
        candidates = super().calibration_draws(seed, rounds, population)
        if self.accounted == "candidates":
            return candidates
        streams = [stream(seed, Purpose.COHORT, t=t) for t in range(rounds)]
        cohorts = [successive_sample(rng, population, self.pool)[: self.cohort] for rng in streams]
        return [*cohorts, np.setdiff1d(np.concatenate(candidates), np.concatenate(cohorts))]

    @property
    def uncounted(self) -> str | None:
        if self.accounted == "candidates":
            return None
        return (
            "noise is sized as if cohorts were drawn blindly among the candidates: that all of "
            "these are asked, and that losses choose, is not counted (selection.accounted: chosen)"
        )

    def select(self, seed: int, t: int, population: Population, ask: Ask) -> Cohort:
        """The candidates with the largest losses. Of equal losses the lower client's comes first;
        NaN comes last.
        """
        candidates = self.exposed(seed, t, population)
        order = np.argsort(-ask(candidates), kind="stable")
        return Cohort.of(candidates[order[: self.cohort]])

    def sampling(self, population: Population) -> Sampling:
        rule = f"the largest losses of {self.pool} candidates"
        rule = f"{rule}, noised and seen by all" if self.loss_std else rule
        return Sampling("public", len(population), self.cohort, rule=rule)

    def clients_left(self, seed: int, rounds: int, population: Population) -> int:
        """A lower bound: the number if all candidates that drop out had been chosen."""
        if not self.dropout:
            return self.cohort
        candidates = (Cohort.of(self.exposed(seed, t, population)) for t in range(rounds))
        max_lost = max(self.drop(seed, t, cohort).lost for t, cohort in enumerate(candidates))
        return max(0, self.cohort - max_lost)


def successive_sample(
    generator: np.random.Generator, population: Population, size: int, attempts: int = 8
) -> np.ndarray:
    """`size` distinct clients drawn one after another, each in proportion to its samples among
    those that are left: int64 [size].

    Draws with replacement, without the repeats, have that distribution at O(size log N). Where few
    clients hold nearly all data and `attempts` times 2 size draws are not enough, the rest come in
    the order of exponential clocks of rate n_k, which has the same distribution at O(N).

    Raises `ConfigError` if fewer clients have data.
    """
    sums = population.cached("sums of sizes", lambda: np.cumsum(population.sizes))
    clients = np.empty(0, np.int64)
    for _ in range(attempts):
        places = generator.integers(sums[-1], size=2 * size)
        clients = np.concatenate([clients, np.searchsorted(sums, places, side="right")])
        # each client where it came first
        clients = clients[np.sort(np.unique(clients, return_index=True)[1])]
        if len(clients) >= size:
            return clients[:size]
    with np.errstate(divide="ignore"):
        clocks = generator.standard_exponential(len(population)) / population.sizes
    clocks[clients] = np.inf
    eligible_count = int(np.isfinite(clocks).sum())
    missing = size - len(clients)
    if eligible_count < missing:
        expected = f"at most the {eligible_count + len(clients)} clients that have data"
        raise ConfigError("selection.pool", size, expected)
    return np.concatenate([clients, np.argsort(clocks)[:missing]])
