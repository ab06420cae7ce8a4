"""Weights & Biases."""

import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from raydpfl.tracking.base import Log, Row, Tracked, Tracker, facts, numbers

INIT = 20  # seconds that its server may take to answer


class WandB(Tracker):
    """Every number of the rounds table over the round, the config, and how the run ended, in
    Weights & Biases. Its key is in WANDB_API_KEY, or where `wandb login` has put it.
    """

    library: ClassVar[str] = "wandb"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"mode": "offline"},)

    kind: str = "wandb"
    project: str = Field(default="raydpfl", description="that runs are listed in")
    entity: str | None = Field(default=None, description="a user or team; null: the user's own")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description=(
            "offline: in a folder here, which `wandb sync` sends; null: WANDB_MODE, or online"
        ),
    )
    folder: str | None = Field(
        default=None, description="where its files are; null: WANDB_DIR, or ./wandb"
    )

    def open(self, run: Tracked) -> Log:
        return _Run(self, run)

    def kept_in(self, folder: Path) -> Tracker:
        return self.model_copy(update={"mode": "offline", "folder": str(folder)})


class _Run(Log):
    def __init__(self, tracker: WandB, run: Tracked):
        wandb = importlib.import_module("wandb")
        mode = tracker.mode or os.environ.get("WANDB_MODE") or "online"
        # it would ask on the terminal
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise RuntimeError("nobody is logged in: wandb login, WANDB_API_KEY, or mode: offline")
        self.id = run.id or uuid.uuid4().hex[:16]
        setup = wandb.Settings(silent=True, console="off", x_disable_stats=True, init_timeout=INIT)
        self._run = wandb.init(
            project=tracker.project,
            entity=tracker.entity,
            name=run.name,
            group=run.group or None,
            config=dict(run.config),
            id=self.id,
            resume="allow",
            mode=mode,
            dir=tracker.folder,
            settings=setup,
        )
        # rounds have their numbers, so that some may be sent twice
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"round": row["round"], **numbers(row)})

    def close(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(facts(summary))
        self._run.finish(exit_code=1 if summary.get("status", "failed") == "failed" else 0)
