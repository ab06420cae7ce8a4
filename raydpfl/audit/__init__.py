"""An audit: does a run give the privacy that its accountants say it gives?

Canaries take the place of clients in runs of the experiment itself, present or absent (or their
opposites) by a coin. What an observer can tell about the coins bounds epsilon from below [2, 3] and
estimates it [1] (references in `bounds`). `checks` holds the noise and all else that is recorded
against what was accounted for.

>>> experiment = Experiment.from_dict({
...     "rounds": 1,
...     "data": {"kind": "synthetic", "clients": 500, "samples": 5,
...              "sizes": {"kind": "balanced"}, "test_samples": 10},
...     "model": {"kind": "mlp", "hidden": 100},
...     "selection": {"kind": "full"},
...     "bounding": {"kind": "clip", "bound": 1.0},
...     "noise": {"kind": "gaussian", "placement": "server", "epsilon": 4.0},
...     "privacy": {"accountants": ["pld"], "relation": "zero_out"},
... })
>>> report = audit(experiment, canaries=2000)
>>> (view,) = report.views
>>> report.runs, report.passed, 0.3 < view.lower / view.claimed.epsilon < 1
(4, True, True)

A population smaller than the number of canaries is run several times, on the same data with other
seeds: independent runs, together one mechanism, as private for a canary as one run. A lower bound
is usually far below the claim; it shows that privacy is no better than that. What is not audited is
in every verdict (`Audit.unseen`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from raydpfl import storage
from raydpfl.audit import checks, client_canaries, local_step_canaries, observers
from raydpfl.audit.checks import Check
from raydpfl.audit.observers import ObserverAudit
from raydpfl.audit.privacy_curve import ClaimDelta
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment
from raydpfl.privacy import rigorous
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.resolution import resolve
from raydpfl.storage.run_files import make_folder, replace_file, write_json
from raydpfl.storage.tables import write_table

__all__ = ["Audit", "Check", "ObserverAudit", "audit"]

WORTH_HAVING = 1000  # the fewest canaries for a useful bound
# of the noise's energy, or of free guesses per canary: what may weaken an audit unremarked
CROWD = 0.1
# what no audit looks at
TRAINING = (
    "what clients train, in whose place canaries are, and the code that adds up updates while it "
    "trains them"
)
SECRETS = "whether seeds, cohorts and noise stay secret, and the generator behind them"
PLACES = (
    "actors and other machines, as an audit runs in one process, and what floating point gives "
    "away below the grid of the sums"
)


@dataclass(frozen=True)
class Audit:
    """A view for every rigorous guarantee of the run, and the checks."""

    views: list[ObserverAudit]
    checks: list[Check]
    runs: int
    seed: int
    unseen: tuple[str, ...]  # what was not looked at
    notes: tuple[str, ...] = ()  # what weakens the audit

    @property
    def failures(self) -> list[str]:
        """The checks that failed, with what they have found."""
        return [f"{check.name}: {check.finding}" for check in self.checks if not check.passed]

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the claims."""
        return not self.failures and not any(view.refuted or view.exceeded for view in self.views)

    @property
    def verdict(self) -> str:
        """The outcome in plain sentences, with what was looked at and what was not."""

        def claimed(view: ObserverAudit) -> str:
            claim = view.claimed
            return f"epsilon {claim.epsilon:.4g} is claimed against an observer of {claim.observer}"

        refutations = [view for view in self.views if view.refuted]
        excesses = [view for view in self.views if view.exceeded]
        problems = []
        if self.failures:
            faults = "; ".join(self.failures)
            problems.append(f"what ran is not what was accounted for ({faults})")
        if refutations:
            view = max(refutations, key=lambda view: view.proven / view.claimed.epsilon)
            proof = f"the canaries prove at least {view.lower:.4g}"
            if view.lower <= view.claimed.epsilon:
                proof = "the canaries refute its trade-off curve, and those for epsilon below "
                proof += f"{view.lower_of_curve:.4g}"
            problems.append(f"the claim is false: {claimed(view)}, and {proof}")
        elif excesses:
            view = max(excesses, key=lambda view: view.estimate.epsilon / view.claimed.epsilon)
            scores = f"the canaries' scores look like {view.estimate}"
            problems.append(f"the claim is in doubt: {claimed(view)}, and {scores}")
        unseen = f"Not looked at: {'; '.join(self.unseen)}."
        if problems:
            text = ", and ".join(problems)
            return f"{text[0].upper()}{text[1:]}. {unseen}"
        view = max(self.views, key=lambda view: view.lower / view.claimed.epsilon)
        names = ", ".join(check.name for check in self.checks)
        return (
            f"Of what was looked at ({names}) nothing speaks against the claims: {claimed(view)}, "
            f"the canaries prove {view.lower:.4g} and their scores look like {view.estimate}, and "
            f"all {len(self.checks)} checks pass. {unseen}"
        )

    @property
    def false_alarm(self) -> dict[str, float]:
        """How often sound runs are suspected, at most, by what suspects them."""
        tests = sum(check.false_alarm for check in self.checks)
        tests += len(self.views) * observers.FALSE_ALARM
        return {"checks and estimates": tests, "each lower bound": 1 - self.views[0].confidence}

    def to_dict(self) -> dict[str, Any]:
        """As `audit.json` has it."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            "runs": self.runs,
            "seed": self.seed,
            "not_looked_at": list(self.unseen),
            "notes": list(self.notes),
            "false_alarm": self.false_alarm,
            "views": [view.to_dict() for view in self.views],
            "checks": [asdict(check) for check in self.checks],
        }

    def scores(self) -> pa.Table:
        """A row per observer and canary that it has a score of; `view` is the observer's place."""
        lengths = [len(view.inside) for view in self.views]
        inside = np.concatenate([view.inside for view in self.views])
        scores = np.concatenate([view.statistics for view in self.views])
        places = np.repeat(np.arange(len(self.views)), lengths)
        return pa.table({"view": places, "inside": inside.astype(np.int8), "score": scores})

    def text(self) -> str:
        """The report, for a terminal."""
        lines = []
        for view in self.views:
            claim = view.claimed
            estimate = view.estimate
            lines += [
                f"{claim.observer} ({claim.sampling})",
                f"  claimed    epsilon {claim.epsilon:.4g} at delta {claim.delta:g} for one "
                f"{claim.unit}, {claim.relation}, by {claim.accountant}",
                f"  proven     at least {view.lower:.4g}, with confidence {view.confidence:.0%}: "
                f"of {view.canaries} canaries {view.guesses} are guessed, {view.right} right; "
                f"all right would prove {view.reach:.4g}",
            ]
            if view.lower_of_curve is not None:
                lines.append(
                    f"  refuted    the claimed trade-off curve, at noise for epsilon "
                    f"{view.lower_of_curve:.4g} and less, with the same confidence"
                )
            lines.append(f"  estimated  {estimate}")
            if claim.relation != "replace_one":
                lines[-1] += (
                    f"; with variances as fitted {estimate.forward:.4g} one direction and "
                    f"{estimate.backward:.4g} the other"
                )
        lines += [check.line() for check in self.checks]
        return "\n".join([*lines, *(f"note: {note}." for note in self.notes), self.verdict])


def audit(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    canaries: int = 2000,
    confidence: float = 0.95,
    delta: float | None = None,
    data_root: str | Path | None = None,
    on_round: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Audits an experiment, in this process, whatever `client.actors` says. Raises `ConfigError` if
    it claims nothing, or cannot be audited.

    Args:
        experiment: is run as often as the canaries need.
        out: a new or empty directory for `audit.json`, `scores.parquet` and `config.yaml`, which
            `raydpfl report` draws, or its address; None: no files are written.
        canaries: how many; at least 1000 for a useful bound.
        confidence: of a lower bound.
        delta: of the comparison; None: the run's own. Above 1 / (10 canaries) bounds are weak.
        data_root: the folder of data sets.
        on_round: is called with the rounds done, and of how many.
    """
    with result_folder(out) as write:
        _check(experiment, canaries, confidence, delta)
        # without Ray, and without measures, some of which train clients again
        client = experiment.client.model_copy(update={"actors": 0})
        inline_experiment = experiment.model_copy(update={"client": client, "measure": ()})
        plan = resolve(inline_experiment, Path(data_root) if data_root else None)
        # another release than the run's own
        plan = replace(plan, platform={**plan.platform, "audit": "canaries"})
        assert plan.mechanism is not None  # else nothing is claimed; see `_check`
        if plan.experiment.noise.laplace:
            expected = "gaussian noise: canaries are scored along directions of normal noise"
            raise ConfigError("noise.kind", experiment.noise.kind, expected)
        if plan.lattice is not None:
            expected = "gaussian noise: the directions of canaries are not rounded to integers"
            raise ConfigError("noise.kind", experiment.noise.kind, expected)
        run = _audit_samples if plan.mechanism.by_draws else _audit_clients
        report = run(plan, canaries, delta or plan.experiment.terms.delta, confidence, on_round)
        write(plan, report.to_dict(), report.scores())
    return report


@contextmanager
def result_folder(
    out: str | Path | None,
) -> Iterator[Callable[[Plan, dict[str, Any], pa.Table | None], None]]:
    """Within, a function that writes the plan's config, `audit.json` and `scores.parquet` (None:
    none) to `out`, a directory or its address; None: no files are written. Raises `ConfigError`
    for a directory that is not empty.
    """
    with nullcontext() if out is None else storage.open_folder(out) as folder:
        if folder is not None:
            folder_exists = folder.exists()
            if folder_exists and (not folder.is_dir() or any(folder.iterdir())):
                raise ConfigError("--out", str(folder), "a new or empty directory")
            make_folder(folder)  # refused before anything is trained

        def write(plan: Plan, results: dict[str, Any], scores: pa.Table | None) -> None:
            if folder is None:
                return
            config = plan.experiment.to_yaml().encode()
            replace_file(folder / "config.yaml", lambda file: file.write(config))
            if scores is not None:
                write_table(folder / "scores.parquet", scores)
            write_json(folder / "audit.json", results)

        try:
            yield write
        finally:
            if folder is not None and not folder_exists and not any(folder.iterdir()):
                folder.rmdir()


def _check(e: Experiment, canaries: int, confidence: float, delta: float | None) -> None:
    if not e.private:
        expected = "gaussian: without noise nothing is claimed, and there is nothing to audit"
        raise ConfigError("noise.kind", e.noise.kind, expected)
    if not rigorous(e.privacy.accountants):
        expected = "pld or rdp among them: an audit holds a run against a rigorous claim"
        raise ConfigError("privacy.accountants", list(e.privacy.accountants), expected)
    if e.noise.stands_for is not None:
        expected = "none: the clients that it stands for do not run, and cannot be audited"
        raise ConfigError("noise.virtual_cohort", e.noise.stands_for, expected)
    if e.privacy.individual is not None:
        expected = "none in an audit, whose canaries send as much as the bound in every round"
        raise ConfigError("privacy.individual", str(e.privacy.individual), expected)
    if e.selection.asks:
        expected = "one that does not look at losses: a canary has none that would be its own"
        raise ConfigError("selection.kind", e.selection.kind, expected)
    if canaries < 10:
        expected = "at least 10; 1000 and more for a bound worth having"
        raise ConfigError("canaries", canaries, expected)
    if not 0.5 <= confidence < 1:
        raise ConfigError("confidence", confidence, "a number from 0.5, below 1")
    if delta is not None and not 0 < delta < 1:
        raise ConfigError("delta", delta, "a number between 0 and 1, both excluded")


def _audit_clients(
    plan: Plan, canaries: int, delta: float, confidence: float, on_round: Callable[[int, int], None]
) -> Audit:
    """By as many runs as are needed, in which some or all clients are canaries."""
    runs = client_canaries.runs(plan, canaries, on_round)
    views = observers.audit_observers(plan, runs, delta, confidence)
    deltas = observers.delta_lower_bounds(runs, views)
    unseen = (*runs[0].unreleased(), TRAINING)
    crowd = max(share for run in runs for share in run.crowds)
    return _audit(plan, len(runs), views, checks.check_runs(runs), deltas, unseen, crowd)


def _audit_samples(
    plan: Plan, canaries: int, delta: float, confidence: float, on_round: Callable[[int, int], None]
) -> Audit:
    """By one run, in which every sample of some clients is a canary."""
    run = local_step_canaries.run(plan, canaries, delta, on_round)
    view = run.view(delta, confidence)
    deltas = run.delta_lower_bounds([view.claimed, *run.printed])
    unseen = (*run.unreleased(), *run.unseen())
    return _audit(plan, 1, [view], [checks.ledger([run]), run.check_steps()], deltas, unseen)


def _audit(
    plan: Plan,
    runs: int,
    views: list[ObserverAudit],
    results: list[Check],
    claim_deltas: Sequence[ClaimDelta],
    unseen: tuple[str, ...],
    crowd: float = 0.0,
) -> Audit:
    """The audit with the check of `claim_deltas`, and in words what no view and no check looked at,
    and what weakens it. `crowd`: energy of a round's canaries over that of its noise.
    """
    assert plan.mechanism is not None  # else nothing is claimed; see `_check`
    results += filter(None, [checks.curve(claim_deltas)])
    unseen = (*unseen, SECRETS, PLACES)
    if any(delta_bound is None for _, delta_bound in claim_deltas):
        unseen += ("the epsilons that a user-defined sampling scheme is given",)
    if not plan.mechanism.by_draws and "cohorts" not in {check.name for check in results}:
        unseen += ("how cohorts are drawn",)
    elif not plan.mechanism.by_draws and plan.mechanism.hidden:
        unseen += ("how cohorts are drawn, but for their sizes and how often each client is in",)
    if any(view.claimed.kind == "unproven" for view in views):
        unseen += ("what its guarantees call not proved",)
    claim_exclusions = (exclusion for view in views for exclusion in view.claimed.exclusions)
    notes = []
    if views[0].canaries < WORTH_HAVING:
        notes.append(f"{views[0].canaries} canaries prove little; {WORTH_HAVING} are worth having")
    if crowd > CROWD:
        notes.append(
            f"the canaries of a round carry {crowd:.2g} of the energy of its noise and hide one "
            "another, so that estimates come out low"
        )
    if any(view.claimed.delta * view.canaries > CROWD for view in views):
        notes.append(
            f"at delta {views[0].claimed.delta:g} so many guesses may come true for free that "
            "bounds are weak; a smaller --delta helps"
        )
    coverage_gaps = (*unseen, *dict.fromkeys(claim_exclusions))
    return Audit(views, results, runs, plan.experiment.seed, coverage_gaps, tuple(notes))
