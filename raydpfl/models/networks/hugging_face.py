"""Models of the transformers library."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from raydpfl.errors import USER_EXCEPTIONS, ConfigError, one_line
from raydpfl.models.networks.module import Module, factory
from raydpfl.models.tasks import Form


class HuggingFace(Module):
    """A model of the transformers library: `kind` is the import path of its class, as in
    transformers:GPT2LMHeadModel, `args` the fields of its configuration. `vocab_size` and
    `num_labels` follow from the data where they are not given. It has random weights; those of a
    folder that `save_pretrained` wrote are its `init`, folder/model.safetensors.
    """

    def of(self, form: Form) -> nn.Module:
        make: Any = factory(self.kind)
        arguments = {"num_labels": form.outputs[-1], "use_cache": False}
        if form.tokens:
            arguments["vocab_size"] = form.tokens
        try:
            module = make(make.config_class(**{**arguments, **self.args}))
        except USER_EXCEPTIONS as error:
            expected = f"fields of {make.config_class.__name__} ({one_line(error)})"
            raise ConfigError("model.args", self.args, expected) from None
        module.register_forward_hook(partial(_scores, form.outputs))
        return module


def is_transformers_class(module: object) -> bool:
    """Whether an object is such a class."""
    is_module = isinstance(module, type) and issubclass(module, nn.Module)
    return is_module and hasattr(module, "config_class")


def _scores(outputs: tuple[int, ...], module: nn.Module, inputs: Any, outcome: Any) -> Any:
    """A hook after forward: the scores, [batch, *outputs]. Of scores at every position where one a
    sample is wanted, those at the last; of scores of all tokens those of the classes, which come
    first.
    """
    scores = getattr(outcome, "logits", outcome)
    if not isinstance(scores, Tensor):
        return scores
    if scores.dim() == len(outputs) + 2:
        scores = scores[:, -1]
    return scores[..., : outputs[-1]]
