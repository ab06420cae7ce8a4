"""The contract of an accountant: see `raydpfl.privacy.accountants`. What it claims is held against
the same integral as what a sampling scheme claims (`raydpfl.check.claims`).
"""

from dataclasses import replace
from itertools import product

from raydpfl.check.claims import RELATIONS, ROUNDS, Claims, V
from raydpfl.check.contract import hold
from raydpfl.privacy import Sampling, Survey, gaussian_delta

SAMPLINGS = (
    Sampling("fixed", 100, 10),
    Sampling("poisson", 100, 10),
    Sampling("full", 10, 10),
    Sampling("with_replacement", 100, 10),
    Sampling("public", 100, 10),
)


def covers(case: Claims) -> str:
    """It says in words what it does not cover."""
    (accountant,) = case.accountants
    covered = 0
    for mechanism, relation in product(case.mechanisms(), RELATIONS):
        reason = accountant.covers(mechanism, relation)
        wrong = f"covers gives {reason!r} for {mechanism.sampling} under {relation}"
        hold(reason is None or (isinstance(reason, str) and reason), wrong)
        covered += reason is None
    hold(covered, "it covers nothing")
    return f"{covered} of {len(SAMPLINGS) * len(RELATIONS)} combinations"


def surveys(case: Claims) -> str:
    """A rigorous accountant counts what all clients are asked for next to the rounds."""
    if not case.accountants[0].rigorous:
        return "a formula as printed: no guarantee"
    looked = 0
    survey = Survey("score", 1.0, times=1)
    for accountant, mechanism, relation, words in case.covered(4.0):
        asking = replace(mechanism, survey=survey)
        if accountant.covers(asking, relation):
            continue
        claimed = accountant.delta(asking, relation, 1.0, ROUNDS, V)
        alone = float(gaussian_delta(1.0, survey.mu(relation)))
        rounds = accountant.delta(mechanism, relation, 1.0, ROUNDS, V)
        wrong = f"{words}: with a survey delta {claimed:.4g} at epsilon 1, where it alone has "
        wrong += f"{alone:.4g}, and the rounds {rounds:.4g}"
        hold(claimed >= max(alone, rounds) * (1 - 1e-4) - 1e-9, wrong)
        looked += 1
    return f"of {looked} combinations"
