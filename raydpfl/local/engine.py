"""Which way trains a model, and the trainer that carries it out.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> local = Sgd(steps=20, batch=10)
>>> way = resolve(module, local, rows=20, shape=(1, 28, 28))
>>> way
'sample_space'
>>> trainer = Trainer(module, local, way=way, seed=0)
>>> x, y, sizes = torch.ones(2, 20, 1, 28, 28), torch.zeros(2, 20, dtype=torch.long), [20, 13]
>>> for block in trainer.lane(torch.zeros(7850), x, y, sizes, t=0, clients=[3, 8], draws=[0, 0]):
...     print(block.slots, tuple(block.updates.shape), block.losses.round(2))
[0 1] (2, 7850) [0.12 0.12]
"""

from __future__ import annotations

import contextlib
import copy
import logging
import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from raydpfl import keys, models
from raydpfl.errors import RAISED, ConfigError
from raydpfl.interrupts import limited
from raydpfl.keys import Purpose, stream, torch_stream
from raydpfl.local.batches import batches
from raydpfl.local.layerwise import Layerwise, NotLayerwise
from raydpfl.local.linear import Fused, SampleSpace
from raydpfl.local.loop import Loop
from raydpfl.local.noop import Noop
from raydpfl.local.sgd import Sgd
from raydpfl.local.stack import NoStack, stack
from raydpfl.local.vmap import Vmap
from raydpfl.local.way import Block, LaneData, Way, sample_loss, spans

log = logging.getLogger("raydpfl")
WAYS: dict[str, type[Way]] = {
    "sample_space": SampleSpace,
    "fused": Fused,
    "layerwise": Layerwise,
    "vmap": Vmap,
    "loop": Loop,
    "noop": Noop,
}
REFERENCE = "loop"  # trains any module
TOGETHER = 1 << 24  # bytes that lanes trained together may take
# of the step's norm: rounding gives 1e-6, a ReLU whose input rounds across 0 gives 1e-4, a wrong
# gradient about 1
TOLERANCE = 1e-3
TRIAL = 120.0  # seconds that the comparison may take
ROUNDING = 1e-6  # of the model's norm: what subtracting two models leaves uncertain of a step


def resolve(
    module: nn.Module,
    local: Sgd,
    rows: int,
    shape: tuple[int, ...],
    way: str = "auto",
    clip: float | None = None,
    regression: bool = False,
) -> str:
    """The way to train `module` on samples of `shape` when a typical client has `rows` of them.

    A function of the architecture, `local`, the shapes and whether each sample is clipped alone,
    never of timing: a stack of linear layers in sample space or fused, whichever takes fewer
    operations; a module with convolutions or recurrent layers by the loop; any other by vmap. With
    `clip`, the bound on a sample's gradient: a stack of linear layers fused, any other module
    layerwise, or else by vmap. The way's first steps are compared with the loop's on made-up rows.
    Where they fail or differ, `auto` takes the next, in the end the loop, and logs why. Raises
    `ConfigError` for a way that does not fit and was asked for by name; for a module that has
    BatchNorm or changes its buffers or parameters, with `clip`; and for one with more than one
    output, for `regression`.
    """
    if not isinstance(local, Sgd):
        raise ConfigError(
            "local.kind",
            local.kind,
            "sgd, or the import path of a class that derives from raydpfl.local.Sgd",
        )
    rates = [local.learning_rate(t) for t in (0, 1, 2, 0, 1, 2)]
    if rates[:3] != rates[3:]:
        raise ConfigError(
            "local.kind", local.kind, "a class whose learning_rate depends on the round alone"
        )
    if regression:
        _check_single_output(module, shape)
    if clip is not None:
        _check_apart(module, shape)
    choices = _choices(module, local, rows, clip) if way == "auto" else [way]
    drawn = _drawn(module, shape)
    if drawn and way == "auto":
        log.warning(
            "clients are trained by the loop, one at a time, as the module draws from %s", drawn
        )
        choices = [REFERENCE]
    elif drawn and way in WAYS and way != "noop" and not WAYS[way].one_by_one:
        raise ConfigError(
            "client.way",
            way,
            f"auto or {REFERENCE}; the module draws from {drawn}, which has to be client by client",
        )
    for chosen, other in pairwise([*choices, REFERENCE]):
        _check_way(chosen, local, clip)
        reason = None
        if chosen not in (REFERENCE, "noop"):
            with limited(TRIAL, TimeoutError(f"three steps take more than {TRIAL:g} s")):
                reason = _mismatch(module, local, shape, chosen, clip, regression)
        if reason is None:
            return chosen
        if way != "auto":
            raise ConfigError(
                "client.way", way, f"auto or {REFERENCE}; this way does not fit the model: {reason}"
            )
        log.warning(
            "clients are trained by %s; %s does not fit the model: %s",
            "the loop" if other == REFERENCE else other,
            chosen,
            reason,
        )
    return REFERENCE


def _drawn(module: nn.Module, shape: tuple[int, ...]) -> str | None:
    """The generator of the process, other than torch's, that a module in training draws from.

    None where it draws from none. Other threads of the process may draw from them too at any time,
    so only what is seen in each of a few tries is the module's.
    """
    found = {_drawn_once(module, shape) for _ in range(3)}
    return found.pop() if len(found) == 1 else None


def _drawn_once(module: nn.Module, shape: tuple[int, ...]) -> str | None:
    with keys.keyed_globals(0):
        before = random.getstate(), pickle.dumps(np.random.get_state())
        with contextlib.suppress(Exception):  # what it raises it will raise in training too
            copy.deepcopy(module).train()(torch.ones(2, *shape))
        if random.getstate() != before[0]:
            return "Python's random"
        return "np.random" if pickle.dumps(np.random.get_state()) != before[1] else None


def _choices(module: nn.Module, local: Sgd, rows: int, clip: float | None) -> list[str]:
    try:
        layers = stack(module)
        if clip is not None:
            return ["fused", "layerwise", "vmap"]
        return [
            "sample_space"
            if not local.stateful and SampleSpace.pays(layers, rows, local)
            else "fused"
        ]
    except NoStack:
        if clip is not None:
            return ["layerwise", "vmap"]
        return [
            "loop"
            if any(isinstance(layer, (_ConvNd, nn.RNNBase)) for layer in module.modules())
            else "vmap"
        ]


def _check_way(way: str, local: Sgd, clip: float | None) -> None:
    """Raises `ConfigError` for a way that is none, or cannot do what `local` and the clipping of
    each sample ask for.
    """

    def can(kind: type[Way]) -> bool:
        return kind.private in (None, clip is not None) and (kind.corrects or not local.stateful)

    if way not in WAYS or not can(WAYS[way]):
        reason = (
            ""
            if way not in WAYS
            else f" (local.kind {local.kind}, {'with' if clip is not None else 'without'} clipping of each sample)"
        )
        raise ConfigError(
            "client.way",
            way,
            f"auto or one of {', '.join(name for name in WAYS if can(WAYS[name]))}{reason}",
        )


def _check_single_output(module: nn.Module, shape: tuple[int, ...]) -> None:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = tuple(copy.deepcopy(module)(torch.zeros(2, *shape)).shape)
    except RAISED:  # it will raise in training too, and be reported with its client
        return
    if outputs not in ((2, 1), (2,)):
        raise ConfigError(
            "model",
            type(module).__name__,
            f"a module with a single output, for regression; 2 samples give it shape {outputs}",
        )


def _check_apart(module: nn.Module, shape: tuple[int, ...]) -> None:
    """Raises `ConfigError` for a module in which one sample's gradient depends on the others by
    another path than the noised parameters.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            "model",
            type(module).__name__,
            f"a module that keeps samples apart, as they are clipped one by one; {what}",
        )

    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            raise refuse(
                f"{name or 'it'} is a {type(layer).__name__} (raydpfl.models.group_norm converts it)"
            )
        # of an Embedding: it shortens the rows that it is asked for
        if getattr(layer, "max_norm", None) is not None:
            raise refuse(
                f"{name or 'it'} is a {type(layer).__name__} with max_norm, which changes its weight with what it is given"
            )
    tried = copy.deepcopy(module).train()
    # what it raises it will raise in training too
    with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
        tried(torch.ones(2, *shape))
    for kind, named, afterwards in (
        ("buffer", module.named_buffers(), tried.buffers()),
        ("parameter", module.named_parameters(), tried.parameters()),
    ):
        for (name, before), after in zip(named, afterwards, strict=True):
            if not torch.equal(before, after):
                raise refuse(f"its {kind} {name} changes with what it is given")


def _median_norm(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The median norm of the samples' gradients."""
    module = copy.deepcopy(module).train()
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    norms = []
    for sample in zip(x.split(1), y.split(1), strict=True):
        gradients = torch.autograd.grad(
            sample_loss(module(sample[0]), sample[1]), parameters, allow_unused=True
        )
        norms.append(torch.stack([each.norm() for each in gradients if each is not None]).norm())
    return float(torch.stack(norms).median())


def _mismatch(
    module: nn.Module,
    local: Sgd,
    shape: tuple[int, ...],
    way: str,
    clip: float | None,
    regression: bool,
) -> str | None:
    """Why `way` cannot train `module`, or None: its first steps against the loop's, for three
    clients of 6, 5 and 3 made-up rows.

    With `clip` the rows, and so their gradients, are of different norms, and the bound is such that
    half of them are clipped.
    """
    # a dropout layer draws for each sample apart, but not what the loop draws, one sample after
    # another
    if way == "layerwise":
        module = copy.deepcopy(module)
        for layer in module.modules():
            if isinstance(layer, _DropoutNd):
                layer.p = min(layer.p, 1e-9)  # not 0: where drawing itself fails, that must show
    sizes = [6, 5, 3]
    parameters = models.flatten(module)
    generator = stream(0, Purpose.DATA)
    x = torch.from_numpy(generator.random((3, 6, *shape), dtype=np.float32))
    steps: list[torch.Tensor] = []
    # A proximal term is 0 at the first step.
    few = {
        "steps": 2 if local.proximal else 1,
        "batch": local.batch if local.batch == "full" else 4,
        "lr": 1.0,
    }
    local = local.model_copy(update=few)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            outputs = copy.deepcopy(module)(x[0])
        drawn = (
            generator.random((3, 6))
            if regression
            else generator.integers(outputs.shape[1], size=(3, 6))
        )
        y = torch.from_numpy(drawn).to(torch.float32 if regression else torch.int64)
        if clip is not None:
            x *= torch.linspace(1, 0.2, 6).view(1, 6, *[1] * len(shape))
            with torch.random.fork_rng(devices=[]):
                clip = _median_norm(module, x[0], y[0])
        corrections = None
        if local.stateful:  # of about the norm that gradients have
            corrections = torch.from_numpy(
                generator.standard_normal((3, len(parameters))) / len(parameters) ** 0.5
            )
        for name in (way, REFERENCE):
            trainer = Trainer(module, local, way=name, seed=0, clip=clip, own=True)
            lane = trainer.lane(
                parameters,
                x,
                y,
                sizes,
                t=0,
                clients=range(3),
                draws=[0] * 3,
                corrections=corrections,
            )
            steps.append(torch.cat([block.updates for block in lane]))
    except RAISED as error:  # a module may do anything when it is traced or vmapped
        return (
            str(error)
            if isinstance(error, (NoStack, NotLayerwise))
            else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        )
    far = max(
        float((a - b).norm() / (b.norm() + ROUNDING / TOLERANCE * parameters.norm()))
        for a, b in zip(*steps, strict=True)
    )
    return None if far <= TOLERANCE else f"its first step is off by {far:.1e} of the loop's"


class Trainer:
    """Trains lanes of clients, one way. `way` is what `resolve` gave; the module is never changed.

    `clip` is the bound on the L2 norm of one sample's gradient. `own` says that code of the user's
    takes part: what it draws from the generators of the process is then keyed by the client. Raises
    `ConfigError` for a way that cannot clip each sample, or cannot add the corrections that `local`
    needs. Call `single_thread` first: a number of threads that changes would change bits.
    """

    def __init__(
        self,
        module: nn.Module,
        local: Sgd,
        *,
        way: str,
        seed: int,
        device: torch.device | str = "cpu",
        clip: float | None = None,
        own: bool = False,
    ):
        _check_way(way, local, clip)
        self.local = local
        self.device = torch.device(device)
        self.clip = clip
        self.seed = self.noise_seed = seed  # a run sets them for each round
        self.own = own
        with keys.keyed_globals(seed):
            self._way = WAYS[way](module, local, self.device)

    def lane(
        self,
        parameters: torch.Tensor,
        x: torch.Tensor | np.ndarray,
        y: torch.Tensor | np.ndarray,
        sizes: Sequence[int],
        *,
        t: int,
        clients: Sequence[int],
        draws: Sequence[int],
        stds: np.ndarray | None = None,
        corrections: torch.Tensor | np.ndarray | None = None,
        drawn: tuple[np.ndarray, np.ndarray] | None = None,
        clipped: np.ndarray | None = None,
        width: int | None = None,
    ) -> Iterator[Block]:
        """The clients of the lane, in its order, in blocks (see `raydpfl.local.way.Block`): of one
        client where the way trains one by one, each trained when its block is asked for; else of as
        many as lie in the cache.

        `parameters` is the model, float32 [d] as `raydpfl.models.flatten` gives it; x float32 [C,
        n, *shape], sizes [C]; y [C, n] holds integers for cross-entropy, floats for half the
        squared error; rows from sizes[i] on are never looked at. `clients` [C] has -1 for an empty
        slot; `draws` [C] tells apart the times a client was drawn. A client's bits depend on its
        rows, key, slot and the shapes C and n, not on what is in the other slots. A client without
        rows has an update of zeros and the loss NaN; a diverged update comes back as it is.

        `stds` float64 [C] is the std of the Gaussian noise on the mean gradient of each step, in
        each coordinate, and needs `clip`; `corrections` float32 [C, d] is added to every gradient
        after that. `drawn` are the batches, as `batches` gives them, where x holds other rows than
        all of a client's in their order (`picked`); else they are drawn here. Raises ValueError for
        stds without clip, and for a stateful `local` without corrections or corrections for a way
        that cannot add them.

        Into `clipped`, float64 [C], is written, by the time that a slot's block is yielded, the share of
        its (sample, step) pairs whose gradient was longer than `clip`: a gradient that is not
        finite is not. NaN for a slot without rows, and for all where nothing is clipped.

        With `width`, the C clients are C / `width` lanes one after another, trained together: each
        client has the bits that it has in its lane alone, and no block holds clients of two. See
        `together`.
        """
        if clipped is not None:
            clipped.fill(np.nan)
        if stds is not None and self.clip is None:
            raise ValueError("noise on a step needs gradients that are clipped per sample")
        if (
            (corrections is None)
            if self.local.stateful
            else (corrections is not None and not self._way.corrects)
        ):
            raise ValueError(
                f"{self.local.kind} needs corrections"
                if corrections is None
                else "this way adds no corrections"
            )
        members = np.asarray(clients) >= 0
        present = np.where(members, sizes, 0)
        names = {
            "clients": np.asarray(clients),
            "draws": np.asarray(draws),
            "stds": np.asarray(stds),
        }

        def noise(slots: Sequence[int], step: int) -> torch.Tensor:
            who = {name: each[slots] for name, each in names.items()}
            return keys.clients_normals(
                self.noise_seed, Purpose.STEP_NOISE, len(parameters), t=t, step=step, **who
            ).to(self.device)

        regression = torch.as_tensor(y).is_floating_point()
        index, batch_sizes = drawn or batches(
            self.seed, t, clients, draws, present, self.local, rows=y.shape[1]
        )
        lane = LaneData(
            x=torch.as_tensor(x, dtype=torch.float32, device=self.device),
            y=torch.as_tensor(
                y, dtype=torch.float32 if regression else torch.int64, device=self.device
            ),
            sizes=present,
            index=index,
            batch_sizes=batch_sizes,
            slots=np.flatnonzero(present).tolist(),
            lr=self.local.learning_rate(t),
            generator=lambda slot: torch_stream(
                self.seed,
                Purpose.MODULE,
                t=t,
                client=int(clients[slot]),
                draw=int(draws[slot]),
            ),
            clip=self.clip,
            corrections=None
            if corrections is None
            else torch.as_tensor(corrections, dtype=torch.float32, device=self.device),
            noise=None if stds is None else noise,
            clipped=clipped,
            width=width,
        )
        # A copy, in torch's own alignment: how the model is aligned in memory could change the bits
        # of a product.
        parameters = parameters.to(self.device, torch.float32, copy=True)
        trained = self._trained(parameters, lane, t, clients, draws)
        idle = np.flatnonzero(members & (present == 0))
        yield from trained if not len(idle) else _with_idle(trained, idle, parameters)

    def _trained(
        self,
        parameters: torch.Tensor,
        lane: LaneData,
        t: int,
        clients: Sequence[int],
        draws: Sequence[int],
    ) -> Iterator[Block]:
        """What the way gives. What the user's own code draws in it is keyed: by the client, or by
        the round where a lane is trained at once.
        """
        running = self._way.run(parameters, lane)
        if self._way.one_by_one:
            for slot in lane.slots:
                with self._keyed(t=t, client=int(clients[slot]), draw=int(draws[slot])):
                    block = next(running)
                yield block
            return
        while True:
            with self._keyed(t=t, step=1):
                block = next(running, None)
            if block is None:
                return
            yield block

    def _keyed(self, **name: int) -> AbstractContextManager[None]:
        return keys.keyed_globals(self.seed, **name) if self.own else nullcontext()

    def together(self, width: int, rows: int, features: int) -> int:
        """How many lanes of `width` clients, padded to `rows` rows of `features` numbers, are to be
        trained in one call of `lane`: as many as keep within `TOGETHER`, at least 1.
        """
        batch = self.local.batch_size(rows)
        numbers = self._way.numbers(rows, features, batch, clip=self.clip is not None)
        return 1 if numbers is None else max(1, TOGETHER // (4 * width * max(numbers, 1)))

    @property
    def module(self) -> nn.Module | None:
        """The working copy of the module, where its own code is run; None where its layers are
        taken apart.
        """
        return getattr(self._way, "module", None)


def _with_idle(
    trained: Iterator[Block], idle: np.ndarray, parameters: torch.Tensor
) -> Iterator[Block]:
    """The blocks with the `idle` slots, int64, in their places: updates of 0 and losses of NaN."""
    for block in trained:
        first, last = block.slots[[0, -1]]
        yield from _idle(idle[idle < first], parameters)
        within = idle[(idle > first) & (idle < last)]
        idle = idle[idle > last]
        for zeros in _idle(within, parameters):
            slots = np.concatenate([block.slots, zeros.slots])
            order = np.argsort(slots)
            updates = torch.cat([block.updates, zeros.updates])[torch.from_numpy(order)]
            losses = np.concatenate([block.losses, zeros.losses])[order]
            block = Block(slots[order], updates, losses)
        yield block
    yield from _idle(idle, parameters)


def _idle(slots: np.ndarray, parameters: torch.Tensor) -> Iterator[Block]:
    for some in spans(0, len(slots), len(parameters)):
        given = slots[some]
        updates = parameters.new_zeros(len(given), len(parameters))
        yield Block(given, updates, np.full(len(given), np.nan))
