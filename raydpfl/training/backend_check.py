"""A backend's first steps against those of the loop, on made-up rows."""

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from raydpfl import models
from raydpfl.core.hardware import Precision
from raydpfl.core.prng import Purpose, keyed_globals, stream
from raydpfl.core.signals import time_limit
from raydpfl.errors import USER_EXCEPTIONS
from raydpfl.methods.local.base import Local
from raydpfl.models.linear_stack import NoStack
from raydpfl.models.tasks import Form
from raydpfl.training.backends import BACKENDS, REFERENCE
from raydpfl.training.backends.base import Starts
from raydpfl.training.backends.frozen_base import NotOneBatch
from raydpfl.training.backends.ghost_clipping import NotLayerwise
from raydpfl.training.backends.vmap import paddings
from raydpfl.training.trainer import Trainer
from raydpfl.training.value_reads import value_read

# of the step's norm: rounding gives 1e-6, a wrong gradient about 1
TOLERANCE = 1e-3
ATTEMPTS = 3  # on other rows: a ReLU or a maximum that rounds the other way can give 1e-2 on some
MAX_SECONDS = 120.0  # seconds that the comparison may take
ROUNDING = 1e-6  # of the model's norm: what subtracting two models leaves uncertain of a step
SIZES = [6, 5, 3]  # rows of the three clients
SCALES = (1e3, 1e6, -1e6, 0.0)  # of a row that is far from the others
SMALL = 0.1  # of a parameter's usual size: what is scaled up
BATCH_ERROR = 1e-5  # relative: what rounding in another batch may come to


def mismatch(
    module: nn.Module,
    local: Local,
    form: Form,
    backend: str,
    clip: float | None,
    precision: Precision = "float32",
) -> str | None:
    """Why `backend` cannot train `module`, or None: its first steps against the loop's, each
    client's on one attempt's rows. With `clip` the bound is such that half of the rows, which
    differ in norm, are clipped. A backend of `whole_batches` takes no module whose course may
    depend on the rows, or in which a row far from the others changes them, which three steps need
    not show. In another `precision` than float32 the steps only have to be made.
    """
    errors = torch.full((len(SIZES),), torch.inf)
    timeout = TimeoutError(f"three steps take more than {MAX_SECONDS:g} s")
    try:
        with time_limit(MAX_SECONDS, timeout):
            if BACKENDS[backend].whole_batches:
                read = value_read(module, form.inputs(4, stream(0, Purpose.DATA)))
                if read:
                    return f"its forward reads values of its rows ({read}) and may branch on them"
            for seed in range(ATTEMPTS):
                steps = FirstSteps(module, local, form, clip, seed)
                updates, reference = steps.by(backend)
                uncertain = ROUNDING / TOLERANCE * models.trained(steps.module).norm()
                relative = (updates - reference).norm(dim=1) / (reference.norm(dim=1) + uncertain)
                errors = torch.minimum(errors, relative.cpu())
                if errors.max() <= TOLERANCE:
                    if precision != "float32":
                        steps.by(backend, precision)
                    whole = BACKENDS[backend].whole_batches
                    return row_dependence(copy.deepcopy(module).train(), form) if whole else None
    except (NoStack, NotLayerwise, NotOneBatch) as error:
        return str(error)
    except USER_EXCEPTIONS as error:  # a module may do anything when it is traced or vmapped
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"its first step is off by {float(errors.max()):.1e} of the loop's"


def row_dependence(module: nn.Module, form: Form) -> str | None:
    """How the outputs of made-up rows change with another row that is far from them, or None; a far
    row that the module does not take shows nothing. The module runs in its mode.
    """
    module = _full_size(module)
    x = form.inputs(4, stream(0, Purpose.DATA))

    def other_outputs(row: torch.Tensor) -> torch.Tensor:
        batch = torch.cat([x[:1], row[None], x[2:]])
        with torch.no_grad(), keyed_globals(0):
            return module(batch)[[0, 2, 3]]

    if form.tokens:
        far_rows = {f"of {k} alone": torch.full_like(x[1], k) for k in (0, form.tokens - 1)}
    else:
        far_rows = {f"times {scale:g}": scale * x[1] for scale in SCALES}
    expected = other_outputs(x[1])
    largest = expected.abs().max().clamp(min=1e-30)
    for name, row in far_rows.items():
        error = 0.0
        with suppress(*USER_EXCEPTIONS):
            error = float((other_outputs(row) - expected).abs().max() / largest)
        if not error <= BATCH_ERROR:
            return f"with one row {name} its outputs for the others are off by {error:.1e}"
    return None


class FirstSteps:
    """What three clients train to on rows drawn by `seed`: the rows are drawn, and the loop is run,
    once for all backends. Other arguments as for `mismatch`.
    """

    def __init__(
        self, module: nn.Module, local: Local, form: Form, clip: float | None, seed: int = 0
    ) -> None:
        self.module = _full_size(module)
        self.local = _shorten(local)
        self.form = form
        self.clip = clip
        self.seed = seed
        # the bound, the arguments of a chunk and the loop's updates, by whether dropout is idle
        self._reference: dict[bool, tuple[float | None, dict[str, Any], torch.Tensor]] = {}

    def by(
        self, backend: str, precision: Precision = "float32"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By `backend` in a precision and by the loop in float32, float32 [3, d] each. Raises
        whatever the backend does.
        """
        module = copy.deepcopy(self.module)
        # for single samples a dropout layer draws other numbers than in the loop
        by_sample = self.clip is not None and backend != REFERENCE
        dropouts = [layer for layer in module.modules() if isinstance(layer, _DropoutNd)]
        idle = by_sample and bool(dropouts)
        for layer in dropouts if idle else ():
            layer.p = min(layer.p, 1e-9)  # not 0: where drawing itself fails, that must show
        if idle not in self._reference:
            clip, rows = self._rows(module)
            self._reference[idle] = clip, rows, self._updates(module, REFERENCE, clip, rows)
        clip, rows, reference = self._reference[idle]
        return self._updates(module, backend, clip, rows, precision), reference

    def _updates(
        self,
        module: nn.Module,
        backend: str,
        clip: float | None,
        rows: dict[str, Any],
        precision: Precision = "float32",
    ) -> torch.Tensor:
        """What the three clients have trained to, float32 [3, D]."""
        options: dict[str, Any] = {"backend": backend, "clip": clip, "task": self.form.task}
        options |= {"user_defined": True, "precision": precision}
        trainer = Trainer(module, self.local, seed=0, **options)
        initial = rows["initial"]
        chunk = trainer.chunk(
            *(models.trained(module), rows["x"], rows["y"], SIZES),
            t=0,
            clients=range(3),
            draws=[0] * 3,
            corrections=rows["corrections"],
            starts=None if initial is None else Starts.at(initial),
        )
        return torch.cat([block.updates for block in chunk])

    def _rows(self, module: nn.Module) -> tuple[float | None, dict[str, Any]]:
        """The bound; x [3, 6, ...], y, corrections and initial parameters, [3, D] or None."""
        form, clip = self.form, self.clip
        generator = stream(self.seed, Purpose.DATA)
        x = form.inputs(18, generator).view(3, 6, *form.shape)
        if form.tokens:  # every client has those that may stand for padding
            tokens = sorted({0, form.tokens - 1, *paddings(module)} & {*range(form.tokens)})
            x.view(3, 6, -1)[..., -1] = torch.tensor((tokens * 6)[:6])
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = copy.deepcopy(module)(x[0])
        targets = form.task.random_targets(generator, 18, tuple(outputs.shape[1:]))
        y = targets.view(3, 6, *targets.shape[1:])
        if clip is not None:
            if not form.tokens:
                x *= torch.linspace(1, 0.2, 6).view(1, 6, *[1] * len(form.shape))
            with torch.random.fork_rng(devices=[]):
                clip = self._median_norm(module, x[0], y[0])
        parameters = models.trained(module)
        shape = (3, len(parameters))
        corrections = initial = None
        if self.local.corrects:  # of about the norm that gradients have
            corrections = torch.from_numpy(generator.standard_normal(shape) / shape[1] ** 0.5)
        if models.ParameterSplit.of(module).own:
            factors = 1 + 0.1 * torch.from_numpy(generator.standard_normal(shape)).float()
            initial = parameters * factors
        return clip, {"x": x, "y": y, "corrections": corrections, "initial": initial}

    def _median_norm(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        module = copy.deepcopy(module).train()
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        norms = []
        for sample, label in zip(x.split(1), y.split(1), strict=True):
            loss = self.form.task.loss(module(sample), label).mean()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            norms.append(torch.stack([g.norm() for g in gradients if g is not None]).norm())
        return float(torch.stack(norms).median())


def _full_size(module: nn.Module) -> nn.Module:
    """A copy whose trained parameters are not near 0: behind such a gate no gradient would show."""
    module = copy.deepcopy(module)
    generator = stream(0, Purpose.MODEL)
    with torch.no_grad():
        for parameter in module.parameters():
            if not (parameter.requires_grad and parameter.numel()):
                continue
            size = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 1.0
            largest = float(parameter.abs().max())
            if largest == 0:
                normals = size * generator.standard_normal(parameter.shape)
                parameter.copy_(torch.as_tensor(normals))
            elif largest < SMALL * size:  # a factor keeps signs, which may matter
                parameter.mul_(size / largest)
    return module


def _shorten(local: Local) -> Local:
    """The rule with few steps: two where the second differs from the first."""
    linear = local.linear()
    changes: dict[str, Any] = {"batch": local.batch if local.batch == "full" else 4}
    if local.epochs is not None:
        changes["epochs"] = 1.0  # two steps of the first two clients, one of the third
    elif linear is None or linear.proximal:  # a proximal term is 0 at the first step
        changes["steps"] = 2
    else:
        changes["steps"] = 1
    if linear is not None:  # else its learning rate is of the size that it takes
        changes["lr"] = 1.0
    return local.model_copy(update=changes)
