"""Gauges of Ray, which its dashboard shows."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from raydpfl.privacy import RIGOROUS
from raydpfl.tracking.base import Log, Row, Tracked, Tracker

# By column of the rounds table: what the gauge raydpfl_COLUMN says.
GAUGE_DESCRIPTIONS = {
    "round": "Rounds that are done.",
    "epsilon": "Spent so far, by the rigorous accountant with the smallest.",
    "clients_per_second": "Clients trained in a second, without evaluation.",
    "replaced": "Client actors that were replaced so far.",
}


class RayGauges(Tracker):
    """The rounds done, the epsilon spent, clients per second and replaced actors, as gauges of
    `ray.util.metrics` with the tag `run`: Ray exports them to Prometheus, which its dashboard and
    Grafana read. Nothing is shown of a run that uses no Ray.
    """

    kind: str = "ray"

    def open(self, run: Tracked) -> Log:
        return Gauges(run.name)


class Gauges(Log):
    """The gauges of the run `name`."""

    def __init__(self, name: str):
        self._tags = {"run": name}
        self._gauges: dict[str, Any] = {}

    def write(self, rows: Sequence[Row]) -> None:
        ray = sys.modules.get("ray")  # a run starts it where it pays, which may be later
        if ray is None or not ray.is_initialized():
            return
        if not self._gauges:
            gauge = importlib.import_module("ray.util.metrics").Gauge
            for name, description in GAUGE_DESCRIPTIONS.items():
                self._gauges[name] = gauge(f"raydpfl_{name}", description, ("run",))
        row = {**rows[-1], "round": rows[-1]["round"] + 1, "epsilon": _epsilon(rows[-1])}
        for name, gauge in self._gauges.items():
            if row.get(name) is not None:
                gauge.set(float(row[name]), self._tags)


def _epsilon(row: Row) -> float | None:
    epsilons = [row[name] for name in RIGOROUS if row.get(name) is not None]
    return min(epsilons, default=None)
