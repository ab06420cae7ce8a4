"""raydpfl beside other simulators, on the same work in one run.

    python experiments/benchmarks/compare.py [--pfl-python PATH] [--flower-python PATH] \\
        [--blazefl-python PATH] [--out FILE]

A contender is a program in peers/, written as its users would write it, which takes a job and tells
when each round has ended. The contenders take turns, a fresh process each time, in blocks of as
many rounds as take `--seconds`; the first block of each finds that number, and is not counted, nor
are the first rounds of any block. Printed for each:

- `wall` and `processor`, ms a round: the median over rounds, and over blocks of all processes of
  the contender together. On a machine that others use, the second is the one to trust.
- `of peak`: the FLOPs of the job's steps, as a plain loop takes them, over those that the machine
  can do in that wall time, all cores at the speed of one thread's `torch.mm` of float32 matrices of
  2048 rows; `(cpu)` over those that its processor time can. Whoever needs fewer FLOPs than a plain
  loop may pass 100 %.
- `MB`: the largest sum of the memory of all its processes, sampled, and `client` that of a process
  that trains clients. A page that n processes share counts as 1/n in each (Linux's proportional set
  size).
- `start`: seconds from the command to the end of the first round.
- `loss` on the first 1,000 rows after as many rounds for all: that they do the same work.

Contenders that cannot be imported are left out. `--tiny` is for trying the program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch
from peers.job import Job

HERE = Path(__file__).resolve().parent
WARM = 2  # rounds of every block that do not count
TRIED = WARM + 1  # rounds of the block that finds how many the others have
MOST = 300  # rounds of a block
TIMEOUT = 900.0  # seconds of a block
SAMPLED = 1.0  # seconds between two looks at the memory
TICK = 0.01  # seconds that Linux counts processor time in
NEEDS = {
    "raydpfl": ("raydpfl",),
    "pfl": ("pfl", "torch"),
    "Flower": ("flwr", "ray", "torch"),
    "BlazeFL": ("blazefl.contrib", "torch"),
}
SIDE = 2048  # rows and columns of the matrices whose product is the peak


@dataclass(frozen=True)
class Work:
    """A job before its contenders. `macs`: of each layer, multiplications a row; the first layer's
    input needs no gradient.
    """

    clients: int
    rows: int
    cohort: int
    epochs: int
    batch: int
    lr: float
    shape: tuple[int, ...]
    macs: tuple[int, ...]
    model: dict[str, Any]
    tokens: bool = False  # rows of whole numbers below `TOKENS`, [length]
    positions: bool = False  # a target at each of them

    @property
    def targets(self) -> dict[str, Any]:
        """How raydpfl's config names them."""
        if not self.tokens:
            return {"classes": 10}
        task = {"task": {"kind": "sequence"}} if self.positions else {}
        return {"classes": TOKENS, **task}

    @property
    def steps(self) -> int:
        return self.epochs * self.rows // self.batch

    @property
    def flops(self) -> int:
        """Of a round, by a plain loop: two a multiplication; a layer's output, and the gradients of
        its weights and, after the first, of its input.
        """
        row = 2 * (2 * self.macs[0] + 3 * sum(self.macs[1:]))
        return self.cohort * self.steps * self.batch * row


TOKENS = 65
CONVOLUTIONS = (28 * 28 * 16 * 25, 14 * 14 * 32 * 16 * 25)
TWO_CONVOLUTIONS = (30 * 30 * 32 * 27, 28 * 28 * 64 * 288, 12544 * 128, 1280)
WORK = {
    "softmax": Work(3000, 20, 150, 10, 10, 0.1, (784,), (7840,), {"kind": "softmax"}),
    "mlp": Work(1000, 32, 80, 16, 16, 0.1, (784,), (156800, 2000), {"kind": "mlp"}),
    "cnn": Work(
        *(60, 640, 10, 1, 64, 0.1, (1, 28, 28)),
        macs=(*CONVOLUTIONS, 1568 * 512, 512 * 32, 320),
        model={"kind": "cnn"},
    ),
    "cifar_dropout": Work(
        *(1000, 50, 50, 1, 10, 0.1, (3, 32, 32)),
        macs=TWO_CONVOLUTIONS,
        model={"kind": "dropout_cnn"},
    ),
    "cifar": Work(
        *(1000, 50, 50, 1, 10, 0.1, (3, 32, 32)),
        macs=TWO_CONVOLUTIONS,
        model={"kind": "dropout_cnn", "dropout": [0, 0]},
    ),
    "resnet18": Work(
        *(50, 100, 5, 1, 20, 0.05, (3, 32, 32)),
        macs=(256 * 64 * 147, 4 * 2359296, *3 * (7 * 1179648 + 131072,), 5120),
        model={"kind": "resnet18", "stem": "imagenet"},
    ),
    "lstm": Work(
        *(100, 100, 10, 1, 10, 0.5, (80,)),
        macs=(0, 80 * 4 * 256 * (8 + 3 * 256), 256 * TOKENS),
        model={"kind": "char_lstm"},
        tokens=True,
    ),
    "transformer": Work(
        *(100, 64, 20, 1, 16, 0.1, (20,)),
        macs=(0, 20 * 3 * (4 * 96 * 96 + 2 * 20 * 96 + 2 * 96 * 1536), 20 * 96 * TOKENS),
        model={"kind": "transformer", "width": 96, "heads": 8, "layers": 3, "inner": 1536},
        tokens=True,
        positions=True,
    ),
}


def write_rows(work: Work, folder: Path) -> None:
    """Random rows, each with the class that a fixed linear map of it has largest; of tokens, with
    what a fixed map has for the last one, or for each.
    """
    rng = np.random.default_rng(0)
    shape = (work.clients * work.rows, *work.shape)
    if work.tokens:
        x = rng.integers(TOKENS, size=shape)
        after = rng.permutation(TOKENS)[x]
        y = after if work.positions else after[:, -1]
    else:
        x = rng.random(shape, dtype=np.float32)
        centred = x.reshape(len(x), -1) - 0.5
        y = (centred @ rng.standard_normal((centred.shape[1], 10), dtype=np.float32)).argmax(1)
    folder.mkdir()
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    client = np.repeat(np.arange(work.clients), work.rows)
    np.savez(folder / "rows.npz", x=x, y=y, client=client)
    np.savez(folder / "test.npz", x=x[:100], y=y[:100], client=client[:100])


@dataclass
class Contender:
    """A program of peers/ with its settings. Of several rows of one `peer` the best is shown."""

    peer: str
    name: str
    program: str
    python: str
    settings: dict[str, Any]
    processes: int = 1
    rounds: int = TRIED
    blocks: list[Block] = field(default_factory=list)
    loss: float = 0.0

    def command(self, job: Path) -> list[str]:
        if self.processes == 1:
            return [self.python, str(HERE / "peers" / self.program), str(job)]
        spread = ["-m", "torch.distributed.run", "--standalone"]
        each = ["--nproc_per_node", str(self.processes)]
        return [self.python, *spread, *each, str(HERE / "peers" / self.program), str(job)]


def contenders(options: argparse.Namespace) -> list[Contender]:
    """Those that are asked for and can be run here; says who is left out."""
    cores = psutil.cpu_count(logical=True) or 1
    ours = ("raydpfl", "with_raydpfl.py", sys.executable)
    pfl = ("pfl", "with_pfl.py", options.pfl_python)
    flower = ("Flower", "with_flower.py", options.flower_python)
    blazefl = ("BlazeFL", "with_blazefl.py", options.blazefl_python)
    found = [
        made(ours, "inline", {"actors": 0}),
        made(ours, f"{cores} actors", {"actors": cores}),
        made(ours, "default", {}),
        made(pfl, "one thread", {"threads": 1}),
        made(pfl, f"{cores} threads", {"threads": cores}),
        made(pfl, f"{cores} processes", {"threads": 1}, cores),
        made(flower, "a client per core", {}),
        made(blazefl, "one thread", {"threads": 1}),
        made(blazefl, f"{cores} threads", {"threads": cores}),
    ]
    wanted = [each for each in found if any(part in each.name for part in options.contenders)]
    pythons = {each.peer: each.python for each in wanted}
    there = {peer: has(peer, python) for peer, python in pythons.items()}
    return [each for each in wanted if there[each.peer]]


def made(
    who: tuple[str, str, str], setting: str, settings: dict[str, Any], processes: int = 1
) -> Contender:
    peer, program, python = who
    return Contender(peer, f"{peer}, {setting}", program, python, settings, processes)


def has(peer: str, python: str) -> bool:
    """Whether a peer's interpreter imports what it needs; says so where it does not."""
    code = f"import {', '.join(NEEDS[peer])}"
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, env=environment()
        )
        reason = (done.stderr.splitlines() or [""])[-1] if done.returncode else ""
    except OSError as error:
        reason = str(error)
    if reason:
        print(f"{peer} is left out: {python} does not import it ({reason})", flush=True)
    return not reason


@dataclass(frozen=True)
class Block:
    """Some rounds of a contender: the start and the seconds of its rounds, those of the processor
    and of the clock a round, and the peak memory in MB, of all processes and of one that trains.
    """

    startup: float
    walls: list[float]
    processor: float
    memory: float
    client: float
    loss: float


def tree(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def processor_seconds(process: psutil.Process) -> float:
    """Of a process and all below it, those that have ended included."""
    total = 0.0
    for each in tree(process):
        with suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])
    return total


class Memory:
    """The peak of the memory of a process and all below it, and of the largest that trains clients,
    in MB: of Ray's actors where there are some, else of all.
    """

    def __init__(self, process: psutil.Process):
        self.process = process
        self.peak = self.largest = self.actor = 0.0
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.ended.wait(SAMPLED):
            total = 0.0
            for each in tree(self.process):
                with suppress(psutil.NoSuchProcess):
                    size = each.memory_full_info().pss / 1e6
                    total += size
                    self.largest = max(self.largest, size)
                    if "ray::Client" in "".join(each.cmdline()):
                        self.actor = max(self.actor, size)
            self.peak = max(self.peak, total)

    def stop(self) -> tuple[float, float]:
        self.ended.set()
        self.thread.join()
        return self.peak, self.actor or self.largest


def stop(process: psutil.Process) -> None:
    """Ends a process and all below it."""
    for each in tree(process):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def environment() -> dict[str, str]:
    """Of every contender: each sets its own threads, and ours is this checkout's."""
    kept = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return {**kept, "PYTHONPATH": str(HERE.parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def started(contender: Contender, job: Path, timeout: float) -> Iterator[subprocess.Popen[str]]:
    """A contender's process, which leaves none behind. Raises SystemExit where it fails."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            contender.command(job),
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
            text=True,
        )
        watched = psutil.Process(process.pid)
        timer = threading.Timer(timeout, stop, [watched])
        timer.start()
        try:
            yield process
            code = process.wait()
        finally:
            timer.cancel()
            stop(watched)
            process.wait()
        if code:
            errors.seek(0)
            last = "".join(errors.readlines()[-20:])
            raise SystemExit(f"{contender.name} ended with {code}\n{last}")


def run_block(contender: Contender, work: Work, net: str, folder: Path, timeout: float) -> Block:
    keys = ("clients", "rows", "cohort", "epochs", "steps", "model", "targets")
    values = {key: getattr(work, key) for key in keys}
    job = Job(
        folder=str(folder),
        net=net,
        batch=work.batch,
        lr=work.lr,
        clip=1.0,
        rounds=contender.rounds,
        settings=contender.settings,
        **values,
    )
    path = folder / "job.json"
    path.write_text(json.dumps(asdict(job)))
    began = time.monotonic()
    with started(contender, path, timeout) as process:
        watched = psutil.Process(process.pid)
        memory = Memory(watched)
        ends, marks, loss = heard(process, watched, contender.rounds)
        peak, client = memory.stop()
    if len(ends) != contender.rounds:
        raise SystemExit(f"{contender.name} told of {len(ends)} of {contender.rounds} rounds")
    rounds = len(ends) - WARM
    walls = np.diff(ends)[WARM - 1 :].tolist()
    processor = max(marks[1] - marks[0], TICK) / rounds
    return Block(ends[0] - began, walls, processor, peak, client, loss)


def heard(
    process: subprocess.Popen[str], watched: psutil.Process, rounds: int
) -> tuple[list[float], list[float], float]:
    """When the rounds ended, the processor's seconds after the first ones and after all, and the
    loss.
    """
    assert process.stdout is not None
    ends: list[float] = []
    marks: list[float] = []
    loss = float("nan")
    for line in process.stdout:
        told = json.loads(line)
        loss = told.get("loss", loss)
        if "ended" not in told:
            continue
        ends.append(told["ended"])
        if len(ends) in (WARM, rounds):
            marks.append(processor_seconds(watched))
    return ends, marks, loss


def peak() -> float:
    """FLOPs a second of the processor, of one thread's product of two matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a = torch.rand(SIDE, SIDE)
    b = torch.rand(SIDE, SIDE)
    torch.mm(a, b)
    rates = []
    for _ in range(5):
        began = time.thread_time()
        torch.mm(a, b)
        rates.append(2 * SIDE**3 / (time.thread_time() - began))
    torch.set_num_threads(threads)
    return max(rates)


def compare(
    net: str, work: Work, entered: list[Contender], options: argparse.Namespace
) -> dict[str, Any]:
    """All contenders on one job, as it is written to the file."""
    peaks = [peak()]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "rows"
        write_rows(work, folder)
        for turn in range(options.blocks + 1):
            for contender in entered:
                block = run_block(contender, work, net, folder, options.timeout)
                if turn:
                    contender.blocks.append(block)
                    continue
                contender.loss = block.loss
                rounds = int(options.seconds / median(block.walls))
                contender.rounds = WARM + min(max(rounds, 3), MOST)
            peaks.append(peak())
    cores = psutil.cpu_count(logical=True) or 1
    highest = median(peaks)
    results = [summary(each, work, highest, cores) for each in entered]
    return {"job": net, "peak_flops": highest * cores, "cores": cores, "contenders": results}


def summary(contender: Contender, work: Work, peak_flops: float, cores: int) -> dict[str, Any]:
    """Of all counted blocks."""
    blocks = contender.blocks
    wall = median(each for block in blocks for each in block.walls)
    processor = median(block.processor for block in blocks)
    return {
        "peer": contender.peer,
        "name": contender.name,
        "wall_seconds": wall,
        "processor_seconds": processor,
        "share_of_peak": work.flops / (wall * peak_flops * cores),
        "share_of_peak_processor": work.flops / (processor * peak_flops),
        "peak_mb": max(block.memory for block in blocks),
        "client_mb": max(block.client for block in blocks),
        "startup_seconds": median(block.startup for block in blocks),
        "loss": contender.loss,
        "rounds": contender.rounds - WARM,
        "blocks": len(blocks),
    }


def ratios(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How many times as long each peer takes as we do, each side at its best."""
    best: dict[str, dict[str, float]] = {}
    for each in result["contenders"]:
        mine = best.setdefault(each["peer"], {})
        for key in ("wall_seconds", "processor_seconds"):
            mine[key] = min(mine.get(key, float("inf")), each[key])
    ours = best.pop("raydpfl", None)
    if ours is None:
        return []
    return [
        {
            "peer": peer,
            "wall": theirs["wall_seconds"] / ours["wall_seconds"],
            "processor": theirs["processor_seconds"] / ours["processor_seconds"],
        }
        for peer, theirs in best.items()
    ]


HEAD = (
    f"{'job':14}{'contender':25}{'wall':>9}{'processor':>10}{'of peak':>8}{'(cpu)':>7}"
    f"{'MB':>6}{'client':>8}{'start':>6}{'loss':>7}"
)


def row(job: str, each: dict[str, Any]) -> str:
    wall = each["wall_seconds"] * 1e3
    processor = each["processor_seconds"] * 1e3
    shares = f"{each['share_of_peak']:>8.1%}{each['share_of_peak_processor']:>7.1%}"
    memory = f"{each['peak_mb']:>6,.0f}{each['client_mb']:>8,.0f}"
    rest = f"{memory}{each['startup_seconds']:>6.1f}{each['loss']:>7.4f}"
    return f"{job:14}{each['name']:25}{wall:>9,.1f}{processor:>10,.1f}{shares}{rest}"


def shown(result: dict[str, Any]) -> list[str]:
    """All rows of ours, and the fastest of every peer; then the ratios."""
    rows = [each for each in result["contenders"] if each["peer"] == "raydpfl"]
    peers = {each["peer"] for each in result["contenders"]} - {"raydpfl"}
    for peer in sorted(peers):
        theirs = [each for each in result["contenders"] if each["peer"] == peer]
        rows.append(min(theirs, key=lambda each: each["wall_seconds"]))
    lines = [row(result["job"], each) for each in rows]
    for each in result["ratios"]:
        times = f"{each['wall']:.1f} times our wall, {each['processor']:.1f} times our processor"
        lines.append(f"{result['job']:14}{each['peer']}: {times}")
    return lines


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", choices=list(WORK), default=list(WORK))
    parser.add_argument("--pfl-python", default=sys.executable, help="an interpreter with pfl")
    parser.add_argument(
        "--flower-python", default=sys.executable, help="an interpreter with flwr[simulation]"
    )
    parser.add_argument(
        "--blazefl-python", default=sys.executable, help="an interpreter with blazefl and tqdm"
    )
    parser.add_argument(
        "--contenders", nargs="+", default=[""], metavar="PART", help="of whose name is a part"
    )
    parser.add_argument("--blocks", type=int, default=4, help="of each contender, by turns")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the rounds of a block")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds of a block")
    parser.add_argument("--out", type=Path, help="a file for all numbers, as JSON")
    parser.add_argument("--tiny", action="store_true", help="twelve clients, three a round")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    entered = contenders(options)
    print(HEAD, flush=True)
    results = []
    for net in options.jobs:
        work = replace(WORK[net], clients=12, cohort=3) if options.tiny else WORK[net]
        result = compare(net, work, [replace(each, blocks=[]) for each in entered], options)
        result["ratios"] = ratios(result)
        print("\n".join(shown(result)), flush=True)
        results.append(result)
        if options.out is not None:
            found = {"torch": torch.__version__, "jobs": results}
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
