"""Which backend trains a model.

The backends that suit a model (`_suited`) are compared with the loop on made-up rows; the log says
why one is left out. A run of less than `WORTH` seconds takes the first that is left, a longer one
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
from raydpfl.training.backends import BACKENDS, REFERENCE, check_backend, lacking
from raydpfl.training.backends.compiled import unfit
from raydpfl.training.backends.convolutional import links, unpooled
from raydpfl.training.validation import check_loss, check_no_mixing, check_rule, drawn_from

log = logging.getLogger("raydpfl")
UNFIT = "this backend does not fit the model"
NEXT = "clients are trained by %s; %s does not fit the model: %s"
SLOW = "clients are trained by the loop, one at a time, which is slow: %s; faster: %s"
FASTEST = "clients are trained by %s, the fastest here: %s"
WORTH = 5.0  # seconds of a run whose backends are timed
LONGEST = 2.0  # seconds after which no other backend is timed, or a twentieth of the run
GAIN = 0.9  # of the time of the first, which another has to take at most
CHAIN = "convolutions, activations and max-pooling in a row, then linear layers (as model.kind cnn)"

Asked = tuple[Local, float | None, Precision, ParameterSplit]
"""What `lacking` is called with, after the backend."""


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
    asked = (local, clip, precision, ParameterSplit.of(module))
    suited = _suited(module, local, form, clip, gpu) if backend in ("auto", REFERENCE) else []
    candidates = _candidates(suited, asked) if backend == "auto" else [backend]
    drawn = drawn_from(module, form)
    if drawn and backend in BACKENDS and not BACKENDS[backend].one_by_one:
        reason = f"the module draws from {drawn}, which has to be client by client"
        raise ConfigError("client.backend", backend, f"auto or {REFERENCE}; {reason}")
    if drawn and backend == "auto":
        candidates = [REFERENCE]
    for name in candidates:
        check_backend(name, *asked)
    fit, unlike = _fit(candidates, partial(mismatch, module, local, form, clip=clip), times)
    if not fit:
        expected = f"auto or {REFERENCE}; {UNFIT}: {unlike[backend]}"
        raise ConfigError("client.backend", backend, expected)
    if times and len(fit) > 1:
        return _fastest(times, fit)
    if fit[0] == REFERENCE:
        log.warning(SLOW, *_hindrance(module, suited, asked, drawn, unlike))
    return fit[0]


def _fit(
    candidates: list[str], differs: Callable[..., str | None], times: StepTimes | None
) -> tuple[list[str], dict[str, str]]:
    """The candidates that fit, the first alone for a short run; and why others do not fit."""
    fit: list[str] = []
    unlike = {}
    for name, following in pairwise([*candidates, ""]):
        reason = None if name == REFERENCE else differs(backend=name)
        if reason is None:
            fit.append(name)
            if not following or times is None or BACKENDS[name].threads or _short(times, fit):
                break
            continue
        unlike[name] = reason
        if following not in ("", REFERENCE) and not fit:
            log.warning(NEXT, following, name, reason)
    return fit, unlike


def _short(times: StepTimes, fit: list[str]) -> bool:
    """Whether a run by the first backend that fits is too short to look for another."""
    return len(fit) == 1 and times.of(fit[0]) * times.work.steps < WORTH


def _fastest(times: StepTimes, fit: list[str]) -> str:
    """The backend of those that takes the least time."""
    began = time.perf_counter()
    first, *others = fit
    seconds = {first: times.of(first)}
    most = max(LONGEST, seconds[first] * times.work.steps / 20)
    for name in others:
        if time.perf_counter() - began < most:
            seconds[name] = times.of(name, min(seconds.values()))
    best = min(seconds, key=lambda name: seconds[name])
    taken = best if seconds[best] <= GAIN * seconds[first] else first
    shown = (f"{name} {1e3 * took:.3g}" for name, took in seconds.items())
    log.info(FASTEST, taken, f"ms a step of a client: {', '.join(shown)}")
    return taken


def _hindrance(
    module: nn.Module,
    suited: list[str],
    asked: Asked,
    drawn: str | None,
    unlike: dict[str, str],
) -> tuple[str, str]:
    """Why the loop trains, and what would be faster, in words. `drawn`: the generator that the
    module draws from, other than torch's; `unlike`: why the backends that were tried do not fit.
    """
    if unlike:
        name, reason = list(unlike.items())[-1]
        drops = any(isinstance(layer, _DropoutNd) and layer.p for layer in module.modules())
        faster = "a model without dropout" if drops else f"a model that {name} fits"
        return f"{name} does not fit the model: {reason}", faster
    if drawn:
        return f"the module draws from {drawn}", "a module that draws nothing"
    able = [backend for backend in suited if not lacking(backend, *asked)]
    if able and able[0] != REFERENCE:
        return "client.backend asks for it", f"client.backend=auto, which tries {able[0]}"
    if suited[0] != REFERENCE:
        lacks = lacking(suited[0], *asked)
        faster = "a step in its place" if asked[0].trains else f"what {suited[0]} can do"
        return f"{suited[0]} cannot do {lacks}", faster
    if ParameterSplit.of(module).buffers:
        return "buffers of the model are clients' own (model.local)", "a model without BatchNorm"
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            kind = type(layer).__name__
            return f"{kind} is recurrent", "a model without recurrent layers, as transformer"
    reason = f"convolutional does not fit the model: {_unlinked(module)}"
    return reason, f"{CHAIN}, or a GPU (client.num_gpus)"


def _unlinked(module: nn.Module) -> str | None:
    """Why convolutions of it are not trained by hand (`links`), in words; None: they are."""
    try:
        links(module)
    except NoStack as error:
        return str(error)
    return None


def _candidates(suited: list[str], asked: Asked) -> list[str]:
    """Of the backends that suit the module, those that can do what is asked of them."""
    able = [backend for backend in suited if not lacking(backend, *asked)]
    lacks = lacking(suited[0], *asked)
    if lacks and able[0] != REFERENCE:
        log.warning("clients are trained by %s; %s cannot do %s", able[0], suited[0], lacks)
    return able


def _suited(
    module: nn.Module, local: Local, form: Form, clip: float | None, gpu: bool
) -> list[str]:
    """The backends that suit the module, the best first, able to do what is asked or not."""
    if ParameterSplit.of(module).buffers:  # which no other backend keeps
        return [REFERENCE]
    try:
        layers = stack(module)
    except NoStack:
        kinds = list(module.modules())
        recurs = any(isinstance(layer, nn.RNNBase) for layer in kinds)
        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        first = ["one_batch"] if frozen else []
        if clip is not None:
            by_hand = not gpu and not _unlinked(module) and not unpooled(links(module))
            first += ["convolutional"] if by_hand else []
            return [*first, "layerwise", *([] if recurs else ["vmap"]), REFERENCE]
        if recurs:
            return [*first, REFERENCE]
        if gpu or not any(isinstance(layer, _ConvNd) for layer in kinds):
            return [*first, "vmap", REFERENCE]
        by_hand = not _unlinked(module)
        return [*first, *(["convolutional"] if by_hand else []), REFERENCE, "vmap"]
    layerwise = ["layerwise"] if clip is not None else []
    if form.task.closed() is None:
        return [*layerwise, "vmap", REFERENCE]
    if gpu or lacking("compiled", local, clip):
        return ["fused", *layerwise, "vmap", REFERENCE]
    reason = unfit(layers)
    if reason is not None and reason == native.library_or_reason():
        log.warning("clients are not trained by compiled, which takes half the time: %s", reason)
    return [*(["compiled"] if reason is None else []), "fused", *layerwise, "vmap", REFERENCE]
