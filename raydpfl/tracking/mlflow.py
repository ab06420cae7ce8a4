"""MLflow."""

import importlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock
from pydantic import Field

from raydpfl.storage.files import cache_root
from raydpfl.tracking.base import Log, Row, Tracked, Tracker, facts, numbers

STATUS = {"completed": "FINISHED", "budget": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}
METRICS = 1000  # that a server takes at once
PARAMS = 100
MAX_VALUE_LENGTH = 500  # characters of a parameter's value, for every server there is


class MLflow(Tracker):
    """Every number of the rounds table as a metric by round, the config as parameters, and how the
    run ended as tags, in MLflow. A user's name and password belong into its variables
    (MLFLOW_TRACKING_USERNAME, ...), not into a config.
    """

    library: ClassVar[str] = "mlflow"
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"experiment": "mine"},)

    kind: str = "mlflow"
    uri: str | None = Field(
        default=None,
        description=(
            "of its server or store (http://..., sqlite:///mlflow.db); null: MLFLOW_TRACKING_URI, "
            "or MLflow's own"
        ),
    )
    experiment: str = Field(default="raydpfl", description="in which the runs are")

    def open(self, run: Tracked) -> Log:
        return _Run(self, run)

    def kept_in(self, folder: Path) -> Tracker:
        return self.model_copy(update={"uri": f"sqlite:///{(folder / 'mlflow.db').absolute()}"})


class _Run(Log):
    def __init__(self, tracker: MLflow, run: Tracked):
        self._entities = importlib.import_module("mlflow.entities")
        mlflow_tracking = importlib.import_module("mlflow.tracking")
        for name in ("mlflow", "alembic"):  # what they say of setting up a store
            logging.getLogger(name).setLevel(logging.WARNING)
        self.id = run.id
        # it creates a store, which only one process may do at a time, as a sweep has several
        with FileLock(cache_root() / "mlflow.lock"):
            self._client = mlflow_tracking.MlflowClient(tracker.uri)
            experiment = self._experiment(tracker.experiment)
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            return
        tags = {"directory": run.place} | ({"sweep": run.group} if run.group else {})
        mlflow_run = self._client.create_run(experiment, None, tags, run.name)
        self.id = mlflow_run.info.run_id
        param = self._entities.Param
        params = [param(key, str(value)[:MAX_VALUE_LENGTH]) for key, value in run.config.items()]
        for batch in _batches(params, PARAMS):
            self._client.log_batch(self.id, params=batch)

    def _experiment(self, name: str) -> str:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            with suppress(Exception):  # another node may have made it meanwhile
                return self._client.create_experiment(name)
            experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id

    def write(self, rows: Sequence[Row]) -> None:
        timestamp = int(1000 * time.time())
        metric = self._entities.Metric
        metrics = [
            metric(name, value, timestamp, row["round"])
            for row in rows
            for name, value in numbers(row).items()
        ]
        for batch in _batches(metrics, METRICS):
            self._client.log_batch(self.id, metrics=batch)

    def close(self, summary: Mapping[str, Any]) -> None:
        tag = self._entities.RunTag
        tags = [tag(name, str(value)[:MAX_VALUE_LENGTH]) for name, value in facts(summary).items()]
        self._client.log_batch(self.id, tags=tags)
        status = STATUS.get(summary.get("status", ""), "KILLED")
        self._client.set_terminated(self.id, status)


def _batches(values: Sequence[Any], batch_size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), batch_size):
        yield values[start : start + batch_size]
