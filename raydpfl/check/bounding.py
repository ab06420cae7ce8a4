"""What bounds a client's influence promises: see `raydpfl.bounding`."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import torch

from raydpfl.check.cases import Case
from raydpfl.check.promise import Look, close, copied, hold, made_up, same_shapes, tensor
from raydpfl.errors import ConfigError
from raydpfl.keys import keyed_globals
from raydpfl.rounds import Facts, View

ABSOLUTE = (0.0, 1e-300, 1e-12, 1e12, 1e300)
RELATIVE = (0.5, 1.0, 1 + 1e-12, 1.5, 2.0, 7.0)  # of the bound
TOGETHER = 25
RANDOM = 200


def norms(bound: float) -> torch.Tensor:
    """Norms that a bounding may meet, float64 [k]."""
    drawn = np.exp(3 * made_up(RANDOM)) * bound
    return torch.tensor([*ABSOLUTE, *(bound * each for each in RELATIVE), *drawn])


def _factors(case: Case, given: torch.Tensor, bound: float) -> torch.Tensor:
    with keyed_globals(1):  # as in a run
        return case.member.factors(given.clone(), bound)


def _view(case: Case, k: int = TOGETHER, t: int = 2) -> View:
    """The round as k clients know it, who remember something."""
    member = case.member
    told = {name: torch.tensor(each) for name, each in member.tells(member.start(case.d)).items()}
    own = tensor(TOGETHER, case.d, step=1).float()[:k]
    model = tensor(case.d, step=2).float()
    lr = case.plan.experiment.local.learning_rate(t)
    return View(t, lr, member.initial_bound, model, told, lambda: own)


def _alone(view: View, place: int) -> View:
    """The round as one of them knows it."""
    own = view.own[place : place + 1]
    return replace(view, remembered=lambda: own)


def _bounds(case: Case) -> list[float]:
    first = case.member.initial_bound
    if first is None:
        return []
    return [first, 1e-3, 1.0, 50.0] if case.member.adapts else [first]


def bound(case: Case) -> str:
    """Nothing that a client sends is longer than the bound, whatever it would have sent."""
    for most in _bounds(case):
        given = norms(most)
        factors = _factors(case, given, most)
        hold(factors.shape == given.shape, f"{len(given)} norms get {list(factors.shape)} factors")
        hold(factors.dtype == torch.float64, f"factors are {factors.dtype}, not float64")
        left = (factors * given).tolist()
        for norm, factor, length in zip(given.tolist(), factors.tolist(), left, strict=True):
            hold(np.isfinite(factor), f"the factor of norm {norm:g} is {factor}")
            hold(factor >= 0, f"the factor of norm {norm:g} is {factor:g}")
            hold(
                length <= most * (1 + 1e-12),
                f"norm {norm:g} is sent with length {length:.6g}, above the bound of {most:g}",
            )
    return f"{len(norms(1.0))} norms from 0 to 1e300" if _bounds(case) else "bounds nothing"


def each_alone(case: Case) -> str:
    """What one client gets does not depend on the others of its block."""
    view = _view(case)
    updates = tensor(TOGETHER, case.d)
    together = case.member.send(updates.clone(), view)
    hold(together.shape == updates.shape, f"send gives {list(together.shape)}")
    kept = case.member.remember(together.clone(), together * 0.5, view)
    for place in (0, 7, TOGETHER - 1):
        alone = _alone(view, place)
        sent = case.member.send(updates[place : place + 1].clone(), alone)
        hold(close(sent[0], together[place]), f"client {place} alone sends something else")
        if kept is not None:
            one = together[place : place + 1]
            mine = case.member.remember(one.clone(), one * 0.5, alone)
            hold(close(mine[0], kept[place]), f"client {place} alone remembers something else")
    for most in _bounds(case):
        given = norms(most)
        factors = _factors(case, given, most)
        for place in range(len(given)):
            one = _factors(case, given[place : place + 1], most)
            hold(
                close(one[0], factors[place]),
                f"norm {float(given[place]):g} gets factor {float(one[0]):g} alone and "
                f"{float(factors[place]):g} among others",
            )
    return f"1 client as {TOGETHER}"


def no_hidden_state(case: Case) -> str:
    """It keeps nothing but what it says: asked again, it answers the same."""
    copy = pickle.loads(pickle.dumps(case.member))
    view = _view(case)
    updates = tensor(TOGETHER, case.d)
    first = case.member.send(updates.clone(), view)
    for most in _bounds(case):
        factors = _factors(case, norms(most), most)
        _factors(case, norms(most) * 3, most)
        hold(torch.equal(_factors(case, norms(most), most), factors), "other factors")
    for member in (case.member, copy):
        hold(torch.equal(member.send(updates.clone(), view), first), "something else is sent")
    return "the same answers again"


def inverse(case: Case) -> str:
    """`invert` undoes `send`, as an audit needs."""
    view = _view(case)
    updates = tensor(TOGETHER, case.d)
    back = case.member.invert(case.member.send(updates.clone(), view), view)
    off = float((back.double() - updates).abs().max())
    hold(close(back, updates, 1e-5), f"invert(send(u)) is off by {off:.2g}")
    return f"to {off:.1g}"


def memory(case: Case) -> str:
    """What clients remember is a vector for each, and finite."""
    view = _view(case)
    sent = tensor(TOGETHER, case.d) * 0.1
    kept = case.member.remember(3 * sent, sent.clone(), view)
    if kept is None:
        return "clients remember nothing"
    hold(kept.shape == sent.shape, f"remember gives {list(kept.shape)}, for {list(sent.shape)}")
    hold(torch.isfinite(kept).all(), "it is not finite")
    hold(case.member.remembers, "remembers is False")
    return "a vector for each client"


def receive(case: Case) -> str:
    """The mean update is made of the released sum and the member's own state alone."""
    member = case.member
    released = made_up(case.d)
    model = made_up(case.d, step=2).astype(np.float32)
    facts = Facts(2, 0.1, model, divisor=9.0, cohort=9, population=24)
    start = member.start(case.d)
    found = []
    for _ in range(2):
        state = copied(start)
        given = released.copy()
        mean = np.array(member.receive(given, state, facts))
        hold(mean.shape == (case.d,), f"it is {list(mean.shape)}, for {case.d} parameters")
        hold(mean.dtype == np.float64, f"it is {mean.dtype}, not float64")
        hold(np.isfinite(mean).all(), "it is not finite")
        hold(np.array_equal(given, released), "the released sum is changed in place")
        same_shapes(start, state, "the state")
        found.append(mean)
        member.receive(-3 * released, copied(start), facts)
    hold(np.array_equal(found[0], found[1]), "asked again, it is another")
    told = member.tells(member.start(case.d))
    hold(all(each.dtype == np.float32 for each in told.values()), "what is told is not float32")
    return f"keeps {', '.join(start) or 'nothing'}"


def _columns(k: int, bound: float) -> dict[str, np.ndarray]:
    """Columns of clients, some of which have failed."""
    given = norms(bound).numpy()[:k]
    given[3] = np.nan
    given[5] = np.inf
    losses = np.abs(made_up(k, step=3))
    losses[[3, 4]] = np.nan
    factors = np.minimum(1.0, bound / np.maximum(np.nan_to_num(given), 1e-12))
    known = {"client": np.arange(k), "norm": given, "factor": factors}
    return known | {"clipped": (factors < 1).astype(float), "train_loss": losses}


def answers(case: Case) -> str:
    """What clients answer besides is within the bound of its query, of each client alone."""
    queries = case.member.queries()
    if not queries:
        return "no queries"
    shares = sum(query.share for query in queries)
    hold(0 < shares < 1, f"the shares of the queries add up to {shares:g}")
    for most in _bounds(case):
        columns = _columns(40, most)
        found = case.member.answers(columns, most)
        for query in queries:
            given = np.nan_to_num(found[query.name])
            hold(given.shape == (40,), f"{query.name} has {list(given.shape)} for 40 clients")
            worst = float(np.abs(given).max())
            beyond = f"{query.name} is answered with {worst:g}, above its bound of {query.bound:g}"
            hold(worst <= query.bound, beyond)
            for place in (0, 3, 20, 39):
                one = {name: each[place : place + 1] for name, each in columns.items()}
                mine = np.nan_to_num(case.member.answers(one, most)[query.name])
                hold(close(mine[0], given[place]), f"{query.name} depends on the other clients")
    return ", ".join(f"{query.name} within {query.bound:g}" for query in queries)


def adapt(case: Case) -> str:
    """The next bound is positive and finite, and follows from released sums alone."""
    if not case.member.adapts:
        return "the bound stays"
    queries = case.member.queries()
    for most in _bounds(case):
        for size in (0.0, 0.3, -0.3, 1.0, -1.0, 40.0, -40.0):
            sums = {query.name: size * query.bound * 9 for query in queries}
            following = case.member.adapt(most, dict(sums), 9, case.member.start(case.d))
            says = f"from a bound of {most:g} and sums {sums} it becomes {following}"
            hold(np.isfinite(following) and 0 < following <= 1e15, says)
            other = {name: -2 * each for name, each in sums.items()}
            case.member.adapt(3 * most, other, 5, case.member.start(case.d))
            again = case.member.adapt(most, sums, 9, case.member.start(case.d))
            hold(again == following, "asked again, it is another")
    return "from noised sums alone"


def needs_a_bound(case: Case) -> str:
    """A bound that is no positive number is refused."""
    if case.member.initial_bound is None:
        return "bounds nothing of what is sent"
    for wrong in (0.0, -1.0):
        try:
            Case(case.section, {**case.values, "bound": wrong}).member  # noqa: B018 - made here
        except ConfigError:
            continue
        hold(False, f"bound={wrong:g} is taken; give it as Field(gt=0)")
    return "0 and -1 are refused"


PROMISES: tuple[Look, ...] = (
    bound,
    each_alone,
    no_hidden_state,
    inverse,
    memory,
    receive,
    answers,
    adapt,
    needs_a_bound,
)
