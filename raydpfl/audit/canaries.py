"""A run with canaries, and what an observer of the run sees of them.

Canaries take the place of clients (`client_canaries`) or of samples (`local_step_canaries`): each
is one of two things by a coin, and all else is the code of every run. Clients run in this process,
and a contribution (`raydpfl.simulation.client.contribution`) is observed client by client.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import numpy as np
import torch

from raydpfl.core.messages import ChunkResult
from raydpfl.data import RowReader
from raydpfl.errors import BudgetError, ConfigError
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.pool import InlinePool
from raydpfl.training.backends.base import Block

Rows = tuple[np.ndarray, np.ndarray]
"""x float32 [n, *shape] and y [n]."""

ROUNDING = 1e-6  # relative: what float64 and the sums' grid may differ by


class CanaryRun(Coordinator):
    """A coordinator, inline, whose run has canaries; it keeps neither rows nor checkpoints."""

    rounds: list[int]  # that were released
    end_reason = ""  # why it ended before its last round, in words

    def start(self) -> tuple[int, list[str]]:
        pid_and_warnings = super().start()
        assert isinstance(self.pool, InlinePool)
        self.pool.client = self.clients()
        self.rounds = []
        self._snapshots: list[tuple[int, int, bytes]] = []  # (round, ledger bytes, last line)
        return pid_and_warnings

    def clients(self) -> ClientActor:
        """What trains the clients."""
        return CanaryActor(self)

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        text = self._ledger_text()
        self._snapshots.append((t, len(text), text.splitlines()[-1] if text else b""))
        self.rounds.append(t)
        return super().collect(t, cohort)

    def plant(self, actor: ClientActor) -> None:
        """Puts canaries in the place of what a client actor reads."""

    def blocks(self, contribution: Contribution, state: ChunkRound) -> Iterator[Block]:
        """The updates of a chunk's clients, canaries among them."""
        return contribution.training.blocks(state, state.chunk.members)

    def sent(self, state: ChunkRound, block: Block, vector: torch.Tensor) -> None:
        """Takes note of what the client of a block adds to the sum, float64 [d]."""
        raise NotImplementedError

    def run_epsilons(self) -> Mapping[str, float]:
        """By accountant, the epsilon that the whole run spends."""
        raise NotImplementedError

    def accounted_stds(self) -> Mapping[int, float]:
        """By round, the std that the ledger should have; empty: no round's noise has one."""
        return {}

    def find_ledger_fault(self) -> str:
        """What the ledger lacks, has wrong or had too late, in words; empty: nothing."""
        text = self._ledger_text()
        entries = {entry["round"]: entry for entry in map(json.loads, text.splitlines())}
        missing_rounds = sorted(set(self.rounds) - entries.keys())
        if missing_rounds:
            return f"round {missing_rounds[0]} was released and is not in the ledger"
        for t, std in self.accounted_stds().items():
            recorded_std = entries[t]["std"]
            if not np.isclose(recorded_std, std, rtol=ROUNDING, atol=0):
                record_text = f"round {t} is recorded with noise of std {recorded_std:.6g}"
                return f"{record_text}; the accountants have {std:.6g}"
        last_epsilons = entries[max(entries)]["epsilon"]
        for name, epsilon in self.run_epsilons().items():
            if float(last_epsilons[name]) < epsilon * (1 - ROUNDING):
                cost_text = f"{len(self.rounds)} rounds spend {epsilon:.6g}"
                return f"epsilon {last_epsilons[name]:.6g} is recorded ({name}) where {cost_text}"
        for t, size, line in self._snapshots:
            if not line or json.loads(line)["round"] < t:
                return f"round {t} began before it was in the ledger"
            if not text[:size].endswith(line + b"\n"):
                return f"the ledger of round {t} was changed after that round had started"
        return ""

    def finished(self) -> None:
        """Ends the run. What is needed of its files and clients is read now."""
        guarantees = self.accounts.guarantees(self.state.t, self.state.participations)
        self.printed = [guarantee for guarantee in guarantees if guarantee.unit != "person"]
        self.ledger_fault = self.find_ledger_fault()
        self.pool.close()
        del self.pool, self.record, self.problem

    def unreleased(self) -> tuple[str, ...]:
        """The rounds that it ended before, in words."""
        rounds = self.experiment.rounds
        words = f"the last {rounds - len(self.rounds)} of {rounds} rounds ({self.end_reason})"
        return (words,) if self.end_reason else ()

    def _ledger_text(self) -> bytes:
        path = self.ledger.path
        return path.read_bytes() if path.exists() else b""


class OtherRows(RowReader):
    """A reader of rows that replaces those of some clients: `replacement_rows` gives x and y of all
    rows of a client, or None to leave them.
    """

    def __init__(self, reader: RowReader, replacement_rows: Callable[[int], Rows | None]):
        self._reader = reader
        self._replacement_rows = replacement_rows

    def rows(self, client: int, row_indices: np.ndarray | None) -> Rows:
        rows = self._replacement_rows(client)
        if rows is None:
            return self._reader.rows(client, row_indices)
        x, y = rows
        return rows if row_indices is None else (x[row_indices], y[row_indices])

    def release(self) -> None:
        self._reader.release()


R = TypeVar("R", bound=CanaryRun)


def execute_run(
    run: Callable[..., R], on_round: Callable[[int, int], None], offset: int, total: int
) -> R:
    """A whole run, or up to the end of its budget, in a directory of its own. `on_round` is called
    with the rounds done, after `offset` rounds of earlier runs, and with `total`, the rounds of all
    runs. Raises `ConfigError` where the budget is not enough for a round.
    """
    with tempfile.TemporaryDirectory(prefix="raydpfl-audit-") as out:
        canary_run = run(out=out)
        canary_run.start()
        for t in range(canary_run.experiment.rounds):
            try:
                canary_run.round()
            except BudgetError as error:
                if t == 0:
                    budget = canary_run.experiment.privacy.budget
                    expected = f"one that is enough for a round, to audit any ({error})"
                    raise ConfigError("privacy.budget", budget, expected) from None
                canary_run.end_reason = str(error)
                break
            on_round(offset + t + 1, total)
        canary_run.finished()
    return canary_run


class CanaryActor(ClientActor):
    """The clients of a run with canaries."""

    def __init__(self, run: CanaryRun):
        super().__init__(run.experiment, str(run.plan.shards))
        self.run = run
        run.plant(self)

    def contribution(self, state: ChunkRound) -> Contribution:
        return ObservedContribution(super().contribution(state), self.run)


class ObservedContribution(Contribution):
    """Another contribution, client by client, as the observer of a run sees it."""

    def __init__(self, contribution: Contribution, run: CanaryRun):
        super().__init__(contribution.training)
        self.contribution = contribution
        self.run = run

    def blocks(self, state: ChunkRound) -> Iterator[Block]:
        for block in self.run.blocks(self, state):
            yield from block.singles()

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        vector = torch.zeros_like(total)
        self.contribution.add(state, block, vector)
        total += vector
        self.run.sent(state, block, vector)
