"""The contract of every member that takes part in a round: what holds of a run."""

import math
from typing import cast

import numpy as np

from raydpfl.check.contract import FALSE_ALARM, equal, hold, tail
from raydpfl.check.example import Example
from raydpfl.check.runs import Watched
from raydpfl.methods.noise import Whitening
from raydpfl.privacy import Mechanism, Query, report_of


def runs(case: Example) -> str:
    """A small run goes through all its rounds, and its model is finite."""
    model = case.whole.parameters()
    hold(np.isfinite(model).all(), "the model is not finite")
    return f"{case.whole.position()} rounds, {case.d} parameters"


def same_bits_twice(case: Example) -> str:
    """A second run in the same process gives the same bits."""
    return _same(case, case.ran("second"))


def same_bits_pooled(case: Example) -> str:
    """Clients on three actors, whose results come last first, give the same bits."""
    return _same(case, case.ran("pooled", actors=3))


def same_bits_per_client(case: Example) -> str:
    """An actor per client gives the same bits."""
    if case.plan.experiment.data.clients is None:
        return "the data do not say how many clients there are"
    return _same(case, case.ran("per client", actors=0))


def same_bits_resumed(case: Example) -> str:
    """A run that is taken up from a checkpoint gives the same bits, and finds in it all that it
    kept.
    """
    paused = case.ran("resumed", until=case.plan.experiment.rounds // 2)
    resumed = Watched(paused.plan, str(case.folder / "resumed"), resume=True)
    resumed.start()
    for name, state in paused.state.states.items():
        hold(equal(state, resumed.state.states[name]), f"the state of {name} is another")
    before = paused.state.memory.arrays()
    after = resumed.state.memory.arrays()
    hold(all(map(equal, before, after)), "the client state differs")
    hold(paused.state.bound == resumed.state.bound, "the bound is another")
    return _same(case, case.ran("resumed", resume=True))


def _same(case: Example, other: Watched) -> str:
    """Raises `Broken` where the model, or what is known of the clients, differs."""
    whole = case.whole
    if not whole.experiment.noise.repeatable:
        return "no run can be repeated, as the noise says"
    mine, theirs = whole.parameters(), other.parameters()
    wrong = f"the model differs by {np.abs(mine - theirs).max():g} from that of the inline run"
    hold(np.array_equal(mine, theirs), wrong)
    for one, two in zip(reversed(whole.columns), reversed(other.columns), strict=False):
        hold(equal(one, two), "what is known of the clients differs from the inline run")
    hold(whole.state.bound == other.state.bound, "the bound differs from that of the inline run")
    return "as inline, to the last bit"


def bound_held(case: Example) -> str:
    """In a run no client sends more than the bound in force."""
    if case.whole.bounds[0] is None:
        return "nothing that is sent is bounded"
    worst = 0.0
    for columns, bound in zip(case.whole.columns, case.whole.bounds, strict=True):
        assert bound is not None
        sent = columns["norm"] * columns["factor"] / bound
        worst = max(worst, float(np.nanmax(sent, initial=0.0)))
    hold(worst <= 1 + 1e-9, f"a client sends {worst:.6g} times the bound")
    return f"at most {worst:.4g} of it"


def epsilon(case: Example) -> str:
    """A run with noise is private, and its epsilon is that of what it releases."""
    plan = case.plan
    e, mechanism = plan.experiment, plan.mechanism
    if mechanism is None:
        return "not private"
    spent = case.whole.accounts.spent(e.rounds - 1)
    least = min((spent[name] for name in plan.rigorous), default=math.inf)
    hold(math.isfinite(least), f"no rigorous accountant covers {mechanism.cohorts}")
    sampling = mechanism.cohorts
    if mechanism.by_draws or sampling is None:
        hold(least > 0, "it spends nothing")
        return f"{least:.4g} for one sample"
    share = plan.cohort / sampling.cohort
    released = [Query("updates", 1.0, plan.ratio / share)]
    for query in e.bounding.queries():
        std = plan.side_stds[query.name] / share
        released.append(Query(query.name, query.bound, std))
    asked = e.selection.loss_query
    held = Mechanism(
        sampling,
        (*released, *([asked] if asked else [])),
        e.rounds,
        placement=e.noise.drawn_by() or "server",
        stateful=e.stateful.kind if e.stateful else "",
        noise_in_state=e.local.stateful and e.noise.drawn_by() == "client",
        squares=cast(Mechanism, mechanism).squares,  # which the clause `sensitivity` holds
        integer=cast(Mechanism, mechanism).integer,
        laplace=e.noise.laplace,
        factors=tuple(map(plan.factor, range(e.rounds))),
    )
    terms = e.terms
    report = report_of(held, plan.rigorous, terms)
    for name, curve in report.curves(plan.counted_draws(), plan.composed_rounds).items():
        true = float(curve[-1])
        says = f"{name} says {spent[name]:.6g}, and what is released costs {true:.6g}"
        hold(math.isclose(spent[name], true, rel_tol=1e-6), says)
    return f"{least:.4g} at delta {terms.delta:g}, {sampling}"


def noise_on_sums(case: Example) -> str:
    """The noise that the server adds in a run has the std that was accounted for."""
    plan = case.plan
    whiten = Whitening(plan.experiment.noise)
    tails = []
    for t, (added, bound) in enumerate(zip(case.whole.added, case.whole.bounds, strict=True)):
        if added is None:
            return "the server draws none"
        scores = plan.experiment.noise.scores(added, plan.drawn_std(t, bound))
        square = float(np.sum(whiten(scores) ** 2))
        tails.append(float(tail(square, plan.d)))
    worst = min(tails) * 2 * len(tails)
    hold(worst >= FALSE_ALARM, f"its size has a chance of {worst:.2g} by chi-squared")
    return f"chi-squared p = {min(1.0, worst):.2g}"
