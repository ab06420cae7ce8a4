"""Convolutions that are max-pooled, with the gradients of single samples by their filters.

Only where a maximum was does the convolution's output have a gradient. A sample's gradient by a
channel's filter is the sum, over its maxima, of the gradient there times the patch of the image
that the output was taken from. Compiled code (`core/native/convolution.c`) takes the maxima image
by image, so that the outputs never leave the cache, and that sum for the step, or where samples are
clipped once for the norms and once, weighted, for the mean, with no sample's gradient in memory.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raydpfl.core import native

ROW_MARGIN = 16  # floats after each image: what is beyond a filter's row is read and written too
_PAIRS = ("outputs", "step", "grid", "kernel", "stride", "padding", "dilation")


class _Filters(ctypes.Structure):
    """Filters of convolution.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "channels")),
        ("size", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("inside", "image", "row", "rows", "run")),
        *((name, ctypes.c_int64 * 2) for name in _PAIRS),
    )


def _pair(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 2)(*values)


@dataclass(frozen=True)
class Window:
    """How a convolution and its max-pooling move over images: pairs, of height and width."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    # of the pooling: kernel, stride, padding and dilation, and whether its grid is rounded up
    pool: tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], bool]

    def outputs(self, image: Sequence[int]) -> list[int]:
        """Height and width of the convolution's outputs, from those of the image."""
        axes = zip(image, self.kernel, self.stride, self.padding, strict=True)
        return [(size + 2 * pad - kernel) // stride + 1 for size, kernel, stride, pad in axes]

    def grid(self, outputs: Sequence[int]) -> list[int]:
        """Height and width of the maxima, from those of the outputs."""
        *pairs, round_up = self.pool
        counts = []
        for size, kernel, stride, pad, dilation in zip(outputs, *pairs, strict=True):
            last_start = size + 2 * pad - dilation * (kernel - 1) - 1
            count = (last_start + (stride - 1 if round_up else 0)) // stride + 1
            # the last window begins in the outputs or in the padding before them
            counts.append(count - 1 if round_up and (count - 1) * stride >= size + pad else count)
        return counts


class Filters:
    """A batch of images under a convolution that is max-pooled."""

    def __init__(self, images: torch.Tensor, channels: int, window: Window):
        """Of images float32 [B, c, H, W], with so many output channels."""
        count, inputs, height, width = images.shape
        down, across = window.padding
        row = (width + 2 * across) * inputs
        image = (height + 2 * down) * row + ROW_MARGIN
        self.unpadded_images = images.permute(0, 2, 3, 1).contiguous()
        self.images = torch.empty(count, image)
        outputs = window.outputs((height, width))
        grid = window.grid(outputs)
        step = (window.stride[0] * row, window.stride[1] * inputs)
        self.shape = (channels, window.kernel[0], window.kernel[1] * inputs)
        self.cells = (count, *grid, channels)
        self.indices = torch.empty(self.cells, dtype=torch.int32)  # of the maxima
        pairs = (outputs, step, grid, *window.pool[:4])
        self._filters = _Filters(
            *(count, channels, _pair((height, width * inputs))),
            *(down * row + across * inputs, image, row, *self.shape[1:]),
            *(_pair(pair) for pair in pairs),
        )

    def maxima(self, weights: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The maxima, float32 [B, C, h, w], by filters [C, height, width, c] and bias [C]."""
        maxima = torch.empty(self.cells)
        filters = (weights.contiguous(), None if bias is None else bias.contiguous())
        arrays = (self.unpadded_images, self.images, *filters, maxima, self.indices)
        self._call("raydpfl_maxima", *arrays)
        return maxima.permute(0, 3, 1, 2)

    def follow(self, g: torch.Tensor) -> None:
        """Takes the gradient by the maxima, float32 [B, C, h, w], which all below come from."""
        self.g = g.permute(0, 2, 3, 1).contiguous()

    def squares(self) -> torch.Tensor:
        """The squared norm of every sample's gradient, float32 [B]."""
        squares = torch.empty(len(self.images))
        self._call("raydpfl_filters", self.images, self.g, self.indices, None, squares, None)
        return squares

    def total(self, factors: torch.Tensor | None = None) -> torch.Tensor:
        """The sum of gradients, by `factors` [B] if given: float32 [C, height, width times c]."""
        total = torch.empty(self.shape)
        weights = None if factors is None else factors.contiguous()
        self._call("raydpfl_filters", self.images, self.g, self.indices, weights, None, total)
        return total

    def by_images(self, weights: torch.Tensor) -> torch.Tensor:
        """The gradient by the images, float32 [B, c, H, W] with channels last in memory, from the
        filters [C, height, width, c].
        """
        by_images = torch.empty_like(self.unpadded_images)
        self._call("raydpfl_by_images", self.g, self.indices, weights.contiguous(), by_images)
        return by_images.permute(0, 3, 1, 2)

    def _call(self, name: str, *arrays: torch.Tensor | None) -> None:
        library = native.library()
        assert library is not None  # as the backend says
        places = [None if array is None else array.data_ptr() for array in arrays]
        call = getattr(library, name)
        if call(ctypes.byref(self._filters), *map(ctypes.c_void_p, places)):
            raise MemoryError("no memory for the gradient by a filter")
