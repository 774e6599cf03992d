"""The LLaMA model on megatron-core's GPTModel; see README.md."""

from patch.model.llama import DTYPES, LlamaModel, build_llama_model

__all__ = ["DTYPES", "LlamaModel", "build_llama_model"]
