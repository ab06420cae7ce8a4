"""Which backend trains a model.

The backends that suit a model are tried in the order of their speed (`_suited`): the first steps of
each, on made-up rows, are compared with the loop's. Where they fail or differ the next one is
tried, in the end the loop, and the log says why. On a GPU all convolutions are trained by vmap, as
one client after another keeps it waiting for the host.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> choose_backend(module, Sgd(steps=20, batch=10), form)
'compiled'
"""

from __future__ import annotations

import logging
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
from raydpfl.training.backends import BACKENDS, REFERENCE, check_backend, lacking
from raydpfl.training.backends.compiled import unfit
from raydpfl.training.backends.convolutional import links, unpooled
from raydpfl.training.validation import check_loss, check_no_mixing, check_rule, drawn_from

log = logging.getLogger("raydpfl")
UNFIT = "this backend does not fit the model"
NEXT = "clients are trained by %s; %s does not fit the model: %s"
SLOW = "clients are trained by the loop, one at a time, which is slow: %s; faster: %s"
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
) -> str:
    """The backend to train `module` on samples of this form.

    Args:
        module: the model; it stays as it is.
        local: the local rule.
        form: of a sample.
        backend: "auto", or the name of one.
        clip: the bound on every sample's gradient, if any.
        gpu: whether training is on a GPU.
        precision: of products.

    Raises:
        ConfigError: a rule, a loss or a module that cannot be trained as asked, or a backend that
            does not fit.
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
    unlike = {}  # why backends do not fit
    others = [name for name in candidates if name != REFERENCE]
    for name, following in pairwise([*others, REFERENCE]):
        unlike[name] = mismatch(module, local, form, name, clip)
        if unlike[name] is None:
            return name
        if backend == "auto" and following != REFERENCE:
            log.warning(NEXT, following, name, unlike[name])
    if backend not in ("auto", REFERENCE):
        expected = f"auto or {REFERENCE}; {UNFIT}: {unlike[backend]}"
        raise ConfigError("client.backend", backend, expected)
    log.warning(SLOW, *_hindrance(module, suited, asked, drawn, unlike))
    return REFERENCE


def _hindrance(
    module: nn.Module,
    suited: list[str],
    asked: Asked,
    drawn: str | None,
    unlike: dict[str, str | None],
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
    """The backends to try before the loop, the best first: of those that suit the module, those
    that can do what is asked of them; only the best where samples are not clipped and no parameters
    frozen.
    """
    able = [backend for backend in suited if not lacking(backend, *asked)]
    lacks = lacking(suited[0], *asked)
    if lacks and able and suited[0] != REFERENCE:
        log.warning("clients are trained by %s; %s cannot do %s", able[0], suited[0], lacks)
    all_of_them = asked[1] is not None or able[:1] == ["one_batch"]
    return (able if all_of_them else able[:1]) or [REFERENCE]


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
            return [*first, "layerwise", REFERENCE if recurs else "vmap"]
        if not recurs and (gpu or not any(isinstance(layer, _ConvNd) for layer in kinds)):
            return [*first, "vmap"]
        return [*first, REFERENCE if _unlinked(module) else "convolutional"]
    layerwise = ["layerwise"] if clip is not None else []
    if form.task.closed() is None:
        return [*layerwise, "vmap"]
    if gpu or lacking("compiled", local, clip):
        return ["fused", *layerwise, "vmap"]
    reason = unfit(layers)
    if reason is not None and reason == native.library_or_reason():
        log.warning("clients are not trained by compiled, which takes half the time: %s", reason)
    return [*(["compiled"] if reason is None else []), "fused", *layerwise, "vmap"]
