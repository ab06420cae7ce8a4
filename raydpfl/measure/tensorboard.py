"""TensorBoard."""

from __future__ import annotations

from pathlib import Path

from raydpfl.measure.base import Board, Probe
from raydpfl.tracking import TensorBoard


class TensorBoardProbe(Probe):
    """Every number of the rounds table as events of TensorBoard, in tensorboard/."""

    kind: str = "tensorboard"

    @property
    def shows_only(self) -> bool:
        return True

    def board(self, out: Path, t: int) -> Board | None:
        return TensorBoard(out / "tensorboard", t)
