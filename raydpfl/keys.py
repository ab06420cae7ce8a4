"""Keyed randomness: every draw is a function of what it is for, never of what was drawn before it.

A stream is named by (seed, purpose, round, client, draw, step). The first two are the key of a
Philox 4x64-10 counter-based generator (Salmon et al. 2011), the others its initial counter. So two
names never share a block: nothing is hashed, and nothing collides. The lowest counter word counts
the blocks within a stream (2^64 of them).

>>> float(stream(7, Purpose.BATCH, t=3, client=12).random())
0.4514275659643635
>>> float(stream(7, Purpose.BATCH, t=3, client=13).random())
0.5441855385880319

`normals` draws noise: one flat vector of standard normals per name, by the Box-Muller transform of
the same streams.

>>> normals(7, Purpose.STEP_NOISE, 3, t=3, client=12, step=1)
tensor([-1.2855,  0.5160, -1.0663])

The generator is for simulation: reproducible and statistically sound, not cryptographic.

Design note. numpy's ziggurat takes 11 ns per normal and torch's generator 3, but the latter stops
at 5.77 standard deviations and its seed at 32 bits. Box-Muller in numpy's vectorised float32
functions takes 3 (torch's own take 5 to 8, for their cost per call), half of it for Philox. Filling
the state of SFC64 from Philox instead would save half a nanosecond, but two names could then share
a block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

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
    # noise of a side query, by step: 0 is the count of clients below the bound, 1 the losses of
    # candidates (see raydpfl.noise.drawn)
    QUERY_NOISE = 9
    DROPOUT = 10  # which clients fail after training
    RESPONSE = 11  # response times
    STEP_NOISE = 12  # noise on a local step
    BUDGET = 13  # budgets of clients
    CANARY = 14  # audit
    SWEEP = 15  # values that a sweep tries
    GLOBAL = 16  # what a user's own code draws from the process's global generators
    VALIDATION = 17  # rows that are held out of training


class _Key(ISeedSequence):
    """Gives Philox its key unchanged, four times faster than its argument `key` does."""

    def __init__(self, seed: int, purpose: int):
        self.words = np.array([seed, purpose], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return self.words


def _philox(
    seed: int, purpose: Purpose, t: int, client: int, draw: int, step: int
) -> np.random.Philox:
    # numpy takes `counter` and the key as little-endian words, the low one first.
    if not (0 <= draw < 1 << 32 and 0 <= step < 1 << 32):
        raise ValueError(f"draw {draw} and step {step} must each fit in 32 bits")
    counter = np.array([0, (draw << 32) | step, client, t], np.uint64)
    # numpy's stubs know no other seed sequence than its own
    return np.random.Philox(_Key(seed, purpose), counter=counter)  # type: ignore[arg-type]


def stream(
    seed: int, purpose: Purpose, *, t: int = 0, client: int = 0, draw: int = 0, step: int = 0
) -> np.random.Generator:
    """A numpy generator for one named stream.

    Args:
        seed: from 0, below 2^64.
        purpose: what the stream is for.
        t: the round, from 0.
        client: its id, from 0.
        draw: the index of this draw among the client's draws this round, from 0.
        step: a local step, or another number from 0.

    Raises:
        ValueError: draw or step is negative, or does not fit in 32 bits.
    """
    return np.random.Generator(_philox(seed, purpose, t, client, draw, step))


def bit_streams(
    seed: int, purpose: Purpose, *, t: int, clients: Sequence[int], draws: Sequence[int]
) -> Iterator[np.random.Philox]:
    """The bit generators of clients' streams, one after another, in a third of the time.

    It is always the same object: read it before you ask for the next.

    Args:
        seed: as for `stream`.
        purpose: as for `stream`.
        t: the round.
        clients: [C].
        draws: [C], as `draw` of `stream`.
    """
    philox = _philox(seed, purpose, t, 0, 0, 0)
    state = philox.state
    counter = state["state"]["counter"]
    words = zip(np.asarray(clients).tolist(), np.asarray(draws).tolist(), strict=True)
    for client, draw in words:
        counter[1] = draw << 32
        counter[2] = client
        philox.state = state
        yield philox


_BLOCK = 32768  # words at a time, so that intermediate results stay in the cache
_ANGLE = np.float32(math.pi / 2**23)
_UNIT = np.float32(2.0**-40)


def normals(
    seed: int,
    purpose: Purpose,
    n: int,
    *,
    t: int = 0,
    client: int = 0,
    draw: int = 0,
    step: int = 0,
) -> torch.Tensor:
    """Standard normals of one named stream, by Box and Muller (1958): two from every 64-bit word.

    40 bits of a word give the radius and 24 the angle. The uniform under the logarithm is in
    [2^-41, 1], in steps that shrink towards 0 as those of float32 do. So values reach 7.53 standard
    deviations; 5e-14 of the law is beyond. The vector depends on n as a whole (two draws of 1000
    are not one of 2000). It has the same bits on the same hardware: numpy picks its vector
    instructions by the processor. Arguments as for `stream`.

    Returns:
        float32 [n].
    """
    return clients_normals(seed, purpose, n, t=t, clients=[client], draws=[draw], step=step)[0]


def clients_normals(
    seed: int,
    purpose: Purpose,
    n: int,
    *,
    t: int,
    clients: Sequence[int] | np.ndarray,
    draws: Sequence[int] | np.ndarray,
    step: int = 0,
    stds: np.ndarray | None = None,
) -> torch.Tensor:
    """The `normals` of C clients, float32 [C, n], with the same bits and in less time.

    Args:
        clients: [C]; the other arguments are those of `stream`.
        draws: [C], as `draw` of `stream`.
        stds: [C], what each client's normals are multiplied by; None: 1.
    """
    half = (n + 1) // 2
    out = np.empty((len(clients), 2 * half), np.float32)
    together = max(1, _BLOCK // max(half, 1))
    for first in range(0, len(clients), together):
        rows = slice(first, first + together)
        streams = [
            _philox(seed, purpose, t, int(client), int(draw), step)
            for client, draw in zip(clients[rows], draws[rows], strict=True)
        ]
        for start in range(0, half, _BLOCK):
            end = min(start + _BLOCK, half)
            words = np.stack([each.random_raw(end - start) for each in streams])
            _box_muller(
                words.view(np.int64),
                out[rows, start:end],
                out[rows, half + start : half + end],
                None if stds is None else stds[rows],
            )
    return torch.from_numpy(out)[:, :n]


def _box_muller(
    words: np.ndarray, cos: np.ndarray, sin: np.ndarray, stds: np.ndarray | None
) -> None:
    """Writes the normals of `words`, int64 [C, w], which it overwrites, into `cos` and `sin`,
    float32 [C, w].
    """
    angle = (words >> 40).astype(np.float32)  # signed: in [-2^23, 2^23)
    angle *= _ANGLE
    words &= (1 << 40) - 1
    radius = words.astype(np.float32)
    radius += np.float32(0.5)  # never log(0); the largest words round to 1, whose radius is 0
    radius *= _UNIT
    np.log(radius, out=radius)
    radius *= np.float32(-2)
    np.sqrt(radius, out=radius)
    if stds is not None:
        radius *= stds.astype(np.float32)[:, None]
    np.multiply(np.cos(angle), radius, out=cos)
    np.multiply(np.sin(angle, out=angle), radius, out=sin)


def torch_stream(
    seed: int, purpose: Purpose, *, t: int = 0, client: int = 0, draw: int = 0, step: int = 0
) -> torch.Generator:
    """A torch CPU generator for one named stream; its Mersenne state is filled from the Philox
    stream. Arguments as for `stream`.

    `torch.Generator.manual_seed` keeps only 32 bits of a seed on the CPU, so keys never go through
    it.
    """
    generator = torch.Generator()
    generator.set_state(mersenne_state(_philox(seed, purpose, t, client, draw, step)))
    return generator


def mersenne_state(philox: np.random.Philox) -> torch.Tensor:
    """A torch CPU generator state (uint8 [5056]) whose 624 words come from `philox`."""
    state = torch.Generator().get_state().numpy().copy()
    words = state.view(np.uint64)
    raw = philox.random_raw(312).view(np.uint32)
    words[3 : 3 + 624] = raw  # after: seed, (left, seeded), next
    # only this bit of the first word is used; an all-zero state would never leave zero
    words[3] |= 0x80000000
    return torch.from_numpy(state)


@contextmanager
def keyed_globals(
    seed: int, *, t: int = 0, client: int = 0, draw: int = 0, step: int = 0
) -> Iterator[None]:
    """Within it `random`, `np.random` and torch's global generators, of the CPU and of a GPU that
    this process uses, are at the start of one named stream; afterwards they are as they were. For a
    user's own code that draws from them.

    Arguments as for `stream`.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    philox = _philox(seed, Purpose.GLOBAL, t, client, draw, step)
    random.seed(int.from_bytes(philox.random_raw(4).tobytes(), "little"))
    np.random.seed(philox.random_raw(4).view(np.uint32))
    torch.set_rng_state(mersenne_state(philox))
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    if gpu is not None:
        torch.cuda.manual_seed(int(philox.random_raw()) >> 1)
    try:
        yield
    finally:
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
