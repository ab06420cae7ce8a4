"""The contract of a member of any family: its section in a config."""

import json
import pickle
from typing import Any

from raydpfl.check.contract import BrokenClause, UnsupportedMember, hold
from raydpfl.check.example import Example
from raydpfl.errors import ConfigError
from raydpfl.experiment import Experiment


def example(case: Example) -> str:
    """Its example is a valid setting."""
    fields = case.member.model_dump(mode="json")
    return f"{len(fields) - 1} fields"


def fits(case: Example) -> str:
    """A small experiment takes it.

    The experiments are `raydpfl.check.example.BASE_SECTIONS`, or those of its section.
    """
    try:
        experiment = case.plan.experiment
    except UnsupportedMember as error:
        raise BrokenClause(f"the first of those that were tried says {error}") from None
    if experiment.private:
        return f"private, with selection {experiment.selection.kind}"
    return f"not private: {case.refusal}" if case.refusal else "not private: without noise"


def config_round_trip(case: Example) -> str:
    """A config that is written and read back has the same member."""
    experiment = case.plan.experiment
    tree = experiment.to_dict()
    hold(Experiment.from_dict(tree).to_dict() == tree, "from_dict(to_dict()) is another")
    hold(json.loads(json.dumps(tree)) == tree, "JSON changes it")
    text = experiment.to_yaml()
    path = case.folder / "config.yaml"
    path.write_text(text)
    second = Experiment.from_yaml(path)
    hold(second.to_yaml() == text, "its YAML, read back, is another")
    section = "data" if case.section == "task" else case.section
    is_equal = getattr(second, section) == getattr(experiment, section)
    hold(is_equal, "the member read back is not equal to what was written")
    return "as it was, through YAML"


def refusals(case: Example) -> str:
    """What is wrong with a setting is refused in one line that names the field."""
    settings: list[dict[str, Any]] = [{"no_such_key": 1}]
    for name, field in type(case.member).model_fields.items():
        if name != "kind" and field.annotation in (int, float):
            settings.append({name: "no number"})
    for setting in settings:
        name = next(iter(setting))
        try:
            Example(case.section, {**case.values, **setting}).member  # noqa: B018 - made here
        except ConfigError as error:
            hold("\n" not in str(error), f"{name}: more than one line")
            hold(name in error.field, f"{name}: the message names {error.field}")
        else:
            hold(False, f"{setting} is taken")
    return f"{len(settings)} wrong settings"


def pickles(case: Example) -> str:
    """A member is its settings: pickled and, but for models with arguments, hashed, it is the
    same.
    """
    member = case.member
    second = pickle.loads(pickle.dumps(member))
    hold(second == member, "unpickled, it is not equal")
    if case.section == "model":
        return "equal"
    hold(hash(second) == hash(member), "unpickled, it has another hash")
    return "equal, with the same hash"
