"""The contract of local training: see `raydpfl.methods.local`."""

from copy import deepcopy

import numpy as np
import torch
from torch import nn

from raydpfl import models
from raydpfl.check.contract import backends, check_shapes, close, hold, normals, tensor
from raydpfl.check.example import Example
from raydpfl.core.messages import Facts
from raydpfl.core.prng import keyed_globals
from raydpfl.methods.local.base import Step
from raydpfl.models.tasks import Classification, Form, Target
from raydpfl.training.backend_check import mismatch
from raydpfl.training.backends import REFERENCE
from raydpfl.training.trainer import Trainer
from raydpfl.training.validation import check_rule

K = 5
FEATURES = 6


def rule(case: Example) -> str:
    """A step for several clients is that for each of them, and changes nothing that it is given."""
    check_rule(case.member)
    return "clients together as each alone"


def no_hidden_state(case: Example) -> str:
    """Its step keeps nothing but its state: made twice, it is the same to the last bit."""
    member = case.member
    if member.trains:
        return "it has no step"
    x = tensor(K, 7).float()
    gradient = tensor(K, 7, step=1).float()
    step = Step(0, member.learning_rate(0), x[0])
    results = []
    for _ in range(2):
        model, state = member.step(x.clone(), gradient.clone(), member.fresh(x.clone()), step)
        results.append(model)
        member.step(model, -2 * gradient, state, Step(1, step.lr, x[0]))
    hold(torch.equal(*results), "asked twice, it gives something else")
    hold(torch.isfinite(results[0]).all(), "a step from finite numbers is not finite")
    return "the same step twice"


def _dense() -> nn.Module:
    with keyed_globals(0):
        return nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 3))


def _module_and_form(backend: str) -> tuple[nn.Module, Form]:
    """A small module that a backend can train, and what its samples are."""
    if backend != "convolutional":
        return _dense(), Form((FEATURES,), Target(classes=3), Classification())
    with keyed_globals(0):
        layers = [
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.MaxPool2d(2, stride=1),
            nn.Flatten(),
            nn.Linear(4 * (FEATURES - 3) ** 2, 3),
        ]
    form = Form((1, FEATURES, FEATURES), Target(classes=3), Classification())
    return nn.Sequential(*layers), form


def training(case: Example) -> str:
    """A `train` of its own changes the module that it is given, by what it is given alone, whoever
    was trained before.
    """
    member = case.member
    if not member.trains:
        return "trains by steps"
    module = _dense()
    start = models.flatten(module)
    x = tensor(2, 12, FEATURES).float()
    y = torch.arange(24).view(2, 12) % 3
    results = []
    for clients in ([3, -1], [7, 3]):
        trainer = Trainer(module, member, backend=REFERENCE, seed=1, user_defined=True)
        slot = clients.index(3)
        order = [0, 1] if slot == 0 else [1, 0]
        rows = x[order], y[order], [12, 12]
        chunk = trainer.chunk(start, *rows, t=1, clients=clients, draws=[0, 0])
        results += [block.updates[0] for block in chunk if block.slots[0] == slot]
    hold(torch.isfinite(results[0]).all(), "it has trained to numbers that are not finite")
    hold(torch.equal(*results), "asked twice, it trains to something else")
    hold(bool(results[0].any()), "the module is as it was")
    return "by itself, the same twice"


def every_backend(case: Example) -> str:
    """Every backend that can carry out its rule takes the same first steps."""
    agreeing_backends = []
    if case.member.trains:
        return "trains by itself"
    for clip, clip_note in ((None, ""), (1.0, " with clipping of each sample")):
        for backend in backends(case.member, clip):
            module, form = _module_and_form(backend)
            difference = mismatch(module, case.member, form, backend, clip)
            hold(difference is None, f"{backend}{clip_note}: {difference}")
            agreeing_backends.append(backend)
    return f"{', '.join(dict.fromkeys(agreeing_backends))} as the loop"


def numbers(case: Example) -> str:
    """Learning rates are positive numbers, and a client trains on rows that it has."""
    member = case.member
    for t in (0, 1, 50):
        rate = member.learning_rate(t)
        hold(np.isfinite(rate) and rate > 0, f"the learning rate of round {t} is {rate}")
    sizes = np.array([1, 2, 7, 100, 5000])
    counts = np.asarray(member.max_rows(sizes))
    hold(counts.shape == sizes.shape and counts.dtype.kind == "i", "max_rows gives no int64 [C]")
    hold(((counts >= 0) & (counts <= sizes)).all(), "max_rows gives more rows than there are")
    batches = [member.batch_size(rows) for rows in sizes.tolist()]
    for rows, batch in zip(sizes.tolist(), batches, strict=True):
        hold(1 <= batch <= rows, f"a client of {rows} rows has batches of {batch}")
    hold(batches == sorted(batches), "a client of more rows has smaller batches")
    joint_batches = np.asarray(member.batch_sizes(sizes)).tolist()
    hold(joint_batches == batches, "batch_sizes of a client depends on the others")
    return f"learning rate {member.learning_rate(0):g} in round 0"


def memory(case: Example) -> str:
    """What corrects gradients and the client state are a vector for each, of that client
    alone.
    """
    member = case.member
    view, lone_view = case.view(K), case.view(1)
    rows = tensor(K, case.d, step=2)
    idle = member.idle(lone_view)
    hold(idle.shape == (case.d,), f"idle gives {list(idle.shape)}")
    correction = member.correction(view)
    states = (member.next_state(rows.clone(), view), member.next_state(rows[:1].clone(), lone_view))
    for name, state, client_value in (
        ("correction", correction, member.correction(lone_view)),
        ("state", *states),
    ):
        if state is None:
            continue
        hold(state.shape == (K, case.d), f"{name} gives {list(state.shape)} for {K} clients")
        hold(torch.isfinite(state).all(), f"{name} is not finite")
        hold(close(client_value[0], state[0], 1e-6), f"{name} of a client depends on the others")
    if correction is not None:
        hold(correction.dtype == torch.float32, f"correction is {correction.dtype}")
    return "clients have state" if member.stateful else "clients have no state"


def receive(case: Example) -> str:
    """The server's part follows from the mean update and its own state alone."""
    member = case.member
    start = member.start(case.d)
    mean = normals(case.d)
    model = normals(case.d, step=1).astype(np.float32)
    facts = Facts(1, member.learning_rate(1), model, divisor=9.0, cohort=9, population=24)
    states = []
    for _ in range(2):
        state = deepcopy(start)
        sums = mean.copy()
        member.receive(sums, state, facts)
        hold(np.array_equal(sums, mean), "the mean update is changed in place")
        check_shapes(start, state)
        states.append(state)
        member.receive(-2 * mean, deepcopy(start), facts)
    for name in start:
        hold(np.array_equal(states[0][name], states[1][name]), f"asked twice, {name} is another")
    return f"keeps {', '.join(start) or 'nothing'}"
