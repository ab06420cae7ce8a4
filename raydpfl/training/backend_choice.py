"""Which backend trains a model.

The backends that suit a model (`_ranking`) are compared with the loop on made-up rows; the log says
why one is left out. A run shorter than `MIN_RUN_SECONDS` takes the first that is left, a longer one
the fastest, unless it saves less than a tenth. On a GPU, and for compiled code, the order decides.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> choose_backend(module, Sgd(steps=20, batch=10), form)
'compiled'
"""

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from raydpfl.core import native
from raydpfl.core.hardware import Precision
from raydpfl.errors import ConfigError
from raydpfl.methods.local.base import Local
from raydpfl.methods.local.sgd import Sgd  # noqa: F401  (the example above)
from raydpfl.models.linear_stack import NoStack, stack
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.models.tasks import Classification, Form, Target  # noqa: F401  (the example above)
from raydpfl.training.backend_check import mismatch
from raydpfl.training.backend_timing import StepTimes
from raydpfl.training.backends import BACKENDS, REFERENCE, check_backend, missing_requirement
from raydpfl.training.backends.compiled import compilation_refusal
from raydpfl.training.backends.convolutional import clipping_refusal, links
from raydpfl.training.validation import check_loss, check_no_mixing, check_rule, foreign_generator

log = logging.getLogger("raydpfl")
UNFIT_REASON = "this backend does not fit the model"
NEXT_MESSAGE = "clients are trained by %s; %s does not fit the model: %s"
SLOW_MESSAGE = "clients are trained by the loop, one at a time, which is slow: %s; faster: %s"
FASTEST_MESSAGE = "clients are trained by %s, the fastest here: %s"
MIN_RUN_SECONDS = 5.0  # seconds of a run whose backends are timed
MAX_TIMING_SECONDS = 2.0  # seconds after which no other backend is timed, or a twentieth of the run
GAIN = 0.9  # of the time of the first, which another has to take at most
CHAIN = "convolutions, activations and max-pooling in a row, then linear layers (as model.kind cnn)"

Demands = tuple[Local, float | None, Precision, ParameterSplit]
"""What `missing_requirement` is called with, after the backend."""


def choose_backend(
    module: nn.Module,
    local: Local,
    form: Form,
    backend: str = "auto",
    clip: float | None = None,
    gpu: bool = False,
    precision: Precision = "float32",
    times: StepTimes | None = None,
) -> str:
    """The backend that trains `module`, which stays as it is, on samples of this form: `backend`,
    or for "auto" the best that fits, by `times` (None: by the order). `clip`: the bound on every
    sample's gradient, if any; `gpu`: whether training is on one. Raises `ConfigError` for a rule,
    loss or module that cannot be trained as asked, or a backend that does not fit.
    """
    if gpu and backend == "compiled":
        expected = "auto, or another backend; compiled code is for the CPU"
        raise ConfigError("client.backend", backend, expected)
    check_rule(local)
    check_loss(module, form)
    if clip is not None:
        check_no_mixing(module, form)
    demands = (local, clip, precision, ParameterSplit.of(module))
    backends = _ranking(module, local, form, clip, gpu) if backend in ("auto", REFERENCE) else []
    candidates = _candidates(backends, demands) if backend == "auto" else [backend]
    generator_name = foreign_generator(module, form)
    if generator_name and backend in BACKENDS and not BACKENDS[backend].one_by_one:
        reason = f"the module draws from {generator_name}, which has to be client by client"
        raise ConfigError("client.backend", backend, f"auto or {REFERENCE}; {reason}")
    if generator_name and backend == "auto":
        candidates = [REFERENCE]
    for name in candidates:
        check_backend(name, *demands)
    find_mismatch = partial(mismatch, module, local, form, clip=clip, precision=precision)
    matches, mismatches = _fit(candidates, find_mismatch, times)
    if not matches:
        expected = f"auto or {REFERENCE}; {UNFIT_REASON}: {mismatches[backend]}"
        raise ConfigError("client.backend", backend, expected)
    if times and len(matches) > 1:
        return _fastest(times, matches)
    if matches[0] == REFERENCE:
        hindrance = _hindrance(module, backends, demands, generator_name, mismatches)
        log.warning(SLOW_MESSAGE, *hindrance)
    return matches[0]


def _fit(
    candidates: list[str], find_mismatch: Callable[..., str | None], times: StepTimes | None
) -> tuple[list[str], dict[str, str]]:
    """The candidates that fit, the first alone for a short run; and why others do not fit."""
    matches: list[str] = []
    mismatches = {}
    for name, successor in pairwise([*candidates, ""]):
        reason = None if name == REFERENCE else find_mismatch(backend=name)
        if reason is None:
            matches.append(name)
            is_final = not successor or BACKENDS[name].threads
            if is_final or times is None or _is_short(times, matches):
                break
            continue
        mismatches[name] = reason
        if successor not in ("", REFERENCE) and not matches:
            log.warning(NEXT_MESSAGE, successor, name, reason)
    return matches, mismatches


def _is_short(times: StepTimes, matches: list[str]) -> bool:
    """Whether a run by the first backend that fits is too short to look for another."""
    return len(matches) == 1 and times.of(matches[0]) * times.work.steps < MIN_RUN_SECONDS


def _fastest(times: StepTimes, backends: list[str]) -> str:
    start_time = time.perf_counter()
    first, *rest = backends
    seconds = {first: times.of(first)}
    time_limit = max(MAX_TIMING_SECONDS, seconds[first] * times.work.steps / 20)
    for name in rest:
        if time.perf_counter() - start_time < time_limit:
            seconds[name] = times.of(name, min(seconds.values()))
    best = min(seconds, key=lambda name: seconds[name])
    choice = best if seconds[best] <= GAIN * seconds[first] else first
    timings = (f"{name} {1e3 * duration:.3g}" for name, duration in seconds.items())
    log.info(FASTEST_MESSAGE, choice, f"ms a step of a client: {', '.join(timings)}")
    return choice


def _hindrance(
    module: nn.Module,
    backends: list[str],
    demands: Demands,
    generator_name: str | None,
    mismatches: dict[str, str],
) -> tuple[str, str]:
    """Why the loop trains, and what would be faster, in words. `generator_name`: what the module
    draws from, if not from torch; `mismatches`: why the backends that were tried do not fit.
    """
    if mismatches:
        name, reason = list(mismatches.items())[-1]
        has_dropout = any(isinstance(layer, _DropoutNd) and layer.p for layer in module.modules())
        remedy = "a model without dropout" if has_dropout else f"a model that {name} fits"
        return f"{name} does not fit the model: {reason}", remedy
    if generator_name:
        return f"the module draws from {generator_name}", "a module that draws nothing"
    candidates = [backend for backend in backends if not missing_requirement(backend, *demands)]
    if candidates and candidates[0] != REFERENCE:
        return "client.backend asks for it", f"client.backend=auto, which tries {candidates[0]}"
    if backends[0] != REFERENCE:
        demand = missing_requirement(backends[0], *demands)
        remedy = "a step in its place" if demands[0].trains else f"what {backends[0]} can do"
        return f"{backends[0]} cannot do {demand}", remedy
    if ParameterSplit.of(module).buffers:
        return "buffers of the model are clients' own (model.local)", "a model without BatchNorm"
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            kind = type(layer).__name__
            return f"{kind} is recurrent", "a model without recurrent layers, as transformer"
    reason = f"convolutional does not fit the model: {_hand_refusal(module, None)}"
    return reason, f"{CHAIN}, or a GPU (client.num_gpus)"


def _hand_refusal(module: nn.Module, clip: float | None) -> str | None:
    """Why its convolutions are not trained by hand, in words; None: they are."""
    try:
        chain = links(module)
    except NoStack as error:
        return str(error)
    return None if clip is None else clipping_refusal(chain)


def _candidates(backends: list[str], demands: Demands) -> list[str]:
    """Of the backends that suit the module, those that can do what is asked of them."""
    candidates = [backend for backend in backends if not missing_requirement(backend, *demands)]
    demand = missing_requirement(backends[0], *demands)
    if demand and candidates[0] != REFERENCE:
        log.warning(
            "clients are trained by %s; %s cannot do %s", candidates[0], backends[0], demand
        )
    return candidates


def _ranking(
    module: nn.Module, local: Local, form: Form, clip: float | None, gpu: bool
) -> list[str]:
    """The backends that suit the module, the best first, able to do what is asked or not."""
    if ParameterSplit.of(module).buffers:  # which no other backend keeps
        return [REFERENCE]
    try:
        layers = stack(module)
    except NoStack:
        kinds = list(module.modules())
        has_recurrence = any(isinstance(layer, nn.RNNBase) for layer in kinds)
        has_frozen = any(not parameter.requires_grad for parameter in module.parameters())
        head = ["one_batch"] if has_frozen else []
        by_hand = [] if gpu or _hand_refusal(module, clip) else ["convolutional"]
        if clip is not None:
            return [*head, *by_hand, "layerwise", *([] if has_recurrence else ["vmap"]), REFERENCE]
        if has_recurrence:
            return [*head, REFERENCE]
        if gpu or not any(isinstance(layer, _ConvNd) for layer in kinds):
            return [*head, "vmap", REFERENCE]
        return [*head, *by_hand, REFERENCE, "vmap"]
    layerwise = ["layerwise"] if clip is not None else []
    if form.task.loss_form() is None:
        return [*layerwise, "vmap", REFERENCE]
    if gpu or missing_requirement("compiled", local, clip):
        return ["fused", *layerwise, "vmap", REFERENCE]
    reason = compilation_refusal(layers)
    if reason is not None and reason == native.library_or_reason():
        log.warning("clients are not trained by compiled, which takes half the time: %s", reason)
    return [*(["compiled"] if reason is None else []), "fused", *layerwise, "vmap", REFERENCE]
