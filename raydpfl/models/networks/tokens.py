"""Networks of tokens."""

from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from raydpfl.errors import ConfigError
from raydpfl.models.base import Model
from raydpfl.models.tasks import Form

MODES = "a target per position, or one per sample"


class Pick(nn.Module):
    """Of what there is at every position, [batch, length, units], what is scored: all of it, or the
    last position, [batch, units].
    """

    def __init__(self, all_positions: bool):
        super().__init__()
        self.all_positions = all_positions

    def forward(self, x: Tensor) -> Tensor:
        return x if self.all_positions else x[:, -1]


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
        return self.tokens(form.tokens, form.shape[0], outputs, Pick(bool(positions)))

    def tokens(self, tokens: int, length: int, outputs: int, pick: Pick) -> nn.Module:
        """A fresh module; `pick` takes of what it has at every position what is scored."""
        raise NotImplementedError


class CharLstm(TokenModel):
    """An embedding, one or several LSTM layers and a linear layer. LEAF (Caldas et al. 2018) takes
    2 layers of 256 units behind an embedding of 8 for the next character of Shakespeare's plays.
    """

    kind: str = "char_lstm"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"hidden": 8, "layers": 1},)
    embedding: int = Field(default=8, ge=1, description="numbers of a token's embedding")
    hidden: int = Field(default=256, ge=1, description="units of an LSTM layer")
    layers: int = Field(default=2, ge=1, description="LSTM layers")

    def tokens(self, tokens: int, length: int, outputs: int, pick: Pick) -> nn.Module:
        embedding = nn.Embedding(tokens, self.embedding)
        lstm = nn.LSTM(self.embedding, self.hidden, self.layers, batch_first=True)
        return Lstm(embedding, lstm, nn.Linear(self.hidden, outputs), pick)


class Lstm(nn.Module):
    """Scores of tokens, int64 [batch, length]."""

    def __init__(self, table: nn.Embedding, lstm: nn.LSTM, out: nn.Linear, pick: Pick):
        super().__init__()
        self.embed = table
        self.lstm = lstm
        self.out = out
        self.pick = pick

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(x))
        return self.out(self.pick(states))


class Transformer(TokenModel):
    """A transformer whose positions see themselves and those before: embeddings of tokens and of
    positions, blocks of attention and of a dense layer of `inner` units with ReLU, each behind a
    LayerNorm and added to its input (the pre-norm form of GPT-2), a LayerNorm and a linear layer.
    No dropout. 3 layers of width 96 with 8 heads and 1,536 units inside are the transformer that
    Wang et al. 2021 (2107.06917) train on Stack Overflow.
    """

    kind: str = "transformer"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"width": 8, "heads": 2, "layers": 1},
        {"width": 8, "heads": 2, "layers": 1, "lora": {"rank": 2, "targets": ["into", "down"]}},
    )
    added_fields: ClassVar[frozenset[str]] = TokenModel.added_fields | {"inner"}
    width: int = Field(default=64, ge=1, description="length of a position's vector")
    heads: int = Field(default=4, ge=1, description="of attention, which divide width")
    layers: int = Field(default=2, ge=1, description="blocks")
    inner: int | None = Field(
        default=None, ge=1, description="units of a block's dense layer; None: 4 x width"
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.width % self.heads:
            expected = f"a number that divides model.width = {self.width}"
            raise ConfigError("model.heads", self.heads, expected)
        return self

    def tokens(self, tokens: int, length: int, outputs: int, pick: Pick) -> nn.Module:
        inner = self.inner or 4 * self.width
        return nn.Sequential(
            nn.Embedding(tokens, self.width),
            Positions(length, self.width),
            *(TransformerBlock(self.width, self.heads, inner) for _ in range(self.layers)),
            nn.LayerNorm(self.width),
            pick,
            nn.Linear(self.width, outputs),
        )


class Positions(nn.Module):
    """Adds an embedding of each position, [length, width]."""

    def __init__(self, length: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class TransformerBlock(nn.Module):
    """Attention and a dense layer, [batch, length, width] to the same."""

    def __init__(self, width: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = (
            self._heads(part) for part in self.into(self.before(x)).chunk(3, 2)
        )
        scores = queries @ keys.mT * queries.shape[-1] ** -0.5
        future_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        attention = torch.softmax(scores.masked_fill(future_mask, -torch.inf), -1) @ values
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.between(x))))

    def _heads(self, part: Tensor) -> Tensor:
        """The heads of a part, [batch, heads, length, width / heads]."""
        return part.unflatten(2, (self.heads, -1)).transpose(1, 2)


class EmbeddingMean(Model):
    """The mean of the embeddings of a text's tokens, those of id 0 (padding) left out, and a linear
    layer (fastText; Joulin et al. 2017, sec. 2). A text without tokens has the mean 0.
    """

    kind: str = "embedding_mean"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"width": 8},)
    width: int = Field(default=32, ge=1, description="numbers of an embedding")

    def of(self, form: Form) -> nn.Module:
        if not form.tokens or len(form.shape) != 1 or len(form.outputs) != 1:
            detail = f"samples are {form.dtype} {form.shape}, targets {form.target.shape}"
            expected = f"another model; this one scores sequences of whole numbers; {detail}"
            raise ConfigError("model.kind", self.kind, expected)
        return MeanOfEmbeddings(
            nn.Embedding(form.tokens, self.width), nn.Linear(self.width, form.outputs[0])
        )


class MeanOfEmbeddings(nn.Module):
    """Scores of texts, from their tokens int64 [batch, length]."""

    def __init__(self, table: nn.Embedding, out: nn.Linear):
        super().__init__()
        self.embed = table
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        token_mask = (x != 0).to(torch.float32)
        total = (self.embed(x) * token_mask[..., None]).sum(1)
        return self.out(total / token_mask.sum(1, keepdim=True).clamp(min=1.0))
