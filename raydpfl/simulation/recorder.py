"""What a run writes about its rounds: tables, models and the summary."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl import storage
from raydpfl.core.hardware import peak_rss_mb
from raydpfl.core.messages import ChunkResult, Columns
from raydpfl.data import Shards
from raydpfl.errors import ConfigError, RunError
from raydpfl.methods.hook_values import array_of, check_names
from raydpfl.methods.probes import Probe, Problem, Round
from raydpfl.models import metric_columns
from raydpfl.models.metrics import Metric
from raydpfl.privacy import brief_sentences, column, tightest_guarantees
from raydpfl.simulation import evaluation
from raydpfl.simulation.checkpoint import Checkpoint, RunState, save
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.pool import Pool
from raydpfl.simulation.privacy_budget import Account
from raydpfl.simulation.provenance import capability
from raydpfl.storage.run_files import Clock, Dropped, Pace
from raydpfl.storage.tables import StoredTable, schema

# The columns of every client, measured or not.
CLIENT_COLUMNS = ("client", "norm", "factor", "clipped", "train_loss")
ACTOR_COLUMNS = ("draw", "contribution")  # next to them, of what actors send
NO_CLIENTS: Columns = {
    "client": np.empty(0, np.int64),
    **{name: np.empty(0) for name in CLIENT_COLUMNS[1:]},
}
SHARES = (0.1, 0.5, 0.9)  # of the quantiles of norms
PHASES = ("account", "select", "collect", "server", "record", "evaluate")


def join_columns(results: Iterable[ChunkResult]) -> Columns:
    """The columns of all clients, in client order; empty columns if there are no results."""
    column_sets = [result.columns for result in results]
    if not column_sets:
        return NO_CLIENTS
    columns = {name: np.concatenate([row[name] for row in column_sets]) for name in column_sets[0]}
    order = np.lexsort((columns.pop("draw"), columns["client"]))
    if (order[1:] > order[:-1]).all():
        return columns
    return {name: values[order] for name, values in columns.items()}


def open_tables(plan: Plan, out: Path) -> dict[str, StoredTable]:
    """The tables of a run in its directory, by name."""
    columns = table_columns(plan)
    return {name: StoredTable(out, name, schema(names)) for name, names in columns.items()}


def table_columns(plan: Plan) -> dict[str, Sequence[str]]:
    """The columns of a run's tables, by their names. Raises `ConfigError` for a probe with a column
    or a table that is named as one of the run or of another probe.
    """
    experiment = plan.experiment
    probes = experiment.measure
    metric = experiment.evaluate.per_client
    noisy = experiment.noise.client_std(1.0, 1) > 0
    round_columns = [
        *("round", "cohort", "train_loss", *experiment.scores),
        *(column(name) for name in (plan.accountants if plan.mechanism else ())),
        *("bound", "noise_std", "clipped", "norm_mean", "norm_p10", "norm_p50", "norm_p90"),
        *("update_norm", "lr", "lost", "dropped", "actors", "replaced", "seconds_clients"),
        *(() if plan.lattice is None else ("wrapped",)),
    ]
    timings = [*(f"seconds_{phase}" for phase in PHASES), "seconds", "clients_per_second"]
    columns: dict[str, Sequence[str]] = {"rounds": [*round_columns, *timings]}
    if experiment.evaluate.histogram:
        columns["client_histogram"] = ["round", "low", "high", "count", "share"]
    elif metric:
        columns["client_scores"] = ["round", "client", metric.name]
    for rows in dict.fromkeys(
        metric_columns.score_set(name) for name in experiment.evaluation_scores
    ):
        for score_metric in experiment.metrics if rows != metric_columns.CLIENT else ():
            if score_metric.columns():
                columns[f"{rows}_{score_metric.name}"] = ["round", *score_metric.columns()]
    client_columns = [*CLIENT_COLUMNS, *(name for probe in probes for name in probe.columns(noisy))]
    taken_names = {*CLIENT_COLUMNS, *ACTOR_COLUMNS}, {*columns["rounds"]}, {*columns}
    for probe in probes:
        tables = probe.tables(client_columns)
        probe_names = (probe.columns(noisy), probe.values(), tables)
        for taken, names in zip(taken_names, probe_names, strict=True):
            _take_names(probe, names, taken)
        columns |= tables
    values = [name for probe in probes for name in probe.values()]
    return columns | {"rounds": [*round_columns, *values, *timings]}


def _take_names(probe: Probe, names: Iterable[str], taken: set[str]) -> None:
    """Adds a probe's names to those that are taken. Raises `ConfigError` for one that is."""
    for name in names:
        if name in taken:
            expected = f"one with no column or table {name}, as the run or another measure has it"
            raise ConfigError("measure", probe.kind, expected)
        taken.add(name)


class Recorder:
    """Writes the tables, checkpoints and other files of a run to the directory `out`.

    `tables` are those of `open_tables`, at the rounds that are done; the coordinator updates
    `state`; `survey` is `Coordinator.survey`.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        tables: dict[str, StoredTable],
        state: RunState,
        pool: Pool,
        problem: Problem,
        survey: Callable[[int, np.ndarray], np.ndarray],
    ):
        experiment = plan.experiment
        self.plan = plan
        self.out = out
        self.tables = tables
        self.rounds = tables["rounds"]
        self.state = state
        self.pool = pool
        self._survey = survey
        self.probes = experiment.measure
        self._client_rss = 0.0
        self._pace = Pace()
        # the score that may end the run, from the evaluation on at which it was best
        self._since_best: list[float | None] = []
        if experiment.evaluate.stop:
            for row in (
                self.rounds.arrow().select(["round", *experiment.evaluation_scores]).to_pylist()
            ):
                self._judge(row)
        self.drop_log = Dropped(out / "dropped.jsonl", state.t)
        followers = (probe.follow(out, plan.d, state.t) for probe in self.probes)
        self._followers = [follower for follower in followers if follower is not None]
        self.follow()
        assessors = ((probe, probe.assess(problem, out)) for probe in self.probes)
        self._assessors = [(probe, assess) for probe, assess in assessors if assess is not None]

    def follow(self) -> None:
        """Shows the probes the model."""
        for follower in self._followers:
            follower(self.state.t, self.state.model)

    def row(
        self, record: Round, results: list[ChunkResult], epsilons: Mapping[str, float]
    ) -> dict[str, Any]:
        """The row of a round, without its evaluation. Also writes the tables of the probes."""
        experiment = self.plan.experiment
        columns = record.columns
        row: dict[str, Any] = {"round": record.t, "cohort": len(columns["client"])}
        row |= {"train_loss": _mean(columns["train_loss"])}
        row |= dict.fromkeys(experiment.scores)
        row |= {column(name): epsilons[name] for name in epsilons}
        row["bound"] = experiment.bounding.sample_bound or record.bound
        # drawn at every client's local steps, there is none on the sum
        has_step_noise = self.plan.mechanism is not None and self.plan.mechanism.by_draws
        row["noise_std"] = None if has_step_noise else self.plan.sum_std(record.t, record.bound)
        row["clipped"] = _mean(columns["clipped"])
        row["norm_mean"] = _mean(columns["norm"])
        norms = _finite(columns["norm"])
        quantiles = np.quantile(norms, SHARES).tolist() if len(norms) else [None] * len(SHARES)
        row |= dict(zip(("norm_p10", "norm_p50", "norm_p90"), quantiles, strict=True))
        row["update_norm"] = math.sqrt(record.update.dot(record.update))
        row["lr"] = experiment.local.learning_rate(record.t)
        drops = sorted(drop for result in results for drop in result.dropped_updates)
        if drops:
            self.drop_log.append(record.t, drops)
        row |= {"dropped": len(drops), "replaced": self.pool.replaced}
        row["actors"] = self.pool.healthy
        row["seconds_clients"] = sum(result.seconds for result in results)
        self._client_rss = max([self._client_rss, *(result.peak_rss_mb for result in results)])
        for probe in self.probes:
            state = self.state.states[f"measure.{probe.kind}"]
            row |= _declared_values(probe, "round", probe.round(record, state))
            for name, probe_rows in probe.rows(record).items():
                self.tables[name].append(probe_rows)
        for probe, assess in self._assessors:
            row |= _declared_values(probe, "assess", assess(record.t, self.state.model))
        return row

    def finish_row(self, row: dict[str, Any], clock: Clock) -> dict[str, Any]:
        """Completes a row, with the evaluation of the model if this round has one, and keeps it."""
        clock.lap("record")
        state = self.state
        experiment = self.plan.experiment
        last = state.t == experiment.rounds
        if experiment.evaluation_scores and (last or state.t % experiment.evaluate.every == 0):
            self._evaluate(row)
        clock.lap("evaluate")
        row |= clock.seconds
        row["seconds"] = sum(clock.seconds.values())
        row["clients_per_second"] = row["cohort"] / (row["seconds"] - row["seconds_evaluate"])
        state.seconds += row["seconds"]
        self.follow()
        self.rounds.append({name: [value] for name, value in row.items()})
        self._judge(row)
        if last or self._pace.due():
            self.save(copies=last)
        return row

    def _judge(self, row: Mapping[str, Any]) -> None:
        """Takes up the score that may end the run, if this row has it; not that of a last round
        after which a run went on, as the same run at once has none there.
        """
        experiment = self.plan.experiment
        stop = experiment.evaluate.stop
        t = row["round"] + 1
        due = t % experiment.evaluate.every == 0 or t == experiment.rounds
        if stop and due and metric_columns.is_evaluated(row):
            scores = [*self._since_best, row[stop.metric]]
            self._since_best = metric_columns.since_best(scores, stop.sign(experiment.metrics))

    def _evaluate(self, row: dict[str, Any]) -> None:
        experiment = self.plan.experiment
        state = self.state
        batches = self.pool.evaluate(state.model, state.t, state.memory.own)
        totals = evaluation.totals(batches, experiment.metrics)
        scores = evaluation.set_scores(totals)
        metric = experiment.evaluate.per_client
        if metric:
            values = evaluation.client_values(batches, metric)
            scores |= self._client_scores(row["round"], metric, values)
        row |= scores
        divergence = metric_columns.divergence(scores)
        if divergence:
            raise RunError(f"{divergence} after round {row['round']}; lower server.lr or local.lr")
        for rows, metrics in totals.items():
            for metric, total in metrics:
                cells = metric.cells(total)
                if cells:
                    self.tables[f"{rows}_{metric.name}"].append(_round_rows(row["round"], cells))

    def _client_scores(self, t: int, metric: Metric, values: np.ndarray) -> dict[str, float | None]:
        """What the metric of every client, float64 [clients], comes to; also writes its table."""
        histogram = self.plan.experiment.evaluate.histogram
        if histogram is None:
            numbers = [value if np.isfinite(value) else None for value in values.tolist()]
            places = _round_rows(t, {"client": np.arange(len(values))})
            self.tables["client_scores"].append({**places, metric.name: numbers})
            return metric_columns.client_statistics(metric, values)
        counts = self._survey(t, values)
        shares = histogram.shares(counts)
        bins = {"low": histogram.edges[:-1], "high": histogram.edges[1:], "count": counts}
        bins["share"] = np.full(len(counts), np.nan) if shares is None else shares
        self.tables["client_histogram"].append(_round_rows(t, bins))
        return metric_columns.histogram_statistics(metric, histogram, counts)

    def stop_reason(self) -> str | None:
        """Why the run ends now (`evaluate.stop`), in words; None: it goes on."""
        stop = self.plan.experiment.evaluate.stop
        if stop is None or len(self._since_best) <= stop.patience:
            return None
        times = "evaluation" if stop.patience == 1 else "evaluations"
        score_name = metric_columns.score_label(stop.metric)
        return f"evaluate.stop: the {score_name} was no better for {stop.patience} {times}"

    def save(self, copies: bool = True) -> None:
        """Writes the tables and a checkpoint to disk, and to the store that `out` is a copy of;
        without `copies`, Parquet files only when due.
        """
        start_time = time.monotonic()
        tables = {name: table.flush() for name, table in self.tables.items()}
        checkpoint = Checkpoint(self.state, self.plan.origin(), tables)
        save(self.out / "checkpoints", checkpoint)
        storage.push(self.out)
        for table in self.tables.values() if copies else ():
            table.copy()
        self._pace.record_cost(time.monotonic() - start_time)

    def summary(self, account: Account) -> dict[str, Any]:
        """The summary of the run so far."""
        rows = self.rounds.arrow()
        names = self.plan.experiment.scores
        score_rows = rows.select(["round", *names]).to_pylist()
        clients = sum(rows["cohort"].to_pylist())
        state = self.state
        training = state.seconds - sum(rows["seconds_evaluate"].to_pylist())
        quantiles = account.write_guarantees(self.out, state.t, state.participations)
        summary: dict[str, Any] = {} if quantiles is None else {"epsilon_quantiles": quantiles}
        target = Shards.open(self.plan.shards).target
        if target.names:
            summary["class_names" if target.classes else "target_names"] = list(target.names)
        if sums := secure_sums(self.plan, rows):
            summary["secure_sums"] = sums
        if individual := self.plan.individual:
            summary["individual"] = individual.summary(state.states["individual"])
        guarantees = account.guarantees(state.t, state.participations)
        mechanism = self.plan.mechanism
        return summary | {
            "rounds": state.t,
            **metric_columns.last_scores(score_rows, names),
            **metric_columns.best_scores(score_rows, names, self.plan.experiment.metrics),
            "norm_mean": _norm_mean(rows),
            "model_sha256": hashlib.sha256(state.model.astype("<f4").tobytes()).hexdigest(),
            "parameters": self.plan.d,
            "population": len(self.plan.population),
            "seconds": state.seconds,
            "clients_per_second": clients / training if clients else 0.0,
            "peak_rss_mb": {"coordinator": peak_rss_mb(), "clients": self._client_rss},
            "seed": self.plan.experiment.seed,
            "precision": self.plan.experiment.client.precision,
            "capability": capability(),
            "repeated_rounds": self.plan.repeated,
            "noise_multiplier": mechanism.noise_multiplier if mechanism else None,
            "replaced_actors": self.pool.replaced,
            "sentences": brief_sentences(guarantees),
            "guarantees": [guarantee.to_dict() for guarantee in guarantees],
            "holds": [item.to_dict(curve=True) for item in tightest_guarantees(guarantees)],
        }


def secure_sums(plan: Plan, rows: pa.Table) -> dict[str, Any]:
    """How the sums of the `rows` of a run were taken, if of integers; else empty."""
    lattice, mechanism = plan.lattice, plan.mechanism
    if lattice is None or mechanism is None or mechanism.integer is None:
        return {}
    noise = plan.experiment.noise
    return {
        "bits": mechanism.integer.bits,
        "bits_sent": mechanism.integer.bits * plan.d,  # by a client in a round
        "step": lattice.step,  # over the largest norm of what a client sends
        "noise_steps": lattice.std,
        "sensitivity": math.sqrt(lattice.square) * lattice.step,  # likewise, after rounding
        "wrapped": sum(rows["wrapped"].to_pylist()),  # of rounds x parameters coordinates
        "repeatable": noise.repeatable,
    }


def _round_rows(t: int, columns: Columns) -> Columns:
    """Rows of a table, of round t."""
    count = len(next(iter(columns.values())))
    return {"round": np.full(count, t), **columns}


def _norm_mean(rows: pa.Table) -> float | None:
    """The mean norm of what clients would have sent unbounded, over all clients of all rounds (000
    sec. 4, where half of it is the bound); None where no client sent anything.
    """
    cohort, drop_counts, norms = (
        np.array(rows[name].to_pylist(), np.float64) for name in ("cohort", "dropped", "norm_mean")
    )
    sender_counts = cohort - drop_counts
    mask = sender_counts > 0
    return float(np.average(norms[mask], weights=sender_counts[mask])) if mask.any() else None


def _declared_values(
    probe: Probe, hook: str, values: Mapping[str, float | None]
) -> dict[str, float | None]:
    """What a hook of a probe gave for the rounds table. Raises `RunError` for what is not declared,
    or no number.
    """
    subject = f"measure {probe.kind}: {hook}"
    check_names(subject, values, probe.values())
    return {
        name: None if value is None else array_of(f"{subject}, of {name},", value, ()).item()
        for name, value in values.items()
    }


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _mean(values: np.ndarray) -> float | None:
    finite = _finite(values)
    return float(np.add.reduce(finite) / len(finite)) if len(finite) else None
