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
    """A run, as its noise is sized for it."""

    setting: Setting  # of the other sections of its config
    seed: int  # of the run
    local: Local  # the local rule
    sizes: np.ndarray  # int64 [N], samples of each client
    rounds: int  # how many a guarantee composes
    calibrated: int  # of these, the rounds that an epsilon is for
    weight: float  # the largest weight of any client
    clients_left: int  # the fewest clients that are left in any round
    # gives whose participations noise at local steps is sized for, int64 arrays of clients, with
    # repeats
    draws: Callable[[], list[np.ndarray]]
    surveys: int = 0  # histograms of all clients that a guarantee composes with the rounds
    calibrated_surveys: int = 0  # of these, those that an epsilon is for
    data_root: Path | None = None  # the folder of data sets; None: the default


@dataclass(frozen=True)
class SideQuery:
    """A side query of one round (such as the count of an adaptive bound), as noise is drawn on its
    sum.
    """

    name: str  # of the query
    seed: int  # the run's seed of noise
    t: int  # the round, from 0
    std: float  # of the noise on the sum of the answers, in the units of an answer
    clients: np.ndarray  # int64 [r], the cohort
    # int64 [r], the index of each draw among its client's draws of the round, from 0
    draws: np.ndarray
    clients_left: int  # the fewest clients that any round keeps
