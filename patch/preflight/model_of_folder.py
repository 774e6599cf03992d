"""Shape of the weights at position 22: from a Hugging Face config.json, or from a run's config.yaml.

The family interprets the keys of config.json. Folders in another format (Meta's, adapters, GGUF) are refused
with a message about their content.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from patch.config.schema import RunConfig
from patch.config.yaml_io import read_run
from patch.errors import ConfigError
from patch.families import SHAPE_FIELDS, ConfigReader, ModelConfig, expert_layers, read_config
from patch.families.adapters import AdapterConfig, read_adapter
from patch.preflight.checkpoint_places import (
    existing_checkpoint_root,
    has_checkpoints,
    resumed_run_folder,
    store_errors,
)
from patch.storage.names import ADAPTER_CONFIG_NAME, CONFIG_FILE, TRACKER, find_checkpoint_root, is_complete
from patch.storage.places import AnyPath, any_path
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_json

MTP_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
"""Keys of config.json for the number of layers that predict further tokens."""


def has_hf_config(path: str | Path) -> bool:
    """Return whether the folder has a config.json."""
    return (Path(path) / "config.json").is_file()


def is_hf_folder(path: str | Path) -> bool:
    """Return whether this is a Hugging Face model folder, and not a checkpoint converted from it."""
    return has_hf_config(path) and not (Path(path) / TRACKER).is_file()


def refuse_other_forms(values: Mapping[str, Any]) -> None:
    """Refuse folders of LLaMA in another format than Hugging Face's, as weights or tokenizer.

    transformers loads the tokenizer.model of Meta's format without an error, but without special tokens.

    Raises:
        ConfigError: a folder has files of another format, and lacks the file of Hugging Face's format.
    """
    for field, instead in (("load", "config.json"), ("tokenizer_name_or_path", "tokenizer_config.json")):
        folder = Path(values.get(field) or "")
        if values.get(field) is None:
            continue
        found = None if (folder / instead).exists() else _original_form(folder)
        if found or (field == "load" and (found := _other_weights(folder))):
            raise ConfigError(f"got {folder}, {found}", field=field)


def _original_form(folder: Path) -> str | None:
    """Return a message that the folder has Meta's format, and where Hugging Face's is, or None."""
    if (folder / "params.json").is_file():
        above = folder.absolute().parent
        where = above if has_hf_config(above) else "a repository of the hub has it above original/"
        return (
            "LLaMA in Meta's original form (params.json, consolidated.*.pth), expected its "
            f"Hugging Face form (config.json, model*.safetensors, tokenizer.json): {where}"
        )
    return None


def _other_weights(folder: Path) -> str | None:
    """Return a message on what a folder or file holds instead of a model's weights, or None."""
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return None
    if (folder / "adapter_config.json").is_file():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        return (
            f"a PEFT adapter of {base}, expected a whole model: give that one, and the adapter as "
            "--lora-load; or merge them (llama-patch merge)"
        )
    if gguf := [folder] if folder.suffix == ".gguf" else sorted(folder.glob("*.gguf")):
        return (
            f"weights in GGUF ({gguf[0].name}), expected a Hugging Face folder: the one that they were made "
            "from, or transformers' from_pretrained(FOLDER, gguf_file=NAME) and save_pretrained()"
        )
    return None


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        values = read_json(file)
    except OSError as error:
        expected = "a folder of PEFT" if file.name == ADAPTER_CONFIG_NAME else "a Hugging Face folder"
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; expected {expected}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: malformed JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: got a JSON {type(values).__name__}, expected an object")
    return values


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """Return ModelConfig's fields that `folder`/config.json sets.

    Raises:
        ConfigError: the file cannot be read or is malformed; the model is not in `families.FAMILIES`; or a
            key (the message names it) is not supported: biases of the attention's output or the MLP, another
            activation, a RoPE type outside `families/config_json.py`, a sliding window in only some layers.
    """
    file = Path(folder) / "config.json"
    if found := _other_weights(Path(folder)) or (None if file.exists() else _original_form(Path(folder))):
        raise ConfigError(f"{folder}: {found}")
    return read_config(ConfigReader(file, _read_json(file)))


def further_layers(folder: Path) -> int:
    """Return how many layers after the model's last one predict further tokens (MTP), by config.json."""
    described = _read_json(folder / "config.json") if has_hf_config(folder) else {}
    numbers = (described.get(key) for key in MTP_KEYS)
    return next((number for number in numbers if isinstance(number, int)), 0)


def router_loss_at(folder: str | Path) -> tuple[float, str]:
    """Return each layer's load balancing coefficient for `folder`/config.json, and the reason; or 0.

    transformers has one loss over all layers, which counts each of a token's choices. With this coefficient
    the sum of the layers' losses has the same size; for one layer both losses are equal.

    Raises:
        ConfigError: see `read_hf_config`.
    """
    model = ModelConfig(**read_hf_config(folder), seq_length=1)
    file, layers = Path(folder) / "config.json", len(expert_layers(model))
    config = ConfigReader(file, _read_json(file)).by_table(str(model.model_type))
    if not (layers and config.boolean("output_router_logits", False)):
        return 0.0, ""
    theirs = config.number("router_aux_loss_coef")
    factor = theirs * model.moe_router_topk / layers
    return factor, (
        f"{factor:g}, because output_router_logits is true in {file}: router_aux_loss_coef {theirs:g} x "
        f"{model.moe_router_topk} choices / {layers} layers"
    )


def adapter_at(folder: str | Path, model: ModelConfig) -> AdapterConfig:
    """Return the adapters that a PEFT folder describes, or the adapters of a run that saved to the folder.

    Raises:
        ConfigError: there is no adapter_config.json, or its content is not supported.
    """
    file = Path(folder) / ADAPTER_CONFIG_NAME
    if not file.is_file() and (run := run_behind(folder)) is not None and run.adapter.is_on:
        return run.adapter
    return read_adapter(ConfigReader(file, _read_json(file)), model)


def adapter_loaded(config: RunConfig) -> AdapterConfig:
    """Return the adapters at --lora-load, or else the run's. If a run from there has checkpoints, its own.

    Raises:
        ConfigError: see `adapter_at`; or the store does not answer.
    """
    if (folder := config.adapter.lora_load) is None:
        return config.adapter
    home = resumed_run_folder(config)
    if existing_checkpoint_root(config) is not None and (home / CONFIG_FILE).is_file():
        before = read_run(home / CONFIG_FILE).adapter
        if before.lora_load == folder:
            return before
    return adapter_at(folder, config.model)


def vocabulary_at(folder: str | Path) -> dict[str, int]:
    """Return `vocab_size` of a tokenizer's folder, by config.json or by tokenizer.json; {} if it has neither.

    Raises:
        ConfigError: a file cannot be read or is malformed.
    """
    rows = _read_json(Path(folder) / "config.json").get("vocab_size") if has_hf_config(folder) else None
    if isinstance(rows, int):
        return {"vocab_size": rows}
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return {}
    values = _read_json(file)
    try:
        vocabulary = values["model"]["vocab"]
        ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [*range(len(vocabulary))]
        return {"vocab_size": max(ids + [token["id"] for token in values.get("added_tokens", ())]) + 1}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"{file}: {error!r}, expected a tokenizer's file") from error


STORED_SHAPE = SHAPE_FIELDS | {"make_vocab_size_divisible_by"}
"""Fields of a preset, and the field that decides how the stored vocabulary is padded."""


class FoundShape(NamedTuple):
    """Fields of ModelConfig, and the file from which they were read."""

    file: AnyPath
    fields: dict[str, Any]


def run_behind(load: str | Path) -> RunConfig | None:
    """Return the run that wrote the checkpoints at `load`, or None if there is no config.yaml beside them.

    Args:
        load: a run's folder, the checkpoint/ in it, or a checkpoint in that (or a link to it).

    Raises:
        ConfigError: the config.yaml cannot be read.
    """
    file = _run_file(load)
    return read_run(file) if file is not None else None


def _run_file(load: str | Path) -> AnyPath | None:
    """Return the config.yaml of the run that wrote the checkpoints at `load`, or None if there is none.
    In a store it lies beside the checkpoints, or above them if a whole run's folder was copied there.
    """
    with store_errors("load"):
        folder = any_path(str(load))
        if isinstance(folder, Path):
            folder = folder.absolute()
        root = folder.parent if is_complete(folder) else find_checkpoint_root(folder)
        if not has_checkpoints(root):
            return None
        homes = (root, root.parent) if isinstance(root, RemotePath) else (root.parent,)
        return next((home / CONFIG_FILE for home in homes if (home / CONFIG_FILE).is_file()), None)


def shape_at(load: str | Path | None) -> FoundShape | None:
    """Return the shape of the weights at `load`, or None if no file there describes it.

    Raises:
        ConfigError: the file cannot be read, or its model is not supported.
    """
    if load is None:
        return None
    if has_hf_config(load):
        return FoundShape(Path(load) / "config.json", read_hf_config(load))
    file = _run_file(load)
    if file is None:
        return None
    run = read_run(file)
    return FoundShape(file, {name: getattr(run.model, name) for name in sorted(STORED_SHAPE)})
