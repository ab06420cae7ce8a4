"""The keyed normals: their law, their tails, and that a name alone decides them."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from raydpfl import keys, native
from raydpfl.keys import Purpose, clients_normals, normals
from raydpfl.noise import drawn

ALARM = 1e-5  # false-alarm rate of each statistic below


def _drawn(vectors: int, n: int) -> np.ndarray:
    return np.stack(
        [normals(11, Purpose.STEP_NOISE, n, t=t).numpy() for t in range(vectors)]
    ).astype(np.float64)


@pytest.mark.slow
def test_normals_have_the_moments_of_the_standard_normal():
    """Mean, variance, skewness and kurtosis of 4 million; each statistic is normal with the
    variance it is divided by.
    """
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
    """Kolmogorov-Smirnov over the cosine and the sine half, and over the values within 0.01 of
    zero, which must be uniform there.
    """
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


def _from_words(monkeypatch, words: list[int]) -> np.ndarray:
    """The normals made of these words, in the order cosine half, sine half."""

    class Words:
        def random_raw(self, count: int) -> np.ndarray:
            assert count == len(words)
            return np.array(words, np.uint64)

    monkeypatch.setattr(keys, "_philox", lambda *name: Words())
    monkeypatch.setattr(native, "normals", lambda *given: False)
    return normals(0, Purpose.STEP_NOISE, 2 * len(words)).numpy()


def test_the_tail_reaches_seven_and_a_half_sigma_and_no_word_gives_a_number_that_is_not_finite(
    monkeypatch,
):
    ones = (1 << 40) - 1
    radii = [0, 1, 2, ones >> 1, ones - (1 << 15), ones - 1, ones]
    words = [
        (angle << 40) | radius
        for radius in radii
        for angle in (0, 1, 1 << 22, 1 << 23, (1 << 24) - 1)
    ]
    drawn = _from_words(monkeypatch, words)
    assert np.isfinite(drawn).all()
    assert (
        drawn.max() == pytest.approx(math.sqrt(2 * 41 * math.log(2)), rel=1e-6)
        and drawn.max() > 7.5
    )


def test_normals_are_the_box_muller_transform_in_double_precision_to_rounding(monkeypatch):
    words = np.random.Generator(np.random.Philox(key=5)).integers(0, 1 << 64, 20_000, np.uint64)
    drawn = _from_words(monkeypatch, words.tolist()).astype(np.float64)
    uniform = ((words & np.uint64((1 << 40) - 1)).astype(np.float64) + 0.5) * 2.0**-40
    angle = (words.view(np.int64) >> 40) * (np.pi / 2**23)
    exact = np.sqrt(-2 * np.log(uniform)) * np.stack([np.cos(angle), np.sin(angle)])
    # the uniform is rounded to 2^-25 near 1, where the radius is small
    assert np.abs(drawn - exact.ravel()).max() < 2e-5


def test_halves_and_neighbouring_names_are_uncorrelated():
    """Correlations of values and of squares, between cosine and sine half and between vectors whose
    names differ by one.
    """
    n = 40_000
    names = [
        {},
        {"t": 1},
        {"client": 1},
        {"draw": 1},
        {"step": 1},
        {"t": 2},
        {"client": 2**32},
        {"draw": 2},
        {"step": 2},
    ]
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


def test_a_name_alone_decides_the_bits_whatever_was_drawn_before():
    first = normals(8, Purpose.STEP_NOISE, 7850, t=3, client=5, draw=1, step=9)
    normals(8, Purpose.STEP_NOISE, 333, t=3, client=6)
    again = normals(8, Purpose.STEP_NOISE, 7850, t=3, client=5, draw=1, step=9)
    assert first.dtype == torch.float32 and torch.equal(first, again)


@pytest.mark.parametrize("n", [1, 333, 7850, 2 * keys._BLOCK + 5])
def test_drawn_together_clients_get_the_bits_that_each_gets_alone(n):
    clients = [5, 2**40, 0, 5, 7, 8, 9, 1, 2, 3, 4]
    draws = [0, 1, 0, 2] + 7 * [0]
    stds = np.linspace(0, 3, 11)
    name = dict(t=6, step=2)
    together = clients_normals(4, Purpose.STEP_NOISE, n, clients=clients, draws=draws, **name)
    scaled = clients_normals(
        4, Purpose.STEP_NOISE, n, clients=clients, draws=draws, stds=stds, **name
    )
    alone = torch.stack(
        [
            normals(4, Purpose.STEP_NOISE, n, client=client, draw=draw, **name)
            for client, draw in zip(clients, draws, strict=True)
        ]
    )
    assert together.dtype == scaled.dtype == torch.float32 and torch.equal(together, alone)
    torch.testing.assert_close(
        scaled, alone * torch.tensor(stds)[:, None].float(), rtol=3e-7, atol=0
    )


def test_any_number_of_normals_can_be_drawn_odd_ones_too():
    for n in (0, 1, 2, 3, 17, 2 * keys._BLOCK - 1, 2 * keys._BLOCK + 1, 2 * keys._BLOCK + 2):
        drawn = normals(1, Purpose.STEP_NOISE, n)
        assert drawn.shape == (n,) and (n < 2 or len(drawn.unique()) > 0.99 * n)


def test_noise_is_scaled_in_double_precision():
    for noise, base in (
        (
            drawn.client_noise(2, 3, [4], [1], 1 / 3, 1001)[0],
            normals(2, Purpose.CLIENT_NOISE, 1001, t=3, client=4, draw=1),
        ),
        (drawn.server_noise(2, 3, 1 / 3, 1001), normals(2, Purpose.SERVER_NOISE, 1001, t=3)),
    ):
        assert noise.dtype == np.float64 and np.array_equal(noise, base.double().numpy() * (1 / 3))
