"""The flat list of fields behind flags, YAML and positions, and the one conversion of a value to its type.

Field names are unique over the sections of RunConfig, so a name alone says which flag is meant.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from patch.config.schema import RunConfig
from patch.config.unsupported import is_built
from patch.errors import ConfigError, nearest
from patch.parse_numbers import to_float, to_int

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)
"""Section name to its dataclass, in the order of config.yaml."""


class Field(NamedTuple):
    """One value of the run: what its flag, its YAML key and `--help` need to know."""

    section: str
    name: str
    kind: type
    """int, float, bool or str."""
    default: Any
    """dataclasses.MISSING where the value must be given or derived."""
    help: str
    choices: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The flag that sets it: `seq_length` is `--seq-length`."""
        return "--" + self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is dataclasses.MISSING


def _collect() -> dict[str, Field]:
    found: dict[str, Field] = {}
    for section, cls in SECTIONS.items():
        kinds = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in found, f"field names are unique over sections: {field.name}"
            found[field.name] = Field(
                section, field.name, kinds[field.name], field.default, **dict(field.metadata)
            )
    return found


FIELDS: dict[str, Field] = _collect()


def value_of(config: RunConfig, name: str) -> Any:
    """The value of a field, whichever section it lies in."""
    return getattr(getattr(config, FIELDS[name].section), name)


def assemble(values: Mapping[str, Any]) -> RunConfig:
    """The run of these values; those left out have their defaults, those without one must be there."""
    sections = {
        section: cls(**{name: value for name, value in values.items() if FIELDS[name].section == section})
        for section, cls in SECTIONS.items()
    }
    return RunConfig(**sections)


def missing(values: Mapping[str, Any]) -> list[str]:
    """The fields without a default that `values` lacks."""
    return [field.name for field in FIELDS.values() if field.required and field.name not in values]


def _to_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))


def _to_str(value: object) -> str | None:
    """Text; YAML's own reading of an unquoted `false` or `8` is turned back into text."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (str, int, float)) and value != "" else None


_CONVERSIONS: Mapping[type, tuple[Callable[[object], Any], str]] = {
    int: (to_int, "a whole number (5e8 is one)"),
    float: (to_float, "a finite number"),
    bool: (_to_bool, "true or false"),
    str: (_to_str, "a text that is not empty"),
}


def coerce(field: Field, value: object, origin: str) -> Any:
    """`value` (text of a flag, or a scalar of YAML) as the field's type.

    Args:
        origin: what the message calls the value, such as `--lr` or `run.yaml: optimizer.lr`.

    Raises:
        ConfigError: another type, or none of the field's choices.
    """
    convert, expected = _CONVERSIONS[field.kind]
    converted = convert(value)
    if converted is None:
        raise ConfigError(f"{origin}: got {value!r}, expected {expected}")
    if field.choices:
        built = [choice for choice in field.choices if is_built(field.name, choice)]
        check_choice(converted, field.choices, origin, built)
    return converted


def check_choice(
    value: str, choices: tuple[str, ...], origin: str, offered: Sequence[str] | None = None
) -> None:
    """Raise ConfigError with the legal values and the nearest one unless `value` is among them.

    Args:
        offered: those that the message names, where they are not all.
    """
    if value not in choices:
        offered = list(choices if offered is None else offered)
        hint = nearest(value, offered)
        raise ConfigError(f"{origin}: got {value!r}, expected one of {', '.join(offered)}{hint}")
