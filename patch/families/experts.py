"""The families with experts in place of MLPs: Mixtral, Qwen 2 MoE, Qwen 3 MoE, and their public sizes.

Attention and norms are those of Mistral, Qwen 2 and Qwen 3. Sources of the sizes: the config.json that is
published with each model on Hugging Face.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from patch.families.config_json import ConfigReader
from patch.families.family import Family
from patch.families.layers import EVERY_LAYER, expert_layers, layers_text
from patch.families.shape import MOST_EXPERTS, ModelConfig, Traits, preset
from patch.families.weights import rows_named

_NUMBER_OF_5 = "num_local_experts"
"""Key under which transformers 5 writes Qwen 3's number of experts (Mixtral's key)."""


@dataclass(frozen=True, kw_only=True)
class ExpertsFamily(Family):
    """A family whose layers have experts."""

    has_layer_choice: bool = True
    """Whether config.json says which layers have experts, and whether the router's weights are normed."""

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Return ModelConfig's fields from a config.json of this family.

        Raises:
            ConfigError: a feature is not supported; the message names the key.
        """
        fields = super().read_config(config)
        number, chosen = fields["num_experts"], fields["moe_router_topk"]
        for name, key in self.sizes.items():
            size = fields[name]
            most = {"num_experts": MOST_EXPERTS, "moe_router_topk": number}.get(name, size)
            if not 1 <= size <= most:
                words = f"1 to {most}" if most != size else "at least 1"
                config.refuse(key, size, f"{words}: {chosen} of {number} experts are chosen")
        layers = self._expert_layers(config, fields["num_layers"])
        is_normed = not self.has_layer_choice or config.boolean("norm_topk_prob", False)
        return {
            **fields,
            "moe_layer_freq": layers_text(layers, fields["num_layers"]),
            "moe_router_pre_softmax": not is_normed,
            "moe_shared_expert_gate": "moe_shared_expert_intermediate_size" in self.sizes,
        }

    def _expert_layers(self, config: ConfigReader, num_layers: int) -> list[int]:
        """Layers with experts: every `decoder_sparse_step`th, without `mlp_only_layers`."""
        step = config.integer("decoder_sparse_step", 1, at_least=1)
        dense = config.values.get("mlp_only_layers")
        if dense is not None and not (isinstance(dense, list) and all(type(n) is int for n in dense)):
            config.refuse("mlp_only_layers", dense, "a list of layers' numbers")
        without = {*(dense or ())}
        layers = [n for n in range(num_layers) if n not in without and (n + 1) % step == 0]
        if not layers:
            config.refuse("mlp_only_layers", dense, f"at least one of {num_layers} layers with experts")
        return layers

    def computes(self, model: ModelConfig) -> bool:
        """Return whether the class in transformers computes a model with these experts."""
        shared, is_gated = model.moe_shared_expert_intermediate_size, model.moe_shared_expert_gate
        has_shared = "moe_shared_expert_intermediate_size" in self.sizes
        has_own_width = self.has_layer_choice or model.expert_width == model.ffn_hidden_size
        is_plain = model.moe_layer_freq == EVERY_LAYER and not model.moe_router_pre_softmax
        return bool(
            super().computes(model)
            and (has_shared and is_gated if shared else not has_shared)
            and has_own_width
            and (self.has_layer_choice or is_plain)
            and model.moe_router_score_function == "softmax"
            and model.moe_router_topk_scaling_factor is None
            and model.moe_router_num_groups is None
        )

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        """Set the keys of config.json that depend on some fields of the model; see Family."""
        super().write_shape(described, replace(model, moe_ffn_hidden_size=model.expert_width), fields)
        if _NUMBER_OF_5 in described:  # transformers 4 reads the family's own key
            described[self.sizes["num_experts"]] = model.num_experts
        if self.has_layer_choice and "moe_layer_freq" in fields:
            with_experts = expert_layers(model)
            self._write_layers(described, [n for n in range(model.num_layers) if n not in with_experts])
        if self.has_layer_choice and "moe_router_pre_softmax" in fields:
            described["norm_topk_prob"] = not model.moe_router_pre_softmax

    def _write_layers(self, described: dict[str, Any], dense: list[int]) -> None:
        described |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_MIXTRAL_NAMES = {
    "mlp.gate.": "block_sparse_moe.gate.",
    "mlp.experts.#.gate_proj": "block_sparse_moe.experts.#.w1",
    "mlp.experts.#.up_proj": "block_sparse_moe.experts.#.w3",
    "mlp.experts.#.down_proj": "block_sparse_moe.experts.#.w2",
}
"""Part of Qwen's tensor name -> Mixtral's part."""


class StackedPart(NamedTuple):
    """Place of a folder's tensor in the memory of transformers 5, which stacks experts."""

    name: str
    """Tensor of all experts [experts, rows, columns], or the renamed tensor if it is not an expert's."""
    expert: int | None
    """On the stacked axis; None if only the name differs."""
    part: int
    """Index among concatenated gate and up: 0 or 1."""


def stacked_part(name: str) -> StackedPart | None:
    """Return where transformers 5 has a folder's tensor, or None if the name is the same."""
    if match := re.fullmatch(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name):
        layer, expert, matrix = match.groups()
        is_down, is_up = matrix in ("down_proj", "w2"), matrix in ("up_proj", "w3")
        stacked = f"{layer}.mlp.experts.{'down_proj' if is_down else 'gate_up_proj'}"
        return StackedPart(stacked, int(expert), int(is_up))
    other = name.replace(".block_sparse_moe.", ".mlp.")
    return StackedPart(other, None, 0) if other != name else None


def _shape(*size: int, **own: Any) -> dict[str, Any]:
    of_all = {"kv_channels": 128, "vocab_size": 151936, "norm_epsilon": 1e-6, "rotary_base": 1e6}
    return preset(*size, **{**of_all, "untie_embeddings_and_output_weights": True, **own})


def _qwen2(*size: int, shared: int, **own: Any) -> dict[str, Any]:
    return _shape(
        *size, add_qkv_bias=True, moe_router_pre_softmax=True, moe_shared_expert_gate=True,
        moe_shared_expert_intermediate_size=shared, **own,
    )  # fmt: skip


def _qwen3(*size: int, width: int) -> dict[str, Any]:
    return _shape(
        *size, qk_layernorm=True, max_position_embeddings=40960, num_experts=128, moe_router_topk=8,
        moe_ffn_hidden_size=width,
    )  # fmt: skip


MIXTRAL = ExpertsFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    slides_from=0,
    rows=partial(rows_named, _MIXTRAL_NAMES),
    sizes={"num_experts": "num_local_experts", "moe_router_topk": "num_experts_per_tok"},
    own_of_router=frozenset({"weights"}),
    has_layer_choice=False,
    presets={
        "8x7B": _shape(
            32, 4096, 14336, 32, 8, vocab_size=32000, max_position_embeddings=32768, norm_epsilon=1e-5,
            num_experts=8, moe_router_topk=2,
        ),
    },
)  # fmt: skip
"""All layers have experts; their width is config.json's width of an MLP."""

_QWEN_KEYS = {
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}

QWEN2_MOE = ExpertsFamily(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    traits=Traits(add_qkv_bias=True),
    type_keys=lambda model: {"use_sliding_window": False, "qkv_bias": True},
    sizes={
        **_QWEN_KEYS, "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"
    },
    presets={
        "A2.7B": _qwen2(
            24, 2048, 5632, 16, 16, shared=5632, max_position_embeddings=8192, num_experts=60,
            moe_router_topk=4, moe_ffn_hidden_size=1408,
        ),
        "57B-A14B": _qwen2(
            28, 3584, 18944, 28, 4, shared=20480, max_position_embeddings=131072, num_experts=64,
            moe_router_topk=8, moe_ffn_hidden_size=2560,
        ),
    },
)  # fmt: skip
"""A shared expert with a gate; Qwen 1.5's MoE is also of this family."""

QWEN3_MOE = ExpertsFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    traits=Traits(qk_layernorm=True),
    type_keys=lambda model: {"use_sliding_window": False, "attention_bias": False},
    sizes=_QWEN_KEYS,
    presets={
        "30B-A3B": _qwen3(48, 2048, 6144, 32, 4, width=768),
        "235B-A22B": _qwen3(94, 4096, 12288, 64, 4, width=1536),
    },
)  # fmt: skip

ALL = (MIXTRAL, QWEN2_MOE, QWEN3_MOE)
