"""A million clients against three thousand: time per round and peak memory of every process.

    python experiments/benchmarks/scale.py [--clients 3000 1000000] [--rounds 200]

Each population of synthetic clients (20 samples of 60 features) is run by the command line as a
user would, with cohort 150 and two client actors, after a run of one round that prepares the data.
The populations take turns, and medians over the rounds of all their runs are compared; so are 10th
percentiles, which others on the machine disturb less.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

CONFIG = """
data: {{kind: synthetic, clients: {clients}, samples: 20, sizes: {{kind: balanced}}}}
model: {{kind: softmax}}
selection: {{kind: uniform, cohort: 150}}
local: {{kind: sgd, steps: 20, batch: 10, lr: 0.05}}
bounding: {{kind: normalize, bound: 1.0}}
noise: {{kind: gaussian, multiplier: 4.0, delta: 1.0e-7}}
evaluate: {{every: 1000}}
measure: []
"""


def run(
    folder: Path, clients: int, rounds: int, name: str, actors: int = 2
) -> tuple[np.ndarray, dict[str, float]]:
    """(seconds of every round but the first five, peak MB by process) of one run."""
    config = folder / f"{clients}.yaml"
    config.write_text(CONFIG.format(clients=clients))
    out = folder / f"{clients}-{name}"
    asked = [config, f"rounds={rounds}", f"client.actors={actors}", "--out", out, "--quiet"]
    subprocess.run([sys.executable, "-m", "raydpfl", "run", *asked], check=True)
    memory = json.loads((out / "summary.json").read_text())["peak_rss_mb_by_process"]
    return pq.read_table(out / "rounds.parquet")["seconds"].to_numpy()[5:], memory


def show(name: str, small: float, large: float, digits: int) -> None:
    """A row of the table: both populations, and their ratio."""
    print(f"{name:30}{small:12.{digits}f}{large:12.{digits}f}{large / small:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs=2, default=[3_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for clients in options.clients:
            run(folder, clients, 1, "prepare", actors=0)
        seconds: dict[int, list] = {clients: [] for clients in options.clients}
        memory: dict[int, dict] = {}
        for repeat in range(options.repeats):
            for clients in options.clients:
                took, peak = run(folder, clients, options.rounds, str(repeat))
                seconds[clients].append(took)
                memory[clients] = {
                    name: max(value, memory.get(clients, {}).get(name, 0))
                    for name, value in peak.items()
                }
    small, large = options.clients
    every = {clients: np.concatenate(took) * 1e3 for clients, took in seconds.items()}
    print(f"{'':30}{small:>12,}{large:>12,}{'ratio':>8}")
    for name, q in (("median", 0.5), ("10th percentile", 0.1)):
        low, high = (float(np.quantile(every[clients], q)) for clients in (small, large))
        show(f"ms a round ({name})", low, high, digits=1)
    for name, megabytes in memory[small].items():
        show(f"peak MB, {name}", megabytes, memory[large][name], digits=0)


if __name__ == "__main__":
    main()
