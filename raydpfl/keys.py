"""Keyed randomness: every draw is a function of what it is for, never of what was drawn before it.

A stream is named by (seed, purpose, round, client, draw, step). The first two are the key of a Philox
4x64-10 counter-based generator (Salmon et al. 2011), the rest its starting counter, so two different names
can never share a block: nothing is hashed and nothing collides. The lowest counter word counts the blocks
within a stream (2^64 of them).

>>> float(stream(7, Purpose.BATCH, round=3, client=12).random())
0.4514275659643635
>>> float(stream(7, Purpose.BATCH, round=3, client=13).random())
0.5441855385880319

The generator is for simulation: reproducible and statistically sound, not cryptographic.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence


class Purpose(IntEnum):
    """What a stream is for. The numbers are part of every run's bits: add, never renumber."""

    MODEL = 1  # initial parameters
    PARTITION = 2  # which sample goes to which client
    DATA = 3  # synthetic samples
    COHORT = 4  # who takes part
    BATCH = 5  # mini-batches of a client
    MODULE = 6  # randomness inside a module's forward pass (dropout)
    CLIENT_NOISE = 7
    SERVER_NOISE = 8
    QUERY_NOISE = 9  # noise of a side query, for instance the count of clipped clients
    DROPOUT = 10  # which clients fail after training
    RESPONSE = 11  # response times
    STEP_NOISE = 12  # noise on a local step
    BUDGET = 13  # budgets of clients
    CANARY = 14  # audit


class _Key(ISeedSequence):
    """Hands Philox its key as it is, four times faster than its argument `key` does."""

    def __init__(self, seed: int, purpose: int):
        self.words = np.array([seed, purpose], np.uint64)

    def generate_state(self, n_words: int, dtype: type = np.uint64) -> np.ndarray:
        return self.words


def _philox(seed: int, purpose: Purpose, round: int, client: int, draw: int, step: int) -> np.random.Philox:
    # numpy takes `counter` and the key as little-endian words, the low one first.
    if not (0 <= draw < 1 << 32 and 0 <= step < 1 << 32):
        raise ValueError(f"draw {draw} and step {step} must each fit in 32 bits")
    counter = np.array([0, (draw << 32) | step, client, round], np.uint64)
    return np.random.Philox(_Key(seed, purpose), counter=counter)


def stream(seed: int, purpose: Purpose, *, round: int = 0, client: int = 0, draw: int = 0, step: int = 0) -> np.random.Generator:
    """A numpy generator for one named stream. All arguments are non-negative; `seed` is below 2^64.

    `draw` tells apart the several times a client was drawn into the cohort of one round.
    """
    return np.random.Generator(_philox(seed, purpose, round, client, draw, step))


def torch_stream(seed: int, purpose: Purpose, *, round: int = 0, client: int = 0, draw: int = 0, step: int = 0) -> torch.Generator:
    """A torch CPU generator for one named stream, its whole Mersenne state filled from the Philox stream.

    `torch.Generator.manual_seed` keeps only 32 bits of a seed on the CPU, so it is never used for a key.
    """
    generator = torch.Generator()
    generator.set_state(mersenne_state(_philox(seed, purpose, round, client, draw, step)))
    return generator


def mersenne_state(philox: np.random.Philox) -> torch.Tensor:
    """A torch CPU generator state (uint8 [5056]) whose 624 words come from `philox`."""
    state = torch.Generator().get_state().numpy().copy()
    words = state.view(np.uint64)
    raw = philox.random_raw(312).view(np.uint32)
    words[3 : 3 + 624] = raw  # after: seed, (left, seeded), next
    words[3] |= 0x80000000  # only this bit of the first word is used; an all-zero state would never leave zero
    return torch.from_numpy(state)
