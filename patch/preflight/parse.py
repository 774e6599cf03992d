"""From argv, environment and machine to one RunConfig: merge the layers, read the shape, derive the rest.

Flags override positions and environment variables. These override the --config file, the file overrides
--deepspeed-config and the shape of MODEL_SIZE, and these override the defaults. The layer that sets
MODEL_SIZE replaces the whole shape of the layers below it, so nothing of a file's 8B remains in a position's
70B.

Relative paths, also those in a --config file, are relative to the working directory. The resulting RunConfig
has absolute paths only, so that its config.yaml can be used from any directory.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

from patch.config.choices import BuiltInTemplate
from patch.config.data_spec import format_data, parse_data
from patch.config.fields import FIELDS, assemble, check_choice, missing
from patch.config.flags import help_text, is_flag, is_setting, read_flags
from patch.config.foreign_files import deepspeed_run, fill_batch
from patch.config.positions import POSITIONS, USAGE, read_positions, read_variables, where
from patch.config.schema import RunConfig
from patch.config.yaml_io import read_yaml
from patch.device import MachineFacts
from patch.errors import ConfigError, about, shown
from patch.families import (
    EXPERT_FIELDS,
    LATENT_FIELDS,
    OWN_FIELDS,
    PRESETS,
    SHAPE_FIELDS,
    TRAIT_FIELDS,
    UNUSED_ROTARY_BASE,
    family_called,
    own_traits,
)
from patch.families.adapters import AdapterConfig
from patch.features.table import LATENTS
from patch.preflight.cluster import Rendezvous, default_nproc_per_node, read_cluster
from patch.preflight.hub_names import take_models
from patch.preflight.model_of_folder import (
    adapter_loaded,
    has_hf_config,
    refuse_other_forms,
    router_loss_at,
    run_behind,
    shape_at,
    vocabulary_at,
)
from patch.storage.hub import hub_name
from patch.storage.remote import is_url

_LATER_FIELDS = {"model_type", "position_embedding_type", *OWN_FIELDS}
"""Fields of a shape that runs of earlier versions lack, beside those of experts and latent attention."""
_DATA = ("train_data_path", "valid_data_path")
_REQUIRED_SHAPE = {"num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"}
"""Fields that the user must give if neither a preset nor a config.json sets them."""


_FOLLOWS = {
    "num_query_groups": "num_attention_heads", "kv_channels": "num_attention_heads",
    "max_padding_length": "seq_length", "vocab_size": "tokenizer_name_or_path",
}  # fmt: skip
"""Fields that follow from another field; a message asks for the other field instead."""


class Invocation(NamedTuple):
    """A resolved command line."""

    config: RunConfig
    dry_run: bool
    rendezvous: Rendezvous
    force: bool = False
    """Start the run even if the plan says that it does not fit."""
    notes: Sequence[str] = ()
    """One line for each value that takes effect differently than written."""


def parse_args(argv: Sequence[str], environ: Mapping[str, str], machine: MachineFacts) -> Invocation:
    """Resolve a command line without the program's name: 25 positions and then flags, or flags alone.

    Raises:
        ConfigError: a value is missing or cannot be read. `validate_run` checks rules between values later.
        SystemExit: --help, after printing it.
    """
    if asked := {"--help", "-h"} & {*argv}:
        topic = "".join(argv[argv.index(asked.pop()) + 1 :][:1])
        sys.stdout.write(help_text("" if topic.startswith("-") else topic))
        raise SystemExit(0)
    if not argv:
        raise ConfigError(f"nothing is given, expected {USAGE}; --help positions explains each")
    texts, rest = split_positions(argv)
    if len(texts) == 1 and texts[0].endswith((".yaml", ".yml", ".json", ".toml")):
        raise ConfigError(f"got the file {shown(texts[0])}, expected it after a flag: --config {texts[0]}")
    flags = read_flags(rest)
    _refuse_two_lengths(flags.fields)
    file = read_yaml(flags.config) if flags.config is not None else {}
    env, positions = "dsw", read_variables(environ)
    notes: list[str] = []
    if texts:
        env, positions, notes = read_positions(texts, environ, flags.fields)
        if epochs := flags.fields.get("train_epochs"):
            notes = [*notes, f"{where('train_iters')} has no effect with {where('train_epochs')} {epochs:g}"]
    engine = deepspeed_run(flags.deepspeed_config) if flags.deepspeed_config is not None else None
    merged = _merge([engine.values if engine is not None else {}, file, positions, flags.fields])
    take_models(merged)
    refuse_other_forms(merged)
    _refuse_other_family(merged)
    merged = {**_shape(merged), **merged}
    notes = [*notes, *_take_router_loss(merged), *_shard_states(merged, flags.fields)]
    # positions imply the number of machines, so only a flag may override it
    nnodes = (flags.fields if texts else merged).get("nnodes")
    if "LOCAL_RANK" in environ and merged.get("min_nodes"):
        nnodes = None  # the launcher counts the present machines at each start
    cluster = read_cluster(env, environ, nnodes)
    merged["nnodes"] = cluster.nnodes if nnodes is None else nnodes
    _derive(merged)
    _take_tokenizer(merged)
    if "nproc_per_node" not in flags.fields and (texts or "nproc_per_node" not in merged):
        merged["nproc_per_node"] = default_nproc_per_node(cluster, machine, _replica(merged))
    if engine is not None:
        fill_batch(merged, engine.accumulation)
    _make_absolute(merged)
    config = _take_adapters(_build(merged), merged)
    _check_family(config, flags.fields.get("model_type"))
    return Invocation(config, flags.dry_run, cluster.rendezvous, flags.force, notes)


def split_positions(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split into positions and flags. Flags begin at the first hyphenated argument that is not a number, or
    at a setting after the last position."""
    for index, text in enumerate(argv):
        if is_flag(text) or (index >= len(POSITIONS) and is_setting(text)):
            return list(argv[:index]), list(argv[index:])
    return list(argv), []


def _refuse_two_lengths(flags: Mapping[str, Any]) -> None:
    if flags.get("train_iters") and flags.get("train_epochs"):
        raise ConfigError(
            f"got {flags['train_epochs']:g} with --train-iters {flags['train_iters']}, expected one of them",
            field="train_epochs",
        )


def _merge(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge layers into one; a later layer overrides an earlier layer.
    Epochs and steps both give the length of a run: the later layer counts, within a layer epochs.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        if "model_size" in layer:
            merged = {name: value for name, value in merged.items() if name not in SHAPE_FIELDS}
        merged.update(layer)
        if layer.get("train_epochs"):
            merged["train_iters"] = 0
        elif layer.get("train_iters"):
            merged["train_epochs"] = None
    return merged


def _shape(merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape that MODEL_SIZE names, or {} if all fields of the shape are given already.
    If flags give the shape, the vocabulary's size comes from the tokenizer's folder.
    """
    size, load = merged.get("model_size", "auto"), merged.get("load")
    check_choice(size, (*PRESETS, "auto"), where("model_size"))
    if merged.keys() >= SHAPE_FIELDS - EXPERT_FIELDS - LATENT_FIELDS - _LATER_FIELDS:
        return {}
    if size != "auto":
        return PRESETS[size]
    if (found := shape_at(load)) is not None:
        return found.fields
    if merged.keys() >= _REQUIRED_SHAPE:
        folder = merged.get("tokenizer_name_or_path") or load
        return {} if folder is None else vocabulary_at(folder)
    if not {"model_size", "load"} & merged.keys():
        return {}
    if load is not None and not is_url(load) and not Path(load).exists():
        raise ConfigError(
            f"got {load!r}, no such folder, expected a folder, or a name of the hub (org/name)", field="load"
        )
    raise ConfigError(
        f"auto reads the shape from the folder at {where('load')}; got {FIELDS['load'].to_scalar(load)!r}, "
        "which has neither a config.json nor a run's checkpoints with their config.yaml; expected one of the "
        f"two there, one of {', '.join(PRESETS)}, or the shape by flags",
        field="model_size",
    )


def _derive(merged: dict[str, Any]) -> None:
    """Add values that follow from other values, by Megatron-LM's and Megatron-LLaMA's rules."""
    traits = family_called(merged.get("model_type")).traits
    for name in TRAIT_FIELDS:
        merged.setdefault(name, getattr(traits, name))
    if not traits.has_rope:
        merged.setdefault("rotary_base", UNUSED_ROTARY_BASE)
    heads, hidden = merged.get("num_attention_heads", 0), merged.get("hidden_size", 0)
    if heads > 0:
        merged.setdefault("num_query_groups", heads)
        if merged.get(LATENTS.field):
            parts = (merged.get(name) or 0 for name in ("qk_head_dim", "qk_pos_emb_head_dim"))
            merged.setdefault("kv_channels", sum(parts))
        if "kv_channels" not in merged and hidden % heads:
            raise ConfigError(f"--kv-channels is needed: {heads} heads do not divide --hidden-size {hidden}")
        merged.setdefault("kv_channels", hidden // heads)
    if "seq_length" in merged:
        merged.setdefault("max_padding_length", merged["seq_length"])
    if merged.get("overlapped_distributed_optimizer"):
        merged.setdefault("use_distributed_optimizer", True)


def _shard_states(merged: dict[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Let the flag of Megatron-LLaMA's readme override a false DO (position or file); return notes."""
    is_off = merged.get("use_distributed_optimizer") is False and "use_distributed_optimizer" not in flags
    if not (is_off and flags.get("overlapped_distributed_optimizer")):
        return []
    merged["use_distributed_optimizer"] = True
    given, idle = where("overlapped_distributed_optimizer"), where("use_distributed_optimizer")
    return [f"{idle} false has no effect with {given}: gradients and optimizer states are sharded"]


def _check_family(config: RunConfig, asked: str | None) -> None:
    """Refuse a --model-type whose class in transformers does not compute the model."""
    found = config.model.model_type
    if asked not in (None, found):
        raise ConfigError(
            f"got {asked}, expected auto or {found}, which has these traits and this window of attention",
            field="model_type",
        )


def _refuse_other_family(merged: Mapping[str, Any]) -> None:
    """Refuse a family whose layers differ from the preset's: the preset's weights would not fit."""
    size, asked = merged.get("model_size", "auto"), merged.get("model_type")
    own = PRESETS.get(size, {}).get("model_type")
    if asked is not None and own is not None and own_traits(asked) != own_traits(own):
        given = f"{where('model_size')} {size}"
        raise ConfigError(f"got {asked} beside {given}, expected auto or {own}", field="model_type")


def _take_router_loss(merged: dict[str, Any]) -> list[str]:
    """Take the load balancing coefficient from the config.json of the loaded model."""
    load, kind = merged.get("load"), merged.get("moe_router_load_balancing_type")
    if load is None or kind == "none" or "moe_aux_loss_coeff" in merged or not has_hf_config(load):
        return []
    factor, why = router_loss_at(load)
    merged |= {"moe_aux_loss_coeff": factor} if factor else {}
    return [f"{where('moe_aux_loss_coeff')} {why}"] if factor else []


def _take_tokenizer(merged: dict[str, Any]) -> None:
    """Use the tokenizer's folder that the config.yaml of the loaded run names."""
    load = merged.get("load")
    if load is None or merged.get("tokenizer_name_or_path") is not None or has_hf_config(load):
        return
    if (run := run_behind(load)) is not None:
        merged["tokenizer_name_or_path"] = run.tokenizer_folder


def _take_adapters(config: RunConfig, merged: Mapping[str, Any]) -> RunConfig:
    """Use the adapters of the folder that the run begins from, unless the user sets a value."""
    given = {name: getattr(config.adapter, name) for name in AdapterConfig.__slots__ if name in merged}
    return replace(config, adapter=replace(adapter_loaded(config), **given))


def _make_absolute(merged: dict[str, Any]) -> None:
    for name in (each.name for each in FIELDS.values() if each.is_path):
        if merged.get(name) is not None and not is_url(merged[name]):
            merged[name] = os.path.abspath(merged[name])
    chat = merged.get("chat_template")
    if chat is not None and chat not in get_args(BuiltInTemplate) and os.path.exists(chat):
        merged["chat_template"] = os.path.abspath(chat)
    for name in _DATA:
        if merged.get(name) is not None:
            with about(name):
                parts = parse_data(merged[name])
            merged[name] = format_data(
                part._replace(path=_absolute_data(part.path, merged)) for part in parts
            )


def _absolute_data(path: str, merged: Mapping[str, Any]) -> str:
    """Return the absolute path of a set; a hub name stays until the rules have been checked."""
    is_name = merged.get("dataset_type") == "raw" and hub_name(path, "dataset") is not None
    return path if is_name else os.path.abspath(path)


def _replica(merged: Mapping[str, Any]) -> int:
    axes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return math.prod(merged.get(name, FIELDS[name].default) for name in axes)


def _build(merged: Mapping[str, Any]) -> RunConfig:
    if lacking := missing(merged):
        asked = [*dict.fromkeys(_FOLLOWS.get(name, name) for name in lacking)]
        either = [f"{where('model_size')} or {where('load')}"] if _REQUIRED_SHAPE <= {*asked} else []
        of_load = SHAPE_FIELDS | {"tokenizer_name_or_path"} if either else ()
        names = ", ".join([*either, *(where(name) for name in asked if name not in of_load)])
        what = f" ({FIELDS[asked[0]].help})" if len(asked) == 1 else ""
        raise ConfigError(f"missing: {names}{what}; give the 25 positions, these flags, or --config FILE")
    return assemble(merged)
