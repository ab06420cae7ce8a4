"""What a run spends: checked against the budget and written to the ledger before every round, and
turned into guarantees at the end.
"""

import math
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from raydpfl.errors import RunError
from raydpfl.privacy import Guarantee, Ledger, check_budget, column, rigorous
from raydpfl.privacy.guarantee import SHARES
from raydpfl.privacy.release_report import LocalStepsReport, row_quantiles
from raydpfl.simulation.plan import Plan
from raydpfl.storage.tables import schema, write_table

FRESH_NOISE = (
    "--resume --fresh-noise goes on with noise of its own, and rounds released before count twice"
)
UNKNOWN_SPENDING = "what this run has spent is unknown"


class Account:
    """The ledger of a run, and every accountant's epsilons for it."""

    def __init__(self, plan: Plan, ledger: Ledger):
        self.plan = plan
        self.ledger = ledger
        self.draws = plan.counted_draws()  # the clients of all releases, where these are counted
        self.curves = plan.curves(self.draws)

    def epsilons(self, t: int) -> dict[str, float]:
        """Epsilon after round t, by accountant."""
        return {name: float(curve[t]) for name, curve in self.curves.items()}

    def spend(self, t: int, bound: float | None) -> None:
        """Writes the spending of round t, with this bound (None: nothing is bounded), to the ledger
        ahead of it. Raises `BudgetError` where the run may not spend that; nothing is written.
        """
        epsilons = self.epsilons(t)
        budget = self.plan.experiment.privacy.budget
        if budget is not None:
            accountant = min(self.plan.rigorous_accountants, key=epsilons.__getitem__)
            check_budget(t, epsilons, {accountant: budget})
        if self.plan.mechanism:
            release = self._release(t, bound, present=True)
            self.ledger.record(t=t, restart=self.plan.restart, epsilon=epsilons, **release)

    def _release(self, t: int, bound: float | None, present: bool) -> dict[str, Any]:
        """The ledger's line of a release; only the `present` segment has a key of its noise."""
        plan = self.plan
        assert plan.mechanism is not None
        release: dict[str, Any] = {"mechanism": plan.mechanism.round_digest(), "bound": bound}
        release["std"] = plan.sum_std(t, bound)
        release |= {f"{name}_std": std * plan.factor(t) for name, std in plan.side_stds.items()}
        if plan.mechanism.survey:
            release["survey_std"] = plan.mechanism.survey.std if plan.has_survey(t) else 0.0
        if loss_query := plan.experiment.selection.loss_query:
            release["loss_std"] = loss_query.std
        release["delta"] = plan.experiment.terms.delta
        return release | ({"key": self.plan.noise_key} if present else {})

    def verify(self, rounds: int, bound: float | None) -> None:
        """Raises `RunError` unless the `rounds` of a checkpoint are in the ledger as this plan
        releases them. `bound` is in force in the coming round.
        """
        if self.plan.mechanism and self.ledger.spending().rounds < rounds:
            ledger_text = f"the ledger has {self.ledger.spending().rounds} rounds"
            raise RunError(f"{ledger_text} and the checkpoint {rounds}: {UNKNOWN_SPENDING}")
        for entry in self.ledger.entries:
            self._verify(entry, rounds, bound)

    def _verify(self, entry: dict[str, Any], rounds: int, bound: float | None) -> None:
        t = entry["round"]
        # whether the line is of the segment that goes on, under the present key of the noise
        present = entry.get("restart", 0) == self.plan.restart
        if self.plan.experiment.bounding.adapts and not (t == rounds and present):
            bound = entry.get("bound")  # computed for the coming round alone
            if not (isinstance(bound, float) and 0 < bound < math.inf):
                raise RunError(f"the ledger has bound {bound} for round {t}: {UNKNOWN_SPENDING}")
        planned_entry = self._release(t, bound, present)
        stored_entry = {name: entry.get(name) for name in planned_entry}
        if stored_entry == planned_entry:
            return
        key = next(name for name in planned_entry if stored_entry[name] != planned_entry[name])
        text = f"{key} {stored_entry[key]} for round {t}, where this run has {planned_entry[key]}"
        reason = f"; {FRESH_NOISE}" if key == "key" else ""
        raise RunError(f"the ledger has {text}: {UNKNOWN_SPENDING}{reason}")

    def guarantees(self, rounds: int, participations: Counter) -> list[Guarantee]:
        """What holds for everything in the ledger, rounds that a crash cut off included.
        `participations`: how often every client was drawn in the rounds that are done.
        """
        ledger_counts = self._ledger_counts(rounds, participations)
        guarantees = self.plan.guarantees(*ledger_counts)
        if ledger_counts[0] == rounds and not self.plan.history:  # else the chosen are unknown
            guarantees += self.plan.of_the_chosen(rounds, participations)
        return guarantees

    def _ledger_counts(self, rounds: int, participations: Counter) -> tuple[int, Counter]:
        ledger_rounds = max(rounds, self.ledger.spending().rounds)
        asks_losses = self.plan.experiment.selection.asks
        # who might have been chosen does not depend on the data
        if ledger_rounds > rounds or self.plan.history or asks_losses:
            return ledger_rounds, self.plan.participations(ledger_rounds)
        return ledger_rounds, participations.copy()

    def write_guarantees(
        self, out: Path, rounds: int, participations: Counter
    ) -> dict[str, list[Any]] | None:
        """Writes every client's own guarantee to guarantees.parquet. Returns quantiles of epsilon
        over the clients, by accountant; None: clients have no guarantees of their own.
        """
        mechanism = self.plan.mechanism
        if mechanism is None or not mechanism.by_draws:
            return None
        _, draw_counts = self._ledger_counts(rounds, participations)
        rows = cast(LocalStepsReport, self.plan.report).client_table(draw_counts)
        table = pa.Table.from_pylist(rows, schema(rows[0] if rows else ()))
        write_table(out / "guarantees.parquet", table)
        names = rigorous(self.plan.accountants)
        quantiles = {name: row_quantiles(rows, column(name)) for name in names}
        return {"at": list(SHARES)} | {
            name: [value if math.isfinite(value) else "infinity" for value in values]
            for name, values in quantiles.items()
        }
