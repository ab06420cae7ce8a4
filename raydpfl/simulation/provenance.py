"""What a run's bits depend on next to its experiment: versions, user-defined code, how the
processor computes, and the GPU where clients train on one.

Another processor, or a setting that keeps libraries from using it fully (ATEN_CPU_CAPABILITY,
MKL_ENABLE_INSTRUCTIONS, ...), rounds differently: torch, MKL, oneDNN, OpenBLAS and numpy choose
their vector instructions at run time. Two processes that agree on `capability` give the same bits;
clients on GPUs where `raydpfl.core.device.facts` agree too: the model of the GPU, the versions of
CUDA and cuDNN, and the workspace of cuBLAS.

>>> stored = {"torch": "2.14.1", "code mine:Tanh": "5f70bf", "cpu": "AVX512"}
>>> differences(stored, {"torch": "2.14.1", "code mine:Tanh": "90cd1a", "cpu": "AVX2"})
'code mine:Tanh has changed; cpu was AVX512, now AVX2'
"""

import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.core import device, hardware, native, prng
from raydpfl.errors import RunError
from raydpfl.experiment import Experiment
from raydpfl.methods.local import Scaffold, Sgd
from raydpfl.simulation.user_code import sources
from raydpfl.storage.files import check, file_identity, find_file
from raydpfl.training.trainer import Trainer

PACKAGES = ("raydpfl", "torch", "torchvision", "numpy", "ray", "pyarrow", "dp-accounting")
# packages whose version may change a model's bits
COMPUTING_PACKAGES = ("raydpfl", "torch", "torchvision", "numpy")
# the digest of what compiled code draws and trains to, on every processor
COMPILED_DIGEST = "0b045bc97f178797"
# what a node has to agree with the run on, and its GPU where the run knows one
NODE = ("cpu", "products", "arithmetic", "native", "bfloat16", "settings")
GPU = ("device", "cuda", "cudnn", "cublas")
SETTINGS = (
    "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE",
    "NPY_DISABLE_CPU_FEATURES", "OPENBLAS_CORETYPE",
)  # fmt: skip


@functools.cache
def versions() -> dict[str, str]:
    """Python, the machine's architecture and the packages that a run uses, with their versions."""
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), "machine": platform.machine()} | versions


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that the package is in, `-dirty` with changes; None: there is
    none.
    """
    root = Path(__file__).parents[2]
    place = (f"--git-dir={root / '.git'}", f"--work-tree={root}")
    command = ("git", *place, "describe", "--always", "--dirty")
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


@functools.cache
def capability() -> dict[str, str]:
    """How this process computes: `cpu`, torch's vector instructions; `products`, whether MKL takes
    the processor for Intel's; `settings`, environment variables that affect products; `arithmetic`,
    a digest of products, convolutions, sums and elementary functions in float32 and float64, on one
    thread (10 ms); and where compiled code does not draw or train to `COMPILED_DIGEST`, `native`,
    its own.
    """
    settings = [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]
    facts = {
        "cpu": torch.backends.cpu.get_cpu_capability(),
        # the keys of noise are made of these names
        "products": "torch" if hardware.maker() == "GenuineIntel" else "oneDNN",
        "arithmetic": _arithmetic(),
    }
    native_digest = COMPILED_DIGEST if native.library() is None else _digest(_native_results())
    if native_digest != COMPILED_DIGEST:
        facts["native"] = native_digest
    return facts | ({"settings": " ".join(settings)} if settings else {})


def check_node(
    host: str, expected: Mapping[str, str], gpu: Mapping[str, str] | None = None
) -> None:
    """Raises `RunError` if this process, on the node `host` and with a GPU of these facts, does not
    compute as the run does (`expected`: of the run, `platform_facts`).
    """
    node_facts = dict(capability())
    names = [*NODE]
    if "bfloat16" in expected:
        node_facts |= bfloat16_facts()
    if gpu and "device" in expected:
        node_facts |= gpu
        names += GPU
    mismatches = ", ".join(
        f"{name} {node_facts.get(name, 'unset')} instead of {expected.get(name, 'unset')}"
        for name in names
        if expected.get(name) != node_facts.get(name)
    )
    if mismatches:
        raise RunError(
            f"node {host} computes otherwise than the run ({mismatches}), so that its clients "
            "would have other bits; use nodes of one kind, or set ATEN_CPU_CAPABILITY=avx2 and "
            "MKL_ENABLE_INSTRUCTIONS=AVX2 for the run and where Ray is started on each node"
        )


def _arithmetic() -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            return _digest(_kernel_results())
    finally:
        torch.set_num_threads(threads)


def _digest(results: Iterable[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(result.tobytes() for result in results)).hexdigest()[:16]


def _native_results() -> Iterator[np.ndarray]:
    """What compiled code draws, adds and trains (momentum, clipping, noise, SCAFFOLD's corrections)
    of a fixed seed.
    """
    noise = prng.normals(1, prng.Purpose.STEP_NOISE, 1000, t=2, client=3)
    yield noise.numpy()
    yield native.norms(noise[None])
    total = np.zeros(len(noise))
    native.add(total, noise[None].double().numpy(), 2.0**-30, 2.0**20)
    yield total
    with prng.keyed_globals(1):
        module = nn.Sequential(nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3))
    d = models.parameter_count(module)
    models.load(module, noise[:d])
    x = noise[: 3 * 10 * 20].view(3, 10, 20)
    y = torch.arange(30).view(3, 10) % 3
    options: dict[str, Any] = {"clients": [3, 5, 8], "draws": [0, 0, 0], "stds": np.full(3, 0.5)}
    corrections = noise[-3 * d :].view(3, d)
    for rule in (Sgd(steps=3, batch=4, lr=0.1, momentum=0.5), Scaffold(steps=3, batch=4, lr=0.1)):
        trainer = Trainer(module, rule, backend="compiled", seed=1, clip=1.0)
        options["corrections"] = corrections if rule.corrects else None
        for block in trainer.chunk(models.flatten(module), x, y, [10, 7, 3], t=2, **options):
            yield block.updates.numpy()


def _kernel_results() -> Iterator[np.ndarray]:
    """A fixed computation by each of the kernels that training, noise and sums use."""
    raw = np.random.Philox(counter=1, key=2).random_raw(1 << 15).astype(np.float64) / 2.0**63 - 1.0
    # in torch's own alignment, as all that is computed with
    x = torch.empty(1 << 15, dtype=torch.float32)
    x.copy_(torch.from_numpy(raw))
    wide = x.view(128, 256)
    tall = x.view(256, 128)
    yield (wide @ tall).numpy()
    yield (wide.double() @ tall.double()).numpy()
    yield torch.bmm(x[:30000].view(10, 50, 60), x[:30000].view(10, 60, 50)).numpy()
    yield torch.nn.functional.linear(wide[:10], tall.T).numpy()
    yield torch.nn.functional.conv2d(x[:6272].view(2, 4, 28, 28), x[:800].view(8, 4, 5, 5)).numpy()
    for function in (torch.exp, torch.tanh, torch.sigmoid, torch.log1p):
        yield function(x.abs()).numpy()
    yield torch.log_softmax(wide, 1).numpy()
    yield np.array(
        [float(x.sum()), float(torch.linalg.vector_norm(x, dtype=torch.float64)), float(raw.sum())]
    )
    positive = x.abs().numpy() + np.float32(1e-6)
    for elementary in (np.log, np.cos, np.sin, np.sqrt):
        yield elementary(positive)
    square = raw[:10000].reshape(100, 100)
    yield square @ square


def platform_facts(experiment: Experiment) -> dict[str, str]:
    """Everything that a run of `experiment` in this process depends on, by name."""
    facts = {name: version for name, version in versions().items() if name in COMPUTING_PACKAGES}
    facts |= {"torch": str(torch.__version__), "numpy": np.__version__}
    gpu = device.facts(experiment.client.num_gpus)
    facts |= sources(experiment) | capability()
    return facts | (bfloat16_facts() if experiment.client.precision == "bfloat16" else {}) | gpu


@functools.cache
def bfloat16_facts() -> dict[str, str]:
    """By the name bfloat16, a digest of products and convolutions in it: processors with
    instructions for them round otherwise.
    """
    x = torch.linspace(-1, 1, 1 << 14).bfloat16()
    image = x[:6272].view(2, 4, 28, 28)
    with torch.inference_mode():
        products = x.view(64, 256) @ x.view(256, 64)
        images = torch.nn.functional.conv2d(image, x[:800].view(8, 4, 5, 5))
    return {"bfloat16": _digest(tensor.float().numpy() for tensor in (products, images))}


def file_facts(experiment: Experiment, data_root: Path | None) -> dict[str, str]:
    """Digests of the files and folders that user-defined members name, by "file FIELD". Raises
    `ConfigError` for one that is missing or cannot be read.
    """
    contents: dict[str, list] = {}
    for field, name in sorted(experiment.user_files()):
        # by a relative name the class may read that of the working folder, or that of the data root
        paths = {find_file(field, name, data_root, "file or folder").absolute()}
        paths |= {Path(name).absolute()} if os.path.exists(name) else set()
        for path in sorted(paths):
            files = sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
            contents.setdefault(f"file {field}", []).extend(
                [file.relative_to(path).as_posix(), *file_identity(field, str(file), None)]
                for file in files
            )
    return {field: check(*parts)[:16] for field, parts in contents.items()}


def differences(stored_facts: Mapping[str, str], current_facts: Mapping[str, str]) -> str:
    """What has changed, in words; empty: nothing."""
    facts = ("experiment", "data", "clients", "cohorts", "mechanism", "arithmetic", "native")
    digests = ("code ", "file ", *facts)
    words = []
    for name in dict.fromkeys([*stored_facts, *current_facts]):
        before, after = stored_facts.get(name), current_facts.get(name)
        if before == after:
            continue
        if name.startswith(digests) and None not in (before, after):
            words.append(f"{name} has changed")
        else:
            words.append(f"{name} was {before or 'unset'}, now {after or 'unset'}")
    return "; ".join(words)
