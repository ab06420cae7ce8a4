"""The coordinator: one private federated run, round by round.

A round, as `Coordinator.round` reads: account for it (the ledger first: spending is on disk before
anything is released), select the cohort, broadcast the model and take up the exact sum of what the
clients send, step the server, measure, record. On hardware of one kind the model after round t is a
function of (experiment, seed, t) alone.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raydpfl import measures, models, origin
from raydpfl.client import Lane, Partial, Work, peak_rss_mb
from raydpfl.data import Shards
from raydpfl.errors import RunError
from raydpfl.heterogeneity import Heterogeneity
from raydpfl.placement import Actors, Inline, lanes
from raydpfl.plan import Plan
from raydpfl.privacy import (
    Guarantee,
    Ledger,
    check_budget,
    column,
    holding,
    rigorous,
)
from raydpfl.privacy.guarantee import SHARES
from raydpfl.selection import Cohort
from raydpfl.selection.witness import Witness, fingerprint
from raydpfl.sums import grid, snap
from raydpfl.tables import Table, schema, write_table
from raydpfl.tracking import (
    Checkpoint,
    Clock,
    Dropped,
    Pace,
    Trajectory,
    load,
    save,
)

log = logging.getLogger("raydpfl")

ANEW = (
    "--resume --fresh-noise goes on with noise of its own, and rounds released before count twice"
)


class Coordinator:
    """Runs the rounds of a plan in the directory `out`. `actors`: 0 inline, or how many client
    actors to start.

    With `resume` it goes on from the newest checkpoint in `out`, or from the start when there is
    none. With `anew` it goes on under fresh noise, so that code, versions and processor may be
    others than those it began with.
    """

    def __init__(
        self,
        plan: Plan,
        out: str,
        actors: int,
        resume: bool = False,
        path: tuple[str, ...] = (),
        anew: bool = False,
    ):
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.plan = plan
        self.experiment = plan.experiment
        self.out = Path(out)
        self._actors = actors
        self._resume = resume
        self._anew = anew
        self._heterogeneity: Heterogeneity | None = None

    def start(self) -> None:
        """Takes up the run where it stands and starts its clients. Raises `RunError` for a run
        directory that contradicts itself.
        """
        shards = str(self.plan.shards)
        self.shards = Shards.open(self.plan.shards)
        self.ledger = Ledger(self.out / "ledger.jsonl", resume=self._resume)
        self.table = Table(self.out, "rounds", schema(self._round_columns()))
        self.client_table = Table(self.out, "clients", schema(self._client_columns()))
        checkpoint = None
        if self._resume:
            checkpoint = load(self.out / "checkpoints", self._flaw, self._most())
        anew = (checkpoint.round if checkpoint else 0) if self._anew else None
        self.plan = plan = self.plan.continued(self.ledger.segments, anew)
        self.noise_seed = plan.noise_seed
        self._noise = self.experiment.noise.source(plan.noise_seed, plan.d)
        by_draws = plan.mechanism is not None and plan.mechanism.by_draws
        draws = plan.draws(self.experiment.rounds) if by_draws else None
        self.curves = plan.curves(draws)
        self._begin(checkpoint)
        self.dropped = Dropped(self.out / "dropped.jsonl", self.next)
        self.witness = self._witness(draws)
        # what the bits depend on, on disk before anything is released
        if self._anew or not self.next:
            self._snapshot()
        self.trajectory = None
        if self.experiment.measure.trajectory:
            self.trajectory = Trajectory(self.out / "trajectory.bin", plan.d, self.next)
            self.trajectory.write(self.next, self.model)
        per_client = self.experiment.client.actors == "per-client"
        capability = origin.of_capability(plan.platform)
        # which may be a worker of Ray's, under other settings than the run's
        origin.check_node(platform.node(), capability)
        if self._actors:
            self.pool = Actors(self.experiment, shards, self._actors, per_client, capability)
        else:
            self.pool = Inline(self.experiment, shards)
        self._pending: tuple[dict, Any] | None = None  # a row that waits for its evaluation
        self._pace = Pace()
        self._client_rss = 0.0
        self._snr = None

    def started(self) -> tuple[int, list[str]]:
        """As `start`; the id of this process, and what that warned of, which the log of an actor
        would keep to itself.
        """
        heard: list[str] = []
        listener = logging.Handler(logging.WARNING)
        listener.emit = lambda record: heard.append(record.getMessage())
        log.addHandler(listener)
        try:
            self.start()
        finally:
            log.removeHandler(listener)
        return os.getpid(), heard

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        experiment = self.experiment
        if checkpoint:
            self.next = checkpoint.round
            self.model = checkpoint.model
            self.bound = checkpoint.bound
            self.state = checkpoint.server
            self.remembered = checkpoint.kept
            self.seconds = checkpoint.seconds
            self.participations = Counter(dict(checkpoint.participations.tolist()))
            self.memory = dict(zip(checkpoint.members.tolist(), checkpoint.memory, strict=True))
            self._same_origin(checkpoint.origin)
            if self.plan.mechanism and self.ledger.spent().rounds < self.next:
                raise RunError(
                    f"the ledger has {self.ledger.spent().rounds} rounds and the checkpoint {self.next}: what this run has spent is unknown"
                )
            self._verify_ledger()
            for name, table in self._tables().items():
                table.resume(checkpoint.tables[name])
            return
        self.next, self.model = 0, models.flatten(self._module()).numpy()
        self.state = experiment.server.start(self.plan.d)
        self.bound = experiment.bounding.initial_bound
        # the server's part of what clients remember, and the last update where it is measured
        self.remembered: dict[str, np.ndarray] = {}
        self.seconds = 0.0
        self.participations = Counter()
        # what clients keep from one of their rounds to the next, float32 [d] each
        self.memory: dict[int, np.ndarray] = {}
        if experiment.stateful:
            self.remembered["shared"] = np.zeros(self.plan.d)

    def _tables(self) -> dict[str, Table]:
        """The tables of this run, by their names in a checkpoint."""
        clients = {"clients": self.client_table} if self.experiment.measure.clients else {}
        return {"rounds": self.table, **clients}

    def _round_columns(self) -> list[str]:
        names = ["round", "cohort", "train_loss", "test_loss", "test_accuracy"]
        names += [column(name) for name in (self.plan.named if self.plan.mechanism else ())]
        names += ["bound", "noise_std", "clipped", "norm_p10", "norm_p50", "norm_p90"]
        names += ["update_norm", "lr", "lost", "dropped", "actors", "replaced", "seconds_clients"]
        if self.experiment.measure.bounding:
            names += measures.BOUNDING
        phases = ("account", "select", "collect", "server", "record", "evaluate")
        names += [f"seconds_{phase}" for phase in phases]
        return [*names, "seconds", "clients_per_second"]

    def _client_columns(self) -> list[str]:
        names = ["round", "client", "norm", "factor", "clipped", "train_loss"]
        measure = self.experiment.measure
        if measure.bounding:
            names += ["bounded_norm", "angle"]
            names += ["expected_norm"] if measure.repeats else []
            names += ["noise_norm"] if self.experiment.noise.placement == "client" else []
        return names

    def _most(self) -> int:
        """Bytes that a checkpoint of this run has at most."""
        d = self.plan.d
        clients = len(self.plan.population)
        arrays = len(self.experiment.server.start(d)) + 2  # shared and previous
        remembered = clients if self.experiment.stateful else 0
        return (1 << 22) + d * (4 + 8 * arrays + 4 * remembered) + 24 * clients

    def _flaw(self, found: Checkpoint) -> str | None:
        """Why this run cannot go on from a checkpoint; None: it can. Raises what a broken table
        makes its reader raise.
        """
        rows = {name: table.read(found.tables[name]) for name, table in self._tables().items()}
        if not _sound(rows["rounds"], found.round):
            return "its rows are not those of rounds"
        bounding = self.experiment.bounding
        state = self.experiment.server.start(self.plan.d)
        if not bounding.adaptive and found.bound != bounding.initial_bound:
            return f"its bound is {found.bound}, not {bounding.initial_bound}"
        if bounding.adaptive and not (type(found.bound) is float and 0 < found.bound < math.inf):
            return f"its bound is {found.bound}"
        return found.flaw(self.plan.d, len(self.plan.population), self.experiment.rounds, state)

    def _same_origin(self, stored: dict[str, str]) -> None:
        """Raises `RunError` where the run began with something else that its bits depend on."""
        now = self.plan.origin()
        if self._anew:  # the same mechanism on the same data, by whatever code
            kept = ("experiment", "data", "clients", "cohorts", "mechanism")
            stored, now = (
                {name: facts[name] for name in kept if name in facts} for facts in (stored, now)
            )
        changed = origin.differences(stored, now)
        if changed and self._anew:
            raise RunError(f"the run cannot go on, as it would be another: {changed}")
        if changed:
            raise RunError(
                f"the run cannot go on as it began, as its bits would differ: {changed}; {ANEW}"
            )

    def _verify_ledger(self) -> None:
        """Raises `RunError` unless the rounds that the checkpoint counts on are recorded as this
        plan releases them.
        """
        for entry in self.ledger.entries:
            t = entry["round"]
            bound = self.bound
            if self.experiment.bounding.adaptive and not (t == self.next and self._present(entry)):
                bound = entry.get("bound")  # known of the coming round alone
                if not (isinstance(bound, float) and 0 < bound < math.inf):
                    raise RunError(
                        f"the ledger has bound {bound} for round {t}: what this run has spent is unknown"
                    )
            planned = self._release(bound, self._present(entry))
            stored = {name: entry.get(name) for name in planned}
            if stored != planned:
                other = next(name for name in planned if stored[name] != planned[name])
                what = f"{other} {stored[other]} for round {t}, where this run has {planned[other]}"
                way = f"; {ANEW}" if other == "key" else ""
                raise RunError(f"the ledger has {what}: what this run has spent is unknown{way}")

    def _present(self, entry: dict) -> bool:
        """Whether a line of the ledger is of the segment that goes on, under the present key of the
        noise.
        """
        return entry.get("again", 0) == self.plan.again

    def _witness(self, draws: list[np.ndarray] | None) -> Witness:
        """What looks at every draw; `draws`: those of all releases, where the accountants counted
        these.
        """
        plan = self.plan
        noise = self.experiment.noise
        selection = self.experiment.selection
        least = noise.least(plan.survivors)
        exposures = plan.exposures + max(plan.repeated, 0)
        plan.check_law()
        secret = plan.mechanism is not None and not plan.mechanism.by_draws
        apart = noise.apart()
        planned = None
        if draws is not None:
            present = draws[len(draws) - (self.experiment.rounds - plan.first) :]
            planned = {t: fingerprint(clients) for t, clients in enumerate(present, plan.first)}
        witness = Witness(selection, plan.population, exposures, least, secret, apart, planned)
        for t in range(self.next if selection.asks else 0):
            witness.asked(selection.exposed(plan.cohort_seed(), t, plan.population))
        for t in range(max(0, self.next - apart + 1), self.next):
            witness.took(selection.exposed(plan.cohort_seed(), t, plan.population))
        return witness

    def _module(self) -> torch.nn.Module:
        return models.build(
            self.experiment.model, self.shards.shape, self.shards.classes, self.experiment.seed
        )

    def round(self) -> list[dict]:
        """Does the next round and returns the rows of the rounds table that are now complete."""
        t = self.next
        clock = Clock()
        self.account(t)
        clock.lap("account")
        cohort = self.select(t)
        clock.lap("select")
        total, partials = self.collect(t, cohort)
        clock.lap("collect")
        update = self.aggregate(t, cohort, self.release(t, total))
        self.model = self.experiment.server.step(
            self.model.astype(np.float64), update, self.state, t
        )
        clock.lap("server")
        row = self.measure(t, cohort, partials, update)
        self.bound = self.next_bound(t, cohort, partials)
        self.participations.update(cohort.clients.tolist())
        self.next = t + 1
        return self.record(row, clock)

    def select(self, t: int) -> Cohort:
        """The cohort of the round."""

        def ask(clients: np.ndarray) -> np.ndarray:
            self.witness.asks(t, clients)
            return self.pool.losses(self.model, t, clients, self.noise_seed)

        seed = self.plan.cohort_seed()
        cohort = self.experiment.selection.draw(seed, t, self.plan.population, ask)
        self.witness.see(t, cohort, self.participations)
        return cohort

    def account(self, t: int) -> None:
        """Writes this round's spending ahead of it; raises `BudgetError` instead when the run may
        not spend that.
        """
        spent = {name: float(curve[t]) for name, curve in self.curves.items()}
        if self.experiment.privacy.budget is not None:
            least = min(self.plan.rigorous, key=spent.__getitem__)
            check_budget(t, spent, {least: self.experiment.privacy.budget})
        if self.plan.mechanism:
            self.ledger.record(
                t=t, again=self.plan.again, epsilon=spent, **self._release(self.bound)
            )

    def _release(self, bound: float | None, present: bool = True) -> dict[str, Any]:
        """What the ledger says of a round's release, besides its number; the key of its noise where
        that is the `present` one.
        """
        plan = self.plan
        release = {"mechanism": plan.mechanism.digest(), "bound": bound, "std": plan.sum_std(bound)}
        release["count_std"] = plan.count_std
        asked = self.experiment.selection.loss_query
        if asked:
            release["loss_std"] = asked.std
        release["delta"] = self.experiment.noise.delta
        if present:
            release["key"] = hashlib.sha256(str(self.noise_seed).encode()).hexdigest()[:16]
        return release

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[Partial]]:
        """Broadcasts the model; the exact sum of the cohort's contributions, float64 [d], and each
        actor's account of them.
        """
        clients = cohort.clients
        shared = self.remembered.get("shared") if self.experiment.local.stateful else None
        sizes = self.experiment.local.rows_used(self.plan.population.sizes[clients])
        cut = lanes(
            cohort,
            self.plan.weights(clients),
            sizes,
            self.experiment.client.lane,
            self.plan.step_stds(clients),
        )
        cut = [replace(lane, memory=self._remembered(lane)) for lane in cut] if self.memory else cut
        broadcast = (
            self.model if shared is None else np.stack([self.model, shared.astype(np.float32)])
        )
        shares = self.pool.shares(cut)
        std = self.plan.client_std(self.bound)
        bound = self.bound
        reach = grid(len(cohort), None if bound is None else bound * self.plan.weight, std)
        work = Work(
            t, self.plan.seed, self.noise_seed, bound, std, reach, self.remembered.get("previous")
        )
        # by share: nothing depends on the order of arrival
        partials: list[Partial] = [None] * len(shares)
        total = np.zeros(self.plan.d)
        for index, partial in self.pool.run(broadcast, work, shares):
            partials[index] = partial
            if not self.pool.per_client:
                total += partial.total
        # one client each: the lanes' sums are formed here, in client order
        if self.pool.per_client:
            for start in range(0, len(shares), self.experiment.client.lane):
                lane = np.zeros(self.plan.d)
                for partial in partials[start : start + self.experiment.client.lane]:
                    lane += partial.total
                total += snap(lane, work.grid)
        self._remember(partials)
        return total, partials

    def _remembered(self, lane: Lane) -> dict[int, np.ndarray]:
        return {
            slot: self.memory[client]
            for slot, client in enumerate(lane.clients.tolist())
            if client in self.memory
        }

    def _remember(self, partials: list[Partial]) -> None:
        """Keeps what the clients will know in their next round; for one that was drawn several
        times, all its changes add up.
        """
        kept: dict[int, list[np.ndarray]] = {}
        for partial in partials:
            # no memory at all, where clients keep none
            for client, memory in zip(partial.clients, partial.memory, strict=False):
                kept.setdefault(client, []).append(memory)
        for client, each in kept.items():
            own = self.memory.get(client, np.float32(0.0))
            self.memory[client] = (
                each[0]
                if len(each) == 1
                else (
                    np.sum(each, axis=0, dtype=np.float64) - (len(each) - 1) * np.float64(own)
                ).astype(np.float32)
            )

    def release(self, t: int, total: np.ndarray) -> np.ndarray:
        """The sum of the contributions as it is released, float64 [d]: with the server's noise,
        where the server draws any.
        """
        noise = self._noise.on_sum(t, self.plan.sum_std(self.bound))
        if noise is None:
            return total
        self._snr = (
            float(np.linalg.norm(total) / np.linalg.norm(noise))
            if self.experiment.measure.bounding
            else None
        )
        return total + noise

    def aggregate(self, t: int, cohort: Cohort, total: np.ndarray) -> np.ndarray:
        """The mean update, float64 [d], from the released sum of the contributions."""
        experiment = self.experiment
        lr = self.experiment.local.learning_rate(t)
        mean = total / self.plan.divisor
        # the mean of what all clients remember, followed by what was sent of it
        if experiment.bounding.stateful:
            self.remembered["shared"] += (
                experiment.bounding.beta / len(self.plan.population) * total
            )
            mean = self.remembered["shared"]
        if experiment.bounding.sends == "model":
            return mean - self.model
        mean = mean * lr if experiment.bounding.scaling == "gradient" else mean
        if experiment.local.stateful and len(cohort):
            share = len(cohort) / len(self.plan.population)
            self.remembered["shared"] = experiment.local.next_shared(
                self.remembered["shared"], mean * (self.plan.divisor / len(cohort)), lr, share
            )
        return mean

    def next_bound(self, t: int, cohort: Cohort, partials: list[Partial]) -> float | None:
        """The bound of the coming round; an adaptive one moves by the noised share of clients below
        the present one.
        """
        if not self.experiment.bounding.adaptive:
            return self.bound
        seed = self.noise_seed
        std = self.plan.count_std
        r = self.experiment.selection.counted(cohort, self.plan.population)
        if not r:
            return self.bound
        norms = [norm for partial in partials for norm in partial.norms]
        # Each client gives its indicator minus 1/2; a client that failed has a NaN norm and gives
        # 0.
        count = sum(0.5 if norm <= self.bound else -0.5 for norm in norms if np.isfinite(norm))
        who = cohort.clients, cohort.draws
        count += self.experiment.noise.on_query(seed, t, std, *who, self.plan.survivors)
        bound = self.experiment.bounding.next_bound(self.bound, min(max(count / r + 0.5, 0.0), 1.0))
        if not 0 < bound <= 1e15:
            raise RunError(
                f"the adaptive bound left its range ({bound:g} after round {t}); lower bounding.lr"
            )
        return bound

    def measure(self, t: int, cohort: Cohort, partials: list[Partial], update: np.ndarray) -> dict:
        """The row of this round, and the rows of its clients when they are asked for."""

        def gather(name: str) -> np.ndarray:
            return np.array(
                [value for partial in partials for value in getattr(partial, name)], float
            )

        norms = gather("norms")
        clipped = gather("clipped")
        losses = gather("losses")
        finite = norms[np.isfinite(norms)]
        row: dict[str, Any] = {
            "round": t,
            "cohort": len(cohort),
            "train_loss": _mean(losses[np.isfinite(losses)]),
        }
        row |= {"test_loss": None, "test_accuracy": None}
        row |= {column(name): float(curve[t]) for name, curve in self.curves.items()}
        # of the sum; at steps each client has its own
        std = None if self.experiment.noise.placement == "step" else self.plan.sum_std(self.bound)
        row |= {
            "bound": self.experiment.bounding.sample_bound or self.bound,
            "noise_std": std,
            "clipped": _mean(clipped[np.isfinite(clipped)]),
        }
        row |= {
            f"norm_p{q}": float(np.quantile(finite, q / 100)) if len(finite) else None
            for q in (10, 50, 90)
        }
        row |= {
            "update_norm": float(np.linalg.norm(update)),
            "lr": self.experiment.local.learning_rate(t),
        }
        dropped = [each for partial in partials for each in partial.dropped]
        if dropped:
            self.dropped.append(t, dropped)
        row |= {
            "lost": cohort.lost,
            "dropped": len(dropped),
            "actors": self.pool.healthy,
            "replaced": self.pool.replaced,
        }
        row["seconds_clients"] = sum(partial.seconds for partial in partials)
        self._client_rss = max([self._client_rss, *(partial.peak_rss_mb for partial in partials)])
        measured: dict[str, np.ndarray] = {}
        if self.experiment.measure.bounding:
            for name in dict.fromkeys(name for partial in partials for name in partial.measured):
                measured[name] = np.array(
                    [value for partial in partials for value in partial.measured[name]]
                )
            row |= measures.of_bounding(norms, self.bound, measured) | (
                {"snr": self._snr} if self._snr else {}
            )
            self.remembered["previous"] = update.astype(np.float32)
        if self.experiment.measure.clients:
            columns = {
                "client": gather("clients").astype(int),
                "norm": norms,
                "factor": gather("factors"),
                "clipped": clipped,
                "train_loss": losses,
            }
            columns |= measured
            self.client_table.append({"round": np.full(len(norms), t), **columns})
        return row

    def record(self, row: dict, clock: Clock) -> list[dict]:
        """Sends the model off to be evaluated, takes up the evaluation before it, and keeps what is
        complete.
        """
        clock.lap("record")
        complete = self._settle()
        last = self.next == self.experiment.rounds
        if last or self.next % self.experiment.evaluate.every == 0:
            self._pending = row, self.pool.evaluate(self.model)
        clock.lap("evaluate")
        row |= clock.seconds
        row["seconds"] = sum(clock.seconds.values())
        row["clients_per_second"] = row["cohort"] / (row["seconds"] - row["seconds_evaluate"])
        self.seconds += row["seconds"]
        if self.trajectory:
            self.trajectory.write(self.next, self.model)
        complete += [] if self._pending else [self._keep(row)]
        return complete + (self.save(copies=last) if last or self._pace.due() else [])

    def _keep(self, row: dict) -> dict:
        """Appends a row that is complete to the rounds table."""
        self.table.append({name: [value] for name, value in row.items()})
        return row

    def _settle(self) -> list[dict]:
        if not self._pending:
            return []
        row, handle = self._pending
        self._pending = None
        loss, accuracy = self.pool.evaluation(handle)
        if not math.isfinite(loss):
            raise RunError(
                f"the test loss is {loss} after round {row['round']}; lower server.lr or local.lr"
            )
        row["test_loss"], row["test_accuracy"] = loss, accuracy
        return [self._keep(row)]

    def save(self, copies: bool = True) -> list[dict]:
        """Puts the tables and a checkpoint of all that decides the coming rounds on disk; the row
        that this completed, if any. Without `copies` the Parquet files are written when due.
        """
        began = time.monotonic()
        complete = self._settle()
        self._snapshot()
        for table in self._tables().values() if copies else ():
            table.copy()
        self._pace.took(time.monotonic() - began)
        return complete

    def _snapshot(self) -> None:
        tables = {name: table.flush() for name, table in self._tables().items()}
        seen = np.array(sorted(self.participations.items()), np.int64).reshape(-1, 2)
        members = np.array(sorted(self.memory), np.int64)
        memory = np.zeros((0, self.plan.d), np.float32)
        if len(members):
            memory = np.stack([self.memory[client] for client in members.tolist()])
        held = (self.next, self.model, self.state, self.bound, self.seconds, seen, members, memory)
        save(
            self.out / "checkpoints", Checkpoint(*held, self.plan.origin(), tables, self.remembered)
        )

    def finish(self, status: str, save: bool) -> dict:
        """Stops the clients and sums up the run, having saved it if asked to (a round that was
        broken off must not be).
        """
        if save:
            self.save()
        self.pool.close()
        found = {}
        rows = self.table.arrow()
        evaluated = rows.filter(rows["test_loss"].is_valid())
        last = evaluated.slice(max(0, len(evaluated) - 1)).to_pylist()
        clients = sum(rows["cohort"].to_pylist())
        evaluating = sum(rows["seconds_evaluate"].to_pylist())
        quantiles = self._per_client()
        if quantiles is not None:
            found["epsilon_quantiles"] = quantiles
        guarantees = self.guarantees()
        return found | {
            "status": status,
            "rounds": self.next,
            "test_accuracy": last[0]["test_accuracy"] if last else None,
            "test_loss": last[0]["test_loss"] if last else None,
            "model_sha256": hashlib.sha256(self.model.astype("<f4").tobytes()).hexdigest(),
            "parameters": self.plan.d,
            "population": len(self.plan.population),
            "seconds": self.seconds,
            "clients_per_second": clients / (self.seconds - evaluating) if clients else 0.0,
            "peak_rss_mb": {"coordinator": peak_rss_mb(), "clients": self._client_rss},
            "seed": self.experiment.seed,
            "capability": origin.capability(),
            "repeated_rounds": self.plan.repeated,
            "noise_multiplier": self.plan.noise_multiplier,
            "replaced_actors": self.pool.replaced,
            "guarantees": [guarantee.to_dict() for guarantee in guarantees],
            "holds": [guarantee.to_dict() for guarantee in holding(guarantees)],
        }

    def measure_heterogeneity(self, seconds: float = 1.0) -> tuple[int, int]:
        """Goes on with `measure.heterogeneity` for about so long; how many of how many steps are
        done.
        """
        if self._heterogeneity is None:
            linear = self.experiment.local.linear()
            decay = linear.decay if linear is not None else 0.0
            self._heterogeneity = Heterogeneity(self._module(), self.shards, self.model, decay)
        return self._heterogeneity.advance(seconds)

    def heterogeneity(self) -> dict:
        """What it came to, for the summary; each client's part goes to heterogeneity.parquet."""
        found = self._heterogeneity.result()
        rows = found.pop("clients")
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(self.out / "heterogeneity.parquet", table)
        return found

    def guarantees(self) -> list[Guarantee]:
        """What holds for all that the ledger has recorded, rounds that a crash cut off and that
        were not done again included.
        """
        return self.plan.guarantees(*self._recorded())

    def _recorded(self) -> tuple[int, Counter]:
        rounds = max(self.next, self.ledger.spent().rounds)
        seen = self.participations.copy()
        # who might have been chosen does not depend on the data
        if rounds > self.next or self.plan.history or self.experiment.selection.asks:
            seen = self.plan.participations(rounds)
        return rounds, seen

    def _per_client(self) -> dict[str, list[float]] | None:
        """Writes every client's own guarantee to guarantees.parquet; quantiles of epsilon over the
        clients by accountant, for the summary. None where no client has a guarantee of its own.
        """
        mechanism = self.plan.mechanism
        if mechanism is None or not mechanism.by_draws:
            return None
        accountants = self.plan.named
        _, seen = self._recorded()
        rows = mechanism.table(seen, accountants)
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(self.out / "guarantees.parquet", table)
        quantiles = {
            name: mechanism.quantiles(name, seen).tolist() for name in rigorous(accountants)
        }
        return {"at": list(SHARES)} | {
            name: [value if np.isfinite(value) else "infinity" for value in values]
            for name, values in quantiles.items()
        }

    def parameters(self) -> np.ndarray:
        """The model, flat float32 [d]."""
        return self.model

    def position(self) -> int:
        """How many rounds are done."""
        return self.next


def _sound(rows: pa.Table, rounds: int) -> bool:
    """Whether these can be the rows of so many rounds, from 0 on."""
    if rows["round"].to_pylist() != list(range(rounds)):
        return False
    known = ("cohort", "seconds_evaluate")
    if any(rows[name].null_count for name in known):
        return False
    numbers = (rows[name].drop_null() for name in (*known, "test_loss", "test_accuracy"))
    return all(np.isfinite(column.to_numpy()).all() for column in numbers)


def _mean(values: np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None
