"""The contract of a bounding: see `raydpfl.methods.bounding`."""

import math
import pickle
import time
from copy import deepcopy
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from raydpfl.check.contract import check_shapes, close, hold, normals, tensor
from raydpfl.check.example import Example
from raydpfl.core import native
from raydpfl.core.messages import Facts, check_bound
from raydpfl.core.prng import keyed_globals
from raydpfl.errors import ConfigError
from raydpfl.methods.bounding import Bounding
from raydpfl.methods.local import Sgd
from raydpfl.models import flatten
from raydpfl.models.tasks.regression import Regression
from raydpfl.training.backends import BACKENDS, missing_requirement
from raydpfl.training.trainer import Trainer

ABSOLUTE = (0.0, 1e-300, 1e-12, 1e12, 1e300)
RELATIVE = (0.5, 1.0, 1 + 1e-12, 1.5, 2.0, 7.0)  # of the bound
BLOCK_CLIENTS = 25
RANDOM = 200
# norms of a scan: over all of SPAN, and over the middle of it, on each side of the bound
POINTS = 1 << 21
SPAN = 1e30
MIDDLE = 1e3
PARTS = 64  # of a scan, each of which is spread over all of it
PATIENCE = 5.0  # seconds of one scan; a slow member is looked at in fewer parts
ZOOM = 1000  # norms between two neighbours of a scan, around a jump or a largest length
ZOOM_PLACES = 200  # such places
# of `scales`
EXPONENTS = range(-30, 31, 3)  # powers of ten, over all that floating point has
PARTIAL = (-30, -23, -14, 0, 9, 18)  # of inputs and of targets
ROUNDING = 1e-5
WIDTH = 16


def norms(bound: float) -> torch.Tensor:
    """Norms that a bounding may meet, float64 [k]."""
    random_norms = np.exp(3 * normals(RANDOM)) * bound
    return torch.tensor([*ABSOLUTE, *(bound * factor for factor in RELATIVE), *random_norms])


def _factors(case: Example, norms: torch.Tensor, bound: float) -> torch.Tensor:
    with keyed_globals(1):  # as in a run
        return case.member.factors(norms.clone(), bound)


def _bounds(case: Example) -> list[float]:
    initial_bound = case.member.initial_bound
    if initial_bound is None:
        return []
    return [initial_bound, 1e-3, 1.0, 50.0] if case.member.adapts else [initial_bound]


def _lengths(case: Example, input_norms: np.ndarray, bound: float) -> np.ndarray:
    """The lengths that are sent, float64 [k], over the bound. Raises `BrokenClause` above 1, and
    for factors that are none.
    """
    factors = _factors(case, torch.from_numpy(input_norms), bound)
    shape = list(factors.shape)
    hold(shape == [len(input_norms)], f"{len(input_norms)} norms get {shape} factors")
    hold(factors.dtype == torch.float64, f"factors are {factors.dtype}, not float64")
    factor_values = factors.numpy()
    is_valid = np.isfinite(factor_values) & (factor_values >= 0)
    place = int(np.argmin(is_valid))
    hold(is_valid.all(), f"the factor of norm {input_norms[place]:g} is {factor_values[place]:g}")
    with np.errstate(over="ignore"):
        lengths = input_norms * factor_values / bound
    place = int(lengths.argmax())
    norm, length = float(input_norms[place]), float(lengths[place] * bound)
    message = f"norm {norm!r} is sent with length {length!r}, above the bound of {bound!r}"
    hold(lengths[place] <= 1 + 1e-12, message)
    return lengths


def _critical_norms(case: Example, bound: float) -> np.ndarray:
    """Norms at, next to and between the numbers in the member's settings, float64 [k]."""
    fields = case.member.model_dump().values()
    numbers = {float(field) for field in fields if isinstance(field, (int, float))}
    base = np.array([0.5, 1.0, 2.0, bound, *sorted(map(abs, numbers))[:200]])
    with np.errstate(over="ignore"):
        marks = [base, base * bound, base + bound, np.abs(base - bound), np.exp(base), 10.0**base]
        marks += [bound * (1 + base), np.outer(base[:40], base[:40]).ravel() * bound]
        places = np.unique(np.concatenate([*marks, bound * 2.0 ** np.arange(-60, 61)]))
        places = np.unique(places[(places > 1e-300) & (places < 1e300)])
        sides = [places * (1 + sign * 10.0**-k) for k in (1, 2, 3, 5, 7, 9, 12) for sign in (1, -1)]
    ulps = [np.nextafter(places, 0), np.nextafter(places, np.inf)]
    return np.concatenate([places, *sides, *ulps, (places[1:] + places[:-1]) / 2])


def _scan(case: Example, bound: float, span: float, points: int) -> float:
    """Looks at so many norms from bound / span to bound span, and closer where lengths jump or are
    largest. Returns the logarithm of the ratio of neighbours.
    """
    start_time = time.monotonic()
    reach = np.log(span)
    grid = bound * np.exp(np.linspace(-reach, reach, points))
    lengths = np.full(points, np.nan)
    order = sorted(range(PARTS), key=lambda k: int(f"{k:06b}"[::-1], 2))  # halves what is left
    parts_done = 0
    for part in order:
        lengths[part::PARTS] = _lengths(case, grid[part::PARTS], bound)
        parts_done += 1
        if time.monotonic() - start_time > PATIENCE:
            break
    scan_indices = np.flatnonzero(~np.isnan(lengths))
    scan_lengths = lengths[scan_indices]
    jumps = np.abs(np.diff(np.log(np.maximum(scan_lengths, 1e-300))))
    peaks = np.maximum(scan_lengths[1:], scan_lengths[:-1])
    places = np.union1d(jumps.argsort()[-ZOOM_PLACES:], peaks.argsort()[-ZOOM_PLACES:])
    low = np.log(grid[scan_indices[places]])
    high = np.log(grid[scan_indices[places + 1]])
    zoom_norms = np.exp(low[:, None] + (high - low)[:, None] * np.linspace(0, 1, ZOOM))
    if parts_done == PARTS:
        _lengths(case, zoom_norms.ravel(), bound)
    return 2 * reach / points * PARTS / parts_done


def bound(case: Example) -> str:
    """Nothing that a client sends is longer than the bound, whatever it would have sent."""
    bounds = _bounds(case)
    steps = []
    for index, max_norm in enumerate(bounds):
        _lengths(case, norms(max_norm).numpy(), max_norm)
        _lengths(case, _critical_norms(case, max_norm), max_norm)
        points = POINTS >> (4 if index else 0)  # the bound is first what the config says
        steps.append((_scan(case, max_norm, SPAN, points), _scan(case, max_norm, MIDDLE, points)))
    if not bounds:
        return "bounds nothing"
    step, middle = steps[0]
    return (
        f"norms from {1 / SPAN:g} to {SPAN:g} of the bound, {step:.1g} of a norm between, and "
        f"{middle:.1g} from {1 / MIDDLE:g} to {MIDDLE:g}; a narrower range of norms is not seen"
    )


def each_alone(case: Example) -> str:
    """What one client gets does not depend on the others of its block."""
    view = case.view(BLOCK_CLIENTS)
    updates = tensor(BLOCK_CLIENTS, case.d)
    block = case.member.send(updates.clone(), view)
    hold(block.shape == updates.shape, f"send gives {list(block.shape)}")
    states = case.member.next_state(block.clone(), block * 0.5, view)
    for place in (0, 7, BLOCK_CLIENTS - 1):
        client_view = replace(view, load_state=partial(view.state.narrow, 0, place, 1))
        update = case.member.send(updates[place : place + 1].clone(), client_view)
        hold(close(update[0], block[place]), f"client {place} alone sends something else")
        if states is not None:
            one = block[place : place + 1]
            client_state = case.member.next_state(one.clone(), one * 0.5, client_view)
            hold(close(client_state[0], states[place]), f"client {place} alone has another state")
    for max_norm in _bounds(case):
        inputs = norms(max_norm)
        factors = _factors(case, inputs, max_norm)
        for norm, factor in zip(inputs, factors, strict=True):
            one = float(_factors(case, norm[None], max_norm)[0])
            message = f"norm {float(norm):g} gets factor {one:g} alone and {float(factor):g} among "
            hold(close(one, factor), f"{message}others")
    return f"1 client as {BLOCK_CLIENTS}"


def no_hidden_state(case: Example) -> str:
    """It keeps nothing but what it says: asked twice, it answers the same."""
    copy = pickle.loads(pickle.dumps(case.member))
    view = case.view(BLOCK_CLIENTS)
    updates = tensor(BLOCK_CLIENTS, case.d)
    block = case.member.send(updates.clone(), view)
    for max_norm in _bounds(case):
        factors = _factors(case, norms(max_norm), max_norm)
        _factors(case, norms(max_norm) * 3, max_norm)
        hold(torch.equal(_factors(case, norms(max_norm), max_norm), factors), "other factors")
    for member in (case.member, copy):
        hold(torch.equal(member.send(updates.clone(), view), block), "something else is sent")
    return "the same answers twice"


def inverse(case: Example) -> str:
    """`invert` undoes `send`, as an audit needs."""
    view = case.view(BLOCK_CLIENTS)
    updates = tensor(BLOCK_CLIENTS, case.d)
    inverted_updates = case.member.invert(case.member.send(updates.clone(), view), view)
    error = float((inverted_updates.double() - updates).abs().max())
    hold(close(inverted_updates, updates, 1e-5), f"invert(send(u)) is off by {error:.2g}")
    return f"to {error:.1g}"


def memory(case: Example) -> str:
    """The client state is a vector for each, and finite."""
    view = case.view(BLOCK_CLIENTS)
    rows = tensor(BLOCK_CLIENTS, case.d) * 0.1
    previous = rows.clone()
    state = case.member.next_state(3 * rows, previous, view)
    hold(torch.equal(previous, rows), "next_state changes what is sent")
    if state is None:
        return "clients have no state"
    hold(state.shape == rows.shape, f"next_state gives {list(state.shape)}, for {list(rows.shape)}")
    hold(torch.isfinite(state).all(), "it is not finite")
    hold(case.member.stateful, "stateful is False")
    return "a vector for each client"


def receive(case: Example) -> str:
    """The mean update is made of the released sum and the member's own state alone."""
    member = case.member
    released_sum = normals(case.d)
    model = normals(case.d, step=2).astype(np.float32)
    facts = Facts(2, 0.1, model, divisor=9.0, cohort=9, population=24)
    start = member.start(case.d)
    states = []
    for _ in range(2):
        state = deepcopy(start)
        sums = released_sum.copy()
        mean = np.array(member.receive(sums, state, facts))
        hold(mean.shape == (case.d,), f"it is {list(mean.shape)}, for {case.d} parameters")
        hold(mean.dtype == np.float64, f"it is {mean.dtype}, not float64")
        hold(np.isfinite(mean).all(), "it is not finite")
        hold(np.array_equal(sums, released_sum), "the released sum is changed in place")
        check_shapes(start, state)
        states.append(mean)
        member.receive(-3 * released_sum, deepcopy(start), facts)
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
    losses = np.abs(normals(k, step=3))
    losses[[3, 4]] = np.nan
    factors = np.minimum(1.0, bound / np.maximum(np.nan_to_num(lengths), 1e-12))
    available = {"client": np.arange(k), "norm": lengths, "factor": factors}
    return available | {"clipped": (factors < 1).astype(float), "train_loss": losses}


def _usual_columns(bound: float, factor: float) -> dict[str, np.ndarray]:
    """As `_columns`, of clients that have not failed, norms and losses times a factor."""
    columns = {name: column[11:] for name, column in _columns(40, bound).items()}
    return columns | {name: factor * columns[name] for name in ("norm", "train_loss")}


def answers(case: Example) -> str:
    """What clients answer to a query is within the bound of its query, of each client alone."""
    queries = case.member.queries()
    if not queries:
        return "no queries"
    shares = sum(query.share for query in queries)
    hold(0 < shares < 1, f"the shares of the queries add up to {shares:g}")
    for max_norm in _bounds(case):
        columns = _columns(40, max_norm)
        answers = case.member.answers(columns, max_norm)
        for query in queries:
            answer = np.nan_to_num(answers[query.name])
            hold(answer.shape == (40,), f"{query.name} has {list(answer.shape)} for 40 clients")
            peak = float(np.abs(answer).max())
            message = f"{query.name} is answered with {peak:g}, above its bound of {query.bound:g}"
            hold(peak <= query.bound, message)
            for place in (0, 3, 20, 39):
                one = {name: column[place : place + 1] for name, column in columns.items()}
                reply = np.nan_to_num(case.member.answers(one, max_norm)[query.name])
                hold(close(reply[0], answer[place]), f"{query.name} depends on the other clients")
    return ", ".join(f"{query.name} within {query.bound:g}" for query in queries)


def adapt(case: Example) -> str:
    """The next bound is positive and finite, and follows from released sums alone."""
    if not case.member.adapts:
        return "the bound stays"
    member: Bounding = Example(case.section, case.values).member  # that has answered nothing yet
    queries = member.queries()
    for max_norm in _bounds(case):
        for size in (0.0, 0.3, -0.3, 1.0, -1.0, 40.0, -40.0):
            sums = {query.name: size * query.bound * 9 for query in queries}
            if queries:
                member.answers(_usual_columns(max_norm, 1.0), max_norm)
            next_bound = member.adapt(max_norm, dict(sums), 9, member.start(case.d))
            message = f"from a bound of {max_norm:g} and sums {sums} it becomes {next_bound}"
            hold(np.isfinite(next_bound) and 0 < next_bound <= 1e15, message)
            other_sums = {name: -2 * total for name, total in sums.items()}
            member.adapt(3 * max_norm, other_sums, 5, member.start(case.d))
            if queries:
                member.answers(_usual_columns(max_norm, 3.0), max_norm)
            repeat_bound = member.adapt(max_norm, sums, 9, member.start(case.d))
            hold(repeat_bound == next_bound, "asked again, after other answers, it is another")
    return "from noisy sums alone"


def needs_a_bound(case: Example) -> str:
    """A bound that is no positive number is refused."""
    if case.member.initial_bound is None:
        return "bounds nothing of what is sent"
    for number in (0.0, -1.0):
        try:
            Example(case.section, {**case.values, "bound": number}).member  # noqa: B018 - made here
        except ConfigError:
            continue
        hold(False, f"bound={number:g} is taken; give it as Field(gt=0)")
    return "0 and -1 are refused"


def scales(case: Example) -> str:
    """Bounds and what is bounded may be of any size: a bound is kept, or refused as out of
    range.
    """
    member = case.member
    if member.initial_bound is None and member.sample_bound is None:
        return "bounds nothing"
    has_bound = "bound" in case.values
    scales = [
        exponent
        for exponent in (EXPONENTS if has_bound else (0,))
        if _accepts_bound(case, {"bound": 10.0**exponent} if has_bound else {})
    ]
    hold(scales, "no bound is taken")
    return f"bounds of 1e{scales[0]} to 1e{scales[-1]}" if has_bound else "the bound that it has"


def _accepts_bound(case: Example, bound: dict[str, float]) -> bool:
    """Whether a bound is taken. Raises `BrokenClause` for one that is taken and not kept."""
    values = case.values | bound
    try:
        member: Bounding = Example(case.section, values).member
        limit = member.initial_bound or member.sample_bound
        assert limit is not None
        check_bound("bounding.bound", limit)
    except ConfigError:
        return False
    if member.initial_bound is not None:
        _check_vectors(member, limit)
    else:
        for backend in (name for name in BACKENDS if not missing_requirement(name, Sgd(), limit)):
            _check_samples(backend, limit)
    return True


def _check_vectors(member: Bounding, bound: float) -> None:
    rows = torch.from_numpy(normals(WIDTH)).float() * 10.0 ** torch.tensor(EXPONENTS)[:, None]
    for vectors in (rows, rows.double()):
        norms = torch.from_numpy(native.norms(vectors))
        with keyed_globals(1):
            factors = member.factors(norms.clone(), bound)
        outputs = (factors[:, None] * vectors.double()).tolist()
        for exponent, norm in zip(EXPONENTS, (math.hypot(*row) for row in outputs), strict=True):
            message = f"a vector of size 1e{exponent} is sent with norm {norm:g}, above {bound:g}"
            hold(norm <= bound * (1 + 1e-9), message)


def _check_samples(backend: str, bound: float) -> None:
    """Raises `BrokenClause` unless a step of this backend, of one sample, is within the bound on
    its gradient, for inputs and errors of every size, or shows as not finite. Only weights that
    are 0 are looked at, as others round the step that they are moved by.
    """
    sizes = [(inputs, errors) for inputs in PARTIAL for errors in PARTIAL]
    x = torch.from_numpy(normals(len(sizes), 1, 1, 6, 6)).float()
    y = torch.ones(len(sizes), 1)
    for place, (inputs, errors) in enumerate(sizes):
        x[place] *= 10.0**inputs
        y[place] *= 10.0**errors
    rule = Sgd(steps=1, batch=1, lr=1.0)
    for bias in (True, False):
        module, count = _module(backend, bias)
        trainer = Trainer(module, rule, backend=backend, seed=0, clip=bound, task=Regression())
        model, rows = flatten(module), [1] * len(sizes)
        clients, draws = list(range(len(sizes))), [0] * len(sizes)
        for block in trainer.chunk(model, x, y, rows, t=0, clients=clients, draws=draws):
            steps = np.asarray(block.updates[:, -count:], np.float64)
            for slot, step in zip(block.slots.tolist(), steps, strict=True):
                norm = math.hypot(*step)
                inputs, errors = sizes[slot]
                message = f"{backend}: inputs of 1e{inputs}, an error of 1e{errors}: {norm:g}"
                is_bounded = norm <= bound * (1 + ROUNDING) or not math.isfinite(norm)
                hold(is_bounded, f"{message}, above {bound:g}")


def _module(backend: str, bias: bool) -> tuple[nn.Module, int]:
    """A regression that begins at 0, and its number of weights; for convolutions, after filters
    that are too small to move it.
    """
    last = nn.Linear(36 if backend != "convolutional" else 8, 1, bias=bias)
    layers: list[nn.Module] = [nn.Flatten()]
    if backend == "convolutional":
        filters = nn.Conv2d(1, 2, 3, bias=False)
        nn.init.constant_(filters.weight, 2.0**-30)
        layers = [filters, nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()]
    for parameter in last.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(*layers, last), sum(weight.numel() for weight in last.parameters())
