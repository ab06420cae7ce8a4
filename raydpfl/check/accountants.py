"""The contract of an accountant: see `raydpfl.privacy.accountants`. What it claims is held against
the same integral as what a sampling scheme claims (`raydpfl.check.claims`).
"""

from dataclasses import replace
from itertools import product

from raydpfl.check.claims import DELTA, EPSILONS, NOISE, RELATIONS, ROUNDS, Claims, LoneClient, V
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
    covered_count = 0
    for mechanism, relation in product(case.mechanisms(), RELATIONS):
        reason = accountant.covers(mechanism, relation)
        message = f"covers gives {reason!r} for {mechanism.sampling} under {relation}"
        hold(reason is None or (isinstance(reason, str) and reason), message)
        covered_count += reason is None
    hold(covered_count, "it covers nothing")
    return f"{covered_count} of {len(SAMPLINGS) * len(RELATIONS)} combinations"


def composes(case: Claims) -> str:
    """No delta, and no epsilon, of several rounds is below that of a client who alone moves every
    sum.
    """
    value_count = 0
    for z in NOISE:
        for accountant, mechanism, relation, words in case.covered(z):
            lone = LoneClient.of(mechanism.sampling, relation, mechanism.mu(relation))
            at = accountant.epsilons(mechanism, relation, DELTA, ROUNDS, ROUNDS, V)
            claims = [(float(at[0]), DELTA)]
            claims += [(e, accountant.delta(mechanism, relation, e, ROUNDS, V)) for e in EPSILONS]
            for epsilon, claim in claims if accountant.rigorous else ():
                lone_delta = lone.composed_delta(epsilon, ROUNDS)
                message = f"{words} with noise {z:g}: delta {claim:.4g} at epsilon {epsilon:.4g} "
                message += f"for {ROUNDS} rounds; a lone client has {lone_delta:.4g}"
                hold(claim >= lone_delta * (1 - 1e-4) - 1e-9, message)
                value_count += 1
    return f"{value_count} values of {ROUNDS} rounds held against an integral"


def surveys(case: Claims) -> str:
    """A rigorous accountant counts what all clients are asked for next to the rounds."""
    if not case.accountants[0].rigorous:
        return "a formula as printed: no guarantee"
    combination_count = 0
    survey = Survey("score", 1.0, times=1)
    for accountant, mechanism, relation, words in case.covered(4.0):
        survey_mechanism = replace(mechanism, survey=survey)
        if accountant.covers(survey_mechanism, relation):
            continue
        claim = accountant.delta(survey_mechanism, relation, 1.0, ROUNDS, V)
        survey_delta = float(gaussian_delta(1.0, survey.mu(relation)))
        rounds_delta = accountant.delta(mechanism, relation, 1.0, ROUNDS, V)
        message = f"{words}: with a survey delta {claim:.4g} at epsilon 1, where it alone has "
        message += f"{survey_delta:.4g}, and the rounds {rounds_delta:.4g}"
        hold(claim >= max(survey_delta, rounds_delta) * (1 - 1e-4) - 1e-9, message)
        combination_count += 1
    return f"of {combination_count} combinations"
