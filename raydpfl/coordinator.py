"""The coordinator: one private federated run, round by round.

A round, as `Coordinator.round` reads: select the cohort, account for it (the ledger first: spending is on disk before
anything is released), broadcast the model and take up the exact sum of what the clients send, step the server, measure,
record. The model after round t is a function of (experiment, seed, t) alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from raydpfl import models
from raydpfl.client import Partial, Work, peak_rss_mb
from raydpfl.data import Shards
from raydpfl.errors import RunError
from raydpfl.noise import query_noise, server_noise
from raydpfl.placement import Actors, Inline, lanes
from raydpfl.plan import Plan
from raydpfl.privacy import Guarantee, Ledger, check_budget
from raydpfl.selection import Cohort
from raydpfl.server import grid, snap
from raydpfl.tracking import Checkpoint, Pace, Table, load, save


class Coordinator:
    """Runs the rounds of a plan in the directory `out`. `actors`: 0 inline, or how many client actors to start.

    With `resume` it goes on from the newest checkpoint in `out`, or from the start when there is none.
    """

    def __init__(self, plan: Plan, out: str, actors: int, resume: bool = False, path: tuple[str, ...] = ()):
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.plan, self.experiment, self.out = plan, plan.experiment, Path(out)
        self._actors, self._resume = actors, resume

    def start(self) -> None:
        """Takes up the run where it stands and starts its clients. Raises `RunError` for a run directory that contradicts itself."""
        plan, shards = self.plan, str(self.plan.shards)
        self.shards = Shards.open(plan.shards)
        self.ledger = Ledger(self.out / "ledger.jsonl", resume=self._resume)
        self.table, self.client_table = Table(self.out / "rounds.parquet"), Table(self.out / "clients.parquet")
        self.curves = plan.curves()
        self._begin(load(self.out / "checkpoints") if self._resume else None)
        per_client = self.experiment.client.actors == "per-client"
        self.pool = Actors(self.experiment, shards, self._actors, per_client) if self._actors else Inline(self.experiment, shards)
        self._pending: tuple[dict, Any] | None = None  # a row that waits for its evaluation
        self._pace, self._client_rss = Pace(), 0.0

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        experiment = self.experiment
        if checkpoint:
            self.next, self.model, self.state, self.bound = checkpoint.round, checkpoint.model, checkpoint.server, checkpoint.bound
            self.seconds, self.participations = checkpoint.seconds, Counter(dict(checkpoint.participations.tolist()))
            if checkpoint.origin != self.plan.origin():
                raise RunError(f"the run was started with {checkpoint.origin} and cannot go on with {self.plan.origin()}: its bits would differ")
            if self.plan.mechanism and self.ledger.spent().rounds < self.next:
                raise RunError(f"the ledger has {self.ledger.spent().rounds} rounds and the checkpoint {self.next}: what this run has spent is unknown")
            self.table.resume(self.next)
            if len(self.table.rows) < self.next:
                raise RunError(f"{self.table.path} does not hold all rounds below {self.next}, which the checkpoint counts on")
            if experiment.measure.clients:
                self.client_table.resume(self.next)
            return
        module = models.build(experiment.model, self.shards.shape, self.shards.classes, experiment.seed)
        self.next, self.model = 0, models.flatten(module).numpy()
        self.state, self.bound = experiment.server.start(self.plan.d), experiment.bounding.initial_bound
        self.seconds, self.participations = 0.0, Counter()

    def round(self) -> list[dict]:
        """Does the next round and returns the rows of the rounds table that are now complete."""
        began, t = time.perf_counter(), self.next
        cohort = self.experiment.selection.draw(self.experiment.seed, t, self.plan.population)
        self.account(t)
        total, partials = self.collect(t, cohort)
        update = self.aggregate(t, total)
        self.model = self.experiment.server.step(self.model.astype(np.float64), update, self.state, t)
        row = self.measure(t, cohort, partials, update)
        self.bound = self.next_bound(t, cohort, partials)
        self.participations.update(cohort.clients.tolist())
        self.next = t + 1
        return self.record(row, began)

    def account(self, t: int) -> None:
        """Writes this round's spending ahead of it; raises `BudgetError` instead when the run may not spend that."""
        spent = {name: float(curve[t]) for name, curve in self.curves.items()}
        if self.experiment.privacy.budget is not None:
            check_budget(t, spent, {self.plan.accountant: self.experiment.privacy.budget})
        if self.plan.mechanism:
            self.ledger.record(
                round=t,
                mechanism=self.plan.mechanism.digest(),
                bound=self.bound,
                std=self.plan.sum_std(self.bound),
                count_std=self.plan.count_std,
                delta=self.experiment.noise.delta,
                epsilon=spent,
            )

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[Partial]]:
        """Broadcasts the model; the exact sum of the cohort's contributions, float64 [d], and each actor's account of them."""
        sizes = np.asarray(self.shards.sizes[cohort.clients])
        weights = self.experiment.weights.of(sizes, self.plan.samples, self.plan.population)
        cut = lanes(cohort.clients, cohort.draws, weights, sizes, self.experiment.client.lane)
        shares = self.pool.shares(cut)
        std, bound = self.plan.client_std(self.bound), self.bound
        work = Work(t, bound, std, grid(len(cohort), None if bound is None else bound * self.plan.weight, std))
        partials: list[Partial] = [None] * len(shares)  # by share: nothing depends on the order of arrival
        total = np.zeros(self.plan.d)
        for index, partial in self.pool.run(self.model, work, shares):
            partials[index] = partial
            if not self.pool.per_client:
                total += partial.total
        if self.pool.per_client:  # one client each: the lanes' sums are formed here, in client order
            for start in range(0, len(shares), self.experiment.client.lane):
                lane = np.zeros(self.plan.d)
                for partial in partials[start : start + self.experiment.client.lane]:
                    lane += partial.total
                total += snap(lane, work.grid)
        return total, partials

    def aggregate(self, t: int, total: np.ndarray) -> np.ndarray:
        """The mean update, float64 [d], from the sum of the contributions."""
        if self.experiment.noise.placement == "server" and self.plan.ratio:
            total = total + server_noise(self.experiment.seed, t, self.plan.sum_std(self.bound), len(total))
        mean = total / self.experiment.selection.divisor(self.plan.population)
        if self.experiment.bounding.sends == "model":
            return mean - self.model
        return mean * self.experiment.local.learning_rate(t) if self.experiment.bounding.scaling == "gradient" else mean

    def next_bound(self, t: int, cohort: Cohort, partials: list[Partial]) -> float | None:
        """The bound of the coming round; an adaptive one moves by the noised share of clients below the present one."""
        if not self.experiment.bounding.adaptive:
            return self.bound
        seed, std = self.experiment.seed, self.plan.count_std
        r = self.experiment.selection.divisor(self.plan.population)
        norms = [norm for partial in partials for norm in partial.norms]
        # Each client gives its indicator minus 1/2; a client that failed has a NaN norm and gives 0.
        count = sum(0.5 if norm <= self.bound else -0.5 for norm in norms if np.isfinite(norm))
        if self.experiment.noise.placement == "server":
            count += query_noise(seed, t, std)
        else:  # in client order, whoever trained them
            drawn = zip(cohort.clients.tolist(), cohort.draws.tolist(), strict=True)
            count += sum(query_noise(seed, t, std / math.sqrt(r), client, draw) for client, draw in drawn)
        return self.experiment.bounding.next_bound(self.bound, min(max(count / r + 0.5, 0.0), 1.0))

    def measure(self, t: int, cohort: Cohort, partials: list[Partial], update: np.ndarray) -> dict:
        """The row of this round, and the rows of its clients when they are asked for."""
        def gather(name: str) -> np.ndarray:
            return np.array([value for partial in partials for value in getattr(partial, name)], float)

        norms, factors, losses = gather("norms"), gather("factors"), gather("losses")
        finite = norms[np.isfinite(norms)]
        row: dict[str, Any] = {"round": t, "cohort": len(cohort), "train_loss": _mean(losses[np.isfinite(losses)])}
        row |= {"test_loss": None, "test_accuracy": None}
        row |= {f"epsilon_{name}": float(curve[t]) for name, curve in self.curves.items()}
        row |= {"bound": self.bound, "noise_std": self.plan.sum_std(self.bound), "clipped": _mean(factors < 1.0)}
        row |= {f"norm_p{q}": float(np.quantile(finite, q / 100)) if len(finite) else None for q in (10, 50, 90)}
        row |= {"update_norm": float(np.linalg.norm(update)), "lr": self.experiment.local.learning_rate(t)}
        with open(self.out / "dropped.jsonl", "a") if any(partial.dropped for partial in partials) else nullcontext() as file:
            for client, detail in (each for partial in partials for each in partial.dropped):
                file.write(json.dumps({"round": t, "client": client, "detail": detail}) + "\n")
        row |= {"dropped": sum(len(partial.dropped) for partial in partials), "actors": self.pool.healthy, "replaced": self.pool.replaced}
        row["seconds_clients"] = sum(partial.seconds for partial in partials)
        self._client_rss = max([self._client_rss, *(partial.peak_rss_mb for partial in partials)])
        if self.experiment.measure.clients:
            who = [client for partial in partials for client in partial.clients]
            columns = zip(who, norms.tolist(), factors.tolist(), losses.tolist(), strict=True)
            self.client_table.rows += [{"round": t, "client": c, "norm": n, "factor": f, "train_loss": loss} for c, n, f, loss in columns]
        return row

    def record(self, row: dict, began: float) -> list[dict]:
        """Sends the model off to be evaluated, takes up the evaluation before it, and keeps what is complete."""
        complete = self._settle()
        last = self.next == self.experiment.rounds
        if last or self.next % self.experiment.evaluate.every == 0:
            self._pending = row, self.pool.evaluate(self.model)
        row["seconds"] = time.perf_counter() - began
        row["clients_per_second"] = row["cohort"] / row["seconds"]
        self.seconds += row["seconds"]
        self.table.rows.append(row)
        complete += [] if self._pending else [row]
        return complete + (self.save() if last or self._pace.due() else [])

    def _settle(self) -> list[dict]:
        if not self._pending:
            return []
        row, handle = self._pending
        self._pending = None
        row["test_loss"], row["test_accuracy"] = self.pool.evaluation(handle)
        return [row]

    def save(self) -> list[dict]:
        """Puts the tables and a checkpoint of all that decides the coming rounds on disk; the row that this completed, if any."""
        began = time.monotonic()
        complete = self._settle()
        self.table.flush()
        if self.experiment.measure.clients:
            self.client_table.flush()
        seen = np.array(sorted(self.participations.items()), np.int64).reshape(-1, 2)
        save(self.out / "checkpoints", Checkpoint(self.next, self.model, self.state, self.bound, self.seconds, seen, self.plan.origin()))
        self._pace.took(time.monotonic() - began)
        return complete

    def finish(self, status: str, save: bool) -> dict:
        """Stops the clients and sums up the run, having saved it if asked to (a round that was broken off must not be)."""
        if save:
            self.save()
        self.pool.close()
        evaluated = next((row for row in reversed(self.table.rows) if row["test_accuracy"] is not None), {})
        clients = sum(row["cohort"] for row in self.table.rows)
        return {
            "status": status,
            "rounds": self.next,
            "test_accuracy": evaluated.get("test_accuracy"),
            "test_loss": evaluated.get("test_loss"),
            "model_sha256": hashlib.sha256(self.model.astype("<f4").tobytes()).hexdigest(),
            "parameters": self.plan.d,
            "population": self.plan.population,
            "seconds": self.seconds,
            "clients_per_second": clients / self.seconds if self.seconds else 0.0,
            "peak_rss_mb": {"coordinator": peak_rss_mb(), "clients": self._client_rss},
            "seed": self.experiment.seed,
            "noise_multiplier": self.plan.ratio,
            "replaced_actors": self.pool.replaced,
            "guarantees": [guarantee.to_dict() for guarantee in self.guarantees()],
        }

    def guarantees(self) -> list[Guarantee]:
        """What holds for all that the ledger has recorded, rounds that a crash cut off and that were not done again included."""
        rounds, seen = max(self.next, self.ledger.spent().rounds), self.participations.copy()
        for t in range(self.next, rounds):
            seen.update(self.experiment.selection.draw(self.experiment.seed, t, self.plan.population).clients.tolist())
        return self.plan.guarantees(rounds, seen)

    def parameters(self) -> np.ndarray:
        """The model, flat float32 [d]."""
        return self.model

    def position(self) -> int:
        """How many rounds are done."""
        return self.next


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
