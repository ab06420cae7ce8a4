"""The noise that leaves a client, and the noise that reaches the server, is what the accountants
count on. What reaches it in whole runs, of sums, answers and histograms, `test_audit` holds.

Each source gives rows of noise, [n, d] in units of the std that was asked for; `check_distribution`
tests them against independent standard normals: the variance of all, of each coordinate and of each
row, the distribution of single numbers, and correlations between rows and between coordinates. Each
of these raises a false alarm for one sound seed in 10^6; seeds are fixed.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import start_coordinator
from scipy.stats import chi2, kstest, norm

from raydpfl.core.messages import Broadcast, Chunk, Grid, Work
from raydpfl.core.prng import Purpose, stream
from raydpfl.methods.local import Sgd
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.training.trainer import Trainer

FALSE_ALARM = 1e-6
TINY = {  # 610 parameters, and clients that hardly move: what they send is their noise
    "data": {"kind": "synthetic", "clients": 30, "samples": 20, "test_samples": 10,
             "sizes": {"kind": "power-law"}},
    "weights": {"kind": "data"},
    "selection": {"kind": "uniform", "cohort": 8},
    "noise": {"kind": "gaussian", "placement": "client", "multiplier": 3.0, "delta": 1e-5},
    "bounding": {"kind": "clip", "bound": 0.5},
    "local": {"kind": "sgd", "steps": 1, "batch": 1, "lr": 1e-30},
    "client": {"actors": 0, "chunk": 4, "backend": "fused"},
}  # fmt: skip


def check_distribution(rows: np.ndarray) -> None:
    """Raises AssertionError unless `rows` [n, d] look like n d independent standard normals."""
    n, d = rows.shape

    def variance(sums: np.ndarray, degrees: int) -> None:
        tail = np.minimum(chi2.cdf(sums, degrees), chi2.sf(sums, degrees))
        assert tail.min() * 2 * sums.size > FALSE_ALARM, (
            f"variance {sums.flat[tail.argmin()] / degrees:.4f}"
        )

    squares = rows**2
    variance(squares.sum(keepdims=True), n * d)
    variance(squares.sum(0), n)
    variance(squares.sum(1), d)
    assert kstest(rows.ravel(), "norm").pvalue > FALSE_ALARM, "not normal"
    for vectors in (rows, rows.T):
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        products = (vectors @ vectors.T)[np.triu_indices(len(vectors), 1)]
        limit = -norm.ppf(FALSE_ALARM / (2 * len(products))) / math.sqrt(vectors.shape[1])
        assert np.abs(products).max() < limit, f"correlation {np.abs(products).max():.3f}"


@pytest.mark.parametrize(
    "broken",
    [
        lambda x, g: x * 0.98,
        lambda x, g: x * np.where(np.arange(x.shape[1]) == 5, 1.5, 1.0),  # one coordinate
        lambda x, g: x * np.where(np.arange(len(x)) == 7, 1.3, 1.0)[:, None],  # one row
        lambda x, g: g.uniform(-math.sqrt(3), math.sqrt(3), x.shape),
        lambda x, g: np.concatenate([x[:-1], x[:1]]),  # a row twice
        lambda x, g: np.concatenate([x[:, :-1], x[:, :1]], axis=1),  # a coordinate twice
        lambda x, g: (x + g.standard_normal((1, x.shape[1]))) / math.sqrt(2),  # a common part
        lambda x, g: np.clip(x, -2.5, 2.5) / math.sqrt(0.94),  # no tails
    ],
)
def test_noise_of_another_distribution_is_detected(broken):
    generator = np.random.default_rng(0)
    sound = generator.standard_normal((200, 610))
    check_distribution(sound)
    with pytest.raises(AssertionError):
        check_distribution(broken(sound, generator))


def test_noise_that_leaves_clients(tmp_path):
    """30 clients, 7 rounds, one drawn twice: as large for small weights as for large ones."""
    coordinator = start_coordinator(tmp_path, **TINY)
    plan = coordinator.plan
    actor = coordinator.pool.client
    rows = []
    std = plan.client_std(0, 0.5)
    assert std == pytest.approx(3.0 * 0.5 * plan.weight / math.sqrt(8))
    for t in range(7):
        clients = np.append(np.arange(30), 29)
        draws = np.append(np.zeros(30, int), 1)
        chunk = Chunk(clients, draws, plan.weights(clients), rows=int(plan.population.sizes.max()))
        work = Work(t, plan.seed, plan.noise_seed, 0.5, std, Grid.of(31, 0.5, std))
        began = actor.begin(Broadcast(np.zeros(plan.d, np.float32)), work)
        state = ChunkRound(began, chunk, torch.zeros(31, 0))
        contribution = actor.contribution(state)
        for block in contribution.blocks(state):
            for single in block.singles():
                sent = torch.zeros(plan.d, dtype=torch.float64)
                contribution.add(state, single, sent)
                rows.append(sent.numpy() / std)
    assert len(rows) == 7 * 31 and np.ptp(plan.weights(np.arange(30))) > 0.5
    check_distribution(np.stack(rows))


def test_banded_noise_is_white_noise_through_the_inverse_of_its_bands(tmp_path):
    """C y has the law of z, y the covariance (C^T C)^-1: 6 standard errors, 66 entries, 10^-7."""
    noise = {"kind": "banded_gaussian", "multiplier": 3.0, "bands": 4}
    changes = {"rounds": 200, "noise": noise, "selection": {"kind": "cyclic", "period": 5}}
    coordinator = start_coordinator(tmp_path, **TINY | changes)
    plan = coordinator.plan
    std = 3.0 * 0.5 * plan.weight
    c = plan.experiment.noise.coefficients
    y = np.stack([coordinator.release(t, np.zeros(plan.d)) / std for t in range(200)])
    matrix = sum(np.diag(np.full(200 - j, each), -j) for j, each in enumerate(c))
    assert np.linalg.norm(c) == pytest.approx(1) and len(c) == 4
    check_distribution(matrix @ y)
    inverse = np.linalg.inv(matrix[:11, :11])
    wanted = inverse @ inverse.T
    found = y[:11] @ y[:11].T / plan.d
    errors = np.sqrt((wanted**2 + np.outer(np.diag(wanted), np.diag(wanted))) / plan.d)
    assert np.abs((found - wanted) / errors).max() < 6
    assert np.abs(wanted[np.triu_indices(11, 1)]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fused", "vmap", "loop"])
def test_noise_of_local_steps(backend):
    """Of 20 clients, each with a std of its own, in 3 rounds of 3 steps: what the q-th step adds to
    the update. Gradients are clipped away.
    """
    stds = np.linspace(0.5, 2.0, 20)
    x = torch.from_numpy(stream(1, Purpose.DATA).standard_normal((20, 6, 60), dtype=np.float32))
    y = torch.zeros(20, 6, dtype=torch.int64)
    rows = []
    for t in range(3):
        updates = [np.zeros((20, 610))]
        for steps in (1, 2, 3):
            rule = Sgd(steps=steps, batch=4, lr=1.0)
            trainer = Trainer(torch.nn.Linear(60, 10), rule, backend=backend, seed=3, clip=1e-9)
            keys = {"t": t, "clients": range(20), "draws": [0] * 20}
            chunk = trainer.chunk(torch.zeros(610), x, y, [6] * 20, **keys, stds=stds)
            updates.append(torch.cat([block.updates for block in chunk]).double().numpy())
        rows += [(before - after) / stds[:, None] for before, after in pairwise(updates)]
    check_distribution(np.concatenate(rows))
