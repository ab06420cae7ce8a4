"""The base of what bounds a client's influence, and what every member promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from raydpfl.errors import ConfigError
from raydpfl.member import Member
from raydpfl.rounds import Columns, Facts, State, View

if TYPE_CHECKING:
    from raydpfl.config import Experiment


@dataclass(frozen=True)
class Query:
    """A number that every client answers in every round, besides what it sends.

    The noised sum of the answers is released too. `bound` is the largest size of one answer,
    `share` (between 0 and 1) how much of the round's squared sensitivity-to-noise ratio is spent on
    it: with z the noise multiplier of the round the sum has noise of std z bound / sqrt(share).
    `bound` is the same in every round: an answer that grows with the bound in force is given as a
    share of it. One from 0 to 1 is given less 1/2, with a bound of 1/2.
    """

    name: str
    bound: float
    share: float


class Bounding(Member):
    """Base of the family. A member gives `factor` (or `factors`), and what else it needs of these.

    What a client sends is `factors(norms, bound)` times the vectors that `send` makes of updates,
    `norms` being their L2 norms. Nothing it sends is longer than the bound in force, the field
    `bound` in the first round. Vectors are float64 [k, d], those of k clients at once; what a
    client gets must not depend on the others. Tensors given to `send` may be written to.

    >>> import math
    >>> class Tanh(Bounding):
    ...     bound: float = 1.0
    ...     def factor(self, norm, bound):
    ...         return bound * math.tanh(norm / bound) / norm if norm > 0 else 0.0
    >>> norms = torch.tensor([0.0, 0.1, 3.0], dtype=torch.float64)
    >>> Tanh().factors(norms, 1.0) * norms
    tensor([0.0000, 0.0997, 0.9951], dtype=torch.float64)
    """

    scaling: Literal["update", "gradient"] = "update"

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A class with a `factor` of its own is not bounded by the `factors` of its base."""
        super().__pydantic_init_subclass__(**options)
        if "factor" in vars(cls) and "factors" not in vars(cls):
            cls.factors = Bounding.factors  # type: ignore[method-assign]
        if "factors" in vars(cls) and "factor" not in vars(cls):
            cls.factor = _of_one  # type: ignore[method-assign]

    @property
    def initial_bound(self) -> float | None:
        """The bound in force in the first round: the field `bound` of every member that has one.

        None: nothing is bounded, and no privacy can be claimed for what is sent.
        """
        return getattr(self, "bound", None)

    @property
    def sample_bound(self) -> float | None:
        """The bound on each sample's gradient within a local step; None: they are not bounded."""
        return None

    def check(self, experiment: Experiment) -> None:
        """Raises `ConfigError` where the mean over clients would not be what the server needs, and
        for queries whose answers nothing takes up.
        """
        if self.sends_model() and not experiment.weights.plain():
            accepted = f"uniform with {self.kind}: the new model is the mean of those sent"
            raise ConfigError("weights.kind", experiment.weights.kind, accepted)
        if self.queries() and not self.adapts:
            accepted = "a class with adapt, which takes up the answers to its queries"
            raise ConfigError("bounding.kind", self.kind, accepted)
        if not self.remembers:
            return
        if experiment.local.remembers:
            accepted = (
                f"a bounding without memory beside local.kind {experiment.local.kind}, which has "
                "one"
            )
            raise ConfigError("bounding.kind", self.kind, accepted)
        if not experiment.weights.plain():
            accepted = f"uniform, as {self.kind} keeps the plain mean over all clients"
            raise ConfigError("weights.kind", experiment.weights.kind, accepted)

    @property
    def remembers(self) -> bool:
        """Whether clients keep a vector from one of their rounds to the next."""
        return type(self).remember is not Bounding.remember

    @property
    def adapts(self) -> bool:
        """Whether the bound may change from round to round."""
        return type(self).adapt is not Bounding.adapt

    def sends_model(self) -> bool:
        """Whether the mean of what is sent is the new model itself, and no change of it."""
        return False

    @property
    def far(self) -> float:
        """How far beyond the bound a norm must lie for what is sent to be about as long as it."""
        return 0.0

    # --- what a client does ---

    def send(self, updates: torch.Tensor, view: View) -> torch.Tensor:
        """What clients with these updates would send unbounded, float64 [k, d] both.

        By default the update Delta = x^Q - x; with `scaling: gradient` Delta / lr, minus the sum of
        the local gradients (001 Alg. 1-2 bound that, and the server multiplies by lr again).
        """
        if self.scaling == "gradient":
            updates /= view.lr
        return updates

    def invert(self, vectors: torch.Tensor, view: View) -> torch.Tensor:
        """The updates of which `send` makes these vectors, float [k, d] both; for audits."""
        return vectors * view.lr if self.scaling == "gradient" else vectors

    def factor(self, norm: float, bound: float) -> float:
        """What a vector of this finite norm is multiplied by, given the bound in force."""
        raise NotImplementedError

    def factors(self, norms: torch.Tensor, bound: float) -> torch.Tensor:
        """`factor` of k norms, float64 [k] both; the bound is infinite where there is none."""
        found = [self.factor(norm, bound) for norm in norms.tolist()]
        return torch.tensor(found, dtype=torch.float64, device=norms.device)

    def clipped(self, factors: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """The column `clipped` of clients.parquet, float64 [k]: 1 for a factor below 1, else 0.

        `samples` is the share of each client's (sample, step) pairs whose gradient was clipped.
        """
        return (factors < 1.0).astype(np.float64)

    def remember(
        self, vectors: torch.Tensor, sent: torch.Tensor, view: View
    ) -> torch.Tensor | None:
        """What clients that sent this keep for their next round, [k, d]; they had `view.own`.

        `vectors` float64 [k, d] are those that `send` made, `sent` float64 [k, d] is the same
        bounded and weighted, and still without noise. What bounding has left out is their
        difference (error feedback).
        """
        return None

    def moved(self, sent: torch.Tensor, view: View) -> torch.Tensor:
        """What clients moved by, in units of updates, when they sent this: float64 [k, d] both."""
        return sent * view.lr if self.scaling == "gradient" else sent

    # --- what the server does ---

    def start(self, d: int) -> State:
        """The server's part of the memory before the first round, float64 arrays by name."""
        return {}

    def tells(self, state: State) -> State:
        """What clients are told of that in every round, float32 arrays by name (`View.told`)."""
        return {}

    def receive(self, released: np.ndarray, state: State, facts: Facts) -> np.ndarray:
        """The mean update, float64 [d], from the released sum of the contributions, float64 [d].

        `state` is the member's own, to be changed in place.
        """
        mean = released / facts.divisor
        return mean * facts.lr if self.scaling == "gradient" else mean

    # --- a bound that adapts ---

    def queries(self) -> tuple[Query, ...]:
        """What clients answer besides what they send."""
        return ()

    def answers(self, columns: Columns, bound: float) -> Mapping[str, np.ndarray]:
        """By query, each client's answer, float64 [r], from what is known of it.

        `columns` are `norm`, `factor`, `train_loss` and more, float64 [r] each, NaN for one that
        failed. An answer that is NaN counts as 0.
        """
        return {}

    def adapt(self, bound: float, sums: Mapping[str, float], clients: float, state: State) -> float:
        """The bound of the next round.

        Args:
            bound: that of this round.
            sums: by query, the noised sum of the answers.
            clients: how many answered; the expected number where that is a secret.
            state: the member's own, as `start` made it, to be changed in place.

        Returns:
            A positive number, which may depend on nothing that has not been released.
        """
        return bound


def _of_one(self: Bounding, norm: float, bound: float) -> float:
    return float(self.factors(torch.tensor([norm], dtype=torch.float64), bound)[0])
