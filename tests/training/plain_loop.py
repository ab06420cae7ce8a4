"""What the tests of training share: small modules, rows of five clients, and a plain loop over them
with torch.optim in double, sample by sample where gradients are clipped.
"""

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import task_of
from torch import nn

from raydpfl import models
from raydpfl.core.prng import Purpose, normals
from raydpfl.methods.local import Adam, AdamW, Local, Sam, Scaffold, Sgd
from raydpfl.methods.schedules import Schedule
from raydpfl.training.minibatches import batches
from raydpfl.training.trainer import Trainer

SHAPE = (2, 6, 6)
CLASSES = 4
ROUND = 2
SEED = 4
# one with fewer rows than a batch, one empty slot, one with exactly a batch
SIZES = [13, 4, 9, 0, 6]
CLIENTS = [2, 5, 5, -1, 30]
DRAWS = [0, 0, 1, 0, 0]
STDS = np.array([0.01, 0.0, 0.02, 0.0, 0.005])


def net(kind: str, forward, **layers: nn.Module | nn.Parameter) -> nn.Module:
    """A module of a class of its own: its layers by name, and its `forward(self, x)`."""
    module = type(kind, (nn.Module,), {"forward": forward})()
    for name, layer in layers.items():
        setattr(module, name, layer)
    return module


def residual() -> nn.Module:
    """No stack of linear layers: a branch, LayerNorm, a parameter outside of its layers."""

    def forward(self, x):
        h = self.first(x.flatten(1))
        return self.last(h + self.scale * torch.tanh(self.norm(h)))

    layers = {"first": nn.Linear(72, 12), "norm": nn.LayerNorm(12), "last": nn.Linear(12, CLASSES)}
    return net("Residual", forward, **layers, scale=nn.Parameter(torch.ones(12)))


def functional() -> nn.Module:
    """A stack of linear layers written in functions."""

    def forward(self, x):
        x = F.leaky_relu(self.a(x.view(x.size(0), -1)), 0.2)
        return self.c(torch.sigmoid(F.linear(x, self.b.weight)))

    layers = {"b": nn.Linear(9, 7, bias=False), "c": nn.Linear(7, CLASSES)}
    return net("Functional", forward, a=nn.Linear(72, 9), **layers)


def reused() -> nn.Module:
    def forward(self, x):
        x = torch.tanh(self.square(self.enter(x.flatten(1))))
        return self.leave(torch.tanh(self.square(x)))

    layers = {"enter": nn.Linear(72, 8), "square": nn.Linear(8, 8), "leave": nn.Linear(8, CLASSES)}
    return net("Reused", forward, **layers)


def tied_by_hand() -> nn.Module:
    """Uses a layer's weight a second time, outside of the layer."""

    def forward(self, x):
        return F.linear(torch.tanh(self.square(self.enter(x.flatten(1)))), self.square.weight)

    square = nn.Linear(CLASSES, CLASSES)
    return net("TiedByHand", forward, enter=nn.Linear(72, CLASSES), square=square)


def pooling() -> nn.Module:
    """Convolutions with the functions after them as they are usually written."""

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.a(x)), 2)
        x = F.max_pool2d(torch.tanh(self.b(x)), kernel_size=3, stride=1, padding=1)
        return self.d(F.relu(self.c(torch.flatten(x, 1))))

    filters = {"a": nn.Conv2d(2, 4, 3, padding=1), "b": nn.Conv2d(4, 5, 3, padding=1)}
    return net("Pooling", forward, **filters, c=nn.Linear(45, 8), d=nn.Linear(8, CLASSES))


def positions(count: int, width: int) -> nn.Module:
    """Linear layers over `count` x 2 positions, and a LayerNorm over the last two axes."""

    def forward(self, x):
        h = self.norm(self.first(x.reshape(len(x), 2, count, -1)))
        return self.last(torch.tanh(h)).mean((1, 2))

    layers = {"first": nn.Linear(36 // count, width), "norm": nn.LayerNorm((count, width))}
    return net("Positions", forward, **layers, last=nn.Linear(width, CLASSES, bias=False))


def in_place() -> nn.Module:
    """Changes the outputs of its layers in place, and adds to one of them."""

    def forward(self, x):
        a = torch.tanh_(self.a(x))
        out = self.norm(self.b(a))
        out += a
        return self.c(F.relu_(out.mul_(2.0)).flatten(1))

    filters = {"a": nn.Conv2d(2, 6, 3, padding=1), "b": nn.Conv2d(6, 6, 3, padding=1)}
    return net("InPlace", forward, **filters, norm=nn.GroupNorm(3, 6), c=nn.Linear(216, CLASSES))


def viewed() -> nn.Module:
    """Takes its images in another shape by `view`, which those that are channels-last have not."""

    def forward(self, x):
        return self.b(self.pool(self.a(x)).view(-1, 45))

    layers = {"a": nn.Conv2d(2, 5, 3, padding=1), "pool": nn.MaxPool2d(2)}
    return net("Viewed", forward, **layers, b=nn.Linear(45, CLASSES))


def two_inputs() -> nn.Module:
    """Has a layer with a bare parameter, of two inputs."""

    def scaled(self, x, y):
        return torch.sin(self.by * x.flatten(1)) + self.by**2 * y.flatten(1)

    def forward(self, x):
        return self.last(self.scale(x, x.tanh()))

    scale = net("Scale", scaled, by=nn.Parameter(torch.linspace(0.5, 2, 72)))
    return net("TwoInputs", forward, scale=scale, last=nn.Linear(72, CLASSES))


def embedded() -> nn.Module:
    def forward(self, x):
        return self.last(self.table((x.flatten(1)[:, :10].abs() * 3).long() % 5).mean(1))

    return net("Embedded", forward, table=nn.Embedding(5, 3), last=nn.Linear(3, CLASSES))


def adapted() -> nn.Module:
    """A frozen net with adapters, one of which is not at its start, a trained norm, and a bias."""
    module = residual()
    asked = models.Lora(rank=2, scale=1.5, targets=("first", "last"), trained=("norm.*", "*.bias"))
    models.adapt(module, asked, lambda: module(torch.zeros(1, *SHAPE)))
    nn.init.normal_(module.first.lora_B.weight, std=0.2)
    return module


def single_number() -> nn.Module:
    """Has a layer with a parameter that is one number, without an axis."""
    scale = net("Times", lambda self, x: self.by * x, by=nn.Parameter(torch.tensor(0.7)))
    return mlp(nn.Linear(72, CLASSES), scale)


def tied() -> nn.Module:
    module = mlp(nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 72), nn.Linear(72, CLASSES))
    module[3].weight = module[1].weight
    return module


def frozen() -> nn.Module:
    layers = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 5, 3), nn.Flatten()
    module = nn.Sequential(*layers, nn.Linear(20, CLASSES))
    for parameter in (module[0].bias, module[1].weight, module[3].weight, module[5].bias):
        parameter.requires_grad_(False)
    return module


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


def ending(*layers: nn.Module) -> nn.Module:
    """The layers, then a linear one."""
    with torch.no_grad():
        width = nn.Sequential(*layers)(torch.zeros(2, *SHAPE)).flatten(1).shape[1]
    return nn.Sequential(*layers, nn.Tanh(), nn.Flatten(), nn.Linear(width, CLASSES))


STACKS = {
    "softmax": lambda: mlp(nn.Linear(72, CLASSES)),
    "softmax without bias": lambda: mlp(nn.Linear(72, CLASSES, bias=False)),
    "relu mlp": lambda: mlp(
        *(nn.Linear(72, 20), nn.ReLU(), nn.Linear(20, 11, bias=False), nn.ReLU()),
        nn.Linear(11, CLASSES),
    ),
    "mlp": lambda: mlp(
        *(nn.Linear(72, 17), nn.Tanh(), nn.Linear(17, 9, bias=False), nn.Sigmoid()),
        nn.Linear(9, CLASSES),
    ),
    "leaky mlp": lambda: mlp(nn.Linear(72, 17), nn.LeakyReLU(0.1), nn.Linear(17, CLASSES)),
    "functional": functional,
}
CONVOLUTIONAL = {
    "cnn": lambda: nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(54, CLASSES)),
    ),
    "cnn of functions": pooling,
    "cnn of all kinds": lambda: nn.Sequential(
        *(nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 1), bias=False), nn.Tanh()),
        *(nn.MaxPool2d(3, 1, padding=1), nn.Identity()),
        *(nn.Conv2d(4, 6, 2, dilation=2, groups=2), nn.MaxPool2d(2, ceil_mode=True)),
        *(nn.LeakyReLU(0.1), nn.Flatten(), nn.Linear(18, 7, bias=False), nn.Sigmoid()),
        nn.Linear(7, CLASSES),
    ),
    "pooled": lambda: nn.Sequential(
        *(nn.Conv2d(2, 5, 3, padding=1, stride=(1, 2)), nn.MaxPool2d((2, 1)), nn.ReLU()),
        *(nn.Conv2d(5, 19, (1, 2), bias=False), nn.ReLU()),
        nn.MaxPool2d(2, stride=1),  # whose windows overlap
        *(nn.Flatten(), nn.Linear(38, CLASSES)),
    ),
}
LAYERS = {
    "linear, few positions": lambda: positions(2, 30),
    "linear, many positions": lambda: positions(18, 5),
    "linear, over two rows": lambda: nn.Sequential(
        *(nn.Flatten(2), nn.Linear(36, 5), nn.Flatten(), nn.Linear(10, CLASSES))
    ),
    "convolution": lambda: ending(nn.Conv2d(2, 5, 3)),
    "of wide patches": lambda: ending(nn.Conv2d(2, 5, 3), nn.Conv2d(5, 3, 3)),
    "of few positions": lambda: ending(nn.Conv2d(2, 20, 5), nn.Conv2d(20, 24, (2, 1), bias=False)),
    "stride": lambda: ending(
        nn.Conv2d(2, 5, 3, stride=(2, 1), padding=(1, 2)), nn.Conv2d(5, 20, 2, stride=(1, 3))
    ),
    "dilation": lambda: ending(
        nn.Conv2d(2, 5, 2, dilation=(3, 2), padding=1),
        nn.Conv2d(5, 20, 3, padding=(1, 0), dilation=2),
    ),
    "groups": lambda: ending(
        nn.Conv2d(2, 6, 3, groups=2), nn.Conv2d(6, 6, 2, groups=6), nn.Conv2d(6, 9, 2, groups=3)
    ),
    "padded to the same size": lambda: ending(
        nn.Conv2d(2, 5, 4, padding="same"), nn.Conv2d(5, 5, 2, padding="same", dilation=3)
    ),
    "reflected and circular": lambda: ending(
        nn.Conv2d(2, 5, 3, padding=2, padding_mode="reflect"),
        nn.Conv2d(5, 20, 3, padding=1, padding_mode="circular"),
    ),
    "one dimension": lambda: ending(
        nn.Flatten(2), nn.Conv1d(2, 3, 5, stride=2, padding=1), nn.Conv1d(3, 4, 3)
    ),
    "three dimensions": lambda: ending(nn.Unflatten(1, (1, 2)), nn.Conv3d(1, 3, (2, 3, 3))),
    "transposed": lambda: ending(
        nn.ConvTranspose2d(2, 4, 3, stride=2, output_padding=1), nn.Conv2d(4, 2, 5, stride=3)
    ),
    "channels last": lambda: ending(
        nn.Conv2d(2, 5, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(5, 20, 2)
    ),
    "group norm": lambda: ending(
        *(nn.Conv2d(2, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(inplace=True), nn.Flatten()),
        nn.GroupNorm(4, 96),
    ),
    "instance norm": lambda: ending(nn.Conv2d(2, 6, 3), nn.InstanceNorm2d(6, affine=True)),
    "rms norm": lambda: ending(nn.Conv2d(2, 6, 3), nn.RMSNorm((4, 4))),
    "embedding": embedded,
    "two inputs": two_inputs,
    "in place": in_place,
    "viewed": viewed,
    "frozen": frozen,
}
OTHERS = {"residual": residual, "reused": reused, "tied": tied, "tied by hand": tied_by_hand}
OTHERS |= {"single number": single_number}
MODULES = {**STACKS, **CONVOLUTIONAL, **LAYERS, **OTHERS, "adapters": adapted}


def made(name: str, regression: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = MODULES[name]()
        return nn.Sequential(module, nn.Linear(CLASSES, 1)) if regression else module


def rows(sizes=SIZES, n=13, seed=1, regression=False):
    """Rows of different norms; what is padding shows if it is looked at."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(sizes), n, *SHAPE, generator=generator)
    x *= 0.3 + torch.rand(len(sizes), n, 1, 1, 1, generator=generator)
    y = torch.randint(0, CLASSES, (len(sizes), n), generator=generator)
    y = torch.randn(len(sizes), n, generator=generator) if regression else y
    for slot, size in enumerate(sizes):
        x[slot, size:] = float("nan")
        y[slot, size:] = float("nan") if regression else -7
    return x, y


def corrected(sizes, d: int, seed=3) -> torch.Tensor:
    """A correction of norm about 1 for each client, NaN for an empty slot."""
    corrections = torch.randn(len(sizes), d, generator=torch.Generator().manual_seed(seed)) / d**0.5
    corrections[np.equal(sizes, 0)] = float("nan")
    return corrections


def alone(slot: int) -> dict[str, np.ndarray]:
    """The sizes and the clients of a chunk in which one of them trains."""
    keep = np.arange(5) == slot
    return {"sizes": np.where(keep, SIZES, 0), "clients": np.where(keep, CLIENTS, -1)}


def clients_of(blocks):
    """(slot, update, loss) of every client."""
    return [client for block in blocks for client in block.clients()]


def train(backend, module, local, x, y, sizes=SIZES, clients=CLIENTS, draws=DRAWS, **more):
    """(update, loss) by slot. `more`: the trainer's `clip` and `precision`, and the chunk's."""
    how = {name: more.pop(name) for name in more.keys() & {"clip", "precision"}}
    trainer = Trainer(module, local, backend=backend, seed=SEED, task=task_of(y), **how)
    who = {"t": ROUND, "clients": clients, "draws": draws}
    model = models.flatten(module)
    round_model, other_model = model.clone(), torch.full_like(model, 7.0)
    models.load(module, other_model)  # as an evaluation does
    try:
        chunk = trainer.chunk(round_model, x, y, sizes, **who, **more)
        updates = {slot: (delta, loss) for slot, delta, loss in clients_of(chunk)}
        assert torch.equal(models.flatten(module), other_model)
    finally:
        models.load(module, model)
    assert torch.equal(round_model, model)  # clients of one round share it
    return updates


# --- rules, and what torch has for them ---


class Signs(Local):
    def step(self, x, gradient, state, at):
        return x - at.lr * gradient.sign(), state


class Normalized(Local):
    def step(self, x, gradient, state, at):
        return x - at.lr * gradient / gradient.norm(dim=-1, keepdim=True), state


class Nesterov(Local):
    beta: float = 0.9

    def fresh(self, x):
        return torch.zeros_like(x)

    def step(self, x, gradient, state, at):
        velocity = self.beta * state + gradient
        return x - at.lr * (gradient + self.beta * velocity), velocity


class Kept:
    """What nobody else can look into."""

    def __init__(self, velocity):
        self.velocity = velocity


class ClosedState(Nesterov):
    def fresh(self, x):
        return Kept(torch.zeros_like(x))

    def step(self, x, gradient, state, at):
        x, velocity = super().step(x, gradient, state.velocity, at)
        return x, Kept(velocity)


class OwnAdam(Local):
    def fresh(self, x):
        return torch.zeros_like(x), torch.zeros_like(x)

    def step(self, x, gradient, state, at):
        mean = 0.8 * state[0] + 0.2 * gradient
        square = 0.95 * state[1] + 0.05 * gradient**2
        size = (square / (1 - 0.95 ** (at.k + 1))).sqrt() + 1e-3
        return x - at.lr * mean / (1 - 0.8 ** (at.k + 1)) / size, (mean, square)


class Drawn(Local):
    """Towards the round's model, and along the step before: the state is what it was given."""

    def fresh(self, x):
        return x

    def step(self, x, gradient, state, at):
        return x - at.lr * gradient + 0.3 * (x - state) - 0.1 * (x - at.model), x


class SignedMomentum(Sgd):
    def step(self, x, gradient, state, at):
        return super().step(x, gradient.sign(), state, at)


COSINE = Schedule(schedule="cosine", lr_period=3, lr_last=0.2, lr_warmup=1)
FIVE: dict[str, Any] = {"steps": 5, "batch": 6}
EPOCHS: dict[str, Any] = {"epochs": 1.5, "batch": 4}
ADAM: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}
PLAIN: dict[str, Local] = {  # without corrections of the gradients
    "plain": Sgd(lr=0.3, **FIVE),
    "decay": Sgd(lr=0.3, weight_decay=0.1, **FIVE),
    "full": Sgd(steps=3, batch="full", lr=0.3, momentum=0.5, weight_decay=0.02),
    "share": Sgd(steps=5, batch={"share": 0.4}, lr=0.3, momentum=0.5),
    "epochs": Sgd(steps=7, batch=6, lr=0.2, sampling="epochs"),
    "unequal": Sgd(lr=0.3, **EPOCHS),
    "unequal, full": Sgd(lr=0.2, epochs=2.5, batch="full", weight_decay=0.1),
    "unequal, all": Sgd(lr=0.2, momentum=0.6, weight_decay=0.1, proximal=0.3, **EPOCHS),
    "within": Sgd(lr=0.2, momentum=0.6, within=COSINE, **EPOCHS),
    "adam": Adam(**ADAM, **EPOCHS),
    "adamw": AdamW(within=COSINE, **ADAM, **EPOCHS),
    "sam": Sam(lr=0.2, rho=0.3, momentum=0.5, weight_decay=0.05, **EPOCHS),
}
CORRECTED: dict[str, Local] = {
    "scaffold": Scaffold(lr=0.3, weight_decay=0.1, **FIVE),
    "share, epochs": Sgd(steps=5, batch={"share": 0.4}, lr=0.3, sampling="epochs"),
    "all": Sgd(
        steps=6, batch=6, lr=0.1, momentum=0.7, weight_decay=0.05, proximal=0.8, lr_decay=0.9
    ),
    "signs": Signs(lr=0.02, **FIVE),
    "full signs": Signs(steps=4, batch="full", lr=0.02),
    "normalized": Normalized(lr=0.3, lr_decay=0.9, **FIVE),
    "nesterov": Nesterov(lr=0.1, **FIVE),
    "closed state": ClosedState(lr=0.1, **EPOCHS),
    "own adam": OwnAdam(lr=0.05, **FIVE),
    "drawn": Drawn(lr=0.2, **FIVE),
    "signed momentum": SignedMomentum(
        lr=0.02, momentum=0.7, weight_decay=0.05, proximal=0.8, **FIVE
    ),
}
METHODS = PLAIN | CORRECTED
USER_DEFINED = ("signs", "full signs", "normalized", "nesterov", "own adam", "drawn")


def optimizer_of(local: Local, parameters: list[nn.Parameter]) -> Any:
    """torch's own, with the settings of a rule."""
    lr = local.learning_rate(ROUND)
    if isinstance(local, Adam):
        kind = torch.optim.AdamW if isinstance(local, AdamW) else torch.optim.Adam
        settings = {"betas": local.betas, "eps": local.eps, "weight_decay": local.weight_decay}
        return kind(parameters, lr, **settings)
    if isinstance(local, OwnAdam):
        return torch.optim.Adam(parameters, lr, betas=(0.8, 0.95), eps=1e-3)
    if isinstance(local, Nesterov):
        return torch.optim.SGD(parameters, lr, momentum=0.9, nesterov=True)
    momentum = getattr(local, "momentum", 0.0)
    decay = getattr(local, "weight_decay", 0.0)
    return torch.optim.SGD(parameters, lr, momentum=momentum, weight_decay=decay)


def cosine_of(optimizer: Any) -> Any:
    """torch's schedulers for `COSINE`."""
    lr = optimizer.param_groups[0]["lr"]
    rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3, eta_min=0.2 * lr)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [rise, fall], [1])


def losses_of(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if y.is_floating_point():
        return (outputs - y.view_as(outputs)).square().mean(1) / 2
    return F.cross_entropy(outputs, y, reduction="none")


def direction_of(local: Local, gradient: torch.Tensor) -> torch.Tensor:
    if isinstance(local, Normalized):
        return gradient / gradient.norm()
    return gradient.sign() if isinstance(local, Signs | SignedMomentum) else gradient


def gradient_of(module: nn.Module, x, y) -> tuple[torch.Tensor, torch.Tensor]:
    """(the gradient of the mean loss by all trained parameters, flat; the mean loss)."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = losses_of(module(x), y).mean()
    parts = torch.autograd.grad(loss, trained, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts]), loss.detach()


def sample_gradients(module: nn.Module, x, y) -> torch.Tensor:
    """Each sample's gradient by autograd, in double [B, d]."""
    module = copy.deepcopy(module).double().train()
    x, y = x.double(), y.double() if y.is_floating_point() else y
    return torch.stack([gradient_of(module, x[k : k + 1], y[k : k + 1])[0] for k in range(len(x))])


@cache
def bound(name: str) -> float:
    """About the median norm of samples' gradients of a module."""
    x, y = rows()
    return float(sample_gradients(made(name), x[0], y[0]).norm(dim=1).quantile(0.45))


def plain_loop(module, local: Local, x, y, index, clip=None, noise=None, correction=None):
    """One client by the book.

    Args:
        module: the model.
        local: any rule of this file.
        x: [n, *SHAPE], y: [n], its rows; index: [steps, batch].
        clip: the bound on each sample's gradient.
        noise: on the gradients of the steps, [steps, d].
        correction: of every gradient, [d].

    Returns:
        (its update in double [d], its mean loss, the norms of its samples' gradients in order).
    """
    module = copy.deepcopy(module).double().train()
    x, y = x.double(), y.double() if y.is_floating_point() else y
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def flat() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in trained])

    def put(values: torch.Tensor, attribute: str) -> None:
        parts = values.split([parameter.numel() for parameter in trained])
        for parameter, part in zip(trained, parts, strict=True):
            setattr(parameter, attribute, part.view_as(parameter).clone())

    optimizer = optimizer_of(local, trained)
    scheduler = cosine_of(optimizer) if local.within else None
    start = before = flat()
    losses, norms = [], []
    for k, batch in enumerate(index):
        gradient, loss = gradient_of(module, x[batch], y[batch])
        losses.append(float(loss))
        if clip is not None:
            samples = sample_gradients(module, x[batch], y[batch])
            norms += samples.norm(dim=1).tolist()
            gradient = (samples * (clip / samples.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
        now = flat()
        if isinstance(local, Sam):
            put(now + local.rho * gradient / gradient.norm(), "data")
            gradient, _ = gradient_of(module, x[batch], y[batch])
            put(now, "data")
        gradient = gradient + (0 if noise is None else noise[k])
        gradient = gradient + (0 if correction is None else correction)
        gradient = direction_of(local, gradient)
        put(gradient + getattr(local, "proximal", 0.0) * (now - start), "grad")
        optimizer.step()
        if scheduler and k < 4:  # beyond its end torch's goes up again
            scheduler.step()
        if isinstance(local, Drawn):
            put(flat() + 0.3 * (now - before) - 0.1 * (now - start), "data")
        before = now
    return flat() - start, float(np.mean(losses)), np.array(norms)


def drawn(local: Local, slot: int, sizes=SIZES) -> np.ndarray:
    """The batches of the client at a slot, [steps, batch]."""
    index, batch_sizes = batches(SEED, ROUND, CLIENTS, DRAWS, sizes, local)
    return index[slot, : local.step_counts(np.array(sizes))[slot], : batch_sizes[slot]]


def check_updates(backend: str, module, local: Local, x, y, clip=None) -> None:
    """Asserts that a backend comes to what the plain loop comes to."""
    for slot, (delta, loss) in train(backend, module, local, x, y, clip=clip).items():
        update, mean, _ = plain_loop(module, local, x[slot], y[slot], drawn(local, slot), clip)
        assert (delta - update).norm() <= 2e-5 * update.norm()
        assert loss == pytest.approx(mean, rel=1e-5)


def step_noise(d: int, slot: int, steps: int, std: float) -> torch.Tensor:
    """The keyed noise of a client's steps, [steps, d]."""
    key = {"t": ROUND, "client": CLIENTS[slot], "draw": DRAWS[slot]}
    every = [normals(SEED, Purpose.STEP_NOISE, d, **key, step=k) for k in range(steps)]
    return std * torch.stack(every).double()
