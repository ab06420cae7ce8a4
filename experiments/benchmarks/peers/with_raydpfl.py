"""A job with raydpfl: `settings` are keys of its section `client`."""

import os
import tempfile
from pathlib import Path
from typing import Any

from job import Job, Teller


def config(job: Job) -> dict[str, Any]:
    folder = Path(job.folder)
    return {
        "rounds": job.rounds,
        "data": {
            "kind": "table",
            "train": str(folder / "rows.npz"),
            "test": str(folder / "test.npz"),
            "x": "x",
            "y": "y",
            "client": "client",
            **job.targets,
            "clients": job.clients,
            "partition": {"kind": "natural"},
        },
        "model": job.model,
        "selection": {"kind": "uniform", "cohort": job.cohort},
        "local": {"kind": "sgd", "steps": job.steps, "batch": job.batch, "lr": job.lr},
        "bounding": {"kind": "clip", "bound": job.clip},
        "client": job.settings,
        "evaluate": {"test": False},
        "measure": [],
    }


def main() -> None:
    teller = Teller()
    job = Job.given()
    os.environ.setdefault("RAYDPFL_CACHE", str(Path(job.folder) / "cache"))
    from raydpfl import Experiment, run

    def on_rows(rows: list[dict]) -> None:
        for _ in rows:
            teller.round_ended()

    with tempfile.TemporaryDirectory() as folder:
        result = run(Experiment.from_dict(config(job)), Path(folder) / "run", on_rows=on_rows)
        import nets

        teller.tell(loss=nets.loss(result.model, job))


if __name__ == "__main__":
    main()
