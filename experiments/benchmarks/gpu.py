"""A GPU by one command: `python experiments/benchmarks/gpu.py [--pfl-python PATH]`.

It runs every test that needs a device (`tests/test_gpu.py`), then pfl-research's CIFAR-10 workload
with its dropout: 1,000 clients of 50 images each, cohorts of 50, one local epoch in batches of 10
at learning rate 0.1, averaged for 1,500 rounds and evaluated every 10, with a net of two
convolutions and 1.6 million parameters; nothing is clipped and no noise is drawn. The run is
inline, on one GPU, as a user would write it. It prints the table of `docs/gpu.md`, or with `--json`
all of it as JSON:

- the tests: how many passed;
- the run: its seconds, those of a round (the median, and that of rounds without an evaluation),
  clients a second, the test accuracy, the GPU's peak memory, and which share of the measured peak
  of float32 products a round comes to;
- pfl-research on the same device, where `--pfl-python` imports it: seconds of a round of five jobs
  of `compare.py`, and ours in the same jobs;
- the plain loop: a module and `torch.optim.SGD` for one client after another on the same device,
  its rows there, by the same settings of torch; and how many times its seconds ours are;
- two client actors of half the GPU each: whether they give the bits of the inline run;
- a few rounds in other backends and precisions;
- where a round goes: operations of the device, their seconds and the copies among them. Where they
  take most of a round a CUDA graph would gain nothing;
- the convolutions of a step, forward and back, of all clients: as vmap has them, in a group for
  each client, and as products of patches.

`--cpu` tries all of it but the tests on the CPU, which says nothing of a GPU's speed:

    python experiments/benchmarks/gpu.py --cpu --rounds 2 --few 1
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import compare
import torch
import torch.nn.functional as F
from torch.func import vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from raydpfl import Experiment, models, run
from raydpfl.core import device
from raydpfl.data import Shards
from raydpfl.errors import ConfigError, RunError
from raydpfl.models.networks.convolutional import DropoutCnn
from raydpfl.simulation.resolution import resolve

HERE = Path(__file__).resolve().parent
EVERY = 10  # rounds between two evaluations
BATCH = 10
STEPS = 5
LR = 0.1
PEAK = 8192  # rows and columns of the matrices whose product is the peak; 512 on a CPU
REPEATS = 10
JOBS = ("cifar_dropout", "cifar", "resnet18", "lstm", "transformer")  # of compare.py
# of the net's convolutions: channels in, channels out, and pixels of a row of what goes in
CONVOLUTIONS = ((3, 32, 32), (32, 64, 30))


def experiment(options: argparse.Namespace, rounds: int = 0, **changes: Any) -> Experiment:
    """The workload, with some keys of `client` changed. Of so many `rounds` the
    last alone is evaluated.
    """
    sections: dict[str, Any] = {
        "rounds": rounds or options.rounds,
        "data": {"kind": options.data, "clients": options.clients, "partition": {"kind": "iid"}},
        "model": {"kind": "dropout_cnn"},
        "selection": {"kind": "uniform", "cohort": min(50, options.clients)},
        "local": {"kind": "sgd", "steps": STEPS, "batch": BATCH, "sampling": "epochs", "lr": LR},
        "bounding": {"kind": "none"},
        "noise": {"kind": "none"},
        "client": {"actors": 0, "num_gpus": 0 if options.cpu else 1, "backend": options.backend},
        "evaluate": {"every": rounds or EVERY},
        "measure": [],
    }
    sections["client"].update(changes)
    return Experiment.from_dict(sections)


def measured(options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """The run, and what it took."""
    result = run(experiment(options), out)
    rows = result.rounds.to_pylist()
    seconds = [row["seconds"] for row in rows]
    plain = [row["seconds"] for row in rows if row["test_loss"] is None]
    found = {
        "device": device.facts(0 if options.cpu else 1).get("device", "the CPU"),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "rounds": len(rows),
        "parameters": sum(each.numel() for each in result.model.parameters()),
        "chunk": result.experiment.client.chunk,
        "seconds": result.summary["wall_seconds"],
        "seconds_round": median(seconds),
        "seconds_round_unevaluated": median(plain) if plain else None,
        "clients_per_second": result.summary["clients_per_second"],
        "test_accuracy": result.summary["test_accuracy"],
    }
    if not options.cpu:
        found["peak_gpu_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return found


def few(options: argparse.Namespace, out: Path, **changes: Any) -> float | None:
    """The median of the seconds of a few rounds, the first, and the last with its evaluation, left
    out; None, and the reason printed, where they cannot be run.
    """
    try:
        rows = run(experiment(options, 2 + options.few, **changes), out).rounds.to_pylist()
    except (ConfigError, RunError) as error:
        print(f"{changes}: {error}", file=sys.stderr)
        return None
    return median(row["seconds"] for row in rows[1:-1])


class PlainLoop:
    """One client after another, as anybody would write it."""

    def __init__(self, options: argparse.Namespace, there: torch.device):
        plan = resolve(experiment(options))
        shards = Shards.open(plan.shards)
        rows = int(shards.sizes.max())
        x, y, _ = shards.chunk(range(min(50, options.clients)), rows)
        self.x = torch.from_numpy(x).to(there)
        self.y = torch.from_numpy(y).to(there)
        self.net = models.build(plan.experiment.model, shards.form(plan.experiment.data.task), 0)
        self.net = self.net.to(there).train()
        self.start = [each.detach().clone() for each in self.net.parameters()]

    def round(self) -> list[torch.Tensor]:
        """The mean of what the clients have trained to."""
        total = [torch.zeros_like(each) for each in self.start]
        for x, y in zip(self.x, self.y, strict=True):
            with torch.no_grad():
                torch._foreach_copy_(list(self.net.parameters()), self.start)
            optimizer = torch.optim.SGD(self.net.parameters(), lr=LR)
            order = torch.randperm(len(x)).to(x.device)
            for rows in order[: STEPS * BATCH].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(self.net(x[rows]), y[rows]).backward()
                optimizer.step()
            torch._foreach_add_(total, [each.detach() for each in self.net.parameters()])
        return [each / len(self.x) for each in total]


def timed(what: Callable[[], object], there: torch.device, repeats: int) -> float:
    """The median of the seconds that something takes on a device, once it has been done."""
    what()
    device.synchronise(there)
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        what()
        device.synchronise(there)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def operations(options: argparse.Namespace) -> int:
    """Floating point operations of a round, of products and convolutions."""
    net = DropoutCnn().module((3, 32, 32), 10)
    sample = torch.zeros(1, 3, 32, 32)
    with FlopCounterMode(display=False) as counter:
        net(sample).sum().backward()
    return counter.get_total_flops() * min(50, options.clients) * STEPS * BATCH


def peaks(there: torch.device) -> dict[str, float]:
    """Floating point operations a second of float32 products, and bytes a second of a copy on the
    device, those read and those written.
    """
    side = 512 if there.type == "cpu" else PEAK
    a = torch.randn(side, side, device=there)
    b = torch.randn(side, side, device=there)
    seconds = timed(lambda: a @ b, there, REPEATS)
    return {
        "peak_float32": 2 * side**3 / seconds,
        "peak_copy": 2 * a.nbytes / timed(lambda: b.copy_(a), there, REPEATS),
    }


def where(options: argparse.Namespace, out: Path) -> dict[str, float | None]:
    """What the device does in a round, and for how long: of rounds without an evaluation, each the
    difference that it makes to a run. None on a CPU.
    """
    if options.cpu:
        return dict.fromkeys(("device_operations_round", "device_seconds_round"))
    seen = []
    for rounds in (2, 2 + options.few):
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            run(experiment(options, rounds), out / str(rounds))
        seen.append(busy(profiled.key_averages()))
    short, long = seen
    return {name: (long[name] - short[name]) / options.few for name in short}


def busy(events: Iterable[Any]) -> dict[str, float]:
    """Operations of the device, and the copies among them, and their seconds."""
    there = [event for event in events if event.self_device_time_total > 0]
    copies = [event for event in there if "memcpy" in event.key.lower()]
    found = {}
    for name, some in (("device", there), ("copy", copies)):
        found[f"{name}_operations_round"] = sum(event.count for event in some)
        found[f"{name}_seconds_round"] = sum(event.self_device_time_total for event in some) / 1e6
    return found


def by_patches(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The convolutions of clients' images, [C, B, in, side, side], by their filters, [C, out, in,
    k, k], as products: [C, B, out, T].
    """
    clients, batch = x.shape[:2]
    patches = F.unfold(x.flatten(0, 1), weight.shape[-1]).unflatten(0, (clients, batch))
    return weight.flatten(2)[:, None] @ patches


def convolutions(options: argparse.Namespace, there: torch.device) -> dict[str, float]:
    """Seconds of the net's convolutions in a step of all clients, forward and back, in two forms.

    Raises AssertionError where they differ.
    """
    clients = min(50, options.clients)
    forms: dict[str, Callable[..., torch.Tensor]] = {
        "groups": lambda x, weight: vmap(F.conv2d)(x, weight).flatten(3),
        "patches": by_patches,
    }
    found = dict.fromkeys((f"convolutions_{name}" for name in forms), 0.0)
    for inputs, outputs, side in CONVOLUTIONS:
        x = torch.randn(clients, BATCH, inputs, side, side, device=there)
        weight = torch.randn(clients, outputs, inputs, 3, 3, device=there)
        wanted = [weight.requires_grad_()] + ([x.requires_grad_()] if inputs > 3 else [])
        results = []
        for name, form in forms.items():

            def step(form: Callable = form, x=x, weight=weight, wanted=wanted) -> torch.Tensor:
                made = form(x, weight)
                return torch.autograd.grad(made.square().sum(), wanted)[0]

            results.append(step())
            found[f"convolutions_{name}"] += timed(step, there, options.few)
        first, second = results
        assert (first - second).norm() <= 1e-3 * first.norm(), "the forms differ"
    return found


def tests() -> str:
    """The last line of pytest on those that need a device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or ["pytest printed nothing"])[-1]


def beside_pfl(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Seconds of a round of each of `JOBS` by raydpfl and by pfl-research on the device."""
    if not options.pfl_python or not compare.has("pfl", options.pfl_python):
        return
    ours = {"actors": 0, "num_gpus": 0 if options.cpu else 1}
    entered = [
        compare.made(("raydpfl", "with_raydpfl.py", sys.executable), "inline", ours),
        compare.made(("pfl", "with_pfl.py", options.pfl_python), "on the device", {"threads": 1}),
    ]
    for job in JOBS:
        work = compare.WORK[job]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "rows"
            compare.write_rows(work, folder)
            for each in entered:
                each.rounds = compare.WARM + options.few
                block = compare.run_block(each, work, job, folder, compare.TIMEOUT)
                yield {f"seconds_{each.peer}_{job}": median(block.walls)}


def two_actors(options: argparse.Namespace, out: Path) -> bool:
    """Whether two actors, each with half of the GPU, give the bits of a run inline."""
    chunk = {"chunk": max(1, min(50, options.clients) // 2)}
    share = 0 if options.cpu else 0.5
    runs = (
        run(experiment(options, 2, **chunk, **how), out / str(how["actors"]))
        for how in ({"actors": 0}, {"actors": 2, "num_gpus": share})
    )
    return len({each.summary["model_sha256"] for each in runs}) == 1


def compared(options: argparse.Namespace, folder: Path, ours: float) -> Iterator[dict[str, Any]]:
    """All that is measured beside the run; `ours`: the seconds of one of its rounds."""
    there = device.choose_device(0 if options.cpu else 1)
    # as in a run
    kept: AbstractContextManager[None] = (
        nullcontext() if options.cpu else device.preserve_settings()
    )
    with kept:
        device.settle(there, 1.0)
        highest = peaks(there)
        yield highest | convolutions(options, there)
        plain = timed(PlainLoop(options, there).round, there, options.few)
    count = operations(options)
    share = count / ours / highest["peak_float32"]
    yield {"operations_round": count, "share_of_peak": share}
    yield {"seconds_plain_loop": plain, "times_plain_loop": plain / ours}
    yield where(options, folder / "where")
    for backend in ("vmap", "loop"):
        yield {f"seconds_{backend}": few(options, folder / backend, backend=backend)}
    for precision in () if options.cpu else ("tf32", "bfloat16"):
        yield {f"seconds_{precision}": few(options, folder / precision, precision=precision)}
    yield {"two_actors_same_bits": two_actors(options, folder / "actors")}
    yield from beside_pfl(options)


def table_rows(found: dict[str, Any]) -> str:
    """Rows of the table."""
    rows = []
    for name, value in found.items():
        text = f"{value:.6g}" if isinstance(value, float) else value
        rows.append(f"| {name} | {text} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--few", type=int, default=20, help="rounds of what is compared with it")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--data", default="cifar10", help="a data set of images, of 10 classes")
    parser.add_argument("--backend", default="auto", help="client.backend of the run")
    parser.add_argument("--pfl-python", help="an interpreter with pfl 0.6.0")
    parser.add_argument("--cpu", action="store_true", help="tries it on the CPU")
    parser.add_argument("--json", action="store_true", help="prints JSON")
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        print("gpu.py needs a GPU, and torch finds none; --cpu --rounds 2 tries it without")
        sys.exit(2)
    passed = {} if options.cpu else {"tests": tests()}
    with tempfile.TemporaryDirectory() as folder:
        found = passed | measured(options, Path(folder) / "run")
        if not options.json:
            print(f"| what | measured |\n|---|---|\n{table_rows(found)}", flush=True)
        ours = found["seconds_round_unevaluated"] or found["seconds_round"]
        for some in compared(options, Path(folder), ours):
            found |= some
            if not options.json:
                print(table_rows(some), flush=True)
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
