"""Reads the small files that describe a run, a checkpoint or a model: bytes, text, JSON or YAML.

The kind of a checkpoint's or a model's file is checked before it is read: a pipe may have no writer, and a
device such as /dev/zero has no end.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import yaml

from patch.errors import shown
from patch.storage.places import AnyPath, check_kind

_MOST_BYTES = 1 << 26


def read_small(file: AnyPath, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the content of a regular file of at most `most_bytes`.

    Raises:
        OSError: the file cannot be read, is no regular file, or is too large.
    """
    if isinstance(file, Path):
        check_kind(file)
    length = file.stat().st_size
    if length > most_bytes:
        raise OSError(errno.EFBIG, f"got {length} bytes, expected at most {most_bytes}", str(file))
    return file.read_bytes()


def read_text(file: Path) -> str:
    """Return the text of a UTF-8 file or pipe of at most 64 MiB that a user has named.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger, is not UTF-8, or is a pipe without a writer.
    """
    with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
        os.set_blocking(stream.fileno(), True)  # only reading waits for a writer
        data = stream.read(_MOST_BYTES + 1)
    if not data and not file.is_file():
        raise ValueError("it is a pipe or a device that has nothing to read")
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return data.decode()


def read_json(file: AnyPath) -> Any:
    """Return the values of a JSON file; see `read_small`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON in UTF-8, or nested too deeply.
    """
    return parse_json(read_small(file))


def parse_json(content: bytes) -> Any:
    """Return the values of a JSON text in UTF-8.

    Raises:
        ValueError: it is not JSON in UTF-8, or nested too deeply.
    """
    try:
        return json.loads(content.decode())
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error


_MOST_KEYS = 10_000
"""Most keys of one YAML mapping: keys merged by << may multiply at every level."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which also refuses duplicate keys and reports the position of each error."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, AttributeError, LookupError) as error:
            # PyYAML's constructors raise ValueError for a date such as 2026-99-99, KeyError for
            # `!!bool x`, AttributeError and IndexError for other tags.
            kind = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise _malformed(node, f"got {shown(node.value)}, expected a value of {kind}") from error

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _malformed(key, f"got the key {shown(key.value)} twice, expected it once")
                seen.add((key.tag, key.value))
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MOST_KEYS:
            raise _malformed(node, f"got {len(node.value)} keys by <<, expected at most {_MOST_KEYS}")


def _malformed(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


def parse_yaml(text: str) -> Any:
    """Return the values of a YAML text of plain values.

    Raises:
        ValueError: it is not such YAML; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error).replace("\n", "\n  ")) from error
    except RecursionError as error:
        raise ValueError("its values are nested too deeply") from error
