"""Small configurations for tests: a model of four layers with the shape of LLaMA-3.1, and its run."""

import dataclasses
import tempfile
from enum import IntEnum
from pathlib import Path
from typing import Any

from patch.config.experts import ExpertsConfig
from patch.config.fields import FIELDS, coerce
from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.families import with_family
from patch.families.adapters import AdapterConfig

_SECTIONS = {
    "model": ModelConfig(
        num_layers=4, hidden_size=64, ffn_hidden_size=160, num_attention_heads=4, num_query_groups=2,
        kv_channels=16, vocab_size=250, make_vocab_size_divisible_by=16, seq_length=32,
        max_position_embeddings=512, rotary_base=500000.0, use_rope_scaling=True, rope_scaling_factor=8.0,
        rope_original_max_position=64, untie_embeddings_and_output_weights=True, init_method_std=0.05,
    ),
    "parallel": ParallelConfig(nproc_per_node=1),
    "training": TrainingConfig(
        micro_batch_size=2, global_batch_size=4, train_iters=20, sft=True, precision="fp32"
    ),
    "optimizer": OptimizerConfig(lr=2e-3, min_lr=1e-4, lr_warmup_iters=4),
    "data": DataConfig(dataset_type="raw", train_data_path="none", max_padding_length=32),
    "checkpoint": CheckpointConfig(output_path="none"),
    "experts": ExpertsConfig(),
    "adapter": AdapterConfig(),
}  # fmt: skip


def _value(name: str, value: Any) -> Any:
    is_scalar = isinstance(value, (str, int, float)) and not isinstance(value, IntEnum)
    return coerce(FIELDS[name], value, name) if is_scalar else value


ZERO_3: dict[str, Any] = {"data_parallel_sharding": "parameters", "param_persistence_threshold": 100}
HALF: dict[str, Any] = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5}
"""Half of the optimizer states in host memory."""
ON_HOST = ZERO_3 | HALF | {"optimizer_offload_fraction": 1.0, "cpu_offloading_weights": True}
"""Weights, gradients and states in host memory."""
ON_DISK = HALF | {"offload_folder": tempfile.gettempdir(), "optimizer_offload_host_share": 0.0}
"""Half of the optimizer states in a file."""


def small_run(
    tp: int = 1, pp: int = 1, dp: int = 1, stage: int = 0, cp: int = 1, **changes: Any
) -> RunConfig:
    """Return a resolved run of TP x PP x CP x DP processes.

    Args:
        stage: layers of an interleaved stage, or 0 without interleaving.
        changes: fields of any section. Strings are parsed as on the command line.
    """
    changes |= {
        "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp, "nproc_per_node": tp * pp * cp * dp,
        "num_layers_per_virtual_pipeline_stage": stage,
    }  # fmt: skip
    sections = {}
    for name, section in _SECTIONS.items():
        fields = {field.name for field in dataclasses.fields(section)}
        values = {k: _value(k, changes.pop(k)) for k in fields & set(changes)}
        sections[name] = dataclasses.replace(section, **values)
    assert not changes, f"no such fields: {sorted(changes)}"
    return RunConfig(**{**sections, "model": with_family(sections["model"])})


def hf_llama(config: RunConfig, folder: Path | None = None, seed: int = 0) -> Any:
    """Return a transformers LlamaForCausalLM with random weights; save it to `folder` if given."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = config.model
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        rope |= {
            "rope_type": "llama3", "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position,
        }  # fmt: skip
    hf_config = LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers, num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups, head_dim=model.kv_channels,
        max_position_embeddings=model.max_position_embeddings, rms_norm_eps=model.norm_epsilon,
        rope_parameters=rope, tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        initializer_range=0.05, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    hf_model = LlamaForCausalLM(hf_config)
    with torch.no_grad():
        for name, parameter in hf_model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    if folder is not None:
        hf_model.save_pretrained(folder)
    return hf_model.eval()
