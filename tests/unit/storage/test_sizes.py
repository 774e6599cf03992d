"""Bytes in the unit that a person would take."""

import pytest

from patch.storage.sizes import size_text, timed


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0.00 MiB"), (3 * 2**19, "1.50 MiB"), (2**29, "0.50 GiB"), (5 * 2**29, "2.50 GiB")],
)
def test_sizes_below_a_hundredth_of_a_gib_are_told_in_mib(size: int, words: str) -> None:
    assert size_text(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "12.3 ms"), (4.314, "4.31 s"), (998.7, "999 s"), (1032.4, "1,032 s"), (1.47e6, "1,470,000 s")],
)
def test_seconds_have_three_digits_and_no_exponent(seconds: float, words: str) -> None:
    assert timed(seconds) == words
