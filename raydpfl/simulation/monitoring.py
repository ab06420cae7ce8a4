"""The witness of a run: what looks at every draw, with what the plan says of them, and what draws
its noise.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from raydpfl.errors import ConfigError
from raydpfl.simulation.noise_monitor import Drawing
from raydpfl.simulation.plan import Plan
from raydpfl.simulation.sampling_monitor import Witness, fingerprint


def of(plan: Plan, t: int, draws: list[np.ndarray] | None) -> Witness:
    """The witness of a run that has done `t` rounds. `draws` are the clients of all releases, where
    the accountants counted these.
    """
    member = plan.experiment.noise
    selection = plan.experiment.selection
    plan.check_sampling()
    composed_rounds = plan.composed_rounds + max(plan.repeated, 0)
    secret = plan.mechanism is not None and not plan.mechanism.by_draws
    secret = secret and selection.sampling(plan.population).hidden
    apart = member.min_separation()
    planned = None
    if draws is not None:
        present = draws[len(draws) - (plan.experiment.rounds - plan.first) :]
        planned = {t: fingerprint(clients) for t, clients in enumerate(present, plan.first)}
    least = plan.clients_left if member.drawn_by() == "client" else 0
    facts = composed_rounds, least, secret, apart, planned
    witness = Witness(selection, plan.population, *facts, pairs=selection.is_user_defined)
    seed = plan.cohort_seed()
    for before in range(t if selection.asks else 0):
        witness.asked(selection.exposed(seed, before, plan.population))
    for before in range(max(0, t - apart + 1), t):
        witness.took(selection.exposed(seed, before, plan.population))
    if secret and t:
        _draw_again(witness, plan, t)
    return witness


def noise(plan: Plan, t: int) -> Drawing:
    """What draws the noise of a run from round `t` on."""
    member = plan.experiment.noise
    accounted = plan.sum_std if plan.mechanism else None
    return Drawing(member, plan.noise_seed, plan.d, t, accounted)


def _draw_again(witness: Witness, plan: Plan, t: int) -> None:
    """Gives a witness the cohorts of the rounds before `t`, each as it was released last. A
    selection that needs losses cannot draw them again, and is not bet on any more.
    """
    seen = Counter[int]()
    for before in range(t):
        past = [one.restart for one in plan.history if one.first <= before]
        seed = plan.cohort_seed(past[-1] if before < plan.first else None)
        try:
            cohort = plan.experiment.selection.draw(seed, before, plan.population)
        except ConfigError:
            witness.cannot_bet()
            return
        witness.drew(before, cohort, seen)
        seen.update(cohort.clients.tolist())
