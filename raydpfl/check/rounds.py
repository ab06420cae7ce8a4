"""The contract of every member that takes part in a round: what holds of a run."""

import math
from typing import cast

import numpy as np

from raydpfl.check.contract import FALSE_ALARM, equal, hold
from raydpfl.check.example import Example
from raydpfl.check.runs import RecordingCoordinator
from raydpfl.methods.noise import Whitening
from raydpfl.privacy import Mechanism, Query, report_of
from raydpfl.simulation.noise_monitor import tail


def runs(case: Example) -> str:
    """A small run goes through all its rounds, and its model is finite."""
    model = case.inline_run.parameters()
    hold(np.isfinite(model).all(), "the model is not finite")
    return f"{case.inline_run.position()} rounds, {case.d} parameters"


def same_bits_twice(case: Example) -> str:
    """A second run in the same process gives the same bits."""
    return _check_same_bits(case, case.run("second"))


def same_bits_pooled(case: Example) -> str:
    """Clients on three actors, whose results come last first, give the same bits."""
    return _check_same_bits(case, case.run("pooled", actors=3))


def same_bits_per_client(case: Example) -> str:
    """An actor per client gives the same bits."""
    if case.plan.experiment.data.clients is None:
        return "the data do not say how many clients there are"
    return _check_same_bits(case, case.run("per client", actors=0))


def same_bits_resumed(case: Example) -> str:
    """A run that is taken up from a checkpoint gives the same bits, and finds in it all that it
    kept.
    """
    paused_run = case.run("resumed", stop_round=case.plan.experiment.rounds // 2)
    resumed_run = RecordingCoordinator(paused_run.plan, str(case.folder / "resumed"), resume=True)
    resumed_run.start()
    for name, state in paused_run.state.states.items():
        hold(equal(state, resumed_run.state.states[name]), f"the state of {name} is another")
    before = paused_run.state.memory.arrays()
    after = resumed_run.state.memory.arrays()
    hold(all(map(equal, before, after)), "the client state differs")
    hold(paused_run.state.bound == resumed_run.state.bound, "the bound is another")
    return _check_same_bits(case, case.run("resumed", resume=True))


def _check_same_bits(case: Example, other: RecordingCoordinator) -> str:
    """Raises `BrokenClause` where the model, or what is known of the clients, differs."""
    run = case.inline_run
    if not run.experiment.noise.repeatable:
        return "no run can be repeated, as the noise says"
    first, second = run.parameters(), other.parameters()
    message = f"the model differs by {np.abs(first - second).max():g} from that of the inline run"
    hold(np.array_equal(first, second), message)
    for one, two in zip(reversed(run.columns), reversed(other.columns), strict=False):
        hold(equal(one, two), "what is known of the clients differs from the inline run")
    hold(run.state.bound == other.state.bound, "the bound differs from that of the inline run")
    return "as inline, to the last bit"


def bound_held(case: Example) -> str:
    """In a run no client sends more than the bound in force."""
    if case.inline_run.bounds[0] is None:
        return "nothing that is sent is bounded"
    max_ratio = 0.0
    for columns, bound in zip(case.inline_run.columns, case.inline_run.bounds, strict=True):
        assert bound is not None
        norm_ratios = columns["norm"] * columns["factor"] / bound
        max_ratio = max(max_ratio, float(np.nanmax(norm_ratios, initial=0.0)))
    hold(max_ratio <= 1 + 1e-9, f"a client sends {max_ratio:.6g} times the bound")
    return f"at most {max_ratio:.4g} of it"


def epsilon(case: Example) -> str:
    """A run with noise is private, and its epsilon is that of what it releases."""
    plan = case.plan
    e, mechanism = plan.experiment, plan.mechanism
    if mechanism is None:
        return "not private"
    epsilons = case.inline_run.accounts.epsilons(e.rounds - 1)
    min_epsilon = min((epsilons[name] for name in plan.rigorous_accountants), default=math.inf)
    hold(math.isfinite(min_epsilon), f"no rigorous accountant covers {mechanism.cohorts}")
    sampling = mechanism.cohorts
    if mechanism.by_draws or sampling is None:
        hold(min_epsilon > 0, "it spends nothing")
        return f"{min_epsilon:.4g} for one sample"
    share = plan.cohort / sampling.cohort
    released_queries = [Query("updates", 1.0, plan.ratio / share)]
    for query in e.bounding.queries():
        std = plan.side_stds[query.name] / share
        released_queries.append(Query(query.name, query.bound, std))
    loss_query = e.selection.loss_query
    released_mechanism = Mechanism(
        sampling,
        (*released_queries, *([loss_query] if loss_query else [])),
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
    report = report_of(released_mechanism, plan.rigorous_accountants, terms)
    for name, curve in report.curves(plan.counted_draws(), plan.composed_rounds).items():
        cost = float(curve[-1])
        message = f"{name} says {epsilons[name]:.6g}, and what is released costs {cost:.6g}"
        hold(math.isclose(epsilons[name], cost, rel_tol=1e-6), message)
    return f"{min_epsilon:.4g} at delta {terms.delta:g}, {sampling}"


def noise_on_sums(case: Example) -> str:
    """The noise that the server adds in a run has the std that was accounted for."""
    plan = case.plan
    whiten = Whitening(plan.experiment.noise)
    tails = []
    run = case.inline_run
    for t, (server_noise, bound) in enumerate(zip(run.server_noise, run.bounds, strict=True)):
        if server_noise is None:
            return "the server draws none"
        scores = plan.experiment.noise.scores(server_noise, plan.drawn_std(t, bound))
        square = float(np.sum(whiten(scores) ** 2))
        tails.append(float(tail(square, plan.d)))
    p_value = min(tails) * 2 * len(tails)
    hold(p_value >= FALSE_ALARM, f"its size has a chance of {p_value:.2g} by chi-squared")
    return f"chi-squared p = {min(1.0, p_value):.2g}"
