"""The contract of a paper's formula: see `raydpfl.privacy.accountants.base.Formula`."""

from itertools import pairwise

from raydpfl.check.claims import DELTA
from raydpfl.check.contract import hold
from raydpfl.privacy.accountants import Formula

CLIENT = {"bound": 1.0, "batch": 10, "samples": 600, "steps": 40}


def more_noise(case: Formula) -> str:
    """The epsilon that it prints, where all its conditions hold, falls with the noise."""
    claims = [case.printed(std, DELTA, **CLIENT) for std in (0.5, 1.0, 4.0, 40.0)]
    values = [one.value for one, delta in claims if delta == DELTA and not one.conditions_failed]
    hold(all(left >= right for left, right in pairwise(values)), f"with more noise {values}")
    return f"{len(values)} of {len(claims)} values have all its conditions"


def noise(case: Formula) -> str:
    """The noise that it names for an epsilon, where all its conditions hold, costs no more."""
    noise_claim = case.noise(2.0, DELTA, **CLIENT)
    if noise_claim.conditions_failed:
        return f"not at epsilon 2: {'; '.join(noise_claim.conditions_failed)}"
    claim, delta = case.printed(noise_claim.value, DELTA, **CLIENT)
    hold(claim.value <= 2.002 or delta != DELTA, f"epsilon 2 becomes {claim.value:.4g}")
    return f"std {noise_claim.value:.4g} for epsilon 2"
