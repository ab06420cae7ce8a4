"""Convolutions whose filters are larger than their images, without the taps that see padding alone.

A 3 x 3 filter over images of one pixel, padded by one, reads that pixel by its middle tap. The
products of the other eight are 0, and so are their gradients: in the last stage of a ResNet-18 of
ImageNet on images of 32 x 32 pixels these are two thirds of the model. Such a layer convolves with
a view of the taps that read pixels, a leaf of autograd in the place of its weight, wherever its
images have the size that it was cropped for.

>>> layer = nn.Conv2d(4, 4, 3, padding=1)
>>> live_taps(layer, (1, 1)), live_taps(layer, (2, 2)), live_taps(layer, (1, 9))
(((1, 2), (1, 2)), ((0, 3), (0, 3)), ((1, 2), (0, 3)))
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Span = tuple[int, int]
SHARE = 0.25  # of the taps, above which a copy of those that read pixels takes as long as all do


def live_taps(layer: nn.Conv2d, image: tuple[int, int]) -> tuple[Span, Span]:
    """From which tap to which, down and across, its filters read pixels of images of a size."""
    down, across = (_live_span(layer, axis, size) for axis, size in enumerate(image))
    return down, across


def _live_span(layer: nn.Conv2d, axis: int, size: int) -> Span:
    kernel, stride, dilation = (
        getattr(layer, name)[axis] for name in ("kernel_size", "stride", "dilation")
    )
    padding = int(layer.padding[axis])
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    live = [
        tap
        for tap in range(kernel)
        if any(0 <= k * stride - padding + tap * dilation < size for k in range(outputs))
    ]
    return (live[0], live[-1] + 1) if live else (0, kernel)


def images_of(module: nn.Module, run: Callable[[], Any]) -> dict[nn.Conv2d, list[tuple[int, int]]]:
    """The sizes of images that each convolution takes while `run` has the module go forward."""
    image_sizes: dict[nn.Conv2d, list[tuple[int, int]]] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        assert isinstance(layer, nn.Conv2d)
        image_sizes.setdefault(layer, []).append((inputs[0].shape[-2], inputs[0].shape[-1]))

    convolutions = [
        layer
        for layer in module.modules()
        if type(layer) is nn.Conv2d and "forward" not in vars(layer)
    ]
    if not convolutions:
        return {}
    hooks = [layer.register_forward_pre_hook(note) for layer in convolutions]
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return image_sizes


def crop(layer: nn.Conv2d, image: tuple[int, int]) -> tuple[slice, ...] | None:
    """The part of the weight [out, in, height, width] that reads pixels of images of a size, where
    it is at most `SHARE` of the taps and leaves no padding; else None.
    """
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    spans = live_taps(layer, image)
    taps = [end - start for start, end in spans]
    if taps[0] * taps[1] > SHARE * layer.kernel_size[0] * layer.kernel_size[1]:
        return None
    for axis, size in enumerate(image):
        start, end = spans[axis]
        stride, padding, dilation = layer.stride[axis], layer.padding[axis], layer.dilation[axis]
        outputs = (size + 2 * int(padding) - dilation * (layer.kernel_size[axis] - 1) - 1) // stride
        cropped_outputs = (size - dilation * (end - start - 1) - 1) // stride
        if int(padding) != start * dilation or cropped_outputs != outputs:
            return None
    return (slice(None), slice(None), *(slice(*span) for span in spans))


def set_leaf(layer: nn.Conv2d, leaf: torch.Tensor, image: tuple[int, int]) -> None:
    """Has the layer convolve images of a size with `leaf` [out, in, taps, taps], which `crop` gives
    for it, unpadded.
    """
    whole = layer.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.shape[-2:] != image:
            return whole(x)
        geometry = (layer.stride, 0, layer.dilation, layer.groups)
        return F.conv2d(x, leaf.contiguous(), layer.bias, *geometry)

    vars(layer)["forward"] = forward
