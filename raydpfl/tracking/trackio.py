"""Trackio."""

import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from raydpfl.tracking.base import Log, Row, Tracked, Tracker, facts, numbers


class Trackio(Tracker):
    """Every number of the rounds table by round, and the config, in Trackio: in a store here
    (TRACKIO_DIR says where; `trackio show` shows it), or in a Space of Hugging Face.
    """

    library: ClassVar[str] = "trackio"

    kind: str = "trackio"
    project: str = Field(default="raydpfl", description="that runs are listed in")
    space: str | None = Field(
        default=None, description="of Hugging Face, user/name; null: TRACKIO_SPACE_ID, or here"
    )

    def open(self, run: Tracked) -> Log:
        return _Run(self, run)

    def kept_in(self, folder: Path) -> Tracker:
        os.environ.setdefault("TRACKIO_DIR", str(folder))  # which it reads once, when imported
        return self


class _Run(Log):
    def __init__(self, tracker: Trackio, run: Tracked):
        trackio = importlib.import_module("trackio")
        for name in ("", ".run", ".utils"):  # they print what they do
            vars(importlib.import_module(f"trackio{name}"))["print"] = lambda *_, **__: None
        self.id = run.id or f"{run.name}-{uuid.uuid4().hex[:6]}"  # its runs are known by name
        # its own names begin with an underscore
        config = {key.lstrip("_"): value for key, value in run.config.items()}
        self._run = trackio.init(
            tracker.project,
            name=self.id,
            group=run.group or None,
            space_id=tracker.space,
            config=config,
            resume="allow" if run.id else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(numbers(row), step=row["round"])

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.config.update(facts(summary))
        self._run.finish()
