"""Public functions and classes say what they take."""

import importlib
import inspect

import pytest

PUBLIC = (
    "raydpfl", "raydpfl.privacy", "raydpfl.methods.selection", "raydpfl.methods.noise",
    "raydpfl.methods.bounding", "raydpfl.methods.server", "raydpfl.methods.weights",
    "raydpfl.audit",
)  # fmt: skip


def is_code(found: object) -> bool:
    return inspect.isfunction(found) or isinstance(found, type)


def unsaid(found: object) -> str:
    """What the docstring of a public class or function leaves out; empty: nothing."""
    text = vars(found).get("__doc__") if inspect.isclass(found) else found.__doc__
    if not text:
        return "has no docstring"
    takes = 0 if inspect.isclass(found) else len(inspect.signature(found).parameters)
    if takes > 1 and "Args:" not in text and ">>>" not in text:
        return f"has {takes} parameters, and neither Args nor an example"
    return ""


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_say_what_they_take(package):
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}
    code = {name: each for name, each in public.items() if is_code(each)}
    assert not {name: unsaid(each) for name, each in code.items() if unsaid(each)}
