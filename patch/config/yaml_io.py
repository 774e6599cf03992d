"""A run as YAML: `--dry-run` prints it, config.yaml stores it, and `--config` reads it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from patch.config.fields import FIELDS, SECTIONS, assemble, coerce, missing, scalars_of
from patch.config.foreign_files import flatten
from patch.config.foreign_flags import answers, foreign_flag
from patch.config.schema import RunConfig
from patch.errors import ConfigError, nearest, shown
from patch.storage.places import AnyPath
from patch.storage.text_files import parse_yaml, read_small, read_text

_GONE = [
    ("model", "cuda_graph_impl", "none"),
    ("optimizer", "use_nccl_ub", False),
    ("training", "spike_factor", 10.0),
    ("training", "spike_factor", 0),
    ("checkpoint", "save_retry_seconds", 30.0),
]
"""Keys in the config.yaml of earlier versions, at values that had no effect; they are ignored.

At other values, foreign_flags.txt has the answer (section "Earlier versions of this project")."""


def to_yaml(config: RunConfig) -> str:
    """Return every value of the run as YAML, section by section."""
    return yaml.safe_dump(scalars_of(config), sort_keys=False, allow_unicode=True)


def read_yaml(file: str | Path) -> dict[str, Any]:
    """Read the fields that a file sets; sections and keys may be missing.

    Raises:
        ConfigError: the file cannot be read, is malformed (the message has the line), or has an unknown
            section, key or value.
    """
    origin = f"--config {file}"
    with _errors(origin):
        text = read_text(Path(file))
    return _parse(text, str(file))


def read_run(file: AnyPath) -> RunConfig:
    """Read a whole run, as config.yaml stores it.

    Raises:
        ConfigError: see `read_yaml`; or a field without a default is missing.
    """
    with _errors(str(file)):
        text = read_small(file).decode()
    values = _parse(text, str(file))
    if lacking := missing(values):
        raise ConfigError(f"{file}: lacks {', '.join(lacking)}, expected a whole run as config.yaml keeps it")
    return assemble(values)


@contextmanager
def _errors(origin: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from error


def _parse(text: str, origin: str) -> dict[str, Any]:
    kind, parse = ("TOML", tomllib.loads) if origin.endswith(".toml") else ("YAML", parse_yaml)
    try:
        sections = parse(text) or {}
    except ValueError as error:
        raise ConfigError(f"{origin}: malformed {kind}: {error}") from error
    fields: dict[str, Any] = {}
    _refuse_foreign(_mapping(sections, origin), origin)
    for section, values in sections.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{origin}: unknown section {section!r}{nearest(section, list(SECTIONS))}, "
                f"expected {', '.join(SECTIONS)}"
            )
        for name, value in _mapping(values or {}, f"{origin}: {section}").items():
            if (section, name, value) in _GONE:
                continue
            _check_known(name, section, origin)
            fields[name] = coerce(FIELDS[name], value, f"{origin}: {section}.{name}")
    return fields


def _refuse_foreign(sections: dict[str, Any], origin: str) -> None:
    """Refuse another program's file (LLaMA-Factory's YAML, DeepSpeed's JSON) with advice for all its keys."""
    unknown = {name: _unknown(name, values) for name, values in sections.items()}
    foreign = {name: values for name, values in unknown.items() if values or name not in SECTIONS}
    given = flatten(foreign, splits=True)
    if any(foreign_flag(*pair) is not None for pair in given):
        flags = [field.flag for field in FIELDS.values()]
        lines = "".join(f"\n  {line}" for line in answers(given, flags))
        raise ConfigError(f"{origin}: keys of another program, expected {', '.join(SECTIONS)}:{lines}")


def _unknown(section: str, values: object) -> object:
    """Return what a section of ours has beside its own keys."""
    if not isinstance(values, dict):
        return values
    return {
        key: value
        for key, value in values.items()
        if (section, key, value) not in _GONE and not (key in FIELDS and FIELDS[key].section == section)
    }


def _mapping(value: object, origin: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{origin}: got {shown(value)}, expected keys with values")
    return value


def _check_known(name: str, section: str, origin: str) -> None:
    if name not in FIELDS:
        row = foreign_flag(name)
        said = nearest(name, list(FIELDS)) if row is None else f": {row.answer}"
        raise ConfigError(f"{origin}: unknown key {section}.{name}{said}")
    if FIELDS[name].section != section:
        raise ConfigError(f"{origin}: unknown key {section}.{name}: {name} belongs to {FIELDS[name].section}")
