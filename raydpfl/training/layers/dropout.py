"""The masks of dropout of a chunk's clients, drawn as the plain loop draws them: each client's from
its own generator, for its real samples alone.

>>> generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
>>> slots = [(generators[0], 3), (generators[1], 2)]
>>> masks = draw(slots, [DropoutCall((4,), 0.5)], torch.ones(2, 3))
>>> with Dropout(iter([masks[0][1]])):
...     second = F.dropout(torch.ones(3, 4))
>>> alone = torch.ones(2, 4).bernoulli_(0.5, generator=torch.Generator().manual_seed(2)) * 2
>>> torch.equal(second[:2], alone)
True
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

Draws = Sequence[tuple[torch.Generator | None, int]]
"""The generator of every slot, None for an empty one, and its samples."""


class DropoutCall(NamedTuple):
    """What a module's dropout is called with."""

    shape: tuple[int, ...]  # of one sample
    p: float


class Dropout(TorchFunctionMode):
    """Takes the masks of `F.dropout` and of attention, in their order, from `masks`."""

    def __init__(self, masks: Iterable[torch.Tensor] = ()):
        super().__init__()
        self.masks = iter(masks)

    def mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """What x is multiplied by where each of its numbers is dropped with probability p."""
        return next(self.masks)

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
        mask = self.mask(x, p)
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


class RowMajor(Dropout):
    """Draws each mask in the order of its axes; torch draws in the order of memory."""

    def mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        keep_mask = torch.empty(x.shape, dtype=x.dtype, device=x.device).bernoulli_(1 - p)
        return keep_mask.div_(1 - p)


class Record(Dropout):
    """Drops nothing of one sample, [1, ...], and notes what would be in `calls`. Raises ValueError
    where the first axis is not that of the samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[DropoutCall] = []

    def mask(self, x: torch.Tensor, p: float) -> torch.Tensor:
        if len(x) != 1:
            raise ValueError("the first axis of what is dropped out is not that of the samples")
        self.calls.append(DropoutCall(tuple(x.shape[1:]), p))
        return torch.ones_like(x)


def draw(draws: Draws, calls: Sequence[DropoutCall], like: torch.Tensor) -> list[torch.Tensor]:
    """The masks of every call, [C, B, ...], on the device of `like` [C, B] and in its dtype."""
    masks = [like.new_ones(*like.shape, *call.shape) for call in calls]
    for slot, (generator, samples) in enumerate(draws):
        for mask, call in zip(masks, calls, strict=True):
            if generator is not None:
                mask[slot, :samples].bernoulli_(1 - call.p, generator=generator).div_(1 - call.p)
    return masks
