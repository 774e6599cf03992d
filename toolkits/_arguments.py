"""Types of arguments that several command lines share."""

import argparse


def positive(text: str) -> int:
    """A whole number of at least 1, for `argparse`'s `type`."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {number}, expected at least 1")
    return number
