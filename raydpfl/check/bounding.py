"""The contract of a bounding: see `raydpfl.methods.bounding`."""

import pickle
import time
from dataclasses import replace

import numpy as np
import torch

from raydpfl.check.contract import close, copied, hold, made_up, same_shapes, tensor
from raydpfl.check.example import Example
from raydpfl.core.messages import Facts, View
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import ConfigError

ABSOLUTE = (0.0, 1e-300, 1e-12, 1e12, 1e300)
RELATIVE = (0.5, 1.0, 1 + 1e-12, 1.5, 2.0, 7.0)  # of the bound
TOGETHER = 25
RANDOM = 200
# norms of a scan: over all of SPAN, and over the middle of it, on each side of the bound
POINTS = 1 << 21
SPAN = 1e30
MIDDLE = 1e3
PARTS = 64  # of a scan, each of which is spread over all of it
PATIENCE = 5.0  # seconds of one scan; a slow member is looked at in fewer parts
ZOOM = 1000  # norms between two neighbours of a scan, around a jump or a largest length
CLOSER = 200  # such places


def norms(bound: float) -> torch.Tensor:
    """Norms that a bounding may meet, float64 [k]."""
    drawn = np.exp(3 * made_up(RANDOM)) * bound
    return torch.tensor([*ABSOLUTE, *(bound * factor for factor in RELATIVE), *drawn])


def _factors(case: Example, norms: torch.Tensor, bound: float) -> torch.Tensor:
    with keyed_globals(1):  # as in a run
        return case.member.factors(norms.clone(), bound)


def _alone(view: View, place: int) -> View:
    own = view.state[place : place + 1]
    return replace(view, load_state=lambda: own)


def _bounds(case: Example) -> list[float]:
    first = case.member.initial_bound
    if first is None:
        return []
    return [first, 1e-3, 1.0, 50.0] if case.member.adapts else [first]


def _lengths(case: Example, given: np.ndarray, bound: float) -> np.ndarray:
    """What vectors of these norms are sent with, float64 [k], over the bound. Raises `Broken` for
    factors that are none, and where that is above 1.
    """
    factors = _factors(case, torch.from_numpy(given), bound)
    shape = list(factors.shape)
    hold(shape == [len(given)], f"{len(given)} norms get {shape} factors")
    hold(factors.dtype == torch.float64, f"factors are {factors.dtype}, not float64")
    found = factors.numpy()
    fine = np.isfinite(found) & (found >= 0)
    place = int(np.argmin(fine))
    hold(fine.all(), f"the factor of norm {given[place]:g} is {found[place]:g}")
    with np.errstate(over="ignore"):
        lengths = given * found / bound
    place = int(lengths.argmax())
    norm, length = float(given[place]), float(lengths[place] * bound)
    wrong = f"norm {norm!r} is sent with length {length!r}, above the bound of {bound!r}"
    hold(lengths[place] <= 1 + 1e-12, wrong)
    return lengths


def _written(case: Example, bound: float) -> np.ndarray:
    """Norms at which the member may do otherwise, by the numbers in its settings: at these, on both
    sides of them, and between them, float64 [k].
    """
    fields = case.member.model_dump().values()
    numbers = {float(field) for field in fields if isinstance(field, (int, float))}
    some = np.array([0.5, 1.0, 2.0, bound, *sorted(map(abs, numbers))[:200]])
    with np.errstate(over="ignore"):
        marks = [some, some * bound, some + bound, np.abs(some - bound), np.exp(some), 10.0**some]
        marks += [bound * (1 + some), np.outer(some[:40], some[:40]).ravel() * bound]
        places = np.unique(np.concatenate([*marks, bound * 2.0 ** np.arange(-60, 61)]))
        places = np.unique(places[(places > 1e-300) & (places < 1e300)])
        near = [places * (1 + sign * 10.0**-k) for k in (1, 2, 3, 5, 7, 9, 12) for sign in (1, -1)]
    ulps = [np.nextafter(places, 0), np.nextafter(places, np.inf)]
    return np.concatenate([places, *near, *ulps, (places[1:] + places[:-1]) / 2])


def _scan(case: Example, bound: float, span: float, points: int) -> float:
    """Looks at so many norms from bound / span to bound span, and closer where lengths jump or are
    largest. Returns the logarithm of the ratio of neighbours.
    """
    began = time.monotonic()
    reach = np.log(span)
    grid = bound * np.exp(np.linspace(-reach, reach, points))
    lengths = np.full(points, np.nan)
    order = sorted(range(PARTS), key=lambda k: int(f"{k:06b}"[::-1], 2))  # halves what is left
    done = 0
    for part in order:
        lengths[part::PARTS] = _lengths(case, grid[part::PARTS], bound)
        done += 1
        if time.monotonic() - began > PATIENCE:
            break
    seen = np.flatnonzero(~np.isnan(lengths))
    found = lengths[seen]
    jumps = np.abs(np.diff(np.log(np.maximum(found, 1e-300))))
    peaks = np.maximum(found[1:], found[:-1])
    places = np.union1d(jumps.argsort()[-CLOSER:], peaks.argsort()[-CLOSER:])
    low = np.log(grid[seen[places]])
    high = np.log(grid[seen[places + 1]])
    closer = np.exp(low[:, None] + (high - low)[:, None] * np.linspace(0, 1, ZOOM))
    if done == PARTS:
        _lengths(case, closer.ravel(), bound)
    return 2 * reach / points * PARTS / done


def bound(case: Example) -> str:
    """Nothing that a client sends is longer than the bound, whatever it would have sent."""
    bounds = _bounds(case)
    steps = []
    for nth, most in enumerate(bounds):
        _lengths(case, norms(most).numpy(), most)
        _lengths(case, _written(case, most), most)
        points = POINTS >> (4 if nth else 0)  # the bound is first what the config says
        steps.append((_scan(case, most, SPAN, points), _scan(case, most, MIDDLE, points)))
    if not bounds:
        return "bounds nothing"
    whole, middle = steps[0]
    return (
        f"norms from {1 / SPAN:g} to {SPAN:g} of the bound, {whole:.1g} of a norm between, and "
        f"{middle:.1g} from {1 / MIDDLE:g} to {MIDDLE:g}; a narrower range of norms is not seen"
    )


def each_alone(case: Example) -> str:
    """What one client gets does not depend on the others of its block."""
    view = case.view(TOGETHER)
    updates = tensor(TOGETHER, case.d)
    together = case.member.send(updates.clone(), view)
    hold(together.shape == updates.shape, f"send gives {list(together.shape)}")
    states = case.member.next_state(together.clone(), together * 0.5, view)
    for place in (0, 7, TOGETHER - 1):
        alone = _alone(view, place)
        sent = case.member.send(updates[place : place + 1].clone(), alone)
        hold(close(sent[0], together[place]), f"client {place} alone sends something else")
        if states is not None:
            one = together[place : place + 1]
            mine = case.member.next_state(one.clone(), one * 0.5, alone)
            hold(close(mine[0], states[place]), f"client {place} alone has another state")
    for most in _bounds(case):
        inputs = norms(most)
        factors = _factors(case, inputs, most)
        for norm, factor in zip(inputs, factors, strict=True):
            one = float(_factors(case, norm[None], most)[0])
            wrong = f"norm {float(norm):g} gets factor {one:g} alone and {float(factor):g} among "
            hold(close(one, factor), f"{wrong}others")
    return f"1 client as {TOGETHER}"


def no_hidden_state(case: Example) -> str:
    """It keeps nothing but what it says: asked twice, it answers the same."""
    copy = pickle.loads(pickle.dumps(case.member))
    view = case.view(TOGETHER)
    updates = tensor(TOGETHER, case.d)
    first = case.member.send(updates.clone(), view)
    for most in _bounds(case):
        factors = _factors(case, norms(most), most)
        _factors(case, norms(most) * 3, most)
        hold(torch.equal(_factors(case, norms(most), most), factors), "other factors")
    for member in (case.member, copy):
        hold(torch.equal(member.send(updates.clone(), view), first), "something else is sent")
    return "the same answers twice"


def inverse(case: Example) -> str:
    """`invert` undoes `send`, as an audit needs."""
    view = case.view(TOGETHER)
    updates = tensor(TOGETHER, case.d)
    back = case.member.invert(case.member.send(updates.clone(), view), view)
    off = float((back.double() - updates).abs().max())
    hold(close(back, updates, 1e-5), f"invert(send(u)) is off by {off:.2g}")
    return f"to {off:.1g}"


def memory(case: Example) -> str:
    """The client state is a vector for each, and finite."""
    view = case.view(TOGETHER)
    sent = tensor(TOGETHER, case.d) * 0.1
    previous = sent.clone()
    state = case.member.next_state(3 * sent, previous, view)
    hold(torch.equal(previous, sent), "next_state changes what is sent")
    if state is None:
        return "clients have no state"
    hold(state.shape == sent.shape, f"next_state gives {list(state.shape)}, for {list(sent.shape)}")
    hold(torch.isfinite(state).all(), "it is not finite")
    hold(case.member.stateful, "stateful is False")
    return "a vector for each client"


def receive(case: Example) -> str:
    """The mean update is made of the released sum and the member's own state alone."""
    member = case.member
    released = made_up(case.d)
    model = made_up(case.d, step=2).astype(np.float32)
    facts = Facts(2, 0.1, model, divisor=9.0, cohort=9, population=24)
    start = member.start(case.d)
    states = []
    for _ in range(2):
        state = copied(start)
        sums = released.copy()
        mean = np.array(member.receive(sums, state, facts))
        hold(mean.shape == (case.d,), f"it is {list(mean.shape)}, for {case.d} parameters")
        hold(mean.dtype == np.float64, f"it is {mean.dtype}, not float64")
        hold(np.isfinite(mean).all(), "it is not finite")
        hold(np.array_equal(sums, released), "the released sum is changed in place")
        same_shapes(start, state)
        states.append(mean)
        member.receive(-3 * released, copied(start), facts)
    hold(np.array_equal(states[0], states[1]), "asked twice, it is another")
    broadcast = member.broadcast_state(member.start(case.d)).values()
    single = all(array.dtype == np.float32 for array in broadcast)
    hold(single, "the broadcast state is not float32")
    return f"keeps {', '.join(start) or 'nothing'}"


def _columns(k: int, bound: float) -> dict[str, np.ndarray]:
    """Columns of clients, some of which have failed."""
    lengths = norms(bound).numpy()[:k]
    lengths[3] = np.nan
    lengths[5] = np.inf
    losses = np.abs(made_up(k, step=3))
    losses[[3, 4]] = np.nan
    factors = np.minimum(1.0, bound / np.maximum(np.nan_to_num(lengths), 1e-12))
    available = {"client": np.arange(k), "norm": lengths, "factor": factors}
    return available | {"clipped": (factors < 1).astype(float), "train_loss": losses}


def answers(case: Example) -> str:
    """What clients answer to a query is within the bound of its query, of each client alone."""
    queries = case.member.queries()
    if not queries:
        return "no queries"
    shares = sum(query.share for query in queries)
    hold(0 < shares < 1, f"the shares of the queries add up to {shares:g}")
    for most in _bounds(case):
        columns = _columns(40, most)
        answers = case.member.answers(columns, most)
        for query in queries:
            answer = np.nan_to_num(answers[query.name])
            hold(answer.shape == (40,), f"{query.name} has {list(answer.shape)} for 40 clients")
            worst = float(np.abs(answer).max())
            beyond = f"{query.name} is answered with {worst:g}, above its bound of {query.bound:g}"
            hold(worst <= query.bound, beyond)
            for place in (0, 3, 20, 39):
                one = {name: column[place : place + 1] for name, column in columns.items()}
                mine = np.nan_to_num(case.member.answers(one, most)[query.name])
                hold(close(mine[0], answer[place]), f"{query.name} depends on the other clients")
    return ", ".join(f"{query.name} within {query.bound:g}" for query in queries)


def adapt(case: Example) -> str:
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
            other = {name: -2 * total for name, total in sums.items()}
            case.member.adapt(3 * most, other, 5, case.member.start(case.d))
            second = case.member.adapt(most, sums, 9, case.member.start(case.d))
            hold(second == following, "asked twice, it is another")
    return "from noisy sums alone"


def needs_a_bound(case: Example) -> str:
    """A bound that is no positive number is refused."""
    if case.member.initial_bound is None:
        return "bounds nothing of what is sent"
    for wrong in (0.0, -1.0):
        try:
            Example(case.section, {**case.values, "bound": wrong}).member  # noqa: B018 - made here
        except ConfigError:
            continue
        hold(False, f"bound={wrong:g} is taken; give it as Field(gt=0)")
    return "0 and -1 are refused"
