"""The embedded images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from raydpfl.data.sources.base import Samples
from raydpfl.data.sources.named_images import Images
from raydpfl.storage.files import digest


class FashionMnistMini(Images):
    """The first 900 training and 200 test images of each class of Fashion-MNIST, embedded in the
    package (see `raydpfl.data.embedded`).
    """

    kind: str = "fashion_mnist_mini"
    examples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"clients": 60},
        {"clients": 20, "partition": {"kind": "overlapping", "per_client": 8}},
    )
    # of these 9,000 images; see raydpfl.data.embedded for why not 0.2860 and 0.3530
    mean: ClassVar[tuple[float, ...]] = (0.3032,)
    std: ClassVar[tuple[float, ...]] = (0.2701,)

    @classmethod
    def located(cls, root: Path) -> str:
        return "in the package"

    def samples(self, seed: int, root: Path | None) -> Samples:
        from raydpfl.data import embedded

        found = Samples(*embedded.read("train"), *embedded.read("test"))
        self.check_pixels(found.x)
        return found

    def sources(self, root: Path | None) -> list:
        from raydpfl.data import embedded

        return [digest(embedded.path(part)) for part in ("train", "test")]
