"""The map of columns that a user writes."""

import pytest

from patch.config.columns import parse_columns


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
