"""Numbers in YAML."""

import math

import pytest
import yaml

from raydpfl.config.yaml import dump, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-5", -5),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0b11", 3),
        ("1e-5", 1e-5),
        ("2.5e3", 2500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1.25", 1.25),
        ("-.inf", -math.inf),
        ("010", "010"),  # no octal number, as in YAML 1.1
        ("1:30", "1:30"),  # nor one of sixties
        ("1:30.5", "1:30.5"),
        ("-", [None]),
        (".", "."),
        ("'-.5'", "-.5"),  # text that PyYAML alone would write without quotes
    ],
)
def test_numbers_are_those_of_yaml_1_2(text, value):
    assert parse_yaml(text) == value and type(parse_yaml(text)) is type(value)
    assert parse_yaml(dump({"a": value})) == {"a": value}


def test_an_empty_number_is_refused():
    with pytest.raises(yaml.YAMLError):
        parse_yaml("lr: !!int ''")


def test_no_number_is_one():
    assert math.isnan(parse_yaml(".nan"))
