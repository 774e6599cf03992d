"""A run as YAML: `--dry-run` prints it, config.yaml stores it, and `--config` reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from patch.config.fields import FIELDS, SECTIONS, assemble, coerce, missing, scalar_of
from patch.config.foreign_flags import answers, foreign_flag
from patch.config.schema import RunConfig
from patch.errors import ConfigError, nearest
from patch.storage.places import AnyPath
from patch.storage.text_files import read_text


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the place of a value that contradicts its tag, such as `!!bool x`."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError, LookupError) as error:
            # What PyYAML's own constructors raise: ValueError for a date such as 2026-99-99, KeyError for
            # `!!bool x`, AttributeError and IndexError for other tags.
            kind = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise yaml.constructor.ConstructorError(
                problem=f"got {node.value!r}, expected a value of {kind}", problem_mark=node.start_mark
            ) from error


def to_yaml(config: RunConfig) -> str:
    """Every value of the run, section by section."""
    sections = {
        section: {field.name: scalar_of(config, field.name) for field in dataclasses.fields(cls)}
        for section, cls in SECTIONS.items()
    }
    return yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)


def read_yaml(file: str | Path) -> dict[str, Any]:
    """The fields that a file sets; sections and keys may be left out.

    Raises:
        ConfigError: the file cannot be read, is malformed (the message has the line), or has an unknown
            section, key or value.
    """
    return _parse(_read(Path(file), f"--config {file}"), str(file))


def read_run(file: AnyPath) -> RunConfig:
    """A whole run, as config.yaml stores it.

    Raises:
        ConfigError: see `read_yaml`; or a field without a default is missing.
    """
    values = _parse(_read(file, str(file)), str(file))
    if lacking := missing(values):
        raise ConfigError(f"{file}: lacks {', '.join(lacking)}, expected a whole run as config.yaml keeps it")
    return assemble(values)


def _read(file: AnyPath, origin: str) -> str:
    try:
        return read_text(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from error


def _parse(text: str, origin: str) -> dict[str, Any]:
    try:
        sections = yaml.load(text, _Loader) or {}
    except (yaml.YAMLError, RecursionError) as error:  # the latter for deeply nested brackets
        raise ConfigError(f"{origin}: malformed YAML: {error}") from error
    fields: dict[str, Any] = {}
    _refuse_foreign(_mapping(sections, origin), origin)
    for section, values in sections.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{origin}: unknown section {section!r}{nearest(str(section), list(SECTIONS))}, "
                f"expected {', '.join(SECTIONS)}"
            )
        for name, value in _mapping(values or {}, f"{origin}: {section}").items():
            _check_known(str(name), section, origin)
            fields[name] = coerce(FIELDS[name], value, f"{origin}: {section}.{name}")
    return fields


def _refuse_foreign(sections: dict[Any, Any], origin: str) -> None:
    """Answer a file of another program (LLaMA-Factory's YAML, DeepSpeed's JSON), all its keys at once."""
    unknown = [name for name in sections if name not in SECTIONS]
    names = [key for name in unknown for key in _dotted(str(name), sections[name])]
    if any(foreign_flag(name) is not None for name in names):
        flags = [field.flag for field in FIELDS.values()]
        lines = "".join(f"\n  {line}" for line in answers([(name, "") for name in names], flags))
        raise ConfigError(f"{origin}: keys of another program, expected {', '.join(SECTIONS)}:{lines}")


def _dotted(name: str, value: object) -> Iterator[str]:
    """The names of all values below a key: `zero_optimization.stage`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _dotted(f"{name}.{key}", inner)
    else:
        yield name


def _mapping(value: object, origin: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{origin}: got {value!r}, expected keys with values")
    return value


def _check_known(name: str, section: str, origin: str) -> None:
    if name not in FIELDS:
        raise ConfigError(f"{origin}: unknown key {section}.{name}{nearest(name, list(FIELDS))}")
    if FIELDS[name].section != section:
        raise ConfigError(f"{origin}: unknown key {section}.{name}: {name} belongs to {FIELDS[name].section}")
