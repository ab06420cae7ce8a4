"""Quadratic objectives: the data, the exact solutions, and whole runs against both."""

import itertools

import numpy as np
import pytest
from conftest import experiment, form, messages
from quadratics import harmless_lr, model_clip_limit, stationary

from raydpfl import data, models, run
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Shards, prepare
from raydpfl.errors import ConfigError

EQ_8 = (1.0, 2.0, 6.0), (4.0, 1.0, -1.0)  # a and b of 000 eq. 8; the optimum is 0


def spread_start():
    """The linear model at a distance, float64 [15], as runs with spread 1 and seed 4 have it."""
    model = models.parse({"kind": "linear", "spread": 1.0})
    return models.flatten(models.build(model, form((15,), 0, "regression"), 4)).double().numpy()


def clip(values, bound):
    return values if bound is None else np.clip(values, -bound, bound)


def trained(a, b, steps, lr, x):
    """The clients' models after their local steps from x, one step after another."""
    local = np.full(len(a), float(x))
    for _ in range(steps):
        local -= lr * np.asarray(a) * (np.asarray(a) * local - b)
    return local


def averaged(a, b, steps, lr, bound, sends, rounds, x=0.0):
    """Federated averaging of the scalar quadratics in float64."""
    for _ in range(rounds):
        local = trained(a, b, steps, lr, x)
        x = clip(local, bound).mean() if sends == "model" else x + clip(local - x, bound).mean()
    return x


def claim_2_1(bound, k):
    return (1.0, 1.0, 1.0), (-bound / 2, -bound / 2, k * bound)


def simulated(tmp_path, rounds, source, local, bounding=None, start=0.0, spread=0.0, server=None):
    """Final parameters, float64 [d], and summary of a run of all clients without noise."""
    asked = experiment(
        **{"seed": 4, "rounds": rounds, "data": source, "evaluate": {"every": rounds}},
        model={"kind": "linear", "start": start, "spread": spread},
        selection={"kind": "full"},
        local={"kind": "sgd", "batch": "full", **local},
        bounding=bounding or {"kind": "none"},
        noise={"kind": "none"},
        server={"kind": "sgd", **(server or {})},
    )
    result = run(asked, tmp_path / "run")
    return models.flatten(result.model).double().numpy(), result.summary


def quadratic(seed=4, **keys):
    return data.parse({"kind": "quadratics", "clients": 12, "dimension": 15, "rank": 4} | keys)


def definition(described, seed):
    """Q_i [N, d, d] and w_i [N, d] of 001 sec. 5.3, and w* of the mean, of least norm."""
    d = described.dimension
    rank = described.rank
    q = np.zeros((described.clients, d, d))
    own = np.zeros((described.clients, d))
    for client in range(described.clients):
        generator = stream(seed, Purpose.DATA, client=client)
        matrix = generator.standard_normal((rank, d)).T * (described.variance or 1 / d) ** 0.5
        q[client] = matrix @ matrix.T
        own[client] = described.heterogeneity * (
            generator.standard_normal(d) if described.optima == "normal" else generator.random(d)
        )
    best = np.linalg.pinv(q.sum(0), rcond=1e-9, hermitian=True) @ np.einsum("nij,nj->i", q, own)
    return q, own, best


def values(q, own, w):
    """f_i(w) = 1/2 (w - w_i)^T Q_i (w - w_i), [N]."""
    return np.einsum("ni,nij,nj->n", w - own, q, w - own) / 2


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"optima": "uniform", "heterogeneity": 3.0},
        {"variance": 0.5},
        {"clients": 3, "dimension": 20},
    ],
)
def test_a_clients_mean_loss_is_its_quadratic_in_coordinates_with_the_optimum_at_0(keys):
    described = quadratic(**keys)
    split = described.split(4, None)
    q, own, best = definition(described, 4)
    assert split.classes == 0 and split.shape == (described.dimension,)
    assert (split.sizes == described.rank).all()
    for w in np.random.default_rng(0).normal(size=(5, described.dimension)):
        for client, value in enumerate(values(q, own, w + best)):
            x, y = split.rows(client, client + 1)
            assert np.mean((x.astype(float) @ w - y) ** 2) / 2 == pytest.approx(value, rel=1e-5)
        x, y = split.test()
        assert np.mean((x.astype(float) @ w - y) ** 2) / 2 == pytest.approx(
            values(q, own, w + best).mean(), rel=1e-5
        )


# the sum of the Q_i has full rank; or rank 12 of 20
@pytest.mark.parametrize("keys", [{}, {"clients": 3, "dimension": 20}])
def test_the_optimum_is_the_origin_and_its_value_is_in_the_description(keys, tmp_path):
    described = quadratic(**keys)
    q, own, best = definition(described, 4)
    x, y = described.split(4, None).test()
    assert np.abs(x.T.astype(float) @ y / len(y)).max() < 1e-6  # no slope there
    told = Shards.open(prepare(described, 4, cache=tmp_path)).describe()["optimum"]
    assert told == pytest.approx(values(q, own, best).mean(), rel=1e-5, abs=1e-12) and told >= 0
    if keys:  # the solution of least norm has no part that no row sees
        span = np.linalg.svd(x.astype(float))[2][: len(x)]
        np.testing.assert_allclose(span.T @ (span @ best), best, atol=1e-5)


def test_a_client_alone_can_reach_0():
    x, y = quadratic().split(4, None).rows(5, 6)
    w = np.linalg.lstsq(x.astype(float), y.astype(float))[0]
    assert np.abs(x.astype(float) @ w - y).max() < 1e-12


def test_without_heterogeneity_all_clients_agree():
    described = quadratic(heterogeneity=0)
    assert described.split(0, None).optimum == 0 and not described.split(0, None).test()[1].any()


def test_scalar_quadratics_are_the_pairs(tmp_path):
    pairs = data.parse({"kind": "scalar_quadratics", "a": EQ_8[0], "b": EQ_8[1]})
    opened = Shards.open(prepare(pairs, 0, cache=tmp_path))
    x, y, n = opened.chunk([0, 1, 2], 1)
    assert (x.ravel() == EQ_8[0]).all() and (y.ravel() == EQ_8[1]).all() and (n == 1).all()
    described = opened.describe()
    assert described["optimum"] == (16 + 1 + 1) / 6
    assert opened.clients == described["test_samples"] == 3


@pytest.mark.parametrize(("keys", "message"), messages("quadratics"))
def test_pairs_that_are_none_are_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        data.parse({"kind": "scalar_quadratics"} | keys)


@pytest.mark.slow
def test_claim_2_1_holds_wherever_k_is_above_4():
    for k, steps, lr, bound in itertools.product(
        (4.001, 5.0, 50.0), (1, 3, 40), (1e-3, 0.3, 0.95), (0.2, 7.0)
    ):
        limit = model_clip_limit(bound, steps, lr)
        a, b = claim_2_1(bound, k)
        assert stationary(a, b, steps, lr, bound, "model") == (pytest.approx(limit, rel=1e-12),) * 2
        ended = averaged(a, b, steps, lr, bound, "model", rounds=150, x=bound)
        assert ended == pytest.approx(limit, rel=1e-12)
        # which is the optimum
        assert limit < bound < (k - 1) * bound / 3 == pytest.approx(np.mean(b))
    # Of k = 3.9 and a small lr it does not: the third client's model is within the bound.
    low = stationary(*claim_2_1(1.0, 3.9), 1, 1e-3, 1.0, "model")[0]
    assert low < model_clip_limit(1.0, 1, 1e-3) - 1e-3


def test_claim_2_2_one_unclipped_step_keeps_the_optimum_but_the_printed_rate_may_not():
    for bound in (0.03, 0.2, 1.0):
        lr = min(harmless_lr(*EQ_8, bound), 1 / 36)
        assert stationary(*EQ_8, 1, lr, bound) == (pytest.approx(0, abs=1e-15),) * 2
    assert harmless_lr(*EQ_8, 0.1) == pytest.approx(0.1 / 6)  # |f_i'(0)| = 4, 2, 6
    assert harmless_lr((1, 2), (2, 4), 0.1) == np.inf
    # eq. 8 with flatter clients, of which 1 / max |f_i'| is a stable rate
    a = (0.1, 0.2, 0.6)
    b = (4.0, 1.0, -1.0)
    printed = harmless_lr(a, b, bound=1.0)
    best = np.dot(a, b) / np.dot(a, a)
    assert stationary(a, b, 1, printed, 1.0)[0] == pytest.approx(best, abs=1e-12)
    assert abs(stationary(a, b, 1, printed, 0.5)[0] - best) > 0.1


@pytest.mark.parametrize("lr", [0.01, 0.02, 0.05])
def test_clipping_hurts_one_step_and_helps_many(lr):
    """What 000 says of its Table 1, whose numbers and learning rate are lost."""
    bounds = (1.0, 0.5, 0.1, 0.05, 0.01)
    assert stationary(*EQ_8, 1, lr, None)[0] == pytest.approx(0, abs=1e-15)
    assert stationary(*EQ_8, 1, lr, 0.01)[0] == pytest.approx(0.5)
    for steps in (50, 100, 1000):
        plain = stationary(*EQ_8, steps, lr, None)[0]
        assert all(0 < stationary(*EQ_8, steps, lr, bound)[0] < plain for bound in bounds)
    # the mean of the clients' optima
    assert stationary(*EQ_8, 10_000, lr, None)[0] == pytest.approx((4 + 1 / 2 - 1 / 6) / 3)
    assert stationary(*EQ_8, 10_000, lr, 0.01)[0] == pytest.approx(1 / 2)  # their median


@pytest.mark.parametrize(("k", "steps", "lr"), [(4.5, 1, 0.5), (10.0, 5, 0.1), (100.0, 2, 0.9)])
def test_a_run_with_model_clipping_stops_where_claim_2_1_says(k, steps, lr, tmp_path):
    a, b = claim_2_1(1.0, k)
    source = {"kind": "scalar_quadratics", "a": a, "b": b}
    bounding = {"kind": "model_clip", "bound": 1.0}
    local = {"steps": steps, "lr": lr}
    (x,), summary = simulated(tmp_path, 50, source, local, bounding, start=-3.0)
    assert x == pytest.approx(model_clip_limit(1.0, steps, lr), abs=1e-6)
    assert summary["test_loss"] == pytest.approx(np.mean((x - np.array(b)) ** 2) / 2, rel=1e-5)
    assert summary["test_accuracy"] is None


@pytest.mark.parametrize("kind", ["clip", "normalize"])
def test_runs_on_quadratics_follow_their_definition_from_a_start_at_a_distance(kind, tmp_path):
    """001 Alg. 1 and 2 without noise, five steps a round, in float64 beside the run."""
    described = quadratic()
    q, own, best = definition(described, 4)
    given = (described.model_dump(), {"steps": 5, "lr": 0.3}, {"kind": kind, "bound": 0.2})
    found, summary = simulated(tmp_path, 10, *given, spread=1.0)
    w = spread_start()
    assert w.min() >= 0 and w.max() <= 1 and w.std() > 0.1
    for _ in range(10):
        updates = np.zeros((12, 15))
        for client in range(12):
            local = w.copy()
            for _ in range(5):
                local -= 0.3 * q[client] @ (local + best - own[client])
            updates[client] = local - w
        factors = 0.2 / np.linalg.norm(updates, axis=1, keepdims=True)
        factors = factors if kind == "normalize" else np.minimum(1, factors)
        w = w + (updates * factors).mean(0)
    np.testing.assert_allclose(found, w, atol=1e-5)
    assert summary["test_loss"] == pytest.approx(values(q, own, w + best).mean(), rel=1e-5)


@pytest.mark.slow
def test_one_full_gradient_step_finds_the_optimum_and_many_the_reweighted_one(tmp_path):
    described = quadratic(heterogeneity=2.0)
    optimum = described.split(4, None).optimum
    q, own, best = definition(described, 4)
    lr = 1 / np.linalg.eigvalsh(q).max()
    given = (400, described.model_dump(), {"steps": 1, "lr": lr})
    w, summary = simulated(tmp_path / "one", *given, start=0.5, server={"lr": 2.0})
    assert np.abs(w).max() < 1e-4 and summary["test_loss"] == pytest.approx(optimum, rel=1e-5)
    shares = np.eye(15) - np.linalg.matrix_power(np.eye(15) - lr * q, 30)
    limit = np.linalg.solve(shares.sum(0), np.einsum("nij,nj->i", shares, own)) - best
    w, summary = simulated(tmp_path / "many", 400, described.model_dump(), {"steps": 30, "lr": lr})
    np.testing.assert_allclose(w, limit, atol=1e-4)
    assert summary["test_loss"] > optimum * 1.01
