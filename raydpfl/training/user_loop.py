"""A client trained by code of the user's own, from its first step to its last (`Local.train`)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from raydpfl import models
from raydpfl.methods.local.base import Local
from raydpfl.models.tasks import Task
from raydpfl.training.backends.base import ChunkData

ROWS = 1024  # in a pass of those that the loss is taken on


def trained_whole(
    local: Local,
    module: nn.Module,
    task: Task,
    parameters: torch.Tensor,
    chunk: ChunkData,
    slot: int,
) -> tuple[torch.Tensor, float]:
    """What the client at a slot has trained to, and its loss. The code is given a copy of the
    module of its own, and copies of the rows, which are gone when the next client begins.

    Args:
        local: a rule that `trains`.
        module: the model, which stays as it is.
        task: what losses are told by; the code has its own.
        parameters: the round's model, float32 [D].
        chunk: of the client's rows, where what it has trained to of its own is written too.
        slot: its slot.

    Returns:
        The update, float32 [d]; and the mean loss of the model on the client's rows before it
        trained, in evaluation mode, as its own losses are not known.

    Raises:
        ValueError: what it was to train is gone, or of another shape.
    """
    own = copy.deepcopy(module).to(parameters.device).train()
    begun = chunk.begins(parameters, slot)
    models.set_trained(own, begun)
    size = int(chunk.sizes[slot])
    x = chunk.x[slot, :size].clone()
    y = chunk.y[slot, :size].clone()
    loss = _loss(own, task, x, y)
    trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
    local.train(own, x, y, chunk.generator(slot))
    flat = _parameters(own, trained, len(parameters))
    if chunk.starts is not None:
        chunk.starts.ended[slot] = models.trained(own)
    return flat.to(parameters.device) - begun[: len(parameters)], loss


def _parameters(module: nn.Module, trained: list[nn.Parameter], count: int) -> torch.Tensor:
    """These parameters of a module as one vector, float32 [count]. Raises ValueError if they are
    gone, or others.
    """
    kept = {id(parameter) for parameter in module.parameters()}
    if not all(id(parameter) in kept for parameter in trained):
        raise ValueError("train puts other parameters in the place of the module's")
    flat = torch.cat([parameter.detach().float().reshape(-1) for parameter in trained])
    if len(flat) != count:
        raise ValueError(f"train leaves {len(flat)} parameters of {count}")
    return flat


@torch.no_grad()
def _loss(module: nn.Module, task: Task, x: torch.Tensor, y: torch.Tensor) -> float:
    total = 0.0
    module.eval()
    for some, labels in zip(x.split(ROWS), y.split(ROWS), strict=True):
        total += float(task.loss(module(some), labels).sum())
    module.train()
    return total / len(x)
