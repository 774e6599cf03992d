"""Tiny models of families whose class is code in their folders, saved like a user's folder."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 6, "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "float32",
    "tie_word_embeddings": False, "auto_map": {"AutoModelForCausalLM": "modeling_other.Other"},
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "internlm2": {
        "model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"], "num_key_value_heads": 2,
        "bias": False, "max_position_embeddings": 512, "rope_theta": 1e6,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    },
    "baichuan-7B": {
        "model_type": "baichuan", "architectures": ["BaiChuanForCausalLM"], "max_position_embeddings": 512
    },
    "baichuan-13B": {
        "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "model_max_length": 512
    },
    "baichuan2-7B": {
        "model_type": "baichuan", "architectures": ["BaichuanForCausalLM"], "max_position_embeddings": 512,
        "vocab_size": 125696, "hidden_size": 24, "intermediate_size": 32,
    },
}  # fmt: skip


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, words = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head = hidden // config["num_attention_heads"]
    qkv = hidden + 2 * head * config.get("num_key_value_heads", config["num_attention_heads"])
    if config["model_type"] == "internlm2":
        ends = "model.tok_embeddings", "output"
        names = "attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"
        norms = "attention_norm", "ffn_norm"
    else:
        ends = "model.embed_tokens", "lm_head"
        names = "self_attn.W_pack", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
        norms = "input_layernorm", "post_attention_layernorm"
    sizes = (qkv, hidden), (hidden, hidden), (ffn, hidden), (ffn, hidden), (hidden, ffn)
    of_layer = dict(zip(names, sizes, strict=True)) | dict.fromkeys(norms, (hidden,))
    return {f"{ends[0]}.weight": (words, hidden)} | {
        f"model.layers.{layer}.{name}.weight": size
        for layer in range(config["num_hidden_layers"]) for name, size in of_layer.items()
    } | {"model.norm.weight": (hidden,), f"{ends[1]}.weight": (words, hidden)}  # fmt: skip


def write_model(name: str, folder: Path) -> None:
    """Write a folder with random weights, and with code that must not run."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: torch.rand(size, generator=generator) + 0.5
        if len(size) == 1
        else torch.randn(size, generator=generator) * 0.1
        for key, size in shapes(SHAPE | MODELS[name]).items()
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(SHAPE | MODELS[name], indent=2) + "\n")
    (folder / "modeling_other.py").write_text("raise SystemExit('this code must not run')\n")
