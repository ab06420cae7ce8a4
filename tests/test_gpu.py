"""Clients on a GPU: a fake one (`fake_gpu`), and a real one where there is one."""

import json
import os
import pickle
import sys
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes
import pyarrow.parquet as pq
import pytest
import torch
from conftest import experiment, form, refusal
from fake_gpu import Overwritten, fake_gpu
from test_same_bits import METHODS, SAMPLE
from torch import nn
from torch.nn import functional as F

from raydpfl import models, run
from raydpfl.check.runs import run_plan
from raydpfl.core import device
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Shards
from raydpfl.data.features.resnet18 import ResNet18Features
from raydpfl.errors import ClientError, DeviceError, DeviceLost, RunError
from raydpfl.methods.bounding import FAMILY
from raydpfl.methods.local import Sgd
from raydpfl.runtime import launcher
from raydpfl.runtime.worker import Started, start_worker
from raydpfl.sections import Client
from raydpfl.simulation.client import actor, contribution
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.client.data_cache import GpuRows
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.provenance import check_node, differences, platform_facts
from raydpfl.simulation.resolution import resolve
from raydpfl.training import trainer as engine
from raydpfl.training.backend_choice import choose_backend
from raydpfl.training.backends import base, convolutional, vmap
from raydpfl.training.trainer import Trainer

SEEN = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not SEEN, reason="needs a GPU that torch can use")
CLUSTER = Client(actors=2, num_gpus=1.0)
GPU = {"actors": 0, "num_gpus": 1.0, "chunk": 8}


@pytest.fixture
def fake(monkeypatch):
    """A fake GPU within `with fake()`, which gives its counts."""
    if SEEN:
        pytest.skip("pretends a GPU where there is none")

    @contextmanager
    def made():
        with device.preserve_settings(), fake_gpu(monkeypatch) as counts:
            yield counts

    return made


@pytest.fixture
def gpu(fake):
    """The counts of a fake GPU that is there throughout the test."""
    with fake() as counts:
        yield counts


def on_gpu(**changes) -> Plan:
    """The plan of the small experiment with these changes and its clients on a GPU."""
    client = {**changes.get("client", {}), "num_gpus": 1.0}
    return resolve(experiment(**{**changes, "client": client}))


def numbers_of(plan: Plan, out: Path, actors: int | None = None) -> np.ndarray:
    """The sum of every round of a run, and its last model."""
    done = run_plan(plan, out, actors)
    return np.concatenate([*done.totals, done.parameters()])


def on_cpu(plan: Plan, out: Path) -> np.ndarray:
    """The same plan with its noise, by the products, steps and norms that a GPU takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "choose_device", lambda *_: device.CPU)
        patch.setattr(convolutional.Convolution, "compiled", False)
        patch.setattr(actor, "choose", lambda state, training: Contribution)
        patch.setattr(contribution, "vector_norms", lambda vectors: device.norms(vectors).numpy())
        return numbers_of(plan, out)


def trained(out: Path) -> int:
    """How many clients the rounds of a run have trained."""
    return sum(pq.read_table(out / "rounds.parquet")["cohort"].to_pylist())


# The whole path, for every method.

# For each client, of what waits for the device and of what is copied to it or from it. What trains
# client by client waits for each.
AT_ONCE = {"waits": 1.2, "copies": 4.5}
ONE_BY_ONE = {"waits": 5.5, "copies": 8.0}
ASKED = {"waits": 2.0, "copies": 8.0}  # for the losses of clients that are not chosen
CAPS = {
    "per-sample clipping, cnn": ONE_BY_ONE,
    "per-sample clipping, cnn layerwise": ONE_BY_ONE,
    # the loop, with a correction and a part of its own for each client, whose vector is measured
    # again as the module is user-defined
    "FedBN, scaffold": {"waits": 6.5, "copies": 14.0},
    "adapters, half of them of their own": {"waits": 1.2, "copies": 5.0},
    "Ditto": {"waits": 1.2, "copies": 6.5},  # trains each client twice
    "cnn by hand": ONE_BY_ONE,
    "large products, loop": ONE_BY_ONE,
    "large products, per-sample clipping": ONE_BY_ONE,
    "cnn, loop": ONE_BY_ONE,
    "narrow cnn": ONE_BY_ONE,
    "power of choice": ASKED,
    "power of choice among the chosen": ASKED,
    # noise for every step, of which there are many
    "tCDP, and clients that it does not fit": {"waits": 2.0, "copies": 14.0},
    "validation": {"waits": 1.5, "copies": 5.5},
    "no client of a chunk has rows": {"waits": 1.5, "copies": 4.5},  # chunks of two
    # chunks of four that join no others
    "unequal steps, batches of a row, fused": {"waits": 1.5, "copies": 4.5},
    "power of choice, noisy losses": ASKED,
    "columns of clients": {"waits": 2.0, "copies": 4.5},  # trains each client three times
    "losses of unequal clients": {"waits": 2.0, "copies": 5.0},  # chunks of two
    "an own bound with a state": ONE_BY_ONE,  # one by one for code of one's own
}
QUICK = ("clip", "vmap")
EVERY = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, method in METHODS.items()
    if method.get("client", {}).get("backend") != "compiled"  # is for the CPU
    and "precision" not in method.get("client", {})  # of a device; a fake one has none
    and "dropout" not in name.split(",")[0].split(" by ")  # whose masks a device draws itself
]


def started(plan: Plan, out: Path) -> Coordinator:
    """A run before its first round."""
    coordinator = Coordinator(plan, str(out))
    coordinator.start()
    return coordinator


@pytest.fixture
def check_path(fake, tmp_path, monkeypatch):
    """Trains by a method on the fake GPU and the CPU, and compares."""
    # groups of vectors that a CPU pads in less time than it trains them in
    monkeypatch.setattr(device, "GROUP", 1 << 18)

    def check(method: str) -> None:
        plan = on_gpu(**METHODS[method])
        expected = on_cpu(plan, tmp_path / "cpu")
        with fake() as counts:
            found = numbers_of(plan, tmp_path / "gpu")
        assert np.array_equal(found, expected)
        clients = trained(tmp_path / "gpu")
        cap = CAPS.get(method, AT_ONCE)
        form = Shards.open(plan.shards).form(plan.experiment.data.task)
        module = models.build(plan.experiment.model, form, 0)
        assert counts["set up"] <= 4 * len(list(module.parameters())), counts
        assert counts["waits"] <= cap["waits"] * clients, counts
        assert counts["to device"] + counts["to host"] <= cap["copies"] * clients, counts
        assert counts["operations"] > clients

    return check


@pytest.mark.parametrize("method", EVERY)
def test_the_path_to_a_gpu_gives_the_bits_of_the_cpu_and_seldom_waits(method, check_path):
    """Training, bounding, noise and evaluation; with no operation on tensors of both sides."""
    check_path(method)


@pytest.mark.slow
def test_a_chunk_waits_for_the_gpu_as_often_as_it_would_for_one_client(fake, tmp_path):
    """For the losses and the norms of all its clients, for faults, for the sum and its range; what
    the model and an evaluation take is not counted by clients either.
    """
    plan = on_gpu(client={"chunk": 20}, evaluate={"every": 9})
    with fake() as counts:
        numbers_of(plan, tmp_path)
    rounds = plan.experiment.rounds
    assert trained(tmp_path) == 20 * rounds
    assert counts["waits"] <= 5 * rounds + 4, counts
    # once for the evaluation, and once for what is trained on trial before the first round
    assert counts["to host"] <= 3 * rounds + 2, counts
    assert counts["to device"] <= 10 * rounds + 8, counts


@pytest.mark.slow
def test_a_wait_for_each_client_is_found(check_path, monkeypatch):
    made = Contribution.vectors

    def waiting(self, state, block):
        vectors = made(self, state, block)
        assert all(float(vector.sum()) < 1e9 for vector in vectors)
        assert all(float(vector.sum()) < 1e9 for vector in vectors)
        return vectors

    monkeypatch.setattr(Contribution, "vectors", waiting)
    with pytest.raises(AssertionError, match=r"waits"):
        check_path("clip")


@pytest.mark.slow
def test_noise_that_is_left_on_the_host_is_found(check_path, monkeypatch):
    draw = base.StepNoise.__call__
    left = lambda noise, *of: draw(replace(noise, device=device.CPU), *of)  # noqa: E731
    monkeypatch.setattr(base.StepNoise, "__call__", left)
    with pytest.raises(ClientError, match=r"fake_gpu.Mixed: Expected all tensors"):
        check_path("DPNFL")


# The models that there are.

WORDS = {"kind": "transformer", "width": 8, "heads": 2, "layers": 1}
MODELS = {
    "softmax": {"kind": "softmax"},
    "mlp": {"kind": "mlp", "hidden": [8]},
    "cnn": {"kind": "cnn", "width": 0.25},
    "dp_cnn": {"kind": "dp_cnn", "width": 0.1},
    "alexnet": {"kind": "alexnet", "width": 0.05},
    "mobilenet_v2": {"kind": "mobilenet_v2", "width": 0.1},
    "resnet18": {"kind": "resnet18", "width": 0.05},
    "char_lstm": {"kind": "char_lstm", "hidden": 8, "layers": 1},
    "transformer": WORDS,
    "adapters": {**WORDS, "lora": {"rank": 2, "targets": ["into", "down"]}},
}
EVERY_MODEL = [
    pytest.param(name, clip, marks=() if (name, clip) == ("cnn", None) else pytest.mark.slow)
    for name in MODELS
    for clip in (None, 0.5)
    if (name, clip) != ("mobilenet_v2", 0.5)  # whose trial takes long
]


def chunk_of(name: str, clip: float | None, there: str) -> np.ndarray:
    """What two clients of a model come to there, by the backend that a GPU takes."""
    tokens = name in ("char_lstm", "transformer", "adapters")
    of = form((6,), 5, tokens=11) if tokens else form((1, 16, 16))
    module = models.build(models.parse(MODELS[name]), of, 0)
    rule = Sgd(steps=2, batch=4, lr=0.1)
    backend = choose_backend(module, rule, of, clip=clip, gpu=True)
    trainer = Trainer(module, rule, backend=backend, seed=0, device=there, clip=clip, task=of.task)
    drawn = stream(0, Purpose.DATA)
    x = of.inputs(12, drawn).view(2, 6, *of.shape)
    y = of.task.random_targets(drawn, 12, of.outputs).view(2, 6)
    sizes = {"t": 0, "clients": [0, 1], "draws": [0, 0]}
    blocks = trainer.chunk(models.trained(module), x, y, [6, 5], **sizes)
    return torch.cat([block.updates.cpu() for block in blocks]).numpy()


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """How far they are from each other, of the size that they are of."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("name", "clip"), EVERY_MODEL)
def test_every_model_trains_on_a_gpu_by_what_is_deterministic_there(name, clip, fake):
    expected = chunk_of(name, clip, "cpu")
    with fake():
        device.settle(torch.device("cuda"), 1.0)
        found = chunk_of(name, clip, "cuda")
    assert apart(found, expected) <= 1e-6


# The fake device: as strict as a real one.


def test_a_copy_to_a_gpu_waits_for_it_but_from_pinned_memory(gpu, monkeypatch):
    x = torch.arange(6.0)
    there = torch.device("cuda")
    for plain in (lambda: x.to("cuda"), lambda: torch.tensor([1.0], device="cuda"), x.cuda):
        before = gpu["waits"]
        plain()
        assert gpu["waits"] == before + 1
    found = device.move_tensor(x, there)
    assert gpu["waits"] == before + 1 and device.move_tensor(found, there) is found
    monkeypatch.setattr(device, "PINNED", x.nbytes - 1)  # a large one takes no pinned memory
    assert torch.equal(device.move_tensor(x, there).cpu(), x) and gpu["waits"] == before + 3
    assert torch.equal(found.cpu(), x)


def test_pinned_memory_that_is_written_to_before_it_is_copied_is_found(gpu):
    pinned = torch.arange(6.0).pin_memory()
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    pinned.add_(1)  # it has landed
    pinned.to("cuda", non_blocking=True)
    pinned.add_(1)
    with pytest.raises(Overwritten):
        torch.cuda.synchronize()


class Pooled(nn.Sequential):
    """Has a layer whose gradient torch adds up by atomics on a GPU."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 2, 5, stride=4), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 10)
        )


class Homely(nn.Linear):
    """Makes a tensor on the CPU in its forward pass."""

    def forward(self, x):
        return super().forward(x.flatten(1)) + torch.zeros(10)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("Pooled", {}, r"trains on a GPU.*_adaptive_avg_pool2d_backward.* deterministic"),
        ("Homely", {"in_features": 784, "out_features": 10}, r"trains on a GPU.*same device"),
    ],
)
def test_a_module_that_a_gpu_does_not_train_is_refused_before_the_first_round(
    name, args, said, gpu
):
    plan = resolve(experiment(model={"kind": f"{__name__}:{name}", "args": args}, client=GPU))
    with refusal(f"a module that {said}") as error:
        ClientActor(plan.experiment, str(plan.shards))
    assert error.value.field == "model.kind"


class Attentive(nn.Module):
    """Attention by torch's own function, over the rows of an image."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(28, 12)
        self.out = nn.Linear(112, 10)

    def forward(self, x):
        q, k, v = self.into(x[:, 0]).chunk(3, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v).flatten(1))


@pytest.mark.parametrize(
    "clip", [{"kind": "none"}, pytest.param(SAMPLE, marks=pytest.mark.slow, id="samples")]
)
def test_a_chunk_goes_back_through_attention_at_once(clip, fake, tmp_path, monkeypatch):
    sections = {"model": {"kind": f"{__name__}:Attentive"}, "rounds": 2, "bounding": clip}
    plan = on_gpu(**sections, noise={"kind": "none"}, client={"backend": "vmap"})
    with fake():
        found = numbers_of(plan, tmp_path / "gpu")
    assert torch.backends.cuda.mem_efficient_sdp_enabled()
    with monkeypatch.context() as patch:
        patch.setattr(vmap, "sdpa_kernel", lambda _: nullcontext())
        expected = on_cpu(plan, tmp_path / "cpu")
        assert np.linalg.norm(found - expected) <= 1e-5 * np.linalg.norm(expected)
        with fake(), refusal("OneByOne"):
            ClientActor(plan.experiment, str(plan.shards))


# Out of memory.


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("GET was unable to find an engine to execute this computation", "cuDNN has no memory, or"),
        ("CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", "the GPU has no memory left"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", "the GPU has no memory left"),
        ("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'", "no memory left"),
    ],
)
def test_a_lack_of_memory_is_known_by_what_the_libraries_say(said, told):
    with pytest.raises(DeviceError, match=told):
        device.raise_device_error(torch.device("cuda"), RuntimeError(said))


def test_on_the_cpu_a_lack_of_memory_is_what_it_was_and_a_clients_error_is_the_clients(gpu):
    device.raise_device_error(device.CPU, torch.OutOfMemoryError("CUDA out of memory"))
    device.raise_device_error(torch.device("cuda"), ValueError("of a module"))


def small_memory(monkeypatch, most: int) -> list[int]:
    """A device whose memory holds the training of so many clients at once; the widths that were
    tried. What an attempt had in memory must be gone when the next one begins.
    """
    chunk = engine.Trainer.chunk
    widths = []
    held = []

    def limited(self, parameters, x, y, sizes, **named):
        widths.append(len(sizes))
        assert all(each() is None for each in held)
        memory = torch.zeros(len(sizes), 100)
        held.append(weakref.ref(memory))
        if len(sizes) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        yield from chunk(self, parameters, x, y, sizes, **named)

    monkeypatch.setattr(engine.Trainer, "chunk", limited)
    return widths


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fused", "vmap"])
def test_where_memory_is_short_half_a_chunk_trains_at_once_and_no_client_is_blamed(
    backend, fake, tmp_path, monkeypatch
):
    plan = on_gpu(client={"backend": backend, "on_error": "drop"})
    expected = on_cpu(plan, tmp_path / "cpu")
    with fake():
        widths = small_memory(monkeypatch, 3)
        found = numbers_of(plan, tmp_path / "gpu")
    assert np.array_equal(found, expected)
    assert 8 in widths[1:3] and widths.count(8) == 1 and max(widths[4:]) <= 4
    assert not (tmp_path / "gpu" / "dropped.jsonl").exists()


def test_memory_that_holds_no_two_clients_ends_the_run_in_one_line_and_blames_none(
    gpu, tmp_path, monkeypatch
):
    coordinator = started(on_gpu(client={"on_error": "drop", "backend": "fused"}), tmp_path)
    small_memory(monkeypatch, 1)
    with pytest.raises(DeviceError, match=r"no memory left; raise client.num_gpus") as error:
        coordinator.round()
    assert "\n" not in str(error.value) and "client 0" not in str(error.value)


@pytest.mark.slow
def test_where_memory_is_short_for_what_is_sent_half_of_it_is_made_at_once(
    fake, tmp_path, monkeypatch
):
    plan = on_gpu(client={"on_error": "drop"}, local={"kind": "scaffold", "steps": 2})
    expected = on_cpu(plan, tmp_path / "cpu")
    sent = FAMILY["clip"].send
    tried = []

    def limited(self, updates, view):
        tried.append(len(updates))
        if len(updates) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return sent(self, updates, view)

    with fake():
        monkeypatch.setattr(FAMILY["clip"], "send", limited)
        found = numbers_of(plan, tmp_path / "gpu")
    assert np.array_equal(found, expected) and tried[:3] == [8, 4, 2]
    assert not (tmp_path / "gpu" / "dropped.jsonl").exists()


# Where rows and noise are.


@pytest.mark.parametrize("held", [True, False])
def test_rows_that_a_gpu_cannot_keep_go_there_chunk_by_chunk(held, fake, tmp_path, monkeypatch):
    plan = on_gpu(local={"steps": 2, "batch": 4}, client={"chunk": 20})
    expected = on_cpu(plan, tmp_path / "cpu")
    with fake():
        if not held:
            monkeypatch.setattr(device, "memory", lambda *_: 1000)
        found = numbers_of(plan, tmp_path / "gpu")
        shards = Shards.open(plan.shards)
        rows = GpuRows(shards, shards.form(plan.experiment.data.task), device.choose_device(1), 1)
        x, y, sizes = rows.chunk([3, -1, 5], 180, [np.array([2, 7]), None, None])
        read = rows.shards.chunk([3, -1, 5], 180, [np.array([2, 7]), None, None])
        assert ("_row_tensors" in vars(rows)) == held
        given = (x.cpu().numpy(), y.cpu().numpy(), sizes)
    assert np.array_equal(found, expected)
    assert all(np.array_equal(a, b) for a, b in zip(given, read, strict=True))


def test_noise_is_drawn_by_a_thread_while_a_chunk_trains(fake, tmp_path, monkeypatch):
    threads = set()
    draw = Contribution.noise

    def watched(self, *given):
        threads.add(threading.current_thread() is threading.main_thread())
        return draw(self, *given)

    monkeypatch.setattr(Contribution, "noise", watched)
    plan = on_gpu()
    with fake():
        numbers_of(plan, tmp_path)
    assert threads == {False}


def test_norms_of_rows_do_not_depend_on_how_many_there_are(fake, monkeypatch):
    """They are taken of as many at once wherever, the last of them filled up."""
    shapes = set()
    norm = torch.linalg.vector_norm
    vectors = torch.rand(7, 5, dtype=torch.float64)
    expected = norm(vectors, dim=1)

    def seen(rows, dim):
        shapes.add(tuple(rows.shape))
        return norm(rows, dim=dim)

    monkeypatch.setattr(device, "GROUP", 10)
    with fake():
        there = vectors.to("cuda")
        monkeypatch.setattr(torch.linalg, "vector_norm", seen)
        for k in (1, 2, 7):
            assert np.array_equal(device.norms(there[:k]).numpy(), expected.numpy()[:k])
    assert shapes == {(2, 5)}


def test_a_gpu_trains_a_whole_cohort_at_once_and_convolutions_by_vmap(gpu):
    small = {"model": {"kind": "cnn", "width": 0.25}, "local": {"steps": 1, "batch": 4}}
    of_gpu = resolve(experiment(**small, client={"num_gpus": 1, "chunk": "auto"})).experiment
    assert (of_gpu.client.backend, of_gpu.client.chunk) == ("vmap", 20)
    of_cpu = resolve(experiment(**small, client={"chunk": "auto"})).experiment
    assert (of_cpu.client.backend, of_cpu.client.chunk) == ("convolutional", 1)
    share = {"num_gpus": 0.01, "chunk": "auto"}  # 86 MB
    assert 2 <= resolve(experiment(**small, client=share)).experiment.client.chunk < 20


# Faults.


def test_a_fault_of_the_gpu_is_no_clients_and_ends_the_use_of_the_process(
    gpu, tmp_path, monkeypatch
):
    """It is seen where the host waits, after the clients' part has been asked for."""
    coordinator = started(on_gpu(client={"on_error": "drop"}), tmp_path)

    def failed() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nfor debugging")

    monkeypatch.setattr(torch.cuda, "synchronize", failed)
    with pytest.raises(DeviceLost, match=r"the GPU failed: CUDA error: an illegal") as error:
        coordinator.round()
    assert "\n" not in str(error.value)


class Faulty(FAMILY["clip"]):
    """Loses its GPU once, as far as anybody can see."""

    folder: str = ""

    def factors(self, norms, bound):
        try:
            Path(self.folder, "lost").touch(exist_ok=False)  # both actors may come here at once
        except FileExistsError:
            return super().factors(norms, bound)
        raise DeviceLost("the GPU failed: CUDA error: device-side assert triggered")


@pytest.mark.slow
def test_an_actor_that_has_lost_its_gpu_is_replaced_and_the_bits_stay(tmp_path, shared_ray):
    bounding = {"kind": f"{__name__}:Faulty", "bound": 1.0, "folder": str(tmp_path)}
    faulty = run(experiment(bounding=bounding, client={"actors": 2}), tmp_path / "faulty").summary
    assert faulty["replaced_actors"] == 1
    again = run(experiment(bounding=bounding, client={"actors": 0}), tmp_path / "again").summary
    assert faulty["model_sha256"] == again["model_sha256"]


def test_a_label_that_no_model_knows_is_found_on_the_host():
    there = torch.device("cuda")
    device.check_numbers(there, np.array([[0, 9]]), 10, "Target")
    device.check_numbers(there, np.array([[0.5, -3.0]]), 0, "Target")
    device.check_numbers(there, np.empty(0, np.int64), 10, "Target")
    for wrong in (10, -1):
        with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
            device.check_numbers(there, np.array([[0, wrong]]), 10, "Target")


def test_a_client_with_such_a_label_is_named_and_dropped_before_the_gpu_sees_it(
    gpu, tmp_path, monkeypatch
):
    coordinator = started(on_gpu(client={"on_error": "drop"}), tmp_path)
    shards = coordinator.pool.client.shards
    chunk = shards.chunk

    def spoilt(self, members, *given, **named):
        x, y, sizes = chunk(members, *given, **named)
        y = y.copy()
        y[members == 7] = 12
        return x, y, sizes

    monkeypatch.setattr(type(shards), "chunk", spoilt)
    row = coordinator.round()
    while 7 not in coordinator.state.participations:
        row = coordinator.round()
    assert row["dropped"] == 1
    assert '"client": 7' in (tmp_path / "dropped.jsonl").read_text()


def test_a_row_that_is_trained_on_apart_from_the_run_is_looked_at_too(gpu, monkeypatch):
    """What a model is fine-tuned on for an evaluation."""
    tune = {"kind": "sgd", "steps": 1, "batch": 4, "lr": 0.1}
    scored = {"validation": 0.2, "per_client": "accuracy", "fine_tune": tune}
    plan = on_gpu(evaluate=scored)
    client = ClientActor(plan.experiment, str(plan.shards))
    chunk = Shards.chunk
    spoil = lambda x, y, sizes: (x, y + 10, sizes)  # noqa: E731
    monkeypatch.setattr(Shards, "chunk", lambda *given, **named: spoil(*chunk(*given, **named)))
    every = range(len(client.evaluator.batches))
    with pytest.raises(IndexError, match=r"Target 1\d is out of bounds: they are"):
        client.evaluator.evaluate(np.zeros(plan.d, np.float32), 1, every, {})


# Which device.


@pytest.mark.skipif(SEEN, reason="needs a machine without a GPU")
def test_without_a_gpu_an_actor_that_was_to_have_one_refuses(tmp_path):
    with refusal(r"client.num_gpus = 0.5: expected 0; node 7 has no GPU"):
        device.choose_device(0.5, "node 7")
    plan = on_gpu()
    with refusal(r"client.num_gpus"):
        ClientActor(plan.experiment, str(plan.shards))
    with refusal("client.num_gpus = 1.0: expected 0; this machine has no GPU"):
        run(experiment(client={"actors": 0, "num_gpus": 1}), tmp_path)
    given = (pickle.dumps(plan.experiment), str(plan.shards), (), None)
    with refusal(r"client.num_gpus = 1.0: expected 0; node .* has no GPU"):
        start_worker(ClientActor(), *given)


def test_settings_that_bits_need_are_made_and_undone(gpu, monkeypatch):
    shares = []
    monkeypatch.delenv(device.WORKSPACE, raising=False)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    share = lambda: shares[-1] if shares else 0.9  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", share)
    cudnn = torch.backends.cudnn
    cudnn.benchmark = True
    with device.preserve_settings():
        device.settle(device.choose_device(0.25), 0.25)
        assert os.environ[device.WORKSPACE] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled() and cudnn.deterministic
        assert not cudnn.benchmark and not any(each.allow_tf32 for each in device.LEGACY)
        device.settle(device.choose_device(0.25), 0.25, tf32=True)
        assert all(each.allow_tf32 for each in device.LEGACY)
    assert shares == [0.25, 0.25, 0.25, 0.9] and cudnn.benchmark
    assert not torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark = False
    monkeypatch.setenv(device.WORKSPACE, ":0:0")
    with refusal("CUBLAS_WORKSPACE_CONFIG = ':0:0': expected unset, :4096:8"):
        device.settle(torch.device("cuda"), 1.0)


ASKED_FOR = (
    "torch.set_float32_matmul_precision('high')",
    "torch.backends.cudnn.conv.fp32_precision = 'tf32'",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.fp32_precision = 'tf32'",
    "torch.backends.cudnn.allow_tf32 = False",
    "",
)
# each in a process of its own, with what `settle` has it import
TF32 = """
import os
import traceback

import torch
import torch._inductor.config
from raydpfl.core import device

def check(asked):
    torch.cuda.set_per_process_memory_fraction = lambda *_: None
    torch.cuda.get_per_process_memory_fraction = lambda *_: 1.0
    exec(asked)
    named = [torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul]
    before = [each.fp32_precision for each in named]
    with device.preserve_settings():
        pass
    with device.preserve_settings():
        device.settle(torch.device("cuda"), 1)
        assert not any(each.fp32_precision == "tf32" for each in named), named
    assert before == [each.fp32_precision for each in named]

failed = []
for asked in {asked!r}:
    child = os.fork()
    if not child:
        try:
            check(asked)
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(asked)
print(failed)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="needs the names of torch 2.9"
)
def test_however_a_process_has_asked_for_tf32_none_is_used_and_that_is_undone():
    code = TF32.format(asked=ASKED_FOR)
    done = processes.run([sys.executable, "-c", code])
    assert done.stdout == "[]\n", done.stderr


def test_a_run_says_which_gpu_its_bits_depend_on(gpu):
    plan = resolve(experiment(client=GPU))
    stored = plan.origin()
    assert {"device", "cuda", "cudnn", "cublas"} <= stored.keys()
    assert stored["device"] == "Fake, compute 9.0, 1 multiprocessors"
    assert not {"device", "cuda"} & platform_facts(experiment()).keys()
    said = differences(stored, {**stored, "device": "NVIDIA H200", "cudnn": "1"})
    assert "device was Fake, compute 9.0, 1 multiprocessors, now NVIDIA H200" in said
    check_node("here", plan.platform, device.facts(1))
    with pytest.raises(RunError, match=r"node here computes otherwise .*device NVIDIA A100"):
        check_node("here", plan.platform, {**device.facts(1), "device": "NVIDIA A100"})


def test_where_the_driver_sees_no_gpu_a_node_says_what_the_bits_depend_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plan = on_gpu()
    client = CLUSTER.model_copy(update={"chunk": 4})
    asked = plan.experiment.model_copy(update={"client": client})
    plan = replace(plan, experiment=asked)
    monkeypatch.setattr(launcher, "Session", lambda address: None)
    starting = launcher.Launcher(asked.client, "auto")
    facts = {"device": "NVIDIA H200", "cuda": "13.2", "cudnn": "1", "cublas": ":4096:8"}
    monkeypatch.setattr(starting, "_nodes", lambda: [{"CPU": 8, "GPU": 8}])
    monkeypatch.setattr(starting, "_gpu_facts", lambda gpus: facts)
    assert starting.decide(plan).origin() == {**plan.origin(), **facts}
    assert starting.decide(plan).noise_seed != plan.noise_seed
    monkeypatch.setattr(starting, "_gpu_facts", lambda gpus: {})
    with refusal(r"torch can use no GPU on a node that Ray counts one of"):
        starting.decide(plan)


def test_actors_with_different_gpus_are_refused():
    from raydpfl.runtime.actor_pool import ActorPool  # imports Ray

    actors = object.__new__(ActorPool)
    actors._facts = {0: Started(1, "a", "", {"device": "NVIDIA H200"})}
    actors._check_same_gpu(Started(2, "b", "", {"device": "NVIDIA H200"}))
    with pytest.raises(RunError, match=r"node b has another GPU than node a .*NVIDIA A100"):
        actors._check_same_gpu(Started(2, "b", "", {"device": "NVIDIA A100"}))


def test_the_cache_of_features_knows_the_gpu_that_made_them(monkeypatch):
    features = ResNet18Features()
    assert SEEN or len(features.identity(None)) == 1
    with nullcontext() if SEEN else fake_gpu(monkeypatch):
        assert features.identity(None)[1] == device.facts(1)


# The benchmark.

BENCHMARK = Path(__file__).parent.parent / "experiments" / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_the_benchmark_runs_a_few_rounds_on_the_cpu():
    small = ["--cpu", "--rounds", "2", "--clients", "8", "--data", "fashion_mnist_mini", "--json"]
    done = processes.run([sys.executable, BENCHMARK, *small, "--few", "1"], check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rounds"] == 2 and found["device"] == "the CPU"
    assert found["parameters"] == 320 + 18496 + 64 * 12 * 12 * 128 + 128 + 1290
    assert found["seconds"] > found["seconds_round"] > 0
    for name in ("vmap", "loop", "plain_loop"):
        assert found[f"seconds_{name}"] > 0
    assert found["two_actors_same_bits"] is True
    assert not any("pfl" in name for name in found)


# A real one.


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_gpu_gives_the_same_bits_twice_and_others_in_less_than_float32(precision, tmp_path):
    plan = on_gpu(model={"kind": "cnn"}, client={"precision": precision})
    with device.preserve_settings():
        found = numbers_of(plan, tmp_path / "a")
        assert np.array_equal(numbers_of(plan, tmp_path / "b"), found)
        exact = numbers_of(on_gpu(model={"kind": "cnn"}), tmp_path / "c")
    # with other noise, as what a run depends on says its precision
    assert np.isfinite(found).all() and np.array_equal(found, exact) == (precision == "float32")


@needs_gpu
@pytest.mark.parametrize("method", EVERY)
def test_a_gpu_gives_the_model_of_the_cpu_to_rounding(method, tmp_path):
    plan = on_gpu(**METHODS[method])
    expected = on_cpu(plan, tmp_path / "cpu")
    with device.preserve_settings():
        found = numbers_of(plan, tmp_path / "gpu")
    assert np.linalg.norm(found - expected) <= 1e-3 * np.linalg.norm(expected)


@needs_gpu
@pytest.mark.parametrize("method", ["clip", "DPSCAFFOLD", "per-sample clipping, cnn", "cnn, loop"])
def test_however_chunks_are_dealt_a_gpu_gives_the_same_bits(method, tmp_path):
    plan = on_gpu(**METHODS[method])
    with device.preserve_settings():
        inline = numbers_of(plan, tmp_path / "inline")
        for actors in (1, 3):
            assert np.array_equal(numbers_of(plan, tmp_path / str(actors), actors), inline)


@needs_gpu
@pytest.mark.parametrize("model", ["softmax", "cnn"])
def test_a_gpu_holds_the_bound_of_what_is_clipped(model, tmp_path):
    sent = {"kind": "clip", "bound": 0.01}
    with device.preserve_settings():
        measure = ["bounding", "clients"]
        asked = experiment(model={"kind": model}, bounding=sent, client=GPU, measure=measure)
        run(asked, tmp_path)
    norms = pq.read_table(tmp_path / "clients.parquet")["bounded_norm"].to_numpy()
    assert 0.99 < norms.max() / (0.01 * resolve(asked).weight) <= 1 + 1e-9


@needs_gpu
def test_a_gpu_without_memory_for_a_chunk_trains_its_halves(tmp_path, monkeypatch):
    plan = on_gpu(client={"backend": "fused", "on_error": "drop"})
    with device.preserve_settings():
        expected = numbers_of(plan, tmp_path / "whole")
        widths = small_memory(monkeypatch, 4)
        assert np.array_equal(numbers_of(plan, tmp_path / "halves"), expected)
    assert 4 in widths


@needs_gpu
@pytest.mark.parametrize(("name", "clip"), EVERY_MODEL)
def test_every_model_gives_a_gpu_the_same_bits_twice_and_those_of_the_cpu_to_rounding(name, clip):
    with device.preserve_settings():
        device.settle(torch.device("cuda"), 1.0)
        found = chunk_of(name, clip, "cuda")
        assert np.array_equal(chunk_of(name, clip, "cuda"), found)
    assert apart(found, chunk_of(name, clip, "cpu")) <= 1e-3


@needs_gpu
def test_a_gpu_is_waited_for_as_the_fake_one_counts_it(tmp_path):
    """By what torch itself says of operations that wait, but for those that are asked to."""
    plan = on_gpu()
    with device.preserve_settings(), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            numbers_of(plan, tmp_path)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in seen if "synchronizing" in str(each.message)]
    assert 0 < len(waits) <= AT_ONCE["waits"] * trained(tmp_path), len(waits)


@needs_gpu
def test_a_run_leaves_the_memory_of_a_gpu_to_the_process(tmp_path):
    before = torch.cuda.get_per_process_memory_fraction()
    run(experiment(client={"actors": 0, "num_gpus": 0.25}), tmp_path)
    assert torch.cuda.get_per_process_memory_fraction() == before


ASSERTS = """
import torch
from raydpfl.core import device

try:
    with device.device_errors(torch.device("cuda")):
        torch.zeros(2, device="cuda")[torch.tensor([5], device="cuda")].cpu()
except device.DeviceLost as error:
    print(error)
"""


@needs_gpu
@pytest.mark.slow
def test_a_device_assert_is_a_gpu_lost():
    done = processes.run([sys.executable, "-c", ASSERTS])
    said = done.stdout.splitlines()
    assert len(said) == 1 and said[0].startswith("the GPU failed: "), done.stderr


@needs_gpu
@pytest.mark.slow
def test_actors_that_share_a_gpu_give_the_bits_of_one_process(tmp_path, shared_ray):
    hashes = set()
    for actors in (0, 2):
        shared = experiment(client={"actors": actors, "num_gpus": 0.5})
        hashes.add(run(shared, tmp_path / str(actors)).summary["model_sha256"])
    assert len(hashes) == 1


@needs_gpu
def test_a_gpu_that_is_really_full_says_so():
    with device.preserve_settings(), pytest.raises(DeviceError, match=r"no memory left"):
        device.settle(torch.device("cuda"), 0.05)
        with device.device_errors(torch.device("cuda")):
            torch.empty(1 << 45, device="cuda")
