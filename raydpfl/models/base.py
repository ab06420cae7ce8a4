"""The base of the family, what gives nets a width, and stacks of dense layers."""

from itertools import pairwise
from typing import Any, ClassVar

from pydantic import Field
from torch import nn

from raydpfl.config.registry import Member
from raydpfl.config.setting import Setting
from raydpfl.errors import ConfigError
from raydpfl.models.lora import Lora
from raydpfl.models.tasks import Form
from raydpfl.models.weights import place
from raydpfl.storage.files import digest

Shape = tuple[int, ...]


class Model(Member):
    """Base of the family: `module` gives a fresh module that takes [batch, *shape] and returns
    [batch, outputs]: a score for each class, or the numbers of a regression. A model for other
    inputs or outputs has `of` instead.

    It draws its initial parameters from torch's default generator, which `raydpfl.models.build`
    sets.
    """

    is_classifier: ClassVar[bool] = False  # whether it is for classes alone
    file_fields: ClassVar[frozenset[str]] = frozenset({"init"})
    added_fields: ClassVar[frozenset[str]] = frozenset({"init", "frozen", "local", "lora"})

    init: str | None = Field(
        default=None,
        description=(
            "the weights that training starts from: a file of safetensors, a state_dict, or a run "
            "directory"
        ),
    )
    frozen: tuple[str, ...] = Field(
        default=(),
        description=(
            'patterns of parameters and buffers that stay as they are: ["features.*", '
            '"*.running_*"]'
        ),
    )
    local: tuple[str, ...] = Field(
        default=(),
        description=(
            'patterns of what stays with each client, who trains it and never sends it: ["head.*"]'
        ),
    )
    lora: Lora | None = Field(
        default=None,
        description=(
            "adapters of low rank on linear layers, and all else frozen: {rank: 8, targets: "
            '["c_attn"]}'
        ),
    )

    def module(self, shape: Shape, outputs: int) -> nn.Module:
        """A fresh module for float32 inputs of this shape."""
        expected = "a class with a method module(shape, outputs), or of(form)"
        raise ConfigError("model.kind", self.kind, expected)

    def of(self, form: Form) -> nn.Module:
        """A fresh module for samples of this form. Raises `ConfigError`."""
        if form.tokens:
            expected = "char_lstm, transformer or one of your own: the inputs are whole numbers"
            remedy = "data.dtype: float32 makes a table's numbers of them"
            raise ConfigError("model.kind", self.kind, f"{expected} ({remedy})")
        if len(form.outputs) != 1:
            expected = "char_lstm, transformer or one of your own: there is a target per position"
            raise ConfigError("model.kind", self.kind, expected)
        if self.is_classifier and not form.target.classes:
            expected = "linear, mlp or another that is no classifier"
            reason = "the targets of the data are numbers, not classes"
            raise ConfigError("model.kind", self.kind, f"{expected}: {reason}")
        return self.module(form.shape, form.outputs[0])

    def check(self, setting: Setting) -> None:
        """Raises `ConfigError` for what has no meaning where parts of it are clients' own."""
        if not self.local:
            return
        if setting.tested:
            expected = "false with model.local (no model of all clients is tested); "
            expected += "evaluate.validation=0.1 holds out rows of each client, for its own"
            raise ConfigError("evaluate.test", True, expected)
        if isinstance(setting.held_out, dict):
            expected = "a share of every client's rows with model.local: clients that are held out "
            raise ConfigError("evaluate.validation", setting.held_out, f"{expected}train no part")
        if setting.per_sample_bound is not None:
            expected = "one that bounds what a client sends: by the part that stays (model.local) "
            expected += "one sample changes the gradients of all the client's others, without noise"
            raise ConfigError("bounding.kind", setting.kinds["bounding"], expected)
        if setting.asks_losses:
            expected = "one that asks for no losses, which under model.local are of clients' own"
            raise ConfigError("selection.kind", setting.kinds["selection"], expected)

    @property
    def accounted_with(self) -> tuple[str, ...]:
        return ("model",) if self.local else ()

    @property
    def exclusions(self) -> tuple[str, ...]:
        """What of it no accountant counts, in words."""
        exclusions: tuple[str, ...] = ()
        if self.init is not None:
            file = f"the weights that training starts from ({self.init})"
            exclusions += (f"{file}, and the data they are of",)
        if self.local:
            part = f"each client's own part of the model (model.local: {', '.join(self.local)})"
            reason = "it is not released, and no epsilon covers it against who sees it there"
            exclusions += (f"{part}: {reason}",)
        return exclusions

    def meaning(self) -> dict[str, Any]:
        """See `Member.meaning`: of the file that it starts from what it holds, not where it is."""
        meaning = super().meaning()
        if self.init is None:
            return meaning
        try:
            return {**meaning, "init": digest(place(self.init))}
        except OSError as error:
            expected = f"a file of weights, or the directory of a run that has ended ({error})"
            raise ConfigError("model.init", self.init, expected) from None

    def image(self, shape: Shape, min_size: int) -> Shape:
        """`shape` if it is (channels, height, width) with height and width at least `min_size`;
        else raises `ConfigError`.
        """
        if len(shape) != 3 or min(shape[1:]) < min_size:
            images = f"images (channels, height, width), {min_size} x {min_size} or more"
            expected = f"a model for samples of shape {shape}; this one takes {images}"
            raise ConfigError("model.kind", self.kind, expected)
        return shape


class Net(Model):
    """Base of the structured nets, each hidden layer of which may be narrower, or wider."""

    added_fields: ClassVar[frozenset[str]] = Model.added_fields | {"width"}
    examples: ClassVar[tuple[dict[str, Any], ...]] = ({"width": 0.1},)

    width: float = Field(
        default=1.0,
        gt=0,
        le=16,
        description=(
            "every hidden layer has so many times the channels or units that it has in the paper"
        ),
    )

    def units(self, full: int) -> int:
        """The channels or units, at least 1, of a hidden layer that has `full` at width 1.

        >>> Net(width=0.25).units(32), Net(width=0.01).units(32)
        (8, 1)
        """
        return max(1, round(self.width * full))


def dense(
    layers: list[nn.Module], widths: list[int], activation: type[nn.Module], outputs: int
) -> nn.Sequential:
    """These layers, their outputs flattened, then linear layers from one of the widths to the
    next, each with an activation behind it, and a linear one to the outputs.
    """
    inner = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers, nn.Flatten(), *inner, nn.Linear(widths[-1], outputs))
