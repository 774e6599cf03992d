"""A JSON object changed in its text."""

import json

import pytest

from patch.convert.hf_config_files import with_values

TEXT = '{ "a" : 1e-05,\n\t"b": [1, {"a": "}, "}],  "c":"x\\"y" , "d": null}\n'


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, TEXT),
        ({"a": 2}, TEXT.replace("1e-05", "2")),
        ({"c": None}, TEXT.replace('"x\\"y"', "null")),
        ({"a": "\u00e9", "d": True}, TEXT.replace("1e-05", '"\\u00e9"').replace("null", "true")),
    ],
)
def test_only_changed_values_change_in_the_text(change, expected):
    contents = json.loads(TEXT) | change
    assert with_values(TEXT, contents) == expected
    assert json.loads(expected) == contents


@pytest.mark.parametrize("contents", [{"a": 1}, {"b": 1, "new": {"x": 2}}])
def test_text_is_written_anew_where_members_come_or_go(contents):
    assert with_values('{"a": 0}' if "b" in contents else '{"a": 0, "b": 1}', contents) == (
        json.dumps(contents, indent=2) + "\n"
    )
