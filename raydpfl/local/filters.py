"""The gradients of single samples by the filters of a convolution that is max-pooled.

Only where a maximum was does the convolution's output have a gradient: of a 2 x 2 pooling, one
place of four. A sample's gradient by a channel's filter is the sum, over its maxima, of the
gradient there times the patch of the image that the output was taken from. Compiled code
(`raydpfl/native/kernels.c`) takes that sum twice, once for the norms and once, weighted by the clip
factors, for the mean, and keeps no sample's gradient in memory. The gradient by the images is taken
from the maxima too. Every sum has an order of its own, as in all compiled code.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from raydpfl import native

BEYOND = 16  # floats after each image: what is beyond a filter's row is read and written too


class _Filters(ctypes.Structure):
    """Filters of kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("samples", "channels", "cells", "image", "row")),
        *((name, ctypes.c_int64) for name in ("rows", "run")),
        *((name, ctypes.c_void_p) for name in ("offsets", "counts", "values", "places")),
    )


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its images: pairs, of height and width."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]


class Filters:
    """A batch of images and the gradients by the maxima of the outputs."""

    def __init__(
        self,
        images: torch.Tensor,
        g: torch.Tensor,
        where: torch.Tensor,
        outputs: Sequence[int],
        window: Window,
    ):
        """
        Args:
            images: float32 [B, c, H, W].
            g: float32 [B, C, h, w], by the maxima.
            where: int64 [B, C, h, w], the place of each maximum among a channel's outputs.
            outputs: height and width of these.
            window: the convolution's.
        """
        count, channels, height, width = images.shape
        down, across = window.padding
        self.size = (height + 2 * down, width + 2 * across, channels)
        self.inner = (slice(None), slice(down, down + height), slice(across, across + width))
        image = prod(self.size) + BEYOND
        self.images = images.new_zeros(count, image)
        self._inside(self.images).copy_(images.permute(0, 2, 3, 1))
        row = self.size[1] * channels
        rows = torch.arange(outputs[0])[:, None] * (window.stride[0] * row)
        offsets = (rows + torch.arange(outputs[1]) * (window.stride[1] * channels)).flatten()
        cells = g.shape[2] * g.shape[3]
        self.shape = (g.shape[1], window.kernel[0], window.kernel[1] * channels)
        counts = torch.empty(count, g.shape[1], dtype=torch.int64)
        values = torch.empty(count, g.shape[1], cells)
        places = torch.empty(count, g.shape[1], cells, dtype=torch.int32)
        self._arrays = (offsets, counts, values, places)
        self._given = _Filters(
            *(count, self.shape[0], cells, image, row, *self.shape[1:]),
            *(each.data_ptr() for each in self._arrays),
        )
        by_cells = (each.permute(0, 2, 3, 1).contiguous() for each in (g, where))
        self._call("raydpfl_cells", *by_cells)

    def _inside(self, padded: torch.Tensor) -> torch.Tensor:
        """The images within `padded`, [B, H, W, c]."""
        return padded[:, :-BEYOND].unflatten(1, self.size)[self.inner]

    def squares(self) -> torch.Tensor:
        """The squared norm of each sample's gradient, float32 [B]."""
        found = torch.empty(len(self.images))
        self._call("raydpfl_filters", self.images, None, found, None)
        return found

    def total(self, factors: torch.Tensor) -> torch.Tensor:
        """The sum of the samples' gradients, weighted by `factors`, float32 [B]: float32 [C, height
        of a filter, width times c].
        """
        found = torch.empty(self.shape)
        self._call("raydpfl_filters", self.images, factors.contiguous(), None, found)
        return found

    def by_images(self, weights: torch.Tensor) -> torch.Tensor:
        """The gradient by the images, float32 [B, c, H, W] with channels last in memory, from the
        filters [C, height, width, c].
        """
        found = torch.zeros_like(self.images)
        self._call("raydpfl_by_images", weights.contiguous(), found)
        return self._inside(found).contiguous().permute(0, 3, 1, 2)

    def _call(self, name: str, *arrays: torch.Tensor | None) -> None:
        compiled = native.library()
        assert compiled is not None  # as the way says
        places = [None if each is None else each.data_ptr() for each in arrays]
        call = getattr(compiled, name)
        if call(ctypes.byref(self._given), *map(ctypes.c_void_p, places)):
            raise MemoryError("no memory for the gradient by a filter")
