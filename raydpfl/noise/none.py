"""No noise."""

from __future__ import annotations

from typing import ClassVar

from raydpfl.noise.base import Noise


class NoNoise(Noise):
    """No noise: the run is not private, and says so."""

    kind: str = "none"
    placement: ClassVar[str] = "client"
