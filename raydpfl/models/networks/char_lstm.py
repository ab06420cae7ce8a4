"""The LSTM of LEAF's Shakespeare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import Field
from torch import Tensor, nn

from raydpfl.models.text import TokenModel


class CharLstm(TokenModel):
    """An embedding, one or several LSTM layers and a linear layer. LEAF (Caldas et al. 2018) takes
    2 layers of 256 units behind an embedding of 8 for the next character of Shakespeare's plays.
    """

    kind: str = "char_lstm"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"hidden": 8, "layers": 1},)
    embedding: int = Field(default=8, ge=1)
    hidden: int = Field(default=256, ge=1)
    layers: int = Field(default=2, ge=1)

    def tokens(
        self, tokens: int, length: int, outputs: int, pick: Callable[[Tensor], Tensor]
    ) -> nn.Module:
        embed = nn.Embedding(tokens, self.embedding)
        lstm = nn.LSTM(self.embedding, self.hidden, self.layers, batch_first=True)
        return Lstm(embed, lstm, nn.Linear(self.hidden, outputs), pick)


class Lstm(nn.Module):
    """Scores of tokens, int64 [batch, length]."""

    def __init__(
        self, embed: nn.Embedding, lstm: nn.LSTM, out: nn.Linear, pick: Callable[[Tensor], Tensor]
    ):
        super().__init__()
        self.embed = embed
        self.lstm = lstm
        self.out = out
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.out(self.pick(states))
