"""Privacy: what a run releases, what that costs, and how much noise a budget needs.

A `Mechanism` describes the releases; accountants read it and nothing else:

>>> query = Query("update", bound=1.0, std=4.0)
>>> mechanism = Mechanism(Sampling("fixed", population=1920, cohort=80), (query,), rounds=100)
>>> round(epsilon(mechanism, "replace_one", delta=1e-5, accountant="pld"), 3)
0.984
>>> epsilon_curve(mechanism, "replace_one", delta=1e-5, rounds=3).round(4)
array([0.1479, 0.1813, 0.2065])
>>> draws = Mechanism(Sampling("with_replacement", 100, 10), (query,), rounds=10)
>>> covers("rdp", draws, "replace_one")
'draws with replacement are not covered by rdp; nearest: pld'
>>> noisy = mechanism.with_noise(noise_for(1.5, mechanism, "replace_one", delta=1e-5))
>>> for guarantee in guarantees(noisy, "replace_one", 1e-5, accountants=["pld"], participations=12):
...     print(guarantee.sentence())  # doctest: +NORMALIZE_WHITESPACE
epsilon 1.5 at delta 1e-05 for one client, which may be replaced by another,
against an observer of every aggregate (fixed size 80 of 1920, cohort hidden): rigorous, by pld.
epsilon 11.86 at delta 1e-05 for one client, which may be replaced by another,
against an observer of every aggregate (fixed size 80 of 1920, cohort known,
a client in at most 12 of 100 rounds): rigorous, by pld. It is zCDP with rho 2.633.

A `mechanism` draws by a scheme of `sampling`; `pld` and `rdp` are the mathematics of the rigorous
`accountants`, among which are the papers' formulas as printed; `accounting` says what they make of
a mechanism and against whom, in a `guarantee`; `calibration` finds the noise for an epsilon.
`local_steps` is a mechanism per client, with its own calibration. `release_report` is what a run's
release costs round by round, `ledger` what is spent, `calculator` noise, epsilon or rounds from the
other two; `composition` is of several runs, `repetition` of a search that releases the best run.
`budgets` reads tables, and is imported by that name.
"""

from raydpfl.privacy.accountants import FALLBACK
from raydpfl.privacy.accountants.paper import paper_multiplier
from raydpfl.privacy.accountants.xu_2026 import budget_variance
from raydpfl.privacy.accounting import (
    RIGOROUS,
    covers,
    delta,
    epsilon,
    epsilon_curve,
    guarantees,
    rigorous,
    tradeoff,
)
from raydpfl.privacy.calibration import noise_for, rounds_for
from raydpfl.privacy.composition import (
    Composition,
    RunRelease,
    StepsRelease,
    best_of,
    compose_step_runs,
    together,
)
from raydpfl.privacy.guarantee import (
    Guarantee,
    brief_sentences,
    column,
    delta_warning,
    sentences,
    tightest_guarantees,
)
from raydpfl.privacy.ledger import Ledger, Segment, Spent, check_budget, read_entries, segments_of
from raydpfl.privacy.local_steps import LocalSteps, Release
from raydpfl.privacy.local_steps_calibration import calibrate_local_steps
from raydpfl.privacy.mechanism import Event, Mechanism, Query, Survey
from raydpfl.privacy.pld import gaussian_delta, gaussian_epsilon
from raydpfl.privacy.release_report import ReleaseReport, report_of
from raydpfl.privacy.repetition import Repetition
from raydpfl.privacy.sampling import Sampling, SamplingScheme
from raydpfl.privacy.tradeoff import TradeOff
from raydpfl.privacy.types import Relation, Terms

__all__ = [
    "FALLBACK",
    "RIGOROUS",
    "Composition",
    "Event",
    "Guarantee",
    "Ledger",
    "LocalSteps",
    "Mechanism",
    "Query",
    "Relation",
    "Release",
    "ReleaseReport",
    "Repetition",
    "RunRelease",
    "Sampling",
    "SamplingScheme",
    "Segment",
    "Spent",
    "StepsRelease",
    "Survey",
    "Terms",
    "TradeOff",
    "best_of",
    "brief_sentences",
    "budget_variance",
    "calibrate_local_steps",
    "check_budget",
    "column",
    "compose_step_runs",
    "covers",
    "delta",
    "delta_warning",
    "epsilon",
    "epsilon_curve",
    "gaussian_delta",
    "gaussian_epsilon",
    "guarantees",
    "noise_for",
    "paper_multiplier",
    "read_entries",
    "report_of",
    "rigorous",
    "rounds_for",
    "segments_of",
    "sentences",
    "tightest_guarantees",
    "together",
    "tradeoff",
]
