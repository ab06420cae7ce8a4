"""Which way trains a model.

A stack of linear layers is trained by compiled code, where its activations are ReLU, tanh or
sigmoid, the rule is linear and there is a C compiler; else by torch, in sample space (if the rule
is linear) or fused, whichever takes fewer operations for the largest client. Convolutions with
linear layers after them are trained by hand; any other module with convolutions or recurrent layers
by the loop; any other by vmap. Of these only the last three train parts of the model that are
clients' own. On a GPU all convolutions are trained by vmap, as one client after another keeps it
waiting for the host. With a bound on every sample's gradient: a stack of linear layers likewise by
compiled code, or else fused, convolutions that are max-pooled by hand, any other module layerwise,
or else by vmap, with recurrent layers by the loop. A module with frozen parameters goes through as
one batch, with such a bound or without. The way's first steps are compared with the loop's on
made-up rows. Where they fail or differ the next way is taken, in the end the loop, and the log says
why.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> form = Form((1, 28, 28), Target(classes=10), Classification())
>>> resolve(module, Sgd(steps=20, batch=10), 20, form)
'compiled'
"""

from __future__ import annotations

import logging
from itertools import pairwise

from torch import nn
from torch.nn.modules.conv import _ConvNd

from raydpfl import native
from raydpfl.errors import ConfigError
from raydpfl.hardware import Precision
from raydpfl.local.base import Local
from raydpfl.local.checks import check_apart, check_loss, check_rule, drawn_from
from raydpfl.local.compiled import Compiled, unfit
from raydpfl.local.convolutional import links, unpooled
from raydpfl.local.linear import SampleSpace
from raydpfl.local.sgd import Sgd  # noqa: F401  (the example above)
from raydpfl.local.stack import Layer, NoStack, stack
from raydpfl.local.trial import mismatch
from raydpfl.local.ways import REFERENCE, WAYS, check_way, lacking
from raydpfl.models.split import Split
from raydpfl.tasks import Classification, Form, Target  # noqa: F401  (the example above)

log = logging.getLogger("raydpfl")
UNFIT = "this way does not fit the model"
SAID = "clients are trained by %s; %s does not fit the model: %s"


def resolve(
    module: nn.Module,
    local: Local,
    rows: int,
    form: Form,
    way: str = "auto",
    clip: float | None = None,
    gpu: bool = False,
    precision: Precision = "float32",
    known: set[bytes] | None = None,
) -> str:
    """The way to train `module` on samples of this form when the largest client has `rows` of them.

    With `way` auto it is a function of all that is given and of whether there is a C compiler,
    never of timing; see the module. `gpu`: whether clients train on one. `known`: see `mismatch`.

    Raises:
        ConfigError: for a way that does not fit and was asked for by name; for a module that has
            BatchNorm or changes its buffers or parameters, with `clip`; for a loss that is none for
            its outputs (`raydpfl.local.checks.check_loss`); for a rule that is none (`check_rule`).
    """
    _check_device(way, gpu)
    check_rule(local)
    check_loss(module, form)
    if clip is not None:
        check_apart(module, form)
    choices = _choices(module, local, rows, form, clip, gpu, precision) if way == "auto" else [way]
    drawn = drawn_from(module, form)
    choices = [_one_by_one(way, drawn)] if drawn else choices
    for chosen, other in pairwise([*choices, REFERENCE]):
        check_way(chosen, local, clip, precision, Split.of(module))
        if chosen in (REFERENCE, "noop"):
            return chosen
        reason = mismatch(module, local, form, chosen, clip, known)
        if reason is None:
            return chosen
        if way != "auto":
            raise ConfigError("client.way", way, f"auto or {REFERENCE}; {UNFIT}: {reason}")
        log.warning(SAID, "the loop" if other == REFERENCE else other, chosen, reason)
    return REFERENCE


def _one_by_one(way: str, drawn: str) -> str:
    """The way for a module that draws from a generator of the process. Raises `ConfigError`."""
    if way == "auto":
        log.warning(
            "clients are trained by the loop, one at a time, as the module draws from %s", drawn
        )
        return REFERENCE
    if way in WAYS and way != "noop" and not WAYS[way].one_by_one:
        reason = f"the module draws from {drawn}, which has to be client by client"
        raise ConfigError("client.way", way, f"auto or {REFERENCE}; {reason}")
    return way


def _by_hand(module: nn.Module) -> bool:
    try:
        links(module)
    except NoStack:
        return False
    return True


def _clipped_by_hand(module: nn.Module) -> bool:
    return _by_hand(module) and unpooled(links(module)) is None


def _check_device(way: str, gpu: bool) -> None:
    """Raises `ConfigError` for a way that is none for the device."""
    if gpu and way == "compiled":
        raise ConfigError("client.way", way, "auto, or another way; compiled code is for the CPU")


def _choices(
    module: nn.Module,
    local: Local,
    rows: int,
    form: Form,
    clip: float | None,
    gpu: bool,
    precision: Precision,
) -> list[str]:
    """The ways to try before the loop, the best first: of those that suit the module, those that
    can do what is asked of them; only the best where samples are not clipped and none are frozen.
    """
    suited = _suited(module, local, rows, form, clip, gpu)
    asked = (local, clip, precision, Split.of(module))
    able = [way for way in suited if not lacking(way, *asked)]
    lacks = lacking(suited[0], *asked)
    if lacks and suited[0] != REFERENCE:
        instead = able[0] if able else "the loop"
        log.warning("clients are trained by %s; %s cannot do %s", instead, suited[0], lacks)
    return able[: None if clip is not None or able[:1] == ["one_batch"] else 1] or [REFERENCE]


def _suited(
    module: nn.Module, local: Local, rows: int, form: Form, clip: float | None, gpu: bool
) -> list[str]:
    """The ways that suit the module, whether or not they can do what is asked, the best first."""
    if Split.of(module).buffers:  # which no other way keeps, and a forward may put anew
        return [REFERENCE]
    try:
        layers = stack(module)
    except NoStack:
        recurs = any(isinstance(layer, nn.RNNBase) for layer in module.modules())
        frozen = any(not each.requires_grad for each in module.parameters())
        shared = ["one_batch"] if frozen else []
        if clip is not None:
            by_hand = ["convolutional"] if not gpu and _clipped_by_hand(module) else []
            return [*shared, *by_hand, "layerwise", "loop" if recurs else "vmap"]
        if not recurs and (gpu or not any(isinstance(each, _ConvNd) for each in module.modules())):
            return [*shared, "vmap"]
        return [*shared, "convolutional" if _by_hand(module) else "loop"]
    if form.task.closed() is None:
        return ["vmap"] if clip is None else ["layerwise", "vmap"]
    spanned = SampleSpace.pays(layers, rows, local)
    able = spanned or Compiled.lacks(local, clip) is None
    compiled = _compiled(layers) if able and not gpu else []
    if clip is not None:
        return [*compiled, "fused", "layerwise", "vmap"]
    return [*compiled, *["sample_space"] * spanned, "fused", "vmap"]


def _compiled(layers: tuple[Layer, ...]) -> list[str]:
    """`compiled`, where it fits; a warning where a compiler alone is lacking."""
    reason = unfit(layers)
    if reason is not None and reason == native.found():
        log.warning("clients are not trained by compiled, which takes half the time: %s", reason)
    return ["compiled"] if reason is None else []
