"""Which backend trains a model.

A stack of linear layers is trained by compiled code, where its activations are ReLU, tanh or
sigmoid, the rule is linear and there is a C compiler; else fused. Convolutions with linear layers
after them are trained by hand; any other module with convolutions or recurrent layers by the loop;
any other by vmap. Only these last three train local parameters. On a GPU all convolutions are
trained by vmap, as one client after another keeps it waiting for the host. With a bound on every
sample's gradient: a stack of linear layers likewise by compiled code or fused, convolutions that
are max-pooled by hand, any other module layerwise, else by vmap, or with recurrent layers by the
loop. A module with frozen parameters is trained as one batch, with such a bound or without. The
backend's first steps are compared with the loop's on made-up rows. Where they fail or differ the
next backend is taken, in the end the loop, and the log says why.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> resolve(module, Sgd(steps=20, batch=10), form)
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
from raydpfl.models.linear_stack import Layer, NoStack, stack
from raydpfl.models.shared_and_local import ParameterSplit
from raydpfl.models.tasks import Classification, Form, Target  # noqa: F401  (the example above)
from raydpfl.training.backend_check import mismatch
from raydpfl.training.backends import BACKENDS, REFERENCE, check_backend, lacking
from raydpfl.training.backends.compiled import Compiled, unfit
from raydpfl.training.backends.convolutional import links, unpooled
from raydpfl.training.validation import check_apart, check_loss, check_rule, drawn_from

log = logging.getLogger("raydpfl")
UNFIT = "this backend does not fit the model"
SAID = "clients are trained by %s; %s does not fit the model: %s"
SLOW = "clients are trained by the loop, one at a time, which is slow: %s; faster: %s"
CHAIN = "convolutions, activations and max-pooling in a row, then linear layers (as model.kind cnn)"


def resolve(
    module: nn.Module,
    local: Local,
    form: Form,
    backend: str = "auto",
    clip: float | None = None,
    gpu: bool = False,
    precision: Precision = "float32",
    known: set[bytes] | None = None,
) -> str:
    """The backend to train `module` on samples of this form.

    With `backend` auto it is a function of all that is given and of whether there is a C compiler,
    never of timing; see the module. `gpu`: whether clients train on one. `known`: see `mismatch`.

    Raises:
        ConfigError: for a backend that does not fit and was asked for by name; for a module that
            has BatchNorm or changes its buffers or parameters, with `clip`; for a loss that is none
            for its outputs (`raydpfl.training.validation.check_loss`); for a rule that is none
            (`check_rule`).
    """
    _check_device(backend, gpu)
    check_rule(local)
    check_loss(module, form)
    if clip is not None:
        check_apart(module, form)
    asked = (local, clip, precision, ParameterSplit.of(module))
    look = backend in ("auto", REFERENCE)
    suited = _suited(module, local, form, clip, gpu) if look else []
    choices = _choices(suited, asked, clip) if backend == "auto" else [backend]
    drawn = drawn_from(module, form)
    if drawn:
        choices = [_one_by_one(backend, drawn)]
    for choice in choices:
        check_backend(choice, *asked)
    chosen, slow = _first_that_fits(module, local, form, backend, clip, choices, known)
    if chosen == REFERENCE:
        log.warning(SLOW, *(slow or _hindrance(module, suited, asked, drawn)))
    return chosen


def _first_that_fits(
    module: nn.Module,
    local: Local,
    form: Form,
    backend: str,
    clip: float | None,
    choices: list[str],
    known: set[bytes] | None,
) -> tuple[str, tuple[str, str] | None]:
    """The first of `choices` that fits the module, else the loop; then why the others do not, and
    what would be faster than the loop, in words (None: none was tried). Raises `ConfigError` for a
    `backend` that was asked for by name.
    """
    slow = None
    for chosen, other in pairwise([*choices, REFERENCE]):
        if chosen == REFERENCE:
            return chosen, slow
        reason = mismatch(module, local, form, chosen, clip, known)
        if reason is None:
            return chosen, None
        if backend != "auto":
            raise ConfigError("client.backend", backend, f"auto or {REFERENCE}; {UNFIT}: {reason}")
        if other != REFERENCE:
            log.warning(SAID, other, chosen, reason)
        slow = f"{chosen} does not fit the model: {reason}", _without(module, chosen)
    return REFERENCE, slow


def _without(module: nn.Module, backend: str) -> str:
    """A model that a backend fits which does not fit this one, in words."""
    if any(isinstance(each, _DropoutNd) and each.p for each in module.modules()):
        return "a model without dropout"
    return f"a model that {backend} fits"


def _hindrance(
    module: nn.Module,
    suited: list[str],
    asked: tuple[Local, float | None, Precision, ParameterSplit],
    drawn: str | None,
) -> tuple[str, str]:
    """Why the loop trains, where no other backend was tried, and what would be faster, in words.

    Args:
        suited: see `_suited`.
        asked: what `lacking` is called with.
        drawn: the generator that the module draws from, other than torch's.
    """
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
    recurrent = [type(each).__name__ for each in module.modules() if isinstance(each, nn.RNNBase)]
    if recurrent:
        return f"{recurrent[0]} is recurrent", "a model without recurrent layers, as transformer"
    reason = f"convolutional does not fit the model: {_unlinked(module)}"
    return reason, f"{CHAIN}, or a GPU (client.num_gpus)"


def _one_by_one(backend: str, drawn: str) -> str:
    """The backend for a module that draws from a generator of the process. Raises `ConfigError`."""
    if backend == "auto":
        return REFERENCE
    if backend in BACKENDS and not BACKENDS[backend].one_by_one:
        reason = f"the module draws from {drawn}, which has to be client by client"
        raise ConfigError("client.backend", backend, f"auto or {REFERENCE}; {reason}")
    return backend


def _unlinked(module: nn.Module) -> str | None:
    """Why convolutions of it are not trained by hand (`links`), in words; None: they are."""
    try:
        links(module)
    except NoStack as error:
        return str(error)
    return None


def _clipped_by_hand(module: nn.Module) -> bool:
    return _unlinked(module) is None and unpooled(links(module)) is None


def _check_device(backend: str, gpu: bool) -> None:
    """Raises `ConfigError` for a backend that is none for the device."""
    if gpu and backend == "compiled":
        raise ConfigError(
            "client.backend", backend, "auto, or another backend; compiled code is for the CPU"
        )


def _choices(
    suited: list[str],
    asked: tuple[Local, float | None, Precision, ParameterSplit],
    clip: float | None,
) -> list[str]:
    """The backends to try before the loop, the best first: of those that suit the module, those
    that can do what is asked of them; only the best where samples are not clipped and none are
    frozen.
    """
    able = [backend for backend in suited if not lacking(backend, *asked)]
    lacks = lacking(suited[0], *asked)
    if lacks and able and suited[0] != REFERENCE:
        log.warning("clients are trained by %s; %s cannot do %s", able[0], suited[0], lacks)
    return able[: None if clip is not None or able[:1] == ["one_batch"] else 1] or [REFERENCE]


def _suited(
    module: nn.Module, local: Local, form: Form, clip: float | None, gpu: bool
) -> list[str]:
    """The backends that suit the module, the best first, able to do what is asked or not."""
    if ParameterSplit.of(
        module
    ).buffers:  # which no other backend keeps, and a forward may put anew
        return [REFERENCE]
    try:
        layers = stack(module)
    except NoStack:
        recurs = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        shared = ["one_batch"] if frozen else []
        if clip is not None:
            by_hand = ["convolutional"] if not gpu and _clipped_by_hand(module) else []
            return [*shared, *by_hand, "layerwise", "loop" if recurs else "vmap"]
        if not recurs and (gpu or not any(isinstance(each, _ConvNd) for each in module.modules())):
            return [*shared, "vmap"]
        return [*shared, "loop" if _unlinked(module) else "convolutional"]
    if form.task.closed() is None:
        return ["vmap"] if clip is None else ["layerwise", "vmap"]
    able = Compiled.lacks(local, clip) is None
    compiled = _compiled(layers) if able and not gpu else []
    return [*compiled, "fused", *(["layerwise"] if clip is not None else []), "vmap"]


def _compiled(layers: tuple[Layer, ...]) -> list[str]:
    """`compiled`, where it fits; a warning where a compiler alone is lacking."""
    reason = unfit(layers)
    if reason is not None and reason == native.found():
        log.warning("clients are not trained by compiled, which takes half the time: %s", reason)
    return ["compiled"] if reason is None else []
