"""Which way trains a model, and the trainer that carries it out.

>>> module = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
>>> local = Sgd(steps=20, batch=10)
>>> way = resolve(module, local, rows=20, shape=(1, 28, 28))
>>> way
'sample_space'
>>> trainer = Trainer(module, local, way=way, seed=0)
>>> x, y, sizes = torch.ones(2, 20, 1, 28, 28), torch.zeros(2, 20, dtype=torch.long), [20, 13]
>>> for slot, delta, loss in trainer.lane(torch.zeros(7850), x, y, sizes, round=0, clients=[3, 8], draws=[0, 0]):
...     print(slot, tuple(delta.shape), f"{loss:.2f}")
0 (7850,) 0.12
1 (7850,) 0.12
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from raydpfl import models
from raydpfl.errors import ConfigError
from raydpfl.keys import Purpose, stream, torch_stream
from raydpfl.local.batches import batches
from raydpfl.local.linear import Fused, SampleSpace
from raydpfl.local.loop import Loop
from raydpfl.local.noop import Noop
from raydpfl.local.sgd import Sgd
from raydpfl.local.stack import NoStack, stack
from raydpfl.local.vmap import Vmap
from raydpfl.local.way import LaneData, Way

log = logging.getLogger("raydpfl")
WAYS: dict[str, type[Way]] = {"sample_space": SampleSpace, "fused": Fused, "vmap": Vmap, "loop": Loop, "noop": Noop}
TOLERANCE = 1e-3  # of the step's norm: rounding gives 1e-6, a ReLU whose input rounds across 0 gives 1e-4, a wrong gradient about 1
ROUNDING = 1e-6  # of the model's norm: what subtracting two models leaves uncertain of a step


def resolve(module: nn.Module, local: Sgd, rows: int, shape: tuple[int, ...], way: str = "auto") -> str:
    """The way to train `module` on samples of `shape` when a typical client has `rows` of them.

    A function of the architecture, `local` and the shapes alone, never of timing: a stack of linear layers in sample space or fused,
    whichever takes fewer operations; a module with convolutions or recurrent layers by the loop; any other by vmap. The way's first
    step is compared with the loop's on made-up rows. Where it fails or differs, `auto` takes the loop and logs why, and a way asked for
    by name raises `ConfigError`.
    """
    if not isinstance(local, Sgd):
        raise ConfigError("local.kind", local.kind, "sgd, or the import path of a class that derives from raydpfl.local.Sgd")
    chosen = way
    if way == "auto":
        try:
            chosen = "sample_space" if SampleSpace.pays(stack(module), rows, local) else "fused"
        except NoStack:
            chosen = "loop" if any(isinstance(layer, (_ConvNd, nn.RNNBase)) for layer in module.modules()) else "vmap"
    elif way not in WAYS:
        raise ConfigError("client.way", way, f"auto or one of {', '.join(WAYS)}")
    if chosen in ("loop", "noop"):
        return chosen
    reason = _mismatch(module, local, shape, chosen)
    if reason and way != "auto":
        raise ConfigError("client.way", way, f"auto or loop; this way does not fit the model: {reason}")
    if reason:
        log.warning("clients are trained by the loop; %s does not fit the model: %s", chosen, reason)
    return "loop" if reason else chosen


def _mismatch(module: nn.Module, local: Sgd, shape: tuple[int, ...], way: str) -> str | None:
    """Why `way` cannot train `module`, or None: its first step against the loop's, for three clients of 6, 5 and 3 made-up rows."""
    sizes, parameters = [6, 5, 3], models.flatten(module)
    generator = stream(0, Purpose.DATA)
    x = torch.from_numpy(generator.random((3, 6, *shape), dtype=np.float32))
    steps: list[list[torch.Tensor]] = []
    local = local.model_copy(update={"steps": 1, "batch": local.batch if local.batch == "full" else 4, "lr": 1.0})
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            classes = copy.deepcopy(module)(x[0]).shape[1]
        y = torch.from_numpy(generator.integers(classes, size=(3, 6)))
        for name in (way, "loop"):
            trained = Trainer(module, local, way=name, seed=0).lane(parameters, x, y, sizes, round=0, clients=range(3), draws=[0] * 3)
            steps.append([delta for _, delta, _ in trained])
    except Exception as error:  # a module may do anything when it is traced or vmapped
        return str(error) if isinstance(error, NoStack) else f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    far = max(float((a - b).norm() / (b.norm() + ROUNDING / TOLERANCE * parameters.norm())) for a, b in zip(*steps, strict=True))
    return None if far <= TOLERANCE else f"its first step is off by {far:.1e} of the loop's"


class Trainer:
    """Trains lanes of clients, one way. `way` is what `resolve` gave; the module is never changed.

    Call `single_thread` first: a number of threads that changes would change bits.
    """

    def __init__(self, module: nn.Module, local: Sgd, *, way: str, seed: int, device: torch.device | str = "cpu"):
        self.local, self.seed, self.device = local, seed, torch.device(device)
        self._way = WAYS[way](module, local, self.device)

    def lane(
        self,
        parameters: torch.Tensor,
        x: torch.Tensor | np.ndarray,
        y: torch.Tensor | np.ndarray,
        sizes: Sequence[int],
        *,
        round: int,
        clients: Sequence[int],
        draws: Sequence[int],
    ) -> Iterator[tuple[int, torch.Tensor, float]]:
        """(slot, update float32 [d] on the device, mean training loss over the steps) of each client of the lane, in its order.

        `parameters` is the model, float32 [d] as `raydpfl.models.flatten` gives it; x float32 [C, n, *shape], y int64 [C, n], sizes [C];
        rows from sizes[i] on are never looked at. `clients` [C] has -1 for an empty slot; `draws` [C] tells apart the times a client was
        drawn. A client's bits depend on its rows, key, slot and the shapes C and n, not on what is in the other slots. A client without
        rows gives zeros and the loss NaN; a diverged update comes back as it is.
        """
        members = np.asarray(clients) >= 0
        present = np.where(members, sizes, 0)
        index, batch_sizes = batches(self.seed, round, clients, draws, present, self.local, rows=y.shape[1])
        lane = LaneData(
            x=torch.as_tensor(x, dtype=torch.float32, device=self.device),
            y=torch.as_tensor(y, dtype=torch.int64, device=self.device),
            sizes=present,
            index=index,
            batch_sizes=batch_sizes,
            slots=np.flatnonzero(present).tolist(),
            lr=self.local.learning_rate(round),
            generator=lambda slot: torch_stream(self.seed, Purpose.MODULE, round=round, client=int(clients[slot]), draw=int(draws[slot])),
        )
        # A copy, in torch's own alignment: how the model is aligned in memory could change the bits of a product.
        parameters = parameters.to(self.device, torch.float32, copy=True)
        trained = self._way.run(parameters, lane)
        for slot in np.flatnonzero(members).tolist():
            yield next(trained) if present[slot] else (slot, torch.zeros_like(parameters), float("nan"))
