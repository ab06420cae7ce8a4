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
ChaCha with 8 rounds (Bernstein 2008). Seed, purpose, round and client are the 256 bits of its key,
draw and step the 64 of the nonce, and 64 more count the blocks, so these streams share no block
either.

>>> normals(7, Purpose.STEP_NOISE, 3, t=3, client=12, step=1)
tensor([-0.8958,  0.2055,  0.8524])

The generators are for simulation: reproducible and statistically sound, but a seed of 64 bits is no
secret key. A normal takes 0.5 ns in compiled code (`raydpfl/core/native/normals.c`; numpy's
ziggurat 11, torch's generator, which stops at 5.77 standard deviations and a seed of 32 bits, 3);
without a compiler numpy gives the same bits in 60 ns.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence

from raydpfl.core import native


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
    # candidates; of any other by its name (see raydpfl.methods.noise.keyed_noise)
    QUERY_NOISE = 9
    DROPOUT = 10  # which clients fail after training
    RESPONSE = 11  # response times
    STEP_NOISE = 12  # noise on a local step
    BUDGET = 13  # budgets of clients
    CANARY = 14  # audit
    SWEEP = 15  # values that a sweep tries
    GLOBAL = 16  # what user-defined code draws from the process's global generators
    VALIDATION = 17  # rows that are held out of training
    SURVEY_NOISE = 18  # noise on a histogram over all clients
    ROTATION = 19  # of what clients send to a modular sum
    ROUNDING = 20  # to integers, of what a client sends


class _Key(ISeedSequence):
    """Gives Philox its key unchanged, four times faster than its argument `key` does."""

    def __init__(self, seed: int, purpose: int):
        self.words = np.array([seed, purpose], np.uint64)

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return self.words


def _philox(seed: int, purpose: int, t: int, client: int, draw: int, step: int) -> np.random.Philox:
    # numpy takes `counter` and the key as little-endian words, the low one first.
    if not (0 <= draw < 1 << 32 and 0 <= step < 1 << 32):
        raise ValueError(f"draw {draw} and step {step} must each fit in 32 bits")
    counter = np.array([0, (draw << 32) | step, client, t], np.uint64)
    # numpy's stubs know no other seed sequence
    return np.random.Philox(_Key(seed, purpose), counter=counter)  # type: ignore[arg-type]


def stream(
    seed: int, purpose: Purpose, *, t: int = 0, client: int = 0, draw: int = 0, step: int = 0
) -> np.random.Generator:
    """A numpy generator for one named stream. Raises ValueError for a draw or step that is negative
    or does not fit in 32 bits.

    Args:
        seed: from 0, below 2^64.
        purpose: what the stream is for.
        t: the round, from 0.
        client: its id, from 0.
        draw: the index of this draw among the client's draws this round, from 0.
        step: a local step, or another number from 0.
    """
    return np.random.Generator(_philox(seed, purpose, t, client, draw, step))


def named_stream(
    seed: int, purpose: Purpose, name: str, *, t: int = 0, client: int = 0, draw: int = 0
) -> np.random.Generator:
    """The stream of this name, where a purpose has streams of any name: those of two names are the
    same with probability 2^-95, and none is one of `stream`.

    95 bits of the name's SHA-256 stand in the places of the purpose, whose numbers are below 2^63,
    and of the step. The other arguments are those of `stream`.
    """
    words = np.frombuffer(hashlib.sha256(f"{purpose:d} {name}".encode()).digest(), "<u8")
    step = int(words[1]) >> 32
    return np.random.Generator(_philox(seed, int(words[0]) | 1 << 63, t, client, draw, step))


def bit_streams(
    seed: int,
    purpose: Purpose,
    *,
    t: int,
    clients: Sequence[int] | np.ndarray,
    draws: Sequence[int] | np.ndarray,
) -> Iterator[np.random.Philox]:
    """The bit generators of the streams of `clients` [C] and their `draws` [C], one after another,
    in a third of the time. It is always the same object: read it before you ask for the next.
    """
    philox = _philox(seed, purpose, t, 0, 0, 0)
    state = philox.state
    counter = state["state"]["counter"]
    for client, draw in zip(np.asarray(clients).tolist(), np.asarray(draws).tolist(), strict=True):
        counter[1] = draw << 32
        counter[2] = client
        philox.state = state
        yield philox


BLOCKS = 16  # of a group of blocks of the stream of normals
WORDS = 8 * BLOCKS  # of 64 bits, of such a group
_AT_ONCE = 256 * WORDS  # words at a time, so that intermediate results stay in the cache


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
    """Standard normals of one named stream, float32 [n], by Box and Muller (1958): two from every
    64-bit word, with the same bits on every processor. Arguments as for `stream`.

    40 bits of a word give the radius and 24 the angle. The uniform under the logarithm is in
    [2^-41, 1], in steps that shrink towards 0 as those of float32 do. So values reach 7.53 standard
    deviations; 5e-14 of the distribution is beyond. The vector depends on n as a whole (two draws
    of 1000 are not one of 2000).
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
    """The `normals` of C clients with their draws, float32 [C, n], times `stds` [C] (None: 1), with
    the same bits and in less time.
    """
    half = (n + 1) // 2
    out = np.empty((len(clients), 2 * half), np.float32)
    factors = np.ones(len(clients), np.float32) if stds is None else stds.astype(np.float32)
    draw_indices = np.asarray(draws, np.int64)
    if not (0 <= step < 1 << 32 and ((draw_indices >= 0) & (draw_indices < 1 << 32)).all()):
        raise ValueError(f"draws and step {step} must each fit in 32 bits")
    names = np.empty((len(draw_indices), 5), np.uint64)
    names[:, :3] = np.array([seed, purpose, t], np.uint64)
    names[:, 3] = clients
    names[:, 4] = (draw_indices.astype(np.uint64) << np.uint64(32)) | np.uint64(step)
    if not native.normals(names, factors, out):
        group_size = max(1, _AT_ONCE // max(half, WORDS))
        for start in range(0, len(clients), group_size):
            rows = slice(start, start + group_size)
            _numpy_normals(names[rows], factors[rows], out[rows])
    return torch.from_numpy(out)[:, :n]


def _numpy_normals(names: np.ndarray, stds: np.ndarray, out: np.ndarray) -> None:
    """What `raydpfl.core.native.normals` does."""
    half = out.shape[1] // 2
    for start in range(0, half, _AT_ONCE):
        end = min(start + _AT_ONCE, half)
        groups = -(-(end - start) // WORDS)
        words = chacha(names, start // 8, groups * BLOCKS)
        # of each pair of a block's words, and each group, that of all blocks
        pairs = words.reshape(8, 2, len(names), groups, BLOCKS).transpose(1, 2, 3, 0, 4)
        low, high = pairs.reshape(2, len(names), -1)[:, :, : end - start]
        halves = _box_muller(low, high, stds[:, None])
        out[:, start:end], out[:, half + start : half + end] = halves


def chacha(names: np.ndarray, counter: int, blocks: int) -> np.ndarray:
    """Blocks of ChaCha with 8 rounds (Bernstein 2008), from the number `counter` on: their words,
    uint32 [16, C, blocks], of `names` uint64 [C, 5], the key and the nonce.
    """
    words = np.empty((8, len(names), blocks), np.uint64)
    words[:2] = np.array([0x3320646E61707865, 0x6B20657479622D32], np.uint64)[:, None, None]
    words[2:6] = names.T[:4, :, None]
    words[6] = np.uint64(counter) + np.arange(blocks, dtype=np.uint64)
    words[7] = names.T[4, :, None]
    start = np.empty((8, 2, len(names), blocks), np.uint32)
    start[:, 0] = words
    start[:, 1] = words >> np.uint64(32)
    rows = start.reshape(4, 4, len(names), blocks).copy()
    for _ in range(4):
        _mix(*rows)
        _turn(rows, 1)
        _mix(*rows)
        _turn(rows, -1)
    return rows.reshape(16, len(names), blocks) + start.reshape(16, len(names), blocks)


def _mix(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> None:
    """Four quarter rounds, one for each number of these rows."""
    for x, y, z, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        x += y
        z ^= x
        high = z << np.uint32(bits)
        z >>= np.uint32(32 - bits)
        z |= high


def _turn(rows: np.ndarray, shift: int) -> None:
    """Brings the diagonals of 4 rows into columns, or back."""
    for r in (1, 2, 3):
        rows[r] = rows[r][(np.arange(4) + shift * r) % 4]


def _box_muller(
    low: np.ndarray, high: np.ndarray, stds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The normals of words by their halves, uint32 [C, w], times `stds`, float32 [C, 1]: the
    cosines and the sines, float32 [C, w].

    The radius has 31 bits of `low` and 9 of `high`. The angle has 21 of `high` for its place in an
    eighth of the circle, and 3 for the reflection that this eighth is taken by. Every operation is
    one of float32 or int32, fused ones too, in the order of `box_muller` in normals.c.
    """
    number = np.float32
    tail = (high & np.uint32(0x3FE) | np.uint32(1)).astype(number) * number(2.0**-10)
    v = (low & np.uint32(0x7FFFFFFF)).astype(number) + tail
    radius = np.sqrt(_minus_two_logarithms(v)) * stds
    odd = (high >> np.uint32(9)) & np.uint32(0x3FFFFE) | np.uint32(1)
    r = odd.astype(number) * number(1.8725351414619645e-07)
    z = r * r
    s = _polynomial(z, _SINE) * z
    s = _fma(s, r, r)
    c = _polynomial(z, _COSINE)
    swap_mask = (high & np.uint32(1)) != 0
    cosine = _copy_sign(np.where(swap_mask, s, c), low)
    sine = _copy_sign(np.where(swap_mask, c, s), high)
    return cosine * radius, sine * radius


def _copy_sign(values: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """float32 `values`, negated where the highest of `bits` is 1."""
    return (values.view(np.uint32) ^ (bits & np.uint32(1 << 31))).view(np.float32)


def _minus_two_logarithms(v: np.ndarray) -> np.ndarray:
    """-2 log(2^-31 v) of float32 numbers in [2^-10, 2^31], to rounding."""
    t = v.view(np.int32) - np.int32(0x4EB504F3)
    e = (t >> np.int32(23)).astype(np.float32)  # v = (f + 1) 2^(e + 31)
    f = ((t & np.int32(0x7FFFFF)) + np.int32(0x3F3504F3)).view(np.float32) - np.float32(1)
    return _fma(e, np.float32(-1.3862943611), _polynomial(f, _LOG) * f)


# polynomials with the least relative error over a reduced argument, the highest power first: of
# -2 log(1 + f) / f over [sqrt(1/2), sqrt(2)] - 1, 3e-8; of (sin r / r - 1) / r^2 and cos r, in r^2
# over [0, pi^2 / 16], 4e-9 and 2e-10 of the sine and the cosine
_LOG = (
    -0.1746968627, 0.2861504257, -0.2983594835, 0.3314101696, -0.3992414474, 0.5000351071,
    -0.6666790247, 0.9999998212, -2.0,
)  # fmt: skip
_SINE = (-0.0001951528393, 0.008332160302, -0.1666665524)
_COSINE = (2.44331568e-05, -0.001388731645, 0.04166664556, -0.5, 1.0)


def _polynomial(x: np.ndarray, terms: Sequence[float]) -> np.ndarray:
    """float32 numbers, by fused multiply-adds from the first of `terms` on."""
    y = np.full_like(x, terms[0])
    for term in terms[1:]:
        y = _fma(y, x, np.float32(term))
    return y


def _fma(a: np.ndarray, b: np.ndarray | np.float32, c: np.ndarray | np.float32) -> np.ndarray:
    """a b + c of float32 numbers, rounded once, where that is no subnormal number.

    In float64 the product is exact, and the sum is rounded. To round it again is to round it once,
    unless it comes to lie halfway between two float32 numbers: then what was lost decides.
    """
    product = a.astype(np.float64) * b
    total = product + c
    halfway = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    if halfway.any():
        p = product[halfway]
        addend = np.broadcast_to(c, a.shape)[halfway].astype(np.float64)
        s = total[halfway]
        back = s - p
        residual = (p - (s - back)) + (addend - back)
        total[halfway] = np.where(residual == 0, s, np.nextafter(s, np.copysign(np.inf, residual)))
    return total.astype(np.float32)


def torch_stream(
    seed: int, purpose: Purpose, *, t: int = 0, client: int = 0, draw: int = 0, step: int = 0
) -> torch.Generator:
    """A torch CPU generator for one named stream; its Mersenne state is filled from the Philox
    stream, as `manual_seed` has only 32 bits of a seed. Arguments as for `stream`.
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
    this process uses, are at the start of one named stream; afterwards they are as before. For
    user-defined code. Arguments as for `stream`.
    """
    saved_states = random.getstate(), np.random.get_state(), torch.get_rng_state()
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
        random.setstate(saved_states[0])
        np.random.set_state(saved_states[1])
        torch.set_rng_state(saved_states[2])
