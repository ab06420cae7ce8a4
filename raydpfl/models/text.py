"""What models of tokens share."""

from collections.abc import Callable

from torch import Tensor, nn

from raydpfl.errors import ConfigError
from raydpfl.models.base import Model
from raydpfl.models.tasks import Form

MODES = "a target per position, or one per sample"


class TokenModel(Model):
    """Base of the models of sequences of whole numbers, int64 [batch, length]. They give scores at
    every position where there is a target at each, else those at the last one.
    """

    def of(self, form: Form) -> nn.Module:
        if not form.tokens or len(form.shape) != 1:
            kind = f"samples are {form.dtype} {form.shape}"
            expected = f"a model for other inputs than sequences of whole numbers; {kind}"
            raise ConfigError("model.kind", self.kind, expected)
        *positions, outputs = form.outputs
        if positions not in ([], list(form.shape)):
            expected = f"one for other targets: {positions} for {form.shape} inputs; it is for"
            raise ConfigError("model.kind", self.kind, f"{expected} {MODES}")
        length = form.shape[0]
        return self.tokens(form.tokens, length, outputs, every if positions else last)

    def tokens(
        self, tokens: int, length: int, outputs: int, pick: Callable[[Tensor], Tensor]
    ) -> nn.Module:
        """A fresh module; `pick` takes of what it has at every position, [batch, length, units],
        what is scored.
        """
        raise NotImplementedError


def every(states: Tensor) -> Tensor:
    """All positions."""
    return states


def last(states: Tensor) -> Tensor:
    """The last position, [batch, units]."""
    return states[:, -1]
