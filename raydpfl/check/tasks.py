"""The contract of a task: see `raydpfl.models.tasks`."""

from math import prod
from pathlib import Path

import numpy as np
import torch
from pydantic import Field
from torch import nn

from raydpfl.check.contract import backends, close, hold
from raydpfl.check.example import Example
from raydpfl.core.prng import Purpose, stream
from raydpfl.data import Data, Split
from raydpfl.methods.local.sgd import Sgd
from raydpfl.models import Model
from raydpfl.models.tasks import Form, Target, Task
from raydpfl.training.backend_check import mismatch
from raydpfl.training.validation import check_loss

FEATURES = 8
TOKENS = 6
ROWS = 3  # of a client, about
TEST = 6


def sample_form(task: Task) -> Form:
    """Samples that a task can be learnt of: numbers, or tokens where there is a target at each
    position.
    """
    target = task.example_target()
    if len(task.outputs(target)) > 1:
        return Form(target.shape, target, task, TOKENS)
    return Form((FEATURES,), target, task)


class RandomSamples(Data):
    """Random samples of any shape, for any task; without a shape those of `sample_form`."""

    clients: int = 6
    shape: tuple[int, ...] = ()
    classes: int = Field(default=3, ge=0)
    tokens: int = Field(default=0, ge=0)
    targets: tuple[int, ...] = ()

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Those of any task."""

    def split(self, seed: int, root: Path | None) -> Split:
        form = sample_form(self.task)
        if self.shape:
            target = Target(self.targets, self.classes)
            form = Form(self.shape, target, self.task, self.tokens)
        return random_split(form, ROWS + np.arange(self.clients) % 2, TEST, seed)


def random_split(form: Form, sizes: np.ndarray, test: int, seed: int) -> Split:
    """Random samples of this form, so many for each client and for testing."""
    count = int(sizes.sum()) + test
    generator = stream(seed, Purpose.DATA)
    x = form.inputs(count, generator).numpy()
    y = form.task.random_targets(generator, count, form.outputs).numpy()
    ends = np.concatenate([[0], np.cumsum(sizes)])
    return Split(
        sizes=sizes,
        shape=form.shape,
        classes=form.target.classes,
        rows=lambda first, last: (x[ends[first] : ends[last]], y[ends[first] : ends[last]]),
        test=lambda: (x[-test:], y[-test:]),
        tokens=form.tokens,
        targets=form.target.shape,
    )


class LinearNet(Model):
    """One linear layer, behind an embedding of tokens."""

    def of(self, form: Form) -> nn.Module:
        if form.tokens:
            return nn.Sequential(nn.Embedding(form.tokens, 4), nn.Linear(4, form.outputs[-1]))
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(form.shape), form.outputs[0]))


def _module_of(case: Example) -> tuple[Form, nn.Module]:
    """Samples for the task, and a module for them."""
    form = sample_form(case.member)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return form, LinearNet().of(form)


def _outputs(case: Example, rows: int) -> tuple[Form, torch.Tensor, torch.Tensor]:
    """Samples for the task, what the module gives for so many of them, and their targets."""
    form, module = _module_of(case)
    x = form.inputs(rows, stream(0, Purpose.DATA))
    with torch.no_grad():
        outputs = module(x)
    return form, outputs, form.task.random_targets(stream(0, Purpose.DATA), rows, form.outputs)


def loss(case: Example) -> str:
    """A finite loss for each sample, which does not depend on the others, with finite gradients."""
    form, module = _module_of(case)
    check_loss(module, form)
    generator = stream(0, Purpose.DATA)
    y = form.task.random_targets(generator, 5, form.outputs)
    for scale in (0.0, 1.0, 1e3):
        random_outputs = generator.standard_normal((5, *form.outputs)) * scale
        outputs = torch.from_numpy(random_outputs).float().requires_grad_()
        losses = form.task.loss(outputs, y)
        hold(losses.shape == (5,), f"it is of shape {list(losses.shape)} for 5 samples")
        hold(torch.isfinite(losses).all(), f"outputs of size {scale:g} make it infinite")
        (gradient,) = torch.autograd.grad(losses[2], outputs, retain_graph=True)
        message = f"outputs of size {scale:g} make its gradient infinite"
        hold(torch.isfinite(gradient).all(), message)
        hold(not gradient[[0, 1, 3, 4]].any(), "a sample's loss depends on other samples' outputs")
    return "finite, of each sample alone"


def same_twice(case: Example) -> str:
    """It keeps nothing: asked twice, the loss is the same to the last bit."""
    form, outputs, y = _outputs(case, 5)
    first_loss = form.task.loss(outputs.clone(), y.clone())
    form.task.loss(-2 * outputs, y)
    hold(torch.equal(form.task.loss(outputs, y), first_loss), "asked twice, it is another")
    return "the same loss twice"


def right(case: Example) -> str:
    """What is met is no more than what counts, and adds up over batches."""
    form, outputs, y = _outputs(case, 9)
    hits, total = map(int, form.task.right(outputs, y))
    hold(0 <= hits <= total, f"right gives {hits} of {total}")
    parts = [form.task.right(outputs[part], y[part]) for part in (slice(0, 4), slice(4, 9))]
    hold((hits, total) == tuple(map(sum, zip(*parts, strict=True))), "two batches give others")
    has_accuracy = "accuracy" in form.task.scores()
    hold(has_accuracy == (total > 0), "scores names an accuracy, or right gives one, and not both")
    return f"{hits} of {total}" if total else "no accuracy"


def written_out(case: Example) -> str:
    """The closed form that backends go by is that of the loss."""
    form, _ = _module_of(case)
    closed_form = form.task.loss_form()
    if closed_form is None:
        return "none: backends differentiate the loss"
    generator = stream(0, Purpose.DATA)
    y = form.task.random_targets(generator, 7, form.outputs)
    outputs = torch.from_numpy(generator.standard_normal((7, *form.outputs))).float()
    forms = {
        "softmax": lambda: -torch.log_softmax(outputs, 1)[torch.arange(7), y],
        "squares": lambda: (outputs - y.view(outputs.shape)).square().mean(1) / 2,
    }
    hold(closed_form in forms, f"loss_form gives {closed_form!r}, not one of {', '.join(forms)}")
    expected = forms[closed_form]()
    hold(close(form.task.loss(outputs, y), expected, 1e-5), f"the loss is not {closed_form}")
    return closed_form


def every_backend(case: Example) -> str:
    """Every backend that takes the task has the same first steps."""
    form, module = _module_of(case)
    agreeing_backends = []
    for clip in (None, 1.0):
        for backend in backends(Sgd(), clip):
            difference = mismatch(module, Sgd(), form, backend, clip)
            hold(difference is None or "off by" not in difference, f"{backend}: {difference}")
            agreeing_backends += [] if difference else [backend]
    hold("vmap" in agreeing_backends, "vmap cannot carry it out")
    return f"{', '.join(dict.fromkeys(agreeing_backends))} as the loop"
