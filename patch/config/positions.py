"""The 25 positions of run_mcore_llama.sh: their names, legal values, and the fields that they set.

Source of their meaning: the public script of Pai-Megatron-Patch (examples/llama3_1), without its errors.
Tokens are converted to iterations here; rules between several values are in `patch/checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from patch.config.fields import FIELDS, check_choice, coerce
from patch.config.schema import RunConfig
from patch.errors import ConfigError, PatchError, nearest, shown
from patch.families import PRESETS
from patch.text import to_float, to_int

INT, FLOAT, PATH, SIZE = "int", "float", "path", "size"
_BOOLS = ("true", "false")


class Position(NamedTuple):
    """One position: a number, a path, or one of several words."""

    name: str
    kind: str | tuple[str, ...]
    """INT, FLOAT, PATH, SIZE, or the legal words."""
    fields: tuple[str, ...]
    help: str

    @property
    def words(self) -> tuple[str, ...]:
        """Legal words, or () if there are other values. SIZE has the presets of all known families."""
        if self.kind == SIZE:
            return (*PRESETS, "auto")
        return self.kind if isinstance(self.kind, tuple) else ()


POSITIONS: tuple[Position, ...] = (
    Position("ENV", ("dsw", "dlc", "slurm"), (), "one machine, or several by DLC's or SLURM's variables"),
    Position("MODEL_SIZE", SIZE, ("model_size",), "a preset, or auto: position 22's config.json"),
    Position("BATCH_SIZE", INT, ("micro_batch_size",), "samples of one forward on one replica"),
    Position("GLOBAL_BATCH_SIZE", INT, ("global_batch_size",), "samples of one optimizer step"),
    Position("LR", FLOAT, ("lr",), "highest learning rate"),
    Position("MIN_LR", FLOAT, ("min_lr",), "learning rate at the end of the decay"),
    Position("SEQ_LEN", INT, ("seq_length",), "the model's sequence"),
    Position("PAD_LEN", INT, ("max_padding_length",), "raw samples are padded and truncated to it"),
    Position("PR", FIELDS["precision"].choices, ("precision",), "precision of weights and activations"),
    Position("TP", INT, ("tensor_model_parallel_size",), "tensor parallelism"),
    Position("PP", INT, ("pipeline_model_parallel_size",), "pipeline parallelism"),
    Position("CP", INT, ("context_parallel_size",), "context parallelism"),
    Position("SP", _BOOLS, ("sequence_parallel",), "sequence parallelism over TP"),
    Position("DO", _BOOLS, ("use_distributed_optimizer",), "sharded optimizer states"),
    Position("FL", _BOOLS, ("attention_backend",), "flash attention; false: the fused kernel"),
    Position("SFT", _BOOLS, ("sft",), "fine-tuning (MP_DATASET_TYPE=raw); false: pre-training"),
    Position(
        "AC",
        ("none", "false", "sel", "full", "offload", "auto"),
        ("recompute_granularity", "cpu_offloading"),
        "activations: keep; recompute norms and MLP activations (sel) or layers (full); offload; what fits",
    ),
    Position(
        "OPTIMIZER_OFFLOAD",
        FIELDS["optimizer_offload_policy"].choices,
        ("optimizer_offload_policy",),
        "optimizer states in host memory: none, a fraction, or what does not fit",
    ),
    Position("SAVE_INTERVAL", INT, ("save_interval",), "steps between checkpoints"),
    Position("DATASET_PATH", PATH, ("train_data_path",), "file, folder or glob of rows; prefix of .bin/.idx"),
    Position("VALID_DATASET_PATH", PATH, ("valid_data_path",), "the same for evaluation, or none"),
    Position("PRETRAIN_CHECKPOINT_PATH", PATH, ("load",), "Hugging Face folder or name, checkpoint, or none"),
    Position("TRAIN_TOKENS_OR_ITERS", INT, ("train_iters",), "tokens; with SFT=true iterations"),
    Position("WARMUP_TOKENS_OR_ITERS", INT, ("lr_warmup_iters",), "tokens; with SFT=true iterations"),
    Position("OUTPUT_BASEPATH", PATH, ("output_path",), "the run's folder"),
)

USAGE = (
    f"run_mcore_llama.sh {' '.join(position.name for position in POSITIONS)} [FLAGS], "
    "or pretrain_llama.py FLAGS, or --config FILE"
)
"""Both forms of the command line, and a run from its file."""

VARIABLES: dict[str, tuple[str, str]] = {
    "MP_DATASET_TYPE": ("dataset_type", "idxmap (default) or raw"),
    "MP_AC_LAYERS": (
        "recompute_num_layers",
        "AC=full: layers per recomputed block (default 1); offload: offloaded ones",
    ),
    "MP_VP": ("num_layers_per_virtual_pipeline_stage", "layers per interleaved stage"),
    "MP_EP": ("expert_model_parallel_size", "processes that share the experts of a layer"),
    "OPTIMIZER_OFFLOAD_FRACTION": (
        "optimizer_offload_fraction",
        "OPTIMIZER_OFFLOAD=static: share of a process's states in host memory (default 1.0)",
    ),
    "MP_SFT_PACKING": ("packing", "true: several samples in one sequence"),
    "TOKENIZER_PATH": ("tokenizer_name_or_path", "tokenizer folder (default: position 22)"),
}
"""Environment variables that also set fields: name -> (field, help)."""

_GRANULARITIES = {"sel": "selective", "full": "full", "auto": "auto"}
"""AC's words for `recompute_granularity`; all other words mean none."""
_POSITION_OF = {field: f"{i} {p.name}" for i, p in enumerate(POSITIONS, 1) for field in p.fields}
_VARIABLE_OF = {field: variable for variable, (field, _) in VARIABLES.items()}
_OTHER_NAMES: dict[str, str] = {
    **{field: f"position {position}" for field, position in _POSITION_OF.items()},
    **_VARIABLE_OF,
    "nproc_per_node": "NPROC_PER_NODE",
}


def where(field: str) -> str:
    """Return how a user sets a field: `--global-batch-size (position 4 GLOBAL_BATCH_SIZE)`."""
    other_name = _OTHER_NAMES.get(field)
    return FIELDS[field].flag + (f" ({other_name})" if other_name else "")


def position_word(field: str, scalar: object) -> str:
    """Return a field's scalar (see `Field.to_scalar`) as its position writes it: `true`, `8`, `sel`."""
    if field == "recompute_granularity":
        return next((word for word, meant in _GRANULARITIES.items() if meant == scalar), str(scalar))
    return str(scalar).lower() if isinstance(scalar, bool) else str(scalar)


def place_of(field: str, scalar: object) -> str | None:
    """Return the position or variable that sets a value: `10 TP 2`, `MP_VP=2`, or None if there is none."""
    if field in _POSITION_OF:
        return f"{_POSITION_OF[field]} {position_word(field, scalar)}"
    if field in _VARIABLE_OF:
        return f"{_VARIABLE_OF[field]}={scalar}"
    return None


def user_message(error: PatchError) -> str:
    """Return the error's message for a command line user, after the flag and position to change."""
    return str(error) if error.field is None else f"{where(error.field)}: {error}"


def length_text(config: RunConfig, steps: int) -> str:
    """Format steps as positions 23 and 24 count: tokens (and steps) in pre-training, steps in SFT."""
    if config.training.sft:
        return str(steps)
    tokens = steps * config.training.global_batch_size * config.model.seq_length
    return f"{tokens} tokens ({steps} steps)"


def read_positions(
    texts: Sequence[str], environ: Mapping[str, str], flags: Mapping[str, Any]
) -> tuple[str, dict[str, Any], list[str]]:
    """Return ENV, the fields that positions and environment variables set, and notes for the user.

    Args:
        flags: fields set by named flags. They override positions, so tokens are converted with their values.

    Raises:
        ConfigError: the number of positions is wrong, or a position has an unknown value.
    """
    _check_count(texts)
    layer: dict[str, Any] = {}
    for index, (position, text) in enumerate(zip(POSITIONS, texts, strict=True), 1):
        layer.update(_fields_set_by(position, _parse(index, position, text)))
    layer.update(read_variables(environ))
    if layer["cpu_offloading"] and "recompute_num_layers" in layer:  # as in Pai-Megatron-Patch
        layer["cpu_offloading_num_layers"] = layer.pop("recompute_num_layers")
    notes = [] if flags.get("sft", layer["sft"]) else _tokens_to_iters(layer, flags)
    return texts[0], layer, notes


def _fields_set_by(position: Position, value: Any) -> dict[str, Any]:
    if position.name == "FL":
        return {"attention_backend": "flash" if value else "fused"}
    if position.name == "AC":
        return {"recompute_granularity": _GRANULARITIES.get(value), "cpu_offloading": value == "offload"}
    return {name: FIELDS[name].from_scalar(value) for name in position.fields}


def _check_count(texts: Sequence[str]) -> None:
    if len(texts) == len(POSITIONS):
        return
    got = f"got {len(texts)} positions, expected {len(POSITIONS)}"
    if len(texts) > len(POSITIONS):
        sp = next(index for index, position in enumerate(POSITIONS) if position.name == "SP")
        if to_int(texts[sp]) is not None:
            raise ConfigError(
                f"{got}: {texts[sp]!r} at position {sp + 1} is EP or ETP of Pai-Megatron-Patch's scripts for "
                "experts: give MP_EP and --expert-tensor-parallel-size; the line goes on with SP (true, "
                "false) after CP"
            )
        extra = texts[len(POSITIONS)]
        raise ConfigError(f"{got}: {extra!r} after position {len(POSITIONS)} is the first too many")
    message = f"{got}: position {len(texts) + 1} {POSITIONS[len(texts)].name} is the first missing"
    for index, (position, text) in enumerate(zip(POSITIONS, texts, strict=False), 1):
        try:
            _parse(index, position, text)
        except ConfigError as error:
            raise ConfigError(f"{message}; the first that does not fit its position is {error}") from None
    raise ConfigError(f"{message}; --help positions lists them all")


def _parse(index: int, position: Position, text: str) -> Any:
    origin = f"position {index} {position.name}"
    if position.words:
        check_choice(text, position.words, origin)
        return text == "true" if position.kind == _BOOLS else text
    assert isinstance(position.kind, str)
    may_be_none = position.kind == PATH and FIELDS[position.fields[0]].none is not None
    value = {INT: to_int, FLOAT: to_float, PATH: lambda path: path or None}[position.kind](text)
    if value is None or (may_be_none and text in ("None", "NONE", "null")):
        path = "a path, or none" if may_be_none else "a path"
        expected = {INT: "a whole number", FLOAT: "a finite number", PATH: path}[position.kind]
        raise ConfigError(f"{origin}: got {shown(text)}, expected {expected}")
    return value


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that environment variables set, with or without positions.

    Raises:
        ConfigError: a value cannot be read.
    """
    return {
        field: coerce(FIELDS[field], environ[variable], f"environment variable {variable}")
        for variable, (field, _) in VARIABLES.items()
        if environ.get(variable)
    }


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return one line for each variable that begins with MP_ but is unknown and so has no effect."""
    known = [*VARIABLES, "NPROC_PER_NODE"]
    return [
        f"environment variable {name} has no effect: it is unknown{nearest(name, known)} (known: "
        f"{', '.join(known)})"
        for name in sorted(environ)
        if name.startswith("MP_") and name not in VARIABLES
    ]


def _tokens_to_iters(layer: dict[str, Any], flags: Mapping[str, Any]) -> list[str]:
    """Replace token counts by counts of whole steps of GLOBAL_BATCH_SIZE x SEQ_LEN tokens.
    Return a note if the warm-up is shorter than one step.
    """
    batch, length = (flags.get(name, layer[name]) for name in ("global_batch_size", "seq_length"))
    tokens_per_step = max(batch * length, 1)  # sizes below 1 are refused by name in patch/checks
    step = f"one step is {batch} samples x {length} tokens"
    tokens, warmup = layer["train_iters"], layer["lr_warmup_iters"]
    layer["train_iters"], layer["lr_warmup_iters"] = tokens // tokens_per_step, warmup // tokens_per_step
    if layer["train_iters"] < 1 and "train_iters" not in flags and not flags.get("train_epochs"):
        raise ConfigError(
            f"{_OTHER_NAMES['train_iters']}: got {tokens} tokens, expected at least {tokens_per_step}: "
            f"{step} (SFT=true counts iterations)"
        )
    if 0 < warmup < tokens_per_step and "lr_warmup_iters" not in flags:
        return [f"{_OTHER_NAMES['lr_warmup_iters']}: {warmup} tokens are no step of warm-up: {step}"]
    return []


def refuse(field: str, got: object, expected: str, why: str) -> NoReturn:
    """Raise the ConfigError of a field: its value, the legal values in words, and the reason for them."""
    raise ConfigError(f"got {got}, expected {expected}: {why}", field=field)
