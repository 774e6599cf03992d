"""How a rule refuses a value."""

from __future__ import annotations

from typing import NoReturn

from patch.errors import ConfigError


def refuse(field: str, got: object, expected: str, why: str) -> NoReturn:
    """Raise the ConfigError of one field.

    Args:
        field: the field to change.
        got: its value.
        expected: the legal values, in words.
        why: the reason for them.
    """
    raise ConfigError(f"got {got}, expected {expected}: {why}", field=field)
