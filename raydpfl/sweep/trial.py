"""The process that runs trials, one after another: starting one costs seconds of a core, so Ray
Tune reuses it.

A trial is `raydpfl.runtime.runner.run` in its own directory, in a thread of this process; `step`
hands on what it reports. Client actors, if it has any, are placed in the placement group that the
trial holds, and this process is their coordinator.
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
from raydpfl.simulation.provenance import search
from raydpfl.storage.files import LOCK, cache_root
from raydpfl.storage.files import data_root as data_folder
from raydpfl.storage.tables import read_log
from raydpfl.sweep.trial_folders import settled
from raydpfl.sweep.trial_source import FINISHED, Source, Trial

PLACES = ("node", "cache", "root", "home", "path")  # of the driver, for `RemotePreparation`
ENDING = 300.0  # seconds that a trial which was told to stop may take to end its round
SEES = "must see what RAYDPFL_CACHE and PYTHONPATH name where it was started from"
PATIENCE = 60.0  # seconds that the processes of a killed sweep may take to let go of a directory


def work(
    trial: Trial, source: Source, bundles: list[dict[str, float]], data_root: Path | None
) -> dict[str, Any]:
    """What `TrialActor` is told of a trial of `source`."""
    elsewhere = storage.origin(trial.folder)
    return {
        "experiment": trial.experiment.to_dict(),
        "folder": elsewhere or str(trial.folder),
        "status": trial.status,
        "bundles": bundles,
        "mark": None if elsewhere else str(trial.folder.parent.parent / source.mark),
        "metric": source.metric,
        "data_root": str(data_root) if data_root else None,
        "pause": source.pauses,
        "home": os.getcwd(),
        "cache": str(cache_root()),
        "root": str(data_folder(data_root).absolute()),
        "node": ray.get_runtime_context().get_node_id() if ray.is_initialized() else None,
        "path": [os.path.abspath(entry) for entry in sys.path],
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
        """Ends a run that goes on still; it is one that the scheduler has stopped."""
        if self._thread is None:
            return
        self._stopping = True
        self._permits.put(None)
        self._thread.join(ENDING)
        if self._thread.is_alive():  # it hangs: the next trial is given another process
            os._exit(1)

    def _run(self) -> None:
        end: dict[str, Any] = {"done": True, "over": True}
        try:
            self._arrive()
            with storage.at(self._work["folder"], PATIENCE) as folder:
                self._carry_out(folder)
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
        return (
            ray.is_initialized() and ray.get_runtime_context().get_node_id() != self._work["node"]
        )

    def _arrive(self) -> None:
        """Takes up the place that the driver was started from. Raises `ConfigError` naming a node
        that has no such place, unless the sweep is elsewhere: then none needs to have it.
        """
        home = self._work["home"]
        mark = self._work["mark"]
        every = "a directory that all nodes of the cluster see; on node"
        try:
            os.chdir(home)
        except OSError as error:
            if mark:
                expected = f"{every} {place()}: {error.strerror}"
                raise ConfigError("working directory", home, expected) from None
        search(self._work["path"])
        if mark and not os.path.exists(mark):
            expected = f"{every} {place()} it is not what it is where it was started from"
            raise ConfigError("--out", os.path.dirname(mark), expected)

    def _carry_out(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with runner.alone(folder, PATIENCE):
            begun = (folder / "config.yaml").exists()
            if not begun:  # at most what a kill left behind before the run began
                for left in folder.iterdir():
                    if left.is_dir():
                        shutil.rmtree(left)
                    elif left.name != LOCK:
                        left.unlink()
        self._rows(_rows(folder))
        if self._work["status"] not in FINISHED:
            experiment = Experiment.from_dict(self._work["experiment"])
            # whether this node sees no disk of the driver's
            remote = self._away() and not self._work["mark"]
            places = {name: self._work[name] for name in PLACES} if remote else {}
            runner.run(
                settled(experiment, folder) if begun else experiment,
                folder,
                resume=begun,
                data_root=self._work["data_root"],
                on_rows=self._rows,
                prepare=RemotePreparation(**places) if remote else prepare,
            )

    def _rows(self, rows: list[dict[str, Any]]) -> bool:
        """Reports the rows that have been evaluated, once each; whether to stop."""
        for row in rows:
            if self._stopping:
                break
            if not metric_columns.evaluated(row) or row["round"] < self._report["round"]:
                continue
            kept = {
                key: math.nan if value is None else value
                for key, value in row.items()
                if metric_columns.is_score(key) or key.startswith("epsilon_")
            }
            self._report = {**kept, "round": row["round"] + 1}
            self._reports.put(self._report)
            if self._work["pause"]:
                self._permits.get()
        return self._stopping


def _rows(folder: Path) -> list[dict[str, Any]]:
    """What a run that was begun before has recorded."""
    found = read_log(folder, "rounds")
    return [] if found is None else found.to_pylist()
