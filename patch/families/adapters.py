"""Adapters of a model (LoRA) as rows of the weight table: two small matrices beside a frozen weight.

A target W [out, in] gets A [r, in] and B [out, r]; its layer computes W x + scale * B (A x). As in PEFT, each
Hugging Face tensor has its own adapter: q, k and v, gate and up, and experts share no A. Adapters of a
router, the embedding or the output layer are not built.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from patch.errors import ConfigError, nearest, shown
from patch.families import ConfigReader, stored_rows, weight_rows
from patch.families.shape import ModelConfig
from patch.families.weights import MLP_PARTS, HFTensor, Kind, WeightRow
from patch.flag_field import flag

ALL_LINEAR = "all-linear"
INSIDE = ".adapters."
"""Part of the name of every adapter parameter, and of no other parameter."""
FIRST_FACTOR = ".lora_A.weight"
"""End of the name of every A."""
SECOND_FACTOR = ".lora_B.weight"
"""End of the name of every B, which begins with zeros."""
PEFT_PREFIX = "base_model.model."
"""Prefix of tensor names in a PEFT folder."""
MOST_RANK = 8192
"""Largest rank of an adapter: more than any weight can use."""
BLOCK, SCALES = 64, 256
"""Values that share a scale in nf4, and the scales that share a scale with double quantization."""
BaseFormat = Literal["nf4", "nf4-double"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """The adapters that a run trains in place of its weights. Source of the names: PEFT's LoraConfig."""

    lora_rank: int | None = flag(
        "train adapters of this rank beside the weights, which stay as they are; 0: train all weights",
        none=0,
        at_most=MOST_RANK,
    )
    lora_alpha: float | None = flag(
        "the adapter output is multiplied by alpha / rank; 0: alpha is the rank", none=0
    )
    lora_dropout: float = flag("dropout probability of the adapter input", 0.0, at_least=0, below=1)
    lora_target_modules: str = flag(
        "layers that get an adapter: all-linear (attention, MLPs, experts), or names of Hugging Face with "
        "commas between them, as in q_proj,v_proj or model.layers.*.self_attn.*",
        ALL_LINEAR,
    )
    lora_rslora: bool = flag("multiply by alpha / sqrt(rank) in place of alpha / rank (rsLoRA)", False)
    lora_plus_ratio: float | None = flag(
        "learning rate of an adapter's B over that of its A (LoRA+, arXiv:2402.12354); 0: 1", none=0, above=0
    )
    lora_load: str | None = flag(
        "start from the adapters in this folder of PEFT, or of a run, which also gives rank, alpha and "
        "targets; none: new ones",
        none="none",
        is_path=True,
    )
    quantize_base: BaseFormat | None = flag(
        "keep the frozen matrices of the layers in nf4 (QLoRA), in blocks of 64 as bitsandbytes does; "
        "nf4-double: with the scales of the blocks in 8 bits (bnb_4bit_use_double_quant)",
        none="none",
    )

    @property
    def is_on(self) -> bool:
        """Whether the run trains adapters; then the weights of the model are frozen."""
        return bool(self.lora_rank)

    @property
    def starts_at_base(self) -> bool:
        """Whether the adapters are new: they do not change the output before the first step."""
        return self.is_on and not self.lora_load

    @property
    def alpha(self) -> float:
        """`lora_alpha`, or its default."""
        return self.lora_alpha or self.lora_rank or 0

    @property
    def scale(self) -> float:
        """Factor of an adapter's output."""
        assert self.lora_rank, "a run without adapters has no scale"
        return self.alpha / (math.sqrt(self.lora_rank) if self.lora_rslora else self.lora_rank)


class Adapter(NamedTuple):
    """The adapter of one Hugging Face tensor, in all layers and experts that have this tensor."""

    base: WeightRow
    """Parameter that contains the target."""
    target: str
    """Hugging Face tensor, such as `model.layers.*.self_attn.q_proj.weight`."""
    a: WeightRow
    """[r, in]; cut over TP if the base is row-parallel."""
    b: WeightRow
    """[out, r]; cut over TP if the base is column-parallel."""

    @property
    def name(self) -> str:
        """Last part of the target's module name, such as `q_proj`; the base's module has the adapter under
        it.
        """
        return _module(self.target).rpartition(".")[2]


def adapters_of(model: ModelConfig, adapter: AdapterConfig) -> tuple[Adapter, ...]:
    """Return the adapters of a model in the order of its weight table; none without a rank."""
    if not adapter.lora_rank:
        return ()
    targets = [target.strip() for target in adapter.lora_target_modules.split(",")]
    return tuple(
        _adapter(base, name, adapter.lora_rank)
        for name, base in _targets(model).items()
        if any(_matches(target, _module(name)) for target in targets)
    )


def factor_names(tensor: str) -> tuple[str, str]:
    """Return the names of A and B of a Hugging Face tensor in a PEFT folder, without PEFT_PREFIX."""
    return f"{_module(tensor)}{FIRST_FACTOR}", f"{_module(tensor)}{SECOND_FACTOR}"


def targets_are_there(model: ModelConfig, adapter: AdapterConfig) -> None:
    """Refuse targets that match no layer of the model.

    Raises:
        ConfigError: a target matches nothing.
    """
    names = [_module(target) for target in _targets(model)]
    for target in adapter.lora_target_modules.split(","):
        if not any(_matches(target.strip(), name) for name in names):
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ConfigError(
                f"no layer of the model is called {shown(target)}, expected {ALL_LINEAR}, some of "
                f"{', '.join(ends)}, or a whole name with * for numbers, such as "
                f"{names[0]}{nearest(target, ends)}",
                field="lora_target_modules",
            )


def adapter_rows(model: ModelConfig, adapter: AdapterConfig) -> tuple[WeightRow, ...]:
    """Return the parameters of all adapters, A before B, with PEFT's names without `base_model.model.`."""
    return tuple(row for each in adapters_of(model, adapter) for row in (each.a, each.b))


def hf_tensors(model: ModelConfig, adapter: AdapterConfig | None = None) -> list[HFTensor]:
    """Return every tensor that a Hugging Face folder of this model, or of its adapters, must contain."""
    rows = stored_rows(model) if adapter is None else adapter_rows(model, adapter)
    return [*dict.fromkeys(tensor for row in rows for layer in row.layers for tensor in row.tensors(layer))]


def loads_whole(model: ModelConfig, adapter: AdapterConfig) -> bool:
    """Return whether PEFT loads all adapters into transformers 5's model, whose experts are one parameter.

    PEFT 0.21 translates names of experts, and takes names of shared experts and MLPs for such names.
    """
    parts = {row.part for row in weight_rows(model)}
    is_mixed = "expert" in parts and not parts.isdisjoint({"mlp", "shared expert"})
    return not is_mixed or not any(each.base.part in MLP_PARTS for each in adapters_of(model, adapter))


def adapts_experts(model: ModelConfig, adapter: AdapterConfig) -> bool:
    """Return whether experts have adapters."""
    return any(each.base.part == "expert" for each in adapters_of(model, adapter))


def are_experts_single(model: ModelConfig, adapter: AdapterConfig) -> bool:
    """Return whether a rank computes its experts one by one, each with its own layers: adapted or in nf4."""
    return bool(adapter.quantize_base) or adapts_experts(model, adapter)


def base_rows(model: ModelConfig) -> list[WeightRow]:
    """Return the parameters that may have adapters, and that `quantize_base` keeps in nf4."""
    parts = ("attention", *MLP_PARTS)
    return [row for row in weight_rows(model) if row.part in parts and row.is_matrix]


def row_bytes(columns: int, format: BaseFormat) -> int:
    """Return the bytes of a matrix row of whole nf4 blocks (patch/model/nf4_product.py)."""
    blocks = columns // BLOCK
    return 36 * blocks if format == "nf4" else 33 * blocks + 4 * (blocks // SCALES + 4)


def _targets(model: ModelConfig) -> dict[str, WeightRow]:
    """Hugging Face tensors that may have an adapter -> the parameter that contains the tensor."""
    return {name: base for base in base_rows(model) for name in base.hf}


def _matches(target: str, module: str) -> bool:
    """Whether a target is a module's name, its end, or a file-name pattern; PEFT's regexes may never end."""
    is_named = f".{module}".endswith(f".{target}") and target != ""
    return target == ALL_LINEAR or is_named or fnmatchcase(module, target)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


_OF_SECOND = {
    **{kind: kind for kind in (Kind.COLUMN_PARALLEL, Kind.JOINED_QKV, Kind.JOINED_GATE_UP)},
    Kind.QKV: Kind.COLUMN_PARALLEL,
}
"""Kind of a weight that gives a TP rank its part of the output -> kind of its adapter's B."""


def _adapter(base: WeightRow, target: str, rank: int) -> Adapter:
    out, into = base.hf[target]
    kinds = (
        Kind.ROW_PARALLEL if base.kind is Kind.ROW_PARALLEL else Kind.REPLICATED,
        _OF_SECOND.get(base.kind, Kind.REPLICATED),
    )
    above, shapes = _module(target).rpartition(".")[0], ((rank, into), (out, rank))
    inside = f"{base.name.removesuffix('.weight')}{INSIDE}"
    rows = (
        base._replace(name=inside + hf.removeprefix(f"{above}."), kind=kind, hf={hf: shape})
        for hf, kind, shape in zip(factor_names(target), kinds, shapes, strict=True)
    )
    return Adapter(base, target, *rows)


_INERT = frozenset(
    "alpha_pattern auto_mapping base_model_name_or_path bias inference_mode init_lora_weights layers_pattern "
    "lora_alpha lora_dropout megatron_core peft_type peft_version qalora_group_size r rank_pattern revision "
    "target_modules task_type use_rslora".split()
)
"""Keys of adapter_config.json that are read below or change nothing. All other keys must be off."""
_SAME_BASE = (None, True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights unchanged."""


def read_adapter(config: ConfigReader, model: ModelConfig) -> AdapterConfig:
    """Return the adapters that the adapter_config.json of a PEFT folder describes.

    Raises:
        ConfigError: a feature is not supported; the message names the key.
    """
    config.accept_only({"peft_type": "LORA", "bias": "none"})
    for key, value in config.values.items():
        if key not in _INERT and value:
            config.refuse(key, value, "null or false: such adapters are not supported")
    if (task := config.values.get("task_type")) not in (None, "CAUSAL_LM"):
        config.refuse("task_type", task, "CAUSAL_LM")
    if (initial := config.values.get("init_lora_weights")) not in _SAME_BASE:
        config.refuse("init_lora_weights", initial, "true: this initialization also changes the base weights")
    rank, alpha = config.integer("r", at_least=1, at_most=MOST_RANK), config.number("lora_alpha")
    dropout = config.number("lora_dropout", 0.0)
    if alpha <= 0:
        config.refuse("lora_alpha", alpha, "more than 0")
    if not 0 <= dropout < 1:
        config.refuse("lora_dropout", dropout, "at least 0 and below 1")
    for key, one in (("rank_pattern", rank), ("alpha_pattern", alpha)):
        pattern = config.values.get(key) or {}
        if not isinstance(pattern, dict) or any(value != one for value in pattern.values()):
            config.refuse(key, pattern, f"{one} for all layers")
    return AdapterConfig(
        lora_rank=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        lora_target_modules=_read_targets(config, model),
        lora_rslora=config.boolean("use_rslora", False),
    )


def _read_targets(config: ConfigReader, model: ModelConfig) -> str:
    """`lora_target_modules` from a list of names or name ends; numbers in names are ignored."""
    names = config.values.get("target_modules")
    if names == ALL_LINEAR:
        return ALL_LINEAR
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        config.refuse("target_modules", names, f"{ALL_LINEAR} or a list of names: patterns are not supported")
    modules = [_module(target) for target in _targets(model)]
    numbered = {module: "." + re.sub(r"[*#]", "0", module) for module in modules}
    chosen: set[str] = set()
    for name in {re.sub(r"(?<![^.])\d+(?![^.])", "0", name, flags=re.ASCII) for name in names}:
        matching = [module for module in modules if numbered[module].endswith(f".{name}")]
        if not matching:
            known = ", ".join(sorted({module.rpartition(".")[2] for module in modules}))
            config.refuse("target_modules", name, f"some of {known}: the model has no other layers for it")
        chosen.update(matching)
    return ALL_LINEAR if len(chosen) == len(modules) else ",".join(m for m in modules if m in chosen)


def write_adapter(model: ModelConfig, adapter: AdapterConfig, base: str | None) -> dict[str, Any]:
    """Return the contents of adapter_config.json; `base` is the base model's folder or name on the hub."""
    chosen = adapters_of(model, adapter)
    names = sorted({each.name for each in chosen})
    if adapters_of(model, dataclasses.replace(adapter, lora_target_modules=",".join(names))) != chosen:
        first = (tensor for each in chosen for layer in each.a.layers for tensor in each.a.tensors(layer))
        names = [tensor.name.removesuffix(FIRST_FACTOR) for tensor in first]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.lora_rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        # PEFT on transformers 5, where experts are one parameter, refuses dropout for experts.
        "lora_dropout": 0.0 if adapts_experts(model, adapter) else adapter.lora_dropout,
        "use_rslora": adapter.lora_rslora,
        "target_modules": names,
        "bias": "none",
        "inference_mode": True,
    }
