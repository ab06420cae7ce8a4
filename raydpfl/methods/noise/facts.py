"""What a noise is given: of its run (`RunFacts`), and of a side query of a round (`SideQuery`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raydpfl.config.setting import Setting
from raydpfl.methods.local import Local


@dataclass(frozen=True)
class RunFacts:
    """A run, as its noise is sized for it.

    Args:
        setting: of the other sections of its config.
        seed: of the run.
        local: the local rule.
        sizes: int64 [N], samples of each client.
        rounds: how many a guarantee composes.
        calibrated: of these, the rounds that an epsilon is for.
        weight: the largest weight of any client.
        clients_left: the fewest clients that are left in any round.
        draws: gives whose participations noise at local steps is sized for, int64 arrays of
            clients, with repeats.
        surveys: histograms of all clients that a guarantee composes with the rounds.
        calibrated_surveys: of these, those that an epsilon is for.
        data_root: the folder of data sets; None: the default.
    """

    setting: Setting
    seed: int
    local: Local
    sizes: np.ndarray
    rounds: int
    calibrated: int
    weight: float
    clients_left: int
    draws: Callable[[], list[np.ndarray]]
    surveys: int = 0
    calibrated_surveys: int = 0
    data_root: Path | None = None


@dataclass(frozen=True)
class SideQuery:
    """A side query of one round (such as the count of an adaptive bound), as noise is drawn on its
    sum.

    Args:
        name: of the query.
        seed: the run's seed of noise.
        t: the round, from 0.
        std: of the noise on the sum of the answers, in the units of an answer.
        clients: int64 [r], the cohort.
        draws: int64 [r], the index of each draw among its client's draws of the round, from 0.
        clients_left: the fewest clients that any round keeps.
    """

    name: str
    seed: int
    t: int
    std: float
    clients: np.ndarray
    draws: np.ndarray
    clients_left: int
