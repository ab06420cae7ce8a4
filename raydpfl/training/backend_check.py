"""A backend's first steps against those of the loop, on made-up rows."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from raydpfl import models
from raydpfl.core.prng import Purpose, stream
from raydpfl.core.signals import limited
from raydpfl.errors import RAISED
from raydpfl.methods.local.base import Local
from raydpfl.models.linear_stack import NoStack
from raydpfl.models.tasks import Form, Task
from raydpfl.training.backends import REFERENCE
from raydpfl.training.backends.base import Starts
from raydpfl.training.backends.ghost_clipping import NotLayerwise
from raydpfl.training.trainer import Trainer

# of the step's norm: rounding gives 1e-6, a wrong gradient about 1
TOLERANCE = 1e-3
ATTEMPTS = 3  # on other rows: a ReLU or a maximum that rounds the other way can give 1e-2 on some
LIMIT = 120.0  # seconds that the comparison may take
ROUNDING = 1e-6  # of the model's norm: what subtracting two models leaves uncertain of a step
SIZES = [6, 5, 3]  # rows of the three clients
SETTLED = {"torch", "raydpfl", "builtins", "collections", "copyreg"}  # code that stays as it is


@dataclass(frozen=True)
class _Rows:
    x: torch.Tensor  # [3, 6, *shape]
    y: torch.Tensor  # [3, 6, *target]
    clip: float | None
    corrections: torch.Tensor | None  # float32 [3, D]
    begun: torch.Tensor | None  # float32 [3, D]: where the clients begin; None: at the model


def mismatch(
    module: nn.Module,
    local: Local,
    form: Form,
    backend: str,
    clip: float | None,
    known: set[bytes] | None = None,
) -> str | None:
    """Why `backend` cannot train `module`, or None: its first steps against the loop's.

    With `clip` the rows, and so their gradients, are of different norms, and the bound is such that
    half of them are clipped. Each client is to take the loop's steps on one attempt's rows.

    `known`: digests of what was compared before and agreed, which is not compared again; what does
    now is added. None: everything is compared.
    """
    if known is None:
        return _compared(module, local, form, backend, clip)
    digest = _digest(module, local, form, backend, clip)
    if digest in known:
        return None
    reason = _compared(module, local, form, backend, clip)
    if reason is None and digest is not None:
        known.add(digest)
    return reason


def _compared(
    module: nn.Module, local: Local, form: Form, backend: str, clip: float | None
) -> str | None:
    """See `mismatch`."""
    uncertain = ROUNDING / TOLERANCE * models.trained(module).norm()
    far = torch.full((len(SIZES),), torch.inf)
    late = TimeoutError(f"three steps take more than {LIMIT:g} s")
    try:
        with limited(LIMIT, late):
            for seed in range(ATTEMPTS):
                ours, theirs = first_steps(module, local, form, backend, clip, seed)
                apart = (ours - theirs).norm(dim=1) / (theirs.norm(dim=1) + uncertain)
                far = torch.minimum(far, apart.cpu())
                if far.max() <= TOLERANCE:
                    return None
    except (NoStack, NotLayerwise) as error:
        return str(error)
    except RAISED as error:  # a module may do anything when it is traced or vmapped
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"its first step is off by {float(far.max()):.1e} of the loop's"


def _digest(*compared: object) -> bytes | None:
    """Tells a comparison from any other; None where there is code of others in it, which may be
    another by the same name.
    """
    written = io.BytesIO()
    try:
        _Facts(written).dump(compared)
    except Exception:  # a module may hold anything
        return None
    return hashlib.sha256(written.getvalue()).digest()


class _Facts(pickle.Pickler):
    """Writes tensors as what is in them, and refuses code that is not `SETTLED`."""

    def persistent_id(self, value: object) -> object:
        code = value.__module__ if isinstance(value, type | FunctionType) else "builtins"
        if code.partition(".")[0] not in SETTLED:
            raise pickle.PicklingError(code)
        if not isinstance(value, torch.Tensor):
            return None
        numbers: Any = value.detach().cpu().contiguous().numpy()
        content = hashlib.sha256(numbers).digest()
        return str(value.dtype), tuple(value.shape), value.requires_grad, content


def first_steps(
    module: nn.Module, local: Local, form: Form, backend: str, clip: float | None, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What three clients come to by `backend` and by the loop: see `FirstSteps`."""
    return FirstSteps(module, local, form, clip, seed).by(backend)


class FirstSteps:
    """What three clients come to on rows drawn by `seed`: the rows are drawn, and the loop is run,
    once for all backends. Other arguments as for `mismatch`.
    """

    def __init__(
        self, module: nn.Module, local: Local, form: Form, clip: float | None, seed: int = 0
    ) -> None:
        self.module = _without_zeros(module)
        self.local = _short(local)
        self.form = form
        self.clip = clip
        self.seed = seed
        # by whether dropout layers stand still
        self._rows: dict[bool, _Rows] = {}
        self._theirs: dict[bool, torch.Tensor] = {}

    def by(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """By `backend` and by the loop, float32 [3, d] each. Raises whatever the backend does with
        a module that it cannot train.
        """
        module = copy.deepcopy(self.module)
        # a dropout layer draws for each sample apart, but not what the loop draws, one sample after
        # another
        apart = backend == "layerwise" or (backend == "one_batch" and self.clip is not None)
        dropouts = [layer for layer in module.modules() if isinstance(layer, _DropoutNd)]
        still = apart and bool(dropouts)
        for layer in dropouts if still else ():
            layer.p = min(layer.p, 1e-9)  # not 0: where drawing itself fails, that must show
        if still not in self._rows:
            self._rows[still] = _rows(module, self.local, self.form, self.clip, self.seed)
        rows = self._rows[still]
        ours = self._updates(module, backend, rows)
        if still not in self._theirs:
            self._theirs[still] = self._updates(module, REFERENCE, rows)
        return ours, self._theirs[still]

    def _updates(self, module: nn.Module, backend: str, rows: _Rows) -> torch.Tensor:
        return _updates(module, self.local, self.form.task, backend, rows)


def _without_zeros(module: nn.Module) -> nn.Module:
    """A copy whose trained matrices are not 0, as that of an adapter is: behind it no gradient
    would show.
    """
    module = copy.deepcopy(module)
    generator = stream(0, Purpose.MODEL)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dim() > 1 and not parameter.any():
                drawn = generator.standard_normal(parameter.shape) * parameter[0].numel() ** -0.5
                parameter.copy_(torch.from_numpy(drawn))
    return module


def _short(local: Local) -> Local:
    """The rule with few steps: two where the second differs from the first."""
    linear = local.linear()
    few: dict[str, Any] = {"batch": local.batch if local.batch == "full" else 4}
    if local.epochs is not None:
        few["epochs"] = 1.0  # two steps of the first two clients, one of the third
    elif linear is None or linear.proximal:  # a proximal term is 0 at the first step
        few["steps"] = 2
    else:
        few["steps"] = 1
    if linear is not None:  # else its learning rate is of the size that it takes
        few["lr"] = 1.0
    return local.model_copy(update=few)


def _rows(module: nn.Module, local: Local, form: Form, clip: float | None, seed: int) -> _Rows:
    generator = stream(seed, Purpose.DATA)
    x = form.inputs(18, generator).view(3, 6, *form.shape)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        outputs = copy.deepcopy(module)(x[0])
    targets = form.task.made_up(generator, 18, tuple(outputs.shape[1:]))
    y = targets.view(3, 6, *targets.shape[1:])
    if clip is not None:
        if not form.tokens:
            x *= torch.linspace(1, 0.2, 6).view(1, 6, *[1] * len(form.shape))
        with torch.random.fork_rng(devices=[]):
            clip = _median_norm(module, form.task, x[0], y[0])
    parameters = models.trained(module)
    shape = (3, len(parameters))
    corrections = None
    if local.corrects:  # of about the norm that gradients have
        corrections = torch.from_numpy(generator.standard_normal(shape) / shape[1] ** 0.5)
    begun = None
    if models.ParameterSplit.of(module).own:
        begun = parameters * (1 + 0.1 * torch.from_numpy(generator.standard_normal(shape)).float())
    return _Rows(x, y, clip, corrections, begun)


def _updates(
    module: nn.Module, local: Local, task: Task, backend: str, rows: _Rows
) -> torch.Tensor:
    """What the three clients have trained to, float32 [3, D]."""
    trainer = Trainer(module, local, backend=backend, seed=0, clip=rows.clip, own=True, task=task)
    parameters = models.trained(module)
    chunk = trainer.chunk(
        parameters,
        rows.x,
        rows.y,
        SIZES,
        t=0,
        clients=range(3),
        draws=[0] * 3,
        corrections=rows.corrections,
        starts=None if rows.begun is None else Starts.at(rows.begun),
    )
    return torch.cat([block.updates for block in chunk])


def _median_norm(module: nn.Module, task: Task, x: torch.Tensor, y: torch.Tensor) -> float:
    """The median norm of the samples' gradients."""
    module = copy.deepcopy(module).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    norms = []
    for some, label in zip(x.split(1), y.split(1), strict=True):
        loss = task.loss(module(some), label).mean()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        norms.append(
            torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm()
        )
    return float(torch.stack(norms).median())
