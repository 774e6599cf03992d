"""The map of columns that a user writes."""

import pytest

from patch.config.data_spec import parse_columns
from patch.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (None, {}),
        ("instruction=question", {"instruction": "question"}),
        (" messages = the dialog ,role=from=x", {"messages": "the dialog", "role": "from=x"}),
    ],
)
def test_columns_are_pairs_of_our_name_and_the_rows(text, columns):
    assert parse_columns(text) == columns


@pytest.mark.parametrize("name", ["conversations=dialog", "conversation=dialog"])
def test_keys_of_sharegpt_are_sent_to_ours(name):
    with pytest.raises(ConfigError, match=r"did you mean messages\?"):
        parse_columns(name)
