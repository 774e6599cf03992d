"""Values of a parsed config.json, whose errors name file and key; RoPE's keys in both directions.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes one `rope_parameters` with both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from patch.errors import ConfigError, shown
from patch.families.shape import ModelConfig
from patch.numbers import to_float, to_int

_FREE_KEYS = {"hidden_act": "used", "sliding_window": "used"}
"""Keys of a family of another program that LLaMA's rows would refuse, and that its traits decide."""


@cache
def key_table() -> dict[str, dict[str, Any]]:
    """`model_type` -> key of config.json -> what becomes of it: config_keys.yaml."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("config_keys.yaml").read_text(encoding="utf-8")
    )
    return table


def set_keys(described: dict[str, Any], model_type: str, changed: Mapping[str, Any]) -> None:
    """Set keys of config.json, and their other spellings where the file has them."""
    rows = key_table().get(model_type, {})
    others = {key: row["means"] for key, row in rows.items() if "means" in row and key in described}
    described |= {**changed, **{key: changed[means] for key, means in others.items() if means in changed}}


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

    def by_table(self, model_type: str) -> ConfigReader:
        """The keys that a family uses, each under its own name, with its defaults; all keys for a family of
        another program.

        Raises:
            ConfigError: a key that changes the computation has another value than is supported.
        """
        known, values = key_table().get(model_type), dict(self.values)
        for key, row in (known or {**key_table()["llama"], **_FREE_KEYS}).items():
            got = self.values.get(key)
            if type(got) is int and "default" in row and isinstance(row["default"], float):
                self.refuse(key, got, f"{got}.0: transformers takes no whole number")
            if "means" in row and got is not None:
                if self.values.get(row["means"], got) != got:
                    self.refuse(key, got, f"{self.values[row['means']]!r}, which is at {row['means']}")
                values[row["means"]] = got
            if "only" in row and key in values and got not in row["only"]:
                legal = " or ".join(repr(one) for one in row["only"] if one is not None) or "null"
                self.refuse(key, got, row.get("expected", f"{legal}: nothing else is supported"))
        if known is None:
            return ConfigReader(self.file, values)
        defaults = {key: row["default"] for key, row in known.items() if "default" in row}
        used = {key: values[key] for key in values if known.get(key) == "used" or key in defaults}
        return ConfigReader(self.file, defaults | used)

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


_LLAMA3: dict[str, str] = {
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position",
}
_YARN: dict[str, str] = {
    "original_max_position_embeddings": "rope_original_max_position",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
    "attention_factor": "yarn_attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_TYPES: dict[str, dict[str, str]] = {"llama3": _LLAMA3, "linear": {}, "dynamic": {}, "yarn": _YARN}
"""`rope_type` -> key -> ModelConfig's field, besides the factor that all have."""

ROPE_FIELDS: frozenset[str] = frozenset(
    {"rotary_base", "use_rope_scaling", "rope_scaling_type", "rope_scaling_factor"}
    | {field for fields in _TYPES.values() for field in fields.values()}
)
"""ModelConfig's fields that `write_rope` writes."""

_IMPLIED: dict[str, Any] = {
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "yarn_attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
}
"""Fields whose keys are left out where transformers means the same without them."""

_OUTSIDE = "original_max_position_embeddings"
"""A key that some files have beside the object of the others; transformers prefers it."""


def read_rope(config: ConfigReader) -> dict[str, Any]:
    """RoPE's fields from the keys of transformers 4 or 5; if both are present, as transformers 5 reads them.

    `rope_type` was called `type` in old files.
    """
    rope = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        config.refuse("rope_parameters", rope, "an object for all layers alike")
    inner = ConfigReader(config.file, rope)
    base = inner.number("rope_theta", config.number("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", *_TYPES):
        known = ", ".join(("default", *_TYPES))
        config.refuse("rope_type", rope_type, f"one of {known}: no other scaling is supported")
    inner.accept_only({"partial_rotary_factor": 1.0})
    fields: dict[str, Any] = {"rotary_base": base, "use_rope_scaling": rope_type != "default"}
    if rope_type != "default":
        fields |= {"rope_scaling_type": rope_type} | _read_scaling(config, inner, rope_type)
    return fields


def _read_scaling(config: ConfigReader, rope: ConfigReader, rope_type: str) -> dict[str, Any]:
    """The fields of one type of scaling, with transformers' defaults."""
    if rope_type in ("linear", "dynamic"):
        return {"rope_scaling_factor": rope.number("factor")}
    longest = config.integer("max_position_embeddings")
    original = config.integer(_OUTSIDE, rope.integer(_OUTSIDE, longest))
    if original < 1:
        config.refuse(_OUTSIDE, original, "at least 1")
    if rope_type == "llama3":
        fields = {field: rope.number(key) for key, field in _LLAMA3.items() if key != _OUTSIDE}
        return {"rope_scaling_factor": rope.number("factor"), "rope_original_max_position": original} | fields
    factor = rope.number("factor", longest / original)
    return {
        "rope_scaling_factor": factor,
        "rope_original_max_position": original,
        "yarn_beta_fast": rope.number("beta_fast", 0.0) or _IMPLIED["yarn_beta_fast"],
        "yarn_beta_slow": rope.number("beta_slow", 0.0) or _IMPLIED["yarn_beta_slow"],
        "yarn_correction_range_round_to_int": rope.boolean("truncate", True),
        "yarn_attention_factor": _attention_factor(rope, factor),
    }


def _attention_factor(rope: ConfigReader, factor: float) -> float | None:
    """The factor that the file names, or that follows from its `mscale` and `mscale_all_dim`; else None."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    scales = [rope.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    above, below = (1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return above / below


def write_rope(described: dict[str, Any], model: ModelConfig) -> None:
    """Set RoPE's keys of transformers 4, and also that of transformers 5 if it is present.

    Args:
        described: the contents of config.json, changed in place.
        model: the model to describe.
    """
    scaling = None
    if model.use_rope_scaling:
        scaling = {"rope_type": model.rope_scaling_type, "factor": model.rope_scaling_factor}
        for key, field in _TYPES[model.rope_scaling_type].items():
            value = getattr(model, field)
            if field not in _IMPLIED or value != _IMPLIED[field]:
                scaling[key] = value
        if _OUTSIDE in described:
            described[_OUTSIDE] = model.rope_original_max_position
    described |= {"rope_theta": model.rotary_base, "rope_scaling": scaling}
    if "rope_parameters" in described:
        described["rope_parameters"] = {
            **(scaling or {"rope_type": "default"}), "rope_theta": model.rotary_base
        }  # fmt: skip
