"""Threads of compiled code: the same bits on any number, whoever stops or forks in mid-round."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import experiment, start_coordinator
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from raydpfl import models, run
from raydpfl.core import exact_sum, hardware, native
from raydpfl.core.messages import Broadcast, Grid, Work
from raydpfl.data import prepare
from raydpfl.errors import RunError
from raydpfl.methods.bounding import FAMILY, Bounding
from raydpfl.methods.local import Sgd
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client import actor
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.contribution import (
    Contribution,
    KernelContribution,
    ScaledContribution,
)
from raydpfl.simulation.resolution import resolve
from raydpfl.training.trainer import Trainer

pytestmark = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")
CLIENTS = 23
NOISED = {"clip": 0.8, "stds": np.linspace(0, 0.3, CLIENTS)}


@pytest.fixture(autouse=True)
def as_before():
    yield
    native.use(1)


@cache
def given(hidden: int, activation: type) -> tuple:
    """A module, and a chunk's rows, of which one client has none and one has huge ones."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(61, hidden), activation(), nn.Linear(hidden, 7))
    x = torch.randn(CLIENTS, 9, 61)
    x[7] *= 1e30
    sizes = np.arange(CLIENTS) % 9 + 1
    sizes[4] = 0
    return module, (models.flatten(module), x, torch.randint(0, 7, (CLIENTS, 9)), sizes)


def chunk(hidden: int, clip: float | None = None, activation: type = nn.ReLU, **more):
    """The blocks of a chunk in training."""
    module, chunk = given(hidden, activation)
    local = Sgd(steps=5, batch=4, lr=0.2, momentum=0.5)
    trainer = Trainer(module, local, backend="compiled", seed=1, clip=clip)
    return trainer.chunk(*chunk, t=0, clients=range(CLIENTS), draws=[0] * CLIENTS, **more)


def found(blocks) -> bytes:
    """What clients have trained to, as bytes; their norms must be those of their updates."""
    parts = []
    for block in blocks:
        parts += [block.slots.tobytes(), block.updates.numpy().tobytes(), block.losses.tobytes()]
        if block.norms is not None:
            np.testing.assert_array_equal(block.norms, native.norms(block.updates))
    return b"".join(parts)


@pytest.mark.parametrize("hidden", [19, 4000, 8000])  # a block of all clients, of 3, and of one
@pytest.mark.parametrize("more", [{}, NOISED, {"activation": nn.Tanh}])
def test_clients_train_to_the_same_bits_on_any_number_of_threads(more, hidden):
    native.use(1)
    alone = found(chunk(hidden, **more))
    for count in (2, 3, 8):
        native.use(count)
        assert native.threads() == count
        assert found(chunk(hidden, **more)) == alone


def test_sums_and_norms_have_the_same_bits_on_any_number_of_threads():
    generator = np.random.default_rng(0)
    for k, d in [(1, 1), (2, 3), (5, 20_000), (40, 16_384), (3, 200_001)]:
        rows = generator.standard_normal((k, d)).astype(np.float32)
        factors = generator.random(k)
        noise = generator.standard_normal((k, d))
        expected = None
        for count in (1, 2, 5):
            native.use(count)
            total = np.zeros(d)
            exact_sum.add(total, rows, Grid.of(k, 10.0), factors, noise)
            norms = native.norms(torch.from_numpy(rows)), native.norms(torch.from_numpy(noise))
            made = total.tobytes() + b"".join(each.tobytes() for each in norms)
            expected = expected or made
            assert made == expected


def test_stretches_of_a_file_are_read_to_their_places_on_any_number_of_threads(tmp_path):
    """By two callers, however much is read at once."""
    generator = np.random.default_rng(0)
    content = generator.integers(0, 256, 1 << 20, dtype=np.uint8)
    (tmp_path / "f").write_bytes(content.tobytes())
    lengths = np.append(generator.integers(1, 20_000, 200), [0, 4097])
    at = np.append(generator.integers(0, len(content) - 20_000, 201), len(content) - 4097)
    places = np.cumsum(lengths) - lengths + 3
    expected = np.zeros(lengths.sum() + 200, np.uint8)
    for start, length, place in zip(at, lengths, places, strict=True):
        expected[place : place + length] = content[start : start + length]
    with (tmp_path / "f").open("rb", buffering=0) as file, ThreadPoolExecutor(2) as callers:

        def read(max_bytes: int) -> bool:
            into = np.zeros_like(expected)
            assert native.read(file.fileno(), at, lengths, into, places, max_bytes)
            return np.array_equal(into, expected)

        for count in (1, 2, 5):
            native.use(count)
            assert all(callers.map(read, (1 << 30, 7000, 4096, 999)))
            with pytest.raises(EOFError):
                native.read(file.fileno(), at, lengths + 1, np.zeros_like(expected), places)
        with pytest.raises(AssertionError):  # it is never written beside the memory
            native.read(file.fileno(), at, lengths, expected[:-1000], places)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            native.read(folder, at, lengths, np.zeros_like(expected), places)
    finally:
        os.close(folder)


@pytest.mark.slow
def test_short_pieces_of_work_one_after_another_are_all_done():
    """Where threads come late, or find nothing left."""
    native.use(4)
    generator = np.random.default_rng(1)
    rows = torch.from_numpy(generator.standard_normal((60, 70)).astype(np.float32))
    expected = native.norms(rows)
    for k in generator.integers(1, 60, 3000).tolist():
        np.testing.assert_array_equal(native.norms(rows[:k]), expected[:k])


def test_a_chunk_that_is_left_in_the_midst_leaves_the_threads_free():
    native.use(3)
    expected = found(chunk(4000))
    for taken in (0, 1, 5):
        blocks = chunk(4000)
        for _ in range(taken):
            next(blocks)
        del blocks
        assert found(chunk(4000)) == expected


def test_chunks_trained_at_once_get_the_bits_of_each_alone():
    """In two threads of Python, of which one has those of compiled code; and one in the other."""
    native.use(3)
    expected = found(chunk(4000)), found(chunk(19, **NOISED))
    barrier = threading.Barrier(2)

    def trained(*given, **more) -> bytes:
        barrier.wait()
        return found(chunk(*given, **more))

    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            both = pool.submit(trained, 4000), pool.submit(trained, 19, **NOISED)
            assert tuple(each.result() for each in both) == expected
    outer = chunk(4000)
    first = next(outer)
    assert found(chunk(19, **NOISED)) == expected[1]
    assert found([first, *outer]) == expected[0]


def test_a_fork_has_threads_of_its_own():
    """Between two chunks, and in the midst of one."""
    native.use(3)
    expected = found(chunk(4000))
    outer = chunk(4000)
    next(outer)
    for _ in range(2):
        child = os.fork()
        if not child:
            os._exit(found(chunk(4000)) != expected)
        assert os.waitpid(child, 0)[1] == 0
        outer.close()


@pytest.mark.slow
def test_a_run_in_a_fork_of_a_process_whose_torch_has_threads_ends(tmp_path):
    run(experiment(rounds=1), tmp_path / "here")  # what is imported, prepared and compiled
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.log_softmax(torch.zeros(1 << 16, 10), 1)
    try:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60)
            torch.log_softmax(torch.zeros(1 << 16, 10), 1)
            run(experiment(rounds=1), tmp_path / "there")
            os._exit(0)
    finally:
        torch.set_num_threads(before)
    assert os.waitpid(child, 0)[1] == 0


def test_a_run_has_the_same_bits_on_any_number_of_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    hashes = set()
    for count in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        result = run(experiment(client={"actors": 0, "backend": "compiled"}), tmp_path / count)
        assert native.threads() == int(count)
        hashes.add(result.summary["model_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize(("cpus", "count"), [(3, 3), (2.5, 2), (0.5, 1)])
def test_an_actor_has_the_threads_of_its_cores(cpus, count):
    plan = resolve(experiment(client={"num_cpus": cpus}))
    actor = ClientActor()
    actor.make(plan.experiment, str(plan.shards))
    assert native.threads() == count


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, 4), ("2", 2), ("9", 4), ("0", 1), ("4,2", 4), ("", 4)]
)
def test_a_process_has_a_thread_for_each_core_or_as_many_as_it_is_told(
    asked, expected, monkeypatch
):
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert hardware.threads() == expected


def test_whatever_command_makes_a_plan_takes_products_on_one_thread():
    """Components that are kept for later runs would depend on the number of cores."""
    counts = []

    def prepared(*arguments, **options):
        blas = [library for library in threadpool_info() if library["user_api"] == "blas"]
        counts.extend(library["num_threads"] for library in blas)
        return prepare(*arguments, **options)

    with threadpool_limits(3, user_api="blas"):
        resolve(experiment(), prepare=prepared)
    assert set(counts) == {1}


ADDED = {
    "clipped, of the clients' noise": {},
    "clipped by an adaptive bound": {"bounding": {"kind": "quantile_clip", "bound": 0.1}},
    "normalized, of unequal clients": {
        "bounding": {"kind": "normalize", "bound": 0.3},
        "data": {"sizes": {"kind": "lognormal", "sigma": 1.0}},
        "weights": {"kind": "data"},
    },
    "smoothly normalized": {"bounding": {"kind": "smooth_normalize", "bound": 0.3, "a": 0.07}},
    "unbounded": {"bounding": {"kind": "none"}, "noise": {"kind": "none"}},
    "noise at steps": {
        "bounding": {"kind": "per_sample_clip", "bound": 1.0},
        "model": {"kind": "mlp", "hidden": [9]},
    },
}


class Trained:
    """Shares of an experiment's cohort, as bytes. One of its clients has rows that overflow."""

    def __init__(self, out, **sections):
        drop = {} if "per_sample_clip" in str(sections) else {"on_error": "drop"}
        self.coordinator = start_coordinator(out, client=drop, **sections)
        self.hurt = 7 if drop else -1
        reader = self.coordinator.pool.client.rows
        rows = reader.chunk

        def chunk(members, *given, **more):
            x, y, n = rows(members, *given, **more)
            scale = np.where(np.asarray(members) == self.hurt, 1e38, 1.0).astype(np.float32)
            return x * scale.reshape(-1, *[1] * (x.ndim - 1)), y, n

        reader.chunk = chunk

    def share(self) -> tuple:
        total, (found,) = self.coordinator.collect(1, Cohort.of(np.arange(23)))
        columns = {name: values.tobytes() for name, values in found.columns.items()}
        return total.tobytes(), columns, found.dropped_updates


@pytest.mark.parametrize("name", ADDED)
def test_updates_that_compiled_code_adds_up_have_the_bits_of_those_that_python_does(
    name, tmp_path, monkeypatch
):
    trained = Trained(tmp_path, **ADDED[name])
    native.use(1)
    with monkeypatch.context() as alone:
        # the reference makes each client's vector in float64
        alone.setattr(actor, "choose", lambda state, training: Contribution)
        expected = trained.share()
        alone.setattr(actor, "choose", lambda state, training: ScaledContribution)
        assert trained.share() == expected
    assert [who for who, _ in expected[2]] == [trained.hurt] * (trained.hurt >= 0)

    def never(*_):
        raise AssertionError("Python adds up")

    monkeypatch.setattr(ScaledContribution, "add", never)
    for count in (1, 2, 5):
        native.use(count)
        assert trained.share() == expected


@pytest.mark.parametrize(("most", "fits"), [(1e-9, False), (0.9, True)])
def test_updates_whose_norms_do_not_say_that_they_fit_are_looked_at(
    most, fits, tmp_path, monkeypatch
):
    """As it is a grid of contributions of norm 1."""
    of = Grid.of
    monkeypatch.setattr(Grid, "of", lambda *given: replace(of(*given), most=most))
    trained = Trained(tmp_path, noise={"kind": "none"})
    results = []
    for kind in (ScaledContribution, KernelContribution):
        monkeypatch.setattr(actor, "choose", lambda state, training, kind=kind: kind)
        with nullcontext() if fits else pytest.raises(RunError, match="diverged"):
            results.append(trained.share())
    assert len(results) == 2 * fits and results[:1] == results[1:]


@pytest.mark.slow
def test_updates_add_up_to_the_same_bits_however_many_threads_there_are(tmp_path):
    """Of clients whose training takes no time beside their sum."""
    trained = Trained(tmp_path, local={"steps": 1, "batch": 1}, noise={"kind": "none"})
    native.use(1)
    expected = trained.share()
    native.use(8)
    for _ in range(200):
        assert trained.share() == expected


@pytest.mark.parametrize(("backend", "sums"), [("compiled", 5), ("vmap", 1)])
def test_threads_have_sums_of_their_own_where_compiled_code_adds_up_alone(backend, sums):
    made = resolve(experiment(client={"backend": backend}))
    actor = ClientActor(made.experiment, str(made.shards))
    native.use(5)
    work = Work(0, 1, 1, None, 0.0, Grid.of(1, None))
    began = actor.begin(Broadcast(np.zeros(9, np.float32)), work)
    assert began.totals.shape == (sums, native.VECTOR)


CLOSED = {kind for kind in FAMILY if FAMILY[kind].closed is not Bounding.closed}


@pytest.mark.parametrize("kind", sorted(CLOSED))
def test_the_closed_form_of_factors_is_theirs_to_the_bit(kind):
    drawn = np.random.default_rng(0).lognormal(0, 5, 999)
    for bound in (1e-3, 0.3, 1.0, 7.0, 1e15):
        member = FAMILY[kind](**({} if kind == "none" else {"bound": bound}))
        around = [0.0, bound, np.nextafter(bound, 0), 2 * bound]
        norms = np.concatenate([drawn, around, [5e-324, 1e300]])
        most, above, beside = member.closed(bound)
        with np.errstate(all="ignore"):
            beyond = np.where(beside + norms > 0, above * (1 / (beside + norms)), 0.0)
        found = np.where(norms <= most, 1.0, beyond)
        expected = member.factors(torch.from_numpy(norms), bound).numpy()
        np.testing.assert_array_equal(found, expected)
