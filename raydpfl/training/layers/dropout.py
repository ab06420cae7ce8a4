"""The masks of dropout in a chunk that goes through a module as one batch.

>>> generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
>>> with Masks([(generators[0], 3), (generators[1], 2)]):  # the second has 2 samples, and padding
...     together = F.dropout(torch.ones(6, 4))
>>> alone = torch.ones(3, 4).bernoulli_(0.5, generator=torch.Generator().manual_seed(1)) * 2
>>> torch.equal(together[:3], alone)
True
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Masks(TorchFunctionMode):
    """Draws the masks of dropout client by client, as the loop draws them: each from its own
    generator, for its real samples alone.
    """

    def __init__(self, clients: list[tuple[torch.Generator | None, int]]):
        """`clients`: the generator of every slot, None for an empty one, and its samples."""
        super().__init__()
        self.clients = clients

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))

    def _dropout(
        self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0:
            return x
        if len(x) % len(self.clients):
            raise ValueError("the first axis of what is dropped out is not that of the samples")
        mask = torch.ones_like(x, memory_format=torch.contiguous_format)
        by_client = mask.unflatten(0, (len(self.clients), -1))
        for part, (generator, samples) in zip(by_client, self.clients, strict=True):
            if generator is not None:
                part[:samples].bernoulli_(1 - p, generator=generator)
        mask.div_(1 - p)
        return x.mul_(mask) if inplace else x * mask

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """`F.scaled_dot_product_attention`, which draws by itself."""
        if dropout_p == 0:
            options: dict[str, Any] = {"is_causal": is_causal, "scale": scale}
            options["enable_gqa"] = enable_gqa
            return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, **options)
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key = key.repeat_interleave(groups, -3)
            value = value.repeat_interleave(groups, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return self._dropout(torch.softmax(scores, -1), dropout_p) @ value
