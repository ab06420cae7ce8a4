"""Clients that are available at public times: groups that take turns, and windows of availability.

Client k is available in the rounds t with

    (t - k) mod period < window.

Who is available is public. Which of them a round takes can be a secret, which amplifies privacy
within them alone. A client's guarantee composes over the rounds in which it is available.

>>> from raydpfl.methods.selection.availability import Availability
>>> from raydpfl.methods.selection.base import Population
>>> from raydpfl.methods.selection.cyclic import Cyclic
>>> clients = Population.balanced(10)
>>> [Cyclic(period=3).draw(0, t, clients).clients.tolist() for t in range(4)]
[[0, 3, 6, 9], [1, 4, 7], [2, 5, 8], [0, 3, 6, 9]]
>>> daily = Availability(period=5, window=2, cohort=2)
>>> print(daily.sampling(clients), daily.composed_rounds(0, 6, clients))
fixed size 2 of 4 (those available, each in 2 rounds of 5) [1 2 2 2 2 3]
"""

from __future__ import annotations

import numpy as np


def available(count: int, period: int, window: int, t: int) -> tuple[int, int, int]:
    """Who is available in round t.

    Returns:
        How many of `count` clients are, the first open phase, and how many open phases wrap around
        to 0. The phase of client k is k mod period.
    """
    first = (t - window + 1) % period
    wrapped = max(0, first + window - period)
    blocks, rest = divmod(count, period)
    return (
        blocks * window + min(wrapped, rest) + min(max(0, rest - first), window - wrapped),
        first,
        wrapped,
    )


def fewest(count: int, period: int, window: int) -> int:
    """How many clients are available in the emptiest round."""
    blocks, rest = divmod(count, period)
    return blocks * window + max(0, rest + window - period)


def turns(rounds: int, period: int, window: int) -> np.ndarray:
    """The largest number of rounds in which any client was available, after 1, 2, ... rounds:
    int64 [rounds].
    """
    blocks, rest = np.divmod(np.arange(1, rounds + 1), period)
    return blocks * window + np.minimum(rest, window)


def nth(index: np.ndarray, period: int, window: int, first: int, wrapped: int) -> np.ndarray:
    """The clients at these places among the available ones, int64: of every `period` clients
    `window` are available, in the same phases.
    """
    block, place = np.divmod(index, window)
    return block * period + np.where(place < wrapped, place, first + place - wrapped)
