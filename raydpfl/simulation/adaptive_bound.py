"""The bound of the coming round, where it follows what clients answer in the present one."""

from __future__ import annotations

import numpy as np

from raydpfl.core.messages import BOUNDS, Columns, State
from raydpfl.errors import RunError
from raydpfl.methods.noise import SideQuery
from raydpfl.methods.selection import Cohort
from raydpfl.simulation.noise_monitor import Drawing
from raydpfl.simulation.plan import Plan


def next_bound(
    plan: Plan,
    bound: float | None,
    state: State,
    t: int,
    cohort: Cohort,
    columns: Columns,
    noise: Drawing,
) -> float | None:
    """The bound of round t + 1, from that of round t, `bound`. `state` is the bounding's own, which
    it may change; `noise` draws that on the answers.

    Raises `RunError` for one out of range, an answer beyond its own bound, or noise that is not
    what was accounted for.
    """
    bounding = plan.experiment.bounding
    if bound is None or not bounding.adapts:
        return bound
    clients = plan.experiment.selection.counted(cohort, plan.population)
    if not clients:
        return bound
    sums = _answers(plan, bound, t, cohort, columns, noise)
    following = bounding.adapt(bound, sums, clients, state)
    if not BOUNDS[0] <= following <= BOUNDS[1]:
        left = f"the adaptive bound left its range ({following:g} after round {t})"
        raise RunError(f"{left}; look at what bounding.kind {bounding.kind} makes of it")
    return following


def _answers(
    plan: Plan,
    bound: float,
    t: int,
    cohort: Cohort,
    columns: Columns,
    noise: Drawing,
) -> dict[str, float]:
    """The noised sums of what the clients answer, by query."""
    bounding = plan.experiment.bounding
    given = bounding.answers(columns, bound)
    sums = {}
    for query in bounding.queries():
        if query.name not in given:
            raise RunError(
                f"bounding.kind {bounding.kind} gives no answers to its query {query.name}; "
                f"it answers {', '.join(given) or 'nothing'}"
            )
        answers = np.nan_to_num(given[query.name])
        if not (np.abs(answers) <= query.bound).all():
            worst = float(np.abs(answers).max())
            raise RunError(
                f"bounding.kind {bounding.kind} answers its query {query.name} with {worst:g}, "
                f"above its bound of {query.bound:g}"
            )
        std = plan.side_stds.get(query.name, 0.0)
        clients = cohort.clients
        asked = SideQuery(
            query.name, plan.noise_seed, t, std, clients, cohort.draws, plan.clients_left
        )
        exact = float(answers.sum())
        sums[query.name] = exact + noise.on_query(asked, exact)
    return sums
