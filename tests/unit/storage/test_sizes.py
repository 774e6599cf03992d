"""Bytes in the unit that a person would take."""

import pytest

from patch.storage.sizes import size_text


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0.00 MiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**29, "0.50 GiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**29, "2.50 GiB"),
    ],
)
def test_sizes_below_a_hundredth_of_a_gib_are_told_in_mib(size: int, words: str) -> None:
    assert size_text(size) == words
