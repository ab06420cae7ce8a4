"""The compiled parts of the engine: same bits as their plain references, on every kind of code."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import form
from torch import nn

from raydpfl import models, native
from raydpfl.keys import Purpose, clients_normals
from raydpfl.local import Sgd, Trainer, resolve

LENGTHS = [1, 2, 63, 64, 65, 127, 1000, 2049, 7850]
needs = pytest.mark.skipif(native.library() is None, reason="nothing is compiled here")


def test_it_compiles_wherever_there_is_a_compiler():
    assert shutil.which("cc") is None or native.library() is not None


def hostile(d: int, dtype: type) -> np.ndarray:
    """Rows of many sizes, [8, d]."""
    generator = np.random.default_rng(d)
    rows = generator.standard_normal((8, d)) * np.logspace(-30, 18, 8)[:, None]
    rows[1] = 0
    rows[2, d // 2] = np.inf
    rows[3, d // 3] = np.nan
    return rows.astype(dtype)


@needs
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("d", LENGTHS)
def test_norms_have_the_bits_of_the_reference_and_are_norms(d, dtype, monkeypatch):
    rows = torch.from_numpy(hostile(d, dtype))
    compiled = native.norms(rows)
    monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(compiled, native.norms(rows))
    for row, norm in zip(rows.double().numpy(), compiled, strict=True):
        if np.isfinite(row).all():
            assert norm == pytest.approx(math.sqrt(math.fsum(row * row)), rel=1e-14)
        else:
            assert not np.isfinite(norm)


@needs
@pytest.mark.parametrize("noised", [False, True])
@pytest.mark.parametrize("d", LENGTHS)
def test_sums_have_the_bits_of_adding_row_by_row(d, noised, monkeypatch):
    rows = hostile(d, np.float32)[[0, 1, 4, 5, 6, 7]]
    generator = np.random.default_rng(1)
    factors = generator.random(len(rows))
    noise = generator.standard_normal(rows.shape) if noised else None
    start = generator.standard_normal(d)
    expected = start.copy()
    for i, row in enumerate(rows):
        sent = row.astype(np.float64) * factors[i]
        expected += sent if noise is None else sent + noise[i]
    for _ in range(2):
        total = start.copy()
        native.add(total, rows, factors, noise)
        np.testing.assert_array_equal(total, expected)
        monkeypatch.setattr(native, "library", lambda: None)


def drawn(n: int, stds: np.ndarray | None) -> np.ndarray:
    """The normals of some names, among them the largest."""
    who = {"clients": [0, 5, 2**40, 7], "draws": [0, 1, 2**32 - 1, 3]}
    found = [
        clients_normals(2**63 + 5, purpose, n, t=t, step=step, stds=stds, **who).numpy()
        for purpose, t, step in ((Purpose.CLIENT_NOISE, 0, 0), (Purpose.CANARY, 10**6, 2**32 - 1))
    ]
    return np.stack(found)


@needs
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 127, 128, 129, 1000, 70_001])
def test_normals_have_the_bits_of_those_in_numpy(n, scaled, monkeypatch):
    stds = np.array([1.0, 0.3, 1e-20, 7e9]) if scaled else None
    compiled = drawn(n, stds)
    monkeypatch.setattr(native, "library", lambda: None)
    np.testing.assert_array_equal(compiled, drawn(n, stds))


def trained() -> bytes:
    """Updates and losses of some clients, as bytes."""
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(61, 19), nn.ReLU(), nn.Linear(19, 7))
    module = nn.Sequential(*layers)
    local = Sgd(steps=9, batch=5, lr=0.2, momentum=0.5, weight_decay=0.01, proximal=0.1)
    x = torch.randn(4, 11, 61)
    y = torch.randint(0, 7, (4, 11))
    trainer = Trainer(module, local, way="compiled", seed=1)
    blocks = trainer.lane(
        models.flatten(module), x, y, [11, 4, 0, 9], t=0, clients=range(4), draws=[0] * 4
    )
    return b"".join(block.updates.numpy().tobytes() + block.losses.tobytes() for block in blocks)


@needs
@pytest.mark.slow
def test_shorter_vectors_give_the_same_bits(monkeypatch):
    expected = trained()
    sums = native.norms(torch.from_numpy(hostile(1000, np.float32)))
    noise = drawn(1001, None)
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has one vector length")
    monkeypatch.setitem(native.KINDS, "AVX512", native.KINDS["AVX2"])
    native.library.cache_clear()
    try:
        assert trained() == expected
        found = native.norms(torch.from_numpy(hostile(1000, np.float32)))
        np.testing.assert_array_equal(found, sums)
        np.testing.assert_array_equal(drawn(1001, None), noise)
    finally:
        native.library.cache_clear()


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_without_a_compiler_clients_train_another_way(no_compiler):
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    assert native.library() is None
    assert resolve(module, Sgd(), 20, form((36,), 4)) == "sample_space"
    with pytest.raises(Exception, match="C compiler"):
        resolve(module, Sgd(), 20, form((36,), 4), "compiled")


@needs
def test_a_compiler_that_fails_leaves_nothing_behind(no_compiler, monkeypatch):
    monkeypatch.setenv("CC", "false")
    native.library.cache_clear()
    assert native.library() is None
    assert not [*no_compiler.rglob("*.so")]


@needs
@pytest.mark.slow
def test_processes_that_compile_at_once_all_get_the_library(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDPFL_CACHE", str(tmp_path))
    code = "from raydpfl import native; assert native.library() is not None"
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [each.wait(120) for each in running] == [0, 0, 0]
    assert len([*tmp_path.rglob("*.so")]) == 1
    assert [each.name for each in (tmp_path / "native").iterdir()] == [
        each.name for each in tmp_path.rglob("*.so")
    ]
