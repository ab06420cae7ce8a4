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
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.client.actor import ClientActor
from raydpfl.simulation.client.actor_round import ChunkRound
from raydpfl.simulation.client.contribution import Contribution
from raydpfl.simulation.coordinator import Coordinator
from raydpfl.simulation.pool import Inline
from raydpfl.training.backends.base import Block

Rows = tuple[np.ndarray, np.ndarray]
"""x float32 [n, *shape] and y [n]."""

ROUNDING = 1e-6  # relative: what float64 and the sums' grid may differ by


class CanaryRun(Coordinator):
    """A coordinator, inline, whose run has canaries; it keeps neither rows nor checkpoints."""

    rounds: list[int]  # that were released

    def start(self) -> tuple[int, list[str]]:
        started = super().start()
        assert isinstance(self.pool, Inline)
        self.pool.client = self.clients()
        self.rounds = []
        self._recorded: list[tuple[int, int, bytes]] = []  # (round, bytes of the ledger, last line)
        return started

    def clients(self) -> ClientActor:
        """What trains the clients."""
        return CanaryActor(self)

    def collect(self, t: int, cohort: Cohort) -> tuple[np.ndarray, list[ChunkResult]]:
        text = self._ledger_text()
        self._recorded.append((t, len(text), text.splitlines()[-1] if text else b""))
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

    def spent(self) -> Mapping[str, float]:
        """By accountant, the epsilon that the whole run spends."""
        raise NotImplementedError

    def accounted_stds(self) -> Mapping[int, float]:
        """By round, the std that the ledger should have; empty: no round's noise has one."""
        return {}

    def misrecorded(self) -> str:
        """What the ledger lacks, has wrong or had too late, in words; empty: nothing."""
        text = self._ledger_text()
        entries = {entry["round"]: entry for entry in map(json.loads, text.splitlines())}
        missing = sorted(set(self.rounds) - entries.keys())
        if missing:
            return f"round {missing[0]} was released and is not in the ledger"
        for t, std in self.accounted_stds().items():
            written = entries[t]["std"]
            if not np.isclose(written, std, rtol=ROUNDING, atol=0):
                wrong = f"round {t} is recorded with noise of std {written:.6g}"
                return f"{wrong}; the accountants have {std:.6g}"
        last = entries[max(entries)]["epsilon"]
        for name, truth in self.spent().items():
            if float(last[name]) < truth * (1 - ROUNDING):
                spent = f"{len(self.rounds)} rounds spend {truth:.6g}"
                return f"epsilon {last[name]:.6g} is recorded ({name}) where {spent}"
        for t, size, line in self._recorded:
            if not line or json.loads(line)["round"] < t:
                return f"round {t} began before it was in the ledger"
            if not text[:size].endswith(line + b"\n"):
                return f"the ledger of round {t} was changed after that round had started"
        return ""

    def finished(self) -> None:
        """Ends the run. What is needed of its files and clients is read now."""
        held = self.accounts.guarantees(self.state.t, self.state.participations)
        self.printed = [one for one in held if one.unit != "person"]
        self.misrecording = self.misrecorded()
        self.pool.close()
        del self.pool, self.record, self.problem

    def _ledger_text(self) -> bytes:
        path = self.ledger.path
        return path.read_bytes() if path.exists() else b""


class OtherRows(RowReader):
    """A reader of rows, with others for those of some clients: of those that `others` has any for,
    x and y of all rows.
    """

    def __init__(self, reader: RowReader, others: Callable[[int], Rows | None]):
        self._reader = reader
        self._others = others

    def rows(self, client: int, picked: np.ndarray | None) -> Rows:
        rows = self._others(client)
        if rows is None:
            return self._reader.rows(client, picked)
        x, y = rows
        return rows if picked is None else (x[picked], y[picked])

    def release(self) -> None:
        self._reader.release()


R = TypeVar("R", bound=CanaryRun)


def carried_out(
    run: Callable[..., R], on_round: Callable[[int, int], None], done: int, of: int
) -> R:
    """A whole run, in a directory of its own. `on_round` is called with the rounds done, after
    `done` of earlier runs, and of how many.
    """
    with tempfile.TemporaryDirectory(prefix="raydpfl-audit-") as out:
        made = run(out=out)
        made.start()
        for t in range(made.experiment.rounds):
            made.round()
            on_round(done + t + 1, of)
        made.finished()
    return made


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

    def __init__(self, observed: Contribution, run: CanaryRun):
        super().__init__(observed.training)
        self.observed = observed
        self.run = run

    def blocks(self, state: ChunkRound) -> Iterator[Block]:
        for block in self.run.blocks(self, state):
            yield from block.singles()

    def add(self, state: ChunkRound, block: Block, total: torch.Tensor) -> None:
        sent = torch.zeros_like(total)
        self.observed.add(state, block, sent)
        total += sent
        self.run.sent(state, block, sent)
