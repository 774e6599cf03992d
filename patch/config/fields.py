"""The flat list of all fields, and the conversion between a value and its text in flags, YAML and positions.

Field names are unique over the sections of RunConfig, so a name alone identifies a flag.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from patch.config.schema import RunConfig
from patch.errors import ConfigError, nearest, shown
from patch.families import with_family
from patch.flag_field import Bounds
from patch.text import to_float, to_int

SECTIONS: dict[str, type] = typing.get_type_hints(RunConfig)
"""Section name -> dataclass, in the order of config.yaml."""


class Field(NamedTuple):
    """One field of a RunConfig, described for its flag, its YAML key and `--help`.

    A value has two forms. In a RunConfig it has the annotated type. In flags, positions and YAML it is a
    scalar (text, number or boolean): a word for an enum member, `none` for None.
    """

    section: str
    name: str
    kind: type
    """Type of the scalar: int, float, bool or str; tuple for an attention window."""
    default: Any
    """dataclasses.MISSING if the value must be given or derived."""
    words: Mapping[str, Any]
    """Legal word -> value; empty if the values cannot be listed."""
    help: str
    none: str | int | None
    """The scalar for None, or None if the field is never None."""
    is_path: bool
    """Whether the value is a path that is made absolute. Machines may have other values."""
    bounds: Bounds

    @property
    def flag(self) -> str:
        """The flag: `--seq-length` for `seq_length`."""
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        """The legal words, or () if the values cannot be listed."""
        return tuple(self.words)

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    def to_scalar(self, value: Any) -> str | int | float | bool:
        """Return a RunConfig value as flags and YAML write it."""
        if value is None:
            assert self.none is not None, f"{self.name} is never None"
            return self.none
        if self.kind is tuple:
            return ",".join(map(str, value))
        return value.name.lower() if isinstance(value, IntEnum) else value

    def from_scalar(self, scalar: Any) -> Any:
        """Return the RunConfig value of a legal scalar of the right type."""
        if self.words:
            return self.words[scalar]
        return None if self.none is not None and scalar == self.none else scalar


def _collect() -> dict[str, Field]:
    fields: dict[str, Field] = {}
    for section, cls in SECTIONS.items():
        annotations = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in fields, f"field names are unique over sections: {field.name}"
            kind, words = _kind_and_words(annotations[field.name], field.metadata["none"])
            fields[field.name] = Field(section, field.name, kind, field.default, words, **field.metadata)
    return fields


def _kind_and_words(annotation: Any, none: str | int | None) -> tuple[type, dict[str, Any]]:
    """Return the scalar type of an annotation, and its legal words; the word for None comes first."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    parts = typing.get_args(annotation) if is_union else (annotation,)
    words: dict[str, Any] = {}
    for part in parts:
        if typing.get_origin(part) is Literal:
            words |= {word: word for word in typing.get_args(part)}
        elif isinstance(part, type) and issubclass(part, IntEnum):
            words |= {member.name.lower(): member for member in part}
    assert (type(None) in parts) == (none is not None), "flag(none=...) says how None is written"
    if words:
        return str, ({str(none): None} if none is not None else {}) | words
    (kind,) = (part for part in parts if part is not type(None))
    return typing.get_origin(kind) or kind, {}


FIELDS: dict[str, Field] = _collect()


def value_of(config: RunConfig, name: str) -> Any:
    """Return the value of a field, whatever its section."""
    return getattr(getattr(config, FIELDS[name].section), name)


def scalar_of(config: RunConfig, name: str) -> str | int | float | bool:
    """Return the value of a field as flags and YAML write it."""
    return FIELDS[name].to_scalar(value_of(config, name))


def with_values(config: RunConfig, **values: object) -> RunConfig:
    """Return the run with other values of fields, whatever their sections."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(FIELDS[name].section, {})[name] = value
    replaced = {name: dataclasses.replace(getattr(config, name), **new) for name, new in sections.items()}
    return dataclasses.replace(config, **replaced) if replaced else config


def scalars_of(config: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the values of all fields as YAML writes them, by section."""
    return {
        section: {field.name: scalar_of(config, field.name) for field in dataclasses.fields(cls)}
        for section, cls in SECTIONS.items()
    }


def assemble(values: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig. Missing fields get their defaults; fields without a default are required.

    If `model_type` does not name a family that computes the model, the matching family replaces it.

    Raises:
        ConfigError: `model_type` is not a family.
    """
    sections = {
        section: cls(**{name: value for name, value in values.items() if FIELDS[name].section == section})
        for section, cls in SECTIONS.items()
    }
    return RunConfig(**{**sections, "model": with_family(sections["model"])})


def missing(values: Mapping[str, Any]) -> list[str]:
    """Return the fields without a default that `values` lacks."""
    return [field.name for field in FIELDS.values() if field.required and field.name not in values]


def _to_bool(value: object) -> bool | None:
    return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value))


def _to_str(value: object) -> str | None:
    """Return text. YAML reads an unquoted `false` or `8` as another type, which is converted back."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (str, int, float)) and value != "" else None


def _to_window(value: object) -> tuple[int, int] | None:
    """Parse a causal window such as `4095,0`."""
    match = re.fullmatch(r"(\d+),0", value) if isinstance(value, str) else None
    left = to_int(match[1]) if match else None
    return None if left is None else (left, 0)


_CONVERSIONS: Mapping[type, tuple[Callable[[object], Any], str]] = {
    int: (to_int, "a whole number of 64 bits (5e8 is one)"),
    float: (to_float, "a finite number"),
    bool: (_to_bool, "true or false"),
    str: (_to_str, "a text that is not empty"),
    tuple: (_to_window, "none, or LEFT,0 such as 4095,0"),
}


def coerce(field: Field, scalar: object, origin: str) -> Any:
    """Convert the text of a flag, or a YAML scalar, to the RunConfig value.

    Args:
        origin: where the scalar was written, for the message, such as `--lr` or `run.yaml: optimizer.lr`.

    Raises:
        ConfigError: the scalar has the wrong type or is not one of the field's choices.
    """
    convert, expected = _CONVERSIONS[field.kind]
    is_none = field.kind in (tuple, float, bool) and scalar == field.none
    converted = field.none if is_none else convert(scalar)
    if converted is None:
        raise ConfigError(f"{origin}: got {shown(scalar)}, expected {expected}")
    if field.words:
        assert isinstance(converted, str)
        check_choice(converted, field.choices, origin)
    return field.from_scalar(converted)


def check_choice(value: str, choices: Sequence[str], origin: str) -> None:
    """Refuse a value that is not among the choices; the message lists the choices and the nearest one.

    Raises:
        ConfigError: the value is not among the choices.
    """
    if value not in choices:
        ending = [choice for choice in choices if choice.endswith(f"-{value}")]
        hint = f"; {value} is there as {' and '.join(ending)}" if ending else nearest(value, list(choices))
        raise ConfigError(f"{origin}: got {shown(value)}, expected one of {', '.join(choices)}{hint}")
