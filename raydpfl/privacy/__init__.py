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
against whoever sees every aggregate (fixed size 80 of 1920, cohort hidden): rigorous, by pld.
epsilon 11.86 at delta 1e-05 for one client, which may be replaced by another,
against whoever sees every aggregate (fixed size 80 of 1920, cohort known,
a client in at most 12 of 100 rounds): rigorous, by pld.

Each file is one concept:

- `mechanism`: what is released; `survey`: and besides the rounds; `places`: who draws the noise;
  `laws`: a file a sampling law;
- `accountants`: a file an accountant; `accounting`: what they say of a mechanism;
- `guarantee`: an epsilon with everything that gives it a meaning;
- `pld` and `renyi`: the mathematics of the rigorous accountants; `paper`: formulas as printed;
- `calibrate`: noise for an epsilon; `roots`: searches that end on the safe side;
- `ledger`: spending, on disk;
- `personal`: noise at local steps, client by client; `budgets`: laws of personal budgets (imported
  by that name, since it reads tables);
- `memory`: clients that remember; `factorization`: noise that is correlated over the rounds.

The papers are 000 (Theorem 3.2), 001 (Theorem 1), 002 (Theorem 5) and 003 (Section III-C3).
"""

from raydpfl.privacy.accountants import STANDBY
from raydpfl.privacy.accounting import (
    RIGOROUS,
    covers,
    delta,
    epsilon,
    epsilon_curve,
    guarantees,
    rigorous,
)
from raydpfl.privacy.calibration import noise_for, rounds_for
from raydpfl.privacy.guarantee import Guarantee, column, holding, in_words, loose, sentences
from raydpfl.privacy.histogram_query import Survey
from raydpfl.privacy.ledger import Ledger, Segment, Spent, check_budget, segments
from raydpfl.privacy.local_steps import LocalSteps
from raydpfl.privacy.mechanism import Event, Mechanism, Query, Release, Sampling
from raydpfl.privacy.paper_formulas import paper_multiplier
from raydpfl.privacy.pld import gaussian_delta, gaussian_epsilon
from raydpfl.privacy.types import Relation, Terms

__all__ = [
    "RIGOROUS",
    "STANDBY",
    "Event",
    "Guarantee",
    "Ledger",
    "LocalSteps",
    "Mechanism",
    "Query",
    "Relation",
    "Release",
    "Sampling",
    "Segment",
    "Spent",
    "Survey",
    "Terms",
    "check_budget",
    "column",
    "covers",
    "delta",
    "epsilon",
    "epsilon_curve",
    "gaussian_delta",
    "gaussian_epsilon",
    "guarantees",
    "holding",
    "in_words",
    "loose",
    "noise_for",
    "paper_multiplier",
    "rigorous",
    "rounds_for",
    "segments",
    "sentences",
]
