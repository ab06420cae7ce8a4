"""The contract of an accountant: see `raydpfl.privacy.accountants`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from raydpfl.check.contract import Look, hold
from raydpfl.check.sampling import DELTA, NOISE, RELATIONS, Lone
from raydpfl.privacy import Mechanism, Query, Sampling, Survey, gaussian_delta
from raydpfl.privacy.accountants import Accountant, Formula

SAMPLINGS = (
    Sampling("fixed", 100, 10),
    Sampling("poisson", 100, 10),
    Sampling("full", 10, 10),
    Sampling("with_replacement", 100, 10),
    Sampling("public", 100, 10),
)
V = 4.0
ROUNDS = 5
CLIENT = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 40}


def _mechanisms(z: float) -> list[Mechanism]:
    return [
        Mechanism(sampling, (Query("updates", 1.0, z),), rounds=ROUNDS) for sampling in SAMPLINGS
    ]


def covers(accountant: Accountant) -> str:
    """It says in words what it does not cover."""
    covered = 0
    for mechanism in _mechanisms(1.0):
        for relation in RELATIONS:
            reason = accountant.covers(mechanism, relation)
            wrong = f"covers gives {reason!r} for {mechanism.sampling} under {relation}"
            hold(reason is None or (isinstance(reason, str) and reason), wrong)
            covered += reason is None
    hold(covered, "it covers nothing")
    return f"{covered} of {len(SAMPLINGS) * len(RELATIONS)} combinations"


def monotone(accountant: Accountant) -> str:
    """Epsilon rises with the rounds, and falls with the noise."""
    for few, much in zip(*map(_mechanisms, NOISE), strict=True):
        for relation in RELATIONS:
            if accountant.covers(few, relation):
                continue
            curves = [
                accountant.epsilons(mechanism, relation, DELTA, 1, ROUNDS, V)
                for mechanism in (few, much)
            ]
            where = f"{few.sampling} under {relation}"
            hold(curves[0].shape == (ROUNDS,), f"{where}: {list(curves[0].shape)} epsilons")
            hold((np.diff(curves[0]) >= -1e-9).all(), f"{where}: it falls with the rounds")
            hold((curves[1] <= curves[0] + 1e-9).all(), f"{where}: it rises with the noise")
            hold(np.isfinite(curves[0]).all(), f"{where}: it is not finite")
    return "in rounds and in noise"


def inverse(accountant: Accountant) -> str:
    """Delta at the epsilon of a delta is that delta, at most."""
    for mechanism in _mechanisms(1.0):
        for relation in RELATIONS:
            if accountant.covers(mechanism, relation):
                continue
            epsilons = accountant.epsilons(mechanism, relation, DELTA, ROUNDS, ROUNDS, V)
            back = accountant.delta(mechanism, relation, float(epsilons[0]), ROUNDS, V)
            wrong = f"{mechanism.sampling} under {relation}: epsilon {epsilons[0]:.6g} at {DELTA:g}"
            hold(back <= DELTA * 1.001, f"{wrong}, delta {back:.6g} there")
    return f"at delta {DELTA:g}"


def rigorous(accountant: Accountant) -> str:
    """A rigorous accountant claims no more privacy than a client has who alone moves the sum."""
    if not accountant.rigorous:
        return "a formula as printed: no guarantee"
    looked = 0
    for z in NOISE:
        for mechanism in _mechanisms(z):
            for relation in RELATIONS:
                if accountant.covers(mechanism, relation):
                    continue
                lone = Lone.of(mechanism.sampling, relation, mechanism.mu(relation))
                for epsilon in (0.1, 1.0):
                    claimed = accountant.delta(mechanism, relation, epsilon, 1, V)
                    least = lone.delta(epsilon)
                    wrong = f"{mechanism.sampling} under {relation}: delta {claimed:.4g}"
                    wrong += f" at epsilon {epsilon:g}, where a lone client has {least:.4g}"
                    hold(claimed >= least * (1 - 1e-4) - 1e-9, wrong)
                    looked += 1
    return f"{looked} values of delta held against an integral"


def surveys(accountant: Accountant) -> str:
    """A rigorous accountant counts what all clients are asked for besides the rounds."""
    if not accountant.rigorous:
        return "a formula as printed: no guarantee"
    looked = 0
    survey = Survey("score", 1.0, times=1)
    for mechanism in _mechanisms(4.0):
        asking = replace(mechanism, survey=survey)
        for relation in RELATIONS:
            if accountant.covers(asking, relation):
                continue
            claimed = accountant.delta(asking, relation, 1.0, ROUNDS, V)
            alone = float(gaussian_delta(1.0, survey.mu(relation)))
            rounds = accountant.delta(mechanism, relation, 1.0, ROUNDS, V)
            wrong = f"{mechanism.sampling} under {relation}: with a survey delta {claimed:.4g} at "
            wrong += f"epsilon 1, where it alone has {alone:.4g}, and the rounds {rounds:.4g}"
            hold(claimed >= max(alone, rounds) * (1 - 1e-4) - 1e-9, wrong)
            looked += 1
    return f"of {looked} combinations"


CONTRACT: tuple[Look, ...] = (covers, monotone, inverse, rigorous, surveys)


def more_noise(formula: Formula) -> str:
    """The epsilon that it prints, where all its conditions hold, falls with the noise."""
    claims = [formula.printed(std, DELTA, **CLIENT) for std in (0.5, 1.0, 4.0, 40.0)]
    values = [one.value for one, delta in claims if delta == DELTA and not one.conditions_failed]
    hold(all(few >= much for few, much in pairwise(values)), f"with more noise {values}")
    return f"{len(values)} of {len(claims)} values have all its conditions"


def noise(formula: Formula) -> str:
    """The noise that it names for an epsilon, where all its conditions hold, costs no more."""
    asked = formula.noise(2.0, DELTA, **CLIENT)
    if asked.conditions_failed:
        return f"not at epsilon 2: {'; '.join(asked.conditions_failed)}"
    printed, delta = formula.printed(asked.value, DELTA, **CLIENT)
    hold(printed.value <= 2.002 or delta != DELTA, f"epsilon 2 becomes {printed.value:.4g}")
    return f"std {asked.value:.4g} for epsilon 2"


FORMULA: tuple[Look, ...] = (more_noise, noise)
