"""The process that runs trials, one after another: starting one costs seconds of a core, so Ray
Tune reuses it.

A trial is `raydpfl.runtime.runner.run` in its own directory, in a thread of this process; `step`
returns its reports, one by one. Its client actors, if it has any, are placed in the placement group
that the trial holds, and this process is their coordinator.
"""

from __future__ import annotations

import math
import os
import queue
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raydpfl import storage
from raydpfl.data import prepare
from raydpfl.errors import ConfigError, RunError, traceback_text
from raydpfl.experiment import Experiment
from raydpfl.models import metric_columns
from raydpfl.runtime import runner
from raydpfl.runtime.file_transfer import RemotePreparation
from raydpfl.runtime.session import place
from raydpfl.simulation.user_code import search
from raydpfl.storage.files import LOCK, cache_root
from raydpfl.storage.files import data_root as data_folder
from raydpfl.storage.tables import read_log
from raydpfl.sweep.resources import Resources
from raydpfl.sweep.search_runner import SearchRunner
from raydpfl.sweep.trials import FINISHED, Trial, resolved

ENDING = 300.0  # seconds that a trial may take to end its round after it was asked to stop
SEES = "must see what RAYDPFL_CACHE and PYTHONPATH name where it was started from"
PATIENCE = 60.0  # seconds that the processes of a killed sweep may take to release a directory


def work(trial: Trial, runner: SearchRunner, resources: Resources) -> dict[str, Any]:
    """The config of `TrialActor` for a trial."""
    address = storage.origin(trial.folder)
    root = resources.root
    return {
        "experiment": trial.experiment.to_dict(),
        "folder": address or str(trial.folder),
        "status": trial.status,
        "bundles": resources.bundles(trial.experiment),
        # a file that shows a node whether it sees the directory of the sweep or study
        "mark": None if address else str(trial.folder.parent.parent / runner.config.name),
        "metric": runner.metric,
        "data_root": str(root) if root else None,
        "pause": runner.pauses,
        "driver": {  # where files are fetched from by nodes that do not see them
            "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else None,
            "cache": str(cache_root()),
            "root": str(data_folder(root).absolute()),
            "home": os.getcwd(),
            "path": [os.path.abspath(entry) for entry in sys.path],
        },
    }


class TrialActor(tune.Trainable):
    """Each `step` is an evaluation of the model: `round` (rounds done), the metrics, and the
    epsilons.

    The last has `done` and `over`, and `failed` (a message) or `refused` (the three parts of a
    `ConfigError`) unless the run went well.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory(config["bundles"], strategy="PACK")

    def setup(self, config: dict[str, Any]) -> None:
        self._work = config
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self._permits: queue.Queue[None] = queue.Queue()
        self._asked = self._stopping = False
        self._report: dict[str, Any] = {"round": 0, config["metric"]: math.nan}
        self._thread: threading.Thread | None = None

    def reset_config(self, config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(config)
        return True

    def step(self) -> dict[str, Any]:
        # Not before: Ray Tune starts processes for trials that it then has another process run.
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        if self._asked:
            self._permits.put(None)
        self._asked = True
        return self._reports.get()

    def cleanup(self) -> None:
        """Ends a run that still continues: one that the scheduler has stopped."""
        if self._thread is None:
            return
        self._stopping = True
        self._permits.put(None)
        self._thread.join(ENDING)
        if self._thread.is_alive():  # it hangs: the next trial gets another process
            os._exit(1)

    def _run(self) -> None:
        end: dict[str, Any] = {"done": True, "over": True}
        try:
            self._check_node()
            with storage.at(self._work["folder"], PATIENCE) as folder:
                self._run_in(folder)
        except ConfigError as error:
            expected = error.expected
            if self._away() and "on node" not in expected:
                expected += f" (on node {place()}, which {SEES})"
            end["refused"] = [error.field, error.value, expected]
        except RunError as error:
            end["failed"] = str(error)
        except BaseException as error:
            end["failed"] = traceback_text(error)
        self._reports.put({**self._report, **end})

    def _away(self) -> bool:
        """Whether the driver is on another node."""
        node = self._work["driver"]["node"]
        return ray.is_initialized() and ray.get_runtime_context().get_node_id() != node

    def _check_node(self) -> None:
        """Changes to the working directory of the driver. Raises `ConfigError` naming a node that
        does not have it, unless the sweep is at an address: then no node needs to have it.
        """
        home = self._work["driver"]["home"]
        mark = self._work["mark"]
        every = "a directory that all nodes of the cluster see; on node"
        try:
            os.chdir(home)
        except OSError as error:
            if mark:
                expected = f"{every} {place()}: {error.strerror}"
                raise ConfigError("working directory", home, expected) from None
        search(self._work["driver"]["path"])
        if mark and not os.path.exists(mark):
            expected = f"{every} {place()} it is not what it is where it was started from"
            raise ConfigError("--out", os.path.dirname(mark), expected)

    def _run_in(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with runner.alone(folder, PATIENCE):
            started = (folder / "config.yaml").exists()
            if not started:  # at most what a kill left behind before the run started
                for left in folder.iterdir():
                    if left.is_dir():
                        shutil.rmtree(left)
                    elif left.name != LOCK:
                        left.unlink()
        recorded = read_log(folder, "rounds")
        self._rows([] if recorded is None else recorded.to_pylist())
        if self._work["status"] not in FINISHED:
            experiment = Experiment.from_dict(self._work["experiment"])
            # whether this node sees no disk of the driver's
            remote = self._away() and not self._work["mark"]
            runner.run(
                resolved(experiment, folder) if started else experiment,
                folder,
                resume=started,
                data_root=self._work["data_root"],
                on_rows=self._rows,
                prepare=RemotePreparation(**self._work["driver"]) if remote else prepare,
            )

    def _rows(self, rows: list[dict[str, Any]]) -> bool:
        """Reports the rows that have been evaluated, once each; whether to stop."""
        for row in rows:
            if self._stopping:
                break
            if not metric_columns.evaluated(row) or row["round"] < self._report["round"]:
                continue
            scores = {
                key: math.nan if value is None else value
                for key, value in row.items()
                if metric_columns.is_score(key) or key.startswith("epsilon_")
            }
            self._report = {**scores, "round": row["round"] + 1}
            self._reports.put(self._report)
            if self._work["pause"]:
                self._permits.get()
        return self._stopping
