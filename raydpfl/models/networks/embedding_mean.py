"""A classifier of texts by the mean of their tokens' embeddings."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from raydpfl.errors import ConfigError
from raydpfl.models.base import Model
from raydpfl.models.tasks import Form


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

    def __init__(self, embed: nn.Embedding, out: nn.Linear):
        super().__init__()
        self.embed = embed
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        counted = (x != 0).to(torch.float32)
        total = (self.embed(x) * counted[..., None]).sum(1)
        return self.out(total / counted.sum(1, keepdim=True).clamp(min=1.0))
