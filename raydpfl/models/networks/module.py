"""Any module of the user's own."""

import copy
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from pydantic import Field
from torch import nn

from raydpfl.config.registry import load
from raydpfl.errors import USER_EXCEPTIONS, ConfigError, located_message
from raydpfl.models.base import Model
from raydpfl.models.tasks import Form


class Module(Model):
    """Any `torch.nn.Module`: `kind` is the import path of a class or function (see `factory`),
    `args` what it is called with."""

    kind: str = ""
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_user_defined(self) -> bool:
        return True

    def of(self, form: Form) -> nn.Module:
        make = factory(self.kind)
        try:
            module = make(**self.args)
        except USER_EXCEPTIONS as error:  # a user's constructor may raise anything
            expected = f"what {self.kind} can be called with ({located_message(error)})"
            raise ConfigError("model.args", self.args, expected) from None
        # a function may return one object every time
        return copy.deepcopy(module) if isinstance(make, FunctionType) else module


def factory(path: str) -> Callable[..., Any]:
    """What an import path names: a subclass of `Model` or of `torch.nn.Module`, or a function that
    is declared to return a module, `def net() -> torch.nn.Module`.

    Raises `ConfigError` for all else, having called nothing.
    """
    function = load(path, "model.kind")
    if isinstance(function, type):
        if issubclass(function, (nn.Module, Model)):
            return function
        raise ConfigError("model.kind", path, f"a torch.nn.Module, not {function.__name__}")
    return_type = _return_annotation(function) if isinstance(function, FunctionType) else None
    if isinstance(return_type, type) and issubclass(return_type, nn.Module):
        return function
    expected = "a class or a function that makes a torch.nn.Module"
    if callable(function):
        signature = f"def {path.split(':')[-1]}(...) -> torch.nn.Module"
        expected = f"a subclass of torch.nn.Module, or a function that says so: {signature}"
    raise ConfigError("model.kind", path, expected)


def _return_annotation(function: FunctionType) -> Any:
    """The return annotation of a function; text is looked up as a name, not evaluated."""
    declared_type = function.__annotations__.get("return")
    if not isinstance(declared_type, str):
        return declared_type
    root_name, *parts = declared_type.strip("'\"").split(".")
    annotation = inspect.unwrap(function).__globals__.get(root_name)
    for part in parts:
        annotation = getattr(annotation, part, None)
    return annotation
