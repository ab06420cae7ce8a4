"""The keyed normals: their law, their tails, and that a name alone decides them."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from raydpfl.core import prng
from raydpfl.core.prng import Purpose, clients_normals, normals
from raydpfl.methods.noise import keyed_noise

ALARM = 1e-5  # false-alarm rate of each statistic below


def _drawn(vectors: int, n: int) -> np.ndarray:
    return np.stack(
        [normals(11, Purpose.STEP_NOISE, n, t=t).numpy() for t in range(vectors)]
    ).astype(np.float64)


@pytest.mark.slow
def test_normals_have_the_moments_of_the_standard_normal():
    """Mean, variance, skewness, kurtosis of 4 million, each over its standard deviation."""
    drawn = _drawn(40, 100_000).ravel()
    scale = math.sqrt(len(drawn))
    moments = [
        drawn.mean(),
        ((drawn**2).mean() - 1) / math.sqrt(2),
        (drawn**3).mean() / math.sqrt(15),
        ((drawn**4).mean() - 3) / math.sqrt(96),
    ]
    assert np.abs(moments).max() * scale < stats.norm.isf(ALARM / 2 / 4)


def test_normals_follow_the_normal_law_in_each_half_and_near_zero():
    """Kolmogorov-Smirnov over cosine and sine half; uniform within 0.01 of zero."""
    drawn = _drawn(10, 100_000)
    for half in (drawn[:, :50_000], drawn[:, 50_000:]):
        assert stats.kstest(half.ravel(), "norm").pvalue > ALARM
    near = drawn[np.abs(drawn) < 0.01]
    assert stats.kstest(near, stats.uniform(-0.01, 0.02).cdf).pvalue > ALARM


@pytest.mark.parametrize("sigmas", [3.0, 4.0, 5.0])
def test_as_many_normals_lie_in_the_tails_as_should(sigmas):
    """Both tails of 20 million together, an exact binomial test."""
    n = 200_000
    beyond = 0
    for t in range(100):
        drawn = normals(12, Purpose.STEP_NOISE, n, t=t)
        beyond += int((drawn.abs() > sigmas).sum())
    assert stats.binomtest(beyond, 100 * n, 2 * stats.norm.sf(sigmas)).pvalue > ALARM


def _from_words(radii: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Cosines and sines, [2, w], of words with these radii, of 40 bits, and angles, of 24: the
    angle within an eighth of the circle (21), whether it is swapped, and the two signs.
    """
    cosine = angles >> 22 & 1
    sine = angles >> 23
    low = cosine << 31 | radii >> 9
    within = angles & 0x1FFFFF
    high = sine << 31 | within << 10 | (radii & 0x1FF) << 1 | angles >> 21 & 1
    given = low.astype(np.uint32)[None], high.astype(np.uint32)[None]
    return np.concatenate(prng._box_muller(*given, np.ones((1, 1), np.float32)))


ONES = (1 << 40) - 1


def test_the_tail_reaches_seven_and_a_half_sigma_and_no_word_gives_a_number_that_is_not_finite():
    some = [0, 1, 2, 511, 512, ONES >> 1, ONES - (1 << 15), ONES - 1, ONES]
    radii, angles = np.meshgrid(
        some, [0, 1, 1 << 21, (1 << 21) - 1, 1 << 22, 1 << 23, (1 << 24) - 1]
    )
    drawn = _from_words(radii.ravel(), angles.ravel())
    assert np.isfinite(drawn).all()
    longest = math.sqrt(2 * 41 * math.log(2))
    assert drawn.max() == pytest.approx(longest, rel=1e-6) and longest > 7.5


def test_normals_are_the_box_muller_transform_in_double_precision_to_rounding():
    generator = np.random.Generator(np.random.Philox(key=5))
    radii = generator.integers(0, ONES + 1, 20_000) >> generator.integers(0, 41, 20_000)
    angles = generator.integers(0, 1 << 24, 20_000)
    within = ((angles & 0x1FFFFF) + 0.5) * (np.pi / 4 / 2**21)
    at = np.stack([np.cos(within), np.sin(within)])
    at = np.where(angles >> 21 & 1, at[::-1], at) * (
        1 - 2 * np.stack([angles >> 22 & 1, angles >> 23])
    )
    exact = np.sqrt(-2 * np.log((radii + 0.5) * 2.0**-40)) * at
    # the uniform is rounded to 2^-24 near 1, where the radius is small
    assert np.abs(_from_words(radii, angles) - exact).max() < 2e-5


def test_logarithms_sines_and_cosines_are_exact_to_two_units_in_the_last_place():
    places = np.linspace(0, 1, 200_001)
    v = (2.0 ** (41 * places - 10)).astype(np.float32)
    some = v[v < np.float32(2.0**31)]
    log = prng._minus_two_logarithms(some)
    r = (np.pi / 4 * places[1:]).astype(np.float32)
    z = r * r
    sine = prng._fma(prng._polynomial(z, prng._SINE) * z, r, r)
    cosine = prng._polynomial(z, prng._COSINE)
    angle = r.astype(np.float64)
    true = np.sin(angle), np.cos(angle), -2 * np.log(some.astype(np.float64) * 2.0**-31)
    for found, exact in zip((sine, cosine, log), true, strict=True):
        assert (np.abs(found - exact) <= 2 * np.spacing(np.float32(exact))).all()


def test_a_fma_is_rounded_once_where_its_sum_in_double_is_halfway():
    """1 + 2^-24 + 2^-56, as 641 6700417 = 2^32 + 1; 1 + 2^-23 + 2^-24 - 2^-70; and 1 + 2^-24."""
    u = 2.0**-23
    a = np.float32([641, -641, 1 - u, 1])
    b = np.float32([6700417 * 2.0**-56, 6700417 * 2.0**-56, (1 + u) / 2**24, 2.0**-24])
    c = np.float32([1, -1, 1 + u, 1])
    np.testing.assert_array_equal(prng._fma(a, b, c), np.float32([1 + u, -1 - u, 1 + u, 1]))


def test_the_angles_go_round_the_circle_in_equal_steps():
    """On a coarser grid: the middles of 16 parts of the eighth of the circle, and 8 reflections."""
    angles = ((2 * np.arange(16)[:, None] + 1 << 16) | np.arange(8) << 21).ravel()
    cosine, sine = _from_words(np.full_like(angles, 1 << 30), angles)
    steps = np.diff(np.sort(np.arctan2(sine, cosine))) / (2 * np.pi / 128)
    assert np.allclose(steps, 1, atol=1e-3)


# of draft-strombergson-chacha-test-vectors-01: ChaCha with 8 rounds, key, nonce, and two blocks
BLOCKS = [
    (
        "0000000000000000000000000000000000000000000000000000000000000000",
        "0000000000000000",
        "3e00ef2f895f40d67f5bb8e81f09a5a12c840ec3ce9a7f3b181be188ef711a1e"
        "984ce172b9216f419f445367456d5619314a42a3da86b001387bfdb80e0cfe42"
        "d2aefa0deaa5c151bf0adb6c01f2a5adc0fd581259f9a2aadcf20f8fd566a26b"
        "5032ec38bbc5da98ee0c6f568b872a65a08abf251deb21bb4b56e5d8821e68aa",
    ),
    (
        "c46ec1b18ce8a878725a37e780dfb7351f68ed2e194c79fbc6aebee1a667975d",
        "1ada31d5cf688221",
        "838751b42d8ddd8a3d77f48825a2ba752cf4047cb308a5978ef274973be374c9"
        "6ad848065871417b08f034e681fe46a93f7d5c61d1306614d4aaf257a7cff08b"
        "16f2fda170cc18a4b58a2667ed962774af792a6e7f3c77992540711a7a136d7e"
        "8a2f8d3f93816709d45a3fa5f8ce72fde15be7b841acba3a2abd557228d9fe4f",
    ),
]


def test_the_generator_gives_its_published_vectors_for_several_names_at_once():
    names = np.frombuffer(bytes.fromhex("".join(key + nonce for key, nonce, _ in BLOCKS)), "<u8")
    blocks = prng.chacha(names.reshape(-1, 5), 0, 2)
    found = [blocks[:, i].T.astype("<u4").tobytes().hex() for i in range(len(BLOCKS))]
    assert found == [expected for _, _, expected in BLOCKS]


def test_blocks_are_counted_in_64_bits():
    names = np.array([[1, 2, 3, 4, 5]], np.uint64)
    around = prng.chacha(names, (1 << 32) - 2, 4)
    assert np.array_equal(around[..., 2:], prng.chacha(names, 1 << 32, 2))
    assert len(np.unique(prng.chacha(names, 0, 3).T, axis=0)) == 3
    assert not np.array_equal(around[..., 2:], prng.chacha(names, 0, 2))


def test_halves_and_neighbouring_names_are_uncorrelated():
    """Correlations of values and squares between the halves, and between adjacent names."""
    n = 40_000
    names = [{}, {"client": 2**32}]
    names += [{name: k} for name in ("t", "client", "draw", "step") for k in (1, 2)]
    drawn = [normals(3, Purpose.STEP_NOISE, n, **name).numpy() for name in names]
    drawn += [
        normals(4, Purpose.STEP_NOISE, n).numpy(),
        normals(3, Purpose.CLIENT_NOISE, n).numpy(),
        normals(3 + 2**32, Purpose.STEP_NOISE, n).numpy(),
    ]
    halves = np.stack(drawn).astype(np.float64).reshape(-1, n // 2)
    for values in (halves, halves**2):
        pairs = np.corrcoef(values)[np.triu_indices(len(values), 1)]
        assert np.abs(pairs).max() * math.sqrt(n // 2) < stats.norm.isf(ALARM / 2 / len(pairs))


@pytest.mark.parametrize("n", [1, 333, 7850, 2 * prng._AT_ONCE + 5])
def test_drawn_together_clients_get_the_bits_that_each_gets_alone(n):
    clients = [5, 2**40, 0, 5, 7, 8, 9, 1, 2, 3, 4]
    draws = [0, 1, 0, 2] + 7 * [0]
    stds = np.linspace(0, 3, 11)
    name = dict(t=6, step=2)
    drawn = partial(clients_normals, 4, Purpose.STEP_NOISE, n, clients=clients, draws=draws, **name)
    together, scaled = drawn(), drawn(stds=stds)
    names = [{"client": c, "draw": draw, **name} for c, draw in zip(clients, draws, strict=True)]
    alone = torch.stack([normals(4, Purpose.STEP_NOISE, n, **each) for each in names])
    assert together.dtype == scaled.dtype == torch.float32 and torch.equal(together, alone)
    expected = alone * torch.tensor(stds)[:, None].float()
    torch.testing.assert_close(scaled, expected, rtol=3e-7, atol=0)


def test_any_number_of_normals_can_be_drawn_odd_ones_too():
    for n in (0, 1, 2, 3, 17, 2 * prng._AT_ONCE - 1, 2 * prng._AT_ONCE + 1, 2 * prng._AT_ONCE + 2):
        drawn = normals(1, Purpose.STEP_NOISE, n)
        assert drawn.shape == (n,) and (n < 2 or len(drawn.unique()) > 0.99 * n)


def test_noise_is_scaled_in_double_precision():
    of_client = keyed_noise.client_noise(2, 3, [4], [1], 1 / 3, 1001)[0]
    of_server = keyed_noise.server_noise(2, 3, 1 / 3, 1001)
    key = {"t": 3, "client": 4, "draw": 1}
    for noise, base in (
        (of_client, normals(2, Purpose.CLIENT_NOISE, 1001, **key)),
        (of_server, normals(2, Purpose.SERVER_NOISE, 1001, t=3)),
    ):
        assert noise.dtype == np.float64 and np.array_equal(noise, base.double().numpy() * (1 / 3))
