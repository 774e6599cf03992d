"""Values of a parsed config.json, with errors that name file and key; RoPE's keys in both directions.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes both into one `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from patch.errors import ConfigError, shown
from patch.families.shape import ModelConfig
from patch.text import to_float, to_int

_FREE_KEYS = {"hidden_act": "used", "sliding_window": "used"}
"""Keys that LLaMA's rows refuse, but an externally registered family may use."""


@cache
def key_table() -> dict[str, dict[str, Any]]:
    """Return `model_type` -> key of config.json -> treatment of the key, from config_keys.yaml."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("config_keys.yaml").read_text(encoding="utf-8")
    )
    return table


def set_keys(described: dict[str, Any], model_type: str, changed: Mapping[str, Any]) -> None:
    """Set keys of config.json, and their other spellings if the file has them."""
    rows = key_table().get(model_type, {})
    others = {key: row["means"] for key, row in rows.items() if "means" in row and key in described}
    described |= {**changed, **{key: changed[means] for key, means in others.items() if means in changed}}


class ConfigReader:
    """Reader of numbers from config.json, or from an object inside it; `file` is for messages."""

    def __init__(self, file: Path, values: Mapping[str, Any]) -> None:
        self.file = file
        self.values = values

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigReader:
        """Return the same file with values for absent keys."""
        return ConfigReader(self.file, {**defaults, **self.values})

    def refuse(self, key: str, got: object, expected: str) -> NoReturn:
        """Raise the ConfigError of one key; `expected` describes the supported values in words."""
        raise ConfigError(f"{self.file}: {key}: got {shown(got)}, expected {expected}")

    def accept_only(self, supported: Mapping[str, Any]) -> None:
        """Refuse every key that is present with a value other than the supported one."""
        for key, only in supported.items():
            got = self.values.get(key, only)
            if got != only:
                self.refuse(key, got, f"{only!r}: nothing else is supported")

    def by_table(self, model_type: str) -> ConfigReader:
        """Return the keys that a family uses, under their main names and with defaults.

        For a family of another program, which has no rows in the table, return all keys.

        Raises:
            ConfigError: a key that changes the computation has an unsupported value.
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
        """Return true or false, or `default` if the key is absent or null.

        Raises:
            ConfigError: the value is not a boolean.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, value, "true or false")
        return default if value is None else value

    def integer(
        self, key: str, default: int | None = None, *, at_least: int | None = None, at_most: int | None = None
    ) -> int:
        """Return a whole number, or `default` if the key is absent or null.

        Raises:
            ConfigError: the value is missing without a default, is no whole number, or is out of bounds.
        """
        value = self.values.get(key)
        number = to_int(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a whole number")
        if at_least is not None and number < at_least:
            self.refuse(key, number, f"at least {at_least}")
        if at_most is not None and number > at_most:
            self.refuse(key, value, f"at most {at_most}")
        return number

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; `default` and errors as for `integer`."""
        value = self.values.get(key)
        number = to_float(default if value is None else value)
        if number is None:
            self.refuse(key, value, "a finite number")
        return number


_OUTSIDE = "original_max_position_embeddings"
"""Key that some files have outside of the RoPE object; transformers prefers this place."""
_ORIGINAL = {_OUTSIDE: "rope_original_max_position"}
_LLAMA3 = {"low_freq_factor": "rope_low_freq_factor", "high_freq_factor": "rope_high_freq_factor"}
_YARN = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
    "attention_factor": "yarn_attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_TYPES: dict[str, dict[str, str]] = {
    "llama3": {**_LLAMA3, **_ORIGINAL},
    "linear": {},
    "dynamic": {},
    "yarn": {**_ORIGINAL, **_YARN},
}
"""`rope_type` -> key -> ModelConfig's field, in addition to the factor that all types have."""

ROPE_FIELDS: frozenset[str] = frozenset(
    {"rotary_base", "use_rope_scaling", "rope_scaling_type", "rope_scaling_factor"}
    | {"rotary_base_local", "rotary_percent", "llama_4_scaling_beta"}
    | {field for fields in _TYPES.values() for field in fields.values()}
)

_IMPLIED = {each.name: each.default for each in fields(ModelConfig) if each.name in _YARN.values()}
"""Fields whose keys are left out if they have these values, which transformers assumes anyway."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers in `layer_types`, and in the `rope_parameters` of families with a RoPE for the window."""


def read_rope(config: ConfigReader, own: Set[str] = frozenset()) -> dict[str, Any]:
    """Return RoPE's fields from keys of transformers 4 or 5, with 5's precedence, or from the old `type`.

    `own` are the OWN_FIELDS of the family.
    """
    rope = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    found: dict[str, Any] = {}
    if "rotary_base_local" in own:
        local = config.values.get("rope_parameters", {}) if isinstance(rope, dict) else {}
        local = ConfigReader(config.file, (local or {}).get(SLIDING) or {})
        local.accept_only({"rope_type": "default"})
        base = config.number("rope_local_base_freq", config.number("rope_theta", 10000.0))
        found["rotary_base_local"] = local.number("rope_theta", base)
        rope = rope.get(FULL) or ({} if SLIDING in rope else rope)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        config.refuse("rope_parameters", rope, "an object for all layers alike")
    inner = ConfigReader(config.file, rope)
    base = inner.number("rope_theta", config.number("rope_theta", 10000.0))
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", *_TYPES):
        known = ", ".join(("default", *_TYPES))
        config.refuse("rope_type", rope_type, f"one of {known}: no other scaling is supported")
    if "rotary_percent" in own:
        share = config.number("partial_rotary_factor", 1.0)
        found["rotary_percent"] = inner.number("partial_rotary_factor", share)
    else:
        inner.accept_only({"partial_rotary_factor": 1.0})
    if "llama_4_scaling_beta" in own:
        found["llama_4_scaling_beta"] = inner.number("llama_4_scaling_beta", 0.0) or None
    found |= {"rotary_base": base, "use_rope_scaling": rope_type != "default"}
    if rope_type != "default":
        found |= {"rope_scaling_type": rope_type} | _read_scaling(config, inner, rope_type)
    return found


def _read_scaling(config: ConfigReader, rope: ConfigReader, rope_type: str) -> dict[str, Any]:
    if rope_type in ("linear", "dynamic"):
        return {"rope_scaling_factor": rope.number("factor")}
    longest = config.integer("max_position_embeddings")
    original = config.integer(_OUTSIDE, rope.integer(_OUTSIDE, longest), at_least=1)
    factor = rope.number("factor", longest / original if rope_type == "yarn" else None)
    found: dict[str, Any] = {"rope_scaling_factor": factor, "rope_original_max_position": original}
    if rope_type == "llama3":
        return found | {field: rope.number(key) for key, field in _LLAMA3.items()}
    for key, field in _YARN.items():
        if key == "truncate":
            found[field] = rope.boolean(key, True)
        elif rope.values.get(key) is None:
            found[field] = _IMPLIED[field]
        else:  # an attention factor of 0 is one
            found[field] = rope.number(key) or (0.0 if key == "attention_factor" else _IMPLIED[field])
    return found


def write_rope(
    described: dict[str, Any], model: ModelConfig, own: Set[str] = frozenset(), local_key: str | None = None
) -> None:
    """Set RoPE's keys of transformers 4, and `rope_parameters` of transformers 5 if `described` has it.

    `own` are the OWN_FIELDS of the family, `local_key` its key of `rotary_base_local` in transformers 4.
    """
    scaling: dict[str, Any] | None = None
    if model.use_rope_scaling:
        scaling = {"rope_type": model.rope_scaling_type, "factor": model.rope_scaling_factor}
        for key, field in _TYPES[model.rope_scaling_type].items():
            value = getattr(model, field)
            if field not in _IMPLIED or value != _IMPLIED[field]:
                scaling[key] = value
        if _OUTSIDE in described:
            described[_OUTSIDE] = model.rope_original_max_position
        if "llama_4_scaling_beta" in own:
            scaling["llama_4_scaling_beta"] = model.llama_4_scaling_beta or 0.0
    described |= {"rope_theta": model.rotary_base, "rope_scaling": scaling}
    if local_key is not None:
        described[local_key] = model.rotary_base_local
    if "rotary_percent" in own:
        described["partial_rotary_factor"] = model.rotary_percent
    if "rope_parameters" in described:
        rope: dict[str, Any] = {**(scaling or {"rope_type": "default"}), "rope_theta": model.rotary_base}
        if "rotary_percent" in own:
            rope["partial_rotary_factor"] = model.rotary_percent
        if "rotary_base_local" in own:
            rope = {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": model.rotary_base_local}}
        described["rope_parameters"] = rope
