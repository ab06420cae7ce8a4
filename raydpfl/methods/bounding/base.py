"""The base of the boundings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from raydpfl.config.registry import overrides
from raydpfl.config.setting import Setting
from raydpfl.core.messages import BOUNDS, Columns, Facts, State, View, check_bound
from raydpfl.errors import ConfigError
from raydpfl.methods.server_state import WithServerState

Bound = Annotated[float, Field(ge=BOUNDS[0], le=BOUNDS[1])]  # an L2 norm


@dataclass(frozen=True)
class BoundingQuery:
    """A number that every client gives in every round with its update; the noisy sum of the
    answers is released too.
    """

    # no two queries of a class have one name, and none is `updates`, `losses`, `loss` or `survey`:
    # noise is keyed by it
    name: str
    # the largest absolute value of an answer, the same in every round: one that grows with the
    # bound in force is given as a fraction of it, one from 0 to 1 minus 1/2, with a bound of 1/2
    bound: float
    # between 0 and 1, of the round's squared sensitivity-to-noise ratio: with z the noise
    # multiplier of the round, the noise on the sum of the answers has std z bound / sqrt(share)
    share: float


class Bounding(WithServerState):
    """Base of the family. A member gives `factor` (or `factors`), and of the other hooks what it
    needs.

    A client sends the vector that `send` makes of its update times `factors(norms, bound)`, where
    `norms` are the L2 norms of such vectors. Nothing that it sends is longer than the bound in
    force, which is the field `bound` in the first round. Vectors are float64 [k, d], those of k
    clients at once; no client may depend on the others. Tensors given to `send` may be written to.
    """

    order: ClassVar[int] = 2  # of the norm that is at most `bound`: L2, or L1

    scaling: Literal["update", "gradient"] = Field(
        default="update",
        description=(
            "what is bounded: the update, or update / lr, minus the sum of gradients, as 001 "
            "writes it"
        ),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A class with another `factor`, or other `factors`, its own or a mixin's, does not inherit
        the other.
        """
        super().__pydantic_init_subclass__(**options)
        overrides_by_class = ({"factor", "factors"} & vars(base).keys() for base in cls.__mro__)
        overridden = next(filter(None, overrides_by_class))
        if overridden == {"factor"}:
            cls.factors = Bounding.factors  # type: ignore[method-assign]
        if overridden == {"factors"}:
            cls.factor = _scalar_factor(cls.factors)  # type: ignore[method-assign]

    @property
    def initial_bound(self) -> float | None:
        """The bound in force in the first round, an L2 norm: the field `bound`. None: nothing is
        bounded, and no privacy can be claimed for what is sent.
        """
        return getattr(self, "bound", None)

    @property
    def sample_bound(self) -> float | None:
        """The bound on each sample's gradient in a local step, an L2 norm; None: not bounded."""
        return None

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for a bound outside of `raydpfl.core.messages.BOUNDS`, for weights
        where the plain mean over clients is needed, for queries without `adapt`, and for two
        members that keep states of clients.
        """
        for bound in (self.initial_bound, self.sample_bound):
            if bound is not None:
                check_bound("bounding.bound", bound)
        if self.sends_model() and setting.weighted:
            expected = f"uniform with {self.kind}: the new model is the mean of those sent"
            raise ConfigError("weights.kind", setting.kinds["weights"], expected)
        if self.queries() and not self.adapts:
            expected = "a class with adapt, which takes up the answers to its queries"
            raise ConfigError("bounding.kind", self.kind, expected)
        if not self.stateful:
            return
        if "local" in setting.stateful:
            local = setting.kinds["local"]
            expected = f"a bounding without memory next to local.kind {local}, which has one"
            raise ConfigError("bounding.kind", self.kind, expected)
        if setting.weighted:
            expected = f"uniform, as {self.kind} keeps the plain mean over all clients"
            raise ConfigError("weights.kind", setting.kinds["weights"], expected)

    @property
    def scales(self) -> bool:
        """Whether clients send their updates as they are, times the factors of their L2 norms."""
        plain = type(self).send is Bounding.send and self.scaling == "update"
        return plain and self.order == 2

    def sends_model(self) -> bool:
        """Whether the mean of what is sent is the new model itself, not a change of it."""
        return False

    @property
    def far(self) -> float:
        """The norm, in bounds, from which what is sent is about as long as the bound."""
        return 0.0

    # --- what a client does ---

    def send(self, updates: Tensor, view: View) -> Tensor:
        """What clients would send without a bound, float64 [k, d], of their updates float64 [k, d],
        which may be written to.

        By default the update Delta = x^Q - x; with `scaling: gradient` Delta / lr, minus the sum of
        the local gradients (001 Alg. 1-2 bound that, and the server multiplies by lr again).
        """
        if self.scaling == "gradient":
            updates /= view.lr
        return updates

    def invert(self, vectors: Tensor, view: View) -> Tensor:
        """The updates from which `send` makes these vectors, float [k, d] both."""
        return vectors * view.lr if self.scaling == "gradient" else vectors

    def factor(self, norm: float, bound: float) -> float:
        """The factor on a vector of this finite L2 norm, under the bound in force; norm times
        factor is at most `bound`.
        """
        raise NotImplementedError

    def factors(self, norms: Tensor, bound: float) -> Tensor:
        """`factor` of k norms, float64 [k] both. The bound is infinite where there is none."""
        values = [self.factor(norm, bound) for norm in norms.tolist()]
        return torch.tensor(values, dtype=torch.float64, device=norms.device)

    def closed(self, bound: float) -> tuple[float, float, float] | None:
        """(threshold, numerator, offset): factors are 1 for norms up to `threshold`, and
        numerator / (offset + norm) beyond, or 0 where that divides by 0; to the bit as `factors`,
        as torch divides a number by a tensor. None: no such form. Not used of user-defined classes.
        """
        return None

    def clipped(self, factors: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """The column `clipped` of clients.parquet, float64 [k]: 1 for a factor below 1, else 0, of
        `factors` float64 [k]; or `samples` float64 [k], the share of each client's (sample, step)
        pairs whose gradient was clipped.
        """
        return samples if self.sample_bound is not None else (factors < 1.0).astype(np.float64)

    def next_state(self, vectors: Tensor, sent: Tensor, view: View) -> Tensor | None:
        """The states of clients for their next round, [k, d], where they were `view.state`; None:
        they have none. `vectors` are as `send` made them, `sent` the same bounded and weighted,
        without noise, float64 [k, d]: the difference is what bounding has left out.
        """
        return None

    stateful = overrides(next_state)  # whether clients keep a vector from one round to their next

    # --- what the server does ---

    def receive(self, noisy_sum: np.ndarray, state: State, facts: Facts) -> np.ndarray:
        """The mean update, in units of updates, float64 [d], of the sum of the contributions with
        noise, float64 [d]; may change `state` in place.
        """
        mean = noisy_sum / facts.divisor
        return mean * facts.lr if self.scaling == "gradient" else mean

    # --- a bound that adapts ---

    def queries(self) -> tuple[BoundingQuery, ...]:
        """The numbers that clients give in addition to what they send."""
        return ()

    def answers(self, columns: Columns, bound: float) -> Mapping[str, np.ndarray]:
        """The clients' answers by query, float64 [r]; NaN counts as 0. `columns` are `norm`,
        `factor`, `train_loss` and more of each client, float64 [r], NaN for one that failed.
        """
        return {}

    def each_answer(self, columns: Columns, bound: float) -> Mapping[str, np.ndarray]:
        """`answers`, of a user-defined class asked about each client alone: so none depends on
        another client.
        """
        count = len(columns["client"])
        if not self.is_user_defined or count < 2:
            return self.answers(columns, bound)
        rows = [
            self.answers({name: column[i : i + 1] for name, column in columns.items()}, bound)
            for i in range(count)
        ]
        names = [name for name in rows[0] if all(name in row for row in rows)]
        return {name: np.concatenate([np.atleast_1d(row[name]) for row in rows]) for name in names}

    def adapt(self, bound: float, sums: Mapping[str, float], clients: float, state: State) -> float:
        """The bound of the next round, within `raydpfl.core.messages.BOUNDS`, which may depend on
        nothing that has not been released.

        Args:
            bound: that of this round.
            sums: the noisy sum of the answers, by query.
            clients: how many answered; the expected number where that is a secret.
            state: as `start` made it, to be changed in place.
        """
        return bound

    adapts = overrides(adapt)  # whether the bound may change from round to round


def _scalar_factor(factors: Callable[[Any, Tensor, float], Tensor]) -> Callable[..., float]:
    """`factor` of a class that has these `factors`, whatever those of its subclasses."""

    def factor(self: Bounding, norm: float, bound: float) -> float:
        return float(factors(self, torch.tensor([norm], dtype=torch.float64), bound)[0])

    return factor


class ClosedForm(Bounding):
    """Base of the members with a closed form, which give `closed`."""

    def factors(self, norms: Tensor, bound: float) -> Tensor:
        form = self.closed(bound)
        assert form is not None  # of these members
        threshold, numerator, offset = form
        divisors = offset + norms
        far_factors = torch.where(divisors > 0, numerator / divisors, 0.0)
        return torch.where(norms <= threshold, 1.0, far_factors)
