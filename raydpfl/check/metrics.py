"""The contract of a metric: see `raydpfl.models.metrics`.

It is tried on made-up rows of every task that it has a meaning for: all at once, in batches, and in
another order.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raydpfl.check.contract import SEED, hold
from raydpfl.config.registry import choose
from raydpfl.core.prng import Purpose, stream
from raydpfl.errors import ConfigError
from raydpfl.models.metrics import FAMILY, SECTION, Metric, Total
from raydpfl.models.tasks import Form, Target, parse

ROWS = 60
WIDTHS = (1, 7, 25)  # of batches
TOLERANCE = 1e-9  # relative, of sums of numbers that are rounded
FORMS = (
    Form((4,), Target((), 3), parse("classification")),
    Form((4,), Target((), 2), parse("classification")),
    Form((4,), Target((5,), 4), parse("sequence")),
    Form((4,), Target((3,)), parse("multi_label")),
    Form((4,), Target((2,)), parse("regression")),
    Form((4,), Target(), parse("regression")),
)


@dataclass(frozen=True)
class MetricCase:
    """A metric, as a config has it."""

    values: Mapping[str, Any]

    @property
    def metric(self) -> Metric:
        """Raises `ConfigError`."""
        return choose(SECTION, self.values, FAMILY, Metric)

    def rows(self) -> Iterator[tuple[Form, torch.Tensor, torch.Tensor]]:
        """Made-up outputs and targets of each task that it has a meaning for."""
        for place, form in enumerate(FORMS):
            try:
                self.metric.fits(form)
            except ConfigError:
                continue
            generator = stream(SEED, Purpose.DATA, t=place)
            outputs = torch.from_numpy(generator.standard_normal((ROWS, *form.outputs))).float()
            y = form.task.random_targets(generator, ROWS, form.outputs)
            yield form, outputs, y.reshape(ROWS, *form.target.shape)

    def total(self, form: Form, outputs: torch.Tensor, y: torch.Tensor, width: int) -> Total:
        """What the rows come to in batches of this width."""
        batches = zip(outputs.split(width), y.split(width), strict=True)
        parts = [self.metric.sums(form, *batch).double().numpy() for batch in batches]
        hold(all(part.ndim == 1 for part in parts), "sums gives no vectors")
        return self.metric.joined(parts)

    def value(self, form: Form, outputs: torch.Tensor, y: torch.Tensor, width: int = ROWS) -> Any:
        """The metric of rows in batches of this width."""
        return self.metric.value(self.total(form, outputs, y, width))


def setting(case: MetricCase) -> str:
    """Its example is a valid setting, which a config holds and a process is sent."""
    metric = case.metric
    fields = metric.model_dump(mode="json", round_trip=True)
    second = choose(SECTION, json.loads(json.dumps(fields)), FAMILY, Metric)
    hold(
        second.model_dump(mode="json", round_trip=True) == fields, "written and read, it is another"
    )
    second = pickle.loads(pickle.dumps(metric))
    hold(second == metric and hash(second) == hash(metric), "unpickled, it is another")
    hold(metric.name.isidentifier(), f"{metric.name!r} is no name of a column")
    return metric.name


def tasks(case: MetricCase) -> str:
    """It has a meaning for some task, and a value for its rows."""
    tasks = []
    for form, outputs, y in case.rows():
        value = case.value(form, outputs, y)
        hold(value is None or isinstance(value, float), f"{form.task.kind}: a value {value!r}")
        hold(value is None or np.isfinite(value), f"{form.task.kind}: the value {value}")
        tasks.append(form.task.kind)
    hold(tasks, "every task is refused")
    return ", ".join(dict.fromkeys(tasks))


def batches(case: MetricCase) -> str:
    """Its value does not depend on how rows are cut into batches, nor on their order."""
    for form, outputs, y in case.rows():
        whole = case.value(form, outputs, y)
        for width in WIDTHS:
            _check_equal(whole, case.value(form, outputs, y, width), f"in batches of {width}")
        _check_equal(whole, case.value(form, outputs.flip(0), y.flip(0), 7), "in another order")
    return f"batches of {', '.join(map(str, WIDTHS))}"


def _check_equal(whole: float | None, other: float | None, note: str) -> None:
    if whole is None or other is None:
        hold(whole is other, f"{other} {note}, and {whole}")
        return
    hold(np.isclose(whole, other, rtol=TOLERANCE, atol=TOLERANCE), f"{other} {note}, not {whole}")


def untouched(case: MetricCase) -> str:
    """It leaves outputs and targets as they are, and gives the same twice."""
    for form, outputs, y in case.rows():
        copies = outputs.clone(), y.clone()
        first = case.total(form, outputs, y, 25)
        second = case.total(form, outputs, y, 25)
        hold(np.array_equal(first, second), "asked twice, it gives other sums")
        is_unchanged = torch.equal(outputs, copies[0]) and torch.equal(y, copies[1])
        hold(is_unchanged, "it changes its inputs")
    return "as they were"


def better(case: MetricCase) -> str:
    """It knows whether more or less of it is better."""
    sign = case.metric.sign()
    hold(sign in (-1, 0, 1), f"sign gives {sign!r}")
    for form, outputs, y in case.rows():
        one, other = (_improve(form, outputs, y, amount) for amount in (0.0, 0.9))
        before = case.value(form, one, y)
        after = case.value(form, other, y)
        if sign and before is not None and after is not None:
            text = f"{before} of worse outputs, {after} of better ones"
            hold(sign * after >= sign * before, text)
    return {1: "more is better", -1: "less is better", 0: "nobody can say"}[sign]


def _improve(form: Form, outputs: torch.Tensor, y: torch.Tensor, amount: float) -> torch.Tensor:
    """Outputs that are moved towards what loses least, by an amount in [0, 1]."""
    inputs = outputs.clone().requires_grad_()
    for _ in range(200):
        loss = form.task.loss(inputs, y).sum()
        (gradient,) = torch.autograd.grad(loss, inputs)
        inputs = (inputs.detach() - 0.5 * gradient).requires_grad_()
    return outputs + amount * (inputs.detach() - outputs)


def cells(case: MetricCase) -> str:
    """A table of its own has the columns that it says, of one length, in whole numbers."""
    for form, outputs, y in case.rows():
        cells = case.metric.cells(case.total(form, outputs, y, 25))
        columns: Sequence[str] = case.metric.columns()
        hold(tuple(cells) == tuple(columns), f"columns says {columns}, and there are {[*cells]}")
        hold(len({len(column) for column in cells.values()}) <= 1, "its columns differ in length")
        hold(all(column.dtype == np.int64 for column in cells.values()), "its cells are not int64")
    return ", ".join(case.metric.columns()) or "none"
