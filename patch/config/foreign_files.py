"""Arguments of another program as fields of ours, by foreign_flags.txt: values, and what sets no field.

`llama-patch migrate` prints them as a command; `--deepspeed-config` reads a file of DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.fields import FIELDS, coerce
from patch.config.foreign_flags import ForeignFlag, foreign_defaults, foreign_flag, nearest_flag, plain_name
from patch.errors import ConfigError, shown
from patch.storage.text_files import parse_json, read_small
from patch.text import to_float, to_int

DEEPSPEED = "Megatron-DeepSpeed"
"""The table's program that has DeepSpeed's keys."""
NOT_NEEDED = "remove it: "
"""How the answer to an argument begins without which nothing is lost."""
MOST_BYTES = 1 << 20
"""Size of the largest file that is read as a configuration."""
_MOST_PAIRS = 10_000
_NEEDS_SHELL = "needs a shell: give our flag, or the script's arguments after FILE"
_ACCUMULATION = "gradient-accumulation-steps"
_JOINED = {"train_data_path": " ", "columns": ","}
"""Fields whose repeated values are joined; of other fields the last value counts."""
_FP16 = ("initial_loss_scale", "loss_scale_window", "min_loss_scale", "hysteresis", "loss_scale")


class Translation(NamedTuple):
    """Arguments of another program, in fields of a RunConfig."""

    values: dict[str, Any]
    """Field -> value."""
    left: list[tuple[str, str]]
    """(argument, answer) of all that sets no field; see `NOT_NEEDED`."""
    accumulation: int | None
    """Micro-batches of a replica in a step, or None if it is not given."""


def flatten(content: dict[str, Any], *, splits: bool = False) -> list[tuple[str, str]]:
    """Return the pairs (key, value as text) of a parsed file, with dots in the keys of nested mappings.

    A list of scalars is one text with commas; an empty value is "null". A mapping that says `enabled: false`
    yields only that.

    Args:
        splits: yield each scalar of a list, and all of such a mapping, because each may have its own answer.
    Raises:
        ConfigError: there are more than `_MOST_PAIRS`, or an alias of a YAML contains itself.
    """
    try:
        pairs = list(islice(_flattened("", content, splits), _MOST_PAIRS + 1))
    except RecursionError as error:
        raise ConfigError("its values are nested too deeply") from error
    if len(pairs) > _MOST_PAIRS:
        raise ConfigError(f"got more than {_MOST_PAIRS} values, expected a configuration")
    return pairs


def _flattened(name: str, value: object, splits: bool) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        is_off = value.get("enabled") is False and not splits
        items = [("enabled", False)] if is_off else value.items()
        for key, inner in items:
            yield from _flattened(f"{name}.{key}" if name else str(key), inner, splits)
    elif isinstance(value, list) and any(splits or isinstance(each, (dict, list)) for each in value):
        for each in value:
            yield from _flattened(name, each, splits)
    elif value in (None, {}, [], ""):
        yield name, "null"
    else:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        yield name, text.lower() if isinstance(value, bool) else text


def translate(program: str, pairs: list[tuple[str, str]]) -> Translation:
    """Translate (name, value as text) arguments of a program of the table, and what it does without some."""
    texts = {plain_name(name): text for name, text in pairs}
    found = Translation({}, [], to_int(texts.get(_ACCUMULATION)))
    rows = [(name, text, _row(name, text, program)) for name, text in pairs]
    if found.accumulation:
        rows = [each for each in rows if plain_name(each[0]) != _ACCUMULATION]
    rows += _defaults(program, pairs)
    for name, text, row in sorted(rows, key=lambda each: each[2].value.startswith("= ")):  # formulas last
        if text == "auto" and program == DEEPSPEED:
            found.left.append((name, f"{NOT_NEEDED}the trainer's own argument says it"))
        elif "$" in text and not row.answer.startswith(NOT_NEEDED):
            found.left.append((name, f"{text} {_NEEDS_SHELL}" if text != name else _NEEDS_SHELL))
        elif row.value.startswith("= "):
            _take(found, name, row, _compute(row, text, found.values))
        else:
            _take(found, name, row, row.value.replace("*", text))
    for name, text, row in rows:
        is_implied = row.value == "-" and text != "auto"
        if is_implied and found.values.keys().isdisjoint(map(_field, row.ours.split())):
            found.left.append((name, row.answer))
    if found.values.get("precision") != "fp16":
        for name in _FP16:
            found.values.pop(name, None)
    return found


def _defaults(program: str, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, ForeignFlag]]:
    """Yield (name, "", row) for each default of a program that counts for its arguments."""
    for row in foreign_defaults(program):
        unless, _, need = row.theirs.partition(" if ")
        if not _is_given(unless, pairs) and (not need or _is_given(need, pairs)):
            name = (need if unless == "-" else unless).split(", ")[0].split()[0]
            yield name, "", row._replace(value=row.advice if row.ours != "-" else "")


def _row(name: str, text: str, program: str) -> ForeignFlag:
    """Return the row of an argument: the program's own, our flag of the same name, or another program's."""
    row, plain = foreign_flag(name, text, program), plain_name(name)
    flag = f"--{plain}"
    is_ours = "." not in name and _field(flag) in FIELDS
    if is_ours and (row is None or plain not in map(plain_name, row.theirs.split(", "))):
        return ForeignFlag(name, flag, "the same name", "*")
    if (row := row or foreign_flag(name, text)) is not None:
        return row
    hint = nearest_flag(name, [field.flag for field in FIELDS.values()])
    return ForeignFlag(name, "-", f"nothing here has this name{hint}")


def _field(flag: str) -> str:
    """Return the field that a flag sets; `--no-NAME` sets NAME."""
    name = flag.removeprefix("--").replace("-", "_")
    return name if name in FIELDS else name.removeprefix("no_")


def _is_given(names: str, pairs: list[tuple[str, str]]) -> bool:
    return any(ForeignFlag(names, "-", "").fit(*pair) > 0 for pair in pairs)


def _compute(row: ForeignFlag, text: str, values: Mapping[str, Any]) -> str:
    """Return the value of a formula such as `= * x --lr`, or "" if it cannot be computed."""
    words = [text if word == "*" else word for word in row.value.split()[1:]]
    ends = [values.get(_field(word)) if word.startswith("--") else word for word in (words[0], words[-1])]
    first, last = map(to_float, ends)
    if first is None or last is None:
        return ""
    signs = {"x": lambda: first * last, "/": lambda: first / last, "^": lambda: first**last}
    try:
        number = signs[words[1]]() if len(words) > 1 else first
    except ArithmeticError:
        return ""
    is_whole = FIELDS[_field(row.ours)].kind is int
    return str((int if "/" in words else math.ceil)(number) if is_whole else number)


def _take(found: Translation, name: str, row: ForeignFlag, value: str) -> None:
    """Set the fields of a row to a value, or list what cannot be set."""
    if not value and row.advice.startswith("= "):  # a default that cannot be computed
        return
    if not value or row.ours == "-":
        found.left.append((name, row.answer))
    elif value != "-":
        flags = row.ours.split()
        parts = value.split(",") if len(flags) > 1 and "," in value else [value] * len(flags)
        for flag, part in zip(flags, parts, strict=False):
            field, text = _field(flag), "false" if flag[2:5] == "no-" else part
            try:
                read = coerce(FIELDS[field], text, name)
            except ConfigError as error:
                found.left.append((name, str(error).removeprefix(f"{name}: ")))
                continue
            if field in _JOINED and field in found.values:
                read = f"{found.values[field]}{_JOINED[field]}{read}"
            found.values[field] = read


def fill_batch(values: dict[str, Any], accumulation: int | None) -> None:
    """Add what follows from global batch = micro-batch x accumulation (1 by default) x replicas.

    Args:
        values: fields of a run, among them `nproc_per_node`.
    """
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    world = values["nproc_per_node"] * values.get("nnodes", 1)
    replicas = max(world // math.prod(values.get(axis) or 1 for axis in axes), 1)
    micro, whole = values.get("micro_batch_size"), values.get("global_batch_size")
    if whole is None and micro is not None:
        values["global_batch_size"] = micro * (accumulation or 1) * replicas
    elif micro is None and whole is not None and accumulation:
        values["micro_batch_size"] = whole // (accumulation * replicas)


def deepspeed_run(file: str) -> Translation:
    """Return the fields that DeepSpeed's JSON sets in a run.

    Raises:
        ConfigError: the file cannot be read, is larger than `MOST_BYTES`, or is no JSON object; or a key asks
            for what we do not have.
    """
    try:
        content = parse_json(read_small(Path(file), MOST_BYTES))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}, expected DeepSpeed's JSON") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: got {shown(content)}, expected DeepSpeed's JSON object")
    found = translate(DEEPSPEED, flatten(content))
    if lost := [f"\n  {name}: {why}" for name, why in found.left if not why.startswith(NOT_NEEDED)]:
        raise ConfigError(f"--deepspeed-config {file}: remove what has no equivalent:{''.join(lost)}")
    return found
