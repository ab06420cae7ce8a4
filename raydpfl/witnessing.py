"""The witness of a run: what looks at every draw, with what the plan says of them."""

from __future__ import annotations

import numpy as np

from raydpfl.plan import Plan
from raydpfl.selection.witness import Witness, fingerprint


def of(plan: Plan, t: int, draws: list[np.ndarray] | None) -> Witness:
    """The witness of a run that has done `t` rounds. `draws` are the clients of all releases, where
    the accountants counted these.
    """
    noise = plan.experiment.noise
    selection = plan.experiment.selection
    plan.check_law()
    exposures = plan.exposures + max(plan.repeated, 0)
    secret = plan.mechanism is not None and not plan.mechanism.by_draws
    apart = noise.apart()
    planned = None
    if draws is not None:
        present = draws[len(draws) - (plan.experiment.rounds - plan.first) :]
        planned = {t: fingerprint(clients) for t, clients in enumerate(present, plan.first)}
    least = noise.least(plan.survivors)
    witness = Witness(selection, plan.population, exposures, least, secret, apart, planned)
    seed = plan.cohort_seed()
    for before in range(t if selection.asks else 0):
        witness.asked(selection.exposed(seed, before, plan.population))
    for before in range(max(0, t - apart + 1), t):
        witness.took(selection.exposed(seed, before, plan.population))
    return witness
