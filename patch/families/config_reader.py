"""Reads values from a parsed config.json; every error names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from patch.errors import ConfigError, shown
from patch.parse_numbers import to_float, to_int


class ConfigReader:
    """Reads numbers from config.json, or from an object in it.

    Args:
        file: the path, for messages.
        values: the parsed object.
    """

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """The same file, with values for keys that are absent."""
        return ConfigReader(self.file, {**defaults, **self.values})

    def refuse(self, key: str, got: object, expected: str) -> NoReturn:
        """Raise the ConfigError of one key.

        Args:
            key: the key in config.json.
            got: its value.
            expected: the supported values, in words.
        """
        raise ConfigError(f"{self.file}: {key}: got {shown(got)}, expected {expected}")

    def accept_only(self, supported: Mapping[str, Any]) -> None:
        """Refuse every key that is present with a value other than the supported one."""
        for key, only in supported.items():
            got = self.values.get(key, only)
            if got != only:
                self.refuse(key, got, f"{only!r}: nothing else is supported")

    def boolean(self, key: str, default: bool) -> bool:
        """True or false; `default` if the key is absent or null.

        Raises:
            ConfigError: the value is something else.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, at_most: int | None = None) -> int:
        """A whole number; `default` if the key is absent or null.

        Args:
            key: the key in config.json.
            default: its value if there is none.
            at_most: the largest legal value.
        Raises:
            ConfigError: the value is not a whole number or too large, or there is neither a value nor a
                default.
        """
        value = self.values.get(key)
        number = to_int(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a whole number")
        if at_most is not None and number > at_most:
            self.refuse(key, value, f"at most {at_most}")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` and errors as for `integer`."""
        value = self.values.get(key)
        number = to_float(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a finite number")
        return number
